//! Keys of a configuration from a few answers.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use longdraft_configuration::{json_schema, schema_of};
use longdraft_models::target_model::Target;
use longdraft_models::{ModelError, TargetConfig};
use longdraft_pretrain::{PretrainConfig, Tokenizer};
use longdraft_train::config::TrainConfig;
use longdraft_train::method::{Method, Recipe, Room};
use serde_json::{Map, Value, json};

use super::questions::{Answers, DEMONSTRATION, SHIPPED};
use super::size;
use crate::cli::Purpose;
use crate::commands::quickstart::assets;
use crate::failure::{Failure, Result};
use crate::recording::quoted;

/// Tokens of a row, in short and in long stages, where the context has room for them.
const SHORT_ROWS: usize = 1024;
const LONG_ROWS: usize = 8192;
/// Passes over the data at most; the time may end before.
const EPOCHS: usize = 4;
/// Of a language model that is pretrained.
const VOCABULARY: usize = 2048;
const ROW_TOKENS: usize = 512;
/// Shards that `data pack` writes.
const SHARDS: [&str; 2] = ["train_*.bin", "val_*.bin"];
/// Of `data pack`: every so many documents one is held out; of the shipped text that is several rows.
const VALIDATION_EVERY: usize = 12;

/// A configuration that is not written yet.
pub(super) struct Made {
    pub(super) schema: Value,
    pub(super) keys: Map<String, Value>,
    purpose: Purpose,
    /// What has to be called before it runs.
    before: Vec<String>,
}

impl Made {
    pub(super) fn command(&self) -> &'static str {
        if self.purpose == Purpose::Pretrain { "lm train" } else { "train" }
    }

    /// How its keys are listed.
    pub(super) fn schema_option(&self) -> &'static str {
        if self.purpose == Purpose::Pretrain { " --pretrain" } else { "" }
    }

    /// Commands from here on.
    pub(super) fn next(&self, file: &Path) -> Vec<String> {
        let file = quoted(&file.display().to_string());
        let own = [
            format!("longdraft config check {file}"),
            format!("longdraft {} {file}", self.command()),
        ];
        self.before.iter().cloned().chain(own).collect()
    }
}

/// The command that `fit` is; the demonstration target is written for it.
pub(super) fn fit_command(answers: &Answers) -> Result<String> {
    let target = quoted(&target_of(answers)?);
    let prompts: Vec<&String> = answers.data.iter().filter(|path| *path != SHIPPED).collect();
    let prompts =
        prompts.first().map_or_else(String::new, |path| format!(" --prompts {}", quoted(path)));
    let output = quoted(&answers.output.display().to_string());
    let method = match answers.method.as_str() {
        "" => String::new(),
        name => format!(" --method {name}"),
    };
    let time = written_time(answers.time);
    Ok(format!("longdraft fit {target}{prompts}{method} --time {time} --output {output}"))
}

/// Seconds as options take them: `30m`, `1h30m`.
fn written_time(seconds: f64) -> String {
    if seconds.fract() != 0.0 {
        return format!("{seconds}s");
    }
    let mut left = seconds as u64;
    let mut written = String::new();
    for (unit, letter) in [(86_400, 'd'), (3600, 'h'), (60, 'm'), (1, 's')] {
        if left >= unit {
            // Writing to a string does not fail.
            let _ = write!(written, "{}{letter}", left / unit);
            left %= unit;
        }
    }
    written
}

/// The target's place; that of the demonstration is written there.
fn target_of(answers: &Answers) -> Result<String> {
    Ok(match answers.target.as_str() {
        DEMONSTRATION => assets::write_target(&answers.output)?.display().to_string(),
        other => other.to_owned(),
    })
}

/// The keys that follow from the answers; what the program carries is written beside the run.
pub(super) fn of(answers: &Answers) -> Result<Made> {
    match answers.purpose {
        Purpose::Pretrain => pretraining(answers),
        _ => training(answers),
    }
}

