//! What the layers of a pass need of its tokens, for full and for sliding ones.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::rope::{Rope, RopeTable};

use crate::config::{Parts, TargetConfig};
use crate::error::Result;

/// Which keys the tokens see.
pub(super) struct Visible {
    full: Arc<KeyRanges>,
    sliding: Option<Arc<KeyRanges>>,
}

impl Visible {
    /// `within` makes the visible keys of a reach in tokens, the token itself among them.
    pub(super) fn new(parts: &Parts, within: impl Fn(Option<usize>) -> KeyRanges) -> Self {
        let sliding = parts.window.map(|window| Arc::new(within(Some(window))));
        Self { full: Arc::new(within(None)), sliding }
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
}

impl Ropes {
    /// # Errors
    /// - a base or a scaling is unusable
    pub(super) fn of(config: &TargetConfig) -> Result<Self> {
        let turned_in = |slides: bool| {
            let of_kind = |layer: &usize| config.window_of(*layer).is_some() == slides;
            let layer = (0..config.num_hidden_layers).rev().find(of_kind);
            let head_dim = layer.map_or(config.head_dim, |layer| config.heads_of(layer).head_dim);
            config.parts.rotary_dim.unwrap_or(head_dim)
        };
        let sliding = config.parts.build_sliding_rope(turned_in(true))?;
        Ok(Self { full: config.rope.build(turned_in(false))?, sliding })
    }

    /// Those of full layers alone; `None` where sliding ones have others.
    pub(super) fn only(&mut self) -> Option<&mut Rope> {
        if self.sliding.is_some() { None } else { Some(&mut self.full) }
    }

    /// Those of a layer with or without a window.
    pub(super) fn of_layer(&self, slides: bool) -> &Rope {
        self.sliding.as_ref().filter(|_| slides).unwrap_or(&self.full)
    }

    /// Angles of tokens at their positions.
    ///
    /// # Errors
    /// - the device has no memory for them
    pub(super) fn angles(
        &self,
        parts: &Parts,
        position_ids: &[u32],
        device: &Device,
    ) -> Result<Angles> {
        let table = |rope: &Rope| rope.table(position_ids, device);
        let growth = parts.query_growth.map(|growth| {
            let factors: Vec<f32> = position_ids.iter().map(|&t| growth.at(t)).collect();
            Tensor::from_vec(factors, (position_ids.len(), 1, 1), device)
        });
        Ok(Angles {
            full: table(&self.full)?,
            sliding: self.sliding.as_ref().map(table).transpose()?,
            query_growth: growth.transpose()?,
        })
    }
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
