//! Which ranks run a row together, and which rows fall to whom.
//!
//! ```text
//! parallel.sequence: 2 over 6 ranks
//! ranks 0 1 | 2 3 | 4 5      three groups: the rows of a step are dealt to groups
//!       ^ ^ parts of one row
//! ```

use std::ops::Range;
use std::sync::Arc;

use candle_core::Device;
use longdraft_data::Batch;
use longdraft_kernels::token_ranges::TokenRanges;
use longdraft_models::target_model::{Ranks, RowPart};

use super::communicators::Purpose;
use super::gpus::{remark_of_any, summing};
use super::{ParallelConfig, World, share_of};
use crate::error::Result;

/// The groups of ranks that rows are dealt to.
#[derive(Debug, Clone)]
pub struct RowGroups {
    /// The ranks of this one's group.
    group: World,
    index: usize,
    count: usize,
}

impl RowGroups {
    /// One rank that runs everything.
    pub fn single() -> Self {
        Self { group: World::single(), index: 0, count: 1 }
    }

    /// Groups of `parallel.sequence` neighbours; all ranks call it.
    ///
    /// # Errors
    /// - the ranks do not divide into such groups
    pub fn new(world: &World, config: &ParallelConfig) -> Result<Self> {
        let (size, ranks) = (config.sequence, world.size());
        if size == 1 {
            return Ok(Self { group: World::single(), index: world.rank(), count: ranks });
        }
        let group = world.neighbours("sequence", size)?;
        Ok(Self { group, index: world.rank() / size, count: ranks / size })
    }

    /// The same, which exchange what they share of a row on their GPUs where each rank has one of its own and the order
    /// of sums is free; else, if there are GPUs, with a remark on what keeps them, or another group, from it. All ranks
    /// of the world call it, with their devices.
    ///
    /// # Errors
    /// - the GPUs do not reach each other
    pub fn with_gpus(
        self,
        world: &World,
        device: &Device,
        config: &ParallelConfig,
    ) -> Result<(Self, Option<String>)> {
        let (group, remark) = summing(&self.group, Purpose::Rows, device, config)?;
        let remark = remark_of_any(world, &group, remark)?;
        Ok((Self { group, ..self }, remark))
    }

    /// Groups.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Items that fall to this rank's group.
    pub fn share(&self, items: usize) -> Range<usize> {
        share_of(items, self.index, self.count)
    }

    /// Items of the group with most of them.
    pub fn rounds(&self, items: usize) -> usize {
        items.div_ceil(self.count)
    }

    /// This rank's part of a row of these documents, `[T]`; `None` where it runs the whole row, which it also does
    /// with one that has fewer tokens than there are ranks to share it.
    pub fn part_of(&self, document_ids: &[i32]) -> Option<RowPart> {
        let size = self.group.size();
        let ranks: Arc<dyn Ranks> = Arc::new(self.group.clone());
        (size > 1 && document_ids.len() >= size).then(|| RowPart::of(&ranks, document_ids))
    }

    /// A batch of which only what falls to this rank is learned.
    #[must_use]
    pub fn cut(&self, mut batch: Batch) -> Batch {
        batch.own = match self.part_of(&batch.document_ids) {
            Some(part) => Some(part.rows().clone()),
            None if self.group.is_first() => None,
            None => Some(TokenRanges::default()),
        };
        let mut learned = std::mem::take(&mut batch.learned);
        learned.retain(|token| batch.owns(*token as usize));
        Batch { learned, ..batch }
    }

    /// Whether this rank speaks for its group where a row counts once.
    pub fn is_first_of_group(&self) -> bool {
        self.group.is_first()
    }
}

#[cfg(test)]
mod tests {
    use super::super::threads::in_threads;
    use super::*;

    fn groups(world: &World, sequence: usize) -> Result<RowGroups> {
        RowGroups::new(world, &ParallelConfig { sequence, ..ParallelConfig::default() })
    }

    fn batch(tokens: u32) -> Batch {
        Batch { learned: (0..tokens - 1).collect(), ..Batch::of_document(0..tokens) }
    }

    #[test]
    fn every_learned_token_falls_to_one_rank_of_the_group() {
        for tokens in [2, 3, 10, 11] {
            let learned = in_threads(6, |world| {
                let groups = groups(&world, 3).expect("groups");
                assert_eq!(groups.share(5), share_of(5, world.rank() / 3, 2));
                assert_eq!(
                    (groups.rounds(5), groups.is_first_of_group()),
                    (3, world.rank() % 3 == 0)
                );
                assert_eq!(groups.part_of(&vec![0; tokens]).is_some(), tokens >= 3);
                groups.cut(batch(tokens as u32)).learned
            });
            for group in learned.chunks(3) {
                let mut all = group.concat();
                all.sort_unstable();
                assert_eq!(all, (0..tokens as u32 - 1).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn ranks_that_do_not_divide_into_groups_are_refused() {
        assert_eq!(in_threads(3, |world| groups(&world, 2).is_err()), [true; 3]);
        assert!(groups(&World::single(), 1).is_ok());
    }
}
