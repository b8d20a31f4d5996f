//! The frozen target: a Llama-family decoder with taps and a key-value cache.
//!
//! It runs without a gradient graph. One layer serves every architecture: attention (optional q/k/v bias,
//! optional norm per head on q and k, rotary embedding, grouped queries, a window in some layers) and a gated
//! MLP or a mixture of them, with norms before and, in some families, after each. What a family does
//! otherwise stands in the table of [`crate::config::Parts`].

mod build;
mod cache;
mod extend;
mod features;
mod feed_forward;
pub mod gguf;
mod latent;
mod layer;
mod layers;
mod load;
mod locate;
mod mtp;
pub(crate) mod names;
mod nested;
mod part;
mod pass;
mod per_layer;
mod recurrent;
mod renamed;
mod spread;
mod tensor;
mod views;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::bend::Bend;
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::{Rope, RopeTable};
use longdraft_kernels::top_k::{TopK, bent_top_k};

use crate::config::TargetConfig;
use crate::error::{ModelError, Result};
use crate::tokenizer::TextTokenizer;
use crate::weights::WeightSource;
use crate::weights::memory::MemorySource;

pub use cache::{CacheType, KvCache};
pub use extend::Extension;
pub use features::{Features, KeyValues, PackedSequence, Tap, Taps};
pub use load::{Layers, StoredType, TargetOptions};
pub use locate::locate;
pub use mtp::{MtpBlock, Pairs};
pub(crate) use names::norm_before_feed_forward;
pub use names::tensor_specs;
pub use part::RowPart;
pub use spread::Ranks;

use layer::{Context, Heads};
use layers::LayerSource;
use pass::{Ropes, Visible};
use per_layer::PerLayerInputs;
use recurrent::Rule;
use spread::{Held, Table};
use tensor::LayerShare;

/// A frozen decoder.
pub struct Target {
    config: TargetConfig,
    fingerprint: String,
    ropes: Ropes,
    embedding: Table,
    /// What tokens bring to every layer, in families where they do.
    per_layer: Option<PerLayerInputs>,
    /// All of them, the last one, or none.
    layers: Box<dyn LayerSource>,
    /// How the state of each layer steps, of those that have one.
    rules: Vec<Option<Arc<Rule>>>,
    /// `[H]`
    final_norm: Tensor,
    /// `None` if tied to the embedding.
    head: Option<Table>,
    device: Device,
    /// What keys and values are cached as.
    cache_dtype: DType,
    /// Whether matrices are held as quantised blocks.
    has_blocks: bool,
    /// Quantised types of the file that are held as floats although they were wanted as stored.
    widened: Vec<&'static str>,
    /// Bytes of matrices by the type in which they are held, the largest first.
    held: Vec<(&'static str, u64)>,
    /// What this rank holds of every layer.
    share: LayerShare,
}

/// What becomes of what a pass taps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeping {
    /// It is handed out.
    All,
    /// It is another rank's.
    Nothing,
}

/// Keeps embedding table and head of a spread target whole ([`Target::hold_ends`]).
pub struct Ends<'a> {
    _tables: [Held<'a>; 2],
}

impl Target {
    /// Loads a Hugging Face folder, a GGUF file, or a hub model `org/name` or `org/name:QUANTISATION`.
    ///
    /// # Errors
    /// - one error that names every problem of the files
    pub fn open(spec: &str, options: &TargetOptions) -> Result<Self> {
        load::open(&locate(spec)?, options)
    }

    /// Loads from an existing folder or file.
    ///
    /// # Errors
    /// - as [`Self::open`]
    pub fn open_path(path: &Path, options: &TargetOptions) -> Result<Self> {
        load::open(path, options)
    }

    /// Builds a target from any source that holds its tensors under their published names.
    ///
    /// # Errors
    /// - a list of every missing and misshapen tensor
    pub fn from_source(
        config: TargetConfig,
        source: &dyn WeightSource,
        options: &TargetOptions,
    ) -> Result<Self> {
        load::from_source(config, source, options)
    }

