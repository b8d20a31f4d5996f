//! Predictions beside steps that were measured.

use longdraft_models::TargetConfig;
use longdraft_models::published::published_config;
use longdraft_models::target_model::Layers;
use longdraft_train::config::TrainConfig;
use serde_json::{Value, json};

use super::TargetPass;
use crate::operations::OfTarget;
use crate::roofline::{self, Bound, Kernel, Part, Term};
use crate::sample::{pass, workload};
use crate::target::{ForwardPass, Held, States, weight_bytes};
use crate::{GPUS, Gpu, Layout, PartTime, Workload};

const LLAMA: &str = "meta-llama/Llama-3.1-8B-Instruct";
const QWEN: &str = "Qwen/Qwen3-30B-A3B-Instruct-2507";

/// A step of one row of a target on one GPU; `features` are those of a folder or online.
fn step(target: &str, draft: &Value, row_tokens: u64, features: &str) -> Workload {
    let config = json!({
        "target": "t", "output": "o",
        "data": { "train": [{ "path": "p" }], "row_tokens": row_tokens },
        "draft": draft, "train": { "features": features, "rows_per_step": 1 },
    });
    let config: TrainConfig = serde_json::from_value(config).expect("a configuration");
    let target = published_config(target).expect("a published target");
    let layout = Layout { target_value_bytes: 2, half_states: true, ..Layout::of(1, 0) };
    Workload::new(&config, target, layout).expect("sizes that fit")
}

fn glide(row_tokens: u64) -> Workload {
    step(LLAMA, &json!({ "method": "glide" }), row_tokens, "online")
}

fn eagle3(row_tokens: u64) -> Workload {
    step(LLAMA, &json!({ "method": "eagle3", "oov_rows": "keep" }), row_tokens, "FOLDER")
}

fn dflash() -> Workload {
    let taps = [1, 12, 23, 34, 45];
    let draft = json!({
        "method": "dflash", "layers": 2, "target_layers": taps, "block_size": 16, "blocks_per_row": 512,
    });
    step(QWEN, &draft, 3072, "FOLDER")
}

/// A decoding pass of so many rows after 2048 tokens, in bf16, with its logits.
fn decoding(rows: u64) -> Vec<Term> {
    let config = published_config(LLAMA).expect("a published target");
    let bytes = |layers| weight_bytes(&config, layers, &Held::Alike(2), 1);
    let of_target = TargetPass {
        config: &config,
        forward: ForwardPass { tokens: rows, ..pass(States::Half) },
        work: OfTarget::new(&config, &Layers::All.tensor_specs(&config), 2 * 2048),
        weights: bytes(Layers::All) - bytes(Layers::None),
        keys: 2048,
        half: true,
    };
    let head = 2.0 * (config.vocab_size * config.hidden_size) as f64;
    let head = Term {
        operations: rows as f64 * head,
        bytes: head,
        ..Term::new(Part::Loss, Kernel::Product)
    };
    of_target.terms().into_iter().chain([head]).collect()
}

fn on_h200() -> &'static Gpu {
    Gpu::named("h200").expect("a GPU that is known")
}

fn seconds(terms: &[Term]) -> f64 {
    PartTime::total(&roofline::parts(terms, on_h200()))
}

fn part_of(workload: &Workload, gpu: &Gpu, part: Part) -> PartTime {
    let parts = workload.estimate().parts(gpu);
    *parts.iter().find(|own| own.part == part).expect("a part that has work")
}

