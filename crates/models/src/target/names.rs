//! Published names and shapes of a target's tensors.

use std::ops::Range;

use crate::config::{Architecture, ExpertsConfig, NormPlaces, QkNorm, Router, TargetConfig};
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
    for index in loaded {
        let prefix = layer(index);
        for norm in norms(config.parts.norms).all() {
            specs.push(TensorSpec::new(format!("{prefix}{norm}"), &[hidden]));
        }
        let widths = match config.qk_norm() {
            QkNorm::PerHead => Some([config.head_dim; 2]),
            QkNorm::Whole => Some([config.query_size(), config.kv_size()]),
            QkNorm::None | QkNorm::Unweighted => None,
        };
        for (name, width) in QK_NORMS.iter().zip(widths.into_iter().flatten()) {
            specs.push(TensorSpec::new(format!("{prefix}{name}"), &[width]));
        }
        if config.parts.sinks {
            specs.push(TensorSpec::new(format!("{prefix}{SINKS}"), &[config.num_attention_heads]));
        }
        for (name, outputs, inputs, bias) in attention(config) {
            add(&mut specs, &format!("{prefix}{name}"), outputs, inputs, bias);
        }
        if let Some(sizes) = config.experts_in(index) {
            let names = experts(config.architecture, index);
            add_experts(&mut specs, &names, sizes, config);
        } else {
            let prefix = mlp(config.architecture, index);
            add_mlp(&mut specs, &prefix, config.intermediate_size, hidden, config.mlp_bias);
        }
    }
    specs
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

/// Name, outputs, inputs and bias of a layer's attention projections.
fn attention(config: &TargetConfig) -> [(&'static str, usize, usize, bool); 4] {
    let hidden = config.hidden_size;
    let (query, kv) = (config.query_size(), config.kv_size());
    [
        ("self_attn.q_proj", query, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, query, config.attention_output_bias),
    ]
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
        Architecture::Mixtral => format!("{}block_sparse_moe", layer(index)),
        _ => mlp(architecture, index),
    };
    let (router, shared) = match architecture {
        Architecture::GptOss | Architecture::Llama4 => ("router", "shared_expert"),
        Architecture::Glm4Moe => ("gate", "shared_experts"),
        _ => ("gate", "shared_expert"),
    };
    ExpertNames { prefix, matrices, router, shared }
}

impl ExpertNames {
    /// `[E, H]`
    pub(crate) fn router(&self) -> String {
        format!("{}.{}.weight", self.prefix, self.router)
    }

    /// `[E]`, of a router that has any.
    pub(crate) fn router_bias(&self, router: &Router) -> Option<String> {
        let bias = match router {
            Router::Biased => "bias",
            Router::Sigmoid { .. } => "e_score_correction_bias",
            Router::Softmax | Router::SigmoidOnInput => return None,
        };
        Some(format!("{}.{}.{bias}", self.prefix, self.router))
    }

    /// Biases of gate, up and down of an expert.
    pub(crate) fn biases_of(&self, expert: usize) -> [String; 3] {
        self.matrices.map(|matrix| format!("{}.experts.{expert}.{matrix}.bias", self.prefix))
    }

    /// What the names of all experts' tensors begin with.
    pub(crate) fn all(&self) -> String {
        format!("{}.experts", self.prefix)
    }

    /// Gate, up and down of an expert.
    pub(crate) fn of(&self, expert: usize) -> [String; 3] {
        self.matrices.map(|matrix| format!("{}.experts.{expert}.{matrix}.weight", self.prefix))
    }

    /// What the names of the expert that every token visits begin with.
    pub(crate) fn shared(&self) -> String {
        format!("{}.{}", self.prefix, self.shared)
    }
}
