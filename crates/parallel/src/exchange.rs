//! Buckets of gradients and weights between the ranks.
//!
//! A round moves the same stretch of every rank's elements, together at most a bucket. A rank's
//! elements are its runs one after the other.

use super::{Partition, Reduction, Run, World};

pub(super) struct Exchange<'a> {
    pub(super) world: &'a World,
    pub(super) partition: &'a Partition,
    /// f32 values of a bucket.
    pub(super) bucket: usize,
    pub(super) reduction: Reduction,
}

impl Exchange<'_> {
    /// Sums everybody's values of whole parameters (`None`: zeros); a rank gets those of its runs.
    pub(super) fn reduce(&self, whole: &[Option<Vec<f32>>]) -> Vec<Vec<f32>> {
        let mut own: Vec<Vec<f32>> = self.own_runs().iter().map(|run| zeros(run.len)).collect();
        for (counts, stretch) in self.rounds() {
            let mut bucket = Vec::with_capacity(counts.iter().sum());
            for rank in 0..self.world.size() {
                for (run, part) in stretches(self.partition.of(rank), &stretch) {
                    match &whole[run.parameter] {
                        Some(values) => bucket.extend_from_slice(&values[run.start..][part]),
                        None => bucket.resize(bucket.len() + part.len(), 0.0),
                    }
                }
            }
            let sums = match self.reduction {
                Reduction::Auto | Reduction::RankOrder => {
                    self.world.reduce_scatter(&bucket, &counts)
                }
                Reduction::Library => self.world.reduce_scatter_by_library(&bucket, &counts),
            };
            let mut rest = sums.as_slice();
            for (index, part) in indexed_stretches(self.own_runs(), &stretch) {
                let (values, after) = rest.split_at(part.len());
                own[index][part].copy_from_slice(values);
                rest = after;
            }
        }
        own
    }

    /// Puts everybody's values of their runs together to whole parameters of these sizes.
    pub(super) fn gather<V: AsRef<[f32]>>(&self, own: &[V], sizes: &[usize]) -> Vec<Vec<f32>> {
        let mut whole: Vec<Vec<f32>> = sizes.iter().map(|size| zeros(*size)).collect();
        for (counts, stretch) in self.rounds() {
            let mut bucket = Vec::new();
            for (index, part) in indexed_stretches(self.own_runs(), &stretch) {
                bucket.extend_from_slice(&own[index].as_ref()[part]);
            }
            for (rank, values) in self.world.gather_counted(&bucket, &counts).iter().enumerate() {
                let mut rest = values.as_slice();
                for (run, part) in stretches(self.partition.of(rank), &stretch) {
                    let (values, after) = rest.split_at(part.len());
                    whole[run.parameter][run.start..][part].copy_from_slice(values);
                    rest = after;
                }
            }
        }
        whole
    }

    fn own_runs(&self) -> &[Run] {
        self.partition.of(self.world.rank())
    }

    /// Each round's counts by rank, and its stretch of every rank's elements.
    fn rounds(&self) -> impl Iterator<Item = (Vec<usize>, std::ops::Range<usize>)> {
        rounds(self.partition.sizes(), self.bucket)
    }
}

/// Each round's counts by rank, and its stretch of every rank's elements, of which a round moves at
/// most `bucket` together.
pub(super) fn rounds(
    sizes: Vec<usize>,
    bucket: usize,
) -> impl Iterator<Item = (Vec<usize>, std::ops::Range<usize>)> {
    let step = (bucket / sizes.len()).max(1);
    let longest = sizes.iter().copied().max().unwrap_or(0);
    (0..longest).step_by(step).map(move |start| {
        let counts = sizes.iter().map(|size| step.min(size.saturating_sub(start)));
        (counts.collect(), start..start + step)
    })
}

