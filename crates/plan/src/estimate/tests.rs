//! Terms and times of a step, on workloads whose figures are known.

use longdraft_models::target_model::Layers;
use longdraft_parallel::Reduction;
use serde_json::json;

use super::FACTORS;
use crate::sample::workload;
use crate::{Layout, Links, Pace, Speed, Workload};

/// A GLIDE draft of Qwen3-8B whose ranks have a GPU each and share all weights.
fn of_gpus(layout: Layout) -> Workload {
    let given = json!({
        "data": { "row_tokens": 8192 }, "train": { "rows_per_step": 8 },
        "parallel": { "zero": 3, "reduction": "library" },
    });
    workload("glide", &given, layout)
}

/// Bytes of an item in a phase of a step.
fn bytes_of(workload: &Workload, phase: &str, item: &str) -> u64 {
    let phases = workload.estimate().phases;
    let phase = phases.iter().find(|own| own.name == phase).expect("a phase");
    phase.items.iter().filter(|own| own.name == item).map(|own| own.bytes).sum()
}

#[test]
fn what_is_gathered_while_the_target_computes_takes_time_only_beyond_that() {
    let layout = Layout { target_value_bytes: 2, ..Layout::of(8, 0) };
    let estimate = of_gpus(layout).estimate();
    let time = |links: Links| estimate.time(&Speed { pace: Pace::Gflops(400_000.0), links });
    let links = Links::of(true, Reduction::Library);
    let layers = estimate.sent.iter().find(|sent| sent.is_beside).expect("gathered layers");
    let fast = time(links);
    assert!((fast.beside - links.seconds(layers)).abs() < 1e-12, "{fast:?}");
    assert!(fast.beside > 0.0 && fast.total() < fast.work + fast.collectives);
    // Where links are slow, the target's work is all that passes meanwhile.
    let slow = time(links.given(None, Some(0.1), None));
    let of_target = estimate.target_operations / 4e14;
    assert!((slow.beside - of_target).abs() < 1e-12 && slow.total() > slow.collectives);
    // Parts of rows gather layers when they are due.
    let shared = of_gpus(Layout { sequence: 8, ..layout }).estimate();
    assert!(shared.sent.iter().all(|sent| !sent.is_beside));
}

#[test]
fn rows_are_whole() {
    let work = |rows: usize, layout: Layout| {
        let workload = Workload { rows_per_step: rows as u64, ..of_gpus(layout) };
        (workload.estimate().operations, workload.idle_ranks())
    };
    let ranks = |ranks: usize| Layout::of(ranks, 0);
    let (row, _) = work(1, ranks(1));
    let is = |(operations, idle): (f64, u64), rows: f64, idle_ranks: u64| {
        assert!((operations / row - rows).abs() < 1e-9 && idle == idle_ranks, "{rows}");
    };
    // One row is not done sooner by several ranks, unless they share it.
    is(work(1, ranks(2)), 1.0, 1);
    is(work(1, ranks(4)), 1.0, 3);
    is(work(1, Layout { sequence: 4, ..ranks(4) }), 0.25, 0);
    is(work(5, ranks(4)), 2.0, 0);
    is(work(8, ranks(4)), 2.0, 0);
    is(work(8, Layout { tensor: 4, ..ranks(4) }), 2.0, 0);
    // Ranks that share layers run the row of one of them together.
    let shared = Workload { rows_per_step: 1, ..of_gpus(Layout { tensor: 4, ..ranks(4) }) };
    let alone = Workload { rows_per_step: 1, ..of_gpus(ranks(1)) };
    let [shared, alone] = [shared, alone].map(|one| one.estimate().target_operations);
    assert!((4.0 * shared / alone - 1.0).abs() < 1e-9);
}

#[test]
fn a_collective_is_counted_once_a_row_and_layer() {
    let layout = Layout { target_value_bytes: 2, sequence: 4, ..Layout::of(8, 0) };
    let sent = of_gpus(layout).estimate().sent;
    let of = |name: &str| {
        let sent = sent.iter().find(|sent| sent.name == name);
        let sent = sent.unwrap_or_else(|| panic!("no {name}"));
        (sent.calls, sent.ranks)
    };
    // Four rows for each of two groups, 36 layers: keys, and values.
    assert_eq!(of("keys and values (sequence)"), (4 * 36 * 2, 4));
    let bytes = |layout| {
        let sent = of_gpus(layout).estimate().sent;
        let mut keys = sent.iter().filter(|sent| sent.name == "keys and values (sequence)");
        keys.next().expect("gathered keys").bytes
    };
    // Heads in bf16 are half as much, but for the last layer's, which the draft reads.
    let (single, half) = (bytes(layout), bytes(Layout { half_states: true, ..layout }));
    assert_eq!(72 * half, 37 * single);
    assert_eq!(of("target's layers (ZeRO-3)"), (4 * 36, 8));
    assert_eq!(of("embedding and head (ZeRO-3)"), (4 * 2, 8));
}

