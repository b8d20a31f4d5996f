//! The phase that trains: how it begins, and what it does where the training diverges.

use std::path::{Path, PathBuf};

use longdraft_records::events::FitPhase;
use longdraft_train::method::Room;
use longdraft_train::stage::ResumePolicy;
use serde_json::Value;

use super::divergence::{self, Diverged};
use super::rules::Candidate;
use super::search::{self, Choice};
use super::training::{Staging, Text};
use super::{Fit, following, stages, telling, training};
use crate::failure::{Failure, Result};

/// Seconds that training has at any rate.
pub(super) const LEAST_TRAINING: f64 = 2.0;
/// What the learning rate is multiplied with where a training diverged, and how often.
const LOWER: f64 = 1.0 / 3.0;
const MOST_LOWERED: usize = 2;
/// Steps below which another training is not worth its features.
const FEW_STEPS: u64 = 20;

impl Fit<'_> {
    /// Trains the round's draft.
    pub(super) fn train(&mut self, candidate: &Candidate) -> Result<()> {
        if self.ledger.round().trained {
            return Ok(());
        }
        self.ledger.begin(FitPhase::Training)?;
        if self.ledger.round().training.is_none() {
            let choice = self.beginning(candidate)?;
            let config = self.configured(candidate, &choice, &[])?;
            self.ledger.round().training = Some(config);
            self.ledger.write()?;
        }
        self.take_where_it_lies()?;
        loop {
            let config = self.ledger.round().training.clone().unwrap_or_default();
            telling::training(&config, self.left_for_training());
            // A rate that was lowered is another one than its checkpoints say.
            let is_lowered = self.ledger.round().lowered > 0;
            let policy = if is_lowered { ResumePolicy::Force } else { ResumePolicy::Strict };
            let ran = following::run(&config, policy, &self.interrupts, &self.ledger.events);
            let diverged = ran.map_err(|failure| self.or_stopped(failure))?;
            let Some((stage, diverged)) = diverged else { break };
            if !self.fall_back(candidate, stage, &diverged)? {
                break;
            }
        }
        self.ledger.round().trained = true;
        self.ledger.write()
    }

    /// Folder and target may lie elsewhere than when the training was fixed. What it began with stays, whatever `--from` says
    /// now.
    fn take_where_it_lies(&mut self) -> Result<()> {
        let place = training::run_folder(&self.ledger.folder, self.ledger.number());
        let target = self.ledger.state.settings.target.clone();
        let fixed = self.ledger.round().training.clone().unwrap_or_default();
        let config = training::moved(fixed.clone(), &place, &target);
        let begins_with = config["draft"]["from"].as_str().map(Path::new);
        if self.arguments.from.as_deref().is_some_and(|from| begins_with != Some(from)) {
            let of = begins_with
                .map_or("without a draft".to_owned(), |path| format!("with {}", path.display()));
            errln!("note: --from is not followed: this training began {of}");
        }
        if config != fixed {
            self.ledger.round().training = Some(config);
            self.ledger.write()?;
        }
        Ok(())
    }

    /// Seconds that the training has until the proof.
    fn left_for_training(&mut self) -> f64 {
        (self.ledger.left() - self.current_plan().proof).max(LEAST_TRAINING)
    }

    /// The draft that the round's training goes on from: that of an earlier round, or the one that was given.
    fn predecessor(&self) -> Option<PathBuf> {
        let fixed = self.ledger.state.rounds.last().and_then(|round| round.training.as_ref());
        if let Some(config) = fixed {
            return config["draft"]["from"].as_str().map(PathBuf::from);
        }
        let (folder, number) = (&self.ledger.folder, self.ledger.number());
        let before = number.checked_sub(1).filter(|before| *before > 0);
        let before =
            before.map(|before| training::run_folder(folder, self.ledger.state.kept(before)));
        before.or_else(|| self.arguments.from.clone())
    }

    /// The configuration of a training within the time that is left; `done` are its stages that are over.
    fn configured(
        &mut self,
        candidate: &Candidate,
        choice: &Choice,
        done: &[Value],
    ) -> Result<Value> {
        let (plan, seconds) = (self.current_plan(), self.left_for_training());
        // The search ran many steps, where the plan knew a few.
        let slowness = self.ledger.round().slowness.unwrap_or(1.0);
        let cleaned = self.ledger.round().answers.clone().unwrap_or_default();
        let state = &self.ledger.state;
        let prompt = state.machine.as_ref().map_or(0.0, |machine| machine.lengths.prompt);
        let text = Text {
            tokens: cleaned.tokens as f64 + cleaned.kept as f64 * prompt,
            is_chat: self.tokenizer.chat_template().is_some(),
        };
        let trial = self.ledger.trial().slower(slowness);
        let place = (self.ledger.folder.as_path(), self.ledger.number());
        let chosen = (candidate, &trial, &plan, choice);
        let (before, row_tokens) = (self.predecessor(), plan.row_tokens);
        let room = Room { target: &self.config, seconds, row_tokens };
        let keys = stages::keys_of_rows(candidate.method, &room, &plan.stages);
        let staging = Staging { keys, done: done.to_vec() };
        let (within, from) = ((&text, seconds), before.as_deref());
        training::configured(place, &state.settings, chosen, within, from, staging)
    }

    /// How the training begins: what was known, or what a search finds best.
    fn beginning(&mut self, candidate: &Candidate) -> Result<Choice> {
        let mut known = self.known_choice(candidate);
        let mut starts = &candidate.recipe.starts[..];
        if self.predecessor().is_some() {
            // It has begun.
            (known.init, starts) = (None, &[]);
        }
        let config = training::first_stage(&self.configured(candidate, &known, &[])?);
        let (trial, plan) = (self.ledger.trial(), self.current_plan());
        let work = self.ledger.folder.join("work");
        // A killed search goes on.
        let found = self.ledger.round().tried.clone();
        let (ledger, interrupts) = (&mut self.ledger, &self.interrupts);
        let mut tell = |found: &[search::Tried], slowness: f64| {
            telling::tried(found);
            ledger.round().tried = found.to_vec();
            ledger.round().slowness = Some(slowness);
            ledger.write()
        };
        let (about, places) = ((&config, known, starts), (work.as_path(), interrupts));
        let found = search::search(about, (&plan, &trial), places, found, &mut tell);
        let choice = found.map_err(|failure| self.or_stopped(failure))?;
        self.ledger.round().chosen = Some(choice.clone());
        Ok(choice)
    }

    /// What an earlier round found, or the recipe's choice.
    fn known_choice(&self, candidate: &Candidate) -> Choice {
        let found = self.ledger.state.rounds.iter().rev().find_map(|round| round.chosen.clone());
        found.unwrap_or_else(|| Choice::of(&candidate.recipe))
    }

    /// What is done about a training that diverged in a stage: that goes on at a lower rate from where it was good, or what
    /// is good is taken. Whether there is more to train.
    fn fall_back(
        &mut self,
        candidate: &Candidate,
        stage: usize,
        diverged: &Diverged,
    ) -> Result<bool> {
        let before = self.ledger.round().training.clone().unwrap_or_default();
        let run = training::run_of(&before, stage);
        let good = divergence::good(&run, diverged);
        let known = self.known_choice(candidate);
        let lower = Choice { rate: LOWER * known.rate, ..known };
        let mut config = self.configured(candidate, &lower, &training::stages(&before)[..stage])?;
        let own = &training::stages(&config)[stage];
        let has_time = own["train"]["steps"].as_u64().is_some_and(|steps| steps >= FEW_STEPS);
        let rate = own["schedule"]["learning_rate"].as_f64();
        // That of the stage before is one.
        let has_draft = good.is_some() || stage > 0 || divergence::has_checkpoint(&run);
        let lowered = self.ledger.round().lowered + 1;
        let goes_on = lowered <= MOST_LOWERED && (has_time || !has_draft);
        if !goes_on && !has_draft {
            return Err(Failure::work(format!("the training diverged: {diverged}"))
                .hint("it did so at lower learning rates, too: try another --method"));
        }
        let name = before["stages"][stage]["name"].as_str();
        let next = (good.as_ref(), rate.filter(|_| goes_on));
        telling::diverged(name, diverged, next, stage > 0);
        if goes_on || good.is_some() {
            divergence::restore(&run, good.is_some())?;
        }
        if goes_on {
            if let Some(state) = &good {
                divergence::go_on(training::stage_mut(&mut config, stage), state);
            }
            let round = self.ledger.round();
            (round.lowered, round.chosen, round.training) = (lowered, Some(lower), Some(config));
            self.ledger.write()?;
        } else {
            // What diverged is not the training's draft where there is a better one.
            let mut ended = before;
            training::end_after(&mut ended, stage + usize::from(good.is_some()))?;
            self.ledger.round().training = Some(ended);
        }
        Ok(goes_on)
    }
}
