//! How likely nodes are, and which children of theirs are the best.

use std::sync::Arc;

use longdraft_kernels::log_sum_exp::row_log_sum_exp;
use longdraft_models::TargetTokenId;

use crate::distribution::argmax;
use crate::drafter::{DraftModel, Forecast, Logits, Worth};

/// How likely a path is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Likelihood {
    /// Its log-probability under the draft.
    pub(super) log_prob: f32,
    /// The draft's chance that the target keeps it.
    pub(super) chance: f64,
}

impl Likelihood {
    /// That of the root.
    pub(super) const CERTAIN: Self = Self { log_prob: 0.0, chance: 1.0 };
}

/// A node that what follows it was asked for.
pub(super) struct Expandable {
    /// Row in the tree.
    pub(super) row: usize,
    pub(super) path: Likelihood,
    pub(super) forecast: Forecast,
}

/// A possible child.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    /// Index among the expandable nodes.
    pub(super) of: usize,
    pub(super) token: TargetTokenId,
    pub(super) path: Likelihood,
}

/// Log-probabilities of some children of a node, best first.
type Children = Arc<Vec<(TargetTokenId, f32)>>;

/// An expandable node with its best children.
pub(super) struct Scored {
    path: Likelihood,
    confidence: Option<f64>,
    children: Children,
}

/// Nodes of a level with their `count` best children each, none where the draft's confidence is below
/// `threshold`. Nodes that share logits are looked through once.
pub(super) fn score(
    model: &dyn DraftModel,
    nodes: &[Expandable],
    count: usize,
    threshold: f64,
) -> Vec<Scored> {
    let mut last: Option<(&Arc<Vec<f32>>, Children)> = None;
    let scored = nodes.iter().map(|node| {
        let Forecast { logits, confidence } = &node.forecast;
        let children = match logits {
            _ if confidence.is_some_and(|confidence| confidence < threshold) => Children::default(),
            Logits::All(values) => match &last {
                Some((shared, children)) if Arc::ptr_eq(shared, values) => Arc::clone(children),
                _ => {
                    let children = Arc::new(children(model, logits, count));
                    last = Some((values, Arc::clone(&children)));
                    children
                }
            },
            Logits::Some { .. } => Arc::new(children(model, logits, count)),
        };
        Scored { path: node.path, confidence: *confidence, children }
    });
    scored.collect()
}

/// The `count` best pairs over all nodes, of at most `each` children a node: by cumulative
/// log-probability, ties to the earlier node, then the lower token.
pub(super) fn best(nodes: &[Scored], each: usize, count: usize) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    for (of, Scored { path, confidence, children }) in nodes.iter().enumerate() {
        let first = children.first().map_or(0.0, |(_, log_prob)| *log_prob);
        let candidates = children.iter().take(each).enumerate();
        all.extend(candidates.map(|(place, &(token, log_prob))| {
            let (own, first) = (f64::from(log_prob).exp(), f64::from(first).exp());
            let chance = path.chance * chance_of(*confidence, place, own, first);
            let path = Likelihood { log_prob: path.log_prob + log_prob, chance };
            Candidate { of, token, path }
        }));
    }
    all.sort_by(|a, b| {
        b.path.log_prob.total_cmp(&a.path.log_prob).then((a.of, a.token).cmp(&(b.of, b.token)))
    });
    all.truncate(count);
    all
}

/// Chance that the target keeps a token: the child at `place` of a node, whose draft gives it the
/// probability `own` and the first child `first`.
///
/// What the draft is sure of is its first proposal; the rest is left to the others, in proportion to
/// their probabilities.
pub(super) fn chance_of(confidence: Option<f64>, place: usize, own: f64, first: f64) -> f64 {
    match confidence {
        None => own,
        Some(confidence) if place == 0 => confidence,
        Some(confidence) if first < 1.0 => (1.0 - confidence) * (own / (1.0 - first)).min(1.0),
        Some(_) => 0.0,
    }
}

