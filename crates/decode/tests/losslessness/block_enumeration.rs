//! The exact distribution of what is committed with the proposals of real block drafts, whose depth
//! their confidence decides.

use std::cell::RefCell;
use std::collections::BTreeMap;

use longdraft_decode::drafter::{
    Asked, Beside, BlockDraftModel, DraftContext, DraftModel, Drafter, Forecast, ModelDrafter,
    Plan, Reading, Turn,
};
use longdraft_decode::verifier::Verifier;
use longdraft_decode::{DraftShape, Result, Sampling, VerifyRule};
use longdraft_models::draft::VocabularyMap;
use longdraft_models::draft::block::{
    BlockConfig, BlockDraft, ChainKind, ChainSizes, SelectorSizes,
};
use longdraft_models::target_model::{Features, Tap, Taps, Target, TargetOptions};
use longdraft_models::{TargetConfig, TargetTokenId};
use serde_json::json;

use crate::enumeration::{Table, distribution_of, error, path_text};
use crate::models::{randomised, with_own_head};

const VOCABULARY: usize = 4;

/// A target whose states a draft reads; what it would say itself plays no part.
fn small_target(seed: u64) -> Target {
    let config = json!({
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "initializer_range": 0.5
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    Target::random(config, seed, &TargetOptions::default()).expect("target")
}

type Levels = Vec<Vec<Reading>>;

/// Reads once for all outcomes of a round that begin alike.
struct Once<'a> {
    model: BlockDraftModel<'a>,
    depth: usize,
    /// The levels of this outcome after the root.
    levels: Levels,
    /// What was said after the last of such levels.
    known: Vec<(Levels, Vec<Vec<Forecast>>)>,
}

impl<'a> Once<'a> {
    fn new(model: BlockDraftModel<'a>) -> Self {
        Self { model, depth: 0, levels: Vec::new(), known: Vec::new() }
    }
}

impl DraftModel for Once<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.model.taps()
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.model.vocabulary()
    }

    fn block_len(&self) -> Option<usize> {
        self.model.block_len()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.model.begin(kept)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.model.observe(tokens, features)
    }

    fn read(&mut self, turn: Turn<'_>, _: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        match turn.asked {
            Asked::Root { depth, .. } => {
                self.depth = depth;
                self.levels.clear();
            }
            Asked::After { readings, .. } => self.levels.push(readings.to_vec()),
        }
        if let Some((_, said)) = self.known.iter().find(|(levels, _)| *levels == self.levels) {
            return Ok(said.clone());
        }
        // The model goes on from the level before alone.
        let (context, asked) = (turn.context, Asked::Root { depth: self.depth, room: 0 });
        let mut said = self.model.read(Turn { context, asked }, &mut [])?;
        for (level, readings) in (1..).zip(&self.levels) {
            let asked = Asked::After { level, readings };
            said = self.model.read(Turn { context, asked }, &mut [])?;
        }
        self.known.push((self.levels.clone(), said.clone()));
        Ok(said)
    }
}

/// What rounds commit after a text, and how deep they proposed.
struct Rounds<'a> {
    target: &'a Target,
    draft: &'a BlockDraft,
    verified: Table,
    shape: DraftShape,
    threshold: f64,
    depths: RefCell<Vec<usize>>,
}

