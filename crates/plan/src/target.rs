//! Memory of the frozen target: its weights and what a forward pass needs.

use std::collections::BTreeMap;
use std::sync::Arc;

use longdraft_kernels::linear::{Pass, kept_bytes};
use longdraft_kernels::matrix::BlockFormat;
use longdraft_models::TargetConfig;
use longdraft_models::target_model::Layers;
use longdraft_models::weights::TensorSpec;
use longdraft_train::footprint::F32;

/// How the target's matrices are held.
#[derive(Debug, Clone)]
pub(crate) enum Held {
    /// All of them in so many bytes a value: 2 as bf16, 4 as f32.
    Alike(u64),
    /// In main memory as its files hold them, whose types stand here by the matrices' names: quantised blocks and floats
    /// of 16 bits as such, all else in f32.
    AsStored(Arc<BTreeMap<String, &'static str>>),
}

impl Held {
    /// Bytes of so many values of a matrix. Blocks count as in files; in memory some take a few bytes more.
    pub(crate) fn bytes(&self, name: &str, values: u64) -> u64 {
        let types = match self {
            Self::Alike(bytes) => return bytes * values,
            Self::AsStored(types) => types,
        };
        match types.get(name).copied() {
            Some("BF16" | "F16") => 2 * values,
            stored => stored.and_then(BlockFormat::named).map_or(F32 * values, |format| {
                (values * format.bytes() as u64).div_ceil(format.values() as u64)
            }),
        }
    }
}

/// Bytes of the loaded weights: matrices as they are `held`, vectors and routers in f32. `tensor` ranks share every
/// matrix of a layer; their parts of biases, small numbers, count as whole.
pub(crate) fn weight_bytes(config: &TargetConfig, layers: Layers, held: &Held, tensor: u64) -> u64 {
    layers.tensor_specs(config).iter().map(|spec| bytes_of(spec, held, tensor)).sum()
}

fn bytes_of(spec: &TensorSpec, held: &Held, tensor: u64) -> u64 {
    let values: u64 = spec.shape.iter().map(|size| *size as u64).product();
    let router = spec.name.ends_with("_gate.weight") || spec.name.ends_with(".gate.weight");
    let vector = spec.shape.len() == 1 || router;
    let ranks = if spec.name.starts_with("model.layers.") { tensor } else { 1 };
    if vector { F32 * values } else { held.bytes(&spec.name, values.div_ceil(ranks)) }
}

/// Where the states of a forward pass lie, and as what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum States {
    /// f32 in main memory.
    OfCpu,
    /// f32 on an accelerator.
    Single,
    /// bf16 between sums of f32, as [`crate::Layout::half_states`] says.
    Half,
}

/// A forward pass over some tokens of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForwardPass {
    /// Tokens of this rank's part of the row.
    pub(crate) tokens: u64,
    /// Ranks that share the row; attention gathers their keys.
    pub(crate) parts: u64,
    /// Ranks that share every layer's heads and inner states.
    pub(crate) tensor: u64,
    /// Tapped layers below the last one.
    pub(crate) tapped: u64,
    /// Whether the last layer's MLP runs: not for its keys and values alone.
    pub(crate) finishes: bool,
    /// Where its states lie, and as what.
    pub(crate) states: States,
    /// Whether the last keys and values are handed out.
    pub(crate) taps_keys: bool,
}

