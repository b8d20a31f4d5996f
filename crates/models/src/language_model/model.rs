//! The forward pass over sequences laid end to end.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use longdraft_kernels::attention::{Delays, KeyRanges};
use longdraft_kernels::bend::Bend;
use longdraft_kernels::channel_scale::add_scaled;
use longdraft_kernels::linear::linear;
use longdraft_kernels::linear_cross_entropy::{Inputs, Output, linear_cross_entropy};
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::{Rope, RopeScaling, RopeTable};
use longdraft_kernels::rows::select_rows;

use super::block::{Block, Pass, norm};
use super::llama::{self, LlamaBlock};
use super::{Group, LanguageModelConfig, group_of, tensor_specs, weights};
use crate::draft::Parameter;
use crate::error::{Result, refused};
use crate::ids::check_ids;
use crate::weights::{TensorSpec, WeightSource};

/// What attention sees in a row of sequences, and how RoPE turns it.
#[derive(Debug, Clone)]
pub struct Layout {
    ranges: Arc<KeyRanges>,
    table: RopeTable,
    tokens: usize,
}

impl Layout {
    /// Sequences laid end to end, positions from 0 in each; `rope_length` is the configured
    /// sequence or window length, which decides RoPE's base.
    ///
    /// # Errors
    /// - the tables cannot be made
    pub fn new(
        config: &LanguageModelConfig,
        lengths: &[usize],
        rope_length: usize,
    ) -> Result<Self> {
        let ids: Vec<i32> = (0..).zip(lengths).flat_map(|(id, &length)| vec![id; length]).collect();
        Self::with_documents(config, lengths, &ids, rope_length)
    }

    /// The same, attention held within runs of equal `document_ids`, `[T]`.
    ///
    /// # Errors
    /// - as [`Self::new`], or not an id a token
    pub fn with_documents(
        config: &LanguageModelConfig,
        lengths: &[usize],
        document_ids: &[i32],
        rope_length: usize,
    ) -> Result<Self> {
        let tokens = lengths.iter().sum();
        if document_ids.len() != tokens {
            let ids = document_ids.len();
            return Err(refused(format!("{ids} document ids for {tokens} tokens")));
        }
        let base = config.effective_rope_base(rope_length);
        let rope = Rope::new(config.rope_dimensions(), base, RopeScaling::None)?;
        let longest = lengths.iter().max().copied().unwrap_or(0);
        let positions: Vec<u32> = (0..longest as u32).collect();
        let whole = rope.table(&positions, &Device::Cpu)?;
        // The baseline's rotation turns the other way than the one of Llama.
        let whole = if config.is_llama() { whole } else { whole.reversed()? };
        let tables: Vec<RopeTable> = lengths
            .iter()
            .map(|&length| if length == longest { Ok(whole.clone()) } else { whole.first(length) })
            .collect::<candle_core::Result<_>>()?;
        Ok(Self {
            ranges: Arc::new(KeyRanges::packed(document_ids, None, Delays::Same(0))),
            table: RopeTable::concatenated(&tables)?,
            tokens,
        })
    }

    /// Tokens of the row.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// The decoder and its trained tensors.
#[derive(Debug, Clone)]
pub struct LanguageModel {
    config: LanguageModelConfig,
    parameters: Vec<Parameter>,
    embedding: Tensor,
    head: Tensor,
    layers: Layers,
}

/// What lies between embedding and head.
#[derive(Debug, Clone)]
enum Layers {
    Baseline {
        blocks: Vec<Block>,
        /// `[E, d]`
        skips: Option<Tensor>,
    },
    Llama {
        blocks: Vec<LlamaBlock>,
        /// `[d]`
        final_norm: Tensor,
    },
}

impl LanguageModel {
    /// A model with initial values, a function of `seed`.
    ///
    /// # Errors
    /// - a tensor cannot be made
    pub fn initialise(config: &LanguageModelConfig, seed: u64) -> Result<Self> {
        let tensors = tensor_specs(config)
            .into_iter()
            .map(|spec| {
                let tensor = weights::initial(config, &spec, seed)?;
                Ok((spec, tensor))
            })
            .collect::<Result<_>>()?;
        Self::build(config, tensors)
    }

    /// A model with the tensors of any source.
    ///
    /// # Errors
    /// - a list of every missing, misshapen and unexpected tensor
    pub fn from_source(config: &LanguageModelConfig, source: &dyn WeightSource) -> Result<Self> {
        Self::build(config, weights::read(config, source)?)
    }

    fn build(config: &LanguageModelConfig, tensors: Vec<(TensorSpec, Tensor)>) -> Result<Self> {
        let parameters: Vec<Parameter> = tensors
            .into_iter()
            .map(|(spec, tensor)| {
                let decay = group_of(&spec.name) == Group::Matrix;
                let var = Var::from_tensor(&tensor)?;
                Ok(Parameter { name: spec.name, var, role: spec.role, decay, dead: false })
            })
            .collect::<Result<_>>()?;
        Self::assemble(config.clone(), parameters, |var| var.as_tensor().clone())
    }

    /// The same values without a gradient graph; later steps change them as well.
    ///
    /// # Errors
    /// - none for a model that was built
    pub fn frozen(&self) -> Result<Self> {
        Self::assemble(self.config.clone(), self.parameters.clone(), |var| var.detach())
    }

