//! `config.json` of a block draft, under the keys that engines read.
//!
//! What is special to block drafts stands in `dflash_config`; the rest are the keys of a Qwen3 model.

use longdraft_kernels::bend::Bend;
use serde_json::{Map, Value, json};

use super::config::{
    BlockConfig, ChainKind, ChainSizes, ConvolutionSizes, LayerKind, SelectorSizes, default_layers,
};
use super::speculators;
use crate::config::{RopeParameters, limits};
use crate::draft::keys::Keys;
use crate::error::{Problems, without_backtrace};
use crate::ids::LayerId;

/// The object of the keys that other models do not have.
pub const OWN: &str = "dflash_config";

/// Whether slot 0 proposes.
const FROM_ANCHOR: &str = "sample_from_anchor";

/// The older opposite of it.
pub const BONUS_ANCHOR: &str = "dspark_bonus_anchor";

/// What becomes of the head's products: a factor, then a soft-cap.
const BEND: [&str; 2] = ["output_multiplier", "final_logit_softcapping"];

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
                plain["num_target_layers"] = layers.into();
            }
            plain
        });
        let value = plain.as_ref().unwrap_or(value);
        let own = value[OWN].as_object().cloned().unwrap_or_default();
        let merged = merged(value, own, &mut problems);
        let mut keys = Keys { value: &merged, problems: &mut problems };
        check_supported(&mut keys);
        let hidden_size = keys.size("hidden_size", None);
        let num_attention_heads = keys.size("num_attention_heads", None);
        let max_position_embeddings = keys.size("max_position_embeddings", Some(32_768));
        let num_layers = keys.size("num_hidden_layers", None);
        let num_target_layers = keys.size("num_target_layers", target_layers);
        let sliding_window = window(&mut keys);
        let mut config = Self {
            hidden_size,
            intermediate_size: keys.size("intermediate_size", None),
            num_attention_heads,
            num_key_value_heads: keys.size("num_key_value_heads", Some(num_attention_heads)),
            head_dim: keys.size("head_dim", Some(hidden_size / num_attention_heads.max(1))),
            vocab_size: keys.size("vocab_size", None),
            rms_norm_eps: keys.number("rms_norm_eps", 1e-6),
            rope: RopeParameters::plain(10_000.0),
            max_position_embeddings,
            attention_bias: keys.flag("attention_bias", false),
            layers: layers(&mut keys, num_layers, sliding_window),
            sliding_window,
            is_causal: is_causal(&mut keys),
            block_size: keys.size("block_size", None),
            mask_token_id: u32::try_from(keys.size("mask_token_id", None)).unwrap_or(u32::MAX),
            target_layers: Vec::new(),
            num_target_layers,
            convolution: None,
            selector: None,
            chain: chain(&mut keys),
            bend: bend(&mut keys),
            initializer_range: keys.number("initializer_range", 0.02),
        };
        check_sizes_of_target(&mut keys, &config);
        config.target_layers = layer_ids(&mut keys, num_target_layers, num_layers);
        if keys.present("conv_kernel_size").is_some() {
            config.convolution = Some(ConvolutionSizes {
                kernel_size: keys.size("conv_kernel_size", None),
                group_size: keys.size("conv_group_size", None),
            });
        }
        if keys.present("selector_rank").is_some() {
            config.selector = Some(SelectorSizes {
                rank: keys.size("selector_rank", None),
                top_k: keys.size("selector_top_k", None),
            });
        }
        config.rope = RopeParameters::from_json(value, max_position_embeddings, &mut problems);
        if let Some(divisors) = value["rope_divisors"].as_array() {
            let numbers = divisors.iter().filter_map(Value::as_f64);
            config.rope.divisors = Some(numbers.map(|divisor| divisor as f32).collect());
        }
        if problems.0.is_empty() {
            problems = config.problems();
        }
        if problems.0.is_empty()
            && let Err(error) = config.rope.build(config.head_dim)
        {
            problems.push(without_backtrace(error));
        }
        if problems.0.is_empty() { Ok(config) } else { Err(problems) }
    }

    /// The keys of a `config.json` for readers of an architecture. The number of slots, the rotary base and
    /// whether slot 0 proposes stand twice, since readers differ in where they look.
    pub fn to_json(&self, architecture: &str) -> Value {
        let name = |kind: &LayerKind| match kind {
            LayerKind::Full => FULL,
            LayerKind::Sliding => SLIDING,
        };
        let rope = self.rope.to_json();
        let mut own = json!({
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": self.target_layers.iter().map(|layer| layer.0).collect::<Vec<_>>(),
            FROM_ANCHOR: self.chain.is_some(),
        });
        if !self.bend.is_plain() {
            own[BEND[0]] = self.bend.divisor.recip().into();
        }
        if let Some(softcap) = self.bend.softcap {
            own[BEND[1]] = softcap.into();
        }
        if let Some(sizes) = self.convolution {
            own["conv_kernel_size"] = sizes.kernel_size.into();
            own["conv_group_size"] = sizes.group_size.into();
        }
        if let Some(sizes) = self.selector {
            own["selector_rank"] = sizes.rank.into();
            own["selector_top_k"] = sizes.top_k.into();
        }
        if let Some(sizes) = self.chain {
            own["projector_type"] = "dspark".into();
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
            "num_target_layers": self.num_target_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "rope_theta": self.rope.theta,
            "rope_parameters": rope,
            "layer_types": self.layers.iter().map(name).collect::<Vec<_>>(),
            "use_sliding_window": self.layers.contains(&LayerKind::Sliding),
            "max_window_layers": self.layers.iter().take_while(|k| **k == LayerKind::Full).count(),
            "block_size": self.block_size,
            FROM_ANCHOR: self.chain.is_some(),
            "tie_word_embeddings": false,
            "initializer_range": self.initializer_range,
            OWN: own,
        });
        if let Some(window) = self.sliding_window {
            value["sliding_window"] = window.into();
        }
        if let Some(causal) = self.causality() {
            value["is_causal"] = causal.into();
        }
        if let Some(sizes) = self.chain {
            // Engines look for these keys at the top.
            for (key, inner) in of_chain(sizes) {
                value[key] = inner;
            }
            for key in ["mask_token_id", "target_layer_ids"] {
                value[key] = value[OWN][key].clone();
            }
        }
        // Readers take an absent key for none; some refuse null.
        if rope["rope_type"] != "default" {
            value["rope_scaling"] = rope;
        }
        if let Some(divisors) = &self.rope.divisors {
            value["rope_divisors"] = json!(divisors);
        }
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

