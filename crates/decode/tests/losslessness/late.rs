//! Answers whose ends may not come early: with a draft as without.

use longdraft_decode::{DecodeOptions, EndReason, LateTokens, Sampling, VerifyRule};
use longdraft_models::TargetTokenId;

use crate::answers::{generate, options, prompt};
use crate::models::{KINDS, drafter, shapes, with_drafts};

/// Tokens before an end may come.
const AFTER: usize = 12;

#[test]
fn no_end_comes_early_and_no_draft_changes_a_token() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 3);
    let prompt = prompt(9, 3);
    for temperature in [0.0, 0.8] {
        // Draws that match are those of plain decoding, token for token.
        let sampling = Sampling::at(temperature);
        let free = DecodeOptions { sampling, rule: VerifyRule::Match, ..options(40) };
        let truth = generate(&target, None, &prompt, &free).tokens;
        // It would be over at its third token.
        let ends = vec![truth[2]];
        let early = DecodeOptions { stop_tokens: ends.clone(), ..free.clone() };
        let ended = generate(&target, None, &prompt, &early);
        assert!(ended.tokens.len() <= 3 && ended.end == EndReason::StopToken);
        let late = DecodeOptions { late: LateTokens { tokens: ends, after: AFTER }, ..early };
        let plain = generate(&target, None, &prompt, &late);
        assert!(plain.tokens.len() > AFTER && !plain.tokens[..AFTER].contains(&truth[2]));
        for kind in KINDS {
            for shape in [1, 4, 5].map(|place| shapes()[place].clone()) {
                let drafted = DecodeOptions { shape, ..late.clone() };
                let drafter = drafter(kind, &target, &drafts);
                let found = generate(&target, Some(drafter), &prompt, &drafted);
                assert_eq!(found.tokens, plain.tokens, "{kind:?} {temperature}");
                assert_eq!(found.end, plain.end, "{kind:?} {temperature}");
            }
        }
    }
}

/// The end is always the likeliest token here.
#[test]
fn an_end_comes_at_the_first_place_where_it_may() {
    let (target, drafts) = with_drafts("qwen3", 16, (2, 2), 5);
    let prompt = prompt(6, 5);
    let mut asked = options(40);
    asked.stop_tokens = vec![TargetTokenId(7)];
    asked.sampling.bias = [(asked.stop_tokens[0], 100.0)].into();
    for after in 0..9 {
        asked.late = LateTokens { tokens: asked.stop_tokens.clone(), after };
        for kind in std::iter::once(None).chain(KINDS.map(Some)) {
            let drafter = kind.map(|kind| drafter(kind, &target, &drafts));
            let found = generate(&target, drafter, &prompt, &asked);
            assert_eq!((found.tokens.len(), found.end), (after + 1, EndReason::StopToken));
        }
    }
}