impl ForwardPass {
    /// Bytes at most while a layer runs, with what was tapped below. Of each token, in f32 values, the
    /// layer holds its input, `H`; rotated queries and what attention returns, `2 N·D`; keys before and
    /// after rotation and values, `3 K·D`; the state after attention and its norm, `2 H`; and of the
    /// MLP `max(3 I, I + H)`. Angles are `D` values. A layer that stops at its keys holds its input, its
    /// norm, and queries and keys before and after rotation. A mixture is counted as if every token
    /// chose the same expert: sums and a copy of the input, `2 H`, beside that expert's MLP, and on a GPU the
    /// outputs of its `k` experts, `k H`. A layer with a recurrent state holds its inputs, gates and outputs in place
    /// of heads, and two states whatever the number of tokens. Of `M` ranks that share the layer each holds `1/M` of `N·D`, `K·D`
    /// and `I`; to sum their parts they hold `(3 − 1/M) H` in place of the MLP's. Where states are bf16 between sums,
    /// [`Self::half_layer_bytes`] counts the layer, and its mixture otherwise.
    pub(crate) fn layer_bytes(&self, config: &TargetConfig) -> u64 {
        // The state before a row's documents, and the one that steps.
        let states = (0..config.num_hidden_layers).map(|layer| config.state_values_of(layer)).max();
        let states = 2 * states.unwrap_or(0) as u64;
        let is_half = self.states == States::Half;
        let tables = if is_half && config.parts.sliding_rope.is_some() { 2 } else { 1 };
        let angles = tables * config.head_dim as u64;
        let beside = angles + self.tapped * config.hidden_size as u64;
        let of_layer =
            if is_half { self.half_layer_bytes(config) } else { F32 * self.layer_values(config) };
        self.tokens * (of_layer + F32 * beside) + F32 * states
    }

    /// Bytes of a value that passes between its norms and its sums.
    pub(crate) fn value_bytes(&self) -> u64 {
        if self.states == States::Half { 2 } else { F32 }
    }

    /// Bytes of a token that all layers read and write beside what their products and their attention read: in each the
    /// stream, which two norms read and two products add to, `24 H`; and, of the bytes of a value, norms, `2 H`, rotated
    /// queries and keys, `2 (N·D + K·D)`, and gate, up and product of its MLP or of every expert that a token visits, `3 I`.
    pub(crate) fn moved_bytes(&self, config: &TargetConfig) -> u64 {
        let width = config.hidden_size as u64;
        let heads = 2 * (config.query_size() + config.kv_size()) as u64;
        let of_layer = |index: usize| {
            let inner = match config.experts_in(index) {
                Some(experts) => {
                    let shared = experts.shared_expert_intermediate_size.unwrap_or(0);
                    experts.num_experts_per_tok * experts.moe_intermediate_size + shared
                }
                None => config.inner_of(index),
            };
            let shared = heads + 3 * inner as u64;
            6 * F32 * width + self.value_bytes() * (2 * width + shared.div_ceil(self.tensor))
        };
        (0..config.num_hidden_layers).map(of_layer).sum()
    }

    /// Values of a token in a layer whose states are all f32.
    fn layer_values(&self, config: &TargetConfig) -> u64 {
        let width = config.hidden_size as u64;
        let query = (config.query_size() as u64).div_ceil(self.tensor);
        let kv = (config.kv_size() as u64).div_ceil(self.tensor);
        let gathered = if self.parts > 1 { 2 * kv * self.parts } else { 0 };
        let projected = 2 * width + 2 * query + 3 * kv;
        if self.finishes || config.num_hidden_layers > 1 {
            let inner = inner_values(config).div_ceil(self.tensor);
            let summing = if self.tensor > 1 { 3 * width - width / self.tensor } else { 0 };
            let mixed = config.experts.as_ref().map_or(0, |experts| {
                let is_kept = self.states != States::OfCpu;
                2 + if is_kept { experts.num_experts_per_tok as u64 } else { 0 }
            });
            let mlp = (3 * inner).max(inner + width).max(summing) + mixed * width;
            let recurrent = config.recurrent_values() as u64;
            let mixer = (2 * query + 3 * kv + gathered).max(recurrent);
            projected.max(3 * width + mixer + mlp)
        } else {
            projected
        }
    }

