//! Which experts a row visits, and what they weigh.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use super::Expert;
use crate::sums::Sums;
use crate::top_k::row_top_k;

/// How a router turns its logits into experts and weights.
#[derive(Debug, Clone, Copy, Default)]
pub enum Choice<'a> {
    /// Softmax over all.
    #[default]
    Softmax,
    /// `s = σ(z)`; the best `s + bias` are chosen, of the groups whose two best sum highest, and `s` weighs
    /// (DeepSeek-AI 2024, <https://arxiv.org/abs/2412.19437>).
    Sigmoid(&'a SigmoidChoice),
    /// The best logits; `σ(z)` multiplies the expert's input (Llama 4).
    SigmoidOnInput,
}

/// Numbers of a router of [`Choice::Sigmoid`].
#[derive(Debug, Clone, PartialEq)]
pub struct SigmoidChoice {
    /// Added to the scores for the choice alone, `[E]`.
    pub bias: Vec<f32>,
    /// Groups of neighbouring experts; they divide `E`.
    pub groups: usize,
    /// How many of them count.
    pub kept_groups: usize,
    /// Factor of the weights.
    pub scale: f32,
}

/// The experts of every row: rows sorted by expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    pub(super) rows: usize,
    /// Where each expert's rows begin in `visitors`; a last entry says where they end.
    pub(super) starts: Vec<usize>,
    /// The rows of every expert, ascending.
    pub(super) visitors: Vec<u32>,
    /// What each of them takes of the expert's output.
    pub(super) weights: Vec<f32>,
    /// Factor of what each hands to the expert, where it is not 1.
    pub(super) of_inputs: Option<Vec<f32>>,
}

impl Routes {
    /// The `per_row` most likely experts of every row; `normalise` makes their weights sum to one.
    ///
    /// # Shapes
    /// - `logits`: `[R, E]`
    ///
    /// # Errors
    /// - `logits` is no matrix, or `per_row` is not between 1 and `E`
    pub fn choose(logits: &Tensor, per_row: usize, normalise: bool) -> Result<Self> {
        let (rows, count) = logits.dims2()?;
        if per_row == 0 || per_row > count {
            bail!("experts: {per_row} of {count} for every row");
        }
        let mut chosen = row_top_k(&logits.to_dtype(DType::F32)?, per_row)?;
        for log_probs in chosen.log_probs.chunks_mut(per_row) {
            into_weights(log_probs, normalise);
        }
        Ok(Self::of_chosen((rows, count), &chosen.ids, &chosen.log_probs, per_row))
    }

    /// The experts of every row by another choice than softmax; `normalise` makes the weights of
    /// [`Choice::Sigmoid`] sum to one before they are scaled.
    ///
    /// # Shapes
    /// - `logits`: `[R, E]`
    ///
    /// # Errors
    /// - as [`Self::choose`]; the numbers of the choice do not fit `E`
    pub fn choose_by(
        logits: &Tensor,
        per_row: usize,
        normalise: bool,
        choice: Choice<'_>,
    ) -> Result<Self> {
        let (rows, count) = logits.dims2()?;
        if per_row == 0 || per_row > count {
            bail!("experts: {per_row} of {count} for every row");
        }
        let sigmoid = match choice {
            Choice::Softmax => return Self::choose(logits, per_row, normalise),
            Choice::Sigmoid(numbers) => Some(numbers),
            Choice::SigmoidOnInput => None,
        };
        if let Some(numbers) = sigmoid {
            numbers.check(count, per_row)?;
        }
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for row in logits.to_dtype(DType::F32)?.to_vec2::<f32>()? {
            if let Some(numbers) = sigmoid {
                numbers.choose(&row, per_row, normalise, (&mut ids, &mut weights));
                continue;
            }
            let chosen = best(&row, per_row);
            weights.extend(chosen.iter().map(|&expert| sigma(row[expert])));
            ids.extend(chosen.into_iter().map(|expert| expert as u32));
        }
        let mut routes = Self::of_chosen((rows, count), &ids, &weights, per_row);
        if sigmoid.is_none() {
            let ones = vec![1.0; routes.weights.len()];
            routes.of_inputs = Some(std::mem::replace(&mut routes.weights, ones));
        }
        Ok(routes)
    }

    /// Weights times a factor of their expert, `[E]`.
    ///
    /// # Errors
    /// - there is not one factor an expert
    pub fn scaled_by(mut self, factors: &[f32]) -> Result<Self> {
        if factors.len() + 1 != self.starts.len() {
            bail!("experts: {} factors for {} experts", factors.len(), self.starts.len() - 1);
        }
        for (factor, visits) in factors.iter().zip(self.starts.windows(2)) {
            self.weights[visits[0]..visits[1]].iter_mut().for_each(|weight| *weight *= factor);
        }
        Ok(self)
    }

