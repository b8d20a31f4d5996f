//! Updates that are spread over ranks come to what one process does.

use candle_core::{Device, Tensor, Var};
use longdraft_models::draft::Parameter;
use longdraft_models::weights::TensorRole;
use longdraft_parallel::threads::{in_threads, with_gpus};
use longdraft_parallel::{DataParallel, Gradients, ParallelConfig, Reduction};

use super::{AdamW, AdamWConfig, DeadParameters, MomentKind};

const SIZES: [(&str, [usize; 2]); 4] = [
    ("blocks.0.mlp.fc.weight", [130, 260]),
    ("tok_emb.weight", [40, 10]),
    ("blocks.0.attn.proj.weight", [3, 2]),
    ("dead", [7, 3]),
];

fn parameters() -> Vec<Parameter> {
    let parameter = |(index, (name, shape)): (usize, &(&str, [usize; 2]))| {
        let count = shape[0] * shape[1];
        let values: Vec<f32> =
            (0..count).map(|i| ((i * 7 + index * 3) % 23) as f32 * 0.1 - 1.0).collect();
        let tensor = Tensor::from_vec(values, &shape[..], &Device::Cpu).expect("tensor");
        let var = Var::from_tensor(&tensor).expect("variable");
        let (name, role) = ((*name).to_owned(), TensorRole::Layer);
        Parameter { name, var, role, decay: index != 1, dead: index == 3 }
    };
    SIZES.iter().enumerate().map(parameter).collect()
}

/// Rank 1 has none of the second parameter, nobody of the last.
fn gradients(rank: usize, step: usize) -> Gradients {
    let values = SIZES.iter().enumerate().map(|(index, (_, shape))| {
        let missing = index == 3 || (index, rank) == (1, 1);
        let value = |i: usize| ((i * 13 + index + 5 * rank + step) % 19) as f32 * 1e-3 - 9e-3;
        (!missing).then(|| (0..shape[0] * shape[1]).map(value).collect())
    });
    Gradients::from_values(values.collect())
}

fn values(parameters: &[Parameter]) -> Vec<Vec<f32>> {
    let values = |p: &Parameter| p.var.flatten_all().and_then(|t| t.to_vec1());
    parameters.iter().map(|p| values(p).expect("values")).collect()
}

#[test]
fn zero_1_updates_like_replicated_ranks_bit_for_bit() {
    let config = AdamWConfig {
        clip_norm: 0.05,
        dead_params: DeadParameters::Decay,
        ..AdamWConfig::default()
    };
    let run = |zero: u8, ranks: usize| {
        in_threads(ranks, |world| {
            let parallel = ParallelConfig { zero, bucket_bytes: 4096, ..Default::default() };
            let parameters = parameters();
            let parallel = DataParallel::by_blocks(&world, &parallel, &parameters);
            let folder = tempfile::tempdir().expect("folder");
            // A rank's moments may lie in a file.
            let optimizer = if zero == 1 && world.rank() == 1 {
                AdamW::over_files(config.clone(), &parallel, folder.path())
            } else {
                Ok(AdamW::over(config.clone(), &parallel))
            };
            let mut optimizer = optimizer.expect("optimizer");
            let norms: Vec<f64> = (0..3)
                .map(|step| {
                    let sums = parallel.reduce(gradients(world.rank(), step)).expect("sums");
                    let norm = parallel.norm(&sums).expect("norm");
                    let rate = 1e-2;
                    optimizer.update(&parallel, &parameters, &sums, norm, rate).expect("step");
                    norm
                })
                .collect();
            let first = |run| optimizer.moment(MomentKind::First, run).expect("a moment").len();
            let state = (0..parallel.runs().len()).map(first).sum::<usize>();
            (norms, values(&parameters), state)
        })
    };
    let all: usize = SIZES.iter().map(|(_, [a, b])| a * b).sum();
    for ranks in [2, 3] {
        let replicated = run(0, ranks);
        let sharded = run(1, ranks);
        for (a, b) in replicated.iter().zip(&sharded) {
            assert_eq!((&a.0, &a.1), (&b.0, &b.1));
            assert_eq!(a.2, all);
        }
        assert!(replicated.iter().all(|rank| rank.1 == replicated[0].1));
        assert_eq!(sharded.iter().map(|rank| rank.2).sum::<usize>(), all);
        assert!(sharded.iter().all(|rank| rank.2 < all));
    }
}