    /// Bytes of packed operands that its products leave.
    pub(crate) fn packed_bytes(&self, config: &TargetConfig, threads: usize) -> u64 {
        if threads == 0 {
            return 0;
        }
        let (width, tensor) = (config.hidden_size, self.tensor as usize);
        let (query, kv) = (config.query_size() / tensor, config.kv_size() / tensor);
        let inner = inner_values(config) as usize / tensor;
        let maps = [(width, query), (width, kv), (query, width), (width, inner), (inner, width)];
        let packed = maps.map(|(inputs, outputs)| {
            kept_bytes(Pass::Forward, (self.tokens as usize, inputs, outputs), threads)
        });
        packed.into_iter().max().unwrap_or(0) as u64
    }
}

/// Width of the widest MLP or expert that a token visits.
fn inner_values(config: &TargetConfig) -> u64 {
    let Some(experts) = &config.experts else { return config.intermediate_size as u64 };
    let dense = (0..config.num_hidden_layers).any(|layer| config.experts_in(layer).is_none());
    let shared = experts.shared_expert_intermediate_size.unwrap_or(0);
    let plain = if dense { config.intermediate_size } else { 0 };
    experts.moe_intermediate_size.max(shared).max(plain) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::pass;
    use longdraft_models::published::published_config;

    #[test]
    fn a_gpu_holds_the_outputs_of_all_experts_of_a_token() {
        let config =
            published_config("Qwen/Qwen3-30B-A3B-Instruct-2507").expect("a published target");
        let pass = |states| ForwardPass { tokens: 1024, ..pass(states) };
        // 8 of 2048 values for each token.
        let more =
            pass(States::Single).layer_bytes(&config) - pass(States::OfCpu).layer_bytes(&config);
        assert_eq!(more, 1024 * 8 * 2048 * 4);
    }

    #[test]
    fn every_layer_moves_what_its_own_mlp_makes() {
        let mut config =
            published_config("Qwen/Qwen3-30B-A3B-Instruct-2507").expect("a published target");
        let (layers, pass) = (config.num_hidden_layers as u64, pass(States::Half));
        // 8 experts of 768 values.
        let of_heads = 24 * 2048 + 2 * (2 * 2048 + 2 * (4096 + 512));
        let of_experts = 2 * 3 * 8 * 768;
        assert_eq!(pass.moved_bytes(&config), layers * (of_heads + of_experts));
        let experts = config.experts.as_mut().expect("a mixture");
        (experts.mlp_only_layers, config.intermediate_size) = (vec![0], 5000);
        let mixed = layers * of_heads + (layers - 1) * of_experts + 2 * 3 * 5000;
        assert_eq!(pass.moved_bytes(&config), mixed);
    }

    #[test]
    fn published_targets_have_their_published_sizes() {
        let billions = |name: &str, bytes: u64, tensor: u64| {
            let config = published_config(name).expect("a published target");
            weight_bytes(&config, Layers::All, &Held::Alike(bytes), tensor) as f64 / 1e9
        };
        // 8.03, 70.55, 32.76, 30.53 and 235.09 billion parameters.
        for (name, parameters) in [
            ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
            ("meta-llama/Llama-3.3-70B-Instruct", 70.55),
            ("Qwen/QwQ-32B", 32.76),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.53),
            ("Qwen/Qwen3-235B-A22B-Instruct-2507", 235.09),
        ] {
            assert!((billions(name, 4, 1) / 4.0 - parameters).abs() < 0.01, "{name}");
            // Norms and routers keep 32 bits.
            assert!((billions(name, 2, 1) / 2.0 - parameters).abs() < 1e-3 * parameters, "{name}");
            // A quarter of the layers and both ends.
            let config = published_config(name).expect("a published target");
            let ends = weight_bytes(&config, Layers::None, &Held::Alike(4), 4) as f64 / 1e9;
            let shared = billions(name, 4, 4) - ends;
            assert!((shared + ends / 4.0 - parameters).abs() < 2e-3 * parameters, "{name}");
        }
    }
}
