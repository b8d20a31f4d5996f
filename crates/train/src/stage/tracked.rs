//! Feeds trackers from a stage's events.

use longdraft_tracking::{Outcome, Row, Run, Trackers, scalars};

use crate::config::{RunConfig, TrainConfig};
use crate::metrics::DraftMetrics;
use crate::observer::{Event, Observer};

/// Opens the trackers of a run that was resumed after so many steps.
type Open<'a> = Box<dyn FnOnce(u64) -> Trackers + 'a>;

/// An observer that hands every event to another one, and the metrics to the trackers.
///
/// Trackers are opened at the first step, so that a run that cannot start leaves nothing;
/// a resumed run without a step left opens them to end them.
/// Scalars of a step and of the evaluation that is due after it go out as one [`Row`].
pub struct Tracked<'a> {
    inner: &'a mut dyn Observer,
    open: Option<Open<'a>>,
    trackers: Trackers,
    log_every: u64,
    evaluate_every: u64,
    resumed_step: u64,
    pending: Option<Row>,
}

impl<'a> Tracked<'a> {
    /// Tracks a run of `config` for `inner`.
    pub fn new(config: &TrainConfig, inner: &'a mut dyn Observer) -> Self {
        let run_config = config.clone();
        let open = move |resumed_step| {
            let (folder, tracking) = (&run_config.output, &run_config.tracking);
            Trackers::open(&Run::new(folder, tracking, run_config.record(), resumed_step))
        };
        Self::with(Box::new(open), &config.train, inner)
    }

    fn with(open: Open<'a>, run: &RunConfig, inner: &'a mut dyn Observer) -> Self {
        Self {
            inner,
            open: Some(open),
            trackers: Trackers::default(),
            log_every: run.log_every.max(1),
            evaluate_every: run.evaluate_every,
            resumed_step: 0,
            pending: None,
        }
    }

    /// Ends all trackers; returns what the user should know.
    pub fn finish(mut self, outcome: Outcome) -> Vec<String> {
        self.complete_row();
        // The run was killed after its last step: its trackers have not heard of the end.
        if self.resumed_step > 0 && outcome == Outcome::Finished {
            self.open();
        }
        let notes = self.trackers.finish(outcome);
        self.warn();
        notes
    }

    /// Adds scalars to the row of a step.
    fn add(&mut self, step: u64, scalars: Vec<(String, f64)>) {
        match &mut self.pending {
            Some(row) if row.step == step => row.scalars.extend(scalars),
            _ => {
                self.complete_row();
                self.pending = Some(Row::now(step, scalars));
            }
        }
    }

    fn evaluated(&mut self, step: u64, metrics: &DraftMetrics) {
        let record = metrics.to_json(metrics.by_delay.len()).into();
        self.add(step, scalars("held_out", &record));
        self.complete_row();
    }

    /// Hands the row to the trackers; the first row opens them.
    fn complete_row(&mut self) {
        let Some(row) = self.pending.take() else { return };
        self.open();
        self.trackers.log(&row);
        self.warn();
    }

    fn open(&mut self) {
        if let Some(open) = self.open.take() {
            self.trackers = open(self.resumed_step);
        }
    }

    /// Tells which trackers were dropped.
    fn warn(&mut self) {
        for warning in self.trackers.warnings() {
            self.inner.on_event(Event::Warning(&warning));
        }
    }
}

