//! The process that trains: it reads what is kept, goes on from the draft that proposes, and tells whether
//! the candidate is better on answers that were set aside. Killed at any moment, the next one goes on. A check is
//! its last part alone: the draft that rests stands for the candidate.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use longdraft_configuration::parse_stages;
use longdraft_models::target_model::Target;
use longdraft_models::weights::atomic::write_atomically;
use longdraft_models::{DeviceChoice, TargetConfig};
use longdraft_parallel::World;
use longdraft_train::config::TrainConfig;
use longdraft_train::method::{Method, Room};
use longdraft_train::stage::{Ending, ResumePolicy, measure_drafts};
use serde_json::{Value, json};

use super::clock::{Budget, Clock};
use super::extent::Extent;
use super::folder::private_folder;
use super::rows::{Choice, LEAST_CHECKED, Text, choose, different, judged, learned, unseen};
use super::state::{DRAFTS, Job, Outcome, Resting, TRAINING, draft_folder};
use super::store::{newest, now};
use crate::commands::extract::extract;
use crate::commands::fit::{self, TrainingSpeed};
use crate::commands::remove_folder;
use crate::commands::train::{self, Resume};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::Voice;

/// Tokens of a training row, where the context allows it.
const ROW_TOKENS: usize = 1024;
/// Share of a new draft's learning rate with which one goes on that has learned (`docs/results/training-choices.md`).
const CONTINUED: f64 = 0.25;
/// Name of the file of answers that decide.
const JUDGED: &str = "judged";
/// Folder of the steps that are timed.
const TIMED: &str = "timed";
/// How often these are run at most, and the share of their time that the process must have worked for: seconds that
/// it rested would count as those of a step. The clock's beats are up to so many seconds late.
const ATTEMPTS: usize = 4;
const AWAKE: f64 = 0.9;
const BEATS: f64 = 0.1;

/// Trains and compares; the outcome is told in the folder.
pub(super) fn run(folder: &Path) -> Result<()> {
    end_with_the_server();
    #[cfg(unix)]
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let job = Job::read(folder).ok_or_else(|| {
        Failure::usage(format!("{}: no training is under way there", folder.display()))
            .hint("`longdraft serve --learn DIR` begins one")
    })?;
    let place = folder.join(TRAINING);
    let clock = Clock::start(&place).map_err(Failure::work)?;
    let setup = Setup::of(&job, &place)?;
    let mut outcome = Outcome { rows_at: job.began, ..Outcome::default() };
    match &job.check {
        Some(resting) => setup.check(folder, resting, &mut outcome)?,
        None => setup.learn(folder, &clock, &mut outcome)?,
    }
    outcome.at = now();
    outcome.seconds = clock.worked().as_secs_f64();
    outcome.write(folder)
}

/// Ends this process when the server's end of its input closes, however the server ended. Where the system
/// can, it also ends one that rests, and when memory is short this one before any other.
fn end_with_the_server() {
    #[cfg(target_os = "linux")]
    {
        // Where it cannot, what is below has to do.
        let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
        let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    }
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        std::process::exit(i32::from(Failure::interrupted(15).code()));
    });
}

/// A job in its folder.
struct Setup<'a> {
    job: &'a Job,
    place: &'a Path,
    target: TargetConfig,
    row_tokens: usize,
}

impl<'a> Setup<'a> {
    fn of(job: &'a Job, place: &'a Path) -> Result<Self> {
        let target = Target::open_config(&job.target)?;
        let row_tokens = ROW_TOKENS.min(target.max_position_embeddings);
        Ok(Self { job, place, target, row_tokens })
    }

    /// Trains a candidate, and keeps it if it is better than the draft that proposes.
    fn learn(&self, folder: &Path, clock: &Clock, outcome: &mut Outcome) -> Result<()> {
        let Choice { train, mut held_out } = self.choice(folder)?;
        outcome.held_out = held_out.len();
        if train.is_empty() || outcome.has_too_few() {
            return Ok(());
        }
        let candidate = self.place.join("candidate");
        let extent = self.extent(clock, &train)?;
        self.train_candidate(clock, extent, &candidate)?;
        let learned = learned(&train, extent.tokens);
        outcome.rows = different(learned);
        held_out.truncate(judged(&held_out, learned));
        self.compare(&held_out, &candidate, outcome)?;
        if outcome.is_better() {
            keep(folder, &candidate, self.job.number)?;
            outcome.draft = Some(self.job.number);
        }
        Ok(())
    }

