//! The decoder's side: tasks into places, tokens into text.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use longdraft_decode::drafter::Proposer;
use longdraft_decode::stop::AnswerText;
use longdraft_decode::{BatchEngine, Committed, EndReason, Generation, Grammar, LogProbs, Origin};
use longdraft_models::tokenizer::TextTokenizer;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::drafts::{MakeDrafter, Swap, Work};
use crate::error::ApiError;
use crate::events::{Ending, Event, Piece, Task};
use crate::lessons::Lessons;
use crate::meters::Meters;

/// An answer that is written.
struct Answer<'t> {
    task: Task,
    text: AnswerText<'t>,
    /// Tokens so far, and which of them nobody had proposed.
    tokens: usize,
    own: Vec<usize>,
    /// Whether it is what the target says of itself: nothing forced its tokens or forbade some, and its ends are the
    /// target's.
    is_free: bool,
    problem: Option<ApiError>,
}

/// Works until nobody can send tasks any more. With `cut`, whatever runs or waits ends as it is.
pub(crate) fn work<'a>(
    (engine, make): (BatchEngine<'a>, &MakeDrafter<'a>),
    tokenizer: &TextTokenizer,
    mut inbox: UnboundedReceiver<Work>,
    cut: &AtomicBool,
    (meters, lessons, hides_lookup): (&Meters, Option<&Lessons>, bool),
) {
    let (waiting, answers) = (VecDeque::new(), BTreeMap::new());
    let mut worker = Worker {
        engine,
        make,
        tokenizer,
        waiting,
        answers,
        joined: 0,
        meters,
        lessons,
        hides_lookup,
    };
    loop {
        if worker.is_idle() {
            worker.tell_load();
            match inbox.blocking_recv() {
                Some(work) => worker.take(work),
                None => return,
            }
        }
        while let Ok(work) = inbox.try_recv() {
            worker.take(work);
        }
        worker.drop_cancelled();
        if cut.load(Ordering::Relaxed) {
            worker.cut_short();
        }
        worker.join();
        worker.round();
    }
}

struct Worker<'a, 'm> {
    engine: BatchEngine<'a>,
    make: &'m MakeDrafter<'a>,
    tokenizer: &'m TextTokenizer,
    waiting: VecDeque<Task>,
    /// By their keys in the engine.
    answers: BTreeMap<usize, Answer<'m>>,
    /// Answers that began so far.
    joined: usize,
    meters: &'m Meters,
    /// Who learns of the answers.
    lessons: Option<&'m Lessons>,
    /// What lookup proposes is told as a draft's.
    hides_lookup: bool,
}

