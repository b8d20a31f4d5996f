//! The training of a round: its configuration, fixed before its first step, and the run.

use std::path::{Path, PathBuf};

use longdraft_configuration::{parse_stages, recheck};
use longdraft_models::DeviceChoice;
use longdraft_models::draft::DraftKind;
use longdraft_models::target_model::Target;
use longdraft_parallel::World;
use longdraft_records::ROUND_PREFIX;
use longdraft_records::events::Events;
use longdraft_train::checkpoint::{read_state, saved_draft};
use longdraft_train::method::Method;
use longdraft_train::stage::{Ending, Observer, ResumePolicy, Stage};
use serde_json::{Map, Value, json};

use super::answers::training_file;
use super::divergence::{Diverged, Watch};
use super::parting::MOST_EPOCHS;
use super::rules::{Candidate, Plan};
use super::search::Choice;
use super::state::Settings;
use super::trial::Trial;
use crate::commands::train::{self, Resume};
use crate::draft_source::{DraftSource, configuration};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::Voice;

/// Share of the rows that are held out, most of them, how often they are measured at most, and share of the time that
/// this may take: the draft is proved on prompts, these only show its way.
const HELD_OUT_PART: usize = 20;
const MOST_HELD_OUT: usize = 4;
const FEW_ROWS: f64 = 3.0;
const EVALUATIONS: usize = 4;
const MEASURING: f64 = 0.08;
/// Steps of training that measuring a held-out row takes beside its features: every delay or step of the draft,
/// without gradients.
pub(super) const OF_ROW: f64 = 4.0;
/// Over the planned time, after which training ends wherever it stands.
const GRACE: f64 = 1.3;
/// Prompt tokens of an answer's, from which prompts are not learned.
const LONG_PROMPTS: f64 = 1.0;

/// Run directory of a round.
pub(super) fn run_folder(folder: &Path, round: usize) -> PathBuf {
    folder.join(format!("{ROUND_PREFIX}{round}"))
}

/// A draft that is gone on from.
pub(crate) struct Start {
    pub(crate) method: String,
    /// The keys that it was trained with, if they are known.
    trained: Option<Map<String, Value>>,
    /// Those that make its network, as it was saved.
    network: Map<String, Value>,
}

impl Start {
    /// The keys of a training that goes on from it: `otherwise` is how its method is set up where nothing is
    /// known of the training before.
    pub(crate) fn keys(&self, otherwise: Map<String, Value>) -> Map<String, Value> {
        let mut keys = self.trained.clone().unwrap_or(otherwise);
        if self.trained.is_none() {
            keys.extend(self.network.clone());
        }
        keys
    }
}

/// What is known of a draft that is gone on from.
pub(crate) fn start(from: &Path) -> Result<Start> {
    let source = DraftSource::find(from)?;
    let (method, trained) = match &source {
        DraftSource::Files(_) => (DraftKind::at(source.folder())?.name.to_owned(), None),
        DraftSource::Checkpoint(located) => {
            let mut keys = configuration(&located.run)["draft"].as_object().cloned();
            for key in ["method", "from"] {
                keys.as_mut().map(|keys| keys.remove(key));
            }
            (read_state(&located.checkpoint)?.method, keys)
        }
    };
    let saved = saved_draft(from)?;
    let known = Method::named(&method).map(|known| known.fresh().keys_of(&saved)).transpose()?;
    Ok(Start { method, trained, network: known.unwrap_or_default() })
}

/// What is learned from.
pub(super) struct Text {
    /// With the prompts.
    pub(super) tokens: f64,
    /// Whether the target has a chat template.
    pub(super) is_chat: bool,
}

