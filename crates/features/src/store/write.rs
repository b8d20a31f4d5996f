//! Writing a store, alone or with other processes.

use std::ops::Range;
use std::time::Duration;

use longdraft_data::Batch;
use serde::{Deserialize, Serialize};

use super::claim::{CLAIMS, Claim, LEASE, RENEWAL};
use super::encode::encode;
use super::location::Location;
use super::recipe::{Compression, Part, Recipe};
use super::record::Record;
use crate::error::{FeatureError, Result};
use crate::key;

pub(super) const RECIPE: &str = "recipe.json";
pub(super) const INDEX: &str = "index.json";

/// Pause before a shard that another process took over is looked at again.
const PAUSE: Duration = Duration::from_secs(1);

/// What a complete shard holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Receipt {
    /// File name.
    pub(super) object: String,
    pub(super) bytes: u64,
    pub(super) blake3: String,
    pub(super) rows: Vec<RowEntry>,
}

/// One packed row of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RowEntry {
    pub(super) row: usize,
    pub(super) tokens: usize,
    /// Hash of what the target saw.
    pub(super) key: String,
}

/// `index.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    pub(super) recipe: Recipe,
    pub(super) train: Vec<Receipt>,
    pub(super) held_out: Vec<Receipt>,
}

impl Index {
    pub(super) fn part(&self, part: Part) -> &[Receipt] {
        match part {
            Part::Train => &self.train,
            Part::HeldOut => &self.held_out,
        }
    }
}

/// One shard of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardPlan {
    /// Of which part.
    pub part: Part,
    /// Its place among the part's shards.
    pub index: usize,
    /// Its packed rows.
    pub rows: Range<usize>,
}

impl ShardPlan {
    fn name(&self) -> String {
        format!("{}-{:05}", self.part.name(), self.index)
    }

    fn receipt(&self) -> String {
        format!("{}.json", self.name())
    }

    fn object(&self, compression: Compression) -> String {
        match compression {
            Compression::None => format!("{}.safetensors", self.name()),
            Compression::Zstd => format!("{}.safetensors.zst", self.name()),
        }
    }
}

/// What a capture will write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// Packed tokens of both parts.
    pub tokens: u64,
    /// Bytes of all shards, before compression.
    pub bytes: u64,
    /// Of these, not yet captured.
    pub bytes_left: u64,
    /// Free bytes where the store lies, if it is a local folder and the system tells.
    pub free: Option<u64>,
}

impl Estimate {
    /// Mean bytes of a token.
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes as f64 / self.tokens.max(1) as f64
    }

    /// Free bytes, where they are known and fewer than are still to be written.
    fn too_few(&self) -> Option<u64> {
        self.free.filter(|free| *free < self.bytes_left)
    }
}

/// Whose turn a shard is.
pub enum Turn {
    /// It is complete.
    Complete,
    /// Another process works on it: the shard, who it is and by which claim, unless it finished at this moment.
    Busy(Option<String>),
    /// This process's; it must be written or given up.
    Mine(Work),
}

/// A shard that this process captures.
pub struct Work {
    shard: ShardPlan,
    claim: Claim,
    rows: Vec<(Batch, Record)>,
    /// What was wrong with the file that lay in its place.
    pub damage: Option<String>,
}

/// A store that is being written.
pub struct StoreWriter {
    location: Location,
    recipe: Recipe,
    verify: bool,
}

impl StoreWriter {
    /// Opens a store, which may be empty. With `verify` the hash of every complete shard is checked also
    /// where that means fetching it; in a local folder it always is.
    ///
    /// # Errors
    /// - the place cannot be written, or holds features of another recipe: what differs is named
    pub fn open(spec: &str, recipe: Recipe, verify: bool) -> Result<Self> {
        let location = Location::open(spec, true)?;
        let verify = verify || location.folder().is_some();
        let store = Self { location, recipe, verify };
        if store.location.size(RECIPE)?.is_some() {
            store.compare()?;
        }
        Ok(store)
    }

    /// Says what the store is going to hold, so that no process adds anything else.
    ///
    /// # Errors
    /// - the place cannot be written, or another process has begun a store of another recipe
    pub fn begin(&self) -> Result<()> {
        let text = serde_json::to_vec_pretty(&self.recipe).unwrap_or_default();
        // Another process may be writing them at this moment, so only old ones go.
        ["", CLAIMS].iter().for_each(|folder| self.location.remove_staged(folder, "", LEASE));
        if self.location.create(RECIPE, &text)? { Ok(()) } else { self.compare() }
    }

    /// Refuses a store of another recipe.
    fn compare(&self) -> Result<()> {
        let differences = read_recipe(&self.location)?.differences(&self.recipe);
        if differences.is_empty() {
            return Ok(());
        }
        let problem = format!(
            "holds features of another configuration: {}; give another place, or remove it",
            differences.join("; ")
        );
        Err(self.location.problem("", problem))
    }

