//! EAGLE-3 draft (Li et al., arXiv 2503.01840), with the norms of EAGLE-3.1 by choice.
//!
//! ```text
//! g⁽⁻¹⁾  = fc(aux)                                   aux = three layers of the target, side by side
//! u      = [RMS_in(E[x]) | RMS_hid(g)]               2H wide
//! r      = g + W_o · Attn(W_q u, W_k u, W_v u)       context, and the row's own later steps
//! h      = r + MLP(RMS_post(r))
//! logits = W_lm · RMS_norm(h)                        over the draft's own vocabulary
//! g      = h, or RMS_norm(h) with `norm_output`      what the next step reads
//! ```
//!
//! With `norm_before_residual`, `r` starts from `RMS_hid(g)`.
//!
//! Shapes: `Ht` width of the target, `Vd` draft vocabulary; the rest as everywhere.

mod config;
mod config_file;
pub mod gguf_file;
mod model;
mod open;
mod published;
mod unroll;
mod vocabulary;
mod weights;

pub use config::{Eagle3Config, TAPPED_LAYERS};
pub use config_file::{LayerIdSource, layer_id_source};
pub use model::{Eagle3Draft, KeyValues};
pub use open::is_at;
pub use unroll::TestTimeSteps;
pub use vocabulary::{Coverage, Ties, TokenCounts, VocabularyMap};
pub use weights::{save_tensors, tensor_specs};

#[cfg(test)]
mod tests;
