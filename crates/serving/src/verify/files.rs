//! The folder itself: which files are there, whether they are whole, and nothing that runs.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use longdraft_models::draft::files::PTH_FILE;
use longdraft_models::weights::gguf::gguf_files;
use serde_json::Value;

use crate::checks::rules::Rule;
use crate::checks::{Checks, Effect, json, weights_file};
use crate::formats;
use crate::profile::Profile;

const NO_CONFIG: Rule =
    Rule::rejects("no-config", "the draft's keys", "there is no model in the folder");
const DUPLICATE_KEY: Rule =
    Rule::garbage("duplicate-key", "each key once", "the later one wins, silently");
const CONFIG_TABLE: Rule =
    Rule::rejects("config-json", "a table of keys", "the configuration is unreadable");
const NO_WEIGHTS: Rule =
    Rule::rejects("no-weights", "the draft's tensors", "there are no weights in the folder");
const WEIGHTS_FILE: Rule =
    Rule::rejects("weights-file", "a whole safetensors file", "the file cannot be opened");
const DUPLICATE_TENSOR: Rule =
    Rule::garbage("duplicate-tensor", "each tensor once", "whichever shard is read last wins");
const INDEX_TABLE: Rule = Rule::rejects("index", "a table of shards", "the shards cannot be found");
const DUPLICATE_ENTRY: Rule = Rule::garbage("index", "each tensor once", "the later entry wins");
const MISSING_SHARD: Rule =
    Rule::rejects("missing-shard", "every shard", "the file cannot be opened");
const STALE_ENTRY: Rule =
    Rule::rejects("stale-index", "an index made with these shards", "loading ends with a KeyError");
const UNLISTED: Rule =
    Rule::garbage("stale-index", "an index made with these shards", "some loaders skip it");
const ORPHAN: Rule =
    Rule::garbage("orphan-file", "one or the other", "which one is read depends on the loader");

const EXECUTABLE: Rule = Rule::rejects(
    "executable",
    "safetensors and JSON alone",
    "not read while safetensors are there",
)
.effect(Effect::Ignores)
.remedy("remove it before you share the folder");
const TRAVERSAL: Rule = Rule::rejects(
    "path-traversal",
    "a file of this folder",
    "some versions read files from outside of the folder",
)
.remedy("do not load this folder: its index points out of it");

/// Endings of files that are code, or run code when they are read.
const RUNS: [&str; 10] = ["bin", "pt", "pth", "ckpt", "pkl", "pickle", "py", "sh", "so", "exe"];

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// `config.json` as far as it can be read, for the choice of a profile.
pub(super) fn peek(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join(CONFIG)).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// What a folder without a manifest is for, by its files and keys.
pub(super) fn guess(path: &Path, config: &Value) -> Profile {
    let is_gguf = path.extension().is_some_and(|extension| extension == "gguf");
    if is_gguf || (config.is_null() && !gguf_files(path).is_empty()) {
        return Profile::Llamacpp;
    }
    formats::profile_of(config)
}

pub(super) fn check(checks: &mut Checks<'_>) {
    config(checks);
    executables(checks);
    weights(checks);
}

fn config(checks: &mut Checks<'_>) {
    let text = match std::fs::read_to_string(checks.folder.join(CONFIG)) {
        Ok(text) => text,
        Err(error) => return checks.broken(&NO_CONFIG, CONFIG, error.to_string()),
    };
    let Some(value) = table(checks, CONFIG, &text, [&CONFIG_TABLE, &DUPLICATE_KEY]) else { return };
    if !value.is_object() {
        checks.broken(&CONFIG_TABLE, CONFIG, "no table");
    }
    checks.config = value;
}

/// A file's JSON, under the rules that it is some and that no key is there twice.
fn table(
    checks: &mut Checks<'_>,
    name: &str,
    text: &str,
    [is_json, once]: [&Rule; 2],
) -> Option<Value> {
    match json::parse(text) {
        Ok((value, twice)) => {
            checks.each(once, name, twice.iter().map(|key| format!("`{key}` is there twice")));
            Some(value)
        }
        Err(error) => {
            checks.broken(is_json, name, format!("no JSON: {error}"));
            None
        }
    }
}