/// The keys of sequential heads. What readers default differently is written.
fn of_chain(sizes: ChainSizes) -> [(&'static str, Value); 4] {
    let kind = CHAINS.iter().find(|(_, kind)| *kind == sizes.kind);
    [
        ("markov_rank", sizes.rank.into()),
        ("markov_head_type", kind.map(|(name, _)| *name).into()),
        ("enable_confidence_head", sizes.confidence.is_some().into()),
        ("confidence_head_with_markov", sizes.confidence.unwrap_or(true).into()),
    ]
}

fn chain(keys: &mut Keys<'_>) -> Option<ChainSizes> {
    let is_chain = keys.present("markov_rank").is_some();
    let usual = is_chain && !keys.flag(BONUS_ANCHOR, false);
    if keys.flag(FROM_ANCHOR, usual) != is_chain {
        let beside = if is_chain { "beside" } else { "without" };
        let said = !is_chain;
        keys.problems
            .push(format!("`{FROM_ANCHOR}` = {said} is not supported {beside} `markov_rank`"));
    }
    if !is_chain {
        return None;
    }
    let rank = keys.size("markov_rank", None);
    let name = keys.present("markov_head_type").map_or(Some("vanilla"), Value::as_str);
    let kind = CHAINS.iter().find(|(known, _)| name == Some(known)).map(|(_, kind)| *kind);
    if kind.is_none() {
        keys.problems.push(format!("`markov_head_type` = {name:?} is unknown"));
    }
    let reads_token = keys.flag("confidence_head_with_markov", true);
    let confidence = keys.flag("enable_confidence_head", false).then_some(reads_token);
    Some(ChainSizes { rank, kind: kind.unwrap_or(ChainKind::Vanilla), confidence })
}

fn bend(keys: &mut Keys<'_>) -> Bend {
    let [multiplier, softcap] = BEND.map(|key| {
        let number = keys.present(key)?.as_f64().unwrap_or(f64::NAN);
        limits::scale(keys.problems, key, number)
    });
    Bend { divisor: multiplier.map_or(1.0, f64::recip), softcap }
}

fn check_supported(keys: &mut Keys<'_>) {
    if let Some(act) = keys.present("hidden_act").filter(|act| *act != "silu") {
        let problem = format!("`hidden_act` = {act} is not supported (silu is)");
        keys.problems.push(problem);
    }
    let key = "input_embedding_scale";
    if let Some(value) = keys.present(key).filter(|value| value.as_f64() != Some(1.0)) {
        let problem = format!("`{key}` = {value} is not supported");
        keys.problems.push(problem);
    }
    if keys.flag("attention_sink_bias", false) {
        keys.problems.push("`attention_sink_bias` is not supported");
    }
}

/// Sizes that a draft shares with its target here.
fn check_sizes_of_target(keys: &mut Keys<'_>, config: &BlockConfig) {
    for (key, wanted) in
        [("draft_vocab_size", config.vocab_size), ("target_hidden_size", config.hidden_size)]
    {
        let found = keys.size(key, Some(wanted));
        if found != wanted {
            keys.problems.push(format!("`{key}` = {found} beside {wanted} is not supported"));
        }
    }
}

fn window(keys: &mut Keys<'_>) -> Option<usize> {
    let names = ["sliding_window", "swa_window_size"];
    let name = names.into_iter().find(|name| keys.present(name).is_some())?;
    Some(keys.size(name, None))
}

/// The kinds of the layers: as listed, or by the switches of older files.
fn layers(keys: &mut Keys<'_>, count: usize, window: Option<usize>) -> Vec<LayerKind> {
    // A list of absurd length is refused by its number, which is kept one above the limit.
    let count = count.min(limits::LAYERS + 1);
    let Some(listed) = keys.present("layer_types") else {
        let all = keys.flag("use_swa", false);
        let some = keys.flag("use_sliding_window", false) && window.is_some();
        let first = if all { 0 } else { keys.size("max_window_layers", Some(count)) };
        let slides = |layer: usize| (all || some) && layer >= first;
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
                format!("`layer_types` is no list of {count} times `{FULL}` or `{SLIDING}`");
            keys.problems.push(problem);
            vec![LayerKind::Full; count]
        }
    }
}

