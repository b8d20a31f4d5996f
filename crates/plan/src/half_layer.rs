//! A layer of the frozen target on a GPU that multiplies in bf16: sums are f32, and bf16 is what passes between norms,
//! projections and attention.

use longdraft_models::TargetConfig;
use longdraft_models::config::{Mixer, QkNorm};
use longdraft_train::footprint::F32;

use crate::target::ForwardPass;

/// Bytes of a bf16.
const HALF: u64 = 2;

/// Sizes of a layer, `1/M` of whose heads and inner states a rank holds where `M` ranks share it.
struct HalfLayer {
    /// `H`
    width: u64,
    /// `N·D / M`
    query: u64,
    /// `K·D / M`
    kv: u64,
    /// Keys of the whole row for each of this rank's tokens, where ranks share rows: `K·D` a rank.
    gathered: u64,
    /// Bytes of a value of heads: what a pass hands out is f32.
    value: u64,
    /// Results that lead from a projection to rotated heads, the first one among them.
    steps: u64,
    /// What it holds in place of heads, in f32: gates, inputs and outputs of a state.
    recurrent: Option<u64>,
    /// Whether ranks sum their parts of its outputs.
    is_shared: bool,
    feed_forward: FeedForward,
}

/// The second half of a layer, by its inner width.
enum FeedForward {
    /// An MLP of bf16 states.
    Half(u64),
    /// One of f32 states.
    Single(u64),
    /// Experts, how many of them a token visits, and the one that every token visits.
    Experts { inner: u64, each: u64, shared: u64 },
}

impl HalfLayer {
    fn of(pass: &ForwardPass, config: &TargetConfig, index: usize) -> Self {
        let heads = config.heads_of(index);
        let part = |values: usize| (values as u64).div_ceil(pass.tensor);
        let kv = part(heads.kv_heads * heads.head_dim);
        let attends = config.mixer_of(index) == Mixer::Attention;
        let is_tapped = pass.taps_keys && config.last_attention_layer() == Some(index);
        let is_half = config.has_half_heads(index) && !is_tapped;
        let turns = u64::from(!config.parts.is_still(index));
        let feed_forward = match config.experts_in(index) {
            Some(experts) => FeedForward::Experts {
                inner: part(experts.moe_intermediate_size),
                each: experts.num_experts_per_tok as u64,
                shared: part(experts.shared_expert_intermediate_size.unwrap_or(0)),
            },
            None if config.has_half_mlp(index) => FeedForward::Half(part(config.inner_of(index))),
            None => FeedForward::Single(part(config.inner_of(index))),
        };
        Self {
            width: config.hidden_size as u64,
            query: part(config.num_attention_heads * heads.head_dim),
            kv,
            gathered: if pass.parts > 1 { pass.parts * kv } else { 0 },
            value: if is_half { HALF } else { F32 },
            steps: 1 + turns + u64::from(config.qk_norm() != QkNorm::None),
            recurrent: (!attends).then(|| config.recurrent_values() as u64),
            is_shared: pass.tensor > 1,
            feed_forward,
        }
    }

    /// The stream, its norm, and every result on the way to queries, keys and values.
    fn projecting(&self) -> u64 {
        let heads = self.steps * (self.query + self.kv) + self.kv;
        F32 * self.width + self.value * (self.width + heads)
    }

    /// Queries, keys before and after rotation, values; gathered keys and values are f32.
    fn heads(&self) -> u64 {
        if let Some(values) = self.recurrent {
            return F32 * values;
        }
        let own_sides = if self.gathered > 0 { 1 } else { 3 };
        self.value * (self.query + own_sides * self.kv) + F32 * 2 * self.gathered
    }

    /// The stream, heads, what they attend to, and what attention multiplies in place of f32.
    fn attending(&self) -> u64 {
        let sides = if self.gathered > 0 { 2 * self.gathered } else { 2 * self.kv };
        let queries = if self.value == F32 { self.query } else { 0 };
        let sides = if self.value == F32 || self.gathered > 0 { sides } else { 0 };
        F32 * self.width + self.heads() + self.value * self.query + HALF * (queries + sides)
    }

    /// The stream and its sum with the attention's output, which f32 heads are multiplied to before; ranks begin
    /// with zeros, and get the sum of their parts.
    fn adding(&self) -> u64 {
        let streams = if self.is_shared { 3 } else { 2 };
        let product = if self.value == F32 { HALF * self.query + F32 * self.width } else { 0 };
        F32 * streams * self.width + self.heads() + self.value * self.query + product
    }

    /// The streams before and after attention, heads, and the second half.
    fn feeding(&self) -> u64 {
        let normed = match self.feed_forward {
            FeedForward::Half(_) => HALF * self.width,
            _ => F32 * self.width,
        };
        // Ranks begin with zeros, which are there until their part is, and get the sum of all parts.
        let begun = if self.is_shared { F32 * self.width } else { 0 };
        let inner = match self.feed_forward {
            // Gate, up, and their product, which is added where the sum is.
            FeedForward::Half(inner) => (3 * HALF * inner + begun).max(HALF * inner + 2 * begun),
            FeedForward::Single(inner) => self.single(inner) + begun,
            // Rows of all experts and what they become in bf16, then the outputs of all and their sums. Or, of blocks, as if
            // every token chose the same expert: its input beside those outputs. Last the shared expert.
            FeedForward::Experts { inner, each, shared } => {
                let own = F32 * self.width;
                let together = own * each + (HALF * each * inner).max(own);
                let alone = own * (1 + each) + self.single(inner);
                together.max(alone).max(own + self.single(shared)) + begun
            }
        };
        2 * F32 * self.width + normed + self.heads() + inner
    }

