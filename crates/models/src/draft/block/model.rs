//! Forward pass: keys and values of the context, then blocks over them.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use longdraft_kernels::dispatch::has_half_products;
use longdraft_kernels::graph::{add, cat, reshape};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rope::{Rope, RopeTable, rope};
use longdraft_kernels::rows::select_rows;
use serde_json::Value;

use super::chain;
use super::config::BlockConfig;
use super::convolution::Convolution;
use super::files::architecture_of;
use super::mask::Visible;
use super::own_head::OwnHead;
use super::rows::{Run, distinct, within};
use crate::draft::seen::{Seen, attention_each};
use crate::draft::{Draft, DraftWeights, HeldAs, VocabularyMap};
use crate::error::{Result, refused};
use crate::ids::check_ids;
use crate::target_model::{KeyValues, KvCache, Tap};

/// What the queries of a layer find in the context, and in the blocks' own keys and values. The queries are those of
/// some slots, or of all.
type Attend<'a> = dyn Fn(usize, &Tensor, KeyValues, Option<&[u32]>) -> Result<Tensor> + 'a;

/// A pass over the slots of blocks.
struct Pass<'a> {
    attend: &'a Attend<'a>,
    /// Slots of a block.
    slots: usize,
    /// Angles of every slot.
    table: RopeTable,
    /// Those of the slots asked for, where not all are.
    of_wanted: Option<RopeTable>,
}

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

    fn weights(&self) -> &DraftWeights {
        &self.weights
    }

    fn weights_mut(&mut self) -> &mut DraftWeights {
        &mut self.weights
    }

    fn held_bytes(&self) -> usize {
        self.weights.held_bytes() + self.own_head.as_ref().map_or(0, OwnHead::held_bytes)
    }

    fn hold_as(&mut self, how: HeldAs) -> Result<()> {
        if let Some(own) = &mut self.own_head {
            own.hold_as(how)?;
            return self.weights.hold_as(how);
        }
        // Through a head over fewer tokens a chain proposes with rows of its matrix in f32.
        self.weights.hold_beside(how, &[chain::OUTPUT])
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
        self.context_by(features, &self.rope.table(positions, self.embedding.device())?)
    }

    /// The same for [`Self::blocks_at`] alone, so that keys may be rounded for attention's products.
    ///
    /// # Errors
    /// - as [`Self::context`]
    pub fn attended_context(&self, features: &Tensor, positions: &[u32]) -> Result<Vec<KeyValues>> {
        let table = self.rope.table(positions, self.embedding.device())?;
        self.context_by(features, &table.attended())
    }

    fn context_by(&self, features: &Tensor, table: &RopeTable) -> Result<Vec<KeyValues>> {
        let fused = self.weights.project(features, "fc")?;
        let context = self.weights.norm(&fused, "hidden_norm")?;
        (0..self.config.layers.len()).map(|i| self.key_values(i, &context, None, table)).collect()
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
        self.blocks_at(ids, positions, (context, visible), None)
    }

    /// The same of some slots, `wanted`, ascending: `[W, H]`; all of them where there is none. The other slots run only
    /// as far as these see them.
    ///
    /// # Errors
    /// - as [`Self::blocks`], or there is no such slot
    pub fn blocks_at(
        &self,
        ids: &[u32],
        positions: &[u32],
        (context, visible): (&[KeyValues], &Visible),
        wanted: Option<&[u32]>,
    ) -> Result<Tensor> {
        let attend = |layer: usize, q: &Tensor, own: KeyValues, wanted: Option<&[u32]>| {
            let Some(KeyValues { k, v }) = context.get(layer) else {
                let layers = context.len();
                return Err(refused(format!(
                    "the context of {layers} layers has no layer {layer}"
                )));
            };
            let (k, v) = (cat(&[k, &own.k], 0)?, cat(&[v, &own.v], 0)?);
            attention_each(q, &[self.seen(layer, KeyValues { k, v }, (visible, wanted))])
        };
        // Keys of the slots are joined to those of the context.
        let is_rounded = context.first().is_some_and(|layer| layer.k.dtype() == DType::BF16);
        self.forward((ids, positions), (&attend, is_rounded), visible.slots(), wanted)
    }

    /// The same of one block each of several sequences, over the tokens of their caches: a block's own keys are
    /// written after these, and not committed. No key of the context is copied. On a CPU a slot's bits do not depend on
    /// the sequences beside its own, nor on the slots that are asked for.
    ///
    /// # Shapes
    /// - `ids`, `positions`: `[R]`, all blocks of as many slots; every `visible` of one block → `[W, H]`, `W`
    ///   slots as in [`Self::blocks_at`]
    ///
    /// # Errors
    /// - as [`Self::blocks`]; the device has no memory for larger caches
    pub fn blocks_each(
        &self,
        ids: &[u32],
        positions: &[u32],
        sequences: &mut [(&mut KvCache, Visible)],
        wanted: Option<&[u32]>,
    ) -> Result<Tensor> {
        let slots = sequences.first().map_or(0, |(_, visible)| visible.slots());
        for (cache, _) in sequences.iter_mut() {
            cache.reserve(slots)?;
        }
        let attend = |layer: usize, q: &Tensor, own: KeyValues, wanted: Option<&[u32]>| {
            let mut seen = Vec::with_capacity(sequences.len());
            for (block, (cache, visible)) in sequences.iter().enumerate() {
                let first = block * slots;
                let of_block = |tensor: &Tensor| tensor.narrow(0, first, slots);
                let (k, v) = cache.append(layer, &of_block(&own.k)?, &of_block(&own.v)?)?;
                let wanted = wanted.map(|wanted| within(wanted, first..first + slots));
                seen.push(self.seen(layer, KeyValues { k, v }, (visible, wanted.as_deref())));
            }
            attention_each(q, &seen)
        };
        self.forward((ids, positions), (&attend, false), slots, wanted)
    }

    fn seen(
        &self,
        layer: usize,
        keys: KeyValues,
        (visible, wanted): (&Visible, Option<&[u32]>),
    ) -> Seen {
        let all = visible.of(self.config.layers[layer]);
        let ranges = wanted.map_or_else(|| Arc::clone(all), |slots| Arc::new(all.select(slots)));
        Seen { keys, ranges }
    }

    fn forward(
        &self,
        (ids, positions): (&[u32], &[u32]),
        (attend, is_rounded): (&Attend<'_>, bool),
        slots: usize,
        wanted: Option<&[u32]>,
    ) -> Result<Tensor> {
        if positions.len() != ids.len() || slots == 0 || !ids.len().is_multiple_of(slots) {
            return Err(refused(format!(
                "{} ids at {} positions are not blocks of {slots} slots",
                ids.len(),
                positions.len()
            )));
        }
        if let Some(wanted) = wanted {
            let is_fine =
                wanted.is_sorted() && wanted.last().is_none_or(|&s| (s as usize) < ids.len());
            if !is_fine {
                return Err(refused(format!("not slots of {}, ascending: {wanted:?}", ids.len())));
            }
            if wanted.is_empty() {
                let none = (0, self.config.hidden_size);
                return Ok(Tensor::zeros(none, DType::F32, self.embedding.device())?);
            }
        }
        let angles = |positions: &[u32]| -> Result<RopeTable> {
            let table = self.rope.table(positions, self.embedding.device())?;
            Ok(if is_rounded { table.attended() } else { table })
        };
        let table = angles(positions)?;
        // Convolutions mix the slots of a block before and after each part of a layer.
        let alone = self.config.convolution.is_none();
        let of_wanted = wanted.filter(|_| alone).map(|wanted| {
            angles(&wanted.iter().map(|&slot| positions[slot as usize]).collect::<Vec<_>>())
        });
        let pass = Pass { attend, slots, table, of_wanted: of_wanted.transpose()? };
        let last = self.config.layers.len() - 1;
        let of_slot = if alone && self.shares_tokens() { distinct(ids) } else { None };
        let (mut x, mut of_slot) = match of_slot {
            Some((tokens, of_slot)) => (self.embed(&tokens)?, Some(of_slot)),
            None => (self.embed(ids)?, None),
        };
        for layer in 0..=last {
            let wanted = wanted.filter(|_| alone && layer == last);
            let run = Run { of_slot: of_slot.as_deref(), wanted };
            x = self.layer(layer, &x, run, &pass)?;
            of_slot = None;
        }
        if let (Some(wanted), false) = (wanted, alone) {
            x = select_rows(&x, wanted)?;
        }
        self.weights.norm(&x, "norm")
    }

    /// Whether the first layer projects every token once for all slots that hold it; most hold the mask token. On a GPU
    /// the gradient of such a row would be the sum of all of its slots in one thread a column, which takes longer than
    /// the products. A CPU that runs a GPU's kernels does as a GPU does.
    fn shares_tokens(&self) -> bool {
        !has_half_products(self.embedding.device())
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

    fn key_values(
        &self,
        layer: usize,
        input: &Tensor,
        of_slot: Option<&[u32]>,
        table: &RopeTable,
    ) -> Result<KeyValues> {
        let attention = format!("layers.{layer}.self_attn");
        let (heads, size) = (self.config.num_key_value_heads, self.config.head_dim);
        let k = self.weights.heads(input, &format!("{attention}.k_proj"), heads, size)?;
        let k = self.weights.norm(&k, &format!("{attention}.k_norm"))?;
        let v = self.weights.heads(input, &format!("{attention}.v_proj"), heads, size)?;
        let (k, v) = match of_slot {
            Some(rows) => (select_rows(&k, rows)?, select_rows(&v, rows)?),
            None => (k, v),
        };
        Ok(KeyValues { k: rope(&k, table)?, v })
    }

    fn layer(&self, layer: usize, x: &Tensor, run: Run<'_>, pass: &Pass<'_>) -> Result<Tensor> {
        let name = format!("layers.{layer}");
        let z = self.weights.norm(x, &format!("{name}.input_layernorm"))?;
        let x = match self.convolution(&format!("{name}.attention_conv"), &z, pass.slots)? {
            None => {
                let attended = self.attention(layer, &z, run, pass)?;
                match run.rows() {
                    Some(rows) => add(&select_rows(x, &rows)?, &attended)?,
                    None => add(x, &attended)?,
                }
            }
            Some(convolution) => {
                let input = convolution.apply(&z, 0)?;
                let out = self.attention(layer, &input, run, pass)?;
                add(x, &convolution.apply(&out, 1)?)?
            }
        };
        let z = self.weights.norm(&x, &format!("{name}.post_attention_layernorm"))?;
        let mlp = format!("{name}.mlp");
        match self.convolution(&format!("{name}.mlp_conv"), &z, pass.slots)? {
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
        run: Run<'_>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let q = self.queries(layer, input, run, pass)?;
        let own = self.key_values(layer, input, run.of_slot, &pass.table)?;
        let attended = (pass.attend)(layer, &q, own, run.wanted)?;
        let attended = reshape(&attended, (q.dim(0)?, self.config.query_size()))?;
        self.weights.project(&attended, &format!("layers.{layer}.self_attn.o_proj"))
    }

    /// Rotated queries of the slots asked for.
    fn queries(
        &self,
        layer: usize,
        input: &Tensor,
        run: Run<'_>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let module = format!("layers.{layer}.self_attn");
        let (heads, size) = (self.config.num_attention_heads, self.config.head_dim);
        let of = |input: &Tensor| -> Result<Tensor> {
            let q = self.weights.heads(input, &format!("{module}.q_proj"), heads, size)?;
            self.weights.norm(&q, &format!("{module}.q_norm"))
        };
        let q = match (run.rows(), run.of_slot) {
            (Some(rows), Some(_)) => select_rows(&of(input)?, &rows)?,
            (Some(rows), None) => of(&select_rows(input, &rows)?)?,
            (None, _) => of(input)?,
        };
        let of_wanted = pass.of_wanted.as_ref().filter(|_| run.wanted.is_some());
        Ok(rope(&q, of_wanted.unwrap_or(&pass.table))?)
    }
}
