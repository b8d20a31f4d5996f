//! Optimizers over a model's parameters.

mod adamw;
mod gradients;
mod muon;
mod run_values;

pub use adamw::{AdamW, AdamWConfig, DeadParameters, MatrixUpdate, MomentKind};
pub use gradients::Gradients;
pub use muon::{Muon, MuonConfig, MuonOutcome, MuonState, Orthogonalisation, TensorState};
