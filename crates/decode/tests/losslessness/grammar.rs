//! Answers that follow a grammar: with a draft as without, and never outside of it.

use std::collections::BTreeMap;

use longdraft_decode::{
    BatchEngine, DecodeError, DecodeOptions, Generation, Grammar, Result, Sampling, VerifyRule,
};
use longdraft_models::TargetTokenId;

use crate::answers::{options, prompt};
use crate::batch::places;
use crate::engine::{finish, goes_on, outcomes};
use crate::models::{Drafts, KINDS, Kind, shapes, with_drafts};

/// After a token of number `a`, `b` is forbidden where `a + 2 b` is a multiple of 3.
#[derive(Debug, Clone, Default)]
pub(crate) struct Thirds {
    vocabulary: usize,
    tokens: Vec<u32>,
}

impl Thirds {
    pub(crate) fn after(vocabulary: usize, tokens: &[TargetTokenId]) -> Self {
        Self { vocabulary, tokens: tokens.iter().map(|token| token.0).collect() }
    }

    pub(crate) fn allows(before: Option<u32>, next: u32) -> bool {
        !(before.unwrap_or(1) + 2 * next).is_multiple_of(3)
    }
}

impl Grammar for Thirds {
    fn allowed(&mut self) -> Result<Vec<u32>> {
        let mut words = vec![0; self.vocabulary.div_ceil(32)];
        for id in 0..self.vocabulary {
            if Self::allows(self.tokens.last().copied(), id as u32) {
                words[id / 32] |= 1 << (id % 32);
            }
        }
        Ok(words)
    }

    fn accepts(&mut self, tokens: &[TargetTokenId]) -> Result<usize> {
        let mut before = self.tokens.last().copied();
        let fits = |token: &&TargetTokenId| {
            let fits = Self::allows(before, token.0);
            before = Some(token.0);
            fits
        };
        Ok(tokens.iter().take_while(fits).count())
    }

    fn advance(&mut self, token: TargetTokenId) -> Result<()> {
        if self.accepts(&[token])? == 0 {
            return Err(DecodeError::Grammar(format!("{} may not follow", token.0)));
        }
        self.tokens.push(token.0);
        Ok(())
    }

    fn take_back(&mut self, count: usize) -> Result<()> {
        let left = self.tokens.len().checked_sub(count);
        let left = left.ok_or_else(|| DecodeError::Grammar("nothing to take back".into()))?;
        self.tokens.truncate(left);
        Ok(())
    }
}

/// Requests of which every second follows a grammar.
fn requests() -> Vec<(Vec<TargetTokenId>, DecodeOptions)> {
    let shapes = shapes();
    let request = |index: usize| {
        let sampling = Sampling::at(if index.is_multiple_of(3) { 0.0 } else { 0.9 });
        let shape = shapes[if sampling.is_greedy() { index % shapes.len() } else { 1 }].clone();
        // Draws that match are those of plain decoding, token for token.
        let options = DecodeOptions {
            shape,
            sampling,
            rule: VerifyRule::Match,
            request: vec![index as u64],
            ..options(12 + index)
        };
        (prompt(3 + 5 * index, index as u64), options)
    };
    (0..8).map(request).collect()
}

fn run(
    kind: Option<Kind>,
    target: &longdraft_models::target_model::Target,
    drafts: &Drafts,
) -> BTreeMap<usize, Generation> {
    let mut engine = BatchEngine::new(target, places(kind, 3, target, drafts));
    let mut ended = BTreeMap::new();
    let mut waiting = requests().into_iter().enumerate();
    loop {
        while engine.has_room()
            && let Some((key, (prompt, options))) = waiting.next()
        {
            let grammar = Thirds::after(target.config().vocab_size, &[]);
            let grammar = (key % 2 == 0).then(|| Box::new(grammar) as Box<dyn Grammar>);
            engine.join_with(key, &prompt, &options, grammar).expect("joined");
        }
        if engine.running() == 0 {
            return ended;
        }
        for (key, generation) in engine.round(&mut goes_on).expect("round") {
            ended.insert(key, generation.expect("generation"));
        }
    }
}

