//! What some of the keys add to an attention's rows.

use std::ops::Range;

use crate::simd::{blend, exp_in_place, exp_of_two, max_of};

/// Softmax sums of rows over some keys, relative to the largest score among these.
pub(super) struct Part {
    /// `[rows]`, −∞ where no key is visible.
    max: Vec<f32>,
    /// `Σ e^(s − max)`, `[rows]`.
    total: Vec<f32>,
    /// `Σ e^(s − max) v`, `[rows, D]`.
    pub(super) values: Vec<f32>,
    head_dim: usize,
}

impl Part {
    /// No key is visible to any row.
    pub(super) fn nothing(rows: usize, head_dim: usize) -> Self {
        let (max, total) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
        Self { max, total, values: vec![0.0; rows * head_dim], head_dim }
    }

    /// Largest score and total of a row.
    pub(super) fn softmax_of(&self, row: usize) -> (f32, f32) {
        (self.max[row], self.total[row])
    }

    /// Sum of a row's values, `[D]`.
    pub(super) fn values_of(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.head_dim..][..self.head_dim]
    }

    /// Turns a row's scores into weights and takes over their largest and their sum. Hidden
    /// entries become 0.
    pub(super) fn soften(&mut self, row: usize, scores: &mut [f32], visible: Range<usize>) {
        scores[..visible.start].fill(0.0);
        scores[visible.end..].fill(0.0);
        let scores = &mut scores[visible];
        self.max[row] = max_of(scores);
        self.total[row] = if scores.is_empty() { 0.0 } else { exp_in_place(scores, self.max[row]) };
    }

    /// Adds the part of later keys.
    pub(super) fn add(&mut self, later: &Self) {
        (0..self.max.len()).for_each(|row| self.add_row(row, later, row));
    }

    /// Adds row `from` of a part of later keys to `row`.
    pub(super) fn add_row(&mut self, row: usize, later: &Self, from: usize) {
        if later.total[from] == 0.0 {
            return;
        }
        let max = if later.max[from] > self.max[row] { later.max[from] } else { self.max[row] };
        let [mine, theirs] = exp_of_two(self.max[row] - max, later.max[from] - max);
        self.max[row] = max;
        self.total[row] = self.total[row] * mine + later.total[from] * theirs;
        let values = &later.values[from * self.head_dim..][..self.head_dim];
        blend(mine, self.values_of(row), theirs, values);
    }
}
