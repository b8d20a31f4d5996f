//! Tensors that files store in one piece, and those that they store apart.

use std::io::Cursor;

use candle_core::Device;
use candle_core::quantized::gguf_file::{Value, write};
use candle_core::quantized::{GgmlDType, QTensor};
use longdraft_kernels::matrix::Matrix;

use super::*;
use crate::target_model::{Layers, Target, TargetOptions};

/// A Llama of one layer, two query heads and a key head of 4 values each, which holds these tensors; matrices as
/// blocks.
fn llama(tensors: &[(&str, &Tensor)]) -> (tempfile::TempDir, GgufSource) {
    let sizes = [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 8),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 4),
    ];
    let keys = sizes.map(|(key, size)| (format!("llama.{key}"), Value::U32(size)));
    let architecture = Value::String("llama".into());
    let mut metadata = vec![("general.architecture", &architecture)];
    metadata.extend(keys.iter().map(|(key, value)| (key.as_str(), value)));
    let stored = |tensor: &Tensor| {
        let dtype = if tensor.rank() == 2 { GgmlDType::Q8_0 } else { GgmlDType::F32 };
        QTensor::quantize(tensor, dtype).expect("a tensor")
    };
    let tensors: Vec<_> = tensors.iter().map(|(name, values)| (*name, stored(values))).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let mut file = Cursor::new(Vec::new());
    write(&mut file, &metadata, &tensors).expect("GGUF");
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file.into_inner()).expect("written");
    let source = GgufSource::open(&path).expect("a source");
    (dir, source)
}

#[test]
fn joined_queries_keys_and_values_are_those_of_separate_tensors() {
    let values = |first: usize, shape: &[usize]| {
        let count = shape.iter().product::<usize>();
        let values: Vec<f32> = (first..first + count).map(|value| value as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor")
    };
    let table = values(0, &[5, 32]);
    let weights = [values(0, &[8, 32]), values(300, &[4, 32]), values(600, &[4, 32])];
    let biases = [values(0, &[8]), values(20, &[4]), values(40, &[4])];
    let [q, k, v] = &weights;
    let [of_q, of_k, of_v] = &biases;
    let (_apart, apart) = llama(&[
        ("token_embd.weight", &table),
        ("blk.0.attn_q.weight", q),
        ("blk.0.attn_k.weight", k),
        ("blk.0.attn_v.weight", v),
        ("blk.0.attn_q.bias", of_q),
        ("blk.0.attn_k.bias", of_k),
        ("blk.0.attn_v.bias", of_v),
    ]);
    let [weight, bias] =
        [&weights, &biases].map(|parts| Tensor::cat(parts, 0).expect("one tensor"));
    let (_joined, joined) = llama(&[
        ("token_embd.weight", &table),
        ("blk.0.attn_qkv.weight", &weight),
        ("blk.0.attn_qkv.bias", &bias),
    ]);
    assert!(joined.config().qkv_bias);
    for module in ["q", "k", "v"] {
        let name = |kind: &str| format!("model.layers.0.self_attn.{module}_proj.{kind}");
        let load = |source: &GgufSource, name: &str| {
            let values = source.load(name, DType::F32).expect("values").flatten_all();
            values.and_then(|values| values.to_vec1::<f32>()).expect("values")
        };
        for kind in ["weight", "bias"] {
            let name = name(kind);
            assert_eq!(load(&joined, &name), load(&apart, &name), "{name}");
        }
        for source in [&joined, &apart] {
            // Each head's first row, and both rows of a pair that lie apart.
            for row in [0, 1, 2, 3] {
                let rows = source.load_rows(&name("weight"), row..row + 1, DType::F32);
                let rows = rows.and_then(|rows| Ok(rows.to_vec2::<f32>()?)).expect("a row");
                let whole = load(source, &name("weight"));
                assert_eq!(rows, [&whole[32 * row..32 * (row + 1)]], "{module}, row {row}");
            }
            let beyond = source.load_rows(&name("weight"), 7..9, DType::F32);
            assert!(beyond.is_err(), "{module}");
        }
        let blocks = joined.load_quantised(&name("weight")).expect("read").expect("blocks");
        let blocks = Matrix::Quantised(blocks.into()).to_dense().expect("values");
        let blocks = blocks.flatten_all().and_then(|all| all.to_vec1::<f32>()).expect("values");
        assert_eq!(blocks, load(&apart, &name("weight")), "{module}");
    }
}

#[test]
fn biases_norms_and_scales_that_no_part_reads_are_named() {
    let unread = [
        "blk.0.attn_q.scale",
        "blk.0.attn_output.input_scale",
        "blk.0.ffn_up.bias",
        "blk.0.ffn_sub_norm.weight",
        "output.scale",
    ];
    // What is read, and of an encoder of images.
    let others =
        ["blk.0.attn_q.bias", "blk.0.attn_norm.weight", "output_norm.weight", "v.blk.0.ln1.bias"];
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).expect("a tensor");
    let (table, vector) = (ones(&[5, 32]), ones(&[32]));
    let mut tensors = vec![("token_embd.weight", &table)];
    tensors.extend(unread.iter().chain(&others).map(|name| (*name, &vector)));
    let (folder, _) = llama(&tensors);
    let path = folder.path().join("model.gguf");
    let error = Target::check_weights(&path, Layers::All).expect_err("refused").to_string();
    let opened = Target::open_path(&path, &TargetOptions::default()).err().expect("refused");
    assert_eq!(opened.to_string(), error);
    let is_named = |name: &&str| error.contains(&format!("`{name}` is not read"));
    assert!(unread.iter().all(is_named), "{error}");
    assert!(!others.iter().any(is_named), "{error}");
}
