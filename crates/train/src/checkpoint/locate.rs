//! Which checkpoint is meant by a path: a checkpoint, a run, or a curriculum of runs.

use std::path::{Path, PathBuf};

use longdraft_models::draft::files::SavedDraft;

use super::contents::{DRAFT, STATE, read_state, verify_draft};
use super::curriculum::{CURRICULUM_FILE, CurriculumFile};
use super::store::{BEST, LAST, PREVIOUS};
use crate::error::Result;

/// Folder of a run that its draft is extracted to.
const EXTRACTED: &str = "draft";

/// Which of a run's checkpoints is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// The newest one.
    #[default]
    Newest,
    /// The one with the best held-out evaluation.
    Best,
}

/// A checkpoint on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// Its folder.
    pub checkpoint: PathBuf,
    /// The run that it belongs to.
    pub run: PathBuf,
}

impl Located {
    /// The checkpoint that a path means: itself, that of a run, or that of the last stage of a
    /// curriculum; `None` if there is none.
    pub fn at(path: &Path, wanted: Wanted) -> Option<Self> {
        if holds_checkpoint(path) {
            return Some(Self { checkpoint: path.to_path_buf(), run: run_of(path) });
        }
        let names: &[&str] = match wanted {
            Wanted::Newest => &[LAST, PREVIOUS],
            Wanted::Best => &[BEST],
        };
        let in_run = |run: &Path| {
            let places = names.iter().map(|name| run.join("checkpoints").join(name));
            let checkpoint = places.into_iter().find(|folder| holds_checkpoint(folder))?;
            Some(Self { checkpoint, run: run.to_path_buf() })
        };
        in_run(path).or_else(|| in_run(stages(path).last()?))
    }
}

/// The run of a checkpoint: two folders above, which a path from below them does not name.
fn run_of(checkpoint: &Path) -> PathBuf {
    let above = |path: &Path| {
        let run = path.parent().and_then(Path::parent);
        run.filter(|run| !run.as_os_str().is_empty()).map(Path::to_path_buf)
    };
    let whole = || above(&checkpoint.canonicalize().ok()?);
    above(checkpoint).or_else(whole).unwrap_or_else(|| checkpoint.to_path_buf())
}

fn holds_checkpoint(folder: &Path) -> bool {
    folder.join(STATE).is_file() && folder.join(DRAFT).is_file()
}

/// Run directories of a curriculum's stages, in order; nothing if `path` is no curriculum.
pub fn stages(path: &Path) -> Vec<PathBuf> {
    let text = std::fs::read_to_string(path.join(CURRICULUM_FILE)).unwrap_or_default();
    let file: Option<CurriculumFile> = serde_json::from_str(&text).ok();
    let run = |output: PathBuf| {
        let inside = path.join(&output);
        if inside.exists() { inside } else { output }
    };
    file.into_iter().flat_map(|file| file.stages).map(|stage| run(stage.output)).collect()
}

/// The file or folder of the draft that a path means: that of [`Located::at`], else the draft that was
/// extracted there, else the path itself.
pub fn draft_file(path: &Path) -> PathBuf {
    if let Some(located) = Located::at(path, Wanted::Newest) {
        return located.checkpoint.join(DRAFT);
    }
    let extracted = path.join(EXTRACTED);
    if longdraft_models::draft::files::holds_draft(&extracted)
        && !longdraft_models::draft::files::holds_draft(path)
    {
        return extracted;
    }
    path.to_path_buf()
}

/// The draft that a path means, as [`draft_file`], with what is said of its network.
///
/// # Errors
/// - it is that of a checkpoint whose state is unusable, or whose draft is damaged
pub fn saved_draft(path: &Path) -> Result<SavedDraft> {
    let Some(located) = Located::at(path, Wanted::Newest) else {
        return Ok(SavedDraft::at(&draft_file(path)));
    };
    verify_draft(&located.checkpoint)?;
    let config = Some(read_state(&located.checkpoint)?.draft);
    Ok(SavedDraft { path: located.checkpoint.join(DRAFT), config })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, names: &[&str]) {
        std::fs::create_dir_all(folder).expect("folder");
        names.iter().for_each(|name| std::fs::write(folder.join(name), "").expect("file"));
    }

    #[test]
    fn a_checkpoint_is_found_from_itself_its_run_and_its_curriculum() {
        let folder = tempfile::tempdir().expect("folder");
        let curriculum = folder.path().join("cur");
        let text = r#"{"stages": [{"name": "a", "output": "a"}, {"name": "b", "output": "b"}]}"#;
        write(&curriculum, &[]);
        std::fs::write(curriculum.join(CURRICULUM_FILE), text).expect("file");
        let (a, b) = (curriculum.join("a"), curriculum.join("b"));
        let at = |path: &Path, wanted| Located::at(path, wanted).map(|found| found.checkpoint);
        write(&a.join("checkpoints/last"), &[STATE, DRAFT]);
        // The last stage is not trained yet: an earlier one is another draft.
        assert_eq!(at(&curriculum, Wanted::Newest), None);
        write(&b.join("checkpoints/last_2"), &[STATE, DRAFT]);
        write(&b.join("checkpoints/last"), &[STATE]);
        write(&b.join("checkpoints/best"), &[STATE, DRAFT]);
        let previous = b.join("checkpoints/last_2");
        for path in [&curriculum, &b, &previous] {
            assert_eq!(at(path, Wanted::Newest), Some(previous.clone()));
            assert_eq!(Located::at(path, Wanted::Newest).map(|found| found.run), Some(b.clone()));
        }
        assert_eq!(at(&curriculum, Wanted::Best), Some(b.join("checkpoints/best")));
        assert_eq!(draft_file(&curriculum), previous.join(DRAFT));
        assert_eq!(at(folder.path(), Wanted::Newest), None);
    }

    #[test]
    fn a_checkpoint_named_from_its_own_folder_has_its_run() {
        let here = std::env::current_dir().expect("a folder");
        for name in ["src", "src/checkpoint"] {
            let run = here.join(name);
            let run = run.parent().and_then(Path::parent).expect("two folders above");
            assert_eq!(run_of(Path::new(name)), run.canonicalize().expect("there"), "{name}");
        }
        assert_eq!(run_of(Path::new("run/checkpoints/last")), Path::new("run"));
    }

    #[test]
    fn an_extracted_draft_stands_for_its_run() {
        let folder = tempfile::tempdir().expect("folder");
        let run = folder.path().join("run");
        assert_eq!(draft_file(&run), run);
        write(&run.join(EXTRACTED), &["draft_model_weights.safetensors"]);
        assert_eq!(draft_file(&run), run.join(EXTRACTED));
        write(&run, &["model.safetensors"]);
        assert_eq!(draft_file(&run), run);
    }
}
