//! Ranks that share the target's layers (`parallel.tensor`).

use std::path::Path;

use candle_core::DType;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;

use super::{
    EAGLE3, groups_train_like_one_process, joined, memory_mib, succeed_on, target_of_many_layers,
};
use crate::support::{self, Workshop, fail, fail_with, mpirun, stdout, told_by};

#[test]
fn mpi_ranks_that_share_layers_train_like_one_process() {
    // Three rows a step: ranks of two and of four have different numbers of them, or none.
    let groups = [(2, &["parallel.tensor=2"][..]), (4, &["parallel.tensor=2", "parallel.zero=1"])];
    for method in [&[][..], &EAGLE3] {
        groups_train_like_one_process(method, &groups);
    }
    let memory = ["train.features=memory", "teacher.soft_targets=top_k"];
    groups_train_like_one_process(&memory, &groups);
}

#[test]
fn mpi_ranks_that_cannot_share_layers_are_refused() {
    let shop = Workshop::of_four_layers();
    let (config, store) = (shop.config(), format!("train.features={}", shop.path("store")));
    let tensor = "parallel.tensor=2";
    for (ranks, more, problem) in [
        (3, vec![tensor], "`parallel.tensor: 2` does not divide the 3 ranks into groups"),
        (
            4,
            vec!["parallel.tensor=4"],
            "`num_key_value_heads` = 2 is not a multiple of 4 (it may be 1, 2)",
        ),
        (2, vec![tensor, &store], "set `parallel.tensor: 1`"),
    ] {
        let output = mpirun(ranks, &joined(&[&["train", &config], &more])).output();
        let text = told_by(&output.expect("mpirun starts"), 2);
        assert!(text.contains(problem) && text.contains("hint: "), "{text}");
        assert!(!Path::new(&shop.path("run/config.yaml")).exists(), "nothing has begun");
    }
    for (more, problem) in [
        ("parallel.sequence=2", "`parallel.sequence: 2` cuts them into parts: set one of them"),
        ("parallel.zero=3", "would cut the target's weights twice: set `parallel.zero: 1`"),
        ("train.steps=1", "`parallel.tensor: 2` does not divide the 1 ranks into groups"),
    ] {
        fail_with(&["train", &config, tensor, more], 2, &[problem]);
    }
    let records = ["capture", &config, &store, tensor, "--records", &shop.path("store")];
    assert!(fail(&records, 2).contains("hint: set parallel.tensor=1"));
}

#[test]
fn mpi_ranks_that_share_layers_hold_their_share_of_them() {
    let shop = target_of_many_layers();
    let weights = std::fs::metadata(shop.target.join("model.safetensors")).expect("file").len();
    let config = shop.config();
    let peak = |tensor: usize| {
        let run = shop.path(&format!("tensor-{tensor}"));
        let (output, tensor) = (format!("output={run}"), format!("parallel.tensor={tensor}"));
        let set = ["train.steps=1", "train.log_every=1"];
        succeed_on(2, &joined(&[&["train", &config, &output, &tensor], &set]));
        memory_mib(&run)
    };
    let (whole, shared, weights) = (peak(1), peak(2), weights as f64 / 1_048_576.0);
    eprintln!("{weights:.0} MiB of weights, {whole:.0} MiB, {shared:.0} MiB");
    // The embedding is whole; a layer is whole while it is read.
    assert!(shared < whole - 0.4 * weights, "{shared} {whole}, {weights} of weights");
}

#[test]
fn mpi_ranks_that_share_layers_capture_one_store() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let place = |store: &str| format!("train.features={store}");
    let (one, shared) = (shop.path("one"), shop.path("shared"));
    let set = ["capture.shard_mib=1", "capture.dtype=f32", "capture.compression=none"];
    for method in [&[][..], &EAGLE3] {
        let set = joined(&[&set, method, &["data.row_tokens=512"]]);
        for (ranks, store, more) in [(1, &one, &[][..]), (4, &shared, &["parallel.tensor=2"])] {
            let _ = std::fs::remove_dir_all(store);
            let place = place(store);
            let arguments = joined(&[&["capture", &config, &place], &set, more]);
            let shown = stdout(&succeed_on(ranks, &arguments));
            assert!(shown.starts_with("done in "), "{shown}");
        }
        assert_same_shards(&one, &shared);
        let (place, output) = (place(&shared), format!("output={}", shop.path("trained")));
        let arguments = ["train", &config, &place, &output, "train.steps=2"];
        succeed_on(2, &joined(&[&arguments, &set]));
        std::fs::remove_dir_all(shop.path("trained")).expect("run");
    }
}

/// The stores hold the same files, and in these the same tensors within rounding.
#[track_caller]
fn assert_same_shards(one: &str, other: &str) {
    let (names, others) = (support::files(one), support::files(other));
    assert!(names.keys().eq(others.keys()), "{:?} {:?}", names.keys(), others.keys());
    let shards: Vec<&String> = names.keys().filter(|name| name.ends_with(".safetensors")).collect();
    assert!(shards.len() > 1, "{:?}", names.keys());
    for shard in shards {
        let [a, b] = [one, other].map(|store| {
            SafetensorsSource::open_file(&Path::new(store).join(shard)).expect("a shard")
        });
        assert_eq!(a.names(), b.names());
        for name in a.names().iter().filter(|name| !name.ends_with("mask")) {
            let [x, y] = [&a, &b].map(|source| values(source, name));
            let largest = x.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            let close = |(x, y): (&f32, &f32)| (x - y).abs() <= 1e-5 * largest;
            assert!(x.len() == y.len() && x.iter().zip(&y).all(close), "{shard}: {name}");
        }
    }
}

/// Values of a tensor of whatever type.
fn values(source: &SafetensorsSource, name: &str) -> Vec<f32> {
    if let Ok(tensor) = source.load(name, DType::F32) {
        return tensor.flatten_all().and_then(|t| t.to_vec1()).expect("values");
    }
    let ids = source.load_integers(name).expect("integers");
    ids.into_iter().map(|id| id as f32).collect()
}
