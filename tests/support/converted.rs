//! Folders of DeepSeek-V3 and Gemma 4 as GGUF files, by the names and in the form that converters give them.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Gguf;
use candle_core::{Device, Tensor};
use longdraft_models::TargetConfig;
use longdraft_models::config::{LatentConfig, Router};
use serde_json::Value;

use super::files::{Tensors, read_json, read_tensors};
use super::gguf::{self, file_of};

/// Changed, added or removed keys, without the architecture before them.
pub(crate) type Changes<'a> = &'a [(&'a str, Option<Gguf>)];

/// What versions of the format and their writers do differently.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    /// Whether what makes keys and values of latent rows stands head by head, as in newer files.
    pub(crate) heads_apart: bool,
    /// Whether gate and up of experts are one stack.
    pub(crate) fused: bool,
    /// What matrices are stored as where rows are whole blocks.
    pub(crate) blocks: GgmlDType,
    /// Whether the values of those blocks are stored as floats in their place.
    pub(crate) widened: bool,
}

impl Default for Form {
    fn default() -> Self {
        Self { heads_apart: true, fused: false, blocks: GgmlDType::F32, widened: false }
    }
}

const DEEPSEEK: [(&str, &str); 25] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    (".eh_proj", ".nextn.eh_proj"),
    (".shared_head.norm", ".nextn.shared_head_norm"),
    (".enorm", ".nextn.enorm"),
];

