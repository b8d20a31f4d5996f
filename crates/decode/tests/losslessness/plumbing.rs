//! Limits, stops, caches between requests, and what is refused.

use std::cell::Cell;
use std::ops::ControlFlow;

use longdraft_decode::{
    DecodeError, DecodeOptions, DraftShape, EndReason, READ_ALONE, Sampling, SpeculativeDecoder,
    VerifyRule,
};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Tap, Taps};

use crate::answers::{converse, decode, generate, options, prompt};
use crate::models::{
    FAMILIES, KINDS, Kind, RECURRENT, VOCABULARY, drafter, extend_tree, shapes, target, with_drafts,
};

#[test]
fn the_context_fills_to_its_last_slot() {
    let (target, drafts) = with_drafts("llama", 16, (1, 2), 11);
    let prompt = prompt(1380, 11);
    let mut options = options(500);
    let plain = generate(&target, None, &prompt, &options);
    assert_eq!((plain.tokens.len(), plain.end), (20, EndReason::ContextLimit));
    for (kind, shape) in [(Kind::Glide, 1), (Kind::Eagle3, 4), (Kind::Merged, 5)] {
        options.shape = shapes()[shape].clone();
        let drafted = generate(&target, Some(drafter(kind, &target, &drafts)), &prompt, &options);
        assert_eq!((&plain.tokens, plain.end), (&drafted.tokens, drafted.end));
    }
}

#[test]
fn a_limit_of_one_token_and_a_prompt_of_one_work() {
    let (target, drafts) = with_drafts("qwen2", 32, (2, 2), 3);
    for kind in KINDS {
        for limit in 1..4 {
            let options = options(limit);
            let plain = generate(&target, None, &prompt(1, 3), &options);
            let drafter = drafter(kind, &target, &drafts);
            let drafted = generate(&target, Some(drafter), &prompt(1, 3), &options);
            assert_eq!((plain.tokens, plain.end), (drafted.tokens, drafted.end), "{kind:?}");
        }
    }
}

/// Nobody hears of a token then, so the listener cannot end it.
#[test]
fn an_answer_can_be_ended_while_its_prompt_is_read() {
    for (family, kind) in [("llama", Kind::Glide), ("qwen3", Kind::Eagle3)] {
        let (target, drafts) = with_drafts(family, 16, (2, 2), 4);
        let mut decoder = SpeculativeDecoder::new(&target, Some(drafter(kind, &target, &drafts)));
        let options = DecodeOptions { reuse_prefix: true, ..options(12) };
        let prompt = prompt(1300, 4);
        let alone = generate(&target, None, &prompt, &options);
        let asked = Cell::new(0);
        let one_round = || asked.replace(asked.get() + 1) == 0;
        let ended = decoder
            .generate_while(&one_round, &prompt, &options, &mut |_| ControlFlow::Continue(()));
        let ended = ended.expect("ended");
        assert_eq!((ended.end, ended.tokens.len(), asked.get()), (EndReason::Interrupted, 0, 2));
        let whole = decode(&mut decoder, &prompt, &options);
        assert_eq!((&whole.tokens, whole.end), (&alone.tokens, alone.end), "{family} {kind:?}");
        assert_eq!(whole.reused_tokens, READ_ALONE - 1, "{family} {kind:?}");
    }
}

