//! The text, the target's distribution and the confidence at the slots of drawn blocks.
//!
//! ```text
//! w_k = exp(−k / γ)          up to the first token of a block that is not learned
//! D_k = Σ_v |q_k − p_k|      α_k = 1 − D_k / 2
//! L   = (a Σ w CE + b Σ w D + c Σ w BCE(σ(ĉ), α)) / Σ w        α takes no gradient
//! ```

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, FeatureNeeds, TeacherFeatures, TeacherKind, untapped};
use longdraft_kernels::linear_cross_entropy::{
    Inputs, LowRank, Output, Rejection, RowStatistics, SoftTargets, Teacher, Weighted,
    linear_cross_entropy,
};
use longdraft_kernels::rows::select_rows;
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::Chain;
use longdraft_models::target_model::KeyValues;

use crate::error::Result;
use crate::loss::Share;
use crate::method::block::{DrawnBlocks, Slots, context, give_keys, replay};
use crate::metrics::{DraftMetrics, LossPart, Quantities};
use crate::objective::{Normalisation, Objective, Prepared};
use crate::rounds::Rounds;

/// What is minimised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChainLoss {
    /// γ, in slots.
    pub decay: f64,
    /// Weight of the cross-entropy with the text.
    pub hard: f64,
    /// Weight of the distance to the target's distribution.
    pub distance: f64,
    /// Weight of the confidence's loss.
    pub confidence: f64,
}

/// A block draft with sequential heads, and its loss.
pub type ChainObjective = DrawnBlocks<ChainLoss>;

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
    /// The whole loss before its divisor, a scalar with gradients.
    sum: Tensor,
    /// The same as a number.
    value: f64,
    /// Against the text; chances of acceptance are `Σ min(p, q)`.
    rows: RowStatistics,
}

impl Pass {
    /// The heads over the slots' tokens.
    fn labels<'a>(&'a self, head: &'a Tensor, slots: &'a Slots) -> Inputs<'a> {
        let mixed = self.mixed.as_ref();
        Inputs {
            low_rank: mixed.map(|(hidden, head)| LowRank { hidden, head }),
            ..Inputs::of_labels(&self.hidden, head, &slots.labels)
        }
    }
}

impl ChainObjective {
    fn slots(&self, batch: &Batch) -> Slots {
        Slots::from_anchors(batch, &self.starts(batch), self.draft.config())
    }

    fn weights(&self, slots: &Slots) -> Vec<f64> {
        let size = self.draft.config().block_size as u32;
        let weight = |slot: &u32| (-f64::from(slot % size) / self.loss.decay).exp();
        slots.learned.iter().map(weight).collect()
    }

    /// What the chain mixes at the learned slots, `[S, r]`.
    fn mixed(
        &self,
        chain: Chain<'_>,
        (all, states): (&Tensor, &Tensor),
        (batch, slots, embedded): (&Batch, &Slots, &Tensor),
    ) -> Result<Tensor> {
        if !chain.is_recurrent() {
            return Ok(chain.step(None, states, embedded)?.mixed);
        }
        let (size, blocks) = (self.draft.config().block_size, slots.anchors.len());
        let all = all.reshape((blocks, size, ()))?;
        let mut steps = Vec::with_capacity(size);
        let mut state = None;
        for slot in 0..size {
            // Beyond the row nothing is learned, and any token will do.
            let before = slots.anchors.iter().map(|anchor| batch.ids.get(anchor.index + slot));
            let before: Vec<u32> = before.map(|id| id.copied().unwrap_or_default()).collect();
            let Some(embedded) = chain.embed(&before)? else { break };
            let states = all.narrow(1, slot, 1)?.squeeze(1)?.contiguous()?;
            let step = chain.step(state.as_ref(), &states, &embedded)?;
            steps.push(step.mixed);
            state = step.state;
        }
        let mixed = Tensor::stack(&steps, 1)?.flatten(0, 1)?;
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
        let all = slots.states_over(&self.draft, context, batch.ids.len())?;
        let all = if train { all } else { all.detach() };
        let states = select_rows(&all, &slots.learned)?;
        let embedded = chain.embed(&slots.before)?;
        let frozen = |tensor: &Tensor| if train { tensor.clone() } else { tensor.detach() };
        let mixed = match &embedded {
            Some(embedded) => {
                let mixed = self.mixed(chain, (&all, &states), (batch, slots, embedded))?;
                Some((frozen(&mixed), frozen(chain.output()?)))
            }
            None => None,
        };
        let confidence = chain.confidence(&states, embedded.as_ref())?;
        let confidence = confidence.as_ref().map(frozen);
        Ok(Pass { hidden: states, mixed, confidence })
    }

