//! The phases of a fit up to the training, each of which can be repeated.

use longdraft_models::DeviceChoice;
use longdraft_models::disk::{free_bytes, readable_bytes};
use longdraft_records::events::FitPhase;
use longdraft_report::words::clock;
use longdraft_train::memory::resident_bytes;

use super::learning::LEAST_TRAINING;
use super::measure::{self, Machine};
use super::parting::{self, Budget, LEAST_ANSWERS};
use super::rules::{Candidate, Plan};
use super::trial::Trial;
use super::{Fit, answers, lengths, lookup, proof, telling, trial};
use crate::commands::data::regenerate::Reached;
use crate::commands::train::memory_for_features;
use crate::failure::{Failure, Result};
use crate::terminal::cover::is_covered;

/// Seconds of a budget from which lookup is measured, too.
const WITH_LOOKUP: f64 = 30.0;
/// Seconds that must be left after the measurement: less than this answers, trains and proves nothing.
const LEAST_LEFT: f64 = 2.0;
/// Seconds of a budget in which a draft learns little.
const LITTLE: f64 = 600.0;

/// A time as `--time` takes it, rounded up.
fn in_seconds(seconds: f64) -> String {
    format!("{}s", seconds.ceil())
}

impl Fit<'_> {
    /// Measures what an earlier call did not; returns the method that is taken.
    pub(super) fn measure(&mut self) -> Result<Candidate> {
        if self.ledger.round().has_begun() {
            // It was measured, and its phase stays. Who watches hears that a call begins.
            let number = self.ledger.number();
            self.ledger.events.phase(FitPhase::Measure, number);
        } else {
            self.ledger.begin(FitPhase::Measure)?;
        }
        let target = self.ledger.state.settings.target.clone();
        if self.ledger.state.machine.is_none() {
            errln!("[measure] how fast this machine runs {target}");
            let machine = self.machine().map_err(|failure| self.or_stopped(failure))?;
            self.ledger.state.machine = Some(machine);
            self.ledger.write()?;
        }
        let candidate = self.candidate()?;
        if !self.is_tried(&candidate) {
            errln!("[measure] a few steps of training, method {}", candidate.method.name());
            let trial = self.try_out(&candidate);
            // Also where the disk is full.
            let _ = std::fs::remove_dir_all(self.ledger.folder.join("work"));
            let trial = trial.map_err(|failure| self.or_stopped(failure))?;
            self.ledger.state.trial = Some(trial);
            self.ledger.write()?;
        }
        if let Some(machine) = &self.ledger.state.machine {
            telling::machine(machine, parting::of_answer(self.ledger.state.settings.max_tokens));
        }
        self.require_time()?;
        Ok(candidate)
    }

    /// Whether it is known what a draft of a method takes, in rows as long as the time of a round that begins affords.
    fn is_tried(&mut self, candidate: &Candidate) -> bool {
        let (left, has_begun) = (self.ledger.left(), self.ledger.round().has_begun());
        let rows = self.rows_of_trial(left);
        self.ledger.state.trial.as_ref().is_some_and(|trial| {
            trial.method == candidate.method.name() && (has_begun || !trial.is_outgrown(rows, left))
        })
    }

    /// Tokens of the rows of a trial for some seconds, and those of whole rows where a training has stages.
    fn rows_of_trial(&self, seconds: f64) -> (usize, Option<usize>) {
        let machine = self.ledger.machine();
        let (whole, stages) = (self.row_tokens(seconds), self.stages(seconds));
        let first = stages.first().map_or(whole, |stage| stage.row_tokens);
        (trial::row(first, &machine, seconds), stages.first().map(|_| whole))
    }

    /// What a draft of a method takes here, also in long rows where a training of the time that is left has some.
    fn try_out(&mut self, candidate: &Candidate) -> Result<Trial> {
        let settings = self.ledger.state.settings.clone();
        let folder = self.ledger.folder.clone();
        let left = self.ledger.left();
        let step = self.ledger.state.machine.as_ref().map_or(1.0, Machine::step);
        let (row_tokens, whole) = self.rows_of_trial(left);
        // As many pieces of text a token as in training.
        let shorter = self.for_rows(candidate, row_tokens);
        let tried = shorter.as_ref().unwrap_or(candidate);
        let work = folder.join("work");
        let how = ((row_tokens, step), self.engines.as_slice());
        let places = (work.as_path(), folder.as_path());
        let mut trial = trial::measure(&settings, tried, how, places, &self.interrupts)?;
        let long = whole.and_then(|whole| trial.long_row((row_tokens, whole), left));
        if let Some(long) = long {
            let longer = self.for_rows(candidate, long);
            let tried = (settings.target.as_str(), longer.as_ref().unwrap_or(candidate));
            trial::measure_long(&mut trial, tried, (row_tokens, long), &work, &self.interrupts)?;
        }
        Ok(trial)
    }

    /// What the target takes here.
    fn machine(&mut self) -> Result<Machine> {
        let left = self.ledger.left();
        let (settings, folder) = (&self.ledger.state.settings, &self.ledger.folder);
        let models = settings.decoding().open(&settings.target)?;
        let opened = (&*models.target, &*models.tokenizer);
        let held_out = proof::held_out(folder, opened)?;
        let of_answer = parting::of_answer(settings.max_tokens);
        let about = (held_out.as_slice(), lengths::of(folder, opened, of_answer)?);
        let lookup = (left >= WITH_LOOKUP).then(|| lookup::seconds(left));
        measure::machine(&models, about, lookup, settings, &self.interrupts)
    }

    /// Refuses what cannot even be begun in the time that is left; what was measured is kept.
    fn require_time(&mut self) -> Result<()> {
        let (left, round) = (self.ledger.left(), self.ledger.round());
        let (budget, has_begun) = (round.budget, round.has_begun());
        if has_begun || self.arguments.plan {
            return Ok(());
        }
        let least = self.least_answering();
        let needed = (least + LEAST_TRAINING).max(LEAST_LEFT);
        if left >= needed {
            if budget < LITTLE {
                errln!(
                    "note: {} is little time: rows are short, and the draft learns little",
                    clock(budget)
                );
            }
            return Ok(());
        }
        self.ledger.drop_round()?;
        let problem = format!(
            "--time {} is too short: measuring this machine took {} of it, and the first answers take some {}",
            clock(budget),
            clock(budget - left),
            clock(least)
        );
        let hint = if budget >= needed {
            "what was measured is kept: the same command has all of its time now".to_owned()
        } else {
            format!("what was measured is kept; give at least --time {}", in_seconds(needed))
        };
        Err(Failure::usage(problem).hint(hint))
    }

    /// Seconds of the answers that a draft needs at least; none where they are there.
    fn least_answering(&self) -> f64 {
        let state = &self.ledger.state;
        if state.rounds.iter().any(|round| round.answers.is_some()) {
            return 0.0;
        }
        let of_answer = parting::of_answer(state.settings.max_tokens);
        let machine = state.machine.as_ref();
        LEAST_ANSWERS as f64 * machine.map_or(0.0, |machine| machine.row(of_answer))
    }

    /// Makes the plan of the round, once, and tells it.
    pub(super) fn plan(&mut self, candidate: &Candidate) -> Result<()> {
        let free = free_bytes(&self.ledger.folder);
        if self.ledger.round().plan.is_none() {
            let earlier = self.ledger.state.rounds.iter();
            let answered = earlier.filter_map(|round| round.answers.as_ref()).map(|a| a.kept).max();
            let learned = self.ledger.state.learned();
            let left = self.ledger.left().max(1.0);
            let set_up_for = self.ledger.round().set_up_for.unwrap_or(left);
            let row_tokens = self.row_tokens(set_up_for);
            let split = &self.ledger.state.split;
            let budget = Budget {
                prompts: split.training + split.shipped,
                max_tokens: self.ledger.state.settings.max_tokens,
                learned,
                answered: answered.unwrap_or(0),
                goes_on: self.arguments.from.is_some(),
                row_tokens,
                stages: self.stages(left),
                free_memory: self.memory_beside_training(),
                seconds: left,
            };
            let plan = Plan::new(candidate, &self.ledger.machine(), &self.ledger.trial(), &budget);
            self.ledger.round().plan = Some(plan);
            self.ledger.write()?;
        }
        let plan = self.current_plan();
        telling::plan(&plan, (&self.ledger.machine(), &self.ledger.trial()), free);
        // What has begun holds a part of it already.
        let wanted = if self.ledger.round().has_begun() { 0 } else { plan.disk };
        if let Some(free) = free.filter(|free| *free < wanted) {
            return Err(Failure::usage(format!(
                "{}: {} are free, and the fit needs {}",
                self.ledger.folder.display(),
                readable_bytes(free),
                readable_bytes(wanted)
            ))
            .hint("make room, or give a folder on another disk with --output"));
        }
        Ok(())
    }

    /// Bytes that are free beside a target and its training. Both may lie in memory by now, or not yet.
    fn memory_beside_training(&self) -> Option<u64> {
        let free = memory_for_features(DeviceChoice::Auto)?;
        if DeviceChoice::Auto.open(0).is_ok_and(|device| !device.is_cpu()) {
            return Some(free);
        }
        let training = self.ledger.state.trial.as_ref().map_or(0, |trial| trial.memory);
        let own = resident_bytes().unwrap_or(0);
        Some((free + own).saturating_sub(training.max(own)))
    }

    /// The round's plan; an empty one before it is made.
    pub(super) fn current_plan(&mut self) -> Plan {
        self.ledger.round().plan.clone().unwrap_or_default()
    }

    /// Whether the time is spent on training.
    pub(super) fn is_worth_it(&mut self) -> bool {
        // What has begun was found worth it, or wanted anyway.
        self.arguments.anyway || self.ledger.round().has_begun() || self.current_plan().may_pay()
    }

    /// Ends a call that only plans, or that finds nothing worth its time.
    pub(super) fn end_of_plan(&mut self) -> Result<()> {
        let plan = self.current_plan();
        let (machine, trial) = (self.ledger.machine(), self.ledger.trial());
        if !plan.may_pay() {
            let [lookup, _] = self.commands_with(" --lookup=switch");
            telling::does_not_pay(&plan, &machine, &lookup);
        }
        if self.ledger.round().has_begun() {
            self.ledger.write()?;
        } else {
            self.ledger.drop_round()?;
        }
        // What earlier rounds made is there.
        if !self.arguments.plan && !self.ledger.state.rounds.is_empty() {
            return self.tell_result();
        }
        if self.json {
            let may_pay = plan.may_pay();
            outjson!({ "plan": plan, "machine": machine, "trial": trial, "may_pay": may_pay });
        }
        if self.arguments.plan {
            return Ok(());
        }
        Err(Failure::work("nothing was trained: no draft is expected to pay here")
            .hint("--anyway trains all the same")
            .in_result())
    }

    /// Has the target answer prompts.
    pub(super) fn answer(&mut self) -> Result<()> {
        if self.ledger.round().answers.is_some() {
            return Ok(());
        }
        let earlier = *self.ledger.round().answering.get_or_insert(0.0);
        self.ledger.begin(FitPhase::Answers)?;
        let plan = self.current_plan();
        let settings = self.ledger.state.settings.clone();
        let machine = self.ledger.machine();
        let how = (machine.lookup_helps(), machine.batch());
        let models = settings.decoding().open(&settings.target)?;
        let folder = self.ledger.folder.clone();
        // What earlier calls took of the time is not given again.
        let most = self.ledger.left() - plan.proof - LEAST_TRAINING;
        let seconds = (plan.answering - earlier).min(most).max(1.0);
        let started = std::time::Instant::now();
        let mut last = std::time::Instant::now();
        let events = self.ledger.events.clone();
        let split = &self.ledger.state.split;
        let prompts = split.training + split.shipped;
        let ledger = &mut self.ledger;
        let mut tell = |done: usize, all: usize| -> Result<()> {
            if last.elapsed().as_secs() >= 5 {
                last = std::time::Instant::now();
                let left = seconds - started.elapsed().as_secs_f64();
                if !is_covered() {
                    errln!("[answers] {done}/{all} prompts, at most {} left", clock(left));
                }
                ledger.round().answering = Some(earlier + started.elapsed().as_secs_f64());
                ledger.write()?;
            }
            Ok(())
        };
        let has_template = self.tokenizer.chat_template().is_some();
        let mut wanted = plan.answers;
        let cleaned = loop {
            let goal = (wanted, seconds - started.elapsed().as_secs_f64());
            let about = (&settings, how, prompts);
            let heard = (&self.interrupts, &events);
            let reached = answers::write(&folder, about, &models, goal, heard, &mut tell)?;
            if reached == Reached::ASignal {
                return Err(self.stopped());
            }
            let cleaned = answers::clean(&folder, has_template)?;
            let has_time = reached == Reached::TheEnd && started.elapsed().as_secs_f64() < seconds;
            match answers::further(wanted, (&cleaned, plan.answer_tokens), prompts) {
                Some(more) if has_time => wanted = more,
                _ => break cleaned,
            }
        };
        telling::cleaned(&cleaned);
        self.ledger.round().answers = Some(cleaned);
        self.ledger.write()
    }

    /// Says that the same command goes on.
    pub(super) fn stopped(&mut self) -> Failure {
        let _ = self.ledger.write();
        if self.json {
            let phase = self.ledger.state.phase;
            outjson!({ "output": self.ledger.folder, "finished": false, "phase": phase });
        } else {
            outln!(
                "stopped in the phase `{}`: the same command goes on from there",
                self.ledger.state.phase
            );
        }
        self.interrupts.failure()
    }

    /// A failure; where a signal stopped the work, after a word about it.
    pub(super) fn or_stopped(&mut self, failure: Failure) -> Failure {
        if failure.is_interruption() { self.stopped() } else { failure }
    }
}
