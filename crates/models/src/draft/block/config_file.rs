//! `config.json` of a block draft, under the keys that engines read.
//!
//! What is special to block drafts ([`key_names`](super::key_names)) stands in an object of its own; the rest
//! are the keys of a Qwen3 model.

mod factors;

use serde_json::{Map, Value, json};

use super::config::{
    BlockConfig, ChainKind, ChainSizes, ConvolutionSizes, LayerKind, SelectorSizes, default_layers,
    no_embeddings,
};
use super::key_names::{
    BEND, BLOCK_SIZE, BONUS_ANCHOR, CAUSAL, CHAIN, CONVOLUTION, COUNTED_LAYERS, DRAFT_VOCABULARY,
    EMBEDDING_SCALE, FROM_ANCHOR, MASK_TOKEN, OWN, PROJECTOR, SELECTOR, TARGET_LAYERS,
};
use super::speculators;
use crate::config::json_keys::Keys;
use crate::config::{RopeParameters, limits};
use crate::error::Problems;
use crate::ids::LayerId;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

impl BlockConfig {
    /// Reads a draft's `config.json`, of a plain folder or of a speculators one. Without a number of target
    /// layers in it, `target_layers` is taken.
    ///
    /// # Errors
    /// - a list of every missing, unusable or unsupported key
    pub fn from_json(value: &Value, target_layers: Option<usize>) -> Result<Self, Problems> {
        let mut problems = Problems::default();
        let plain = speculators::plain(value, &mut problems).map(|mut plain| {
            if let Some(layers) = target_layers {
                plain[COUNTED_LAYERS] = layers.into();
            }
            plain
        });
        let value = plain.as_ref().unwrap_or(value);
        let own = value[OWN].as_object().cloned().unwrap_or_default();
        let merged = merged(value, own, &mut problems);
        let mut keys = Keys::of(&merged);
        keys.problems = problems;
        check_supported(&mut keys);
        let hidden_size = keys.size_or("hidden_size", None);
        let num_attention_heads = keys.size_or("num_attention_heads", None);
        let max_position_embeddings = keys.size_or("max_position_embeddings", Some(32_768));
        let num_layers = keys.size_or("num_hidden_layers", None);
        let vocab_size = keys.size_or("vocab_size", None);
        let num_target_layers = keys.size_or(COUNTED_LAYERS, target_layers);
        let sliding_window = window(&mut keys);
        let mut config = Self {
            hidden_size,
            intermediate_size: keys.size_or("intermediate_size", None),
            num_attention_heads,
            num_key_value_heads: keys.size_or("num_key_value_heads", Some(num_attention_heads)),
            head_dim: keys.size_or("head_dim", Some(hidden_size / num_attention_heads.max(1))),
            vocab_size,
            draft_vocab_size: keys.size_or(DRAFT_VOCABULARY, Some(vocab_size)),
            rms_norm_eps: keys.number("rms_norm_eps", 1e-6),
            rope: RopeParameters::plain(10_000.0),
            max_position_embeddings,
            attention_bias: keys.switch("attention_bias", false),
            layers: layers(&mut keys, num_layers, sliding_window),
            sliding_window,
            is_causal: is_causal(&mut keys),
            block_size: keys.size_or(BLOCK_SIZE, None),
            mask_token_id: u32::try_from(keys.size_or(MASK_TOKEN, None)).unwrap_or(u32::MAX),
            target_layers: layer_ids(&mut keys, num_target_layers, num_layers),
            num_target_layers,
            convolution: sizes(&mut keys, CONVOLUTION)
                .map(|[kernel_size, group_size]| ConvolutionSizes { kernel_size, group_size }),
            selector: sizes(&mut keys, SELECTOR).map(|[rank, top_k]| SelectorSizes { rank, top_k }),
            chain: chain(&mut keys),
            bend: factors::bend(&mut keys),
            embedding_scale: factors::embedding_scale(&mut keys),
            initializer_range: keys.number("initializer_range", 0.02),
        };
        check_width_of_target(&mut keys, hidden_size);
        let slides = config.layers.contains(&LayerKind::Sliding);
        if slides && !is_switched_off(&keys) {
            check_spellings(&mut keys, WINDOWS);
        }
        let full = config.layers.contains(&LayerKind::Full);
        let kinds: Vec<&str> = [(FULL, full), (SLIDING, slides)]
            .into_iter()
            .filter(|kind| kind.1)
            .map(|kind| kind.0)
            .collect();
        let context = max_position_embeddings;
        config.rope = RopeParameters::of_draft(value, (context, &kinds), &mut keys.problems);
        config.checked(keys.into_problems())
    }

