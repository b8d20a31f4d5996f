//! How often tokens were learned, by which a draft's vocabulary is chosen.

use std::path::Path;

use super::VocabularyMap;
use crate::error::{ModelError, Result};
use crate::ids::TargetTokenId;

/// How often each target token is learned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenCounts {
    pub(super) counts: Vec<u64>,
    /// Number of tokens counted before the first of its kind; the largest number if unseen.
    pub(super) first_seen: Vec<u64>,
    seen: u64,
}

impl TokenCounts {
    /// Nothing counted yet, for a vocabulary of `target_size`.
    pub fn new(target_size: usize) -> Self {
        Self { counts: vec![0; target_size], first_seen: vec![u64::MAX; target_size], seen: 0 }
    }

    /// Counts a document's supervised tokens.
    ///
    /// # Shapes
    /// - `ids`, `loss_mask`: `[T]`
    ///
    /// # Errors
    /// - lengths differ, or a token lies outside the vocabulary; nothing is counted then
    pub fn add(&mut self, ids: &[u32], loss_mask: &[bool]) -> Result<()> {
        let path = Path::new("token counts");
        if ids.len() != loss_mask.len() {
            let problem = format!("{} ids and {} mask bits", ids.len(), loss_mask.len());
            return Err(ModelError::invalid(path, problem));
        }
        let size = self.counts.len();
        if let Some(id) = ids.iter().find(|id| **id as usize >= size) {
            let problem = format!("token {id} lies outside the vocabulary of {size}");
            return Err(ModelError::invalid(path, problem));
        }
        for (&id, _) in ids.iter().zip(loss_mask).filter(|(_, learned)| **learned) {
            let id = id as usize;
            self.counts[id] += 1;
            self.first_seen[id] = self.first_seen[id].min(self.seen);
            self.seen += 1;
        }
        Ok(())
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }

    /// How many of the counted tokens a map keeps.
    pub fn coverage(&self, map: &VocabularyMap) -> Coverage {
        let count = |id: &TargetTokenId| self.counts.get(id.0 as usize).copied().unwrap_or(0);
        Coverage { covered: map.kept.iter().map(count).sum(), total: self.counts.iter().sum() }
    }

    /// A line for each counted token, `id count`, as the decoder reads a reduced head.
    pub fn to_text(&self) -> String {
        let counted = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        counted.map(|(id, count)| format!("{id} {count}\n")).collect()
    }

    /// Adds what [`Self::to_text`] wrote for the same vocabulary.
    ///
    /// # Errors
    /// - a line is no id with a count, or a token lies outside the vocabulary; nothing is added then
    pub fn add_text(&mut self, text: &str) -> Result<()> {
        let entry = |line: &str| {
            let (id, count) = line.split_once(' ')?;
            Some((id.parse::<usize>().ok()?, count.parse::<u64>().ok()?))
        };
        let mut entries = Vec::new();
        for (line, number) in text.lines().zip(1..) {
            let known = entry(line).filter(|(id, _)| *id < self.counts.len());
            entries.push(known.ok_or_else(|| {
                let size = self.counts.len();
                let problem =
                    format!("line {number}: `{line}` is not a token of {size} with its count");
                ModelError::invalid(Path::new("token counts"), problem)
            })?);
        }
        for (id, count) in entries {
            self.counts[id] = self.counts[id].saturating_add(count);
            self.first_seen[id] = self.first_seen[id].min(self.seen);
            self.seen = self.seen.saturating_add(count);
        }
        Ok(())
    }
}

/// Supervised tokens that a draft vocabulary holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// Tokens counted that are kept.
    pub covered: u64,
    /// Tokens counted.
    pub total: u64,
}

impl Coverage {
    /// Shares below this are worth a warning: the draft cannot propose every twentieth token.
    pub const LOW: f64 = 0.95;

    /// Share of the supervised tokens, 1 if there are none.
    pub fn share(&self) -> f64 {
        if self.total == 0 { 1.0 } else { self.covered as f64 / self.total as f64 }
    }
}
