//! The network against itself and against reference cases.

mod slots;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::bend::Bend;
use longdraft_kernels::graph::Backward;

use super::*;
use crate::config::{RopeParameters, TargetConfig};
use crate::draft::files::SavedDraft;
use crate::draft::{Draft, VocabularyMap};
use crate::ids::{LayerId, TargetTokenId};
use crate::target_model::{KeyValues, Layers, PackedSequence, Tap, Taps, Target, TargetOptions};
use crate::test_support::{assert_refused, values};
use crate::weights::WeightSource;
use crate::weights::memory::MemorySource;

/// A network of two full layers.
pub(super) fn toy() -> BlockConfig {
    BlockConfig {
        hidden_size: 32,
        intermediate_size: 48,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        vocab_size: 40,
        draft_vocab_size: 40,
        rms_norm_eps: 1e-6,
        rope: RopeParameters::plain(1e4),
        max_position_embeddings: 64,
        attention_bias: true,
        layers: vec![LayerKind::Full; 2],
        sliding_window: None,
        is_causal: None,
        block_size: 4,
        mask_token_id: 39,
        target_layers: vec![LayerId(1), LayerId(3)],
        num_target_layers: 6,
        convolution: None,
        selector: None,
        chain: None,
        bend: Bend::default(),
        embedding_scale: None,
        initializer_range: 0.2,
    }
}

fn noise(shape: &[usize], seed: u64) -> Tensor {
    let spec = crate::weights::TensorSpec::new("noise.matrix", shape);
    let source = MemorySource::random(&[spec], 1.0, seed).expect("values");
    source.load("noise.matrix", DType::F32).expect("there")
}

fn worst(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (values(a), values(b));
    let largest = b.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let error = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max);
    assert!(a.iter().all(|value| value.is_finite()));
    f64::from(error / largest.max(f32::MIN_POSITIVE))
}

/// A draft's files, and the folder that has them while it lives.
fn saved_draft(draft: &BlockDraft) -> (tempfile::TempDir, SavedDraft) {
    let folder = tempfile::tempdir().expect("folder");
    draft.save(folder.path(), "of the target").expect("saved");
    let saved = SavedDraft::at(folder.path());
    (folder, saved)
}

/// Inputs and positions of the blocks at `anchors` of one document.
fn inputs(ids: &[u32], anchors: &[usize], config: &BlockConfig) -> (Vec<u32>, Vec<u32>) {
    let slot = |at: usize, k: usize| if k == 0 { ids[at] } else { config.mask_token_id };
    let slots = || anchors.iter().flat_map(|&at| (0..config.block_size).map(move |k| (at, k)));
    (slots().map(|(at, k)| slot(at, k)).collect(), slots().map(|(at, k)| (at + k) as u32).collect())
}

fn run(network: &BlockDraft, ids: &[u32], features: &Tensor, anchors: &[usize]) -> Tensor {
    let config = network.config();
    let (tokens, positions) = inputs(ids, anchors, config);
    let anchors: Vec<Anchor> =
        anchors.iter().map(|&index| Anchor { index, document_start: 0 }).collect();
    let rows = features.dim(0).expect("rows");
    let visible = Visible::new(config, &anchors, config.block_size, rows);
    let all: Vec<u32> = (0..rows as u32).collect();
    let context = network.context(features, &all).expect("context");
    network.blocks(&tokens, &positions, &context, &visible).expect("hidden")
}

#[test]
fn a_trained_block_is_the_decoded_block() {
    let ids: Vec<u32> = (0..12).map(|t| t * 7 % 39).collect();
    for (layers, is_causal) in [
        (vec![LayerKind::Full; 2], None),
        (vec![LayerKind::Sliding, LayerKind::Full], None),
        (vec![LayerKind::Sliding; 2], Some(false)),
    ] {
        let config = BlockConfig { layers, is_causal, sliding_window: Some(5), ..toy() };
        let network = BlockDraft::initialise(&config, &noise(&[40, 32], 1), 3).expect("network");
        let features = noise(&[12, 64], 2);
        let together = run(&network, &ids, &features, &[1, 6, 10]);
        for (block, anchor) in [1, 6, 10].into_iter().enumerate() {
            let before = features.narrow(0, 0, anchor).expect("rows");
            let alone = run(&network, &ids, &before, &[anchor]);
            let own = together.narrow(0, 4 * block, 4).expect("block");
            assert!(worst(&own, &alone) < 1e-6, "anchor {anchor}");
        }
    }
}

