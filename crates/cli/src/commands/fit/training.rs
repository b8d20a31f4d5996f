//! The training of a round: its configuration, fixed before its first step.

use std::path::{Path, PathBuf};

use longdraft_configuration::{Composed, parse, parse_stages, recheck};
use longdraft_models::DeviceChoice;
use longdraft_models::target_model::Target;
use longdraft_parallel::World;
use longdraft_records::ROUND_PREFIX;
use longdraft_train::stage::{Event, Observer, ResumePolicy, Stage};
use serde_json::{Map, Value, json};

use super::answers::training_file;
use super::beginning::start;
use super::parting::MOST_EPOCHS;
use super::rules::{Candidate, Plan};
use super::search::Choice;
use super::stages::OfToken;
use super::state::Settings;
use super::trial::Trial;
use crate::commands::{curriculum, train};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

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
/// Minutes that a training has at any rate, and a stage of one.
const LEAST_MINUTES: f64 = 0.2;
const LEAST_OF_STAGE: f64 = 0.1;
/// Prompt tokens of an answer's, from which prompts are not learned.
const LONG_PROMPTS: f64 = 1.0;

pub(super) fn run_folder(folder: &Path, round: usize) -> PathBuf {
    folder.join(format!("{ROUND_PREFIX}{round}"))
}

/// A fixed configuration for a fit that lies elsewhere by now: with its run directory at `place`.
pub(super) fn moved(mut config: Value, place: &Path, target: &str) -> Value {
    let known = config["output"].as_str().map(PathBuf::from).unwrap_or_default();
    if let (Some(old), Some(new)) = (known.parent(), place.parent())
        && known != place
        && !old.as_os_str().is_empty()
    {
        move_paths(&mut config, old, new);
    }
    config["target"] = target.into();
    config
}

