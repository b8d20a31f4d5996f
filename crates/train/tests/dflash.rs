//! The DFlash objective on reference cases, and on what must hold without them.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_data::Batch;
use longdraft_models::LayerId;
use longdraft_models::config::RopeParameters;
use longdraft_models::draft::block::{
    BlockConfig, BlockDraft, ConvolutionSizes, LayerKind, SelectorSizes, tensor_specs,
};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_train::features::{BatchFeatures, TeacherFeatures};
use longdraft_train::method::block::{
    BlockDraws, BlockLoss, BlockObjective, SelectorLoss, SlotWeights,
};
use longdraft_train::objective::{Objective, Prepared};
use serde_json::Value;

/// The network of a case.
fn network(meta: &Value, file: &SafetensorsSource) -> BlockConfig {
    let size = |key: &str| meta[key].as_u64().expect("a size") as usize;
    let optional = |key: &str| meta[key].as_u64().map(|size| size as usize);
    let shape = |name: &str| file.shape(name).expect("a tensor");
    let kind = |name: &Value| {
        if name == "sliding_attention" { LayerKind::Sliding } else { LayerKind::Full }
    };
    let id = |id: &Value| LayerId(id.as_u64().expect("an id") as usize);
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
        layers: meta["layer_types"].as_array().expect("layers").iter().map(kind).collect(),
        sliding_window: meta["sliding_window"].as_u64().map(|window| window as usize),
        is_causal: meta["is_causal"].as_bool(),
        block_size: size("block_size"),
        mask_token_id: size("mask_token_id") as u32,
        target_layers: meta["target_layer_ids"].as_array().expect("ids").iter().map(id).collect(),
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

fn loss_of(meta: &Value) -> BlockLoss {
    let weights = match meta["loss_type"].as_str().unwrap_or("dflash") {
        "dflash" if meta["gamma"].is_null() => SlotWeights::Uniform,
        "dflash" => SlotWeights::Decay,
        "dpace" => SlotWeights::Dpace,
        "dpace-cumulative-confidence-only" => SlotWeights::DpaceConfidence,
        "dpace-continuation-value-only" => SlotWeights::DpaceContinuation,
        other => panic!("a loss that nobody knows: {other}"),
    };
    BlockLoss {
        weights,
        decay: meta["gamma"].as_f64().unwrap_or(1.0),
        alpha: meta["alpha"].as_f64().unwrap_or(0.5),
        divide_by_rows: meta["divisor"] == "rows",
        selector: meta["selector_loss_weight"].as_f64().map(|weight| SelectorLoss {
            weight,
            over_hits: meta["selector_divisor"] == "over_hit_weights",
        }),
    }
}

/// The rows of a case with where their blocks begin.
fn rows(file: &SafetensorsSource) -> (Vec<Batch>, Vec<Vec<usize>>) {
    let integers = |name: &str| file.load_integers(name).expect("integers");
    let (ids, anchors) = (integers("in.input_ids"), integers("in.anchors"));
    let keep = integers("in.keep");
    let mask = file.load("in.loss_mask", DType::F32).expect("mask").to_vec2::<f32>();
    let mask = mask.expect("rows");
    let (tokens, blocks) = (ids.len() / mask.len(), anchors.len() / mask.len());
    let batch = |row: usize| Batch {
        ids: ids[row * tokens..][..tokens].iter().map(|id| *id as u32).collect(),
        position_ids: (0..tokens as u32).collect(),
        document_ids: vec![0; tokens],
        loss_mask: mask[row].iter().map(|bit| *bit > 0.0).collect(),
        row,
        ..Batch::default()
    };
    let starts = |row: usize| {
        let kept = (row * blocks..(row + 1) * blocks).filter(|block| keep[*block] != 0);
        kept.map(|block| anchors[block] as usize).collect()
    };
    ((0..mask.len()).map(batch).collect(), (0..mask.len()).map(starts).collect())
}

fn features(states: Tensor) -> BatchFeatures {
    BatchFeatures {
        last_kv: None,
        aux_hidden: Some(states),
        teacher: TeacherFeatures::None,
        part: None,
    }
}

/// `max |a − b| / max |b|`
fn worst(a: &Tensor, b: &Tensor) -> f32 {
    let values = |t: &Tensor| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values");
    let (a, b) = (values(a), values(b));
    assert!(a.len() == b.len() && a.iter().all(|value| value.is_finite()));
    let largest = b.iter().fold(f32::MIN_POSITIVE, |most, value| most.max(value.abs()));
    a.iter().zip(&b).map(|(a, b)| (a - b).abs() / largest).fold(0.0, f32::max)
}

#[test]
fn loss_and_gradients_are_those_of_the_reference_cases() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden/block");
    if !folder.is_dir() {
        eprintln!("skipped: no shared/golden/block beside the project");
        return;
    }
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).expect("folder") {
        let path = entry.expect("entry").path();
        let Ok(text) = std::fs::read_to_string(path.join("meta.json")) else { continue };
        let meta: Value = serde_json::from_str(&text).expect("JSON");
        if meta["kind"] == "dflash" || meta["kind"] == "dflash2" {
            check_case(&path, &meta);
            seen += 1;
        }
    }
    assert!(seen > 0, "a folder without such cases");
}

