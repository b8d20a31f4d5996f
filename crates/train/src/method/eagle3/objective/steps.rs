//! The test-time steps of a batch, and the loss of all of them in one pass over the head.

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, sequence_of, untapped};
use longdraft_kernels::graph::cat;
use longdraft_kernels::linear::linear;
use longdraft_kernels::linear_cross_entropy::{
    Inputs, Rejection, RowStatistics, SoftTargets, Teacher, Weighted, linear_cross_entropy,
};
use longdraft_kernels::rows::select_rows;
use longdraft_models::draft::eagle3::TestTimeSteps;
use longdraft_models::target_model::RowPart;

use super::config::Eagle3Loss;
use super::rows::{RowPlan, StepRows};
use super::{Eagle3Objective, Eagle3Outcome, teacher_hidden};
use crate::error::Result;
use crate::metrics::{DelayCounts, DraftMetrics, LossPart};

/// The steps' rows, one step after the other.
struct HeadRows<'a> {
    /// What the head reads, `[R, H]`
    normed: &'a Tensor,
    teacher: RowTeacher,
}

/// What the steps of a batch came to.
pub(super) enum Steps {
    /// `RMS_norm(h)` of their rows, `[R, H]`
    Rows(Tensor),
    /// Of a part of a shared row nothing is learned, but other ranks attend to its keys: a number
    /// without worth through which their gradients reach these.
    OnlyKeys(Tensor),
    None,
}

/// What the rows learn.
enum RowTeacher {
    Whole {
        /// States of every token, `[T, Ht]`
        hidden: Tensor,
        /// Which of them every row has, `[R]`
        rows: Vec<u32>,
        /// Normaliser of the teacher's whole vocabulary, `[R]`
        log_sum_exp: Vec<f64>,
    },
    /// Which of the plan's distributions every row has, `[R]`
    Top { rows: Vec<u32> },
}

/// Factors of a step's rows: `a · cross-entropy + b · rejection`.
#[derive(Debug, Clone, Copy)]
struct Factors {
    cross_entropy: f64,
    rejection: f64,
}

impl Eagle3Objective {
    /// Runs the draft on the planned rows; `denominators` are those of the whole optimizer step.
    ///
    /// # Errors
    /// - the features are not those that the plan was made of, or shapes do not fit
    pub fn evaluate(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        plan: &RowPlan,
        denominators: &[f64],
        train: bool,
    ) -> Result<Eagle3Outcome> {
        let steps = self.take_steps(batch, features, plan)?;
        self.judge(&steps, features, (plan, denominators), train)
    }

    /// What steps that were taken for the plan's rows come to beside what it teaches them.
    pub(super) fn judge(
        &self,
        steps: &Steps,
        features: &BatchFeatures,
        (plan, denominators): (&RowPlan, &[f64]),
        train: bool,
    ) -> Result<Eagle3Outcome> {
        let part = features.part.as_ref();
        let loss = match steps {
            Steps::Rows(normed) => {
                let rows = HeadRows { normed, teacher: row_teacher(features, plan)? };
                return self.outcome(&rows, plan, denominators, (part, train));
            }
            Steps::OnlyKeys(loss) => Some(loss.clone()),
            Steps::None => None,
        };
        if self.config.loss == Eagle3Loss::LkLambda {
            acceptance_of_steps(plan, &[], part);
        }
        let metrics = self.metrics(plan, None, &[]);
        Ok(Eagle3Outcome { loss: loss.filter(|_| train), metrics, agrees: Vec::new() })
    }

    /// What the steps' rows come to.
    fn outcome(
        &self,
        rows: &HeadRows<'_>,
        plan: &RowPlan,
        denominators: &[f64],
        (part, train): (Option<&RowPart>, bool),
    ) -> Result<Eagle3Outcome> {
        let factors = if self.config.loss == Eagle3Loss::LkLambda {
            // The mix follows the row's mean acceptance, which is a constant.
            let no_mix = vec![Factors { cross_entropy: 0.0, rejection: 0.0 }; plan.steps.len()];
            let (_, statistics) = self.pass(rows, plan, &no_mix, denominators, false)?;
            let acceptance = acceptance_of_steps(plan, &statistics.acceptance, part);
            self.mixed_factors(plan, &acceptance)
        } else {
            self.plain_factors(plan)
        };
        let (loss, statistics) = self.pass(rows, plan, &factors, denominators, train)?;
        let metrics = self.metrics(plan, Some(&statistics), &factors);
        // Other ranks' gradients reach the keys of a part of which nothing is learned.
        let learned = part.is_some() || plan.steps.iter().any(|step| step.learned() > 0);
        let agrees = statistics.agrees;
        Ok(Eagle3Outcome { loss: learned.then_some(loss), metrics, agrees })
    }