#[test]
fn fresh_convolutions_change_nothing_and_every_tensor_gets_a_gradient() {
    let (ids, features) = ((0..12).collect::<Vec<u32>>(), noise(&[12, 64], 2));
    let plain = toy();
    let sizes = ConvolutionSizes { kernel_size: 2, group_size: 8 };
    let wide = BlockConfig { convolution: Some(sizes), ..plain.clone() };
    let table = noise(&[40, 32], 1);
    let without = BlockDraft::initialise(&plain, &table, 3).expect("network");
    let with = BlockDraft::initialise(&wide, &table, 3).expect("network");
    let hidden = run(&with, &ids, &features, &[2, 7]);
    assert!(worst(&hidden, &run(&without, &ids, &features, &[2, 7])) <= 0.0);
    let loss = (hidden * noise(&[8, 32], 5)).and_then(|t| t.sum_all()).expect("loss");
    let gradients = loss.gradients().expect("backward");
    for parameter in with.weights().parameters() {
        let gradient = gradients.get(parameter.var.as_tensor());
        assert!(gradient.is_some(), "{} gets no gradient", parameter.name);
    }
}

#[test]
fn a_factor_of_embeddings_is_a_table_of_larger_ones() {
    let (ids, features) = ((0..12).collect::<Vec<u32>>(), noise(&[12, 64], 2));
    let table = noise(&[40, 32], 1);
    let network = |scale: Option<f64>, table: &Tensor| {
        let config = BlockConfig { embedding_scale: scale, ..toy() };
        BlockDraft::initialise(&config, table, 3).expect("network")
    };
    // A power of 2 rounds nothing.
    let larger = (&table * 4.0).expect("a table");
    let hidden = run(&network(Some(4.0), &table), &ids, &features, &[2, 7]);
    assert!(worst(&hidden, &run(&network(None, &larger), &ids, &features, &[2, 7])) <= 0.0);
    assert!(worst(&hidden, &run(&network(None, &table), &ids, &features, &[2, 7])) > 1e-3);
}

#[test]
fn what_does_not_fit_is_named() {
    let mut config = toy();
    config.mask_token_id = 40;
    config.target_layers = vec![LayerId(3), LayerId(3)];
    config.layers[0] = LayerKind::Sliding;
    config.convolution = Some(ConvolutionSizes { kernel_size: 2, group_size: 5 });
    let text = config.problems().to_string();
    for part in ["`mask_token_id` = 40", "do not ascend", "`sliding_window`", "`conv_group_size`"] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    let network = BlockDraft::initialise(&toy(), &noise(&[40, 32], 1), 3).expect("network");
    let visible = Visible::new(&toy(), &[], 4, 0);
    assert!(network.blocks(&[1, 2], &[0, 1], &[], &visible).is_err());
}

#[test]
fn a_saved_draft_is_opened_again_and_another_network_is_refused() {
    let table = noise(&[40, 32], 1);
    let config = BlockConfig { is_causal: Some(false), ..toy() };
    let draft = BlockDraft::initialise(&config, &table, 3).expect("draft");
    let (_folder, saved) = saved_draft(&draft);
    assert_eq!(crate::draft::DraftKind::at(&saved.path).expect("a kind").name, draft.method());
    assert_eq!(crate::draft::files::trained_for(&saved.path).as_deref(), Some("of the target"));
    BlockDraft::check_file(&saved, &config).expect("the same network");
    let again = BlockDraft::load(&saved, &config, &table, (None, 3)).expect("opened");
    assert_eq!(again.config(), &config);
    let named = |draft: &BlockDraft| draft.weights().named().expect("tensors");
    for (a, b) in named(&draft).iter().zip(named(&again)) {
        assert_eq!((&a.0, worst(&a.1, &b.1)), (&b.0, 0.0));
    }
    for (other, key) in [
        (BlockConfig { mask_token_id: 5, ..config.clone() }, "mask_token_id"),
        (BlockConfig { target_layers: vec![LayerId(0), LayerId(3)], ..config.clone() }, "layers"),
        (BlockConfig { is_causal: Some(true), ..config.clone() }, "causal"),
        (BlockConfig { layers: vec![LayerKind::Full], ..config.clone() }, "`layers` = 2, 1"),
    ] {
        assert_refused(BlockDraft::load(&saved, &other, &table, (None, 3)), &[key]);
    }
    // A window is given and taken.
    let windowed = BlockConfig {
        layers: vec![LayerKind::Sliding; config.layers.len()],
        sliding_window: Some(3),
        ..config.clone()
    };
    let again = BlockDraft::load(&saved, &windowed, &table, (None, 3)).expect("opened");
    assert_eq!(again.config(), &windowed);
}