fn is_causal(keys: &mut Keys<'_>) -> Option<bool> {
    let names = ["is_causal", "causal"];
    let name = names.into_iter().find(|name| keys.present(name).is_some())?;
    Some(keys.flag(name, false))
}

fn layer_ids(keys: &mut Keys<'_>, target_layers: usize, layers: usize) -> Vec<LayerId> {
    let Some(listed) = keys.present("target_layer_ids") else {
        let limit = limits::LAYERS;
        return default_layers(target_layers.min(limit), layers.min(limit));
    };
    let id = |id: &Value| Some(LayerId(usize::try_from(id.as_u64()?).ok()?));
    let ids: Option<Vec<LayerId>> = listed.as_array().and_then(|ids| ids.iter().map(id).collect());
    ids.unwrap_or_else(|| {
        let problem = format!("`target_layer_ids` = {listed} is no list of layers");
        keys.problems.push(problem);
        vec![LayerId(0)]
    })
}

#[cfg(test)]
mod tests {
    use longdraft_kernels::rope::RopeScaling;

    use super::super::tests::toy;
    use super::*;

    const NAME: &str = "DFlashDraftModel";

    #[test]
    fn what_is_written_is_read_back() {
        let sliding = vec![LayerKind::Sliding; 2];
        let mixed = vec![LayerKind::Sliding, LayerKind::Full];
        let window = Some(9);
        for config in [
            BlockConfig { is_causal: Some(false), ..toy() },
            BlockConfig { layers: mixed, sliding_window: window, ..toy() },
            BlockConfig { layers: sliding, sliding_window: window, is_causal: Some(true), ..toy() },
            BlockConfig {
                rope: RopeParameters {
                    scaling: RopeScaling::Linear { factor: 4.0 },
                    divisors: Some(vec![1.5; 4]),
                    ..RopeParameters::plain(5e5)
                },
                convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
                selector: Some(SelectorSizes { rank: 4, top_k: 16 }),
                is_causal: Some(false),
                ..toy()
            },
            BlockConfig {
                chain: Some(ChainSizes { rank: 4, kind: ChainKind::Rnn, confidence: Some(false) }),
                is_causal: Some(false),
                ..toy()
            },
            BlockConfig {
                bend: Bend { divisor: 4.0, softcap: Some(20.0) },
                is_causal: Some(false),
                ..toy()
            },
        ] {
            assert_eq!(BlockConfig::from_json(&config.to_json(NAME), None), Ok(config));
        }
    }

