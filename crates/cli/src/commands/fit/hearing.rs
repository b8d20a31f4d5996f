//! Who watches the answers as they are written: counts tokens, and tells one answer at a time.

use std::time::Instant;

use longdraft_decode::{Committed, Job};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_records::decode::SampleToken;
use longdraft_records::events::{Advance, Answer, Events};

use crate::commands::data::regenerate::Hears;

/// Tokens of other answers after which one that got none is over.
const OVER: usize = 128;

/// Hears of tokens, and tells events.
pub(super) struct Hearing<'a> {
    events: Events,
    tokenizer: &'a TextTokenizer,
    stops: Vec<TargetTokenId>,
    /// Prompts that are answered, of all.
    done: usize,
    all: usize,
    until: Instant,
    tokens: u64,
    /// Of the jobs under way: their prompts and answers.
    open: Vec<(Vec<TargetTokenId>, Vec<Committed>)>,
    followed: usize,
    /// Tokens of others since the last one of that answer.
    others: usize,
}

impl<'a> Hearing<'a> {
    pub(super) fn new(
        events: Events,
        (tokenizer, stops): (&'a TextTokenizer, Vec<TargetTokenId>),
        (all, until): (usize, Instant),
    ) -> Self {
        let (done, tokens, open, followed, others) = (0, 0, Vec::new(), 0, 0);
        Self { events, tokenizer, stops, done, all, until, tokens, open, followed, others }
    }

    /// So many prompts are answered and written.
    pub(super) fn done(&mut self, done: usize) {
        self.done = done;
        self.tell();
    }

    fn tell(&mut self) {
        let left = self.until.saturating_duration_since(Instant::now());
        self.events.progress(Advance {
            what: "prompts".to_owned(),
            done: self.done,
            all: self.all,
            tokens: Some(self.tokens),
            at_most: Some(left.as_secs_f64()),
        });
        let Self { events, open, followed, tokenizer, stops, .. } = self;
        let answer = || {
            let (prompt, answer) = open.get(*followed)?;
            let ids: Vec<u32> = prompt.iter().map(|token| token.0).collect();
            let prompt = tokenizer.decode(&ids, true).ok()?;
            let tokens = SampleToken::of(answer, tokenizer, stops)?;
            (!tokens.is_empty()).then_some(Answer { prompt, tokens })
        };
        events.answer(answer);
    }
}

impl Hears for Hearing<'_> {
    fn begin(&mut self, jobs: &[Job]) {
        self.open = jobs.iter().map(|job| (job.prompt.clone(), Vec::new())).collect();
        (self.followed, self.others) = (0, 0);
    }

    fn token(&mut self, job: usize, committed: Committed) {
        self.tokens += 1;
        if let Some((_, answer)) = self.open.get_mut(job) {
            answer.push(committed);
        }
        if job == self.followed {
            self.others = 0;
            self.tell();
            return;
        }
        self.others += 1;
        if self.others > OVER {
            (self.followed, self.others) = (job, 0);
        }
    }
}