#[test]
fn a_plain_draft_becomes_one_with_a_selector_that_computes_the_same() {
    let table = noise(&[40, 32], 1);
    let plain = BlockConfig { is_causal: Some(false), ..toy() };
    let wide = BlockConfig {
        convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
        selector: Some(SelectorSizes { rank: 4, top_k: 5 }),
        ..plain.clone()
    };
    let draft = BlockDraft::initialise(&plain, &table, 3).expect("draft");
    let (_folder, saved) = saved_draft(&draft);
    BlockDraft::check_file(&saved, &wide).expect("one to extend");
    let extended = BlockDraft::load(&saved, &wide, &table, (None, 7)).expect("extended");
    let (ids, features) = ((0..12).collect::<Vec<u32>>(), noise(&[12, 64], 2));
    let hidden = run(&extended, &ids, &features, &[2, 7]);
    assert!(worst(&hidden, &run(&draft, &ids, &features, &[2, 7])) <= 0.0);
    let selector = extended.selector().expect("a selector");
    let projected = selector.project(&hidden).expect("projected");
    let preferences = selector.preferences(&projected, &[1; 8], &[4; 40]).expect("preferences");
    assert_eq!(values(&preferences), [0.0; 40], "a fresh selector prefers nothing");

    // Its own files are of the other kind, and no plain draft starts from them.
    let (_folder, saved) = saved_draft(&extended);
    assert_eq!(crate::draft::DraftKind::at(&saved.path).expect("a kind").name, "dflash2");
    let again = BlockDraft::load(&saved, &wide, &table, (None, 9)).expect("opened");
    let named = |draft: &BlockDraft| draft.weights().named().expect("tensors");
    for (a, b) in named(&extended).iter().zip(named(&again)) {
        assert_eq!((&a.0, worst(&a.1, &b.1)), (&b.0, 0.0));
    }
    for (other, key) in [
        (plain, "`conv_group_size` = 8, none is configured"),
        (BlockConfig { selector: Some(SelectorSizes { rank: 4, top_k: 6 }), ..wide }, "top_k"),
    ] {
        assert_refused(BlockDraft::load(&saved, &other, &table, (None, 3)), &[key]);
    }
}

#[test]
fn heads_of_other_sizes_are_told_by_their_keys() {
    let sizes = ChainSizes { rank: 4, kind: ChainKind::Gated, confidence: Some(true) };
    let config = BlockConfig { is_causal: Some(false), chain: Some(sizes), ..toy() };
    let draft = BlockDraft::initialise(&config, &noise(&[40, 32], 1), 3).expect("draft");
    let (_folder, saved) = saved_draft(&draft);
    BlockDraft::check_file(&saved, &config).expect("the same network");
    for (chain, told) in [
        (Some(ChainSizes { rank: 5, ..sizes }), "`markov_rank` = 4, 5 is configured"),
        (
            Some(ChainSizes { kind: ChainKind::Rnn, ..sizes }),
            "`markov_head` = gated, rnn is configured",
        ),
        (
            Some(ChainSizes { confidence: None, ..sizes }),
            "`confidence` = true, false is configured",
        ),
        (
            Some(ChainSizes { confidence: Some(false), ..sizes }),
            "`confidence_reads_token` = true, false is configured",
        ),
        (None, "`markov_rank` = 4, none is configured"),
    ] {
        let other = BlockConfig { chain, ..config.clone() };
        assert_refused(BlockDraft::check_file(&saved, &other), &[told]);
    }
}

#[test]
fn tensors_that_the_network_does_not_know_are_refused_but_for_the_target_s() {
    let config = toy();
    let specs = tensor_specs(&config);
    let named = |extra: &str| {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("0");
        let own = specs.iter().map(|spec| (spec.name.clone(), zeros(&spec.shape)));
        MemorySource::new(own.chain([(extra.to_owned(), zeros(&[40, 32]))]))
    };
    let open = |extra| BlockDraft::from_source(&named(extra), &config, &noise(&[40, 32], 1));
    assert!(open("lm_head.weight").is_ok());
    assert_refused(open("mask_embedding"), &["unexpected tensor `mask_embedding`"]);
}

/// What the files of a draft hold that proposes every other token through a head of its own.
fn with_own_head(config: &BlockConfig) -> Vec<(String, Tensor)> {
    let specs = file_specs(config);
    let source = MemorySource::random(&specs, 0.2, 5).expect("values");
    let load = |name: &String| (name.clone(), source.load(name, DType::F32).expect("there"));
    let mut all: Vec<_> = specs.iter().map(|spec| load(&spec.name)).collect();
    let kept = (0..20).map(|i| TargetTokenId(2 * i)).collect();
    let map = VocabularyMap::new(kept, config.vocab_size).expect("a map");
    all.extend(map.tensors().expect("tensors"));
    all
}

