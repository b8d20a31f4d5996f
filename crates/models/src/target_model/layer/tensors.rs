//! The tensors of a layer, for drafts that begin with them.

use candle_core::Tensor;

use super::{DecoderLayer, Mixer};
use crate::config::QkNorm;
use crate::error::Result;
use crate::target_model::names;

impl DecoderLayer {
    /// Tensors by published name (norms as they multiply, whatever the file holds), without the layer's
    /// prefix; quantised ones widened to f32. Of a mixture of experts only what is not the experts'. The ranks
    /// that share the layer all call it.
    pub(in crate::target_model) fn tensors(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let names = names::norms(self.norm_places);
        let mut tensors: Vec<_> = names.all().copied().zip(self.norms.all().cloned()).collect();
        let (mut by_outputs, mut by_inputs) = (Vec::new(), Vec::new());
        if let Mixer::Attention(own) = &self.mixer {
            by_outputs.push(("self_attn.q_proj.weight", "self_attn.q_proj.bias", &own.q_proj));
            let kv = [
                ("self_attn.k_proj.weight", "self_attn.k_proj.bias", &own.k_proj),
                ("self_attn.v_proj.weight", "self_attn.v_proj.bias", &own.v_proj),
            ];
            by_outputs.extend(
                kv.into_iter()
                    .filter_map(|(weight, bias, own)| Some((weight, bias, own.as_ref()?))),
            );
            by_inputs.push(("self_attn.o_proj.weight", "self_attn.o_proj.bias", &own.o_proj));
        }
        if let Some(mlp) = self.feed_forward.dense() {
            by_outputs.extend([
                ("mlp.gate_proj.weight", "mlp.gate_proj.bias", &mlp.gate),
                ("mlp.up_proj.weight", "mlp.up_proj.bias", &mlp.up),
            ]);
            by_inputs.push(("mlp.down_proj.weight", "mlp.down_proj.bias", &mlp.down));
        }
        let share = &self.share;
        for (weight, bias, projection) in by_outputs {
            tensors.push((weight, share.whole(&projection.weight.to_dense()?, 0)?));
            if let Some(values) = &projection.bias {
                tensors.push((bias, share.whole(values, 0)?));
            }
        }
        for (weight, bias, projection) in by_inputs {
            tensors.push((weight, share.whole(&projection.weight.to_dense()?, 1)?));
            if let Some(values) = &projection.bias {
                tensors.push((bias, share.sum(values.clone())?));
            }
        }
        if let (QkNorm::PerHead, Mixer::Attention(own)) = (self.sizes.qk_norm, &self.mixer) {
            let [q_name, k_name] = names::QK_NORMS;
            let (q_norm, k_norm) = own.qk_norm.clone().unzip();
            tensors.extend(q_norm.map(|norm| (q_name, norm)));
            tensors.extend(k_norm.flatten().map(|norm| (k_name, norm)));
        }
        Ok(tensors)
    }
}
