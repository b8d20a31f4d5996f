//! A stage's features into a store, for offline training.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use longdraft_data::Batch;
use longdraft_data::batch::{DrawEpochs, Draws};
use longdraft_features::records::{Records, is_record_folder};
use longdraft_features::store::{
    BackgroundWriter, Contents, Estimate, PartRecipe, Recipe, Record, ShardPlan, StoreWriter,
    StoredTeacher, Turn, Work,
};
use longdraft_features::{FeatureError, FeatureNeeds, Part};
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_parallel::{World, share_of};

use super::data_sets::data_sets;
use super::evaluate::held_out_batch;
use super::prepare::{counts, draws};
use super::team::{Next, Team};
use super::{DataSet, Ending, Event, Observer};
use crate::config::{CompletedDraft, TrainConfig};
use crate::error::Result;
use crate::method::Materials;
use crate::objective::Objective;

/// Pause before a shard of another process is looked at again.
const PAUSE: Duration = Duration::from_millis(300);

/// How to capture.
#[derive(Debug, Clone, Default)]
pub struct CaptureOptions {
    /// Folder of another trainer's or engine's records, which take the place of the target's passes.
    pub records: Option<PathBuf>,
    /// Check the hash of every complete shard, also where that means fetching it.
    pub verify: bool,
    /// Free bytes where the store lies, in place of what the system says.
    pub free_bytes: Option<u64>,
}

/// A stage that captures features instead of training on them.
pub struct Capture {
    target: Arc<Target>,
    records: Option<Records>,
    rows: Rows,
    recipe: Recipe,
    store: StoreWriter,
    estimate: Estimate,
    world: World,
    team: Team,
}

/// Rows of both parts, as training lays them out.
struct Rows {
    train: DataSet,
    held_out: DataSet,
    draws: Draws,
    objective: Box<dyn Objective>,
}

impl Capture {
    /// Reads the text, lays the rows out and opens the store at `train.features`. What is written
    /// is known before the target runs.
    ///
    /// # Errors
    /// - unusable data, no place for a store in the configuration, a store of another
    ///   configuration, ranks that do not divide into groups of `parallel.tensor`
    pub fn prepare(
        config: &TrainConfig,
        target: Arc<Target>,
        tokenizer: &TextTokenizer,
        options: &CaptureOptions,
        world: &World,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        world.set_timeout(config.parallel.timeout());
        let place = config.train.features.store().ok_or_else(|| {
            FeatureError::store("train.features", "names no place for a store of features")
        })?;
        if is_record_folder(place) {
            let problem =
                "holds records of another trainer or engine: name another place for the store";
            return Err(FeatureError::store(place, problem).into());
        }
        let (train, held_out) = data_sets(config, &target, tokenizer, world, observer)?;
        let CompletedDraft { start, method, .. } = config.draft.completed()?;
        let token_counts = counts(config, &train, &target)?;
        let materials = Materials {
            teacher: config.teacher,
            seed: config.train.seed,
            target: &target,
            tokenizer,
            documents: &train.documents,
            start: start.as_ref(),
            token_counts: &token_counts,
        };
        let objective = method.build(&materials, observer)?;
        let draws = draws(config, &target);
        let data = (&train, &held_out);
        let mut recipe = recipe(config, (&target, tokenizer), data, objective.as_ref(), &draws);
        let told = config.capture.record_layers.as_deref();
        let open = |folder| Records::open(folder, told);
        let records = options.records.as_deref().map(open).transpose()?;
        if let Some(records) = &records {
            let check = |part: &Part| {
                let contents = &recipe.part(*part).contents;
                records.check(target.config(), contents, recipe.anchor)
            };
            Part::ALL.iter().try_for_each(check)?;
            recipe.records = Some(records.fingerprint().to_owned());
        }
        let store = StoreWriter::open(place, recipe.clone(), options.verify)?;
        let rows = Rows { train, held_out, draws, objective };
        let free = options.free_bytes.or_else(|| store.free_bytes());
        let estimate = Estimate { free, ..estimate(&rows, &recipe, &store, &target)? };
        let (team, world) = (Team::new(config.parallel.tensor_group(world)?), world.clone());
        Ok(Self { target, records, rows, recipe, store, estimate, world, team })
    }

    /// What the store takes.
    pub fn estimate(&self) -> Estimate {
        self.estimate
    }

    /// Shards of training and held-out rows.
    pub fn shards(&self) -> usize {
        self.recipe.train.shards.len() + self.recipe.held_out.shards.len()
    }

