//! What is written is read back, older spellings are read, and what cannot be run is refused.

use longdraft_kernels::bend::Bend;
use longdraft_kernels::rope::RopeScaling;

use super::*;
use crate::config::TargetConfig;
use crate::draft::block::tests::toy;
use crate::test_support::assert_refused;

const NAME: &str = "DFlashDraftModel";

fn read(value: &Value) -> Result<BlockConfig, Problems> {
    BlockConfig::from_json(value, None)
}

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
        BlockConfig { draft_vocab_size: 20, is_causal: Some(false), ..toy() },
        BlockConfig { embedding_scale: Some(5.5), is_causal: Some(false), ..toy() },
        BlockConfig {
            bend: Bend { divisor: 4.0, softcap: Some(20.0) },
            is_causal: Some(false),
            ..toy()
        },
    ] {
        assert_eq!(read(&config.to_json(NAME)), Ok(config));
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
        assert_eq!(value[FROM_ANCHOR], wanted);
        assert_eq!(value[OWN].get(FROM_ANCHOR), (!wanted).then_some(&false.into()), "{value}");
        let without = |more: &[(&str, bool)]| {
            let mut value = value.clone();
            value[OWN].as_object_mut().expect("an object").remove(FROM_ANCHOR);
            value.as_object_mut().expect("an object").remove(FROM_ANCHOR);
            more.iter().for_each(|(key, said)| value[*key] = (*said).into());
            read(&value)
        };
        assert_eq!(without(&[]).expect("valid").chain.is_some(), wanted);
        assert_refused(
            without(&[(FROM_ANCHOR, !wanted)]),
            &[&format!("`{FROM_ANCHOR}` = {}", !wanted)],
        );
        // The older opposite counts where the newer key is not there.
        assert_eq!(without(&[(BONUS_ANCHOR, true)]).is_ok(), !wanted);
        without(&[(BONUS_ANCHOR, true), (FROM_ANCHOR, wanted)]).expect("valid");
    }
}

/// A target that [`toy`] fits.
fn target() -> TargetConfig {
    let keys = json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "rope_theta": 1e4, "tie_word_embeddings": true
    });
    TargetConfig::from_json(&keys).expect("valid")
}

