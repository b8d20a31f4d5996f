use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Device, Tensor};
use longdraft_kernels::rope::RopeScaling;

use super::super::tests::toy;
use super::super::weights::file_specs;
use super::*;
use crate::draft::block::BlockDraft;
use crate::draft::files::{SavedDraft, open_weights};
use crate::draft::{Draft, DraftKind};
use crate::ids::LayerId;
use crate::test_support::{assert_refused, values};
use crate::weights::gguf::write::save;

type Keys = Vec<(String, Value)>;

/// Keys of [`toy`] without biases.
fn keys() -> Keys {
    let count = |size: u32| Value::U32(size);
    let own = [
        ("block_count", count(2)),
        ("context_length", count(64)),
        ("embedding_length", count(32)),
        ("feed_forward_length", count(48)),
        ("attention.head_count", count(4)),
        ("attention.head_count_kv", count(2)),
        ("attention.key_length", count(8)),
        ("attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
        ("rope.freq_base", Value::F32(1e4)),
        ("vocab_size", count(40)),
        ("block_size", count(4)),
        ("target_layers", Value::Array(vec![Value::I32(2), Value::I32(4)])),
    ];
    let mut all: Keys = own.map(|(key, value)| (format!("{ARCHITECTURE}.{key}"), value)).into();
    all.push(("general.architecture".into(), Value::String(ARCHITECTURE.into())));
    all.push((MASK_TOKEN.into(), count(39)));
    all
}

fn set(keys: &mut Keys, key: &str, value: Value) {
    keys.push((format!("{ARCHITECTURE}.{key}"), value));
}

/// Writes a network's tensors, each value its own, under `keys`.
fn write(path: &Path, config: &BlockConfig, keys: &Keys) -> Vec<(String, Tensor)> {
    let tensors: Vec<(String, Tensor)> = (1..)
        .zip(file_specs(config))
        .map(|(number, spec)| {
            let count: usize = spec.shape.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (i % 97) as f32 / number as f32).collect();
            let tensor = Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu);
            (spec.name, tensor.expect("a tensor"))
        })
        .collect();
    // Every other token, by its id.
    let ids: Vec<i64> = (0..config.draft_vocab_size as i64).map(|i| 2 * i).collect();
    let ids = Tensor::new(ids, &Device::Cpu).expect("a map");
    let map = config.has_own_head().then(|| (MAP[0].to_owned(), ids));
    let stored: Vec<_> = tensors
        .iter()
        .chain(&map)
        .map(|(name, tensor)| (stored_name(name).expect("a name"), tensor.clone().into()))
        .collect();
    save(path, keys, &stored).expect("written");
    tensors
}

fn plain() -> BlockConfig {
    BlockConfig {
        attention_bias: false,
        is_causal: Some(false),
        initializer_range: 0.02,
        num_target_layers: 5,
        ..toy()
    }
}