#[test]
fn weights_that_the_update_writes_in_16_bits_are_there_all_the_time() {
    let holds = |layout: Layout, name: &str| {
        bytes_of(&workload("glide", &json!({}), layout), name, FACTORS)
    };
    let one = Layout { target_value_bytes: 2, half_states: true, ..Layout::of(1, 0) };
    let made = Layout { half_states: false, ..one };
    let factors = holds(made, "backward");
    assert!(factors > 0 && holds(made, "features") == 0);
    assert_eq!([holds(one, "features"), holds(one, "backward")], [factors; 2]);
    assert_eq!(holds(Layout::of(1, 1), "backward"), 0);
    // A rank that updates a part of the weights rounds them for the products of each step.
    let given = json!({ "parallel": { "zero": 1, "reduction": "library" } });
    let spread = workload("glide", &given, Layout { ranks: 8, ..one });
    let of = |name: &str| bytes_of(&spread, name, FACTORS);
    assert_eq!([of("features"), of("backward")], [0, factors]);
}

#[test]
fn an_accelerator_forms_gradients_of_further_rows_onto_those_before() {
    let gradients = |rows: usize, threads: usize| {
        let given = json!({ "train": { "rows_per_step": rows } });
        let workload = workload("glide", &given, Layout::of(1, threads));
        let of = |name| bytes_of(&workload, "gradients", name);
        (of("gradients under way"), of("gradients of rows before"))
    };
    let (first, none) = gradients(1, 0);
    let (further, before) = gradients(2, 0);
    assert_eq!((none, gradients(1, 1).0), (0, gradients(2, 1).0));
    assert!(before > 0 && further < first / 100, "{further} of {first}, {before} before");
}

#[test]
fn a_stored_target_takes_what_the_types_of_its_files_take() {
    let of = |layers: &'static str, ends: &'static str, name: &str| {
        let layout = Layout { target_value_bytes: 1, ..Layout::of(1, 1) };
        let workload = workload("glide", &json!({}), layout);
        let specs = Layers::All.tensor_specs(&workload.target).into_iter();
        let types = specs.filter(|spec| spec.shape.len() == 2).map(|spec| {
            let is_layer = spec.name.starts_with("model.layers.");
            (spec.name, if is_layer { layers } else { ends })
        });
        let types = types.collect();
        bytes_of(&workload.with_stored(Some(types)), "forward", name)
    };
    // Of GLIDE's target all layers run. 8.19 billion values, 1.245 billion of them in both ends.
    let close = |bytes: u64, billions: f64| (bytes as f64 / 1e9 - billions).abs() < 0.02;
    let weights = |layers, ends| of(layers, ends, "target weights");
    assert!(close(weights("BF16", "BF16"), 16.38) && close(weights("F16", "F16"), 16.38));
    assert!(close(weights("F32", "F32"), 32.76) && close(weights("Q2_0", "Q2_0"), 32.76));
    // 4.5 and 6.5625 bits a value.
    let mixed = 6.946 * 4.5 / 8.0 + 1.245 * 6.5625 / 8.0;
    assert!(close(weights("Q4_K", "Q6_K"), mixed), "{}", weights("Q4_K", "Q6_K"));
    // Only a head of blocks is widened slab by slab.
    let [blocks, halves] = ["Q6_K", "BF16"].map(|ends| of("Q4_K", ends, "chunks of the loss"));
    assert_eq!(blocks - halves, 1024 * 4096 * 4);
}

#[test]
fn a_head_of_blocks_is_held_once_and_widened_some_rows_at_a_time() {
    let of = |target_value_bytes: usize, name: &str| {
        let layout = Layout { target_value_bytes, ..Layout::of(1, 1) };
        bytes_of(&workload("glide", &json!({}), layout), "forward", name)
    };
    let [blocks, halves] = [1, 2].map(|bytes| of(bytes, "chunks of the loss"));
    // 16 MiB of rows of 4096 values.
    assert_eq!(blocks - halves, 1024 * 4096 * 4);
    let [blocks, halves] = [1, 2].map(|bytes| of(bytes, "target weights") as f64 / 1e9);
    assert!((blocks - 8.19).abs() < 0.02 && (halves - 16.38).abs() < 0.02, "{blocks} {halves}");
}
