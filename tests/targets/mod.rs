//! Targets from every kind of file, and what happens with wrong and hostile ones.

mod held;
mod refused;

use std::path::Path;

use crate::support::files::{change_json, change_tensors};
use crate::support::gguf::{file_of, interleaved, name_of};
use crate::support::{
    self, complaint, fail, fail_with, loaded, logits as logits_of, random_tensors, stderr,
    tiny_config, with, write_target,
};
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Gguf;
use longdraft_models::target_model::{Target, TargetOptions};
use serde_json::{Value, json};

const HEADS: usize = 4;

/// The tiny Llama, wide enough for whole blocks of a type.
fn config_for(dtype: GgmlDType) -> Value {
    let width = dtype.block_size();
    let sizes = json!({
        "hidden_size": width, "intermediate_size": 2 * width, "head_dim": width / HEADS,
        "initializer_range": 0.1
    });
    with(tiny_config("llama"), if width > 32 { sizes } else { json!({}) })
}

/// Logits of a fixed text.
fn logits(path: &Path, dtype: DType) -> Vec<f32> {
    logits_of(path, &TargetOptions { dtype, ..TargetOptions::default() })
}

/// The tiny model as a GGUF file with a SentencePiece tokenizer.
fn gguf_bytes() -> Vec<u8> {
    gguf_bytes_of(GgmlDType::F32)
}

/// The same with matrices quantised where their rows consist of whole blocks.
fn gguf_bytes_of(dtype: GgmlDType) -> Vec<u8> {
    gguf_bytes_with(dtype, &[])
}

/// The same with other values of some keys, or more keys.
fn gguf_bytes_with(dtype: GgmlDType, changed: &[(&str, Gguf)]) -> Vec<u8> {
    gguf_bytes_from(&config_for(dtype), dtype, changed)
}

/// The same of another configuration.
fn gguf_bytes_from(config: &Value, dtype: GgmlDType, changed: &[(&str, Gguf)]) -> Vec<u8> {
    let head_dim = config["head_dim"].as_u64().expect("a size") as usize;
    let size = |key: &str| Gguf::U32(config[key].as_u64().expect("a size") as u32);
    let mut tensors = loaded(&random_tensors(config), DType::F32);
    for (name, tensor) in &mut tensors {
        if name.contains("q_proj") || name.contains("k_proj") {
            *tensor = interleaved(tensor, head_dim);
        }
        *name = name_of(name);
    }
    let strings = |items: Vec<String>| Gguf::Array(items.into_iter().map(Gguf::String).collect());
    let mut pieces = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    pieces.extend((0..253).map(|byte| format!("<0x{byte:02X}>")));
    pieces.extend(["▁".to_owned(), "▁t".to_owned()]);
    let scores = (0..pieces.len()).map(|i| Gguf::F32(-(i as f32))).collect();
    let types = (0..pieces.len() as i32)
        .map(|i| {
            Gguf::I32(match i {
                0 => 2,
                1 | 2 => 3,
                3..256 => 6,
                _ => 1,
            })
        })
        .collect();
    let metadata = [
        ("general.architecture", Gguf::String("llama".into())),
        ("llama.embedding_length", size("hidden_size")),
        ("llama.feed_forward_length", size("intermediate_size")),
        ("llama.block_count", Gguf::U32(2)),
        ("llama.attention.head_count", Gguf::U32(4)),
        ("llama.attention.head_count_kv", Gguf::U32(2)),
        ("llama.attention.layer_norm_rms_epsilon", Gguf::F32(1e-5)),
        ("llama.context_length", Gguf::U32(512)),
        ("llama.rope.freq_base", Gguf::F32(10000.0)),
        ("tokenizer.ggml.model", Gguf::String("llama".into())),
        ("tokenizer.ggml.tokens", strings(pieces)),
        ("tokenizer.ggml.scores", Gguf::Array(scores)),
        ("tokenizer.ggml.token_type", Gguf::Array(types)),
        ("tokenizer.ggml.bos_token_id", Gguf::U32(1)),
        ("tokenizer.ggml.eos_token_id", Gguf::U32(2)),
        (
            "tokenizer.chat_template",
            Gguf::String(
                "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}".into(),
            ),
        ),
    ];
    let kept = metadata.iter().filter(|(key, _)| changed.iter().all(|(other, _)| other != key));
    let metadata: Vec<(&str, Gguf)> = kept.chain(changed).cloned().collect();
    file_of(&metadata, &tensors, dtype)
}

#[test]
fn gguf_and_folder_of_the_same_weights_agree_bit_for_bit() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (folder, gguf) = (dir.path().join("hf"), dir.path().join("model.gguf"));
    for has_biases in [false, true] {
        let mut config = tiny_config("llama");
        config["attention_bias"] = has_biases.into();
        write_target(&folder, &config);
        std::fs::write(&gguf, gguf_bytes_from(&config, GgmlDType::F32, &[])).expect("write");
        let (a, b) = (logits(&folder, DType::F32), logits(&gguf, DType::F32));
        let same = a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "biases: {has_biases}");
        let target = Target::open_path(&gguf, &TargetOptions::default()).expect("target");
        assert_eq!(target.config().qkv_bias, has_biases);
    }
}

/// A head that lies in a folder decides, whatever `tie_word_embeddings` says.
#[test]
fn a_stored_head_of_its_own_is_used_though_the_configuration_ties_it() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut config = tiny_config("llama");
    config["tie_word_embeddings"] = json!(false);
    write_target(dir.path(), &config);
    let own = logits(dir.path(), DType::F32);
    change_json(dir.path().join("config.json"), |config| {
        config["tie_word_embeddings"] = json!(true);
    });
    assert_eq!(logits(dir.path(), DType::F32), own);
    let is_tied = || {
        let target = Target::open_path(dir.path(), &TargetOptions::default()).expect("target");
        target.config().tie_word_embeddings
    };
    assert!(!is_tied());
    // A copy of the table is no head of its own.
    change_tensors(dir.path().join("model.safetensors"), |tensors| {
        let of = |name: &str| tensors.iter().position(|(known, _)| known == name).expect(name);
        let [head, table] = [of("lm_head.weight"), of("model.embed_tokens.weight")];
        tensors[head].1 = tensors[table].1.clone();
    });
    assert!(is_tied());
}

#[test]
fn a_gguf_carries_its_tokenizer_and_template() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, gguf_bytes()).expect("write");
    let tokenizer = Target::open_tokenizer(&path.to_string_lossy()).expect("tokenizer");
    let ids = tokenizer.encode("AB").expect("ids").ids;
    assert_eq!(tokenizer.decode(&ids, true).expect("text"), "AB");
    let turn = longdraft_models::tokenizer::Message::new("user", "hi");
    let template = tokenizer.chat_template().expect("template");
    assert_eq!(template.render(&[turn], false).expect("text"), "<s>hi");
    // As `tokenizer.json` it is the same one.
    let folder = dir.path().join("saved");
    std::fs::create_dir(&folder).expect("folder");
    tokenizer.save(&folder).expect("saved");
    let saved = longdraft_models::tokenizer::TextTokenizer::from_folder(&folder).expect("opened");
    assert_eq!(saved.fingerprint().expect("hash"), tokenizer.fingerprint().expect("hash"));
}