    /// Compares the draft that rests with the one that proposes on the newest answers, which neither has learned.
    fn check(&self, folder: &Path, resting: &Resting, outcome: &mut Outcome) -> Result<()> {
        let answers = unseen(newest(folder), resting.since, self.row_tokens);
        outcome.held_out = answers.len();
        if answers.len() >= LEAST_CHECKED {
            self.compare(&answers, &resting.draft, outcome)?;
        }
        outcome.rested = Some(resting.origin);
        Ok(())
    }

    /// Writes the texts to learn from and those that are set aside, the newest ones first, unless they are there.
    /// Answers that were kept since the training was asked for count for the next one, and for checks of this one.
    fn choice(&self, folder: &Path) -> Result<Choice> {
        let (train, held_out) = (self.file("train"), self.file("held_out"));
        // The second file is written last.
        if held_out.is_file() {
            return Ok(Choice { train: read_texts(&train)?, held_out: read_texts(&held_out)? });
        }
        let kept_before = newest(folder).filter(|row| row.at <= self.job.began);
        let choice = choose(kept_before, self.row_tokens);
        write_texts(&train, &choice.train)?;
        write_texts(&held_out, &choice.held_out)?;
        Ok(choice)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.place.join(format!("{name}.jsonl"))
    }

    /// The keys of a training that goes on from the draft of the job, for one step.
    fn configured(&self) -> Result<Value> {
        let Self { job, row_tokens, .. } = *self;
        let start = job.draft.as_deref().map(fit::start).transpose()?;
        let method =
            start.as_ref().map(|start| start.method.clone()).or_else(|| job.method.clone());
        let method = method.ok_or_else(|| {
            Failure::usage("nothing says what is to be trained: neither a draft nor a method")
        })?;
        let room = Room { target: &self.target, seconds: 60.0 * job.minutes, row_tokens };
        let recipe = Method::named(&method).and_then(|method| method.fresh().recipe(&room));
        let of_recipe = recipe.as_ref().map(|recipe| recipe.draft.clone()).unwrap_or_default();
        // A draft that is there has its sizes; a new one has those that suit the target.
        let mut draft = match &start {
            Some(start) => start.keys(of_recipe),
            None => of_recipe,
        };
        draft.insert("method".into(), method.into());
        if let Some(from) = &job.draft {
            draft.insert("from".into(), json!(from));
        }
        let device: DeviceChoice = job.device.parse().map_err(Failure::usage)?;
        let mut value = json!({
            "target": job.target, "device": device, "precision": train::as_served(device)?,
            "output": self.place.join("run"),
            "draft": draft,
            "data": {
                "train": [source(&self.file("train"))], "held_out": [source(&self.file("held_out"))],
                "row_tokens": row_tokens, "anchor": { "enabled": false },
            },
            "train": { "rows_per_step": 1, "steps": 1, "save_minutes": 1, "keep_best": false },
            "tracking": { "report_to": [] },
        });
        if let Some(recipe) = recipe {
            value["teacher"] = recipe.teacher.into();
            let share = if job.draft.is_some() { CONTINUED } else { 1.0 };
            let rate = share * recipe.learning_rate;
            value["schedule"] = json!({ "learning_rate": rate, "warmup_ratio": 0.05 });
        }
        Ok(value)
    }

    /// What of the texts is learned; found once by some steps that are timed.
    fn extent(&self, clock: &Clock, train: &[Text]) -> Result<Extent> {
        if let Some(extent) = Extent::read(self.place) {
            return Ok(extent);
        }
        let speed = self.speed(clock)?;
        let tokens = train.iter().map(|text| text.input_ids.len()).sum();
        let left = 60.0 * self.job.minutes - clock.worked().as_secs_f64();
        let sizes = (tokens, self.row_tokens);
        let extent =
            Extent::of(&speed, sizes, left, train::memory_for_features(DeviceChoice::Auto));
        extent.write(self.place)?;
        Ok(extent)
    }

    /// What training takes, measured while the process was not stopped for long.
    fn speed(&self, clock: &Clock) -> Result<TrainingSpeed> {
        let mut config = self.configured()?;
        let folder = self.place.join(TIMED);
        config["output"] = json!(folder);
        let (interrupts, mut attempts) = (Interrupts::listen(), 0);
        loop {
            let _ = std::fs::remove_dir_all(&folder);
            let (started, before) = (Instant::now(), clock.worked().as_secs_f64());
            let speed = fit::timed(&config, &interrupts);
            let _ = std::fs::remove_dir_all(&folder);
            let speed = speed?;
            let worked = clock.worked().as_secs_f64() - before;
            attempts += 1;
            if attempts == ATTEMPTS || worked >= AWAKE * started.elapsed().as_secs_f64() - BEATS {
                return Ok(speed);
            }
        }
    }