#[test]
fn an_answer_with_a_draft_is_the_one_without_and_follows_the_grammar() {
    let (target, drafts) = with_drafts("llama", 16, (4, 2), 1);
    let plain = run(None, &target, &drafts);
    assert_eq!(plain.len(), 8);
    for (key, generation) in &plain {
        let tokens: Vec<u32> = generation.tokens.iter().map(|token| token.0).collect();
        let mut before = None;
        let fits = |token: &u32| Thirds::allows(before.replace(*token), *token);
        assert_eq!(tokens.iter().all(fits), key % 2 == 0, "{key}: {tokens:?}");
    }
    for kind in KINDS {
        let drafted = run(Some(kind), &target, &drafts);
        for (key, generation) in &drafted {
            assert_eq!(generation.tokens, plain[key].tokens, "{kind:?} {key}");
        }
    }
}

/// Allows nothing from the second token on.
struct Short(usize);

impl Grammar for Short {
    fn allowed(&mut self) -> Result<Vec<u32>> {
        Ok(if self.0 == 0 { vec![u32::MAX; 64] } else { Vec::new() })
    }

    fn accepts(&mut self, tokens: &[TargetTokenId]) -> Result<usize> {
        Ok(tokens.len().min(1 - self.0.min(1)))
    }

    fn advance(&mut self, _: TargetTokenId) -> Result<()> {
        self.0 += 1;
        Ok(())
    }

    fn take_back(&mut self, count: usize) -> Result<()> {
        self.0 -= count;
        Ok(())
    }
}

#[test]
fn a_grammar_that_leaves_no_token_ends_its_own_request_alone() {
    let (target, drafts) = with_drafts("qwen2", 16, (2, 2), 1);
    let mut engine = BatchEngine::new(&target, places(Some(KINDS[0]), 2, &target, &drafts));
    engine.join_with(0, &prompt(4, 1), &options(9), Some(Box::new(Short(0)))).expect("joined");
    engine.join(1, &prompt(4, 1), &options(9)).expect("joined");
    let ended = outcomes(&mut engine);
    assert!(matches!(ended[&0], Err(DecodeError::NoDistribution)));
    assert_eq!(ended[&1].as_ref().expect("the other").tokens.len(), 9);
}

/// Cannot be followed from the second token on, which shows where it is asked for what it forces, or where
/// proposals are held against it.
struct Lost {
    in_forced: bool,
    tokens: usize,
}

impl Lost {
    fn check(&self, in_forced: bool) -> Result<()> {
        if self.tokens > 0 && self.in_forced == in_forced {
            return Err(DecodeError::Grammar("too many states".into()));
        }
        Ok(())
    }
}

impl Grammar for Lost {
    fn allowed(&mut self) -> Result<Vec<u32>> {
        Ok(vec![u32::MAX; 64])
    }

    fn accepts(&mut self, tokens: &[TargetTokenId]) -> Result<usize> {
        self.check(false).map(|()| tokens.len())
    }

    fn forced(&mut self, _: usize) -> Result<Vec<TargetTokenId>> {
        self.check(true).map(|()| Vec::new())
    }

    fn advance(&mut self, _: TargetTokenId) -> Result<()> {
        self.tokens += 1;
        Ok(())
    }

    fn take_back(&mut self, count: usize) -> Result<()> {
        self.tokens -= count;
        Ok(())
    }
}

#[test]
fn a_grammar_that_cannot_be_followed_ends_its_own_request_alone() {
    let (target, drafts) = with_drafts("qwen2", 16, (2, 2), 1);
    for in_forced in [true, false] {
        let mut engine = BatchEngine::new(&target, places(Some(KINDS[0]), 2, &target, &drafts));
        let lost = Lost { in_forced, tokens: 0 };
        engine.join(1, &prompt(4, 1), &options(9)).expect("joined");
        engine.join_with(0, &prompt(4, 1), &options(9), Some(Box::new(lost))).expect("joined");
        let mut ended = BTreeMap::new();
        while engine.running() > 0 {
            ended.extend(engine.round(&mut goes_on).expect("the others go on"));
            // Its place is free for the next one.
            if ended.len() == 1 && engine.running() == 1 {
                engine.join(2, &prompt(4, 1), &options(9)).expect("joined");
            }
        }
        assert!(matches!(ended[&0], Err(DecodeError::Grammar(_))), "{in_forced}: {:?}", ended[&0]);
        let other = ended[&1].as_ref().expect("the other");
        assert_eq!(other.tokens.len(), 9);
        assert_eq!(ended[&2].as_ref().expect("the next").tokens, other.tokens);
    }
}

