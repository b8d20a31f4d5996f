//! Updates that are spread over ranks come to what one process does.

use candle_core::{Device, Tensor, Var};
use longdraft_models::draft::Parameter;
use longdraft_models::weights::TensorRole;
use longdraft_parallel::threads::in_threads;
use longdraft_parallel::{DataParallel, Gradients, ParallelConfig, share_of};
use longdraft_pretrain::{Muon, MuonConfig};

const SIZES: [(&str, [usize; 2]); 3] = [
    ("blocks.0.mlp.fc.weight", [130, 260]),
    ("tok_emb.weight", [40, 10]),
    ("blocks.0.attn.proj.weight", [3, 2]),
];

fn parameters() -> Vec<Parameter> {
    let parameter = |(index, (name, shape)): (usize, &(&str, [usize; 2]))| {
        let count = shape[0] * shape[1];
        let values: Vec<f32> =
            (0..count).map(|i| ((i * 7 + index * 3) % 23) as f32 * 0.1 - 1.0).collect();
        let tensor = Tensor::from_vec(values, &shape[..], &Device::Cpu).expect("tensor");
        let var = Var::from_tensor(&tensor).expect("variable");
        let (name, role) = ((*name).to_owned(), TensorRole::Layer);
        Parameter { name, var, role, decay: true, dead: false }
    };
    SIZES.iter().enumerate().map(parameter).collect()
}

/// Rank 1 has none of the second parameter.
fn gradients(rank: usize) -> Gradients {
    let values = SIZES.iter().enumerate().map(|(index, (_, shape))| {
        let value = |i: usize| ((i * 13 + index + 5 * rank) % 19) as f32 * 1e-3 - 9e-3;
        ((index, rank) != (1, 1)).then(|| (0..shape[0] * shape[1]).map(value).collect())
    });
    Gradients::from_values(values.collect())
}

#[test]
fn muon_over_ranks_is_muon_on_the_summed_gradient() {
    let costs = Muon::costs(&parameters());
    let run = |ranks: usize| {
        in_threads(ranks, |world| {
            let parameters = parameters();
            let config = ParallelConfig::default();
            let parallel = DataParallel::by_cost(&world, &config, &parameters, &costs);
            let mut optimizer = Muon::over(MuonConfig::default(), &parallel, &parameters);
            // Two ranks' gradients, however many ranks there are.
            let mut sum = Gradients::new(&parameters);
            for rank in share_of(2, world.rank(), ranks) {
                sum.merge(gradients(rank)).expect("sums");
            }
            let sums = parallel.reduce(sum).expect("sums");
            let norm = parallel.norm(&sums).expect("norm");
            optimizer.update(&parallel, &parameters, &sums, norm, 1.0).expect("step");
            let values = |p: &Parameter| p.var.flatten_all().and_then(|t| t.to_vec1::<f32>());
            let values: Vec<_> = parameters.iter().map(|p| values(p).expect("values")).collect();
            (norm, values)
        })
    };
    let one = run(1);
    for ranks in [2, 4] {
        assert!(run(ranks).iter().all(|rank| *rank == one[0]), "{ranks}");
    }
}