#[test]
fn numbers_that_bend_logits_must_be_the_targets() {
    let mut target = target();
    let problems = |own: &Value, target: &_| {
        let mut value = toy().to_json(NAME);
        own.as_object().into_iter().flatten().for_each(|(key, n)| value[OWN][key] = n.clone());
        read(&value).expect("valid").problems_with(target)
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
fn a_factor_of_embeddings_is_read_and_must_be_the_targets() {
    let plain = |scale: Value| {
        let mut value = toy().to_json(NAME);
        value[OWN][EMBEDDING_SCALE] = scale;
        read(&value).expect("valid")
    };
    assert_eq!(plain(1.into()).embedding_scale, None);
    assert_eq!(plain(Value::Null).embedding_scale, None);
    assert!(toy().to_json(NAME)[OWN].get(EMBEDDING_SCALE).is_none());
    let mut value = nested("dflash");
    value[EMBEDDING_SCALE] = 0.2.into();
    assert_eq!(BlockConfig::from_json(&value, Some(6)).expect("valid").embedding_scale, Some(0.2));

    let mut target = target();
    let text = plain(3.0.into()).problems_with(&target).to_string();
    assert!(text.contains("multiplies embeddings by 3.0, the target by 1.0"), "{text}");
    target.parts.embedding_scale = Some(73.3212);
    // The second one is the target's in bf16.
    for (scale, fits) in [(73.3212, true), (73.5, true), (1.0, true), (70.0, false)] {
        let problems = plain(scale.into()).problems_with(&target);
        assert_eq!(problems.0.is_empty(), fits, "{scale}: {problems}");
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

/// What a folder of sliding layers becomes under other keys.
fn with(change: impl Fn(&mut Value)) -> Result<BlockConfig, Problems> {
    let sliding =
        BlockConfig { sliding_window: Some(7), layers: vec![LayerKind::Sliding; 2], ..toy() };
    let mut value = BlockConfig { is_causal: Some(false), ..sliding }.to_json(NAME);
    change(&mut value);
    BlockConfig::from_json(&value, Some(6))
}

#[test]
fn one_switch_gives_every_layer_a_window_and_makes_no_block_causal() {
    let config = with(|value| {
        value["layer_types"] = json!([FULL, FULL]);
        value.as_object_mut().expect("an object").remove("is_causal");
        value.as_object_mut().expect("an object").remove("sliding_window");
        value[OWN] = json!({
            "use_swa": true, "swa_window_size": 9, "target_layer_ids": [1, 3], "mask_token_id": 39,
            "block_size": 4, "sample_from_anchor": false
        });
    });
    let config = config.expect("valid");
    assert_eq!(config.layers, [LayerKind::Sliding; 2]);
    assert_eq!((config.sliding_window, config.is_causal), (Some(9), Some(false)));
}

#[test]
fn that_switch_is_nothing_beside_a_layer_that_is_listed_with_a_window() {
    for kinds in [[SLIDING, FULL], [SLIDING, SLIDING]] {
        let config = with(|value| {
            value["layer_types"] = json!(kinds);
            value.as_object_mut().expect("an object").remove("is_causal");
            value[OWN].as_object_mut().expect("an object").remove("causal");
            value[OWN]["use_swa"] = true.into();
        });
        let config = config.expect("valid");
        let wanted =
            kinds.map(|kind| if kind == FULL { LayerKind::Full } else { LayerKind::Sliding });
        assert_eq!((config.layers.as_slice(), config.is_causal), (&wanted[..], None));
    }
}

#[test]
fn two_spellings_that_differ_are_refused() {
    assert!(with(|_| ()).is_ok());
    assert_refused(
        with(|value| value[OWN]["causal"] = true.into()),
        &["`is_causal` = false, and `causal` = true"],
    );
    let window = |size: usize| with(|value| value[OWN]["swa_window_size"] = size.into());
    assert!(window(7).is_ok());
    // A window that no layer has, or that is switched off, is no contradiction.
    let full = with(|value| {
        value["layer_types"] = json!([FULL, FULL]);
        value[OWN]["swa_window_size"] = 8.into();
    });
    assert!(full.is_ok());
    let off = with(|value| {
        value["use_sliding_window"] = false.into();
        value.as_object_mut().expect("an object").remove("layer_types");
        value[OWN]["use_swa"] = true.into();
        value[OWN]["swa_window_size"] = 8.into();
    });
    assert_eq!(off.expect("valid").sliding_window, Some(8));
    assert_refused(window(8), &["`sliding_window` = 7, and `swa_window_size` = 8"]);
}

#[test]
fn rotations_of_other_kinds_are_refused() {
    for key in ["is_neox_style", "rope_is_neox_style"] {
        assert!(with(|value| value[key] = true.into()).is_ok());
        assert_refused(with(|value| value[key] = false.into()), &[key]);
    }
    // A map by the kinds of layers is read where all turn alike.
    let rope = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
    let by_kind = |full: f64, sliding: f64, listed: [&str; 2]| {
        with(|value| {
            value["layer_types"] = json!(listed);
            value.as_object_mut().expect("an object").remove("rope_theta");
            value["rope_parameters"] =
                json!({"full_attention": rope(full), "sliding_attention": rope(sliding)});
        })
    };
    let same = by_kind(5e5, 5e5, [FULL, SLIDING]).expect("valid").rope;
    let no_full_layer = by_kind(5e5, 1e6, [SLIDING; 2]).expect("valid").rope;
    assert_eq!([same, no_full_layer], [RopeParameters::plain(5e5), RopeParameters::plain(1e6)]);
    assert_refused(by_kind(5e5, 1e6, [FULL, SLIDING]), &["differ between kinds of layers"]);
    for theta in [1e-60, 1e300] {
        let said = with(|value| value["rope_parameters"]["rope_theta"] = theta.into());
        assert!(said.expect_err("refused").to_string().contains("rope_theta"));
    }
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
    value["draft_vocab_size"] = 20.into();
    let config = BlockConfig::from_json(&value, Some(6)).expect("valid");
    assert!(config.has_own_head() && config.draft_vocab_size == 20);
    value["sliding_window_non_causal"] = true.into();
    let config = read(&value).expect("valid");
    assert!(!config.is_causal_in(LayerKind::Sliding));
    assert_eq!(config.num_target_layers, 5, "one above the last that is read");
    // Without the switch each class has a default of its own.
    for (kind, is_causal) in [("dflash", None), ("dspark", None), ("dflash2", Some(false))] {
        let mut value = nested(kind);
        value.as_object_mut().expect("keys").remove("sliding_window_non_causal");
        assert_eq!(read(&value).expect("valid").is_causal, is_causal);
    }
}

#[test]
fn heads_of_nested_folders_are_those_of_their_type() {
    let chain = |value: &Value| read(value).expect("valid").chain;
    let mut value = nested("dspark");
    let full = ChainSizes { rank: 256, kind: ChainKind::Vanilla, confidence: Some(true) };
    assert_eq!(chain(&value), Some(full), "what the class has where nothing is said");
    value["markov_rank"] = 5.into();
    value["markov_head_type"] = "gated".into();
    value["enable_confidence_head"] = false.into();
    value.as_object_mut().expect("keys").remove("sample_from_anchor");
    let gated = ChainSizes { rank: 5, kind: ChainKind::Gated, confidence: None };
    assert_eq!(chain(&value), Some(gated));
    let mut unknown = value.clone();
    unknown["markov_head_type"] = "wide".into();
    assert_refused(read(&unknown), &["`markov_head_type` = \"wide\" is unknown"]);
    // The older opposite: slot 0 holds a token and proposes none.
    value[BONUS_ANCHOR] = true.into();
    assert_refused(read(&value), &["`sample_from_anchor` = false"]);
    let mut value = nested("dflash");
    assert_eq!(chain(&value), None);
    value["sample_from_anchor"] = true.into();
    let none = ChainSizes { rank: 0, kind: ChainKind::Vanilla, confidence: None };
    assert_eq!(chain(&value), Some(none), "a chain without a head");
    let config = read(&nested("dflash2")).expect("valid");
    assert_eq!(config.selector, Some(SelectorSizes { rank: 256, top_k: 16 }));
    assert_eq!(config.convolution, Some(ConvolutionSizes { kernel_size: 2, group_size: 16 }));
}

#[test]
fn what_nested_folders_may_hold_beside_is_refused() {
    for (key, value, part) in [
        (
            "aux_hidden_state_layer_ids",
            json!([0, 4]),
            "are not layers, counted from 1: layer -1 is the output",
        ),
        ("aux_hidden_state_layer_ids", json!([2.5, 4]), "= [2.5,4] are not layers, counted from 1"),
        ("aux_hidden_state_layer_ids", Value::Null, "`aux_hidden_state_layer_ids` is missing"),
        ("aux_hidden_state_layer_ids", json!([u64::MAX]), "target_layer_ids"),
        ("draft_vocab_size", 50.into(), "`draft_vocab_size` = 50"),
        ("target_hidden_size", 64.into(), "`target_hidden_size` = 64 beside 32"),
        ("input_embedding_scale", (-0.2).into(), "`input_embedding_scale` = -0.2"),
        ("input_embedding_scale", "wide".into(), "`input_embedding_scale` = NaN"),
    ] {
        let mut config = nested("dflash");
        config[key] = value;
        assert_refused(BlockConfig::from_json(&config, Some(6)), &[part]);
    }
    let mut value = nested("dflash2");
    value["draft_vocab_size"] = 20.into();
    assert_refused(read(&value), &["`draft_vocab_size` stands beside a selector"]);
    let mut value = nested("dflash2");
    value["sample_from_anchor"] = true.into();
    assert_refused(read(&value), &["beside a selector"]);
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
    assert_refused(
        read(&value),
        &[
            "`hidden_size` = \"wide\"",
            "`layer_types`",
            "`block_size` = 8, and 4",
            "`output_multiplier` = -0.2",
            "`target_layer_ids` = [1,\"two\"]",
            "`linear` needs",
        ],
    );
}

#[test]
fn a_list_that_names_the_embeddings_is_refused_with_the_reason() {
    for (ids, is_told) in [(json!([-1, 3]), true), (json!([1, "two"]), false)] {
        let mut value = toy().to_json(NAME);
        value[OWN]["target_layer_ids"] = ids;
        let text = read(&value).expect_err("refused").to_string();
        assert!(text.contains("is not a list of layers"), "{text}");
        assert_eq!(text.contains("layer -1 is the output of the embeddings"), is_told, "{text}");
    }
}

#[test]
fn absurd_sizes_are_refused_before_anything_is_made_of_them() {
    for key in ["hidden_size", "num_hidden_layers", "num_target_layers", "vocab_size"] {
        for size in [1_u64 << 23, 1 << 32, u64::MAX - 1] {
            let mut value = toy().to_json(NAME);
            value.as_object_mut().expect("an object").remove("layer_types");
            value[key] = json!(size);
            assert!(read(&value).is_err(), "{key} = {size}");
        }
    }
}
