//! A run as it goes: how far it has come, how long it still takes, what is being written.
//!
//! ```text
//! fit.json                 phases, plan, expectation ->
//! events.jsonl             progress, answer, memory  -> Live -> page, terminal
//! metrics.jsonl (by Run)   loss, lengths, positions  ->
//! ```
//!
//! All of it is read from the run's folder, as far as it is there.

mod fit;
mod left;
mod recent;
pub(crate) mod shown;
mod words;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use longdraft_records::events::{Advance, Answer, EVENTS_FILE, FitPhase, now};
use longdraft_records::{FIT_FILE, FIT_LAYOUT, other_layout};
use longdraft_train::checkpoint::{LAST, Located, PREVIOUS, Wanted, read_state, stages};
use serde::Deserialize;
use serde_json::Value;

pub use left::Left;

use super::metrics_log::{Agreement, StepRecord};
use super::run::{Run, Stage};
use super::series::{point, smooth};
use fit::{FitState, phases};
use recent::Recent;

/// Seconds without a sign after which a run may have been killed.
const QUIET: f64 = 90.0;
/// Reading takes at most this share of the time.
const READING: u32 = 25;

/// Where a phase stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stand {
    /// It is over.
    Done,
    /// It is under way.
    Now,
    /// It has not begun.
    ToCome,
}

/// A phase of a fit, or the training of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// One of [`FitPhase::WITH_WORK`].
    pub name: FitPhase,
    /// Where it stands.
    pub stand: Stand,
    /// Seconds that it took so far.
    pub spent: Option<f64>,
    /// Seconds that it was planned to take.
    pub planned: Option<f64>,
}

/// Whether a run goes on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pulse {
    /// It goes on.
    Running,
    /// It said that it stops.
    Stopped,
    /// There was no sign of it for so many seconds.
    Quiet(f64),
    /// It came to its end.
    Finished,
    /// Another version wrote its state, in this layout, which is not read.
    Foreign(u32),
    /// Its folder is not there yet.
    Absent,
}

/// A value that is expected, with its range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Expected {
    /// Lower end.
    pub low: f64,
    /// Most likely.
    pub middle: f64,
    /// Upper end.
    pub high: f64,
}

/// A run as it goes.
#[derive(Debug, Clone, PartialEq)]
pub struct Live {
    /// Name of its directory; the whole path where that is not there yet.
    pub name: String,
    /// Whether it goes on.
    pub pulse: Pulse,
    /// In their order.
    pub phases: Vec<Phase>,
    /// Of the phase under way.
    pub work: Option<Advance>,
    /// Of it, too.
    pub left_of_phase: Option<Left>,
    /// Of all that is to come.
    pub left: Option<Left>,
    /// Tokens a second: written, or learned.
    pub speed: Option<f64>,
    /// Resident memory of its process.
    pub memory_mib: Option<f64>,
    /// Loss by step, smoothed.
    pub loss: Vec<(f64, f64)>,
    /// Simulated acceptance length by step, smoothed.
    pub length: Vec<(f64, f64)>,
    /// Share of rows where draft and target agree, by position.
    pub positions: Vec<f64>,
    /// Whether these are held-out rows.
    pub positions_are_held_out: bool,
    /// Tau and speed-up, before the training.
    pub expected: Option<(Expected, Expected)>,
    /// The one that is being written.
    pub answer: Option<Answer>,
}

/// Follows a run's folder.
pub struct Follower {
    folder: PathBuf,
    recent: Recent,
    seen: Option<(Instant, Duration, (Run, Live))>,
}

impl Follower {
    /// Of a folder, which may be empty or not there yet.
    pub fn of(folder: &Path) -> Self {
        Self { folder: folder.to_path_buf(), recent: Recent::of(folder), seen: None }
    }

    /// What stands there now; not read anew where that was done just before.
    pub fn look(&mut self) -> &(Run, Live) {
        let is_fresh =
            self.seen.as_ref().is_some_and(|(when, took, _)| when.elapsed() < READING * *took);
        if !is_fresh {
            self.seen = None;
        }
        let (folder, recent) = (&self.folder, &mut self.recent);
        let (_, _, found) = self.seen.get_or_insert_with(|| {
            let started = Instant::now();
            let run = Run::read(folder);
            recent.read();
            let live = live(&run, recent);
            (started, started.elapsed(), (run, live))
        });
        found
    }
}

