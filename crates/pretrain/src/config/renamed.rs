//! Keys that had other names in earlier versions: refused in files and arguments, by their new names,
//! and read in what earlier versions recorded.

use longdraft_models::language_model::{self, new_name, rename_keys};
use serde_json::{Map, Value};

/// Names of earlier versions, each with its name of this one.
type Names = &'static [(&'static str, &'static str)];

const SECTIONS: [(&str, Names); 4] = [
    ("data", &[("validation", "held_out")]),
    (
        "optimizer",
        &[
            ("matrix_lr", "matrix_learning_rate"),
            ("scalar_lr", "scalar_learning_rate"),
            ("token_lr", "token_learning_rate"),
            ("head_lr", "head_learning_rate"),
            ("adam_eps", "eps"),
        ],
    ),
    ("schedule", &[("floor", "floor_ratio")]),
    ("train", &[("iterations", "steps"), ("batch_tokens", "tokens_per_step")]),
];

/// Of the items of `train.phases`.
const PHASES: Names = &[("sequence_length", "row_tokens"), ("batch_tokens", "tokens_per_step")];

/// Where a dotted key of an earlier version stands now.
pub fn renamed(key: &str) -> Option<String> {
    let (section, name) = key.split_once('.')?;
    if (section, name) == ("train", "sequence_length") {
        return Some("data.row_tokens".to_owned());
    }
    if section == "model" {
        return language_model::renamed(name).map(|new| format!("model.{new}"));
    }
    if let Some((index, name)) =
        key.strip_prefix("train.phases.").and_then(|rest| rest.split_once('.'))
    {
        return new_name(PHASES, name).map(|new| format!("train.phases.{index}.{new}"));
    }
    let (_, names) = SECTIONS.iter().find(|(known, _)| *known == section)?;
    new_name(names, name).map(|new| format!("{section}.{new}"))
}

/// Brings what an earlier version recorded to the keys of this one; sections may be missing.
pub fn upgrade(record: &mut Map<String, Value>) {
    let run = section(record, "train");
    let row_tokens = run.and_then(|run| run.shift_remove("sequence_length"));
    if let (Some(row_tokens), Some(data)) = (row_tokens, section(record, "data")) {
        data.insert("row_tokens".to_owned(), row_tokens);
    }
    for (name, names) in SECTIONS {
        if let Some(section) = section(record, name) {
            rename_keys(section, names);
        }
    }
    let phases = record.get_mut("train").and_then(|run| run.get_mut("phases")?.as_array_mut());
    for phase in phases.into_iter().flatten().filter_map(Value::as_object_mut) {
        rename_keys(phase, PHASES);
    }
    if let Some(model) = section(record, "model") {
        language_model::upgrade(model);
    }
}

fn section<'a>(
    record: &'a mut Map<String, Value>,
    name: &str,
) -> Option<&'a mut Map<String, Value>> {
    record.get_mut(name)?.as_object_mut()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::PretrainConfig;

    /// A configuration of an earlier version.
    fn old() -> Value {
        json!({
            "output": "runs/x",
            "model": {"num_layers": 3, "num_heads": 4, "rope": {"base": 5e5}},
            "data": {"train": ["a.bin"], "validation": ["b.bin"], "tokenizer": "t"},
            "optimizer": {"matrix_lr": 0.02, "scalar_lr": 0.03, "token_lr": 0.04, "head_lr": 0.05,
                          "adam_eps": 1e-7, "clip_norm": 1.0},
            "schedule": {"kind": "fraction", "floor": 0.2},
            "train": {"iterations": 7, "sequence_length": 64, "batch_tokens": 640, "seed": 5,
                      "phases": [{"until": 0.5, "sequence_length": 32, "batch_tokens": 320}]},
        })
    }

    #[test]
    fn what_an_earlier_version_recorded_is_the_same_configuration() {
        let mut record = old();
        let map = record.as_object_mut().expect("a map");
        upgrade(map);
        let once = map.clone();
        upgrade(map);
        assert_eq!(*map, once);
        let config: PretrainConfig = serde_json::from_value(record).expect("a configuration");
        assert_eq!((config.model.num_hidden_layers, config.model.num_attention_heads), (3, 4));
        assert!((config.model.rope.rope_theta - 5e5).abs() < 1.0);
        assert_eq!((config.data.held_out.len(), config.data.row_tokens), (1, 64));
        let (run, phase) = (&config.train, &config.train.phases[0]);
        assert_eq!((run.steps, run.tokens_per_step, run.seed), (7, 640, 5));
        assert_eq!((phase.row_tokens, phase.tokens_per_step), (32, Some(320)));
        let rates = &config.optimizer;
        let got = json!([
            rates.matrix_learning_rate,
            rates.scalar_learning_rate,
            rates.token_learning_rate,
            rates.head_learning_rate,
            rates.eps,
            rates.clip_norm,
            config.schedule.floor_ratio,
        ]);
        assert_eq!(got, json!([0.02, 0.03, 0.04, 0.05, 1e-7, 1.0, 0.2]));
    }

    #[test]
    fn a_record_of_this_version_stays_as_it_is() {
        let keys = json!({"output": "runs/x", "data": {"train": ["a.bin"]}});
        let config: PretrainConfig = serde_json::from_value(keys).expect("a configuration");
        let mut record = json!(config);
        upgrade(record.as_object_mut().expect("a map"));
        assert_eq!(record, json!(config));
    }

    #[test]
    fn every_earlier_key_has_a_new_name_or_none() {
        for (old, new) in [
            ("train.sequence_length", "data.row_tokens"),
            ("train.iterations", "train.steps"),
            ("train.phases.1.batch_tokens", "train.phases.1.tokens_per_step"),
            ("data.validation", "data.held_out"),
            ("optimizer.adam_eps", "optimizer.eps"),
            ("schedule.floor", "schedule.floor_ratio"),
            ("model.num_kv_heads", "model.num_key_value_heads"),
            ("model.rope.base", "model.rope.rope_theta"),
        ] {
            assert_eq!(renamed(old).as_deref(), Some(new), "{old}");
        }
        for key in [
            "train.steps",
            "train.phases",
            "train.phases.0.until",
            "evaluation.batch_tokens",
            "train.micro_batch_tokens",
            "iterations",
            "optimizer.floor",
        ] {
            assert_eq!(renamed(key), None, "{key}");
        }
    }
}
