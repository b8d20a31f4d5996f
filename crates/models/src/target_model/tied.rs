//! Heads that lie in a folder beside the table that the configuration ties them to.

use candle_core::DType;

use super::names::EMBEDDING;
use crate::config::TargetConfig;
use crate::error::Result;
use crate::weights::WeightSource;

const HEAD: &str = "lm_head.weight";

/// Values of either that are compared at a time.
const CHUNK_VALUES: usize = 1 << 20;

/// Whether the head is the embedding table: as the configuration says, unless the files hold a head of other values. An
/// equal one stays tied, which saves its memory. Only folders that tie a head and hold one all the same are read for it.
/// It fails where one of the two cannot be read.
pub(super) fn is_tied(config: &TargetConfig, source: &dyn WeightSource) -> Result<bool> {
    let (rows, width) = (config.vocab_size, config.hidden_size);
    let has = |name: &str| source.shape(name).is_some_and(|shape| shape == [rows, width]);
    if !config.tie_word_embeddings || source.shape(HEAD).is_none() {
        return Ok(config.tie_word_embeddings);
    }
    if !has(HEAD) || !has(EMBEDDING) {
        // What is misshapen is named when the tensors are checked.
        return Ok(false);
    }
    let step = (CHUNK_VALUES / width).max(1);
    for first in (0..rows).step_by(step) {
        let part = first..rows.min(first + step);
        let values = |name: &str| -> Result<Vec<f32>> {
            let rows = source.load_rows(name, part.clone(), DType::F32)?;
            Ok(rows.flatten_all()?.to_vec1()?)
        };
        if values(HEAD)? != values(EMBEDDING)? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use serde_json::json;

    use super::*;
    use crate::weights::memory::MemorySource;

    #[test]
    fn a_stored_head_of_other_values_is_not_tied() {
        let rows = 2 * CHUNK_VALUES / 8 + 3;
        let table: Vec<f32> = (0..8 * rows).map(|i| (i % 1001) as f32).collect();
        let tensor = |values: Vec<f32>, shape: (usize, usize)| {
            Tensor::from_vec(values, shape, &Device::Cpu).expect("a matrix")
        };
        let tied = |says: bool, head: Option<Tensor>| {
            let config = json!({
                "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": rows,
                "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
                "tie_word_embeddings": says
            });
            let config = TargetConfig::from_json(&config).expect("configuration");
            let table = (EMBEDDING.to_owned(), tensor(table.clone(), (rows, 8)));
            let head = head.map(|head| (HEAD.to_owned(), head));
            let source = MemorySource::new([table].into_iter().chain(head));
            is_tied(&config, &source).expect("values")
        };
        let equal = || tensor(table.clone(), (rows, 8));
        assert!(tied(true, None) && tied(true, Some(equal())));
        assert!(!tied(false, None) && !tied(false, Some(equal())));
        let mut other = table.clone();
        other[8 * rows - 1] += 0.5;
        assert!(!tied(true, Some(tensor(other, (rows, 8)))));
        assert!(!tied(true, Some(tensor(vec![0.0; 16], (2, 8)))));
    }
}
