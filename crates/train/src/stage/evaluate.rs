//! Held-out rows, each at every delay or step.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use longdraft_data::Batch;
use longdraft_data::batch::{AnchorOffset, DrawEpochs, Draws};
use longdraft_features::{BatchFeatures, FeatureMode, FeatureSource, Part};
use longdraft_models::draft::TokenCounts;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_parallel::{RowGroups, World};
use longdraft_rules::Checked;
use serde_json::{Map, Value};

use super::data_sets::held_out_set;
use super::prepare::{draws, features};
use super::row_metrics::RowMetrics;
use super::{DataSet, Event, Observer, Stage};
use crate::checkpoint::{add_token_counts, saved_draft};
use crate::config::TrainConfig;
use crate::error::Result;
use crate::method::{DraftMethod, Materials};
use crate::metrics::DraftMetrics;
use crate::objective::Objective;
use crate::observer::Unheard;

impl Stage {
    /// Loss, agreement and acceptance of the held-out rows at ordinary positions; every rank measures
    /// its share of them.
    ///
    /// # Errors
    /// - the target cannot run
    pub fn evaluate(&mut self) -> Result<DraftMetrics> {
        self.gather_draft()?;
        let metrics = self.config.products.within(|| self.evaluate_whole())?;
        self.release_draft()?;
        Ok(metrics)
    }

    fn evaluate_whole(&self) -> Result<DraftMetrics> {
        let features = self.held_out_features();
        let text = HeldOut {
            target: &self.target,
            features: &features,
            set: &self.held_out,
            draws: &self.draws,
            groups: &self.groups,
            places: &[None],
        };
        let (world, rows) = (self.parallel.world(), self.held_out.rows.len());
        let (own, rounds) = (self.groups.share(rows), self.groups.rounds(rows));
        let rows = text.measure(&[self.objective.as_ref()], own, rounds, &mut || {})?;
        // Row by row, so that sums do not depend on the number of ranks.
        let rows = rows.iter().flatten().flat_map(|draft| &draft.rows);
        let numbers: Vec<f64> = rows.flat_map(DraftMetrics::to_numbers).collect();
        over_ranks(world, &numbers)
    }

    /// Where held-out features come from: never from memory, which holds training rows.
    fn held_out_features(&self) -> FeatureSource {
        match &self.features {
            FeatureSource::Stored(store) => FeatureSource::Stored(store.clone()),
            FeatureSource::Records(records) => FeatureSource::Records(records.clone()),
            FeatureSource::Online(_) | FeatureSource::Memory(_) => {
                FeatureSource::Online(Arc::clone(&self.target))
            }
        }
    }

    /// Lets go of everything but the held-out rows and the place of the draft. The target is let go of, too: another
    /// stage may need that memory.
    pub fn into_evaluator(self) -> Evaluator {
        Evaluator {
            world: self.parallel.world().clone(),
            config: self.config,
            method: self.method,
            token_counts: self.token_counts,
            held_out: self.held_out,
        }
    }
}

/// A finished stage's held-out rows, and what its draft is opened again by.
pub struct Evaluator {
    world: World,
    config: Checked<TrainConfig>,
    method: Box<dyn DraftMethod>,
    token_counts: TokenCounts,
    held_out: DataSet,
}

impl Evaluator {
    /// The configuration of its stage.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// Whether ranks share its rows, so that all of them have to measure.
    pub fn shares_rows(&self) -> bool {
        self.config.parallel.sequence > 1 && self.world.size() > 1
    }

    /// Measures the drafts of all `stages` on the held-out rows of one of them, `text`, row by row, with that stage's
    /// target, which runs once for all. All ranks call it where they share the target or the rows; each of them runs
    /// its part of every row.
    ///
    /// # Errors
    /// - a draft or a store cannot be opened, the target cannot run
    pub fn measure(
        stages: &[Self],
        text: usize,
        of_target: (&Arc<Target>, &TextTokenizer),
    ) -> Result<Vec<RowMetrics>> {
        let objectives = stages.iter().map(|stage| stage.objective(of_target));
        let objectives = objectives.collect::<Result<Vec<_>>>()?;
        let objectives: Vec<&dyn Objective> = objectives.iter().map(AsRef::as_ref).collect();
        let products = stages[text].config.products;
        products.within(|| stages[text].measure_here(&objectives, text, of_target))
    }

    /// The draft of its last checkpoint.
    fn objective(
        &self,
        (target, tokenizer): (&Arc<Target>, &TextTokenizer),
    ) -> Result<Box<dyn Objective>> {
        let start = saved_draft(&self.config.output)?;
        let materials = Materials {
            teacher: self.config.teacher,
            seed: self.config.train.seed,
            target,
            tokenizer,
            documents: &self.held_out.documents,
            start: Some(&start),
            token_counts: &self.token_counts,
        };
        // What there is to say was said when it was trained.
        self.method.as_saved(&start)?.build(&materials, &mut Unheard)
    }

