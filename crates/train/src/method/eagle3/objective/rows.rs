//! Which rows every step measures and learns.
//!
//! Row `t` at step `i` reads teacher row `t + 1 + i`, the distribution of token `t + 2 + i`.
//! Tokens, teacher and mask move left by one each step; the row stays.

use longdraft_data::Batch;
use longdraft_models::{DraftTokenId, TargetTokenId};

use super::config::{Eagle3Compat, Eagle3ObjectiveConfig, MaskRule, OovRows};
use super::teacher::TeacherSummary;
use crate::replay::Rounds;

/// A row that the head has to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// Token.
    pub(super) t: u32,
    /// Whether its loss counts.
    pub(super) learned: bool,
    /// The teacher's most likely token, if the draft can propose it.
    pub(super) label: Option<DraftTokenId>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct StepRows {
    pub(super) rows: Vec<Row>,
    /// Rows that the mask supervises, whether or not the head looks at them.
    pub(super) supervised: usize,
}

impl StepRows {
    pub(super) fn learned(&self) -> usize {
        self.rows.iter().filter(|row| row.learned).count()
    }
}

/// What is measured and learned of one batch: the mask's rows and the teacher's summary of them.
#[derive(Debug, Clone)]
pub struct RowPlan {
    pub(super) steps: Vec<StepRows>,
    pub(super) teacher: TeacherSummary,
    /// Batch rows times the longest of them: documents padded to one length.
    padded_tokens: usize,
}

impl RowPlan {
    pub(super) fn new(
        config: &Eagle3ObjectiveConfig,
        batch: &Batch,
        supervised: Vec<Vec<u32>>,
        teacher: TeacherSummary,
    ) -> Self {
        let compat = config.compat.is_some();
        let keep = !compat && config.oov_rows == OovRows::Keep;
        let of_step = |(i, supervised): (usize, Vec<u32>)| {
            let row = |&t: &u32| {
                let label = teacher.label[t as usize + 1 + i];
                Row { t, learned: label.is_some() || keep, label }
            };
            let rows = supervised.iter().map(row);
            // Compat measures acceptance on learned rows only, and the others cannot agree.
            let rows = rows.filter(|row| !compat || row.learned).collect();
            StepRows { rows, supervised: supervised.len() }
        };
        let steps = supervised.into_iter().enumerate().map(of_step).collect();
        let documents = || batch.document_ids.chunk_by(|a, b| a == b).filter(|run| run[0] >= 0);
        let longest = documents().map(<[i32]>::len).max().unwrap_or(0);
        Self { steps, teacher, padded_tokens: documents().count() * longest }
    }

    /// The same rows beside another part of the teacher's distribution. Its most likely token is in every part.
    pub(super) fn taught_by(self, teacher: TeacherSummary) -> Self {
        Self { teacher, ..self }
    }

    /// Where the teacher of every row stands, one step after the other.
    pub(super) fn rows_taught(&self) -> Vec<u32> {
        let of_step = |(i, step): (u32, &StepRows)| -> Vec<u32> {
            step.rows.iter().map(|row| row.t + 1 + i).collect()
        };
        (0..).zip(&self.steps).flat_map(of_step).collect()
    }

    /// Supervised and learned rows of every step, `[S]`.
    pub fn counts(&self) -> Vec<(usize, usize)> {
        self.steps.iter().map(|step| (step.supervised, step.learned())).collect()
    }

    /// Rows that a step learns, ascending; none for a step that does not exist.
    pub fn learned_rows(&self, step: usize) -> Vec<u32> {
        let rows = self.steps.get(step).map_or(&[][..], |step| &step.rows);
        rows.iter().filter(|row| row.learned).map(|row| row.t).collect()
    }

    /// The teacher's most likely token of every token that some step reads, `None` elsewhere,
    /// `[T]`.
    pub fn teacher_tokens(&self) -> Vec<Option<TargetTokenId>> {
        let best = self.teacher.best.iter().zip(&self.teacher.log_sum_exp);
        best.map(|(best, normaliser)| normaliser.is_finite().then_some(*best)).collect()
    }

    /// Documents of the batch times the length of the longest, in tokens.
    pub fn padded_tokens(&self) -> usize {
        self.padded_tokens
    }

    /// Decoding rounds over the batch, given whether the draft agrees at the steps' rows, one step
    /// after the other. Row `t` is the pass that first reads token `t + 1`, the root.
    pub(super) fn replay(&self, batch: &Batch, agrees: &[bool]) -> Rounds {
        let mut right = vec![vec![false; batch.ids.len() + 1]; self.steps.len()];
        let mut agrees = agrees.iter();
        for (step, right) in self.steps.iter().zip(&mut right) {
            for (row, agrees) in step.rows.iter().zip(&mut agrees) {
                right[row.t as usize + 1] = row.label.is_some() && *agrees;
            }
        }
        Rounds::replay(batch, self.steps.len(), |root, level| right[level - 1][root])
    }

