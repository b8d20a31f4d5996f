//! Headers key by key: defaults of the format's reader, and what is refused.

use std::io::Cursor;

use candle_core::quantized::gguf_file::{Value, write};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use longdraft_kernels::rope::RopeScaling;

use super::super::RopeParameters;
use super::*;
use crate::test_support::assert_refused;

/// The configuration of a header of four layers with some keys of its architecture.
fn config(name: &str, more: &[(&str, Value)]) -> Result<TargetConfig, Problems> {
    config_with(name, more, &[])
}

/// The same of a file that holds some vectors.
fn config_with(
    name: &str,
    more: &[(&str, Value)],
    vectors: &[&str],
) -> Result<TargetConfig, Problems> {
    let vector = Tensor::zeros(8, DType::F32, &Device::Cpu).expect("zeros");
    let vector = QTensor::quantize(&vector, GgmlDType::F32).expect("a tensor");
    let table = Tensor::zeros((7, 48), DType::F32, &Device::Cpu).expect("zeros");
    let table = QTensor::quantize(&table, GgmlDType::F32).expect("a tensor");
    let sizes = [
        ("embedding_length", 48),
        ("feed_forward_length", 72),
        ("block_count", 4),
        ("context_length", 512),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
    ];
    let sizes = sizes.map(|(key, size)| (key, Value::U32(size)));
    let given = |key: &str| more.iter().any(|(other, _)| *other == key);
    let keys = sizes.iter().filter(|(key, _)| !given(key)).chain(more);
    let full = |key: &str| {
        let is_of_all = key.starts_with("tokenizer.");
        if is_of_all { key.to_owned() } else { format!("{name}.{key}") }
    };
    let keys: Vec<_> = keys.map(|(key, value)| (full(key), value)).collect();
    let architecture = Value::String(name.into());
    let mut metadata = vec![("general.architecture", &architecture)];
    metadata.extend(keys.iter().map(|(key, value)| (key.as_str(), *value)));
    let mut tensors = vec![("token_embd.weight", &table)];
    tensors.extend(vectors.iter().map(|name| (*name, &vector)));
    let mut file = Cursor::new(Vec::new());
    write(&mut file, &metadata, &tensors).expect("GGUF");
    read(&Header::read(&file.into_inner()).expect("a header"))
}

fn windows(config: &TargetConfig) -> [Option<usize>; 4] {
    [0, 1, 2, 3].map(|layer| config.window_of(layer))
}

#[test]
fn gemmas_are_read_with_the_defaults_of_their_reader() {
    let older = config("gemma2", &[]).expect("valid");
    assert_eq!(windows(&older), [Some(4096), None, Some(4096), None]);
    let parts = &older.parts;
    assert_eq!((parts.attention_softcap, parts.logits_softcap), (Some(50.0), Some(30.0)));
    assert!(!parts.norms_less_one && parts.query_scalar.is_none());
    let window = ("attention.sliding_window", Value::U32(9));
    let pattern = ("attention.sliding_window_pattern", Value::U32(2));
    let newer = config("gemma3", &[window.clone(), pattern]).expect("valid");
    assert_eq!(windows(&newer), [Some(9), None, Some(9), None]);
    assert_eq!(newer.parts.sliding_rope, Some(RopeParameters::plain(1e4)));
    assert_eq!(newer.parts.logits_softcap, None);
    let none = ("final_logit_softcapping", Value::F32(0.0));
    let older = config("gemma2", &[none]).expect("valid");
    assert_eq!(older.parts.logits_softcap, None);
    let flags = [false, true, true, true].map(Value::Bool).to_vec();
    let flags = ("attention.sliding_window_pattern", Value::Array(flags));
    let base = ("rope.freq_base_swa", Value::F32(5e3));
    let newer = config("gemma3", &[window, flags, base]).expect("valid");
    assert_eq!(windows(&newer), [None, Some(9), Some(9), Some(9)]);
    assert_eq!(newer.parts.sliding_rope, Some(RopeParameters::plain(5e3)));
}

/// The windows of a header with some keys.
fn windows_of(name: &str, more: &[(&str, Value)]) -> [Option<usize>; 4] {
    windows(&config(name, more).expect("valid"))
}