fn training(answers: &Answers) -> Result<Made> {
    let target = target_of(answers)?;
    let described = described(&target)?;
    let config = described.as_ref().map(|(config, _)| config);
    let context = config.map_or(SHORT_ROWS, |config| config.max_position_embeddings);
    let row_tokens = SHORT_ROWS.min(context);
    let recipe = config.and_then(|target| {
        let room = Room { target, seconds: answers.time, row_tokens };
        Method::named(&answers.method)?.fresh().recipe(&room)
    });
    let knows_turns = described.as_ref().is_none_or(|(_, knows_turns)| *knows_turns);
    let sources = sources(answers, knows_turns)?;
    let mut keys = common(answers, &target, recipe);
    if answers.purpose == Purpose::Long {
        let minutes = answers.time / 60.0;
        keys.insert(
            "train".into(),
            json!({
                "rows_per_step": 1, "epochs": EPOCHS, "features": "memory", "save_minutes": 2,
            }),
        );
        keys.insert("data".into(), json!({ "held_out_rows": 2 }));
        keys.insert("stages".into(), stages(&sources, (row_tokens, context), minutes));
    } else {
        keys.insert(
            "data".into(),
            json!({
                "train": sources.short, "held_out_rows": 2, "row_tokens": row_tokens,
            }),
        );
        keys.insert("train".into(), json!({
            "epochs": EPOCHS, "max_minutes": answers.time / 60.0, "rows_per_step": 1, "features": "memory",
            "save_minutes": 2, "evaluate_every": 50,
        }));
    }
    let schema =
        if answers.purpose == Purpose::Long { json_schema() } else { schema_of::<TrainConfig>() };
    Ok(Made { schema, keys, purpose: answers.purpose, before: Vec::new() })
}