    /// A target with random weights of the configuration's deviation, for tests and benchmarks.
    ///
    /// # Errors
    /// - the configuration is unusable
    pub fn random(config: TargetConfig, seed: u64, options: &TargetOptions) -> Result<Self> {
        let specs = tensor_specs(&config);
        let source = MemorySource::random(&specs, config.initializer_range, seed)?;
        load::from_source(config, &source, options)
    }

    /// Loads the block for prediction of several tokens that lies in a target's files, held as the target is.
    ///
    /// # Errors
    /// - as [`MtpBlock::from_source`], or as [`Self::open`]
    pub fn open_mtp(spec: &str, options: &TargetOptions) -> Result<MtpBlock> {
        load::open_mtp(&locate(spec)?, options)
    }

    /// The tokenizer that belongs to the same folder or file.
    ///
    /// # Errors
    /// - there is none or it is unusable
    pub fn open_tokenizer(spec: &str) -> Result<TextTokenizer> {
        load::open_tokenizer(&locate(spec)?)
    }

    /// Reads only the configuration of `spec`.
    ///
    /// # Errors
    /// - the target is not found or its configuration is unusable
    pub fn open_config(spec: &str) -> Result<TargetConfig> {
        load::open_config(&locate(spec)?)
    }

    /// Reads the configuration and the tokenizer of `spec`; of a hub model no weights are fetched.
    ///
    /// # Errors
    /// - the target is not found, or its configuration or tokenizer is unusable
    pub fn open_description(spec: &str) -> Result<(TargetConfig, TextTokenizer)> {
        locate::describe(spec)
    }

    /// Checks names and shapes of the tensors that `layers` need, in the headers of a local target's
    /// files.
    ///
    /// # Errors
    /// - there are no weights, or a list of every missing and misshapen tensor
    pub fn check_weights(path: &Path, layers: Layers) -> Result<()> {
        load::check(path, layers)
    }

    /// Types of a local target's matrices, from the headers of its files; the largest first.
    ///
    /// # Errors
    /// - there are no weights, or the configuration is unusable
    pub fn stored_types(path: &Path) -> Result<Vec<StoredType>> {
        load::stored_types(path)
    }

    /// Sizes and switches.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Identifies the weights: a hash of the configuration and a sample of them.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Where the weights lie.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether matrices are held as quantised blocks.
    pub fn holds_blocks(&self) -> bool {
        self.has_blocks
    }

