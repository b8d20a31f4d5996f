//! A folder of records of one kind.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::deepspec::{Cache, INDEX, MANIFEST};
use super::specforge::Saved;
use super::speculators::Engine;
use super::{Captured, Format, RecordDocument, problem};
use crate::error::{FeatureError, Result};

/// Folders, at most, that lie within one another.
const MOST_FOLDERS: usize = 16;

/// Records of one kind, in a folder and those below it.
pub struct RecordFolder {
    folder: PathBuf,
    /// What the records consist of.
    files: Vec<PathBuf>,
    format: Box<dyn Format>,
}

impl RecordFolder {
    /// Finds out what the folder holds.
    ///
    /// # Errors
    /// - it cannot be read, holds no records, compressed ones or several kinds, or leads in circles
    pub fn open(folder: &Path) -> Result<Self> {
        let (files, format): (Vec<PathBuf>, Box<dyn Format>) = if is_cache(folder) {
            let cache = Cache::open(folder)?;
            (cache.files(), Box::new(cache))
        } else {
            let Found { pickles, safetensors } = Found::below(folder)?;
            match (pickles.is_empty(), safetensors.is_empty()) {
                (true, true) => {
                    return Err(problem(
                        folder,
                        "no records (`.ckpt`, `.pt`, `.safetensors`, `manifest.json` with `samples.idx`) in it",
                    ));
                }
                (false, false) => {
                    let (a, b) = (pickles[0].display(), safetensors[0].display());
                    return Err(problem(folder, format!("records of two kinds: {a} and {b}")));
                }
                (false, true) => (pickles.clone(), Box::new(Saved(pickles))),
                (true, false) => (safetensors.clone(), Box::new(Engine(safetensors))),
            }
        };
        Ok(Self { folder: folder.to_path_buf(), files, format })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Files that the records consist of.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Documents.
    pub fn len(&self) -> usize {
        self.format.len()
    }

    /// Whether there is no document.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens and mask of a document.
    ///
    /// # Errors
    /// - the file is damaged or no such record: file and tensor are named
    pub fn document(&self, index: usize) -> Result<RecordDocument> {
        self.format.document(index)
    }

    /// Hash of names and sizes of the files.
    pub(super) fn hash(&self) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new();
        for path in &self.files {
            let size = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
            let name = path.strip_prefix(&self.folder).unwrap_or(path);
            hasher.update(name.as_os_str().as_encoded_bytes());
            hasher.update(&size.to_le_bytes());
        }
        hasher
    }

    pub(super) fn captured(&self, index: usize, size: (usize, usize)) -> Result<Captured> {
        self.format.captured(index, size)
    }

    pub(super) fn layers(&self) -> Option<&[usize]> {
        self.format.layers()
    }

    pub(super) fn hidden_size(&self) -> Option<usize> {
        self.format.hidden_size()
    }

    pub(super) fn problem(&self, text: impl std::fmt::Display) -> FeatureError {
        problem(&self.folder, text)
    }
}

impl std::fmt::Debug for RecordFolder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} records of {}", self.len(), self.folder.display())
    }
}

fn is_cache(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file() && folder.join(INDEX).is_file()
}

/// Whether anything in the folder or below it looks like a record. Compressed records and what cannot be read count,
/// too: [`RecordFolder::open`] says what is wrong with them, and no store may be written among them.
pub(super) fn holds_records(folder: &Path) -> bool {
    let holds_none = |found: Found| found.pickles.is_empty() && found.safetensors.is_empty();
    is_cache(folder) || !Found::below(folder).is_ok_and(holds_none)
}

/// Whether a system keeps a folder of this name, closed to users, at the root of a disk.
fn is_systems_own(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default();
    name == "lost+found" || name.as_encoded_bytes().starts_with(b".")
}

/// Files that may be records, by name.
struct Found {
    pickles: Vec<PathBuf>,
    safetensors: Vec<PathBuf>,
}