    /// Every shard, training rows first.
    pub fn shards(&self) -> Vec<ShardPlan> {
        let of_part = |part: Part| {
            let recipe = self.recipe.part(part).clone();
            (0..recipe.shards.len()).map(move |index| {
                let rows = recipe.rows_of(index);
                ShardPlan { part, index, rows }
            })
        };
        Part::ALL.into_iter().flat_map(of_part).collect()
    }

    /// Whether a shard has a receipt; its file is not looked at.
    ///
    /// # Errors
    /// - the store cannot be read
    pub fn has_receipt(&self, shard: &ShardPlan) -> Result<bool> {
        Ok(self.location.size(&shard.receipt())?.is_some())
    }

    /// Refuses to begin what does not fit.
    ///
    /// # Errors
    /// - more bytes are still to be written than are known to be free
    pub fn require_room(&self, estimate: &Estimate) -> Result<()> {
        estimate.too_few().map_or(Ok(()), |free| {
            let location = self.location.name().to_owned();
            Err(FeatureError::NoRoom { location, bytes_left: estimate.bytes_left, free })
        })
    }

    /// Free bytes, if the store is a local folder and the system tells.
    pub fn free_bytes(&self) -> Option<u64> {
        longdraft_models::disk::free_bytes(self.location.folder()?)
    }

    /// The receipt of a whole shard, or what is wrong with it.
    fn receipt(&self, shard: &ShardPlan) -> Result<std::result::Result<Receipt, Option<String>>> {
        let Some(bytes) = self.location.get(&shard.receipt())? else {
            return Ok(Err(None));
        };
        let Ok(receipt) = serde_json::from_slice::<Receipt>(&bytes) else {
            return Ok(Err(Some(format!("{} is unreadable", shard.receipt()))));
        };
        let object = &receipt.object;
        // What another file or other rows stand in would be called complete, and miss when it is trained on.
        let rows = receipt.rows.iter().map(|entry| entry.row);
        if *object != shard.object(self.recipe.compression) || !rows.eq(shard.rows.clone()) {
            return Ok(Err(Some(format!("{} is of another shard", shard.receipt()))));
        }
        let problem = match self.location.size(object)? {
            None => Some(format!("{object} is missing")),
            Some(size) if size != receipt.bytes => {
                Some(format!("{object} has {size} bytes, not {}", receipt.bytes))
            }
            Some(_) if self.verify => {
                let hash = hash_of(&self.location, object)?;
                (hash != receipt.blake3).then(|| format!("{object} is damaged"))
            }
            Some(_) => None,
        };
        Ok(problem.map_or(Ok(receipt), |problem| Err(Some(problem))))
    }

    /// Takes a shard, if it is neither complete nor another process's.
    ///
    /// # Errors
    /// - the store cannot be read or written
    pub fn take(&self, shard: &ShardPlan) -> Result<Turn> {
        if self.receipt(shard)?.is_ok() {
            return Ok(Turn::Complete);
        }
        let claim = match Claim::take(&self.location, &shard.name())? {
            Ok(claim) => claim,
            Err(holder) => return Ok(Turn::Busy(holder)),
        };
        // Another process may have finished it in between.
        let Err(damage) = self.receipt(shard)? else {
            claim.release(&self.location)?;
            return Ok(Turn::Complete);
        };
        // Half files that a killed process left of it. Not those of its claims: a living process may
        // be asking for the shard at this moment.
        self.location.remove_staged("", &format!("{}.", shard.name()), Duration::ZERO);
        Ok(Turn::Mine(Work { shard: shard.clone(), claim, rows: Vec::new(), damage }))
    }

    /// Adds a row to a shard, in main memory as the store holds it, and renews the shard's claim; `false` if
    /// another process took it over.
    ///
    /// # Errors
    /// - the store cannot be written, or the row cannot be brought into main memory
    /// - the row holds values that are not finite
    pub fn add(&self, work: &mut Work, batch: Batch, record: Record) -> Result<bool> {
        let record = record.on_host(self.recipe.dtype)?;
        record.require_finite(batch.row)?;
        work.rows.push((batch, record));
        work.claim.renew(&self.location)
    }

    /// Runs what may take long, and keeps a shard this process's meanwhile.
    pub(super) fn hold_while<T>(&self, work: &mut Work, run: impl FnOnce() -> T) -> T {
        work.claim.hold_while(&self.location, RENEWAL, run)
    }

    /// Writes a shard, then its receipt, and lets go of it. If another process took it over meanwhile, this one
    /// gives it up and waits for the other; should that one let go of it too, it is written after all.
    ///
    /// # Errors
    /// - the store cannot be written; the shard stays incomplete
    pub fn complete(&self, mut work: Work) -> Result<()> {
        let written = self.write(&mut work);
        if matches!(written, Ok(false)) {
            return self.complete_after(work);
        }
        let released = work.claim.release(&self.location);
        written.and(released)
    }

