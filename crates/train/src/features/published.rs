//! Features that the public EAGLE-3 trainer (SpecForge) wrote: one `torch.save` of a document each.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `input_ids`, `loss_mask` | `[T]` or `[1, T]` i64 | zeros after the document are padding |
//! | `aux_hidden_state` | `[1, T, L·H]` | tapped layers side by side |
//! | `hidden_state` | `[1, T, H]` | after the final norm |
//!
//! The pickles are read by a machine that builds tensors and calls nothing.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_data::batch::AnchorOffset;
use longdraft_models::target::Target;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::pth::PthSource;

use super::store::{Contents, Record};
use crate::error::{Result, TrainError};

/// One document of a folder of records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedDocument {
    /// The record's file.
    pub path: PathBuf,
    /// Tokens without padding.
    pub ids: Vec<u32>,
    /// Whether a token is learned.
    pub loss_mask: Vec<bool>,
}

impl PublishedDocument {
    /// Reads ids and mask of a record and leaves out the padding after its last token: ids of zero
    /// that are not learned.
    ///
    /// # Errors
    /// - no such record: what is wrong is named
    pub fn read(path: &Path) -> Result<Self> {
        let source = PthSource::open(path)?;
        let problem = |text: String| TrainError::features(path.display().to_string(), text);
        for name in ["input_ids", "loss_mask"] {
            let shape = source.shape(name).unwrap_or_default();
            if !matches!(shape[..], [_] | [1, _]) {
                return Err(problem(format!("`{name}` {shape:?} where [T] or [1, T] is needed")));
            }
        }
        let ids = source.load_integers("input_ids")?;
        let mask = source.load_integers("loss_mask")?;
        if ids.len() != mask.len() {
            return Err(problem(format!("{} ids and a mask of {}", ids.len(), mask.len())));
        }
        let padding = ids.iter().zip(&mask).rev().take_while(|(id, mask)| (**id, **mask) == (0, 0));
        let tokens = ids.len() - padding.count();
        let ids = ids[..tokens].iter().map(|id| u32::try_from(*id));
        let ids: std::result::Result<Vec<_>, _> = ids.collect();
        let ids = ids.map_err(|_| problem("`input_ids` below 0 or beyond 32 bits".to_owned()))?;
        if let Some(other) = mask.iter().find(|mask| !(0..=1).contains(*mask)) {
            return Err(problem(format!("`loss_mask` is {other}, neither 0 nor 1")));
        }
        let loss_mask = mask[..tokens].iter().map(|mask| *mask == 1).collect();
        Ok(Self { path: path.to_path_buf(), ids, loss_mask })
    }
}

/// Folders, at most, that lie within one another.
const MOST_FOLDERS: usize = 16;

/// The records (`.ckpt`, `.pt`) in a folder and those below it, by name.
///
/// # Errors
/// - the folder cannot be read, holds none or compressed ones, or leads in circles
pub fn record_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let fail = |error: &dyn std::fmt::Display| {
        TrainError::features(folder.display().to_string(), error.to_string())
    };
    let (mut open, mut found) = (vec![(folder.to_path_buf(), 1)], Vec::new());
    while let Some((folder, depth)) = open.pop() {
        if depth > MOST_FOLDERS {
            return Err(fail(&format!("{} leads in circles", folder.display())));
        }
        for entry in std::fs::read_dir(&folder).map_err(|error| fail(&error))? {
            let path = entry.map_err(|error| fail(&error))?.path();
            let extension = path.extension().unwrap_or_default();
            if path.is_dir() {
                open.push((path, depth + 1));
            } else if extension == "gz" && path.file_stem().is_some_and(is_record) {
                let name = path.display();
                return Err(fail(&format!("{name} is compressed: unpack such records first")));
            } else if path.file_name().is_some_and(is_record) {
                found.push(path);
            }
        }
    }
    found.sort();
    if found.is_empty() { Err(fail(&"no records (`.ckpt`, `.pt`) in it")) } else { Ok(found) }
}

fn is_record(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "ckpt" || extension == "pt")
}

/// A folder of records, found by the tokens of their documents.
#[derive(Debug)]
pub struct PublishedRecords {
    folder: PathBuf,
    by_text: HashMap<blake3::Hash, PathBuf>,
    /// Hash of names and sizes of the files.
    fingerprint: String,
}

impl PublishedRecords {
    /// Reads ids and masks of all records.
    ///
    /// # Errors
    /// - as [`record_files`] and [`PublishedDocument::read`]
    pub fn open(folder: &Path) -> Result<Self> {
        let (mut by_text, mut hasher) = (HashMap::new(), blake3::Hasher::new());
        for path in record_files(folder)? {
            let document = PublishedDocument::read(&path)?;
            let size = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
            hasher
                .update(path.strip_prefix(folder).unwrap_or(&path).as_os_str().as_encoded_bytes());
            hasher.update(&size.to_le_bytes());
            by_text.insert(hash_of(&document.ids), path);
        }
        let fingerprint = hasher.finalize().to_hex()[..16].to_owned();
        Ok(Self { folder: folder.to_path_buf(), by_text, fingerprint })
    }

    /// Hash of names and sizes of the files.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Refuses what such records do not hold.
    ///
    /// # Errors
    /// - keys and values of the last layer are asked for, or positions that do not begin at 0
    pub fn check(&self, contents: &Contents, anchor: AnchorOffset) -> Result<()> {
        if anchor.enabled {
            return Err(self.problem(
                "the records were made at positions from 0 on: set `data.anchor.enabled=false`",
            ));
        }
        if contents.last_kv {
            return Err(self.problem(
                "the records hold no keys and values, which this draft reads: choose a `draft.method` that \
                 reads layers' outputs, or capture from the target",
            ));
        }
        Ok(())
    }

