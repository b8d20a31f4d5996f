//! Which elements of the parameters each rank updates.

use std::ops::Range;

use longdraft_kernels::adamw::BLOCK;

/// Elements of one parameter, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Index of the parameter.
    pub parameter: usize,
    /// First element.
    pub start: usize,
    /// Elements.
    pub len: usize,
}

impl Run {
    /// The elements.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// The runs of every rank: each element in exactly one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    ranks: Vec<Vec<Run>>,
}

impl Partition {
    /// Shards of equal size, one after the other, cut at the borders of the blocks that squares
    /// are summed over, so that the gradient norm does not depend on the cut.
    pub fn by_blocks(sizes: &[usize], ranks: usize) -> Self {
        let all: usize = sizes.iter().sum();
        let mut parts: Vec<Vec<Run>> = vec![Vec::new(); ranks.max(1)];
        let mut before = 0;
        for (parameter, size) in sizes.iter().enumerate() {
            for start in (0..*size).step_by(BLOCK) {
                let len = BLOCK.min(size - start);
                // The middle of the block decides.
                let owner = (before + len / 2) * parts.len() / all.max(1);
                before += len;
                match parts[owner].last_mut() {
                    Some(run) if run.parameter == parameter => run.len += len,
                    _ => parts[owner].push(Run { parameter, start, len }),
                }
            }
        }
        Self { ranks: parts }
    }

    /// Whole parameters, the costliest first to the rank with the least work so far.
    pub fn by_cost(sizes: &[usize], costs: &[u64], ranks: usize) -> Self {
        let mut parts: Vec<Vec<Run>> = vec![Vec::new(); ranks.max(1)];
        let mut work = vec![0_u64; parts.len()];
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|parameter| (std::cmp::Reverse(costs[*parameter]), *parameter));
        for parameter in order {
            let owner = (0..work.len()).min_by_key(|rank| (work[*rank], *rank)).unwrap_or(0);
            work[owner] += costs[parameter].max(1);
            parts[owner].push(Run { parameter, start: 0, len: sizes[parameter] });
        }
        for part in &mut parts {
            part.sort_by_key(|run| run.parameter);
        }
        Self { ranks: parts }
    }

    /// The runs of one rank, by parameter and start.
    pub fn of(&self, rank: usize) -> &[Run] {
        &self.ranks[rank]
    }

    /// Elements of every rank.
    pub fn sizes(&self) -> Vec<usize> {
        self.ranks.iter().map(|runs| runs.iter().map(|run| run.len).sum()).collect()
    }
}

/// A rank's part of `items` items in order: sizes differ by one at most.
pub fn share_of(items: usize, rank: usize, ranks: usize) -> Range<usize> {
    items * rank / ranks..items * (rank + 1) / ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(partition: &Partition, sizes: &[usize]) {
        let mut seen: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size]).collect();
        for run in partition.ranks.iter().flatten() {
            seen[run.parameter][run.range()].iter_mut().for_each(|count| *count += 1);
        }
        assert!(seen.iter().flatten().all(|count| *count == 1), "{partition:?}");
    }

    #[test]
    fn every_element_has_one_owner() {
        let sizes = [3 * BLOCK + 5, 7, 0, BLOCK, 2 * BLOCK - 1, 1];
        let costs: Vec<u64> = sizes.iter().map(|size| *size as u64).collect();
        for ranks in 1..9 {
            let blocks = Partition::by_blocks(&sizes, ranks);
            covers(&blocks, &sizes);
            assert!(blocks.ranks.iter().flatten().all(|run| run.start % BLOCK == 0));
            let fair = sizes.iter().sum::<usize>() / ranks;
            assert!(blocks.sizes().iter().all(|size| size.abs_diff(fair) <= BLOCK), "{ranks}");
            covers(&Partition::by_cost(&sizes, &costs, ranks), &sizes);
        }
        assert_eq!(Partition::by_cost(&sizes, &costs, 2).of(0)[0].parameter, 0);
    }

    #[test]
    fn shares_leave_nothing_out() {
        for (items, ranks) in [(0, 2), (1, 4), (5, 2), (7, 3), (8, 4)] {
            let all: Vec<usize> =
                (0..ranks).flat_map(|rank| share_of(items, rank, ranks)).collect();
            assert_eq!(all, (0..items).collect::<Vec<_>>());
        }
    }
}
