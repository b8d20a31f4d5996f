//! `longdraft lm train`, and what is done with its models: `quantize`, `score`, `grid`.

mod bits_per_byte;
mod experiment;
mod quantize;
mod table;

use longdraft_configuration::{read_pretrain, recheck};
use longdraft_models::bits_per_byte::Score;
use longdraft_models::sha256;
use longdraft_parallel::World;
use longdraft_pretrain::{
    ArtifactReport, PretrainConfig, PretrainEvent, PretrainStep, Pretraining, ScoredStream,
    build_artifact,
};
use longdraft_records::median;
use longdraft_report::words::clock;
use longdraft_train::memory::peak_resident_mib;
use longdraft_train::stage::{Ending, Observer, ResumePolicy};
use serde_json::{Value, json};

use super::{plan, write_json};
use crate::cli::TrainArguments;
use crate::commands::recorded::{config_text, save_config};
use crate::commands::train::require_extension;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::Lines;
use crate::ranks::{Voice, over_ranks};

pub(crate) use bits_per_byte::run as bits_per_byte;
pub(crate) use experiment::{problems as grid_problems, run as experiment};
pub(crate) use quantize::run as quantize;

/// The artifact in a run directory.
const ARTIFACT: &str = "model.ldq";

/// Trains; a second call with the same configuration goes on where the first one stopped.
pub(crate) fn run(arguments: &TrainArguments, json: bool) -> Result<()> {
    over_ranks(&arguments.ranks_to_start(), |world| run_on(world, arguments, json))
}

fn run_on(world: &World, arguments: &TrainArguments, json: bool) -> Result<()> {
    let policy = arguments.policy();
    let config = read_pretrain(&arguments.config, &arguments.changes())?;
    if arguments.planning.plan {
        return plan::pretraining(world, &config, arguments, json);
    }
    let voice = Voice::of(world, &config.output)?;
    let interrupts = Interrupts::listen();
    let mut progress = Progress::new(interrupts.clone(), voice);
    let trained = train(config, policy, world, &mut progress)?;
    let outcome = interrupts.outcome(trained.ending, world);
    let output = &trained.run.config().output;
    require_extension(policy, trained.ending, progress.speeds.is_empty(), output)?;
    if !world.is_first() {
        return outcome;
    }
    if json {
        outln!("{}", trained.to_json());
    } else if trained.ending == Ending::Finished {
        trained.print();
        outln!("done: {}", output.display());
    } else {
        let steps = trained.run.totals().0;
        outln!("stopped after step {steps}: the same command goes on from there");
    }
    outcome
}

/// A run that ended.
pub(super) struct Trained {
    pub(super) run: Pretraining,
    pub(super) ending: Ending,
    pub(super) artifact: Option<ArtifactReport>,
    /// Tokens a second; none where this call took no step.
    speed: Option<f64>,
    hash: String,
}

/// Runs to the end on every rank; the first one then writes the artifact and scores it.
pub(super) fn train(
    mut config: PretrainConfig,
    policy: ResumePolicy,
    world: &World,
    progress: &mut Progress,
) -> Result<Trained> {
    let text = config_text(&config, &config.references, &config.output)?;
    if !world.is_first() {
        // The first rank reports for all.
        config.tracking.report_to.clear();
    }
    let mut run = Pretraining::prepare(recheck(config)?, policy, world, progress)?;
    let config = run.config().clone();
    if let Some(stream) = run.held_out() {
        require_targets(stream.targets(), config.data.row_tokens)?;
    }
    if world.is_first() {
        // Not before: a refused run keeps the configuration that it was made with.
        save_config(&config.output, &text)?;
    }
    let hash = sha256::of_text(&text)[..12].to_owned();
    progress.voice.say(&format!(
        "configuration {hash}; {:.2} M parameters; {} tokens to train on, {} targets to score; {} \
         tokens a step in sequences of {}; seed {}; {} threads",
        config.model.parameter_count() as f64 / 1e6,
        run.training_tokens(),
        run.held_out().map_or(0, ScoredStream::targets),
        config.train.tokens_per_step,
        config.data.row_tokens,
        config.train.seed,
        rayon::current_num_threads()
    ));
    let ending = run.run(progress)?;
    let mut artifact = None;
    if ending == Ending::Finished && world.is_first() {
        let model = run.final_model()?;
        let path = config.output.join(ARTIFACT);
        let hash = run.tokenizer_hash().to_owned();
        if let Some(stream) = run.held_out() {
            let (window, stride) = config.windows();
            let length = config.data.row_tokens;
            let lengths = (length, window, stride, config.evaluation.batch_tokens);
            let report =
                ArtifactReport::measure(&model, &hash, &config.artifact, &path, stream, lengths)?;
            write_json(&config.output.join("result.json"), &report.to_json())?;
            artifact = Some(report);
        } else {
            build_artifact(&model, &hash, &config.artifact, &path)?;
        }
    }
    let speeds = &progress.speeds;
    let speed = (!speeds.is_empty()).then(|| median(speeds));
    Ok(Trained { run, ending, artifact, speed, hash })
}

