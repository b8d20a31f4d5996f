//! A target's own block for prediction of several tokens (MTP; DeepSeek-V3, section 2.2,
//! <https://arxiv.org/abs/2412.19437>), which drafts.
//!
//! ```text
//! x_i = W [norm_e(E[t_{i+1}]) | norm_h(h_i)]      h_i: final state of token i, after the final norm, [H]
//! y_i = layer(x_i)                                one layer of the family, with full attention, at position i
//! logits of t_{i+2} = head(norm(y_i))             the target's head
//! ```
//!
//! A drafted token goes on from what the block put out at the token before it, in place of `h`.
//!
//! | here | Qwen3-Next, Qwen3.5 folders | GLM-4.5, DeepSeek-V3 folders: `model.layers.L.` | GGUF: `blk.L.nextn.` |
//! |---|---|---|---|
//! | `W` `[H, 2H]` | `mtp.fc` | `eh_proj` | `eh_proj` |
//! | `norm_e`, `norm_h` `[H]` | `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden` | `enorm`, `hnorm` | `enorm`, `hnorm` |
//! | `norm` `[H]` | `mtp.norm` | `shared_head.norm` | `shared_head_norm` |
//! | the layer | `mtp.layers.0.` | the same prefix | `blk.L.` |
//!
//! `L` is the number of the target's layers. Without a norm of its own the block takes the target's final one.
//!
//! No reference values of these blocks were at hand. What is taken from descriptions of other engines is: the order of the
//! two halves; that `h` is taken after the final norm; that later steps read `norm(y)` in the Qwen families and `y`
//! in the others; that norms of GGUF files are held as they multiply. A wrong one would lower what is accepted, and
//! would not change what is decoded. Of several blocks the first one makes every step.

use candle_core::Tensor;
use longdraft_kernels::attention::{KeyRanges, Reach};
use longdraft_kernels::rms_norm::rms_norm;

use super::build::{self, FileWeights, Weights};
use super::cache::{KvCache, Layout};
use super::feed_forward::Projection;
use super::layer::{Appended, Context, DecoderLayer, Heads};
use super::names::FINAL_NORM;
use super::pass::{Ropes, Visible};
use super::specs::specs_of;
use super::tensor_parallel::LayerShare;
use super::{Target, TargetOptions, names};
use crate::config::{Architecture, LayerHeads, TargetConfig};
use crate::error::{ModelError, Result, refused};
use crate::weights::aliases::{Aliased, Aliases};
use crate::weights::memory::MemorySource;
use crate::weights::{TensorSpec, WeightSource, check_specs};

/// `W`
const JOINT: &str = "eh_proj.weight";
const EMBEDDING_NORM: &str = "enorm.weight";
const HIDDEN_NORM: &str = "hnorm.weight";
const HEAD_NORM: &str = "shared_head.norm.weight";

/// Names of files that hold the block apart from the layers: ours below the layer's prefix, the file's.
const APART: [(&str, &str); 4] = [
    (JOINT, "mtp.fc.weight"),
    (EMBEDDING_NORM, "mtp.pre_fc_norm_embedding.weight"),
    (HIDDEN_NORM, "mtp.pre_fc_norm_hidden.weight"),
    (HEAD_NORM, "mtp.norm.weight"),
];
/// What the names of the layer begin with there.
const LAYER_APART: &str = "mtp.layers.0.";

/// The block that predicts the token after the next one.
pub struct MtpBlock {
    joint: Projection,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    head_norm: Tensor,
    layer: DecoderLayer,
    ropes: Ropes,
    /// Of the target with this block as one more layer.
    config: TargetConfig,
    /// Whether later steps read normed states.
    hands_on_normed: bool,
}

/// Tokens that a block reads, each with the state of the token before it.
#[derive(Clone, Copy)]
pub struct Pairs<'a> {
    /// Token ids, `[T]`.
    pub ids: &'a [u32],
    /// Final states, or what the block handed on, `[T, H]`.
    pub states: &'a Tensor,
    /// Positions of the tokens before, `[T]`.
    pub position_ids: &'a [u32],
}

/// What a block makes of pairs, `[T, H]` each.
pub struct Stepped {
    /// What the head reads ([`super::Ends::logits`]).
    pub head_input: Tensor,
    /// What the next step reads as the token's state.
    pub handed_on: Tensor,
}

