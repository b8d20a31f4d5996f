//! Buckets of gradients and weights between the ranks' devices.
//!
//! The same rounds as in [`super::exchange`]. Devices exchange blocks of one size, so shorter ones are filled up.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use longdraft_kernels::collectives::DeviceRanks;

use super::exchange::{indexed_stretches, rounds, stretches};
use super::{Partition, Run};

pub(super) struct DeviceExchange<'a> {
    pub(super) devices: &'a dyn DeviceRanks,
    pub(super) partition: &'a Partition,
    /// f32 values of a bucket.
    pub(super) bucket: usize,
}

impl DeviceExchange<'_> {
    /// Sums everybody's whole parameters, each flat and in f32; a rank gets those of its runs, flat.
    pub(super) fn reduce(&self, whole: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut own = vec![Vec::new(); self.own_runs().len()];
        for (counts, stretch) in self.rounds() {
            let block = longest(&counts);
            let mut parts = Vec::new();
            for (rank, count) in counts.iter().enumerate() {
                for (run, part) in stretches(self.partition.of(rank), &stretch) {
                    let from = run.start + part.start;
                    parts.push(whole[run.parameter].narrow(0, from, part.len())?);
                }
                self.fill_up(&mut parts, block - count)?;
            }
            let blocks = Tensor::cat(&parts, 0)?.reshape((counts.len(), block))?;
            let sums = self.devices.reduce_scatter(&blocks)?;
            let mut start = 0;
            for (index, part) in indexed_stretches(self.own_runs(), &stretch) {
                own[index].push(sums.narrow(0, start, part.len())?);
                start += part.len();
            }
        }
        own.into_iter().map(|parts| self.joined(&parts)).collect()
    }

    /// Puts everybody's values of their runs together, each flat and in f32, to so many whole parameters.
    pub(super) fn gather(&self, own: &[Tensor], parameters: usize) -> Result<Vec<Tensor>> {
        let mut pieces = vec![Vec::new(); parameters];
        for (counts, stretch) in self.rounds() {
            let mut parts = Vec::new();
            for (index, part) in indexed_stretches(self.own_runs(), &stretch) {
                parts.push(own[index].narrow(0, part.start, part.len())?);
            }
            self.fill_up(&mut parts, longest(&counts) - counts[self.devices.rank()])?;
            let all = self.devices.all_gather(&[Tensor::cat(&parts, 0)?])?;
            for rank in 0..counts.len() {
                let (values, mut start) = (all[0].get(rank)?, 0);
                for (run, part) in stretches(self.partition.of(rank), &stretch) {
                    let piece = values.narrow(0, start, part.len())?;
                    pieces[run.parameter].push((run.start + part.start, piece));
                    start += part.len();
                }
            }
        }
        let whole = pieces.into_iter().map(|mut pieces| {
            pieces.sort_by_key(|(start, _)| *start);
            self.joined(&pieces.into_iter().map(|(_, piece)| piece).collect::<Vec<_>>())
        });
        whole.collect()
    }

    fn own_runs(&self) -> &[Run] {
        self.partition.of(self.devices.rank())
    }

    fn rounds(&self) -> impl Iterator<Item = (Vec<usize>, Range<usize>)> {
        rounds(self.partition.sizes(), self.bucket)
    }

    fn fill_up(&self, parts: &mut Vec<Tensor>, values: usize) -> Result<()> {
        if values > 0 {
            parts.push(Tensor::zeros(values, DType::F32, &self.devices.device())?);
        }
        Ok(())
    }

    fn joined(&self, parts: &[Tensor]) -> Result<Tensor> {
        match parts {
            [] => Tensor::zeros(0, DType::F32, &self.devices.device()),
            several => Tensor::cat(several, 0),
        }
    }
}

fn longest(counts: &[usize]) -> usize {
    counts.iter().copied().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::Reduction;
    use super::super::exchange::Exchange;
    use super::super::threads::{in_threads, with_gpus};
    use super::*;

    #[test]
    fn buckets_between_devices_have_the_bits_of_those_in_main_memory() {
        let sizes = [5, 1, 0, 7, 3];
        let of = |rank: usize, parameter: usize| -> Vec<f32> {
            let value = |i| (100 * parameter + i) as f32 * 10_f32.powi(-(rank as i32));
            (0..sizes[parameter]).map(value).collect()
        };
        let flat = |values: &Vec<f32>| Tensor::from_slice(values, values.len(), &Device::Cpu);
        let values = |tensors: Vec<Tensor>| -> Vec<Vec<f32>> {
            tensors.iter().map(|tensor| tensor.to_vec1().expect("values")).collect()
        };
        for ranks in [2, 3, 7] {
            let costs = sizes.map(|size| size as u64);
            for partition in
                [Partition::by_cost(&sizes, &costs, ranks), Partition::by_blocks(&sizes, ranks)]
            {
                for bucket in [1, 4, 1000] {
                    in_threads(ranks, |world| {
                        let world = with_gpus(&world);
                        let devices = world.gpus().expect("devices");
                        let partition = &partition;
                        let there = DeviceExchange { devices, partition, bucket };
                        let reduction = Reduction::RankOrder;
                        let here = Exchange { world: &world, partition, bucket, reduction };
                        let whole: Vec<_> = (0..5).map(|index| of(world.rank(), index)).collect();
                        let tensors: Result<Vec<_>> = whole.iter().map(flat).collect();
                        let sums = there.reduce(&tensors.expect("tensors")).expect("sums");
                        let whole: Vec<_> = whole.into_iter().map(Some).collect();
                        let own = here.reduce(&whole);
                        assert_eq!(values(sums.clone()), own);
                        let all = there.gather(&sums, 5).expect("all");
                        assert_eq!(
                            values(all),
                            here.gather(&own, &sizes),
                            "{ranks} ranks, {bucket}"
                        );
                    });
                }
            }
        }
    }
}
