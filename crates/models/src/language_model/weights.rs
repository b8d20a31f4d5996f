//! Names, groups, initial values, reading.

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::orthogonalise::{Rule, orthogonalise};
use longdraft_kernels::random::CounterRng;

use super::{LanguageModelConfig, llama};
use crate::error::{ModelError, Result};
use crate::weights::{TensorSpec, WeightSource, check_specs};

/// Which optimizer and rate a tensor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Matrices of the blocks: Muon.
    Matrix,
    /// The embedding: Adam.
    Token,
    /// A head of its own: Adam.
    Head,
    /// Gains, scales, mixes and skips: Adam.
    Scalar,
}

/// The group of a tensor by its published name.
pub fn group_of(name: &str) -> Group {
    match name {
        "tok_emb.weight" | llama::EMBEDDING => Group::Token,
        "lm_head.weight" => Group::Head,
        _ if name.starts_with("blocks.") && name.ends_with(".weight") => Group::Matrix,
        _ if llama::is_matrix(name) => Group::Matrix,
        _ => Group::Scalar,
    }
}

/// Every tensor, published names, in a fixed order.
pub fn tensor_specs(config: &LanguageModelConfig) -> Vec<TensorSpec> {
    if config.is_llama() {
        return crate::target_model::tensor_specs(&llama::target_config(config));
    }
    let (d, vocabulary) = (config.hidden_size, config.vocab_size);
    let kv = config.num_key_value_heads * config.head_dim();
    let width = config.mlp_width();
    let table = &[vocabulary, d];
    let mut specs = if config.tie_word_embeddings {
        vec![TensorSpec::head("tok_emb.weight", table)]
    } else {
        vec![
            TensorSpec::embedding("tok_emb.weight", table),
            TensorSpec::head("lm_head.weight", table),
        ]
    };
    for layer in 0..config.num_hidden_layers {
        let tensors: [(&str, &[usize]); 10] = [
            ("attn.c_q.weight", &[d, d]),
            ("attn.c_k.weight", &[kv, d]),
            ("attn.c_v.weight", &[kv, d]),
            ("attn.proj.weight", &[d, d]),
            ("attn.q_gain", &[config.num_attention_heads]),
            ("mlp.fc.weight", &[width, d]),
            ("mlp.proj.weight", &[d, width]),
            ("attn_scale", &[d]),
            ("mlp_scale", &[d]),
            ("resid_mix", &[2, d]),
        ];
        specs.extend(
            tensors.map(|(name, shape)| TensorSpec::new(format!("blocks.{layer}.{name}"), shape)),
        );
    }
    let skips = config.encoder_layers();
    if skips > 0 {
        specs.push(TensorSpec::new("skip_weights", &[skips, d]));
    }
    specs
}

/// Values at the start, a function of seed and name.
pub(super) fn initial(
    config: &LanguageModelConfig,
    spec: &TensorSpec,
    seed: u64,
) -> Result<Tensor> {
    let count: usize = spec.shape.iter().product();
    let mut rng = CounterRng::new(seed, &spec.name, &[]);
    let constant = |value: f32| vec![value; count];
    let name = spec.name.rsplit_once("blocks.").map_or(spec.name.as_str(), |(_, rest)| {
        rest.split_once('.').map_or(rest, |(_, name)| name)
    });
    let values = match name {
        _ if llama::is_norm(name) => constant(1.0),
        _ if llama::starts_at_zero(name) => constant(0.0),
        "tok_emb.weight" | llama::EMBEDDING => {
            let deviation =
                if config.tie_word_embeddings { config.tied_embed_init_std } else { 1.0 };
            (0..count).map(|_| (rng.normal() * deviation) as f32).collect()
        }
        "lm_head.weight" | "attn.proj.weight" | "mlp.proj.weight" => constant(0.0),
        "attn.q_gain" => constant(config.qk_gain_init as f32),
        "attn_scale" | "mlp_scale" | "skip_weights" => constant(1.0),
        "resid_mix" => {
            let mut rows = vec![1.0; config.hidden_size];
            rows.resize(2 * config.hidden_size, 0.0);
            rows
        }
        _ => {
            let (rows, columns) = (spec.shape[0], spec.shape[1]);
            let bound = 1.0 / (columns as f64).sqrt();
            if config.orthogonal_init {
                let noise: Vec<f32> = (0..count).map(|_| rng.normal() as f32).collect();
                // Twice: the map's singular values are near 1 only after it.
                let once = orthogonalise(&noise, rows, columns, Rule::PolarExpress);
                let mut values = orthogonalise(&once, rows, columns, Rule::PolarExpress);
                // The deviation of the uniform start.
                let size = (rows.max(columns) as f64).sqrt() * bound / 3.0_f64.sqrt();
                values.iter_mut().for_each(|value| *value *= size as f32);
                values
            } else {
                (0..count).map(|_| ((2.0 * rng.uniform() - 1.0) * bound) as f32).collect()
            }
        }
    };
    Ok(Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)?)
}

/// Every tensor of a source, in the order of [`tensor_specs`].
pub(super) fn read(
    config: &LanguageModelConfig,
    source: &dyn WeightSource,
) -> Result<Vec<(TensorSpec, Tensor)>> {
    let specs = tensor_specs(config);
    let mut problems = check_specs(source, &specs);
    for name in source.names() {
        if !specs.iter().any(|spec| spec.name == name) {
            problems.push(format!("tensor `{name}` belongs to no tensor of the model"));
        }
    }
    problems.into_result(source.path())?;
    let loaded = |spec: TensorSpec| -> std::result::Result<_, ModelError> {
        let tensor = source.load(&spec.name, DType::F32)?;
        Ok((spec, tensor))
    };
    specs.into_iter().map(loaded).collect()
}
