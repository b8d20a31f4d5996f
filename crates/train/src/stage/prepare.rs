//! From a configuration to a stage that is ready to run, fresh or resumed.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use longdraft_data::batch::{AnchorOffset, Draws};
use longdraft_data::packing::PackedRow;
use longdraft_data::sampler::Sampler;
use longdraft_features::records::{RecordFeatures, Records, is_record_folder};
use longdraft_features::store::Contents;
use longdraft_features::{FeatureMode, FeatureSource, MemoryFeatures, StoredFeatures};
use longdraft_models::draft::TokenCounts;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_parallel::{RowGroups, StatePlace, World};
use longdraft_rules::Checked;
use longdraft_tracking::MetricsLog;
use serde_json::{Map, Value};

use super::capture::recipe;
use super::data_sets::data_sets;
use super::identity::{among_ranks, identity};
use super::resume::{Resumed, resume};
use super::{DataSet, Event, Observer, Stage};
use crate::checkpoint::{Checkpointer, ResumePolicy, RunLock, SaveClock, add_token_counts};
use crate::config::{CompletedDraft, TrainConfig};
use crate::error::{Result, TrainError};
use crate::method::{Materials, token_counts};
use crate::objective::Objective;
use crate::optim::AdamW;
use crate::schedule::Schedule;

impl Stage {
    /// Loads data and draft, and goes on from the run directory's checkpoint if there is one; every
    /// rank of `world` does.
    ///
    /// # Errors
    /// - unusable data or draft, a run directory of another run (unless `resume` is forced) or held
    ///   by another process, damaged checkpoints
    pub fn prepare(
        config: Checked<TrainConfig>,
        target: Arc<Target>,
        tokenizer: TextTokenizer,
        resume_policy: ResumePolicy,
        world: &World,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        world.set_timeout(config.parallel.timeout());
        let groups = RowGroups::new(world, &config.parallel)?;
        let (groups, apart) = groups.with_gpus(world, target.device(), &config.parallel)?;
        let lock = RunLock::of_world(&config.output, world)?;
        let (train, held_out) = data_sets(&config, &target, &tokenizer, world, observer)?;
        let CompletedDraft { start, method, taken } = config.draft.completed()?;
        tell_taken(&taken, observer);
        let token_counts = counts(&config, &train, &target)?;
        let materials = Materials {
            teacher: config.teacher,
            seed: config.train.seed,
            target: &target,
            tokenizer: &tokenizer,
            documents: &train.documents,
            start: start.as_ref(),
            token_counts: &token_counts,
        };
        let objective = method.build(&materials, observer)?;
        let mut draws = draws(&config, &target);
        let features = features(
            &config,
            &target,
            &tokenizer,
            (&train, &held_out),
            objective.as_ref(),
            &mut draws,
        )?;
        let parameters = objective.draft().parameters();
        let parallel = config.optimizer.spread(world, &config.parallel, parameters);
        let (parallel, remark) = parallel.with_gpus(target.device(), &config.parallel)?;
        for remark in apart.iter().chain(&remark) {
            observer.on_event(Event::Warning(remark));
        }
        warn_of_idle_ranks(&config, world, &groups, observer);
        let steps = total_steps(&config, &train);
        let schedule = schedule(&config, steps);
        let identity = identity(&config, &target, &train, (objective.draft(), &features), steps)?;
        among_ranks(&identity, &config, &held_out)?.require_agreement(world)?;
        let checkpointer = Checkpointer::new(config.output.join("checkpoints"), world);
        checkpointer.clean();
        let mut optimizer = match config.parallel.optimizer_state {
            StatePlace::Memory => AdamW::over(config.optimizer.clone(), &parallel),
            StatePlace::File => {
                AdamW::over_files(config.optimizer.clone(), &parallel, &config.output)?
            }
        };
        let Resumed { cursor, progress, metrics_bytes, schedule } = resume(
            (&config, schedule),
            &checkpointer,
            (objective.as_ref(), &parallel, &mut optimizer),
            (&identity, resume_policy),
            observer,
        )?;
        std::fs::create_dir_all(&config.output)
            .map_err(|error| TrainError::checkpoint(&config.output, error))?;
        let log = MetricsLog::open(&config.output, metrics_bytes, world.is_first())?;
        let sampler = Sampler::new(train.rows.len(), config.train.seed, cursor);
        let saving = SaveClock::new(config.train.save_every, config.train.save_minutes);
        Ok(Self {
            config,
            method,
            target,
            tokenizer,
            token_counts,
            objective,
            optimizer,
            parallel,
            groups,
            schedule,
            sampler,
            draws,
            train,
            held_out,
            features,
            ahead: None,
            identity,
            checkpointer,
            log,
            progress,
            empty_steps: 0,
            saving,
            started: Instant::now(),
            _lock: lock,
        })
    }
}