    /// The type in which keys and values are cached, by its name.
    pub fn cache_type(&self) -> &'static str {
        match self.cache_dtype {
            DType::U8 => "q8",
            dtype => dtype.as_str(),
        }
    }

    /// Quantised types of the file (`Q4_K`, ...) that were wanted as stored and are held as floats, in
    /// order: products read others.
    pub fn widened(&self) -> &[&'static str] {
        &self.widened
    }

    /// Bytes of the matrices by the type in which they are held (`Q4_K`, `F32`), the largest first; of
    /// the whole target where ranks hold a part each.
    pub fn held(&self) -> &[(&'static str, u64)] {
        &self.held
    }

    /// Rotary frequencies of the last layer that attends, whose keys [`Tap::LastKv`] hands out; those of short
    /// sequences where they depend on the length.
    pub fn rope(&self) -> &Rope {
        self.rope_of_last(false)
    }

    /// The same for the sequence of a cache.
    pub fn rope_for(&self, cache: &KvCache) -> &Rope {
        self.rope_of_last(cache.is_long())
    }

    /// Angles of some tokens of a packed row in the last layer.
    ///
    /// # Shapes
    /// - `position_ids`, `document_ids`: `[T]` of the whole row → a table of `rows`
    ///
    /// # Errors
    /// - the device has no memory for them
    ///
    /// # Panics
    /// - `rows` are not in the row
    pub fn rope_table(
        &self,
        (position_ids, document_ids): (&[u32], &[i32]),
        rows: Range<usize>,
    ) -> Result<RopeTable> {
        let long = self.long_tokens(position_ids, document_ids);
        let long = long.get(rows.clone()).unwrap_or_default();
        let slides =
            self.config.window_of(self.config.num_hidden_layers.saturating_sub(1)).is_some();
        self.ropes.last_table(slides, (&position_ids[rows], long), &self.device)
    }

    fn rope_of_last(&self, long: bool) -> &Rope {
        let last = self.config.last_attention_layer().unwrap_or(0);
        self.ropes.of_last_layer(self.config.window_of(last).is_some(), long)
    }

    /// Stretches RoPE's base for sequences `stretch` times as long as those of training (NTK):
    /// `theta · stretch^(D/(D−2))`. Returns the new base.
    ///
    /// # Errors
    /// - `stretch` is not positive, or layers have rotary bases of two kinds
    pub fn stretch_rope(&mut self, stretch: f64) -> Result<f64> {
        let is_even = self.config.parts.heads.is_empty();
        let Some(only) = self.ropes.only().filter(|_| is_even) else {
            return Err(refused("a target with two rotary bases is not stretched"));
        };
        let head_dim = self.config.parts.turning(self.config.head_dim);
        let mut rope = self.config.rope.clone();
        if head_dim > 2 {
            let dimensions = head_dim as f64;
            rope.theta *= stretch.powf(dimensions / (dimensions - 2.0));
        }
        *only = self.config.parts.build_rope(&rope, self.config.head_dim)?;
        Ok(rope.theta)
    }

    /// Puts embedding table and head of a spread target together until the guard goes. All ranks
    /// call it; where the target is not spread nothing happens.
    ///
    /// # Errors
    /// - they cannot be put together
    pub fn hold_ends(&self) -> Result<Ends<'_>> {
        Ok(Ends { _tables: [self.embedding.hold()?, self.head_table().hold()?] })
    }

    /// Output head, `[V, H]`; [`Self::bend`] makes logits of its products.
    ///
    /// # Errors
    /// - it is quantised and there is no memory for its values, or it is spread and not held
    pub fn head(&self) -> Result<Tensor> {
        self.head_table().tensor()
    }

    /// What becomes of the head's products before they are logits.
    pub fn bend(&self) -> Bend {
        self.config.bend()
    }

    /// The `k` most likely tokens after final hidden states, of `k` up to the vocabulary.
    ///
    /// # Shapes
    /// - `[R, H]` → `[R, k]`
    ///
    /// # Errors
    /// - as [`Self::head`], or the width differs
    pub fn top_k(&self, final_hidden: &Tensor, k: usize) -> Result<TopK> {
        let k = k.min(self.config.vocab_size);
        Ok(bent_top_k(final_hidden, &self.head()?, k, self.bend())?)
    }

    /// Output head as it is held; [`Self::bend`] makes logits of its products.
    ///
    /// # Errors
    /// - it is spread and not held
    pub fn head_matrix(&self) -> Result<Matrix> {
        self.head_table().matrix()
    }

    fn head_table(&self) -> &Table {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Embedding table, `[V, H]`, as the file holds it: [`Self::embed`] scales where the family does.
    ///
    /// # Errors
    /// - it is quantised and there is no memory for its values, or it is spread and not held
    pub fn embedding(&self) -> Result<Tensor> {
        self.embedding.tensor()
    }

    /// Weight of the norm before the head, `[H]`.
    pub fn final_norm(&self) -> &Tensor {
        &self.final_norm
    }

    /// Tensors of the last decoder layer that attends (the last one if none does) under their published names
    /// without a prefix. All ranks of a spread target call it.
    ///
    /// # Errors
    /// - they are quantised and there is no memory for their values
    pub fn last_layer(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let (mut tensors, layers) = (Vec::new(), self.layers.len());
        let last = layers.saturating_sub(1);
        let place = if layers == self.config.num_hidden_layers {
            self.config.last_attention_layer().unwrap_or(last)
        } else {
            last
        };
        self.layers.visit(place..layers.min(place + 1), &mut |_, layer| {
            tensors = layer.tensors()?;
            Ok(())
        })?;
        Ok(tensors)
    }

    /// Embeddings of `ids` in f32, as the first layer reads them.
    ///
    /// # Shapes
    /// - `ids`: `[T]` → `[T, H]`
    ///
    /// # Errors
    /// - an id lies outside the vocabulary, or the table is spread and not held
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.check_ids(ids)?;
        let rows = self.embedding.matrix()?.rows(ids)?;
        Ok(match self.config.parts.embedding_scale {
            Some(scale) => (rows * scale)?,
            None => rows,
        })
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let Some(id) = ids.iter().find(|id| **id as usize >= self.config.vocab_size) else {
            return Ok(());
        };
        let vocabulary = self.config.vocab_size;
        let message = format!("token {id} lies outside the vocabulary of {vocabulary}");
        Err(ModelError::Tokenizer(message))
    }

    /// Runs packed documents and returns what `taps` ask for; layers after the last tap are
    /// skipped. All ranks of a spread target, or of one whose layers they share, make the same passes;
    /// one that has nothing to run makes [`Self::join_forward`]. Where layers are shared, all ranks
    /// run every rank's documents in turn.
    ///
    /// # Errors
    /// - lengths differ, an id lies outside the vocabulary, or a tapped layer does not exist
    pub fn forward(&self, sequence: &PackedSequence, taps: &Taps) -> Result<Features> {
        sequence.check()?;
        match self.share.ranks() {
            None => self.run_packed(sequence, (taps, Keeping::All)),
            Some(ranks) => self.run_in_turn(ranks, Some(sequence), taps),
        }
    }

    fn run_packed(&self, row: &PackedSequence, taps: (&Taps, Keeping)) -> Result<Features> {
        let visible = self.visible(&row.document_ids, |ranges| ranges);
        let mut context = Context::Packed(visible, &row.document_ids);
        let long = self.long_tokens(&row.position_ids, &row.document_ids);
        self.run((&row.ids, &row.position_ids), &long, &mut context, taps)
    }

    /// The keys that packed tokens see, or those of some of them.
    fn visible(&self, document_ids: &[i32], some: impl Fn(KeyRanges) -> KeyRanges) -> Visible {
        Visible::new(&self.config.parts, |reach| some(KeyRanges::packed_in(document_ids, reach)))
    }

    /// Which packed tokens are those of documents that are longer than short sequences are.
    fn long_tokens(&self, position_ids: &[u32], document_ids: &[i32]) -> Vec<bool> {
        let Some(border) = self.ropes.border() else { return Vec::new() };
        let mut long = Vec::with_capacity(position_ids.len());
        for document in document_ids.chunk_by(|a, b| a == b) {
            let first = long.len();
            let positions = &position_ids[first..first + document.len()];
            let last = positions.iter().max().map_or(0, |last| *last as usize);
            long.resize(first + document.len(), last >= border);
        }
        long
    }

    /// Runs this rank's tokens of a row that several ranks run together; all of them call it. Keys
    /// and values are those of the whole row, rotated ones alone; all else is of [`RowPart::rows`].
    /// Every token has the bits that it has in the whole row.
    ///
    /// # Errors
    /// - as [`Self::forward`], the row has fewer tokens than ranks, or ranks share the layers
    pub fn forward_part(
        &self,
        sequence: &PackedSequence,
        part: &RowPart,
        taps: &Taps,
    ) -> Result<Features> {
        sequence.check()?;
        self.require_whole_layers("parts of rows")?;
        part.check(sequence.ids.len())?;
        if self.config.is_recurrent() {
            return Err(refused("ranks do not share the rows of layers with a recurrent state"));
        }
        let rows = part.rows();
        let visible = self.visible(&sequence.document_ids, |whole| part.ranges(&whole));
        let mut context = Context::Part(part.clone(), visible);
        let long = self.long_tokens(&sequence.position_ids, &sequence.document_ids);
        let long = long.get(rows.clone()).unwrap_or_default();
        let tokens = (&sequence.ids[rows.clone()], &sequence.position_ids[rows]);
        self.run(tokens, long, &mut context, (taps, Keeping::All))
    }

    /// Takes part in what the ranks of a spread target gather for a pass with the same taps, or runs
    /// the others' rows where ranks share the layers; else nothing happens.
    ///
    /// # Errors
    /// - a tapped layer does not exist, or a layer cannot be put together
    pub fn join_forward(&self, taps: &Taps) -> Result<()> {
        self.check(taps)?;
        if let Some(ranks) = self.share.ranks() {
            return self.run_in_turn(ranks, None, taps).map(drop);
        }
        drop(self.embedding.hold()?);
        let last_kv = self.config.last_attention_layer();
        self.layers.visit(0..taps.layers_read(self.layers.len(), last_kv), &mut |_, _| Ok(()))
    }

    /// Logits of final hidden states (after the final norm), in f32.
    ///
    /// # Shapes
    /// - `[T, H]` → `[T, V]`
    ///
    /// # Errors
    /// - the width differs
    pub fn logits(&self, final_hidden: &Tensor) -> Result<Tensor> {
        Ok(self.bend().of(self.head_matrix()?.linear(final_hidden, None)?)?)
    }

    fn check(&self, taps: &Taps) -> Result<()> {
        let layers = self.config.num_hidden_layers;
        if self.layers.len() != layers {
            return Err(ModelError::Tensor(candle_core::Error::Msg(format!(
                "the target's {layers} layers were not loaded: it cannot run"
            ))));
        }
        taps.check(layers, self.config.last_attention_layer())
    }

    fn require_whole_layers(&self, what: &str) -> Result<()> {
        match self.share.size() {
            1 => Ok(()),
            ranks => Err(ModelError::Tensor(candle_core::Error::Msg(format!(
                "{ranks} ranks share the target's layers: it does not run {what}"
            )))),
        }
    }

    fn run(
        &self,
        (ids, position_ids): (&[u32], &[u32]),
        long: &[bool],
        context: &mut Context<'_>,
        (taps, keeping): (&Taps, Keeping),
    ) -> Result<Features> {
        self.check(taps)?;
        let layers = self.layers.len();
        let cached = matches!(context, Context::Cached(..));
        let last_kv = self.config.last_attention_layer();
        let read = if cached { layers } else { taps.layers_read(layers, last_kv) };
        let angles = self.ropes.angles(&self.config.parts, position_ids, long, &self.device)?;
        let mut hidden = {
            let _held = self.embedding.hold()?;
            self.embed(ids)?
        };
        let per_layer =
            self.per_layer.as_ref().map(|inputs| inputs.of(ids, &hidden)).transpose()?;
        // Keys and values that later layers read.
        let mut shared: BTreeMap<usize, Heads> = BTreeMap::new();
        let (mut features, keeps) = (Features::default(), keeping == Keeping::All);
        self.layers.visit(0..read, &mut |index, layer| {
            let owner = layer.sizes.keys_owner.and_then(|owner| shared.get(&owner));
            let mut heads = layer.project(&hidden, &angles, owner)?;
            if let (Context::Part(part, _), Some(heads)) = (&*context, &mut heads)
                && layer.sizes.keys_owner.is_none()
            {
                (heads.k, heads.v) = (part.gather(&heads.k)?, part.gather(&heads.v)?);
            }
            if let Some(heads) = heads.as_ref().filter(|_| self.config.owns_keys(index)) {
                shared.insert(index, heads.clone());
            }
            if let Some(heads) = heads.as_ref().filter(|_| last_kv == Some(index) && taps.last_kv) {
                let (kv, unrotated) = layer.all_heads(heads, &angles)?;
                let whole = !matches!(context, Context::Part(..));
                features.last_keys_unrotated = (keeps && whole).then_some(unrotated);
                features.last_kv = keeps.then_some(kv);
            }
            if !cached && !taps.needs_output_of(index, last_kv) {
                return Ok(());
            }
            hidden = layer.finish(&hidden, heads.as_ref(), index, context)?;
            let inputs =
                per_layer.as_ref().map(|all| all.narrow(1, index, 1)?.squeeze(1)?.contiguous());
            hidden = layer.end.apply(hidden.clone(), inputs.transpose()?.as_ref())?;
            if keeps && taps.hidden.iter().any(|layer| layer.0 == index) {
                features.hidden.insert(crate::LayerId(index), hidden.clone());
            }
            Ok(())
        })?;
        if keeps && taps.final_hidden {
            let normed = rms_norm(&hidden, &self.final_norm, self.config.rms_norm_eps)?;
            features.final_hidden = Some(normed);
        }
        Ok(features)
    }
}

/// What a target does not do.
fn refused(problem: &str) -> ModelError {
    ModelError::Tensor(candle_core::Error::Msg(problem.to_owned()))
}
