//! Block drafts as GGUF files, as llama.cpp reads them: one architecture for all kinds.
//!
//! Layers count as states that enter one ([`crate::ids::EnteredLayerId`]). Rows of q and k are in the order of the
//! published files. Which heads there are, the tensors say; whether slot 0 proposes is a key that is true
//! where it is absent, and read only where there is a chain.

use longdraft_kernels::bend::Bend;

use super::chain;
use super::config::{
    BlockConfig, ChainKind, ChainSizes, ConvolutionSizes, LayerKind, SelectorSizes, no_embeddings,
};
use super::files::{CHAINED, EXTENDED, FROZEN, PLAIN};
use super::key_names::{BEND, BLOCK_SIZE, CONVOLUTION, FROM_ANCHOR, SELECTOR};
use super::selector::{HIDDEN_PROJECTION, PREDECESSORS, SUCCESSORS};
use crate::config::gguf::Keys;
use crate::config::{RopeParameters, TargetConfig, limits};
use crate::draft::DraftKind;
use crate::draft::gguf::{DraftGguf, Naming};
use crate::draft::vocabulary::MAP;
use crate::error::Problems;
use crate::target_model::gguf::PLAIN_MODULES;

/// `general.architecture` of such files.
pub const ARCHITECTURE: &str = PLAIN.name;

/// The mask token among the keys of the target's tokenizer.
pub const MASK_TOKEN: &str = "tokenizer.ggml.mask_token_id";

/// First tensor of a chain.
const CHAIN: &str = "markov_w1.weight";
/// The head that tells the chance of acceptance.
const CONFIDENCE: &str = "conf_proj.weight";

/// Modules or tensors outside of layers: name in files, published name.
const NAMES: [(&str, &str); 12] = [
    ("fc", "fc"),
    ("enc.output_norm", "hidden_norm"),
    ("output_norm", "norm"),
    ("markov_w1", chain::EMBEDDING_MODULE),
    ("markov_w2", chain::OUTPUT),
    ("conf_proj", chain::CONFIDENCE),
    ("selector_hidden", HIDDEN_PROJECTION),
    ("selector_predecessor.weight", PREDECESSORS),
    ("selector_successor.weight", SUCCESSORS),
    ("token_embd.weight", FROZEN[0]),
    ("output.weight", FROZEN[1]),
    (MAP[0], MAP[0]),
];

/// The same inside of a layer, beside [`PLAIN_MODULES`].
const LAYER_NAMES: [(&str, &str); 4] = [
    ("attn_conv_base", "attention_conv.base_kernel"),
    ("attn_conv_proj", "attention_conv.kernel_projection"),
    ("ffn_conv_base", "mlp_conv.base_kernel"),
    ("ffn_conv_proj", "mlp_conv.kernel_projection"),
];

/// The name in files of a published tensor.
pub fn stored_name(published: &str) -> Option<String> {
    match published.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => {
            let names = PLAIN_MODULES.iter().chain(&LAYER_NAMES);
            Some(format!("blk.{layer}.{}", renamed(rest, names.map(|(a, b)| (*b, *a)))?))
        }
        None => renamed(published, NAMES.iter().map(|(a, b)| (*b, *a))),
    }
}

/// A name by a table of whole tensors, and of modules whose `weight` or `bias` it is.
fn renamed<'a>(name: &str, mut table: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
    table.find_map(|(from, to)| match name.strip_prefix(from)? {
        "" => Some(to.to_owned()),
        rest @ (".weight" | ".bias") => Some(format!("{to}{rest}")),
        _ => None,
    })
}

/// Names of block drafts' tensors: [`stored_name`] and back.
pub struct BlockNames;

impl Naming for BlockNames {
    const ARCHITECTURE: &'static str = ARCHITECTURE;
    const TITLE: &'static str = "block";
    const IS_INTERLEAVED: bool = false;

    fn stored_name(published: &str) -> Option<String> {
        stored_name(published)
    }

    fn published_name(stored: &str) -> Option<String> {
        match stored.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, rest)) => {
                let names = PLAIN_MODULES.iter().chain(&LAYER_NAMES);
                Some(format!("layers.{layer}.{}", renamed(rest, names.copied())?))
            }
            None => renamed(stored, NAMES.iter().copied()),
        }
    }
}

/// A block draft's GGUF file.
pub type GgufBlockSource = DraftGguf<BlockNames>;