/// What a target is, and whether it knows turns; nothing where a hub does not answer now.
fn described(target: &str) -> Result<Option<(TargetConfig, bool)>> {
    match Target::open_description(target) {
        Ok((config, tokenizer)) => Ok(Some((config, tokenizer.chat_template().is_some()))),
        Err(error @ ModelError::Hub { .. }) => {
            errln!("note: {error}; the draft's keys keep their defaults");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Keys of every training, as the method's recipe says.
fn common(answers: &Answers, target: &str, recipe: Option<Recipe>) -> Map<String, Value> {
    let mut draft = Map::from_iter([("method".to_owned(), json!(answers.method))]);
    let mut keys = Map::from_iter([
        ("target".to_owned(), json!(target)),
        ("output".to_owned(), json!(answers.output)),
    ]);
    if let Some(recipe) = recipe {
        draft.extend(recipe.draft);
        keys.insert("draft".into(), Value::Object(draft));
        if !recipe.teacher.is_empty() {
            keys.insert("teacher".into(), Value::Object(recipe.teacher));
        }
        keys.insert("schedule".into(), json!({ "learning_rate": recipe.learning_rate }));
    } else {
        keys.insert("draft".into(), Value::Object(draft));
    }
    keys
}

/// What is learned from, as `data.train` lists it.
#[derive(Default)]
struct Sources {
    short: Vec<Value>,
    /// Long texts, where there are some of their own.
    long: Vec<Value>,
}

fn sources(answers: &Answers, knows_turns: bool) -> Result<Sources> {
    let mut sources = Sources::default();
    for path in &answers.data {
        if path == SHIPPED {
            let folder = assets::write_corpus(&answers.output)?;
            let source = |name: &str| json!({ "path": folder.join(name) });
            let mut questions = source(assets::ANSWERS);
            if !knows_turns {
                // Without a chat template both are text.
                questions["template"] = json!({ "kind": "raw", "fields": ["question", "answer"] });
            }
            sources.short.extend([source(assets::BOOKS), questions]);
            sources.long.push(source(assets::LONG_BOOKS));
        } else {
            sources.short.push(json!({ "path": path }));
            sources.long.push(json!({ "path": path }));
        }
    }
    Ok(sources)
}

/// A stage of short rows and one of long ones, each with its part of the time.
fn stages(sources: &Sources, (short, context): (usize, usize), minutes: f64) -> Value {
    let stage = |name: &str, train: &[Value], row_tokens: usize| {
        json!({
            "name": name,
            "data": { "train": train, "row_tokens": row_tokens },
            "train": { "max_minutes": minutes / 2.0 },
        })
    };
    let long = LONG_ROWS.min(context);
    json!([stage("short", &sources.short, short), stage("long", &sources.long, long)])
}

fn pretraining(answers: &Answers) -> Result<Made> {
    let is_shard = |path: &String| {
        let path = Path::new(path);
        path.extension().is_some_and(|ending| ending == "bin")
            || (path.is_dir() && holds_shards(path))
    };
    let shards = answers.data.iter().filter(|path| is_shard(path)).count();
    let Text { data, vocabulary, before, tokens } = if shards == answers.data.len() {
        let tokenizer = answers.tokenizer.as_ref().ok_or_else(|| {
            Failure::usage("shards of tokens are named, but not their tokenizer")
                .hint("give --tokenizer: the folder or .model that `longdraft data pack` took")
        })?;
        let vocabulary = Tokenizer::open(tokenizer)?.vocabulary();
        let data = json!({
            "train": answers.data, "row_tokens": ROW_TOKENS, "tokenizer": tokenizer,
            "loader": "shuffled",
        });
        let tokens = size::tokens_of_shards(&answers.data)?;
        Text { data, vocabulary, before: Vec::new(), tokens }
    } else if shards > 0 {
        return Err(Failure::usage("text and shards of tokens are named together")
            .hint("give one of them: text is packed first"));
    } else {
        packed(answers)?
    };
    let model = size::sizes(size::choose(answers.size, tokens, vocabulary), vocabulary);
    let keys = json!({
        "output": answers.output,
        "model": {
            "architecture": model.architecture, "vocab_size": vocabulary,
            "num_hidden_layers": model.num_hidden_layers, "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "intermediate_size": model.intermediate_size,
            "rope": { "reference_length": ROW_TOKENS, "rule": "none" },
        },
        "data": data,
        "schedule": { "kind": "fraction", "decay_share": 0.6, "floor_ratio": 0.05 },
        "train": {
            "steps": 100_000, "max_minutes": answers.time / 60.0, "tokens_per_step": 4096,
            "micro_batch_tokens": 4096, "save_minutes": 2, "evaluate_every": 200,
        },
        "evaluation": { "window": ROW_TOKENS, "stride": ROW_TOKENS / 4 },
    });
    let keys = keys.as_object().cloned().unwrap_or_default();
    Ok(Made { schema: schema_of::<PretrainConfig>(), keys, purpose: answers.purpose, before })
}

fn holds_shards(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.path().extension().is_some_and(|ending| ending == "bin"))
}

/// What a language model learns from.
struct Text {
    /// Keys of `data`.
    data: Value,
    vocabulary: usize,
    /// Commands that make its shards.
    before: Vec<String>,
    /// Roughly, where it is not packed yet.
    tokens: u64,
}

/// Shards that are made of text beforehand.
fn packed(answers: &Answers) -> Result<Text> {
    let folder = answers.output.join("data");
    let mut texts = Vec::new();
    for path in &answers.data {
        if path == SHIPPED {
            texts.push(assets::write_corpus(&answers.output)?.join(assets::BOOKS));
        } else {
            texts.push(PathBuf::from(path));
        }
    }
    let tokens = size::tokens_of_text(&texts)?;
    let shown = |path: &Path| quoted(&path.display().to_string());
    let texts: Vec<String> = texts.iter().map(|path| shown(path)).collect();
    let (texts, place) = (texts.join(" "), shown(&folder));
    let mut before = Vec::new();
    let (tokenizer, vocabulary) = if let Some(tokenizer) = &answers.tokenizer {
        (tokenizer.clone(), Tokenizer::open(tokenizer)?.vocabulary())
    } else {
        before.push(format!(
            "longdraft data tokenizer {texts} --vocabulary {VOCABULARY} --output {place}"
        ));
        (folder.clone(), VOCABULARY)
    };
    before.push(format!(
        "longdraft data pack {texts} --tokenizer {} --output {place} --validation-every {VALIDATION_EVERY}",
        shown(&tokenizer)
    ));
    let [train, held_out] = SHARDS.map(|name| folder.join(name));
    let data = json!({
        "train": [train], "held_out": [held_out], "row_tokens": ROW_TOKENS, "tokenizer": tokenizer,
        "loader": "shuffled",
    });
    Ok(Text { data, vocabulary, before, tokens })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::parse_time;

    #[test]
    fn a_time_is_written_as_people_write_it() {
        for text in ["30m", "2h", "1h30m", "1d", "1d5s", "12.5s"] {
            assert_eq!(written_time(parse_time(text).expect("a time")), text);
        }
        assert_eq!(written_time(90.0), "1m30s");
    }
}
