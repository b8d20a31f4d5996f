//! How likely the target itself finds a token, for those who ask.

use longdraft_kernels::log_sum_exp::row_log_sum_exp;
use longdraft_models::TargetTokenId;

/// Log-probabilities at one place of a text: of the target's own softmax, before bias, penalties,
/// temperature and truncation.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbs {
    /// That of the committed token, in nats.
    pub own: f32,
    /// The most likely tokens with theirs, best first, ties to the lower token.
    pub top: Vec<(TargetTokenId, f32)>,
}

impl LogProbs {
    /// Of `token` and of the `count` most likely ones by the target's logits `[V]`.
    pub fn of(token: TargetTokenId, logits: &[f32], count: usize) -> Self {
        let total = row_log_sum_exp(logits) as f32;
        let of = |token: TargetTokenId| {
            logits.get(token.0 as usize).map_or(f32::NEG_INFINITY, |logit| logit - total)
        };
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_logit =
            |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let count = count.min(order.len());
        if (1..order.len()).contains(&count) {
            order.select_nth_unstable_by(count - 1, by_logit);
        }
        order.truncate(count);
        order.sort_unstable_by(by_logit);
        let top = order.into_iter().map(|id| (TargetTokenId(id), of(TargetTokenId(id))));
        Self { own: of(token), top: top.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_and_come_in_order() {
        let logits = [0.5, 2.0, -1.0, 2.0, 0.0];
        for count in 0..=6 {
            let found = LogProbs::of(TargetTokenId(2), &logits, count);
            let order: Vec<u32> = found.top.iter().map(|(token, _)| token.0).collect();
            assert_eq!(order, &[1, 3, 0, 4, 2][..count.min(5)]);
            if count >= 5 {
                let total: f32 = found.top.iter().map(|(_, log_prob)| log_prob.exp()).sum();
                assert!((total - 1.0).abs() < 1e-6, "{total}");
                assert!((found.own - found.top[4].1).abs() < 1e-12);
            }
        }
        assert!(LogProbs::of(TargetTokenId(9), &logits, 0).own.is_infinite());
    }
}