fn check_case(path: &Path, meta: &Value) {
    let file = SafetensorsSource::open_file(&path.join("case.safetensors")).expect("case");
    let load = |name: &str| file.load(name, DType::F32).expect("tensor");
    let config = network(meta, &file);
    let specs = tensor_specs(&config).into_iter();
    let own = specs.map(|spec| (spec.name.clone(), load(&format!("w.{}", spec.name))));
    let draft = BlockDraft::from_source(&MemorySource::new(own), &config, &load("in.embed"));
    let (batches, starts) = rows(&file);
    let draws = BlockDraws { seed: 0, blocks_per_row: 1 };
    let objective =
        BlockObjective::new(draft.expect("draft"), &load("in.head"), loss_of(meta), draws)
            .with_starts(move |batch| starts[batch.row].clone());
    let states = load("in.features");
    let of_row = |row: usize| features(states.get(row).expect("row"));
    let prepared: Vec<Prepared> = batches
        .iter()
        .map(|batch| objective.prepare(batch, &of_row(batch.row)).expect("prepared"))
        .collect();
    let mut totals = vec![0.0; prepared[0].denominators.len()];
    for prepared in &prepared {
        totals.iter_mut().zip(&prepared.denominators).for_each(|(total, own)| *total += own);
    }
    let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu).expect("0");
    for (batch, prepared) in batches.iter().zip(&prepared) {
        if let Some(of_masks) = objective.denominators_of_masks(batch) {
            assert_eq!(of_masks, prepared.denominators, "{}", path.display());
        }
        let share = objective.share(batch, &of_row(batch.row), prepared, &totals, true);
        loss = (loss + share.expect("share").loss.expect("learned slots")).expect("sum");
    }
    let value = f64::from(loss.to_scalar::<f32>().expect("a number"));
    let want = meta["loss"].as_f64().expect("loss");
    assert!((value - want).abs() < 1e-5 * want.abs(), "{}: {value}, {want}", path.display());
    let gradients = loss.backward().expect("backward");
    for parameter in objective.draft().parameters() {
        let own = gradients.get(parameter.var.as_tensor()).expect("a gradient");
        let error = worst(own, &load(&format!("grad.{}", parameter.name)));
        assert!(error < 1e-4, "{}, {}: {error}", path.display(), parameter.name);
    }
}

fn toy() -> BlockConfig {
    BlockConfig {
        hidden_size: 16,
        intermediate_size: 24,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        vocab_size: 30,
        rms_norm_eps: 1e-6,
        rope: RopeParameters::plain(1e4),
        max_position_embeddings: 64,
        attention_bias: false,
        layers: vec![LayerKind::Full; 2],
        sliding_window: None,
        is_causal: Some(false),
        block_size: 4,
        mask_token_id: 29,
        target_layers: vec![LayerId(1), LayerId(2)],
        num_target_layers: 4,
        convolution: None,
        selector: None,
        initializer_range: 0.3,
    }
}

fn random(shape: (usize, usize), seed: u64) -> Tensor {
    let spec = longdraft_models::weights::TensorSpec::new("noise.matrix", &[shape.0, shape.1]);
    let source = MemorySource::random(&[spec], 1.0, seed).expect("values");
    source.load("noise.matrix", DType::F32).expect("there")
}

fn objective(weights: SlotWeights) -> BlockObjective {
    let draft = BlockDraft::initialise(&toy(), &random((30, 16), 1), 2).expect("draft");
    let loss = BlockLoss { weights, decay: 3.0, alpha: 0.5, divide_by_rows: false, selector: None };
    let draws = BlockDraws { seed: 4, blocks_per_row: 6 };
    BlockObjective::new(draft, &random((30, 16), 3), loss, draws)
}

/// Documents of these lengths, of which the first two tokens are not learned.
fn batch(lengths: &[usize]) -> Batch {
    let mut batch = Batch::default();
    for (document, length) in lengths.iter().enumerate() {
        batch.ids.extend((0..*length).map(|t| ((7 * t + document) % 29) as u32));
        batch.position_ids.extend(0..*length as u32);
        batch.document_ids.extend(vec![document as i32; *length]);
        batch.loss_mask.extend((0..*length).map(|t| t > 1));
    }
    batch
}

#[test]
fn a_packed_row_is_its_documents_one_by_one() {
    let starts = |batch: &Batch| match batch.ids.len() {
        20 => vec![3, 6, 12, 17],
        9 => vec![3, 6],
        _ => vec![3, 8],
    };
    for weights in [SlotWeights::Decay, SlotWeights::Dpace] {
        let objective = objective(weights).with_starts(starts);
        let states = random((20, 32), 5);
        let sum = |batch: &Batch, first: usize| {
            let rows = states.narrow(0, first, batch.ids.len()).expect("rows");
            let metrics = objective.measure(batch, &features(rows)).expect("measured");
            (metrics.parts[0].sum, metrics.parts[0].denominator, metrics.replayed.tokens)
        };
        let (packed, one) = (sum(&batch(&[9, 11]), 0), sum(&batch(&[9]), 0));
        // The second document of a packed row has other ids.
        let mut second = batch(&[9, 11]);
        second.ids = second.ids[9..].to_vec();
        second.position_ids = (0..11).collect();
        second.document_ids = vec![0; 11];
        second.loss_mask = second.loss_mask[9..].to_vec();
        let second = sum(&second, 9);
        assert!((packed.0 - one.0 - second.0).abs() < 1e-4 * packed.0, "{packed:?}");
        assert!((packed.1 - one.1 - second.1).abs() < 1e-6 * packed.1, "{packed:?}");
        assert_eq!(packed.2, one.2 + second.2);
    }
}

#[test]
fn a_row_without_two_supervised_tokens_in_a_row_teaches_nothing() {
    let objective = objective(SlotWeights::Dpace);
    let mut batch = batch(&[6]);
    batch.loss_mask = vec![true, false, true, false, true, false];
    let features = features(random((6, 32), 5));
    let prepared = objective.prepare(&batch, &features).expect("prepared");
    assert_eq!(prepared.denominators, [0.0]);
    let share = objective.share(&batch, &features, &prepared, &[0.0], true).expect("share");
    assert!(share.loss.is_none() && share.metrics.rows == 0);
}
