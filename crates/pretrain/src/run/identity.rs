//! What a resumed run must share with the saved one, and ranks with each other.

use candle_core::Device;
use longdraft_data::token_stream::TokenStream;
use longdraft_train::checkpoint::RunIdentity;

use crate::config::PretrainConfig;

/// Names of a run's length in its identity.
pub(super) const STEPS: &str = "train.steps";
pub(super) const MAX_MINUTES: &str = "train.max_minutes";

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
        ("precision", config.precision.frozen_type(!device.is_cpu()).as_str().to_owned()),
        ("products", config.products.on(device).to_owned()),
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

fn json_of<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use longdraft_data::token_stream::write_shard;
    use longdraft_models::Precision;
    use serde_json::{Value, json};

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
            (
                json!({ "save_every": 5, "evaluate_every": 7 }),
                "train.evaluate_every was 1000, now 7",
            ),
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
        let saved = of(Precision::Auto);
        assert_eq!(saved.differences(&of(Precision::F32)), [""; 0]);
        assert_eq!(saved.differences(&of(Precision::Bf16)), ["precision was f32, now bf16"]);
    }
}
