//! Language models on disk: a folder with `config.json` and `model.safetensors`, or an artifact.
//! The folder of a Llama is a Hugging Face one, with what else belongs to the model under a key of
//! its own.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde_json::{Value, json};

use super::{LanguageModel, LanguageModelConfig, llama, renamed};
use crate::draft::files::read_json;
use crate::error::{ModelError, Result};
use crate::weights::artifact::ArtifactSource;
use crate::weights::atomic::write_atomically;
use crate::weights::safetensors::{SafetensorsSource, save as save_tensors};

/// What `config.json` says of these models.
const MODEL_TYPE: &str = "longdraft_language_model";
/// Key of what a Llama's `config.json` says beyond the published keys.
const OWN_KEY: &str = "longdraft";
const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// The folder or artifact that a path means: itself, a run's newest checkpoint; `None` if it is no
/// model of this kind.
pub fn locate(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return path.extension().is_some_and(|e| e == "ldq").then(|| path.to_path_buf());
    }
    let folders = [
        path.to_path_buf(),
        path.join("checkpoints").join("last"),
        path.join("checkpoints").join("last_2"),
    ];
    folders.into_iter().find(|folder| {
        read_json(&folder.join(CONFIG)).is_ok_and(|mut config| own_part(&mut config).is_some())
    })
}

/// `config.json` of a model.
pub fn config_of(config: &LanguageModelConfig, tokenizer_hash: &str) -> Value {
    let own = json!({ "tokenizer_hash": tokenizer_hash, "model": config });
    let (mut value, key, part) = if config.is_llama() {
        (llama::hugging_face_config(config), OWN_KEY, own)
    } else {
        (own, "model_type", json!(MODEL_TYPE))
    };
    value[key] = part;
    value
}

/// The part of a `config.json` that is written here, if it is one of these.
fn own_part(config: &mut Value) -> Option<Value> {
    if config["model_type"] == MODEL_TYPE {
        return Some(config.take());
    }
    let own = config.get_mut(OWN_KEY)?;
    own.get("model")?;
    Some(own.take())
}

/// Opens what [`locate`] found, or any path that it would find; returns the tokenizer's hash too.
///
/// # Errors
/// - there is no such model, or a list of what is wrong with it
pub fn open(path: &Path) -> Result<(LanguageModel, String)> {
    let place = located(path)?;
    if place.is_file() {
        let source = ArtifactSource::open(&place)?;
        let (config, hash) = of_artifact(&place, &source)?;
        return Ok((LanguageModel::from_source(&config, &source)?, hash));
    }
    let (config, hash) = of_folder(&place)?;
    let source = SafetensorsSource::open_file(&place.join(WEIGHTS))?;
    Ok((LanguageModel::from_source(&config, &source)?, hash))
}

/// The configuration of what [`open`] opens, and the tokenizer's hash; the weights of a folder are not read.
///
/// # Errors
/// - as [`open`]
pub fn describe(path: &Path) -> Result<(LanguageModelConfig, String)> {
    let place = located(path)?;
    if place.is_file() {
        return of_artifact(&place, &ArtifactSource::open(&place)?);
    }
    of_folder(&place)
}

fn located(path: &Path) -> Result<PathBuf> {
    locate(path).ok_or_else(|| {
        let problem = "no language model: neither an .ldq file, nor a folder or run with a \
                       config.json of this kind";
        ModelError::unrecognised(path, problem)
    })
}

fn of_artifact(place: &Path, source: &ArtifactSource) -> Result<(LanguageModelConfig, String)> {
    let artifact = source.artifact();
    Ok((checked(place, artifact.config.clone())?, artifact.tokenizer.clone()))
}

fn of_folder(place: &Path) -> Result<(LanguageModelConfig, String)> {
    let file = place.join(CONFIG);
    let mut value = own_part(&mut read_json(&file)?).unwrap_or_default();
    let config = checked(&file, value["model"].take())?;
    let hash = value["tokenizer_hash"].as_str().unwrap_or_default().to_owned();
    Ok((config, hash))
}

/// The section of a file, under our names of its keys or the reference's.
fn checked(path: &Path, mut value: Value) -> Result<LanguageModelConfig> {
    if let Value::Object(record) = &mut value {
        renamed::upgrade(record);
    }
    let config: LanguageModelConfig =
        serde_json::from_value(value).map_err(|error| ModelError::invalid(path, error))?;
    match config.problems().into_iter().next() {
        Some(problem) => Err(ModelError::invalid(path, problem.under("model"))),
        None => Ok(config),
    }
}

