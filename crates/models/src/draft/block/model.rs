//! Forward pass: keys and values of the context, then blocks over them.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::graph::{add, cat, reshape};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rope::{Rope, RopeTable, rope};
use serde_json::Value;

use super::config::BlockConfig;
use super::convolution::Convolution;
use super::files::architecture_of;
use super::mask::Visible;
use super::own_head::OwnHead;
use crate::draft::seen::{Seen, attention_each};
use crate::draft::{Draft, DraftWeights, Parameter, VocabularyMap};
use crate::error::{Result, refused};
use crate::ids::check_ids;
use crate::target_model::{KeyValues, KvCache, Tap};

/// What the slots' queries of a layer find in the context, and in the blocks' own keys and values.
type Attend<'a> = dyn Fn(usize, &Tensor, KeyValues) -> Result<Tensor> + 'a;

/// The network that all block drafts share, with the tensors of their heads.
pub struct BlockDraft {
    pub(super) config: BlockConfig,
    pub(super) weights: DraftWeights,
    /// A head of its own, where it does not propose through the target's.
    pub(super) own_head: Option<OwnHead>,
    /// The target's frozen table, `[V, H]`, as the target holds it.
    pub(in crate::draft) embedding: Matrix,
    pub(super) rope: Rope,
}

impl Draft for BlockDraft {
    fn method(&self) -> &'static str {
        super::files::kind_of(&self.config).name
    }

    fn taps(&self) -> Vec<Tap> {
        self.config.target_layers.iter().map(|layer| Tap::Hidden(*layer)).collect()
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.own_head.as_ref().map(OwnHead::vocabulary)
    }

    fn parameters(&self) -> &[Parameter] {
        self.weights.parameters()
    }

    fn parameters_mut(&mut self) -> &mut [Parameter] {
        self.weights.parameters_mut()
    }

    fn hold_as_blocks(&mut self) -> Result<()> {
        if let Some(own) = &mut self.own_head {
            own.hold_as_blocks()?;
        }
        self.weights.hold_as_blocks()
    }

    fn fixed_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        self.own_head.as_ref().map_or(Ok(Vec::new()), OwnHead::tensors)
    }

    /// The map of a head of its own. Its rows are made again, from the target or from the draft to start from.
    fn binding_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        let map = self.vocabulary().map(VocabularyMap::tensors).transpose()?;
        Ok(map.into_iter().flatten().collect())
    }

    fn config_json(&self) -> Value {
        self.config.to_json(architecture_of(&self.config))
    }
}

impl BlockDraft {
    /// Sizes and switches.
    pub fn config(&self) -> &BlockConfig {
        &self.config
    }

    /// Tensors by name, those of the draft's heads included.
    pub fn weights(&self) -> &DraftWeights {
        &self.weights
    }

    /// A head of the draft's own; `None` where it proposes through the target's.
    pub fn own_head(&self) -> Option<&OwnHead> {
        self.own_head.as_ref()
    }

    /// The same, `[Vd, H]`, as it is held.
    ///
    /// # Errors
    /// - never for a draft that was built
    pub fn own_head_matrix(&self) -> Result<Option<Matrix>> {
        self.own_head.as_ref().map(OwnHead::matrix).transpose()
    }

    /// Rotated keys, and values, of context rows in every layer. They do not depend on blocks.
    ///
    /// # Shapes
    /// - `features`: `[T, A·H]`, `positions`: `[T]` → `[T, K, D]` each
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn context(&self, features: &Tensor, positions: &[u32]) -> Result<Vec<KeyValues>> {
        let fused = self.weights.project(features, "fc")?;
        let context = self.weights.norm(&fused, "hidden_norm")?;
        let table = self.rope.table(positions, self.embedding.device())?;
        (0..self.config.layers.len()).map(|i| self.key_values(i, &context, &table)).collect()
    }

    /// The blocks' slots after the final norm, which the target's head reads.
    ///
    /// # Shapes
    /// - `ids`, `positions`: `[R]`, `R` slots of blocks; `context`: of every layer `[T, K, D]`;
    ///   `visible` over `R` queries, `T` keys of the context and `R` of the blocks → `[R, H]`
    ///
    /// # Errors
    /// - shapes do not fit, or an id lies outside of the table
    pub fn blocks(
        &self,
        ids: &[u32],
        positions: &[u32],
        context: &[KeyValues],
        visible: &Visible,
    ) -> Result<Tensor> {
        let attend = |layer: usize, q: &Tensor, own: KeyValues| {
            let Some(KeyValues { k, v }) = context.get(layer) else {
                let layers = context.len();
                return Err(refused(format!(
                    "the context of {layers} layers has no layer {layer}"
                )));
            };
            let (k, v) = (cat(&[k, &own.k], 0)?, cat(&[v, &own.v], 0)?);
            attention_each(q, &[self.seen(layer, KeyValues { k, v }, visible)])
        };
        self.forward(ids, positions, &attend, visible.slots())
    }

