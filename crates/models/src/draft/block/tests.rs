//! The network against itself and against reference cases.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::chosen_products::chosen_products;
use longdraft_kernels::top_k::linear_top_k;
use serde_json::Value;

use super::*;
use crate::config::RopeParameters;
use crate::draft::Draft;
use crate::draft::files::SavedDraft;
use crate::ids::LayerId;
use crate::weights::WeightSource;
use crate::weights::memory::MemorySource;
use crate::weights::safetensors::SafetensorsSource;

/// A network of two full layers.
pub(super) fn toy() -> BlockConfig {
    BlockConfig {
        hidden_size: 32,
        intermediate_size: 48,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        vocab_size: 40,
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
    let values =
        |t: &Tensor| t.detach().flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values");
    let (a, b) = (values(a), values(b));
    let largest = b.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let error = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max);
    assert!(a.iter().all(|value| value.is_finite()));
    f64::from(error / largest.max(f32::MIN_POSITIVE))
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
    assert!(worst(&hidden, &run(&without, &ids, &features, &[2, 7])) < 1e-6);
    let loss = (hidden * noise(&[8, 32], 5)).and_then(|t| t.sum_all()).expect("loss");
    let gradients = loss.backward().expect("backward");
    for parameter in with.weights().parameters() {
        let gradient = gradients.get(parameter.var.as_tensor());
        assert!(gradient.is_some(), "{} gets no gradient", parameter.name);
    }
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

/// A reference case.
struct Case {
    path: PathBuf,
    meta: Value,
    file: SafetensorsSource,
    network: BlockDraft,
}

/// What a case has for one row of tokens; blocks that count for nothing are left out.
struct CaseRow {
    ids: Vec<u32>,
    features: Tensor,
    anchors: Vec<usize>,
    /// The blocks among those of all rows.
    blocks: Vec<u32>,
}

/// Reference cases beside the project, if they are there.
fn cases() -> Option<Vec<Case>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden/block");
    if !folder.is_dir() {
        eprintln!("skipped: no shared/golden/block beside the project");
        return None;
    }
    let entries = std::fs::read_dir(folder).expect("folder").map(|entry| entry.expect("entry"));
    Some(entries.filter_map(|entry| Case::open(entry.path())).collect())
}

impl Case {
    /// The case of a folder, if it holds one.
    fn open(path: PathBuf) -> Option<Self> {
        let text = std::fs::read_to_string(path.join("meta.json")).ok()?;
        let meta: Value = serde_json::from_str(&text).expect("JSON");
        let file = SafetensorsSource::open_file(&path.join("case.safetensors")).expect("case");
        let config = config_of(&meta, &file);
        let load = |name: &str| file.load(name, DType::F32).expect("tensor");
        let specs = tensor_specs(&config).into_iter();
        let own = specs.map(|spec| (spec.name.clone(), load(&format!("w.{}", spec.name))));
        let source = MemorySource::new(own);
        let network = BlockDraft::from_source(&source, &config, &load("in.embed"));
        Some(Self { network: network.expect("network"), path, meta, file })
    }

    fn load(&self, name: &str) -> Tensor {
        self.file.load(name, DType::F32).expect("tensor")
    }

    fn rows(&self) -> Vec<CaseRow> {
        let integers = |name: &str| self.file.load_integers(name).expect("integers");
        let (ids, anchors, keep) =
            (integers("in.input_ids"), integers("in.anchors"), integers("in.keep"));
        let count = self.file.shape("in.input_ids").expect("shape")[0];
        let (tokens, blocks) = (ids.len() / count, anchors.len() / count);
        let row = |row: usize| {
            let kept = (row * blocks..(row + 1) * blocks).filter(|block| keep[*block] != 0);
            let kept: Vec<usize> = kept.collect();
            CaseRow {
                ids: ids[row * tokens..][..tokens].iter().map(|id| *id as u32).collect(),
                features: self.load("in.features").get(row).expect("row"),
                anchors: kept.iter().map(|block| anchors[*block] as usize).collect(),
                blocks: kept.iter().map(|block| *block as u32).collect(),
            }
        };
        (0..count).map(row).collect()
    }

