//! Files of weights.

use std::collections::{BTreeMap, HashMap};
use std::io::{Cursor, Read, Write};
use std::path::Path;

use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::{DType, Device, Tensor};
use longdraft_models::draft::block::gguf_file::{
    ARCHITECTURE as BLOCK, GgufBlockSource, MASK_TOKEN, stored_name,
};
use longdraft_models::draft::block::{
    BlockConfig, ChainKind, ChainSizes, LayerKind, tensor_specs as block_tensors,
};
use longdraft_models::draft::eagle3::gguf_file::{GgufDraftSource, TENSOR_NAMES};
use longdraft_models::language_model::{DecoderArchitecture, LanguageModel, LanguageModelConfig};
use longdraft_models::target_model::gguf::GgufSource;
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::artifact::{
    Artifact, ArtifactSource, Compression, QuantiseConfig, quantise,
};
use longdraft_models::weights::gguf::half_split_row;
use longdraft_models::weights::gguf::write::{Stored, save as save_gguf_file};
use longdraft_models::weights::pth::{PthSource, save as save_pth};
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use longdraft_serving::formats::eagle3::gguf::metadata as draft_metadata;
use serde_json::json;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::blocks;
use crate::fixtures::{self, TARGET, VOCABULARY, read_all, small_tensors};
use crate::scratch;

/// Reads a safetensors file.
pub(super) fn safetensors(bytes: &[u8]) -> bool {
    let path = scratch::file("weights.safetensors", bytes);
    let Ok(source) = SafetensorsSource::open_file(&path) else { return false };
    read_all(&source);
    for name in source.names() {
        let _ = source.stored_type(&name);
        let _ = (source.load_i8(&name), source.load_i64(&name), source.load_f64(&name));
        let _ = source.load_as_stored(&name);
    }
    true
}

pub(super) fn safetensors_files() -> Vec<Vec<u8>> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    vec![scratch::written("a.safetensors", |path| {
        save(path, &small_tensors(), metadata).expect("written");
    })]
}

fn write_shards(folder: &Path) {
    for (at, tensor) in small_tensors().into_iter().enumerate() {
        let path = folder.join(format!("{}.safetensors", at % 2));
        if at < 2 {
            save(&path, &[tensor], HashMap::new()).expect("written");
        }
    }
}

/// Reads the index of a folder of two shards.
pub(super) fn shard_index(bytes: &[u8]) -> bool {
    let name = "model.safetensors.index.json";
    let folder = scratch::folder_with("shards", write_shards, name, bytes);
    let Ok(source) = SafetensorsSource::open_folder(&folder) else { return false };
    read_all(&source);
    true
}

pub(super) fn shard_indices() -> Vec<Vec<u8>> {
    let map = json!({"fc.weight": "0.safetensors", "norm.weight": "1.safetensors"});
    let index = json!({"metadata": {"total_size": 72}, "weight_map": map});
    vec![index.to_string().into_bytes()]
}

/// Reads a target's GGUF file, with its tokenizer, and decodes with the weights as they are stored.
pub(super) fn gguf(bytes: &[u8]) -> bool {
    let path = scratch::file("target.gguf", bytes);
    let Ok(source) = GgufSource::open(&path) else { return false };
    read_all(&source);
    if let Ok(tokenizer) = TextTokenizer::from_gguf(source.header(), &path) {
        super::text::use_tokenizer(&tokenizer);
    }
    let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
    let target = Target::from_source(source.config().clone(), &source, &options);
    target.is_ok_and(|target| fixtures::generate_after(&target, None, &[1, 4, 5]))
}

pub(super) fn gguf_files() -> Vec<Vec<u8>> {
    let config = LanguageModelConfig {
        architecture: DecoderArchitecture::Llama,
        vocab_size: VOCABULARY,
        num_hidden_layers: 1,
        hidden_size: 8,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        intermediate_size: Some(16),
        ..LanguageModelConfig::default()
    };
    let model = LanguageModel::initialise(&config, 1).expect("a model");
    let folder = tempfile::tempdir().expect("a temporary folder");
    fixtures::write_tokenizer(folder.path());
    let byte_level = scratch::written("a.gguf", |path| {
        longdraft_serving::save_gguf(&model, "tiny", folder.path(), path).expect("written");
    });
    let blocks = [blocks::large_blocks(), blocks::small_blocks()];
    let [large, small] = blocks.map(|entries| blocks::file(&entries));
    vec![byte_level, quantised_gguf(), large, small]
}

