//! From a configuration to a run, fresh or resumed.

use candle_core::Device;
use longdraft_data::token_stream::{TokenStream, overlap};
use longdraft_models::language_model::LanguageModel;
use longdraft_parallel::{DataParallel, World};
use longdraft_rules::Checked;
use longdraft_tracking::{MetricsLog, Trackers};
use longdraft_train::checkpoint::{
    Checkpointer, ResumePolicy, RunIdentity, RunLock, SaveClock, require_same_run, time_is_used_up,
};

use super::identity::{MAX_MINUTES, STEPS, among_ranks, identity};
use super::{Layouts, Pretraining};
use crate::checkpoint::{self, Average, Progress};
use crate::config::PretrainConfig;
use crate::error::Result;
use crate::muon::Muon;
use crate::observer::{PretrainEvent, PretrainObserver};
use crate::score::{ScoredStream, Tokenizer};

impl Pretraining {
    /// Reads data and model, or goes on from the output's newest checkpoint; every rank of `world`
    /// does.
    ///
    /// # Errors
    /// - a shard, the tokenizer or a checkpoint is unusable, or the run belongs to other settings
    pub fn prepare(
        config: Checked<PretrainConfig>,
        policy: ResumePolicy,
        world: &World,
        observer: &mut dyn PretrainObserver,
    ) -> Result<Self> {
        world.set_timeout(config.parallel.timeout());
        let lock = RunLock::of_world(&config.output, world)?;
        let stream = TokenStream::open(&config.data.train)?;
        stream.check(config.model.vocab_size)?;
        let tokenizer = config.data.tokenizer.as_deref().map(Tokenizer::open).transpose()?;
        let tokenizer_hash = tokenizer.as_ref().map_or_else(String::new, Tokenizer::hash);
        let held_out = match &tokenizer {
            Some(tokenizer) if !config.data.held_out.is_empty() && world.is_first() => {
                Some(open_held_out(&config, tokenizer, &stream, observer)?)
            }
            _ => None,
        };
        let device = config.device.open(world.local_rank())?;
        let identity = identity(&config, &stream, (&tokenizer_hash, &device));
        among_ranks(&identity, &config).require_agreement(world)?;
        let checkpointer = Checkpointer::new(config.output.join("checkpoints"), world);
        checkpointer.clean();
        config.precision.apply(&device);
        let model = LanguageModel::initialise(&config.model, config.train.seed)?;
        let model = if matches!(device, Device::Cpu) { model } else { model.to_device(&device)? };
        let parameters = model.parameters();
        let costs = Muon::costs(parameters);
        let parallel = DataParallel::by_cost(world, &config.parallel, parameters, &costs);
        let (parallel, remark) = parallel.with_gpus(&device, &config.parallel)?;
        if let Some(remark) = &remark {
            observer.on_event(PretrainEvent::Warning(remark));
        }
        let mut optimizer = Muon::over(config.optimizer.clone(), &parallel, parameters);
        // The first rank averages for all.
        let averaging = config.train.ema_share.filter(|_| world.is_first());
        let mut average = averaging.map(|_| Average::new(parameters)).transpose()?;
        let mut progress = Progress::default();
        let mut metrics_bytes = 0;
        if let Some((saved, warning)) = checkpointer.newest(checkpoint::load)? {
            if let Some(warning) = warning {
                observer.on_event(PretrainEvent::Warning(&warning));
            }
            progress = saved.state.progress;
            let identities = (&saved.state.identity, &identity);
            check_identity(&config, identities, policy, &mut progress, observer)?;
            saved.restore(parameters, &mut average)?;
            let state = saved.optimizer(&parallel, parameters)?;
            optimizer = Muon::with_state(config.optimizer.clone(), &parallel, parameters, state)?;
            metrics_bytes = saved.state.metrics_bytes;
            observer.on_event(PretrainEvent::Resumed(progress.step));
        }
        let log = MetricsLog::open(&config.output, metrics_bytes, world.is_first())?;
        let saving = SaveClock::new(config.train.save_every, config.train.save_minutes);
        Ok(Self {
            stream,
            held_out,
            tokenizer_hash,
            model,
            optimizer,
            parallel,
            average,
            progress,
            saving,
            checkpointer,
            identity,
            log,
            layouts: Layouts::default(),
            trackers: Trackers::default(),
            config,
            _lock: lock,
        })
    }
}