/// Of every seven tokens the second to the fifth are 4, 5, 6 and 3. It tells what it forces, or keeps it
/// to itself.
#[derive(Clone, Default)]
struct Runs {
    tells: bool,
    tokens: Vec<u32>,
}

impl Runs {
    fn next(&self) -> Option<u32> {
        let at = self.tokens.len() % 7;
        [None, Some(4), Some(5), Some(6), Some(3), None, None][at]
    }
}

impl Grammar for Runs {
    fn allowed(&mut self) -> Result<Vec<u32>> {
        Ok(match self.next() {
            Some(token) => vec![1 << token, 0, 0, 0],
            None => vec![u32::MAX; 4],
        })
    }

    fn accepts(&mut self, tokens: &[TargetTokenId]) -> Result<usize> {
        let mut ahead = self.clone();
        let fits = |token: &&TargetTokenId| {
            let fits = ahead.next().is_none_or(|next| next == token.0);
            ahead.tokens.push(token.0);
            fits
        };
        Ok(tokens.iter().take_while(fits).count())
    }

    fn forced(&mut self, most: usize) -> Result<Vec<TargetTokenId>> {
        let mut ahead = self.clone();
        let mut run = Vec::new();
        while let (true, Some(next)) = (self.tells && run.len() < most, ahead.next()) {
            ahead.tokens.push(next);
            run.push(TargetTokenId(next));
        }
        Ok(run)
    }

    fn advance(&mut self, token: TargetTokenId) -> Result<()> {
        self.tokens.push(token.0);
        Ok(())
    }

    fn take_back(&mut self, count: usize) -> Result<()> {
        self.tokens.truncate(self.tokens.len() - count);
        Ok(())
    }
}

/// What is forced is proposed without a draft and beside one, and the answer stays what it was.
#[test]
fn forced_tokens_are_proposed_for_free() {
    let (target, drafts) = with_drafts("llama", 16, (4, 2), 1);
    let answer = |kind: Option<Kind>, temperature: f64, length: usize, tells: bool| {
        let mut engine = BatchEngine::new(&target, places(kind, 1, &target, &drafts));
        let options = DecodeOptions {
            sampling: Sampling::at(temperature),
            rule: VerifyRule::Match,
            shape: longdraft_decode::DraftShape::Chain { length },
            ..options(30)
        };
        let grammar = Runs { tells, ..Runs::default() };
        engine.join_with(0, &prompt(9, 2), &options, Some(Box::new(grammar))).expect("joined");
        finish(&mut engine).remove(&0).expect("it ends")
    };
    for temperature in [0.0, 0.8] {
        let plain = answer(None, temperature, 4, false);
        assert_eq!((plain.metrics.from_grammar, plain.metrics.accepted), (0, 0));
        for kind in std::iter::once(None).chain(KINDS.map(Some)) {
            // A run is longer than what a draft would propose, or shorter.
            for length in [2, 6] {
                let told = answer(kind, temperature, length, true);
                assert_eq!(told.tokens, plain.tokens, "{kind:?} {temperature} {length}");
                let metrics = &told.metrics;
                assert!(metrics.from_grammar >= 8, "{kind:?} {length}: {metrics:?}");
                assert!(metrics.from_grammar <= metrics.accepted, "{metrics:?}");
                if kind.is_none() {
                    assert_eq!(metrics.from_grammar, metrics.accepted);
                    assert_eq!(metrics.nodes, metrics.accepted, "none of them is refused");
                }
            }
        }
    }
}
