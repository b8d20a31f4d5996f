//! What a GLIDE layer computes on the fixed input.

use std::sync::Arc;

use candle_core::Device;
use longdraft_kernels::attention::{Delays, KeyRanges};
use longdraft_models::draft::glide::{CrossContext, GlideDraft};
use longdraft_models::target_model::{KeyValues, Target};

use crate::error::Result;
use crate::parity::{ParityVector, TOKENS, normal, records};

/// The vector of a GLIDE layer: its outputs on a fixed text, keys and values.
pub(super) fn outputs(draft: &GlideDraft, target: &Target) -> Result<ParityVector> {
    let config = draft.config();
    let positions: Vec<u32> = (0..TOKENS as u32).collect();
    let table = target.rope().table(&positions, &Device::Cpu)?;
    let embeddings = normal("parity embeddings", &[TOKENS, config.hidden_size])?;
    let shape = [TOKENS, config.num_key_value_heads, config.head_dim];
    let last_kv =
        KeyValues { k: normal("parity keys", &shape)?, v: normal("parity values", &shape)? };
    let documents = vec![0; TOKENS];
    let window = Some(config.self_window);
    let own = Arc::new(KeyRanges::packed(&documents, window, Delays::Same(0)));
    let ranges = Arc::new(KeyRanges::packed(&documents, None, Delays::Same(1)));
    let cross = CrossContext { last_kv: &last_kv, ranges };
    let output = draft.forward(&embeddings, &table, &own, &cross, &mut Vec::new())?;
    Ok(ParityVector::of(records(0, &output)?))
}
