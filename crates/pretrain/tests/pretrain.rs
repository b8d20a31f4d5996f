//! Pretraining end to end: it learns, and a stopped run ends with the same bytes.

use std::path::Path;

use longdraft_data::token_stream::write_shard;
use longdraft_models::draft::Parameter;
use longdraft_models::language_model::{LanguageModel, open};
use longdraft_parallel::World;
use longdraft_pretrain::{
    PretrainConfig, PretrainEvent, PretrainStep, Pretraining, ScoredStream, build_artifact,
};
use longdraft_rules::Checked;
use longdraft_train::stage::{Ending, Observer, ResumePolicy};
use serde_json::json;

/// Stops after some steps.
struct Until(u64, Vec<f64>, Vec<String>);

impl Observer<PretrainStep, f64> for Until {
    fn on_event(&mut self, event: PretrainEvent<'_>) {
        match event {
            PretrainEvent::Step(report) => self.1.push(report.loss),
            PretrainEvent::Warning(text) => self.2.push(text.to_owned()),
            _ => {}
        }
    }

    fn should_stop(&self) -> bool {
        self.1.len() as u64 >= self.0
    }
}

fn config(folder: &Path, name: &str, more: &serde_json::Value) -> PretrainConfig {
    let shard = folder.join("train.bin");
    if !shard.is_file() {
        let pattern: Vec<u16> = (0..4000).map(|i: u16| (i % 13) * (i % 7) % 29 + 1).collect();
        write_shard(&shard, &pattern).expect("shard");
    }
    let mut value = json!({
        "output": folder.join(name),
        "model": {"vocab_size": 96, "num_hidden_layers": 3, "hidden_size": 16,
                  "num_attention_heads": 2, "num_key_value_heads": 1, "rope": {"reference_length": 16}},
        "data": {"train": [shard], "row_tokens": 16},
        "optimizer": {"momentum_warmup_steps": 4, "clip_norm": 0.3},
        "schedule": {"warmdown_steps": 3},
        "train": {"steps": 8, "tokens_per_step": 64, "micro_batch_tokens": 32, "save_every": 2},
        "artifact": {"quantise": {"keep_max_elements": 64}},
        "tracking": {"report_to": []}
    });
    for (section, keys) in more.as_object().expect("sections") {
        for (key, own) in keys.as_object().expect("keys") {
            value[section][key] = own.clone();
        }
    }
    let config: PretrainConfig = serde_json::from_value(value).expect("a configuration");
    config
}

fn prepare(
    config: PretrainConfig,
    policy: ResumePolicy,
    observer: &mut Until,
) -> longdraft_pretrain::Result<Pretraining> {
    let config = Checked::new(config).expect("a configuration that breaks no rule");
    Pretraining::prepare(config, policy, &World::single(), observer)
}

fn train(config: PretrainConfig, until: u64) -> (Ending, Vec<f64>, Vec<u8>) {
    let mut observer = Until(until, Vec::new(), Vec::new());
    let artifact = config.output.join("model.ldq");
    let precision = config.artifact.clone();
    let mut run = prepare(config, ResumePolicy::Strict, &mut observer).expect("prepared");
    let ending = run.run(&mut observer).expect("trained");
    let model = run.final_model().expect("model");
    build_artifact(&model, "", &precision, &artifact).expect("artifact");
    (ending, observer.1, std::fs::read(artifact).expect("artifact"))
}

#[test]
fn a_stopped_run_ends_with_the_bytes_of_the_whole_one() {
    let dir = tempfile::tempdir().expect("tempdir");
    let variants = [
        json!({}),
        json!({"data": {"loader": "shuffled", "document_mask": true},
               "optimizer": {"orthogonalisation": "polar5", "weight_decay": 0.1},
               "model": {"tie_word_embeddings": false},
               "schedule": {"kind": "fraction"},
               "train": {"ema_share": 0.4,
                         "phases": [{"until": 0.5, "row_tokens": 8, "tokens_per_step": 32}]}}),
    ];
    for (index, variant) in variants.into_iter().enumerate() {
        let of = |name: &str| config(dir.path(), &format!("{name}{index}"), &variant);
        let (ending, losses, whole) = train(of("whole"), 99);
        assert_eq!((ending, losses.len()), (Ending::Finished, 8));
        let cut = of("cut");
        let (ending, first, _) = train(cut.clone(), 3);
        assert_eq!((ending, first.len()), (Ending::Stopped, 3));
        // What a kill leaves: half a line of metrics.
        let metrics = cut.output.join("metrics.jsonl");
        let text = std::fs::read_to_string(&metrics).expect("metrics");
        std::fs::write(&metrics, format!("{text}{{\"step\":4,\"lo")).expect("write");
        let (ending, rest, resumed) = train(cut.clone(), 99);
        assert_eq!((ending, rest.len()), (Ending::Finished, 5));
        assert_eq!([first, rest].concat(), losses, "variant {index}");
        assert_eq!(resumed, whole, "variant {index}");
        let text = std::fs::read_to_string(&metrics).expect("metrics");
        let steps: Vec<u64> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("whole lines"))
            .filter_map(|record| record["step"].as_u64())
            .collect();
        assert!(steps.into_iter().eq(1..=8));
    }
}

