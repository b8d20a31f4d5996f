//! Projections of a layer that attends.

use candle_core::Tensor;
use longdraft_kernels::matrix::linear_each;

use crate::error::Result;
use crate::target_model::feed_forward::Projection;

/// Projections of a layer that attends.
pub(in crate::target_model) struct Attention {
    pub(in crate::target_model) q_proj: Projection,
    /// Of keys and, unless these are the keys, of values; none where an earlier layer's are read.
    pub(in crate::target_model) k_proj: Option<Projection>,
    pub(in crate::target_model) v_proj: Option<Projection>,
    pub(in crate::target_model) o_proj: Projection,
    /// Of the gate on outputs, `[N·D, H]`.
    pub(in crate::target_model) gate: Option<Projection>,
    /// Norms of queries and, where the layer has some, of keys: `[D]`, or `[N·D]` and `[K·D]`.
    pub(in crate::target_model) qk_norm: Option<(Tensor, Option<Tensor>)>,
    /// Ones `[D]`, where values are normed.
    pub(in crate::target_model) v_norm: Option<Tensor>,
    /// Logits of the heads without values, `[N]`.
    pub(in crate::target_model) sinks: Option<Tensor>,
}

/// Queries; keys and values, where a layer has some: values that are the keys are left out.
type Projected = (Tensor, Option<(Tensor, Option<Tensor>)>);

impl Attention {
    /// Queries of normed states, and keys and values where the layer has some: values that are the keys are
    /// left out.
    pub(super) fn project(&self, normed: &Tensor) -> Result<Projected> {
        Ok(match (&self.k_proj, &self.v_proj) {
            (Some(k), Some(v)) => {
                let [q, k, v] = linear_each(normed, [self.q_proj.map(), k.map(), v.map()])?;
                (q, Some((k, Some(v))))
            }
            (Some(k), None) => {
                let [q, k] = linear_each(normed, [self.q_proj.map(), k.map()])?;
                (q, Some((k, None)))
            }
            (None, _) => (self.q_proj.apply(normed)?, None),
        })
    }

    /// Whether products of all projections take bf16 factors.
    pub(super) fn takes_halves(&self) -> bool {
        let Self { q_proj, k_proj, v_proj, o_proj, .. } = self;
        let mut all = [q_proj, o_proj].into_iter().chain(k_proj).chain(v_proj);
        all.all(Projection::takes_halves)
    }
}
