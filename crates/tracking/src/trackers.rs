//! The trackers of a run: opened by name, and dropped where they fail.

use super::{
    Mlflow, Moment, Outcome, Result, Row, Run, Sink, SwanLab, TensorBoard, Tracker, Wandb,
};

/// A tracker's name, and the tracker or why there is none.
pub type Opened = (&'static str, Result<Box<dyn Tracker>>);

/// The trackers that a run reports to.
fn open(run: &Run) -> Vec<Opened> {
    type Open = fn(&Run) -> Result<Box<dyn Tracker>>;
    let known: [(Sink, &'static str, Open); 4] = [
        (Sink::TensorBoard, "TensorBoard", |run| Ok(Box::new(TensorBoard::new(run)))),
        (Sink::Wandb, "W&B", |run| Ok(Box::new(Wandb::open(run)?))),
        (Sink::SwanLab, "SwanLab", |run| Ok(Box::new(SwanLab::open(run)?))),
        (Sink::Mlflow, "MLflow", |run| Ok(Box::new(Mlflow::open(run)?))),
    ];
    let disabled = run.environment.get("WANDB_MODE") == Some("disabled");
    let is_wanted =
        |sink: &Sink| run.tracking.report_to.contains(sink) && !(disabled && *sink == Sink::Wandb);
    let wanted = known.into_iter().filter(|(sink, ..)| is_wanted(sink));
    wanted.map(|(_, name, open)| (name, open(run))).collect()
}

/// Open trackers with their names; one that fails is dropped with a warning.
#[derive(Default)]
pub struct Trackers {
    open: Vec<(&'static str, Box<dyn Tracker>)>,
    warnings: Vec<String>,
}

impl Trackers {
    /// Opens what the run lists.
    pub fn open(run: &Run) -> Self {
        Self::of(open(run))
    }

    /// Those that could be opened; why others could not is a warning.
    pub fn of(all: Vec<Opened>) -> Self {
        let mut trackers = Self::default();
        for (name, opened) in all {
            match opened {
                Ok(tracker) => trackers.open.push((name, tracker)),
                Err(error) => trackers.warnings.push(format!("not tracked by {name}: {error}")),
            }
        }
        trackers
    }

    fn each(&mut self, mut call: impl FnMut(&mut dyn Tracker) -> Result<()>) {
        for (name, mut tracker) in std::mem::take(&mut self.open) {
            match call(tracker.as_mut()) {
                Ok(()) => self.open.push((name, tracker)),
                Err(error) => {
                    self.warnings
                        .push(format!("{name} is switched off, training goes on: {error}"));
                }
            }
        }
    }

    /// Hands over the scalars of a step.
    pub fn log(&mut self, row: &Row) {
        self.each(|tracker| tracker.log(row));
    }

    /// A checkpoint is about to count on all rows so far.
    pub fn flush(&mut self) {
        self.each(|tracker| tracker.flush());
    }

    /// Ends all; returns what the user should know.
    pub fn finish(&mut self, outcome: Outcome) -> Vec<String> {
        let (mut notes, time) = (Vec::new(), Moment::now());
        self.each(|tracker| {
            notes.extend(tracker.finish(outcome, time)?);
            Ok(())
        });
        notes
    }

    /// Warnings since the last call.
    pub fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }
}
