//! Published names of what a GGUF file stores.

use std::collections::HashMap;

use super::experts::{expert_tensor, of_experts};
use super::heads;
use super::source::{Part, Stored};
use crate::config::{Architecture, LayerHeads, Mixer, NormPlaces, TargetConfig};
use crate::error::Problems;
use crate::target_model::names::mlp;
use crate::weights::gguf::header::Header;

/// Every tensor of the file that has a published name; experts and heads of latent rows one by one.
///
/// # Errors
/// - a list of every stack that holds another number of experts or heads than the header says
pub(super) fn published(
    header: &Header,
    config: &TargetConfig,
) -> Result<HashMap<String, Stored>, Problems> {
    let mut names = HashMap::new();
    let mut problems = Problems::default();
    for (name, info) in &header.tensors {
        if heads::publish(header, config, name, (&mut names, &mut problems)) {
            continue;
        }
        let pieces = pieces(name, info.shape.first().copied().unwrap_or(0), config);
        if !pieces.is_empty() {
            let stored = |part| Stored { name: name.clone(), part };
            names.extend(pieces.into_iter().map(|(published, part)| (published, stored(part))));
            continue;
        }
        if let Some(published) = hugging_face_name(name, config) {
            let taps = [".conv1d.weight", ".conv.conv.weight"];
            let is_taps = taps.iter().any(|taps| published.ends_with(taps));
            let part = if is_taps { Part::Taps } else { Part::Whole };
            names.insert(published, Stored { name: name.clone(), part });
            continue;
        }
        let Some((layer, tensor)) = expert_tensor(name) else {
            continue;
        };
        match of_experts(config, layer, tensor, (name.as_str(), info)) {
            Ok(published) => names.extend(published),
            Err(problem) => problems.push(problem),
        }
    }
    problems.0.sort();
    if problems.0.is_empty() { Ok(names) } else { Err(problems) }
}

/// Tensors outside of the layers: GGUF name, published name.
const OUTER: [(&str, &str); 7] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
    // LFM2's name of the norm before the head.
    ("token_embd_norm.weight", "model.norm.weight"),
    // Gemma 4's inputs of every layer.
    ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
    ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
    ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
];

/// Modules of a plain layer, also of drafts: GGUF name, published name.
pub(crate) const PLAIN_MODULES: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Modules of some families' layers beside these.
const MODULES: [(&str, &str); 22] = [
    // Of families that name the norm before the MLP after what stands before it.
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_in", "linear_attn.in_proj_qkvz"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    // Of attention over latent rows.
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    // Of Gemma 4: inputs of a layer, norms beside experts.
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
];

/// What a block that predicts further tokens has beside a layer, below its prefix.
const FURTHER: [(&str, &str); 4] = [
    ("nextn.eh_proj", "eh_proj"),
    ("nextn.enorm", "enorm"),
    ("nextn.hnorm", "hnorm"),
    ("nextn.shared_head_norm", "shared_head.norm"),
];