#[test]
fn it_learns_and_the_artifact_scores_close_to_the_weights() {
    let dir = tempfile::tempdir().expect("tempdir");
    let config = config(dir.path(), "run", &json!({"train": {"steps": 40}}));
    let output = config.output.clone();
    let (_, losses, _) = train(config, 999);
    assert!(losses[39] < losses[0] - 0.8, "{losses:?}");
    let live = open(&output).expect("checkpoint").0.frozen().expect("frozen");
    let read = open(&output.join("model.ldq")).expect("artifact").0.frozen().expect("frozen");
    let tokens: Vec<u32> = (0..400).map(|i: u32| (i % 13) * (i % 7) % 29 + 1).collect();
    let stream = ScoredStream::of(tokens, vec![1; 399]);
    let score = |model| stream.score_plain(model, 16, 64).expect("score").bits_per_byte();
    assert!((score(&live) - score(&read)).abs() < 0.05 && score(&live) < 5.0);
}

#[test]
fn an_average_that_begins_late_begins_with_the_trained_weights() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut run = config(dir.path(), "run", &json!({}));
    train(run.clone(), 99);
    run.train.ema_share = Some(0.4);
    let trained = open(&run.output).expect("checkpoint").0;
    let mut observer = Until(99, Vec::new(), Vec::new());
    let forced = prepare(run, ResumePolicy::Force, &mut observer).expect("forced");
    assert!(forced.is_finished());
    let values = |model: &LanguageModel| -> Vec<Vec<f32>> {
        let of = |p: &Parameter| p.var.flatten_all().and_then(|t| t.to_vec1()).expect("values");
        model.parameters().iter().map(of).collect()
    };
    assert!(values(&forced.final_model().expect("model")) == values(&trained));
}

/// The order of what is told of a tracker and of saves.
#[derive(Default)]
struct Order(Vec<&'static str>);

impl Observer<PretrainStep, f64> for Order {
    fn on_event(&mut self, event: PretrainEvent<'_>) {
        match event {
            PretrainEvent::Warning(text) if text.contains("SwanLab") => self.0.push("warned"),
            PretrainEvent::Saved(_) => self.0.push("saved"),
            _ => {}
        }
    }
}

#[test]
fn a_tracker_that_cannot_be_opened_is_told_before_the_first_save() {
    let dir = tempfile::tempdir().expect("tempdir");
    let run = config(dir.path(), "run", &json!({"tracking": {"report_to": ["swanlab"]}}));
    let folder = run.output.join("swanlog");
    let mut observer = Until(99, Vec::new(), Vec::new());
    let mut run = prepare(run, ResumePolicy::Strict, &mut observer).expect("prepared");
    // A file stands where its folder would be.
    std::fs::write(folder, "").expect("a file");
    let mut told = Order::default();
    run.run(&mut told).expect("trained");
    assert_eq!(told.0[..2], ["warned", "saved"]);
    assert_eq!(told.0.iter().filter(|what| **what == "warned").count(), 1);
}

#[test]
fn another_configuration_and_damage_are_refused() {
    let dir = tempfile::tempdir().expect("tempdir");
    let run = config(dir.path(), "run", &json!({}));
    train(run.clone(), 3);
    let mut observer = Until(9, Vec::new(), Vec::new());
    let mut other = run.clone();
    other.optimizer.matrix_learning_rate = 0.01;
    let error = prepare(other.clone(), ResumePolicy::Strict, &mut observer);
    let message = error.err().expect("refused").to_string();
    assert!(message.contains("optimizer.matrix_learning_rate was 0.04, now 0.01"), "{message}");
    prepare(other, ResumePolicy::Force, &mut observer).expect("forced");
    let weights = run.output.join("checkpoints/last/model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    *bytes.last_mut().expect("bytes") ^= 1;
    std::fs::write(&weights, bytes).expect("write");
    let mut observer = Until(9, Vec::new(), Vec::new());
    let resumed = prepare(run, ResumePolicy::Strict, &mut observer).expect("last_2");
    assert_eq!(resumed.totals().0, 2);
    assert!(observer.2[0].contains("model.safetensors"), "{:?}", observer.2);
}
