//! From a configuration to a stage that is ready to run, fresh or resumed.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Tensor};
use longdraft_data::batch::{AnchorOffset, Draws};
use longdraft_data::packing::{Overlong, PackedRow, Packing};
use longdraft_data::sampler::{Cursor, Sampler};
use longdraft_features::records::{RecordFeatures, Records, is_record_folder};
use longdraft_features::store::Contents;
use longdraft_features::{FeatureMode, FeatureSource, MemoryFeatures, StoredFeatures};
use longdraft_models::draft::Draft;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_parallel::{DataParallel, RowGroups, StatePlace, World};
use longdraft_rules::Checked;
use longdraft_tracking::MetricsLog;
use serde_json::{Map, Value};

use super::capture::recipe;
use super::data_sets::data_sets;
use super::{DataSet, Event, Observer, Progress, Stage};
use crate::checkpoint::{
    CheckpointState, Checkpointer, ResumePolicy, RunIdentity, RunLock, STEPS, SaveClock,
    add_token_counts, require_same_network, require_same_run, saved_draft,
};
use crate::config::{DraftConfig, TrainConfig, upgrade};
use crate::error::{Result, TrainError};
use crate::method::Materials;
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
        let lock = RunLock::of_world(&config.output, world)?;
        let (train, held_out) = data_sets(&config, &target, &tokenizer, world, observer)?;
        let start = config.draft.from.as_deref().map(saved_draft).transpose()?;
        let materials = Materials {
            teacher: config.teacher,
            seed: config.train.seed,
            target: &target,
            tokenizer: &tokenizer,
            documents: &train.documents,
            start: start.as_ref(),
        };
        let objective = config.draft.method.build(&materials, observer)?;
        let mut token_counts = materials.token_counts()?;
        if let Some(draft) = &config.draft.from {
            add_token_counts(&mut token_counts, draft)?;
        }
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
        if let Some(remark) = remark {
            observer.on_event(Event::Warning(&remark));
        }
        warn_of_idle_ranks(&config, world, &groups, observer);
        let steps = total_steps(&config, &train);
        let schedule = Schedule {
            kind: config.schedule.kind,
            base: config.schedule.learning_rate,
            steps,
            warmup_of: steps,
            warmup_ratio: config.schedule.warmup_ratio,
            floor_ratio: config.schedule.floor_ratio,
        };
        let identity = identity(&config, &target, &train, (objective.draft(), &features))?;
        identity.require_agreement(world)?;
        let checkpointer = Checkpointer::new(config.output.join("checkpoints"), world);
        checkpointer.clean();
        let mut optimizer = match config.parallel.optimizer_state {
            StatePlace::Memory => AdamW::over(config.optimizer.clone(), &parallel),
            StatePlace::File => {
                AdamW::over_files(config.optimizer.clone(), &parallel, &config.output)?
            }
        };
        let fresh = Resumed::fresh(schedule);
        let resumed = resume(
            (&config, schedule),
            &checkpointer,
            (objective.as_ref(), &parallel, &mut optimizer),
            (&identity, resume_policy),
            observer,
        )?;
        let Resumed { cursor, progress, metrics_bytes, schedule, extended } =
            resumed.unwrap_or(fresh);
        std::fs::create_dir_all(&config.output)
            .map_err(|error| TrainError::checkpoint(&config.output, error))?;
        let log = MetricsLog::open(
            &config.output.join("metrics.jsonl"),
            metrics_bytes,
            world.is_first(),
        )?;
        let sampler = Sampler::new(train.rows.len(), config.train.seed, cursor);
        let saving = SaveClock::new(config.train.save_every, config.train.save_minutes);
        Ok(Self {
            config,
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
            saving,
            extended,
            started: Instant::now(),
            _lock: lock,
        })
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
            FeatureSource::Records(RecordFeatures::new(records, Arc::clone(target)))
        }
        FeatureMode::Stored(place) => {
            let captured = StoredFeatures::recipe(place)?;
            draws.position_seed = captured.seed;
            draws.anchor = captured.anchor;
            let wanted = recipe(config, (target, tokenizer), data, objective, draws);
            FeatureSource::Stored(StoredFeatures::open(place, &wanted, Arc::clone(target))?)
        }
    })
}

