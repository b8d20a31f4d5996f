//! The small decoder that `lm train` trains: norms without weights, a norm and a gain on queries
//! and keys, ReLU² MLPs, skip connections from the first to the second half, mixes with the
//! embedding, soft-capped logits.
//!
//! ```text
//! x = x0 = rms(embedding[ids])
//! block: x = m0 x + m1 x0;  x += attn_scale Attn(rms(x));  x += mlp_scale MLP(rms(x))
//! half of the blocks push x; the others pop: x += skip_j pop()
//! logits = c tanh(rms(x) Wᵀ / c)
//! ```
//!
//! Or a plain Llama, which everything that opens targets reads.

mod block;
mod config;
mod files;
mod llama;
mod model;
mod renamed;
mod weights;

pub use config::{Activation, DecoderArchitecture, LanguageModelConfig, RopeConfig, RopeRule};
pub use files::{config_of, describe, locate, open, save};
pub use llama::target_config;
pub use model::{LanguageModel, Layout};
pub use weights::{Group, group_of, tensor_specs};

#[cfg(test)]
mod tests;