#[test]
fn windows_follow_a_list_or_a_period() {
    const KEY: &str = "attention.sliding_window_pattern";
    let window = ("attention.sliding_window", Value::U32(9));
    let with = |pattern| [window.clone(), (KEY, pattern)];
    let own = Some(9);
    assert_eq!(windows_of("olmo2", std::slice::from_ref(&window)), [own, own, own, None]);
    assert_eq!(windows_of("olmo2", &with(Value::U32(2))), [own, None, own, None]);
    assert_eq!(windows_of("gemma2", &with(Value::U32(3))), [own, own, None, own]);
    let listed = [false, true, true, false].map(Value::Bool).to_vec();
    assert_eq!(windows_of("gemma2", &with(Value::Array(listed.clone()))), [None, own, own, None]);
    let width = Value::Array([24, 32, 24, 24].map(Value::I32).to_vec());
    let mut more = with(Value::Array(listed)).to_vec();
    more.extend([
        ("expert_count", Value::U32(4)),
        ("expert_used_count", Value::U32(2)),
        ("expert_feed_forward_length", width),
    ]);
    assert_eq!(windows_of("gpt-oss", &more), [None, own, own, None]);
    let experts = config("gpt-oss", &more).expect("valid").experts.expect("experts");
    assert_eq!(experts.moe_intermediate_size, 32);
    for name in ["gemma2", "gemma3", "olmo2"] {
        let numbers = [0, 1, 1, 0].map(Value::U32).to_vec();
        assert_eq!(windows_of(name, &with(Value::Array(numbers))), [None, own, own, None]);
        let texts = Value::Array(vec![Value::String("full".into()); 4]);
        let text = config(name, &with(texts)).expect_err("invalid").to_string();
        assert!(text.contains(&format!("`{KEY}` is neither")), "{name}: {text}");
    }
}

#[test]
fn layers_with_windows_may_have_a_base_of_their_own() {
    let mut more =
        vec![("attention.sliding_window", Value::U32(9)), ("rope.freq_base", Value::F32(5e5))];
    let base = |more: &[(&str, Value)]| config("olmo2", more).expect("valid").parts.sliding_rope;
    assert_eq!(base(&more), Some(RopeParameters::plain(5e5)));
    more.push(("rope.freq_base_swa", Value::F32(1e4)));
    assert_eq!(base(&more), Some(RopeParameters::plain(1e4)));
    more.extend([("expert_count", Value::U32(4)), ("expert_used_count", Value::U32(2))]);
    more.push(("rope.scaling.factor", Value::F32(2.0)));
    for name in ["gemma2", "gpt-oss"] {
        let read = config(name, &more).expect("valid");
        let own = RopeParameters { theta: 1e4, ..read.rope.clone() };
        assert_eq!((read.rope.theta, read.parts.sliding_rope), (5e5, Some(own)), "{name}");
        let same = [("rope.freq_base_swa", Value::F32(5e5)), ("rope.freq_base", Value::F32(5e5))];
        let read = config(name, &[&more[3..5], &same].concat()).expect("valid");
        assert_eq!(read.parts.sliding_rope, None, "{name}");
    }
}

#[test]
fn a_factor_on_cos_and_sin_is_refused_where_nothing_reads_it() {
    let text = |rule: &str| Value::String(rule.into());
    let with = |name: &str, rule: &str, factor: f32| {
        let factor = ("rope.scaling.attn_factor", Value::F32(factor));
        config(name, &[factor, ("rope.scaling.type", text(rule))])
    };
    for name in ["llama", "qwen3", "phi3", "gemma3"] {
        for rule in ["none", "linear"] {
            assert_refused(with(name, rule, 0.5), &["rope.scaling.attn_factor` = 0.5"]);
            assert!(with(name, rule, 1.0).is_ok(), "{name} {rule}");
        }
    }
    assert!(with("llama", "yarn", 0.5).is_ok());
}

#[test]
fn glms_that_see_have_rows_of_which_halves_turn() {
    let turns = |sections: [i32; 4]| {
        let sections = Value::Array(sections.map(Value::I32).to_vec());
        let more = [("rope.dimension_count", Value::U32(8)), ("rope.dimension_sections", sections)];
        config("glm4", &more).expect("valid").parts.rotary.neighbours
    };
    assert!(!turns([2, 1, 1, 0]) && turns([0; 4]));
    assert!(config("glm4", &[]).expect("valid").parts.rotary.neighbours);
}

