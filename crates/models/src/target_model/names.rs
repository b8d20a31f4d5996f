//! Published names of a target's tensors.

use longdraft_kernels::recurrence::DeltaSizes;

use crate::config::{Architecture, DeltaNetConfig, NormPlaces, Router, TargetConfig};
use crate::error::Result;

/// The table of embeddings, `[V, H]`.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The norm before the head, `[H]`.
pub(super) const FINAL_NORM: &str = "model.norm.weight";

/// Whether a layer with keys has a projection of values.
pub(super) fn has_values(config: &TargetConfig, index: usize) -> bool {
    !config.parts.values_are_keys || config.window_of(index).is_some()
}

/// The table of inputs of every layer, what projects embeddings to them, and their norm.
pub(super) const PER_LAYER: [&str; 3] = [
    "model.embed_tokens_per_layer.weight",
    "model.per_layer_model_projection.weight",
    "model.per_layer_projection_norm.weight",
];

/// Norms of a layer with experts beside its MLP: after the MLP, before the experts, after them.
pub(super) const NORMS_BESIDE: [&str; 3] =
    ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"];

/// Projections of keys and of values of one head, where a file holds every head apart.
pub(super) const OF_A_LATENT_HEAD: [&str; 2] = ["k_b_proj", "v_b_proj"];

/// The name of one of them.
pub(super) fn of_latent_head(prefix: &str, matrix: &str, head: usize) -> String {
    format!("{prefix}self_attn.{matrix}.{head}.weight")
}

/// What the names of a gated delta net's tensors begin with, below the layer's prefix.
pub(super) const DELTA_NET: &str = "linear_attn";
/// The same of a short convolution.
pub(super) const CONVOLUTION: &str = "conv";

/// Rows of `[q | k | v | z]` by key head: those of `[q | k | v]` in the order of the heads, and those of `z`.
pub(super) fn rows_by_key_head(net: DeltaNetConfig) -> (Vec<u32>, Vec<u32>) {
    let DeltaSizes { key_heads, key_dim, .. } = net.sizes;
    let values = net.sizes.values() / key_heads;
    let group = 2 * (key_dim + values);
    let rows = |first: usize, count: usize| {
        let of_group = move |key: usize| {
            (key * group + first..key * group + first + count).map(|row| row as u32)
        };
        (0..key_heads).flat_map(of_group)
    };
    let qkv = rows(0, key_dim).chain(rows(key_dim, key_dim)).chain(rows(2 * key_dim, values));
    (qkv.collect(), rows(2 * key_dim + values, values).collect())
}

/// Norms of queries and keys.
pub(super) const QK_NORMS: [&str; 2] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
/// Logits of the heads without values.
pub(super) const SINKS: &str = "self_attn.sinks";

/// Something of each of a layer's norms.
pub(super) struct Norms<T> {
    pub(super) before_attention: Option<T>,
    pub(super) after_attention: Option<T>,
    pub(super) before_feed_forward: Option<T>,
    pub(super) after_feed_forward: Option<T>,
}

/// How a layer's norms are called where they stand.
pub(super) fn norms(places: NormPlaces) -> Norms<&'static str> {
    match places {
        NormPlaces::Before => Norms {
            before_attention: Some("input_layernorm.weight"),
            after_attention: None,
            before_feed_forward: Some("post_attention_layernorm.weight"),
            after_feed_forward: None,
        },
        NormPlaces::BeforeAndAfter => Norms {
            before_attention: Some("input_layernorm.weight"),
            after_attention: Some("post_attention_layernorm.weight"),
            before_feed_forward: Some("pre_feedforward_layernorm.weight"),
            after_feed_forward: Some("post_feedforward_layernorm.weight"),
        },
        NormPlaces::BeforeAndAfterOfGlm => Norms {
            before_attention: Some("input_layernorm.weight"),
            after_attention: Some("post_self_attn_layernorm.weight"),
            before_feed_forward: Some("post_attention_layernorm.weight"),
            after_feed_forward: Some("post_mlp_layernorm.weight"),
        },
        NormPlaces::After => Norms {
            before_attention: None,
            after_attention: Some("post_attention_layernorm.weight"),
            before_feed_forward: None,
            after_feed_forward: Some("post_feedforward_layernorm.weight"),
        },
    }
}