    fn assemble(
        config: LanguageModelConfig,
        parameters: Vec<Parameter>,
        value: impl Fn(&Var) -> Tensor,
    ) -> Result<Self> {
        let by_name: HashMap<&str, &Var> =
            parameters.iter().map(|p| (p.name.as_str(), &p.var)).collect();
        let tensor = |name: &str| -> Result<Tensor> {
            let var = by_name.get(name);
            Ok(value(var.ok_or_else(|| refused(format!("no tensor `{name}`")))?))
        };
        let layers = if config.is_llama() {
            let blocks = (0..config.num_hidden_layers)
                .map(|layer| LlamaBlock::new(|name| tensor(&llama::layer_tensor(layer, name))))
                .collect::<Result<_>>()?;
            Layers::Llama { blocks, final_norm: tensor(llama::FINAL_NORM)? }
        } else {
            let blocks = (0..config.num_hidden_layers)
                .map(|layer| Block::new(|name| tensor(&format!("blocks.{layer}.{name}"))))
                .collect::<Result<_>>()?;
            let has_skips = config.encoder_layers() > 0;
            Layers::Baseline {
                blocks,
                skips: has_skips.then(|| tensor("skip_weights")).transpose()?,
            }
        };
        let name = if config.is_llama() { llama::EMBEDDING } else { "tok_emb.weight" };
        let embedding = tensor(name)?;
        let head =
            if config.tie_word_embeddings { embedding.clone() } else { tensor("lm_head.weight")? };
        Ok(Self { config, parameters, embedding, head, layers })
    }

    /// A copy of the model on another device.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let moved = |parameter: &Parameter| {
            let value = parameter.var.detach().to_device(device)?;
            Ok(Parameter { var: Var::from_tensor(&value)?, ..parameter.clone() })
        };
        let parameters = self.parameters.iter().map(moved).collect::<Result<_>>()?;
        Self::assemble(self.config.clone(), parameters, |var| var.as_tensor().clone())
    }

    /// Where the weights lie.
    pub fn device(&self) -> &Device {
        self.embedding.device()
    }

    /// Sizes and switches.
    pub fn config(&self) -> &LanguageModelConfig {
        &self.config
    }

    /// Every trained tensor, in the order of [`tensor_specs`].
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Hidden states that the head reads.
    ///
    /// # Shapes
    /// - `ids`: `[T]` → `[T, d]`
    ///
    /// # Errors
    /// - an id lies outside the vocabulary, or the layout is of another length
    pub fn hidden(&self, ids: &[u32], layout: &Layout) -> Result<Tensor> {
        check_ids(ids, self.config.vocab_size)?;
        if ids.len() != layout.tokens {
            let (found, wanted) = (ids.len(), layout.tokens);
            return Err(refused(format!("{found} tokens in a layout of {wanted}")));
        }
        let table = layout.table.to_device(self.device())?;
        let embedded = select_rows(&self.embedding, ids)?;
        match &self.layers {
            Layers::Baseline { blocks, skips } => {
                self.baseline(&embedded, blocks, skips.as_ref(), (&layout.ranges, &table))
            }
            Layers::Llama { blocks, final_norm } => {
                let mut x = embedded;
                for block in blocks {
                    x = block.forward(&x, &self.config, &layout.ranges, &table)?;
                }
                Ok(rms_norm(&x, final_norm, self.config.rms_norm_eps)?)
            }
        }
    }

    fn baseline(
        &self,
        embedded: &Tensor,
        blocks: &[Block],
        skips: Option<&Tensor>,
        (ranges, table): (&Arc<KeyRanges>, &RopeTable),
    ) -> Result<Tensor> {
        let eps = self.config.rms_norm_eps;
        let x0 = norm(embedded, eps)?;
        let pass = Pass { config: &self.config, ranges, table, x0: &x0 };
        let encoders = self.config.encoder_layers();
        let mut kept = Vec::new();
        let mut x = x0.clone();
        for (layer, block) in blocks.iter().enumerate() {
            if layer >= encoders
                && let (Some(skip), Some(weights)) = (kept.pop(), skips)
            {
                let weight = weights.narrow(0, layer - encoders, 1)?.squeeze(0)?;
                x = add_scaled(&x, &skip, &weight)?;
            }
            x = block.forward(&x, layer, &pass)?;
            if layer < encoders {
                kept.push(x.clone());
            }
        }
        norm(&x, eps)
    }

    /// Cross-entropy of `labels` under the logits of `hidden`; nothing of size `[T, V]` is stored.
    ///
    /// # Shapes
    /// - `hidden`: `[R, d]`, `labels`: `[R]` → the sum and every row's
    ///
    /// # Errors
    /// - a label lies outside the vocabulary
    pub fn cross_entropy(&self, hidden: &Tensor, labels: &[u32]) -> Result<Output> {
        let inputs = Inputs::of_labels(hidden, &self.head, labels).bent(self.bend());
        Ok(linear_cross_entropy(&inputs)?)
    }

    /// Logits, soft-capped in the baseline.
    ///
    /// # Shapes
    /// - `[R, d]` → `[R, V]`
    ///
    /// # Errors
    /// - the width differs
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.bend().of(linear(hidden, &self.head, None)?)?)
    }

    /// What makes logits of the head's products.
    fn bend(&self) -> Bend {
        let softcap = self.config.final_logit_softcapping;
        Bend { softcap: (!self.config.is_llama()).then_some(softcap), ..Bend::default() }
    }
}