    /// Counters of all drafts, of which `own` is this stage's.
    fn measure_here(
        &self,
        drafts: &[&dyn Objective],
        own: usize,
        (target, tokenizer): (&Arc<Target>, &TextTokenizer),
    ) -> Result<Vec<RowMetrics>> {
        let (config, set) = (&self.config, &self.held_out);
        let mut draws = draws(config, target);
        let features =
            measured_features(config, (target, tokenizer), set, drafts[own], &mut draws)?;
        let groups = if self.shares_rows() {
            let groups = RowGroups::new(&self.world, &config.parallel)?;
            // What keeps GPUs apart was said when the stage began.
            groups.with_gpus(&self.world, target.device(), &config.parallel)?.0
        } else {
            RowGroups::single()
        };
        let text = HeldOut {
            target,
            features: &features,
            set,
            draws: &draws,
            groups: &groups,
            places: &[None],
        };
        let rows = set.rows.len();
        let measured = text.measure(drafts, 0..rows, rows, &mut || {})?.pop().unwrap_or_default();
        if !self.shares_rows() {
            return Ok(measured);
        }
        let of_all = |draft: &RowMetrics| draft.over_parts(&self.world, &groups);
        measured.iter().map(of_all).collect()
    }
}

/// The counters that all ranks send as numbers, added in their order.
pub(super) fn over_ranks(world: &World, numbers: &[f64]) -> Result<DraftMetrics> {
    let mut total = DraftMetrics::default();
    for numbers in world.gather_varied(numbers) {
        DraftMetrics::list(&numbers)?.iter().for_each(|metrics| total.merge(metrics));
    }
    Ok(total)
}

/// Measures trained drafts (files or folders) on a configuration's held-out rows, in the order
/// given. Nothing is trained or written, and `draft.from` of the configuration does not count.
///
/// # Errors
/// - unusable text or drafts, a store without these rows, a target that cannot run
pub fn measure_drafts(
    config: &TrainConfig,
    drafts: &[PathBuf],
    of_target: (&Arc<Target>, &TextTokenizer),
    observer: &mut dyn Observer,
) -> Result<Vec<RowMetrics>> {
    let mut measured = measure_at_places(config, drafts, &[None], of_target, observer)?;
    Ok(measured.pop().unwrap_or_default())
}

/// As [`measure_drafts`], of the tokens at some places of their text alone (`None`: of all), counted from 0; once for each of
/// `places`, in their order. Rows without such a token are left out.
///
/// # Errors
/// - as [`measure_drafts`]
pub fn measure_at_places(
    config: &TrainConfig,
    drafts: &[PathBuf],
    places: &[Option<Range<usize>>],
    (target, tokenizer): (&Arc<Target>, &TextTokenizer),
    observer: &mut dyn Observer,
) -> Result<Vec<Vec<RowMetrics>>> {
    let set = held_out_set(config, target, tokenizer, observer)?;
    let mut objectives = Vec::new();
    let (teacher, seed, documents) = (config.teacher, config.train.seed, &set.documents);
    for draft in drafts {
        // What it proposes is what it learned, not what this text holds.
        let mut token_counts = TokenCounts::new(target.config().vocab_size);
        add_token_counts(&mut token_counts, draft)?;
        let token_counts = &token_counts;
        let start = saved_draft(draft)?;
        let method = config.draft.method.as_saved(&start)?;
        let known = config.draft.method.keys_of(&start)?;
        tell_changed(draft, known, (&config.draft.method.keys(), &method.keys()), observer);
        let start = Some(&start);
        let materials =
            Materials { teacher, seed, target, tokenizer, documents, start, token_counts };
        objectives.push(method.build(&materials, observer)?);
    }
    let mut draws = draws(config, target);
    // A store must hold what every draft reads.
    let mut source = None;
    for objective in &objectives {
        let of_draft = objective.as_ref();
        let opened = measured_features(config, (target, tokenizer), &set, of_draft, &mut draws)?;
        source.get_or_insert(opened);
    }
    let Some(source) = source else { return Ok(vec![Vec::new(); places.len()]) };
    let objectives: Vec<_> = objectives.iter().map(AsRef::as_ref).collect();
    let rows = set.rows.len();
    let (mut done, all) = (0, rows * objectives.len() * places.len());
    let mut on_part = || {
        done += 1;
        observer.on_event(Event::Measured(done, all));
    };
    let (features, set, draws, groups) = (&source, &set, &draws, &RowGroups::single());
    let text = HeldOut { target, features, set, draws, groups, places };
    config.products.within(|| text.measure(&objectives, 0..rows, rows, &mut on_part))
}

/// Where features of held-out rows alone come from: never from memory, which holds training rows.
fn measured_features(
    config: &TrainConfig,
    (target, tokenizer): (&Arc<Target>, &TextTokenizer),
    held_out: &DataSet,
    objective: &dyn Objective,
    draws: &mut Draws,
) -> Result<FeatureSource> {
    let mut config = config.clone();
    if config.train.features == FeatureMode::Memory {
        config.train.features = FeatureMode::Online;
    }
    let data = (&DataSet::default(), held_out);
    features(&config, target, tokenizer, data, objective, draws)
}