/// The table "Do rooflines say how long steps take?" of docs/results/gpu.md: each row is what these terms come to, and
/// its ratio lies in the range that the page states.
#[test]
fn predictions_are_as_near_to_measured_steps_as_the_page_says() {
    let of = |workload: Workload| workload.estimate().terms;
    let steps = [
        of(glide(32_768)),
        of(glide(32_768).with_documents(Some(4096))),
        of(eagle3(4096)),
        of(eagle3(16_384)),
        of(eagle3(32_768)),
        of(dflash()),
        decoding(1),
        decoding(8),
    ];
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/gpu.md");
    let page = std::fs::read_to_string(page).expect("a page");
    let table = page.lines().skip_while(|line| !line.starts_with("| step | predicted, s |"));
    let rows: Vec<&str> = table.skip(2).take_while(|line| line.starts_with('|')).collect();
    let range = "Predictions are 0.70 to 1.20 of what was measured";
    assert!(page.contains(range), "{range}");
    let mut stale = Vec::new();
    for (index, terms) in steps.iter().enumerate() {
        let row = rows.get(index).copied().unwrap_or_default();
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let measured = cells.get(3).and_then(|cell| cell.parse().ok()).unwrap_or(f64::NAN);
        let (predicted, ratio) = (seconds(terms), seconds(terms) / measured);
        let digits = if predicted < 0.1 { 4 } else { 3 };
        let told = [format!("{predicted:.digits$}"), format!("{ratio:.2}")];
        let written = [cells.get(2), cells.get(4)].map(|cell| cell.copied().unwrap_or_default());
        if told != written || !(0.70..=1.20).contains(&ratio) {
            stale.push(format!("{row}\n  predicted {} | ratio {}", told[0], told[1]));
        }
    }
    assert!(stale.is_empty() && rows.len() == steps.len(), "{}", stale.join("\n"));
}

#[test]
fn attention_grows_with_the_square_of_the_row_and_products_with_the_row() {
    let attention = |workload: &Workload| -> [f64; 2] {
        let of = |kernel| {
            let terms = workload.estimate().terms.into_iter();
            let terms = terms.filter(|term| term.part == Part::Target && term.kernel == kernel);
            terms.map(|term| term.operations).sum()
        };
        [Kernel::Attention, Kernel::Product].map(of)
    };
    let [short, long] = [glide(8192), glide(32_768)].map(|own| attention(&own));
    assert!((long[0] / short[0] - 16.0).abs() < 1e-9, "{short:?} {long:?}");
    assert!((long[1] / short[1] - 4.0).abs() < 1e-9, "{short:?} {long:?}");
    // Documents are rows of their own to attention.
    let packed = attention(&glide(32_768).with_documents(Some(8192)));
    assert!((packed[0] / short[0] - 4.0).abs() < 1e-9, "{packed:?}");
    // A document is at most as long as its row.
    let longer = attention(&glide(8192).with_documents(Some(1 << 40)));
    assert!((longer[0] / short[0] - 1.0).abs() < 1e-9, "{longer:?}");
}

#[test]
fn windows_bound_what_a_token_sees() {
    let mut config = published_config(LLAMA).expect("a published target");
    let of = |config: &TargetConfig| OfTarget::new(config, &[], 8192).attention;
    let whole = of(&config);
    config.parts.window = Some(1024);
    config.parts.sliding = (0..config.num_hidden_layers).map(|layer| layer < 8).collect();
    // A quarter of 32 layers see a quarter of 4096 keys.
    assert!((of(&config) / whole - (24.0 + 8.0 / 4.0) / 32.0).abs() < 1e-9);
}

#[test]
fn a_pass_of_few_rows_waits_for_memory_and_a_long_row_for_arithmetic() {
    for gpu in &GPUS {
        let parts = roofline::parts(&decoding(1), gpu);
        assert!(parts.iter().all(|part| part.bound == Bound::Memory), "{} {parts:?}", gpu.name);
        let long = part_of(&glide(32_768), gpu, Part::Target);
        assert_eq!(long.bound, Bound::Compute, "{}", gpu.name);
        let update = part_of(&eagle3(4096), gpu, Part::Optimizer);
        assert_eq!(update.bound, Bound::Memory, "{}", gpu.name);
    }
    // Rows of few more tokens cost no more reads of weights.
    let [one, eight] = [1, 8].map(|rows| seconds(&decoding(rows)));
    assert!(eight < 1.1 * one, "{one} {eight}");
}