    /// Hidden states of a row's blocks.
    fn hidden(&self, row: &CaseRow) -> Tensor {
        run(&self.network, &row.ids, &row.features, &row.anchors)
    }
}

/// What a case says of the network.
fn config_of(meta: &Value, file: &SafetensorsSource) -> BlockConfig {
    let size = |key: &str| meta[key].as_u64().expect("a size") as usize;
    let shape = |name: &str| file.shape(name).expect("a tensor");
    let kinds = meta["layer_types"].as_array().expect("layers").iter();
    let kind = |name: &Value| match name.as_str() {
        Some("sliding_attention") => LayerKind::Sliding,
        _ => LayerKind::Full,
    };
    let ids = meta["target_layer_ids"].as_array().expect("ids").iter();
    let optional = |key: &str| meta[key].as_u64().map(|size| size as usize);
    BlockConfig {
        hidden_size: shape("in.embed")[1],
        intermediate_size: shape("w.layers.0.mlp.up_proj.weight")[0],
        num_attention_heads: size("heads"),
        num_key_value_heads: size("kv_heads"),
        head_dim: size("head_dim"),
        vocab_size: shape("in.embed")[0],
        rms_norm_eps: meta["eps"].as_f64().expect("eps"),
        rope: RopeParameters::plain(meta["rope_theta"].as_f64().expect("theta")),
        max_position_embeddings: 1024,
        attention_bias: meta["attention_bias"] == true,
        layers: kinds.map(kind).collect(),
        sliding_window: optional("sliding_window"),
        is_causal: meta["is_causal"].as_bool(),
        block_size: size("block_size"),
        mask_token_id: size("mask_token_id") as u32,
        target_layers: ids.map(|id| LayerId(id.as_u64().expect("id") as usize)).collect(),
        num_target_layers: size("num_target_layers"),
        convolution: optional("conv_kernel_size")
            .zip(optional("conv_group_size"))
            .map(|(kernel_size, group_size)| ConvolutionSizes { kernel_size, group_size }),
        selector: optional("selector_rank")
            .zip(optional("top_k"))
            .map(|(rank, top_k)| SelectorSizes { rank, top_k }),
        initializer_range: 0.02,
    }
}

#[test]
fn hidden_states_are_those_of_the_reference_cases() {
    let Some(cases) = cases() else { return };
    assert!(!cases.is_empty(), "a folder without cases");
    for case in cases {
        let config = case.network.config();
        let width = config.block_size * config.hidden_size;
        for row in case.rows() {
            let hidden = case.hidden(&row);
            let kept = Tensor::from_slice(&row.blocks, row.blocks.len(), &Device::Cpu);
            let want = case.load("out.hidden").reshape(((), width)).expect("blocks");
            let want = want.index_select(&kept.expect("indices"), 0).expect("kept");
            let error = worst(&hidden, &want.reshape(hidden.shape()).expect("rows"));
            assert!(error < 1e-4, "{}, blocks {:?}: {error}", case.path.display(), row.blocks);
        }
    }
}

/// Scores of a slot's candidates where `before` stands before it, `[K]`.
fn scores(case: &Case, state: &Tensor, before: u32, candidates: &[u32]) -> Vec<f32> {
    let selector = case.network.selector().expect("a selector");
    let logits = chosen_products(state, &case.load("in.head"), candidates).expect("logits");
    let projected = selector.project(state).expect("projected");
    let preferences = selector.preferences(&projected, &[before], candidates).expect("scores");
    (logits + preferences).and_then(|t| t.detach().squeeze(0)?.to_vec1()).expect("scores")
}