/// Bytes that the rank which sends most sends to others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exchanged {
    /// Of gradients, so that they are summed.
    pub reduced: u64,
    /// Of sums or new weights, so that all have them.
    pub gathered: u64,
    /// Rounds of either, each a collective.
    pub rounds: u64,
}

/// What an exchange of f32 values sends, of which rank `r` owns `shares[r]`.
pub fn exchanged_bytes(shares: &[usize], bucket_bytes: usize, reduction: Reduction) -> Exchanged {
    let ranks = shares.len();
    let mut reduced = vec![0_u64; ranks];
    let (mut gathered, mut all_rounds) = (0, 0);
    for (counts, _) in rounds(shares.to_vec(), bucket_bytes / size_of::<f32>()) {
        let (all, longest) = (counts.iter().sum::<usize>(), counts.iter().copied().max());
        let block = longest.unwrap_or(0) * (ranks - 1);
        gathered += block as u64;
        all_rounds += 1;
        for (reduced, own) in reduced.iter_mut().zip(&counts) {
            *reduced += match reduction {
                Reduction::Auto | Reduction::RankOrder => all - own,
                Reduction::Library => block,
            } as u64;
        }
    }
    let bytes = size_of::<f32>() as u64;
    let reduced = reduced.into_iter().max().unwrap_or(0) * bytes;
    Exchanged { reduced, gathered: gathered * bytes, rounds: all_rounds }
}

fn zeros(count: usize) -> Vec<f32> {
    vec![0.0; count]
}

/// The runs that meet a stretch of a rank's elements, by index, each with the part of itself that
/// lies in it.
pub(super) fn indexed_stretches<'a>(
    runs: &'a [Run],
    stretch: &std::ops::Range<usize>,
) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + 'a {
    let (from, to) = (stretch.start, stretch.end);
    let mut before = 0;
    runs.iter().enumerate().filter_map(move |(index, run)| {
        let start = before;
        before += run.len;
        let (first, last) = (from.max(start), to.min(before));
        (first < last).then(|| (index, first - start..last - start))
    })
}

pub(super) fn stretches<'a>(
    runs: &'a [Run],
    stretch: &std::ops::Range<usize>,
) -> impl Iterator<Item = (&'a Run, std::ops::Range<usize>)> + 'a {
    indexed_stretches(runs, stretch).map(|(index, part)| (&runs[index], part))
}

#[cfg(test)]
mod tests {
    use super::super::threads::in_threads;
    use super::*;

    #[test]
    fn buckets_of_any_size_sum_and_gather_the_same() {
        let sizes = [5, 1, 0, 7, 3];
        let costs = [5, 1, 0, 7, 3];
        let of = |rank: usize, parameter: usize| -> Option<Vec<f32>> {
            let value = |i| (100 * parameter + i) as f32 * 10_f32.powi(-(rank as i32));
            // Rank 1 has no gradient of parameter 3.
            ((rank, parameter) != (1, 3)).then(|| (0..sizes[parameter]).map(value).collect())
        };
        for ranks in [1, 2, 3] {
            let partition = Partition::by_cost(&sizes, &costs, ranks);
            let mut want: Vec<Vec<f32>> = sizes.iter().map(|size| zeros(*size)).collect();
            for (parameter, want) in want.iter_mut().enumerate() {
                for rank in 0..ranks {
                    let values = of(rank, parameter).unwrap_or_else(|| zeros(want.len()));
                    want.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                }
            }
            for bucket in [1, 4, 1000] {
                let all = in_threads(ranks, |world| {
                    let reduction = Reduction::RankOrder;
                    let exchange =
                        Exchange { world: &world, partition: &partition, bucket, reduction };
                    let whole: Vec<_> = (0..sizes.len()).map(|p| of(world.rank(), p)).collect();
                    let own = exchange.reduce(&whole);
                    exchange.gather(&own, &sizes)
                });
                assert!(all.iter().all(|whole| *whole == want), "{ranks} {bucket}");
            }
        }
    }
}
