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
mod recognise;
mod unroll;
mod weights;

pub use config::{Eagle3Config, TAPPED_LAYERS};
pub use config_file::LAYER_IDS;
pub use model::Eagle3Draft;
pub use unroll::TestTimeSteps;
pub use weights::tensor_specs;

use super::DraftKind;
use crate::error::ModelError;

/// This kind of drafts.
pub(super) const KIND: DraftKind = DraftKind {
    name: "eagle3",
    title: "EAGLE-3",
    is_at: open::is_at,
    open: |path, target| Ok(Box::new(Eagle3Draft::open(path, target)?)),
    restore: |config, source, target| {
        let config = read_saved(config, Some(target.config().num_hidden_layers))?;
        config.problems_with(target.config()).into_result(source.path())?;
        let ends = target.hold_ends()?;
        Ok(Box::new(Eagle3Draft::from_source(source, &config, ends.embedding_matrix())?))
    },
    save: |folder, config, tensors, fingerprint| {
        weights::save_tensors(folder, &read_saved(config, None)?, tensors, fingerprint)
    },
    open_gguf: Some(|file| Ok(Box::new(gguf_file::GgufDraftSource::open(file)?))),
    reading: open::reading,
};

/// The configuration as a checkpoint holds it.
fn read_saved(
    config: &serde_json::Value,
    target_layers: Option<usize>,
) -> crate::error::Result<Eagle3Config> {
    Eagle3Config::from_json(config, target_layers)
        .map_err(ModelError::all_in("draft configuration"))
}

#[cfg(test)]
mod tests;
