//! How large a language model is made: by the amount of its text, as a published rule has it.
//!
//! A model learns most of a given amount of work where it reads about 20 tokens for each parameter (Hoffmann et al.
//! 2022, arXiv 2203.15556). The largest size for which the text has so many is taken, at least the smallest one.

use std::path::PathBuf;

use clap::ValueEnum;
use longdraft_data::source::data_files;
use longdraft_data::token_stream::TokenStream;
use longdraft_models::language_model::{DecoderArchitecture, LanguageModelConfig, tensor_specs};

use crate::cli::ModelSize;
use crate::failure::{Failure, Result};

/// Tokens of text for each parameter.
const TOKENS_PER_PARAMETER: u64 = 20;
/// Bytes of text that a token of a small vocabulary stands for, roughly.
const BYTES_PER_TOKEN: u64 = 3;

/// Sizes of a model over a vocabulary: as `conf/pretrain/_tiny.yaml` and `baseline.yaml`, and one between them.
pub(super) fn sizes(size: ModelSize, vocabulary: usize) -> LanguageModelConfig {
    let (layers, hidden, heads, kv_heads, inner) = match size {
        ModelSize::Small => (4, 128, 4, 2, 352),
        ModelSize::Medium => (6, 256, 8, 4, 704),
        ModelSize::Large => (9, 512, 8, 4, 1408),
    };
    LanguageModelConfig {
        architecture: DecoderArchitecture::Llama,
        vocab_size: vocabulary,
        num_hidden_layers: layers,
        hidden_size: hidden,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        intermediate_size: Some(inner),
        ..LanguageModelConfig::default()
    }
}

/// Values of all tensors.
fn parameters(size: ModelSize, vocabulary: usize) -> u64 {
    let specs = tensor_specs(&sizes(size, vocabulary));
    specs.iter().map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
}

/// The largest size for which there is text enough, else the smallest.
fn fitting(tokens: u64, vocabulary: usize) -> ModelSize {
    let is_enough =
        |size: &&ModelSize| TOKENS_PER_PARAMETER * parameters(**size, vocabulary) <= tokens;
    ModelSize::value_variants().iter().rev().find(is_enough).copied().unwrap_or(ModelSize::Small)
}

/// The size that is asked for, or that so many tokens of text ask for; tells which and why.
pub(super) fn choose(asked: Option<ModelSize>, tokens: u64, vocabulary: usize) -> ModelSize {
    let size = asked.unwrap_or_else(|| fitting(tokens, vocabulary));
    let millions = |number: u64| format!("{:.1} million", number as f64 / 1e6);
    let values = millions(parameters(size, vocabulary));
    let name = size.to_possible_value().map(|value| value.get_name().to_owned());
    let name = name.unwrap_or_default();
    if asked.is_some() {
        errln!("model: {name}, {values} parameters, as --size says");
    } else {
        errln!(
            "model: {name}, {values} parameters: there are about {} tokens of text, and the rule is \
             {TOKENS_PER_PARAMETER} for each parameter (Hoffmann et al. 2022); --size chooses another one",
            millions(tokens)
        );
    }
    size
}

/// Tokens that files of text have, roughly, by their bytes.
pub(super) fn tokens_of_text(paths: &[PathBuf]) -> Result<u64> {
    let mut bytes = 0;
    for path in paths {
        for file in data_files(path)? {
            let metadata = std::fs::metadata(&file)
                .map_err(|error| Failure::file(format!("{}: {error}", file.display()), &error))?;
            bytes += metadata.len();
        }
    }
    Ok(bytes / BYTES_PER_TOKEN)
}

/// Tokens of shards, or of those in folders.
pub(super) fn tokens_of_shards(paths: &[String]) -> Result<u64> {
    let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
    Ok(TokenStream::open(&paths)?.len() as u64)
}

#[cfg(test)]
mod tests {
    use longdraft_data::token_stream::{sidecar_path, write_shard};

    use super::*;

    #[test]
    fn the_text_chooses_the_largest_size_that_it_is_enough_for() {
        let enough = |size| TOKENS_PER_PARAMETER * parameters(size, 2048);
        let (medium, large) = (enough(ModelSize::Medium), enough(ModelSize::Large));
        assert!(enough(ModelSize::Small) < medium && medium < large);
        for (tokens, size) in [
            (0, ModelSize::Small),
            (medium - 1, ModelSize::Small),
            (medium, ModelSize::Medium),
            (large - 1, ModelSize::Medium),
            (large, ModelSize::Large),
            (u64::MAX, ModelSize::Large),
        ] {
            assert_eq!(fitting(tokens, 2048), size, "{tokens}");
        }
    }

    #[test]
    fn tokens_of_text_and_of_shards_are_counted() {
        let dir = tempfile::tempdir().expect("tempdir");
        std::fs::write(dir.path().join("a.jsonl"), [b' '; 300]).expect("written");
        assert_eq!(tokens_of_text(&[dir.path().to_path_buf()]).expect("counted"), 100);
        let shard = dir.path().join("train_000000.bin");
        for file in [shard.clone(), sidecar_path(&shard)] {
            write_shard(&file, &[1; 50]).expect("written");
        }
        for path in [dir.path(), &shard] {
            let named = [path.display().to_string()];
            assert_eq!(tokens_of_shards(&named).expect("counted"), 50, "{named:?}");
        }
    }
}
