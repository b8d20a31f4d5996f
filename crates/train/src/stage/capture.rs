//! A stage's features into a store, for offline training.

mod recipe;
mod rows;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use longdraft_data::Batch;
use longdraft_features::records::{Records, is_record_folder};
use longdraft_features::store::{
    BackgroundWriter, Contents, Estimate, Recipe, Record, ShardPlan, StoreWriter, Turn, Work,
};
use longdraft_features::{FeatureError, Part};
use longdraft_models::StepProducts;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_parallel::{World, share_of};

pub(super) use self::recipe::recipe;
use self::rows::Rows;
use super::team::{Next, Team};
use super::{Ending, Event, Observer};
use crate::config::TrainConfig;
use crate::error::Result;

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

/// A configuration that a store serves.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    /// What messages call it.
    pub name: &'a str,
    /// Its draft, objective and rows.
    pub config: &'a TrainConfig,
}

/// Features of a stage's rows, for training on them later; one store may serve several stages of the same rows.
pub struct Capture {
    target: Arc<Target>,
    records: Option<Records>,
    rows: Rows,
    recipe: Recipe,
    store: StoreWriter,
    estimate: Estimate,
    world: World,
    team: Team,
    products: StepProducts,
}

impl Capture {
    /// Reads the text, lays the rows out and opens the store at the first reader's `train.features`. What is
    /// written is known before the target runs. All readers have this target.
    ///
    /// # Errors
    /// - unusable data, no place for a store in the first reader's configuration, a store of another configuration, ranks
    ///   that do not divide into groups of `parallel.tensor`
    /// - readers of other rows: everything that differs is named
    /// - several readers of records that do not tell their layers
    pub fn prepare(
        readers: &[Reader<'_>],
        target: Arc<Target>,
        tokenizer: &TextTokenizer,
        options: &CaptureOptions,
        world: &World,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        let first = readers.first().ok_or_else(no_place)?.config;
        world.set_timeout(first.parallel.timeout());
        let place = first.train.features.store().ok_or_else(no_place)?;
        if is_record_folder(place) {
            let problem =
                "holds records of another trainer or engine: name another place for the store";
            return Err(FeatureError::store(place, problem).into());
        }
        let (rows, mut recipe) = Rows::of_all(readers, (&target, tokenizer), world, observer)?;
        let told = first.capture.record_layers.as_deref();
        let open = |folder| Records::open(folder, told);
        let records = options.records.as_deref().map(open).transpose()?;
        if let Some(records) = &records {
            if readers.len() > 1 && !records.tells_layers() {
                let problem = "does not tell which layers its records hold: name them in `capture.record_layers`";
                let folder = options.records.as_deref().unwrap_or(Path::new(""));
                return Err(FeatureError::store(folder.display().to_string(), problem).into());
            }
            let check = |part: &Part| {
                let contents = &recipe.part(*part).contents;
                records.check(target.config(), contents, recipe.anchor)
            };
            Part::ALL.iter().try_for_each(check)?;
            recipe.records = Some(records.fingerprint().to_owned());
            recipe.precision = None;
            recipe.products = None;
        }
        let store = StoreWriter::open(place, recipe.clone(), options.verify)?;
        let free = options.free_bytes.or_else(|| store.free_bytes());
        let estimate = Estimate { free, ..rows.estimate(&recipe, &store, &target)? };
        let (team, world) = (Team::new(first.parallel.tensor_group(world)?), world.clone());
        let products = first.products;
        Ok(Self { target, records, rows, recipe, store, estimate, world, team, products })
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
        self.products.within(|| self.run_within(observer))
    }

    fn run_within(&self, observer: &mut dyn Observer) -> Result<Ending> {
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
        let (mut done, mut has_told) = (0, false);
        while !open.is_empty() {
            let (mut busy, mut holder) = (Vec::new(), None);
            for shard in open {
                if self.team.should_stop(observer) {
                    return Ok(Ending::Stopped);
                }
                match self.store.take(&shard)? {
                    // Looking at a large shard takes its time, and the others of the team wait for a word.
                    Turn::Busy(told) => {
                        busy.push(shard);
                        holder = holder.or(told);
                        self.team.tell(Next::Wait);
                    }
                    Turn::Complete => {
                        done += shard.rows.len();
                        self.team.tell(Next::Wait);
                    }
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
                if let Some(holder) = holder.filter(|_| !has_told) {
                    observer.on_event(Event::Note(&format!("waits for {holder}")));
                    has_told = true;
                }
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
            let teacher_tokens = self.rows.kept_tokens(shard.part, &batch);
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

fn no_place() -> FeatureError {
    FeatureError::store("train.features", "names no place for a store of features")
}
