//! What a draft takes, as far as its sizes tell: what plans are made of.
//!
//! A draft that is trained here is a [`Footprint`]: tensors, features, the memory of a row. That is a sum of
//! terms, counted in values of f32; `layer` has those of attention and MLP, `accelerator` what differs there on
//! a GPU, `loss` those of the loss.

mod accelerator;
mod layer;
pub mod loss;
mod operations;
mod row;

use std::fmt::Debug;
use std::sync::Arc;

use longdraft_models::target_model::Tap;
use longdraft_models::weights::TensorSpec;

use longdraft_features::TeacherKind;

pub use layer::Layer;
pub use operations::Operations;
pub use row::{ALL_PASSES, INPUT_PASSES, Row, RowMemory, WEIGHT_PASSES};

/// Bytes of an f32.
pub const F32: u64 = 4;

/// A draft's sizes and what follows from them, known before it exists.
pub trait Footprint: Debug + Send + Sync {
    /// Every trained tensor.
    fn specs(&self) -> Vec<TensorSpec>;

    /// What it needs from the target.
    fn taps(&self) -> Vec<Tap>;

    /// Teacher of the loss.
    fn teacher(&self) -> TeacherKind;

    /// How far after a token its teachers may stand.
    fn ahead(&self) -> usize {
        0
    }

    /// Whether a rank needs the features of all its rows of a step before it learns the first.
    fn holds_step(&self) -> bool {
        false
    }

    /// Whether it keeps the target's embedding and head where ranks share the target's weights.
    fn keeps_ends(&self) -> bool {
        false
    }

    /// Values of the rows of the target's head that it keeps beside the head.
    fn kept_head_values(&self) -> usize {
        0
    }

    /// Values of a head of its own that is not trained, in f32.
    fn own_head_values(&self) -> usize {
        0
    }

    /// Values of its own keys and values that ranks with a part of a row gather for a token.
    fn gathered_key_values(&self) -> usize {
        0
    }

    /// Bytes while the rows of a step are planned.
    fn planning_bytes(&self, _row: &Row) -> u64 {
        0
    }

    /// Memory of training on a row.
    fn row_memory(&self, row: &Row) -> RowMemory;

    /// Floating-point operations of training on a token of a document of so many tokens, a row's at most.
    fn operations(&self, row: &Row, document_tokens: u64) -> Operations;

    /// Changes of the configuration that lower its memory, with what it is then.
    fn changes(&self) -> Vec<(String, Arc<dyn Footprint>)> {
        Vec::new()
    }
}

/// Values of some tensors.
pub fn tensor_values(specs: &[TensorSpec]) -> u64 {
    specs.iter().map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
}

/// Values of a draft's matrices, of which each is multiplied once a token.
pub(crate) fn matrix_values(specs: &[TensorSpec]) -> f64 {
    let matrices = specs.iter().filter(|spec| spec.shape.len() == 2);
    matrices.map(|spec| spec.shape.iter().map(|size| *size as f64).product::<f64>()).sum()
}

#[cfg(test)]
pub(crate) mod tests {
    use longdraft_kernels::linear_cross_entropy::logits_at_once;

    use super::Row;

    /// A row that a CPU works on.
    pub(crate) fn on_cpu(tokens: u64, parts: u64) -> Row {
        let (threads, half_products) = (1, false);
        Row {
            tokens,
            learned: tokens,
            parts,
            teacher_logits: true,
            threads,
            half_products,
            stored_head: false,
            chunk_logits: logits_at_once(None),
        }
    }

    /// A row that a GPU works on, with products of 16 bits.
    pub(crate) fn on_gpu(tokens: u64) -> Row {
        Row { threads: 0, half_products: true, ..on_cpu(tokens, 1) }
    }
}
