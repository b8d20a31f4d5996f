//! The text, the target's distribution and the confidence at the slots of drawn blocks.
//!
//! ```text
//! w_k = exp(−k / γ), or another weight     up to the first token of a block that is not learned
//! α_k = Σ_v min(p_k, q_k)
//! L   = Σ w (a CE + b D) / Z + c Σ u BCE(σ(ĉ), α) / Z'         α takes no gradient
//! ```
//!
//! `D` is the distance to the target's distribution, `Σ |q − p|` unless another one is asked for. `u` is `w` where
//! that does not depend on the draft, else `exp(−k / γ)`; or the chance that the slot is reached. `Z` is `Σ w`, the
//! number of learned slots, or that of rows; `Z'` the same of `u`, but `Σ u` in place of the rows, as SpecForge's
//! D-PARD has it.

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, FeatureNeeds, TeacherFeatures, TeacherKind, untapped};
use longdraft_kernels::graph::{cat, narrow, reshape};
use longdraft_kernels::linear_cross_entropy::{
    Inputs, LowRank, Output, RowStatistics, linear_cross_entropy,
};
use longdraft_kernels::rows::select_rows;
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::Chain;
use longdraft_models::target_model::KeyValues;

use super::loss::ChainLoss;
use crate::error::Result;
use crate::loss::Share;
use crate::method::block::{
    Divisor, DrawnBlocks, Factors, SlotWeights, Slots, Terms, context, divisor, give_keys,
    learned_loss, of_whole_row, reach, replay,
};
use crate::metrics::{DraftMetrics, LossPart, Quantities};
use crate::objective::{Objective, Prepared};
use crate::replay::{Rounds, is_replayed};

/// A block draft with sequential heads, and its loss.
pub type ChainObjective = DrawnBlocks<ChainLoss>;

/// What is learned of a row.
struct Plan {
    slots: Slots,
    /// `w` of the learned slots.
    weights: Vec<f64>,
    /// `u`
    of_confidence: Vec<f64>,
    /// What a row adds to `Z` and `Z'`, and to the step's chances of acceptance and their number where the loss
    /// follows their mean.
    denominators: Vec<f64>,
}

/// What the heads read at the learned slots `[S]` of a pass.
struct Pass {
    /// `[S, H]`
    hidden: Tensor,
    /// What the chain mixes, `[S, r]`, and what multiplies it, `[V, r]`.
    mixed: Option<(Tensor, Tensor)>,
    /// Logits of the chance of acceptance, `[S]`, where there is such a head.
    confidence: Option<Tensor>,
}

/// What a pass over a row's slots computes.
struct Outcome {
    /// The whole loss times `Z`, a scalar with gradients.
    sum: Tensor,
    /// Of that the text and the distance, as a number.
    of_slots: f64,
    /// The confidence's part.
    of_confidence: LossPart,
    /// Against the text; chances of acceptance are `Σ min(p, q)`.
    rows: RowStatistics,
    factors: Vec<Factors>,
}

impl Pass {
    /// The same inputs with what the chain adds to logits.
    fn chained<'a>(&'a self, inputs: &Inputs<'a>) -> Inputs<'a> {
        let low_rank = self.mixed.as_ref().map(|(hidden, head)| LowRank { hidden, head });
        Inputs { low_rank, ..*inputs }
    }

    /// The same without gradients.
    fn detached(&self) -> Self {
        let mixed = self.mixed.as_ref().map(|(mixed, head)| (mixed.detach(), head.detach()));
        Self { hidden: self.hidden.detach(), mixed, confidence: None }
    }
}

impl ChainObjective {
    fn slots(&self, batch: &Batch) -> Slots {
        Slots::from_anchors(batch, &self.starts(batch), self.draft.config())
    }