impl GgufBlockSource {
    /// The kind of draft, by its tensors and keys.
    pub(super) fn kind(&self) -> &'static DraftKind {
        let keys = self.keys();
        if self.header().tensors.contains_key(CHAIN) {
            return &CHAINED;
        }
        if [SELECTOR[0], CONVOLUTION[0]].iter().any(|key| keys.is_there(key)) {
            return &EXTENDED;
        }
        if keys.flag(FROM_ANCHOR) == Some(true) { &CHAINED } else { &PLAIN }
    }

    /// Sizes and switches. What files leave to the target is taken from it; without one the target's
    /// layers are counted up to the one above the last that is read.
    ///
    /// # Errors
    /// - a list of every missing, unusable or unsupported key
    pub fn config(&self, target: Option<&TargetConfig>) -> Result<BlockConfig, Problems> {
        let mut keys = self.keys();
        let hidden_size = keys.size("embedding_length");
        let num_attention_heads = keys.size("attention.head_count");
        let default_head_dim = (hidden_size / num_attention_heads.max(1)).max(1);
        let max_position_embeddings =
            keys.size_or("context_length", target.map(|target| target.max_position_embeddings));
        let known = target.map(|target| target.vocab_size).or_else(|| self.tokens());
        let vocab_size = keys.size_or("vocab_size", known);
        let mut config = BlockConfig {
            hidden_size,
            intermediate_size: keys.size("feed_forward_length"),
            num_attention_heads,
            num_key_value_heads: keys.size_or("attention.head_count_kv", Some(num_attention_heads)),
            head_dim: keys.size_or("attention.key_length", Some(default_head_dim)),
            vocab_size,
            draft_vocab_size: self.rows(MAP[0]).unwrap_or(vocab_size),
            rms_norm_eps: Self::rms_norm_eps(&keys),
            rope: RopeParameters::plain(10_000.0),
            max_position_embeddings,
            attention_bias: false,
            // A list of absurd length is refused by its number, which is kept one above the limit.
            layers: vec![LayerKind::Full; keys.size("block_count").min(limits::LAYERS + 1)],
            sliding_window: None,
            is_causal: Some(keys.flag("attention.causal").unwrap_or(false)),
            block_size: keys.size(BLOCK_SIZE),
            mask_token_id: 0,
            target_layers: self.layers(&Self::key("target_layers")).unwrap_or_default(),
            num_target_layers: 0,
            convolution: None,
            selector: None,
            chain: None,
            bend: Bend::default(),
            // Such files have no key for it.
            embedding_scale: None,
            initializer_range: 0.02,
        };
        // The first size says whether the part is there.
        let mut sizes =
            |names: [&str; 2]| keys.is_there(names[0]).then(|| names.map(|name| keys.size(name)));
        config.convolution = sizes(CONVOLUTION)
            .map(|[kernel_size, group_size]| ConvolutionSizes { kernel_size, group_size });
        config.selector = sizes(SELECTOR).map(|[rank, top_k]| SelectorSizes { rank, top_k });
        config.rope = self.rope(&mut keys, max_position_embeddings);
        config.num_target_layers = target.map_or_else(
            || config.target_layers.last().map_or(1, |last| last.0.saturating_add(2)),
            |target| target.num_hidden_layers,
        );
        self.read_mask_token(&mut config, &mut keys.problems);
        self.read_windows(&mut config, &mut keys);
        self.read_chain(&mut config, &mut keys);
        // 0 is none.
        let [multiplier, softcap] = ["logit_scale", BEND[1]].map(|key| keys.scale_or_none(key));
        config.bend = Bend { divisor: multiplier.map_or(1.0, f64::recip), softcap };
        config.checked(keys.into_problems())
    }

    /// Tokens that the file's own tensors or its tokenizer count.
    fn tokens(&self) -> Option<usize> {
        let listed = self.header().metadata.get("tokenizer.ggml.tokens");
        let listed = listed.and_then(|tokens| tokens.to_vec().ok()).map(Vec::len);
        self.rows("token_embd.weight").or(self.rows(CHAIN)).or(listed)
    }

    fn read_mask_token(&self, config: &mut BlockConfig, problems: &mut Problems) {
        let found = self.header().number(MASK_TOKEN).filter(|id| *id >= 0.0);
        match found {
            Some(id) => config.mask_token_id = id as u32,
            None => problems.push(format!("`{MASK_TOKEN}` is missing")),
        }
        let key = Self::key("target_layers");
        if config.target_layers.is_empty() {
            let found = self.header().integers(&key);
            let reason = no_embeddings(found.as_ref().is_some_and(|ids| ids.contains(&0)));
            let told =
                format!("`{key}` = {found:?} is not a list of layers, counted from 1{reason}");
            problems.push(told);
        }
    }

    /// Which layers slide: those that a list of switches names.
    fn read_windows(&self, config: &mut BlockConfig, keys: &mut Keys<'_>) {
        let window = keys.number("attention.sliding_window").filter(|window| *window > 0.0);
        let Some(window) = window else { return };
        config.sliding_window = Some(window as usize);
        let key = Self::key("attention.sliding_window_pattern");
        let kind = |slides| if slides { LayerKind::Sliding } else { LayerKind::Full };
        match self.header().flags(&key) {
            Some(slides) if slides.len() == config.layers.len() => {
                config.layers = slides.into_iter().map(kind).collect();
            }
            _ => keys.problems.push(format!(
                "`{key}` is not a list of {} times true or false",
                config.layers.len()
            )),
        }
    }

    /// A chain by its tensors; the switch alone makes one without a head.
    fn read_chain(&self, config: &mut BlockConfig, keys: &mut Keys<'_>) {
        let width = |name: &str| self.header().tensors.get(name)?.shape.last().copied();
        let said = keys.flag(FROM_ANCHOR);
        let rank = match (width(CHAIN), said) {
            (Some(rank), None | Some(true)) => rank,
            (None, Some(true)) => 0,
            (None, None | Some(false)) => return,
            (Some(_), Some(false)) => {
                let key = Self::key(FROM_ANCHOR);
                return keys
                    .problems
                    .push(format!("`{key}` = false is not supported beside `{CHAIN}`"));
            }
        };
        let confidence = width(CONFIDENCE).map(|width| width != config.hidden_size);
        config.chain = Some(ChainSizes { rank, kind: ChainKind::Vanilla, confidence });
    }
}

#[cfg(test)]
mod tests;
