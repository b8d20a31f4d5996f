//! Blocks of tokens that a model proposes in one pass.

use longdraft_decode::drafter::{
    Asked, Beside, Chosen, DraftContext, DraftModel, Drafted, Drafter, Forecast, Logits,
    LookupChances, MatchClass, ModelDrafter, Plan, Turn, Worth,
};
use longdraft_decode::draws::CounterDraws;
use longdraft_decode::{DraftShape, Pacing, Result, Sampling, Tree, VerifyRule};
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;

use crate::answers::{generate, options, prompt};
use crate::models::{VOCABULARY, shapes, target};

const BLOCK: usize = 5;

/// Logits that depend on the root's place, the depth and the token before.
#[derive(Default)]
struct Table {
    root: usize,
    depth: usize,
}

impl DraftModel for Table {
    fn block_len(&self) -> Option<usize> {
        Some(BLOCK)
    }

    fn read(&mut self, turn: Turn<'_>, _: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        if let Asked::Root { depth, .. } = turn.asked {
            (self.root, self.depth) = (turn.context.tokens.len(), depth);
        }
        let slot = turn.asked.level();
        assert!(slot < self.depth, "{slot} of {}", self.depth);
        let forecast = |chosen: &Chosen| {
            let key = [self.root as u64, slot as u64, u64::from(chosen.token.0)];
            let mut rng = CounterRng::new(5, "block", &key);
            let logits = (0..VOCABULARY).map(|_| (2.0 * rng.normal()) as f32);
            Forecast::from(logits.collect::<Vec<_>>())
        };
        Ok(vec![turn.chosen().iter().map(forecast).collect()])
    }
}

#[test]
fn a_block_changes_no_token() {
    let target = target("llama", 16, (2, 2), 72);
    let prompt = prompt(9, 3);
    for (temperature, pacing) in [
        (0.0, Pacing::Fixed),
        (0.0, Pacing::Measured),
        (0.8, Pacing::Fixed),
        (0.8, Pacing::Measured),
    ] {
        let mut options = options(40);
        options.sampling = Sampling { temperature, ..Sampling::default() };
        options.rule = VerifyRule::Match;
        let plain = generate(&target, None, &prompt, &options);
        options.pacing = pacing;
        for shape in shapes() {
            options.shape = shape.clone();
            let drafter = Box::new(ModelDrafter::new(Table::default()));
            let drafted = generate(&target, Some(drafter), &prompt, &options);
            assert_eq!(plain.tokens, drafted.tokens, "{shape:?} at {temperature}");
        }
    }
}

#[test]
fn a_round_is_one_block_and_no_deeper() {
    let target = target("llama", 16, (2, 2), 72);
    let cache = target.new_cache().expect("cache");
    let tokens = prompt(6, 72);
    let mut drafter = ModelDrafter::new(Table::default());
    for (drawn, shape) in [
        (false, DraftShape::Chain { length: 9 }),
        (false, DraftShape::Static { widths: vec![2; 8] }),
        (true, DraftShape::Sampled { children: vec![2, 2, 1, 1, 1, 1, 1] }),
    ] {
        let (sampling, mut draws) = (Sampling::at(1.0), CounterDraws::new(0, &[]));
        let mut plan = Plan { drawn, ..Plan::filling(&shape, &sampling, &mut draws) };
        let context = DraftContext { target: &target, cache: &cache, tokens: &tokens };
        let tree = drafter.propose(context, &mut plan).expect("proposals");
        assert_eq!((tree.depth(), plan.drafted), (BLOCK, Drafted::Block), "{shape:?}");
    }
}

/// Logits `[slots, 5]`, the same after every token or not.
struct Small {
    slots: usize,
    seed: u64,
    depends: bool,
    /// Of every slot, if it tells one.
    confidence: Vec<f64>,
}

impl Small {
    const VOCABULARY: usize = 5;

    fn logits(&self, slot: usize, before: TargetTokenId) -> Vec<f32> {
        let before = if self.depends { u64::from(before.0) } else { 0 };
        let mut rng = CounterRng::new(self.seed, "small", &[slot as u64, before]);
        (0..Self::VOCABULARY).map(|_| (1.5 * rng.normal()) as f32).collect()
    }

    /// Log-probabilities of all paths of at most so many tokens after the root.
    fn paths(&self, root: TargetTokenId) -> Vec<(Vec<TargetTokenId>, f64)> {
        let (mut all, mut level) = (Vec::new(), vec![(Vec::new(), 0.0)]);
        for slot in 0..self.slots {
            let longer = level.iter().flat_map(|(path, log_prob): &(Vec<TargetTokenId>, f64)| {
                let logits = self.logits(slot, path.last().copied().unwrap_or(root));
                let total = logits.iter().map(|z| f64::from(*z).exp()).sum::<f64>().ln();
                logits.into_iter().enumerate().map(move |(token, logit)| {
                    let path = [&path[..], &[TargetTokenId(token as u32)]].concat();
                    (path, log_prob + f64::from(logit) - total)
                })
            });
            level = longer.collect();
            all.extend(level.clone());
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }
}

impl DraftModel for Small {
    fn block_len(&self) -> Option<usize> {
        Some(self.slots)
    }

    fn tells_confidence(&self) -> bool {
        !self.confidence.is_empty()
    }

