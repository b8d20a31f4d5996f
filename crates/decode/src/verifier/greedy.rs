//! Temperature 0: accept while the proposal is the target's most likely token.

use candle_core::{DType, Tensor};
use longdraft_models::TargetTokenId;

use super::{Verdict, Verifier};
use crate::error::Result;

/// Greedy verification of a chain; ties go to the lower id.
#[derive(Debug, Default)]
pub struct GreedyVerifier;

impl Verifier for GreedyVerifier {
    fn verify(&mut self, proposed: &[TargetTokenId], logits: &Tensor) -> Result<Verdict> {
        let best = argmax_rows(logits)?;
        let agreeing = proposed.iter().zip(&best).take_while(|(p, t)| p == t);
        let accepted = agreeing.count();
        Ok(Verdict { accepted, next: best[accepted] })
    }
}

/// Most likely token of every row of `[R, V]` logits; ties go to the lower id, NaN never wins.
///
/// # Errors
/// - the logits cannot be read
pub fn argmax_rows(logits: &Tensor) -> Result<Vec<TargetTokenId>> {
    let rows = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let best = |row: &Vec<f32>| {
        let mut best = (0, f32::NEG_INFINITY);
        for (id, &logit) in row.iter().enumerate() {
            if logit > best.1 {
                best = (id, logit);
            }
        }
        TargetTokenId(best.0 as u32)
    };
    Ok(rows.iter().map(best).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn verify(proposed: &[u32], best: &[u32]) -> Verdict {
        let rows: Vec<f32> = best
            .iter()
            .flat_map(|b| (0..5).map(move |id| if id == *b { 1.0 } else { 0.0 }))
            .collect();
        let logits = Tensor::from_vec(rows, (best.len(), 5), &Device::Cpu).expect("logits");
        let proposed: Vec<TargetTokenId> = proposed.iter().map(|id| TargetTokenId(*id)).collect();
        GreedyVerifier.verify(&proposed, &logits).expect("verdict")
    }

    #[test]
    fn accepts_up_to_the_first_mismatch_and_adds_the_targets_token() {
        let verdict = |accepted, next| Verdict { accepted, next: TargetTokenId(next) };
        assert_eq!(verify(&[1, 2, 3], &[1, 2, 3, 4]), verdict(3, 4));
        assert_eq!(verify(&[1, 2, 3], &[1, 0, 3, 4]), verdict(1, 0));
        assert_eq!(verify(&[1, 2, 3], &[2, 2, 3, 4]), verdict(0, 2));
        assert_eq!(verify(&[], &[3]), verdict(0, 3));
    }

    #[test]
    fn ties_go_to_the_lower_id() -> Result<()> {
        let logits = Tensor::new(&[[0.5_f32, 2.0, 2.0]], &Device::Cpu)?;
        assert_eq!(argmax_rows(&logits)?, [TargetTokenId(1)]);
        Ok(())
    }
}
