//! What an EAGLE-3 draft computes on the fixed input.

use candle_core::Tensor;
use longdraft_kernels::linear::linear;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft, TestTimeSteps};
use longdraft_models::target_model::PackedSequence;

use crate::error::Result;
use crate::parity::{ParityVector, TOKENS, fixed_ids, normal, records};

/// Test-time steps that are recorded.
const STEPS: usize = 3;

/// What an EAGLE-3 draft reads.
pub(super) struct Eagle3Input {
    /// `[T]`
    pub(super) ids: Vec<u32>,
    /// `[T, 3·Ht]`
    pub(super) aux: Tensor,
}

/// The fixed input of a draft.
///
/// # Errors
/// - it cannot be made
pub(super) fn fixed_input(config: &Eagle3Config) -> Result<Eagle3Input> {
    let aux = normal("parity aux", &[TOKENS, 3 * config.target_hidden_size])?;
    Ok(Eagle3Input { ids: fixed_ids(config.vocab_size), aux })
}

/// Logits `[T, Vd]` of each of the first test-time steps, over one document.
///
/// # Errors
/// - shapes do not fit
pub(super) fn logits_of_steps(draft: &Eagle3Draft, input: &Eagle3Input) -> Result<Vec<Tensor>> {
    let tokens = input.ids.len();
    let sequence = PackedSequence::single(&input.ids);
    let rows: Vec<u32> = (0..tokens as u32).collect();
    let mut steps = TestTimeSteps::new(draft, &sequence, &input.aux)?;
    (0..STEPS)
        .map(|_| {
            let hidden = steps.step(&rows)?;
            Ok(linear(&draft.head_input(&hidden)?, draft.head()?, None)?)
        })
        .collect()
}

/// The vector of an EAGLE-3 draft.
///
/// # Errors
/// - shapes do not fit
pub(super) fn outputs(draft: &Eagle3Draft) -> Result<ParityVector> {
    let logits = logits_of_steps(draft, &fixed_input(draft.config())?)?;
    let mut rows = Vec::new();
    for (step, logits) in logits.iter().enumerate() {
        rows.extend(records(step, logits)?);
    }
    Ok(ParityVector::of(rows))
}
