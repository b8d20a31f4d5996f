//! Published names and shapes of a target's tensors.

use std::ops::Range;

use crate::config::{Architecture, ExpertsConfig, NormPlaces, TargetConfig};
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
        if config.qk_norm() {
            for norm in ["q_norm", "k_norm"] {
                let name = format!("{prefix}self_attn.{norm}.weight");
                specs.push(TensorSpec::new(name, &[config.head_dim]));
            }
        }
        for (name, outputs, inputs, bias) in attention(config) {
            add(&mut specs, &format!("{prefix}{name}"), outputs, inputs, bias);
        }
        if let Some(sizes) = config.experts_in(index) {
            let names = experts(config.architecture, index);
            add_experts(&mut specs, &names, sizes, hidden);
        } else {
            let prefix = format!("{prefix}mlp");
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
    hidden: usize,
) {
    let width = sizes.moe_intermediate_size;
    specs.push(TensorSpec::new(names.router(), &[sizes.num_experts, hidden]));
    for expert in 0..sizes.num_experts {
        let [gate, up, down] = names.of(expert);
        specs.push(TensorSpec::new(gate, &[width, hidden]));
        specs.push(TensorSpec::new(up, &[width, hidden]));
        specs.push(TensorSpec::new(down, &[hidden, width]));
    }
    if let Some(width) = sizes.shared_expert_intermediate_size {
        add(specs, &format!("{}_gate", names.shared()), 1, hidden, false);
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
}

/// The names in layer `index`.
pub(crate) fn experts(architecture: Architecture, index: usize) -> ExpertNames {
    let (module, matrices) = match architecture {
        Architecture::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
        _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    };
    ExpertNames { prefix: format!("{}{module}", layer(index)), matrices }
}

impl ExpertNames {
    /// `[E, H]`
    pub(crate) fn router(&self) -> String {
        format!("{}.gate.weight", self.prefix)
    }

    /// Gate, up and down of an expert.
    pub(crate) fn of(&self, expert: usize) -> [String; 3] {
        self.matrices.map(|matrix| format!("{}.experts.{expert}.{matrix}.weight", self.prefix))
    }

    /// What the names of the expert that every token visits begin with.
    pub(crate) fn shared(&self) -> String {
        format!("{}.shared_expert", self.prefix)
    }
}