/// Says which of the `known` keys of a draft another value is configured for.
fn tell_changed(
    draft: &Path,
    known: Map<String, Value>,
    (configured, measured): (&Map<String, Value>, &Map<String, Value>),
    observer: &mut dyn Observer,
) {
    // What either side leaves open is no difference.
    let value =
        |keys: &Map<String, Value>, key: &str| keys.get(key).filter(|v| !v.is_null()).cloned();
    let changed = |key: String| {
        let (own, now) = (value(configured, &key)?, value(measured, &key)?);
        (own != now).then(|| format!("{key} = {now}"))
    };
    let listed: Vec<_> = known.into_iter().filter_map(|(key, _)| changed(key)).collect();
    if !listed.is_empty() {
        let (draft, listed) = (draft.display(), listed.join(", "));
        let text = format!("{draft}: measured as it was trained, with {listed}");
        observer.on_event(Event::Note(&text));
    }
}

/// Held-out rows with their features.
struct HeldOut<'a> {
    target: &'a Target,
    features: &'a FeatureSource,
    set: &'a DataSet,
    draws: &'a Draws,
    groups: &'a RowGroups,
    /// Places of their text at which tokens are measured, one after the other; `None`: at all.
    places: &'a [Option<Range<usize>>],
}

impl HeldOut<'_> {
    /// Counters of some rows for every draft, at each of the places in turn: `[places][drafts]`. Drafts of one kind
    /// share a row's features, and so do places. The rank with most rows has `rounds` of them; one without a row takes
    /// part in what the others gather. Shares are uneven for one draft only. `on_part` hears of each row, draft and
    /// place.
    fn measure(
        &self,
        drafts: &[&dyn Objective],
        rows: Range<usize>,
        rounds: usize,
        on_part: &mut dyn FnMut(),
    ) -> Result<Vec<Vec<RowMetrics>>> {
        let of_draft = |draft: &&dyn Objective| RowMetrics::new(draft.draft_len());
        let of_drafts: Vec<RowMetrics> = drafts.iter().map(of_draft).collect();
        let mut measured = vec![of_drafts; self.places.len()];
        assert!(drafts.len() == 1 || rows.len() == rounds, "several drafts share all rows");
        for index in rows.start..rows.start + rounds {
            let batch = rows.contains(&index).then(|| held_out_batch(index, self.set, self.draws));
            let batch = batch.map(|batch| self.groups.cut(batch));
            let part = batch.as_ref().and_then(|batch| self.groups.part_of(&batch.document_ids));
            let mut found = None;
            for (at, draft) in drafts.iter().enumerate() {
                let needs = draft.held_out_needs();
                let Some(batch) = &batch else {
                    self.features.join(&needs)?;
                    drop(self.target.hold_ends()?);
                    continue;
                };
                let asked = (needs, draft.teacher_tokens(batch));
                if found.as_ref().is_none_or(|(known, _)| *known != asked) {
                    let (needs, tokens) = &asked;
                    let features = self.features.features(
                        Part::HeldOut,
                        (batch, part.as_ref()),
                        needs,
                        tokens,
                    )?;
                    found = Some((asked, features));
                }
                if let Some(((_, tokens), features)) = &found {
                    let _ends = self.target.hold_ends()?;
                    for (places, measured) in self.places.iter().zip(&mut measured) {
                        let row =
                            measure_within(*draft, places.as_ref(), batch, (tokens, features))?;
                        measured[at].rows.extend(row);
                        on_part();
                    }
                }
            }
            if let Some(first) = drafts.first().filter(|_| index + 1 < rows.end) {
                self.features.read_ahead(Part::HeldOut, index + 1, &first.held_out_needs());
            }
        }
        Ok(measured)
    }
}

/// A draft's counters of a row at some places; `None` where no token stands there. The features' teacher is that of
/// the tokens `read`.
fn measure_within(
    draft: &dyn Objective,
    places: Option<&Range<usize>>,
    batch: &Batch,
    (read, features): (&[u32], &BatchFeatures),
) -> Result<Option<DraftMetrics>> {
    let Some(places) = places else { return Ok(Some(draft.measure(batch, features)?)) };
    let mut within = batch.clone();
    within.supervise_within(places);
    if within.learned.is_empty() {
        return Ok(None);
    }
    let features = features.with_teacher_at(&draft.teacher_tokens(&within), read)?;
    Ok(Some(draft.measure(&within, &features)?))
}

/// A held-out row at ordinary positions.
pub(super) fn held_out_batch(index: usize, held_out: &DataSet, draws: &Draws) -> Batch {
    let anchor = AnchorOffset { enabled: false, ..AnchorOffset::default() };
    let draws = Draws { anchor, ..draws.clone() };
    let epochs = DrawEpochs { positions: 0, batch: 0 };
    Batch::from_row(index, &held_out.rows[index], &held_out.documents, &draws, epochs)
}
