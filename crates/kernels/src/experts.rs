//! Mixture of experts: a router sends every row through a few of many gated MLPs.
//!
//! With router logits `z = x Rᵀ`, `p = softmax(z)` and `S` the `k` most likely experts (ties to the
//! lower one): `y = r + Σ_{e ∈ S} w_e · Down_e (silu(Gate_e x) ∘ Up_e x)`, `w_e = p_e`, or
//! `p_e / Σ_S p`, which is the softmax over `S` alone (Shazeer et al. 2017; Mixtral,
//! arXiv 2401.04088).
//!
//! Rows are grouped by expert, so that a pass reads the weights of an expert once, however many
//! rows chose it, and none of the others. A row's sum runs over its experts in ascending order: its
//! bits depend neither on the rows beside it nor on what they chose. On a device every expert's outputs
//! are kept, and one pass over memory adds each row's. Frozen weights only: nothing flows back.

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor, bail};

use crate::dispatch::fused;
use crate::matrix::{Matrix, linear_each};
use crate::rows::select_rows;
use crate::storage::with_f32;
use crate::sums::Sums;
use crate::swiglu::{Clamped, clamped_swiglu, swiglu};
use crate::top_k::row_top_k;

/// The matrices of one expert.
pub struct Expert {
    /// `[I, H]`
    pub gate: Matrix,
    /// `[I, H]`
    pub up: Matrix,
    /// `[H, I]`
    pub down: Matrix,
    /// Biases of the three, `[I]`, `[I]`, `[H]`; they lie inside of what a router weighs.
    pub biases: Option<[Tensor; 3]>,
    /// Bounds of the gate, if it has any.
    pub clamped: Option<Clamped>,
}

/// What gate and up of an expert become before `Down`.
pub type Gated = fn(&Tensor, &Tensor) -> Result<Tensor>;

