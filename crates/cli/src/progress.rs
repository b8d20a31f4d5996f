//! What a training run shows: a bar on a terminal, a plain line every few seconds elsewhere.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use longdraft_records::events::{Advance, Events};
use longdraft_report::words::clock;
use longdraft_train::checkpoint::{Located, Wanted, read_state};
use longdraft_train::config::TrainConfig;
use longdraft_train::metrics::{DraftMetrics, Rate};
use longdraft_train::stage::{Event, Observer, StepReport};

use crate::interrupts::Interrupts;
use crate::ranks::Voice;
use crate::status::{Bar, lines};
use crate::terminal::cover::is_covered;

/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Says when the next plain line is due.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lines(Option<Instant>);

impl Lines {
    /// The first one at once.
    pub(crate) fn at_once() -> Self {
        Self(None)
    }

    /// The first one after a while.
    pub(crate) fn later() -> Self {
        Self(Some(Instant::now()))
    }

    /// Whether one is due, also where it must come; if so, the next one is due a while later.
    pub(crate) fn are_due(&mut self, must: bool) -> bool {
        let due = must || self.0.is_none_or(|last| last.elapsed() >= LINE_EVERY);
        if due {
            self.0 = Some(Instant::now());
        }
        due
    }
}

/// The time that `train.max_minutes` leaves a run.
struct Limit {
    run: PathBuf,
    /// Of this process.
    seconds: f64,
    /// When its first step ended.
    begun: Option<Instant>,
}

impl Limit {
    /// Takes off what earlier processes used.
    fn resume(&mut self) {
        let newest = Located::at(&self.run, Wanted::Newest);
        let saved = newest.and_then(|found| read_state(&found.checkpoint).ok());
        self.seconds -= saved.map_or(0.0, |state| state.progress.seconds);
    }

    /// Seconds after a step of so many.
    fn left(&mut self, step: f64) -> f64 {
        if self.begun.is_none() {
            self.seconds -= step;
        }
        let begun = self.begun.get_or_insert_with(Instant::now);
        self.seconds - begun.elapsed().as_secs_f64()
    }
}

/// Steps that the shown speed is averaged over (exponentially).
const SPEED_MEMORY: f64 = 0.9;

/// Prints a stage's events; stops it when the user asks.
pub(crate) struct TrainingProgress<'a> {
    voice: Voice,
    bar: Option<Bar>,
    lines: Lines,
    limit: Option<Limit>,
    tokens_per_second: Option<f64>,
    interrupts: Interrupts,
    /// Who watches.
    pub(crate) events: Events,
    /// Hears every event, too, and may stop the stage.
    listener: Option<&'a mut dyn Observer>,
    /// Held-out metrics of the last evaluation.
    pub(crate) held_out: Option<DraftMetrics>,
    /// Speeds of all steps, for a summary.
    pub(crate) speeds: Vec<f64>,
}

impl<'a> TrainingProgress<'a> {
    /// Of a stage that `interrupts` stops.
    pub(crate) fn new(interrupts: Interrupts, voice: Voice) -> Self {
        Self {
            voice,
            bar: None,
            lines: Lines::at_once(),
            limit: None,
            tokens_per_second: None,
            interrupts,
            events: Events::none(),
            listener: None,
            held_out: None,
            speeds: Vec::new(),
        }
    }

    /// Tells a program as well.
    pub(crate) fn heard_by(self, listener: &'a mut dyn Observer) -> Self {
        Self { listener: Some(listener), ..self }
    }

    /// Knows when minutes end the run of a configuration.
    pub(crate) fn limit(&mut self, config: &TrainConfig) {
        self.limit = config.train.max_minutes.map(|minutes| {
            let run = config.output.clone();
            Limit { run, seconds: 60.0 * minutes, begun: None }
        });
    }

    /// Where this rank's lines go.
    pub(crate) fn voice(&self) -> Voice {
        self.voice.clone()
    }

    /// A line every few seconds, for the log alone where a bar is shown.
    fn say_now_and_then(&mut self, last: bool, shown: bool, line: &str) {
        match (self.lines.are_due(last), shown) {
            (true, true) => self.voice.log(line),
            (true, false) => self.voice.say(line),
            (false, _) => {}
        }
    }

