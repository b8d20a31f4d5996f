//! ZeRO stages: what is spread over the ranks (Rajbhandari et al. 2020).

/// What is spread over the ranks. Stage 2 is not told apart: gradients are summed straight into the
/// shards, so that stage 1 holds no second copy of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ZeroStage {
    /// Nothing: every rank holds everything.
    #[default]
    Replicated,
    /// The optimizer's state.
    OptimizerState,
    /// Also the weights of draft and target.
    Weights,
}

impl ZeroStage {
    /// The stage of a number; `None` for other numbers than 0, 1 and 3.
    pub fn of(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Replicated),
            1 => Some(Self::OptimizerState),
            3 => Some(Self::Weights),
            _ => None,
        }
    }
}
