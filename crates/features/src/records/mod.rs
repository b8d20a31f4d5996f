//! Features that other trainers and engines captured, read in place of the target's passes.
//!
//! | kind | files | told of layers | final states |
//! |---|---|---|---|
//! | `specforge` | a `torch.save` of a document each | nothing | after the final norm, or none |
//! | `speculators` | safetensors of a document each, as vLLM writes them | nothing | the last layer's output |
//! | `deepspec` | `manifest.json`, `samples.idx`, shards | their ids | after the final norm |
//!
//! Documents are found by their tokens. What a folder does not tell of its layers the configuration may
//! (`capture.record_layers`); otherwise only the width can be checked.

mod columns;
mod deepspec;
mod folder;
mod specforge;
mod speculators;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_data::batch::AnchorOffset;
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_models::TargetConfig;
use longdraft_models::target_model::Target;

use self::columns::Columns;
use super::store::{Contents, Missing, Record, StoredTeacher};
use super::{BatchFeatures, FeatureNeeds};
use crate::error::{FeatureError, Result};

pub use folder::RecordFolder;

/// One document of a folder of records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordDocument {
    /// The file, and where it holds several documents, which one.
    pub place: String,
    /// Tokens without padding.
    pub ids: Vec<u32>,
    /// Whether a token is learned; engines do not say.
    pub loss_mask: Option<Vec<bool>>,
}

impl RecordDocument {
    /// Of numbers as files hold them.
    fn of_numbers(place: String, ids: &[i64], mask: Option<&[i64]>) -> Result<Self> {
        let problem = |text: String| FeatureError::store(place.clone(), text);
        let of_id = |id: &i64| u32::try_from(*id).map_err(|_| *id);
        let ids: std::result::Result<Vec<u32>, i64> = ids.iter().map(of_id).collect();
        let ids =
            ids.map_err(|id| problem(format!("token id {id} is below 0 or beyond 32 bits")))?;
        if let Some(other) =
            mask.iter().flat_map(|mask| mask.iter()).find(|m| !(0..=1).contains(*m))
        {
            return Err(problem(format!("`loss_mask` is {other}, neither 0 nor 1")));
        }
        let loss_mask = mask.map(|mask| mask.iter().map(|mask| *mask == 1).collect());
        Ok(Self { place, ids, loss_mask })
    }
}

/// A problem with a file or folder of records.
fn problem(path: &Path, text: impl std::fmt::Display) -> FeatureError {
    FeatureError::store(path.display().to_string(), text)
}

