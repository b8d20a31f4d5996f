//! What is said of a path that is no target: a language model that has no tokenizer yet, a draft.

use std::path::{Path, PathBuf};

use longdraft_models::ModelError;
use longdraft_models::draft::files::DRAFT_FILE;
use longdraft_models::language_model;
use longdraft_models::paths::{folder_of, parent_of};
use longdraft_records::CONFIG_FILE;
use longdraft_serving::MANIFEST_FILE;
use longdraft_train::checkpoint::draft_file;

use crate::draft_source::{DraftSource, configuration};
use crate::failure::Failure;

/// What is said where a target cannot be opened: what stands in its place, if that is known.
pub(crate) fn no_target(spec: &str) -> impl Fn(ModelError) -> Failure {
    move |error| {
        let path = Path::new(spec);
        let other = path.exists().then(|| language_model_at(path).or_else(|| draft_at(path)));
        other.flatten().unwrap_or_else(|| error.into())
    }
}

/// Says that a path holds a language model of `lm train`, and how it becomes a target.
fn language_model_at(path: &Path) -> Option<Failure> {
    let place = language_model::locate(path)?;
    let (config, _) = language_model::describe(&place).ok()?;
    let shown = path.display();
    if !config.is_llama() {
        let problem = format!(
            "{shown}: a language model with layers of its own (`model.architecture: baseline`), which is no target"
        );
        return Some(Failure::usage(problem).hint(
            "for a target train with `model.architecture: llama` and `model.rope.rule: none`; \
             `longdraft lm score` takes this one as it is",
        ));
    }
    if place.join("tokenizer.json").is_file() {
        let problem = format!("{shown}: a run of `longdraft lm train`, and no target itself");
        let hint = format!("name its checkpoint: {}", place.display());
        return (place != path).then(|| Failure::usage(problem).hint(hint));
    }
    let run = run_of(&place).map(|run| configuration(&run)).unwrap_or_default();
    let tokenizer = run["data"]["tokenizer"].as_str().unwrap_or("FOLDER").to_owned();
    let problem = format!("{shown}: a language model of `longdraft lm train` without a tokenizer");
    let hint = format!(
        "`longdraft lm quantize {shown} --output lm.gguf --tokenizer {tokenizer}` makes a target of it"
    );
    Some(Failure::usage(problem).hint(hint))
}

/// Says that a path holds a draft. What lies beside a GGUF file says nothing of it.
fn draft_at(path: &Path) -> Option<Failure> {
    if path.is_file() && path.extension().is_some_and(|ending| ending == "gguf") {
        return None;
    }
    let folder = folder_of(path);
    let is_draft = draft_file(folder) != folder
        || [DRAFT_FILE, MANIFEST_FILE].iter().any(|name| folder.join(name).is_file());
    if !is_draft {
        return None;
    }
    let target = DraftSource::find(path).and_then(|draft| draft.target()).ok().flatten();
    let target = target.unwrap_or_else(|| "the model that it was trained for".to_owned());
    let problem =
        format!("{}: a draft, which proposes for a target and is none itself", path.display());
    let hint = format!("give its target, {target}, and this path as --draft");
    Some(Failure::usage(problem).hint(hint))
}

/// The run that a language model at a [`language_model::locate`]d place lies in, by its configuration's file.
fn run_of(place: &Path) -> Option<PathBuf> {
    let run = if place.is_file() {
        parent_of(place).to_path_buf()
    } else {
        place.canonicalize().ok()?.parent()?.parent()?.to_path_buf()
    };
    run.join(CONFIG_FILE).is_file().then_some(run)
}

/// Tokens of the rows that a language model was trained on, where the run that it lies in says so.
pub(crate) fn training_length(path: &Path) -> Option<usize> {
    let run = configuration(&run_of(&language_model::locate(path)?)?);
    // Runs of drafts have no such section.
    run.get("model")?;
    usize::try_from(run["data"]["row_tokens"].as_u64()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_in_place_of_a_target_is_told() {
        let folder = tempfile::tempdir().expect("folder");
        let path = |name: &str| folder.path().join(name);
        let told = |name: &str| {
            let unread = ModelError::invalid(path(name), "no tokenizer");
            no_target(&path(name).display().to_string())(unread)
        };
        std::fs::create_dir_all(path("run/draft")).expect("folder");
        std::fs::create_dir(path("other")).expect("folder");
        std::fs::write(path("run/draft").join(DRAFT_FILE), "").expect("file");
        for place in ["run", "run/draft", "run/draft/draft_model_weights.safetensors"] {
            let failure = told(place);
            assert!(failure.message().contains("a draft"), "{failure:?}");
            assert!(failure.hint.as_ref().is_some_and(|hint| hint.contains("--draft")), "{place}");
        }
        // A damaged file is told as such, whatever lies beside it.
        std::fs::write(path("run/draft/target.gguf"), "").expect("file");
        for other in ["other", "nowhere", "run/draft/target.gguf"] {
            assert!(told(other).message().contains("no tokenizer"), "{other}");
        }
    }
}
