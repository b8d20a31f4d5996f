//! Published names and shapes of a target's tensors.

use std::ops::Range;

use longdraft_kernels::recurrence::DeltaSizes;

use crate::config::{
    Architecture, DeltaNetConfig, ExpertsConfig, LatentConfig, LayerHeads, Mixer, NormPlaces,
    QkNorm, Router, TargetConfig,
};
use crate::error::Result;
use crate::weights::{TensorRole, TensorSpec};

/// The table of embeddings, `[V, H]`.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The norm before the head, `[H]`.
pub(super) const FINAL_NORM: &str = "model.norm.weight";

/// Every tensor of a target, published names.
pub fn tensor_specs(config: &TargetConfig) -> Vec<TensorSpec> {
    specs_of(config, 0..config.num_hidden_layers)
}

/// Tensors of a target of which only the layers `loaded` are.
pub(super) fn specs_of(config: &TargetConfig, loaded: Range<usize>) -> Vec<TensorSpec> {
    let hidden = config.hidden_size;
    let (table, tied) = ([config.vocab_size, hidden], config.tie_word_embeddings);
    let role = if tied { TensorRole::Head } else { TensorRole::Embedding };
    let mut specs = vec![
        TensorSpec { role, ..TensorSpec::new(EMBEDDING, &table) },
        TensorSpec::new(FINAL_NORM, &[hidden]),
    ];
    if !tied {
        specs.push(TensorSpec::head("lm_head.weight", &table));
    }
    if config.parts.per_layer_input > 0 && loaded == (0..config.num_hidden_layers) {
        let width = config.parts.per_layer_input;
        let all = config.num_hidden_layers * width;
        let [table, projection, norm] = PER_LAYER;
        specs.push(TensorSpec::embedding(table, &[config.parts.per_layer_vocabulary, all]));
        specs.push(TensorSpec::new(projection, &[all, hidden]));
        specs.push(TensorSpec::new(norm, &[width]));
    }
    for index in loaded {
        let prefix = layer(index);
        add_end(&mut specs, config, &prefix);
        for norm in norms(config.parts.norms).all() {
            specs.push(TensorSpec::new(format!("{prefix}{norm}"), &[hidden]));
        }
        match config.mixer_of(index) {
            Mixer::Attention => match config.parts.latent {
                Some(latent) => add_latent(&mut specs, config, latent, &prefix),
                None => add_attention(&mut specs, config, index),
            },
            Mixer::DeltaNet => {
                if let Some(net) = config.parts.delta_net {
                    add_delta_net(&mut specs, &format!("{prefix}{DELTA_NET}"), net, hidden);
                }
            }
            Mixer::Convolution => {
                if let Some(own) = config.parts.convolution {
                    let prefix = format!("{prefix}{CONVOLUTION}");
                    add(&mut specs, &format!("{prefix}.in_proj"), 3 * hidden, hidden, own.bias);
                    add(&mut specs, &format!("{prefix}.out_proj"), hidden, hidden, own.bias);
                    let taps = [hidden, 1, own.kernel];
                    specs.push(TensorSpec::new(format!("{prefix}.conv.weight"), &taps));
                    if own.bias {
                        specs.push(TensorSpec::new(format!("{prefix}.conv.bias"), &[hidden]));
                    }
                }
            }
        }
        if let Some(sizes) = config.experts_in(index) {
            let names = experts(config.architecture, index);
            add_experts(&mut specs, &names, sizes, config);
            if config.architecture == Architecture::Gemma4 {
                add_beside(&mut specs, config, sizes, index);
            }
        } else {
            let prefix = mlp(config.architecture, index);
            add_mlp(&mut specs, &prefix, config.inner_of(index), hidden, config.mlp_bias);
        }
    }
    specs
}

