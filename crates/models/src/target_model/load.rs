//! Building a target from its files: every tensor checked before the first one is read.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use candle_core::{DType, Device};
use longdraft_kernels::attention::is_quantisable;
use longdraft_kernels::dispatch::multiplies_halves;
use longdraft_kernels::matrix::{Matrix, multiplies_by_kernels};

use super::Target;
use super::build::{self, FileWeights};
use super::cache::CacheType;
use super::fingerprint::fingerprint;
use super::gguf::{GgufSource, unread};
use super::layers::{LayerSource, ResidentLayers};
use super::names::{EMBEDDING, FINAL_NORM};
use super::pass::Ropes;
use super::repeats::Repeating;
use super::specs::specs_of;
use super::spread::{Ranks, SpreadLayers, Table};
use super::tensor_parallel::LayerShare;
use crate::config::TargetConfig;
use crate::error::{ModelError, Result, refused};
use crate::weights::{TensorSpec, WeightSource, check_specs};

/// How to hold a target.
#[derive(Debug, Clone)]
pub struct TargetOptions {
    /// f32, bf16 or f16, of what `as_stored` does not hold otherwise; norms and biases are always f32.
    pub dtype: DType,
    /// Where to hold it.
    pub device: Device,
    /// Whether matrices are held as the file holds them, where products read them so: quantised blocks,
    /// and 16-bit floats, whose products have the bits of those in f32.
    pub as_stored: bool,
    /// What keys and values are cached as.
    pub cache: CacheType,
    /// Which layers are loaded.
    pub layers: Layers,
    /// Ranks that hold a part each (ZeRO-3); without them everything is in memory.
    pub spread: Option<Arc<dyn Ranks>>,
    /// Whether a thread gathers the next layer of a spread target meanwhile: only where nothing else
    /// calls the ranks during a pass.
    pub gather_ahead: bool,
    /// Ranks that share every layer (tensor parallel), each some heads and a part of the inner width;
    /// not together with `spread`.
    pub tensor: Option<Arc<dyn Ranks>>,
}

/// Which layers of a target are loaded. Embeddings, final norm and head always are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layers {
    /// All: the target can run.
    #[default]
    All,
    /// The last one that attends (the last one if none does) alone, to start a draft from.
    Last,
    /// None; the files need not hold them.
    None,
}

impl Layers {
    fn of(self, config: &TargetConfig) -> Range<usize> {
        let layers = config.num_hidden_layers;
        match self {
            Self::All => 0..layers,
            Self::Last => {
                let last = config.last_attention_layer().unwrap_or(layers.saturating_sub(1));
                last..layers.min(last + 1)
            }
            Self::None => 0..0,
        }
    }

    /// Names and shapes of the tensors that are loaded.
    pub fn tensor_specs(self, config: &TargetConfig) -> Vec<TensorSpec> {
        specs_of(config, self.of(config))
    }
}

impl Default for TargetOptions {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            device: Device::Cpu,
            as_stored: false,
            cache: CacheType::Auto,
            layers: Layers::All,
            spread: None,
            gather_ahead: true,
            tensor: None,
        }
    }
}

impl TargetOptions {
    /// Whether the device and the target's heads take the cache that is asked for.
    fn check_cache(&self, config: &TargetConfig) -> Result<()> {
        let problem = match self.cache {
            CacheType::F16 | CacheType::Q8 if !self.device.is_cpu() => {
                "a cache of f16 or q8 is for the CPU only: leave the cache's type out".to_owned()
            }
            CacheType::Q8 if !is_quantisable(config.cached_dim()) => {
                let head_dim = config.cached_dim();
                format!("a cache of q8 takes heads of whole blocks of 32 values, not of {head_dim}")
            }
            _ => return Ok(()),
        };
        Err(refused(problem))
    }
}

/// Checks the tensors that `layers` need of a GGUF file, which may also hold what is not read.
pub(super) fn check_gguf(source: &GgufSource, layers: Layers) -> Result<()> {
    let (config, loaded) = (source.config(), layers.of(source.config()));
    check_tensor_count(source, config, loaded.clone())?;
    let specs = layers.tensor_specs(config);
    let mut problems = check_specs(source, &specs);
    problems.0.extend(unread(source, &loaded, &specs).0);
    problems.into_result(source.path())
}

/// Matrices of one type in a target's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredType {
    /// As the format writes it (`Q4_K`, `BF16`).
    pub name: &'static str,
    /// Values of all of them.
    pub values: u64,
    /// Values that a pass over one token reads: of the embeddings one row, of experts those chosen.
    pub values_of_a_token: u64,
}