/// Says which keys came from the draft to start from.
fn tell_taken(taken: &Map<String, Value>, observer: &mut dyn Observer) {
    if taken.is_empty() {
        return;
    }
    let of_key = |(key, value): (&String, &Value)| format!("{key} = {value}");
    let listed = taken.iter().map(of_key).collect::<Vec<_>>().join(", ");
    observer.on_event(Event::Note(&format!("from the draft to start from: {listed}")));
}

/// The learning rate over so many steps.
fn schedule(config: &TrainConfig, steps: u64) -> Schedule {
    let config = &config.schedule;
    Schedule {
        warmup_ratio: config.warmup_ratio,
        floor_ratio: config.floor_ratio,
        ..Schedule::new(config.kind, config.learning_rate, steps)
    }
}

/// Fewer rows a step than ranks leave some of these without work.
fn warn_of_idle_ranks(
    config: &TrainConfig,
    world: &World,
    groups: &RowGroups,
    observer: &mut dyn Observer,
) {
    let (rows, ranks) = (config.train.rows_of_a_step(config.data.row_tokens), world.size());
    let working = rows * config.parallel.sequence;
    if rows < groups.count() {
        let idle = ranks - working;
        let warning = format!("{rows} rows a step for {ranks} ranks: {idle} of them idle");
        observer.on_event(Event::Warning(&warning));
    }
}

/// How often each token was learned: in this text, and in that of the draft to start from.
pub(super) fn counts(
    config: &TrainConfig,
    train: &DataSet,
    target: &Target,
) -> Result<TokenCounts> {
    let mut counts = token_counts(&train.documents, target.config())?;
    if let Some(draft) = &config.draft.from {
        add_token_counts(&mut counts, draft)?;
    }
    Ok(counts)
}

/// How positions are drawn.
pub(super) fn draws(config: &TrainConfig, target: &Target) -> Draws {
    let anchor = config.data.anchor;
    Draws {
        position_seed: config.train.seed,
        anchor: AnchorOffset {
            max_position: anchor.max_position.min(target.config().max_position_embeddings),
            ..anchor
        },
    }
}

/// Where features come from; stored ones bring their positions along.
pub(super) fn features(
    config: &TrainConfig,
    target: &Arc<Target>,
    tokenizer: &TextTokenizer,
    data: (&DataSet, &DataSet),
    objective: &dyn Objective,
    draws: &mut Draws,
) -> Result<FeatureSource> {
    Ok(match &config.train.features {
        FeatureMode::Online => FeatureSource::Online(Arc::clone(target)),
        FeatureMode::Memory => FeatureSource::Memory(MemoryFeatures::default()),
        FeatureMode::Stored(place) if is_record_folder(place) => {
            let folder = Path::new(place.strip_prefix("file://").unwrap_or(place));
            let records = Records::open(folder, config.capture.record_layers.as_deref())?;
            for needs in [objective.needs(), objective.held_out_needs()] {
                records.check(target.config(), &Contents::of(&needs), draws.anchor)?;
            }
            // Held-out rows are read at the end, when a missing record would cost the run.
            records.require_all(data.0.texts().chain(data.1.texts()))?;
            FeatureSource::Records(RecordFeatures::new(records, Arc::clone(target)))
        }
        FeatureMode::Stored(place) => {
            let captured = StoredFeatures::recipe(place)?;
            draws.position_seed = captured.seed;
            draws.anchor = captured.anchor;
            let wanted = recipe(config, (target, tokenizer), data, &[objective], draws);
            FeatureSource::Stored(StoredFeatures::open(place, &wanted, Arc::clone(target))?)
        }
    })
}

/// Steps of the whole run: as given, the token budget by the tokens of a step, or the epochs' rows
/// by the rows of a step.
fn total_steps(config: &TrainConfig, train: &DataSet) -> u64 {
    let run = &config.train;
    let rows_of_a_step = run.rows_of_a_step(config.data.row_tokens) as f64;
    let rows = train.rows.len() as f64;
    let per_epoch = rows / rows_of_a_step;
    let steps = if let Some(tokens) = run.tokens {
        let all: usize = train.rows.iter().map(PackedRow::tokens).sum();
        let of_a_step = all as f64 / rows * rows_of_a_step;
        (tokens as f64 / of_a_step).ceil()
    } else if config.draft.method.is_compat() {
        per_epoch.floor() * run.epochs
    } else {
        (per_epoch * run.epochs).round()
    };
    run.steps.unwrap_or((steps as u64).max(1))
}
