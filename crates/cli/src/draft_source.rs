//! Where a draft lies: a checkpoint of a run or of a curriculum, an extracted folder, files from
//! elsewhere. Every command that takes a draft finds it here.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use longdraft_configuration::recorded_text;
use longdraft_models::ModelError;
use longdraft_models::draft::files::{DRAFT_FILE, holds_draft, trained_for};
use longdraft_models::draft::{Draft, DraftKind, open_draft};
use longdraft_models::paths::{folder_of, parent_of};
use longdraft_models::sha256;
use longdraft_models::target_model::{Target, is_same_target};
use longdraft_records::CONFIG_FILE;
use longdraft_records::decode::DecodeRecord;
use longdraft_serving::{MANIFEST_FILE, Provenance};
use longdraft_train::checkpoint::{
    LAST, Located, Wanted, draft_file, open_draft_file, read_state, stages,
};
use serde_json::Value;

use crate::failure::{Failure, Result};

/// How deep below a path drafts are looked for, to name them.
const DEPTH: usize = 2;
/// Drafts that are named at most.
const NAMED: usize = 4;

/// A draft on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DraftSource {
    /// As training saved it.
    Checkpoint(Located),
    /// A draft folder or file.
    Files(PathBuf),
}

impl DraftSource {
    /// What a path holds: of a run the newest checkpoint, of a curriculum that of its last stage.
    pub(crate) fn find(path: &Path) -> Result<Self> {
        if let Some(located) = Located::at(path, Wanted::Newest) {
            return Ok(Self::Checkpoint(located));
        }
        let files = draft_file(path);
        if files.is_file() || holds_draft(&files) {
            return Ok(Self::Files(files));
        }
        Err(missing(path, "draft"))
    }

    /// Where its weights lie.
    pub(crate) fn place(&self) -> &Path {
        match self {
            Self::Checkpoint(located) => &located.checkpoint,
            Self::Files(path) => path,
        }
    }

    /// The folder that its weights lie in.
    pub(crate) fn folder(&self) -> &Path {
        folder_of(self.place())
    }

    pub(crate) fn open(&self, target: &Target) -> Result<Box<dyn Draft>> {
        let Self::Checkpoint(Located { checkpoint, .. }) = self else {
            return open_files(self.place(), target);
        };
        let state = read_state(checkpoint)?;
        let fingerprint = Some(state.target_fingerprint.as_str());
        let kind = DraftKind::named(&state.method)?;
        let source = open_draft_file(checkpoint)?;
        let draft = (kind.restore)(&state.draft, &source, target).map_err(|error| {
            let of_another = of_another_target((checkpoint, fingerprint), &error, target);
            of_another.unwrap_or_else(|| Failure::at(checkpoint)(error))
        })?;
        warn_of_other_target(checkpoint, fingerprint, target);
        Ok(draft)
    }

    pub(crate) fn method(&self) -> Result<String> {
        match self {
            Self::Checkpoint(located) => Ok(read_state(&located.checkpoint)?.method),
            Self::Files(path) => Ok(DraftKind::at(path)?.name.to_owned()),
        }
    }

    /// The run that made it, if it is not one in files alone.
    pub(crate) fn run(&self) -> Option<&Path> {
        match self {
            Self::Checkpoint(located) => Some(&located.run),
            Self::Files(_) => None,
        }
    }

    /// The target that the run's configuration names.
    pub(crate) fn target(&self) -> Result<Option<String>> {
        match self {
            Self::Checkpoint(located) => {
                Ok(recorded_text(&located.run.join(CONFIG_FILE), "target")?)
            }
            Self::Files(_) => Ok(None),
        }
    }

    pub(crate) fn provenance(&self) -> Provenance {
        let last =
            |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match self {
            Self::Files(path) => Provenance { source: last(path), ..Provenance::default() },
            Self::Checkpoint(Located { checkpoint, run }) => {
                let state = read_state(checkpoint).ok();
                let data = configuration(run)["data"]["train"].as_array().map(|sources| {
                    let name = |source: &Value| Some(last(Path::new(source["path"].as_str()?)));
                    sources.iter().filter_map(name).collect()
                });
                let weights = draft_file(checkpoint);
                Provenance {
                    source: last(run),
                    source_sha256: sha256::of_file(&weights).unwrap_or_default(),
                    steps: state.as_ref().map(|state| state.progress.step),
                    tokens: state.as_ref().map(|state| state.progress.tokens),
                    seconds: state.as_ref().map(|state| state.progress.seconds),
                    data: data.unwrap_or_default(),
                    evaluation: evaluation(run),
                }
            }
        }
    }
}

/// The checkpoint that a path means.
pub(crate) fn find_checkpoint(path: &Path, wanted: Wanted) -> Result<Located> {
    Located::at(path, wanted).ok_or_else(|| match wanted {
        Wanted::Best if Located::at(path, Wanted::Newest).is_some() => {
            Failure::usage(format!("{}: the run kept no best checkpoint", path.display()))
                .hint("it needs held-out rows and `train.keep_best: true`; leave out --best")
        }
        _ => missing(path, "checkpoint"),
    })
}

