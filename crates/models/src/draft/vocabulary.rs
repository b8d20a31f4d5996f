//! The draft's own vocabulary: which target tokens it can propose.
//!
//! Kept target ids are sorted, so draft id `i` stands for the i-th of them. Files hold offsets,
//! `d2t[i] = kept[i] − i`, and a flag for every target token, `t2d`.

mod counts;

use std::cmp::Reverse;
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::error::{ModelError, Problems, Result};
use crate::ids::{DraftTokenId, TargetTokenId};

pub use counts::{Coverage, TokenCounts};

/// Names of a map's tensors in files: offsets, and a flag for every target token.
pub const MAP: [&str; 2] = ["d2t", "t2d"];

/// What to do where a map is of another vocabulary.
const OTHER_TARGET: &str = "give the target that the draft was trained for, or a draft of this one";

/// Target token of every draft token, and back. The only thing that turns one kind into the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VocabularyMap {
    /// Ascending.
    kept: Vec<TargetTokenId>,
    target_size: usize,
}

impl VocabularyMap {
    /// Every target token.
    pub fn identity(target_size: usize) -> Self {
        Self { kept: (0..target_size as u32).map(TargetTokenId).collect(), target_size }
    }

    /// These target tokens, in any order.
    ///
    /// # Errors
    /// - a token is given twice or lies outside the target's vocabulary, or there is none
    pub fn new(mut kept: Vec<TargetTokenId>, target_size: usize) -> Result<Self> {
        kept.sort_unstable();
        let mut problems = Problems::default();
        if kept.is_empty() {
            problems.push("the draft's vocabulary is empty");
        }
        if let Some(pair) = kept.windows(2).find(|pair| pair[0] == pair[1]) {
            problems.push(format!("target token {} is kept twice", pair[0].0));
        }
        if let Some(last) = kept.last().filter(|last| last.0 as usize >= target_size) {
            let problem =
                format!("target token {} lies outside the vocabulary of {target_size}", last.0);
            problems.push(problem);
        }
        problems.into_result(Path::new("vocabulary map"))?;
        Ok(Self { kept, target_size })
    }

    /// From `d2t` and, if the file has it, `t2d`.
    ///
    /// # Errors
    /// - the ids are not ascending within the target's vocabulary, or the two disagree; absolute
    ///   ids in the place of offsets are named as such
    pub fn from_offsets(d2t: &[i64], t2d: Option<&[i64]>, target_size: usize) -> Result<Self> {
        let path = Path::new("vocabulary map");
        let ids: Vec<i64> = d2t.iter().zip(0_i64..).map(|(d, i)| d.saturating_add(i)).collect();
        let flagged: Option<Vec<i64>> = t2d.map(|t2d| {
            let ids = t2d.iter().zip(0_i64..);
            ids.filter(|(flag, _)| **flag != 0).map(|(_, id)| id).collect()
        });
        if flagged.as_deref().is_some_and(|flagged| flagged == d2t && flagged != ids) {
            let problem = "`d2t` holds absolute ids, offsets (`target id − draft id`) are expected";
            return Err(ModelError::invalid(path, problem));
        }
        let mut problems = Problems::default();
        if let Some(t2d) = t2d.filter(|t2d| t2d.len() != target_size) {
            problems.push(format!(
                "`t2d` has {} flags, {target_size} expected: {OTHER_TARGET}",
                t2d.len()
            ));
        }
        let range = 0..target_size as i64;
        if let Some((i, id)) = ids.iter().enumerate().find(|(_, id)| !range.contains(id)) {
            problems.push(format!(
                "`d2t` maps draft token {i} to {id}, outside the vocabulary of {target_size}: {OTHER_TARGET}"
            ));
        }
        if let Some(i) = ids.windows(2).position(|pair| pair[0] >= pair[1]) {
            problems.push(format!("`d2t` does not ascend at draft token {}", i + 1));
        }
        if flagged.is_some_and(|flagged| flagged != ids) {
            problems.push("`t2d` flags other tokens than `d2t` maps to");
        }
        problems.into_result(path)?;
        Self::new(ids.into_iter().map(|id| TargetTokenId(id as u32)).collect(), target_size)
    }

    /// Reads the map of a file at `path`; `None` where the file has none. `read` gives the whole numbers of a
    /// tensor, if the file has it.
    ///
    /// # Errors
    /// - a tensor cannot be read; as [`Self::from_offsets`]; the map is not of `[Vd, V]` tokens
    pub(super) fn read(
        path: &Path,
        [draft, target]: [usize; 2],
        read: impl Fn(&str) -> Result<Option<Vec<i64>>>,
    ) -> Result<Option<Self>> {
        let Some(offsets) = read(MAP[0])? else { return Ok(None) };
        let flags = read(MAP[1])?;
        let map =
            Self::from_offsets(&offsets, flags.as_deref(), target).map_err(
                |error| match error {
                    ModelError::Invalid { problems, .. } => {
                        ModelError::Invalid { path: path.to_path_buf(), problems }
                    }
                    other => other,
                },
            )?;
        map.problems([draft, target]).into_result(path)?;
        Ok(Some(map))
    }