impl Worth {
    /// Whether a path that the draft gives a chance pays its row.
    pub(super) fn pays(&self, chance: f64) -> bool {
        self.expected(chance) >= self.node
    }

    /// Expected chance that a path is accepted.
    pub(super) fn expected(&self, chance: f64) -> f64 {
        (self.calibration * chance).min(1.0)
    }
}

/// The `count` most likely tokens with their log-probabilities, ties to the lower column, or of some columns to
/// the one that is named first.
fn children(model: &dyn DraftModel, logits: &Logits, count: usize) -> Vec<(TargetTokenId, f32)> {
    let (mut largest, values): (Vec<u32>, &[f32]) = match logits {
        Logits::All(values) if count == 1 => (vec![argmax(values).0], values),
        Logits::All(values) => (largest(values, count), values),
        Logits::Some { values, .. } => (largest(values, count), values),
    };
    let log_total = row_log_sum_exp(values) as f32;
    // NaN has no order: such a draft proposes nothing.
    if !log_total.is_finite() {
        return Vec::new();
    }
    largest.retain(|at| values[*at as usize] > f32::NEG_INFINITY);
    let child = |at: u32| {
        let column = match logits {
            Logits::All(_) => at,
            Logits::Some { columns, .. } => columns[at as usize],
        };
        let token =
            model.vocabulary().map_or(TargetTokenId(column), |map| map.kept()[column as usize]);
        // Rounding must not let a path grow likelier.
        (token, (values[at as usize] - log_total).min(0.0))
    };
    largest.into_iter().map(child).collect()
}

/// Places of the `count` largest values, largest first, ties to the lower place. NaN is no value.
fn largest(values: &[f32], count: usize) -> Vec<u32> {
    let mut best: Vec<(f32, u32)> = Vec::with_capacity(count.min(values.len()) + 1);
    for (place, value) in values.iter().enumerate() {
        let is_among = match best.last() {
            Some(last) if best.len() >= count => *value > last.0,
            _ => !value.is_nan() && count > 0,
        };
        // Few values come this far, so that inserting them costs little.
        if is_among {
            let at = best.partition_point(|(other, _)| other >= value);
            best.insert(at, (*value, place as u32));
            best.truncate(count);
        }
    }
    best.into_iter().map(|(_, place)| place).collect()
}

#[cfg(test)]
mod tests {
    use longdraft_kernels::random::CounterRng;

    use super::*;

    #[test]
    fn the_largest_come_in_order_and_ties_go_to_the_lower_place() {
        let mut rng = CounterRng::new(1, "values", &[]);
        for size in [0, 1, 5, 200] {
            let values: Vec<f32> = (0..size).map(|_| rng.below(40) as f32).collect();
            let mut order: Vec<u32> = (0..size).collect();
            order.sort_by(|a, b| {
                let value = |at: &u32| values[*at as usize];
                value(b).total_cmp(&value(a)).then(a.cmp(b))
            });
            for count in [0, 1, 3, 50, 500] {
                let wanted = &order[..count.min(order.len())];
                assert_eq!(largest(&values, count), wanted, "{count} of {size}");
            }
        }
        assert_eq!(largest(&[f32::NAN, 1.0, f32::NEG_INFINITY, f32::NAN], 3), [1, 2]);
    }

    #[test]
    fn a_confidence_is_shared_out_and_never_exceeded() {
        let probabilities = [0.5, 0.3, 0.2];
        for confidence in [0.0, 0.4, 1.0] {
            let chance = |place| chance_of(Some(confidence), place, probabilities[place], 0.5);
            assert!((chance(0) - confidence).abs() < 1e-12);
            assert!((chance(0) + chance(1) + chance(2) - 1.0).abs() < 1e-12);
            assert!(chance(1) >= chance(2));
        }
        assert!((chance_of(None, 1, 0.3, 0.5) - 0.3).abs() < 1e-12);
        assert!(chance_of(Some(0.2), 1, 0.0, 1.0).abs() < 1e-12);
    }
}
