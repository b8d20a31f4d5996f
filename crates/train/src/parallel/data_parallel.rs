//! Gradients of all ranks into one update.

use candle_core::Tensor;
use longdraft_kernels::adamw::{BLOCK, square_sums};
use longdraft_models::draft::Parameter;

use super::exchange::Exchange;
use super::{ParallelConfig, Partition, Reduction, Run, World, ZeroStage};
use crate::error::{Result, TrainError};
use crate::optim::Gradients;

/// What one rank does of an optimizer step, and how the ranks' parts come together.
#[derive(Debug, Clone)]
pub struct DataParallel {
    world: World,
    partition: Partition,
    sizes: Vec<usize>,
    /// What this rank's optimizer updates: its part, or everything.
    runs: Vec<Run>,
    is_sharded: bool,
    bucket: usize,
    reduction: Reduction,
}

impl DataParallel {
    /// Elementwise updates: shards of equal size.
    ///
    /// # Errors
    /// - the weights are to be spread over several ranks, which is not supported yet
    pub fn by_blocks(
        world: &World,
        config: &ParallelConfig,
        parameters: &[Parameter],
    ) -> Result<Self> {
        let stage = config.zero_stage();
        if stage == ZeroStage::Weights && world.size() > 1 {
            return Err(TrainError::Unsupported {
                problem: format!(
                    "`parallel.zero: 3` (weights spread over {} ranks) is not supported yet",
                    world.size()
                ),
            });
        }
        let sizes = sizes(parameters);
        let partition = Partition::by_blocks(&sizes, world.size());
        Ok(Self::new(world, config, (sizes, partition), stage != ZeroStage::Replicated))
    }

    /// Updates of whole matrices: every rank those that fall to it, whatever the ZeRO stage.
    ///
    /// # Errors
    /// - as [`Self::by_blocks`]
    pub fn by_cost(
        world: &World,
        config: &ParallelConfig,
        parameters: &[Parameter],
        costs: &[u64],
    ) -> Result<Self> {
        let sharded = Self::by_blocks(world, config, parameters)?;
        let partition = Partition::by_cost(&sharded.sizes, costs, world.size());
        Ok(Self::new(world, config, (sharded.sizes, partition), true))
    }

    /// One process that updates everything.
    pub fn single(parameters: &[Parameter]) -> Self {
        let sizes = sizes(parameters);
        let partition = Partition::by_blocks(&sizes, 1);
        Self::new(&World::single(), &ParallelConfig::default(), (sizes, partition), false)
    }

    fn new(
        world: &World,
        config: &ParallelConfig,
        (sizes, partition): (Vec<usize>, Partition),
        is_sharded: bool,
    ) -> Self {
        let is_sharded = is_sharded && world.size() > 1;
        let runs = if is_sharded {
            partition.of(world.rank()).to_vec()
        } else {
            let whole = |(parameter, len): (usize, &usize)| Run { parameter, start: 0, len: *len };
            sizes.iter().enumerate().map(whole).collect()
        };
        Self {
            world: world.clone(),
            partition,
            sizes,
            runs,
            is_sharded,
            bucket: config.bucket_bytes / size_of::<f32>(),
            reduction: config.reduction,
        }
    }

    /// The ranks.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// What this rank's optimizer updates, by parameter and start.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Whether ranks update different elements.
    pub fn is_sharded(&self) -> bool {
        self.is_sharded
    }

