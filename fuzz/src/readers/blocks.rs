//! Targets as GGUF files whose matrices are blocks of every type.

use candle_core::quantized::gguf_file::Value;
use longdraft_models::weights::gguf::write::save;

use crate::fixtures::CHAT_TEMPLATE;
use crate::scratch;

/// Tokens of the vocabulary.
const PIECES: [&str; 8] = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "ab", "\u{2581}ab"];
/// Query heads of 4 values: rows of the output projection are a block of 32.
const HEADS: u32 = 8;
/// Width of the layer's MLP.
const HIDDEN: usize = 32;
/// Where tensors start.
const ALIGNMENT: usize = 32;

/// A tensor of a file: name, sizes (innermost first), number of the element type, bytes.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) sizes: Vec<u64>,
    pub(crate) element: u32,
    pub(crate) bytes: Vec<u8>,
}

/// Number, values and bytes of a block.
type Kind = (u32, usize, usize);

const F32: Kind = (0, 1, 4);
const Q4_0: Kind = (2, 32, 18);
const Q4_1: Kind = (3, 32, 20);
const Q5_0: Kind = (6, 32, 22);
const Q5_1: Kind = (7, 32, 24);
const Q8_0: Kind = (8, 32, 34);
const Q2_K: Kind = (10, 256, 84);
const Q3_K: Kind = (11, 256, 110);
const Q4_K: Kind = (12, 256, 144);
const Q5_K: Kind = (13, 256, 176);
const Q6_K: Kind = (14, 256, 210);
const IQ4_NL: Kind = (20, 32, 18);
const IQ4_XS: Kind = (23, 256, 136);
const MXFP4: Kind = (39, 32, 17);

/// The tensors of a target whose blocks hold 256 values where they can.
pub(crate) fn large_blocks() -> Vec<Entry> {
    entries(256, [Q4_K, Q6_K, IQ4_XS, Q2_K, Q3_K, MXFP4, Q5_K, Q6_K, IQ4_NL])
}

/// The tensors of a target whose blocks hold 32 values.
pub(crate) fn small_blocks() -> Vec<Entry> {
    entries(32, [Q5_0, Q8_0, Q4_0, Q4_1, Q5_1, IQ4_NL, MXFP4, Q4_0, Q8_0])
}

/// One layer; the types of embedding, head, q, k, v, o, gate, up and down.
fn entries(width: usize, kinds: [Kind; 9]) -> Vec<Entry> {
    let heads = 4 * HEADS as usize;
    let shapes = [
        ("token_embd.weight", width, PIECES.len()),
        ("output.weight", width, PIECES.len()),
        ("blk.0.attn_q.weight", width, heads),
        ("blk.0.attn_k.weight", width, 4),
        ("blk.0.attn_v.weight", width, 4),
        ("blk.0.attn_output.weight", heads, width),
        ("blk.0.ffn_gate.weight", width, HIDDEN),
        ("blk.0.ffn_up.weight", width, HIDDEN),
        ("blk.0.ffn_down.weight", HIDDEN, width),
    ];
    let matrix = |((name, inputs, outputs), (element, values, size)): (_, Kind)| {
        // Small bytes are small finite scales.
        let bytes = inputs / values * size * outputs;
        let bytes = (0..bytes).map(|at| (at * 7 % 61) as u8).collect();
        Entry { name, sizes: vec![inputs as u64, outputs as u64], element, bytes }
    };
    let norm = |name| Entry {
        name,
        sizes: vec![width as u64],
        element: F32.0,
        bytes: 1.0_f32.to_le_bytes().repeat(width),
    };
    let norms = ["output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"];
    shapes.into_iter().zip(kinds).map(matrix).chain(norms.map(norm)).collect()
}

/// The bytes of a file with these tensors, one after the other.
pub(crate) fn file(entries: &[Entry]) -> Vec<u8> {
    let width = entries[0].sizes[0] as u32;
    let text = |text: &str| Value::String(text.to_owned());
    let array = |items: Vec<Value>| Value::Array(items);
    let metadata = [
        ("general.architecture", text("llama")),
        ("llama.block_count", Value::U32(1)),
        ("llama.context_length", Value::U32(64)),
        ("llama.embedding_length", Value::U32(width)),
        ("llama.feed_forward_length", Value::U32(HIDDEN as u32)),
        ("llama.attention.head_count", Value::U32(HEADS)),
        ("llama.attention.head_count_kv", Value::U32(1)),
        ("llama.attention.key_length", Value::U32(4)),
        ("llama.attention.value_length", Value::U32(4)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("tokenizer.ggml.model", text("llama")),
        ("tokenizer.ggml.tokens", array(PIECES.map(text).to_vec())),
        ("tokenizer.ggml.scores", array((0..8_u8).map(|at| Value::F32(-f32::from(at))).collect())),
        ("tokenizer.ggml.token_type", array([2, 3, 3, 1, 1, 1, 1, 1].map(Value::I32).to_vec())),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
        // The last one: its text does not end in a zero, so the file's padding can be told from it.
        ("tokenizer.chat_template", text(CHAT_TEMPLATE)),
    ]
    .map(|(key, value)| (key.to_owned(), value));
    let mut out = scratch::written("a.gguf", |path| {
        save(path, &metadata, &[]).expect("written");
    });
    out.truncate(out.iter().rposition(|byte| *byte != 0).expect("a header") + 1);
    out[8..16].copy_from_slice(&(entries.len() as u64).to_le_bytes());
    let mut data = Vec::new();
    for Entry { name, sizes, element, bytes } in entries {
        out.extend((name.len() as u64).to_le_bytes());
        out.extend(name.bytes());
        out.extend((sizes.len() as u32).to_le_bytes());
        out.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
        out.extend(element.to_le_bytes());
        out.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out.extend(data);
    out
}