/// Refuses held-out text that fills no row: nothing of it is scored.
fn require_targets(targets: usize, row_tokens: usize) -> Result<()> {
    if targets >= row_tokens {
        return Ok(());
    }
    let problem =
        format!("`data.held_out` has {targets} targets, which fill no row of {row_tokens} tokens");
    Err(Failure::usage(problem).hint(
        "hold out more text, take shorter rows (data.row_tokens), or leave `data.held_out` out",
    ))
}

impl Trained {
    pub(super) fn to_json(&self) -> Value {
        let (steps, tokens, elapsed_ms, clipped) = self.run.totals();
        let config = self.run.config();
        let operations = config.model.training_operations_per_token(config.data.row_tokens);
        json!({
            "output": config.output.to_string_lossy(), "config_hash": self.hash,
            "seed": config.train.seed,
            "parameters": config.model.parameter_count(), "steps": steps, "tokens": tokens,
            "seconds": elapsed_ms / 1000.0, "finished": self.ending == Ending::Finished,
            "median_tokens_per_second": self.speed,
            "gflops": self.speed.map(|speed| 1e-9 * speed * operations),
            "clip_share": clipped, "peak_memory_mib": peak_resident_mib(),
            "result": self.artifact.as_ref().map(ArtifactReport::to_json),
        })
    }

    fn print(&self) {
        let (steps, tokens, elapsed_ms, clipped) = self.run.totals();
        let config = self.run.config();
        let operations = config.model.training_operations_per_token(config.data.row_tokens);
        let speed = self.speed.map_or_else(String::new, |speed| {
            let gflops = 1e-9 * speed * operations;
            format!("{speed:.0} tokens/s, {gflops:.1} GFLOP/s of the model; ")
        });
        outln!(
            "{steps} steps, {tokens} tokens in {}; {speed}{:.0} % of steps clipped; {:.0} MiB at most",
            clock(elapsed_ms / 1000.0),
            100.0 * clipped,
            peak_resident_mib().unwrap_or(f64::NAN)
        );
        if let Some(artifact) = &self.artifact {
            print_artifact(artifact, config.data.row_tokens, config.artifact.compression);
        }
    }
}

/// The figures of live weights and artifact.
pub(super) fn print_artifact(
    report: &ArtifactReport,
    length: usize,
    compression: longdraft_models::weights::artifact::Compression,
) {
    let of = |score: &Score| {
        format!(
            "{:.6} bits per byte ({} of {} targets, {} bytes)",
            score.bits_per_byte(),
            score.tokens,
            score.total_tokens,
            score.bytes
        )
    };
    let (window, stride) = report.windows;
    outln!("live weights, plain {length}:      {}", of(&report.live));
    outln!("artifact, plain {length}:          {}", of(&report.plain));
    outln!("artifact, sliding {window}/{stride}: {}", of(&report.sliding));
    outln!(
        "penalty of quantisation {:.6}; trained at {length}, windows of {window}, RoPE base {:.1}",
        report.penalty(),
        report.rope_base
    );
    let sizes = report.sizes;
    outln!(
        "artifact of {} bytes ({} before {}), {} of code, {} in all: {} the limit of 16000000",
        sizes.artifact_bytes,
        sizes.payload_bytes,
        compression.implementation(),
        sizes.code_bytes,
        sizes.total(),
        if sizes.fits() { "within" } else { "BEYOND" }
    );
}

/// Prints a run's events; stops it when the user asks.
pub(super) struct Progress {
    voice: Voice,
    interrupts: Interrupts,
    lines: Lines,
    speeds: Vec<f64>,
}

impl Progress {
    pub(super) fn new(interrupts: Interrupts, voice: Voice) -> Self {
        Self { voice, interrupts, lines: Lines::at_once(), speeds: Vec::new() }
    }

    fn step(&mut self, report: &PretrainStep) {
        let speed = report.tokens as f64 / report.seconds.max(1e-9);
        self.speeds.push(speed);
        if self.lines.are_due(report.step <= 10 || report.progress >= 1.0) {
            self.voice.say(&format!(
                "step {}/{}  loss {:.4}  norm {:.3}  clip {:.2}  multiplier {:.3}  momentum {:.4}  \
                 {speed:.0} tok/s  {:.0} %",
                report.step,
                report.steps,
                report.loss,
                report.grad_norm,
                report.clip_factor,
                report.multiplier,
                report.momentum,
                100.0 * report.progress.min(1.0)
            ));
        }
    }
}

impl Observer<PretrainStep, f64> for Progress {
    fn on_event(&mut self, event: PretrainEvent<'_>) {
        match event {
            PretrainEvent::Resumed(step) => self.voice.say(&format!("resumed after step {step}")),
            PretrainEvent::Note(text) => self.voice.say(text),
            PretrainEvent::Warning(text) => self.voice.say(&format!("warning: {text}")),
            PretrainEvent::Step(report) => self.step(report),
            PretrainEvent::Evaluated(step, bits) => {
                self.voice.say(&format!("validation after step {step}: {bits:.4} bits per byte"));
            }
            PretrainEvent::Saved(path) => self.voice.say(&format!("saved {}", path.display())),
            // Of trainings with a target.
            PretrainEvent::Captured(..) | PretrainEvent::Measured(..) => {}
        }
    }

    fn should_stop(&self) -> bool {
        self.interrupts.asked()
    }
}
