//! Configurations of models, with whole weights beside them.

use std::path::Path;

use longdraft_models::draft::open_draft;
use longdraft_models::language_model::{
    LanguageModel, LanguageModelConfig, Layout, config_of, open, save,
};
use longdraft_models::target_model::{Target, TargetOptions};
use serde_json::json;

use crate::fixtures::{self, TARGET};
use crate::scratch;

const CONFIG: &str = "config.json";

/// Opens a target whose `config.json` may say anything, and generates with it.
pub(super) fn target_config(bytes: &[u8]) -> bool {
    let folder = scratch::folder_with("target", fixtures::write_target, CONFIG, bytes);
    let Ok(target) = Target::open_path(&folder, &TargetOptions::default()) else { return false };
    let _ = fixtures::generate(&target, None);
    true
}

pub(super) fn target_configs() -> Vec<Vec<u8>> {
    let plain = fixtures::target_config();
    let mut scaled = plain.clone();
    scaled["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32
    });
    let mut yarn = plain.clone();
    yarn["rope_scaling"] = json!({
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0
    });
    [plain, scaled, yarn].map(|config| config.to_string().into_bytes()).to_vec()
}

fn write_hybrid(folder: &Path) {
    fixtures::write_target_of(folder, &fixtures::hybrid_config());
}

/// As [`target_config`] beside the weights of a target with recurrent layers.
pub(super) fn hybrid_config(bytes: &[u8]) -> bool {
    let folder = scratch::folder_with("hybrid", write_hybrid, CONFIG, bytes);
    let Ok(target) = Target::open_path(&folder, &TargetOptions::default()) else { return false };
    let _ = fixtures::generate(&target, None);
    true
}

pub(super) fn hybrid_configs() -> Vec<Vec<u8>> {
    vec![fixtures::hybrid_config().to_string().into_bytes()]
}

fn draft(folder: &Path) -> bool {
    let Ok(draft) = open_draft(folder, &TARGET) else { return false };
    let _ = fixtures::generate(&TARGET, Some(draft.as_ref()));
    true
}

fn write_eagle3(folder: &Path) {
    fixtures::eagle3().save(folder, TARGET.fingerprint()).expect("written");
}

/// Opens an EAGLE-3 draft whose `config.json` may say anything, and generates with it.
pub(super) fn eagle3_config(bytes: &[u8]) -> bool {
    draft(&scratch::folder_with("eagle3", write_eagle3, CONFIG, bytes))
}

pub(super) fn eagle3_configs() -> Vec<Vec<u8>> {
    vec![scratch::made(CONFIG, write_eagle3)]
}

fn write_glide(folder: &Path) {
    fixtures::glide().save(folder, TARGET.fingerprint()).expect("written");
}

/// As [`eagle3_config`] for a GLIDE draft.
pub(super) fn glide_config(bytes: &[u8]) -> bool {
    draft(&scratch::folder_with("glide", write_glide, CONFIG, bytes))
}

pub(super) fn glide_configs() -> Vec<Vec<u8>> {
    vec![scratch::made(CONFIG, write_glide)]
}

fn language_model() -> LanguageModelConfig {
    LanguageModelConfig {
        vocab_size: 16,
        num_hidden_layers: 2,
        hidden_size: 8,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        ..LanguageModelConfig::default()
    }
}

fn write_language_model(folder: &Path) {
    let config = language_model();
    let model = LanguageModel::initialise(&config, 1).expect("a model");
    let named = model.parameters().iter().map(|p| (p.name.clone(), p.var.as_tensor().clone()));
    save(folder, &config, "none", &named.collect::<Vec<_>>()).expect("written");
}

/// Opens a pretrained model whose `config.json` may say anything, and runs it.
pub(super) fn language_model_config(bytes: &[u8]) -> bool {
    let folder = scratch::folder_with("language", write_language_model, CONFIG, bytes);
    let Ok((model, _)) = open(&folder) else { return false };
    if let Ok(layout) = Layout::new(model.config(), &[3], 3) {
        let _ = model.hidden(&[1, 2, 3], &layout);
    }
    true
}

pub(super) fn language_model_configs() -> Vec<Vec<u8>> {
    vec![config_of(&language_model(), "none").to_string().into_bytes()]
}
