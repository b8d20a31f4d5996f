//! The method that a fit trains, and how long its rows are.

use longdraft_train::method::Room;

use super::beginning::start;
use super::rules::{self, Candidate};
use super::stages::{self, Stage};
use super::{Fit, parting};
use crate::failure::{Failure, Result};

impl Fit<'_> {
    /// The method that an earlier round took, that of a draft to go on from, or the wanted one.
    fn wanted_method(&self) -> Result<Option<String>> {
        let has_begun = self.ledger.state.rounds.iter().any(|round| round.training.is_some());
        let trial = self.ledger.state.trial.as_ref().filter(|_| has_begun);
        let round = self.ledger.state.rounds.last().filter(|round| round.has_begun());
        let planned = round.and_then(|round| round.plan.as_ref()).map(|plan| plan.method.clone());
        let earlier = planned.or(trial.map(|trial| trial.method.clone()));
        let from = self.arguments.from.as_deref().map(start).transpose()?;
        let from = from.map(|start| start.method);
        if let (Some(from), Some(wanted)) = (&from, &self.arguments.method)
            && from != wanted
        {
            return Err(Failure::usage(format!(
                "--from is a draft of method {from}, not {wanted}"
            ))
            .hint("leave out --method"));
        }
        if let (Some(earlier), Some(wanted)) = (&earlier, &self.arguments.method)
            && earlier != wanted
        {
            errln!("note: --method {wanted} is not followed: the fit here trains {earlier}");
        }
        Ok(earlier.or(from).or_else(|| self.arguments.method.clone()))
    }

    /// The method that is taken: of those that fit the one that is expected to bring most.
    pub(super) fn candidate(&mut self) -> Result<Candidate> {
        let wanted = self.wanted_method()?;
        // A recipe depends on the time: what is planned keeps its own.
        let left = self.ledger.left();
        let round = self.ledger.round();
        let seconds = match round.set_up_for.filter(|_| round.plan.is_some()) {
            Some(seconds) => seconds,
            None if round.has_begun() => round.budget,
            None => *round.set_up_for.insert(left),
        };
        let row_tokens = self.row_tokens(seconds);
        let room = Room { target: &self.config, seconds, row_tokens };
        let found = rules::candidates(&room, &self.engines, wanted.as_deref());
        if found.is_empty() {
            let engines: Vec<&str> = self.engines.iter().map(|profile| profile.name()).collect();
            let what = wanted
                .map_or("no method fits".to_owned(), |name| format!("method {name} does not fit"));
            return Err(Failure::usage(format!(
                "{what} this target ({} layers) and what --for asks for ({})",
                self.config.num_hidden_layers,
                engines.join(", ")
            ))
            .hint("leave out an engine or --method; `longdraft serve` runs every draft"));
        }
        let machine = self.ledger.machine();
        let best = rules::best(found, &machine, &Room { seconds: seconds / 2.0, ..room });
        best.ok_or_else(|| Failure::work("no method fits"))
    }

    /// Tokens of the rows of a training within a time.
    pub(super) fn row_tokens(&self, seconds: f64) -> usize {
        let of_answer = parting::of_answer(self.ledger.state.settings.max_tokens);
        let machine = self.ledger.state.machine.as_ref();
        let long_row = machine.map_or(of_answer as usize, |machine| machine.long_row(of_answer));
        parting::row_tokens(seconds, self.config.max_position_embeddings, long_row)
    }

    /// The stages of a training within a time; none where its rows are short.
    pub(super) fn stages(&self, seconds: f64) -> Vec<Stage> {
        let is_chat = self.tokenizer.chat_template().is_some();
        stages::of(self.row_tokens(seconds), parting::short_row(seconds), is_chat)
    }

    /// The same method set up for rows of another length.
    pub(super) fn for_rows(
        &mut self,
        candidate: &Candidate,
        row_tokens: usize,
    ) -> Option<Candidate> {
        let seconds = self.ledger.left();
        let method = candidate.method;
        let recipe = method.fresh().recipe(&Room { target: &self.config, seconds, row_tokens })?;
        Some(Candidate { method, recipe })
    }
}