    fn run(
        &self,
        batch: &Batch,
        (features, context): (&BatchFeatures, &[KeyValues]),
        slots: &Slots,
        train: bool,
    ) -> Result<Outcome> {
        let TeacherFeatures::EveryToken { hidden: teacher } = &features.teacher else {
            return Err(untapped("the teacher at every token").into());
        };
        let pass = self.pass(batch, context, slots, train)?;
        let weights = self.weights(slots);
        let scaled = |factor: f64| weights.iter().map(|w| (factor * w) as f32).collect::<Vec<_>>();
        // States of a part of a row begin with its own first token.
        let first = features.rows().map_or(0, |rows| rows.start as u32);
        let teachers: Vec<u32> = slots.teachers().iter().map(|t| t - first).collect();
        let Output { loss_sum: mut sum, rows } = linear_cross_entropy(&Inputs {
            label_weights: Some(&scaled(self.loss.hard)),
            soft: SoftTargets::Weighted(Weighted {
                cross_entropy: &vec![0.0; weights.len()],
                rejection: &scaled(2.0 * self.loss.distance),
                form: Rejection::Linear,
                log_sum_exp: None,
            }),
            soft_weight: 1.0,
            teacher: Some(Teacher { hidden: teacher, rows: Some(&teachers), head: &self.head }),
            ..pass.labels(&self.head, slots).bent(self.bend)
        })?;
        if let Some(logits) = &pass.confidence {
            let loss = confidence_loss(logits, &rows.acceptance, &scaled(self.loss.confidence))?;
            sum = (sum + loss)?;
        }
        let value = sum.detach().to_dtype(DType::F64)?.to_scalar::<f64>()?;
        Ok(Outcome { sum, value, rows })
    }

    /// Counters of a row; slot `k` has delay `k + 1`.
    fn metrics(&self, slots: &Slots, outcome: &Outcome) -> DraftMetrics {
        let mut metrics = DraftMetrics::default();
        let size = self.draft.config().block_size;
        let mut agrees = vec![false; slots.ids.len()];
        let rows = &outcome.rows;
        for (row, slot) in slots.learned.iter().enumerate() {
            let (right, acceptance) = (rows.agrees[row], rows.acceptance[row]);
            let distance = 2.0 * (1.0 - acceptance);
            metrics.add_row(slot % size as u32 + 1, rows.hard[row], distance, right, acceptance);
            agrees[*slot as usize] = right;
        }
        let denominator = self.weights(slots).iter().sum();
        metrics.parts = vec![LossPart { weight: 1.0, sum: outcome.value, denominator }];
        let length = |block: &[bool]| 1 + block.iter().take_while(|right| **right).count();
        metrics.replayed =
            Rounds { rounds: slots.anchors.len(), tokens: agrees.chunks(size).map(length).sum() };
        metrics
    }
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

    fn normalisation(&self) -> Normalisation {
        Normalisation::WholeStep
    }

    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>> {
        Some(vec![self.weights(&self.slots(batch)).iter().sum()])
    }

    fn prepare(&self, batch: &Batch, _: &BatchFeatures) -> Result<Prepared> {
        let slots = self.slots(batch);
        Ok(Prepared::new(vec![self.weights(&slots).iter().sum()], slots))
    }

    fn share(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        prepared: &Prepared,
        denominators: &[f64],
        train: bool,
    ) -> Result<Share> {
        let slots: &Slots = prepared.plan().ok_or_else(|| untapped("the plan of a block draft"))?;
        if slots.learned.is_empty() {
            let loss = give_keys(&self.draft, batch, features)?.filter(|_| train);
            return Ok(Share { loss, metrics: DraftMetrics::default() });
        }
        let context = context(&self.draft, batch, features)?;
        let outcome = self.run(batch, (features, &context), slots, train)?;
        let metrics = self.metrics(slots, &outcome);
        let denominator = denominators.first().copied().filter(|d| *d > 0.0).unwrap_or(1.0);
        Ok(Share { loss: Some((outcome.sum / denominator)?), metrics })
    }

    fn quantities(&self, _: TeacherKind) -> Quantities {
        let ChainLoss { decay, hard, distance, confidence } = self.loss;
        let slots = format!("slots 0 to {} of drawn blocks", self.draft_len() - 1);
        Quantities {
            loss: format!(
                "{hard} text + {distance} distance to the target + {confidence} confidence; {slots}; \
                 weights fall by 1/e every {decay} slots"
            ),
            hard_loss: format!("{}; {slots}", Quantities::TEXT),
            agreement: Quantities::TEXT.to_owned(),
            acceptance: Quantities::TARGET.to_owned(),
        }
    }

    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics> {
        let slots = self.slots(batch);
        let context = context(&self.draft, batch, features)?;
        let right = |slots: &Slots| {
            if slots.learned.is_empty() {
                return Ok(Vec::new());
            }
            let pass = self.pass(batch, &context, slots, false)?;
            Ok(linear_cross_entropy(&pass.labels(&self.head, slots).bent(self.bend))?.rows.agrees)
        };
        // Ranks that share a row know a part of it each.
        let replayed = match features.part {
            Some(_) => Rounds::default(),
            None => replay(batch, self.draft.config(), slots.anchors.len(), right)?,
        };
        if slots.learned.is_empty() {
            return Ok(DraftMetrics { replayed, ..DraftMetrics::default() });
        }
        let metrics = self.metrics(&slots, &self.run(batch, (features, &context), &slots, false)?);
        Ok(DraftMetrics { replayed, ..metrics })
    }

    fn draft_len(&self) -> usize {
        self.draft.config().proposals()
    }

    fn teacher_rows(&self, batch: &Batch) -> Vec<u32> {
        (0..batch.ids.len() as u32).collect()
    }
}
