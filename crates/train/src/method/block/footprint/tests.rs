use longdraft_models::published::published_config;

use super::*;
use crate::footprint::tests::{assert_peak, assert_peak_on_gpu, on_cpu, on_gpu};

#[test]
fn a_row_takes_what_its_tensors_take_together() {
    let target = published_config("Qwen/Qwen3-8B").expect("a published target");
    let config = BlockConfig::for_target(&target, 5, 16, 0);
    for (tokens, parts, counted) in [(2048, 1, 20_466_321_412), (2048, 4, 12_654_833_668)] {
        let budget = BlockBudget::PerRow(512);
        let footprint = BlockFootprint::new(config.clone(), false, budget, &target);
        let memory = footprint.expect("sizes that fit").row_memory(&on_cpu(tokens, parts));
        assert_peak(&memory, counted);
    }
}

#[test]
fn a_row_takes_on_a_gpu_what_its_tensors_take_together() {
    for (name, layers, blocks, tokens, counted) in [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 2, 512, 3072, 4_807_525_888),
        ("Qwen/Qwen3-8B", 5, 512, 2048, 19_540_593_664),
        ("meta-llama/Llama-3.1-8B-Instruct", 5, 512, 3072, 21_294_319_616),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 2, 64, 1024, 318_467_328),
    ] {
        let target = published_config(name).expect("a published target");
        let config = BlockConfig::for_target(&target, layers, 16, 0);
        let budget = BlockBudget::PerRow(blocks);
        let footprint = BlockFootprint::new(config, false, budget, &target).expect("fits");
        let row = Row { teacher_logits: false, ..on_gpu(tokens) };
        assert_peak_on_gpu(&footprint.row_memory(&row), counted);
        // Product of gate and up, and the MLP's output, of every slot and layer.
        let [cpu, gpu] =
            [on_cpu(tokens, 1), on_gpu(tokens)].map(|row| footprint.row_memory(&row).activations);
        let more = target.intermediate_size + target.hidden_size;
        assert_eq!(gpu - cpu, (4 * blocks * 16 * layers * more) as u64);
    }
}

#[test]
fn a_divergence_takes_its_own_chunk_many_times_over() {
    let target = published_config("Qwen/Qwen3-8B").expect("a published target");
    let chunks = |loss, chain| {
        let config = BlockConfig { chain, ..BlockConfig::for_target(&target, 1, 16, 0) };
        let footprint =
            BlockFootprint::new(config, false, BlockBudget::PerRow(64), &target).expect("fits");
        footprint.with_loss(loss).row_memory(&on_cpu(2048, 1)).chunks
    };
    // 27 rows have 2^22 logits at most; states of these, and of all 1024 slots, have gradients.
    let (chunk, states) = (4 * 27 * 151_936, 4 * 4096 * (27 + 1024));
    let chain = ChainSizes { rank: 256, kind: ChainKind::Vanilla, confidence: None };
    for (loss, copies) in [(SlotLoss::ReverseKl, 15), (SlotLoss::Renyi, 15), (SlotLoss::Jsd, 44)] {
        assert_eq!(chunks(loss, None), copies * chunk + states, "{loss:?}");
        let tables = 4 * 4 * 256 * 151_936;
        assert_eq!(chunks(loss, Some(chain)), (copies + 2) * chunk + states + tables, "{loss:?}");
        assert!(chunks(loss, None) > chunks(SlotLoss::Tv, None), "the fused loss takes as much");
    }
}

#[test]
fn every_layer_counts_by_its_own_window() {
    let target = published_config("Qwen/Qwen3-8B").expect("a published target");
    let row = Row { teacher_logits: false, ..on_cpu(8192, 1) };
    let operations = |layers: &[LayerKind], window| {
        let config = BlockConfig {
            layers: layers.to_vec(),
            sliding_window: window,
            ..BlockConfig::for_target(&target, layers.len(), 16, 0)
        };
        let footprint = BlockFootprint::new(config, false, BlockBudget::PerRow(512), &target);
        footprint.expect("sizes that fit").operations(&row, 8192)
    };
    let (full, sliding) = (LayerKind::Full, LayerKind::Sliding);
    let of = |layers: [LayerKind; 3]| operations(&layers, Some(1024));
    let (none, all) = (of([full; 3]), of([sliding; 3]));
    let close = |a: f64, b: f64| (a - b).abs() < 1e-6 * a;
    assert!(close(none, operations(&[full; 3], None)), "a window that no layer has");
    // Four eighths of a row to one, over queries of 4096 values in a slot for each token.
    let saved = 14.0 * 4096.0 * (4096.0 - 1024.0);
    assert!(close(none - all, 3.0 * saved), "{none} {all}");
    let mixed = of([sliding, full, sliding]);
    assert!(close(none - mixed, 2.0 * saved), "{none} {mixed}");
    assert!(close(operations(&[sliding; 3], Some(1 << 20)), none), "a window beyond half a row");
}

#[test]
fn convolutions_selectors_and_chains_take_what_their_tensors_take() {
    let name = "HuggingFaceTB/SmolLM2-135M-Instruct";
    let target = published_config(name).expect("a published target");
    let plain = |layers, slots| BlockConfig::for_target(&target, layers, slots, 0);
    let dflash2 = BlockConfig {
        convolution: Some(ConvolutionSizes { kernel_size: 4, group_size: 64 }),
        selector: Some(SelectorSizes { rank: 64, top_k: 8 }),
        ..plain(1, 5)
    };
    let chained = |kind| BlockConfig {
        chain: Some(ChainSizes { rank: 256, kind, confidence: None }),
        ..plain(2, 8)
    };
    for (config, counted) in [
        (dflash2, 158_247_496),
        (chained(ChainKind::Vanilla), 373_788_164),
        (chained(ChainKind::Gated), 380_341_764),
        (chained(ChainKind::Rnn), 391_222_788),
    ] {
        let budget = BlockBudget::PerTokens(16);
        let footprint = BlockFootprint::new(config, false, budget, &target);
        let memory = footprint.expect("sizes that fit").row_memory(&on_cpu(1024, 1));
        assert_peak(&memory, counted);
    }
}