    /// A gated MLP of f32 states: gate, up and product; or the product, what is multiplied in its place, and the
    /// output.
    fn single(&self, inner: u64) -> u64 {
        (3 * F32 * inner).max((F32 + HALF) * inner + F32 * self.width)
    }
}

impl ForwardPass {
    /// Bytes of a token at most while a layer runs, what was tapped and angles apart.
    pub(crate) fn half_layer_bytes(&self, config: &TargetConfig) -> u64 {
        let last = config.num_hidden_layers.saturating_sub(1);
        let of_layer = |index: usize| {
            let layer = HalfLayer::of(self, config, index);
            let projecting = if layer.recurrent.is_some() { 0 } else { layer.projecting() };
            if index == last && !self.finishes {
                return projecting;
            }
            projecting.max(layer.attending()).max(layer.adding()).max(layer.feeding())
        };
        (0..config.num_hidden_layers).map(of_layer).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;
    use crate::target::States;
    use longdraft_models::published::published_config;

    fn config(name: &str) -> TargetConfig {
        published_config(name).expect("a published target")
    }

    fn pass() -> ForwardPass {
        sample::pass(States::Half)
    }

    #[test]
    fn a_dense_layer_holds_two_streams_and_halves() {
        let llama = config("meta-llama/Llama-3.1-8B-Instruct");
        let (h, q, k, i) = (4096, 4096, 1024, 14336);
        let whole = 2 * 4 * h + 2 * h + 2 * (q + 3 * k) + 2 * 3 * i;
        assert_eq!(pass().half_layer_bytes(&llama), whole);
        // The last keys and values are handed out in f32, and so are the queries beside them.
        let tapping = ForwardPass { taps_keys: true, ..pass() };
        assert_eq!(tapping.half_layer_bytes(&llama), whole + 2 * (q + 3 * k));
        // Where that layer stops at its keys, the others count.
        let stopping = ForwardPass { finishes: false, ..tapping };
        assert_eq!(stopping.half_layer_bytes(&llama), whole);
    }

    #[test]
    fn a_layer_alone_that_stops_at_its_keys_counts_them() {
        let mut one = config("Qwen/Qwen3-8B");
        one.num_hidden_layers = 1;
        let stopping = ForwardPass { finishes: false, taps_keys: true, ..pass() };
        // Projected, normed, rotated; values; the stream and its norm.
        let (h, q, k) = (4096, 4096, 1024);
        assert_eq!(stopping.half_layer_bytes(&one), 4 * (2 * h + 3 * (q + k) + k));
    }

    #[test]
    fn experts_are_f32_beside_heads_of_halves() {
        let mixture = config("Qwen/Qwen3-30B-A3B-Instruct-2507");
        let (h, q, k, i, each) = (2048, 4096, 512, 768, 8);
        // Three states, heads, one expert's input, the outputs of all, and its output beside its product.
        let whole = 3 * 4 * h + 2 * (q + 3 * k) + 4 * h * (1 + each) + 6 * i + 4 * h;
        assert!(6 * i + 4 * h > 12 * i);
        assert_eq!(pass().half_layer_bytes(&mixture), whole);
    }

    #[test]
    fn wide_experts_hold_what_the_rows_of_all_become() {
        let mut mixture = config("Qwen/Qwen3-30B-A3B-Instruct-2507");
        let experts = mixture.experts.as_mut().expect("a mixture");
        experts.moe_intermediate_size = 4096;
        let (h, q, k, i, each) = (2048, 4096, 512, 4096, 8);
        let whole = 3 * 4 * h + 2 * (q + 3 * k) + 4 * h * each + 2 * i * each;
        assert_eq!(pass().half_layer_bytes(&mixture), whole);
    }

    #[test]
    fn ranks_that_share_rows_gather_keys_in_f32() {
        let llama = config("meta-llama/Llama-3.1-8B-Instruct");
        let shared = ForwardPass { parts: 4, ..pass() };
        let (h, q, k, i) = (4096, 4096, 1024, 14336);
        let heads = 2 * (q + k) + 4 * 2 * 4 * k;
        assert_eq!(shared.half_layer_bytes(&llama), 10 * h + heads + 6 * i);
    }

    #[test]
    fn ranks_that_share_layers_hold_parts_and_sum_them() {
        let llama = config("meta-llama/Llama-3.1-8B-Instruct");
        let of = |tensor: u64| ForwardPass { tensor, ..pass() };
        let sizes = |ranks: u64| (4096, 4096 / ranks, 1024 / ranks, 14336 / ranks);
        let (h, q, k, i) = sizes(8);
        // Begun and received sums are more than what is begun beside gate, up and product.
        let inner = 2 * i + 2 * 4 * h;
        assert!(inner > 6 * i + 4 * h);
        assert_eq!(of(8).half_layer_bytes(&llama), 10 * h + 2 * (q + 3 * k) + inner);
        let (h, q, k, i) = sizes(2);
        let whole = 10 * h + 2 * (q + 3 * k) + 6 * i + 4 * h;
        assert_eq!(of(2).half_layer_bytes(&llama), whole);
        // Outputs of all experts, too, lie beside what is begun.
        let mixture = config("Qwen/Qwen3-30B-A3B-Instruct-2507");
        let (h, q, k, i, each) = (2048, 4096 / 2, 512 / 2, 768 / 2, 8);
        let whole = 4 * 4 * h + 2 * (q + 3 * k) + 4 * h * (1 + each) + 6 * i + 4 * h;
        assert_eq!(of(2).half_layer_bytes(&mixture), whole);
    }
}
