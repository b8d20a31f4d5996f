//! What a layer's state becomes from row to row.

use longdraft_kernels::recurrence::{
    Convolution, DeltaRows, DeltaSizes, DeltaState, Walk, causal_convolution, gated_delta_rule,
};

use crate::error::Result;

/// How a layer steps: a convolution, and the delta rule over what comes out of it.
#[derive(Debug, Clone)]
pub(in crate::target_model) struct Rule {
    pub(in crate::target_model) convolution: Convolution,
    pub(in crate::target_model) delta: Option<DeltaSizes>,
}

/// What a layer remembers of the tokens so far.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::target_model) struct State {
    /// The last inputs of the convolution, `[n − 1, C]`, the newest last.
    pub(in crate::target_model) window: Vec<f32>,
    /// Of the delta rule, if there is one.
    pub(in crate::target_model) delta: Option<DeltaState>,
}

/// What the rows of a pass bring to a layer's state.
#[derive(Debug, Clone, Default, PartialEq)]
pub(in crate::target_model) struct Rows {
    /// Inputs of the convolution, `[T, C]`.
    pub(in crate::target_model) inputs: Vec<f32>,
    /// `γ`, `[T, Nv]`, of the delta rule.
    pub(in crate::target_model) decay: Vec<f32>,
    /// `β`, `[T, Nv]`.
    pub(in crate::target_model) rate: Vec<f32>,
}

impl Rule {
    /// The state before any token.
    pub(in crate::target_model) fn start(&self) -> State {
        State { window: vec![0.0; self.window()], delta: self.delta.map(DeltaState::new) }
    }

    fn window(&self) -> usize {
        self.convolution.reach() * self.convolution.channels()
    }

    /// Outputs of rows `[T, W]` after the state `before`. If the walk is a chain, the state after it is left in
    /// `after`.
    pub(in crate::target_model) fn run(
        &self,
        rows: &Rows,
        walk: &Walk,
        before: &State,
        after: &mut State,
    ) -> Result<Vec<f32>> {
        let mixed = causal_convolution(&self.convolution, &rows.inputs, walk, &before.window)?;
        if walk.is_chain() {
            let path: Vec<usize> = (0..walk.rows()).collect();
            after.window = self.convolution.window_after(&before.window, &rows.inputs, &path);
        }
        let states = before.delta.as_ref().zip(after.delta.as_mut());
        let (Some(sizes), Some((before, after))) = (self.delta, states) else { return Ok(mixed) };
        let rows = DeltaRows { mixed: &mixed, decay: &rows.decay, rate: &rows.rate };
        Ok(gated_delta_rule(sizes, rows, walk, before, after)?)
    }

    /// The matrices of the delta rule, `[Nv, Dk, Dv]`; empty without one.
    pub(in crate::target_model) fn matrices(&self, state: &State) -> Vec<f32> {
        let states = self.delta.zip(state.delta.as_ref());
        states.map_or_else(Vec::new, |(sizes, state)| state.matrices(sizes))
    }

    /// Some rows of a pass.
    pub(in crate::target_model) fn select(&self, rows: &Rows, chosen: &[usize]) -> Rows {
        let of = |values: &[f32], width: usize| -> Vec<f32> {
            chosen.iter().flat_map(|row| values[row * width..][..width].iter().copied()).collect()
        };
        let heads = self.delta.map_or(0, |sizes| sizes.value_heads);
        Rows {
            inputs: of(&rows.inputs, self.convolution.channels()),
            decay: of(&rows.decay, heads),
            rate: of(&rows.rate, heads),
        }
    }
}