    /// The plan of a row, from what the heads make of its slots where that matters.
    fn planned(&self, batch: &Batch, slots: Slots, rows: Option<&RowStatistics>) -> Plan {
        let ChainLoss { weights, decay, alpha, divide_by, by_reach, .. } = self.loss;
        let chances = rows.map(|rows| weights.chances(rows));
        let of = |weights: SlotWeights| {
            let of_block = |block: &[Option<f64>]| weights.of_block(block, 0, (decay, alpha));
            slots.by_block(chances.as_deref(), of_block)
        };
        let own = of(weights);
        let of_confidence = if by_reach {
            slots.by_block(rows.map(|rows| rows.acceptance.as_slice()), reach)
        } else if weights.look_at_the_draft() {
            of(SlotWeights::Decay)
        } else {
            own.clone()
        };
        let total = |weights: &[f64]| weights.iter().sum::<f64>();
        let learned = slots.learned.len();
        let of_heads = if divide_by == Divisor::Rows { Divisor::Weights } else { divide_by };
        let mut denominators = vec![
            divide_by.of_row(batch, learned, total(&own)),
            of_heads.of_row(batch, learned, total(&of_confidence)),
        ];
        if self.loss.form.follows_the_step() {
            let accepted = rows.map_or(0.0, |rows| total(&rows.acceptance));
            denominators.extend([accepted, learned as f64]);
        }
        Plan { slots, weights: own, of_confidence, denominators }
    }

    /// The plan of a row over its [`context`], which may depend on the draft.
    fn plan(
        &self,
        batch: &Batch,
        slots: Slots,
        (features, context): (&BatchFeatures, &[KeyValues]),
    ) -> Result<Plan> {
        if slots.learned.is_empty() || !self.loss.looks_at_the_draft() {
            return Ok(self.planned(batch, slots, None));
        }
        let pass = self.pass(batch, context, &slots, false)?;
        let rows = self.statistics(&pass, &slots, features)?;
        Ok(self.planned(batch, slots, Some(&rows)))
    }

    /// What the heads make of the learned slots beside the target, without a gradient.
    fn statistics(
        &self,
        pass: &Pass,
        slots: &Slots,
        features: &BatchFeatures,
    ) -> Result<RowStatistics> {
        let terms = Terms::none(self.loss.form.loss, slots.learned.len());
        Ok(self.judge(&pass.detached(), slots, features, terms)?.rows)
    }

    /// The slots' losses with the text and the target.
    fn judge(
        &self,
        pass: &Pass,
        slots: &Slots,
        features: &BatchFeatures,
        terms: Terms,
    ) -> Result<Output> {
        let TeacherFeatures::EveryToken { hidden } = &features.teacher else {
            return Err(untapped("the teacher at every token").into());
        };
        let rows = features.state_rows(&slots.teachers())?;
        self.losses((&pass.hidden, slots), (terms, false), |heads, labels, terms| {
            heads.against_whole(&pass.chained(labels), (hidden, &rows), terms)
        })
    }

    /// What the chain mixes at the learned slots, `[S, r]`.
    fn mixed(
        &self,
        chain: Chain<'_>,
        (all, states): (Option<&Tensor>, &Tensor),
        (batch, slots, embedded): (&Batch, &Slots, &Tensor),
    ) -> Result<Tensor> {
        let Some(all) = all else {
            return Ok(chain.step(None, states, embedded)?.mixed);
        };
        let (size, blocks) = (self.draft.config().block_size, slots.anchors.len());
        let all = reshape(all, (blocks, size, ()))?;
        let mut steps = Vec::with_capacity(size);
        let mut state = None;
        for slot in 0..size {
            // Beyond the row nothing is learned, and any token will do.
            let before = slots.anchors.iter().map(|anchor| batch.ids.get(anchor.index + slot));
            let before: Vec<u32> = before.map(|id| id.copied().unwrap_or_default()).collect();
            let Some(embedded) = chain.embed(&before)? else { break };
            let states = reshape(&narrow(&all, 1, slot, 1)?, (blocks, ()))?;
            let step = chain.step(state.as_ref(), &states, &embedded)?;
            steps.push(reshape(&step.mixed, (blocks, 1, ()))?);
            state = step.state;
        }
        let mixed = reshape(&cat(&steps, 1)?, (blocks * steps.len(), ()))?;
        Ok(select_rows(&mixed, &slots.learned)?)
    }