/// Tensors of a layer without a module of their own.
const VECTORS: [(&str, &str); 6] = [
    ("ssm_a", "linear_attn.A"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_dt", "linear_attn.dt_bias"),
    // Of Gemma 4.
    ("layer_output_scale.weight", "layer_scalar"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
];

/// The same where norms stand after parts or both before and after; these come before those of [`PLAIN_MODULES`].
const NORMS_ON_BOTH_SIDES: [(&str, &str); 3] = [
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const NORMS_OF_GLM: [(&str, &str); 3] = [
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
];

const NORMS_AFTER: [(&str, &str); 2] = [
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// The norm before the feed-forward part where files name it by what it follows.
const NORM_AFTER_ATTENTION: [(&str, &str); 1] =
    [("post_attention_norm", "post_attention_layernorm")];

/// Published tensors that a GGUF tensor of `rows` rows holds one after the other. Converters join queries, keys and
/// values of any family where they are asked to.
fn pieces(name: &str, rows: usize, config: &TargetConfig) -> Vec<(String, Part)> {
    use Architecture::{Glm, Glm4, Phi3};
    let fused = matches!(config.architecture, Glm | Glm4 | Phi3);
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let Some((Ok(layer), rest)) = layer.map(|(layer, rest)| (layer.parse::<usize>(), rest)) else {
        return Vec::new();
    };
    let cut = |modules: &[(&str, usize)], kind: &str| {
        let mut first = 0;
        let named = modules.iter().map(|(module, count)| {
            first += count;
            let part = Part::Rows { first: first - count, count: *count };
            (format!("model.layers.{layer}.{module}.{kind}"), part)
        });
        let named: Vec<_> = named.collect();
        if first == rows { named } else { Vec::new() }
    };
    let attends = config.mixer_of(layer) == Mixer::Attention && config.parts.latent.is_none();
    let width = config.intermediate_size;
    match rest {
        "attn_qkv.weight" | "attn_qkv.bias" if attends => {
            let LayerHeads { kv_heads, head_dim } = config.heads_of(layer);
            let of_a_head = if config.parts.output_gate { 2 * head_dim } else { head_dim };
            let (query, kv) = (config.num_attention_heads * of_a_head, kv_heads * head_dim);
            cut(
                &[("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
                rest.rsplit_once('.').map_or("", |(_, kind)| kind),
            )
        }
        "ffn_up.weight" if fused => {
            cut(&[("mlp.gate_proj", width), ("mlp.up_proj", width)], "weight")
        }
        _ => Vec::new(),
    }
}

/// The published name of a GGUF tensor.
fn hugging_face_name(name: &str, config: &TargetConfig) -> Option<String> {
    if let Some((_, published)) = OUTER.iter().find(|(gguf, _)| *gguf == name) {
        return Some((*published).to_owned());
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    if let Some((_, published)) = VECTORS.iter().find(|(gguf, _)| *gguf == rest) {
        return Some(format!("model.layers.{layer}.{published}"));
    }
    if let Some(rest) = rest.strip_prefix("shortconv.") {
        return Some(format!("model.layers.{layer}.conv.{rest}"));
    }
    let (module, kind) = rest.rsplit_once('.')?;
    let prefix = format!("model.layers.{layer}.");
    if rest == "attn_sinks.weight" {
        return Some(format!("{prefix}self_attn.sinks"));
    }
    let own: &[_] = match (config.parts.norms, config.architecture) {
        (NormPlaces::Before, Architecture::GptOss | Architecture::Glm4Moe) => &NORM_AFTER_ATTENTION,
        (NormPlaces::Before, _) => &[],
        (NormPlaces::BeforeAndAfter, _) => &NORMS_ON_BOTH_SIDES,
        (NormPlaces::BeforeAndAfterOfGlm, _) => &NORMS_OF_GLM,
        (NormPlaces::After, _) => &NORMS_AFTER,
    };
    let common = PLAIN_MODULES.iter().chain(&MODULES).chain(&FURTHER);
    let (_, module) = own.iter().chain(common).find(|(gguf, _)| *gguf == module)?;
    if let Some(matrix) = module.strip_prefix("mlp.") {
        return Some(format!("{}.{matrix}.{kind}", mlp(config.architecture, layer)));
    }
    Some(format!("{prefix}{module}.{kind}"))
}

/// The GGUF name of a published tensor of a model without experts and with norms before its parts.
pub fn gguf_name(published: &str) -> Option<String> {
    if let Some((gguf, _)) = OUTER.iter().find(|(_, name)| *name == published) {
        return Some((*gguf).to_owned());
    }
    let (layer, rest) = published.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (module, kind) = rest.rsplit_once('.')?;
    let (module, _) = PLAIN_MODULES.iter().chain(&MODULES).find(|(_, name)| *name == module)?;
    Some(format!("blk.{layer}.{module}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::super::experts::Tensor;
    use super::*;

    #[test]
    fn names_map_to_the_published_ones() {
        let of = |kind: &str| {
            let config = serde_json::json!({
                "model_type": kind, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 3,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 9,
                "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 6
            });
            TargetConfig::from_json(&config).expect("configuration")
        };
        let (llama, gemma) = (of("llama"), of("gemma2"));
        let name = |n: &str| hugging_face_name(n, &llama).unwrap_or_default();
        assert_eq!(name("blk.7.attn_q.bias"), "model.layers.7.self_attn.q_proj.bias");
        assert_eq!(name("blk.0.ffn_norm.weight"), "model.layers.0.post_attention_layernorm.weight");
        assert_eq!(name("token_embd.weight"), "model.embed_tokens.weight");
        for gguf in ["blk.7.attn_k.bias", "blk.3.ffn_down.weight", "output.weight"] {
            assert_eq!(gguf_name(&name(gguf)).as_deref(), Some(gguf));
        }
        assert_eq!(gguf_name("model.layers.0.mlp.experts.0.up_proj.weight"), None);
        let gemma = |n: &str| hugging_face_name(n, &gemma).unwrap_or_default();
        let layer = "model.layers.2.";
        for (gguf, published) in NORMS_ON_BOTH_SIDES {
            let published = format!("{layer}{published}.weight");
            assert_eq!(gemma(format!("blk.2.{gguf}.weight").as_str()), published);
        }
        assert_eq!(gemma("blk.2.attn_norm.weight"), format!("{layer}input_layernorm.weight"));
        assert_eq!(name("blk.2.post_ffw_norm.weight"), "");
        for (gguf, published) in [
            ("ssm_a", "linear_attn.A"),
            ("ssm_dt.bias", "linear_attn.dt_bias"),
            ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
            ("shortconv.in_proj.weight", "conv.in_proj.weight"),
            ("post_attention_norm.weight", "post_attention_layernorm.weight"),
            ("nextn.eh_proj.weight", "eh_proj.weight"),
            ("nextn.shared_head_norm.weight", "shared_head.norm.weight"),
            ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
            ("layer_output_scale.weight", "layer_scalar"),
            ("ffn_down_exps.scale", "router.per_expert_scale"),
        ] {
            assert_eq!(name(&format!("blk.1.{gguf}")), format!("model.layers.1.{published}"));
        }
        assert_eq!(name("blk.x.attn_q.weight"), "");
        assert_eq!(name("rope_freqs.weight"), "");
        assert_eq!(expert_tensor("blk.3.ffn_up_exps.weight"), Some((3, Tensor::Stack(1))));
        assert_eq!(expert_tensor("blk.3.ffn_up_exps.bias"), Some((3, Tensor::Biases(1))));
        assert_eq!(expert_tensor("blk.3.exp_probs_b.bias"), Some((3, Tensor::RouterBias)));
        assert_eq!(expert_tensor("blk.3.ffn_up.bias"), None);
        assert_eq!(expert_tensor("blk.3.ffn_gate_up_exps.weight"), Some((3, Tensor::GateUpStack)));
        for (kind, gguf, published) in [
            ("gpt_oss", "post_attention_norm.weight", "post_attention_layernorm.weight"),
            ("gpt_oss", "attn_sinks.weight", "self_attn.sinks"),
            ("glm4", "post_attention_norm.weight", "post_self_attn_layernorm.weight"),
            ("glm4", "ffn_norm.weight", "post_attention_layernorm.weight"),
            ("olmo2", "post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
            ("llama4_text", "ffn_up.weight", "feed_forward.up_proj.weight"),
        ] {
            let found = hugging_face_name(&format!("blk.1.{gguf}"), &of(kind)).unwrap_or_default();
            assert_eq!(found, format!("model.layers.1.{published}"), "{kind}");
        }
        let phi3 = of("phi3");
        let cut = pieces("blk.1.attn_qkv.weight", 16, &phi3);
        let rows: Vec<_> = cut.into_iter().map(|(_, part)| part).collect();
        let part = |first, count| Part::Rows { first, count };
        assert_eq!(rows, [part(0, 8), part(8, 4), part(12, 4)]);
        assert!(pieces("blk.1.attn_qkv.weight", 15, &phi3).is_empty());
        assert!(pieces("blk.1.ffn_up.weight", 12, &llama).is_empty());
        for kind in ["glm", "glm4", "phi3"] {
            let cut = pieces("blk.1.ffn_up.weight", 12, &of(kind));
            let rows: Vec<_> = cut.into_iter().map(|(_, part)| part).collect();
            assert_eq!(rows, [part(0, 6), part(6, 6)], "{kind}");
        }
    }

    #[test]
    fn joined_queries_keys_and_values_of_any_family_are_cut() {
        let of = |kind: &str| {
            let config = serde_json::json!({
                "model_type": kind, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 4,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 9
            });
            TargetConfig::from_json(&config).expect("configuration")
        };
        let cut = |name: &str, rows: usize, kind: &str| -> Vec<_> {
            let named = |(name, part): (String, Part)| match part {
                Part::Rows { first, count } => (name, first, count),
                other => panic!("{other:?}"),
            };
            pieces(name, rows, &of(kind)).into_iter().map(named).collect()
        };
        let wanted = |layer: usize, kind: &str, query: usize| {
            let name =
                |module: &str| format!("model.layers.{layer}.self_attn.{module}_proj.{kind}");
            [(name("q"), 0, query), (name("k"), query, 8), (name("v"), query + 8, 8)]
        };
        for kind in ["llama", "qwen2", "qwen3", "gemma2"] {
            for part in ["weight", "bias"] {
                let found = cut(&format!("blk.1.attn_qkv.{part}"), 32, kind);
                assert_eq!(found, wanted(1, part, 16), "{kind}");
            }
        }
        // Queries have their gates beside them; other layers hold the inputs of a delta net by this name.
        assert_eq!(cut("blk.3.attn_qkv.weight", 48, "qwen3_5_text"), wanted(3, "weight", 32));
        assert!(cut("blk.0.attn_qkv.weight", 48, "qwen3_5_text").is_empty());
    }
}
