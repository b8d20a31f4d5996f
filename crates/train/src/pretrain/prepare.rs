//! From a configuration to a run, fresh or resumed.

use candle_core::Device;
use longdraft_data::token_stream::{TokenStream, overlap};
use longdraft_models::language_model::LanguageModel;

use super::checkpoint::{self, Average};
use super::{
    Layouts, PretrainConfig, PretrainEvent, PretrainObserver, Pretraining, Progress, ScoredStream,
    Tokenizer,
};
use crate::checkpoint::{Checkpointer, RunIdentity, RunLock};
use crate::error::{Result, TrainError};
use crate::optim::Muon;
use crate::parallel::{DataParallel, World};
use crate::stage::ResumePolicy;
use crate::stage::metrics_log::MetricsLog;

impl Pretraining {
    /// Reads data and model, or goes on from the output's newest checkpoint; every rank of `world`
    /// does.
    ///
    /// # Errors
    /// - a shard, the tokenizer or a checkpoint is unusable, or the run belongs to other settings
    pub fn prepare(
        config: PretrainConfig,
        policy: ResumePolicy,
        world: &World,
        observer: &mut dyn PretrainObserver,
    ) -> Result<Self> {
        world.set_timeout(config.parallel.timeout());
        if config.parallel.spreads_weights(world) {
            let problem =
                "`parallel.zero: 3` spreads a draft and its target: pretraining has neither";
            return Err(TrainError::Unsupported { problem: problem.to_owned() });
        }
        let lock = RunLock::of_world(&config.output, world)?;
        let stream = TokenStream::open(&config.data.train)?;
        stream.check(config.model.vocab_size)?;
        let tokenizer = config.data.tokenizer.as_deref().map(Tokenizer::open).transpose()?;
        let tokenizer_hash = tokenizer.as_ref().map_or_else(String::new, Tokenizer::hash);
        let validation = match &tokenizer {
            Some(tokenizer) if !config.data.validation.is_empty() && world.is_first() => {
                Some(open_validation(&config, tokenizer, &stream, observer)?)
            }
            _ => None,
        };
        let identity = identity(&config, &stream, &tokenizer_hash);
        identity.require_agreement(world)?;
        let checkpointer = Checkpointer::new(config.output.join("checkpoints"), world);
        checkpointer.clean();
        let device = config.device.open(world.rank())?;
        config.precision.apply(&device);
        let model = LanguageModel::initialise(&config.model, config.train.seed)?;
        let model = if matches!(device, Device::Cpu) { model } else { model.to_device(&device)? };
        let parameters = model.parameters();
        let costs = Muon::costs(parameters);
        let parallel = DataParallel::by_cost(world, &config.parallel, parameters, &costs);
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
            check_identity(&config, &saved.state.identity, &identity, policy, observer)?;
            saved.restore(parameters, &mut average)?;
            let state = saved.optimizer(&parallel, parameters)?;
            optimizer = Muon::with_state(config.optimizer.clone(), &parallel, parameters, state)?;
            progress = saved.state.progress;
            metrics_bytes = saved.state.metrics_bytes;
            observer.on_event(PretrainEvent::Resumed(progress.step));
        }
        let log = MetricsLog::open(&config.output.join("metrics.jsonl"), metrics_bytes, world)?;
        Ok(Self {
            stream,
            validation,
            tokenizer_hash,
            model,
            optimizer,
            parallel,
            average,
            progress,
            checkpointer,
            identity,
            log,
            layouts: Layouts::default(),
            trackers: None,
            config,
            _lock: lock,
        })
    }
}

/// Opens the validation stream, tests the byte table on it and looks for shared documents.
fn open_validation(
    config: &PretrainConfig,
    tokenizer: &Tokenizer,
    train: &TokenStream,
    observer: &mut dyn PretrainObserver,
) -> Result<ScoredStream> {
    let stream = TokenStream::open(&config.data.validation)?;
    stream.check(config.model.vocab_size)?;
    if config.data.check_overlap {
        let counts = overlap(train, &stream)?;
        if counts.shared > 0 {
            let text = format!(
                "{} of {} training documents are in the validation stream: scores are too good",
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

/// Everything that decides the weights.
fn identity(config: &PretrainConfig, stream: &TokenStream, tokenizer: &str) -> RunIdentity {
    let run = &config.train;
    let files = stream.paths().map(|path| path.display().to_string()).collect::<Vec<_>>();
    let values = [
        ("model", json_of(&config.model)),
        ("optimizer", json_of(&config.optimizer)),
        ("schedule", json_of(&config.schedule)),
        ("data.train", format!("{} tokens in {}", stream.len(), files.join(", "))),
        ("data.loader", json_of(&config.data.loader)),
        ("data.document_mask", config.data.document_mask.to_string()),
        ("tokenizer", tokenizer.to_owned()),
        ("train.iterations", run.iterations.to_string()),
        ("train.max_minutes", json_of(&run.max_minutes)),
        ("train.sequence_length", run.sequence_length.to_string()),
        ("train.batch_tokens", run.batch_tokens.to_string()),
        ("train.micro_batch_tokens", run.micro_batch_tokens.to_string()),
        ("train.phases", json_of(&run.phases)),
        ("train.ema_share", json_of(&run.ema_share)),
        ("train.seed", run.seed.to_string()),
    ];
    RunIdentity { values: values.map(|(name, value)| (name.to_owned(), value)).into() }
}

fn json_of<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn check_identity(
    config: &PretrainConfig,
    saved: &RunIdentity,
    new: &RunIdentity,
    policy: ResumePolicy,
    observer: &mut dyn PretrainObserver,
) -> Result<()> {
    let differences = saved.differences(new);
    if differences.is_empty() {
        return Ok(());
    }
    if matches!(policy, ResumePolicy::Force) {
        let text = format!("going on although {}", differences.join("; "));
        observer.on_event(PretrainEvent::Warning(&text));
        return Ok(());
    }
    Err(TrainError::OtherRun { path: config.output.clone(), differences })
}
