//! The network that block drafts share: one pass proposes all slots of a block, conditioned on the
//! states of some of the target's layers (arXiv 2602.06036).
//!
//! ```text
//! c      = RMS_hidden(fc · a)                a = the tapped layers side by side; the same in every layer
//! x⁰     = s E[u]                            u = the anchor's token, then mask tokens; s is 1 in most drafts
//! x     += W_o Attn(q(x); [k(c); k(x)], [v(c); v(x)])       one softmax, context before the anchor
//! x     += SwiGLU(RMS_post(x))
//! h      = RMS_norm(x)                       read by the target's frozen head, or by some rows of it
//! ```
//!
//! DFlash2 adds short convolutions along the slots around both sublayers, and a selector that chooses
//! among the best tokens of a slot by the token before it. DSpark adds to every slot's logits what the
//! token before it says, and proposes from slot 0 on. Shapes: `A` tapped layers, `G`
//! slots of a block, `R` slots of all blocks; the rest as everywhere.

mod chain;
mod config;
mod config_file;
mod convolution;
mod files;
pub mod gguf_file;
pub mod key_names;
mod mask;
mod model;
mod own_head;
mod rows;
mod selector;
mod speculators;
mod start;
mod weights;

pub use chain::{Chain, ChainStep};
pub use config::{
    BlockConfig, ChainKind, ChainSizes, ConvolutionSizes, LayerKind, NO_EMBEDDINGS, SelectorSizes,
    default_layers,
};
pub use files::FROZEN;
pub(super) use files::{CHAINED, EXTENDED, PLAIN};
pub use mask::{Anchor, Visible};
pub use model::BlockDraft;
pub use own_head::OwnHead;
pub use selector::Selector;
pub use weights::{file_specs, tensor_specs};

#[cfg(test)]
mod tests;
