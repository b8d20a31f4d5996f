//! Initial values from the target's last layer.
//!
//! The last layer of the draft is that layer, over the keys and values that it has in the target: `fc`
//! hands on the tapped output nearest to its input, `hidden_norm` is its input norm. Slots are not what
//! that layer reads in the target, so this is a place to begin, not a draft. Earlier layers of the draft
//! change nothing at first. Where the target has no norms of queries and keys, theirs begin with the size
//! that queries and keys would have for states of independent values:
//!
//! ```text
//! w² = Σ_ij (W_ij g_j)² / rows        W the projection, g the weight of the norm before it
//! ```

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Tensor};

use super::config::BlockConfig;
use super::model::BlockDraft;
use super::own_head::OwnHead;
use crate::error::{ModelError, Result};
use crate::target_model::{Target, norm_before_feed_forward};
use crate::weights::TensorSpec;

/// The target's last layer and final norm.
pub(super) struct Start<'a> {
    config: &'a BlockConfig,
    layer: HashMap<&'static str, Tensor>,
    final_norm: &'a Tensor,
    /// Name of the norm before the MLP.
    before_feed_forward: &'static str,
}

impl BlockDraft {
    /// Weights that begin with the target's last layer wherever shapes agree; all others are those of
    /// [`Self::initialise_with`]. All ranks of a spread target call it.
    ///
    /// # Errors
    /// - sizes do not fit, or the target's last layer was not loaded
    pub fn initialise_from(
        config: &BlockConfig,
        target: &Target,
        own: Option<OwnHead>,
        seed: u64,
    ) -> Result<Self> {
        let layer: HashMap<_, _> = target.last_layer()?.into_iter().collect();
        if layer.is_empty() {
            let problem = "`init: last_layer` needs the target's last layer, which was not loaded";
            return Err(ModelError::invalid(Path::new("draft configuration"), problem));
        }
        let before_feed_forward = norm_before_feed_forward(target.config());
        let final_norm = target.final_norm();
        let start = Start { config, layer, final_norm, before_feed_forward };
        let embedding = target.hold_ends()?.embedding_matrix().clone();
        let device = embedding.device().clone();
        Self::build(config, embedding, own, |spec| match start.value(spec)? {
            Some(value) => Ok(value),
            None => Self::fresh(spec, config, seed, &device),
        })
    }
}

impl Start<'_> {
    /// The initial value of a tensor that the target has one for.
    fn value(&self, spec: &TensorSpec) -> Result<Option<Tensor>> {
        let value = match spec.name.as_str() {
            "fc.weight" => Some(self.fusion(spec)?),
            "hidden_norm.weight" => self.layer.get("input_layernorm.weight").cloned(),
            "norm.weight" => Some(self.final_norm.clone()),
            name => self.of_layer(name, spec)?,
        };
        let fits = value.filter(|value| value.dims() == spec.shape.as_slice());
        Ok(fits.map(|value| value.to_dtype(DType::F32)?.copy()).transpose()?)
    }

    fn of_layer(&self, name: &str, spec: &TensorSpec) -> Result<Option<Tensor>> {
        let Some((layer, name)) = name.strip_prefix("layers.").and_then(|it| it.split_once('.'))
        else {
            return Ok(None);
        };
        if layer.parse() != Ok(self.config.layers.len() - 1) {
            let silent = matches!(name, "self_attn.o_proj.weight" | "mlp.down_proj.weight");
            let zeros =
                || Tensor::zeros(spec.shape.as_slice(), DType::F32, self.final_norm.device());
            return Ok(silent.then(zeros).transpose()?);
        }
        // In families with norms after both parts this name is that of another one.
        let in_target = match name {
            "post_attention_layernorm.weight" => self.before_feed_forward,
            other => other,
        };
        if let Some(own) = self.layer.get(in_target) {
            return Ok(Some(match name {
                "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => {
                    self.repeated(own, spec)?
                }
                _ => own.clone(),
            }));
        }
        match name {
            "self_attn.q_norm.weight" => self.size("self_attn.q_proj.weight", spec),
            "self_attn.k_norm.weight" => self.size("self_attn.k_proj.weight", spec),
            _ => Ok(None),
        }
    }

    /// Rows `[KV D, H]` of a projection of keys or values, every head as often as the draft has more heads: each query
    /// head meets the keys and values that it would meet in the target.
    fn repeated(&self, projection: &Tensor, spec: &TensorSpec) -> Result<Tensor> {
        let (rows, width) = projection.dims2()?;
        let (wanted, head) = (spec.shape[0], self.config.head_dim);
        if wanted == rows || !wanted.is_multiple_of(rows) || !rows.is_multiple_of(head) {
            return Ok(projection.clone());
        }
        let heads = projection.reshape((rows / head, 1, head * width))?;
        Ok(heads.repeat((1, wanted / rows, 1))?.reshape((wanted, width))?)
    }

    /// `[H, A H]`: the tapped output that the target's last layer reads, or the last one before it.
    fn fusion(&self, spec: &TensorSpec) -> Result<Tensor> {
        let hidden = self.config.hidden_size;
        let input = self.config.num_target_layers.saturating_sub(2);
        let taps = &self.config.target_layers;
        let tap = taps.iter().rposition(|tap| tap.0 <= input).unwrap_or_default();
        let columns = taps.len() * hidden;
        let mut values = vec![0.0_f32; hidden * columns];
        for row in 0..hidden {
            values[row * columns + tap * hidden + row] = 1.0;
        }
        Ok(Tensor::from_vec(values, spec.shape.as_slice(), self.final_norm.device())?)
    }

    /// The expected size of a projection's values, once for every value of a head.
    fn size(&self, projection: &str, spec: &TensorSpec) -> Result<Option<Tensor>> {
        let of = |name: &str| self.layer.get(name);
        let (Some(weight), Some(norm)) = (of(projection), of("input_layernorm.weight")) else {
            return Ok(None);
        };
        let scaled = weight.to_dtype(DType::F32)?.broadcast_mul(&norm.to_dtype(DType::F32)?)?;
        let square = scaled.sqr()?.sum_all()?.to_scalar::<f32>()? / weight.dim(0)? as f32;
        let values = vec![square.sqrt(); spec.shape.iter().product()];
        Ok(Some(Tensor::from_vec(values, spec.shape.as_slice(), weight.device())?))
    }
}
