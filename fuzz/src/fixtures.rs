//! Tiny models and what belongs to them, made by the product's own writers.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use candle_core::{DType, Device, Tensor};
use longdraft_decode::decoder::{DecodeOptions, SpeculativeDecoder};
use longdraft_decode::drafter::drafter_of;
use longdraft_models::draft::Init;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target_model::{Target, TargetOptions, tensor_specs};
use longdraft_models::tokenizer::{TextTokenizer, train_bpe};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::save;
use longdraft_models::{TargetConfig, TargetTokenId};
use serde_json::{Value, json};

/// Of the target; a few more than the tokenizer has.
pub(crate) const VOCABULARY: usize = 272;

/// Tokens that the EAGLE-3 draft proposes.
const KEPT: usize = 12;

/// A chat template as models ship them.
pub(crate) const CHAT_TEMPLATE: &str = "{% for message in messages %}{{- '<|im_start|>' + message['role'] \
    + '\\n' + message.content.strip() + '<|im_end|>\\n' }}{% endfor %}\
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// `config.json` of the target.
pub(crate) fn target_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2
    })
}

/// `config.json` of a target with gated delta nets, whose last layer does not attend.
pub(crate) fn hybrid_config() -> Value {
    let mut config = target_config();
    let own = json!({
        "model_type": "qwen3_5_text", "num_hidden_layers": 4, "full_attention_interval": 3,
        "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 3, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 3
    });
    for (key, value) in own.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
}

fn config() -> TargetConfig {
    TargetConfig::from_json(&target_config()).expect("a valid configuration")
}

/// The target in memory.
pub(crate) static TARGET: LazyLock<Arc<Target>> = LazyLock::new(|| {
    let target = Target::random(config(), 7, &TargetOptions::default());
    Arc::new(target.expect("a target"))
});

/// Its tokenizer.
pub(crate) static TOKENIZER: LazyLock<TextTokenizer> = LazyLock::new(|| {
    let texts = ["the cat sat on the mat", "the mat and the cat", "7 + 15 = 22"];
    train_bpe(texts.map(str::to_owned).into_iter(), 264).expect("a tokenizer")
});

/// The tokenizer with a chat template.
pub(crate) static CHAT_TOKENIZER: LazyLock<TextTokenizer> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_tokenizer(folder.path());
    let config = json!({"chat_template": CHAT_TEMPLATE, "eos_token": "</s>"}).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("written");
    TextTokenizer::from_folder(folder.path()).expect("a tokenizer")
});

/// Writes `tokenizer.json`.
pub(crate) fn write_tokenizer(folder: &Path) {
    TOKENIZER.save(folder).expect("written");
}

/// Random tensors of a target.
fn tensors(config: &TargetConfig) -> Vec<(String, Tensor)> {
    let source = MemorySource::random(&tensor_specs(config), 0.3, 7).expect("tensors");
    let load = |name: String| {
        let tensor = source.load(&name, DType::F32).expect("a tensor");
        (name, tensor)
    };
    source.names().into_iter().map(load).collect()
}

/// Writes the target as a Hugging Face folder.
pub(crate) fn write_target(folder: &Path) {
    write_target_of(folder, &target_config());
}

/// Writes a target of a configuration.
pub(crate) fn write_target_of(folder: &Path, config: &Value) {
    write_tokenizer(folder);
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    let config = TargetConfig::from_json(config).expect("a valid configuration");
    save(&folder.join("model.safetensors"), &tensors(&config), HashMap::new()).expect("written");
}

/// A draft of the target.
pub(crate) fn eagle3() -> Eagle3Draft {
    let config = Eagle3Config::for_target(&config(), KEPT).expect("a draft's configuration");
    let kept = (0..KEPT).map(|token| TargetTokenId(20 * token as u32 + 2)).collect();
    let map = VocabularyMap::new(kept, VOCABULARY).expect("a vocabulary");
    let ends = TARGET.hold_ends().expect("ends");
    let embedding = ends.embedding().expect("embeddings");
    Eagle3Draft::initialise(&config, map, &embedding, 3).expect("a draft")
}

/// The other kind of draft.
pub(crate) fn glide() -> GlideDraft {
    let config = GlideConfig::for_target(&config(), None);
    GlideDraft::initialise(&config, &TARGET, Init::Random, 3).expect("a draft")
}

/// Some tensors of every type that files hold.
pub(crate) fn small_tensors() -> Vec<(String, Tensor)> {
    let matrix = Tensor::arange(0.0_f32, 12.0, &Device::Cpu).and_then(|t| t.reshape((3, 4)));
    let matrix = matrix.expect("a tensor");
    let of = |dtype| matrix.to_dtype(dtype).expect("a tensor");
    let ids = Tensor::new(&[0_i64, 7, 9], &Device::Cpu).expect("a tensor");
    let flags = Tensor::new(&[0_u8, 1, 1], &Device::Cpu).expect("a tensor");
    [
        ("fc.weight", of(DType::F32)),
        ("norm.weight", of(DType::BF16)),
        ("midlayer.weight", of(DType::F16)),
        ("d2t", ids),
        ("t2d", flags),
    ]
    .map(|(name, tensor)| (name.to_owned(), tensor))
    .to_vec()
}

/// Reads every tensor of a source in every way; errors are fine.
pub(crate) fn read_all(source: &dyn WeightSource) {
    for name in source.names() {
        let _ = source.shape(&name);
        let _ = source.load(&name, DType::F32);
        let _ = source.load(&name, DType::BF16);
        let _ = source.load_quantised(&name);
        let _ = source.load_integers(&name);
    }
}

/// Generates a few tokens.
pub(crate) fn generate(target: &Target, draft: Option<&dyn Draft>) -> bool {
    generate_after(target, draft, &[1, 70, 71])
}

/// The same after a prompt of the target's vocabulary.
pub(crate) fn generate_after(target: &Target, draft: Option<&dyn Draft>, prompt: &[u32]) -> bool {
    let drafter = draft.map(|draft| drafter_of(draft, target, None)).transpose();
    let Ok(drafter) = drafter else { return false };
    let options = DecodeOptions { max_new_tokens: 3, ..DecodeOptions::default() };
    let prompt: Vec<_> = prompt.iter().copied().map(TargetTokenId).collect();
    let mut listener = |_| ControlFlow::Continue(());
    SpeculativeDecoder::new(target, drafter).generate(&prompt, &options, &mut listener).is_ok()
}