/// A target of blocks of 8 bits, with pieces as SentencePiece has them.
fn quantised_gguf() -> Vec<u8> {
    let pieces = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "ab", "\u{2581}ab"];
    let array = |items: Vec<GgufValue>| GgufValue::Array(items);
    let text = |text: &str| GgufValue::String(text.to_owned());
    let metadata = [
        ("general.architecture", text("llama")),
        ("general.alignment", GgufValue::U32(32)),
        ("llama.block_count", GgufValue::U32(1)),
        ("llama.context_length", GgufValue::U32(64)),
        ("llama.embedding_length", GgufValue::U32(32)),
        ("llama.feed_forward_length", GgufValue::U32(32)),
        ("llama.attention.head_count", GgufValue::U32(2)),
        ("llama.attention.head_count_kv", GgufValue::U32(1)),
        ("llama.attention.layer_norm_rms_epsilon", GgufValue::F32(1e-5)),
        ("llama.rope.freq_base", GgufValue::F32(10_000.0)),
        ("tokenizer.ggml.model", text("llama")),
        ("tokenizer.ggml.tokens", array(pieces.iter().map(|piece| text(piece)).collect())),
        (
            "tokenizer.ggml.scores",
            array((0..8_u8).map(|at| GgufValue::F32(-f32::from(at))).collect()),
        ),
        ("tokenizer.ggml.token_type", array([2, 3, 3, 1, 1, 1, 1, 1].map(GgufValue::I32).to_vec())),
        ("tokenizer.ggml.bos_token_id", GgufValue::U32(1)),
        ("tokenizer.ggml.eos_token_id", GgufValue::U32(2)),
        ("tokenizer.chat_template", text(fixtures::CHAT_TEMPLATE)),
    ];
    let norm = |name: &str| {
        let ones = Tensor::ones(32, DType::F32, &Device::Cpu).expect("a tensor");
        (name.to_owned(), Stored::Plain(ones))
    };
    let matrix = |name: &str, rows: usize| {
        let values = Tensor::zeros((rows, 32), DType::F32, &Device::Cpu).expect("a tensor");
        (name.to_owned(), Stored::Q8_0(values))
    };
    let tensors = [
        matrix("token_embd.weight", pieces.len()),
        norm("output_norm.weight"),
        norm("blk.0.attn_norm.weight"),
        norm("blk.0.ffn_norm.weight"),
        matrix("blk.0.attn_q.weight", 32),
        matrix("blk.0.attn_k.weight", 16),
        matrix("blk.0.attn_v.weight", 16),
        matrix("blk.0.attn_output.weight", 32),
        matrix("blk.0.ffn_gate.weight", 32),
        matrix("blk.0.ffn_up.weight", 32),
        matrix("blk.0.ffn_down.weight", 32),
    ];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value));
    scratch::written("b.gguf", |path| {
        save_gguf_file(path, &metadata, &tensors).expect("written");
    })
}

/// Reads a draft's GGUF file.
pub(super) fn gguf_draft(bytes: &[u8]) -> bool {
    let path = scratch::file("draft.gguf", bytes);
    if let Ok(source) = GgufBlockSource::open(&path) {
        let _ = source.config(None);
        read_all(&source);
        return source.config(Some(TARGET.config())).is_ok();
    }
    let Ok(source) = GgufDraftSource::open(&path) else { return false };
    let _ = source.config(None);
    read_all(&source);
    source.config(Some(TARGET.config())).is_ok()
}

pub(super) fn gguf_drafts() -> Vec<Vec<u8>> {
    let draft = fixtures::eagle3();
    let config = draft.config();
    let tensors =
        draft.stored_tensors().expect("tensors").into_iter().filter_map(|(name, tensor)| {
            let (stored, _) = TENSOR_NAMES.iter().find(|(_, published)| *published == name)?;
            let rows = tensor.dims()[0] as u32;
            let order: Vec<u32> = (0..rows).collect();
            let order = if name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight") {
                let place = |row: &u32| half_split_row(*row as usize, config.head_dim) as u32;
                order.iter().map(place).collect()
            } else {
                order
            };
            let order = Tensor::new(order, &Device::Cpu).expect("a tensor");
            let tensor = tensor.index_select(&order, 0).expect("a tensor");
            Some(((*stored).to_owned(), Stored::Plain(tensor)))
        });
    let tensors: Vec<_> = tensors.collect();
    let one_layer = scratch::written("a.gguf", |path| {
        let metadata = draft_metadata(config, "draft", DType::F32, &[]);
        save_gguf_file(path, &metadata, &tensors).expect("written");
    });
    vec![one_layer, gguf_block_draft()]
}

