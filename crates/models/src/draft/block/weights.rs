//! Tensors of the network: names, initial values, reading.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::chain;
use super::config::{BlockConfig, SelectorSizes};
use super::files::check_tensors;
use super::model::BlockDraft;
use super::selector::{HIDDEN_PROJECTION, PREDECESSORS, SUCCESSORS};
use crate::draft::weights::{initial_value, parameter};
use crate::draft::{DraftWeights, VocabularyMap};
use crate::error::{Problems, Result};
use crate::weights::{TensorSpec, WeightSource};

/// The module of a head of the draft's own, `[Vd, H]`.
pub(super) const HEAD: &str = "lm_head";

/// Every trained tensor of the network, in the order of the published table; a head of its own last.
pub fn tensor_specs(config: &BlockConfig) -> Vec<TensorSpec> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (query, kv, head) = (config.query_size(), config.kv_size(), config.head_dim);
    let taps = config.target_layers.len();
    let mut all = vec![
        TensorSpec::new("fc.weight", &[hidden, taps * hidden]),
        TensorSpec::new("hidden_norm.weight", &[hidden]),
    ];
    for layer in 0..config.layers.len() {
        let mut add = |name: &str, shape: &[usize]| {
            all.push(TensorSpec::new(format!("layers.{layer}.{name}"), shape));
        };
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        for (module, outputs, inputs) in [
            ("q_proj", query, hidden),
            ("k_proj", kv, hidden),
            ("v_proj", kv, hidden),
            ("o_proj", hidden, query),
        ] {
            add(&format!("self_attn.{module}.weight"), &[outputs, inputs]);
            if config.attention_bias {
                add(&format!("self_attn.{module}.bias"), &[outputs]);
            }
        }
        add("self_attn.q_norm.weight", &[head]);
        add("self_attn.k_norm.weight", &[head]);
        add("mlp.gate_proj.weight", &[inner, hidden]);
        add("mlp.up_proj.weight", &[inner, hidden]);
        add("mlp.down_proj.weight", &[hidden, inner]);
        let Some(sizes) = config.convolution else { continue };
        let kernels = 2 * sizes.kernel_size * (hidden / sizes.group_size.max(1));
        for module in ["attention_conv", "mlp_conv"] {
            add(&format!("{module}.base_kernel"), &[2, sizes.kernel_size, hidden]);
            add(&format!("{module}.kernel_projection.weight"), &[kernels, hidden]);
        }
    }
    all.push(TensorSpec::new("norm.weight", &[hidden]));
    if let Some(SelectorSizes { rank, .. }) = config.selector {
        let codebook = [config.vocab_size, rank];
        all.push(TensorSpec::embedding(PREDECESSORS, &codebook));
        all.push(TensorSpec::head(SUCCESSORS, &codebook));
        all.push(TensorSpec::new(format!("{HIDDEN_PROJECTION}.weight"), &[rank, hidden]));
    }
    all.extend(config.chain.map(|sizes| chain::tensor_specs(sizes, config)).unwrap_or_default());
    if config.has_own_head() {
        all.push(TensorSpec::head(format!("{HEAD}.weight"), &[config.draft_vocab_size, hidden]));
    }
    all
}

impl BlockDraft {
    /// Fresh weights beside the target's frozen table `[V, H]`, on its device: matrices
    /// N(0, `initializer_range`), norms 1, biases 0, convolutions and a selector that change nothing.
    ///
    /// # Errors
    /// - sizes do not fit, or the draft has a head of its own, whose tokens only files say
    pub fn initialise(config: &BlockConfig, embedding: &Tensor, seed: u64) -> Result<Self> {
        let fresh = |spec: &TensorSpec| Self::fresh(spec, config, seed, embedding.device());
        Self::build(config, embedding, None, fresh)
    }

