//! The exact distribution of what is committed, by going through every outcome of every draw.
//! Drafting and verification are the ones of production; only the source of randomness is replaced.

mod cases;

use std::collections::BTreeMap;

use longdraft_decode::distribution::normalise;
use longdraft_decode::drafter::{Plan, grow};
use longdraft_decode::draws::{Draws, Place};
use longdraft_decode::tree::Distribution;
use longdraft_decode::verifier::test_children;
use longdraft_decode::{DraftShape, Origin, Sampling, Tree};
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;

/// Goes through outcomes: follows a script, then takes the first possible branch.
#[derive(Default)]
pub(crate) struct Outcomes {
    /// Chance of each branch and the branch that is taken, draw by draw.
    script: Vec<(Vec<f64>, usize)>,
    at: usize,
}

impl Outcomes {
    fn branch(&mut self, chances: Vec<f64>) -> usize {
        if self.at == self.script.len() {
            let first = chances.iter().position(|c| *c > 0.0).unwrap_or(0);
            self.script.push((chances, first));
        }
        self.at += 1;
        self.script[self.at - 1].1
    }

    fn weight(&self) -> f64 {
        self.script.iter().map(|(chances, taken)| chances[*taken]).product()
    }

    /// Moves to the next outcome; false after the last one.
    fn advance(&mut self) -> bool {
        self.at = 0;
        while let Some((chances, taken)) = self.script.pop() {
            if let Some(next) = (taken + 1..chances.len()).find(|i| chances[*i] > 0.0) {
                self.script.push((chances, next));
                return true;
            }
        }
        false
    }
}

impl Draws for Outcomes {
    fn accepts(&mut self, _: Place, p: f64, q: f64) -> bool {
        let chance = if p <= 0.0 { 0.0 } else { (p / q).min(1.0) };
        self.branch(vec![1.0 - chance, chance]) == 1
    }

    fn choose(&mut self, _: Place, weights: &[f64]) -> usize {
        let total: f64 = weights.iter().sum();
        self.branch(weights.iter().map(|w| w / total).collect())
    }
}

/// The distribution of `outcome` over all draws.
pub(crate) fn distribution_of<T: Ord>(
    mut outcome: impl FnMut(&mut dyn Draws) -> T,
) -> BTreeMap<T, f64> {
    let mut distribution = BTreeMap::new();
    let mut outcomes = Outcomes::default();
    loop {
        let result = outcome(&mut outcomes);
        *distribution.entry(result).or_insert(0.0) += outcomes.weight();
        if !outcomes.advance() {
            return distribution;
        }
    }
}

/// Logits that depend on the text in an arbitrary way; some tokens are impossible.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) seed: u64,
    pub(crate) vocabulary: usize,
    pub(crate) holes: bool,
}

impl Table {
    pub(crate) fn logits(&self, text: &[u32]) -> Vec<f32> {
        let key: Vec<u64> = text.iter().map(|id| u64::from(*id)).collect();
        let mut rng = CounterRng::new(self.seed, "table", &key);
        let spread = [0.3, 1.0, 3.0][rng.below(3) as usize];
        let mut logits: Vec<f32> =
            (0..self.vocabulary).map(|_| (rng.normal() * spread) as f32).collect();
        if self.holes && rng.uniform() < 0.4 {
            logits[rng.below(self.vocabulary as u64) as usize] = f32::NEG_INFINITY;
        }
        logits
    }
}

/// Largest difference between the distribution of the first `length` tokens after token 0 and the
/// target's, when a round after a text commits what `round` says.
pub(crate) fn error(
    length: usize,
    mut round: impl FnMut(&[u32]) -> BTreeMap<Vec<u32>, f64>,
    of_target: impl Fn(&[u32]) -> Vec<f64>,
) -> f64 {
    let mut open = BTreeMap::from([(vec![0_u32], 1.0)]);
    let mut done: BTreeMap<Vec<u32>, f64> = BTreeMap::new();
    while let Some((text, weight)) = open.pop_first() {
        for (committed, chance) in round(&text) {
            let mut longer = text.clone();
            longer.extend(committed);
            let distribution = if longer.len() > length { &mut done } else { &mut open };
            longer.truncate(length + 1);
            *distribution.entry(longer).or_insert(0.0) += weight * chance;
        }
    }
    let target = |text: &[u32]| {
        (1..text.len()).map(|i| of_target(&text[..i])[text[i] as usize]).product::<f64>()
    };
    let total: f64 = done.values().sum();
    let worst = done.iter().map(|(text, weight)| (weight - target(text)).abs());
    worst.fold((total - 1.0).abs(), f64::max)
}