/// A chain over two layers of the target, one of which slides.
fn gguf_block_draft() -> Vec<u8> {
    let chain = ChainSizes { rank: 2, kind: ChainKind::Vanilla, confidence: Some(true) };
    let config = BlockConfig {
        layers: vec![LayerKind::Full, LayerKind::Sliding],
        chain: Some(chain),
        ..BlockConfig::for_target(TARGET.config(), 2, 4, 3)
    };
    let text = |text: &str| GgufValue::String(text.to_owned());
    let of_sizes = [
        ("block_count", 2),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim),
        ("vocab_size", config.vocab_size),
        ("block_size", config.block_size),
        ("attention.sliding_window", 5),
    ];
    let mut metadata: Vec<(String, GgufValue)> =
        of_sizes.map(|(key, size)| (format!("{BLOCK}.{key}"), GgufValue::U32(size as u32))).into();
    let entered = config.target_layers.iter().map(|layer| GgufValue::I32(layer.0 as i32 + 1));
    let pattern = vec![GgufValue::Bool(false), GgufValue::Bool(true)];
    metadata.extend([
        ("general.architecture".to_owned(), text(BLOCK)),
        (format!("{BLOCK}.target_layers"), GgufValue::Array(entered.collect())),
        (format!("{BLOCK}.attention.sliding_window_pattern"), GgufValue::Array(pattern)),
        (MASK_TOKEN.to_owned(), GgufValue::U32(config.mask_token_id)),
    ]);
    let tensors = block_tensors(&config).into_iter().map(|spec| {
        let tensor = Tensor::ones(spec.shape.as_slice(), DType::F32, &Device::Cpu);
        let name = stored_name(&spec.name).expect("a name");
        (name, Stored::Plain(tensor.expect("a tensor")))
    });
    let tensors: Vec<_> = tensors.collect();
    scratch::written("c.gguf", |path| {
        save_gguf_file(path, &metadata, &tensors).expect("written");
    })
}

/// Reads a PyTorch file.
pub(super) fn pth(bytes: &[u8]) -> bool {
    let path = scratch::file("weights.pth", bytes);
    let Ok(source) = PthSource::open(&path) else { return false };
    read_all(&source);
    true
}

pub(super) fn pth_files() -> Vec<Vec<u8>> {
    vec![scratch::written("a.pth", |path| save_pth(path, &small_tensors()).expect("written"))]
}

/// Reads a pickle inside of a whole PyTorch file: no checksum keeps a fuzzer out.
pub(super) fn pickle(bytes: &[u8]) -> bool {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let mut put = |name: &str, bytes: &[u8]| {
        zip.start_file(name, options).expect("a zip in memory");
        zip.write_all(bytes).expect("a zip in memory");
    };
    put("archive/data.pkl", bytes);
    put("archive/byteorder", b"little");
    for (at, size) in [48, 24, 24, 24, 3].into_iter().enumerate() {
        put(&format!("archive/data/{at}"), &vec![at as u8; size]);
    }
    pth(zip.finish().expect("a zip in memory").get_ref())
}

pub(super) fn pickles() -> Vec<Vec<u8>> {
    let whole = pth_files().remove(0);
    let mut zip = ZipArchive::new(Cursor::new(whole)).expect("a zip");
    let mut pickle = Vec::new();
    let mut entry = zip.by_name("archive/data.pkl").expect("a pickle");
    entry.read_to_end(&mut pickle).expect("a pickle");
    vec![pickle]
}

/// Reads an artifact, compressed or what its compression holds.
pub(super) fn artifact(bytes: &[u8]) -> bool {
    let compressed = bytes.starts_with(b"LDQ8").then(|| {
        let level = flate2::Compression::fast();
        let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), level);
        encoder.write_all(bytes).expect("in memory");
        encoder.finish().expect("in memory")
    });
    let path = scratch::file("model.ldq", compressed.as_deref().unwrap_or(bytes));
    let Ok(source) = ArtifactSource::open(&path) else { return false };
    read_all(&source);
    let _ = source.artifact().payload_bytes();
    let _ = longdraft_models::language_model::open(&path);
    true
}

pub(super) fn artifacts() -> Vec<Vec<u8>> {
    let config = QuantiseConfig { keep_max_elements: 4, ..QuantiseConfig::default() };
    let stored = |(name, tensor): (String, Tensor)| {
        let stored = quantise(&name, &tensor, &config).expect("quantised");
        (name, stored)
    };
    let tensors: BTreeMap<_, _> = small_tensors().into_iter().map(stored).collect();
    let artifact =
        Artifact { config: json!({"num_hidden_layers": 1}), tokenizer: "none".into(), tensors };
    let of = |compression| artifact.to_bytes(compression).expect("bytes");
    let (zlib, zstd) = (of(Compression::Zlib), of(Compression::Zstd));
    let mut plain = Vec::new();
    let mut decoder = flate2::read::ZlibDecoder::new(zlib.as_slice());
    decoder.read_to_end(&mut plain).expect("a stream");
    vec![plain, zlib, zstd]
}
