//! A layer's state in a cache: what it was before the last pass, and what that pass brought.

use std::sync::Arc;

use longdraft_kernels::recurrence::Walk;

use super::rule::{Rows, Rule, State};
use crate::error::Result;

/// One layer's state of one sequence.
#[derive(Clone)]
pub(in crate::target_model) struct CachedState {
    rule: Arc<Rule>,
    /// Before the last pass.
    before: State,
    /// After it, where its rows follow one another.
    after: State,
    /// What the last pass brought.
    rows: Rows,
}

impl CachedState {
    pub(in crate::target_model) fn new(rule: &Arc<Rule>) -> Self {
        let (before, after) = (rule.start(), rule.start());
        Self { rule: Arc::clone(rule), before, after, rows: Rows::default() }
    }

    /// Goes on from the state after the last pass.
    pub(in crate::target_model) fn advance(&mut self) {
        std::mem::swap(&mut self.before, &mut self.after);
        self.rows = Rows::default();
    }

    /// Outputs of a pass's rows `[T, W]`.
    pub(in crate::target_model) fn run(&mut self, rows: Rows, walk: &Walk) -> Result<Vec<f32>> {
        let out = self.rule.run(&rows, walk, &self.before, &mut self.after)?;
        self.rows = rows;
        Ok(out)
    }

    /// The same of text of which no more than the last row is taken back: the state before that one is what is
    /// gone on from.
    pub(in crate::target_model) fn run_text(
        &mut self,
        rows: &Rows,
        count: usize,
    ) -> Result<Vec<f32>> {
        let all: Vec<usize> = (0..count).collect();
        let Some((last, first)) = all.split_last().filter(|(_, first)| !first.is_empty()) else {
            return self.run(rows.clone(), &Walk::chain(count));
        };
        let of_first = self.rule.select(rows, first);
        let mut out = self.run(of_first, &Walk::chain(first.len()))?;
        self.advance();
        out.extend(self.run(self.rule.select(rows, &[*last]), &Walk::chain(1))?);
        Ok(out)
    }

    /// Keeps only some of the last pass's rows, one after the other: their steps are made again.
    pub(in crate::target_model) fn keep(&mut self, path: &[usize]) -> Result<()> {
        let rows = self.rule.select(&self.rows, path);
        if path.is_empty() {
            self.after.clone_from(&self.before);
            self.rows = rows;
            return Ok(());
        }
        self.run(rows, &Walk::chain(path.len())).map(drop)
    }

    /// The last inputs of the convolution and the matrices of the delta rule, before the last pass or after it.
    pub(in crate::target_model) fn values(&self, is_after: bool) -> (&[f32], Vec<f32>) {
        let state = if is_after { &self.after } else { &self.before };
        (&state.window, self.rule.matrices(state))
    }

    /// The state before the last pass.
    pub(in crate::target_model) fn before(&self) -> &State {
        &self.before
    }

    /// Goes on from an earlier state; from the start without one.
    pub(in crate::target_model) fn restore(&mut self, earlier: Option<&State>) {
        match earlier {
            Some(earlier) => self.before.clone_from(earlier),
            None => self.before = self.rule.start(),
        }
        self.after.clone_from(&self.before);
        self.rows = Rows::default();
    }
}
