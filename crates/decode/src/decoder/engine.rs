//! Several requests in one pass of the target, each with its own acceptance; they join and leave
//! between any two rounds.
//!
//! Every round the requests that decode propose together, in passes over their draft that they share. The
//! target runs all trees at once, and each request commits what it accepted. Prompts are read in pieces
//! beside that: in large ones while nobody decodes, in small ones else, so that nobody waits long. Several
//! prompts are read at once, each in an equal part. Outputs are those of each request alone: a row's bits
//! do not depend on the rows beside it, and draws are keyed by request.

mod sharing;

use std::ops::ControlFlow;

use longdraft_kernels::threads::awake;
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Tap, Taps, Target};

use super::proposing::{Part, propose};
use super::request::Request;
use super::round::{Round, run_target};
use super::sequence::Sequence;
use super::{Committed, DecodeOptions, EndReason, Generation};
use crate::drafter::Drafter;
use crate::error::{DecodeError, Result};
use crate::grammar::Grammar;
use crate::log_probs::LogProbs;
use crate::pace::Paces;

/// Tokens of prompts that a round reads.
pub const READ_ALONE: usize = 512;
/// The same where others decode.
const READ_BESIDE: usize = 64;

/// Hears of every token with the key of its request, and may end that request.
pub type EngineListener<'l> =
    dyn FnMut(usize, Committed, Option<&LogProbs>) -> ControlFlow<EndReason> + 'l;

/// A request that ended, by its key. An error is of this request alone.
pub type Ended = (usize, Result<Generation>);

/// A target with several places, each with its own drafter or none.
pub struct BatchEngine<'a> {
    target: &'a Target,
    places: Vec<Place<'a>>,
    taps: Taps,
    paces: Paces,
    /// Requests that joined so far.
    joined: u64,
}

/// Where one request at a time decodes.
struct Place<'a> {
    sequence: Sequence<'a>,
    running: Option<Running>,
    /// What drafts from the next request on, where that changed while one ran.
    next: Option<Replacement<'a>>,
    /// Number of the last request that joined here.
    last: u64,
}

/// Another drafter for a place, or none at all.
struct Replacement<'a>(Option<Box<dyn Drafter + 'a>>);

/// A request at a place.
struct Running {
    key: usize,
    request: Request,
    error: Option<DecodeError>,
}