    #[test]
    fn where_all_layers_agree_the_file_says_whether_blocks_are_causal() {
        let sliding =
            BlockConfig { layers: vec![LayerKind::Sliding; 2], sliding_window: Some(4), ..toy() };
        assert_eq!(toy().to_json(NAME)["is_causal"], false);
        assert_eq!(sliding.to_json(NAME)["is_causal"], true);
    }

    #[test]
    fn files_say_whether_slot_0_proposes_and_what_they_say_holds() {
        let chain = ChainSizes { rank: 4, kind: ChainKind::Vanilla, confidence: None };
        let chained = BlockConfig { chain: Some(chain), ..toy() }.to_json(NAME);
        for (value, wanted) in [(toy().to_json(NAME), false), (chained, true)] {
            assert!(value[FROM_ANCHOR] == wanted && value[OWN][FROM_ANCHOR] == wanted, "{value}");
            let without = |more: &[(&str, bool)]| {
                let mut value = value.clone();
                value[OWN].as_object_mut().expect("an object").remove(FROM_ANCHOR);
                value.as_object_mut().expect("an object").remove(FROM_ANCHOR);
                more.iter().for_each(|(key, said)| value[*key] = (*said).into());
                BlockConfig::from_json(&value, None)
            };
            assert_eq!(without(&[]).expect("valid").chain.is_some(), wanted);
            let text = without(&[(FROM_ANCHOR, !wanted)]).expect_err("refused").to_string();
            assert!(text.contains(&format!("`{FROM_ANCHOR}` = {}", !wanted)), "{text}");
            // The older opposite counts where the newer key is not there.
            assert_eq!(without(&[(BONUS_ANCHOR, true)]).is_ok(), !wanted);
            without(&[(BONUS_ANCHOR, true), (FROM_ANCHOR, wanted)]).expect("valid");
        }
    }