    /// Whether a bar is shown, or a view in its place: on a terminal.
    fn bar(&mut self, length: u64, position: u64, message: &str) -> bool {
        if is_covered() {
            return true;
        }
        if self.bar.is_none() && self.voice.is_shown() {
            self.bar = Bar::new();
        }
        self.bar.as_mut().map(|bar| bar.show(position, length, message)).is_some()
    }

    fn step(&mut self, report: &StepReport) {
        self.events.progress(Advance {
            what: "steps".to_owned(),
            done: report.step as usize,
            all: report.steps as usize,
            tokens: Some(report.total_tokens),
            at_most: None,
        });
        let speed = report.tokens_per_second();
        self.speeds.push(speed);
        let smooth = self
            .tokens_per_second
            .map_or(speed, |old| SPEED_MEMORY * old + (1.0 - SPEED_MEMORY) * speed);
        self.tokens_per_second = Some(smooth);
        let left = (report.steps - report.step) as f64 * report.tokens as f64 / smooth;
        let left = self.limit.as_mut().map_or(left, |limit| limit.left(report.seconds).min(left));
        let length =
            report.metrics.simulated_acceptance_length(Rate::Top1, report.metrics.by_delay.len());
        let message = format!(
            "loss {:.3}  acceptance length {length:.2}  {smooth:.0} tok/s  {} left",
            report.loss,
            clock(left)
        );
        let shown = self.bar(report.steps, report.step, &message);
        let line = format!("step {}/{}  {message}", report.step, report.steps);
        self.say_now_and_then(report.step == report.steps, shown, &line);
        if report.step == report.steps {
            self.bar = None;
        }
    }

    /// Rows done, as a bar where there is a terminal and a line at the end.
    fn rows(&mut self, done: usize, all: usize, what: &str) {
        let line = format!("{what} {done}/{all} rows");
        let advance = Advance { what: "rows".to_owned(), done, all, ..Advance::default() };
        self.events.progress(advance);
        let shown = self.bar(all as u64, done as u64, &format!("rows, {what}"));
        if done < all {
            self.say_now_and_then(false, shown, &line);
            return;
        }
        if let Some(bar) = self.bar.take() {
            bar.clear();
        }
        self.lines.are_due(true);
        self.voice.say(&line);
    }

    fn evaluated(&mut self, step: u64, metrics: &DraftMetrics) {
        let agreement: Vec<String> = metrics
            .by_delay
            .iter()
            .map(|counts| format!("{:.1}", 100.0 * counts.top1_agreement()))
            .collect();
        // Beside the loss of training rows only what is the same quantity is called so.
        let loss = match &metrics.as_trained {
            None => format!("loss {:.3}", metrics.loss()),
            Some(as_trained) => format!(
                "loss {:.3} ({:.3} against the target's whole distribution)",
                as_trained.loss(),
                metrics.loss()
            ),
        };
        let length = metrics.simulated_acceptance_length(Rate::Top1, metrics.by_delay.len());
        let length = match metrics.replayed.acceptance_length() {
            None => format!("acceptance length {length:.3}"),
            Some(replayed) => {
                format!("acceptance length {length:.3} simulated, {replayed:.3} replayed")
            }
        };
        self.voice.say(&lines(&[
            format!("held-out after step {step}:"),
            loss,
            length,
            format!("agreement by position {} %", agreement.join(" ")),
        ]));
        self.held_out = Some(metrics.clone());
    }
}

impl Observer for TrainingProgress<'_> {
    fn on_event(&mut self, event: Event<'_>) {
        if let Some(listener) = &mut self.listener {
            listener.on_event(event);
        }
        match event {
            Event::Resumed(step) => {
                self.voice.say(&format!("resumed after step {step}"));
                if let Some(limit) = &mut self.limit {
                    limit.resume();
                }
            }
            Event::Note(text) => self.voice.say(text),
            Event::Warning(text) => self.voice.say(&format!("warning: {text}")),
            Event::Captured(done, all) => {
                self.rows(done, all, "captured the target's features of");
            }
            Event::Measured(done, all) => self.rows(done, all, "measured"),
            Event::Step(report) => self.step(report),
            Event::Evaluated(step, metrics) => self.evaluated(step, metrics),
            Event::Saved(path) => {
                let line = format!("saved {}", path.display());
                match &self.bar {
                    Some(_) => self.voice.log(&line),
                    None => self.voice.say(&line),
                }
            }
        }
    }

    fn should_stop(&self) -> bool {
        self.interrupts.asked() || self.listener.as_ref().is_some_and(|l| l.should_stop())
    }
}
