//! Reading a store: one thread reads a row ahead.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_kernels::rope::rope;
use longdraft_kernels::rows::{scatter_rows, select_rows};
use longdraft_models::target_model::{Ends, KeyValues, Tap, Target};

use super::location::Location;
use super::open_shards::OpenShards;
use super::recipe::{Contents, Part, Recipe};
use super::record::{Record, Widths};
use super::write::{INDEX, Index, Receipt, RowEntry};
use crate::error::{FeatureError, Result};
use crate::{
    BatchFeatures, FeatureNeeds, TeacherFeatures, TeacherKind, key, select_entries, untapped,
};

/// Features that were captured earlier. Of the target only embeddings, head and rotary
/// frequencies are used.
#[derive(Clone)]
pub struct StoredFeatures {
    store: Arc<Store>,
    target: Arc<Target>,
    ahead: Arc<Mutex<Option<Ahead>>>,
}

/// A row that is being read.
struct Ahead {
    part: Part,
    row: usize,
    read: Contents,
    thread: JoinHandle<Result<Record>>,
}

struct Store {
    location: Location,
    index: Index,
    open: OpenShards,
}

impl StoredFeatures {
    /// Opens a complete store for a run that would capture `wanted` itself.
    ///
    /// # Errors
    /// - there is no store, its capture is not finished, or it was made for another target,
    ///   tokenizer, text or objective: everything that differs is named
    pub fn open(spec: &str, wanted: &Recipe, target: Arc<Target>) -> Result<Self> {
        let store = Store::open(spec)?;
        let differences = store.index.recipe.differences_in_use(wanted);
        if !differences.is_empty() {
            let problem = format!(
                "was captured for another configuration: {}; capture again into another place",
                differences.join("; ")
            );
            return Err(store.location.problem("", problem));
        }
        Ok(Self { store: Arc::new(store), target, ahead: Arc::default() })
    }

    /// Reads only the recipe: positions are drawn as it says.
    ///
    /// # Errors
    /// - there is no complete store
    pub fn recipe(spec: &str) -> Result<Recipe> {
        Ok(Store::open(spec)?.index.recipe)
    }

    /// Names the store's content, wherever it lies.
    pub fn identity(&self) -> String {
        let text = serde_json::to_vec(&self.store.index.recipe).unwrap_or_default();
        blake3::hash(&text).to_hex()[..16].to_owned()
    }

    /// Starts to read what is needed of a row on another thread, and to bring it to the target's device, unless one is
    /// being read. What the store does not hold is told when it is asked for.
    pub fn read_ahead(&self, part: Part, row: usize, needs: &FeatureNeeds) {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(read) = self.store.read_for(part, needs).filter(|_| ahead.is_none()) else {
            return;
        };
        let (store, device) = (Arc::clone(&self.store), self.target.device().clone());
        // A device widens what is held in bf16 when it is used.
        let held = self.store.index.recipe.dtype.of_states();
        let dtype = if device.is_cpu() { DType::F32 } else { held };
        let (of_row, widths) = (read.clone(), Widths::of(self.target.config()));
        let thread = std::thread::spawn(move || {
            store.record((part, row), &of_row, dtype, widths)?.upload_ahead(&device)
        });
        *ahead = Some(Ahead { part, row, read, thread });
    }

    fn record(&self, part: Part, row: usize, needs: &FeatureNeeds) -> Result<Record> {
        let read = self.store.read_for(part, needs).ok_or_else(|| {
            let held = &self.store.index.recipe.part(part).contents;
            let (name, needed) = (part.name(), Contents::of(needs));
            let problem = format!("{name} features are {held}; needed are {needed}");
            self.store.location.problem("", problem)
        })?;
        let widths = Widths::of(self.target.config());
        let here = || self.store.record((part, row), &read, DType::F32, widths);
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).take();
        match ahead.filter(|at| (at.part, at.row, &at.read) == (part, row, &read)) {
            // A thread that panicked has said so; the row is read here instead.
            Some(ahead) => ahead.thread.join().unwrap_or_else(|_| here()),
            None => here(),
        }
    }

    /// The target, whose ends are read.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Features of a batch, as the target would give them. All ranks of a spread target hold its ends for them.
    ///
    /// # Errors
    /// - the batch has other tokens or positions than the captured row, the teacher is asked for at
    ///   tokens that were not kept, or the row's shard is missing or damaged
    pub fn features(
        &self,
        part: Part,
        batch: &Batch,
        needs: &FeatureNeeds,
        teacher_tokens: &[u32],
    ) -> Result<BatchFeatures> {
        let ends = self.target.hold_ends()?;
        let row = batch.row;
        let (receipt, entry) = self.store.entry(part, row)?;
        if entry.key != key(batch) {
            let problem = format!("row {row} was captured with other tokens or positions");
            return Err(self.store.location.problem(&receipt.object, problem));
        }
        let record = self.record(part, row, needs)?;
        record.features(&ends, batch, needs, teacher_tokens).map_err(|at| match at {
            Missing::Teacher(token) => self.store.location.problem(
                &receipt.object,
                format!(
                    "row {row}: the teacher of token {token} was not kept: the store was \
                     captured for an objective that learns other tokens"
                ),
            ),
            Missing::Other(error) => error,
        })
    }
}

