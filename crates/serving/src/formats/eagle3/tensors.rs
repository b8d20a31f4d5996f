//! An EAGLE-3 draft's tensors under a profile's names, in the dtype asked for.

use candle_core::{DType, Tensor};
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::error::Problems;

use crate::Profile;
use crate::error::Result;
use crate::formats::files::narrowed;
use crate::formats::{Named, fitting};
use crate::target::TargetFacts;

/// The network that engines see: a draft that projects the target's embeddings has embeddings of its
/// own there.
pub(super) fn published_config(config: &Eagle3Config) -> Eagle3Config {
    Eagle3Config { embed_proj: false, ..config.clone() }
}

/// Every tensor of an EAGLE-3 draft under our own names (`midlayer.*`), weights in `dtype`.
/// It fails with every tensor of which a value does not fit the dtype or is not finite.
pub(super) fn tensors(
    profile: Profile,
    draft: &Eagle3Draft,
    target: &TargetFacts,
    dtype: DType,
    with_embedding: bool,
) -> Result<Named> {
    let mut problems = Problems::default();
    let mut all = Vec::new();
    let mut embedding = None;
    for (name, tensor) in draft.stored_tensors()? {
        match name.as_str() {
            "embed_proj.weight" => {
                embedding = Some(target.target.hold_ends()?.embedding()?.matmul(&tensor.t()?)?);
            }
            "embed_tokens.weight" => embedding = Some(tensor),
            "d2t" | "t2d" => all.push((name, tensor)),
            _ => all.push((name.clone(), narrowed(&name, &tensor, dtype, &mut problems)?)),
        }
    }
    // A head that is the target's becomes one of the draft's own.
    if all.iter().all(|(name, _)| name != "lm_head.weight") {
        let head = draft.head_matrix()?.to_dense()?;
        let head = narrowed("lm_head.weight", &head, dtype, &mut problems)?;
        all.push(("lm_head.weight".into(), head));
    }
    match embedding {
        Some(own) => {
            let own = narrowed("embed_tokens.weight", &own, dtype, &mut problems)?;
            all.push(("embed_tokens.weight".into(), own));
        }
        // SGLang puts the target's in its place anyway.
        None if with_embedding && profile != Profile::Sglang => {
            let stored = target.stored_embedding.as_ref();
            let shared = match stored {
                Some(stored) => stored.clone(),
                None => target.target.hold_ends()?.embedding()?.to_dtype(dtype)?,
            };
            all.push(("embed_tokens.weight".into(), shared));
        }
        None => {}
    }
    fitting(profile, all, problems)
}

/// Our names under a profile's: the decoder layer's prefix.
pub(super) fn renamed(profile: Profile, tensors: &[(String, Tensor)]) -> Named {
    let rename = |(name, tensor): &(String, Tensor)| {
        let name = match name.strip_prefix("midlayer.") {
            Some(rest) => format!("{}{rest}", profile.layer_prefix()),
            None => name.clone(),
        };
        (name, tensor.clone())
    };
    tensors.iter().map(rename).collect()
}
