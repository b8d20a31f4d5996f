//! A list of requests, as many at a time as there are places: a place whose request ends takes the
//! next one.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use longdraft_models::TargetTokenId;
use longdraft_models::target_model::Target;

use super::engine::BatchEngine;
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
    engine: BatchEngine<'a>,
}

impl<'a> BatchDecoder<'a> {
    /// One place for every drafter.
    pub fn new(target: &'a Target, drafters: Vec<Option<Box<dyn Drafter + 'a>>>) -> Self {
        Self { engine: BatchEngine::new(target, drafters) }
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
        if self.engine.places() == 0 && !jobs.is_empty() {
            return Err(DecodeError::NoPlace);
        }
        let mut results: Vec<Option<Result<Generation>>> = jobs.iter().map(|_| None).collect();
        let mut waiting: VecDeque<(usize, &Job)> = jobs.iter().enumerate().collect();
        let done = self.rounds(&mut waiting, &mut results, listener);
        if done.is_err() {
            self.engine.clear();
        }
        done?;
        Ok(results.into_iter().flatten().collect())
    }

    fn rounds(
        &mut self,
        waiting: &mut VecDeque<(usize, &Job)>,
        results: &mut [Option<Result<Generation>>],
        listener: &mut BatchListener<'_>,
    ) -> Result<()> {
        loop {
            while self.engine.has_room()
                && let Some((index, job)) = waiting.pop_front()
            {
                match self.engine.join(index, &job.prompt, &job.options) {
                    Ok(()) => {}
                    Err(error) if error.is_of_the_prompt() => results[index] = Some(Err(error)),
                    Err(error) => return Err(error),
                }
            }
            if self.engine.running() == 0 {
                return Ok(());
            }
            let heard = &mut |job, committed, _: Option<&_>| listener(job, committed);
            for (index, generation) in self.engine.round(heard)? {
                results[index] = Some(Ok(generation?));
            }
        }
    }
}