impl Worker<'_, '_> {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.answers.is_empty()
    }

    fn tell_load(&self) {
        let (running, waiting) = (self.answers.len(), self.waiting.len());
        self.meters.load(running, waiting);
        if let Some(lessons) = self.lessons {
            lessons.board.load(running + waiting);
        }
    }

    fn take(&mut self, work: Work) {
        match work {
            Work::Answer(task) => self.waiting.push_back(*task),
            // Who asked may be gone; the draft is taken all the same.
            Work::Swap(Swap { proposer, done }) => drop(done.send(self.swap(&proposer))),
        }
    }

    /// Has another draft propose, if every place can have it.
    fn swap(&mut self, proposer: &Proposer) -> Result<(), String> {
        let drafters = (0..self.engine.places()).map(|_| (self.make)(proposer));
        let drafters = drafters.collect::<Result<Vec<_>, String>>()?;
        self.engine.replace_drafters(drafters).map_err(|error| error.to_string())
    }

    /// Frees what nobody waits for any more.
    fn drop_cancelled(&mut self) {
        let before = self.waiting.len();
        self.waiting.retain(|task| !task.events.is_closed());
        (self.waiting.len()..before).for_each(|_| self.meters.cancelled());
        let is_gone =
            |(key, answer): (&usize, &Answer<'_>)| answer.task.events.is_closed().then_some(*key);
        let gone: Vec<usize> = self.answers.iter().filter_map(is_gone).collect();
        for key in gone {
            self.leave(key);
        }
    }

    fn leave(&mut self, key: usize) {
        if let Some(generation) = self.engine.leave(key) {
            self.end(key, &generation);
        }
    }

    /// Hands back what there is of every answer; those that have not begun are refused.
    fn cut_short(&mut self) {
        let keys: Vec<usize> = self.answers.keys().copied().collect();
        for key in keys {
            self.leave(key);
        }
        for task in self.waiting.drain(..) {
            send(&task, Event::Failed(ApiError::ending()));
        }
    }

    fn join(&mut self) {
        while self.engine.has_room()
            && let Some(mut task) = self.waiting.pop_front()
        {
            let before = task.goes_on.then_some(&task.prompt[..]);
            let text = match AnswerText::new(self.tokenizer, before, &task.stops) {
                Ok(text) => text.unstopped(task.options.late.after),
                Err(error) => {
                    send(&task, Event::Failed(error.into()));
                    continue;
                }
            };
            self.joined += 1;
            let is_free =
                task.own_ends && task.form.is_none() && task.options.sampling.bias.is_empty();
            let form = task.form.take().map(|form| Box::new(form) as Box<dyn Grammar>);
            match self.engine.join_with(self.joined, &task.prompt, &task.options, form) {
                Ok(()) => {
                    let own = Vec::new();
                    let answer = Answer { task, text, tokens: 0, own, is_free, problem: None };
                    self.answers.insert(self.joined, answer);
                }
                Err(error) => send(&task, Event::Failed(error.into())),
            }
        }
        self.tell_load();
    }

    fn round(&mut self) {
        if self.answers.is_empty() {
            return;
        }
        let (answers, meters, hides_lookup) = (&mut self.answers, self.meters, self.hides_lookup);
        let ended = self.engine.round(&mut |key, mut committed, log_probs| {
            if hides_lookup && committed.proposed_by == Some(Origin::Lookup) {
                committed.proposed_by = Some(Origin::Draft);
            }
            match answers.get_mut(&key) {
                Some(answer) => answer.hear(committed, log_probs, meters),
                None => ControlFlow::Break(EndReason::Interrupted),
            }
        });
        match ended {
            Ok(ended) => {
                for (key, outcome) in ended {
                    match outcome {
                        Ok(generation) => self.end(key, &generation),
                        Err(error) => self.fail(key, &error.into()),
                    }
                }
            }
            Err(error) => {
                let error = ApiError::from(error);
                let keys: Vec<usize> = self.answers.keys().copied().collect();
                keys.into_iter().for_each(|key| self.fail(key, &error));
            }
        }
    }

    fn fail(&mut self, key: usize, error: &ApiError) {
        if let Some(answer) = self.answers.remove(&key) {
            send(&answer.task, Event::Failed(error.clone()));
        }
    }

    fn end(&mut self, key: usize, generation: &Generation) {
        let Some(mut answer) = self.answers.remove(&key) else { return };
        let task = &answer.task;
        self.tell_load();
        self.meters.ended(generation, task.prompt.len(), task.asked.elapsed());
        if task.events.is_closed() {
            self.meters.cancelled();
            return;
        }
        let rest = answer.text.finish();
        if let Some(problem) = answer.problem {
            return send(task, Event::Failed(problem));
        }
        let rest = match rest {
            Ok(rest) => rest,
            Err(error) => return send(task, Event::Failed(error.into())),
        };
        let is_lesson = answer.is_free && !generation.tokens.is_empty();
        if let Some(lessons) = self.lessons.filter(|_| is_lesson) {
            lessons.add(&task.prompt, generation, std::mem::take(&mut answer.own));
        }
        // What was held back may hold a stop string.
        let reason = rest.end(generation.end);
        if !rest.text.is_empty() {
            send(task, Event::Piece(Piece { text: rest.text, ..Piece::default() }));
        }
        let mut metrics = generation.metrics.clone();
        if self.hides_lookup {
            metrics.from_lookup = 0;
        }
        let ending = Ending {
            reason,
            tokens: generation.tokens.len(),
            reused: generation.reused_tokens,
            metrics,
            _share: Some(Arc::clone(&task.share)),
        };
        send(task, Event::End(ending));
    }
}