/// What the target has to hand out for all places.
fn taps_of(places: &[Place<'_>]) -> Taps {
    let mut taps = vec![Tap::FinalHidden];
    taps.extend(places.iter().flat_map(|place| place.sequence.taps()));
    Taps::of(&taps)
}

impl<'a> BatchEngine<'a> {
    /// One place for every drafter.
    pub fn new(target: &'a Target, drafters: Vec<Option<Box<dyn Drafter + 'a>>>) -> Self {
        let place = |drafter| Place {
            sequence: Sequence::new(drafter),
            running: None,
            next: None,
            last: 0,
        };
        let places: Vec<Place<'_>> = drafters.into_iter().map(place).collect();
        let taps = taps_of(&places);
        Self { target, places, taps, paces: Paces::default(), joined: 0 }
    }

    /// Has other drafters propose, one for every place, from each place's next request on: a request
    /// that runs ends with the drafter that it began with.
    ///
    /// # Errors
    /// - there are more places or fewer
    pub fn replace_drafters(&mut self, drafters: Vec<Option<Box<dyn Drafter + 'a>>>) -> Result<()> {
        if drafters.len() != self.places.len() {
            return Err(DecodeError::NoPlace);
        }
        for (place, drafter) in self.places.iter_mut().zip(drafters) {
            place.next = Some(Replacement(drafter));
        }
        // What was measured is of the drafters before.
        self.paces = Paces::default();
        self.change_drafters();
        Ok(())
    }

    /// Changes drafters where nobody needs those that were.
    fn change_drafters(&mut self) {
        let mut changed = false;
        for place in self.places.iter_mut().filter(|place| place.running.is_none()) {
            if let Some(Replacement(drafter)) = place.next.take() {
                place.sequence = Sequence::new(drafter);
                changed = true;
            }
        }
        if changed {
            self.taps = taps_of(&self.places);
        }
    }

    /// Places, taken or not.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// Requests that run.
    pub fn running(&self) -> usize {
        self.places.iter().filter(|place| place.running.is_some()).count()
    }

    /// Whether another request may join.
    pub fn has_room(&self) -> bool {
        self.running() < self.places.len()
    }

    /// Takes a request in; `key` names it from here on. Where prefixes are reused it goes to the free
    /// place whose last text it goes on with, if there is one, and what another place holds of its
    /// prompt is copied.
    ///
    /// # Errors
    /// - no place is free, the prompt is empty or fills the context, options make no sense
    pub fn join(
        &mut self,
        key: usize,
        prompt: &[TargetTokenId],
        options: &DecodeOptions,
    ) -> Result<()> {
        self.join_with(key, prompt, options, None)
    }

    /// The same of an answer that follows a grammar, which stands at its start.
    ///
    /// # Errors
    /// - as [`Self::join`]
    pub fn join_with(
        &mut self,
        key: usize,
        prompt: &[TargetTokenId],
        options: &DecodeOptions,
        grammar: Option<Box<dyn Grammar>>,
    ) -> Result<()> {
        let to = self.place_for(prompt, options.reuse_prefix).ok_or(DecodeError::NoPlace)?;
        let sequence = &mut self.places[to].sequence;
        let mut request = sequence.begin(self.target, prompt, (options, grammar))?;
        self.share(to, &mut request)?;
        self.paces.begin();
        self.joined += 1;
        let place = &mut self.places[to];
        place.last = self.joined;
        place.running = Some(Running { key, request, error: None });
        Ok(())
    }

    /// Ends a request early and tells what it came to; `None` if none has this key.
    pub fn leave(&mut self, key: usize) -> Option<Generation> {
        let is_it = |running: &mut Running| running.key == key;
        let mut places = self.places.iter_mut();
        let generation = places.find_map(|place| {
            let running = place.running.take_if(is_it)?;
            Some(place.sequence.end(running.request))
        });
        self.change_drafters();
        generation
    }

    /// One round of every request; those that ended in it.
    ///
    /// # Errors
    /// - a model cannot run; all requests are lost
    pub fn round(&mut self, listener: &mut EngineListener<'_>) -> Result<Vec<Ended>> {
        if let Err(error) = awake(|| self.run(listener)) {
            self.clear();
            return Err(error);
        }
        let mut ended = Vec::new();
        for Place { sequence, running, .. } in &mut self.places {
            let has_ended = |r: &mut Running| r.error.is_some() || r.request.end().is_some();
            match running.take_if(has_ended) {
                None => {}
                Some(Running { key, error: Some(error), .. }) => {
                    // What the draft knows may not fit to the cache any more.
                    sequence.forget();
                    ended.push((key, Err(error)));
                }
                Some(Running { key, request, .. }) => ended.push((key, Ok(sequence.end(request)))),
            }
        }
        self.change_drafters();
        Ok(ended)
    }

    /// Drops all requests and what is kept of earlier ones.
    pub fn clear(&mut self) {
        for place in &mut self.places {
            place.running = None;
            place.sequence.forget();
        }
        self.change_drafters();
    }

    fn run(&mut self, listener: &mut EngineListener<'_>) -> Result<()> {
        let running = self.places.iter().filter_map(|place| place.running.as_ref());
        let together = running.filter(|running| running.request.unread() == 0).count();
        let reads = self.reads(if together > 0 { READ_BESIDE } else { READ_ALONE });
        let mut parts: Vec<Part<'_, '_>> = Vec::with_capacity(self.places.len());
        for (Place { sequence, running, .. }, reads) in self.places.iter_mut().zip(reads) {
            let Some(Running { key, request, error }) = running else { continue };
            let (round, wish) = match request.unread() {
                0 => match sequence.begin_round(request, self.paces.of(together)) {
                    Ok(wish) => (Round::of_tree(request.plain()), Some(wish)),
                    // Its grammar is its own: the others go on.
                    Err(broken @ DecodeError::Grammar(_)) => {
                        *error = Some(broken);
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                _ if reads == 0 => continue,
                _ => (Round::of_prompt(reads), None),
            };
            parts.push(Part { key: *key, sequence, request, error, round, wish });
        }
        propose(self.target, &mut parts, self.paces.of(together))?;
        for Part { request, error, round, .. } in &mut parts {
            if error.is_none() {
                // There is no memory for its rows: the others go on.
                **error = round.reserve(request).err();
            }
        }
        parts.retain(|part| part.error.is_none());
        if parts.is_empty() {
            return Ok(());
        }
        let mut rows: Vec<(&mut Request, &mut Round)> =
            parts.iter_mut().map(|part| (&mut *part.request, &mut part.round)).collect();
        let pass = run_target(self.target, &mut rows, &self.taps)?;
        if let Some(pass) = &pass {
            self.paces.of(together).add_pass(pass);
        }
        for Part { key, sequence, request, error, round, .. } in parts {
            let mut of_request =
                |committed, log_probs: Option<&LogProbs>| listener(key, committed, log_probs);
            let learns = pass.as_ref().map(|pass| (self.paces.of(together), pass));
            *error = sequence.settle(request, (round, learns), &mut of_request).err();
        }
        Ok(())
    }
}
