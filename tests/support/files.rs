//! Files that tests read, copy and change.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use serde_json::Value;

/// The small target that the program ships.
pub(crate) fn demonstration() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join("assets/target/demonstration.gguf").display().to_string()
}

/// A file of JSON.
#[track_caller]
pub(crate) fn read_json(path: impl AsRef<Path>) -> Value {
    let text = std::fs::read_to_string(path).expect("a file of JSON");
    serde_json::from_str(&text).expect("JSON")
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