#[test]
fn gradients_summed_on_gpus_stay_there_and_update_alike() {
    let with = |reduction: Reduction, on_gpus: bool, zero: u8| {
        in_threads(3, |world| {
            let world = if on_gpus { with_gpus(&world) } else { world };
            let config = ParallelConfig { zero, reduction, ..Default::default() };
            let mut parameters = parameters();
            let parallel = DataParallel::by_blocks(&world, &config, &parameters);
            let free = reduction != Reduction::RankOrder;
            assert_eq!(parallel.sums_on_gpus(), on_gpus && free);
            let mut optimizer = AdamW::over(AdamWConfig::default(), &parallel);
            for step in 0..3 {
                let sums = parallel.reduce(gradients(world.rank(), step)).expect("sums");
                let known = parallel.runs().iter().enumerate().filter(|(_, run)| run.parameter < 3);
                let has_some = known.clone().next().is_some();
                if parallel.sums_on_gpus() {
                    assert!(known.into_iter().all(|(index, _)| sums.on_device(index).is_some()));
                }
                let norm = parallel.norm(&sums).expect("norm");
                // Under ZeRO-3 a rank keeps its part alone before the last update.
                if step == 2 {
                    parallel.release(&mut parameters).expect("release");
                }
                optimizer.update(&parallel, &parameters, &sums, norm, 1e-2).expect("step");
                assert_eq!(optimizer.lies_on_devices(), has_some && parallel.sums_on_gpus());
            }
            parallel.gather(&mut parameters).expect("gather");
            values(&parameters)
        })
    };
    let run = |on_gpus: bool, zero: u8| with(Reduction::Library, on_gpus, zero);
    let (host, gpus) = (run(false, 0), run(true, 0));
    assert_eq!(with(Reduction::Auto, true, 0), gpus, "GPUs sum unless it is forbidden");
    let ordered = with(Reduction::RankOrder, true, 0);
    assert_eq!(with(Reduction::Auto, false, 0), ordered, "main memory keeps the order");
    assert!(gpus.iter().all(|rank| *rank == gpus[0]));
    for (host, own) in host[0].iter().flatten().zip(gpus[0].iter().flatten()) {
        assert!((host - own).abs() <= 1e-5, "{host} {own}");
    }
    // A rank's part is updated there, too.
    for zero in [1, 3] {
        let parts = run(true, zero);
        assert!(parts.iter().all(|rank| *rank == parts[0]));
        for (whole, own) in gpus[0].iter().flatten().zip(parts[0].iter().flatten()) {
            assert!((whole - own).abs() <= 1e-6, "{whole} {own}, zero {zero}");
        }
    }
}

#[test]
fn zero_3_updates_like_zero_1_bit_for_bit_and_holds_a_share_between_steps() {
    let run = |zero: u8, ranks: usize| {
        in_threads(ranks, |world| {
            let config = ParallelConfig { zero, bucket_bytes: 4096, ..Default::default() };
            let mut parameters = parameters();
            let parallel = DataParallel::by_blocks(&world, &config, &parameters);
            let mut optimizer = AdamW::over(AdamWConfig::default(), &parallel);
            let mut held = Vec::new();
            for step in 0..3 {
                parallel.release(&mut parameters).expect("release");
                parallel.gather(&mut parameters).expect("gather");
                let sums = parallel.reduce(gradients(world.rank(), step)).expect("sums");
                let norm = parallel.norm(&sums).expect("norm");
                // The last update finds whole weights.
                if step < 2 {
                    parallel.release(&mut parameters).expect("release");
                }
                held.push(parameters.iter().map(|p| p.var.elem_count()).sum::<usize>());
                optimizer.update(&parallel, &parameters, &sums, norm, 1e-2).expect("step");
            }
            parallel.gather(&mut parameters).expect("gather");
            (values(&parameters), held)
        })
    };
    let all: usize = SIZES.iter().map(|(_, [a, b])| a * b).sum();
    for ranks in [1, 2, 3] {
        let (replicated, spread) = (run(1, ranks), run(3, ranks));
        for ((want, _), (got, held)) in replicated.iter().zip(&spread) {
            assert_eq!(want, got);
            let between = if ranks == 1 { all } else { 0 };
            assert_eq!(held[..], [between, between, all]);
        }
    }
}