    fn read(&mut self, turn: Turn<'_>, _: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let (slot, before) = (turn.asked.level(), turn.chosen());
        let confidence = self.confidence.get(slot).copied();
        let forecast = |chosen: &Chosen| {
            let forecast = Forecast::from(self.logits(slot, chosen.token));
            Forecast { confidence, ..forecast }
        };
        if self.depends {
            return Ok(vec![before.iter().map(forecast).collect()]);
        }
        // Shared, as a real model's independent slots are.
        Ok(vec![vec![forecast(&before[0]); before.len()]])
    }
}

fn proposed(
    model: impl DraftModel,
    shape: &DraftShape,
    drawn: bool,
    worth: Option<&Worth>,
) -> Tree {
    let target = target("llama", 16, (1, 1), 72);
    let (cache, tokens) = (target.new_cache().expect("cache"), prompt(3, 72));
    let (sampling, mut draws) = (Sampling::at(1.0), CounterDraws::new(0, &[]));
    let worth = worth.copied();
    let mut plan = Plan { drawn, worth, ..Plan::filling(shape, &sampling, &mut draws) };
    let context = DraftContext { target: &target, cache: &cache, tokens: &tokens };
    ModelDrafter::new(model).propose(context, &mut plan).expect("proposals")
}

/// Candidates of a slot, the likeliest before a selector first, with what the selector makes of them.
struct Candidates(Vec<(u32, f32)>);

impl DraftModel for Candidates {
    fn block_len(&self) -> Option<usize> {
        Some(1)
    }

    fn read(&mut self, turn: Turn<'_>, _: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let (columns, values) = self.0.iter().copied().unzip();
        let forecast = Forecast { logits: Logits::Some { columns, values }, confidence: None };
        Ok(vec![vec![forecast; turn.chosen().len()]])
    }
}

#[test]
fn equal_candidates_are_proposed_in_their_order() {
    for (candidates, wanted) in [
        ([(4, 0.5), (3, 1.0), (1, 1.0)], 3),
        ([(4, 1.0), (3, 1.0), (1, 1.0)], 4),
        ([(4, 0.5), (3, 1.0), (1, 1.5)], 1),
    ] {
        let model = Candidates(candidates.to_vec());
        let tree = proposed(model, &DraftShape::Chain { length: 1 }, false, None);
        assert_eq!(tree.nodes()[0].token, TargetTokenId(wanted), "{candidates:?}");
    }
}

#[test]
fn a_dynamic_tree_of_a_block_is_that_of_its_likeliest_paths() {
    let root = prompt(3, 72)[2];
    for (seed, depends) in [(1, false), (2, false), (3, true), (4, true)] {
        for (slots, budget) in [(1, 3), (3, 1), (3, 7), (3, 40), (3, 154), (3, 300), (5, 60)] {
            let model = Small { slots, seed, depends, confidence: Vec::new() };
            let all = model.paths(root);
            // The width of what is read in other methods bounds nothing here.
            let shape = DraftShape::Dynamic { width: 2, depth: slots, budget };
            let tree = proposed(model, &shape, false, None);
            let mut found: Vec<Vec<TargetTokenId>> =
                (1..tree.rows()).map(|row| path(&tree, row)).collect();
            let mut wanted: Vec<Vec<TargetTokenId>> =
                all.into_iter().take(budget).map(|(path, _)| path).collect();
            found.sort_unstable();
            wanted.sort_unstable();
            assert_eq!(found, wanted, "{seed}: {budget} of {slots} slots");
        }
    }
}

/// Tokens from the root's child to a row.
fn path(tree: &Tree, mut row: usize) -> Vec<TargetTokenId> {
    let mut path = Vec::new();
    while let Some(node) = tree.node(row) {
        path.push(node.token);
        row = node.parent;
    }
    path.reverse();
    path
}

#[test]
fn a_round_verifies_as_many_slots_as_pay_by_what_the_draft_is_sure_of() {
    let lookup = LookupChances::new([[0.5; LookupChances::DEPTHS]; MatchClass::COUNT]);
    let shape = DraftShape::Chain { length: 4 };
    for (confidence, node, wanted) in [
        ([0.9, 0.9, 0.2, 0.9], 0.3, 2),
        ([0.9, 0.9, 0.9, 0.9], 0.3, 4),
        ([0.9, 0.9, 0.9, 0.9], 0.7, 3),
        ([0.2, 0.9, 0.9, 0.9], 0.3, 0),
    ] {
        for drawn in [false, true] {
            let worth = Worth { node, jump: 0.0, level: 0.0, calibration: 1.0, gain: 0.5, lookup };
            let confidence = confidence.to_vec();
            let model = Small { slots: 4, seed: 5, depends: true, confidence: confidence.clone() };
            let tree = proposed(model, &shape, drawn, Some(&worth));
            assert_eq!(tree.len(), wanted, "{confidence:?} {node} {drawn}");
            let mut chance = 1.0;
            for (node, confidence) in tree.nodes().iter().zip(confidence) {
                chance *= confidence;
                assert_eq!(node.chance, Some(chance));
            }
        }
    }
    // Measured acceptance by predicted acceptance scales it.
    let worth = Worth { node: 0.3, jump: 0.0, level: 0.0, calibration: 0.4, gain: 0.5, lookup };
    let confidence = vec![0.9; 4];
    let model = Small { slots: 4, seed: 5, depends: false, confidence };
    assert_eq!(proposed(model, &shape, false, Some(&worth)).len(), 2);
}
