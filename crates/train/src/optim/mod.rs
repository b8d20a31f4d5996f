//! Optimizers over a draft's parameters.

mod adamw;
mod gradients;

pub use adamw::{AdamW, AdamWConfig, AdamWState, DeadParameters};
pub use gradients::Gradients;