/// Opens the held-out stream, tests the byte table on it and looks for shared documents.
fn open_held_out(
    config: &PretrainConfig,
    tokenizer: &Tokenizer,
    train: &TokenStream,
    observer: &mut dyn PretrainObserver,
) -> Result<ScoredStream> {
    let stream = TokenStream::open(&config.data.held_out)?;
    stream.check(config.model.vocab_size)?;
    if config.data.check_overlap {
        let counts = overlap(train, &stream)?;
        if counts.shared > 0 {
            let text = format!(
                "{} of {} training documents are in the held-out stream: scores are too good",
                counts.shared, counts.train
            );
            observer.on_event(PretrainEvent::Warning(&text));
        }
    }
    let vocabulary = config.model.vocab_size;
    let scored = ScoredStream::new(&stream, tokenizer, vocabulary, config.evaluation.max_tokens)?;
    for warning in scored.warnings() {
        observer.on_event(PretrainEvent::Warning(warning));
    }
    Ok(scored)
}

/// Refuses a run of other settings; an extended one has an end again.
fn check_identity(
    config: &PretrainConfig,
    (saved, new): (&RunIdentity, &RunIdentity),
    policy: ResumePolicy,
    progress: &mut Progress,
    observer: &mut dyn PretrainObserver,
) -> Result<()> {
    let lengths = [STEPS, MAX_MINUTES];
    let differences = require_same_run(saved, new, &lengths, policy, &config.output)?;
    if policy == ResumePolicy::Force && !differences.is_empty() {
        let text = format!("going on although {}", differences.join("; "));
        observer.on_event(PretrainEvent::Warning(&text));
        // Time ends the run again by itself.
        progress.ended = false;
    }
    if policy != ResumePolicy::Extend {
        return Ok(());
    }
    let run = &config.train;
    if progress.step >= run.steps {
        return Ok(());
    }
    if let Some(minutes) = run.max_minutes.filter(|most| progress.elapsed_ms >= 60_000.0 * most) {
        observer.on_event(PretrainEvent::Warning(&time_is_used_up(minutes)));
        return Ok(());
    }
    progress.ended = false;
    if !differences.is_empty() {
        let before = config.of_length(saved.value(STEPS), saved.value(MAX_MINUTES));
        let multiplier =
            |config: &PretrainConfig| config.multiplier(progress.step, progress.elapsed_ms);
        let text = format!(
            "extended: {}; the multiplier of every rate after step {} goes from {:.3} to {:.3}",
            differences.join("; "),
            progress.step,
            multiplier(&before),
            multiplier(config)
        );
        observer.on_event(PretrainEvent::Note(&text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use longdraft_train::observer::Observer;
    use serde_json::json;

    use super::*;
    use crate::observer::PretrainStep;

    /// Keeps the warnings that it is told.
    #[derive(Default)]
    struct Heard(Vec<String>);

    impl Observer<PretrainStep, f64> for Heard {
        fn on_event(&mut self, event: PretrainEvent<'_>) {
            if let PretrainEvent::Warning(text) = event {
                self.0.push(text.to_owned());
            }
        }
    }

    #[test]
    fn more_steps_without_more_time_are_told() {
        let extended = |elapsed_ms: f64| {
            let keys = json!({
                "output": "runs/x", "data": { "train": ["a.bin"] },
                "train": { "steps": 12, "max_minutes": 1.0 },
            });
            let new: PretrainConfig = serde_json::from_value(keys).expect("a configuration");
            let of_steps = |steps: &str| {
                let values = [(STEPS, steps), (MAX_MINUTES, "1.0")];
                RunIdentity { values: values.map(|(k, v)| (k.to_owned(), v.to_owned())).into() }
            };
            let before = Progress { step: 8, elapsed_ms, ended: true, ..Progress::default() };
            let (mut progress, mut heard) = (before, Heard::default());
            let identities = (&of_steps("8"), &of_steps("12"));
            check_identity(&new, identities, ResumePolicy::Extend, &mut progress, &mut heard)
                .expect("extended");
            (progress.ended, heard.0)
        };
        let (ended, told) = extended(60_000.0);
        assert!(ended && told.len() == 1 && told[0].contains("are used up"), "{told:?}");
        assert_eq!(extended(59_000.0), (false, Vec::new()));
    }
}