    /// What the heads read at the learned slots of a pass over the [`context`] of a row, with gradients where
    /// it trains.
    fn pass(
        &self,
        batch: &Batch,
        context: &[KeyValues],
        slots: &Slots,
        train: bool,
    ) -> Result<Pass> {
        let chain = self.draft.chain().ok_or_else(|| untapped("sequential heads"))?;
        let frozen = |tensor: &Tensor| if train { tensor.clone() } else { tensor.detach() };
        let tokens = batch.ids.len();
        // A recurrent head goes through every slot of a block.
        let (all, states) = if chain.is_recurrent() {
            let all = frozen(&slots.states(&self.draft, context, tokens)?);
            let states = select_rows(&all, &slots.learned)?;
            (Some(all), states)
        } else {
            (None, frozen(&slots.learned_states(&self.draft, context, tokens)?))
        };
        let embedded = chain.embed(&slots.before)?;
        let mixed = match &embedded {
            Some(embedded) => {
                let mixed = self.mixed(chain, (all.as_ref(), &states), (batch, slots, embedded))?;
                Some((frozen(&mixed), frozen(chain.output()?)))
            }
            None => None,
        };
        let confidence = chain.confidence(&states, embedded.as_ref())?;
        let confidence = confidence.as_ref().map(frozen);
        Ok(Pass { hidden: states, mixed, confidence })
    }

    /// The row's loss under the denominators of its step.
    fn run(
        &self,
        batch: &Batch,
        (features, context): (&BatchFeatures, &[KeyValues]),
        (plan, denominators): (&Plan, &[f64]),
        train: bool,
    ) -> Result<Outcome> {
        let ChainLoss { form, hard, distance, confidence, .. } = self.loss;
        let slots = &plan.slots;
        let pass = self.pass(batch, context, slots, train)?;
        let chances = if form.follows_slots() {
            self.statistics(&pass, slots, features)?.acceptance
        } else {
            Vec::new()
        };
        let mean = form.mean_of_step(denominators);
        let factors = form.factors(slots.learned.len(), &chances, mean);
        let terms = Terms::new(form.loss, &plan.weights, (hard, distance), &factors);
        let Output { loss_sum: mut sum, rows } = self.judge(&pass, slots, features, terms)?;
        let (of_slots, mut of_confidence) = (number(&sum)?, LossPart::default());
        if let Some(logits) = &pass.confidence {
            let weights: Vec<f32> =
                plan.of_confidence.iter().map(|weight| *weight as f32).collect();
            let own = confidence_loss(logits, &rows.acceptance, &weights)?;
            let denominator = plan.denominators[1];
            of_confidence = LossPart { weight: confidence, sum: number(&own)?, denominator };
            // Its own divisor, before that of all.
            let factor = confidence * divisor(denominators, 0) / divisor(denominators, 1);
            sum = (sum + (own * factor)?)?;
        }
        Ok(Outcome { sum, of_slots, of_confidence, rows, factors })
    }

    /// Counters of a row; slot `k` has delay `k + 1`.
    fn metrics(&self, plan: &Plan, outcome: &Outcome) -> DraftMetrics {
        let mut metrics = DraftMetrics::default();
        let (slots, loss) = (&plan.slots, self.loss.form.loss);
        let size = self.draft.config().block_size;
        let mut agrees = vec![false; slots.ids.len()];
        let Outcome { rows, factors, .. } = outcome;
        for (row, slot) in slots.learned.iter().enumerate() {
            let (right, acceptance) = (rows.agrees[row], rows.acceptance[row]);
            let distance = factors[row].loss(loss, rows.soft[row], acceptance);
            let hard = learned_loss(rows.hard[row]);
            metrics.add_row(slot % size as u32 + 1, hard, distance, right, acceptance);
            agrees[*slot as usize] = right;
        }
        metrics.parts = vec![plan.part(outcome.of_slots)];
        metrics.confidence = outcome.of_confidence;
        let length = |block: &[bool]| 1 + block.iter().take_while(|right| **right).count();
        metrics.replayed =
            Rounds { rounds: slots.anchors.len(), tokens: agrees.chunks(size).map(length).sum() };
        metrics
    }
}

impl Plan {
    fn part(&self, sum: f64) -> LossPart {
        LossPart { weight: 1.0, sum, denominator: self.denominators[0] }
    }

    /// Counters of a row without a learned slot.
    fn metrics_of_nothing(&self) -> DraftMetrics {
        DraftMetrics { parts: vec![self.part(0.0)], ..DraftMetrics::default() }
    }
}

/// A scalar, without its gradient.
fn number(scalar: &Tensor) -> Result<f64> {
    Ok(scalar.detach().to_dtype(DType::F64)?.to_scalar()?)
}