    /// The keys of a `config.json` for readers of an architecture. The number of slots, the rotary base, that
    /// slot 0 does not propose and whether blocks are causal stand twice, since readers differ in where they look.
    pub fn to_json(&self, architecture: &str) -> Value {
        let name = |kind: &LayerKind| match kind {
            LayerKind::Full => FULL,
            LayerKind::Sliding => SLIDING,
        };
        let mut own = json!({
            BLOCK_SIZE: self.block_size,
            MASK_TOKEN: self.mask_token_id,
            TARGET_LAYERS: self.target_layers.iter().map(|layer| layer.0).collect::<Vec<_>>(),
        });
        // vLLM does not start where this place says that slot 0 proposes.
        if self.chain.is_none() {
            own[FROM_ANCHOR] = false.into();
        }
        if !self.bend.is_plain() {
            own[BEND[0]] = self.bend.divisor.recip().into();
        }
        if let Some(softcap) = self.bend.softcap {
            own[BEND[1]] = softcap.into();
        }
        if let Some(scale) = self.embedding_scale {
            own[EMBEDDING_SCALE] = scale.into();
        }
        let convolution = self.convolution.map(|sizes| [sizes.kernel_size, sizes.group_size]);
        let selector = self.selector.map(|sizes| [sizes.rank, sizes.top_k]);
        for (names, sizes) in [(CONVOLUTION, convolution), (SELECTOR, selector)] {
            for (key, size) in names.into_iter().zip(sizes.into_iter().flatten()) {
                own[key] = size.into();
            }
        }
        if let Some(sizes) = self.chain {
            own[PROJECTOR.0] = PROJECTOR.1.into();
            for (key, value) in of_chain(sizes) {
                own[key] = value;
            }
        }
        let mut value = json!({
            "architectures": [architecture],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers.len(),
            COUNTED_LAYERS: self.num_target_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.to_json(),
            "layer_types": self.layers.iter().map(name).collect::<Vec<_>>(),
            "use_sliding_window": self.layers.contains(&LayerKind::Sliding),
            "max_window_layers": self.layers.iter().take_while(|k| **k == LayerKind::Full).count(),
            BLOCK_SIZE: self.block_size,
            FROM_ANCHOR: self.chain.is_some(),
            "tie_word_embeddings": false,
            "initializer_range": self.initializer_range,
            OWN: own,
        });
        if let Some(window) = self.sliding_window {
            value["sliding_window"] = window.into();
        }
        // Some readers take a folder that has the key for another kind of draft.
        if self.has_own_head() {
            value[DRAFT_VOCABULARY] = self.draft_vocab_size.into();
        }
        // Engines from before autumn 2026 read the second spelling alone. Without it they run sliding layers causally.
        if let Some(causal) = self.causality() {
            value[CAUSAL[0]] = causal.into();
            value[OWN][CAUSAL[1]] = causal.into();
        }
        if let Some(sizes) = self.chain {
            // Engines look for these keys at the top.
            for (key, inner) in of_chain(sizes) {
                value[key] = inner;
            }
            for key in [MASK_TOKEN, TARGET_LAYERS] {
                value[key] = value[OWN][key].clone();
            }
        }
        self.rope.write_beside(&mut value);
        value
    }

    /// Whether blocks are causal in every layer; `None` if layers differ.
    fn causality(&self) -> Option<bool> {
        let mut each = self.layers.iter().map(|kind| self.is_causal_in(*kind));
        let first = each.next()?;
        each.all(|causal| causal == first).then_some(first)
    }
}

