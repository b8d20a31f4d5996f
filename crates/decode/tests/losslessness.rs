//! Greedy output with any drafter equals output without one, token for token, in f32.

use longdraft_decode::drafter::{DraftContext, Drafter, GlideDrafter};
use longdraft_decode::{DecodeOptions, Result, SpeculativeDecoder};
use longdraft_models::draft::glide::{FinalNorm, GlideConfig, GlideDraft, Init};
use longdraft_models::target::{Target, TargetOptions};
use longdraft_models::{TargetConfig, TargetTokenId};
use proptest::prelude::*;
use serde_json::json;

const VOCABULARY: usize = 61;

/// A random target; a large deviation makes its choices vary.
fn target(kind: &str, head_dim: usize, kv_heads: usize, group: usize, seed: u64) -> Target {
    let config = json!({
        "model_type": kind, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1400, "tie_word_embeddings": seed.is_multiple_of(2),
        "initializer_range": 0.3
    });
    let config = TargetConfig::from_json(&config).expect("valid configuration");
    Target::random(config, seed, &TargetOptions::default()).expect("random target")
}

fn draft(target: &Target, seed: u64) -> GlideDraft {
    let mut config = GlideConfig::for_target(target.config(), None);
    config.initializer_range = 0.3;
    config.final_norm = if seed.is_multiple_of(3) { FinalNorm::Target } else { FinalNorm::None };
    let init = if seed.is_multiple_of(2) { Init::LastLayer } else { Init::Random };
    GlideDraft::initialise(&config, target, init, seed).expect("random draft")
}

fn prompt(length: usize, seed: u64) -> Vec<TargetTokenId> {
    let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(1);
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            TargetTokenId((state >> 33) as u32 % VOCABULARY as u32)
        })
        .collect()
}

fn generate(
    target: &Target,
    drafter: Option<Box<dyn Drafter + '_>>,
    prompt: &[TargetTokenId],
    options: &DecodeOptions,
) -> longdraft_decode::Generation {
    let mut streamed = Vec::new();
    let generation = SpeculativeDecoder::new(target, drafter)
        .generate(prompt, options, &mut |token| streamed.push(token))
        .expect("decoding");
    assert_eq!(streamed, generation.tokens, "every token is streamed once, in order");
    generation
}

/// Replays a script of the target's own output: right, wrong or alternating proposals.
struct Scripted {
    truth: Vec<TargetTokenId>,
    prompt: usize,
    /// Proposal i of a round is right where this says so.
    right: fn(usize, usize) -> bool,
    rounds: usize,
}

impl Drafter for Scripted {
    fn begin(&mut self, _: DraftContext<'_>) -> Result<()> {
        Ok(())
    }

    fn propose(
        &mut self,
        context: DraftContext<'_>,
        draft_len: usize,
    ) -> Result<Vec<TargetTokenId>> {
        self.rounds += 1;
        let done = context.tokens.len() - self.prompt;
        Ok((0..draft_len)
            .map(|i| {
                let truth = self.truth.get(done + i).map_or(0, |token| token.0);
                let wrong = (truth + 1) % VOCABULARY as u32;
                TargetTokenId(if (self.right)(self.rounds, i) { truth } else { wrong })
            })
            .collect())
    }

