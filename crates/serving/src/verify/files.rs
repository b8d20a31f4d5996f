//! The folder itself: which files are there, whether they are whole, and nothing that runs.

use std::path::{Component, Path};

use serde_json::Value;

use crate::checks::{Checks, Effect, Problem, Severity, json, weights_file};
use crate::formats;
use crate::profile::Profile;

/// Endings of files that are code, or run code when they are read.
const RUNS: [&str; 9] = ["bin", "pt", "pth", "pkl", "pickle", "py", "sh", "so", "exe"];

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// `config.json` as far as it can be read, for the choice of a profile.
pub(super) fn peek(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// What a folder without a manifest is for, by its files and keys.
pub(super) fn guess(path: &Path, config: &Value) -> Profile {
    let is_gguf = |path: &Path| path.extension().is_some_and(|extension| extension == "gguf");
    let holds_gguf = std::fs::read_dir(path).is_ok_and(|mut entries| {
        entries.any(|entry| entry.is_ok_and(|entry| is_gguf(&entry.path())))
    });
    if is_gguf(path) || (holds_gguf && config.is_null()) {
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
    let path = checks.folder.join("config.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            let found = error.to_string();
            checks.error(
                "no-config",
                "config.json",
                found,
                "the draft's keys",
                Effect::Rejects,
                "there is no model in the folder",
            );
            return;
        }
    };
    match json::parse(&text) {
        Ok((value, twice)) => {
            for key in twice {
                let found = format!("`{key}` is there twice");
                checks.error(
                    "duplicate-key",
                    "config.json",
                    found,
                    "each key once",
                    Effect::Garbage,
                    "the later one wins, silently",
                );
            }
            if !value.is_object() {
                checks.error(
                    "config-json",
                    "config.json",
                    "no table",
                    "a table of keys",
                    Effect::Rejects,
                    "the configuration is unreadable",
                );
            }
            checks.config = value;
        }
        Err(error) => {
            let found = format!("no JSON: {error}");
            checks.error(
                "config-json",
                "config.json",
                found,
                "a table of keys",
                Effect::Rejects,
                "the configuration is unreadable",
            );
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
        let published =
            name == longdraft_models::draft::files::PTH_FILE && checks.profile == Profile::Longspec;
        if extension.is_some_and(|extension| RUNS.contains(&extension)) && !published {
            let problem = Problem::new(
                Severity::Error,
                "executable",
                name.clone(),
                "a file that is code, or runs code when it is read",
                "safetensors and JSON alone",
            );
            checks.push(
                problem
                    .effect_on(
                        checks.profile,
                        Effect::Ignores,
                        "not read while safetensors are there",
                    )
                    .remedy(format!("remove {name} before you share the folder")),
            );
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
        checks.error(
            "no-weights",
            WEIGHTS,
            "missing",
            "the draft's tensors",
            Effect::Rejects,
            "there are no weights in the folder",
        );
    }
}

/// Adds a file's tensors; returns their names.
fn add(checks: &mut Checks<'_>, name: &str) -> Vec<String> {
    let (tensors, faults) = weights_file::read(&checks.folder.join(name));
    for fault in faults {
        checks.error(
            "weights-file",
            name,
            fault,
            "a whole safetensors file",
            Effect::Rejects,
            "the file cannot be opened",
        );
    }
    let mut names = Vec::new();
    for tensor in tensors {
        names.push(tensor.name.clone());
        if let Some(other) = checks.tensors.insert(tensor.name.clone(), tensor) {
            let found = format!("tensor `{}` is in another shard, too", other.name);
            checks.error(
                "duplicate-tensor",
                name,
                found,
                "each tensor once",
                Effect::Garbage,
                "whichever shard is read last wins",
            );
        }
    }
    names
}

fn shards(checks: &mut Checks<'_>, index: &Path) {
    let text = std::fs::read_to_string(index).unwrap_or_default();
    let (value, twice) = match json::parse(&text) {
        Ok(parsed) => parsed,
        Err(error) => {
            let found = format!("no JSON: {error}");
            checks.error(
                "index",
                INDEX,
                found,
                "a table of shards",
                Effect::Rejects,
                "the shards cannot be found",
            );
            return;
        }
    };
    for key in twice {
        checks.error(
            "index",
            INDEX,
            format!("`{key}` is there twice"),
            "each tensor once",
            Effect::Garbage,
            "the later entry wins",
        );
    }
    let Some(map) = value["weight_map"].as_object() else {
        checks.error(
            "index",
            INDEX,
            "no `weight_map`",
            "a table of shards",
            Effect::Rejects,
            "the shards cannot be found",
        );
        return;
    };
    let mut files: Vec<&str> = map.values().filter_map(Value::as_str).collect();
    files.sort_unstable();
    files.dedup();
    let mut found = Vec::new();
    for file in &files {
        let mut parts = Path::new(file).components();
        let plain = matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none();
        if !plain {
            let problem = Problem::new(
                Severity::Error,
                "path-traversal",
                INDEX,
                format!("shard `{file}`"),
                "a file of this folder",
            );
            checks.push(
                problem
                    .effect_on(
                        checks.profile,
                        Effect::Rejects,
                        "some versions read files from outside of the folder",
                    )
                    .remedy("do not load this folder: its index points out of it"),
            );
        } else if checks.folder.join(file).is_file() {
            found.extend(add(checks, file).into_iter().map(|name| (name, (*file).to_owned())));
        } else {
            checks.error(
                "missing-shard",
                INDEX,
                format!("shard `{file}` is not there"),
                "every shard",
                Effect::Rejects,
                "the file cannot be opened",
            );
        }
    }
    for (name, file) in map {
        let file = file.as_str().unwrap_or_default();
        let here = found.iter().any(|(known, at)| known == name && at == file);
        if !here && checks.folder.join(file).is_file() {
            checks.error(
                "stale-index",
                INDEX,
                format!("tensor `{name}` is not in `{file}`"),
                "an index made with these shards",
                Effect::Rejects,
                "loading ends with a KeyError",
            );
        }
    }
    for (name, file) in &found {
        if !map.contains_key(name) {
            checks.error(
                "stale-index",
                INDEX,
                format!("tensor `{name}` of `{file}` is not listed"),
                "an index made with these shards",
                Effect::Garbage,
                "some loaders skip it",
            );
        }
    }
    if checks.folder.join(WEIGHTS).is_file() && !files.contains(&WEIGHTS) {
        checks.error(
            "orphan-file",
            WEIGHTS,
            "there beside an index that does not list it",
            "one or the other",
            Effect::Garbage,
            "which one is read depends on the loader",
        );
    }
}
