//! Every key, option and command that a text of the program names exists.
//!
//! Texts are the string literals and doc comments of all crates, but for tests. A hint that sends a
//! user to a key that is then refused is worse than none.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use longdraft_configuration::{schema_of, schema_places};
use longdraft_pretrain::PretrainConfig;
use longdraft_train::config::TrainConfig;
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use serde_json::Value;

use crate::cli::Cli;

/// Endings that make a dotted word a file's name.
const FILES: [&str; 17] = [
    "yaml",
    "json",
    "jsonl",
    "bin",
    "safetensors",
    "gguf",
    "ldq",
    "txt",
    "html",
    "py",
    "rs",
    "pth",
    "ckpt",
    "toml",
    "md",
    "model",
    "pkl",
];

/// Tensors of targets, whose names begin like keys.
const TENSORS: [&str; 9] = [
    "model.layers",
    "model.embed_tokens",
    "model.embedding_norm",
    "model.per_layer_",
    "model.norm",
    "model.language_model",
    "teacher.loss_mask",
    "teacher.position_mask",
    "teacher.target_token_ids",
];

/// Programs whose command lines texts hold.
const PROGRAMS: [&str; 7] = [
    "cargo ",
    "docker run ",
    "vllm serve ",
    "sglang.launch_server ",
    "llama-server ",
    "convert_hf_to_gguf.py ",
    "wandb sync ",
];

/// Options that the program gives to others (nvcc, nvidia-smi, pip, swanlab).
const FOREIGN: [&str; 14] = [
    "features",
    "gpu-architecture",
    "query-gpu",
    "id",
    "quiet",
    "disable-pip-version-check",
    "no-input",
    "no-deps",
    "only-binary",
    "dest",
    "spec-draft-p-min",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
    "speculative-num-steps",
];

/// What exists.
struct Known {
    sections: BTreeSet<String>,
    keys: BTreeSet<String>,
    options: BTreeSet<String>,
    /// Commands with the names below them.
    commands: Vec<(String, Vec<String>)>,
}

impl Known {
    fn of_the_program() -> Self {
        let mut keys = BTreeSet::new();
        for schema in [schema_of::<TrainConfig>(), schema_of::<PretrainConfig>()] {
            collect_keys(&schema, &schema, "", &mut keys);
        }
        let sections =
            keys.iter().filter_map(|key| Some(key.split_once('.')?.0.to_owned())).collect();
        let mut options = BTreeSet::from(["help".to_owned(), "version".to_owned()]);
        let program = Cli::command();
        collect_options(&program, &mut options);
        let below = |command: &clap::Command| -> Vec<String> {
            command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect()
        };
        let commands = program
            .get_subcommands()
            .map(|inner| (inner.get_name().to_owned(), below(inner)))
            .collect();
        Self { sections, keys, options, commands }
    }

    /// What a text names that does not exist.
    fn inventions(&self, text: &str) -> Vec<String> {
        let mut found = Vec::new();
        let is_foreign = PROGRAMS.iter().any(|program| text.contains(program));
        let in_word = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        for word in text.split(|c| !in_word(c)) {
            if let Some(option) = word.strip_prefix("--") {
                let name = option.split('.').next().unwrap_or_default();
                let is_name = name.starts_with(|c: char| c.is_ascii_lowercase());
                let is_known = self.options.contains(name) || FOREIGN.contains(&name);
                if is_name && !is_known && !is_foreign {
                    found.push(format!("--{name}"));
                }
            } else if !self.is_known_key(word.trim_matches('.')) {
                found.push(word.to_owned());
            }
        }
        for start in ["`longdraft ", "Example: longdraft "] {
            for (at, _) in text.match_indices(start) {
                let rest = &text[at + start.len()..];
                let mut words = rest.split(|c: char| !(c.is_ascii_lowercase() || c == '-'));
                let (first, second) = (words.next().unwrap_or_default(), words.next());
                // A flag or a placeholder.
                if first.is_empty() || first.starts_with('-') {
                    continue;
                }
                match self.commands.iter().find(|(name, _)| name == first) {
                    None => found.push(format!("longdraft {first}")),
                    Some((_, below)) if below.is_empty() => {}
                    Some((_, below)) => {
                        let second = second.unwrap_or_default();
                        if !second.is_empty() && !below.iter().any(|name| name == second) {
                            found.push(format!("longdraft {first} {second}"));
                        }
                    }
                }
            }
        }
        found
    }