impl Rounds<'_> {
    fn distribution(&self, text: &[u32]) -> BTreeMap<Vec<u32>, f64> {
        let tokens: Vec<TargetTokenId> = text.iter().map(|id| TargetTokenId(*id)).collect();
        let mut cache = self.target.new_cache().expect("cache");
        let model = BlockDraftModel::new(self.draft, self.target).expect("model");
        let mut drafter = ModelDrafter::new(Once::new(model));
        drafter.begin(0).expect("begin");
        let seen = &text[..text.len() - 1];
        if !seen.is_empty() {
            let positions: Vec<u32> = (0..seen.len() as u32).collect();
            let taps = Taps::of(&drafter.taps());
            let features = self.target.extend(seen, &positions, &mut cache, &taps).expect("pass");
            drafter.observe(&tokens, &features).expect("observed");
        }
        let sampling = Sampling::at(1.0);
        let verifier = Verifier { sampling: sampling.clone(), rule: VerifyRule::Ratio };
        distribution_of(|draws| {
            let mut plan = Plan {
                drawn: true,
                confidence_threshold: self.threshold,
                ..Plan::filling(&self.shape, &sampling, draws)
            };
            let context = DraftContext { target: self.target, cache: &cache, tokens: &tokens };
            let tree = drafter.propose(context, &mut plan).expect("tree");
            self.depths.borrow_mut().push(tree.depth());
            let logits: Vec<Vec<f32>> = (0..tree.rows())
                .map(|row| self.verified.logits(&path_text(&tokens, &tree, row)))
                .collect();
            let position = tokens.len() as u64;
            let verdict = verifier.verify(&tree, &logits, position, plan.draws).expect("verdict");
            assert_eq!(verdict.residual_fallbacks, 0);
            let path = verdict.path.iter().map(|row| tree.token(*row).0);
            path.chain([verdict.next.0]).collect()
        })
    }
}

fn check(config: &BlockConfig, target: &Target, shape: &DraftShape, threshold: f64) -> Vec<usize> {
    check_each(config, target, shape, threshold, |draft| draft)
}

/// The same of what becomes of each random draft.
fn check_each(
    config: &BlockConfig,
    target: &Target,
    shape: &DraftShape,
    threshold: f64,
    change: impl Fn(BlockDraft) -> BlockDraft,
) -> Vec<usize> {
    let mut depths = Vec::new();
    for seed in 0..4 {
        let draft = change(randomised(config, target, seed));
        let verified = Table { seed, vocabulary: VOCABULARY, holes: seed % 2 == 1 };
        let shape = shape.clone();
        let draft = &draft;
        let rounds =
            Rounds { target, draft, verified, shape, threshold, depths: RefCell::default() };
        let of_target = |text: &[u32]| {
            Sampling::at(1.0).distribution(&verified.logits(text)).expect("distribution")
        };
        let error = error(2, |text| rounds.distribution(text), of_target);
        assert!(error < 1e-12, "{:?} {seed}: {error:e}", config.chain);
        depths.extend(rounds.depths.take());
    }
    depths
}

#[test]
fn chains_cut_by_confidence_and_restricted_candidates_follow_the_distribution() {
    let target = small_target(3);
    let chain = DraftShape::Chain { length: 3 };
    let siblings = DraftShape::Sampled { children: vec![2, 1] };
    let plain = BlockConfig {
        initializer_range: 0.5,
        ..BlockConfig::for_target(target.config(), 1, 3, VOCABULARY as u32 - 1)
    };
    for shape in [&chain, &siblings] {
        let depths = [ChainKind::Vanilla, ChainKind::Gated, ChainKind::Rnn].map(|kind| {
            let sizes = ChainSizes { rank: 3, kind, confidence: Some(true) };
            check(&BlockConfig { chain: Some(sizes), ..plain.clone() }, &target, shape, 0.5)
        });
        // Some rounds are plain steps, some are cut, some are not.
        let depths = depths.concat();
        assert!((0..=shape.depth()).all(|depth| depths.contains(&depth)), "{shape:?}: {depths:?}");
    }
    // Heads of their own propose three of four tokens.
    let kept = [0, 2, 3].map(TargetTokenId).to_vec();
    let map = VocabularyMap::new(kept, VOCABULARY).expect("map");
    let sizes = ChainSizes { rank: 3, kind: ChainKind::Vanilla, confidence: None };
    for sizes in [None, Some(sizes)] {
        let config = BlockConfig { chain: sizes, ..plain.clone() };
        check_each(&config, &target, &chain, 0.0, |draft| with_own_head(&draft, &target, &map));
    }
    let selector = Some(SelectorSizes { rank: 3, top_k: 2 });
    let config = BlockConfig { selector, ..plain };
    for shape in [&chain, &siblings] {
        let depths = check(&config, &target, shape, 0.0);
        assert!(depths.iter().all(|depth| *depth == 2));
    }
}