/// Writes tensors and `config.json` into a folder.
///
/// # Errors
/// - a file cannot be written
pub fn save(
    folder: &Path,
    config: &LanguageModelConfig,
    tokenizer_hash: &str,
    tensors: &[(String, Tensor)],
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(ModelError::io(folder))?;
    save_tensors(&folder.join(WEIGHTS), tensors, HashMap::new())?;
    let text = format!("{:#}\n", config_of(config, tokenizer_hash));
    write_atomically(&folder.join(CONFIG), text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::{DecoderArchitecture, RopeConfig, RopeRule};
    use super::*;
    use crate::draft::Parameter;
    use crate::test_support::{small_language_model, values};
    use crate::weights::artifact::{Artifact, Compression, QuantiseConfig, quantise};

    fn tensors(model: &LanguageModel) -> Vec<(String, Tensor)> {
        let named = |p: &Parameter| (p.name.clone(), p.var.as_tensor().clone());
        model.parameters().iter().map(named).collect()
    }

    /// The section under the reference's names.
    fn under_other_names(config: &LanguageModelConfig) -> Value {
        let mut section = json!(config);
        let map = section.as_object_mut().expect("a map");
        for (new, old) in [
            ("num_hidden_layers", "num_layers"),
            ("hidden_size", "model_dim"),
            ("num_attention_heads", "num_heads"),
            ("num_key_value_heads", "num_kv_heads"),
            ("intermediate_size", "mlp_dim"),
            ("tie_word_embeddings", "tie_embeddings"),
            ("final_logit_softcapping", "logit_softcap"),
        ] {
            let value = map.shift_remove(new).expect(new);
            map.insert(old.to_owned(), value);
        }
        let rope = map["rope"].as_object_mut().expect("a map");
        let base = rope.shift_remove("rope_theta").expect("a base");
        rope.insert("base".to_owned(), base);
        section
    }

    #[test]
    fn folders_and_artifacts_under_other_names_are_read() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let small = small_language_model();
        let rope = RopeConfig { rule: RopeRule::None, rope_theta: 5e4, ..RopeConfig::default() };
        let architecture = DecoderArchitecture::Llama;
        let llama = LanguageModelConfig { architecture, rope, ..small.clone() };
        for config in [small, llama] {
            let tensors = tensors(&LanguageModel::initialise(&config, 4)?);
            save(dir.path(), &config, "abc", &tensors)?;
            let mut written = config_of(&config, "abc");
            let own = if config.is_llama() { &mut written[OWN_KEY] } else { &mut written };
            own["model"] = under_other_names(&config);
            std::fs::write(dir.path().join(CONFIG), written.to_string()).expect("written");
            assert_eq!(open(dir.path())?.0.config(), &config);
            assert_eq!(describe(dir.path())?, (config.clone(), "abc".to_owned()));

            let stored = tensors.iter().map(|(name, tensor)| {
                Ok((name.clone(), quantise(name, tensor, &QuantiseConfig::default())?))
            });
            let (section, tokenizer) = (under_other_names(&config), "abc".to_owned());
            let tensors = stored.collect::<Result<_>>()?;
            let artifact = Artifact { config: section, tokenizer, tensors };
            let file = dir.path().join("model.ldq");
            artifact.save(&file, Compression::Zlib)?;
            assert_eq!(open(&file)?.0.config(), &config);
            assert_eq!(describe(&file)?, (config, "abc".to_owned()));
        }
        Ok(())
    }

    #[test]
    fn a_folder_is_read_back_and_other_folders_are_not_models() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        assert!(locate(dir.path()).is_none() && open(dir.path()).is_err());
        let config = small_language_model();
        let model = LanguageModel::initialise(&config, 4)?;
        save(&dir.path().join("checkpoints/last"), &config, "abc", &tensors(&model))?;
        let (read, hash) = open(dir.path())?;
        assert_eq!((read.config(), hash.as_str()), (&config, "abc"));
        for (a, b) in model.parameters().iter().zip(read.parameters()) {
            assert_eq!(values(&a.var), values(&b.var));
        }
        Ok(())
    }
}
