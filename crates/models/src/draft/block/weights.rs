//! Tensors of the network: names, initial values, reading.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rows::select_rows;

use super::chain;
use super::config::{BlockConfig, SelectorSizes};
use super::files::check_tensors;
use super::model::BlockDraft;
use super::own_head::{self, OwnHead};
use super::selector::{HIDDEN_PROJECTION, PREDECESSORS, SUCCESSORS};
use crate::draft::DraftWeights;
use crate::draft::weights::{initial_value, parameter, table_problem};
use crate::error::Result;
use crate::weights::{TensorSpec, WeightSource};

/// Every tensor that files hold of the network but the map of a head of its own, which comes last.
pub fn file_specs(config: &BlockConfig) -> Vec<TensorSpec> {
    tensor_specs(config).into_iter().chain(own_head::tensor_spec(config)).collect()
}

/// Every trained tensor of the network, in the order of the published table.
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
    all
}

impl BlockDraft {
    /// Fresh weights beside the target's frozen table `[V, H]`, on its device: matrices
    /// N(0, `initializer_range`), norms 1, biases 0, convolutions and a selector that change nothing.
    /// The draft holds the table as the target does.
    ///
    /// # Errors
    /// - sizes do not fit, or the draft has a head of its own: [`Self::initialise_with`]
    pub fn initialise(
        config: &BlockConfig,
        embedding: impl Into<Matrix>,
        seed: u64,
    ) -> Result<Self> {
        Self::initialise_with(config, embedding, None, seed)
    }

    /// The same with a head of its own, if `config` wants one.
    ///
    /// # Errors
    /// - sizes do not fit
    pub fn initialise_with(
        config: &BlockConfig,
        embedding: impl Into<Matrix>,
        own: Option<OwnHead>,
        seed: u64,
    ) -> Result<Self> {
        let embedding = embedding.into();
        let device = embedding.device().clone();
        Self::build(config, embedding, own, |spec| Self::fresh(spec, config, seed, &device))
    }

    /// Reads the tensors of the network `there`, and adds what `config` has more, fresh or given: at first the draft
    /// proposes what the other one does. A head of its own is `own` unless `there` has one. Of a table over all of the
    /// target's tokens the rows of those that `own` proposes are taken, where `config` wants no others.
    pub(super) fn begun(
        source: &dyn WeightSource,
        (config, there): (&BlockConfig, &BlockConfig),
        embedding: Matrix,
        (own, seed): (Option<OwnHead>, u64),
    ) -> Result<Self> {
        check_tensors(source, there)?;
        let known = tensor_specs(there);
        let device = embedding.device().clone();
        let load = loaded(source, &device);
        let own = OwnHead::read(source, there, &load)?.or(own);
        let kept: Vec<u32> =
            own.iter().flat_map(|own| own.vocabulary().kept()).map(|id| id.0).collect();
        Self::build(config, embedding, own, |spec| {
            match known.iter().find(|known| known.name == spec.name) {
                Some(known) if known.shape == spec.shape => load(spec),
                Some(_) => Ok(select_rows(&load(spec)?, &kept)?.detach()),
                None => Self::fresh(spec, config, seed, &device),
            }
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
        embedding: impl Into<Matrix>,
    ) -> Result<Self> {
        config.problems().into_result(source.path())?;
        check_tensors(source, config)?;
        let embedding = embedding.into();
        let device = embedding.device().clone();
        let load = loaded(source, &device);
        Self::build(config, embedding, OwnHead::read(source, config, &load)?, &load)
    }

    pub(super) fn build(
        config: &BlockConfig,
        embedding: Matrix,
        own: Option<OwnHead>,
        value: impl Fn(&TensorSpec) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut problems = config.problems();
        problems.0.extend(table_problem(&embedding, [config.vocab_size, config.hidden_size]));
        let wanted = config.has_own_head().then_some(config.draft_vocab_size);
        let found = own.as_ref().map(|own| own.vocabulary().draft_size());
        match (wanted, found) {
            (Some(tokens), None) => problems.push(format!(
                "nothing says which {tokens} tokens a head of the draft's own proposes"
            )),
            (wanted, Some(found)) if wanted != Some(found) => problems.push(format!(
                "a head of the draft's own has {found} rows, `draft_vocab_size` = {}",
                config.draft_vocab_size
            )),
            _ => {}
        }
        problems.into_result(Path::new("draft configuration"))?;
        let specs = tensor_specs(config);
        let parameters = specs.iter().map(|spec| parameter(spec, &value(spec)?));
        let weights = DraftWeights::new(parameters.collect::<Result<_>>()?, config.rms_norm_eps);
        // The target's table gets no gradient, whatever the caller does with it.
        let embedding = match embedding {
            Matrix::Dense(table) => Matrix::Dense(table.detach()),
            blocks => blocks,
        };
        let rope = config.rope.build(config.head_dim)?;
        Ok(Self { config: config.clone(), weights, own_head: own, embedding, rope })
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

/// Reads tensors of a source to where the embeddings are.
fn loaded<'a>(
    source: &'a dyn WeightSource,
    device: &'a Device,
) -> impl Fn(&TensorSpec) -> Result<Tensor> + 'a {
    move |spec| Ok(source.load(&spec.name, DType::F32)?.to_device(device)?)
}
