//! Published names and shapes of a target's tensors.

use std::ops::Range;

use longdraft_kernels::recurrence::DeltaSizes;

use crate::config::{
    Architecture, DeltaNetConfig, ExpertsConfig, LatentConfig, LayerHeads, Mixer, NormPlaces,
    TargetConfig,
};
use crate::error::Result;
use crate::weights::TensorSpec;

/// Every tensor of a target, published names.
pub fn tensor_specs(config: &TargetConfig) -> Vec<TensorSpec> {
    specs_of(config, 0..config.num_hidden_layers)
}

/// Tensors of a target of which only the layers `loaded` are.
pub(super) fn specs_of(config: &TargetConfig, loaded: Range<usize>) -> Vec<TensorSpec> {
    let hidden = config.hidden_size;
    let mut specs = vec![
        TensorSpec::new("model.embed_tokens.weight", &[config.vocab_size, hidden]),
        TensorSpec::new("model.norm.weight", &[hidden]),
    ];
    if !config.tie_word_embeddings {
        specs.push(TensorSpec::new("lm_head.weight", &[config.vocab_size, hidden]));
    }
    if config.parts.per_layer_input > 0 && loaded == (0..config.num_hidden_layers) {
        let width = config.parts.per_layer_input;
        let all = config.num_hidden_layers * width;
        let [table, projection, norm] = PER_LAYER;
        specs.push(TensorSpec::new(table, &[config.parts.per_layer_vocabulary, all]));
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
            let prefix = format!("{prefix}mlp");
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
    for (norm, is_there) in [("q_norm", true), ("k_norm", has_keys)] {
        if config.qk_norm() && is_there {
            let name = format!("{prefix}self_attn.{norm}.weight");
            specs.push(TensorSpec::new(name, &[head_dim]));
        }
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
    let (width, hidden) = (sizes.moe_intermediate_size, config.hidden_size);
    specs.push(TensorSpec::new(names.router(), &[sizes.num_experts, hidden]));
    if config.parts.scored.is_some() {
        specs.push(TensorSpec::new(names.correction(), &[sizes.num_experts]));
    }
    for expert in 0..sizes.num_experts {
        let [gate, up, down] = names.of(expert);
        specs.push(TensorSpec::new(gate, &[width, hidden]));
        specs.push(TensorSpec::new(up, &[width, hidden]));
        specs.push(TensorSpec::new(down, &[hidden, width]));
    }
    if let Some(width) = sizes.shared_expert_intermediate_size {
        if config.parts.scored.is_none() {
            add(specs, &format!("{}_gate", names.shared()), 1, hidden, false);
        }
        add_mlp(specs, &names.shared(), width, hidden, false);
    }
}

/// Something of each of a layer's norms.
pub(super) struct Norms<T> {
    pub(super) before_attention: T,
    pub(super) after_attention: Option<T>,
    pub(super) before_feed_forward: T,
    pub(super) after_feed_forward: Option<T>,
}

/// How a layer's norms are called where they stand.
pub(super) fn norms(places: NormPlaces) -> Norms<&'static str> {
    match places {
        NormPlaces::Before => Norms {
            before_attention: "input_layernorm.weight",
            after_attention: None,
            before_feed_forward: "post_attention_layernorm.weight",
            after_feed_forward: None,
        },
        NormPlaces::BeforeAndAfter => Norms {
            before_attention: "input_layernorm.weight",
            after_attention: Some("post_attention_layernorm.weight"),
            before_feed_forward: "pre_feedforward_layernorm.weight",
            after_feed_forward: Some("post_feedforward_layernorm.weight"),
        },
    }
}

/// Published name, without the layer's prefix, of the norm before the feed-forward part.
pub(crate) fn norm_before_feed_forward(config: &TargetConfig) -> &'static str {
    norms(config.parts.norms).before_feed_forward
}

impl<T> Norms<T> {
    /// Those that there are, in the order of the layer.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        let Self { before_attention, after_attention, before_feed_forward, after_feed_forward } =
            self;
        let attention = [Some(before_attention), after_attention.as_ref()];
        let feed_forward = [Some(before_feed_forward), after_feed_forward.as_ref()];
        attention.into_iter().chain(feed_forward).flatten()
    }

    /// What `make` makes of each.
    pub(super) fn try_map<U>(&self, make: impl Fn(&T) -> Result<U>) -> Result<Norms<U>> {
        Ok(Norms {
            before_attention: make(&self.before_attention)?,
            after_attention: self.after_attention.as_ref().map(&make).transpose()?,
            before_feed_forward: make(&self.before_feed_forward)?,
            after_feed_forward: self.after_feed_forward.as_ref().map(&make).transpose()?,
        })
    }
}

/// What the names of a layer's tensors begin with.
pub(super) fn layer(index: usize) -> String {
    format!("model.layers.{index}.")
}

/// How a family calls the tensors of a layer's experts.
pub(crate) struct ExpertNames {
    /// Of all of them.
    prefix: String,
    /// Of an expert: gate, up, down.
    matrices: [&'static str; 3],
    /// Of the expert that every token visits.
    shared: &'static str,
    router: &'static str,
}

/// The names in layer `index`.
pub(crate) fn experts(architecture: Architecture, index: usize) -> ExpertNames {
    let plain = ["gate_proj", "up_proj", "down_proj"];
    let (module, matrices, router) = match architecture {
        Architecture::Mixtral => ("block_sparse_moe.", ["w1", "w3", "w2"], "gate"),
        Architecture::Gemma4 => ("", plain, "router.proj"),
        _ => ("mlp.", plain, "gate"),
    };
    let shared = match architecture {
        Architecture::DeepseekV3 => "shared_experts",
        _ => "shared_expert",
    };
    ExpertNames { prefix: format!("{}{module}", layer(index)), matrices, shared, router }
}

impl ExpertNames {
    /// `[E, H]`
    pub(crate) fn router(&self) -> String {
        format!("{}{}.weight", self.prefix, self.router)
    }

    /// `[E]`, what enters the choice of experts alone.
    pub(crate) fn correction(&self) -> String {
        format!("{}{}.e_score_correction_bias", self.prefix, self.router)
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