/// Tells features with other values apart.
fn features_identity(features: &FeatureSource) -> String {
    match features {
        FeatureSource::Online(_) => "online".to_owned(),
        FeatureSource::Memory(_) => "memory".to_owned(),
        FeatureSource::Stored(store) => format!("stored {}", store.identity()),
        FeatureSource::Records(records) => format!("records {}", records.identity()),
    }
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

/// What a resumed run must share with the saved one.
fn identity(
    config: &TrainConfig,
    target: &Target,
    train: &DataSet,
    (start, features): (&dyn Draft, &FeatureSource),
) -> Result<RunIdentity> {
    let mut hasher = blake3::Hasher::new();
    for document in &train.documents {
        document.ids.iter().for_each(|id| {
            hasher.update(&id.to_le_bytes());
        });
        document.loss_mask.iter().for_each(|mask| {
            hasher.update(&[u8::from(*mask)]);
        });
    }
    let tokens = hasher.finalize().to_hex()[..16].to_owned();
    let json = |value: serde_json::Result<serde_json::Value>| {
        value
            .map(|value| value.to_string())
            .map_err(|error| TrainError::checkpoint(&config.output, error))
    };
    let run = &config.train;
    // A draft to start from counts by its values: its file may move.
    let draft = DraftConfig { from: None, ..config.draft.clone() };
    let started_from = match &config.draft.from {
        Some(_) => fingerprint(start)?,
        None => "initial values".to_owned(),
    };
    let mut identity = RunIdentity {
        values: vec![
            ("target".into(), target.fingerprint().to_owned()),
            ("data".into(), tokens),
            ("data.row_tokens".into(), row_layout(config)),
            ("data.anchor".into(), json(serde_json::to_value(config.data.anchor))?),
            ("draft".into(), json(serde_json::to_value(&draft))?),
            ("draft.from".into(), started_from),
            ("teacher".into(), json(serde_json::to_value(config.teacher))?),
            ("optimizer".into(), json(serde_json::to_value(&config.optimizer))?),
            ("schedule".into(), json(serde_json::to_value(&config.schedule))?),
            (STEPS.into(), total_steps(config, train).to_string()),
            ("train.rows_per_step".into(), run.rows_of_a_step(config.data.row_tokens).to_string()),
            ("train.seed".into(), run.seed.to_string()),
            ("train.features".into(), features_identity(features)),
        ],
    };
    // What the trained tensors rest on, such as the draft's vocabulary.
    for (name, tensor) in start.fixed_tensors()? {
        identity.values.push((format!("draft {name}"), tensor_hash(&tensor)?));
    }
    Ok(identity)
}

/// What an earlier version saved, under the keys of this one.
fn upgraded(saved: &RunIdentity) -> RunIdentity {
    let is_section = |name: &str| name == "draft" || name == "objective";
    let parsed = |(name, text): &(String, String)| {
        Some((name.clone(), serde_json::from_str(text).ok().filter(|_| is_section(name))?))
    };
    let mut record: Map<String, Value> = saved.values.iter().filter_map(parsed).collect();
    upgrade(&mut record);
    if !record.contains_key("teacher") {
        return saved.clone();
    }
    let kept = saved.values.iter().filter(|(name, _)| !is_section(name)).cloned();
    let new = record.into_iter().map(|(name, value)| (name, value.to_string()));
    RunIdentity { values: kept.chain(new).collect() }
}

/// A tensor's values as a short hash.
fn tensor_hash(tensor: &Tensor) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let values: Vec<f64> = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
    values.iter().for_each(|value| {
        hasher.update(&value.to_le_bytes());
    });
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// A draft's values as a short hash.
fn fingerprint(draft: &dyn Draft) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    for parameter in draft.parameters() {
        hasher.update(parameter.name.as_bytes());
        let values: Vec<f32> = parameter.var.flatten_all()?.to_vec1()?;
        values.iter().for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// Tokens of a row, and how documents become rows where that is not the default.
fn row_layout(config: &TrainConfig) -> String {
    let data = &config.data;
    if data.packing == Packing::default() && data.overlong == Overlong::default() {
        return data.row_tokens.to_string();
    }
    format!("{} ({:?}, {:?})", data.row_tokens, data.packing, data.overlong)
}

/// Where a run goes on.
struct Resumed {
    cursor: Cursor,
    progress: Progress,
    metrics_bytes: u64,
    schedule: Schedule,
    /// Whether the run became longer than it was.
    extended: bool,
}

impl Resumed {
    /// A run that begins.
    fn fresh(schedule: Schedule) -> Self {
        let (cursor, progress) = (Cursor::default(), Progress::default());
        Self { cursor, progress, metrics_bytes: 0, schedule, extended: false }
    }
}

/// Puts the newest checkpoint's tensors into draft and optimizer.
fn resume(
    (config, schedule): (&TrainConfig, Schedule),
    checkpointer: &Checkpointer,
    (objective, parallel, optimizer): (&dyn Objective, &DataParallel, &mut AdamW),
    (identity, policy): (&RunIdentity, ResumePolicy),
    observer: &mut dyn Observer,
) -> Result<Option<Resumed>> {
    let Some(loaded) = checkpointer.load_latest()? else {
        return Ok(None);
    };
    let resumed = going_on(config, schedule, &loaded.state, (identity, policy), observer)?;
    if let Some(warning) = &loaded.warning {
        observer.on_event(Event::Warning(warning));
    }
    require_same_network(&loaded.state.draft, &objective.draft().config_json(), &loaded.path)?;
    let saved: std::collections::HashMap<&str, &Tensor> =
        loaded.draft.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let parameters = objective.draft().parameters();
    for parameter in parameters {
        let tensor = saved.get(parameter.name.as_str()).ok_or_else(|| {
            TrainError::checkpoint(&loaded.path, format!("no tensor `{}`", parameter.name))
        })?;
        parameter.var.set(&tensor.to_device(parameter.var.device())?)?;
    }
    // Weights mean nothing over another vocabulary, forced or not.
    for (name, tensor) in objective.draft().fixed_tensors()? {
        let same = match saved.get(name.as_str()) {
            Some(saved) => tensor_hash(saved)? == tensor_hash(&tensor)?,
            None => false,
        };
        if !same {
            let problem = format!("the saved draft has another `{name}`");
            return Err(TrainError::checkpoint(&loaded.path, problem));
        }
    }
    loaded.restore(optimizer, parallel, objective.draft())?;
    observer.on_event(Event::Resumed(loaded.state.step));
    Ok(Some(resumed))
}

/// Where a run goes on from a checkpoint, and to which end.
fn going_on(
    config: &TrainConfig,
    schedule: Schedule,
    state: &CheckpointState,
    (identity, policy): (&RunIdentity, ResumePolicy),
    observer: &mut dyn Observer,
) -> Result<Resumed> {
    let output = &config.output;
    let changed = require_same_run(&upgraded(&state.identity), identity, &[STEPS], policy, output)?;
    let mut resumed = Resumed {
        cursor: state.cursor,
        progress: Progress {
            step: state.step,
            tokens: state.tokens,
            learned_rows: state.learned_rows,
            seconds: state.seconds,
            best: state.best,
            evaluations_since_best: state.evaluations_since_best,
            ended: state.ended,
        },
        metrics_bytes: state.metrics_bytes,
        ..Resumed::fresh(schedule)
    };
    let minutes = config.train.max_minutes;
    match policy {
        ResumePolicy::Force => {
            if !changed.is_empty() {
                let warning = format!("resumed although {}", changed.join("; "));
                observer.on_event(Event::Warning(&warning));
            }
            if state.identity.value(STEPS) == identity.value(STEPS) {
                resumed.schedule.warmup_of = state.first_steps.unwrap_or(schedule.steps);
            }
        }
        // What time ended is not longer by itself where more time is given.
        ResumePolicy::Strict if state.ended && is_raised(state.max_minutes, minutes) => {
            let (path, was) = (output.clone(), state.max_minutes.unwrap_or_default());
            let now = minutes.map_or_else(|| "no limit".to_owned(), |minutes| minutes.to_string());
            let differences = vec![format!("train.max_minutes was {was}, now {now}")];
            return Err(TrainError::OtherLength { path, differences, longer: true });
        }
        ResumePolicy::Strict | ResumePolicy::Extend => {
            resumed.schedule.warmup_of = state.first_steps.unwrap_or(schedule.steps);
        }
    }
    if policy == ResumePolicy::Extend {
        extend(config, state, &mut resumed, observer);
    }
    Ok(resumed)
}

/// Whether a limit in minutes was lifted.
fn is_raised(was: Option<f64>, now: Option<f64>) -> bool {
    was.is_some_and(|was| now.is_none_or(|now| now > was))
}

/// Takes a run up to a later end than it had, if that is asked for: its schedule keeps its warm-up.
fn extend(
    config: &TrainConfig,
    state: &CheckpointState,
    resumed: &mut Resumed,
    observer: &mut dyn Observer,
) {
    let steps = resumed.schedule.steps;
    let saved = state.identity.value(STEPS).and_then(|steps| steps.parse().ok());
    let before: u64 = saved.unwrap_or(steps);
    let time_is_up =
        config.train.max_minutes.is_some_and(|minutes| state.seconds >= 60.0 * minutes);
    if state.is_finished() && (state.step >= steps || time_is_up) {
        return;
    }
    if before < steps {
        resumed.extended = true;
        resumed.schedule.warmup_of = state.first_steps.unwrap_or(before);
        let old = resumed.schedule.extended_to(before);
        let note = old.describe_extension(&resumed.schedule, state.step);
        observer.on_event(Event::Note(&note));
    }
    if state.ended {
        // Patience begins anew, or the run would end at once.
        resumed.extended = true;
        resumed.progress.ended = false;
        resumed.progress.evaluations_since_best = 0;
    }
}
