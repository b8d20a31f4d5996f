//! GGUF files of tiny targets, by the names and in the form that converters give their tensors.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;

use candle_core::Tensor;
use candle_core::quantized::gguf_file::{Value as Gguf, write};
use candle_core::quantized::{GgmlDType, QTensor};
use serde_json::Value;

use super::files::{Tensors, read_tensors};

const NAMES: [(&str, &str); 20] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("model.layers.", "blk."),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attn_norm"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.gate.", "ffn_gate_inp."),
];

/// A name with parts of it replaced, one after another.
pub(crate) fn renamed(name: &str, parts: &[(&str, &str)]) -> String {
    parts.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// What a tensor of a Llama or a Qwen is called, but for experts that stand one by one.
pub(crate) fn name_of(name: &str) -> String {
    renamed(name, &NAMES)
}

/// Rows of `attn_q` and `attn_k`, or values of their biases, in the order of files of architecture `llama`: pairs
/// interleaved inside a head.
pub(crate) fn interleaved(tensor: &Tensor, head_dim: usize) -> Tensor {
    let rows = tensor.dim(0).expect("rows");
    let place = |row: usize| {
        let (head, within) = (row / head_dim, row % head_dim);
        (head * head_dim + within % 2 * (head_dim / 2) + within / 2) as u32
    };
    let order: Vec<u32> = (0..rows).map(place).collect();
    let order = Tensor::new(order.as_slice(), tensor.device()).expect("indices");
    tensor.index_select(&order, 0).expect("rows")
}

/// A tensor as it is stored: of blocks where it is a matrix whose rows are whole ones, else of floats.
pub(crate) fn stored(name: &str, tensor: &Tensor, blocks: GgmlDType) -> QTensor {
    let tensor = tensor.force_contiguous().expect("values");
    let width = tensor.dims().last().copied().unwrap_or(1);
    let is_matrix = tensor.rank() > 1 && !name.contains("gate_inp") && !name.contains("conv");
    let whole = is_matrix && width.is_multiple_of(blocks.block_size());
    QTensor::quantize(&tensor, if whole { blocks } else { GgmlDType::F32 }).expect("quantised")
}

/// A file of keys and tensors.
pub(crate) fn file_of<K: AsRef<str>>(
    keys: &[(K, Gguf)],
    tensors: &[(String, Tensor)],
    blocks: GgmlDType,
) -> Vec<u8> {
    let keys: Vec<(&str, &Gguf)> = keys.iter().map(|(key, value)| (key.as_ref(), value)).collect();
    let quantised: Vec<(&str, QTensor)> = tensors
        .iter()
        .map(|(name, tensor)| (name.as_str(), stored(name, tensor, blocks)))
        .collect();
    let tensors: Vec<(&str, &QTensor)> = quantised.iter().map(|(n, t)| (*n, t)).collect();
    let mut file = Cursor::new(Vec::new());
    write(&mut file, &keys, &tensors).expect("GGUF");
    file.into_inner()
}

/// What files call the parts of recurrent layers.
const RECURRENT: [(&str, &str); 12] = [
    ("linear_attn.in_proj_qkv.", "attn_qkv."),
    ("linear_attn.in_proj_z.", "attn_gate."),
    ("linear_attn.in_proj_b.", "ssm_beta."),
    ("linear_attn.in_proj_a.", "ssm_alpha."),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
];

/// Writes the tensors of a folder as a GGUF file, by the names and in the form that converters give them.
pub(crate) fn write_gguf<K: AsRef<str>>(
    folder: &Path,
    to: &Path,
    metadata: &[(K, Gguf)],
    matrices: GgmlDType,
) {
    let mut stacks: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    let mut tensors = Tensors::new();
    let mut all = read_tensors(folder.join("model.safetensors"));
    // Experts in the order of their numbers.
    all.sort_by_key(|(name, _)| (name.len(), name.clone()));
    let is_lfm = matches!(&metadata[0].1, Gguf::String(name) if name == "lfm2");
    for (name, tensor) in all {
        if let Some((layer, rest)) = name.split_once(".mlp.experts.") {
            let matrix = rest.split('.').nth(1).expect("a matrix").replace("_proj", "");
            let layer = layer.replace("model.layers.", "blk.");
            let stack = format!("{layer}.ffn_{matrix}_exps.weight");
            stacks.entry(stack).or_default().push(tensor);
            continue;
        }
        let norm = if is_lfm { "ffn_norm" } else { "post_attention_norm" };
        let stored = name_of(&name.replace("post_attention_layernorm", norm));
        let stored = renamed(&stored, &RECURRENT);
        let stored = if is_lfm { stored.replace("output_norm", "token_embd_norm") } else { stored };
        let less_one = !is_lfm && name.ends_with("norm.weight") && !name.contains("linear_attn");
        let form = match tensor.dims() {
            [channels, 1, taps] => tensor.reshape((*channels, *taps)),
            [1, width] => tensor.reshape(*width),
            _ if name.ends_with("A_log") => tensor.exp().and_then(|a| a.neg()),
            _ if less_one => &tensor + 1.0,
            _ => Ok(tensor),
        };
        tensors.push((stored, form.expect("a form")));
    }
    let stack = |experts: Vec<Tensor>| Tensor::stack(&experts, 0).expect("a stack");
    tensors.extend(stacks.into_iter().map(|(name, experts)| (name, stack(experts))));
    std::fs::write(to, file_of(metadata, &tensors, matrices)).expect("write");
}

/// Sizes of recurrent layers in a Qwen3.5 whose value heads are as many as its key heads: converters leave their order.
pub(crate) const RECURRENT_SIZES: [(&str, u32); 6] = [
    ("rope.dimension_count", 2),
    ("ssm.conv_kernel", 4),
    ("ssm.state_size", 8),
    ("ssm.group_count", 2),
    ("ssm.time_step_rank", 2),
    ("ssm.inner_size", 12),
];

pub(crate) fn numbers(keys: &[(&'static str, u32)]) -> Vec<(&'static str, Gguf)> {
    keys.iter().map(|(key, number)| (*key, Gguf::U32(*number))).collect()
}

/// Keys of a GGUF header for a tiny target.
pub(crate) fn gguf_keys(
    name: &'static str,
    config: &Value,
    more: &[(&'static str, Gguf)],
) -> Vec<(String, Gguf)> {
    let size = |key: &str| Gguf::U32(config[key].as_u64().expect("a size") as u32);
    let sizes = [
        ("block_count", size("num_hidden_layers")),
        ("context_length", size("max_position_embeddings")),
        ("embedding_length", size("hidden_size")),
        ("feed_forward_length", size("intermediate_size")),
        ("attention.head_count", size("num_attention_heads")),
        ("attention.head_count_kv", size("num_key_value_heads")),
        ("attention.key_length", size("head_dim")),
        ("attention.layer_norm_rms_epsilon", Gguf::F32(1e-5)),
        ("rope.freq_base", Gguf::F32(10000.0)),
    ];
    let given = |key: &str| more.iter().any(|(other, _)| *other == key);
    let keys = sizes.into_iter().filter(|(key, _)| !given(key)).chain(more.iter().cloned());
    let mut all = vec![("general.architecture".to_owned(), Gguf::String(name.into()))];
    all.extend(keys.map(|(key, value)| (format!("{name}.{key}"), value)));
    all
}