    /// The features of a batch in place of the target's pass over it.
    ///
    /// # Errors
    /// - a document has no record, a record's tensors do not fit the target, its tapped layers or its
    ///   own ids, or hold a value that is not finite
    pub fn record(
        &self,
        target: &Target,
        batch: &Batch,
        contents: &Contents,
        teacher_rows: &[u32],
    ) -> Result<Record> {
        let hidden = target.config().hidden_size;
        let (mut aux, mut last, mut first) = (Vec::new(), Vec::new(), 0);
        for document in batch.document_ids.chunk_by(|a, b| a == b) {
            let ids = &batch.ids[first..first + document.len()];
            first += document.len();
            let path = self.by_text.get(&hash_of(ids)).ok_or_else(|| self.unknown(ids, batch))?;
            let source = PthSource::open(path)?;
            if !contents.layers.is_empty() {
                let width = contents.layers.len() * hidden;
                aux.push(states(&source, "aux_hidden_state", (ids.len(), width))?);
            }
            last.push(states(&source, "hidden_state", (ids.len(), hidden))?);
        }
        let aux = (!aux.is_empty()).then(|| Tensor::cat(&aux, 0)).transpose()?;
        let aux = aux.map(|aux| aux.to_device(target.device())).transpose()?;
        let last = Tensor::cat(&last, 0)?.to_device(target.device())?;
        Record::of_states(target, aux, &last, contents, teacher_rows)
    }

    fn unknown(&self, ids: &[u32], batch: &Batch) -> TrainError {
        self.problem(&format!(
            "no record has the {} tokens {:?}... of packed row {}; train on what `longdraft data records` \
             wrote of this folder, with `data.row_tokens` no less than the longest record and prompts as they \
             are",
            ids.len(),
            &ids[..ids.len().min(4)],
            batch.row,
        ))
    }

    fn problem(&self, text: &str) -> TrainError {
        TrainError::features(self.folder.display().to_string(), text)
    }
}

fn hash_of(ids: &[u32]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    ids.iter().for_each(|id| {
        hasher.update(&id.to_le_bytes());
    });
    hasher.finalize()
}

/// The first `tokens` rows of a `[1, T, W]` or `[T, W]` tensor.
fn states(source: &PthSource, name: &str, (tokens, width): (usize, usize)) -> Result<Tensor> {
    let problem = |text: String| TrainError::features(source.path().display().to_string(), text);
    let found = source.shape(name).ok_or_else(|| problem(format!("no tensor `{name}`")))?;
    let fits = match found[..] {
        [1, rows, own] | [rows, own] => rows >= tokens && own == width,
        _ => false,
    };
    if !fits {
        return Err(problem(format!(
            "`{name}` {found:?} where [1, {tokens} or more, {width}] is needed: another target, or other \
             layers than the draft's target_layers"
        )));
    }
    let all = source.load(name, DType::F32)?;
    let states = all.reshape(((), width))?.narrow(0, 0, tokens)?;
    let largest = states.abs()?.max_all()?.to_scalar::<f32>()?;
    // NaN hides from a maximum, not from a sum.
    let total = states.sum_all()?.to_scalar::<f32>()?;
    if !largest.is_finite() || total.is_nan() {
        return Err(problem(format!("`{name}` holds values that are not finite")));
    }
    Ok(states)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use longdraft_models::weights::pth::save;

    use super::*;

    fn write(path: &Path, ids: &[i64], mask: &[i64]) {
        let tensor = |values: &[i64]| {
            Tensor::from_slice(values, values.len(), &Device::Cpu).expect("tensor")
        };
        let tensors = [("input_ids", ids), ("loss_mask", mask)];
        save(path, &tensors.map(|(name, values)| (name.to_owned(), tensor(values))))
            .expect("written");
    }

    #[test]
    fn padding_goes_and_nonsense_is_named() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("data_0.ckpt");
        write(&path, &[5, 0, 7, 0, 0, 0], &[0, 0, 1, 1, 0, 0]);
        let document = PublishedDocument::read(&path).expect("a record");
        assert_eq!(document.ids, [5, 0, 7, 0]);
        assert_eq!(document.loss_mask, [false, false, true, true]);
        for (ids, mask, text) in [
            (&[1, 2][..], &[1][..], "2 ids and a mask of 1"),
            (&[1, -2], &[1, 1], "below 0"),
            (&[1, 2], &[1, 2], "neither 0 nor 1"),
        ] {
            write(&path, ids, mask);
            let error = PublishedDocument::read(&path).expect_err("refused").to_string();
            assert!(error.contains(text) && error.contains("data_0.ckpt"), "{error}");
        }
    }

    #[test]
    fn records_are_found_below_their_folder_in_order() {
        let folder = tempfile::tempdir().expect("folder");
        assert!(record_files(folder.path()).expect_err("empty").to_string().contains("no records"));
        for name in ["rows_2000/data_2.ckpt", "rows_0/data_1.ckpt", "rows_0/notes.txt"] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
            std::fs::write(path, b"").expect("file");
        }
        let found = record_files(folder.path()).expect("two");
        let names = found.iter().map(|path| path.strip_prefix(folder.path()).expect("below"));
        let names: Vec<_> = names.collect();
        assert_eq!(names, [Path::new("rows_0/data_1.ckpt"), Path::new("rows_2000/data_2.ckpt")]);
        assert!(PublishedDocument::read(&found[0]).is_err());
    }
}