    fn exchange(&self) -> Exchange<'_> {
        Exchange {
            world: &self.world,
            partition: &self.partition,
            bucket: self.bucket,
            reduction: self.reduction,
        }
    }

    /// Sums over all ranks of whole parameters' gradients, for [`Self::runs`]. A parameter that no
    /// rank has a gradient of stays without one.
    pub fn reduce(&self, gradients: Gradients) -> Gradients {
        if self.world.size() == 1 {
            return gradients;
        }
        let whole = gradients.into_values();
        let mut reached: Vec<u64> = whole.iter().map(|value| u64::from(value.is_some())).collect();
        self.world.all_reduce_max(&mut reached);
        let own = self.exchange().reduce(&whole);
        drop(whole);
        let sums = if self.is_sharded { own } else { self.exchange().gather(&own, &self.sizes) };
        let known = sums.into_iter().zip(&self.runs);
        let known = known.map(|(sum, run)| (reached[run.parameter] > 0).then_some(sum));
        Gradients::from_values(known.collect())
    }

    /// `‖g‖₂` over all parameters of gradients that [`Self::reduce`] returned; the same bits
    /// however the elements are spread.
    pub fn norm(&self, gradients: &Gradients) -> f64 {
        if !self.is_sharded {
            return gradients.norm();
        }
        let firsts: Vec<usize> = self
            .sizes
            .iter()
            .scan(0, |end, size| {
                let first = *end;
                *end += size.div_ceil(BLOCK);
                Some(first)
            })
            .collect();
        let blocks = self.sizes.iter().map(|size| size.div_ceil(BLOCK)).sum();
        let mut squares = vec![0.0_f64; blocks];
        for (index, run) in self.runs.iter().enumerate() {
            let Some(values) = gradients.get(index) else { continue };
            let first = firsts[run.parameter] + run.start / BLOCK;
            let own = square_sums(values);
            squares[first..first + own.len()].copy_from_slice(&own);
        }
        // Every block is one rank's; the others add zeros.
        self.world.all_reduce_sum(&mut squares);
        let of_parameter = |(first, size): (&usize, &usize)| -> f64 {
            squares[*first..first + size.div_ceil(BLOCK)].iter().sum()
        };
        firsts.iter().zip(&self.sizes).map(of_parameter).sum::<f64>().sqrt()
    }

    /// A run's values as they stand.
    ///
    /// # Errors
    /// - the parameter cannot be read
    pub fn read(&self, parameters: &[Parameter], run: &Run) -> Result<Vec<f32>> {
        let values: Vec<f32> = parameters[run.parameter].var.flatten_all()?.to_vec1()?;
        Ok(if run.len == values.len() { values } else { values[run.range()].to_vec() })
    }

    /// Sets a run's new values where this rank holds everything; hands them back where
    /// [`Self::publish`] has to bring the ranks' parts together.
    ///
    /// # Errors
    /// - the parameter cannot be written
    pub fn write(
        &self,
        parameters: &[Parameter],
        run: &Run,
        values: Vec<f32>,
    ) -> Result<Option<Vec<f32>>> {
        if self.is_sharded {
            return Ok(Some(values));
        }
        set(&parameters[run.parameter], values)?;
        Ok(None)
    }

    /// Brings the new values of all ranks' runs together, those of this rank by [`Self::runs`].
    ///
    /// # Errors
    /// - a parameter cannot be written
    pub fn publish(&self, parameters: &[Parameter], own: Vec<Option<Vec<f32>>>) -> Result<()> {
        if !self.is_sharded {
            return Ok(());
        }
        let own: Vec<Vec<f32>> = own.into_iter().map(Option::unwrap_or_default).collect();
        let whole = self.exchange().gather(&own, &self.sizes);
        drop(own);
        whole.into_iter().zip(parameters).try_for_each(|(values, parameter)| set(parameter, values))
    }
}

fn sizes(parameters: &[Parameter]) -> Vec<usize> {
    parameters.iter().map(|parameter| parameter.var.elem_count()).collect()
}

fn set(parameter: &Parameter, values: Vec<f32>) -> Result<()> {
    let tensor = Tensor::from_vec(values, parameter.var.shape(), parameter.var.device())?;
    Ok(parameter.var.set(&tensor)?)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::in_threads;
    use super::*;
    use crate::optim::{AdamW, AdamWConfig, DeadParameters, Muon, MuonConfig};

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
            Parameter { name: (*name).to_owned(), var, decay: index != 1, dead: index == 3 }
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
                let parallel =
                    DataParallel::by_blocks(&world, &parallel, &parameters).expect("data parallel");
                let mut optimizer = AdamW::over(config.clone(), &parallel);
                let norms: Vec<f64> = (0..3)
                    .map(|step| {
                        let sums = parallel.reduce(gradients(world.rank(), step));
                        let norm = parallel.norm(&sums);
                        let rate = 1e-2;
                        optimizer.update(&parallel, &parameters, &sums, norm, rate).expect("step");
                        norm
                    })
                    .collect();
                let state: usize = optimizer.state().first.iter().map(Vec::len).sum();
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
    fn muon_over_ranks_is_muon_on_the_summed_gradient() {
        let names = &parameters()[..3];
        let costs = Muon::costs(names);
        let run = |ranks: usize| {
            in_threads(ranks, |world| {
                let parameters = parameters()[..3].to_vec();
                let config = ParallelConfig::default();
                let parallel = DataParallel::by_cost(&world, &config, &parameters, &costs)
                    .expect("data parallel");
                let mut optimizer = Muon::over(MuonConfig::default(), &parallel, &parameters);
                // Two ranks' gradients, however many ranks there are.
                let mut sum = Gradients::new(&parameters);
                for rank in super::super::share_of(2, world.rank(), ranks) {
                    let values = gradients(rank, 0).into_values()[..3].to_vec();
                    sum.merge(Gradients::from_values(values));
                }
                let sums = parallel.reduce(sum);
                let norm = parallel.norm(&sums);
                optimizer.update(&parallel, &parameters, &sums, norm, 1.0).expect("step");
                (norm, values(&parameters))
            })
        };
        let one = run(1);
        for ranks in [2, 4] {
            assert!(run(ranks).iter().all(|rank| *rank == one[0]), "{ranks}");
        }
    }

    #[test]
    fn spread_weights_are_refused_by_several_ranks_only() {
        let config = ParallelConfig { zero: 3, ..ParallelConfig::default() };
        let refused =
            in_threads(2, |world| DataParallel::by_blocks(&world, &config, &parameters()).is_err());
        assert_eq!(refused, [true, true]);
        assert!(DataParallel::by_blocks(&World::single(), &config, &parameters()).is_ok());
    }
}
