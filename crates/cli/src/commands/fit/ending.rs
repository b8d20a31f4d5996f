//! The phases after the training: proof and delivery, and what is said in the end.

use longdraft_records::decode::{DECODE_FILE, DecodeRecord};
use longdraft_records::events::FINISHED;
use longdraft_report::words::{self, clock};
use serde_json::json;

use super::delivery;
use super::proof::{self, Way};
use super::rules::EXPORT;
use super::{Fit, training};
use crate::cli::WeightDtype;
use crate::commands::{eval, report};
use crate::failure::{Failure, Result};

impl Fit<'_> {
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
        // What the training left of its time is for more prompts.
        let seconds = plan.proof.max(self.ledger.left() - EXPORT).max(1.0);
        let hears = (&self.interrupts, &mut self.ledger.events);
        let record = proof::measure(&folder, (&settings, &machine), &ways, seconds, hears)?;
        let Some(record) = record else { return Err(self.stopped()) };
        eval::write(&run, &record)?;
        self.ledger.round().proved = true;
        self.ledger.write()
    }

    fn record(&mut self) -> Result<DecodeRecord> {
        let run = training::run_folder(&self.ledger.folder, self.ledger.number());
        DecodeRecord::read(&run)
            .map_err(|error| Failure::work(format!("{}: {error}", run.join(DECODE_FILE).display())))
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
        let making = delivery::Making {
            settings: &settings,
            source: &source,
            cleaned: &cleaned,
            plan: &plan,
        };
        delivery::write_card(&folder, &making, &record, &commands)?;
        let name = self.arguments.target_name.as_deref();
        let machine = self.ledger.state.machine.clone().unwrap_or_default();
        let trial = self.ledger.state.trial.clone().unwrap_or_default();
        let survival = record.cells.first().map_or(&[][..], |cell| &cell.survival);
        let chain = plan.best_chain(survival, &machine, &trial);
        delivery::export_all(&folder, &run, (&settings, name), &self.engines, chain)?;
        report::write_page(&folder)?;
        self.ledger.round().delivered = true;
        FINISHED.clone_into(&mut self.ledger.state.phase);
        self.ledger.write()
    }

    /// What was measured, and how to use it.
    pub(super) fn tell_result(mut self) -> Result<()> {
        let record = self.record()?;
        let commands = self.commands(&record, false);
        let folder = self.ledger.folder.clone();
        for cell in &record.cells {
            let pace = if cell.pace == "fixed" { ", every round" } else { "" };
            let way = words::way(&cell.drafter);
            outln!("{way}{pace}: {}", delivery::figures(&cell.figures));
            for figures in delivery::kinds(cell) {
                outln!("  {}: {}", figures.name, delivery::figures(figures));
            }
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