    /// Where the map is not of `[Vd, V]` tokens.
    pub(super) fn problems(&self, [draft, target]: [usize; 2]) -> Problems {
        let mut problems = Problems::default();
        for (name, found, wanted) in [
            ("draft_vocab_size", self.draft_size(), draft),
            ("vocab_size", self.target_size(), target),
        ] {
            if found != wanted {
                problems.push(format!("`{name}` = {wanted}, the vocabulary map has {found}"));
            }
        }
        problems
    }

    /// What files hold of it, by name: `d2t` `[Vd]` and `t2d` `[V]`.
    ///
    /// # Errors
    /// - a tensor cannot be made
    pub fn tensors(&self) -> Result<[(String, Tensor); 2]> {
        let flags: Vec<u8> = self.membership().into_iter().map(u8::from).collect();
        let (draft, target) = (self.draft_size(), self.target_size());
        let offsets = Tensor::from_vec(self.offsets(), draft, &Device::Cpu)?;
        let flags = Tensor::from_vec(flags, target, &Device::Cpu)?;
        Ok([(MAP[0].to_owned(), offsets), (MAP[1].to_owned(), flags)])
    }

    /// The `size` most frequent tokens, after those that are kept whatever their count (end of
    /// text, end of turn and the like). Unseen ids from 0 up fill what is left.
    ///
    /// # Errors
    /// - `size` is 0, larger than the vocabulary, or smaller than the number of forced tokens; a
    ///   forced token lies outside the vocabulary
    pub fn most_frequent(
        counts: &TokenCounts,
        size: usize,
        ties: Ties,
        forced: &[TargetTokenId],
    ) -> Result<(Self, Coverage)> {
        let target_size = counts.counts.len();
        let mut forced: Vec<TargetTokenId> = forced.to_vec();
        forced.sort_unstable();
        forced.dedup();
        let mut problems = Problems::default();
        if size == 0 || size > target_size {
            problems.push(format!("`draft_vocab_size` = {size} is not in 1..={target_size}"));
        }
        if forced.len() > size {
            let count = forced.len();
            problems.push(format!("{count} forced tokens do not fit a vocabulary of {size}"));
        }
        problems.into_result(Path::new("vocabulary map"))?;
        let mut order: Vec<u32> = (0..target_size as u32).collect();
        order.retain(|&id| forced.binary_search(&TargetTokenId(id)).is_err());
        order.sort_by_key(|&id| {
            let seen = match ties {
                Ties::LowerId => 0,
                Ties::FirstSeen => counts.first_seen[id as usize],
            };
            (Reverse(counts.counts[id as usize]), seen, id)
        });
        let rest = size - forced.len();
        forced.extend(order.into_iter().take(rest).map(TargetTokenId));
        let map = Self::new(forced, target_size)?;
        let coverage = counts.coverage(&map);
        Ok((map, coverage))
    }

    /// `Vd`
    pub fn draft_size(&self) -> usize {
        self.kept.len()
    }

    /// `V`
    pub fn target_size(&self) -> usize {
        self.target_size
    }

    /// Whether every target token is kept, so that files need no map.
    pub fn is_identity(&self) -> bool {
        self.kept.len() == self.target_size
    }

    /// Target tokens by draft id.
    pub fn kept(&self) -> &[TargetTokenId] {
        &self.kept
    }

    /// The draft token of a target token, if it is kept.
    pub fn to_draft(&self, id: TargetTokenId) -> Option<DraftTokenId> {
        self.kept.binary_search(&id).ok().map(|index| DraftTokenId(index as u32))
    }

    /// `d2t`, `[Vd]`: target id less draft id.
    pub fn offsets(&self) -> Vec<i64> {
        self.kept.iter().zip(0_i64..).map(|(id, i)| i64::from(id.0) - i).collect()
    }

    /// `t2d`, `[V]`: whether each target token is kept.
    pub fn membership(&self) -> Vec<bool> {
        let mut flags = vec![false; self.target_size];
        for id in &self.kept {
            flags[id.0 as usize] = true;
        }
        flags
    }
}