    /// Reads a plain network and adds what [`BlockConfig::plain`] leaves out, fresh: at first the draft
    /// proposes what the plain one does.
    ///
    /// # Errors
    /// - as [`Self::from_source`]
    pub fn extended(
        source: &dyn WeightSource,
        config: &BlockConfig,
        embedding: &Tensor,
        seed: u64,
    ) -> Result<Self> {
        let plain = config.plain();
        check_tensors(source, &plain)?;
        let known: Vec<String> = tensor_specs(&plain).into_iter().map(|spec| spec.name).collect();
        Self::build(config, embedding, read_vocabulary(source, config)?, |spec| {
            if known.contains(&spec.name) {
                return Ok(source.load(&spec.name, DType::F32)?.to_device(embedding.device())?);
            }
            Self::fresh(spec, config, seed, embedding.device())
        })
    }

    /// Reads the network from an open source.
    ///
    /// # Errors
    /// - a list of every missing, unexpected and misshapen tensor, or sizes that do not fit; the map of a head of
    ///   the draft's own is unusable
    pub fn from_source(
        source: &dyn WeightSource,
        config: &BlockConfig,
        embedding: &Tensor,
    ) -> Result<Self> {
        config.problems().into_result(source.path())?;
        check_tensors(source, config)?;
        Self::build(config, embedding, read_vocabulary(source, config)?, |spec| {
            Ok(source.load(&spec.name, DType::F32)?.to_device(embedding.device())?)
        })
    }

    pub(super) fn build(
        config: &BlockConfig,
        embedding: &Tensor,
        vocabulary: Option<VocabularyMap>,
        value: impl Fn(&TensorSpec) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut problems = config.problems();
        check_embedding(config, embedding, &mut problems);
        if vocabulary.is_none() && config.has_own_head() {
            let tokens = config.draft_vocab_size;
            problems.push(format!(
                "nothing says which {tokens} tokens a head of the draft's own proposes"
            ));
        }
        problems.into_result(Path::new("draft configuration"))?;
        let specs = tensor_specs(config);
        let parameters = specs.iter().map(|spec| parameter(spec, &value(spec)?));
        let weights = DraftWeights::new(parameters.collect::<Result<_>>()?, config.rms_norm_eps);
        // The target's table gets no gradient, whatever the caller does with it.
        let (rope, embedding) = (config.rope.build(config.head_dim)?, embedding.detach());
        Ok(Self { config: config.clone(), weights, vocabulary, embedding, rope })
    }

    /// The value of a tensor without any other to begin with.
    pub(super) fn fresh(
        spec: &TensorSpec,
        config: &BlockConfig,
        seed: u64,
        device: &Device,
    ) -> Result<Tensor> {
        if spec.name == SUCCESSORS || spec.name.ends_with(".kernel_projection.weight") {
            return Ok(Tensor::zeros(spec.shape.as_slice(), DType::F32, device)?);
        }
        if spec.name.ends_with(".base_kernel") {
            let (taps, width) = (spec.shape[1], spec.shape[2]);
            let own = |i: usize| if (i / width).is_multiple_of(taps) { 1.0 } else { 0.0 };
            let values: Vec<f32> = (0..2 * taps * width).map(own).collect();
            return Ok(Tensor::from_vec(values, spec.shape.as_slice(), device)?);
        }
        initial_value(spec, config.initializer_range, seed, device)
    }
}

/// The tokens of a head of the draft's own.
fn read_vocabulary(
    source: &dyn WeightSource,
    config: &BlockConfig,
) -> Result<Option<VocabularyMap>> {
    if !config.has_own_head() {
        return Ok(None);
    }
    let read = |name: &str| source.shape(name).map(|_| source.load_integers(name)).transpose();
    VocabularyMap::read(source.path(), [config.draft_vocab_size, config.vocab_size], read)
}

fn check_embedding(config: &BlockConfig, embedding: &Tensor, problems: &mut Problems) {
    let wanted = [config.vocab_size, config.hidden_size];
    if embedding.dims() != wanted {
        problems.push(format!("embeddings {:?}, {wanted:?} expected", embedding.dims()));
    }
}
