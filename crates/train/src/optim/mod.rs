//! Optimizers over a model's parameters.

mod adamw;
mod matrices;
#[cfg(test)]
mod ranks_tests;
mod run_values;

pub use adamw::{AdamW, AdamWConfig, DeadParameters, MatrixUpdate, MomentKind};
pub use matrices::{direction, update_cost};