/// The target with its block as one more layer, with experts or without.
fn with_block(config: &TargetConfig, has_experts: bool) -> TargetConfig {
    let mut with = config.clone();
    with.num_hidden_layers += 1;
    with.experts = config.experts.clone().filter(|_| has_experts);
    if let Some(experts) = &mut with.experts {
        (experts.decoder_sparse_step, experts.mlp_only_layers) = (1, Vec::new());
    }
    with
}

/// Names, below their layer's prefix, and shapes of a block's tensors.
fn specs(with: &TargetConfig, has_head_norm: bool) -> Vec<TensorSpec> {
    let (index, hidden) = (with.num_hidden_layers - 1, with.hidden_size);
    let prefix = names::layer(index);
    let of_layer = specs_of(with, index..index + 1);
    let mut specs: Vec<TensorSpec> =
        of_layer.into_iter().filter(|spec| spec.name.starts_with(&prefix)).collect();
    let mut add =
        |name: &str, shape: &[usize]| specs.push(TensorSpec::new(format!("{prefix}{name}"), shape));
    add(JOINT, &[hidden, 2 * hidden]);
    add(EMBEDDING_NORM, &[hidden]);
    add(HIDDEN_NORM, &[hidden]);
    if has_head_norm {
        add(HEAD_NORM, &[hidden]);
    }
    specs
}

impl MtpBlock {
    /// Builds the block from a source of the target's tensors.
    ///
    /// # Errors
    /// - there is no such block, or a list of every missing and misshapen tensor of it
    pub fn from_source(
        config: &TargetConfig,
        source: &dyn WeightSource,
        options: &TargetOptions,
    ) -> Result<Self> {
        let index = config.num_hidden_layers;
        let Some(source) = BlockSource::of(source, index) else {
            return Err(ModelError::unrecognised(
                source.path(),
                format!(
                    "no block for prediction of several tokens is there: neither `{}` nor \
                     `{}{JOINT}` (`blk.{index}.nextn.eh_proj.weight` in a GGUF file)",
                    APART[0].1,
                    names::layer(index)
                ),
            ));
        };
        let prefix = names::layer(index);
        let own = |name: &str| format!("{prefix}{name}");
        let router = names::experts(config.architecture, index).router();
        let with = with_block(config, source.shape(&router).is_some());
        let has_head_norm = source.shape(&own(HEAD_NORM)).is_some();
        let mut specs = specs(&with, has_head_norm);
        // Told by the names that the file has.
        specs.iter_mut().for_each(|spec| spec.name = source.0.stored(&spec.name));
        if !has_head_norm {
            specs.push(TensorSpec::new(FINAL_NORM, &[config.hidden_size]));
        }
        check_specs(source.0.source(), &specs).into_result(source.path())?;
        let weights = FileWeights::new(&source, options);
        let norm = |name: &str| build::norm(&with, &weights, name);
        let head_norm = if has_head_norm { own(HEAD_NORM) } else { FINAL_NORM.to_owned() };
        Ok(Self {
            joint: Projection { weight: weights.matrix(&own(JOINT))?, bias: None },
            embedding_norm: norm(&own(EMBEDDING_NORM))?,
            hidden_norm: norm(&own(HIDDEN_NORM))?,
            head_norm: norm(&head_norm)?,
            layer: build::layer(&with, &weights, index, &LayerShare::of(&with, None)?)?,
            ropes: Ropes::of(&with)?,
            hands_on_normed: matches!(
                config.architecture,
                Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe
            ),
            config: with,
        })
    }

    /// Every tensor of a block, under the names that it has among the target's layers.
    pub fn tensor_specs(config: &TargetConfig) -> Vec<TensorSpec> {
        specs(&with_block(config, true), true)
    }

    /// A block with random weights of the configuration's deviation, for tests.
    ///
    /// # Errors
    /// - the configuration is unusable
    pub fn random(config: &TargetConfig, seed: u64, options: &TargetOptions) -> Result<Self> {
        let specs = Self::tensor_specs(config);
        let source = MemorySource::random(&specs, config.initializer_range, seed)?;
        Self::from_source(config, &source, options)
    }