    /// Waits for the process that took a shard over. The old claim is that process's to remove.
    fn complete_after(&self, work: Work) -> Result<()> {
        loop {
            match self.take(&work.shard)? {
                Turn::Complete => return Ok(()),
                Turn::Busy(_) => std::thread::sleep(PAUSE),
                Turn::Mine(again) => return self.complete(Work { rows: work.rows, ..again }),
            }
        }
    }

    /// Tells whether the shard was this process's to the end; its receipt is written only then.
    fn write(&self, work: &mut Work) -> Result<bool> {
        let Work { shard, claim, rows, .. } = work;
        if !claim.renew_now(&self.location)? {
            return Ok(false);
        }
        let write = || self.write_object(shard, rows);
        let receipt = claim.hold_while(&self.location, RENEWAL, write)?;
        if !claim.renew_now(&self.location)? {
            return Ok(false);
        }
        let text = serde_json::to_vec(&receipt).unwrap_or_default();
        self.location.put(&shard.receipt(), text)?;
        Ok(true)
    }

    fn write_object(&self, shard: &ShardPlan, rows: &[(Batch, Record)]) -> Result<Receipt> {
        let object = shard.object(self.recipe.compression);
        let layers = self.recipe.part(shard.part).contents.layers.len();
        let mut bytes = encode(rows, self.recipe.dtype, layers)?;
        if self.recipe.compression == Compression::Zstd {
            bytes = zstd::encode_all(bytes.as_slice(), zstd::DEFAULT_COMPRESSION_LEVEL)
                .map_err(|error| self.location.problem(&object, error))?;
        }
        let receipt = Receipt {
            bytes: bytes.len() as u64,
            blake3: blake3::hash(&bytes).to_hex().to_string(),
            rows: rows.iter().map(|(batch, _)| entry(batch)).collect(),
            object,
        };
        self.location.put(&receipt.object, bytes)?;
        Ok(receipt)
    }

    /// Gives a shard up.
    ///
    /// # Errors
    /// - the claim cannot be removed
    pub fn give_up(&self, work: Work) -> Result<()> {
        work.claim.release(&self.location)
    }

    /// Writes the index; every shard must be complete.
    ///
    /// # Errors
    /// - a shard is not there, or the index cannot be written
    pub fn finish(&self) -> Result<()> {
        let read = |shard: &ShardPlan| -> Result<Receipt> {
            let object = shard.receipt();
            let bytes = self.location.get(&object)?;
            let bytes = bytes.ok_or_else(|| self.location.problem(&object, "is missing"))?;
            serde_json::from_slice(&bytes).map_err(|error| self.location.problem(&object, error))
        };
        let all = self.shards();
        let of = |part: Part| {
            all.iter().filter(|shard| shard.part == part).map(read).collect::<Result<Vec<_>>>()
        };
        let index = Index {
            // As it was begun: files of another process may tell less of the target, and runs know the store by it.
            recipe: read_recipe(&self.location)?,
            train: of(Part::Train)?,
            held_out: of(Part::HeldOut)?,
        };
        Claim::clear(&self.location)?;
        // Half claims of processes that were killed while they asked for a shard; a living one asks again.
        self.location.remove_staged(CLAIMS, "", Duration::ZERO);
        let text = serde_json::to_vec(&index).unwrap_or_default();
        self.location.put(INDEX, text)
    }
}

pub(super) fn entry(batch: &Batch) -> RowEntry {
    RowEntry { row: batch.row, tokens: batch.ids.len(), key: key(batch) }
}

fn read_recipe(location: &Location) -> Result<Recipe> {
    let recipe = location.get_created(RECIPE)?.unwrap_or_else(|| serde_json::from_slice(b""));
    let recipe: Recipe = recipe.map_err(|error| {
        let problem = format!("no store of features: {error}; give another place, or remove it");
        location.problem(RECIPE, problem)
    })?;
    if recipe.format != Recipe::FORMAT {
        let problem = format!("format `{}` is not `{}`", recipe.format, Recipe::FORMAT);
        return Err(location.problem(RECIPE, problem));
    }
    Ok(recipe)
}

/// blake3 of an object; a local one is read in pieces.
pub(super) fn hash_of(location: &Location, object: &str) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    if let Some(folder) = location.folder() {
        let fail = |error: std::io::Error| location.problem(object, error);
        let file = std::fs::File::open(folder.join(object)).map_err(fail)?;
        hasher.update_reader(file).map_err(fail)?;
    } else if let Some(bytes) = location.get(object)? {
        hasher.update(&bytes);
    }
    Ok(hasher.finalize().to_hex().to_string())
}
