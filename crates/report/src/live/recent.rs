//! What events say of the phase under way, and how long earlier ones took.

use std::collections::BTreeMap;
use std::path::Path;

use longdraft_records::events::{Advance, Answer, Event, FitPhase, Line, Reader};

const KEPT: usize = 512;
/// Samples that a speed is read off.
const OF_SPEED: usize = 12;

/// What was read of a run's events.
#[derive(Debug, Default)]
pub(super) struct Recent {
    reader: Reader,
    phase: Option<(FitPhase, usize)>,
    spent: BTreeMap<FitPhase, f64>,
    pub(super) work: Option<Advance>,
    /// When the work had come how far.
    samples: Vec<(f64, f64)>,
    tokens: Vec<(f64, f64)>,
    pub(super) answer: Option<Answer>,
    pub(super) memory_mib: Option<f64>,
    pub(super) last_at: f64,
    pub(super) is_stopped: bool,
}

impl Recent {
    pub(super) fn of(folder: &Path) -> Self {
        Self { reader: Reader::of(folder), ..Self::default() }
    }

    /// Takes what was added.
    pub(super) fn read(&mut self) {
        let (lines, anew) = self.reader.more();
        if anew {
            let reader = std::mem::take(&mut self.reader);
            *self = Self { reader, ..Self::default() };
        }
        lines.into_iter().for_each(|line| self.take(line));
    }

    fn take(&mut self, line: Line) {
        let Line { at, memory_mib, event } = line;
        if !at.is_finite() {
            return;
        }
        let passed = (at - self.last_at).max(0.0);
        let is_new = matches!(&event, Event::Phase { phase, .. }
            if self.phase.is_none_or(|(known, _)| *phase <= known));
        // Between a kill and the next call no phase is under way.
        if let (Some((phase, _)), false) = (self.phase, is_new || self.is_stopped) {
            *self.spent.entry(phase).or_default() += passed;
        }
        (self.last_at, self.is_stopped) = (at, false);
        self.memory_mib = memory_mib.or(self.memory_mib);
        match event {
            Event::Phase { phase, round } => self.begin(phase, round),
            Event::Progress(advance) => self.advance(at, advance),
            Event::Answer(answer) => self.answer = Some(answer),
            Event::Stopped => self.is_stopped = true,
        }
    }

    fn begin(&mut self, phase: FitPhase, round: usize) {
        if self.phase.is_some_and(|(_, known)| known != round) {
            self.spent.clear();
        }
        self.phase = Some((phase, round));
        (self.work, self.answer) = (None, None);
        self.samples.clear();
        self.tokens.clear();
    }

    fn advance(&mut self, at: f64, advance: Advance) {
        // A stage counts its steps from the beginning.
        let is_other = |work: &Advance| work.what != advance.what || work.done > advance.done;
        if self.work.as_ref().is_some_and(is_other) {
            self.samples.clear();
            self.tokens.clear();
        }
        keep(&mut self.samples, (at, advance.done as f64));
        if let Some(tokens) = advance.tokens {
            keep(&mut self.tokens, (at, tokens as f64));
        }
        self.work = Some(advance);
    }

    pub(super) fn samples(&self) -> &[(f64, f64)] {
        &self.samples
    }

    /// Tokens a second of late.
    pub(super) fn speed(&self) -> Option<f64> {
        let late = &self.tokens[self.tokens.len().saturating_sub(OF_SPEED)..];
        let (&(began, first), &(seen, last)) = (late.first()?, late.last()?);
        (seen > began && last > first).then(|| (last - first) / (seen - began))
    }

    pub(super) fn is_in_steps(&self) -> bool {
        self.work.as_ref().is_some_and(|work| work.what == "steps")
    }

    /// Seconds after the last event in which the work ends at any rate.
    pub(super) fn at_most(&self) -> Option<f64> {
        self.work.as_ref()?.at_most.filter(|most| most.is_finite())
    }

    /// Seconds that a phase took, as far as events tell.
    pub(super) fn spent(&self, phase: FitPhase) -> Option<f64> {
        self.spent.get(&phase).copied()
    }
}

fn keep(samples: &mut Vec<(f64, f64)>, sample: (f64, f64)) {
    if samples.len() >= KEPT {
        samples.drain(..KEPT / 2);
    }
    samples.push(sample);
}

#[cfg(test)]
mod tests {
    use super::FitPhase::{Answers, Measure, Training};
    use super::*;

    fn line(at: f64, event: Event) -> Line {
        Line { at, memory_mib: Some(at), event }
    }

    fn phase(phase: FitPhase, round: usize) -> Event {
        Event::Phase { phase, round }
    }

    fn progress(done: usize, tokens: u64) -> Event {
        let what = "prompts".to_owned();
        Event::Progress(Advance { what, done, all: 100, tokens: Some(tokens), at_most: Some(50.0) })
    }

    fn recent(lines: Vec<Line>) -> Recent {
        let mut recent = Recent::of(Path::new(""));
        lines.into_iter().for_each(|line| recent.take(line));
        recent
    }

    #[test]
    fn a_stage_that_begins_is_measured_for_itself() {
        let found = recent(vec![
            line(100.0, phase(Training, 1)),
            line(110.0, progress(50, 1000)),
            line(120.0, progress(100, 2000)),
            line(130.0, progress(1, 50)),
            line(132.0, progress(3, 250)),
        ]);
        assert_eq!(
            (found.samples(), found.speed()),
            (&[(130.0, 1.0), (132.0, 3.0)][..], Some(100.0))
        );
    }

    #[test]
    fn pauses_between_calls_are_no_work() {
        let mut lines = vec![
            line(100.0, phase(Measure, 1)),
            line(110.0, phase(Answers, 1)),
            line(115.0, progress(3, 100)),
            // Killed; an hour later.
            line(4000.0, phase(Measure, 1)),
            line(4001.0, phase(Answers, 1)),
            line(4005.0, progress(6, 50)),
            line(4006.0, progress(9, 150)),
        ];
        let recent_of = |lines: &[Line]| recent(lines.to_vec());
        let found = recent_of(&lines);
        assert_eq!((found.spent(Measure), found.spent(Answers)), (Some(11.0), Some(10.0)));
        assert_eq!((found.speed(), found.samples().len()), (Some(100.0), 2));
        assert_eq!((found.memory_mib, found.at_most()), (Some(4006.0), Some(50.0)));
        lines.push(line(4007.0, Event::Stopped));
        assert!(recent_of(&lines).is_stopped);
        // Another day, with more time.
        lines.push(line(90_000.0, phase(Measure, 2)));
        lines.push(line(90_002.0, phase(Answers, 2)));
        let found = recent_of(&lines);
        assert_eq!((found.spent(Measure), found.spent(Answers)), (Some(2.0), None));
        assert!(!found.is_stopped && found.work.is_none());
    }
}
