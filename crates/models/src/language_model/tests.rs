use candle_core::{DType, Tensor};
use longdraft_kernels::graph::Backward;

use super::*;
use crate::Result;
use crate::weights::memory::MemorySource;

fn small() -> LanguageModelConfig {
    LanguageModelConfig {
        vocab_size: 37,
        num_hidden_layers: 5,
        hidden_size: 24,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        mlp_mult: 3,
        ..LanguageModelConfig::default()
    }
}

/// Every switch that is off by default.
fn switched() -> LanguageModelConfig {
    LanguageModelConfig {
        activation: Activation::LeakyReluSquared,
        tie_word_embeddings: false,
        orthogonal_init: true,
        depth_scaled_norm: true,
        exclusive_attention: true,
        rope: RopeConfig { dimensions: Some(4), ..RopeConfig::default() },
        ..small()
    }
}

fn ids(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 11 + i * i) % 37).collect()
}

#[test]
fn default_sizes_are_the_published_ones() {
    let config = LanguageModelConfig::default();
    assert_eq!(config.parameter_count(), 17_059_912);
    assert!((config.effective_rope_base(2048) - 20_453.0).abs() < 1.0);
    assert!((config.effective_rope_base(4096) - 41_830.0).abs() < 1.0);
    assert!((config.effective_rope_base(1024) - 10_000.0).abs() < 1e-9);
    assert!(config.problems().is_empty());
}

#[test]
fn loss_at_the_start_is_that_of_a_uniform_distribution() -> Result<()> {
    let untied = LanguageModelConfig { tie_word_embeddings: false, ..small() };
    for config in [small(), untied, llama()] {
        let model = LanguageModel::initialise(&config, 3)?;
        let layout = Layout::new(&config, &[20, 20], 20)?;
        let hidden = model.hidden(&ids(40), &layout)?;
        let labels: Vec<u32> = ids(40).iter().map(|id| (id + 5) % 37).collect();
        let loss = model.cross_entropy(&hidden, &labels)?.loss_sum.to_scalar::<f32>()? / 40.0;
        assert!((loss - 37.0_f32.ln()).abs() < 2e-2, "{loss}");
    }
    Ok(())
}

#[test]
fn every_tensor_gets_a_gradient_from_a_random_start() -> Result<()> {
    for config in [small(), switched(), llama()] {
        let source = MemorySource::random(&tensor_specs(&config), 0.3, 5)?;
        let model = LanguageModel::from_source(&config, &source)?;
        let layout = Layout::new(&config, &[16], 16)?;
        let hidden = model.hidden(&ids(16), &layout)?;
        let gradients = model.cross_entropy(&hidden, &ids(16))?.loss_sum.gradients()?;
        for parameter in model.parameters() {
            let name = &parameter.name;
            let gradient = gradients.get(&parameter.var).unwrap_or_else(|| panic!("{name}"));
            let size = gradient.sqr()?.sum_all()?.to_scalar::<f32>()?;
            assert!(size.is_finite() && size > 0.0, "{name}: {size}");
        }
        let frozen = model.frozen()?;
        let same = frozen.hidden(&ids(16), &layout)?;
        assert!(!same.track_op());
        assert_eq!(same.to_vec2::<f32>()?, hidden.to_vec2::<f32>()?);
    }
    Ok(())
}

#[test]
fn sequences_do_not_see_each_other_and_a_short_one_is_a_prefix() -> Result<()> {
    let config = switched();
    let source = MemorySource::random(&tensor_specs(&config), 0.3, 6)?;
    let model = LanguageModel::from_source(&config, &source)?.frozen()?;
    let tokens = ids(30);
    let both = model.hidden(&tokens, &Layout::new(&config, &[20, 10], 20)?)?;
    let alone = model.hidden(&tokens[20..], &Layout::new(&config, &[10], 20)?)?;
    let part = both.narrow(0, 20, 10)?;
    assert_eq!(part.to_vec2::<f32>()?, alone.to_vec2::<f32>()?);
    let prefix = model.hidden(&tokens[20..25], &Layout::new(&config, &[5], 20)?)?;
    assert_eq!(part.narrow(0, 0, 5)?.to_vec2::<f32>()?, prefix.to_vec2::<f32>()?);
    Ok(())
}

