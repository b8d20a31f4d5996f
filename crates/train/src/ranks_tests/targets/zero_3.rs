//! Targets whose layers are spread over ranks have the bits of whole ones.

use candle_core::DType;
use longdraft_features::{FeatureNeeds, TeacherKind, join_target};
use longdraft_models::target_model::Layers;

use super::*;

#[test]
fn zero_3_target_has_the_bits_of_a_whole_one() {
    let mixture = json!({
        "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8,
        "moe_intermediate_size": 5, "tie_word_embeddings": false,
    });
    let tied = json!({ "tie_word_embeddings": true });
    for (more, dtype) in [(json!({}), DType::F32), (tied, DType::BF16), (mixture, DType::F32)] {
        let config = config(&more);
        let options = TargetOptions { dtype, ..TargetOptions::default() };
        let whole = target(&config, options.clone(), None);
        let values = |target: &Target| {
            let head = target.hold_ends().and_then(|ends| ends.head()).expect("head");
            head.to_dtype(DType::F32).and_then(|head| head.to_vec2::<f32>()).expect("values")
        };
        for (ranks, on_gpus) in [(1, false), (2, false), (3, false), (2, true), (3, true)] {
            let all = in_threads(ranks, |world| {
                let world = exchanging(world, on_gpus);
                let target = target(&config, options.clone(), Some(&world));
                assert_eq!(target.fingerprint(), whole.fingerprint());
                let seen = own_features(&world, &target);
                let last = target.last_layer().expect("layer");
                let sent = || world.traffic().sent_bytes;
                let (ends, before) = (target.hold_ends().expect("ends"), sent());
                assert_eq!(values(&target), values(&whole));
                assert_eq!(sent(), before, "held ends are not gathered again");
                drop(ends);
                drop(target.hold_ends().expect("ends"));
                assert_eq!(sent() > before, ranks > 1, "nothing is kept");
                (seen, last.len())
            });
            let want = whole.last_layer().expect("layer").len();
            for (seen, last) in all {
                assert_eq!(last, want);
                for (row, taps, got) in seen {
                    let features = whole.forward(&sequence(row), &taps).expect("features");
                    let what = format!("{ranks} ranks, GPUs: {on_gpus}, row {row}, {taps:?}");
                    assert_eq!(bits(&got), bits(&features), "{what}");
                }
            }
        }
    }
}

#[test]
fn zero_3_ranks_without_rows_join_whatever_is_needed() {
    let config = config(&json!({}));
    for teacher in [TeacherKind::None, TeacherKind::Full, TeacherKind::TopK(4)] {
        let needs = FeatureNeeds { taps: vec![Tap::LastKv], teacher, ahead: 0 };
        let kept = in_threads(3, |world| {
            let target = target(&config, TargetOptions::default(), Some(&world));
            let batch = batch(world.rank());
            // Fewer rows than ranks: one rank has none.
            if world.rank() < 2 {
                let features = run_target(&target, &batch, None, &needs);
                return features.expect("features").last_kv.is_some();
            }
            join_target(&target, &needs).expect("join");
            false
        });
        assert_eq!(kept, [true, true, false]);
    }
}

#[test]
fn zero_3_spreads_a_target_without_layers() {
    let config = config(&json!({}));
    for layers in [Layers::Last, Layers::None] {
        in_threads(2, |world| {
            let options = TargetOptions { layers, ..TargetOptions::default() };
            let target = target(&config, options, Some(&world));
            let count = target.last_layer().expect("layer").len();
            assert_eq!(count > 0, layers == Layers::Last);
            assert!(target.join_forward(&Taps::of(&[Tap::LastKv])).is_err());
        });
    }
}
