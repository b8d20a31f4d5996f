//! A draft trained from a configuration, with its steps as they are taken.
//!
//! ```sh
//! cargo run --release --example train -- conf/quickstart/demonstration.yaml target=model.gguf
//! ```

#![allow(clippy::print_stdout, reason = "a program that prints")]

use longdraft::{Configuration, Event, Observer, Result, Stop, TrainOptions, Trained, train};

/// Prints losses and keeps them.
#[derive(Default)]
pub(crate) struct Losses {
    /// Of every step.
    pub(crate) all: Vec<f64>,
    /// Stop after so many steps; 0 trains to the end.
    pub(crate) limit: usize,
}

impl Observer for Losses {
    fn on_event(&mut self, event: Event<'_>) {
        match event {
            Event::Step(step) => {
                println!("step {}/{}: loss {:.3}", step.step, step.steps, step.loss);
                self.all.push(step.loss);
            }
            Event::Evaluated(step, metrics) => {
                println!("held-out after step {step}: loss {:.3}", metrics.loss());
            }
            Event::Warning(text) => eprintln!("warning: {text}"),
            _ => {}
        }
    }

    fn should_stop(&self) -> bool {
        self.limit > 0 && self.all.len() >= self.limit
    }
}

/// Trains with changes to a configuration.
pub(crate) fn run(configuration: &str, changes: &[String], losses: &mut Losses) -> Result<Trained> {
    let options = TrainOptions { changes: changes.to_vec(), ..TrainOptions::default() };
    let trained = train(&Configuration::from(configuration), &options, losses, &Stop::new())?;
    let end = if trained.finished { "done" } else { "stopped: the same call goes on" };
    println!("{end}, {} steps: {}", trained.steps, trained.output.display());
    Ok(trained)
}

#[allow(dead_code, reason = "tests call `run`")]
fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((configuration, changes)) = arguments.split_first() else {
        eprintln!("give a configuration, and perhaps changes (key=value)");
        return Ok(());
    };
    run(configuration, changes, &mut Losses::default()).map(drop)
}