/// One object of the keys at the top and those in [`OWN`], which must agree.
fn merged(value: &Value, own: Map<String, Value>, problems: &mut Problems) -> Value {
    let mut merged = value.as_object().cloned().unwrap_or_default();
    for (key, inner) in own {
        let outer = merged.get(&key).filter(|outer| !outer.is_null());
        match outer {
            Some(outer) if *outer != inner && !inner.is_null() => {
                problems.push(format!("`{key}` = {outer}, and {inner} in `{OWN}`"));
            }
            Some(_) => {}
            None => {
                merged.insert(key, inner);
            }
        }
    }
    Value::Object(merged)
}

/// The names of heads in files.
const CHAINS: [(&str, ChainKind); 3] =
    [("vanilla", ChainKind::Vanilla), ("gated", ChainKind::Gated), ("rnn", ChainKind::Rnn)];

/// The name of a head in files.
pub(super) fn name_of(kind: ChainKind) -> Option<&'static str> {
    CHAINS.iter().find(|(_, known)| *known == kind).map(|(name, _)| *name)
}

/// The keys of sequential heads. What readers default differently is written.
fn of_chain(sizes: ChainSizes) -> [(&'static str, Value); 4] {
    let [rank, head, has_confidence, reads_token] = CHAIN;
    [
        (rank, sizes.rank.into()),
        (head, name_of(sizes.kind).into()),
        (has_confidence, sizes.confidence.is_some().into()),
        (reads_token, sizes.confidence.unwrap_or(true).into()),
    ]
}

/// Two sizes that stand together; `None` without the first one.
fn sizes(keys: &mut Keys<'_>, [first, second]: [&str; 2]) -> Option<[usize; 2]> {
    keys.present(first)?;
    Some([keys.size_or(first, None), keys.size_or(second, None)])
}

fn chain(keys: &mut Keys<'_>) -> Option<ChainSizes> {
    let [rank_key, head_key, has_confidence, reads_token] = CHAIN;
    let is_chain = keys.present(rank_key).is_some();
    let usual = is_chain && !keys.switch(BONUS_ANCHOR, false);
    if keys.switch(FROM_ANCHOR, usual) != is_chain {
        let beside = if is_chain { "beside" } else { "without" };
        let said = !is_chain;
        keys.problems
            .push(format!("`{FROM_ANCHOR}` = {said} is not supported {beside} `{rank_key}`"));
    }
    if !is_chain {
        return None;
    }
    let rank = keys.size_or(rank_key, None);
    let said = keys.present(head_key);
    let name = said.map_or(Some(CHAINS[0].0), Value::as_str);
    let kind = CHAINS.iter().find(|(known, _)| name == Some(known)).map(|(_, kind)| *kind);
    if let (None, Some(said)) = (kind, said) {
        keys.problems.push(format!("`{head_key}` = {said} is unknown"));
    }
    let reads_token = keys.switch(reads_token, true);
    let confidence = keys.switch(has_confidence, false).then_some(reads_token);
    Some(ChainSizes { rank, kind: kind.unwrap_or(ChainKind::Vanilla), confidence })
}

fn check_supported(keys: &mut Keys<'_>) {
    if let Some(act) = keys.present("hidden_act").filter(|act| *act != "silu") {
        let problem = format!("`hidden_act` = {act} is not supported (silu is)");
        keys.problems.push(problem);
    }
    if keys.switch("attention_sink_bias", false) {
        keys.problems.push("`attention_sink_bias` is not supported");
    }
    for key in ["is_neox_style", "rope_is_neox_style"] {
        if !keys.switch(key, true) {
            keys.problems
                .push(format!("`{key}` = false, which rotates neighbours, is not supported"));
        }
    }
}

/// A draft is as wide as its target here.
fn check_width_of_target(keys: &mut Keys<'_>, wanted: usize) {
    const KEY: &str = "target_hidden_size";
    let found = keys.size_or(KEY, Some(wanted));
    if found != wanted {
        keys.problems.push(format!("`{KEY}` = {found} beside {wanted} is not supported"));
    }
}

/// Where a window is said, at the top and by the switch of older files.
const WINDOWS: [&str; 2] = ["sliding_window", "swa_window_size"];

fn window(keys: &mut Keys<'_>) -> Option<usize> {
    let names = if is_switched_off(keys) { [WINDOWS[1], WINDOWS[0]] } else { WINDOWS };
    let name = names.into_iter().find(|name| keys.present(name).is_some())?;
    Some(keys.size_or(name, None))
}

/// Whether the first of [`WINDOWS`] counts for nothing: classes of engines clear it then.
fn is_switched_off(keys: &Keys<'_>) -> bool {
    keys.present("use_sliding_window").is_some_and(|on| *on == false)
}

/// Two spellings of a key have to say the same: readers differ in which one counts.
fn check_spellings(keys: &mut Keys<'_>, names: [&str; 2]) {
    if let [Some(one), Some(other)] = names.map(|name| keys.present(name))
        && one != other
        && (one.as_f64().is_none() || one.as_f64() != other.as_f64())
    {
        keys.problems.push(format!("`{}` = {one}, and `{}` = {other}", names[0], names[1]));
    }
}

/// Whether one switch gives every layer a window. It counts where no layer is listed with one.
fn all_slide(keys: &Keys<'_>) -> bool {
    let listed = keys.present("layer_types").and_then(Value::as_array);
    let some_slide = listed.is_some_and(|kinds| kinds.iter().any(|kind| *kind == SLIDING));
    keys.switch("use_swa", false) && !some_slide
}

/// The kinds of the layers: as listed, or by the switches of older files.
fn layers(keys: &mut Keys<'_>, count: usize, window: Option<usize>) -> Vec<LayerKind> {
    // A list of absurd length is refused by its number, which is kept one above the limit.
    let count = count.min(limits::LAYERS + 1);
    if all_slide(keys) {
        return vec![LayerKind::Sliding; count];
    }
    let Some(listed) = keys.present("layer_types") else {
        let some = keys.switch("use_sliding_window", false) && window.is_some();
        let first = keys.size_or("max_window_layers", Some(count));
        let slides = |layer: usize| some && layer >= first;
        let kind = |layer| if slides(layer) { LayerKind::Sliding } else { LayerKind::Full };
        return (0..count).map(kind).collect();
    };
    let kind = |name: &Value| match name.as_str() {
        Some(FULL) => Some(LayerKind::Full),
        Some(SLIDING) => Some(LayerKind::Sliding),
        _ => None,
    };
    let kinds: Option<Vec<_>> =
        listed.as_array().and_then(|names| names.iter().map(kind).collect());
    match kinds {
        Some(kinds) if kinds.len() == count => kinds,
        _ => {
            let problem =
                format!("`layer_types` is not a list of {count} times `{FULL}` or `{SLIDING}`");
            keys.problems.push(problem);
            vec![LayerKind::Full; count]
        }
    }
}

fn is_causal(keys: &mut Keys<'_>) -> Option<bool> {
    check_spellings(keys, CAUSAL);
    match CAUSAL.into_iter().find(|name| keys.present(name).is_some()) {
        Some(name) => Some(keys.switch(name, false)),
        // Layers are causal that are listed with a window.
        None => all_slide(keys).then_some(false),
    }
}

fn layer_ids(keys: &mut Keys<'_>, target_layers: usize, layers: usize) -> Vec<LayerId> {
    let Some(listed) = keys.present(TARGET_LAYERS) else {
        let limit = limits::LAYERS;
        return default_layers(target_layers.min(limit), layers.min(limit));
    };
    let id = |id: &Value| Some(LayerId(usize::try_from(id.as_u64()?).ok()?));
    let ids: Option<Vec<LayerId>> = listed.as_array().and_then(|ids| ids.iter().map(id).collect());
    ids.unwrap_or_else(|| {
        let reason = no_embeddings(listed.as_array().is_some_and(|ids| ids.contains(&json!(-1))));
        let problem = format!("`{TARGET_LAYERS}` = {listed} is not a list of layers{reason}");
        keys.problems.push(problem);
        vec![LayerId(0)]
    })
}

#[cfg(test)]
mod tests;