fn add_attention(specs: &mut Vec<TensorSpec>, config: &TargetConfig, index: usize) {
    let prefix = layer(index);
    let LayerHeads { kv_heads, head_dim } = config.heads_of(index);
    let (query, kv) = (config.num_attention_heads * head_dim, kv_heads * head_dim);
    let gated = if config.parts.output_gate { 2 * query } else { query };
    let (hidden, bias) = (config.hidden_size, config.qkv_bias);
    let has_keys = config.keys_owner(index).is_none();
    let has_values = has_keys && has_values(config, index);
    let widths = match config.qk_norm() {
        QkNorm::PerHead => [head_dim; 2],
        QkNorm::Whole => [query, kv],
        QkNorm::None | QkNorm::Unweighted => [0; 2],
    };
    for ((norm, width), is_there) in QK_NORMS.iter().zip(widths).zip([true, has_keys]) {
        if width > 0 && is_there {
            specs.push(TensorSpec::new(format!("{prefix}{norm}"), &[width]));
        }
    }
    if config.parts.sinks {
        specs.push(TensorSpec::new(format!("{prefix}{SINKS}"), &[config.num_attention_heads]));
    }
    for (name, outputs, is_there) in
        [("q_proj", gated, true), ("k_proj", kv, has_keys), ("v_proj", kv, has_values)]
    {
        if is_there {
            add(specs, &format!("{prefix}self_attn.{name}"), outputs, hidden, bias);
        }
    }
    let output = format!("{prefix}self_attn.o_proj");
    add(specs, &output, hidden, query, config.attention_output_bias);
}

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

fn add_end(specs: &mut Vec<TensorSpec>, config: &TargetConfig, prefix: &str) {
    let (hidden, width) = (config.hidden_size, config.parts.per_layer_input);
    if width > 0 {
        add(specs, &format!("{prefix}per_layer_input_gate"), width, hidden, false);
        add(specs, &format!("{prefix}per_layer_projection"), hidden, width, false);
        let norm = format!("{prefix}post_per_layer_input_norm.weight");
        specs.push(TensorSpec::new(norm, &[hidden]));
    }
    if config.parts.layer_scalars {
        specs.push(TensorSpec::new(format!("{prefix}layer_scalar"), &[1]));
    }
}

fn add_beside(
    specs: &mut Vec<TensorSpec>,
    config: &TargetConfig,
    sizes: &ExpertsConfig,
    index: usize,
) {
    let (prefix, hidden) = (layer(index), config.hidden_size);
    for norm in NORMS_BESIDE {
        specs.push(TensorSpec::new(format!("{prefix}{norm}.weight"), &[hidden]));
    }
    specs.push(TensorSpec::new(format!("{prefix}router.scale"), &[hidden]));
    specs.push(TensorSpec::new(format!("{prefix}router.per_expert_scale"), &[sizes.num_experts]));
    let width = config.inner_of(index);
    add_mlp(specs, &format!("{prefix}mlp"), width, hidden, config.mlp_bias);
}

fn add_latent(
    specs: &mut Vec<TensorSpec>,
    config: &TargetConfig,
    latent: LatentConfig,
    prefix: &str,
) {
    let (hidden, heads, bias) = (config.hidden_size, config.num_attention_heads, config.qkv_bias);
    let LatentConfig { rank, plain_dim, turned_dim, value_dim, .. } = latent;
    let own = |name: &str| format!("{prefix}self_attn.{name}");
    let query = heads * latent.head_dim();
    if let Some(width) = latent.query_rank {
        add(specs, &own("q_a_proj"), width, hidden, bias);
        specs.push(TensorSpec::new(own("q_a_layernorm.weight"), &[width]));
        add(specs, &own("q_b_proj"), query, width, false);
    } else {
        add(specs, &own("q_proj"), query, hidden, false);
    }
    add(specs, &own("kv_a_proj_with_mqa"), rank + turned_dim, hidden, bias);
    specs.push(TensorSpec::new(own("kv_a_layernorm.weight"), &[rank]));
    add(specs, &own("kv_b_proj"), heads * (plain_dim + value_dim), rank, false);
    add(specs, &own("o_proj"), hidden, heads * value_dim, config.attention_output_bias);
}

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