#[test]
fn candidates_scores_and_choices_are_those_of_the_reference_cases() {
    let Some(mut cases) = cases() else { return };
    cases.retain(|case| case.network.selector().is_some());
    assert!(!cases.is_empty(), "a folder without such cases");
    for case in cases {
        let (slots, path) = (case.network.config().block_size, case.path.display());
        let top_k = case.network.config().selector.expect("sizes").top_k;
        let integers = |name: &str| case.file.load_integers(name).expect("integers");
        let (candidates, walk) = (integers("out.candidates"), integers("out.walk"));
        let wanted = case.load("out.scores").flatten_all().expect("flat");
        for row in case.rows() {
            let hidden = case.hidden(&row).detach();
            let top = linear_top_k(&hidden, &case.load("in.head"), top_k).expect("candidates");
            for (block, (at, anchor)) in row
                .blocks
                .iter()
                .zip(&row.anchors)
                .enumerate()
                .map(|(i, b)| (i, (*b.0 as usize, *b.1)))
            {
                let mut chosen = row.ids[anchor];
                for slot in 1..slots.min(row.ids.len() - anchor) {
                    let first = (at * slots + slot) * top_k;
                    let own = &top.ids[(block * slots + slot) * top_k..][..top_k];
                    let same =
                        own.iter().zip(&candidates[first..]).all(|(a, b)| i64::from(*a) == *b);
                    assert!(same, "{path}, block {at}, slot {slot}: other candidates");
                    let state = hidden.narrow(0, block * slots + slot, 1).expect("state");
                    let forced = scores(&case, &state, row.ids[anchor + slot - 1], own);
                    let forced = Tensor::from_vec(forced, top_k, &Device::Cpu).expect("scores");
                    let error = worst(&forced, &wanted.narrow(0, first, top_k).expect("scores"));
                    assert!(error < 1e-4, "{path}, block {at}, slot {slot}: {error}");
                    let walked = scores(&case, &state, chosen, own);
                    let best = (0..top_k).rev().max_by(|a, b| walked[*a].total_cmp(&walked[*b]));
                    chosen = own[best.expect("candidates")];
                    assert_eq!(i64::from(chosen), walk[at * (slots - 1) + slot - 1], "{path}");
                }
            }
        }
    }
}

/// `Σ w CE` and `Σ w` of one row's slots, `w = exp(−(k − 1) / γ)` where the loss mask is set.
fn weighted_loss(
    (ids, mask, anchors): (&[u32], &[f32], &[usize]),
    (hidden, head): (&Tensor, &Tensor),
    (slots, gamma): (usize, Option<f64>),
) -> (Tensor, f64) {
    let logits = longdraft_kernels::linear::linear(hidden, head, None).expect("logits");
    let (mut labels, mut weights) = (Vec::new(), Vec::new());
    for (anchor, k) in anchors.iter().flat_map(|anchor| (0..slots).map(move |k| (*anchor, k))) {
        let inside = k > 0 && anchor + k < ids.len();
        labels.push(if inside { ids[anchor + k] } else { 0 });
        let learned = inside && mask[anchor + k] > 0.0;
        let decay = gamma.map_or(1.0, |gamma| (-(k as f64 - 1.0) / gamma).exp());
        weights.push(if learned { decay as f32 } else { 0.0 });
    }
    let rows = labels.len();
    let labels = Tensor::from_vec(labels, (rows, 1), &Device::Cpu).expect("labels");
    let total = weights.iter().map(|weight| f64::from(*weight)).sum();
    let weights = Tensor::from_vec(weights, rows, &Device::Cpu).expect("weights");
    let of_labels = logits.gather(&labels, 1).and_then(|t| t.squeeze(1)).expect("logits");
    let losses = (logits.log_sum_exp(1).expect("sums") - of_labels).expect("losses");
    ((losses * weights).and_then(|t| t.sum_all()).expect("sum"), total)
}

#[test]
fn gradients_are_those_of_the_reference_cases() {
    let Some(mut cases) = cases() else { return };
    cases.retain(|case| case.meta["loss_type"] == "dflash");
    assert!(!cases.is_empty(), "a folder without such cases");
    for case in cases {
        let path = case.path.display();
        let decay = (case.network.config().block_size, case.meta["gamma"].as_f64());
        let masks = case.load("in.loss_mask").to_vec2::<f32>().expect("masks");
        let head = case.load("in.head");
        let (mut sum, mut total) = (Tensor::zeros((), DType::F32, &Device::Cpu).expect("0"), 0.0);
        for (row, mask) in case.rows().iter().zip(&masks) {
            let of_row = (row.ids.as_slice(), mask.as_slice(), row.anchors.as_slice());
            let (loss, weight) = weighted_loss(of_row, (&case.hidden(row), &head), decay);
            sum = (sum + loss).expect("sum");
            total += weight;
        }
        let loss = (sum / total).expect("loss");
        let value = f64::from(loss.to_scalar::<f32>().expect("a number"));
        let want = case.meta["loss"].as_f64().expect("loss");
        assert!((value - want).abs() < 1e-5 * want, "{path}: {value}");
        let gradients = loss.backward().expect("backward");
        for parameter in case.network.weights().parameters() {
            let own = gradients.get(parameter.var.as_tensor()).expect("a gradient");
            let error = worst(own, &case.load(&format!("grad.{}", parameter.name)));
            assert!(error < 1e-4, "{path}, {}: {error}", parameter.name);
        }
    }
}