    /// Whether a word is no key at all, or one that exists.
    fn is_known_key(&self, word: &str) -> bool {
        let parts: Vec<&str> = word.split('.').collect();
        let plain = |part: &&str| {
            !part.is_empty()
                && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return true };
        let is_number = |part: &&str| part.chars().all(|c| c.is_ascii_digit());
        if parts.len() < 2
            || !self.sections.contains(*first)
            || !parts.iter().all(plain)
            || is_number(&parts[1])
            || FILES.contains(last)
            || TENSORS.iter().any(|name| word.starts_with(name))
        {
            return true;
        }
        let parts: Vec<&str> = parts.into_iter().filter(|part| !is_number(part)).collect();
        self.keys.contains(&parts.join("."))
    }
}

fn collect_keys(root: &Value, place: &Value, prefix: &str, keys: &mut BTreeSet<String>) {
    let places = schema_places(root, place);
    let maps = places.iter().filter_map(|place| place.get("properties")?.as_object());
    for (key, property) in maps.flatten() {
        let full = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        keys.insert(full.clone());
        collect_keys(root, property, &full, keys);
        for items in schema_places(root, property).iter().filter_map(|place| place.get("items")) {
            collect_keys(root, items, &full, keys);
        }
    }
}

fn collect_options(command: &clap::Command, options: &mut BTreeSet<String>) {
    for argument in command.get_arguments() {
        options.extend(argument.get_long().map(str::to_owned));
        options.extend(argument.get_all_aliases().into_iter().flatten().map(str::to_owned));
    }
    command.get_subcommands().for_each(|inner| collect_options(inner, options));
}

/// Texts of a file's code, tests left out.
fn texts(code: TokenStream, found: &mut Vec<String>) {
    let mut skipping = false;
    let mut after_hash = false;
    for token in code {
        match token {
            TokenTree::Group(group) if after_hash && group.delimiter() == Delimiter::Bracket => {
                let attribute: String = group.to_string().split_whitespace().collect();
                skipping |= attribute == "[cfg(test)]";
                after_hash = false;
                texts(group.stream(), found);
            }
            TokenTree::Group(group) => {
                if !skipping {
                    texts(group.stream(), found);
                }
                skipping &= group.delimiter() != Delimiter::Brace;
            }
            TokenTree::Punct(punct) => {
                after_hash = punct.as_char() == '#' || (after_hash && punct.as_char() == '!');
                skipping &= punct.as_char() != ';';
            }
            TokenTree::Literal(literal) if !skipping => {
                let text = literal.to_string();
                if text.starts_with(['"', 'r']) {
                    // A line that goes on in the next one.
                    found.push(text.replace("\\\n", " "));
                }
            }
            TokenTree::Literal(_) | TokenTree::Ident(_) => {}
        }
    }
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && !name.ends_with("tests.rs")
            && name != "hints.rs"
        {
            found.push(path);
        }
    }
}

#[test]
fn texts_name_only_keys_options_and_commands_that_exist() {
    let known = Known::of_the_program();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&crates).expect("crates").flatten() {
        sources(&entry.path().join("src"), &mut files);
    }
    assert!(files.len() > 200, "{} files", files.len());
    let mut wrong = Vec::new();
    let mut count = 0;
    for path in files {
        let code = std::fs::read_to_string(&path).expect("a source file");
        let code: TokenStream = code.parse().unwrap_or_else(|_| panic!("{}", path.display()));
        let mut found = Vec::new();
        texts(code, &mut found);
        count += found.len();
        for text in found {
            let told = known.inventions(&text);
            wrong.extend(told.iter().map(|name| format!("{}: `{name}` in {text}", path.display())));
        }
    }
    assert!(count > 5000, "{count} texts");
    assert!(wrong.is_empty(), "{} inventions:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn inventions_are_found() {
    let known = Known::of_the_program();
    for (text, invention) in [
        ("lower `optimizer.learning_rate`", "optimizer.learning_rate"),
        ("set data.train.0.lern: all", "data.train.0.lern"),
        ("add --no-such-flag to it", "--no-such-flag"),
        ("run `longdraft fry x`", "longdraft fry"),
        ("Example: longdraft data fry x", "longdraft data fry"),
    ] {
        assert_eq!(known.inventions(text), [invention], "{text}");
    }
    for text in [
        "lower schedule.learning_rate, data.train.0.path or draft.head_dim",
        "`longdraft data inspect` shows model.safetensors, data.0.text and model.layers.3.x",
        "--force-resume, or `longdraft --version`",
    ] {
        assert!(known.inventions(text).is_empty(), "{text}");
    }
    let code = "#[cfg(test)] mod tests { const A: &str = \"data.none\"; } /// see train.seed\nfn f() { g(\"b\") }";
    let mut found = Vec::new();
    texts(code.parse().expect("code"), &mut found);
    assert!(found.iter().any(|text| text.contains("train.seed")), "{found:?}");
    assert!(
        found.contains(&"\"b\"".to_owned()) && !found.concat().contains("data.none"),
        "{found:?}"
    );
}