    /// Rows by expert of what every row chose.
    fn of_chosen(
        (rows, count): (usize, usize),
        ids: &[u32],
        of_ids: &[f32],
        per_row: usize,
    ) -> Self {
        let mut starts = vec![0; count + 1];
        ids.iter().for_each(|&expert| starts[expert as usize + 1] += 1);
        (0..count).for_each(|expert| starts[expert + 1] += starts[expert]);
        let mut next = starts.clone();
        let (mut visitors, mut weights) = (vec![0; rows * per_row], vec![0.0; rows * per_row]);
        for (i, (&expert, &weight)) in ids.iter().zip(of_ids).enumerate() {
            let place = &mut next[expert as usize];
            visitors[*place] = (i / per_row) as u32;
            weights[*place] = weight;
            *place += 1;
        }
        Self { rows, starts, visitors, weights, of_inputs: None }
    }

    /// Places among the visitors of the rows that visit each expert.
    pub(super) fn visits(&self) -> impl Iterator<Item = Range<usize>> {
        self.starts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// What every row adds up of the visitors' outputs: its experts ascending.
    pub(super) fn sums(&self) -> Sums {
        let each = self.visitors.len() / self.rows.max(1);
        let mut taken = vec![0; self.rows];
        let mut places = vec![0; self.visitors.len()];
        let mut weights = vec![0.0; self.visitors.len()];
        for (place, (&row, &weight)) in self.visitors.iter().zip(&self.weights).enumerate() {
            let row = row as usize;
            places[row * each + taken[row]] = place as u32;
            weights[row * each + taken[row]] = weight;
            taken[row] += 1;
        }
        let from = (0..=self.rows).map(|row| (row * each) as u32).collect();
        Sums { from, places, weights: Some(weights) }
    }

    /// An expert's inputs, weighed where the router weighs inputs.
    pub(super) fn weigh(&self, inputs: Tensor, visits: &Range<usize>) -> Result<Tensor> {
        let Some(factors) = &self.of_inputs else { return Ok(inputs) };
        let factors =
            Tensor::from_slice(&factors[visits.clone()], (visits.len(), 1), inputs.device())?;
        inputs.broadcast_mul(&factors.to_dtype(inputs.dtype())?)
    }

    pub(super) fn check(&self, residual: &Tensor, x: &Tensor, experts: &[Expert]) -> Result<()> {
        let (rows, _) = x.dims2()?;
        if x.shape() != residual.shape()
            || rows != self.rows
            || experts.len() != self.starts.len() - 1
        {
            bail!(
                "experts: input {:?}, residual {:?} and {} experts for routes of {} rows to {}",
                x.shape(),
                residual.shape(),
                experts.len(),
                self.rows,
                self.starts.len() - 1
            );
        }
        if x.track_op() || residual.track_op() {
            bail!("experts: no gradient flows through a mixture of experts");
        }
        Ok(())
    }
}

impl SigmoidChoice {
    fn check(&self, count: usize, per_row: usize) -> Result<()> {
        let Self { bias, groups, kept_groups, .. } = self;
        let divides = *groups > 0 && count.is_multiple_of(*groups);
        if bias.len() != count || !divides || !(1..=*groups).contains(kept_groups) {
            let biases = bias.len();
            bail!(
                "experts: {kept_groups} of {groups} groups and {biases} biases for {count} experts"
            );
        }
        if count / groups * kept_groups < per_row {
            bail!("experts: {per_row} for every row of {kept_groups} groups of {}", count / groups);
        }
        Ok(())
    }

    /// Adds a row's experts and their weights.
    fn choose(
        &self,
        logits: &[f32],
        per_row: usize,
        normalise: bool,
        (ids, weights): (&mut Vec<u32>, &mut Vec<f32>),
    ) {
        let scores: Vec<f32> = logits.iter().map(|z| sigma(*z)).collect();
        let mut ranks: Vec<f32> = scores.iter().zip(&self.bias).map(|(s, b)| s + b).collect();
        let size = ranks.len() / self.groups;
        let of_group = |group: &[f32]| best(group, 2).iter().map(|&i| group[i]).sum::<f32>();
        let of_groups: Vec<f32> = ranks.chunks(size).map(of_group).collect();
        let kept = best(&of_groups, self.kept_groups);
        let dropped = (0..self.groups).filter(|group| !kept.contains(group));
        dropped.for_each(|group| ranks[group * size..][..size].fill(f32::NEG_INFINITY));
        let chosen = best(&ranks, per_row);
        let sum: f32 = chosen.iter().map(|&expert| scores[expert]).sum();
        let factor = if normalise { self.scale / (sum + 1e-20) } else { self.scale };
        weights.extend(chosen.iter().map(|&expert| scores[expert] * factor));
        ids.extend(chosen.into_iter().map(|expert| expert as u32));
    }
}

/// `1 / (1 + e^(−z))`
pub(super) fn sigma(z: f32) -> f32 {
    1.0 / (1.0 + (-z).exp())
}

/// Places of the largest values, the largest first; ties go to the lower place.
pub(super) fn best(values: &[f32], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).collect();
    places.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    places.truncate(count);
    places
}

/// Turns the log-probabilities of a row's experts into their weights.
fn into_weights(log_probs: &mut [f32], normalise: bool) {
    let prob = |log_prob: &f32| f64::from(*log_prob).exp();
    let total = if normalise { log_probs.iter().map(prob).sum() } else { 1.0 };
    log_probs.iter_mut().for_each(|of| *of = (prob(of) / total) as f32);
}