/// What is in the cache after rounds with trees equals a plain pass over the same tokens.
#[test]
fn a_compacted_cache_equals_a_plain_one() {
    let older = ["qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "ministral3"];
    for family in older.into_iter().chain(FAMILIES) {
        check_compacted_cache(family, 21);
    }
    for (family, seed) in RECURRENT.into_iter().cycle().zip(21..27) {
        check_compacted_cache(family, seed);
    }
}

fn check_compacted_cache(family: &str, seed: u64) {
    let target = target(family, 16, (2, 2), seed);
    let tokens = prompt(30, 21);
    let ids = |tokens: &[TargetTokenId]| tokens.iter().map(|t| t.0).collect::<Vec<_>>();
    let taps = Taps::of(&[Tap::FinalHidden]);
    let mut cache = target.new_cache().expect("cache");
    let positions: Vec<u32> = (0..10).collect();
    target.extend(&ids(&tokens[..10]), &positions, &mut cache, &taps).expect("prefill");
    // Rows 0, 3, 4 hold tokens 10, 11, 12; the others are strangers.
    let rows = [tokens[10].0, 1, 2, tokens[11].0, tokens[12].0, 5];
    let parents = [None, Some(0), Some(1), Some(0), Some(3), Some(3)];
    let positions = [10, 11, 12, 11, 12, 12];
    extend_tree(&target, (&rows, &positions), &parents, &mut cache).expect("tree");
    cache.compact(10, &[0, 3, 4]).expect("path");
    assert_eq!(cache.len(), 13);
    let mut plain = target.new_cache().expect("cache");
    let positions: Vec<u32> = (0..13).collect();
    target.extend(&ids(&tokens[..13]), &positions, &mut plain, &taps).expect("plain");
    let values = |cache: &longdraft_models::target_model::KvCache| {
        let (k, v) = cache.last_layer().expect("layer");
        [k, v].map(|t| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values"))
    };
    assert_eq!(values(&cache), values(&plain), "bit for bit");
    for layer in 0..3 {
        assert_eq!(cache.state(layer), plain.state(layer), "{family} {layer}");
    }
    assert!(cache.compact(10, &[0, 9]).is_err() && cache.compact(10, &[1, 0]).is_err());
    let backwards = [None, Some(2), Some(1)];
    assert!(extend_tree(&target, (&[1, 2, 3], &[13, 14, 15]), &backwards, &mut cache).is_err());
    assert_eq!(cache.len(), 13);
}

#[test]
fn a_kept_prefix_changes_nothing_but_time() {
    let families = [
        "llama",
        "qwen3_5_text",
        "gpt_oss",
        "gemma3_text",
        "lfm2",
        "llama4_text",
        "qwen3_next",
        "olmo3",
    ];
    for (seed, (kind, family)) in (30..).zip(KINDS.into_iter().zip(families.into_iter().cycle())) {
        let (target, drafts) = with_drafts(family, 32, (2, 2), seed);
        let shape = DraftShape::Static { widths: vec![3, 4] };
        let options = DecodeOptions { shape, ..options(24) };
        let (what, drafter) = (format!("{kind:?}"), drafter(kind, &target, &drafts));
        let reused = converse(&what, (&target, drafter), prompt(20, 31), options, (4, Some(2)));
        // States are not cut in the middle of what was read at once.
        let wanted = [false, true, true, !RECURRENT.contains(&family)];
        assert_eq!(reused.iter().map(|count| *count > 0).collect::<Vec<_>>(), wanted, "{family}");
    }
}

/// A conversation that grows beyond what a short sequence may have is read anew under other frequencies.
#[test]
fn a_conversation_across_the_border_of_short_sequences_equals_fresh_texts() {
    for kind in KINDS {
        let (target, drafts) = with_drafts("phi3", 32, (2, 2), 31);
        let (what, drafter) = (format!("{kind:?}"), drafter(kind, &target, &drafts));
        let reused = converse(&what, (&target, drafter), prompt(20, 31), options(12), (4, None));
        // Limits of 32, 49, 66 and 83 tokens; short ones have 60.
        let reused: Vec<bool> = reused.iter().map(|count| *count > 0).collect();
        assert_eq!(reused, [false, true, false, true], "{kind:?}");
    }
}

#[test]
fn a_listener_ends_the_request_within_an_accepted_run() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 41);
    let options = options(40);
    let prompt = prompt(9, 41);
    let plain = generate(&target, None, &prompt, &options);
    for at in 1..12 {
        let drafter = drafter(Kind::Merged, &target, &drafts);
        let mut heard = 0;
        let mut listen = |_| {
            heard += 1;
            if heard == at {
                ControlFlow::Break(EndReason::StopString)
            } else {
                ControlFlow::Continue(())
            }
        };
        let generation = SpeculativeDecoder::new(&target, Some(drafter))
            .generate(&prompt, &options, &mut listen)
            .expect("decoding");
        assert_eq!(generation.tokens, plain.tokens[..at]);
        assert_eq!(generation.end, EndReason::StopString);
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens_and_another_seed_others() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 51);
    let run = |seed, request, shape: usize| {
        let mut options = options(32);
        options.sampling = Sampling::at(1.0);
        (options.seed, options.request) = (seed, vec![request]);
        options.shape = shapes()[shape].clone();
        let drafter = drafter(Kind::Eagle3, &target, &drafts);
        generate(&target, Some(drafter), &prompt(9, 51), &options).tokens
    };
    for shape in [1, 5, 8] {
        assert_eq!(run(1, 1, shape), run(1, 1, shape));
        assert_ne!(run(1, 1, shape), run(2, 1, shape));
        assert_ne!(run(1, 1, shape), run(1, 2, shape));
    }
}

