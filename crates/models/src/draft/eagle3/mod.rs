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
//! Shapes: `Ht` width of the target, `Vd` draft vocabulary; the rest as everywhere.

mod config;
mod config_file;
mod model;
mod unroll;
mod vocabulary;
mod weights;

pub use config::{Eagle3Config, TAPPED_LAYERS};
pub use model::{Eagle3Draft, KeyValues};
pub use unroll::TestTimeSteps;
pub use vocabulary::{Coverage, Ties, TokenCounts, VocabularyMap};
pub use weights::{is_at, save_tensors};

#[cfg(test)]
mod tests;