#[test]
fn a_saved_draft_is_opened_again_and_another_network_is_refused() {
    let table = noise(&[40, 32], 1);
    let config = BlockConfig { is_causal: Some(false), ..toy() };
    let draft = BlockDraft::initialise(&config, &table, 3).expect("draft");
    let folder = tempfile::tempdir().expect("folder");
    draft.save(folder.path(), "of the target").expect("saved");
    assert_eq!(crate::draft::DraftKind::at(folder.path()).expect("a kind").name, draft.method());
    assert_eq!(crate::draft::files::trained_for(folder.path()).as_deref(), Some("of the target"));
    let saved = SavedDraft::at(folder.path());
    BlockDraft::check_file(&saved, &config).expect("the same network");
    let again = BlockDraft::load(&saved, &config, &table, 3).expect("opened");
    assert_eq!(again.config(), &config);
    for (a, b) in draft.weights().named().iter().zip(again.weights().named()) {
        assert_eq!((&a.0, worst(&a.1, &b.1)), (&b.0, 0.0));
    }
    for (other, key) in [
        (BlockConfig { mask_token_id: 5, ..config.clone() }, "mask_token_id"),
        (BlockConfig { target_layers: vec![LayerId(0), LayerId(3)], ..config.clone() }, "layers"),
        (BlockConfig { is_causal: Some(true), ..config.clone() }, "causal"),
    ] {
        let error = BlockDraft::load(&saved, &other, &table, 3).err().expect("refused");
        assert!(error.to_string().contains(key), "{error}");
    }
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
    let folder = tempfile::tempdir().expect("folder");
    draft.save(folder.path(), "of the target").expect("saved");
    let saved = SavedDraft::at(folder.path());
    BlockDraft::check_file(&saved, &wide).expect("one to extend");
    let extended = BlockDraft::load(&saved, &wide, &table, 7).expect("extended");
    let (ids, features) = ((0..12).collect::<Vec<u32>>(), noise(&[12, 64], 2));
    let hidden = run(&extended, &ids, &features, &[2, 7]);
    assert!(worst(&hidden, &run(&draft, &ids, &features, &[2, 7])) < 1e-6);
    let selector = extended.selector().expect("a selector");
    let projected = selector.project(&hidden).expect("projected");
    let preferences = selector.preferences(&projected, &[1; 8], &[4; 40]).expect("preferences");
    let values = preferences.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values");
    assert_eq!(values, [0.0; 40], "a fresh selector prefers nothing");

    // Its own files are of the other kind, and no plain draft starts from them.
    let folder = tempfile::tempdir().expect("folder");
    extended.save(folder.path(), "of the target").expect("saved");
    assert_eq!(crate::draft::DraftKind::at(folder.path()).expect("a kind").name, "dflash2");
    let saved = SavedDraft::at(folder.path());
    let again = BlockDraft::load(&saved, &wide, &table, 9).expect("opened");
    for (a, b) in extended.weights().named().iter().zip(again.weights().named()) {
        assert_eq!((&a.0, worst(&a.1, &b.1)), (&b.0, 0.0));
    }
    for (other, key) in [
        (plain, "convolution"),
        (BlockConfig { selector: Some(SelectorSizes { rank: 4, top_k: 6 }), ..wide }, "top_k"),
    ] {
        let error = BlockDraft::load(&saved, &other, &table, 3).err().expect("refused");
        assert!(error.to_string().contains(key), "{error}");
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
    let error = open("mask_embedding").err().expect("refused").to_string();
    assert!(error.contains("unexpected tensor `mask_embedding`"), "{error}");
}
