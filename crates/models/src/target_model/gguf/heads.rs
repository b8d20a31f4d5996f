//! What makes keys and values of latent rows, head by head: `attn_k_b` `[N, r, plain]` and `attn_v_b` `[N, value, r]`. Older
//! files hold `attn_kv_b` `[N (plain + value), r]`, as folders do.

use std::collections::HashMap;

use super::source::{Part, Stored};
use crate::config::{LatentConfig, TargetConfig};
use crate::error::Problems;
use crate::target_model::names::{OF_A_LATENT_HEAD, layer, of_latent_head};
use crate::weights::gguf::header::Header;

/// GGUF names of the two.
const APART: [&str; 2] = ["attn_k_b", "attn_v_b"];

/// Gives the heads of a tensor their names, and both tensors together that of folders; whether the tensor is one of
/// the two. Where `attn_kv_b` is there too, it is taken.
pub(super) fn publish(
    header: &Header,
    config: &TargetConfig,
    name: &str,
    (names, problems): (&mut HashMap<String, Stored>, &mut Problems),
) -> bool {
    let Some(LatentConfig { rank, plain_dim, value_dim, .. }) = config.parts.latent else {
        return false;
    };
    let Some((index, which)) = one_of_two(name) else { return false };
    if header.tensors.contains_key(&format!("blk.{index}.attn_kv_b.weight")) {
        return true;
    }
    let heads = config.num_attention_heads;
    let wanted = [[heads, rank, plain_dim], [heads, value_dim, rank]][which];
    let shape = header.tensors.get(name).map(|tensor| tensor.shape.as_slice()).unwrap_or_default();
    if shape != wanted {
        problems.push(format!("tensor `{name}` has shape {shape:?}, {wanted:?} expected"));
        return true;
    }
    let prefix = layer(index);
    let stored = |part| Stored { name: name.to_owned(), part };
    let of = |head| (of_latent_head(&prefix, OF_A_LATENT_HEAD[which], head), Part::Expert(head));
    names.extend((0..heads).map(of).map(|(published, part)| (published, stored(part))));
    if which == 0 {
        names.insert(format!("{prefix}self_attn.kv_b_proj.weight"), stored(Part::JoinedHeads));
    }
    true
}

/// Layer of a tensor of the two, and which it is.
fn one_of_two(name: &str) -> Option<(usize, usize)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let module = rest.strip_suffix(".weight")?;
    let which = APART.iter().position(|apart| *apart == module)?;
    Some((layer.parse().ok()?, which))
}

/// The name of a layer's values for that of its keys.
pub(super) fn values_beside(keys: &str) -> String {
    let [of_keys, of_values] = APART;
    keys.replacen(of_keys, of_values, 1)
}
