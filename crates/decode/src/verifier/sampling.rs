//! Sampling at a temperature: accept so that the output follows the target's law.
//!
//! Drafters propose one certain chain, so their own law is 1 at the proposal x. Acceptance is then
//! `min(1, p(x) / 1) = p(x)`, and a rejected place is drawn from `(p − q)₊`, which is p without x
//! (Leviathan et al. 2023, algorithm 1). `p = softmax(logits / temperature)`, in f64.

use candle_core::{DType, Tensor};
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;

use super::{Verdict, Verifier};
use crate::error::Result;

/// Verification of a chain by sampling.
#[derive(Debug)]
pub struct SamplingVerifier {
    temperature: f64,
    rng: CounterRng,
}

impl SamplingVerifier {
    /// Samples at `temperature` with draws that follow from `seed` and `key` (which text this is).
    ///
    /// # Panics
    /// - `temperature` is not above 0: that is what [`super::GreedyVerifier`] is for
    pub fn new(temperature: f64, seed: u64, key: &[u64]) -> Self {
        assert!(temperature > 0.0, "a temperature is above 0");
        Self { temperature, rng: CounterRng::new(seed, "sampled token", key) }
    }

    /// Weights proportional to p; the largest is 1.
    fn weights(&self, logits: &[f32]) -> Vec<f64> {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: &f32| {
            let weight = (f64::from(*logit - largest) / self.temperature).exp();
            // NaN never wins.
            if weight.is_nan() { 0.0 } else { weight }
        };
        logits.iter().map(weight).collect()
    }
}

impl Verifier for SamplingVerifier {
    fn verify(&mut self, proposed: &[TargetTokenId], logits: &Tensor) -> Result<Verdict> {
        let rows = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        for (accepted, token) in proposed.iter().enumerate() {
            let mut weights = self.weights(&rows[accepted]);
            let place = token.0 as usize;
            let own = weights.get(place).copied().unwrap_or(0.0);
            let others = weights.iter().sum::<f64>() - own;
            // One draw of two: the proposal, or anything else.
            if others > 0.0 && self.rng.categorical(&[own, others]) == 1 {
                if let Some(weight) = weights.get_mut(place) {
                    *weight = 0.0;
                }
                let next = TargetTokenId(self.rng.categorical(&weights) as u32);
                return Ok(Verdict { accepted, next });
            }
        }
        let weights = self.weights(&rows[proposed.len()]);
        let next = TargetTokenId(self.rng.categorical(&weights) as u32);
        Ok(Verdict { accepted: proposed.len(), next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const LOGITS: [f32; 4] = [1.0, 0.0, 2.0, -30.0];

    /// Shares of the first committed token with and without a proposal.
    fn shares(proposed: Option<u32>) -> Result<Vec<f64>> {
        const DRAWS: usize = 20_000;
        let proposed: Vec<TargetTokenId> = proposed.map(TargetTokenId).into_iter().collect();
        let rows = LOGITS.repeat(proposed.len() + 1);
        let logits = Tensor::from_vec(rows, (proposed.len() + 1, 4), &Device::Cpu)?;
        let mut verifier = SamplingVerifier::new(0.8, 3, &[proposed.len() as u64]);
        let mut counts = vec![0.0; 4];
        for _ in 0..DRAWS {
            let verdict = verifier.verify(&proposed, &logits)?;
            let first = if verdict.accepted > 0 { proposed[0] } else { verdict.next };
            counts[first.0 as usize] += 1.0 / DRAWS as f64;
        }
        Ok(counts)
    }

    #[test]
    fn the_first_token_follows_the_targets_law_whatever_is_proposed() -> Result<()> {
        let weights: Vec<f64> = LOGITS.iter().map(|l| (f64::from(*l) / 0.8).exp()).collect();
        let total: f64 = weights.iter().sum();
        for proposed in [None, Some(0), Some(1), Some(2), Some(3)] {
            for (share, weight) in shares(proposed)?.iter().zip(&weights) {
                let expected = weight / total;
                // Four standard deviations of a share of 20000 draws.
                let bound = 4.0 * (expected * (1.0 - expected) / 20_000.0).sqrt() + 1e-9;
                assert!((share - expected).abs() <= bound, "{proposed:?}: {share} {expected}");
            }
        }
        Ok(())
    }

    #[test]
    fn draws_repeat_with_seed_and_key() -> Result<()> {
        let logits = Tensor::new(&[[0.0_f32; 50]], &Device::Cpu)?;
        let draws = |seed, key| -> Result<Vec<u32>> {
            let mut verifier = SamplingVerifier::new(1.0, seed, &[key]);
            (0..8).map(|_| Ok(verifier.verify(&[], &logits)?.next.0)).collect()
        };
        assert_eq!(draws(1, 2)?, draws(1, 2)?);
        assert_ne!(draws(1, 2)?, draws(1, 3)?);
        assert_ne!(draws(1, 2)?, draws(2, 2)?);
        Ok(())
    }
}