const GEMMA: [(&str, &str); 32] = [
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("post_per_layer_input_norm", "post_norm"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("router.proj", "ffn_gate_inp"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    ("experts.down_proj", "ffn_down_exps.weight"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The tensors of a folder under other names; experts that stand one by one as stacks.
fn renamed(folder: &Path, names: &[(&str, &str)], fused: bool) -> Tensors {
    let mut listed = read_tensors(folder.join("model.safetensors"));
    // Experts in the order of their numbers.
    listed.sort_by_key(|(name, _)| (name.len(), name.clone()));
    let mut stacks: BTreeMap<(String, String), Vec<Tensor>> = BTreeMap::new();
    let mut tensors = Tensors::new();
    for (name, tensor) in listed {
        let own = name.split_once("experts.").filter(|(before, _)| before.ends_with('.'));
        let own = own.and_then(|(before, rest)| Some((before, rest.split_once('.')?)));
        if let Some((before, (number, matrix))) = own
            && number.parse::<usize>().is_ok()
        {
            let layer = before.replace("model.layers.", "blk.").replace("mlp.", "");
            let matrix = matrix.trim_end_matches("_proj.weight").to_owned();
            stacks.entry((layer, matrix)).or_default().push(tensor);
            continue;
        }
        tensors.push((gguf::renamed(&name, names), tensor));
    }
    let mut stacks: BTreeMap<(String, String), Tensor> = stacks
        .into_iter()
        .map(|(key, experts)| (key, Tensor::stack(&experts, 0).expect("a stack")))
        .collect();
    let layers: Vec<String> = stacks.keys().map(|(layer, _)| layer.clone()).collect();
    for layer in layers.into_iter().filter(|_| fused) {
        let mut take = |matrix: &str| stacks.remove(&(layer.clone(), matrix.to_owned()));
        if let (Some(gate), Some(up)) = (take("gate"), take("up")) {
            let both = Tensor::cat(&[gate, up], 1).expect("both");
            stacks.insert((layer, "gate_up".to_owned()), both);
        }
    }
    let stack = |((layer, matrix), tensor)| (format!("{layer}ffn_{matrix}_exps.weight"), tensor);
    tensors.extend(stacks.into_iter().map(stack));
    tensors
}

fn save(
    to: &Path,
    architecture: &str,
    keys: &[(&str, Gguf)],
    changes: Changes<'_>,
    tensors: &[(String, Tensor)],
    Form { blocks, widened, .. }: Form,
) {
    let changed = |key: &str| changes.iter().any(|(other, _)| *other == key);
    let kept = keys.iter().filter(|(key, _)| !changed(key)).map(|(key, value)| (*key, value));
    let more = changes.iter().filter_map(|(key, value)| Some((*key, value.as_ref()?)));
    let full = |(key, value): (&str, &Gguf)| (format!("{architecture}.{key}"), value.clone());
    let mut metadata = vec![("general.architecture".to_owned(), Gguf::String(architecture.into()))];
    metadata.extend(kept.chain(more).map(full));
    let values = |(name, tensor): &(String, Tensor)| {
        let stored = gguf::stored(name, tensor, blocks);
        (name.clone(), stored.dequantize(&Device::Cpu).expect("values"))
    };
    let bytes = if widened {
        file_of(&metadata, &tensors.iter().map(values).collect::<Vec<_>>(), GgmlDType::F32)
    } else {
        file_of(&metadata, tensors, blocks)
    };
    std::fs::write(to, bytes).expect("written");
}

fn config_of(folder: &Path) -> (TargetConfig, Value) {
    let path = folder.join("config.json");
    (TargetConfig::from_file(&path).expect("configuration"), read_json(path))
}

fn size(size: usize) -> Gguf {
    Gguf::U32(size as u32)
}

fn each<T>(layers: usize, of: impl Fn(usize) -> T, value: impl Fn(T) -> Gguf) -> Gguf {
    Gguf::Array((0..layers).map(|layer| value(of(layer))).collect())
}

fn common(config: &TargetConfig) -> Vec<(&'static str, Gguf)> {
    vec![
        ("block_count", size(config.num_hidden_layers)),
        ("context_length", size(config.max_position_embeddings)),
        ("embedding_length", size(config.hidden_size)),
        ("feed_forward_length", size(config.intermediate_size)),
        ("attention.head_count", size(config.num_attention_heads)),
        ("attention.layer_norm_rms_epsilon", Gguf::F32(config.rms_norm_eps as f32)),
        ("rope.freq_base", Gguf::F32(config.rope.theta as f32)),
    ]
}

/// YaRN as files of `deepseek2` state it. `mscale` has no key of its own: a factor on cos and sin has, whose square is
/// on scores too.
fn yarn_of_deepseek(json: &Value) -> Vec<(&'static str, Gguf)> {
    let mut ropes = ["rope_parameters", "rope_scaling"].into_iter().map(|key| &json[key]);
    let Some(rope) = ropes.find(|rope| rope["factor"].is_number()) else {
        return Vec::new();
    };
    let number = |key: &str| rope[key].as_f64().unwrap_or(1.0);
    let log = 0.1 * number("factor").ln();
    let [m, all] = ["mscale", "mscale_all_dim"].map(|key| number(key) * log + 1.0);
    let factor = m / all;
    let same = (factor - 1.0).abs() < 1e-9;
    let multiplier =
        if same { 0.1 * number("mscale_all_dim") } else { 0.1 * (all / factor - 1.0) / log };
    let mut keys = vec![
        ("rope.scaling.type", Gguf::String("yarn".into())),
        ("rope.scaling.factor", Gguf::F32(number("factor") as f32)),
        (
            "rope.scaling.original_context_length",
            size(number("original_max_position_embeddings") as usize),
        ),
    ];
    if rope["mscale_all_dim"].is_number() {
        keys.push(("rope.scaling.yarn_log_multiplier", Gguf::F32(multiplier as f32)));
    }
    if !same {
        keys.push(("rope.scaling.attn_factor", Gguf::F32(factor as f32)));
    }
    keys
}

/// Writes a folder of DeepSeek-V3 as a file of `deepseek2`.
pub(crate) fn deepseek2(folder: &Path, to: &Path, form: Form, changes: Changes<'_>) {
    let (config, json) = config_of(folder);
    let LatentConfig { query_rank, rank, plain_dim, turned_dim, value_dim, .. } =
        config.parts.latent.expect("latent rows");
    let (heads, head_dim) = (config.num_attention_heads, plain_dim + turned_dim);
    let mut tensors = Vec::new();
    for (name, tensor) in renamed(folder, &DEEPSEEK, form.fused) {
        let name = name.replace(".hnorm", ".nextn.hnorm");
        if !(form.heads_apart && name.contains("attn_kv_b.")) {
            tensors.push((name, tensor));
            continue;
        }
        let all = tensor.reshape((heads, plain_dim + value_dim, rank)).expect("heads");
        let keys = all.narrow(1, 0, plain_dim).and_then(|keys| keys.transpose(1, 2));
        let values = all.narrow(1, plain_dim, value_dim);
        tensors.push((name.replace("attn_kv_b", "attn_k_b"), keys.expect("keys")));
        tensors.push((name.replace("attn_kv_b", "attn_v_b"), values.expect("values")));
    }
    let mut keys = common(&config);
    keys.extend([
        ("rope.dimension_count", size(turned_dim)),
        ("attention.kv_lora_rank", size(rank)),
        ("vocab_size", size(config.vocab_size)),
    ]);
    keys.extend(query_rank.map(|width| ("attention.q_lora_rank", size(width))));
    keys.extend(if form.heads_apart {
        vec![
            ("attention.head_count_kv", size(1)),
            ("attention.key_length", size(rank + turned_dim)),
            ("attention.value_length", size(rank)),
            ("attention.key_length_mla", size(head_dim)),
            ("attention.value_length_mla", size(value_dim)),
        ]
    } else {
        vec![
            ("attention.head_count_kv", size(heads)),
            ("attention.key_length", size(head_dim)),
            ("attention.value_length", size(value_dim)),
        ]
    });
    if let (Some(experts), Router::Sigmoid { groups, kept_groups, scale }) =
        (&config.experts, &config.parts.router)
    {
        let width = experts.moe_intermediate_size;
        let shared = experts.shared_expert_intermediate_size.unwrap_or(0) / width;
        keys.extend([
            ("leading_dense_block_count", size(experts.mlp_only_layers.len())),
            ("expert_count", size(experts.num_experts)),
            ("expert_used_count", size(experts.num_experts_per_tok)),
            ("expert_feed_forward_length", size(width)),
            ("expert_shared_count", size(shared)),
            ("expert_weights_scale", Gguf::F32(*scale as f32)),
            ("expert_weights_norm", Gguf::Bool(experts.norm_topk_prob)),
            ("expert_gating_func", size(2)),
            ("expert_group_count", size(*groups)),
            ("expert_group_used_count", size(*kept_groups)),
        ]);
    }
    keys.extend(yarn_of_deepseek(&json));
    save(to, "deepseek2", &keys, changes, &tensors, form);
}

/// Writes a folder of Gemma 4 as a file of `gemma4`.
pub(crate) fn gemma4(folder: &Path, to: &Path, form: Form, changes: Changes<'_>) {
    let (config, _) = config_of(folder);
    let mut tensors = renamed(folder, &GEMMA, form.fused);
    let divisors = config.rope.divisors.clone().expect("divisors of full layers");
    let count = divisors.len();
    let divisors = Tensor::from_vec(divisors, count, &Device::Cpu).expect("divisors");
    tensors.push(("rope_freqs.weight".to_owned(), divisors));
    let layers = config.num_hidden_layers;
    let slides = |layer: usize| config.window_of(layer).is_some();
    let full = (0..layers).find(|layer| !slides(*layer)).expect("a full layer");
    let [full, sliding] = [config.heads_of(full).head_dim, config.head_dim].map(size);
    let parts = &config.parts;
    let mut keys = common(&config);
    keys.retain(|(key, _)| *key != "feed_forward_length");
    let shared = parts.shared_keys_from.map_or(0, |first| layers - first);
    keys.extend([
        ("feed_forward_length", each(layers, |layer| config.inner_of(layer), size)),
        ("attention.head_count_kv", each(layers, |layer| config.heads_of(layer).kv_heads, size)),
        ("attention.key_length", full.clone()),
        ("attention.value_length", full.clone()),
        ("attention.key_length_swa", sliding.clone()),
        ("attention.value_length_swa", sliding.clone()),
        ("rope.dimension_count", full),
        ("rope.dimension_count_swa", sliding),
        ("attention.sliding_window", size(parts.window.expect("a window"))),
        ("attention.sliding_window_pattern", each(layers, slides, Gguf::Bool)),
        ("attention.shared_kv_layers", size(shared)),
        ("embedding_length_per_layer_input", size(parts.per_layer_input)),
    ]);
    let sliding_base = parts.sliding_rope.as_ref().map(|rope| Gguf::F32(rope.theta as f32));
    keys.extend(sliding_base.map(|base| ("rope.freq_base_swa", base)));
    let softcap = parts.logits_softcap.map(|softcap| Gguf::F32(softcap as f32));
    keys.extend(softcap.map(|softcap| ("final_logit_softcapping", softcap)));
    if let Some(experts) = &config.experts {
        keys.extend([
            ("expert_count", size(experts.num_experts)),
            ("expert_used_count", size(experts.num_experts_per_tok)),
            ("expert_feed_forward_length", size(experts.moe_intermediate_size)),
        ]);
    }
    save(to, "gemma4", &keys, changes, &tensors, form);
}
