//! The suite catches wrong verifiers: their committed distributions, enumerated, differ from the
//! target's by what theory says.

use longdraft_decode::Tree;
use longdraft_decode::distribution::normalise;
use longdraft_decode::draws::{Draws, Place, Purpose};
use longdraft_models::TargetTokenId;

use crate::enumeration::{P, Q, drawn_children, one_node};

const AT: Place = Place { purpose: Purpose::Accept, round: 0, row: 0, child: 0 };

fn tokens(tree: &Tree) -> Vec<usize> {
    tree.children(0).map(|(_, node)| node.token.0 as usize).collect()
}

fn chain_of(token: usize) -> Tree {
    Tree::chain(TargetTokenId(0), &[TargetTokenId(token as u32)])
}

/// `(P − Q)₊`, normalised.
fn rest(p: &[f64], q: &[f64]) -> Vec<f64> {
    let mut rest: Vec<f64> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
    normalise(&mut rest);
    rest
}

/// The ratio test of one child after another, with the draft's distribution as `q` says.
fn ratio(children: &[usize], q: &[f64], remove: bool, draws: &mut dyn Draws) -> (bool, u32) {
    let (mut p, mut q) = (P.to_vec(), q.to_vec());
    for &x in children {
        if draws.accepts(AT, p[x], q[x]) {
            return (true, x as u32);
        }
        p = rest(&p, &q);
        if remove {
            q[x] = 0.0;
            normalise(&mut q);
        }
    }
    (false, draws.choose(AT, &p) as u32)
}

fn distance(distribution: &[f64; 5]) -> f64 {
    distribution.iter().zip(P).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0
}

fn assert_distribution((_, distribution): (f64, [f64; 5]), expected: [f64; 5]) {
    for (a, b) in distribution.iter().zip(expected) {
        assert!((a - b).abs() < 1e-6, "{distribution:?}");
    }
    assert!(distance(&distribution) > 0.02, "{distribution:?} is not caught");
}

#[test]
fn a_residual_drawn_from_the_target_is_caught() {
    let judge = |tree: &Tree, draws: &mut dyn Draws| {
        let x = tokens(tree)[0];
        if draws.accepts(AT, P[x], Q[x]) {
            (true, x as u32)
        } else {
            (false, draws.choose(AT, &P) as u32)
        }
    };
    let distribution = one_node(|draws| drawn_children(1, draws), judge);
    assert_distribution(distribution, [0.33, 0.145, 0.3125, 0.0725, 0.14]);
}

#[test]
fn an_arg_max_tested_with_the_soft_distribution_is_caught() {
    let judge = |tree: &Tree, draws: &mut dyn Draws| ratio(&tokens(tree), &Q, true, draws);
    assert_distribution(
        one_node(|_| chain_of(1), judge),
        [0.396_825, 0.285_714, 0.079_365, 0.0, 0.238_095],
    );
}

#[test]
fn a_distribution_of_another_temperature_is_caught() {
    let mut sharper: Vec<f64> = Q.iter().map(|q| q * q).collect();
    normalise(&mut sharper);
    let propose = |draws: &mut dyn Draws| chain_of(draws.choose(AT, &sharper));
    let judge = |tree: &Tree, draws: &mut dyn Draws| ratio(&tokens(tree), &Q, true, draws);
    assert_distribution(one_node(propose, judge), [0.395_556, 0.14, 0.221_111, 0.05, 0.193_333]);
}

#[test]
fn a_token_dropped_after_its_draw_is_caught() {
    let judge = |tree: &Tree, draws: &mut dyn Draws| {
        let kept: Vec<usize> = tokens(tree).into_iter().filter(|x| Q[*x] >= 0.2).collect();
        ratio(&kept, &Q, true, draws)
    };
    let distribution = one_node(|draws| drawn_children(1, draws), judge);
    assert_distribution(distribution, [0.33, 0.12, 0.30, 0.06, 0.19]);
}

#[test]
fn children_tested_by_score_are_caught() {
    let judge = |tree: &Tree, draws: &mut dyn Draws| {
        let mut children = tokens(tree);
        children.sort_by(|a, b| Q[*b].total_cmp(&Q[*a]));
        ratio(&children, &Q, true, draws)
    };
    let distribution = one_node(|draws| drawn_children(2, draws), judge);
    assert_distribution(distribution, [0.378_346, 0.181_244, 0.189_223, 0.050_622, 0.200_566]);
}

#[test]
fn a_distribution_that_is_not_updated_is_caught() {
    let judge = |tree: &Tree, draws: &mut dyn Draws| ratio(&tokens(tree), &Q, false, draws);
    let distribution = one_node(|draws| drawn_children(2, draws), judge);
    assert_distribution(distribution, [0.393_327, 0.10, 0.272_365, 0.05, 0.184_309]);
}

#[test]
fn the_best_tokens_treated_as_drawn_are_caught() {
    let judge = |_: &Tree, draws: &mut dyn Draws| ratio(&[1, 3], &Q, false, draws);
    assert_distribution(
        one_node(|_| chain_of(1), judge),
        [0.420_507, 0.285_714, 0.0, 0.0, 0.293_779],
    );
}

#[test]
fn probabilities_by_node_number_are_caught() {
    // Row 1 of the tree is read as token 1.
    let judge = |tree: &Tree, draws: &mut dyn Draws| {
        let x = tokens(tree)[0];
        if draws.accepts(AT, P[1], Q[1]) {
            return (true, x as u32);
        }
        (false, draws.choose(AT, &rest(&P, &Q)) as u32)
    };
    let (_, distribution) = one_node(|draws| drawn_children(1, draws), judge);
    assert!(distance(&distribution) > 0.02, "{distribution:?}");
}
