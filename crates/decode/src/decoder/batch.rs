//! Several requests in one pass of the target, each with its own acceptance.
//!
//! Every round all running requests propose, the target runs all trees at once, and each request
//! commits what it accepted. A place whose request ends takes the next one. Outputs are those of
//! each request alone: a row's bits do not depend on the rows beside it, and draws are keyed by
//! request.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use longdraft_kernels::threads::awake;
use longdraft_models::TargetTokenId;
use longdraft_models::target::{Tap, Taps, Target};

use super::request::Request;
use super::sequence::{Sequence, run_target};
use super::{Committed, DecodeOptions, EndReason, Generation};
use crate::drafter::Drafter;
use crate::error::{DecodeError, Result};

/// A request of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Text so far.
    pub prompt: Vec<TargetTokenId>,
    /// What is asked for.
    pub options: DecodeOptions,
}

/// Hears of every token with the index of its job, and may end that job.
pub type BatchListener<'l> = dyn FnMut(usize, Committed) -> ControlFlow<EndReason> + 'l;

/// A target with several places, each with its own drafter or none.
pub struct BatchDecoder<'a> {
    target: &'a Target,
    places: Vec<Sequence<'a>>,
    taps: Taps,
}

/// A job that runs at a place.
struct Running<'r> {
    place: usize,
    job: usize,
    request: Request<'r>,
}

impl<'a> BatchDecoder<'a> {
    /// One place for every drafter.
    pub fn new(target: &'a Target, drafters: Vec<Option<Box<dyn Drafter + 'a>>>) -> Self {
        let mut taps = vec![Tap::FinalHidden];
        taps.extend(drafters.iter().flatten().flat_map(|drafter| drafter.taps()));
        let places = drafters.into_iter().map(Sequence::new).collect();
        Self { target, places, taps: Taps::of(&taps) }
    }

    /// Generates for all jobs, as many at a time as there are places; results in the order of jobs.
    /// A job whose prompt does not fit has an error of its own.
    ///
    /// # Errors
    /// - there is no place, or a model cannot run
    pub fn generate(
        &mut self,
        jobs: &[Job],
        listener: &mut BatchListener<'_>,
    ) -> Result<Vec<Result<Generation>>> {
        if self.places.is_empty() && !jobs.is_empty() {
            return Err(DecodeError::NoPlace);
        }
        let mut results: Vec<Option<Result<Generation>>> = jobs.iter().map(|_| None).collect();
        let mut free: Vec<usize> = (0..self.places.len()).rev().collect();
        let mut waiting: VecDeque<(usize, &Job)> = jobs.iter().enumerate().collect();
        let mut running: Vec<Running<'_>> = Vec::new();
        loop {
            while let Some(&place) = free.last()
                && let Some((index, job)) = waiting.pop_front()
            {
                match self.begin(place, job, &mut |committed| listener(index, committed)) {
                    Ok(request) => {
                        free.pop();
                        running.push(Running { place, job: index, request });
                    }
                    Err(error) if error.is_of_the_prompt() => results[index] = Some(Err(error)),
                    Err(error) => return Err(error),
                }
            }
            for ended in running.extract_if(.., |running| running.request.end().is_some()) {
                free.push(ended.place);
                results[ended.job] = Some(Ok(self.places[ended.place].end(ended.request)));
            }
            if running.is_empty() && waiting.is_empty() {
                break;
            }
            awake(|| self.round(&mut running, listener))?;
        }
        Ok(results.into_iter().flatten().collect())
    }

    fn begin<'r>(
        &mut self,
        place: usize,
        job: &'r Job,
        listener: &mut super::Listener<'_>,
    ) -> Result<Request<'r>> {
        self.places[place].begin(self.target, &job.prompt, &job.options, listener)
    }

    /// One round of every running request.
    fn round(
        &mut self,
        running: &mut [Running<'_>],
        listener: &mut BatchListener<'_>,
    ) -> Result<()> {
        let mut rounds = Vec::with_capacity(running.len());
        for Running { place, request, .. } in running.iter_mut() {
            rounds.push(self.places[*place].propose(self.target, request)?);
        }
        let mut requests: Vec<&mut Request<'_>> =
            running.iter_mut().map(|running| &mut running.request).collect();
        if requests.is_empty() {
            return Ok(());
        }
        run_target(self.target, &mut requests, &mut rounds, &self.taps)?;
        for (Running { place, job, request }, round) in running.iter_mut().zip(rounds) {
            let mut of_job = |committed| listener(*job, committed);
            self.places[*place].settle(request, round, &mut of_job)?;
        }
        Ok(())
    }
}