    fn train_candidate(&self, clock: &Clock, extent: Extent, candidate: &Path) -> Result<()> {
        let Extent { tokens, steps, keeps_features } = extent;
        let mut value = self.configured()?;
        value["data"]["train"][0]["limit_tokens"] = json!(tokens);
        value["train"]["steps"] = json!(steps);
        value["train"]["features"] = json!(if keeps_features { "memory" } else { "online" });
        let (config, world) = (parsed(&value)?, World::single());
        let run = config.output.clone();
        let target = train::open_target(&config, &world)?;
        let interrupts = Interrupts::listen();
        let most = Duration::try_from_secs_f64(60.0 * self.job.minutes).unwrap_or(Duration::MAX);
        let mut budget = Budget { clock, most };
        let progress = TrainingProgress::new(interrupts.clone(), Voice::alone());
        let mut progress = progress.heard_by(&mut budget);
        let resume = Resume { policy: ResumePolicy::Strict, continued_by: None };
        let (ending, stage) = train::train(config, &target, &resume, &world, &mut progress)?;
        drop(stage);
        if ending == Ending::Stopped && interrupts.asked() {
            return Err(interrupts.failure());
        }
        extract(&run.join("checkpoints/last"), candidate).map(drop)
    }

    /// The candidate and the draft that proposes on the answers that decide, each of them a row.
    fn compare(&self, answers: &[Text], candidate: &Path, outcome: &mut Outcome) -> Result<()> {
        write_texts(&self.file(JUDGED), answers)?;
        let mut value = self.configured()?;
        value["data"]["packing"] = "none".into();
        let judged = json!([source(&self.file(JUDGED))]);
        (value["data"]["train"], value["data"]["held_out"]) = (judged.clone(), judged);
        let config = parsed(&value)?;
        let target = train::open_target(&config, &World::single())?;
        let tokenizer = Target::open_tokenizer(&self.job.target)?;
        let mut progress = TrainingProgress::new(Interrupts::listen(), Voice::alone());
        let drafts = [Some(candidate.to_path_buf()), self.job.draft.clone()];
        let drafts: Vec<PathBuf> = drafts.into_iter().flatten().collect();
        let measured = measure_drafts(&config, &drafts, (&target, &tokenizer), &mut progress)?;
        let Some(after) = measured.first() else {
            return Err(Failure::work("nothing was measured"));
        };
        outcome.held_out = after.rows();
        outcome.after = after.simulated_length();
        (outcome.before, outcome.interval) = match measured.get(1) {
            Some(before) => (before.simulated_length(), after.gain_over(before).1),
            // A pass without a draft gives a token.
            None => (1.0, (after.interval().0 - 1.0, after.interval().1 - 1.0)),
        };
        Ok(())
    }
}

fn write_texts(path: &Path, texts: &[Text]) -> Result<()> {
    let lines: serde_json::Result<Vec<String>> = texts.iter().map(serde_json::to_string).collect();
    let lines = lines.map_err(Failure::work)?;
    Ok(write_atomically(
        path,
        lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect::<String>().as_bytes(),
    )?)
}

fn read_texts(path: &Path) -> Result<Vec<Text>> {
    let text = std::fs::read_to_string(path).map_err(Failure::at(path))?;
    text.lines().map(|line| serde_json::from_str(line).map_err(Failure::at(path))).collect()
}

fn source(path: &Path) -> Value {
    json!({ "path": path, "template": { "kind": "tokens" } })
}

fn parsed(value: &Value) -> Result<TrainConfig> {
    let mut stages = parse_stages(&value.to_string(), "learn", &[])?;
    let stage = stages.pop().ok_or_else(|| Failure::work("no stage"))?;
    Ok(stage.located.config)
}

/// Puts a draft among those that were taken, whole.
fn keep(folder: &Path, candidate: &Path, number: u32) -> Result<()> {
    private_folder(&folder.join(DRAFTS))?;
    let place: PathBuf = draft_folder(folder, number);
    // One of a training that was killed before it could tell.
    remove_folder(&place)?;
    std::fs::rename(candidate, &place).map_err(Failure::at(&place))
}
