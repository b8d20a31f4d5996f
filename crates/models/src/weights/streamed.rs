//! A safetensors file whose tensors are made one after the other, as they are written. The library asks
//! for all of them at once, or writes files of names that it chooses.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::atomic::write_atomically_with;
use crate::error::ModelError;

/// Bytes that the header's length is a multiple of.
const ALIGNMENT: usize = 8;

/// Values whose bytes are made at a time.
const BLOCK: usize = 1 << 14;

/// Makes a tensor's values.
pub type Values<'a, E> = Box<dyn Fn() -> Result<Cow<'a, [f32]>, E> + 'a>;

/// A flat f32 tensor, `[length]`, that is not in memory yet.
pub struct Streamed<'a, E> {
    /// Name in the file.
    pub name: String,
    /// Number of values.
    pub length: usize,
    /// Makes them, as many.
    pub values: Values<'a, E>,
}

/// Writes the tensors with metadata; one of them is in memory at a time. Beside, synced and renamed, so
/// that a reader never sees half a file.
///
/// # Errors
/// - those of the values, or as many as were promised did not come
/// - the folder cannot be written or is full
pub fn save_streamed<E: From<ModelError>>(
    path: &Path,
    tensors: &[Streamed<'_, E>],
    metadata: &BTreeMap<String, String>,
) -> Result<(), E> {
    let header = header(tensors, metadata);
    write_atomically_with(path, |file| {
        let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(ModelError::io(path));
        write(&(header.len() as u64).to_le_bytes())?;
        write(&header)?;
        for Streamed { name, length, values } in tensors {
            let values = values()?;
            if values.len() != *length {
                let problem = format!("{} values of `{name}` in place of {length}", values.len());
                return Err(ModelError::invalid(path, problem).into());
            }
            for values in values.chunks(BLOCK) {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                write(&bytes)?;
            }
        }
        Ok(())
    })
}

/// Names, types, shapes and places, filled up with blanks.
fn header<E>(tensors: &[Streamed<'_, E>], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut entries = Map::new();
    if !metadata.is_empty() {
        let metadata: Map<String, Value> =
            metadata.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
        entries.insert("__metadata__".to_owned(), metadata.into());
    }
    let mut end = 0;
    for Streamed { name, length, .. } in tensors {
        let start = end;
        end += size_of::<f32>() * length;
        let entry = json!({ "dtype": "F32", "shape": [length], "data_offsets": [start, end] });
        entries.insert(name.clone(), entry);
    }
    let mut header = Value::from(entries).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::WeightSource;
    use crate::weights::safetensors::SafetensorsSource;

    fn tensor<'a>(name: &str, values: &'a [f32], promised: usize) -> Streamed<'a, ModelError> {
        let values: Values<'a, ModelError> = Box::new(move || Ok(Cow::Borrowed(values)));
        Streamed { name: name.to_owned(), length: promised, values }
    }

    #[test]
    fn what_was_streamed_is_read_back_and_errors_leave_no_file() -> Result<(), ModelError> {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("x.safetensors");
        let (a, b) = ([1.0, -2.5, 3.0], [4.0]);
        let metadata = BTreeMap::from([("step".to_owned(), "7".to_owned())]);
        let tensors = [tensor("b", &b, 1), tensor("a", &a, 3), tensor("none", &[], 0)];
        save_streamed(&path, &tensors, &metadata)?;
        let source = SafetensorsSource::open_file(&path)?;
        assert_eq!(source.metadata().get("step").map(String::as_str), Some("7"));
        for (name, want) in [("a", &a[..]), ("b", &b)] {
            let values: Vec<f32> = source.load(name, candle_core::DType::F32)?.to_vec1()?;
            assert_eq!(values, want);
        }
        let other = folder.path().join("y.safetensors");
        let short = [tensor("a", &a, 3), tensor("b", &b, 2)];
        let error = save_streamed(&other, &short, &BTreeMap::new()).expect_err("too few values");
        assert!(error.to_string().contains("1 values of `b` in place of 2"), "{error}");
        let failing: Values<'_, ModelError> =
            Box::new(|| Err(ModelError::Tokenizer("no more".into())));
        let failing = [Streamed { name: "a".into(), length: 2, values: failing }];
        let error = save_streamed(&other, &failing, &BTreeMap::new()).expect_err("no values");
        assert!(error.to_string().contains("no more"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 1);
        Ok(())
    }
}
