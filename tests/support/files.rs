//! Files that tests read, copy and change.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use candle_core::Tensor;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use serde_json::Value;

/// A file or folder of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The small target that the program ships.
pub(crate) fn demonstration() -> String {
    repository("assets/target/demonstration.gguf").display().to_string()
}

/// A file of JSON.
#[track_caller]
pub(crate) fn read_json(path: impl AsRef<Path>) -> Value {
    let text = std::fs::read_to_string(path).expect("a file of JSON");
    serde_json::from_str(&text).expect("JSON")
}

/// Lines of JSON.
pub(crate) fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("whole lines")).collect()
}

pub(crate) fn read_rows(path: impl AsRef<Path>) -> Vec<Value> {
    json_lines(&std::fs::read_to_string(path).expect("a file of lines"))
}

/// The same of a file that need not be there or whole; else `null`.
pub(crate) fn json_so_far(path: impl AsRef<Path>) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap_or_default()).unwrap_or_default()
}

/// Changes a file of JSON in place.
#[track_caller]
pub(crate) fn change_json(path: impl AsRef<Path>, change: impl FnOnce(&mut Value)) {
    let mut value = read_json(&path);
    change(&mut value);
    std::fs::write(path, value.to_string()).expect("write");
}

/// Lines of a file that another process may be writing.
pub(crate) fn lines_so_far(path: impl AsRef<Path>) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

/// Sizes and times of files.
type Looks = BTreeMap<PathBuf, (u64, Option<SystemTime>)>;

/// Counts the changes of the files under a folder that another process makes.
pub(crate) struct Changes {
    folder: PathBuf,
    seen: Looks,
    count: usize,
}

impl Changes {
    /// Changes from now on; the folder need not be there yet.
    pub(crate) fn of(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        let seen = looks(&folder);
        Self { folder, seen, count: 0 }
    }

    /// Looks again, and tells in how many looks so far something was new.
    pub(crate) fn count(&mut self) -> usize {
        let now = looks(&self.folder);
        if now != self.seen {
            self.seen = now;
            self.count += 1;
        }
        self.count
    }
}

/// How every file under a folder looks now.
fn looks(folder: &Path) -> Looks {
    let mut all = Looks::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            // A file may go while others are looked at.
            let Ok(about) = entry.metadata() else { continue };
            if about.is_dir() {
                folders.push(entry.path());
            } else {
                all.insert(entry.path(), (about.len(), about.modified().ok()));
            }
        }
    }
    all
}

/// Copies a folder's files into another folder, which is made where it is missing.
#[track_caller]
pub(crate) fn copy_files(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    std::fs::create_dir_all(&to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("folder").flatten() {
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.as_ref().join(entry.file_name())).expect("copy");
        }
    }
}

/// Tensors by their names.
pub(crate) type Tensors = Vec<(String, Tensor)>;

/// Tensors of a safetensors file, in the types that it stores.
#[track_caller]
pub(crate) fn read_tensors(file: impl AsRef<Path>) -> Tensors {
    let source = SafetensorsSource::open_file(file.as_ref()).expect("weights");
    let load = |name: String| {
        let tensor = source.load_as_stored(&name).expect("a tensor");
        (name, tensor)
    };
    source.names().into_iter().map(load).collect()
}

/// Writes a safetensors file as published ones are.
#[track_caller]
pub(crate) fn write_tensors(file: impl AsRef<Path>, tensors: &[(String, Tensor)]) {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    save(file.as_ref(), tensors, metadata).expect("saved");
}

/// Changes the tensors of a safetensors file in place.
#[track_caller]
pub(crate) fn change_tensors(file: impl AsRef<Path>, change: impl FnOnce(&mut Tensors)) {
    let mut tensors = read_tensors(&file);
    change(&mut tensors);
    write_tensors(file, &tensors);
}