/// What is said where a path holds no draft: what is there instead, and the nearest right path.
fn missing(path: &Path, wanted: &str) -> Failure {
    if let Err(error) = std::fs::metadata(path) {
        return Failure::usage(format!("{}: {error}", path.display())).hint(likely(path));
    }
    // A folder that cannot be looked into is not one without checkpoints.
    let checkpoints = path.join("checkpoints");
    for folder in [path, &checkpoints, &checkpoints.join(LAST)] {
        if let Err(error) = std::fs::read_dir(folder)
            && !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
        {
            return Failure::work(format!("{}: {error}", folder.display()));
        }
    }
    let below = below(path, wanted == "checkpoint");
    let stages = stages(path);
    let what = if stages.is_empty() {
        format!("{}: no {wanted} is there", path.display())
    } else {
        format!("{}: the last stage of the curriculum has no checkpoint yet", path.display())
    };
    let hint = match &below[..] {
        [] => {
            "give a run directory of `longdraft train`, one of its checkpoints/*, or a draft that \
               `longdraft extract` wrote"
                .to_owned()
        }
        found => {
            let names: Vec<String> =
                found.iter().take(NAMED).map(|path| path.display().to_string()).collect();
            let more = if found.len() > NAMED { ", ..." } else { "" };
            format!("below it lie: {}{more}", names.join(", "))
        }
    };
    Failure::usage(what).hint(hint)
}

/// The exports that a path means: itself, or those in the folders of a folder that is none.
pub(crate) fn exports(path: &Path) -> Vec<PathBuf> {
    let is_export = |folder: &Path| folder.join(MANIFEST_FILE).is_file();
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut inside: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| is_export(path)).collect();
    inside.sort();
    let itself = is_export(path) || holds_draft(path) || path.join("config.json").is_file();
    if itself || inside.is_empty() { vec![path.to_path_buf()] } else { inside }
}

/// Paths with drafts below a folder, in order.
fn below(folder: &Path, checkpoints_only: bool) -> Vec<PathBuf> {
    let is_draft = |path: &Path| {
        Located::at(path, Wanted::Newest).is_some()
            || (!checkpoints_only
                && [DRAFT_FILE, MANIFEST_FILE].iter().any(|name| path.join(name).is_file()))
    };
    let (mut found, mut level) = (Vec::new(), vec![folder.to_path_buf()]);
    for _ in 0..DEPTH {
        let entries = level.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
        let mut folders: Vec<PathBuf> =
            entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
        folders.sort();
        let (drafts, others): (Vec<_>, Vec<_>) =
            folders.into_iter().partition(|path| is_draft(path));
        found.extend(drafts);
        level = others;
    }
    found
}

/// What a path that is not there may mean.
fn likely(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = std::fs::read_dir(parent_of(path)).into_iter().flatten();
    let scored = beside.flatten().map(|entry| {
        let other = entry.file_name().to_string_lossy().into_owned();
        (strsim::normalized_damerau_levenshtein(&name, &other), other)
    });
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.7);
    best.map_or_else(
        || "give a run directory, a checkpoint, or a draft folder or file".to_owned(),
        |(_, other)| format!("did you mean {}?", path.with_file_name(other).display()),
    )
}

/// Loads a draft folder or file with the layer that its `config.json` describes, or that fits the
/// target when there is none (published files).
fn open_files(path: &Path, target: &Target) -> Result<Box<dyn Draft>> {
    let fingerprint = trained_for(path);
    let fingerprint = fingerprint.as_deref();
    let draft = open_draft(path, target).map_err(|error| {
        if let Some(failure) = of_another_target((path, fingerprint), &error, target) {
            return failure;
        }
        let is_unfit = matches!(error, ModelError::Invalid { .. });
        let failure = Failure::from(error);
        if is_language_model(path) {
            return failure.hint(
                "other language models are no drafts here: train a draft for the target with `longdraft fit`, or \
                 use --lookup, which needs none",
            );
        }
        failure.hinted((is_unfit && fingerprint.is_none()).then_some(
            "if it was trained for another target, give that one, or train a draft for this one with `longdraft fit`",
        ))
    })?;
    note_reading(path, target);
    warn_of_other_target(path, fingerprint, target);
    Ok(draft)
}

/// What is said of a draft that cannot be opened because it is that of another target.
fn of_another_target(
    (path, fingerprint): (&Path, Option<&str>),
    error: &ModelError,
    target: &Target,
) -> Option<Failure> {
    let is_another = fingerprint.is_some_and(|known| !is_same_target(known, target.fingerprint()));
    let ModelError::Invalid { problems, .. } = error else { return None };
    is_another.then(|| {
        Failure::work(format!("{} was trained for another target: {problems}", path.display())).hint(
            "give the target that it was trained for, or train a draft for this one with `longdraft fit`",
        )
    })
}

