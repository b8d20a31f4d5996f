use longdraft_models::published::published_config;

use super::*;
use crate::footprint::tests::{on_cpu, on_gpu};

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
        footprint.expect("sizes that fit").operations(&row, 8192).total()
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
fn a_gpu_s_convolutions_hold_gradients_beside_those_of_an_mlp() {
    let target = published_config("Qwen/Qwen3-8B").expect("a published target");
    let of = |intermediate_size, convolution| {
        let config = BlockConfig::for_target(&target, 1, 16, 0);
        let config = BlockConfig { intermediate_size, convolution, ..config };
        BlockFootprint::new(config, false, BlockBudget::PerRow(64), &target).expect("fits")
    };
    let convolution = Some(ConvolutionSizes { kernel_size: 2, group_size: 16 });
    // So many slots that weights hardly count.
    let (slots, width, kernels) = (1 << 20, 4096, 1024);
    let of_row = |footprint: &BlockFootprint| footprint.gradients(&on_gpu(2048), slots, 1 << 30);
    let more = of_row(&of(12_288, convolution)) - of_row(&of(12_288, None));
    assert_eq!(more, slots * (width + kernels), "kernels, and what the second one reads");
    // Where an MLP takes less than the convolution before it.
    let narrow = of(16, convolution);
    let held = narrow.convolved_gradients(narrow.layer().matrices(), slots);
    assert_eq!(held, 5 * slots * width + 3 * 16 * width);
}