    /// Captures every shard that is not complete, sharing the work with other processes, and writes
    /// the index; stops between rows when the observer asks to. Of ranks that share the target's layers
    /// only the first tells how it ended: the others run its passes and are done when it is.
    ///
    /// # Errors
    /// - too little free space, before anything is written
    /// - the target cannot run, a full disk; complete shards stay
    pub fn run(&self, observer: &mut dyn Observer) -> Result<Ending> {
        if !self.team.leads() {
            self.team.follow(&self.target, &self.recipe, observer)?;
            return Ok(Ending::Finished);
        }
        let ending = std::thread::scope(|scope| {
            let mut writer = BackgroundWriter::new(&self.store, scope);
            let ending = self.take_shards(&mut writer, observer);
            // An error of its own is told first; whatever the other one is, it would come again.
            let written = writer.wait();
            ending.and_then(|ending| Ok(written.map(|()| ending)?))
        })?;
        self.team.tell(Next::End);
        Ok(ending)
    }

    fn take_shards(
        &self,
        writer: &mut BackgroundWriter<'_, '_>,
        observer: &mut dyn Observer,
    ) -> Result<Ending> {
        self.store.require_room(&self.estimate)?;
        self.store.begin()?;
        let mut open = self.store.shards();
        // Teams begin at different places, so that they seldom ask for the same shard.
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let first = share_of(open.len(), rank / self.team.size(), ranks / self.team.size()).start;
        open.rotate_left(first);
        let all = self.recipe.train.rows + self.recipe.held_out.rows;
        let mut done = 0;
        while !open.is_empty() {
            let mut busy = Vec::new();
            for shard in open {
                if self.team.should_stop(observer) {
                    return Ok(Ending::Stopped);
                }
                match self.store.take(&shard)? {
                    Turn::Busy => busy.push(shard),
                    Turn::Complete => done += shard.rows.len(),
                    Turn::Mine(work) => {
                        if let Some(damage) = &work.damage {
                            let text = format!("{damage}: captured again");
                            observer.on_event(Event::Warning(&text));
                        }
                        match self.shard(&shard, work, writer, (done, all), observer)? {
                            Shard::Done => done += shard.rows.len(),
                            Shard::Lost => busy.push(shard),
                            Shard::Stopped => return Ok(Ending::Stopped),
                        }
                    }
                }
            }
            open = busy;
            if !open.is_empty() {
                self.team.tell(Next::Wait);
                std::thread::sleep(PAUSE);
            }
        }
        writer.wait()?;
        observer.on_event(Event::Captured(all, all));
        self.store.finish()?;
        Ok(Ending::Finished)
    }

    fn record(
        &self,
        batch: &Batch,
        contents: &Contents,
        teacher_tokens: &[u32],
    ) -> longdraft_features::Result<Record> {
        match &self.records {
            Some(records) => records.record(&self.target, batch, contents, teacher_tokens),
            None => Record::capture(&self.target, batch, contents, teacher_tokens),
        }
    }

    fn shard(
        &self,
        shard: &ShardPlan,
        mut work: Work,
        writer: &mut BackgroundWriter<'_, '_>,
        (done, all): (usize, usize),
        observer: &mut dyn Observer,
    ) -> Result<Shard> {
        let contents = &self.recipe.part(shard.part).contents;
        for (count, row) in shard.rows.clone().enumerate() {
            if self.team.should_stop(observer) {
                self.store.give_up(work)?;
                return Ok(Shard::Stopped);
            }
            let batch = self.rows.batch(shard.part, row);
            let teacher_tokens = self.rows.objective.teacher_tokens(&batch);
            self.team.tell(Next::Pass(shard.part));
            let added = self
                .record(&batch, contents, &teacher_tokens)
                .and_then(|record| self.store.add(&mut work, batch, record))
                .and_then(|ours| writer.check().map(|()| ours));
            match added {
                // The end is told once, when every shard is complete.
                Ok(true) if done + count + 1 == all => {}
                Ok(true) => observer.on_event(Event::Captured(done + count + 1, all)),
                Ok(false) => return Ok(Shard::Lost),
                Err(error) => {
                    // The claim of a process that ends is stale in any case.
                    let _ = self.store.give_up(work);
                    return Err(error.into());
                }
            }
        }
        writer.complete(work)?;
        Ok(Shard::Done)
    }
}

/// How work on a shard ended.
enum Shard {
    Done,
    /// Another process took it over.
    Lost,
    Stopped,
}

impl Rows {
    fn batch(&self, part: Part, row: usize) -> Batch {
        batch(part, row, (&self.train, &self.held_out), &self.draws)
    }
}

