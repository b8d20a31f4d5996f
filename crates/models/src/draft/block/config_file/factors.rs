//! Numbers that embeddings and logits are multiplied by or bounded with.

use longdraft_kernels::bend::Bend;

use super::super::key_names::{BEND, EMBEDDING_SCALE};
use crate::config::json_keys::Keys;
use crate::config::limits;

/// What becomes of the head's products.
pub(super) fn bend(keys: &mut Keys<'_>) -> Bend {
    let [multiplier, softcap] = BEND.map(|key| {
        let number = keys.present(key)?.as_f64().unwrap_or(f64::NAN);
        limits::scale(&mut keys.problems, key, number)
    });
    Bend { divisor: multiplier.map_or(1.0, f64::recip), softcap }
}

/// What embeddings are multiplied by; nothing where that is 1.
pub(super) fn embedding_scale(keys: &mut Keys<'_>) -> Option<f64> {
    let said = keys.present(EMBEDDING_SCALE)?.as_f64();
    if said == Some(1.0) {
        return None;
    }
    limits::scale(&mut keys.problems, EMBEDDING_SCALE, said.unwrap_or(f64::NAN))
}
