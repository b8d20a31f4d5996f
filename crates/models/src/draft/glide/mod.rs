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

pub use config::{Compat, FinalNorm, GlideConfig};
pub use model::{CrossContext, GlideDraft, Trace};
pub use weights::tensor_specs;

use super::DraftKind;

/// This kind of drafts. Published files carry no mark of their own, so that every path is taken:
/// whatever is missing or left over is told then.
pub(super) const KIND: DraftKind = DraftKind {
    name: "glide",
    title: "GLIDE",
    is_at: |_| true,
    open: |path, target| Ok(Box::new(GlideDraft::open(path, target)?)),
    restore: |config, source, target| {
        let config = weights::read_saved(config)?;
        config.problems_with(target.config()).into_result(source.path())?;
        Ok(Box::new(GlideDraft::from_source(source, &config, target)?))
    },
    save: |folder, config, tensors, fingerprint| {
        weights::save_tensors(folder, &weights::read_saved(config)?, tensors, fingerprint)
    },
    open_gguf: None,
    reading: |_, _| Vec::new(),
};
