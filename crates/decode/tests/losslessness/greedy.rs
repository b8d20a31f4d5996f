//! Tokens equal those of plain decoding: greedy, and at a temperature wherever proposals are
//! certain or tested by matching.

use longdraft_decode::drafter::{DraftContext, Drafter, Plan};
use longdraft_decode::{Origin, Result, Sampling, Tree, VerifyRule};
use longdraft_models::TargetTokenId;
use proptest::prelude::*;

use crate::answers::{generate, options, prompt};
use crate::models::{FAMILIES, KINDS, Kind, VOCABULARY, drafter, shapes, target, with_drafts};

proptest! {
    #![proptest_config(ProptestConfig { cases: 280, ..ProptestConfig::default() })]

    #[test]
    fn no_drafter_and_no_shape_changes_a_token(
        seed in 0_u64..1_000_000,
        head_dim in prop::sample::select(vec![16_usize, 32, 64, 80, 96, 128]),
        heads in prop::sample::select(vec![(1_usize, 1_usize), (1, 4), (2, 3), (3, 1)]),
        architecture in prop::sample::select(vec![
            "llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe",
            "mistral", "mixtral_window", "qwen3_window", "ministral3", "gemma2", "gemma3_text",
            "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2",
        ].into_iter().chain(FAMILIES).collect::<Vec<_>>()),
        length in prop::sample::select(vec![1_usize, 7, 64]),
        kind in prop::sample::select(KINDS.to_vec()),
        shape in prop::sample::select(shapes()),
        temperature in prop::sample::select(vec![0.0, 0.0, 0.8]),
    ) {
        let (target, drafts) = with_drafts(architecture, head_dim, heads, seed);
        let prompt = prompt(length, seed);
        let mut options = options(48);
        options.seed = seed;
        options.sampling = Sampling { temperature, top_p: 0.9, ..Sampling::default() };
        options.rule = VerifyRule::Match;
        let plain = generate(&target, None, &prompt, &options);
        options.shape = shape;
        let drafted = generate(&target, Some(drafter(kind, &target, &drafts)), &prompt, &options);
        prop_assert_eq!(&plain.tokens, &drafted.tokens);
        prop_assert_eq!(plain.metrics.committed, plain.metrics.rounds);
        prop_assert_eq!(drafted.metrics.committed + 1, drafted.tokens.len());
    }

    #[test]
    fn scripted_drafts_change_nothing_wherever_the_text_stops(
        seed in 0_u64..1_000_000, length in 1_usize..9, stop_at in 0_usize..40,
    ) {
        let target = target("llama", 16, (2, 2), seed);
        let prompt = prompt(9, seed);
        let mut options = options(40);
        options.shape = longdraft_decode::DraftShape::Chain { length };
        let truth = generate(&target, None, &prompt, &options).tokens;
        // A stop token that first appears at some position of the text.
        options.stop_tokens = vec![truth[stop_at]];
        let plain = generate(&target, None, &prompt, &options);
        for script in SCRIPTS {
            let drafter = Scripted::new(&truth, prompt.len(), script);
            let drafted = generate(&target, Some(Box::new(drafter)), &prompt, &options);
            prop_assert_eq!(&plain.tokens, &drafted.tokens);
            prop_assert_eq!(plain.end, drafted.end);
        }
    }
}

/// Whether proposal i of a round is right.
type Script = fn(usize, usize) -> bool;

const SCRIPTS: [Script; 4] =
    [|_, _| true, |_, _| false, |round, _| round % 2 == 0, |round, i| (round + i) % 3 != 0];

/// Replays the target's own output, right, wrong or in turns, in the last of three branches.
struct Scripted {
    truth: Vec<TargetTokenId>,
    prompt: usize,
    right: Script,
    rounds: usize,
}

impl Scripted {
    fn new(truth: &[TargetTokenId], prompt: usize, right: Script) -> Self {
        Self { truth: truth.to_vec(), prompt, right, rounds: 0 }
    }
}

impl Drafter for Scripted {
    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        self.rounds += 1;
        let done = context.tokens.len() - self.prompt;
        let chain = |right: &dyn Fn(usize) -> bool| -> Vec<TargetTokenId> {
            let token = |i: usize| {
                let truth = self.truth.get(done + i).map_or(0, |token| token.0);
                TargetTokenId(if right(i) { truth } else { (truth + 1) % VOCABULARY as u32 })
            };
            (0..plan.shape.depth()).map(token).collect()
        };
        let mut tree = Tree::new(context.tokens[context.tokens.len() - 1]);
        if self.rounds.is_multiple_of(2) {
            tree.insert_chain(&chain(&|i| i == 1), Origin::Lookup);
            tree.insert_chain(&chain(&|_| false), Origin::Lookup);
        }
        tree.insert_chain(&chain(&|i| (self.right)(self.rounds, i)), Origin::Draft);
        Ok(tree)
    }
}

#[test]
fn an_oracle_reaches_the_longest_acceptance_and_a_liar_none() {
    let target = target("qwen3", 32, (2, 2), 5);
    let prompt = prompt(20, 5);
    let options = options(51);
    let truth = generate(&target, None, &prompt, &options).tokens;
    let run = |right| {
        let script = Scripted::new(&truth, prompt.len(), right);
        generate(&target, Some(Box::new(script)), &prompt, &options).metrics
    };
    assert!((run(|_, _| true).acceptance_length() - 5.0).abs() < 1e-12);
    // The branches beside it are right in their second place only: never reached.
    assert!((run(|_, _| false).acceptance_length() - 1.0).abs() < 1e-12);
}

#[test]
fn a_prompt_longer_than_windows_changes_nothing() {
    for (family, length, kind, shape) in [
        ("llama", 511, Kind::Glide, 1),
        ("llama", 513, Kind::Eagle3, 4),
        ("llama", 800, Kind::MergedEagle3, 5),
        ("llama", 800, Kind::Glide, 4),
        ("gemma2", 250, Kind::Glide, 4),
        ("gemma3_text", 250, Kind::MergedEagle3, 5),
        ("mistral", 505, Kind::Eagle3, 4),
    ] {
        let (target, drafts) = with_drafts(family, 16, (2, 2), 8);
        let prompt = prompt(length, 8);
        let mut options = options(64);
        let plain = generate(&target, None, &prompt, &options);
        options.shape = shapes()[shape].clone();
        let drafted = generate(&target, Some(drafter(kind, &target, &drafts)), &prompt, &options);
        assert_eq!(plain.tokens, drafted.tokens, "{kind:?} {length}");
    }
}
