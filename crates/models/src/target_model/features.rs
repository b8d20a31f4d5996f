//! What a draft may ask of the target.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::Tensor;

use crate::error::{ModelError, Result, refused};
use crate::ids::LayerId;

/// One thing that the target's forward pass can hand out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tap {
    /// Keys (after rotary embedding) and values of the last decoder layer that attends.
    LastKv,
    /// The residual stream after a layer.
    Hidden(LayerId),
    /// The hidden states after the final norm, which the head reads.
    FinalHidden,
}

/// A set of taps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Taps {
    pub(super) last_kv: bool,
    pub(super) hidden: Vec<LayerId>,
    pub(super) final_hidden: bool,
}

impl Taps {
    /// The set of these taps.
    pub fn of(taps: &[Tap]) -> Self {
        let mut set = Self::default();
        for tap in taps {
            match tap {
                Tap::LastKv => set.last_kv = true,
                Tap::Hidden(layer) if !set.hidden.contains(layer) => set.hidden.push(*layer),
                Tap::Hidden(_) => {}
                Tap::FinalHidden => set.final_hidden = true,
            }
        }
        set
    }

    /// Whether layer `index` has to put out its hidden states; `last_kv` is the last one with keys.
    pub(super) fn needs_output_of(&self, index: usize, last_kv: Option<usize>) -> bool {
        let for_last_kv = self.last_kv && last_kv.is_some_and(|last| index < last);
        self.final_hidden || for_last_kv || self.hidden.iter().any(|layer| layer.0 >= index)
    }

    /// How many of `layers` a pass over packed documents reads: those that have to put out hidden
    /// states, and the one after them.
    pub(super) fn layers_read(&self, layers: usize, last_kv: Option<usize>) -> usize {
        let outputs = (0..layers).take_while(|index| self.needs_output_of(*index, last_kv));
        layers.min(outputs.count() + 1)
    }

    pub(super) fn check(&self, layers: usize, last_kv: Option<usize>) -> Result<()> {
        if self.last_kv && last_kv.is_none() {
            return Err(refused("keys and values of a target of which no layer attends"));
        }
        match self.hidden.iter().find(|layer| layer.0 >= layers) {
            Some(layer) => Err(refused(format!(
                "tap of layer {} of a target with {layers} layers (counted from 0)",
                layer.0
            ))),
            None => Ok(()),
        }
    }
}

/// Keys and values of some rows, `[T, K, D]` each, keys after rotary embedding.
#[derive(Debug, Clone)]
pub struct KeyValues {
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

/// What a forward pass handed out; only what was tapped is there.
#[derive(Debug, Clone, Default)]
pub struct Features {
    /// For [`Tap::LastKv`].
    pub last_kv: Option<KeyValues>,
    /// For [`Tap::LastKv`]: the same keys before rotary embedding, `[T, K, D]`.
    pub last_keys_unrotated: Option<Tensor>,
    /// For [`Tap::Hidden`], `[T, H]` each.
    pub hidden: BTreeMap<LayerId, Tensor>,
    /// For [`Tap::FinalHidden`], `[T, H]`.
    pub final_hidden: Option<Tensor>,
}

impl Features {
    /// The tapped keys and values.
    ///
    /// # Errors
    /// - they were not tapped
    pub fn last_kv(&self) -> Result<&KeyValues> {
        self.last_kv.as_ref().ok_or_else(|| untapped("last-layer keys and values"))
    }

    /// The tapped keys before rotary embedding.
    ///
    /// # Errors
    /// - they were not tapped
    pub fn last_keys_unrotated(&self) -> Result<&Tensor> {
        self.last_keys_unrotated.as_ref().ok_or_else(|| untapped("last-layer keys"))
    }

    /// The tapped outputs of layers side by side, `[T, L·H]`.
    ///
    /// # Errors
    /// - one of them was not tapped
    pub fn hidden_of(&self, layers: &[LayerId]) -> Result<Tensor> {
        let of = |layer: &LayerId| {
            self.hidden.get(layer).ok_or_else(|| untapped(&format!("outputs of layer {}", layer.0)))
        };
        Ok(Tensor::cat(&layers.iter().map(of).collect::<Result<Vec<_>>>()?, 1)?)
    }

    /// Some rows of everything that was tapped.
    ///
    /// # Errors
    /// - there are fewer rows
    pub fn rows(&self, rows: Range<usize>) -> Result<Self> {
        self.each(|tensor| tensor.narrow(0, rows.start, rows.len()))
    }

    /// What `of` makes of everything that was tapped.
    pub(super) fn each(&self, of: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<Self> {
        let kv = |kv: &KeyValues| -> Result<KeyValues> {
            Ok(KeyValues { k: of(&kv.k)?, v: of(&kv.v)? })
        };
        let hidden = self.hidden.iter().map(|(layer, states)| Ok((*layer, of(states)?)));
        Ok(Self {
            last_kv: self.last_kv.as_ref().map(kv).transpose()?,
            last_keys_unrotated: self.last_keys_unrotated.as_ref().map(&of).transpose()?,
            hidden: hidden.collect::<Result<_>>()?,
            final_hidden: self.final_hidden.as_ref().map(of).transpose()?,
        })
    }

    /// The tapped final hidden states, `[T, H]`.
    ///
    /// # Errors
    /// - they were not tapped
    pub fn final_hidden(&self) -> Result<&Tensor> {
        self.final_hidden.as_ref().ok_or_else(|| untapped("final hidden states"))
    }
}

fn untapped(what: &str) -> ModelError {
    refused(format!("{what} were not tapped"))
}

/// Documents laid end to end in one row of `T` tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PackedSequence {
    /// Token ids, `[T]`.
    pub ids: Vec<u32>,
    /// Rotary positions, `[T]`.
    pub position_ids: Vec<u32>,
    /// A run of equal ids is a document; negative is padding, `[T]`.
    pub document_ids: Vec<i32>,
}

impl PackedSequence {
    /// One document at positions 0, 1, 2, ...
    pub fn single(ids: &[u32]) -> Self {
        Self {
            ids: ids.to_vec(),
            position_ids: (0..ids.len() as u32).collect(),
            document_ids: vec![0; ids.len()],
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let lengths = [self.ids.len(), self.position_ids.len(), self.document_ids.len()];
        if lengths[0] == 0 || lengths.iter().any(|length| *length != lengths[0]) {
            return Err(refused(format!(
                "a packed sequence of {} ids, {} positions and {} document ids",
                lengths[0], lengths[1], lengths[2]
            )));
        }
        Ok(())
    }
}
