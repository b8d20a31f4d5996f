//! Trainable draft models.
//!
//! A method is one folder with the same files: `config` (sizes and modes), `model` (forward pass),
//! `weights` (names, initial values, reading and writing).

mod any;
mod blocks;
pub mod eagle3;
pub mod files;
pub mod glide;

use candle_core::{Tensor, Var};
use serde_json::Value;

use crate::error::Result;
use crate::target::Tap;

pub use any::AnyDraft;
pub use files::TOKEN_COUNTS_FILE;

/// A trained tensor and what the optimizer has to know about it.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Published name without prefix.
    pub name: String,
    /// The value.
    pub var: Var,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Kept and saved for a published layout, but never in the graph.
    pub dead: bool,
}

/// A draft model.
pub trait Draft {
    /// What it needs from the target.
    fn taps(&self) -> Vec<Tap>;

    /// Every tensor, in a fixed order.
    fn parameters(&self) -> &[Parameter];

    /// The same, for who puts others in their place: names, order and shapes stay.
    fn parameters_mut(&mut self) -> &mut [Parameter];

    /// Tensors that belong to the draft and are saved with it, but never change.
    ///
    /// # Errors
    /// - a tensor cannot be made
    fn fixed_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(Vec::new())
    }

    /// What the draft's `config.json` says.
    fn config_json(&self) -> Value;
}