impl Observer for Tracked<'_> {
    fn on_event(&mut self, event: Event<'_>) {
        match &event {
            Event::Resumed(step) => self.resumed_step = *step,
            Event::Step(report) if report.step.is_multiple_of(self.log_every) => {
                let record = report.to_json(report.metrics.by_delay.len());
                self.add(report.step, scalars("train", &record));
                let every = self.evaluate_every;
                let evaluation = every > 0 && report.step.is_multiple_of(every);
                if !evaluation && report.step < report.steps {
                    self.complete_row();
                }
            }
            Event::Evaluated(step, metrics) => self.evaluated(*step, metrics),
            Event::Saved(_) => {
                self.complete_row();
                self.trackers.flush();
                self.warn();
            }
            _ => {}
        }
        self.inner.on_event(event);
    }

    fn should_stop(&self) -> bool {
        self.inner.should_stop()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::observer::StepReport;
    use longdraft_tracking::{Moment, Result, Tracker, TrackerError};

    type Said = Rc<RefCell<Vec<String>>>;

    /// Keeps what it is told; fails from the given step on.
    struct Kept(Said, Option<u64>);

    impl Tracker for Kept {
        fn log(&mut self, row: &Row) -> Result<()> {
            if self.1.is_some_and(|step| row.step >= step) {
                return Err(TrackerError::Setup("full disk".to_owned()));
            }
            let keys: Vec<&str> = row.scalars.iter().map(|(key, _)| key.as_str()).collect();
            let loss = |key: &&str| key.ends_with("_loss");
            let losses = keys.iter().filter(|key| loss(key)).count();
            self.0.borrow_mut().push(format!("row {} losses {losses}", row.step));
            Ok(())
        }

        fn flush(&mut self) -> Result<()> {
            self.0.borrow_mut().push("flush".to_owned());
            Ok(())
        }

        fn finish(&mut self, outcome: Outcome, _: Moment) -> Result<Option<String>> {
            self.0.borrow_mut().push(format!("{outcome:?}"));
            Ok(Some("note".to_owned()))
        }
    }

    #[derive(Default)]
    struct Inner {
        events: usize,
        warnings: Vec<String>,
    }

    impl Observer for Inner {
        fn on_event(&mut self, event: Event<'_>) {
            self.events += 1;
            if let Event::Warning(text) = event {
                self.warnings.push(text.to_owned());
            }
        }

        fn should_stop(&self) -> bool {
            true
        }
    }

    fn report(step: u64) -> StepReport {
        StepReport {
            memory_mib: None,
            traffic: None,
            step,
            steps: 9,
            epoch: 0,
            loss: 1.0,
            target_loss: None,
            grad_norm: 1.0,
            learning_rate: 0.1,
            tokens: 10,
            total_tokens: 10 * step,
            seconds: 1.0,
            capture_seconds: 0.0,
            metrics: DraftMetrics::default(),
        }
    }

    #[test]
    fn a_step_goes_out_at_once_or_with_its_evaluation() {
        let (said, opened) = (Said::default(), Rc::new(RefCell::new(None)));
        let mut inner = Inner::default();
        let (kept, at) = (Rc::clone(&said), Rc::clone(&opened));
        let open = move |resumed| {
            *at.borrow_mut() = Some(resumed);
            Trackers::of(vec![("kept", Ok(Box::new(Kept(kept, None))))])
        };
        let config = RunConfig { log_every: 2, evaluate_every: 3, ..RunConfig::default() };
        let mut tracked = Tracked::with(Box::new(open), &config, &mut inner);
        tracked.on_event(Event::Resumed(3));
        tracked.on_event(Event::Captured(1, 1));
        assert_eq!(*opened.borrow(), None, "opened before a step");
        for step in 4..=6 {
            tracked.on_event(Event::Step(&report(step)));
            assert_eq!(said.borrow().len(), 1, "the row of step 4 goes out at once, 6 waits");
        }
        tracked.on_event(Event::Evaluated(6, &DraftMetrics::default()));
        tracked.on_event(Event::Saved(std::path::Path::new("x")));
        tracked.on_event(Event::Evaluated(7, &DraftMetrics::default()));
        assert!(tracked.should_stop());
        assert_eq!(tracked.finish(Outcome::Stopped), ["note"]);
        assert_eq!(*opened.borrow(), Some(3));
        // Step 5 is not logged; a step has hard and soft loss, and so has an evaluation.
        let expected = ["row 4 losses 2", "row 6 losses 4", "flush", "row 7 losses 2", "Stopped"];
        assert_eq!(*said.borrow(), expected);
        assert_eq!((inner.events, inner.warnings.len()), (8, 0));
    }

    #[test]
    fn a_run_killed_after_its_last_step_is_still_ended() {
        let ended = |resumed: Option<u64>, outcome| {
            let (said, mut inner) = (Said::default(), Inner::default());
            let kept = Rc::clone(&said);
            let open = move |_| Trackers::of(vec![("kept", Ok(Box::new(Kept(kept, None))))]);
            let mut tracked = Tracked::with(Box::new(open), &RunConfig::default(), &mut inner);
            resumed.into_iter().for_each(|step| tracked.on_event(Event::Resumed(step)));
            tracked.finish(outcome);
            said.take()
        };
        assert_eq!(ended(Some(9), Outcome::Finished), ["Finished"]);
        assert!(ended(None, Outcome::Failed).is_empty());
    }

    #[test]
    fn a_tracker_that_fails_is_switched_off_with_one_warning() {
        let (said, mut inner) = (Said::default(), Inner::default());
        let kept = Rc::clone(&said);
        let open = move |_| {
            Trackers::of(vec![
                ("absent", Err(TrackerError::Setup("no server".to_owned()))),
                ("kept", Ok(Box::new(Kept(Rc::clone(&kept), Some(2))))),
                ("kept", Ok(Box::new(Kept(kept, None)))),
            ])
        };
        let mut tracked = Tracked::with(Box::new(open), &RunConfig::default(), &mut inner);
        for step in 1..=3 {
            tracked.on_event(Event::Step(&report(step)));
        }
        assert_eq!(tracked.finish(Outcome::Finished), ["note"]);
        assert_eq!(inner.warnings.len(), 2, "{:?}", inner.warnings);
        assert_eq!(inner.warnings[0], "not tracked by absent: no server");
        assert!(
            inner.warnings[1].contains("kept is switched off")
                && inner.warnings[1].contains("full disk")
        );
        // The other one goes on.
        assert_eq!(said.borrow().iter().filter(|line| line.starts_with("row")).count(), 4);
    }
}