#[test]
fn a_head_of_the_draft_s_own_is_read_with_its_map_and_saved() {
    let table = noise(&[40, 32], 1);
    let chain = ChainSizes { rank: 4, kind: ChainKind::Gated, confidence: Some(true) };
    for chain in [None, Some(chain)] {
        let config = BlockConfig { draft_vocab_size: 20, is_causal: Some(false), chain, ..toy() };
        let tensors = with_own_head(&config);
        let open = |tensors: Vec<(String, Tensor)>| {
            BlockDraft::from_source(&MemorySource::new(tensors), &config, &table)
        };
        let draft = open(tensors.clone()).expect("a draft");
        assert_eq!(draft.vocabulary().map(|map| map.kept()[3].0), Some(6));
        let (_folder, saved) = saved_draft(&draft);
        let again = BlockDraft::load(&saved, &config, &table, (None, 3)).expect("opened");
        assert_eq!(again.vocabulary(), draft.vocabulary());
        let head = |draft: &BlockDraft| draft.own_head().expect("a head").rows().expect("rows");
        assert!(worst(&head(&again), &head(&draft)) <= 0.0);
        assert!(!head(&again).track_op(), "it is not trained");
        assert!(draft.parameters().iter().all(|parameter| parameter.name != "lm_head.weight"));
        // Fewer rows are another network, and all of them are those of the target's head.
        let whole = BlockConfig { draft_vocab_size: 40, ..config.clone() };
        assert_refused(
            BlockDraft::check_file(&saved, &whole),
            &["a head of its own over 20 tokens"],
        );
        for name in ["d2t", "lm_head.weight"] {
            let without = tensors.iter().filter(|(known, _)| known != name).cloned().collect();
            assert_refused(open(without), &[&format!("`{name}`")]);
        }
        let ids = Tensor::new((0..20_i64).map(|i| 2 * i).collect::<Vec<_>>(), &Device::Cpu);
        let mut absolute = tensors.clone();
        absolute.push(("d2t".to_owned(), ids.expect("ids")));
        assert_refused(open(absolute), &["absolute ids"]);
        assert_refused(BlockDraft::initialise(&config, &table, 3), &["which 20 tokens"]);
    }
}

/// A draft that proposed through the target's head goes on with some rows of it, and then keeps these.
#[test]
fn a_draft_gets_a_head_of_its_own_once() {
    let (table, rows) = (noise(&[40, 32], 1), noise(&[20, 32], 4));
    let own = |offset: u32| {
        let kept = (0..20).map(|i| TargetTokenId(2 * i + offset)).collect();
        OwnHead::new(VocabularyMap::new(kept, 40).expect("a map"), &rows).expect("a head")
    };
    let plain = BlockDraft::initialise(&toy(), &table, 3).expect("a draft");
    let (_folder, saved) = saved_draft(&plain);
    let chain = ChainSizes { rank: 4, kind: ChainKind::Vanilla, confidence: None };
    for chain in [None, Some(chain)] {
        let config = BlockConfig { draft_vocab_size: 20, chain, ..toy() };
        BlockDraft::check_file(&saved, &config).expect("a draft to go on with");
        let load = |saved: &SavedDraft, own| BlockDraft::load(saved, &config, &table, (own, 3));
        assert_refused(load(&saved, None), &["which 20 tokens"]);
        let begun = load(&saved, Some(own(1))).expect("begun");
        assert_eq!(begun.vocabulary().map(|map| map.kept()[3].0), Some(7));
        let of = |draft: &BlockDraft| draft.weights().tensor("fc.weight").cloned().expect("one");
        assert!(worst(&of(&begun), &of(&plain)) <= 0.0);
        let (_folder, saved) = saved_draft(&begun);
        let again = load(&saved, Some(own(0))).expect("opened");
        assert_eq!(again.vocabulary(), begun.vocabulary());
    }
    // The output of a chain has a row for every token that is proposed.
    let config = BlockConfig { chain: Some(chain), ..toy() };
    let chained = BlockDraft::initialise(&config, &table, 3).expect("a draft");
    let (_folder, saved) = saved_draft(&chained);
    let narrow = BlockConfig { draft_vocab_size: 20, ..config };
    BlockDraft::check_file(&saved, &narrow).expect("a draft to go on with");
    let begun = BlockDraft::load(&saved, &narrow, &table, (Some(own(1)), 3)).expect("begun");
    let output = |draft: &BlockDraft| draft.chain().expect("one").output().cloned().expect("rows");
    let kept: Vec<u32> = (0..20).map(|i| 2 * i + 1).collect();
    let wanted = output(&chained).index_select(&Tensor::new(kept, &Device::Cpu).expect("ids"), 0);
    assert!(worst(&output(&begun), &wanted.expect("rows")) <= 0.0);
    let wide = BlockConfig { draft_vocab_size: 19, ..toy() };
    let error = BlockDraft::initialise_with(&wide, &table, Some(own(0)), 3).err();
    let error = error.expect("refused").to_string();
    assert!(error.contains("20 rows, `draft_vocab_size` = 19"), "{error}");
    let error = BlockDraft::initialise_with(&toy(), &table, Some(own(0)), 3).err();
    assert!(error.expect("refused").to_string().contains("20 rows"));
}