#[test]
fn faults_of_a_source_are_listed_together() -> Result<()> {
    let config = small();
    let mut specs = tensor_specs(&config);
    specs[0].shape[0] = 9;
    let removed = specs.pop().expect("skips").name;
    specs.push(crate::weights::TensorSpec::new("extra", &[1]));
    let source = MemorySource::random(&specs, 0.1, 1)?;
    let message = LanguageModel::from_source(&config, &source).expect_err("faults").to_string();
    for part in ["tok_emb.weight", removed.as_str(), "`extra`"] {
        assert!(message.contains(part), "{message}");
    }
    let bad =
        LanguageModelConfig { num_attention_heads: 5, final_logit_softcapping: 0.0, ..config };
    assert_eq!(bad.problems().len(), 3, "{:?}", bad.problems());
    Ok(())
}

#[test]
fn one_layer_has_no_skip() -> Result<()> {
    let config = LanguageModelConfig { num_hidden_layers: 1, ..small() };
    let model = LanguageModel::initialise(&config, 1)?;
    assert!(model.parameters().iter().all(|p| p.name != "skip_weights"));
    let hidden = model.hidden(&ids(3), &Layout::new(&config, &[3], 3)?)?;
    let logits: Tensor = model.logits(&hidden)?;
    assert_eq!((logits.dims(), logits.dtype()), (&[3, 37][..], DType::F32));
    assert!(model.hidden(&[99], &Layout::new(&config, &[1], 1)?).is_err());
    assert!(model.hidden(&[1, 2], &Layout::new(&config, &[1], 1)?).is_err());
    Ok(())
}

fn llama() -> LanguageModelConfig {
    let rope = RopeConfig { rule: RopeRule::None, ..RopeConfig::default() };
    LanguageModelConfig { architecture: DecoderArchitecture::Llama, rope, ..small() }
}

#[test]
fn a_llama_opened_as_a_target_gives_the_same_logits() -> Result<()> {
    use crate::target_model::{PackedSequence, Tap, Taps, Target, TargetOptions};
    for tie_word_embeddings in [true, false] {
        let config = LanguageModelConfig { tie_word_embeddings, ..llama() };
        assert_eq!(config.problems(), Vec::new());
        let source = MemorySource::random(&tensor_specs(&config), 0.3, 8)?;
        let model = LanguageModel::from_source(&config, &source)?.frozen()?;
        let dir = tempfile::tempdir().expect("tempdir");
        let tensors: Vec<(String, Tensor)> = model
            .parameters()
            .iter()
            .map(|p| (p.name.clone(), p.var.as_tensor().clone()))
            .collect();
        save(dir.path(), &config, "abc", &tensors)?;
        let own = model.logits(&model.hidden(&ids(20), &Layout::new(&config, &[20], 20)?)?)?;

        let target = Target::open_path(dir.path(), &TargetOptions::default())?;
        assert_eq!(target.config(), &target_config(&config));
        let sequence = PackedSequence::single(&ids(20));
        let features = target.forward(&sequence, &Taps::of(&[Tap::FinalHidden]))?;
        let logits = target.hold_ends()?.logits(features.final_hidden()?)?;
        let difference = (own - &logits)?.abs()?.max_all()?.to_scalar::<f32>()?;
        let size = logits.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(size > 0.1 && difference < 1e-5 * size, "{difference} of {size}");

        let (read, hash) = open(dir.path())?;
        assert_eq!((read.config(), hash.as_str()), (&config, "abc"));
    }
    Ok(())
}

#[test]
fn switches_without_effect_on_a_llama_are_refused() {
    let bad = LanguageModelConfig { architecture: DecoderArchitecture::Llama, ..switched() };
    let problems = bad.problems();
    for key in
        ["activation", "depth_scaled_norm", "exclusive_attention", "rope.dimensions", "rope.rule"]
    {
        assert!(problems.iter().any(|p| p.key.as_str() == key), "{problems:?}");
    }
}