fn executables(checks: &mut Checks<'_>) {
    let Ok(entries) = std::fs::read_dir(&checks.folder) else { return };
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    names.sort();
    for name in names {
        let extension = Path::new(&name).extension().and_then(|extension| extension.to_str());
        let is_published = name == PTH_FILE && checks.profile == Profile::Longspec;
        // Some file systems, and some loaders, do not tell cases apart.
        let runs = |extension: &str| RUNS.iter().any(|name| extension.eq_ignore_ascii_case(name));
        if extension.is_some_and(runs) && !is_published {
            let found = "a file that is code, or runs code when it is read";
            checks.broken(&EXECUTABLE, name, found);
        }
    }
}

fn weights(checks: &mut Checks<'_>) {
    let (single, index) = (checks.folder.join(WEIGHTS), checks.folder.join(INDEX));
    if index.is_file() {
        shards(checks, &index);
    } else if single.is_file() {
        add(checks, WEIGHTS);
    } else {
        checks.broken(&NO_WEIGHTS, WEIGHTS, "missing");
    }
}

/// Adds a file's tensors; returns their names.
fn add(checks: &mut Checks<'_>, name: &str) -> Vec<String> {
    let (tensors, faults) = weights_file::read(&checks.folder.join(name));
    checks.each(&WEIGHTS_FILE, name, faults);
    let mut names = Vec::new();
    for tensor in tensors {
        names.push(tensor.name.clone());
        if let Some(other) = checks.tensors.insert(tensor.name.clone(), tensor) {
            let found = format!("tensor `{}` is in another shard, too", other.name);
            checks.broken(&DUPLICATE_TENSOR, name, found);
        }
    }
    names
}

fn shards(checks: &mut Checks<'_>, index: &Path) {
    let text = std::fs::read_to_string(index).unwrap_or_default();
    let rules = [&INDEX_TABLE, &DUPLICATE_ENTRY];
    let Some(value) = table(checks, INDEX, &text, rules) else { return };
    let Some(map) = value["weight_map"].as_object() else {
        return checks.broken(&INDEX_TABLE, INDEX, "no `weight_map`");
    };
    let mut files: Vec<&str> = map.values().filter_map(Value::as_str).collect();
    files.sort_unstable();
    files.dedup();
    let mut found = BTreeSet::new();
    for file in &files {
        found.extend(shard(checks, file).into_iter().map(|name| (*file, name)));
    }
    compare(checks, map, &found);
    if checks.folder.join(WEIGHTS).is_file() && !files.contains(&WEIGHTS) {
        checks.broken(&ORPHAN, WEIGHTS, "there beside an index that does not list it");
    }
}

/// Adds a shard's tensors if it is a file of this folder; returns their names.
fn shard(checks: &mut Checks<'_>, file: &str) -> Vec<String> {
    let mut parts = Path::new(file).components();
    let plain = matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none();
    if !plain {
        checks.broken(&TRAVERSAL, INDEX, format!("shard `{file}`"));
    } else if checks.folder.join(file).is_file() {
        return add(checks, file);
    } else {
        checks.broken(&MISSING_SHARD, INDEX, format!("shard `{file}` is not there"));
    }
    Vec::new()
}

/// Holds the index against the tensors that are in the shards.
fn compare(
    checks: &mut Checks<'_>,
    map: &serde_json::Map<String, Value>,
    found: &BTreeSet<(&str, String)>,
) {
    for (name, file) in map {
        let file = file.as_str().unwrap_or_default();
        let here = found.contains(&(file, name.clone()));
        if !here && checks.folder.join(file).is_file() {
            checks.broken(&STALE_ENTRY, INDEX, format!("tensor `{name}` is not in `{file}`"));
        }
    }
    for (file, name) in found {
        if !map.contains_key(name) {
            checks.broken(&UNLISTED, INDEX, format!("tensor `{name}` of `{file}` is not listed"));
        }
    }
}