fn batch(part: Part, row: usize, data: (&DataSet, &DataSet), draws: &Draws) -> Batch {
    let epochs = DrawEpochs { positions: 0, batch: 0 };
    match part {
        Part::Train => Batch::from_row(row, &data.0.rows[row], &data.0.documents, draws, epochs),
        Part::HeldOut => held_out_batch(row, data.1, draws),
    }
}

/// The store that a configuration would capture.
pub(super) fn recipe(
    config: &TrainConfig,
    (target, tokenizer): (&Target, &TextTokenizer),
    data: (&DataSet, &DataSet),
    objective: &dyn Objective,
    draws: &Draws,
) -> Recipe {
    let of_part = |part| part_recipe(config, target, data, objective, draws, part);
    Recipe {
        format: Recipe::FORMAT.to_owned(),
        target: target.fingerprint().to_owned(),
        // A tokenizer without JSON form is equal to no other.
        tokenizer: tokenizer.fingerprint().unwrap_or_default(),
        dtype: config.capture.dtype,
        compression: config.capture.compression,
        seed: draws.position_seed,
        anchor: draws.anchor,
        records: None,
        train: of_part(Part::Train),
        held_out: of_part(Part::HeldOut),
    }
}

fn part_recipe(
    config: &TrainConfig,
    target: &Target,
    data: (&DataSet, &DataSet),
    objective: &dyn Objective,
    draws: &Draws,
    part: Part,
) -> PartRecipe {
    let (rows, needs) = match part {
        Part::Train => (data.0.rows.len(), objective.needs()),
        Part::HeldOut => (data.1.rows.len(), objective.held_out_needs()),
    };
    let contents = Contents::of(&needs);
    let (mut text, mut teacher) = (blake3::Hasher::new(), blake3::Hasher::new());
    let (mut tokens, mut shards, mut filled) = (0, Vec::new(), u64::MAX);
    for row in 0..rows {
        let batch = batch(part, row, data, draws);
        let teacher_tokens = kept_tokens(objective, &needs, &batch);
        hash_text(&mut text, &batch);
        hash_u32(&mut teacher, &teacher_tokens);
        tokens += batch.ids.len();
        let size = (batch.ids.len(), teacher_tokens.len());
        let bytes = contents.row_bytes(target.config(), config.capture.dtype, size);
        if filled.saturating_add(bytes) > config.capture.shard_mib << 20 {
            shards.push(row);
            filled = 0;
        }
        filled += bytes;
    }
    let short = |hasher: &blake3::Hasher| hasher.finalize().to_hex()[..16].to_owned();
    let (text, teacher_tokens) = (short(&text), short(&teacher));
    PartRecipe { contents, text, teacher_tokens, rows, tokens, shards }
}

/// Tokens at which the teacher is kept.
fn kept_tokens(objective: &dyn Objective, needs: &FeatureNeeds, batch: &Batch) -> Vec<u32> {
    match Contents::of(needs).teacher {
        StoredTeacher::None => Vec::new(),
        StoredTeacher::FinalHidden | StoredTeacher::TopK(_) => objective.teacher_tokens(batch),
    }
}

fn hash_u32(hasher: &mut blake3::Hasher, values: &[u32]) {
    hasher.update(&(values.len() as u64).to_le_bytes());
    values.iter().for_each(|value| {
        hasher.update(&value.to_le_bytes());
    });
}

/// Tokens, documents and masks; not the positions, which are drawn.
fn hash_text(hasher: &mut blake3::Hasher, batch: &Batch) {
    hash_u32(hasher, &batch.ids);
    for (document, learned) in batch.document_ids.iter().zip(&batch.loss_mask) {
        hasher.update(&document.to_le_bytes());
        hasher.update(&[u8::from(*learned)]);
    }
}

fn estimate(
    rows: &Rows,
    recipe: &Recipe,
    store: &StoreWriter,
    target: &Target,
) -> Result<Estimate> {
    let (mut bytes, mut bytes_left) = (0, 0);
    for shard in store.shards() {
        let contents = &recipe.part(shard.part).contents;
        let of_row = |row| {
            let batch = rows.batch(shard.part, row);
            let teacher = match contents.teacher {
                StoredTeacher::None => 0,
                _ => rows.objective.teacher_tokens(&batch).len(),
            };
            contents.row_bytes(target.config(), recipe.dtype, (batch.ids.len(), teacher))
        };
        let of_shard: u64 = shard.rows.clone().map(of_row).sum();
        bytes += of_shard;
        if !store.has_receipt(&shard)? {
            bytes_left += of_shard;
        }
    }
    let tokens = (recipe.train.tokens + recipe.held_out.tokens) as u64;
    Ok(Estimate { tokens, bytes, bytes_left, free: None })
}