#[test]
fn files_of_every_kind_are_opened_with_their_sizes_and_values() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("draft.gguf");
    let windows = BlockConfig {
        layers: vec![LayerKind::Full, LayerKind::Sliding],
        sliding_window: Some(9),
        ..plain()
    };
    let mut of_windows = keys();
    set(&mut of_windows, "attention.sliding_window", Value::U32(9));
    let pattern = Value::Array(vec![Value::Bool(false), Value::Bool(true)]);
    set(&mut of_windows, "attention.sliding_window_pattern", pattern);
    let wide = BlockConfig {
        convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
        selector: Some(SelectorSizes { rank: 6, top_k: 5 }),
        is_causal: Some(true),
        ..plain()
    };
    let mut of_wide = keys();
    for (key, size) in [
        ("conv_kernel_size", 2),
        ("conv_group_size", 8),
        ("selector_rank", 6),
        ("selector_top_k", 5),
    ] {
        set(&mut of_wide, key, Value::U32(size));
    }
    set(&mut of_wide, "attention.causal", Value::Bool(true));
    set(&mut of_wide, "sample_from_anchor", Value::Bool(false));
    let chain = |confidence| {
        let sizes = ChainSizes { rank: 6, kind: ChainKind::Vanilla, confidence };
        BlockConfig { chain: Some(sizes), ..plain() }
    };
    // Absent, the switch is true where there is a chain, and nothing otherwise.
    for (name, config, keys) in [
        ("dflash", plain(), keys()),
        ("dflash", windows, of_windows),
        ("dflash2", wide, of_wide),
        ("dspark", chain(Some(true)), keys()),
        ("dspark", chain(None), keys()),
        ("dflash", BlockConfig { draft_vocab_size: 20, ..plain() }, keys()),
        ("dspark", BlockConfig { draft_vocab_size: 20, ..chain(None) }, keys()),
    ] {
        let tensors = write(&path, &config, &keys);
        assert_eq!(DraftKind::at(&path).expect("a kind").name, name);
        assert_eq!(DraftKind::at(folder.path()).expect("a kind").name, name);
        let source = GgufBlockSource::open(&path).expect("opened");
        assert_eq!(source.config(None), Ok(config.clone()), "{name}");
        let table = Tensor::zeros((40, 32), DType::F32, &Device::Cpu).expect("a table");
        let source = open_weights(&path).expect("opened");
        let draft = BlockDraft::from_source(source.as_ref(), &config, &table).expect("a draft");
        let mut all = draft.weights().named().expect("tensors");
        all.extend(draft.fixed_tensors().expect("a map").into_iter().take(1));
        for ((a, wanted), (b, found)) in tensors.iter().zip(all) {
            assert_eq!((a, values(wanted)), (&b, values(&found)));
        }
        let kept = draft.vocabulary().map(|map| map.kept()[19].0);
        assert_eq!(kept, config.has_own_head().then_some(38));
        // A file is a draft to start from: another network is told.
        let saved = SavedDraft::at(&path);
        BlockDraft::check_file(&saved, &config).expect("the same network");
        let other = BlockConfig { target_layers: vec![LayerId(0), LayerId(3)], ..config };
        assert!(BlockDraft::check_file(&saved, &other).is_err());
    }
}

#[test]
fn numbers_that_bend_logits_are_read_and_0_is_none() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("draft.gguf");
    let read = |scale: f32, softcap: f32| {
        let mut keys = keys();
        set(&mut keys, "logit_scale", Value::F32(scale));
        set(&mut keys, "final_logit_softcapping", Value::F32(softcap));
        write(&path, &plain(), &keys);
        GgufBlockSource::open(&path).expect("opened").config(None).expect("valid").bend
    };
    assert_eq!(read(0.25, 20.0), Bend { divisor: 4.0, softcap: Some(20.0) });
    assert_eq!(read(0.0, 0.0), Bend::default());
}

/// As in target files.
#[test]
fn a_factor_on_scores_takes_the_place_of_yarn_s_or_multiplies_it() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("draft.gguf");
    let usual = 0.1 * 4.0_f64.ln() + 1.0;
    let cases: [(&[&str], f64); 3] = [
        (&["rope.scaling.attn_factor"], 1.5 * usual),
        (&["rope.scaling.yarn_attn_factor"], 1.5),
        (&["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"], 2.25),
    ];
    for (factors, wanted) in cases {
        let mut keys = keys();
        set(&mut keys, "rope.scaling.type", Value::String("yarn".into()));
        set(&mut keys, "rope.scaling.factor", Value::F32(4.0));
        factors.iter().for_each(|key| set(&mut keys, key, Value::F32(1.5)));
        write(&path, &plain(), &keys);
        let source = GgufBlockSource::open(&path).expect("opened");
        let scaling = source.config(None).expect("valid").rope.scaling;
        let RopeScaling::Yarn { attention_factor, .. } = scaling else { panic!("{scaling:?}") };
        assert!((attention_factor - wanted).abs() < 1e-9, "{factors:?}: {attention_factor}");
    }
}

/// As in target files.
#[test]
fn a_factor_without_a_rule_is_linear() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("draft.gguf");
    let mut keys = keys();
    set(&mut keys, "rope.scaling.factor", Value::F32(4.0));
    write(&path, &plain(), &keys);
    let config = GgufBlockSource::open(&path).expect("opened").config(None).expect("valid");
    assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 4.0 });
}

#[test]
fn the_switch_alone_makes_a_chain_without_a_head() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("draft.gguf");
    let mut keys = keys();
    set(&mut keys, "sample_from_anchor", Value::Bool(true));
    write(&path, &plain(), &keys);
    let config = GgufBlockSource::open(&path).expect("opened").config(None).expect("valid");
    assert_eq!(config.chain.map(|chain| chain.rank), Some(0));
    assert_eq!((config.proposals(), plain().proposals()), (4, 3));
}

