//! Figures of held-out rows with their intervals.

use longdraft_kernels::random::CounterRng;
use longdraft_parallel::{RowGroups, World};

use crate::error::Result;
use crate::metrics::{DraftMetrics, Rate};

/// Draws with replacement for an interval.
const RESAMPLES: usize = 1000;

/// Held-out metrics, row by row.
#[derive(Debug, Clone)]
pub struct RowMetrics {
    pub(super) rows: Vec<DraftMetrics>,
    gamma: usize,
}

impl RowMetrics {
    /// Those of no row, for chains of at most `gamma` tokens.
    pub(super) fn new(gamma: usize) -> Self {
        Self { rows: Vec::new(), gamma }
    }

    /// Counters of all rows together.
    pub fn total(&self) -> DraftMetrics {
        self.sum(0..self.rows.len())
    }

    /// Tokens of the longest chain.
    pub fn gamma(&self) -> usize {
        self.gamma
    }

    /// Measured rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Greedy simulated acceptance length over all rows.
    pub fn simulated_length(&self) -> f64 {
        self.total().simulated_acceptance_length(Rate::Top1, self.gamma)
    }

    /// The same of each row.
    pub fn simulated_lengths(&self) -> impl Iterator<Item = f64> {
        (0..self.rows.len()).map(|row| self.length_of(&[row]))
    }

    /// 95 % interval of it over rows, as [`bootstrap_interval`].
    pub fn interval(&self) -> (f64, f64) {
        bootstrap_interval(self.rows.len(), |draws| self.length_of(draws))
    }

    /// How much longer than another draft's on the same rows, with the 95 % bootstrap interval of
    /// the difference: every resample takes the same rows of both.
    pub fn gain_over(&self, other: &Self) -> (f64, (f64, f64)) {
        let rows = self.rows.len().min(other.rows.len());
        let gain = |draws: &[usize]| self.length_of(draws) - other.length_of(draws);
        let all: Vec<usize> = (0..rows).collect();
        (gain(&all), bootstrap_interval(rows, gain))
    }

    /// The same of whole rows, of which each rank of a group has measured its part. Every group has measured all rows:
    /// one of them counts.
    pub(super) fn over_parts(&self, world: &World, groups: &RowGroups) -> Result<Self> {
        let is_first = groups.share(groups.count()).start == 0;
        let counted = self.rows.iter().filter(|_| is_first);
        let numbers: Vec<f64> = counted.flat_map(DraftMetrics::to_numbers).collect();
        let mut rows = vec![DraftMetrics::default(); self.rows.len()];
        for numbers in world.gather_varied(&numbers) {
            let parts = DraftMetrics::list(&numbers)?;
            rows.iter_mut().zip(&parts).for_each(|(row, part)| row.merge(part));
        }
        Ok(Self { rows, gamma: self.gamma })
    }

    fn length_of(&self, rows: &[usize]) -> f64 {
        let sum = self.sum(rows.iter().copied());
        sum.simulated_acceptance_length(Rate::Top1, self.gamma)
    }

    fn sum(&self, rows: impl IntoIterator<Item = usize>) -> DraftMetrics {
        let mut sum = DraftMetrics::default();
        rows.into_iter().for_each(|row| sum.merge(&self.rows[row]));
        sum
    }
}

/// 95 % bootstrap interval of a figure over rows, or whatever else is drawn anew (percentile method, fixed seed); zeros
/// without rows.
pub fn bootstrap_interval(rows: usize, figure: impl Fn(&[usize]) -> f64) -> (f64, f64) {
    if rows == 0 {
        return (0.0, 0.0);
    }
    let mut random = CounterRng::new(0, "bootstrap", &[rows as u64]);
    let mut draw = || (0..rows).map(|_| random.below(rows as u64) as usize).collect::<Vec<_>>();
    let mut figures: Vec<f64> = (0..RESAMPLES).map(|_| figure(&draw())).collect();
    figures.sort_by(f64::total_cmp);
    (figures[RESAMPLES / 40], figures[RESAMPLES - 1 - RESAMPLES / 40])
}
