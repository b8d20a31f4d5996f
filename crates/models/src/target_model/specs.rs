//! Names and shapes of every tensor of a target.

use std::ops::Range;

use longdraft_kernels::recurrence::DeltaSizes;

use super::names::{
    CONVOLUTION, DELTA_NET, EMBEDDING, ExpertNames, FINAL_NORM, NORMS_BESIDE, PER_LAYER, QK_NORMS,
    SINKS, experts, has_values, layer, mlp, norms,
};
use crate::config::{
    Architecture, DeltaNetConfig, ExpertsConfig, LatentConfig, LayerHeads, Mixer, QkNorm,
    TargetConfig,
};
use crate::weights::{TensorRole, TensorSpec};

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