/// Which of two tokens with equal counts comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ties {
    /// The one with the lower id.
    #[default]
    LowerId,
    /// The one that was seen first, as the public trainer has it.
    FirstSeen,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(map: &VocabularyMap) -> Vec<u32> {
        map.kept().iter().map(|id| id.0).collect()
    }

    fn counts() -> TokenCounts {
        let mut counts = TokenCounts::new(8);
        // 6 and 3 twice, 5 and 1 once, 7 unsupervised.
        let tokens = [6, 5, 3, 7, 6, 3, 1];
        counts.add(&tokens, &tokens.map(|id| id != 7)).expect("fits");
        counts
    }

    #[test]
    fn most_frequent_tokens_are_kept_and_ties_go_by_the_rule() {
        let (map, coverage) =
            VocabularyMap::most_frequent(&counts(), 3, Ties::LowerId, &[]).expect("map");
        assert_eq!(ids(&map), [1, 3, 6]);
        assert_eq!(coverage, Coverage { covered: 5, total: 6 });
        assert!(coverage.share() < Coverage::LOW && coverage.share() > 0.8);
        let (map, _) =
            VocabularyMap::most_frequent(&counts(), 3, Ties::FirstSeen, &[]).expect("map");
        assert_eq!(ids(&map), [3, 5, 6]);
    }

    #[test]
    fn forced_tokens_are_kept_and_unseen_ids_fill_up_from_zero() {
        let forced = [TargetTokenId(7), TargetTokenId(7)];
        let map = |size| VocabularyMap::most_frequent(&counts(), size, Ties::LowerId, &forced);
        assert_eq!(ids(&map(2).expect("map").0), [3, 7]);
        let (map, coverage) = map(6).expect("map");
        assert_eq!(ids(&map), [0, 1, 3, 5, 6, 7]);
        assert!((coverage.share() - 1.0).abs() < 1e-12);
        for size in [0, 9] {
            assert!(VocabularyMap::most_frequent(&counts(), size, Ties::LowerId, &[]).is_err());
        }
        let outside = [TargetTokenId(8)];
        assert!(VocabularyMap::most_frequent(&counts(), 3, Ties::LowerId, &outside).is_err());
        assert!(
            VocabularyMap::most_frequent(
                &counts(),
                1,
                Ties::LowerId,
                &[TargetTokenId(1), TargetTokenId(2)]
            )
            .is_err()
        );
    }

    #[test]
    fn offsets_and_flags_are_read_back() {
        let map = VocabularyMap::new([4, 0, 6].map(TargetTokenId).to_vec(), 7).expect("map");
        assert_eq!(map.offsets(), [0, 3, 4]);
        let flags: Vec<i64> = map.membership().into_iter().map(i64::from).collect();
        assert_eq!(flags, [1, 0, 0, 0, 1, 0, 1]);
        let read = VocabularyMap::from_offsets(&map.offsets(), Some(&flags), 7);
        assert_eq!(read.expect("map"), map);
        assert_eq!(map.kept(), [0, 4, 6].map(TargetTokenId));
        assert_eq!(map.to_draft(TargetTokenId(6)), Some(DraftTokenId(2)));
        assert_eq!(map.to_draft(TargetTokenId(5)), None);
        assert!(!map.is_identity() && VocabularyMap::identity(7).is_identity());
    }

    #[test]
    fn maps_that_are_none_are_refused_with_a_reason() {
        let flags = [1, 0, 0, 0, 1, 0, 1];
        let refused = |d2t: &[i64], t2d: Option<&[i64]>| {
            VocabularyMap::from_offsets(d2t, t2d, 7).expect_err("refused").to_string()
        };
        assert!(refused(&[0, 4, 6], Some(&flags)).contains("absolute ids"));
        assert!(refused(&[0, -1, 4], None).contains("does not ascend at draft token 1"));
        assert!(refused(&[0, 3, 5], None).contains("outside the vocabulary of 7"));
        assert!(refused(&[-1, 3, 4], None).contains("outside the vocabulary"));
        assert!(refused(&[i64::MAX, i64::MAX], None).contains("outside the vocabulary"));
        assert!(refused(&[0, 2, 4], Some(&flags)).contains("other tokens"));
        assert!(refused(&[0, 3, 4], Some(&flags[..6])).contains("6 flags"));
        assert!(refused(&[], None).contains("empty"));
    }

    #[test]
    fn counting_refuses_what_does_not_fit() {
        let mut counts = TokenCounts::new(3);
        assert!(counts.add(&[0, 3], &[true, true]).is_err());
        assert!(counts.add(&[0], &[]).is_err());
        assert_eq!(counts, TokenCounts::new(3));
    }

    #[test]
    fn counts_are_written_and_added() {
        let mut counts = counts();
        let text = counts.to_text();
        let before = counts.counts.clone();
        counts.add_text(&text).expect("own text");
        assert_eq!(counts.counts, before.iter().map(|count| 2 * count).collect::<Vec<_>>());
        let mut fresh = TokenCounts::new(before.len());
        fresh.add_text(&text).expect("text");
        assert_eq!(fresh.counts, before);
        for wrong in ["8 1", "1", "1 x", "-1 2", "1 2 3"] {
            let error = fresh.add_text(&format!("0 1\n{wrong}\n")).expect_err(wrong).to_string();
            assert!(error.contains("line 2"), "{error}");
        }
        assert_eq!(fresh.counts, before);
    }
}