    fn accept(&mut self, _: DraftContext<'_>, _: &[TargetTokenId]) -> Result<()> {
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn random_drafts_on_random_targets_change_nothing(
        seed in 0_u64..1_000_000,
        head_dim in prop::sample::select(vec![16_usize, 32, 64, 80, 96, 128]),
        (kv_heads, group) in prop::sample::select(vec![(1_usize, 1_usize), (1, 4), (2, 3), (3, 1)]),
        kind in prop::sample::select(vec!["llama", "qwen2", "qwen3"]),
        length in prop::sample::select(vec![1_usize, 7, 64]),
        draft_len in 1_usize..40,
    ) {
        let target = target(kind, head_dim, kv_heads, group, seed);
        let draft = draft(&target, seed);
        let prompt = prompt(length, seed);
        let options = DecodeOptions { draft_len, max_new_tokens: 48, stop_tokens: Vec::new() };
        let plain = generate(&target, None, &prompt, &options);
        let drafter = Box::new(GlideDrafter::new(&draft, &target).expect("drafter"));
        let drafted = generate(&target, Some(drafter), &prompt, &options);
        prop_assert_eq!(&plain.tokens, &drafted.tokens);
        prop_assert_eq!(plain.metrics.committed, plain.metrics.rounds);
        prop_assert_eq!(drafted.metrics.committed + 1, drafted.tokens.len());
    }

    #[test]
    fn scripted_drafts_change_nothing_and_count_right(
        seed in 0_u64..1_000_000, draft_len in 1_usize..9, stop_at in 0_usize..40,
    ) {
        let target = target("llama", 16, 2, 2, seed);
        let prompt = prompt(9, seed);
        let mut options = DecodeOptions { draft_len, max_new_tokens: 40, stop_tokens: Vec::new() };
        let truth = generate(&target, None, &prompt, &options).tokens;
        // A stop token that first appears at some position of the text.
        options.stop_tokens = vec![truth[stop_at]];
        let plain = generate(&target, None, &prompt, &options);
        let scripts: [fn(usize, usize) -> bool; 4] =
            [|_, _| true, |_, _| false, |round, _| round % 2 == 0, |round, i| (round + i) % 3 != 0];
        for right in scripts {
            let script = Scripted { truth: truth.clone(), prompt: prompt.len(), right, rounds: 0 };
            let drafted = generate(&target, Some(Box::new(script)), &prompt, &options);
            prop_assert_eq!(&plain.tokens, &drafted.tokens);
            prop_assert_eq!(plain.end, drafted.end);
        }
    }
}

#[test]
fn an_oracle_reaches_the_longest_acceptance_and_a_liar_none() {
    let target = target("qwen3", 32, 2, 2, 5);
    let prompt = prompt(20, 5);
    let options = DecodeOptions { draft_len: 4, max_new_tokens: 51, stop_tokens: Vec::new() };
    let truth = generate(&target, None, &prompt, &options).tokens;
    let run = |right| {
        let script = Scripted { truth: truth.clone(), prompt: prompt.len(), right, rounds: 0 };
        generate(&target, Some(Box::new(script)), &prompt, &options).metrics
    };
    assert!((run(|_, _| true).acceptance_length() - 5.0).abs() < 1e-12);
    assert!((run(|_, _| false).acceptance_length() - 1.0).abs() < 1e-12);
}

#[test]
fn a_prompt_longer_than_the_draft_window_changes_nothing() {
    let target = target("llama", 16, 2, 2, 8);
    let draft = draft(&target, 8);
    let options = DecodeOptions { draft_len: 4, max_new_tokens: 64, stop_tokens: Vec::new() };
    for length in [511, 513, 800] {
        let prompt = prompt(length, 8);
        let plain = generate(&target, None, &prompt, &options);
        let drafter = Box::new(GlideDrafter::new(&draft, &target).expect("drafter"));
        let drafted = generate(&target, Some(drafter), &prompt, &options);
        assert_eq!(plain.tokens, drafted.tokens);
    }
}

#[test]
fn the_context_fills_to_its_last_slot() {
    let target = target("llama", 16, 1, 2, 11);
    let draft = draft(&target, 11);
    let prompt = prompt(1380, 11);
    let options = DecodeOptions { draft_len: 4, max_new_tokens: 500, stop_tokens: Vec::new() };
    let plain = generate(&target, None, &prompt, &options);
    let drafter = Box::new(GlideDrafter::new(&draft, &target).expect("drafter"));
    let drafted = generate(&target, Some(drafter), &prompt, &options);
    assert_eq!(plain.tokens.len(), 20);
    assert_eq!((plain.tokens, plain.end), (drafted.tokens, drafted.end));
}

#[test]
fn impossible_requests_are_errors() {
    let target = target("llama", 16, 1, 2, 12);
    let draft = draft(&target, 12);
    let run = |prompt: &[TargetTokenId]| {
        let drafter = Box::new(GlideDrafter::new(&draft, &target).expect("drafter"));
        let options = DecodeOptions::default();
        let mut decoder = SpeculativeDecoder::new(&target, Some(drafter));
        decoder.generate(prompt, &options, &mut |_| ()).map(|g| g.tokens.len())
    };
    assert!(run(&[]).is_err());
    assert!(run(&prompt(1400, 1)).is_err());
    assert!(run(&[TargetTokenId(VOCABULARY as u32)]).is_err());
}