/// A target of three layers, the taps of its first two and the keys and values of its last one.
fn target_and_features(family: &str) -> (Target, Tensor, KeyValues) {
    let target = target(family, Layers::All);
    let row = PackedSequence {
        ids: (0..12).map(|t| t * 7 % 39).collect(),
        position_ids: vec![0; 12],
        document_ids: vec![0; 12],
    };
    let layers = [LayerId(0), LayerId(1)];
    let taps = layers.map(Tap::Hidden).into_iter().chain([Tap::LastKv]).collect::<Vec<_>>();
    let features = target.forward(&row, &Taps::of(&taps)).expect("features");
    let aux = features.hidden_of(&layers).expect("tapped");
    let last = features.last_kv().expect("tapped").clone();
    (target, aux, last)
}

fn target(family: &str, layers: Layers) -> Target {
    let config = serde_json::json!({
        "model_type": family, "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "initializer_range": 0.2,
        "rope_theta": 1e4, "tie_word_embeddings": true,
    });
    let config = TargetConfig::from_json(&config).expect("configuration");
    let options = TargetOptions { layers, ..TargetOptions::default() };
    Target::random(config, 4, &options).expect("target")
}

#[test]
fn a_draft_may_begin_with_the_target_s_last_layer_over_its_keys_and_values() {
    for family in ["qwen3", "llama"] {
        let (target, features, last) = target_and_features(family);
        let layers = |count| BlockConfig {
            target_layers: vec![LayerId(0), LayerId(1)],
            ..BlockConfig::for_target(target.config(), count, 4, 39)
        };
        let begin =
            |count| BlockDraft::initialise_from(&layers(count), &target, None, 3).expect("draft");
        let (one, two) = (begin(1), begin(2));
        let context = two.context(&features, &[0; 12]).expect("context");
        let KeyValues { k, v } = &context[1];
        assert!(worst(v, &last.v) < 1e-5, "{family}");
        let size = |keys: &Tensor| {
            let square = keys.detach().sqr().and_then(|it| it.mean_all()).expect("square");
            square.to_scalar::<f32>().expect("number").sqrt()
        };
        if family == "qwen3" {
            assert!(worst(k, &last.k) < 1e-5);
        } else {
            let ratio = size(k) / size(&last.k);
            assert!((0.5..2.0).contains(&ratio), "{ratio}");
        }
        // Layers before the last one change nothing at first, and every tensor learns.
        let ids: Vec<u32> = (0..12).collect();
        let hidden = run(&two, &ids, &features, &[2, 7]);
        assert!(worst(&hidden, &run(&one, &ids, &features, &[2, 7])) < 1e-6, "{family}");
        // More key-value heads are copies at first: every query head meets what it would meet in the target.
        let more = BlockConfig { num_key_value_heads: 4, ..layers(1) };
        let more = BlockDraft::initialise_from(&more, &target, None, 3).expect("draft");
        let heads = more.weights().get("layers.0.self_attn.v_proj.weight").expect("a projection");
        assert_eq!(heads.dim(0).expect("rows"), 4 * more.config().head_dim);
        let more = run(&more, &ids, &features, &[2, 7]);
        assert!(worst(&more, &run(&one, &ids, &features, &[2, 7])) < 1e-5, "{family}");
        let norm = one.weights().get("norm.weight").expect("norm");
        assert!(worst(norm, target.final_norm()) < 1e-7);
    }
}

#[test]
fn a_target_without_its_last_layer_is_named() {
    let target = target("llama", Layers::None);
    let config = BlockConfig::for_target(target.config(), 1, 4, 39);
    let error = BlockDraft::initialise_from(&config, &target, None, 3);
    assert_refused(error, &["`init: last_layer` needs the target's last layer"]);
}
