//! Prompts, and what a target answers to them with a drafter and without.

use std::ops::ControlFlow;

use longdraft_decode::drafter::Drafter;
use longdraft_decode::{Committed, DecodeOptions, Generation, SpeculativeDecoder};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::Target;

use crate::models::VOCABULARY;

pub(crate) fn prompt(length: usize, seed: u64) -> Vec<TargetTokenId> {
    let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(1);
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            TargetTokenId((state >> 33) as u32 % VOCABULARY as u32)
        })
        .collect()
}

pub(crate) fn options(max_new_tokens: usize) -> DecodeOptions {
    DecodeOptions { max_new_tokens, ..DecodeOptions::default() }
}

pub(crate) fn generate(
    target: &Target,
    drafter: Option<Box<dyn Drafter + '_>>,
    prompt: &[TargetTokenId],
    options: &DecodeOptions,
) -> Generation {
    decode(&mut SpeculativeDecoder::new(target, drafter), prompt, options)
}

/// Turns of a conversation that keeps its text: each answer is that of the whole text without a draft. The history is
/// edited after the turn `edited`, if there is one. Tokens that each turn reused.
#[track_caller]
pub(crate) fn converse(
    what: &str,
    (target, drafter): (&Target, Box<dyn Drafter + '_>),
    mut text: Vec<TargetTokenId>,
    options: DecodeOptions,
    (turns, edited): (u64, Option<u64>),
) -> Vec<usize> {
    let options = DecodeOptions { reuse_prefix: true, ..options };
    let mut decoder = SpeculativeDecoder::new(target, Some(drafter));
    let mut reused = Vec::new();
    for turn in 0..turns {
        let kept = decode(&mut decoder, &text, &options);
        let fresh = generate(target, None, &text, &options);
        assert_eq!(kept.tokens, fresh.tokens, "{what}, turn {turn}");
        reused.push(kept.reused_tokens);
        text.extend(&kept.tokens);
        text.extend(prompt(5, turn));
        if edited == Some(turn) {
            text[15] = TargetTokenId((text[15].0 + 1) % VOCABULARY as u32);
        }
    }
    reused
}

pub(crate) fn decode(
    decoder: &mut SpeculativeDecoder<'_>,
    prompt: &[TargetTokenId],
    options: &DecodeOptions,
) -> Generation {
    let mut streamed: Vec<Committed> = Vec::new();
    let mut listen = |committed| {
        streamed.push(committed);
        ControlFlow::Continue(())
    };
    let generation = decoder.generate(prompt, options, &mut listen).expect("decoding");
    let tokens: Vec<TargetTokenId> = streamed.iter().map(|committed| committed.token).collect();
    assert_eq!(tokens, generation.tokens, "every token is streamed once, in order");
    let proposed = streamed.iter().filter(|committed| committed.proposed_by.is_some()).count();
    assert_eq!(proposed, generation.metrics.accepted);
    assert_eq!(generation.metrics.residual_fallbacks, 0);
    generation
}