impl Answer<'_> {
    /// Sends what a token makes certain; ends the answer at a stop string, or if nobody reads it.
    fn hear(
        &mut self,
        committed: Committed,
        log_probs: Option<&LogProbs>,
        meters: &Meters,
    ) -> ControlFlow<EndReason> {
        let Committed { token, proposed_by } = committed;
        if self.tokens == 0 {
            meters.first_token(self.task.asked.elapsed());
        }
        if proposed_by.is_none() {
            self.own.push(self.tokens);
        }
        self.tokens += 1;
        if self.task.options.stop_tokens.contains(&token) {
            return ControlFlow::Continue(());
        }
        let offset = self.text.length();
        let streamed = match self.text.push(token.0) {
            Ok(streamed) => streamed,
            Err(error) => {
                self.problem = Some(error.into());
                return ControlFlow::Break(EndReason::Interrupted);
            }
        };
        let (text, token, log_probs) = (streamed.text, Some(token), log_probs.cloned());
        send(&self.task, Event::Piece(Piece { text, token, offset, proposed_by, log_probs }));
        if streamed.stopped {
            ControlFlow::Break(EndReason::StopString)
        } else if self.task.events.is_closed() {
            ControlFlow::Break(EndReason::Interrupted)
        } else {
            ControlFlow::Continue(())
        }
    }
}

/// Who is gone hears nothing; the next round notices.
fn send(task: &Task, event: Event) {
    let _ = task.events.send((task.choice, event));
}

#[cfg(test)]
mod tests {
    use longdraft_models::target_model::{Target, TargetOptions};
    use serde_json::json;

    use super::*;
    use crate::answer::tests::{TARGET, app_of, settings};
    use crate::drafts::Inbox;
    use crate::request::CompletionRequest;

    /// With a seed an answer is that of `generate --seed`, wherever its prompt stands.
    #[test]
    fn a_seed_gives_each_prompt_the_draws_that_it_has_alone() {
        let (_control, Inbox { line, mut receiver }) = crate::channel();
        let mut settings = settings();
        settings.model.vocabulary = 1 << 20;
        let app = app_of(settings, None, line);
        let mut keys = |asked: serde_json::Value| {
            let asked = CompletionRequest::asked(&asked, &app.settings, &app.tokenizer);
            let submitted = app.submit(asked.expect("a request")).expect("room");
            let mut key = || match receiver.try_recv() {
                Ok(Work::Answer(task)) => task.options.request.clone(),
                _ => panic!("an answer"),
            };
            (0..submitted.answers).map(|_| key()).collect::<Vec<Vec<u64>>>()
        };
        let seeded = keys(json!({ "prompt": ["a", "b"], "seed": 3 }));
        assert_eq!(seeded, [Vec::<u64>::new(), Vec::new()]);
        let several = keys(json!({ "prompt": "a", "seed": 3, "n": 2 }));
        assert_eq!(several, [Vec::new(), vec![1_u64]]);
        // Without one equal prompts are answered otherwise.
        let drawn = keys(json!({ "prompt": ["a", "a"] }));
        assert_ne!(drawn[0], drawn[1]);
    }

    /// Else who reads slowly holds any number of answers.
    #[test]
    fn an_answer_keeps_its_place_until_it_is_read() {
        let target = Target::open(TARGET, &TargetOptions::default()).expect("target");
        let (_control, Inbox { line, receiver }) = crate::channel();
        let mut settings = settings();
        settings.model.vocabulary = target.config().vocab_size;
        let app = app_of(settings, None, line);
        let (meters, tokenizer) = (app.meters(), app.tokenizer.clone());
        let client = std::thread::spawn(move || {
            let asked = json!({ "prompt": "a", "max_tokens": 2 });
            let ask = || {
                let asked = CompletionRequest::asked(&asked, &app.settings, &app.tokenizer);
                app.submit(asked.expect("a request")).expect("room")
            };
            let (mut first, second) = (ask(), ask());
            while !second.events.is_closed() {
                std::thread::yield_now();
            }
            assert!(app.require_room().is_err(), "both have ended, and nothing is read");
            while first.events.try_recv().is_ok() {}
            assert!(app.require_room().is_ok(), "one is read");
        });
        let engine = BatchEngine::new(&target, vec![None]);
        let told = (&*meters, None, false);
        work((engine, &|_| Ok(None)), &tokenizer, receiver, &AtomicBool::new(false), told);
        client.join().expect("as it should be");
    }
}