/// `Σ w BCE(σ(ĉ), α)` of logits `[S]`; α takes no gradient.
fn confidence_loss(logits: &Tensor, chances: &[f64], weights: &[f32]) -> Result<Tensor> {
    let of = |values: Vec<f32>| Tensor::from_vec(values, logits.dims(), logits.device());
    let chances = of(chances.iter().map(|chance| chance.clamp(0.0, 1.0) as f32).collect())?;
    // log(1 + e^x) − α x, with the exponent of a number that is not positive.
    let magnitude = logits.abs()?;
    let softplus = (logits.relu()? + (magnitude.neg()?.exp()? + 1.0)?.log()?)?;
    let losses = (softplus - (logits * chances)?)?;
    Ok((losses * of(weights.to_vec())?)?.sum_all()?)
}

impl Objective for ChainObjective {
    fn draft(&self) -> &dyn Draft {
        &self.draft
    }

    fn draft_mut(&mut self) -> &mut dyn Draft {
        &mut self.draft
    }

    fn needs(&self) -> FeatureNeeds {
        let (taps, ahead) = (self.draft.taps(), self.draft.config().block_size);
        FeatureNeeds { taps, teacher: TeacherKind::EveryToken, ahead }
    }

    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>> {
        let plan = || self.planned(batch, self.slots(batch), None);
        (!self.loss.waits()).then(|| plan().denominators)
    }

    fn prepares_with_draft(&self) -> bool {
        self.loss.looks_at_the_draft()
    }

    fn prepare(&self, batch: &Batch, features: &BatchFeatures) -> Result<Prepared> {
        let slots = self.slots(batch);
        let plan = if !self.loss.looks_at_the_draft() {
            self.planned(batch, slots, None)
        } else if slots.learned.is_empty() {
            give_keys(&self.draft, batch, features)?;
            self.planned(batch, slots, None)
        } else {
            self.plan(batch, slots, (features, &context(&self.draft, batch, features)?))?
        };
        Ok(Prepared::new(plan.denominators.clone(), plan))
    }

    fn share(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        prepared: &Prepared,
        denominators: &[f64],
        train: bool,
    ) -> Result<Share> {
        let plan: &Plan = prepared.plan()?;
        if plan.slots.learned.is_empty() {
            let loss = give_keys(&self.draft, batch, features)?.filter(|_| train);
            return Ok(Share { loss, metrics: plan.metrics_of_nothing() });
        }
        let context = context(&self.draft, batch, features)?;
        let outcome = self.run(batch, (features, &context), (plan, denominators), train)?;
        let metrics = self.metrics(plan, &outcome);
        Ok(Share { loss: Some((outcome.sum / divisor(denominators, 0))?), metrics })
    }

    fn quantities(&self, _: TeacherKind) -> Quantities {
        let slots = format!("slots 0 to {} of drawn blocks", self.draft_len() - 1);
        Quantities {
            loss: self.loss.in_words(&slots),
            hard_loss: format!("{}; {slots}", Quantities::TEXT),
            agreement: Quantities::TEXT.to_owned(),
            acceptance: Quantities::TARGET.to_owned(),
        }
    }

    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics> {
        let context = context(&self.draft, batch, features)?;
        let plan = self.plan(batch, self.slots(batch), (features, &context))?;
        let right = |slots: &Slots| {
            if slots.learned.is_empty() {
                return Ok(Vec::new());
            }
            let pass = self.pass(batch, &context, slots, false)?;
            let terms = Terms::none(self.loss.form.loss, slots.learned.len());
            let output = self.losses((&pass.hidden, slots), (terms, true), |_, labels, _| {
                Ok(linear_cross_entropy(&pass.chained(labels))?)
            })?;
            Ok(output.rows.agrees)
        };
        let replayed = if is_replayed(batch, features) {
            replay(batch, self.draft.config(), plan.slots.anchors.len(), right)?
        } else {
            Rounds::default()
        };
        let denominators = of_whole_row(&plan.denominators, features.part.as_ref());
        if plan.slots.learned.is_empty() {
            return Ok(DraftMetrics { replayed, ..plan.metrics_of_nothing() });
        }
        let of = (&plan, denominators.as_slice());
        let outcome = self.run(batch, (features, &context), of, false)?;
        Ok(DraftMetrics { replayed, ..self.metrics(&plan, &outcome) })
    }

    fn draft_len(&self) -> usize {
        self.draft.config().proposals()
    }

    fn teacher_tokens(&self, batch: &Batch) -> Vec<u32> {
        (0..batch.ids.len() as u32).collect()
    }
}
