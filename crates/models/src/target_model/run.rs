//! Passes over packed rows, or over parts of them: what is tapped comes out.

use std::collections::BTreeMap;

use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::rms_norm::rms_norm;

use super::layer::{Context, Heads};
use super::pass::Visible;
use super::{Features, PackedSequence, RowPart, Taps, Target};
use crate::error::{Result, refused};

/// What becomes of what a pass taps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keeping {
    /// It is handed out.
    All,
    /// It is another rank's.
    Nothing,
}

impl Target {
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

    pub(super) fn run_packed(
        &self,
        row: &PackedSequence,
        taps: (&Taps, Keeping),
    ) -> Result<Features> {
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
    pub(super) fn long_tokens(&self, position_ids: &[u32], document_ids: &[i32]) -> Vec<bool> {
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
        let long = if long.is_empty() { long } else { rows.select(&long) };
        let (ids, positions) = (rows.select(&sequence.ids), rows.select(&sequence.position_ids));
        self.run((&ids, &positions), &long, &mut context, (taps, Keeping::All))
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

    pub(super) fn check(&self, taps: &Taps) -> Result<()> {
        let layers = self.config.num_hidden_layers;
        if self.layers.len() != layers {
            return Err(refused(format!(
                "the target's {layers} layers were not loaded: it cannot run"
            )));
        }
        taps.check(layers, self.config.last_attention_layer())
    }

    pub(super) fn require_whole_layers(&self, what: &str) -> Result<()> {
        match self.share.size() {
            1 => Ok(()),
            ranks => Err(refused(format!(
                "{ranks} ranks share the target's layers: it does not run {what}"
            ))),
        }
    }

    pub(super) fn run(
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
        let mut hidden = self.embed(&self.embedding.hold()?, ids)?;
        let per_layer =
            self.per_layer.as_ref().map(|inputs| inputs.of(ids, &hidden)).transpose()?;
        // Keys and values that later layers read.
        let mut shared: BTreeMap<usize, Heads> = BTreeMap::new();
        let (mut features, keeps) = (Features::default(), keeping == Keeping::All);
        self.layers.visit(0..read, &mut |index, layer| {
            let owner = layer.sizes.keys_owner.and_then(|owner| shared.get(&owner));
            let is_tapped = taps.last_kv && last_kv == Some(index);
            // What is handed out is not rounded.
            let dtype = if is_tapped { hidden.dtype() } else { layer.inner_type(&hidden) };
            let mut heads = layer.project((&hidden, dtype), &angles, owner)?;
            if let (Context::Part(part, _), Some(heads)) = (&*context, &mut heads)
                && layer.sizes.keys_owner.is_none()
            {
                (heads.k, heads.v) = (part.gather(&heads.k)?, part.gather(&heads.v)?);
            }
            if let Some(heads) = heads.as_ref().filter(|_| self.config.owns_keys(index)) {
                shared.insert(index, heads.clone());
            }
            if let Some(heads) = heads.as_ref().filter(|_| is_tapped) {
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
