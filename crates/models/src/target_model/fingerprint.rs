//! What one target is told from another by.

use candle_core::{DType, Tensor};

use super::load::check_tensor_count;
use super::names::{self, EMBEDDING, FINAL_NORM};
use super::specs::tensor_specs;
use crate::config::{Parts, TargetConfig};
use crate::error::{ModelError, Result};
use crate::weights::{TensorSpec, WeightSource, check_specs};

/// Between the two parts of a fingerprint.
const SEPARATOR: char = '-';

/// Whether two fingerprints can be of the same weights: a part that one of them lacks is not compared.
pub fn is_same_target(one: &str, other: &str) -> bool {
    match (one.split_once(SEPARATOR), other.split_once(SEPARATOR)) {
        (None, Some((start, _))) => one == start,
        (Some((start, _)), None) => start == other,
        _ => one == other,
    }
}

/// Two hashes with a dash between: one of what every file holds, and one of the layers where the files hold all of them.
/// Few rows are read.
///
/// Fine-tuning may leave embeddings and the final norm as they are. So the second hash looks at every layer.
pub(super) fn fingerprint(config: &TargetConfig, source: &dyn WeightSource) -> Result<String> {
    let ends = ends_hash(config, source)?;
    Ok(match of_layers(config, source)? {
        Some(layers) => format!("{ends}{SEPARATOR}{layers}"),
        None => ends,
    })
}

/// Hash of the configuration, the final norm and a sample of embedding rows, all rounded to
/// bf16, so that the same weights in files of another float type have the same name.
fn ends_hash(config: &TargetConfig, source: &dyn WeightSource) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(described(config).as_bytes());
    let rows = config.vocab_size.min(64);
    let step = (config.vocab_size / rows).max(1);
    for row in (0..rows).map(|row| row * step) {
        add_values(&mut hasher, &source.load_rows(EMBEDDING, row..row + 1, DType::BF16)?)?;
    }
    let norm = source.load(FINAL_NORM, DType::F32)?;
    add_values(&mut hasher, &if config.parts.norms_less_one { (norm + 1.0)? } else { norm })?;
    Ok(hasher.finalize().to_hex()[..32].to_owned())
}

/// Hash of one row of every matrix, rounded likewise. There is none where the files do not hold all layers, or hold
/// them in a type that is not read here. Opening a target refuses the layers that it cannot load.
fn of_layers(config: &TargetConfig, source: &dyn WeightSource) -> Result<Option<String>> {
    match layers_hash(config, source) {
        Err(ModelError::Invalid { .. }) => Ok(None),
        hash => hash.map(Some),
    }
}