    /// Intermediate values of every token: `fc_out`, and `hidden.i` and `logits.i` of every step.
    ///
    /// # Shapes
    /// - `[T, H]`, `[T, Vd]`
    ///
    /// # Errors
    /// - the features are not those that the objective needs
    pub fn trace(&self, batch: &Batch, features: &BatchFeatures) -> Result<Vec<(String, Tensor)>> {
        let sequence = sequence_of(batch);
        let mut steps = TestTimeSteps::new(&self.draft, &sequence, features.aux_hidden()?)?;
        let mut trace = vec![("fc_out".to_owned(), steps.state().clone())];
        let all: Vec<u32> = (0..batch.ids.len() as u32).collect();
        for i in 0..self.config.ttt_steps {
            let hidden = steps.step(&all)?;
            let logits = linear(&self.draft.head_input(&hidden)?, self.draft.head()?, None)?;
            trace.push((format!("hidden.{i}"), hidden));
            trace.push((format!("logits.{i}"), logits));
        }
        Ok(trace)
    }

    /// Takes the steps for the plan's rows, whatever these are taught.
    pub(super) fn take_steps(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        plan: &RowPlan,
    ) -> Result<Steps> {
        let (sequence, part) = (sequence_of(batch), features.part.as_ref());
        let active = plan.active();
        let nothing = active.first().is_none_or(Vec::is_empty);
        if nothing && part.is_none() {
            return Ok(Steps::None);
        }
        let aux = features.aux_hidden()?;
        let mut steps = TestTimeSteps::of_part(&self.draft, &sequence, aux, part)?;
        if nothing {
            return Ok(Steps::OnlyKeys(steps.only_give_keys()?));
        }
        let mut hidden = Vec::new();
        for (step, active) in plan.steps.iter().zip(&active) {
            if active.is_empty() {
                break;
            }
            let all = steps.step(active)?;
            if !step.rows.is_empty() {
                hidden.push(rows_of(&all, active, step)?);
            }
        }
        Ok(Steps::Rows(self.draft.head_input(&cat(&hidden, 0)?)?))
    }

    /// Head, teacher and loss of all steps' rows.
    fn pass(
        &self,
        rows: &HeadRows<'_>,
        plan: &RowPlan,
        factors: &[Factors],
        denominators: &[f64],
        train: bool,
    ) -> Result<(Tensor, RowStatistics)> {
        let (mut cross_entropy, mut rejection, mut labels) = (Vec::new(), Vec::new(), Vec::new());
        let weights = self.config.weights();
        for (i, (step, factors)) in plan.steps.iter().zip(factors).enumerate() {
            let share = weights[i] / denominators[i];
            for row in &step.rows {
                let share = if row.learned { share } else { 0.0 };
                cross_entropy.push((share * factors.cross_entropy) as f32);
                rejection.push((share * factors.rejection) as f32);
                // Where there is no label, whether the draft agrees with it is not asked.
                labels.push(row.label.map_or(0, |label| label.0));
            }
        }
        let form = match self.config.loss {
            Eagle3Loss::LkAlpha => Rejection::Log,
            Eagle3Loss::Ce | Eagle3Loss::LkLambda => Rejection::Linear,
        };
        let (hidden, head) = (rows.normed, self.draft.head()?);
        let detached = (hidden.detach(), head.detach());
        let (hidden, head) = if train { (hidden, head) } else { (&detached.0, &detached.1) };
        let mut factors = Weighted {
            cross_entropy: &cross_entropy,
            rejection: &rejection,
            form,
            log_sum_exp: None,
        };
        let (soft, teacher) = match (&rows.teacher, &plan.teacher.distributions) {
            (RowTeacher::Top { rows }, Some(distributions)) => {
                (SoftTargets::Sparse(distributions.of_rows(rows), factors), None)
            }
            (RowTeacher::Whole { hidden, rows, log_sum_exp }, _) => {
                factors.log_sum_exp = Some(log_sum_exp);
                let head = (&self.kept_head).into();
                let teacher = Teacher { hidden, rows: Some(rows), head };
                (SoftTargets::Weighted(factors), Some(teacher))
            }
            (RowTeacher::Top { .. }, None) => {
                return Err(untapped("the teacher's distributions").into());
            }
        };
        let labels = Inputs::of_labels(hidden, head, &labels);
        let teacher_bend = self.bend;
        let inputs = Inputs { soft, soft_weight: 1.0, teacher, teacher_bend, ..labels };
        let output = linear_cross_entropy(&inputs)?;
        Ok((output.loss_sum, output.rows))
    }

    fn plain_factors(&self, plan: &RowPlan) -> Vec<Factors> {
        let factors = match self.config.loss {
            Eagle3Loss::LkAlpha => Factors { cross_entropy: 0.0, rejection: 1.0 },
            Eagle3Loss::Ce | Eagle3Loss::LkLambda => Factors { cross_entropy: 1.0, rejection: 0.0 },
        };
        vec![factors; plan.steps.len()]
    }

    /// `w` and `1 − w` of every step; compat's cross-entropy is a mean over padded tokens beside a
    /// mean over learned rows.
    fn mixed_factors(&self, plan: &RowPlan, acceptance: &[f64]) -> Vec<Factors> {
        let of_step = |(step, mean): (&StepRows, &f64)| {
            let mix = self.config.kl_scale * (-self.config.kl_decay * mean).exp();
            let of_padded = match self.config.compat {
                Some(_) => step.learned() as f64 / plan.padded_tokens().max(1) as f64,
                None => 1.0,
            };
            Factors { cross_entropy: mix * of_padded, rejection: 1.0 - mix }
        };
        plan.steps.iter().zip(acceptance).map(of_step).collect()
    }