fn add_delta_net(specs: &mut Vec<TensorSpec>, prefix: &str, net: DeltaNetConfig, hidden: usize) {
    let DeltaSizes { value_heads, value_dim, .. } = net.sizes;
    let (channels, values) = (net.sizes.channels(), net.sizes.values());
    let inputs: &[_] = if net.grouped_inputs {
        &[("in_proj_qkvz", net.input_size())]
    } else {
        &[("in_proj_qkv", channels), ("in_proj_z", values)]
    };
    let gates: &[_] = if net.grouped_gates {
        &[("in_proj_ba", 2 * value_heads)]
    } else {
        &[("in_proj_b", value_heads), ("in_proj_a", value_heads)]
    };
    for (name, outputs) in inputs.iter().chain(gates) {
        add(specs, &format!("{prefix}.{name}"), *outputs, hidden, false);
    }
    add(specs, &format!("{prefix}.out_proj"), hidden, values, false);
    let rates = if net.negated_rates { "A" } else { "A_log" };
    for (name, shape) in [
        ("conv1d.weight", &[channels, 1, net.kernel][..]),
        ("dt_bias", &[value_heads]),
        (rates, &[value_heads]),
        ("norm.weight", &[value_dim]),
    ] {
        specs.push(TensorSpec::new(format!("{prefix}.{name}"), shape));
    }
}

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

fn add(specs: &mut Vec<TensorSpec>, name: &str, outputs: usize, inputs: usize, bias: bool) {
    specs.push(TensorSpec::new(format!("{name}.weight"), &[outputs, inputs]));
    if bias {
        specs.push(TensorSpec::new(format!("{name}.bias"), &[outputs]));
    }
}

fn add_mlp(specs: &mut Vec<TensorSpec>, prefix: &str, width: usize, hidden: usize, bias: bool) {
    add(specs, &format!("{prefix}.gate_proj"), width, hidden, bias);
    add(specs, &format!("{prefix}.up_proj"), width, hidden, bias);
    add(specs, &format!("{prefix}.down_proj"), hidden, width, bias);
}

fn add_experts(
    specs: &mut Vec<TensorSpec>,
    names: &ExpertNames,
    sizes: &ExpertsConfig,
    config: &TargetConfig,
) {
    let (hidden, biases) = (config.hidden_size, config.parts.expert_biases);
    let width = sizes.moe_intermediate_size;
    specs.push(TensorSpec::new(names.router(), &[sizes.num_experts, hidden]));
    if let Some(bias) = names.router_bias(&config.parts.router) {
        specs.push(TensorSpec::new(bias, &[sizes.num_experts]));
    }
    for expert in 0..sizes.num_experts {
        if biases {
            let widths = [width, width, hidden];
            let named = names.biases_of(expert).into_iter().zip(widths);
            specs.extend(named.map(|(name, width)| TensorSpec::new(name, &[width])));
        }
        let [gate, up, down] = names.of(expert);
        specs.push(TensorSpec::new(gate, &[width, hidden]));
        specs.push(TensorSpec::new(up, &[width, hidden]));
        specs.push(TensorSpec::new(down, &[hidden, width]));
    }
    if let Some(width) = sizes.shared_expert_intermediate_size {
        if config.parts.router.gates_shared_expert() {
            add(specs, &format!("{}_gate", names.shared()), 1, hidden, false);
        }
        add_mlp(specs, &names.shared(), width, hidden, false);
    }
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

/// The names in layer `index`.
pub(crate) fn experts(architecture: Architecture, index: usize) -> ExpertNames {
    let matrices = match architecture {
        Architecture::Mixtral => ["w1", "w3", "w2"],
        _ => ["gate_proj", "up_proj", "down_proj"],
    };
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