    #[test]
    fn numbers_that_bend_logits_must_be_the_targets() {
        let keys = json!({
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
            "rope_theta": 1e4, "tie_word_embeddings": true
        });
        let mut target = crate::config::TargetConfig::from_json(&keys).expect("valid");
        let problems = |own: &Value, target: &_| {
            let mut value = toy().to_json(NAME);
            own.as_object().into_iter().flatten().for_each(|(key, n)| value[OWN][key] = n.clone());
            BlockConfig::from_json(&value, None).expect("valid").problems_with(target)
        };
        // As files of 32 bits hold it.
        let multiplier = 1.0 / 0.7_f32;
        let said = json!({"output_multiplier": multiplier, "final_logit_softcapping": 20.0});
        assert_eq!(problems(&said, &target).0.len(), 1, "this one does nothing to them");
        (target.parts.logits_divisor, target.parts.logits_softcap) = (Some(0.7), Some(20.0));
        assert_eq!(problems(&said, &target), Problems::default());
        assert_eq!(problems(&json!({}), &target), Problems::default(), "left to the target");
        for part in ["output_multiplier", "final_logit_softcapping"] {
            let text = problems(&json!({part: said[part]}), &target).to_string();
            assert!(text.contains("bends logits"), "{text}");
        }
    }

    #[test]
    fn older_spellings_are_read() {
        let mut value = BlockConfig { is_causal: Some(false), ..toy() }.to_json(NAME);
        let keys = value.as_object_mut().expect("an object");
        for key in ["layer_types", "is_causal", "num_target_layers", "use_sliding_window"] {
            keys.remove(key);
        }
        value[OWN]["use_swa"] = true.into();
        value[OWN]["swa_window_size"] = 7.into();
        value[OWN]["causal"] = false.into();
        let config = BlockConfig::from_json(&value, Some(6)).expect("valid");
        assert_eq!(config.layers, [LayerKind::Sliding; 2]);
        assert_eq!((config.sliding_window, config.is_causal), (Some(7), Some(false)));
        value[OWN].as_object_mut().expect("an object").remove("target_layer_ids");
        let config = BlockConfig::from_json(&value, Some(6)).expect("valid");
        assert_eq!(config.target_layers, default_layers(6, 2));
    }

    /// A folder as the speculators library writes it, values of its classes left out.
    fn nested(kind: &str) -> Value {
        json!({
            "architectures": ["AnyDraftModel"], "speculators_model_type": kind, "block_size": 4,
            "aux_hidden_state_layer_ids": [2, 4], "mask_token_id": 39, "draft_vocab_size": 40,
            "sample_from_anchor": kind == "dspark", "sliding_window_non_causal": false,
            "transformer_layer_config": {
                "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 64,
                "attention_bias": true, "use_sliding_window": true, "sliding_window": 9,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "layer_types": ["sliding_attention", "full_attention"]
            }
        })
    }

    #[test]
    fn nested_folders_count_layers_from_one_and_name_sliding_layers_alone() {
        let mut value = nested("dflash");
        let config = BlockConfig::from_json(&value, Some(6)).expect("valid");
        let wanted = BlockConfig {
            layers: vec![LayerKind::Sliding, LayerKind::Full],
            sliding_window: Some(9),
            rope: RopeParameters::plain(5e5),
            initializer_range: 0.02,
            ..toy()
        };
        assert_eq!(config, wanted);
        assert!(config.is_causal_in(LayerKind::Sliding) && !config.is_causal_in(LayerKind::Full));
        value["sliding_window_non_causal"] = true.into();
        let config = BlockConfig::from_json(&value, None).expect("valid");
        assert!(!config.is_causal_in(LayerKind::Sliding));
        assert_eq!(config.num_target_layers, 5, "one above the last that is read");
        // Without the switch each class has a default of its own.
        for (kind, is_causal) in [("dflash", None), ("dspark", None), ("dflash2", Some(false))] {
            let mut value = nested(kind);
            value.as_object_mut().expect("keys").remove("sliding_window_non_causal");
            assert_eq!(BlockConfig::from_json(&value, None).expect("valid").is_causal, is_causal);
        }
    }