    /// The same of one block each of several sequences, over the tokens of their caches: a block's own keys are
    /// written after these, and not committed. No key of the context is copied. A slot's bits do not depend on the
    /// sequences beside its own.
    ///
    /// # Shapes
    /// - `ids`, `positions`: `[R]`, all blocks of as many slots; every `visible` of one block → `[R, H]`
    ///
    /// # Errors
    /// - as [`Self::blocks`]; the device has no memory for larger caches
    pub fn blocks_each(
        &self,
        ids: &[u32],
        positions: &[u32],
        sequences: &mut [(&mut KvCache, Visible)],
    ) -> Result<Tensor> {
        let slots = sequences.first().map_or(0, |(_, visible)| visible.slots());
        for (cache, _) in sequences.iter_mut() {
            cache.reserve(slots)?;
        }
        let attend = |layer: usize, q: &Tensor, own: KeyValues| {
            let mut seen = Vec::with_capacity(sequences.len());
            for (block, (cache, visible)) in sequences.iter().enumerate() {
                let of_block = |tensor: &Tensor| tensor.narrow(0, block * slots, slots);
                let (k, v) = cache.append(layer, &of_block(&own.k)?, &of_block(&own.v)?)?;
                seen.push(self.seen(layer, KeyValues { k, v }, visible));
            }
            attention_each(q, &seen)
        };
        self.forward(ids, positions, &attend, slots)
    }

    fn seen(&self, layer: usize, keys: KeyValues, visible: &Visible) -> Seen {
        Seen { keys, ranges: Arc::clone(visible.of(self.config.layers[layer])) }
    }

    fn forward(
        &self,
        ids: &[u32],
        positions: &[u32],
        attend: &Attend<'_>,
        slots: usize,
    ) -> Result<Tensor> {
        if positions.len() != ids.len() || slots == 0 || !ids.len().is_multiple_of(slots) {
            return Err(refused(format!(
                "{} ids at {} positions are not blocks of {slots} slots",
                ids.len(),
                positions.len()
            )));
        }
        let mut x = self.embed(ids)?;
        let table = self.rope.table(positions, self.embedding.device())?;
        for layer in 0..self.config.layers.len() {
            x = self.layer(layer, &x, &table, (attend, slots))?;
        }
        self.weights.norm(&x, "norm")
    }

    /// What the target's embeddings say of ids, times the draft's factor for them if it has one, `[R, H]` in f32.
    ///
    /// # Errors
    /// - an id lies outside of the table
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        check_ids(ids, self.config.vocab_size)?;
        let rows = self.embedding.rows(ids)?;
        Ok(match self.config.embedding_scale {
            Some(scale) => (rows * scale)?,
            None => rows,
        })
    }

    fn key_values(&self, layer: usize, input: &Tensor, table: &RopeTable) -> Result<KeyValues> {
        let attention = format!("layers.{layer}.self_attn");
        let (heads, size) = (self.config.num_key_value_heads, self.config.head_dim);
        let k = self.weights.heads(input, &format!("{attention}.k_proj"), heads, size)?;
        let k = self.weights.norm(&k, &format!("{attention}.k_norm"))?;
        let v = self.weights.heads(input, &format!("{attention}.v_proj"), heads, size)?;
        Ok(KeyValues { k: rope(&k, table)?, v })
    }

    fn layer(
        &self,
        layer: usize,
        x: &Tensor,
        table: &RopeTable,
        (attend, slots): (&Attend<'_>, usize),
    ) -> Result<Tensor> {
        let name = format!("layers.{layer}");
        let z = self.weights.norm(x, &format!("{name}.input_layernorm"))?;
        let x = match self.convolution(&format!("{name}.attention_conv"), &z, slots)? {
            None => add(x, &self.attention(layer, &z, table, attend)?)?,
            Some(convolution) => {
                let input = convolution.apply(&z, 0)?;
                let out = self.attention(layer, &input, table, attend)?;
                add(x, &convolution.apply(&out, 1)?)?
            }
        };
        let z = self.weights.norm(&x, &format!("{name}.post_attention_layernorm"))?;
        let mlp = format!("{name}.mlp");
        match self.convolution(&format!("{name}.mlp_conv"), &z, slots)? {
            None => self.weights.mlp_onto(&x, &z, &mlp),
            Some(convolution) => {
                let out = self.weights.mlp(&convolution.apply(&z, 0)?, &mlp)?;
                Ok(add(&x, &convolution.apply(&out, 1)?)?)
            }
        }
    }

    fn convolution(
        &self,
        module: &str,
        z: &Tensor,
        slots: usize,
    ) -> Result<Option<Convolution<'_>>> {
        let make = |_| Convolution::new(&self.weights, module, (z, slots));
        self.config.convolution.map(make).transpose()
    }

    fn attention(
        &self,
        layer: usize,
        input: &Tensor,
        table: &RopeTable,
        attend: &Attend<'_>,
    ) -> Result<Tensor> {
        let module = format!("layers.{layer}.self_attn");
        let (heads, size) = (self.config.num_attention_heads, self.config.head_dim);
        let q = self.weights.heads(input, &format!("{module}.q_proj"), heads, size)?;
        let q = rope(&self.weights.norm(&q, &format!("{module}.q_norm"))?, table)?;
        let attended = attend(layer, &q, self.key_values(layer, input, table)?)?;
        let attended = reshape(&attended, (input.dim(0)?, self.config.query_size()))?;
        self.weights.project(&attended, &format!("{module}.o_proj"))
    }
}
