//! `config.json` of a block draft for every profile that is a folder.

use candle_core::DType;
use longdraft_models::draft::block::key_names::{
    BLOCK_SIZE, CHAIN, CONVOLUTION, COUNTED_LAYERS, DRAFT_VOCABULARY, EMBEDDING_SCALE,
    ENTERED_LAYERS, FROM_ANCHOR, MASK_TOKEN, NON_CAUSAL, OWN, SELECTOR, TARGET_LAYERS,
};
use longdraft_models::draft::block::{BlockConfig, LayerKind};
use serde_json::{Value, json};

use super::Block;
use crate::Profile;
use crate::formats::files::{set_attn_factor, set_special_tokens, torch_dtype};
use crate::formats::speculators::folder;
use crate::target::TargetFacts;

/// Keys of a plain folder that stand beside `transformer_layer_config`, or have another name there; so do those
/// of a chain.
const OUTER: [&str; 9] = [
    "architectures",
    COUNTED_LAYERS,
    BLOCK_SIZE,
    OWN,
    MASK_TOKEN,
    TARGET_LAYERS,
    FROM_ANCHOR,
    DRAFT_VOCABULARY,
    "rope_divisors",
];

/// The keys of our own `config.json`, with those that engines take from the target.
pub(super) fn render(
    profile: Profile,
    (block, config): (&Block, &BlockConfig),
    target: &TargetFacts,
    dtype: DType,
) -> Value {
    let mut plain = config.to_json(block.architectures[0]);
    set_attn_factor(&mut plain);
    if profile == Profile::Speculators {
        return speculators((block, config), plain, target, dtype);
    }
    plain["torch_dtype"] = torch_dtype(dtype).into();
    if target.config().parts.embedding_scale.is_some() {
        // Without it readers may take the target's own factor.
        plain[OWN][EMBEDDING_SCALE] = config.embedding_scale.unwrap_or(1.0).into();
    }
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
        OUTER.iter().chain(&CHAIN).for_each(|key| drop(keys.remove(*key)));
    }
    set_special_tokens(&mut layer, target.config());
    let entered: Vec<usize> = config.target_layers.iter().map(|layer| layer.entered().0).collect();
    let is_causal =
        config.layers.contains(&LayerKind::Sliding) && config.is_causal_in(LayerKind::Sliding);
    value["transformer_layer_config"] = layer;
    value[DRAFT_VOCABULARY] = config.draft_vocab_size.into();
    value[BLOCK_SIZE] = config.block_size.into();
    value[ENTERED_LAYERS] = json!(entered);
    value[FROM_ANCHOR] = config.chain.is_some().into();
    // It is said of sliding layers, but vLLM applies it to all: full ones are never causal here.
    value[NON_CAUSAL] = (!is_causal).into();
    for key in CHAIN.iter().chain(&CONVOLUTION).chain(&SELECTOR).chain([&MASK_TOKEN]) {
        if let Some(kept) = own.get(key) {
            value[*key] = kept.clone();
        }
    }
    // The library refuses a confidence that reads tokens where they have no embedding.
    if config.chain.is_some_and(|chain| chain.rank == 0) {
        value[CHAIN[3]] = false.into();
    }
    value["tie_word_embeddings"] = false.into();
    value["torch_dtype"] = torch_dtype(dtype).into();
    value
}