/// What a record holds of a document's `T` tokens or more.
struct Captured {
    /// Outputs of layers, before any norm, `[T, L, H]`, and the tensor's name.
    layers: Option<(&'static str, Tensor)>,
    /// After the final norm, `[T, H]`, and the tensor's name.
    last: Option<(&'static str, Tensor)>,
}

/// How a kind of folder is read.
trait Format: Send + Sync {
    /// Documents.
    fn len(&self) -> usize;

    /// Tokens and mask of a document.
    fn document(&self, index: usize) -> Result<RecordDocument>;

    /// States of a document of `tokens` tokens, of width `hidden`.
    fn captured(&self, index: usize, size: (usize, usize)) -> Result<Captured>;

    /// Ids of the layers, from 0, where the folder tells them.
    fn layers(&self) -> Option<&[usize]> {
        None
    }

    /// Width of the states, where the folder tells it.
    fn hidden_size(&self) -> Option<usize> {
        None
    }
}

/// A folder of records, whose documents are found by their tokens.
pub struct Records {
    folder: RecordFolder,
    /// Ids of the layers, from 0, in the order of the tensors.
    layers: Option<Vec<usize>>,
    by_text: HashMap<blake3::Hash, usize>,
    /// The largest token id and the document that has it.
    largest: (u32, usize),
    fingerprint: String,
}

impl Records {
    /// Reads the tokens of all documents. `layers` are ids of the held layers, from 0, in the order of the
    /// tensors.
    ///
    /// # Errors
    /// - as [`RecordFolder::open`] and [`RecordFolder::document`], or `layers` are not those that the folder
    ///   tells
    pub fn open(folder: &Path, layers: Option<&[usize]>) -> Result<Self> {
        let folder = RecordFolder::open(folder)?;
        let layers = match (folder.layers(), layers) {
            (Some(own), Some(told)) if own != told => {
                return Err(folder.problem(format!(
                    "capture.record_layers: the folder says that its layers are {own:?}, not {told:?}"
                )));
            }
            (own, told) => own.or(told).map(<[usize]>::to_vec),
        };
        let (mut by_text, mut largest) = (HashMap::new(), (0, 0));
        for index in 0..folder.len() {
            let document = folder.document(index)?;
            let own = document.ids.iter().max().copied().unwrap_or(0);
            largest = largest.max((own, index));
            by_text.insert(hash_of(&document.ids), index);
        }
        let mut hasher = folder.hash();
        hasher.update(format!("{layers:?}").as_bytes());
        let fingerprint = hasher.finalize().to_hex()[..16].to_owned();
        Ok(Self { folder, layers, by_text, largest, fingerprint })
    }

    /// Hash of names and sizes of the files and of the layers' ids.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Whether it is known which layers the records hold, and in which order.
    pub fn tells_layers(&self) -> bool {
        self.layers.is_some()
    }

    /// Refuses what such records do not hold.
    ///
    /// # Errors
    /// - keys and values of the last layer are asked for, positions that do not begin at 0, layers that are
    ///   not held; token ids or a width of another target
    pub fn check(
        &self,
        target: &TargetConfig,
        contents: &Contents,
        anchor: AnchorOffset,
    ) -> Result<()> {
        if anchor.enabled {
            return Err(self.folder.problem(
                "the records were made at positions from 0 on: set `data.anchor.enabled=false`",
            ));
        }
        if contents.last_kv {
            return Err(self.folder.problem(
                "the records hold no keys and values, which this draft reads: choose a `draft.method` that \
                 reads layers' outputs, or capture from the target",
            ));
        }
        let (id, document) = self.largest;
        if id as usize >= target.vocab_size {
            let place = self.folder.document(document)?.place;
            let vocabulary = target.vocab_size;
            let problem =
                format!("token id {id} is beyond the target's vocabulary of {vocabulary}");
            return Err(FeatureError::store(place, problem));
        }
        let own = self.folder.hidden_size();
        if let Some(own) = own.filter(|own| *own != target.hidden_size) {
            let hidden = target.hidden_size;
            let problem = format!("states of width {own}, and the target's have {hidden}");
            return Err(self.folder.problem(problem));
        }
        if let Some(layers) = &self.layers {
            Columns::of(Some(layers), (layers.len(), true), contents, target.num_hidden_layers)
                .map_err(|problem| self.folder.problem(problem))?;
        }
        Ok(())
    }

    /// Refuses documents of which one has no record: their tokens, each with where they come from.
    ///
    /// # Errors
    /// - a document has no record; the first of them is named
    pub fn require_all<'a>(
        &self,
        documents: impl IntoIterator<Item = (&'a [u32], &'a str)>,
    ) -> Result<()> {
        let is_missing = |(ids, _): &(&[u32], &str)| !self.by_text.contains_key(&hash_of(ids));
        let missing = documents.into_iter().find(is_missing);
        missing.map_or(Ok(()), |(ids, origin)| Err(self.unknown(ids, origin)))
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
        teacher_tokens: &[u32],
    ) -> Result<Record> {
        let (mut aux, mut last, mut first) = (Vec::new(), Vec::new(), 0);
        for document in batch.document_ids.chunk_by(|a, b| a == b) {
            let ids = &batch.ids[first..first + document.len()];
            first += document.len();
            let index = self
                .by_text
                .get(&hash_of(ids))
                .ok_or_else(|| self.unknown(ids, &format!("packed row {}", batch.row)))?;
            let (layers, states) = self.states(*index, ids.len(), target, contents)?;
            aux.extend(layers);
            last.extend(states);
        }
        let joined = |parts: &[Tensor]| -> Result<Option<Tensor>> {
            let all = (!parts.is_empty()).then(|| Tensor::cat(parts, 0)).transpose()?;
            Ok(all.map(|all| all.to_device(target.device())).transpose()?)
        };
        let (aux, last) = (joined(&aux)?, joined(&last)?);
        Record::of_states(target, aux, last.as_ref(), contents, teacher_tokens)
    }

    /// The tapped layers side by side, `[T, L·H]`, and the states after the final norm, `[T, H]`, of a document,
    /// as far as `contents` name them.
    fn states(
        &self,
        index: usize,
        tokens: usize,
        target: &Target,
        contents: &Contents,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let config = target.config();
        let place = || self.folder.document(index).map(|document| document.place);
        let Captured { layers, last } =
            self.folder.captured(index, (tokens, config.hidden_size))?;
        let held = layers.as_ref().map_or(0, |(_, layers)| layers.dims()[1]);
        let told = self.layers.as_deref();
        let count = config.num_hidden_layers;
        let columns = match Columns::of(told, (held, last.is_some()), contents, count) {
            Ok(columns) => columns,
            Err(problem) => return Err(FeatureError::store(place()?, problem)),
        };
        let column = |at: usize| -> Result<Tensor> {
            let (name, layers) = layers.as_ref().ok_or_else(|| super::untapped("layers"))?;
            let states = layers.narrow(1, at, 1)?.squeeze(1)?.contiguous()?;
            if is_finite(&states)? {
                return Ok(states);
            }
            let problem = format!("`{name}`, its layer {at}, holds values that are not finite");
            Err(FeatureError::store(place()?, problem))
        };
        let aux: Result<Vec<Tensor>> = columns.aux.iter().map(|at| column(*at)).collect();
        let aux = aux?;
        let aux = (!aux.is_empty()).then(|| Tensor::cat(&aux, 1)).transpose()?;
        let last = match (contents.teacher, last, columns.last) {
            (StoredTeacher::None, ..) | (_, None, None) => None,
            (_, Some((_, last)), _) if is_finite(&last)? => Some(last),
            (_, Some((name, _)), _) => {
                let problem = format!("`{name}` holds values that are not finite");
                return Err(FeatureError::store(place()?, problem));
            }
            (_, None, Some(at)) => {
                let states = column(at)?.to_device(target.device())?;
                Some(rms_norm(&states, target.final_norm(), config.rms_norm_eps)?)
            }
        };
        Ok((aux, last))
    }

    fn unknown(&self, ids: &[u32], origin: &str) -> FeatureError {
        self.folder.problem(format!(
            "no record has the {} tokens {:?}... of {origin}; train on what `longdraft data records` wrote of \
             this folder, and hold out of the same, with `data.row_tokens` no less than the longest record and \
             prompts as they are",
            ids.len(),
            &ids[..ids.len().min(4)],
        ))
    }
}

impl std::fmt::Debug for Records {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.folder, formatter)
    }
}

