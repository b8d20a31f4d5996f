//! A pretrained Llama as one GGUF file: weights, configuration and tokenizer.

use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Tensor};
use longdraft_models::error::Problems;
use longdraft_models::language_model::{LanguageModel, target_config};
use longdraft_models::target_model::gguf::gguf_name;
use longdraft_models::weights::gguf::write::{Stored, save};
use longdraft_models::{ModelError, tokenizer::TextTokenizer};

use crate::error::{Result, ServingError};
use crate::formats::files::interleaved;
use crate::formats::gguf::decoder;
use crate::tokenizer;

/// Values of a Q8_0 block; rows that are not made of whole ones are kept as f16.
const BLOCK: usize = 32;

/// The format's number for files of such blocks.
const Q8_0: u32 = 7;

/// The key that says whether a text gets the start token.
const ADD_START: &str = "tokenizer.ggml.add_bos_token";

/// Writes a model with matrices as Q8_0 blocks and norms in f32; targets, drafts and llama.cpp read
/// it. `folder` holds the `tokenizer.json` that it was trained with.
///
/// # Errors
/// - the model is no Llama, the tokenizer has no GGUF form, or the file cannot be written
pub fn save_gguf(model: &LanguageModel, name: &str, folder: &Path, path: &Path) -> Result<()> {
    let invalid = |problem: String| {
        ServingError::Model(ModelError::Invalid {
            path: path.to_path_buf(),
            problems: Problems(vec![problem]),
        })
    };
    if !model.config().is_llama() {
        let problem = "GGUF files hold no layers of this kind: train with `model.architecture: \
                       llama`";
        return Err(invalid(problem.into()));
    }
    let config = target_config(model.config());
    let known = TextTokenizer::from_folder(folder)?.vocabulary();
    if known > config.vocab_size {
        let problem =
            format!("{known} tokens in the tokenizer, {} in the model", config.vocab_size);
        return Err(invalid(problem));
    }
    let keys = tokenizer::from_folder(folder, &config);
    let mut metadata = decoder!(config, "llama", Q8_0, config.num_hidden_layers).keys(name);
    metadata.extend(keys.map_err(invalid)?.into_iter().filter(|(key, _)| key != ADD_START));
    // Documents of pretraining begin with it, whatever the tokenizer's own files say.
    metadata.push((ADD_START.to_owned(), Value::Bool(true)));
    let tensors = model.parameters().iter().map(|parameter| {
        let tensor = parameter.var.as_tensor().detach();
        let gguf = gguf_name(&parameter.name)
            .ok_or_else(|| invalid(format!("tensor `{}` has no GGUF name", parameter.name)))?;
        Ok((gguf, stored(&parameter.name, &tensor, config.head_dim)?))
    });
    Ok(save(path, &metadata, &tensors.collect::<Result<Vec<_>>>()?)?)
}

fn stored(name: &str, tensor: &Tensor, head_dim: usize) -> Result<Stored> {
    if tensor.rank() == 1 {
        return Ok(Stored::Plain(tensor.clone()));
    }
    let rotated = name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight");
    let tensor = if rotated { interleaved(tensor, head_dim)? } else { tensor.clone() };
    if tensor.dim(1)?.is_multiple_of(BLOCK) {
        return Ok(Stored::Q8_0(tensor));
    }
    Ok(Stored::Plain(tensor.to_dtype(DType::F16)?))
}

#[cfg(test)]
mod tests {
    use longdraft_models::language_model::{
        DecoderArchitecture, LanguageModelConfig, RopeConfig, RopeRule, tensor_specs,
    };
    use longdraft_models::target_model::{PackedSequence, Tap, Taps, Target, TargetOptions};
    use longdraft_models::tokenizer::train_bpe;
    use longdraft_models::weights::memory::MemorySource;

    use super::*;

    fn config() -> LanguageModelConfig {
        LanguageModelConfig {
            architecture: DecoderArchitecture::Llama,
            vocab_size: 300,
            num_hidden_layers: 2,
            hidden_size: 64,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            intermediate_size: Some(40),
            rope: RopeConfig { rule: RopeRule::None, ..RopeConfig::default() },
            ..LanguageModelConfig::default()
        }
    }

    #[test]
    fn a_written_file_is_a_target_with_logits_and_tokens_of_the_model() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let text = "the cat sat on the mat 12 times. ".repeat(20);
        let own = train_bpe(std::iter::once(text.clone()), 300)?;
        own.save(dir.path())?;
        let source = MemorySource::random(&tensor_specs(&config()), 0.2, 3)?;
        let model = LanguageModel::from_source(&config(), &source)?.frozen()?;
        let path = dir.path().join("model.gguf");
        save_gguf(&model, "test", dir.path(), &path)?;

        let target = Target::open_path(&path, &TargetOptions::default())?;
        let mut want = target_config(&config());
        // The header holds it in 32 bits.
        want.rms_norm_eps = f64::from(want.rms_norm_eps as f32);
        assert_eq!(target.config(), &want);
        let tokenizer = Target::open_tokenizer(&path.to_string_lossy())?;
        assert!(tokenizer.adds_bos());
        assert_eq!(tokenizer.encode(&text)?, own.encode(&text)?);

        let ids: Vec<u32> = (0..24).map(|i| 4 + i * 7).collect();
        let layout = longdraft_models::language_model::Layout::new(&config(), &[24], 24)?;
        let want = model.logits(&model.hidden(&ids, &layout)?)?;
        let features =
            target.forward(&PackedSequence::single(&ids), &Taps::of(&[Tap::FinalHidden]))?;
        let got = target.hold_ends()?.logits(features.final_hidden()?)?;
        let error = (&got - &want)?.sqr()?.mean_all()?.sqrt()?.to_scalar::<f32>()?;
        let size = want.sqr()?.mean_all()?.sqrt()?.to_scalar::<f32>()?;
        // Codes of 8 bits; misplaced rows would make an error as large as the logits.
        assert!(error < 0.1 * size && error > 0.0, "{error} of {size}");
        Ok(())
    }

    #[test]
    fn larger_vocabularies_are_refused() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let texts = std::iter::once("a cat and a hat ".repeat(20));
        train_bpe(texts, 280)?.save(dir.path())?;
        let path = dir.path().join("model.gguf");
        let save = |config: &LanguageModelConfig| {
            let model = LanguageModel::initialise(config, 1)?;
            save_gguf(&model, "test", dir.path(), &path)
        };
        let text = save(&LanguageModelConfig { vocab_size: 200, ..config() });
        let text = text.expect_err("small").to_string();
        assert!(text.contains("200 in the model"), "{text}");
        assert!(!path.exists());
        Ok(())
    }
}