fn live(run: &Run, recent: &Recent) -> Live {
    let text = std::fs::read_to_string(run.folder.join(FIT_FILE)).ok();
    let foreign = text.as_deref().and_then(|text| other_layout(text, FIT_LAYOUT));
    let fit: Option<FitState> = text.map(|text| match foreign {
        Some(_) => FitState::default(),
        None => serde_json::from_str(&text).unwrap_or_default(),
    });
    let plan = fit.as_ref().and_then(|fit| fit.rounds.last()?.plan.clone());
    let (phases, work) = match &fit {
        Some(fit) => (phases(fit, plan.as_ref(), recent), recent.work.clone()),
        None => of_training(run),
    };
    let is_training = |phase: &Phase| phase.name == FitPhase::Training && phase.stand == Stand::Now;
    let is_training = phases.iter().any(is_training);
    let is_finished = phases.iter().all(|phase| phase.stand == Stand::Done);
    let has_end = fit.is_some() || work.as_ref().is_none_or(|work| work.all > 0);
    let pulse = foreign.map_or_else(|| pulse(run, recent, (is_finished, has_end)), Pulse::Foreign);
    let (left_of_phase, left) = match (&fit, pulse) {
        (_, Pulse::Finished | Pulse::Stopped) => (None, None),
        (Some(_), _) => {
            let planned = plan.as_ref().filter(|_| is_training);
            let later = planned.map_or(0.0, |plan| plan.after(of_last_round(run).count()));
            left(&phases, work.as_ref(), recent, later)
        }
        (None, _) => {
            let left = work.as_ref().and_then(|work| of_steps(run, work));
            // Nothing tells how long stages take that have not begun.
            (left, left.filter(|_| is_in_last_stage(run)))
        }
    };
    let last = run.stages.last().and_then(|stage| stage.log.steps.last());
    let speed =
        if is_training { last.and_then(|step| step.tokens_per_second) } else { recent.speed() };
    let curve = |of: fn(&Agreement) -> Option<f64>| curve(run, of);
    let (positions, positions_are_held_out) = positions(run);
    let is_absent = pulse == Pulse::Absent;
    Live {
        name: if is_absent { run.folder.display().to_string() } else { run.name.clone() },
        pulse,
        phases,
        work,
        left_of_phase,
        left,
        speed,
        memory_mib: recent.memory_mib.or_else(|| last.and_then(|step| step.memory_mib)),
        loss: curve(|agreement| agreement.loss),
        length: curve(|agreement| agreement.simulated_acceptance_length),
        positions,
        positions_are_held_out,
        expected: plan.map(|plan| (plan.tau, plan.speed_up)),
        answer: recent.answer.clone(),
    }
}

/// A run of `train` is one phase; its steps or tokens in all stand in its configuration, if at all.
fn of_training(run: &Run) -> (Vec<Phase>, Option<Advance>) {
    let stage = run.stages.last();
    let configured = |key| stage.and_then(|stage| stage.configured(&["train", key])?.as_u64());
    let (steps, tokens) = (configured("steps"), configured("tokens"));
    let taken = stage.and_then(|stage| stage.log.steps.last()).map_or(0, |step| step.step);
    let learned = stage.map(Stage::tokens);
    let (what, done, all) = match (steps, tokens) {
        (None, Some(all)) => ("tokens", learned.unwrap_or(0), all),
        (all, _) => ("steps", taken, all.unwrap_or(0)),
    };
    let (done, all) = (done as usize, all as usize);
    let has_all = || (all > 0 && done >= all) || has_ended(&folder_of_last(run), taken);
    let stand = match taken {
        0 => Stand::ToCome,
        _ if is_in_last_stage(run) && has_all() => Stand::Done,
        _ => Stand::Now,
    };
    let spent = stage.map(|stage| stage.log.seconds());
    let work = Advance { what: what.to_owned(), done, all, tokens: learned, at_most: None };
    let training = Phase { name: FitPhase::Training, stand, spent, planned: None };
    (vec![training], (taken > 0).then_some(work))
}

/// Whether no stage of a curriculum is still to begin.
fn is_in_last_stage(run: &Run) -> bool {
    run.stages.len() >= stages(&run.folder).len()
}

/// Where the stage lies that was trained last.
fn folder_of_last(run: &Run) -> PathBuf {
    let begun = run.stages.len().saturating_sub(1);
    stages(&run.folder).into_iter().nth(begun).unwrap_or_else(|| run.folder.clone())
}

/// Whether the newest checkpoint of a stage says that nothing is left to do after so many steps: its
/// time may be over before its steps are.
fn has_ended(stage: &Path, step: u64) -> bool {
    let of_draft = || {
        let state = read_state(&Located::at(stage, Wanted::Newest)?.checkpoint).ok()?;
        Some((state.progress.step, state.is_finished()))
    };
    // A language model's has another form.
    let of_model = || {
        let state = |name: &&str| {
            let path = stage.join("checkpoints").join(name).join("state.json");
            serde_json::from_str::<Value>(&std::fs::read_to_string(path).ok()?).ok()
        };
        let state = [LAST, PREVIOUS].iter().find_map(state)?;
        let progress = state.get("progress")?;
        Some((progress.get("step")?.as_u64()?, progress.get("ended")?.as_bool()?))
    };
    of_draft().or_else(of_model).is_some_and(|(saved, is_over)| is_over && saved >= step)
}

