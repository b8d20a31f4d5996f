//! Optimizers over a model's parameters.

mod adamw;
mod gradients;
mod muon;

pub use adamw::{AdamW, AdamWConfig, AdamWState, DeadParameters, MatrixUpdate};
pub use gradients::Gradients;
pub use muon::{Muon, MuonConfig, MuonOutcome, MuonState, Orthogonalisation, TensorState};
