//! The phases of a fit, each of which can be repeated.

use longdraft_train::features::store::free_bytes;
use serde_json::json;

use super::delivery;
use super::measure;
use super::proof::{self, Way};
use super::rules::{self, Budget, Candidate, Plan};
use super::{Fit, answers, lookup_command, telling, training};
use crate::cli::WeightDtype;
use crate::commands::data::regenerate::Reached;
use crate::commands::{eval, report};
use crate::decode_record::{DECODE_FILE, DecodeRecord};
use crate::doctor::{available_memory, readable_bytes};
use crate::failure::{Failure, Result};
use crate::progress::clock;

/// Seconds of a budget from which lookup is measured, too.
const WITH_LOOKUP: f64 = 30.0;
/// Seconds that training has at any rate.
const LEAST_TRAINING: f64 = 2.0;

impl Fit<'_> {
    /// Measures what an earlier call did not; returns the method that is taken.
    pub(super) fn measure(&mut self) -> Result<Candidate> {
        self.ledger.begin("measure")?;
        let target = self.ledger.state.settings.target.clone();
        let folder = self.ledger.folder.clone();
        if self.ledger.state.machine.is_none() {
            errln!("[measure] how fast this machine runs {target}");
            let models = measure::plainly().open(&target)?;
            let held_out = proof::held_out(&folder, (&models.target, &models.tokenizer))?;
            let with_lookup = self.ledger.left() >= WITH_LOOKUP;
            let machine = measure::machine(&models, &held_out, with_lookup)?;
            self.ledger.state.machine = Some(machine);
            self.ledger.write()?;
        }
        let candidate = self.candidate()?;
        let tried = self.ledger.state.trial.as_ref().map(|trial| trial.method.as_str());
        if tried != Some(candidate.method.name()) {
            errln!("[measure] a few steps of training, method {}", candidate.method.name());
            let context = self.config.max_position_embeddings;
            let row_tokens = rules::row_tokens(self.ledger.left(), context);
            let work = folder.join("work");
            let trial = measure::trial(&target, &candidate, row_tokens, &work, &folder)?;
            let _ = std::fs::remove_dir_all(&work);
            self.ledger.state.trial = Some(trial);
            self.ledger.write()?;
        }
        if let Some(machine) = &self.ledger.state.machine {
            telling::machine(machine);
        }
        Ok(candidate)
    }

    /// Makes the plan of the round, once, and tells it.
    pub(super) fn plan(&mut self, candidate: &Candidate) -> Result<()> {
        let free = free_bytes(&self.ledger.folder);
        if self.ledger.round().plan.is_none() {
            let earlier = || self.ledger.state.rounds.iter();
            let learned =
                earlier().filter(|round| round.trained).filter_map(|round| round.plan.as_ref());
            let learned = learned.map(|plan| (plan.steps as usize * plan.row_tokens) as f64).sum();
            let answered =
                earlier().filter_map(|round| round.answers.as_ref()).map(|a| a.kept).max();
            let split = &self.ledger.state.split;
            let budget = Budget {
                prompts: split.training + split.shipped,
                max_tokens: self.ledger.state.settings.max_tokens,
                learned,
                answered: answered.unwrap_or(0),
                context: self.config.max_position_embeddings,
                free_memory: available_memory(),
                seconds: self.ledger.left().max(1.0),
            };
            let state = &self.ledger.state;
            let (machine, trial) = (state.machine.clone(), state.trial.clone());
            let (machine, trial) = (machine.unwrap_or_default(), trial.unwrap_or_default());
            let plan = Plan::new(candidate, &machine, &trial, &budget);
            self.ledger.round().plan = Some(plan);
            self.ledger.write()?;
        }
        let (plan, trial) = (self.current_plan(), self.ledger.state.trial.clone());
        telling::plan(&plan, &trial.unwrap_or_default(), free);
        if let Some(free) = free.filter(|free| *free < plan.disk) {
            return Err(Failure::usage(format!(
                "{}: {} are free, and the fit needs {}",
                self.ledger.folder.display(),
                readable_bytes(free),
                readable_bytes(plan.disk)
            ))
            .hint("make room, or give a folder on another disk with --output"));
        }
        Ok(())
    }

    /// The round's plan; an empty one before it is made.
    fn current_plan(&mut self) -> Plan {
        self.ledger.round().plan.clone().unwrap_or_default()
    }

    /// Whether the time is spent on training.
    pub(super) fn is_worth_it(&mut self) -> bool {
        self.arguments.anyway || self.current_plan().may_pay()
    }

    /// Ends a call that only plans, or that finds nothing worth its time.
    pub(super) fn end_of_plan(mut self) -> Result<()> {
        let plan = self.current_plan();
        let machine = self.ledger.state.machine.clone().unwrap_or_default();
        let trial = self.ledger.state.trial.clone().unwrap_or_default();
        if !plan.may_pay() {
            telling::does_not_pay(
                &plan,
                &machine,
                &lookup_command(self.arguments, &self.tokenizer),
            );
        }
        // The next call plans anew, with the time that it is given.
        self.ledger.state.rounds.pop();
        self.ledger.write()?;
        if self.json {
            outln!("{}", telling::plan_json(&plan, &machine, &trial));
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
        self.ledger.begin("answers")?;
        let plan = self.current_plan();
        let settings = self.ledger.state.settings.clone();
        let lookup = self.ledger.state.machine.as_ref().is_some_and(measure::Machine::lookup_helps);
        let models = measure::plainly().open(&settings.target)?;
        let folder = self.ledger.folder.clone();
        // What a kill took of the time is not given again.
        let seconds = plan.answering.min(self.ledger.left() - plan.proof - LEAST_TRAINING).max(1.0);
        let started = std::time::Instant::now();
        let mut last = std::time::Instant::now();
        let ledger = &mut self.ledger;
        let mut tell = |done: usize, all: usize| -> Result<()> {
            if last.elapsed().as_secs() >= 5 {
                last = std::time::Instant::now();
                let left = seconds - started.elapsed().as_secs_f64();
                errln!("[answers] {done}/{all} prompts, at most {} left", clock(left));
                ledger.write()?;
            }
            Ok(())
        };
        let goal = (plan.answers, seconds);
        let reached = answers::write(
            &folder,
            (&settings, lookup),
            &models,
            goal,
            &self.interrupts,
            &mut tell,
        )?;
        if reached == Reached::ASignal {
            return Err(self.stopped());
        }
        let cleaned = answers::clean(&folder, self.tokenizer.chat_template().is_some())?;
        telling::cleaned(&cleaned);
        self.ledger.round().answers = Some(cleaned);
        self.ledger.write()
    }

    /// Says that the same command goes on.
    fn stopped(&mut self) -> Failure {
        let _ = self.ledger.write();
        if self.json {
            outln!(
                "{}",
                json!({ "output": self.ledger.folder, "finished": false, "phase": self.ledger.state.phase })
            );
        } else {
            outln!(
                "stopped in the phase `{}`: the same command goes on from there",
                self.ledger.state.phase
            );
        }
        self.interrupts.failure()
    }

    /// Trains the round's draft.
    pub(super) fn train(&mut self, candidate: &Candidate) -> Result<()> {
        if self.ledger.round().trained {
            return Ok(());
        }
        self.ledger.begin("training")?;
        if self.ledger.round().training.is_none() {
            let (plan, number) = (self.current_plan(), self.ledger.number());
            let cleaned = self.ledger.round().answers.clone().unwrap_or_default();
            let seconds = (self.ledger.left() - plan.proof).max(LEAST_TRAINING);
            let folder = self.ledger.folder.clone();
            let before = (number > 1).then(|| training::run_folder(&folder, number - 1));
            let from = before.or_else(|| self.arguments.from.clone());
            let trial = self.ledger.state.trial.clone().unwrap_or_default();
            let config = training::configured(
                (&folder, number),
                &self.ledger.state.settings,
                (candidate, &trial, &plan),
                (&cleaned, seconds),
                (from.as_deref(), self.tokenizer.chat_template().is_some()),
            )?;
            self.ledger.round().training = Some(config);
            self.ledger.write()?;
        }
        let config = self.ledger.round().training.clone().unwrap_or_default();
        errln!("[training] {} steps, {} left for them", config["train"]["steps"], {
            let proof = self.current_plan().proof;
            clock(self.ledger.left() - proof)
        });
        if let Err(failure) = training::run(&config, &self.interrupts) {
            return Err(if failure.is_interruption() { self.stopped() } else { failure });
        }
        self.ledger.round().trained = true;
        self.ledger.write()
    }

    fn ways(&mut self) -> Vec<Way> {
        let (plan, settings) = (self.current_plan(), self.ledger.state.settings.clone());
        proof::ways(&self.ledger.folder.join("draft"), &plan, &settings)
    }

    /// Decodes what was set aside with the draft and without it.
    pub(super) fn prove(&mut self) -> Result<()> {
        if self.ledger.round().proved {
            return Ok(());
        }
        self.ledger.begin("proof")?;
        let (folder, number) = (self.ledger.folder.clone(), self.ledger.number());
        let run = training::run_folder(&folder, number);
        delivery::extract_draft(&folder, &run)?;
        let (ways, plan) = (self.ways(), self.current_plan());
        let settings = self.ledger.state.settings.clone();
        let machine = self.ledger.state.machine.clone().unwrap_or_default();
        let seconds = plan.proof.max(1.0);
        let record =
            proof::measure(&folder, (&settings, &machine), &ways, seconds, &self.interrupts)?;
        let Some(record) = record else { return Err(self.stopped()) };
        eval::write(&run, &record)?;
        self.ledger.round().proved = true;
        self.ledger.write()
    }

    fn record(&mut self) -> Result<DecodeRecord> {
        let run = training::run_folder(&self.ledger.folder, self.ledger.number());
        let path = run.join(DECODE_FILE);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Failure::work(format!("{}: {error}", path.display())))?;
        serde_json::from_str(&text)
            .map_err(|error| Failure::work(format!("{}: {error}", path.display())))
    }

    /// Commands that use the fastest way, or the fastest with the draft.
    fn commands(&mut self, record: &DecodeRecord, with_draft: bool) -> [String; 2] {
        let ways = self.ways();
        let best = proof::best(record, with_draft).and_then(|(index, _)| ways.get(index));
        let arguments = best.map_or_else(String::new, delivery::arguments);
        let has_template = self.tokenizer.chat_template().is_some();
        delivery::commands(&self.arguments.target, &arguments, has_template)
    }

    /// Card, exports, page.
    pub(super) fn deliver(&mut self) -> Result<()> {
        self.ledger.begin("delivery")?;
        let record = self.record()?;
        let commands = self.commands(&record, true);
        let (folder, number) = (self.ledger.folder.clone(), self.ledger.number());
        let run = training::run_folder(&folder, number);
        let (plan, settings) = (self.current_plan(), self.ledger.state.settings.clone());
        let cleaned = self.ledger.round().answers.clone().unwrap_or_default();
        let source = self.ledger.state.split.source.clone();
        delivery::write_card(&folder, &settings, (&source, &cleaned, &plan), &record, &commands)?;
        let name = self.arguments.target_name.as_deref();
        let machine = self.ledger.state.machine.clone().unwrap_or_default();
        let trial = self.ledger.state.trial.clone().unwrap_or_default();
        let survival = record.cells.first().map_or(&[][..], |cell| &cell.survival);
        let chain = plan.best_chain(survival, &machine, &trial);
        delivery::export_all(&folder, &run, (&settings, name), &self.engines, chain)?;
        report::write_page_into(&folder, &run)?;
        self.ledger.round().delivered = true;
        "finished".clone_into(&mut self.ledger.state.phase);
        self.ledger.write()
    }

    /// What was measured, and how to use it.
    pub(super) fn tell_result(mut self) -> Result<()> {
        let record = self.record()?;
        let commands = self.commands(&record, false);
        let folder = self.ledger.folder.clone();
        for cell in &record.cells {
            let pace = if cell.pace == "fixed" { ", every round" } else { "" };
            let way = crate::report::words::way(&cell.drafter);
            outln!("{way}{pace}: {}", delivery::figures(cell));
        }
        let best = proof::best(&record, false).map(|(_, cell)| cell);
        if best.is_none_or(|cell| cell.figures.speed_up_interval.0 < 1.0) {
            outln!(
                "no way is surely faster than plain decoding yet: more --time adds to this draft"
            );
        }
        outln!("use the fastest:\n  {}\n  {}", commands[0], commands[1]);
        let with_draft = self.commands(&record, true);
        if with_draft != commands {
            outln!(
                "lookup alone was faster here; with the draft:\n  {}\n  {}",
                with_draft[0],
                with_draft[1]
            );
        }
        outln!(
            "draft and card: {}; page: {}; took {}",
            folder.join("draft").display(),
            folder.join(report::PAGE).display(),
            clock(self.ledger.state.rounds.iter().map(|round| round.spent).sum())
        );
        if self.json {
            let mut value = eval::to_json(&record);
            value["output"] = json!(folder);
            value["finished"] = json!(true);
            value["draft"] = json!(folder.join("draft"));
            value["report"] = json!(folder.join(report::PAGE));
            value["best"] = json!(best.map(|cell| json!({
                "drafter": cell.drafter, "speed_up": cell.figures.speed_up,
                "interval": cell.figures.speed_up_interval,
            })));
            value["commands"] = json!(commands);
            value["state"] = json!(self.ledger.state);
            outln!("{value}");
        }
        record.cells.iter().try_for_each(|cell| eval::require_lossless(cell, WeightDtype::Stored))
    }
}