    /// An empty cache for the block's layer, of the type of the target's.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn new_cache(&self, target: &Target) -> Result<KvCache> {
        let LayerHeads { kv_heads, head_dim } = self.config.last_heads();
        let layout = match self.config.parts.latent {
            Some(latent) => Layout::Rows(latent.cached()),
            None => Layout::Keys(kv_heads, head_dim),
        };
        KvCache::of(std::iter::once(layout), Reach::All, target.cache_dtype, &target.device)
    }

    /// Appends pairs of committed tokens of some sequences, one after the other: so many of each, and its cache. What
    /// they predict is not computed. Their bits do not depend on the sequences beside their own.
    ///
    /// # Errors
    /// - a token lies outside of the vocabulary, lengths differ, or there are fewer pairs
    pub fn read_each(
        &self,
        target: &Target,
        pairs: Pairs<'_>,
        sequences: &mut [(usize, &mut KvCache)],
    ) -> Result<()> {
        let (_, heads) = self.project(target, pairs)?;
        let mut first = 0;
        for (rows, cache) in sequences {
            let of = |tensor: &Tensor| tensor.narrow(0, first, *rows);
            cache.reserve(*rows)?;
            cache.append(0, &of(&heads.k)?, &of(&heads.v)?)?;
            cache.commit(*rows);
            first += *rows;
        }
        Ok(())
    }

    /// Appends pairs of some sequences, one after the other, and tells what follows them: the keys that the pairs of each
    /// see, and its cache. Their bits do not depend on the sequences beside their own.
    ///
    /// # Errors
    /// - as [`Self::read_each`], or there is not a query for every pair
    pub fn step_each(
        &self,
        target: &Target,
        pairs: Pairs<'_>,
        sequences: &mut [(KeyRanges, &mut KvCache)],
    ) -> Result<Stepped> {
        let (hidden, heads) = self.project(target, pairs)?;
        let mut appended = Vec::with_capacity(sequences.len());
        for (ranges, cache) in sequences.iter_mut() {
            let (rows, visible) = (ranges.queries(), Visible::full(ranges.clone()));
            cache.reserve(rows)?;
            appended.push(Appended { cache, visible, rows, is_text: false, place: None });
        }
        let mut context = Context::Cached(appended);
        let hidden = self.layer.finish(&hidden, Some(&heads), 0, &mut context)?;
        drop(context);
        for (ranges, cache) in sequences {
            cache.commit(ranges.queries());
        }
        let hidden = self.layer.end.apply(hidden, None)?;
        let head_input = rms_norm(&hidden, &self.head_norm, self.config.rms_norm_eps)?;
        let handed_on = if self.hands_on_normed { head_input.clone() } else { hidden };
        Ok(Stepped { head_input, handed_on })
    }

    /// `x`, and the heads of its rows.
    fn project(&self, target: &Target, pairs: Pairs<'_>) -> Result<(Tensor, Heads)> {
        let Pairs { ids, states, position_ids } = pairs;
        if states.dims() != [ids.len(), self.config.hidden_size] || position_ids.len() != ids.len()
        {
            return Err(refused("every token of a pair needs a state and a position"));
        }
        let eps = self.config.rms_norm_eps;
        let embedded = rms_norm(&target.hold_ends()?.embed(ids)?, &self.embedding_norm, eps)?;
        let states = rms_norm(&states.contiguous()?, &self.hidden_norm, eps)?;
        let hidden = self.joint.apply(&Tensor::cat(&[embedded, states], 1)?)?;
        let angles = self.ropes.angles(&self.config.parts, position_ids, &[], &target.device)?;
        let heads = self.layer.project((&hidden, hidden.dtype()), &angles, None)?;
        Ok((hidden, heads.ok_or_else(|| refused("a block for several tokens attends"))?))
    }
}

/// A block's tensors under the names that they have among the target's layers.
struct BlockSource<'a> {
    source: &'a dyn WeightSource,
    prefix: String,
    /// Whether the file holds them apart from the layers.
    is_apart: bool,
}

impl<'a> BlockSource<'a> {
    /// `None` if there is no block after layer `index − 1`.
    fn of(source: &'a dyn WeightSource, index: usize) -> Option<Aliased<Self>> {
        let prefix = names::layer(index);
        let holds = |name: &str| source.shape(name).is_some();
        let is_apart = APART.iter().any(|(_, theirs)| holds(theirs));
        let has = |(ours, _): &(&str, &str)| holds(&format!("{prefix}{ours}"));
        let is_there = is_apart || APART.iter().any(has);
        is_there.then_some(Aliased(Self { source, prefix, is_apart }))
    }
}

impl Aliases for BlockSource<'_> {
    fn source(&self) -> &dyn WeightSource {
        self.source
    }

    fn stored(&self, name: &str) -> String {
        match name.strip_prefix(&self.prefix).filter(|_| self.is_apart) {
            None => name.to_owned(),
            Some(rest) => {
                let apart = APART.iter().find(|(ours, _)| *ours == rest);
                apart.map_or_else(
                    || format!("{LAYER_APART}{rest}"),
                    |(_, theirs)| (*theirs).to_owned(),
                )
            }
        }
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }
}
