//! Trainable draft models.
//!
//! A method is one folder with the same files: `config` (sizes and modes), `model` (forward pass),
//! `weights` (names, initial values, reading and writing), and one line in `kinds`.

pub mod block;
pub mod eagle3;
pub mod files;
pub mod gguf;
pub mod glide;
mod init;
pub mod kinds;
mod quantised;
mod seen;
mod speculators;
pub mod vocabulary;
mod weights;

use std::any::Any;

use candle_core::{Tensor, Var};
use serde_json::Value;

use crate::error::Result;
use crate::target_model::Tap;
use crate::weights::TensorRole;

pub use files::TOKEN_COUNTS_FILE;
pub use init::Init;
pub use kinds::{DraftKind, open_draft};
pub use quantised::HeldAs;
pub use seen::Seen;
pub use vocabulary::{Coverage, Ties, TokenCounts, VocabularyMap};
pub use weights::DraftWeights;

/// A trained tensor and what the optimizer has to know about it.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Published name without prefix.
    pub name: String,
    /// The value.
    pub var: Var,
    /// What it is to the draft.
    pub role: TensorRole,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Kept and saved for a published layout, but never in the graph.
    pub dead: bool,
}

/// A draft model; threads may share one.
pub trait Draft: Any + Send + Sync {
    /// Name of its method.
    fn method(&self) -> &'static str;

    /// What it needs from the target.
    fn taps(&self) -> Vec<Tap>;

    /// What the rows of its own head stand for; `None` if it proposes through the target's head.
    fn vocabulary(&self) -> Option<&VocabularyMap>;

    /// Of a draft that proposes through the target's head and learned to propose only the most frequent tokens of
    /// its text ([`TOKEN_COUNTS_FILE`]): how many.
    fn most_frequent(&self) -> Option<usize> {
        None
    }

    /// Its trained tensors by name.
    fn weights(&self) -> &DraftWeights;

    /// Mutable access to them.
    fn weights_mut(&mut self) -> &mut DraftWeights;

    /// Every tensor, in a fixed order; of a draft that is [held in fewer bits](Self::hold_as) those that are left in f32.
    fn parameters(&self) -> &[Parameter] {
        self.weights().parameters()
    }

    /// Mutable access, for replacing values: names, order and shapes stay.
    fn parameters_mut(&mut self) -> &mut [Parameter] {
        self.weights_mut().parameters_mut()
    }

    /// Values of all parameters, however they are held.
    fn parameter_count(&self) -> usize {
        self.weights().parameter_count()
    }

    /// Bytes of the draft's own tensors as they are held; what it shares with its target is not counted.
    fn held_bytes(&self) -> usize {
        self.weights().held_bytes()
    }

    /// From now on holds its matrices in fewer bits alone, where they and their device allow it: for proposing. It can then
    /// be neither trained nor saved.
    ///
    /// # Errors
    /// - there is no memory for them
    fn hold_as(&mut self, how: HeldAs) -> Result<()> {
        self.weights_mut().hold_as(how)
    }

    /// Tensors that belong to the draft and are saved with it, but never change.
    ///
    /// # Errors
    /// - a tensor cannot be made
    fn fixed_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(Vec::new())
    }

    /// Those of them without which the trained ones mean nothing: a run that goes on must have the same.
    ///
    /// # Errors
    /// - a tensor cannot be made
    fn binding_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        self.fixed_tensors()
    }

    /// What the draft's `config.json` says.
    fn config_json(&self) -> Value;
}

impl dyn Draft {
    /// This draft as one of a method, if it is.
    pub fn of_kind<D: Draft>(&self) -> Option<&D> {
        let any: &dyn Any = self;
        any.downcast_ref()
    }
}