impl Found {
    fn below(folder: &Path) -> Result<Self> {
        let fail = |error: &dyn std::fmt::Display| problem(folder, error);
        let mut open = vec![(folder.to_path_buf(), 1)];
        let mut found = Self { pickles: Vec::new(), safetensors: Vec::new() };
        while let Some((folder, depth)) = open.pop() {
            if depth > MOST_FOLDERS {
                return Err(fail(&format!("{} leads in circles", folder.display())));
            }
            let entries = match std::fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(_) if depth > 1 && is_systems_own(&folder) => continue,
                Err(error) => {
                    let name = folder.display();
                    return Err(fail(&format!(
                        "{name}: {error}: make it readable, or move it away"
                    )));
                }
            };
            for entry in entries {
                let path = entry.map_err(|error| fail(&error))?.path();
                let extension = path.extension().unwrap_or_default();
                if path.is_dir() {
                    open.push((path, depth + 1));
                } else if extension == "gz" && path.file_stem().is_some_and(is_pickle) {
                    let name = path.display();
                    return Err(fail(&format!("{name} is compressed: unpack such records first")));
                } else if path.file_name().is_some_and(is_pickle) {
                    found.pickles.push(path);
                } else if extension == "safetensors" {
                    found.safetensors.push(path);
                }
            }
        }
        found.pickles.sort_by_cached_key(|path| in_order(path));
        found.safetensors.sort_by_cached_key(|path| in_order(path));
        Ok(found)
    }
}

/// A key by which numbers in names count by their value: `hs_2` comes before `hs_10`, as the rows do.
fn in_order(path: &Path) -> (Vec<(String, u64)>, PathBuf) {
    let (name, mut parts) = (path.to_string_lossy(), Vec::new());
    let mut rest = name.as_ref();
    while !rest.is_empty() {
        let (text, from_digit) = rest.split_at(rest.find(is_digit).unwrap_or(rest.len()));
        let end = from_digit.find(|c| !is_digit(c)).unwrap_or(from_digit.len());
        parts.push((text.to_owned(), from_digit[..end].parse().unwrap_or(u64::MAX)));
        rest = &from_digit[end..];
    }
    (parts, path.to_path_buf())
}

fn is_digit(c: char) -> bool {
    c.is_ascii_digit()
}

fn is_pickle(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "ckpt" || extension == "pt")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_below_their_folder_in_order() {
        let folder = tempfile::tempdir().expect("folder");
        let open = |path: &Path| RecordFolder::open(path).expect_err("refused").to_string();
        assert!(open(folder.path()).contains("no records"));
        assert!(!holds_records(folder.path()));
        for name in [
            "rows_2000/data_10.ckpt",
            "rows_2000/data_9.ckpt",
            "rows_0/data_1.ckpt",
            "rows_0/notes.txt",
        ] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
            std::fs::write(path, b"").expect("file");
        }
        let found = RecordFolder::open(folder.path()).expect("two");
        let names =
            found.files().iter().map(|path| path.strip_prefix(folder.path()).expect("below"));
        let names: Vec<_> = names.collect();
        let wanted = ["rows_0/data_1.ckpt", "rows_2000/data_9.ckpt", "rows_2000/data_10.ckpt"];
        assert_eq!(names, wanted.map(Path::new));
        assert!(found.document(0).is_err() && holds_records(folder.path()));
        std::fs::write(folder.path().join("hs_0.safetensors"), b"").expect("file");
        assert!(open(folder.path()).contains("two kinds"));
    }

    #[test]
    fn compressed_records_are_records_that_need_unpacking() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join("data_0.ckpt.gz"), b"").expect("file");
        assert!(holds_records(folder.path()));
        let told = RecordFolder::open(folder.path()).expect_err("refused").to_string();
        assert!(told.contains("data_0.ckpt.gz is compressed: unpack"), "{told}");
    }

    #[cfg(unix)]
    #[test]
    fn what_cannot_be_read_may_hold_records() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let circle = tempfile::tempdir().expect("folder");
        symlink(circle.path(), circle.path().join("again")).expect("link");
        assert!(holds_records(circle.path()));
        let told = RecordFolder::open(circle.path()).expect_err("refused").to_string();
        assert!(told.contains("leads in circles"), "{told}");
        for (name, may_hold) in [("rows_0", true), ("lost+found", false)] {
            let folder = tempfile::tempdir().expect("folder");
            let closed = folder.path().join(name);
            std::fs::create_dir(&closed).expect("folder");
            let allow = |mode| std::fs::set_permissions(&closed, PermissionsExt::from_mode(mode));
            allow(0o000).expect("closed");
            // Root reads all.
            if std::fs::read_dir(&closed).is_err() {
                assert_eq!(holds_records(folder.path()), may_hold, "{name}");
                let told = RecordFolder::open(folder.path()).expect_err("refused").to_string();
                assert_eq!(told.contains("make it readable"), may_hold, "{told}");
            }
            allow(0o755).expect("open");
        }
    }
}