#[test]
fn what_a_file_leaves_out_or_says_wrongly_is_named() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("draft.gguf");
    let read = |keys: &Keys| {
        write(&path, &plain(), keys);
        GgufBlockSource::open(&path).expect("opened").config(None)
    };
    for (key, part) in [
        ("embedding_length", "`dflash.embedding_length` is missing"),
        ("block_size", "`dflash.block_size` is missing"),
        ("target_layers", "`dflash.target_layers` = None"),
    ] {
        let mut keys = keys();
        keys.retain(|(name, _)| *name != format!("{ARCHITECTURE}.{key}"));
        assert_refused(read(&keys), &[part]);
    }
    for (key, value, part) in [
        (
            "target_layers",
            Value::Array(vec![Value::I32(0)]),
            "counted from 1: layer -1 is the output",
        ),
        ("attention.sliding_window", Value::U32(9), "`dflash.attention.sliding_window_pattern`"),
        ("logit_scale", Value::F32(-0.2), "`dflash.logit_scale`"),
        ("final_logit_softcapping", Value::F32(f32::NAN), "softcapping`"),
        ("conv_kernel_size", Value::U32(2), "`dflash.conv_group_size` is missing"),
        ("block_count", Value::U32(u32::MAX), "num_hidden_layers"),
        (
            "rope.scaling.type",
            Value::String("longrope".into()),
            "`longrope` (known: none, linear, yarn)",
        ),
        // Values of another kind do not count as left out.
        ("attention.causal", Value::U32(1), "`dflash.attention.causal` is not a flag"),
        ("sample_from_anchor", Value::U32(1), "`dflash.sample_from_anchor` is not a flag"),
        ("rope.scaling.type", Value::U32(1), "`dflash.rope.scaling.type` is not a text"),
        ("rope.freq_base", Value::Bool(true), "`dflash.rope.freq_base` is not a number"),
        ("attention.layer_norm_rms_epsilon", Value::Bool(true), "rms_epsilon` is not a number"),
        ("attention.sliding_window", Value::Bool(true), "sliding_window` is not a number"),
        ("attention.head_count_kv", Value::Bool(true), "head_count_kv` is missing or not a number"),
        ("selector_rank", Value::Bool(true), "`dflash.selector_rank` is missing or not a number"),
        ("logit_scale", Value::Bool(true), "`dflash.logit_scale` is not a number"),
    ] {
        let mut keys = keys();
        keys.retain(|(name, _)| *name != format!("{ARCHITECTURE}.{key}"));
        set(&mut keys, key, value);
        assert_refused(read(&keys), &[part]);
    }
    let mut keys = keys();
    keys.retain(|(name, _)| name != MASK_TOKEN);
    assert!(read(&keys).expect_err("no mask").to_string().contains(MASK_TOKEN));
}

#[test]
fn every_tensor_has_a_name_in_files() {
    let chain = ChainSizes { rank: 4, kind: ChainKind::Vanilla, confidence: Some(true) };
    let extended = BlockConfig {
        convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
        selector: Some(SelectorSizes { rank: 4, top_k: 4 }),
        ..toy()
    };
    for config in [extended, BlockConfig { chain: Some(chain), ..toy() }] {
        for spec in file_specs(&config) {
            let stored = stored_name(&spec.name).expect("a name");
            assert_eq!(
                BlockNames::published_name(&stored).as_deref(),
                Some(spec.name.as_str()),
                "{stored}"
            );
        }
    }
    for (published, stored) in [
        ("hidden_norm.weight", "enc.output_norm.weight"),
        ("norm.weight", "output_norm.weight"),
        ("layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight"),
        ("layers.0.mlp_conv.base_kernel", "blk.0.ffn_conv_base"),
        ("candidate_selector.successor_codebook", "selector_successor.weight"),
        ("confidence_head.proj.bias", "conf_proj.bias"),
    ] {
        assert_eq!(stored_name(published).as_deref(), Some(stored));
    }
    let gated = ChainSizes { rank: 4, kind: ChainKind::Gated, confidence: None };
    let config = BlockConfig { chain: Some(gated), ..toy() };
    let nameless = file_specs(&config).into_iter().filter(|s| stored_name(&s.name).is_none());
    assert_eq!(nameless.count(), 2, "the gate has no place in files");
}
