//! GLIDE draft layer (Du et al., ICML 2024) with the LongSpec recipe (arXiv 2502.17421).
//!
//! ```text
//! e      = E[x]                                        frozen embeddings
//! h1     = e  + SelfAttn (RMS_in(e))                   causal, window of W + 1 keys
//! h2     = h1 + CrossAttn(RMS_post_self(h1); K_L, V_L) the target's last-layer keys and values
//! h3     = h2 + MLP      (RMS_post_cross(h2))
//! logits = W_head · h3                                 frozen; final norm before it by choice
//! ```

mod config;
mod model;
mod weights;

pub use crate::draft::files::{DRAFT_FILE, PTH_FILE};
pub use config::{Compat, FinalNorm, GlideConfig, Init};
pub use model::{CrossContext, GlideDraft, SelfKv, Trace};
pub use weights::{save_tensors, tensor_specs, trained_for};
