//! Who watches the answers as they are written: counts tokens, and tells one answer at a time.

use std::collections::BTreeMap;
use std::time::Instant;

use longdraft_decode::Committed;
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_records::decode::SampleToken;
use longdraft_records::events::{Advance, Answer, Events};

use crate::commands::data::regenerate::Hears;

/// Tokens of other answers after which one that got none is over.
const OVER: usize = 128;
/// Answers that are kept: as many run at a time at most, and a few that are over.
const KEPT: usize = 64;

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
    /// Of rows under way: their prompts and answers.
    open: BTreeMap<usize, (Vec<TargetTokenId>, Vec<Committed>)>,
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
        let (done, tokens, open, followed, others) = (0, 0, BTreeMap::new(), 0, 0);
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
            let (prompt, answer) = open.get(followed)?;
            let ids: Vec<u32> = prompt.iter().map(|token| token.0).collect();
            let prompt = tokenizer.decode(&ids, true).ok()?;
            let tokens = SampleToken::of(answer, tokenizer, stops)?;
            (!tokens.is_empty()).then_some(Answer { prompt, tokens })
        };
        events.answer(answer);
    }
}

impl Hears for Hearing<'_> {
    fn begin(&mut self, row: usize, prompt: &[TargetTokenId]) {
        if self.open.is_empty() {
            self.followed = row;
        }
        self.open.insert(row, (prompt.to_vec(), Vec::new()));
        while self.open.len() > KEPT {
            self.open.pop_first();
        }
    }

    fn token(&mut self, row: usize, committed: Committed) {
        self.tokens += 1;
        if let Some((_, answer)) = self.open.get_mut(&row) {
            answer.push(committed);
        }
        if row == self.followed {
            self.others = 0;
            self.tell();
            return;
        }
        self.others += 1;
        if self.others > OVER {
            (self.followed, self.others) = (row, 0);
        }
    }
}
