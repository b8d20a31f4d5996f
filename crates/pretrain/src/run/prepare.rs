//! From a configuration to a run, fresh or resumed.

use candle_core::Device;
use longdraft_data::token_stream::{TokenStream, overlap};
use longdraft_models::language_model::LanguageModel;
use longdraft_parallel::{DataParallel, World};
use longdraft_rules::Checked;
use longdraft_tracking::{MetricsLog, Trackers};
use longdraft_train::checkpoint::{
    Checkpointer, ResumePolicy, RunIdentity, RunLock, SaveClock, require_same_run,
};
use serde_json::{Map, Value, json};

use super::{Layouts, Pretraining};
use crate::checkpoint::{self, Average, Progress};
use crate::config::{PretrainConfig, renamed, upgrade};
use crate::error::Result;
use crate::muon::Muon;
use crate::observer::{PretrainEvent, PretrainObserver};
use crate::score::{ScoredStream, Tokenizer};

/// Names of a run's length in its identity.
pub(super) const STEPS: &str = "train.steps";
const MAX_MINUTES: &str = "train.max_minutes";

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
        let identity = identity(&config, &stream, &tokenizer_hash);
        identity.require_agreement(world)?;
        let checkpointer = Checkpointer::new(config.output.join("checkpoints"), world);
        checkpointer.clean();
        let device = config.device.open(world.local_rank())?;
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
            let before = upgraded(&saved.state.identity);
            progress = saved.state.progress;
            check_identity(&config, (&before, &identity), policy, &mut progress, observer)?;
            saved.restore(parameters, &mut average)?;
            let state = saved.optimizer(&parallel, parameters)?;
            optimizer = Muon::with_state(config.optimizer.clone(), &parallel, parameters, state)?;
            metrics_bytes = saved.state.metrics_bytes;
            observer.on_event(PretrainEvent::Resumed(progress.step));
        }
        let log = MetricsLog::open(
            &config.output.join("metrics.jsonl"),
            metrics_bytes,
            world.is_first(),
        )?;
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
        (STEPS, run.steps.to_string()),
        (MAX_MINUTES, json_of(&run.max_minutes)),
        ("data.row_tokens", config.data.row_tokens.to_string()),
        ("train.tokens_per_step", run.tokens_per_step.to_string()),
        ("train.micro_batch_tokens", run.micro_batch_tokens.to_string()),
        ("train.phases", json_of(&run.phases)),
        ("train.ema_share", json_of(&run.ema_share)),
        ("train.seed", run.seed.to_string()),
    ];
    RunIdentity { values: values.map(|(name, value)| (name.to_owned(), value)).into() }
}

/// What an earlier version saved, under the keys of this one.
pub(super) fn upgraded(saved: &RunIdentity) -> RunIdentity {
    let values = saved.values.iter().map(|(name, text)| {
        let new = renamed(name).unwrap_or_else(|| name.clone());
        (new, upgraded_text(name, text).unwrap_or_else(|| text.clone()))
    });
    RunIdentity { values: values.collect() }
}

/// The JSON of a section, or of a list in one, with the names of this version.
fn upgraded_text(name: &str, text: &str) -> Option<String> {
    let value: Value = serde_json::from_str(text).ok()?;
    if !value.is_object() && !value.is_array() {
        return None;
    }
    let (section, key) = name.split_once('.').unwrap_or((name, ""));
    let within = if key.is_empty() { value } else { json!({ key: value }) };
    let mut record = Map::from_iter([(section.to_owned(), within)]);
    upgrade(&mut record);
    let section = record.get(section)?;
    let value = if key.is_empty() { section } else { section.get(key)? };
    Some(value.to_string())
}

fn json_of<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
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
    let time_is_up =
        run.max_minutes.is_some_and(|minutes| progress.elapsed_ms >= 60_000.0 * minutes);
    if time_is_up || progress.step >= run.steps {
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
    use super::*;

    #[test]
    fn the_identity_that_an_earlier_version_saved_is_that_of_the_same_run() {
        let keys = json!({
            "output": "runs/x", "data": {"train": ["a.bin"], "row_tokens": 64},
            "train": {"steps": 7, "tokens_per_step": 640,
                      "phases": [{"until": 0.5, "row_tokens": 32, "tokens_per_step": null}]},
        });
        let config: PretrainConfig = serde_json::from_value(keys).expect("a configuration");
        let of = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        let old = [
            ("model", json_of(&config.model)),
            ("optimizer", json_of(&config.optimizer)),
            ("schedule", json_of(&config.schedule)),
            ("train.phases", json_of(&config.train.phases)),
        ];
        let old_names = [
            ("num_hidden_layers", "num_layers"),
            ("hidden_size", "model_dim"),
            ("num_attention_heads", "num_heads"),
            ("num_key_value_heads", "num_kv_heads"),
            ("intermediate_size", "mlp_dim"),
            ("tie_word_embeddings", "tie_embeddings"),
            ("final_logit_softcapping", "logit_softcap"),
            ("rope_theta", "base"),
            ("matrix_learning_rate", "matrix_lr"),
            ("scalar_learning_rate", "scalar_lr"),
            ("token_learning_rate", "token_lr"),
            ("head_learning_rate", "head_lr"),
            ("eps", "adam_eps"),
            ("floor_ratio", "floor"),
            ("row_tokens", "sequence_length"),
            ("tokens_per_step", "batch_tokens"),
        ];
        let mut values: Vec<(String, String)> = Vec::new();
        for (name, text) in &old {
            let text = old_names.iter().fold(text.clone(), |text, (new, old)| {
                text.replace(&format!("\"{new}\":"), &format!("\"{old}\":"))
            });
            values.push(((*name).to_owned(), text));
        }
        let saved = RunIdentity { values };
        assert_ne!(saved.value("model"), Some(old[0].1.as_str()));
        let mut saved = upgraded(&saved);
        for (name, text) in &old {
            assert_eq!(saved.value(name), Some(text.as_str()), "{name}");
        }
        saved.values = vec![
            of("train.iterations", "7"),
            of("train.sequence_length", "64"),
            of("train.batch_tokens", "640"),
            of("data.train", "4000 tokens in a.bin"),
            of("tokenizer", ""),
        ];
        let upgraded = upgraded(&saved);
        for (name, text) in [
            (STEPS, "7"),
            ("data.row_tokens", "64"),
            ("train.tokens_per_step", "640"),
            ("data.train", "4000 tokens in a.bin"),
            ("tokenizer", ""),
        ] {
            assert_eq!(upgraded.value(name), Some(text), "{name}");
        }
    }
}