/// Whether a file or folder holds a whole language model in place of a draft.
fn is_language_model(path: &Path) -> bool {
    if path.extension().is_some_and(|extension| extension == "gguf") {
        return Target::open_config(&path.display().to_string()).is_ok();
    }
    let text = text_of(&folder_of(path).join("config.json"));
    let config: Value = serde_json::from_str(&text).unwrap_or_default();
    let is_model = |name: &Value| {
        let ends = ["ForCausalLM", "ForConditionalGeneration"];
        name.as_str().is_some_and(|name| ends.iter().any(|end| name.ends_with(end)))
    };
    config["architectures"].as_array().is_some_and(|names| names.iter().any(is_model))
}

fn warn_of_other_target(draft: &Path, fingerprint: Option<&str>, target: &Target) {
    if fingerprint.is_some_and(|known| !is_same_target(known, target.fingerprint())) {
        errln!(
            "warning: {} was trained for another target (or another file of this one): output stays \
             exact, acceptance may be low",
            draft.display()
        );
    }
}

/// Tells how a draft from elsewhere was read where that is not plain.
fn note_reading(path: &Path, target: &Target) {
    let Ok(kind) = DraftKind::at(path) else { return };
    for reading in (kind.reading)(path, target) {
        errln!("note: {}: {reading}", path.display());
    }
}

/// The composed configuration of a run; nothing if it is not there.
pub(crate) fn configuration(run: &Path) -> Value {
    serde_saphyr::from_str(&text_of(&run.join(CONFIG_FILE))).unwrap_or_default()
}

/// A file's text; nothing if it cannot be read. A named pipe in its place would be waited for.
fn text_of(path: &Path) -> String {
    let text = path.is_file().then(|| std::fs::read_to_string(path).ok());
    text.flatten().unwrap_or_default()
}

/// What was measured of a run, or of the curriculum whose last stage it is; texts, commands and the machine's name stay at
/// home.
fn evaluation(run: &Path) -> Option<Value> {
    let of_curriculum = || {
        let whole =
            run.parent().filter(|whole| stages(whole).last().is_some_and(|last| last == run));
        DecodeRecord::read(whole?).ok()
    };
    let record = DecodeRecord::read(run).ok().or_else(of_curriculum)?;
    serde_json::to_value(record.without_circumstances()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("folder");
        let config = folder.path().join("config.json");
        let pipe = std::process::Command::new("mkfifo").arg(&config).status().expect("mkfifo");
        assert!(pipe.success());
        assert!(!is_language_model(folder.path()));
        assert_eq!(text_of(&config), "");
        std::fs::remove_file(&config).expect("removed");
        std::fs::write(&config, r#"{"architectures": ["LlamaForCausalLM"]}"#).expect("file");
        assert!(is_language_model(folder.path()));
    }

    #[test]
    fn what_is_not_there_names_what_is() {
        let folder = tempfile::tempdir().expect("folder");
        let path = |name: &str| folder.path().join(name);
        let told = |name: &str| {
            let failure = DraftSource::find(&path(name)).expect_err("refused");
            format!("{failure:?}")
        };
        std::fs::create_dir_all(path("exports/e3/vllm")).expect("folder");
        std::fs::write(path("exports/e3/vllm").join(MANIFEST_FILE), "{}").expect("file");
        std::fs::create_dir_all(path("runs/mine/draft")).expect("folder");
        std::fs::write(path("runs/mine/draft").join(DRAFT_FILE), "").expect("file");
        assert!(told("exports/e3").contains("below it lie: "), "{}", told("exports/e3"));
        assert!(told("exports").contains("vllm"), "{}", told("exports"));
        assert!(told("runs/mind").contains("did you mean "), "{}", told("runs/mind"));
        let extracted = DraftSource::Files(path("runs/mine/draft"));
        assert_eq!(DraftSource::find(&path("runs/mine")).expect("found"), extracted);
        std::fs::create_dir(path("empty")).expect("folder");
        assert!(told("empty").contains("give a run directory"), "{}", told("empty"));
    }

    #[test]
    fn what_was_measured_of_a_curriculum_is_that_of_its_last_stage() {
        let folder = tempfile::tempdir().expect("folder");
        let place = |name: &str| folder.path().join(name);
        let stages = r#"{"stages": [{"name": "a", "output": "a"}, {"name": "b", "output": "b"}]}"#;
        std::fs::write(place("curriculum.json"), stages).expect("file");
        ["a", "b"].iter().for_each(|name| std::fs::create_dir(place(name)).expect("folder"));
        let record = |draft: &str| {
            let record = serde_json::json!({
                "version": 2, "binary_version": "1", "target": "t", "target_fingerprint": "f", "draft": draft,
                "prompts": "p", "dtype": "stored", "threads": 1, "max_new_tokens": 8, "cells": [],
            });
            record.to_string()
        };
        let measured = |name: &str| evaluation(&place(name)).map(|found| found["draft"].clone());
        assert_eq!(measured("b"), None);
        std::fs::write(place("decode.json"), record("whole")).expect("file");
        assert_eq!((measured("a"), measured("b")), (None, Some("whole".into())));
        // Its own comes first.
        std::fs::write(place("b/decode.json"), record("b")).expect("file");
        assert_eq!(measured("b"), Some("b".into()));
    }
}