/// Chunks of the loss have few rows where vocabularies are large.
#[test]
fn every_chunk_of_the_loss_reads_the_head_again() {
    let config = published_config(LLAMA).expect("a published target");
    let head = 2.0 * (config.vocab_size * config.hidden_size) as f64;
    let chunks = 32_768.0 / f64::from((1 << 25) / config.vocab_size as u32);
    let few = glide(32_768);
    let loss = part_of(&few, on_h200(), Part::Loss);
    // Chunks of a GPU with much memory read it less often.
    let layout = Layout { gpu_memory: Some(139 << 30), ..few.layout };
    let many = part_of(&Workload { layout, ..few.clone() }, on_h200(), Part::Loss);
    let ratio = (loss.bytes - many.bytes) / (3.0 * head);
    assert!((ratio / (32_768.0 / 256.0 - 32_768.0 / 2048.0) - 1.0).abs() < 1e-9, "{ratio}");
    assert!(many.starts * 7.5 < loss.starts && many.seconds < loss.seconds, "{many:?}");
    let chunks_of = |workload: &Workload| workload.row_memory().chunks;
    let bytes = chunks_of(&Workload { layout, ..few.clone() }) - chunks_of(&few);
    // A teacher's logits and the draft's, with gradients in bf16; gradients of all states are more than a small chunk.
    let states = 4 * 32_768 * config.hidden_size as u64;
    assert_eq!(bytes, 10 * 2048 * config.vocab_size as u64 - states);
    // Logits and their gradients, at least.
    assert!(loss.bytes > 2.0 * chunks * head, "{loss:?}, {chunks} chunks of {head}");
    // A GPU with little bandwidth waits for it.
    let bound = |gpu: &Gpu| part_of(&dflash(), gpu, Part::Loss).bound;
    let slow = Gpu::named("l40s").expect("a GPU that is known");
    assert_eq!([on_h200(), slow].map(bound), [Bound::Compute, Bound::Memory]);
}

#[test]
fn uploads_pass_while_the_gpu_computes() {
    let parts = eagle3(4096).estimate().parts(on_h200());
    let (upload, rest): (Vec<PartTime>, Vec<PartTime>) =
        parts.iter().partition(|own| own.part == Part::Upload);
    let rest: f64 = rest.iter().map(|own| own.seconds).sum();
    assert!(upload.len() == 1 && upload[0].seconds < rest, "{upload:?}");
    assert!((PartTime::total(&parts) - rest).abs() < 1e-12);
    assert!((PartTime::total(&upload) - upload[0].seconds).abs() < 1e-12);
}

/// In main memory a rank updates its part, which alone goes there where NCCL sums.
#[test]
fn an_update_in_main_memory_moves_what_it_needs() {
    // How often all gradients, all weights and the rank's part of them move, and its part of what Muon updates.
    for (ranks, zero, reduction, matrices, [gradients, weights, own, directions]) in [
        // The part's gradients twice, its weights there and back.
        (8, 3, "library", "muon", [0.0, 0.0, 3.0, 2.0]),
        (8, 0, "library", "muon", [0.0, 0.0, 4.0, 2.0]),
        (8, 1, "rank_order", "adamw", [1.0, 1.0, 1.0, 0.0]),
        (1, 0, "auto", "muon", [1.0, 1.0, 1.0, 2.0]),
    ] {
        let given = json!({
            "parallel": { "zero": zero, "reduction": reduction },
            "optimizer": { "matrices": matrices },
        });
        let layout = Layout { target_value_bytes: 2, half_states: true, ..Layout::of(ranks, 0) };
        let workload = workload("glide", &given, layout);
        let parameters = workload.parameters(&workload.row_memory());
        let (trained, all) = (parameters.trained as f64, parameters.all() as f64);
        let part = if ranks > 1 { parameters.shares().into_iter().max() } else { None };
        let part = part.map_or(trained, |part| part as f64);
        let of_muon = parameters.sizes.iter().zip(&parameters.moments);
        let of_muon = of_muon.filter(|(_, moments)| **moments == 1).map(|(size, _)| *size as f64);
        let of_muon = of_muon.sum::<f64>() / all;
        let moved = gradients * trained + weights * all + (own + directions * of_muon) * part;
        let update = part_of(&workload, on_h200(), Part::Optimizer);
        let off = update.bytes / (4.0 * moved) - 1.0;
        assert!(off.abs() < 1e-9, "{ranks} ranks, ZeRO {zero}, {reduction}, {matrices}: {off}");
        assert_eq!(update.bound, Bound::Upload);
    }
}

#[test]
fn a_gpu_computes_in_f32_what_it_is_told_to() {
    let half = glide(4096);
    let layout = Layout { target_value_bytes: 4, half_states: false, ..half.layout };
    let single = Workload { layout, ..half.clone() };
    let [half, single] = [half, single].map(|own| part_of(&own, on_h200(), Part::Target));
    assert!((half.operations - single.operations).abs() < 1.0);
    assert!(single.seconds > 5.0 * half.seconds, "{half:?} {single:?}");
}