/// Records in the place of a store: training reads them as they are.
#[derive(Clone)]
pub struct RecordFeatures {
    records: Arc<Records>,
    target: Arc<Target>,
}

impl RecordFeatures {
    /// Records whose target's ends are `target`'s.
    pub fn new(records: Records, target: Arc<Target>) -> Self {
        Self { records: Arc::new(records), target }
    }

    /// Names the records' content, wherever they lie.
    pub fn identity(&self) -> &str {
        self.records.fingerprint()
    }

    /// The target, whose ends are read.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Features of a batch, as the target would give them. All ranks of a spread target hold its ends for them.
    ///
    /// # Errors
    /// - as [`Records::record`]
    pub fn features(
        &self,
        batch: &Batch,
        needs: &FeatureNeeds,
        teacher_tokens: &[u32],
    ) -> Result<BatchFeatures> {
        let (ends, contents) = (self.target.hold_ends()?, Contents::of(needs));
        let record = self.records.record(&self.target, batch, &contents, teacher_tokens)?;
        record.features(&ends, batch, needs, teacher_tokens).map_err(|at| match at {
            Missing::Teacher(token) => {
                self.records.folder.problem(format!("the teacher of token {token} is not held"))
            }
            Missing::Other(error) => error,
        })
    }
}

fn hash_of(ids: &[u32]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    ids.iter().for_each(|id| {
        hasher.update(&id.to_le_bytes());
    });
    hasher.finalize()
}

fn is_finite(states: &Tensor) -> Result<bool> {
    let largest = states.abs()?.max_all()?.to_scalar::<f32>()?;
    // NaN hides from a maximum, not from a sum.
    let total = states.sum_all()?.to_scalar::<f32>()?;
    Ok(largest.is_finite() && !total.is_nan())
}

/// Whether a place of features is a folder of records: one that `longdraft capture` did not write and that holds
/// any.
pub fn is_record_folder(place: &str) -> bool {
    let folder = Path::new(place.strip_prefix("file://").unwrap_or(place));
    folder.is_dir() && !super::store::is_begun(folder) && folder::holds_records(folder)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use longdraft_models::weights::safetensors::save;

    use super::*;

    #[test]
    fn documents_without_a_record_are_named_before_one_is_read() {
        let folder = tempfile::tempdir().expect("folder");
        for (index, ids) in [[5_i64, 60, 7], [8, 200, 11]].iter().enumerate() {
            let ids = Tensor::from_slice(ids, 3, &Device::Cpu).expect("ids");
            let states = Tensor::zeros((3, 2, 4), DType::F32, &Device::Cpu).expect("states");
            let tensors = [("token_ids".to_owned(), ids), ("hidden_states".to_owned(), states)];
            let path = folder.path().join(format!("hs_{index}.safetensors"));
            save(&path, &tensors, HashMap::new()).expect("record");
        }
        let records = Records::open(folder.path(), None).expect("records");
        let held: [(&[u32], &str); 2] = [(&[8, 200, 11], "a:1"), (&[5, 60, 7], "a:2")];
        records.require_all(held).expect("both are held");
        records.require_all([]).expect("nothing is asked for");
        // The beginning of a document is none.
        let others: [(&[u32], &str); 2] = [(&[5, 60], "b:1"), (&[9], "b:2")];
        let error = records.require_all(held.into_iter().chain(others)).expect_err("missing");
        let error = error.to_string();
        assert!(error.contains("the 2 tokens [5, 60]... of b:1;"), "{error}");
    }
}