    #[test]
    fn heads_of_nested_folders_are_those_of_their_type() {
        let chain = |value: &Value| BlockConfig::from_json(value, None).expect("valid").chain;
        let mut value = nested("dspark");
        let full = ChainSizes { rank: 256, kind: ChainKind::Vanilla, confidence: Some(true) };
        assert_eq!(chain(&value), Some(full), "what the class has where nothing is said");
        value["markov_rank"] = 5.into();
        value["markov_head_type"] = "gated".into();
        value["enable_confidence_head"] = false.into();
        value.as_object_mut().expect("keys").remove("sample_from_anchor");
        let gated = ChainSizes { rank: 5, kind: ChainKind::Gated, confidence: None };
        assert_eq!(chain(&value), Some(gated));
        // The older opposite: slot 0 holds a token and proposes none.
        value[BONUS_ANCHOR] = true.into();
        let text = BlockConfig::from_json(&value, None).expect_err("refused").to_string();
        assert!(text.contains("`sample_from_anchor` = false"), "{text}");
        let mut value = nested("dflash");
        assert_eq!(chain(&value), None);
        value["sample_from_anchor"] = true.into();
        let none = ChainSizes { rank: 0, kind: ChainKind::Vanilla, confidence: None };
        assert_eq!(chain(&value), Some(none), "a chain without a head");
        let config = BlockConfig::from_json(&nested("dflash2"), None).expect("valid");
        assert_eq!(config.selector, Some(SelectorSizes { rank: 256, top_k: 16 }));
        assert_eq!(config.convolution, Some(ConvolutionSizes { kernel_size: 2, group_size: 16 }));
    }

    #[test]
    fn what_nested_folders_may_hold_beside_is_refused() {
        for (key, value, part) in [
            ("aux_hidden_state_layer_ids", json!([0, 4]), "are no layers, counted from 1"),
            ("aux_hidden_state_layer_ids", Value::Null, "`aux_hidden_state_layer_ids` is missing"),
            ("aux_hidden_state_layer_ids", json!([u64::MAX]), "target_layer_ids"),
            ("draft_vocab_size", 20.into(), "`draft_vocab_size` = 20 beside 40"),
            ("target_hidden_size", 64.into(), "`target_hidden_size` = 64 beside 32"),
            ("input_embedding_scale", 0.2.into(), "`input_embedding_scale` = 0.2"),
        ] {
            let mut config = nested("dflash");
            config[key] = value;
            let text = BlockConfig::from_json(&config, Some(6)).expect_err(key).to_string();
            assert!(text.contains(part), "{part} not in {text}");
        }
        let mut value = nested("dflash2");
        value["sample_from_anchor"] = true.into();
        let text = BlockConfig::from_json(&value, None).expect_err("refused").to_string();
        assert!(text.contains("beside a selector"), "{text}");
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let mut value = toy().to_json(NAME);
        value["hidden_size"] = "wide".into();
        value["layer_types"] = json!(["full_attention", "linear_attention"]);
        value["block_size"] = 8.into();
        value[OWN]["output_multiplier"] = json!(-0.2);
        value[OWN]["target_layer_ids"] = json!([1, "two"]);
        value["rope_parameters"] = json!({"rope_type": "linear"});
        let text = BlockConfig::from_json(&value, None).expect_err("refused").to_string();
        for part in [
            "`hidden_size` = \"wide\"",
            "`layer_types`",
            "`block_size` = 8, and 4",
            "`output_multiplier` = -0.2",
            "`target_layer_ids` = [1,\"two\"]",
            "`linear` needs",
        ] {
            assert!(text.contains(part), "{part} not in {text}");
        }
    }

    #[test]
    fn absurd_sizes_are_refused_before_anything_is_made_of_them() {
        for key in ["hidden_size", "num_hidden_layers", "num_target_layers", "vocab_size"] {
            for size in [1_u64 << 23, 1 << 32, u64::MAX - 1] {
                let mut value = toy().to_json(NAME);
                value.as_object_mut().expect("an object").remove("layer_types");
                value[key] = json!(size);
                assert!(BlockConfig::from_json(&value, None).is_err(), "{key} = {size}");
            }
        }
    }
}