impl Expert {
    fn apply(&self, x: &Tensor, gated: Gated) -> Result<Tensor> {
        let [of_gate, of_up, of_down] = match &self.biases {
            Some([gate, up, down]) => [Some(gate), Some(up), Some(down)],
            None => [None; 3],
        };
        let [gate, up] = linear_each(x, [(&self.gate, of_gate), (&self.up, of_up)])?;
        let gated = match self.clamped {
            Some(bounds) => clamped_swiglu(&gate, &up, bounds)?,
            None => gated(&gate, &up)?,
        };
        self.down.linear(&gated, of_down)
    }
}

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
    rows: usize,
    /// Where each expert's rows begin in `visitors`; a last entry says where they end.
    starts: Vec<usize>,
    /// The rows of every expert, ascending.
    visitors: Vec<u32>,
    /// What each of them takes of the expert's output.
    weights: Vec<f32>,
    /// Factor of what each hands to the expert, where it is not 1.
    of_inputs: Option<Vec<f32>>,
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
    fn visits(&self) -> impl Iterator<Item = Range<usize>> {
        self.starts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// What every row adds up of the visitors' outputs: its experts ascending.
    fn sums(&self) -> Sums {
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
    fn weigh(&self, inputs: Tensor, visits: &Range<usize>) -> Result<Tensor> {
        let Some(factors) = &self.of_inputs else { return Ok(inputs) };
        let factors =
            Tensor::from_slice(&factors[visits.clone()], (visits.len(), 1), inputs.device())?;
        inputs.broadcast_mul(&factors.to_dtype(inputs.dtype())?)
    }

    fn check(&self, residual: &Tensor, x: &Tensor, experts: &[Expert]) -> Result<()> {
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
fn sigma(z: f32) -> f32 {
    1.0 / (1.0 + (-z).exp())
}

/// Places of the largest values, the largest first; ties go to the lower place.
fn best(values: &[f32], count: usize) -> Vec<usize> {
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

/// `residual` plus the weighted outputs of every row's experts.
///
/// # Shapes
/// - `residual`, `x`: `[R, H]` → `[R, H]`
///
/// # Errors
/// - shapes do not fit the routes or the experts, or an input carries a gradient
pub fn experts_onto(
    residual: &Tensor,
    x: &Tensor,
    experts: &[Expert],
    routes: &Routes,
) -> Result<Tensor> {
    gated_experts_onto(residual, x, experts, routes, swiglu)
}

/// The same with another gated unit than SiLU's, such as [`crate::geglu::geglu`].
///
/// # Shapes
/// - as [`experts_onto`]
///
/// # Errors
/// - as [`experts_onto`]
pub fn gated_experts_onto(
    residual: &Tensor,
    x: &Tensor,
    experts: &[Expert],
    routes: &Routes,
    gated: Gated,
) -> Result<Tensor> {
    routes.check(residual, x, experts)?;
    if !fused(&[residual, x]) {
        return gathered(residual, x, (experts, gated), routes);
    }
    let (rows, width) = x.dims2()?;
    let mut sums = residual.flatten_all()?.to_vec1::<f32>()?;
    for (expert, visits) in experts.iter().zip(routes.visits()) {
        if visits.is_empty() {
            continue;
        }
        let (visitors, weights) =
            (&routes.visitors[visits.clone()], &routes.weights[visits.clone()]);
        let inputs = routes.weigh(rows_of(x, visitors)?, &visits)?;
        let out = outputs_of((expert, gated), &inputs, width)?;
        with_f32(&out, |out| {
            for ((row, weight), out) in visitors.iter().zip(weights).zip(out.chunks_exact(width)) {
                let sum = &mut sums[*row as usize * width..][..width];
                sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight * out);
            }
            Ok(())
        })?;
    }
    Tensor::from_vec(sums, (rows, width), x.device())
}

/// Some rows; all of them without a copy.
fn rows_of(x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    if rows.len() == x.dim(0)? {
        return Ok(x.clone());
    }
    select_rows(x, rows)
}

fn outputs_of((expert, gated): (&Expert, Gated), x: &Tensor, width: usize) -> Result<Tensor> {
    let out = expert.apply(x, gated)?;
    if out.dims() != [x.dim(0)?, width] {
        bail!("experts: output {:?} for rows of {width}", out.shape());
    }
    Ok(out)
}

/// The same grouping on a device: the outputs of all experts, `[R·k, H]`, then each row's sum of them.
fn gathered(
    residual: &Tensor,
    x: &Tensor,
    (experts, gated): (&[Expert], Gated),
    routes: &Routes,
) -> Result<Tensor> {
    let (_, width) = x.dims2()?;
    let visitors = &routes.visitors;
    if visitors.is_empty() {
        return Ok(residual.clone());
    }
    let at = Tensor::from_slice(visitors, visitors.len(), x.device())?;
    let outputs = Tensor::zeros((visitors.len(), width), x.dtype(), x.device())?;
    for (expert, visits) in experts.iter().zip(routes.visits()) {
        if visits.is_empty() {
            continue;
        }
        let own = x.index_select(&at.narrow(0, visits.start, visits.len())?, 0)?;
        let own = routes.weigh(own, &visits)?;
        let out = outputs_of((expert, gated), &own, width)?;
        outputs.slice_set(&out.contiguous()?, 0, visits.start)?;
    }
    routes.sums().of(&outputs, residual)
}

/// The same with every expert applied to every row, from router logits `[R, E]`, for any device
/// and float type.
///
/// # Errors
/// - as [`experts_onto`]
pub fn reference(
    residual: &Tensor,
    x: &Tensor,
    experts: &[Expert],
    logits: &Tensor,
    per_row: usize,
    normalise: bool,
) -> Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
    let probs = shifted.broadcast_div(&shifted.sum_keepdim(D::Minus1)?)?;
    let order = logits.arg_sort_last_dim(false)?;
    let chosen = order.narrow(D::Minus1, 0, per_row)?.contiguous()?;
    let mut weights = probs.gather(&chosen, D::Minus1)?;
    if normalise {
        weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    }
    let weights = probs.zeros_like()?.scatter_add(&chosen, &weights, D::Minus1)?;
    let mut sum = residual.clone();
    for (index, expert) in experts.iter().enumerate() {
        let linear =
            |x: &Tensor, weight: &Matrix| crate::linear::reference(x, &weight.to_dense()?, None);
        let (gate, up) = (linear(x, &expert.gate)?, linear(x, &expert.up)?);
        let out = linear(&crate::swiglu::reference(&gate, &up)?, &expert.down)?;
        sum = (sum + out.broadcast_mul(&weights.narrow(D::Minus1, index, 1)?)?)?;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::emulated;
    use crate::test_support::{Noise, assert_close};

    const HIDDEN: usize = 24;

    fn experts(count: usize, width: usize, dtype: DType, noise: &mut Noise) -> Result<Vec<Expert>> {
        let mut matrix = |outputs, inputs| -> Result<Matrix> {
            Ok(Matrix::Dense(noise.tensor(&[outputs, inputs]).to_dtype(dtype)?))
        };
        (0..count)
            .map(|_| {
                Ok(Expert {
                    gate: matrix(width, HIDDEN)?,
                    up: matrix(width, HIDDEN)?,
                    down: matrix(HIDDEN, width)?,
                    biases: None,
                    clamped: None,
                })
            })
            .collect()
    }

    #[test]
    fn grouping_by_expert_equals_every_expert_on_every_row() -> Result<()> {
        let mut noise = Noise::new(71);
        for (rows, count, per_row, width, dtype, normalise) in [
            (1, 1, 1, 5, DType::F32, false),
            (1, 8, 2, 33, DType::F32, true),
            (7, 8, 8, 16, DType::F32, false),
            (40, 5, 2, 17, DType::BF16, true),
            (130, 16, 3, 8, DType::F32, true),
        ] {
            let experts = experts(count, width, dtype, &mut noise)?;
            let (x, residual) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, HIDDEN]));
            let logits = noise.tensor(&[rows, count]);
            let routes = Routes::choose(&logits, per_row, normalise)?;
            let want = reference(&residual, &x, &experts, &logits, per_row, normalise)?;
            assert_close("fused", &experts_onto(&residual, &x, &experts, &routes)?, &want, 1e-5);
            assert_close(
                "gathered",
                &gathered(&residual, &x, (&experts, swiglu), &routes)?,
                &want,
                1e-5,
            );
            let on_gpu = emulated(|| {
                let routes = Routes::choose(&logits, per_row, normalise)?;
                experts_onto(&residual, &x, &experts, &routes)
            })?;
            assert_close("the GPU's", &on_gpu, &want, 1e-5);
        }
        Ok(())
    }

    #[test]
    fn rows_that_visit_nobody_are_the_residual() -> Result<()> {
        let mut noise = Noise::new(74);
        let experts = experts(3, 8, DType::F32, &mut noise)?;
        let none = Tensor::zeros((0, HIDDEN), DType::F32, &candle_core::Device::Cpu)?;
        let logits = Tensor::zeros((0, 3), DType::F32, &candle_core::Device::Cpu)?;
        let run = || {
            let routes = Routes::choose(&logits, 2, true)?;
            experts_onto(&none, &none, &experts, &routes)
        };
        assert_eq!(run()?.dims(), [0, HIDDEN]);
        assert_eq!(emulated(run)?.dims(), [0, HIDDEN]);
        Ok(())
    }

    #[test]
    fn a_row_has_the_bits_that_it_has_alone() -> Result<()> {
        let mut noise = Noise::new(72);
        let experts = experts(6, 40, DType::F32, &mut noise)?;
        let (rows, per_row) = (50, 2);
        let (x, residual) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, HIDDEN]));
        let logits = noise.tensor(&[rows, 6]);
        let of = |first: usize, count: usize| -> Result<Vec<Vec<f32>>> {
            let part = |t: &Tensor| t.narrow(0, first, count);
            let routes = Routes::choose(&part(&logits)?, per_row, true)?;
            experts_onto(&part(&residual)?, &part(&x)?, &experts, &routes)?.to_vec2()
        };
        let check = || -> Result<()> {
            let together = of(0, rows)?;
            for (row, together) in together.iter().enumerate() {
                assert_eq!(&of(row, 1)?[0], together);
            }
            assert_eq!(of(3, 20)?, together[3..23]);
            Ok(())
        };
        check()?;
        emulated(check)
    }

    #[test]
    fn weights_are_probabilities_or_shares_and_ties_go_to_the_lower_expert() {
        let logits = [0.0_f32, 1.0, -3.0, 1.0];
        let total: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
        let p = (1.0_f64.exp() / total) as f32;
        for (per_row, normalise, want) in [
            (1, false, &[(1, p)][..]),
            (2, false, &[(1, p), (3, p)]),
            (2, true, &[(1, 0.5), (3, 0.5)]),
        ] {
            let row = Tensor::new(&[logits], &candle_core::Device::Cpu).expect("a row");
            let routes = Routes::choose(&row, per_row, normalise).expect("routes");
            let visits = routes.visits().enumerate().filter(|(_, visits)| !visits.is_empty());
            let got: Vec<_> =
                visits.map(|(expert, visits)| (expert, routes.weights[visits.start])).collect();
            assert_eq!(got.len(), want.len());
            for ((expert, weight), (wanted, share)) in got.iter().zip(want) {
                assert_eq!(expert, wanted);
                assert!((weight - share).abs() < 1e-6, "{weight} {share}");
            }
        }
    }

    /// The sum over every row's experts as their weights say, each expert alone.
    fn by_hand(
        x: &Tensor,
        experts: &[Expert],
        of_rows: &[Vec<(usize, f32)>],
    ) -> Result<Vec<Tensor>> {
        let rows = of_rows.iter().enumerate().map(|(row, chosen)| {
            let own = x.narrow(0, row, 1)?;
            let mut sum = own.zeros_like()?;
            for (expert, weight) in chosen {
                sum = (sum + (experts[*expert].apply(&own, swiglu)? * f64::from(*weight))?)?;
            }
            Ok(sum)
        });
        rows.collect()
    }

    #[test]
    fn sigmoid_routers_choose_by_corrected_scores_within_the_best_groups() -> Result<()> {
        let logits = [[0.0_f32, 2.0, 1.0, 1.0, 3.0, -4.0]];
        let rows = Tensor::new(&logits, &candle_core::Device::Cpu)?;
        let s: Vec<f32> = logits[0].iter().map(|z| sigma(*z)).collect();
        let mut numbers =
            SigmoidChoice { bias: vec![0.0; 6], groups: 3, kept_groups: 2, scale: 1.5 };
        let chosen = |numbers: &SigmoidChoice, normalise| -> Result<Vec<(usize, f32)>> {
            let routes = Routes::choose_by(&rows, 2, normalise, Choice::Sigmoid(numbers))?;
            let visits = routes.visits().enumerate().filter(|(_, visits)| !visits.is_empty());
            Ok(visits.map(|(expert, visits)| (expert, routes.weights[visits.start])).collect())
        };
        // The last group holds the best expert, but its two sum lowest.
        let total = s[1] + s[2];
        assert_eq!(chosen(&numbers, false)?, [(1, s[1] * 1.5), (2, s[2] * 1.5)]);
        assert_eq!(
            chosen(&numbers, true)?,
            [(1, s[1] * (1.5 / (total + 1e-20))), (2, s[2] * (1.5 / (total + 1e-20)))]
        );
        // A bias changes who is chosen and not what it weighs.
        numbers.bias[3] = 2.0;
        numbers.bias[0] = -9.0;
        assert_eq!(chosen(&numbers, false)?, [(3, s[3] * 1.5), (4, s[4] * 1.5)]);
        for (groups, kept_groups, biases) in
            [(4, 1, 6), (0, 0, 6), (3, 4, 6), (3, 0, 6), (6, 1, 6), (3, 2, 5)]
        {
            let wrong = SigmoidChoice { bias: vec![0.0; biases], groups, kept_groups, scale: 1.0 };
            assert!(Routes::choose_by(&rows, 2, true, Choice::Sigmoid(&wrong)).is_err());
        }
        Ok(())
    }

    #[test]
    fn experts_with_biases_bounds_and_weighed_inputs_equal_each_alone() -> Result<()> {
        let mut noise = Noise::new(75);
        let mut experts = experts(5, 12, DType::F32, &mut noise)?;
        for expert in &mut experts {
            let biases = [12, 12, HIDDEN].map(|width| noise.tensor(&[width]));
            (expert.biases, expert.clamped) =
                (Some(biases), Some(Clamped { alpha: 1.7, limit: 0.4 }));
        }
        let (x, logits) = (noise.tensor(&[9, HIDDEN]), noise.tensor(&[9, 5]));
        let routes = Routes::choose(&logits, 2, true)?;
        let of_rows = logits.to_vec2::<f32>()?.into_iter().map(|row| {
            let chosen = best(&row, 2);
            let sum: f32 = chosen.iter().map(|&e| row[e].exp()).sum();
            chosen.into_iter().map(|e| (e, row[e].exp() / sum)).collect()
        });
        let want = Tensor::cat(&by_hand(&x, &experts, &of_rows.collect::<Vec<_>>())?, 0)?;
        let zeros = x.zeros_like()?;
        assert_close("fused", &experts_onto(&zeros, &x, &experts, &routes)?, &want, 1e-5);
        assert_close("gathered", &gathered(&zeros, &x, (&experts, swiglu), &routes)?, &want, 1e-5);
        let routes = Routes::choose_by(&logits, 1, false, Choice::SigmoidOnInput)?;
        let rows = logits.to_vec2::<f32>()?.into_iter().enumerate().map(|(row, logits)| {
            let expert = best(&logits, 1)[0];
            experts[expert]
                .apply(&(x.narrow(0, row, 1)? * f64::from(sigma(logits[expert])))?, swiglu)
        });
        let want = Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?;
        assert_close("fused", &experts_onto(&zeros, &x, &experts, &routes)?, &want, 1e-5);
        assert_close("gathered", &gathered(&zeros, &x, (&experts, swiglu), &routes)?, &want, 1e-5);
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() -> Result<()> {
        let mut noise = Noise::new(73);
        let experts = experts(3, 8, DType::F32, &mut noise)?;
        let (x, logits) = (noise.tensor(&[4, HIDDEN]), noise.tensor(&[4, 3]));
        assert!(Routes::choose(&logits, 4, true).is_err());
        assert!(Routes::choose(&logits, 0, true).is_err());
        let routes = Routes::choose(&logits, 2, true)?;
        assert!(experts_onto(&x, &x, &experts[..2], &routes).is_err());
        assert!(experts_onto(&x, &noise.tensor(&[5, HIDDEN]), &experts, &routes).is_err());
        assert!(experts_onto(&noise.tensor(&[4, 9]), &x, &experts, &routes).is_err());
        let trained = noise.var(&[4, HIDDEN]);
        assert!(experts_onto(&x, trained.as_tensor(), &experts, &routes).is_err());
        Ok(())
    }
}
