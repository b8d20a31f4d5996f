//! A training that is tracked by one's own program: here a CSV file, one line a step.
//!
//! A tracker listens to the training and is called between its steps. After an interruption the training goes on from its last checkpoint, so that some
//! steps are taken twice: what a tracker has written of them goes.
//!
//! ```sh
//! cargo run --release --example custom_tracker -- losses.csv conf/quickstart/demonstration.yaml target=model.gguf
//! ```

#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::fs;
use std::path::{Path, PathBuf};

use longdraft::{Configuration, Event, Observer, StepReport, Stop, TrainOptions, Trained, train};

const HEADER: &str = "step,loss,learning_rate,tokens_per_second,held_out_loss";

/// A table of steps. Held-out losses stand in the line of the step that was measured.
pub(crate) struct CsvTracker {
    file: PathBuf,
    lines: Vec<String>,
    /// The first fault of the disk: the training goes on without the table.
    fault: Option<std::io::Error>,
}

impl CsvTracker {
    /// Goes on with a file, or begins one.
    pub(crate) fn open(file: &Path) -> std::io::Result<Self> {
        let lines = match fs::read_to_string(file) {
            Ok(text) => text.lines().skip(1).map(str::to_owned).collect(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        Ok(Self { file: file.to_path_buf(), lines, fault: None })
    }

    /// Keeps the lines of the first `steps` steps.
    fn cut(&mut self, steps: u64) {
        self.lines.truncate(usize::try_from(steps).unwrap_or(usize::MAX));
    }

    fn add(&mut self, step: &StepReport) {
        self.cut(step.step - 1);
        let speed = step.tokens_per_second();
        self.lines.push(format!("{},{},{},{speed:.0},", step.step, step.loss, step.learning_rate));
    }

    /// Writes the table beside the old one and puts it in its place: no reader sees half of it.
    fn write(&mut self) {
        let text = format!("{HEADER}\n{}\n", self.lines.join("\n"));
        let beside = self.file.with_extension("part");
        let written = fs::write(&beside, text).and_then(|()| fs::rename(&beside, &self.file));
        if let (Err(error), None) = (written, &self.fault) {
            self.fault = Some(error);
        }
    }
}

impl Observer for CsvTracker {
    fn on_event(&mut self, event: Event<'_>) {
        match event {
            Event::Resumed(steps) => self.cut(steps),
            Event::Step(step) => self.add(step),
            Event::Evaluated(_, metrics) => {
                if let Some(line) = self.lines.last_mut() {
                    line.push_str(&metrics.loss().to_string());
                }
            }
            // What a checkpoint counts on is on the disk.
            Event::Saved(_) => self.write(),
            _ => {}
        }
    }
}

/// Trains a configuration with changes, and tracks it in a file.
pub(crate) fn run(
    file: &Path,
    configuration: &str,
    changes: &[String],
) -> Result<Trained, Box<dyn std::error::Error>> {
    let mut tracker = CsvTracker::open(file)?;
    let options = TrainOptions { changes: changes.to_vec(), ..TrainOptions::default() };
    let trained = train(&Configuration::from(configuration), &options, &mut tracker, &Stop::new())?;
    tracker.write();
    if let Some(fault) = tracker.fault {
        return Err(format!("{}: {fault}", file.display()).into());
    }
    println!("{} lines in {}", tracker.lines.len(), file.display());
    Ok(trained)
}

#[allow(dead_code, reason = "tests call `run`")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, configuration, changes @ ..] = arguments.as_slice() else {
        eprintln!("give a file to write, a configuration, and perhaps changes (key=value)");
        return Ok(());
    };
    run(Path::new(file), configuration, changes).map(drop)
}