#[test]
fn a_factor_on_scores_takes_the_place_of_yarn_s_or_multiplies_it() {
    let plain = 0.1 * 4.0_f64.ln() + 1.0;
    let cases: [(&[&str], f64); 4] = [
        (&[], plain),
        (&["rope.scaling.yarn_attn_factor"], 1.5),
        (&["rope.scaling.attn_factor"], 1.5 * plain),
        (&["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"], 2.25),
    ];
    for (keys, wanted) in cases {
        let mut more = vec![
            ("rope.scaling.type", Value::String("yarn".into())),
            ("rope.scaling.factor", Value::F32(4.0)),
        ];
        more.extend(keys.iter().map(|key| (*key, Value::F32(1.5))));
        let scaling = config("llama", &more).expect("valid").rope.scaling;
        let RopeScaling::Yarn { attention_factor, .. } = scaling else { panic!("{scaling:?}") };
        assert!((attention_factor - wanted).abs() < 1e-9, "{keys:?}: {attention_factor}");
    }
}

#[test]
fn a_factor_without_a_rule_is_linear() {
    let scaling = |more: &[(&str, Value)]| config("qwen2", more).expect("valid").rope.scaling;
    let rule = |name: &str| ("rope.scaling.type", Value::String(name.into()));
    let (newer, older) = ("rope.scaling.factor", "rope.scale_linear");
    for key in [newer, older] {
        let factor = (key, Value::F32(4.0));
        assert_eq!(scaling(std::slice::from_ref(&factor)), RopeScaling::Linear { factor: 4.0 });
        assert_eq!(scaling(&[factor.clone(), rule("linear")]), RopeScaling::Linear { factor: 4.0 });
        assert_eq!(scaling(&[factor, rule("none")]), RopeScaling::None);
        for one in [0.0, 1.0] {
            assert_eq!(scaling(&[(key, Value::F32(one))]), RopeScaling::None);
        }
    }
    assert_eq!(scaling(&[rule("linear")]), RopeScaling::None);
    let both = [(newer, Value::F32(2.0)), (older, Value::F32(4.0))];
    assert_eq!(scaling(&both), RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn a_part_of_a_head_that_turns_is_read_or_refused() {
    let turning =
        |name: &str, count: u32| config(name, &[("rope.dimension_count", Value::U32(count))]);
    for name in ["llama", "qwen3", "gemma2", "olmo2"] {
        assert!(turning(name, 16).is_ok(), "{name}");
        assert_refused(turning(name, 8), &[&format!("`{name}.rope.dimension_count` = 8")]);
    }
    assert_eq!(turning("phi3", 8).expect("valid").parts.rotary.dimensions, Some(8));
}

#[test]
fn a_window_of_0_or_none_is_none() {
    let key = "attention.sliding_window";
    let none = (key, Value::U32(0));
    for more in [&[][..], std::slice::from_ref(&none)] {
        assert_eq!(windows_of("gemma3", more), [None; 4]);
        assert_eq!(windows_of("lfm2", more), [None; 4]);
    }
    let heads = Value::Array([0, 2, 0, 2].map(Value::I32).to_vec());
    let heads = ("attention.head_count_kv", heads);
    let own = Some(9);
    assert_eq!(windows_of("lfm2", &[heads, (key, Value::U32(9))]), [None, own, None, own]);
    let experts = [("expert_count", Value::U32(4)), ("expert_used_count", Value::U32(1))];
    let chunked = config("llama4", &experts).expect("valid");
    let still = |config: &TargetConfig| [0, 1, 2, 3].map(|layer| config.parts.is_still(layer));
    assert_eq!(windows(&chunked), [Some(8192), Some(8192), Some(8192), None]);
    assert_eq!(still(&chunked), [false, false, false, true]);
    assert!(chunked.parts.query_growth.is_some());
    let full = config("llama4", &[&experts[..], &[none]].concat()).expect("valid");
    assert_eq!((windows(&full), still(&full)), ([None; 4], [false; 4]));
    assert!(full.parts.query_growth.is_none());
}

#[test]
fn a_file_whose_tokens_see_later_ones_is_refused() {
    let causal = |flag| config("qwen3", &[("attention.causal", Value::Bool(flag))]);
    assert!(causal(true).is_ok());
    assert_refused(causal(false), &["`qwen3.attention.causal` = false"]);
}

#[test]
fn ends_are_those_of_keys_and_of_names() {
    let tokens = ["<eos>", "a", "<end_of_turn>", "b", "c"];
    let tokens = tokens.map(|token| Value::String(token.into())).to_vec();
    let more = [
        ("tokenizer.ggml.tokens", Value::Array(tokens)),
        ("tokenizer.ggml.eos_token_id", Value::U32(0)),
        ("tokenizer.ggml.eom_token_id", Value::U32(3)),
    ];
    let config = config("llama", &more).expect("valid");
    assert_eq!(config.eos_token_ids, [0]);
    assert_eq!(config.end_token_ids(), [0, 2, 3]);
}

#[test]
fn a_27b_has_the_query_scalar_that_its_files_have_no_key_for() {
    for (name, layers) in [("gemma2", 46), ("gemma3", 62)] {
        let window = ("attention.sliding_window", Value::U32(9));
        let more = [("block_count", Value::U32(layers)), window];
        let config = config(name, &more).expect("valid");
        assert_eq!(config.parts.query_scalar, Some(12.0), "{name}");
    }
}

#[test]
fn factors_by_length_are_read_where_the_file_holds_them() {
    let factors = families::FACTORS_BY_LENGTH;
    let named = ("rope.scaling.type", Value::String("longrope".into()));
    let named = std::slice::from_ref(&named);
    let read = config_with("phi3", named, &factors).expect("valid");
    assert_eq!(read.rope, RopeParameters::plain(10_000.0));
    assert_eq!(read, config_with("phi3", &[], &factors).expect("valid"));
    assert!(read.parts.rotary.by_length.is_some());
    for (name, held) in [("phi3", &factors[..1]), ("phi3", &[]), ("llama", &factors)] {
        let text = config_with(name, named, held).expect_err("invalid").to_string();
        assert!(text.contains("unknown rope scaling `longrope`"), "{name} {held:?}: {text}");
    }
}

#[test]
fn senseless_keys_are_named() {
    let window = ("attention.sliding_window", Value::U32(9));
    for (key, value) in [
        ("attention.sliding_window", Value::F32(f32::NAN)),
        ("attention.sliding_window", Value::F32(-4.0)),
        ("attention.sliding_window_pattern", Value::U32(0)),
        ("attention.sliding_window_pattern", Value::Array(vec![Value::Bool(true)])),
        ("final_logit_softcapping", Value::F32(f32::NAN)),
        ("final_logit_softcapping", Value::F32(-1.0)),
        ("rope.freq_base_swa", Value::F32(f32::INFINITY)),
    ] {
        let mut more = vec![(key, value)];
        if key != window.0 {
            more.push(window.clone());
        }
        assert_refused(config("gemma3", &more), &[key]);
    }
    let no_window = ("attention.sliding_window", Value::U32(0));
    assert_refused(config("gemma2", &[no_window]), &["attention.sliding_window"]);
    let grows = ("attention.temperature_scale", Value::F32(0.1));
    assert_refused(config("mistral3", std::slice::from_ref(&grows)), &["original_context_length"]);
    let original = ("rope.scaling.original_context_length", Value::U32(48));
    let config = config("mistral3", &[grows, original]).expect("valid");
    assert!(config.parts.query_growth.is_some());
}

#[test]
fn values_of_another_kind_are_named_and_not_taken_for_left_out_ones() {
    let list = || Value::Array(vec![Value::F32(1.0)]);
    for (key, value, wrong) in [
        ("rope.freq_base", list(), "is not a number"),
        ("rope.freq_base", Value::String("1e6".into()), "is not a number"),
        ("attention.key_length", Value::Bool(true), "is not a number"),
        ("attention.layer_norm_rms_epsilon", list(), "is not a number"),
        ("rope.scaling.factor", list(), "is not a number"),
        ("rope.scaling.type", Value::U32(1), "is not a text"),
        ("attention.causal", Value::U32(0), "is not a flag"),
    ] {
        assert_refused(config("llama", &[(key, value)]), &[&format!("`llama.{key}` {wrong}")]);
    }
    let listed = Value::Array(vec![Value::U32(2); 4]);
    assert!(config("llama", &[("attention.head_count_kv", listed)]).is_ok());
}

#[test]
fn a_file_of_more_blocks_than_its_header_counts_is_refused() {
    let read = |tensor: &str| config_with("llama", &[], &[tensor]);
    assert!(read("blk.3.attn_norm.weight").is_ok());
    let told = "`llama.block_count` = 4, but tensors of `blk.4` are there";
    assert_refused(read("blk.4.attn_norm.weight"), &[told]);
}

#[test]
fn a_chatglm_is_a_glm_of_which_half_of_each_head_turns() {
    let glm = config("chatglm", &[("rope.dimension_count", Value::U32(8))]).expect("valid");
    assert_eq!(glm.architecture, Architecture::Glm);
    assert_eq!((glm.parts.turning(16), glm.parts.rotary.neighbours), (8, true));
    assert_eq!(glm.parts.norms, crate::config::NormPlaces::Before);
}
