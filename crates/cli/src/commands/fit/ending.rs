//! The phases after the training: proof and delivery, and what is said in the end.

use std::path::{Path, PathBuf};

use longdraft_decode::Pacing;
use longdraft_records::decode::{Cell, DECODE_FILE, DecodeRecord};
use longdraft_records::events::FitPhase;
use longdraft_report::REPORT_FILE;
use longdraft_report::words::{self, clock};
use longdraft_train::checkpoint::Wanted;
use serde_json::json;

use super::parting::EXPORT;
use super::proof::{self, Time, Way};
use super::state::Exported;
use super::{Fit, comparing, delivery, telling, training};
use crate::cli::WeightDtype;
use crate::commands::{eval, report};
use crate::draft_source::find_checkpoint;
use crate::failure::{Failure, Result};

impl Fit<'_> {
    fn ways_of(&mut self, draft: &Path) -> Vec<Way> {
        let (plan, settings) = (self.current_plan(), self.ledger.state.settings.clone());
        proof::ways(draft, &plan, &settings)
    }

    /// Run directory of the draft that is the round's result.
    fn kept_run(&self) -> PathBuf {
        training::run_folder(&self.ledger.folder, self.ledger.kept())
    }

    /// Compares the round's draft with the one that it went on from, once, and keeps the better one.
    fn keep_the_better(&mut self) -> Result<()> {
        let number = self.ledger.number();
        if number == 1 || self.ledger.round().kept.is_some() {
            return Ok(());
        }
        let earlier = self.ledger.state.kept(number - 1);
        let [newer, older] = [number, earlier].map(|round| {
            let run = training::run_folder(&self.ledger.folder, round);
            find_checkpoint(&run, Wanted::Newest).map(|found| found.checkpoint)
        });
        let [newer, older] = [self.ways_of(&newer?), self.ways_of(&older?)];
        let (Some(newer), Some(older)) = (newer.first(), older.first()) else { return Ok(()) };
        let seconds = comparing::SHARE * self.current_plan().proof;
        let (folder, settings) = (self.ledger.folder.clone(), self.ledger.state.settings.clone());
        let ways = [newer, older];
        let found = comparing::measure(&folder, &settings, ways, seconds, &self.interrupts);
        let found = found.map_err(|failure| self.or_stopped(failure))?;
        let kept = if found.keeps_newer() { number } else { earlier };
        telling::compared(&found, [number, earlier], kept);
        self.ledger.round().kept = Some(kept);
        self.ledger.write()
    }

    /// Decodes what was set aside with the draft and without it.
    pub(super) fn prove(&mut self) -> Result<()> {
        if self.ledger.round().proved {
            return Ok(());
        }
        self.ledger.begin(FitPhase::Proof)?;
        self.keep_the_better()?;
        let (folder, run) = (self.ledger.folder.clone(), self.kept_run());
        delivery::extract_draft(&folder, &run)?;
        let (ways, plan) = (self.ways_of(&folder.join("draft")), self.current_plan());
        let settings = self.ledger.state.settings.clone();
        let machine = self.ledger.machine();
        // Two drafts were compared in a share of it.
        let share = if self.ledger.number() > 1 { 1.0 - comparing::SHARE } else { 1.0 };
        // What the training left of its time is for more prompts.
        let time = Time { planned: share * plan.proof, left: self.ledger.left() - EXPORT };
        let draft = format!("{} of {}", self.ledger.kept(), self.ledger.number());
        let hears = (&self.interrupts, &mut self.ledger.events);
        let about = (&settings, &machine);
        let proved = proof::measure((&folder, &draft), about, &ways, time, hears)?;
        let Some((record, unfinished)) = proved else { return Err(self.stopped()) };
        eval::write(&run, &record)?;
        self.ledger.round().proved = true;
        self.ledger.write()?;
        unfinished.remove();
        Ok(())
    }

    fn record(&self) -> Result<DecodeRecord> {
        let run = self.kept_run();
        DecodeRecord::read(&run).map_err(Failure::at(&run.join(DECODE_FILE)))
    }

    /// Commands for the way to use, or for that with the draft.
    fn commands(&mut self, record: &DecodeRecord, with_draft: bool) -> [String; 2] {
        let draft = self.ledger.folder.join("draft");
        let ways = self.ways_of(&draft);
        let best = proof::best(record, with_draft).and_then(|(index, _)| ways.get(index));
        let arguments = best.map_or_else(String::new, delivery::arguments);
        self.commands_with(&arguments)
    }

    /// Commands that decode with some arguments.
    pub(super) fn commands_with(&self, arguments: &str) -> [String; 2] {
        let has_template = self.tokenizer.chat_template().is_some();
        let settings = &self.ledger.state.settings;
        let template = delivery::template(&settings.chat_template_kwargs);
        let arguments = format!("{arguments}{template}");
        delivery::commands(&self.arguments.target, &arguments, settings.temperature, has_template)
    }

    /// Card, exports, page.
    pub(super) fn deliver(&mut self) -> Result<()> {
        self.ledger.begin(FitPhase::Delivery)?;
        let record = self.record()?;
        let commands = self.commands(&record, true);
        let (folder, run) = (self.ledger.folder.clone(), self.kept_run());
        let (plan, settings) = (self.current_plan(), self.ledger.state.settings.clone());
        // What the draft that was kept learned from.
        let round = self.ledger.state.rounds.get(self.ledger.kept() - 1);
        let cleaned = round.and_then(|round| round.answers.clone()).unwrap_or_default();
        let source = self.ledger.state.split.source.clone();
        let making = delivery::Making {
            settings: &settings,
            source: &source,
            cleaned: &cleaned,
            plan: &plan,
        };
        delivery::write_card(&folder, &making, &record, &commands)?;
        let (machine, trial) = (self.ledger.machine(), self.ledger.trial());
        let survival = record.cells.first().map_or(&[][..], |cell| &cell.survival);
        let chain = plan.best_chain(survival, &machine, &trial);
        for engine in self.without_export() {
            let earlier = self.ledger.state.exported.get(engine.name());
            let earlier = earlier.and_then(|export| export.target_name.clone());
            let target_name = self.arguments.target_name.clone().or(earlier);
            let named = (&settings, target_name.as_deref());
            delivery::export_for((&folder, engine), &run, named, chain)?;
            let export = Exported { round: self.ledger.kept(), target_name };
            self.ledger.state.exported.insert(engine.name().to_owned(), export);
            self.ledger.write()?;
        }
        report::write_page(&folder)?;
        self.ledger.finish()
    }

    /// What was measured, and how to use it.
    pub(super) fn tell_result(&mut self) -> Result<()> {
        let record = self.record()?;
        let commands = self.commands(&record, false);
        let folder = self.ledger.folder.clone();
        for cell in &record.cells {
            let pace = if cell.pace == Pacing::Fixed { ", every round" } else { "" };
            let way = words::way(&cell.drafter_parts);
            outln!("{way}{pace}: {}", delivery::figures(&cell.figures));
            for figures in delivery::kinds(cell) {
                outln!("  {}: {}", figures.name, delivery::figures(figures));
            }
        }
        let best = proof::best(&record, false).map(|(_, cell)| cell);
        self.tell_commands(&record, &commands);
        outln!(
            "draft and card: {}; page: {}; took {}",
            folder.join("draft").display(),
            folder.join(REPORT_FILE).display(),
            clock(self.ledger.state.rounds.iter().map(|round| round.spent).sum())
        );
        if self.json {
            let mut value = eval::to_json(&record);
            value["output"] = json!(folder.to_string_lossy());
            value["finished"] = json!(true);
            value["draft"] = json!(folder.join("draft").to_string_lossy());
            value["report"] = json!(folder.join(REPORT_FILE).to_string_lossy());
            value["best"] = json!(best.map(|cell| json!({
                "drafter": cell.drafter, "speed_up": cell.figures.speed_up,
                "interval": cell.figures.speed_up_interval, "pace": cell.pace.to_string(),
            })));
            value["commands"] = json!(commands);
            value["state"] = json!(self.ledger.state);
            outln!("{value}");
        }
        record.cells.iter().try_for_each(|cell| eval::require_lossless(cell, WeightDtype::Stored))
    }

    /// How to use what was proven.
    fn tell_commands(&mut self, record: &DecodeRecord, commands: &[String; 2]) {
        let as_served = || record.cells.iter().filter(|cell| proof::is_as_served(record, cell));
        if as_served().all(|cell| cell.figures.speed_up_interval.0 < 1.0) {
            outln!(
                "nothing is surely faster than plain decoding yet: more --time adds to this draft"
            );
        }
        let times =
            |cell: Option<(usize, &Cell)>| cell.map_or(0.0, |(_, cell)| cell.figures.speed_up);
        let best = proof::best(record, false);
        let most = as_served().map(|cell| cell.figures.speed_up).fold(0.0, f64::max);
        let is_fastest = times(best) >= most;
        let why = if is_fastest {
            " the fastest"
        } else {
            ", for drafting in every round is not surely faster"
        };
        outln!("use{why}:\n  {}\n  {}", commands[0], commands[1]);
        let with_draft = self.commands(record, true);
        if with_draft != *commands {
            let with = proof::best(record, true);
            let was =
                if times(with) < times(best) { "was faster here" } else { "is the safer choice" };
            outln!("lookup alone {was}; with the draft:\n  {}\n  {}", with_draft[0], with_draft[1]);
        }
    }
}
