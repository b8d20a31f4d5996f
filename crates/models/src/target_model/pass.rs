//! What the layers of a pass need of its tokens, for full and for sliding ones.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use longdraft_kernels::attention::{KeyRanges, Reach};
use longdraft_kernels::rope::{Rope, RopeTable};

use crate::config::{Parts, TargetConfig};
use crate::error::{Result, refused};

/// Which keys the tokens see.
pub(super) struct Visible {
    full: Arc<KeyRanges>,
    sliding: Option<Arc<KeyRanges>>,
    /// Those of sliding layers that hold the last keys only, counted from the first of these.
    held: Option<Arc<KeyRanges>>,
}

impl Visible {
    /// `within` makes the visible keys of a reach.
    pub(super) fn new(parts: &Parts, within: impl Fn(Reach) -> KeyRanges) -> Self {
        let sliding = parts.reach().map(|reach| Arc::new(within(reach)));
        Self { full: Arc::new(within(Reach::All)), sliding, held: None }
    }

    /// Those of layers without a window.
    pub(super) fn whole(&self) -> &KeyRanges {
        &self.full
    }

    /// Those of layers without windows.
    pub(super) fn full(ranges: KeyRanges) -> Self {
        Self { full: Arc::new(ranges), sliding: None, held: None }
    }

    /// The same where sliding layers have dropped the first keys. It fails where a token sees one of these.
    pub(super) fn without_first(self, dropped: usize) -> Result<Self> {
        let Some(sliding) = self.sliding.as_ref().filter(|_| dropped > 0) else { return Ok(self) };
        let held = sliding.as_ref().clone().without_first(dropped);
        let held = held.ok_or_else(|| refused("a token sees keys that were dropped"))?;
        Ok(Self { held: Some(Arc::new(held)), ..self })
    }

    /// Those in a layer whose keys are held from the token `first_held` on.
    pub(super) fn held(&self, slides: bool, first_held: usize) -> &Arc<KeyRanges> {
        self.held.as_ref().filter(|_| first_held > 0).unwrap_or_else(|| self.of(slides))
    }

    /// Those in a layer with or without a window.
    pub(super) fn of(&self, slides: bool) -> &Arc<KeyRanges> {
        self.sliding.as_ref().filter(|_| slides).unwrap_or(&self.full)
    }
}

/// Rotary frequencies of a target's layers.
pub(super) struct Ropes {
    full: Rope,
    sliding: Option<Rope>,
    /// Of long sequences, and how many tokens a short one has at most; `full` are those of short ones.
    long: Option<(Rope, usize)>,
    /// Whether the last layer turns nothing.
    still: Option<Rope>,
}

impl Ropes {
    /// # Errors
    /// - a base or a scaling is unusable
    pub(super) fn of(config: &TargetConfig) -> Result<Self> {
        let head_dim_of = |slides: bool| {
            let of_kind = |layer: &usize| config.window_of(*layer).is_some() == slides;
            let layer = (0..config.num_hidden_layers).rev().find(of_kind);
            layer.map_or(config.head_dim, |layer| config.heads_of(layer).head_dim)
        };
        let (parts, head_dim) = (&config.parts, head_dim_of(false));
        let sliding = parts.build_sliding_rope(head_dim_of(true))?;
        let last = config.last_attention_layer().unwrap_or(0);
        let still = parts.is_still(last).then(|| Rope::still(head_dim));
        let border = parts.rotary.by_length.as_ref().map_or(0, |lengths| lengths.original_context);
        if let Some([full, long]) = parts.build_by_length(&config.rope, head_dim)? {
            return Ok(Self { full, sliding, long: Some((long, border)), still });
        }
        let full = parts.build_rope(&config.rope, head_dim)?;
        Ok(Self { full, sliding, long: None, still })
    }

    /// Tokens that a short sequence has at most, where frequencies depend on it.
    pub(super) fn border(&self) -> Option<usize> {
        self.long.as_ref().map(|(_, border)| *border)
    }

    /// Those of full layers alone; `None` where sliding ones have others.
    pub(super) fn only(&mut self) -> Option<&mut Rope> {
        if self.sliding.is_some() || self.long.is_some() { None } else { Some(&mut self.full) }
    }

    /// Those of the last layer, with or without a window, in a sequence that is long or not.
    pub(super) fn of_last_layer(&self, slides: bool, long: bool) -> &Rope {
        let own = self.sliding.as_ref().filter(|_| slides);
        let long = self.long.as_ref().filter(|_| long).map(|(rope, _)| rope);
        self.still.as_ref().or(own).or(long).unwrap_or(&self.full)
    }

    /// Angles of tokens at their positions; `long` says of each whether its sequence is long, where frequencies
    /// depend on it. It fails where the device has no memory for them.
    pub(super) fn angles(
        &self,
        parts: &Parts,
        position_ids: &[u32],
        long: &[bool],
        device: &Device,
    ) -> Result<Angles> {
        let table = |rope: &Rope| rope.table(position_ids, device);
        let growth = parts.query_growth.map(|growth| {
            let factors: Vec<f32> = position_ids.iter().map(|&t| growth.at(t)).collect();
            Tensor::from_vec(factors, (position_ids.len(), 1, 1), device)
        });
        Ok(Angles {
            full: self.full_table(position_ids, long, device)?,
            sliding: self.sliding.as_ref().map(table).transpose()?,
            query_growth: growth.transpose()?,
        })
    }

    /// Angles in full layers.
    fn full_table(
        &self,
        position_ids: &[u32],
        long: &[bool],
        device: &Device,
    ) -> Result<RopeTable> {
        match &self.long {
            None => Ok(self.full.table(position_ids, device)?),
            Some((of_long, _)) => {
                let of = |long| if long { of_long } else { &self.full };
                by_length(position_ids, long, device, of)
            }
        }
    }

    /// Angles in the last layer, with or without a window, of tokens whose sequences are long or not.
    /// It fails where the device has no memory for them.
    pub(super) fn last_table(
        &self,
        slides: bool,
        (position_ids, long): (&[u32], &[bool]),
        device: &Device,
    ) -> Result<RopeTable> {
        by_length(position_ids, long, device, |long| self.of_last_layer(slides, long))
    }
}

/// Angles run by run of tokens whose sequences are of one kind.
fn by_length<'a>(
    position_ids: &[u32],
    long: &[bool],
    device: &Device,
    of: impl Fn(bool) -> &'a Rope,
) -> Result<RopeTable> {
    if long.is_empty() {
        return Ok(of(false).table(position_ids, device)?);
    }
    let mut tables = Vec::new();
    let mut first = 0;
    for run in long.chunk_by(|a, b| a == b) {
        tables.push(of(run[0]).table(&position_ids[first..first + run.len()], device)?);
        first += run.len();
    }
    Ok(RopeTable::concatenated(&tables)?)
}

/// What turns and stretches the heads of a pass's tokens.
pub(super) struct Angles {
    full: RopeTable,
    sliding: Option<RopeTable>,
    /// Factor of each token's queries, `[T, 1, 1]`.
    pub(super) query_growth: Option<Tensor>,
}

impl Angles {
    /// The angles in a layer with or without a window.
    pub(super) fn of(&self, slides: bool) -> &RopeTable {
        self.sliding.as_ref().filter(|_| slides).unwrap_or(&self.full)
    }
}
