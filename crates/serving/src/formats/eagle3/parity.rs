//! What an EAGLE-3 draft computes on the fixed input.

use candle_core::Tensor;
use longdraft_models::draft::eagle3::{Eagle3Draft, TestTimeSteps};
use longdraft_models::target_model::PackedSequence;

use crate::error::Result;
use crate::parity::{ParityVector, TOKENS, fixed_ids, normal, records};

/// Test-time steps that are recorded.
const STEPS: usize = 3;

/// Logits `[T, Vd]` of each of the first test-time steps, over one document of `ids` `[T]` with the features `aux`
/// `[T, 3·Ht]`.
pub(super) fn logits_of_steps(
    draft: &Eagle3Draft,
    ids: &[u32],
    aux: &Tensor,
) -> Result<Vec<Tensor>> {
    let sequence = PackedSequence::single(ids);
    let rows: Vec<u32> = (0..ids.len() as u32).collect();
    let mut steps = TestTimeSteps::new(draft, &sequence, aux)?;
    (0..STEPS)
        .map(|_| {
            let hidden = steps.step(&rows)?;
            Ok(draft.head_matrix()?.linear(&draft.head_input(&hidden)?, None)?)
        })
        .collect()
}

pub(super) fn outputs(draft: &Eagle3Draft) -> Result<ParityVector> {
    let config = draft.config();
    let aux = normal("parity aux", &[TOKENS, 3 * config.target_hidden_size])?;
    let logits = logits_of_steps(draft, &fixed_ids(config.vocab_size), &aux)?;
    let mut rows = Vec::new();
    for (step, logits) in logits.iter().enumerate() {
        rows.extend(records(step, logits)?);
    }
    Ok(ParityVector::of(rows))
}