/// Published name, without the layer's prefix, of the norm before the feed-forward part; empty if there is none.
pub(crate) fn norm_before_feed_forward(config: &TargetConfig) -> &'static str {
    norms(config.parts.norms).before_feed_forward.unwrap_or_default()
}

impl<T> Norms<T> {
    /// Those that there are, in the order of the layer.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        let Self { before_attention, after_attention, before_feed_forward, after_feed_forward } =
            self;
        let attention = [before_attention.as_ref(), after_attention.as_ref()];
        let feed_forward = [before_feed_forward.as_ref(), after_feed_forward.as_ref()];
        attention.into_iter().chain(feed_forward).flatten()
    }

    /// What `make` makes of each.
    pub(super) fn try_map<U>(&self, make: impl Fn(&T) -> Result<U>) -> Result<Norms<U>> {
        Ok(Norms {
            before_attention: self.before_attention.as_ref().map(&make).transpose()?,
            after_attention: self.after_attention.as_ref().map(&make).transpose()?,
            before_feed_forward: self.before_feed_forward.as_ref().map(&make).transpose()?,
            after_feed_forward: self.after_feed_forward.as_ref().map(&make).transpose()?,
        })
    }
}

/// What the names of a layer's tensors begin with.
pub(super) fn layer(index: usize) -> String {
    format!("model.layers.{index}.")
}

/// What the names of a layer's MLP begin with.
pub(crate) fn mlp(architecture: Architecture, index: usize) -> String {
    let module = if architecture == Architecture::Llama4 { "feed_forward" } else { "mlp" };
    format!("{}{module}", layer(index))
}

/// How a family calls the tensors of a layer's experts.
pub(crate) struct ExpertNames {
    /// Of all of them.
    prefix: String,
    /// Of an expert: gate, up, down.
    matrices: [&'static str; 3],
    router: &'static str,
    /// The expert that every token visits.
    shared: &'static str,
}

/// How a family calls the matrices of an expert: gate, up, down.
pub(super) fn expert_matrices(architecture: Architecture) -> [&'static str; 3] {
    match architecture {
        Architecture::Mixtral => ["w1", "w3", "w2"],
        _ => ["gate_proj", "up_proj", "down_proj"],
    }
}

/// The names in layer `index`.
pub(crate) fn experts(architecture: Architecture, index: usize) -> ExpertNames {
    let matrices = expert_matrices(architecture);
    let prefix = match architecture {
        Architecture::Mixtral => format!("{}block_sparse_moe.", layer(index)),
        Architecture::Gemma4 => layer(index),
        _ => format!("{}.", mlp(architecture, index)),
    };
    let (router, shared) = match architecture {
        Architecture::GptOss | Architecture::Llama4 => ("router", "shared_expert"),
        Architecture::Glm4Moe | Architecture::DeepseekV3 => ("gate", "shared_experts"),
        Architecture::Gemma4 => ("router.proj", "shared_expert"),
        _ => ("gate", "shared_expert"),
    };
    ExpertNames { prefix, matrices, router, shared }
}

impl ExpertNames {
    /// `[E, H]`
    pub(crate) fn router(&self) -> String {
        format!("{}{}.weight", self.prefix, self.router)
    }

    /// `[E]`, of a router that has any.
    pub(crate) fn router_bias(&self, router: &Router) -> Option<String> {
        let bias = match router {
            Router::Biased => "bias",
            Router::Sigmoid { .. } => "e_score_correction_bias",
            Router::Softmax | Router::SigmoidOnInput | Router::ScaledSoftmax { .. } => {
                return None;
            }
        };
        Some(format!("{}{}.{bias}", self.prefix, self.router))
    }

    /// Biases of gate, up and down of an expert.
    pub(crate) fn biases_of(&self, expert: usize) -> [String; 3] {
        self.matrices.map(|matrix| format!("{}experts.{expert}.{matrix}.bias", self.prefix))
    }

    /// What the names of all experts' tensors begin with.
    pub(crate) fn all(&self) -> String {
        format!("{}experts", self.prefix)
    }

    /// Gate, up and down of an expert.
    pub(crate) fn of(&self, expert: usize) -> [String; 3] {
        self.matrices.map(|matrix| format!("{}experts.{expert}.{matrix}.weight", self.prefix))
    }

    /// What the names of the expert that every token visits begin with.
    pub(crate) fn shared(&self) -> String {
        format!("{}{}", self.prefix, self.shared)
    }
}