/// Else a chat that drops its first messages could draw an answer with the numbers of the one before it.
#[test]
fn texts_after_other_prompts_are_drawn_with_other_numbers() {
    let target = target("llama", 16, (2, 2), 52);
    let mut options = options(64);
    // All tokens are about as likely: the numbers alone decide.
    options.sampling = Sampling::at(100.0);
    let after = |seed| generate(&target, None, &prompt(9, seed), &options).tokens;
    let (one, other) = (after(52), after(53));
    let alike = one.iter().zip(&other).filter(|(a, b)| a == b).count();
    assert!(alike < 16, "{alike} of {}", one.len());
}

#[test]
fn penalties_count_every_token_of_the_answer() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 53);
    let mut options = options(40);
    options.sampling.presence_penalty = 100.0;
    for kind in [None, Some(Kind::Glide), Some(Kind::Lookup)] {
        let drafter = kind.map(|kind| drafter(kind, &target, &drafts));
        let mut tokens = generate(&target, drafter, &prompt(9, 53), &options).tokens;
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens.len(), 40, "{kind:?}: a token came twice");
    }
}

#[test]
fn top_k_of_one_is_greedy() {
    let (target, drafts) = with_drafts("llama", 16, (2, 2), 61);
    let mut options = options(32);
    let greedy = generate(&target, None, &prompt(9, 61), &options).tokens;
    options.sampling = Sampling { top_k: Some(1), ..Sampling::at(0.7) };
    for rule in [VerifyRule::Ratio, VerifyRule::Match] {
        options.rule = rule;
        let drafter = drafter(Kind::Glide, &target, &drafts);
        assert_eq!(generate(&target, Some(drafter), &prompt(9, 61), &options).tokens, greedy);
    }
}

#[test]
fn impossible_requests_are_errors() {
    let (target, drafts) = with_drafts("llama", 16, (1, 2), 12);
    let run = |prompt: &[TargetTokenId], change: fn(&mut longdraft_decode::DecodeOptions)| {
        let mut options = options(4);
        change(&mut options);
        SpeculativeDecoder::new(&target, Some(drafter(Kind::Glide, &target, &drafts)))
            .generate(prompt, &options, &mut |_| ControlFlow::Continue(()))
            .map(|generation| generation.tokens.len())
    };
    assert!(matches!(run(&[], |_| ()), Err(DecodeError::EmptyPrompt)));
    let long = run(&prompt(1400, 1), |_| ());
    assert!(matches!(long, Err(DecodeError::PromptTooLong { prompt: 1400, context: 1400 })));
    let unknown = run(&[TargetTokenId(VOCABULARY as u32)], |_| ());
    assert!(matches!(unknown, Err(DecodeError::UnknownToken { vocabulary: VOCABULARY, .. })));
    let prompt = prompt(3, 1);
    assert!(run(&prompt, |o| o.sampling.temperature = -1.0).is_err());
    assert!(run(&prompt, |o| o.shape = DraftShape::Static { widths: vec![0] }).is_err());
    assert_eq!(run(&prompt, |o| o.shape = DraftShape::Chain { length: 0 }).expect("plain"), 4);
}