fn layers_hash(config: &TargetConfig, source: &dyn WeightSource) -> Result<String> {
    check_tensor_count(source, config, 0..config.num_hidden_layers)?;
    let specs = tensor_specs(config);
    check_specs(source, &specs).into_result(source.path())?;
    let mut hasher = blake3::Hasher::new();
    let mut layers = (0..config.num_hidden_layers).rev();
    let last_of_experts = layers.find(|layer| config.experts_in(*layer).is_some());
    let last_of_experts = last_of_experts.map(names::layer);
    for spec in specs.iter().filter(|spec| is_sampled(spec, last_of_experts.as_deref())) {
        let middle = spec.shape[0] / 2;
        add_values(&mut hasher, &source.load_rows(&spec.name, middle..middle + 1, DType::BF16)?)?;
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// Every matrix is, but of all experts only the first one of the last layer that has some: whole experts are read where
/// files stack them.
fn is_sampled(TensorSpec { name, shape, .. }: &TensorSpec, last_of_experts: Option<&str>) -> bool {
    let is_chosen = || {
        last_of_experts.is_some_and(|layer| name.starts_with(layer)) && name.contains(".experts.0.")
    };
    shape.len() == 2 && (!name.contains(".experts.") || is_chosen())
}

fn add_values(hasher: &mut blake3::Hasher, tensor: &Tensor) -> Result<()> {
    let values = tensor.flatten_all()?.to_dtype(DType::BF16)?.to_vec1::<half::bf16>()?;
    for value in values {
        hasher.update(&value.to_le_bytes());
    }
    Ok(())
}

/// The configuration as text. A table of parts that are all a plain Llama's is left out: such targets keep the
/// names that features were stored under before there was a table. So are ends of what is generated: they
/// change no feature.
fn described(config: &TargetConfig) -> String {
    let plain = format!(", parts: {:?}", Parts::default());
    let ends = format!(", further_end_ids: {:?}", config.further_end_ids);
    format!("{config:?}").replace(&plain, "").replace(&ends, "")
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use serde_json::json;

    use super::*;
    use crate::target_model::{Layers, Target, TargetOptions};
    use crate::weights::memory::MemorySource;

    fn config(kind: &str) -> TargetConfig {
        let config = json!({
            "model_type": kind, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3,
            "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 9,
            "num_local_experts": 2, "num_experts_per_tok": 1
        });
        TargetConfig::from_json(&config).expect("configuration")
    }

    fn tensors(config: &TargetConfig) -> Vec<(String, Tensor)> {
        let specs = tensor_specs(config);
        let source = MemorySource::random(&specs, 0.1, 1).expect("random weights");
        let load = |name: String| {
            let tensor = source.load(&name, DType::F32).expect("a tensor");
            (name, tensor)
        };
        source.names().into_iter().map(load).collect()
    }

    fn name_of(
        config: &TargetConfig,
        tensors: &[(String, Tensor)],
        options: &TargetOptions,
    ) -> String {
        let source = MemorySource::new(tensors.iter().cloned());
        let target = Target::from_source(config.clone(), &source, options).expect("a target");
        target.fingerprint().to_owned()
    }

    #[test]
    fn only_parts_of_their_own_enter_a_target_s_name() {
        let mut llama = config("llama");
        llama.further_end_ids = vec![3, 5];
        let plain = described(&llama);
        assert!(plain.starts_with("TargetConfig { architecture: Llama, hidden_size: 8"), "{plain}");
        assert!(plain.ends_with("pad_token_id: None }"), "{plain}");
        assert!(described(&config("mistral")).contains("window: Some(4096)"));
    }

    #[test]
    fn a_change_of_any_matrix_in_any_layer_makes_another_target() {
        for kind in ["llama", "mixtral"] {
            let config = config(kind);
            let tensors = tensors(&config);
            let plain = name_of(&config, &tensors, &TargetOptions::default());
            for (place, (name, tensor)) in tensors.iter().enumerate() {
                let is_seen = tensor.rank() == 2 && !name.contains(".experts.");
                if !is_seen && !name.contains("layers.2.block_sparse_moe.experts.0.") {
                    continue;
                }
                let mut changed = tensors.clone();
                changed[place].1 = (tensor * 1.25).expect("a product");
                let other = name_of(&config, &changed, &TargetOptions::default());
                assert!(!is_same_target(&plain, &other), "{kind}: {name}: {plain} {other}");
            }
        }
    }

    #[test]
    fn how_a_target_is_held_changes_no_name_and_missing_layers_are_not_compared() {
        let config = config("llama");
        let tensors = tensors(&config);
        let held = |options: &TargetOptions| name_of(&config, &tensors, options);
        let plain = held(&TargetOptions::default());
        for dtype in [DType::BF16, DType::F32] {
            for layers in [Layers::All, Layers::Last, Layers::None] {
                let options = TargetOptions { dtype, layers, ..TargetOptions::default() };
                assert_eq!(held(&options), plain);
            }
        }
        let without = |layer: &str| -> Vec<_> {
            tensors.iter().filter(|(name, _)| !name.contains(layer)).cloned().collect()
        };
        let none = TargetOptions { layers: Layers::None, ..TargetOptions::default() };
        let ends = name_of(&config, &without(".layers."), &none);
        assert_eq!(name_of(&config, &without(".layers.1."), &none), ends);
        assert!(plain.starts_with(&ends) && plain.len() > ends.len(), "{plain} {ends}");
        assert!(is_same_target(&ends, &plain) && is_same_target(&plain, &ends));
        let mut other_table = without(".layers.");
        let table = other_table.iter_mut().find(|(name, _)| name.contains("embed_tokens"));
        let table = &mut table.expect("a table").1;
        *table = Tensor::zeros_like(
            &Tensor::ones(table.dims(), DType::F32, &Device::Cpu).expect("ones"),
        )
        .expect("zeros");
        assert!(!is_same_target(&name_of(&config, &other_table, &none), &plain));
    }

    #[test]
    fn parts_that_both_have_are_compared() {
        for (one, other, same) in [
            ("a", "a", true),
            ("a", "b", false),
            ("a", "a-1", true),
            ("b", "a-1", false),
            ("a-1", "a-1", true),
            ("a-1", "a-2", false),
        ] {
            assert_eq!(is_same_target(one, other), same, "{one} {other}");
            assert_eq!(is_same_target(other, one), same, "{other} {one}");
        }
    }
}
