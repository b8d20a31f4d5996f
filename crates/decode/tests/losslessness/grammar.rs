//! Answers that follow a grammar: with a draft as without, and never outside of it.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use longdraft_decode::{
    BatchEngine, Committed, DecodeError, DecodeOptions, Generation, Grammar, LogProbs, Result,
    Sampling, VerifyRule,
};
use longdraft_models::TargetTokenId;

use crate::batch::places;
use crate::models::{Drafts, KINDS, Kind, options, prompt, shapes, target};

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

fn goes_on(
    _: usize,
    _: Committed,
    _: Option<&LogProbs>,
) -> ControlFlow<longdraft_decode::EndReason> {
    ControlFlow::Continue(())
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
    target: &longdraft_models::target::Target,
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
    let target = target("llama", 16, (4, 2), 1);
    let drafts = Drafts::new(&target, 1);
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
    let target = target("qwen2", 16, (2, 2), 1);
    let drafts = Drafts::new(&target, 1);
    let mut engine = BatchEngine::new(&target, places(Some(KINDS[0]), 2, &target, &drafts));
    engine.join_with(0, &prompt(4, 1), &options(9), Some(Box::new(Short(0)))).expect("joined");
    engine.join(1, &prompt(4, 1), &options(9)).expect("joined");
    let mut ended = BTreeMap::new();
    while engine.running() > 0 {
        ended.extend(engine.round(&mut goes_on).expect("round"));
    }
    assert!(matches!(ended[&0], Err(DecodeError::NoDistribution)));
    assert_eq!(ended[&1].as_ref().expect("the other").tokens.len(), 9);
}