/// Paths inside of `old` become those inside of `new`.
fn move_paths(value: &mut Value, old: &Path, new: &Path) {
    match value {
        Value::String(text) => {
            // Other keys may have the folder's name as their value.
            if let Ok(inside) = Path::new(text.as_str()).strip_prefix(old)
                && !inside.as_os_str().is_empty()
            {
                *text = new.join(inside).display().to_string();
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| move_paths(value, old, new)),
        Value::Object(values) => values.values_mut().for_each(|value| move_paths(value, old, new)),
        _ => {}
    }
}

/// What is learned from.
pub(super) struct Text {
    /// With the prompts.
    pub(super) tokens: f64,
    /// Whether the target has a chat template.
    pub(super) is_chat: bool,
}

/// What only stages need.
#[derive(Default)]
pub(super) struct Staging {
    /// Keys of the draft that go with the rows of each.
    pub(super) keys: Vec<Map<String, Value>>,
    /// Those that are over, as they were trained.
    pub(super) done: Vec<Value>,
}

/// The configuration of a round with the time that is left for it: of one training, or of stages.
pub(super) fn configured(
    (folder, round): (&Path, usize),
    settings: &Settings,
    (candidate, trial, plan, choice): (&Candidate, &Trial, &Plan, &Choice),
    (text, seconds): (&Text, f64),
    from: Option<&Path>,
    staging: Staging,
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
    let mut config = json!({
        "target": settings.target,
        "output": run_folder(folder, round),
        "precision": train::as_served(DeviceChoice::Auto)?,
        "draft": draft,
        "teacher": candidate.recipe.teacher,
    });
    let path = training_file(folder);
    let about = (settings, path.as_path(), text);
    if plan.stages.is_empty() {
        let is_long = prompt_share(&path) > LONG_PROMPTS;
        let part = Part {
            row_tokens: plan.row_tokens,
            seconds,
            share: 1.0,
            answers_only: is_long && text.is_chat,
            keeps_features: plan.keeps_features,
            rate: choice.rate,
            trial: trial.clone(),
            after: None,
        };
        extend(&mut config, part.keys(about));
    } else {
        // The proof has prompts of its own, so every stage learns all that it can.
        config["data"] = json!({ "reserved_tokens": 0 });
        config["stages"] = staged((trial, plan, choice), about, seconds, staging);
    }
    Ok(config)
}

/// The stages of a training: those that are over as they were, and those that are to come with their parts of the time.
fn staged(
    (trial, plan, choice): (&Trial, &Plan, &Choice),
    about: (&Settings, &Path, &Text),
    seconds: f64,
    staging: Staging,
) -> Value {
    let Staging { keys, done: mut stages } = staging;
    let first = stages.len();
    let to_come = plan.stages.iter().enumerate().skip(first);
    let planned: f64 = to_come.clone().map(|(_, stage)| stage.seconds).sum();
    for (index, stage) in to_come {
        let part = Part {
            row_tokens: stage.row_tokens,
            seconds: seconds * stage.seconds / planned.max(1e-9),
            share: stage.share,
            answers_only: stage.answers_only,
            keeps_features: plan.keeps_features && index == 0,
            rate: stage.rate * choice.rate,
            trial: trial.in_rows(stage.row_tokens),
            after: Some(index),
        };
        let mut value = json!({ "name": stage.name });
        if let Some(keys) = keys.get(index).filter(|keys| !keys.is_empty()) {
            value["draft"] = json!(keys);
        }
        extend(&mut value, part.keys(about));
        stages.push(value);
    }
    Value::Array(stages)
}

fn extend(value: &mut Value, keys: Value) {
    if let (Some(all), Value::Object(keys)) = (value.as_object_mut(), keys) {
        all.extend(keys);
    }
}

/// A training, or a stage of one.
struct Part {
    row_tokens: usize,
    seconds: f64,
    /// Share of all passes over the text that it may make.
    share: f64,
    answers_only: bool,
    keeps_features: bool,
    rate: f64,
    /// In such rows.
    trial: Trial,
    /// The number of stages before it, where it is a stage.
    after: Option<usize>,
}

impl Part {
    fn keys(&self, (settings, path, text): (&Settings, &Path, &Text)) -> Value {
        let (row_tokens, trial) = (self.row_tokens, &self.trial);
        // What answers came to, in place of what was planned.
        let rows = (text.tokens / row_tokens as f64).max(1.0);
        let (held_out, evaluations, measuring) = self.held_out(rows);
        let OfToken { once, each } = OfToken::of(trial, self.keeps_features);
        let others = text.tokens * once + measuring;
        let steps = (self.seconds - others) / (row_tokens as f64 * each);
        let steps = steps.min(MOST_EPOCHS * self.share * rows).max(1.0) as usize;
        let minutes = if self.after.is_some() { LEAST_OF_STAGE } else { LEAST_MINUTES };
        json!({
            "data": {
                "train": [self.source(settings, path, text)],
                "held_out_rows": held_out,
                "row_tokens": row_tokens,
                "anchor": { "enabled": false },
            },
            "schedule": { "learning_rate": self.rate, "warmup_ratio": 0.05 },
            "train": {
                "rows_per_step": 1, "steps": steps, "seed": settings.seed,
                "features": if self.keeps_features { "memory" } else { "online" },
                "save_minutes": 2, "evaluate_every": steps.div_ceil(evaluations),
                "max_minutes": (GRACE * self.seconds / 60.0).max(minutes),
            },
        })
    }

    fn source(&self, settings: &Settings, path: &Path, text: &Text) -> Value {
        let template = if text.is_chat {
            json!({ "kind": "messages" })
        } else {
            json!({ "kind": "raw", "fields": ["text"] })
        };
        let learn = if self.answers_only { "assistant" } else { "all" };
        let mut source = json!({ "path": path, "template": template, "learn": learn });
        if self.answers_only && self.after.is_some() {
            // An answer stands in one row with the end of its prompt.
            let of_answer = settings.max_tokens.min(self.row_tokens / 2);
            source["max_prompt_tokens"] = json!(self.row_tokens - of_answer);
            source["prompt_overflow"] = json!("truncate_left");
        }
        source
    }

    /// Held-out rows, how often they are measured, and the seconds that this takes. Long rows are held out only as far as
    /// they can be measured in a stage's time.
    fn held_out(&self, rows: f64) -> (usize, usize, f64) {
        let mut held_out = held_out_rows(rows);
        if self.after.is_some_and(|before| before > 0) {
            let of_row = of_evaluation(1, self.row_tokens, &self.trial);
            held_out = held_out.min((MEASURING * self.seconds / of_row.max(1e-9)) as usize);
        }
        let of_one = of_evaluation(held_out, self.row_tokens, &self.trial);
        let (count, seconds) = repeated(of_one, self.seconds);
        (held_out, count, seconds)
    }
}

/// Rows of a text that show how the training goes; none of a text that has hardly more.
fn held_out_rows(rows: f64) -> usize {
    if rows < FEW_ROWS { 0 } else { (rows as usize / HELD_OUT_PART).clamp(1, MOST_HELD_OUT) }
}

/// Seconds in which held-out rows are measured once.
fn of_evaluation(rows: usize, row_tokens: usize, trial: &Trial) -> f64 {
    (rows * row_tokens) as f64 * (trial.capture + OF_ROW * trial.step)
}

/// How often what takes so long is measured in some seconds, and what that takes of them.
fn repeated(of_one: f64, seconds: f64) -> (usize, f64) {
    let count = ((MEASURING * seconds / of_one.max(1e-9)) as usize).clamp(1, EVALUATIONS);
    (count, count as f64 * of_one)
}

/// How often a training over a text measures its held-out rows in some seconds, and what that takes of them.
pub(super) fn evaluations(
    (text_tokens, seconds): (f64, f64),
    row_tokens: usize,
    trial: &Trial,
) -> (usize, f64) {
    let rows = held_out_rows(text_tokens / row_tokens as f64);
    repeated(of_evaluation(rows, row_tokens, trial), seconds)
}

/// The first stage of a training as one of its own.
pub(super) fn first_stage(config: &Value) -> Value {
    let mut config = config.clone();
    let stages = config.as_object_mut().and_then(|keys| keys.remove("stages"));
    let stage = stages.as_ref().and_then(|stages| stages.get(0)).and_then(Value::as_object);
    for (key, value) in stage.into_iter().flatten() {
        match key.as_str() {
            "name" => {}
            "draft" => extend(&mut config["draft"], value.clone()),
            _ => config[key.as_str()] = value.clone(),
        }
    }
    config
}

/// The stages of a training; itself where it has none.
pub(super) fn stages(config: &Value) -> &[Value] {
    config["stages"].as_array().map_or(std::slice::from_ref(config), Vec::as_slice)
}

/// One of them, to be changed.
pub(super) fn stage_mut(config: &mut Value, stage: usize) -> &mut Value {
    if config.get("stages").is_some() { &mut config["stages"][stage] } else { config }
}

/// The run directory of a stage, or of a training that has none.
pub(super) fn run_of(config: &Value, stage: usize) -> PathBuf {
    let output = Path::new(config["output"].as_str().unwrap_or_default());
    let name = config["stages"][stage]["name"].as_str();
    name.map_or_else(|| output.to_path_buf(), |name| output.join(name))
}

/// Leaves away what would come after some stages: the draft of the last of these is the training's.
pub(super) fn end_after(config: &mut Value, count: usize) -> Result<()> {
    let stages = config.get_mut("stages").and_then(Value::as_array_mut);
    let Some(stages) = stages else { return Ok(()) };
    stages.truncate(count.max(1));
    match parse(&config.to_string(), "fit", &[])? {
        Composed::Curriculum { output, stages } => {
            Ok(curriculum::description(&output, &stages).write(&output)?)
        }
        Composed::Stage(_) => Ok(()),
    }
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

/// Hears a short training.
pub(super) struct Ear<'a, F> {
    interrupts: &'a Interrupts,
    hear: F,
}

impl<F: FnMut(Event<'_>)> Observer for Ear<'_, F> {
    fn on_event(&mut self, event: Event<'_>) {
        (self.hear)(event);
    }

    fn should_stop(&self) -> bool {
        self.interrupts.asked()
    }
}

/// Has `hear` hear a short training that `interrupts` stops.
pub(super) fn heard<F: FnMut(Event<'_>)>(interrupts: &Interrupts, hear: F) -> Ear<'_, F> {
    Ear { interrupts, hear }
}

#[cfg(test)]
mod tests;