    /// Counters of every step; without statistics no step has a row.
    fn metrics(
        &self,
        plan: &RowPlan,
        statistics: Option<&RowStatistics>,
        factors: &[Factors],
    ) -> DraftMetrics {
        let (own, weights) = (self.counts_to_divide_by(plan), self.config.weights());
        let mut metrics = DraftMetrics::default();
        let mut first = 0;
        for (i, step) in plan.steps.iter().enumerate() {
            let (rows, acceptance_rows) = (step.supervised, step.rows.len());
            let mut counts = DelayCounts { rows, acceptance_rows, ..DelayCounts::default() };
            let mut part = LossPart { weight: weights[i], sum: 0.0, denominator: own[i] };
            if let Some(statistics) = statistics {
                for (index, row) in (first..).zip(&step.rows) {
                    let agrees = row.label.is_some() && statistics.agrees[index];
                    counts.top1_count += usize::from(agrees);
                    counts.acceptance_sum += statistics.acceptance[index];
                    if row.learned {
                        let (ce, alpha) = (statistics.soft[index], statistics.acceptance[index]);
                        part.sum += self.row_loss(factors[i], ce, alpha);
                    }
                }
            }
            first += step.rows.len();
            if step.learned() == 0 {
                part.sum = self.loss_of_an_empty_step();
                // A loss that no row has is not diluted by those of other batches.
                part.denominator = if part.sum == 0.0 { own[i] } else { 1.0 };
            }
            metrics.by_delay.push(counts);
            metrics.parts.push(part);
        }
        metrics.rows = plan.steps.first().map_or(0, StepRows::learned);
        metrics
    }

    fn row_loss(&self, factors: Factors, cross_entropy: f64, alpha: f64) -> f64 {
        let rejection = match self.config.loss {
            Eagle3Loss::LkAlpha if alpha > 0.0 => -alpha.ln(),
            Eagle3Loss::LkAlpha => 0.0,
            Eagle3Loss::Ce | Eagle3Loss::LkLambda => 1.0 - alpha,
        };
        factors.cross_entropy * cross_entropy + factors.rejection * rejection
    }

    /// The public trainer's `lambda` takes the mean acceptance of no rows for 0 and keeps
    /// `(1 − w)(1 − 0)`, a constant; everywhere else nothing is lost where nothing is learned.
    fn loss_of_an_empty_step(&self) -> f64 {
        let constant = self.config.compat.is_some() && self.config.loss == Eagle3Loss::LkLambda;
        if constant { 1.0 - self.config.kl_scale } else { 0.0 }
    }
}

/// What the plan's rows learn.
fn row_teacher(features: &BatchFeatures, plan: &RowPlan) -> Result<RowTeacher> {
    let tokens = plan.rows_taught();
    if let Some(distributions) = &plan.teacher.distributions {
        let rows = distributions.of_tokens(&tokens);
        let rows = rows.ok_or_else(|| untapped("the teacher at a learned row"))?;
        return Ok(RowTeacher::Top { rows });
    }
    let log_sum_exp = tokens.iter().map(|&t| plan.teacher.log_sum_exp[t as usize]).collect();
    let (hidden, rows) = (teacher_hidden(features)?.clone(), features.state_rows(&tokens)?);
    Ok(RowTeacher::Whole { hidden, rows, log_sum_exp })
}

/// Mean acceptance of every step's learned rows, over all ranks that share the row; `acceptance` is
/// of the plan's rows, and empty where no step has one.
fn acceptance_of_steps(plan: &RowPlan, acceptance: &[f64], part: Option<&RowPart>) -> Vec<f64> {
    let mut rest = acceptance.iter();
    let mut sums = Vec::with_capacity(2 * plan.steps.len());
    for step in &plan.steps {
        let own = step.rows.iter().zip(&mut rest).filter(|(row, _)| row.learned);
        sums.extend([own.map(|(_, acceptance)| acceptance).sum(), step.learned() as f64]);
    }
    let sums = part.map_or(sums.clone(), |part| part.sum(&sums));
    sums.chunks_exact(2).map(|sum| if sum[1] == 0.0 { 0.0 } else { sum[0] / sum[1] }).collect()
}

/// The rows of `step` among those that took it.
fn rows_of(hidden: &Tensor, active: &[u32], step: &StepRows) -> Result<Tensor> {
    if step.rows.len() == active.len() {
        return Ok(hidden.clone());
    }
    let mut places = active.iter().zip(0_u32..);
    let place = |t: u32| places.find(|(row, _)| **row == t).map(|(_, at)| at);
    // Every row of a step is active in it, in the same order.
    let at: Vec<u32> = step.rows.iter().map(|row| row.t).filter_map(place).collect();
    Ok(select_rows(hidden, &at)?)
}