/// Text at a row of a tree below the last of `tokens`.
pub(crate) fn path_text(tokens: &[TargetTokenId], tree: &Tree, row: usize) -> Vec<u32> {
    tokens.iter().copied().chain(tree.path(row)).map(|token| token.0).collect()
}

pub(crate) const P: [f64; 5] = [0.40, 0.10, 0.25, 0.05, 0.20];
pub(crate) const Q: [f64; 5] = [0.15, 0.35, 0.20, 0.25, 0.05];

/// Acceptance and committed distribution when `children` are proposed below one node.
pub(crate) fn one_node(
    mut propose: impl FnMut(&mut dyn Draws) -> Tree,
    mut judge: impl FnMut(&Tree, &mut dyn Draws) -> (bool, u32),
) -> (f64, [f64; 5]) {
    let distribution = distribution_of(|draws| {
        let tree = propose(draws);
        judge(&tree, draws)
    });
    let (mut accepted, mut committed) = (0.0, [0.0; 5]);
    for ((accepts, token), chance) in distribution {
        accepted += if accepts { chance } else { 0.0 };
        committed[token as usize] += chance;
    }
    (accepted, committed)
}

/// A node with children drawn from Q.
pub(crate) fn drawn_children(count: usize, draws: &mut dyn Draws) -> Tree {
    let mut tree = Tree::new(TargetTokenId(0));
    tree.set_distribution(0, std::sync::Arc::new(Distribution::of(&Q)));
    let sampling = Sampling::at(1.0);
    let shape = DraftShape::Sampled { children: vec![count] };
    let mut plan = Plan { drawn: true, position: 0, ..Plan::filling(&shape, &sampling, draws) };
    for token in grow::draw_children(&Q, count, 0, &mut plan) {
        tree.push_drawn(0, token, 0.0);
    }
    tree
}

pub(crate) fn production(tree: &Tree, draws: &mut dyn Draws) -> (bool, u32) {
    let outcome = test_children(tree, 0, P.to_vec(), 0, draws);
    assert!(!outcome.fell_back);
    (outcome.accepted.is_some(), outcome.token.0)
}

#[test]
fn the_reference_case_is_accepted_as_often_as_it_should() {
    let near = |(accepted, distribution): (f64, [f64; 5]), expected: f64| {
        assert!((accepted - expected).abs() < 1e-12, "{accepted} {expected}");
        distribution
            .iter()
            .zip(P)
            .for_each(|(a, b)| assert!((a - b).abs() < 1e-12, "{distribution:?}"));
    };
    let without = [0.55, 712.0 / 975.0, 1_988_003.0 / 2_316_600.0, 0.95, 1.0];
    for (count, expected) in (1..).zip(without) {
        near(one_node(|draws| drawn_children(count, draws), production), expected);
    }
    for (children, expected) in [(&[1][..], 0.10), (&[1, 3], 0.15), (&[1, 3, 2], 0.40)] {
        let tree = |_: &mut dyn Draws| {
            let mut tree = Tree::new(TargetTokenId(0));
            for child in children {
                tree.push(0, TargetTokenId(*child), 0.0, Origin::Draft);
            }
            tree
        };
        near(one_node(tree, production), expected);
        // Testing point masses one by one equals one draw of the target.
        let by_match = |tree: &Tree, draws: &mut dyn Draws| {
            let place = longdraft_decode::draws::Purpose::Token;
            let token =
                draws.choose(Place { purpose: place, round: 0, row: 0, child: 0 }, &P) as u32;
            (tree.child(0, TargetTokenId(token)).is_some(), token)
        };
        near(one_node(tree, by_match), expected);
    }
    let mut residual: Vec<f64> = P.iter().zip(Q).map(|(p, q)| (p - q).max(0.0)).collect();
    assert!((normalise(&mut residual) - 0.45).abs() < 1e-12);
}
