//! What a resumed run must share with the saved one, and ranks with each other.

use candle_core::Device;
use longdraft_data::token_stream::TokenStream;
use longdraft_train::checkpoint::RunIdentity;
use serde_json::{Map, Value, json};

use crate::config::{PretrainConfig, renamed, upgrade};

/// Names of a run's length in its identity.
pub(super) const STEPS: &str = "train.steps";
pub(super) const MAX_MINUTES: &str = "train.max_minutes";
/// Name of the type that products take. Earlier versions did not note it.
const PRECISION: &str = "precision";

/// Everything that decides the weights.
pub(super) fn identity(
    config: &PretrainConfig,
    stream: &TokenStream,
    (tokenizer, device): (&str, &Device),
) -> RunIdentity {
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
        (PRECISION, config.precision.frozen_type(!device.is_cpu()).as_str().to_owned()),
    ];
    RunIdentity { values: values.map(|(name, value)| (name.to_owned(), value)).into() }
}

/// What ranks have to share: what decides the weights, and when ranks save, score and exchange. Each machine may have a
/// configuration file of its own.
pub(super) fn among_ranks(identity: &RunIdentity, config: &PretrainConfig) -> RunIdentity {
    let run = &config.train;
    let values = [
        ("train.save_every", run.save_every.to_string()),
        ("train.save_minutes", run.save_minutes.to_string()),
        ("train.evaluate_every", run.evaluate_every.to_string()),
        ("held-out stream", config.is_scored().to_string()),
        ("parallel", json_of(&config.parallel)),
    ];
    let mut all = identity.clone();
    all.values.extend(values.map(|(name, value)| (name.to_owned(), value)));
    all
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

#[cfg(test)]
mod tests {
    use longdraft_data::token_stream::write_shard;
    use longdraft_models::Precision;

    use super::*;

    fn config(train: &Value) -> PretrainConfig {
        let keys = json!({ "output": "runs/x", "data": { "train": ["a.bin"] }, "train": train });
        serde_json::from_value(keys).expect("a configuration")
    }

    #[test]
    fn ranks_that_would_save_or_score_at_other_steps_are_told_apart() {
        let nothing = RunIdentity { values: Vec::new() };
        let of = |train: Value| among_ranks(&nothing, &config(&train));
        let one = of(json!({ "save_every": 5 }));
        assert_eq!(one.differences(&of(json!({ "save_every": 5, "log_every": 3 }))), [""; 0]);
        for (other, told) in [
            (json!({ "save_every": 6 }), "train.save_every was 5, now 6"),
            (json!({ "save_every": 5, "evaluate_every": 7 }), "train.evaluate_every was 1000, now 7"),
        ] {
            assert_eq!(one.differences(&of(other)), [told]);
        }
        let mut scored = config(&json!({ "save_every": 5 }));
        scored.data.held_out.push("b.bin".into());
        scored.data.tokenizer = Some("t".into());
        let told = one.differences(&among_ranks(&nothing, &scored));
        assert_eq!(told, ["held-out stream was false, now true"]);
    }

    #[test]
    fn products_of_another_type_are_another_run() {
        let dir = tempfile::tempdir().expect("a folder");
        let shard = dir.path().join("a.bin");
        write_shard(&shard, &[1, 2, 3]).expect("a shard");
        let stream = TokenStream::open(&[shard]).expect("a stream");
        let of = |precision: Precision| {
            let config = PretrainConfig { precision, ..config(&json!({})) };
            identity(&config, &stream, ("", &Device::Cpu))
        };
        let mut saved = of(Precision::Auto);
        assert_eq!(saved.differences(&of(Precision::F32)), [""; 0]);
        assert_eq!(saved.differences(&of(Precision::Bf16)), ["precision was f32, now bf16"]);
        // Earlier versions did not note it.
        saved.values.retain(|(name, _)| name != PRECISION);
        assert_eq!(saved.differences(&of(Precision::Bf16)), [""; 0]);
    }

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
