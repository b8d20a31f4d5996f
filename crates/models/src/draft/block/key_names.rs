//! Names of the keys of block drafts that other models do not have, in folders and in GGUF files.

/// The object that holds most of them.
pub const OWN: &str = "dflash_config";
/// What says in it which heads a chain's draft has, in the words of engines.
pub(super) const PROJECTOR: (&str, &str) = ("projector_type", "dspark");

/// Slots of a block.
pub const BLOCK_SIZE: &str = "block_size";
/// The token in slots of which nothing is known.
pub const MASK_TOKEN: &str = "mask_token_id";
/// Tokens that the draft proposes, through a head of its own where that is not all.
pub const DRAFT_VOCABULARY: &str = "draft_vocab_size";
/// Layers that the draft reads, as outputs counted from 0.
pub const TARGET_LAYERS: &str = "target_layer_ids";
/// The same in folders of the speculators library, as states that enter a layer.
pub const ENTERED_LAYERS: &str = "aux_hidden_state_layer_ids";
/// Layers that the target has.
pub const COUNTED_LAYERS: &str = "num_target_layers";

/// Whether slot 0 proposes.
pub const FROM_ANCHOR: &str = "sample_from_anchor";
/// The older opposite of it.
pub const BONUS_ANCHOR: &str = "dspark_bonus_anchor";
/// Whether slots see those before them alone, in two spellings.
pub const CAUSAL: [&str; 2] = ["is_causal", "causal"];
/// Whether slots of sliding layers see those after them, in folders of the speculators library.
pub const NON_CAUSAL: &str = "sliding_window_non_causal";

/// What becomes of the head's products: a factor, then a soft-cap.
pub const BEND: [&str; 2] = ["output_multiplier", "final_logit_softcapping"];
/// What the target's embeddings are multiplied by.
pub const EMBEDDING_SCALE: &str = "input_embedding_scale";

/// Sizes of convolutions: taps, and channels that share a kernel.
pub const CONVOLUTION: [&str; 2] = ["conv_kernel_size", "conv_group_size"];
/// Sizes of a selector: values of a token, and candidates of a slot.
pub const SELECTOR: [&str; 2] = ["selector_rank", "selector_top_k"];
/// A chain: values of a token, the kind of head, whether there is a confidence, and whether it reads tokens.
pub const CHAIN: [&str; 4] =
    ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"];