impl Record {
    /// What an objective reads of a batch, as the target would give it.
    ///
    /// # Errors
    /// - the teacher is asked for at tokens that were not kept, or a tensor cannot be brought to the device
    pub(crate) fn features(
        &self,
        ends: &Ends<'_>,
        batch: &Batch,
        needs: &FeatureNeeds,
        teacher_tokens: &[u32],
    ) -> std::result::Result<BatchFeatures, Missing> {
        let target = ends.target();
        let device = target.device();
        let wide = |tensor: &Tensor| tensor.to_device(device)?.to_dtype(DType::F32);
        let last_kv = match &self.last_kv {
            Some((keys, values)) if needs.taps.contains(&Tap::LastKv) => {
                let row = (&batch.position_ids[..], &batch.document_ids[..]);
                let table = target
                    .rope_table(row, &(0..batch.position_ids.len()).into())
                    .map_err(FeatureError::from)?;
                let k = rope(&wide(keys)?, &table)?;
                Some(KeyValues { k, v: wide(values)? })
            }
            _ => None,
        };
        let hidden_taps = needs.taps.iter().any(|tap| matches!(tap, Tap::Hidden(_)));
        let aux_hidden = self.aux_hidden.as_ref().filter(|_| hidden_taps);
        let aux_hidden = aux_hidden.map(wide).transpose()?;
        let teacher = self.teacher(ends, batch, needs.teacher, teacher_tokens)?;
        Ok(BatchFeatures { last_kv, aux_hidden, teacher, part: None })
    }

    fn teacher(
        &self,
        ends: &Ends<'_>,
        batch: &Batch,
        kind: TeacherKind,
        tokens: &[u32],
    ) -> std::result::Result<TeacherFeatures, Missing> {
        // A store with final states hands those out.
        let kind = match kind {
            TeacherKind::EveryTokenTopK(k) if self.top_k.is_some() => TeacherKind::TopK(k),
            TeacherKind::EveryTokenTopK(_) => TeacherKind::EveryToken,
            kind => kind,
        };
        let every = kind == TeacherKind::EveryToken;
        if kind == TeacherKind::None || (tokens.is_empty() && !every) {
            return Ok(TeacherFeatures::None);
        }
        let place = |token: &u32| self.teacher_tokens.binary_search(token).ok();
        let places: Vec<u32> = tokens
            .iter()
            .map(|token| place(token).map(|at| at as u32).ok_or(Missing::Teacher(*token)))
            .collect::<std::result::Result<_, _>>()?;
        let target = ends.target();
        let device = target.device();
        let hidden = || -> Result<Tensor> {
            let hidden = self.final_hidden.as_ref();
            let hidden = hidden.ok_or_else(|| untapped("the teacher's final states"))?;
            let hidden = hidden.to_device(device)?.to_dtype(DType::F32)?;
            if places.len() == self.teacher_tokens.len() {
                return Ok(hidden);
            }
            Ok(select_rows(&hidden, &places)?)
        };
        Ok(match kind {
            TeacherKind::None => TeacherFeatures::None,
            TeacherKind::Full => TeacherFeatures::Full { hidden: hidden()? },
            TeacherKind::EveryToken | TeacherKind::EveryTokenTopK(_) => {
                let width = target.config().hidden_size;
                let all = batch.ids.len();
                // What nobody reads stays 0.
                let hidden = if tokens.is_empty() {
                    Tensor::zeros((all, width), DType::F32, device)?
                } else {
                    scatter_rows(&hidden()?, tokens, all)?
                };
                TeacherFeatures::EveryToken { hidden }
            }
            TeacherKind::TopK(k) => {
                let k = k.min(target.config().vocab_size);
                let entries = if let Some(stored) = &self.top_k {
                    select_entries(stored, (self.teacher_tokens.len(), &places), k)?
                } else {
                    ends.top_k(&hidden()?, k).map_err(FeatureError::from)?
                };
                TeacherFeatures::TopK { entries, k, hidden: None }
            }
        })
    }
}