/// The configuration of a round with the time that is left for it.
pub(super) fn configured(
    (folder, round): (&Path, usize),
    settings: &Settings,
    (candidate, trial, plan, choice): (&Candidate, &Trial, &Plan, &Choice),
    (text, seconds): (&Text, f64),
    from: Option<&Path>,
) -> Result<Value> {
    let mut draft = candidate.recipe.draft.clone();
    match (from, &choice.init) {
        (Some(from), _) => {
            draft = start(from)?.keys(draft);
            draft.insert("from".into(), json!(from));
        }
        (None, Some(init)) => drop(draft.insert("init".into(), json!(init))),
        (None, None) => {}
    }
    draft.insert("method".into(), candidate.method.name().into());
    // What answers came to, in place of what was planned.
    let rows = (text.tokens / plan.row_tokens as f64).max(1.0);
    let (evaluations, measuring) = evaluations((text.tokens, seconds), plan.row_tokens, trial);
    // Features are made once where they are kept, else for every step.
    let capture = text.tokens * trial.capture;
    let (once, each) = if plan.keeps_features { (capture, 0.0) } else { (0.0, trial.capture) };
    let others = once + measuring;
    let of_step = plan.row_tokens as f64 * (trial.step + each);
    let steps = ((seconds - others) / of_step).min(MOST_EPOCHS * rows).max(1.0) as usize;
    let template = if text.is_chat {
        json!({ "kind": "messages" })
    } else {
        json!({ "kind": "raw", "fields": ["text"] })
    };
    let long = prompt_share(&training_file(folder)) > LONG_PROMPTS;
    let learn = if long && text.is_chat { "assistant" } else { "all" };
    Ok(json!({
        "target": settings.target,
        "output": run_folder(folder, round),
        "precision": train::as_served(DeviceChoice::Auto)?,
        "draft": draft,
        "teacher": candidate.recipe.teacher,
        "data": {
            "train": [{ "path": training_file(folder), "template": template, "learn": learn }],
            "held_out_rows": held_out_rows(rows),
            "row_tokens": plan.row_tokens,
            "anchor": { "enabled": false },
        },
        "schedule": { "learning_rate": choice.rate, "warmup_ratio": 0.05 },
        "train": {
            "rows_per_step": 1, "steps": steps, "seed": settings.seed,
            "features": if plan.keeps_features { "memory" } else { "online" },
            "save_minutes": 2, "evaluate_every": steps.div_ceil(evaluations),
            "max_minutes": (GRACE * seconds / 60.0).max(0.2),
        },
    }))
}

/// Rows of a text that show how the training goes; none of a text that has hardly more.
fn held_out_rows(rows: f64) -> usize {
    if rows < FEW_ROWS { 0 } else { (rows as usize / HELD_OUT_PART).clamp(1, MOST_HELD_OUT) }
}

/// How often a training over a text measures its held-out rows in some seconds, and what that takes of them.
pub(super) fn evaluations(
    (text_tokens, seconds): (f64, f64),
    row_tokens: usize,
    trial: &Trial,
) -> (usize, f64) {
    let tokens = (held_out_rows(text_tokens / row_tokens as f64) * row_tokens) as f64;
    let of_one = tokens * (trial.capture + OF_ROW * trial.step);
    let count = ((MEASURING * seconds / of_one.max(1e-9)) as usize).clamp(1, EVALUATIONS);
    (count, count as f64 * of_one)
}

/// Letters of prompts over those of answers.
fn prompt_share(path: &Path) -> f64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let (mut asked, mut answered) = (0, 0);
    for row in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        for message in row["messages"].as_array().into_iter().flatten() {
            let letters = message["content"].as_str().map_or(0, str::len);
            *(if message["role"] == "assistant" { &mut answered } else { &mut asked }) += letters;
        }
    }
    f64::from(asked as u32) / f64::from((answered as u32).max(1))
}

/// A training of this process alone, ready for its first step.
pub(super) fn prepared(config: &Value, observer: &mut dyn Observer) -> Result<Stage> {
    let mut stages = parse_stages(&config.to_string(), "fit", &[])?;
    let stage = stages.pop().ok_or_else(|| Failure::work("no stage"))?;
    let (config, world) = (recheck(stage.located.config)?, World::single());
    let target = train::open_target(&config, &world)?;
    let tokenizer = Target::open_tokenizer(&config.target)?;
    Ok(Stage::prepare(config, target, tokenizer, ResumePolicy::Strict, &world, observer)?)
}

/// Trains a round from where it stands; says how it diverged, if it did.
pub(super) fn run(
    config: &Value,
    policy: ResumePolicy,
    interrupts: &Interrupts,
    events: &Events,
) -> Result<Option<Diverged>> {
    let mut stages = parse_stages(&config.to_string(), "fit", &[])?;
    let stage = stages.pop().ok_or_else(|| Failure::work("no stage"))?;
    let (config, world) = (stage.located.config, World::single());
    let target = train::open_target(&config, &world)?;
    let voice = Voice::of(&world, &config.output)?;
    let mut watch = Watch::of(&config);
    let mut progress = TrainingProgress::new(interrupts.clone(), voice).heard_by(&mut watch);
    progress.events = events.clone();
    // A row may hold nothing but a long prompt.
    progress.allows_empty_steps = true;
    let resume = Resume { policy, continued_by: None };
    // The stage, which holds the run directory, ends here.
    let ran = train::train(config, &target, &resume, &world, &mut progress);
    let ran = ran.map(|(ending, _)| ending);
    drop(progress);
    match ran {
        Err(failure) if failure.is_divergence() => Ok(watch.found(false)),
        Err(failure) => Err(failure),
        Ok(Ending::Stopped) if interrupts.asked() => Err(interrupts.failure()),
        Ok(_) => Ok(watch.found(true)),
    }
}