    /// The rows that have to take each step: those of the step and of all after it. Empty lists
    /// at the end are steps that nobody takes.
    pub(super) fn active(&self) -> Vec<Vec<u32>> {
        let mut active: Vec<Vec<u32>> = Vec::new();
        let mut needed: Vec<u32> = Vec::new();
        for step in self.steps.iter().rev() {
            needed.extend(step.rows.iter().map(|row| row.t));
            needed.sort_unstable();
            needed.dedup();
            active.push(needed.clone());
        }
        active.reverse();
        active
    }
}

/// Rows of every step that the mask supervises and that are learned here, ascending, `[S]`.
pub(super) fn supervised_rows(config: &Eagle3ObjectiveConfig, batch: &Batch) -> Vec<Vec<u32>> {
    let mut ends = Vec::with_capacity(batch.ids.len());
    for run in batch.document_ids.chunk_by(|a, b| a == b) {
        // Padding ends before it starts.
        let end = if run[0] < 0 { 0 } else { ends.len() + run.len() };
        ends.extend(std::iter::repeat_n(end, run.len()));
    }
    let mask = |t: usize, end: usize| t < end && batch.loss_mask[t];
    let rule = |t: usize, i: usize| {
        let end = ends[t];
        match (config.compat, config.mask_rule) {
            // The last bit of a document is forced to 0.
            (Some(Eagle3Compat::Specforge), _) => mask(t + i, end.saturating_sub(1)),
            (None, MaskRule::Contiguous) => (t + 1..t + i + 3).all(|s| mask(s, end)),
            (None, MaskRule::Input) => mask(t + 1 + i, end),
        }
    };
    let rows = |i| {
        (0..batch.ids.len()).filter(|&t| batch.owns(t) && rule(t, i)).map(|t| t as u32).collect()
    };
    (0..config.ttt_steps).map(rows).collect()
}

/// Teacher rows that `supervised` rows of every step read, ascending: row `t` of step `i` reads
/// `t + 1 + i`.
pub(super) fn rows_read(tokens: usize, supervised: &[Vec<u32>]) -> Vec<u32> {
    let mut read = vec![false; tokens];
    for (i, rows) in supervised.iter().enumerate() {
        for &t in rows {
            read[t as usize + 1 + i] = true;
        }
    }
    (0..tokens as u32).filter(|&t| read[t as usize]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(mask: &[u8], documents: &[i32]) -> Batch {
        Batch {
            ids: vec![0; mask.len()],
            loss_mask: mask.iter().map(|m| *m == 1).collect(),
            document_ids: documents.to_vec(),
            ..Batch::default()
        }
    }

    fn rows(config: &Eagle3ObjectiveConfig, batch: &Batch) -> Vec<Vec<u32>> {
        supervised_rows(&Eagle3ObjectiveConfig { ttt_steps: 3, ..config.clone() }, batch)
    }

    #[test]
    fn contiguous_rows_start_at_a_generated_token_and_stay_in_the_turn_and_document() {
        let config = Eagle3ObjectiveConfig::default();
        //                   0  1  2  3  4  5  6    7  8  9
        let batch = batch(&[0, 0, 1, 1, 1, 0, 1, 1, 1, 1], &[0, 0, 0, 0, 0, 0, 0, 1, 1, 1]);
        assert_eq!(rows(&config, &batch), [vec![1, 2, 7], vec![1], vec![]]);
    }

    #[test]
    fn input_rows_need_a_teacher_in_their_document() {
        let config = Eagle3ObjectiveConfig { mask_rule: MaskRule::Input, ..Default::default() };
        let batch = batch(&[0, 1, 0, 1, 1, 1], &[0, 0, 0, 0, 1, 1]);
        assert_eq!(rows(&config, &batch), [vec![0, 2, 4], vec![1], vec![0]]);
    }

    #[test]
    fn compat_rows_follow_the_unshifted_mask_without_its_last_bit() {
        let compat = Some(Eagle3Compat::Specforge);
        let config = Eagle3ObjectiveConfig { compat, ..Default::default() };
        let batch = batch(&[1, 0, 1, 1, 1, 1, 1], &[0, 0, 0, 0, 1, 1, -1]);
        assert_eq!(rows(&config, &batch), [vec![0, 2, 4], vec![1], vec![0]]);
    }

    #[test]
    fn documents_without_room_have_no_rows() {
        let config = Eagle3ObjectiveConfig::default();
        for (mask, documents) in
            [(&[1_u8][..], &[0_i32][..]), (&[1, 1], &[0, 0]), (&[1, 1, 1], &[-1, -1, -1])]
        {
            let batch = batch(mask, documents);
            assert!(rows(&config, &batch).iter().all(Vec::is_empty));
        }
    }
}