/// Why there is no teacher.
pub(crate) enum Missing {
    /// None was kept at this token.
    Teacher(u32),
    Other(FeatureError),
}

impl From<FeatureError> for Missing {
    fn from(error: FeatureError) -> Self {
        Self::Other(error)
    }
}

impl From<candle_core::Error> for Missing {
    fn from(error: candle_core::Error) -> Self {
        Self::Other(error.into())
    }
}

/// A file name without any way out of the store.
fn is_plain(object: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !object.is_empty() && !object.starts_with('.') && object.chars().all(plain)
}

impl Store {
    fn open(spec: &str) -> Result<Self> {
        let location = Location::open(spec, false)?;
        let bytes = location.get(INDEX)?.ok_or_else(|| {
            location.problem(
                "",
                "capturing these features was not finished: run `longdraft capture` again",
            )
        })?;
        let index: Index = serde_json::from_slice(&bytes).map_err(|error| {
            let problem = format!("is damaged: {error}: run `longdraft capture` again");
            location.problem(INDEX, problem)
        })?;
        if index.recipe.format != Recipe::FORMAT {
            let problem = format!("format `{}` is not `{}`", index.recipe.format, Recipe::FORMAT);
            return Err(location.problem(INDEX, problem));
        }
        let receipts = index.train.iter().chain(&index.held_out);
        if let Some(other) = receipts.map(|shard| &shard.object).find(|object| !is_plain(object)) {
            let problem = "is not a file of this store: run `longdraft capture` again";
            return Err(location.problem(INDEX, format!("`{other}` {problem}")));
        }
        Ok(Self { location, index, open: OpenShards::default() })
    }

    /// The shard of a row, and the row in it.
    fn entry(&self, part: Part, row: usize) -> Result<(&Receipt, &RowEntry)> {
        let shards = self.index.part(part);
        let first = |shard: &Receipt| shard.rows.first().is_some_and(|entry| entry.row <= row);
        let shard = shards.partition_point(first).checked_sub(1).map(|at| &shards[at]);
        let entry = shard
            .and_then(|shard| Some((shard, shard.rows.iter().find(|entry| entry.row == row)?)));
        entry.ok_or_else(|| {
            let name = part.name();
            let problem =
                format!("{name} row {row} was not captured: run `longdraft capture` again");
            self.location.problem("", problem)
        })
    }

    /// What is read of a part's rows, if that serves.
    fn read_for(&self, part: Part, needs: &FeatureNeeds) -> Option<Contents> {
        self.index.recipe.part(part).contents.read_for(&Contents::of(needs))
    }

    /// What `read` names of a row, with states in a type, as [`Record::read`], and as wide as the target's.
    fn record(
        &self,
        (part, row): (Part, usize),
        read: &Contents,
        dtype: DType,
        widths: Widths,
    ) -> Result<Record> {
        let (receipt, entry) = self.entry(part, row)?;
        let held = &self.index.recipe.part(part).contents;
        let problem = |problem: &dyn std::fmt::Display| {
            let remedy = "remove the file, and run `longdraft capture` again";
            self.location.problem(&receipt.object, format!("row {row}: {problem}: {remedy}"))
        };
        let compression = self.index.recipe.compression;
        let shard = self.open.shard(&self.location, compression, receipt)?;
        let record = Record::read(&shard, row, read, dtype).map_err(|error| problem(&error))?;
        record.check(entry.tokens, (held, read), widths).map_err(|text| problem(&text))?;
        // Capture keeps none; the loss would be blamed on the text.
        if !record.is_finite().map_err(|error| problem(&error))? {
            return Err(problem(&"its values are not finite numbers"));
        }
        record.with_layers(&held.layers, &read.layers).map_err(|error| problem(&error))
    }
}