/// What a run's own steps and its limit of time lead to expect.
fn of_steps(run: &Run, work: &Advance) -> Option<Left> {
    let stage = run.stages.last()?;
    let minutes = stage.configured(&["train", "max_minutes"]).and_then(Value::as_f64);
    let most = minutes.map(|minutes| (60.0 * minutes - stage.log.seconds()).max(0.0));
    match (by_speed(stage, work), most) {
        (Some(left), Some(most)) => Some(left.at_most(most)),
        (None, Some(most)) => Some(Left { seconds: most, low: 0.0, high: most }),
        (left, None) => left,
    }
}

/// What the speed of its steps leads to expect.
fn by_speed(stage: &Stage, work: &Advance) -> Option<Left> {
    if work.all == 0 {
        return None;
    }
    let steps = stage.log.steps.iter();
    let done = |step: &StepRecord| if work.what == "tokens" { step.tokens } else { step.step };
    let samples: Vec<(f64, f64)> = steps.map(|step| (step.seconds, done(step) as f64)).collect();
    Left::of(&samples, work.all as f64, samples.last()?.0)
}

/// Of the phase under way, and of all from there; `later` are seconds of the phase after the work that is counted now.
fn left(
    phases: &[Phase],
    work: Option<&Advance>,
    recent: &Recent,
    later: f64,
) -> (Option<Left>, Option<Left>) {
    let Some(at) = phases.iter().position(|phase| phase.stand == Stand::Now) else {
        return (None, None);
    };
    let phase = &phases[at];
    let planned = phase.planned.map(|seconds| Left::planned(seconds, phase.spent.unwrap_or(0.0)));
    let samples = recent.samples();
    let measured = work.and_then(|work| Left::of(samples, work.all as f64, now()));
    let measured = measured.map(|left| left.then(Left::planned(later, 0.0)));
    let mut own = match (measured, planned) {
        // Features are made before the steps that a plan counts with them.
        (Some(_), Some(planned)) if phase.name == FitPhase::Training && !recent.is_in_steps() => {
            Some(planned)
        }
        (measured, planned) => measured.or(planned),
    };
    if let Some(most) = recent.at_most() {
        let most = (most - (now() - recent.last_at).max(0.0)).max(0.0);
        own = Some(own.unwrap_or(Left { seconds: most, low: 0.0, high: most }).at_most(most));
    }
    let later = phases[at + 1..].iter().filter_map(|phase| phase.planned);
    let all = own.map(|own| later.fold(own, |sum, seconds| sum.then(Left::planned(seconds, 0.0))));
    (own, all)
}

fn pulse(run: &Run, recent: &Recent, (is_finished, has_end): (bool, bool)) -> Pulse {
    if !run.folder.is_dir() {
        return Pulse::Absent;
    }
    if is_finished {
        return Pulse::Finished;
    }
    if recent.is_stopped {
        return Pulse::Stopped;
    }
    let changed = |path: PathBuf| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let files = [FIT_FILE, EVENTS_FILE].map(|name| changed(run.folder.join(name)));
    let last = files.into_iter().flatten().chain(run.written).max();
    let since = last.and_then(|last| SystemTime::now().duration_since(last).ok());
    match since.map(|since| since.as_secs_f64()) {
        // Nothing says where such a run ends.
        Some(seconds) if seconds > QUIET && !has_end => Pulse::Finished,
        Some(seconds) if seconds > QUIET => Pulse::Quiet(seconds),
        _ => Pulse::Running,
    }
}

/// The stages of a curriculum, or of a fit's last round.
fn of_last_round(run: &Run) -> impl Iterator<Item = &Stage> {
    let last = run.stages.last().map_or(0, |stage| stage.round);
    run.stages.iter().filter(move |stage| stage.round == last)
}

/// A figure of training rows by steps, smoothed: one stage after the other.
fn curve(run: &Run, of: fn(&Agreement) -> Option<f64>) -> Vec<(f64, f64)> {
    let (mut before, mut curve) = (0.0, Vec::new());
    for stage in of_last_round(run) {
        let steps = stage.log.steps.iter();
        let points = steps.filter_map(|step| point(step.place(), of(&step.agreement)));
        let points: Vec<_> = points.collect();
        curve.extend(smooth(&points).iter().map(|point| (before + point.at.steps, point.y)));
        before += stage.log.end().steps;
    }
    curve
}

/// Agreement by position: of held-out rows, or of the last step's.
fn positions(run: &Run) -> (Vec<f64>, bool) {
    let Some(stage) = run.stages.last() else { return (Vec::new(), false) };
    let known = |rates: &[Option<f64>]| -> Vec<f64> {
        rates.iter().map_while(|rate| *rate).filter(|rate| rate.is_finite()).collect()
    };
    if let Some(record) = stage.log.held_out.last() {
        return (known(&record.held_out.top1_by_delay), true);
    }
    let last = stage.log.steps.last();
    (last.map_or_else(Vec::new, |step| known(&step.agreement.top1_by_delay)), false)
}

#[cfg(test)]
mod tests;
