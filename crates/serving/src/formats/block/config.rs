//! `config.json` of a block draft for every profile that is a folder.

use candle_core::DType;
use longdraft_models::draft::block::{BlockConfig, LayerKind, OWN};
use serde_json::{Value, json};

use super::Block;
use crate::Profile;
use crate::formats::files::{set_special_tokens, torch_dtype};
use crate::formats::speculators::folder;
use crate::target::TargetFacts;

/// Keys of a plain folder that stand beside `transformer_layer_config`, or have another name there.
const OUTER: [&str; 12] = [
    "architectures",
    "num_target_layers",
    "block_size",
    OWN,
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
    "rope_divisors",
];

/// Keys of a plain folder that keep their names at the top.
const KEPT: [&str; 9] = [
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "mask_token_id",
];

/// The keys of our own `config.json`, with those that engines take from the target.
pub(super) fn render(
    profile: Profile,
    (block, config): (&Block, &BlockConfig),
    target: &TargetFacts,
    dtype: DType,
) -> Value {
    let mut plain = config.to_json(block.architectures[0]);
    if profile == Profile::Speculators {
        return speculators((block, config), plain, target, dtype);
    }
    plain["torch_dtype"] = torch_dtype(dtype).into();
    set_special_tokens(&mut plain, target.config());
    plain
}

fn speculators(
    (block, config): (&Block, &BlockConfig),
    plain: Value,
    target: &TargetFacts,
    dtype: DType,
) -> Value {
    let mut value = folder(block.method, block.speculators, target, config.proposals());
    let own = plain[OWN].clone();
    let mut layer = plain;
    if let Some(keys) = layer.as_object_mut() {
        OUTER.iter().for_each(|key| drop(keys.remove(*key)));
    }
    set_special_tokens(&mut layer, target.config());
    let entered: Vec<usize> = config.target_layers.iter().map(|layer| layer.entered().0).collect();
    let is_causal =
        config.layers.contains(&LayerKind::Sliding) && config.is_causal_in(LayerKind::Sliding);
    value["transformer_layer_config"] = layer;
    value["draft_vocab_size"] = config.vocab_size.into();
    value["block_size"] = config.block_size.into();
    value["aux_hidden_state_layer_ids"] = json!(entered);
    value["sample_from_anchor"] = config.chain.is_some().into();
    // It is said of sliding layers, but vLLM applies it to all: full ones are never causal here.
    value["sliding_window_non_causal"] = (!is_causal).into();
    for key in KEPT {
        if let Some(kept) = own.get(key) {
            value[key] = kept.clone();
        }
    }
    // The library refuses a confidence that reads tokens where they have no embedding.
    if config.chain.is_some_and(|chain| chain.rank == 0) {
        value["confidence_head_with_markov"] = false.into();
    }
    value["tie_word_embeddings"] = false.into();
    value["torch_dtype"] = torch_dtype(dtype).into();
    value
}