impl Target {
    /// Builds a target from any source that holds its tensors under their published names.
    ///
    /// # Errors
    /// - a list of every missing and misshapen tensor
    pub fn from_source(
        config: TargetConfig,
        source: &dyn WeightSource,
        options: &TargetOptions,
    ) -> Result<Self> {
        let loaded = options.layers.of(&config);
        check_tensor_count(source, &config, loaded.clone())?;
        check_specs(source, &specs_of(&config, loaded)).into_result(source.path())?;
        options.check_cache(&config)?;
        let ropes =
            Ropes::of(&config).map_err(|error| ModelError::invalid(source.path(), error))?;
        let share = LayerShare::of(&config, options.tensor.as_ref())?;
        let weights = FileWeights::new(source, options);
        let table = |matrix: Matrix| match &options.spread {
            None => Ok(Table::whole(matrix)),
            Some(ranks) => Table::spread(&matrix, ranks),
        };
        let final_norm = build::norm(&config, &weights, FINAL_NORM)?;
        build::require_bounded(source.path(), FINAL_NORM, &final_norm)?;
        let embedding = table(weights.table(EMBEDDING)?)?;
        let head = if config.tie_word_embeddings {
            None
        } else {
            Some(table(weights.table("lm_head.weight")?)?)
        };
        let loaded = options.layers.of(&config);
        let layers: Box<dyn LayerSource> = match &options.spread {
            None => {
                let layers = loaded.map(|index| build::layer(&config, &weights, index, &share));
                Box::new(ResidentLayers(layers.collect::<Result<_>>()?))
            }
            Some(_) if share.size() > 1 => {
                let problem = "a target's layers are spread over ranks or shared by them, not both";
                return Err(refused(problem));
            }
            Some(ranks) => {
                let ranks = (ranks, options.gather_ahead);
                Box::new(SpreadLayers::read(&config, &weights, loaded, ranks)?)
            }
        };
        let rules = match options.layers {
            Layers::All => (0..config.num_hidden_layers)
                .map(|index| build::rule(&config, &weights, index))
                .collect::<Result<_>>()?,
            _ => Vec::new(),
        };
        let per_layer = match options.layers {
            Layers::All => build::per_layer_inputs(&config, &weights)?,
            _ => None,
        };
        let has_blocks = weights.has_blocks.load(Ordering::Relaxed);
        let blocks_on_gpu = has_blocks && multiplies_by_kernels(&options.device);
        let reads_bf16 =
            config.reads_half_keys() && (blocks_on_gpu || multiplies_halves(&options.device));
        let widened = weights.widened.into_inner().unwrap_or_else(PoisonError::into_inner);
        let held = weights.held.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut held: Vec<_> = held.into_iter().collect();
        held.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        Ok(Self {
            fingerprint: fingerprint(&config, source)?,
            widened: widened.into_iter().collect(),
            held,
            cache_dtype: options.cache.dtype(has_blocks && !blocks_on_gpu, reads_bf16),
            has_blocks,
            ropes,
            embedding,
            per_layer,
            layers,
            rules,
            final_norm,
            head,
            device: options.device.clone(),
            share,
            config,
            repeating: Repeating::default(),
        })
    }
}

/// Refuses layers and experts that the files cannot hold, before their tensors are listed.
pub(super) fn check_tensor_count(
    source: &dyn WeightSource,
    config: &TargetConfig,
    loaded: Range<usize>,
) -> Result<()> {
    let held = source.names().len();
    let layers = loaded.len();
    let refuse = |problem: String| Err(ModelError::invalid(source.path(), problem));
    if layers > held {
        return refuse(format!(
            "`num_hidden_layers` = {}, but only {held} tensors are there",
            config.num_hidden_layers
        ));
    }
    let experts = |layer| config.experts_in(layer).map_or(0, |experts| experts.num_experts);
    let experts: usize = loaded.map(experts).sum();
    if experts > held {
        return refuse(format!(
            "{experts} experts in {layers} layers, but only {held} tensors are there"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_left_to_us_is_of_the_smallest_type_that_loses_little() {
        let of = |cache: CacheType, blocks, halves| cache.dtype(blocks, halves);
        assert_eq!(of(CacheType::Auto, true, true), DType::F16);
        assert_eq!(of(CacheType::Auto, false, true), DType::BF16);
        assert_eq!(of(CacheType::Auto, false, false), DType::F32);
        assert_eq!(of(CacheType::F32, true, true), DType::F32);
        assert_eq!(of(CacheType::Q8, false, true), DType::U8);
    }
}
