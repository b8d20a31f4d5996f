//! EAGLE-3's training-time test (arXiv 2503.01840): the draft reads its own states for `S` steps,
//! and every step learns the target's distribution one token further on.
//!
//! ```text
//! L = Σ_i w_i Σ_t ℓ⁽ⁱ⁾_t / D_i        ℓ = −Σ_v p_v log q_v, or an LK loss (arXiv 2602.23881)
//! ```
//!
//! `D_i` is the number of rows that step `i` learns, over the whole optimizer step. Head and loss
//! of all steps run as one pass over their learned rows, so nothing of size `T × V` or `T × T`
//! exists: memory is `O(S · T)`. Where only the teacher's most likely tokens are kept, the
//! distribution is theirs (`crate::objective::distributions`): another objective than the whole distribution's,
//! unless `k = V`.

mod config;
mod rows;
mod steps;
mod teacher;

use std::path::Path;

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, FeatureNeeds, TeacherFeatures, TeacherKind, untapped};
use longdraft_kernels::bend::Bend;
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::token_ranges::TokenRanges;
use longdraft_kernels::top_k::{TopK, bent_top_k};
use longdraft_models::draft::Draft;
use longdraft_models::draft::eagle3::Eagle3Draft;
use longdraft_models::error::Problems;

use crate::error::Result;
use crate::loss::Share;
use crate::metrics::{DraftMetrics, Quantities};
use crate::objective::{Normalisation, Objective, Prepared};
use crate::replay::is_replayed;

pub use crate::objective::TeacherDistribution;
use rows::{rows_read, supervised_rows};
use teacher::TeacherSummary;

pub use config::{Eagle3Compat, Eagle3Loss, Eagle3ObjectiveConfig, MaskRule, OovRows};
pub use rows::RowPlan;

/// The EAGLE-3 objective.
pub struct Eagle3Objective {
    draft: Eagle3Draft,
    /// The target's, `[V, Ht]`.
    head: Matrix,
    /// Its rows of the draft's vocabulary, `[Vd, Ht]`, held as it is.
    kept_head: Matrix,
    /// What makes logits of the target's products; the draft's head has none.
    bend: Bend,
    config: Eagle3ObjectiveConfig,
    distribution: TeacherDistribution,
}

/// What a batch came to.
#[derive(Debug)]
pub struct Eagle3Outcome {
    /// `Σ_i w_i Σ ℓ / D_i`, a scalar that carries the gradient; `None` if nothing is learned.
    pub loss: Option<Tensor>,
    /// Counters of the batch's rows: delay `d` is step `d − 1`, with the rows that the mask supervises. A token that
    /// the draft cannot propose counts against it; acceptance in compat is measured on the learned rows alone.
    pub metrics: DraftMetrics,
    /// Whether draft and target have the same most likely token, for the plan's rows step by step.
    agrees: Vec<bool>,
}

impl Eagle3Objective {
    /// Trains `draft` against the target whose output head `[V, Ht]` is given, a tensor or blocks.
    ///
    /// # Errors
    /// - the head is not of the target that the draft is for, or the configuration is unusable
    pub fn new(
        draft: Eagle3Draft,
        head: impl Into<Matrix>,
        config: Eagle3ObjectiveConfig,
    ) -> Result<Self> {
        let head: Matrix = head.into();
        let told = config.problems().iter().map(ToString::to_string).collect();
        let mut problems = Problems(told);
        let wanted = (draft.config().vocab_size, draft.config().target_hidden_size);
        let found = head.dims()?;
        if found != wanted {
            problems.push(format!("target head {found:?}, {wanted:?} expected"));
        }
        refuse(problems, "objective")?;
        let vocabulary = draft.vocabulary();
        let kept_head = if vocabulary.is_identity() {
            head.clone()
        } else {
            let kept: Vec<u32> = vocabulary.kept().iter().map(|id| id.0).collect();
            head.select(&kept)?
        };
        Ok(Self {
            draft,
            head,
            kept_head,
            bend: Bend::default(),
            config,
            distribution: TeacherDistribution::Whole,
        })
    }

    /// The same with another part of the teacher's distribution. Held-out rows are measured with
    /// all of it where it is at hand.
    #[must_use]
    pub fn with_distribution(self, distribution: TeacherDistribution) -> Self {
        Self { distribution, ..self }
    }

    /// The same for a target that makes logits of its head's products so.
    #[must_use]
    pub fn with_bend(self, bend: Bend) -> Self {
        Self { bend, ..self }
    }

    /// The draft.
    pub fn eagle3(&self) -> &Eagle3Draft {
        &self.draft
    }

    /// Switches.
    pub fn config(&self) -> &Eagle3ObjectiveConfig {
        &self.config
    }

    /// Finds the rows that every step measures and learns; the draft does not run.
    ///
    /// # Errors
    /// - the features are not those that [`Objective::needs`] names, or lengths differ
    pub fn plan(&self, batch: &Batch, features: &BatchFeatures) -> Result<RowPlan> {
        self.plan_with(batch, features, self.distribution)
    }

    fn plan_with(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        distribution: TeacherDistribution,
    ) -> Result<RowPlan> {
        let tokens = batch.ids.len();
        let run = features.tokens().map_or(tokens, TokenRanges::len);
        let mut problems = Problems::default();
        for (name, length, wanted) in [
            ("mask bits", batch.loss_mask.len(), tokens),
            ("positions", batch.position_ids.len(), tokens),
            ("document ids", batch.document_ids.len(), tokens),
            ("rows of tapped layers", features.aux_hidden()?.dim(0)?, run),
        ] {
            if length != wanted {
                problems.push(format!("{length} {name} for {wanted} tokens"));
            }
        }
        refuse(problems, "batch")?;
        let supervised = supervised_rows(&self.config, batch);
        let rows = rows_read(tokens, &supervised);
        let teacher = self.teacher(features, distribution, (&rows, tokens))?;
        Ok(RowPlan::new(&self.config, batch, supervised, teacher))
    }

    /// The teacher at the tokens `rows` of `tokens`.
    fn teacher(
        &self,
        features: &BatchFeatures,
        distribution: TeacherDistribution,
        (rows, tokens): (&[u32], usize),
    ) -> Result<TeacherSummary> {
        let known = features.part.as_ref().map_or(tokens, |part| part.known().len());
        let vocabulary = self.draft.vocabulary();
        let of_entries = |entries: &TopK, k, tail| {
            TeacherSummary::of_top_k(entries, k, (rows, tokens), vocabulary, tail)
        };
        let lengths = |found: usize, wanted: usize| {
            let problem = format!("{found} teacher rows for {wanted} tokens");
            let problems = if found == wanted { Vec::new() } else { vec![problem] };
            refuse(Problems(problems), "batch")
        };
        let states = |hidden: &Tensor| -> Result<Tensor> {
            lengths(hidden.dim(0)?, known)?;
            Ok(select_rows(hidden, &features.state_rows(rows)?)?)
        };
        match (&features.teacher, distribution) {
            (TeacherFeatures::EveryToken { hidden }, TeacherDistribution::Whole) => {
                let hidden = states(hidden)?;
                TeacherSummary::new(&hidden, (&self.head, self.bend), vocabulary, (rows, tokens))
            }
            (TeacherFeatures::EveryToken { hidden }, TeacherDistribution::TopK { k, tail }) => {
                let hidden = states(hidden)?;
                let k = k.min(self.head.dims()?.0);
                if rows.is_empty() {
                    return Ok(of_entries(&TopK::default(), k, tail));
                }
                Ok(of_entries(&bent_top_k(&hidden, &self.head, k, self.bend)?, k, tail))
            }
            // A store hands out nothing where nothing is read.
            (TeacherFeatures::None, TeacherDistribution::TopK { k, tail }) if rows.is_empty() => {
                Ok(of_entries(&TopK::default(), k, tail))
            }
            (TeacherFeatures::TopK { entries, k, .. }, TeacherDistribution::TopK { tail, .. }) => {
                lengths(entries.ids.len().min(entries.log_probs.len()), rows.len() * k)?;
                Ok(of_entries(entries, *k, tail))
            }
            _ => Err(untapped("the teacher at every token").into()),
        }
    }

    /// What every step's `Σ ℓ` is divided by, `[S]`, at least 1. Sum it over the batches and ranks
    /// of an optimizer step and give the sums to [`Self::evaluate`]; compat divides every batch by
    /// its own numbers times the number of batches.
    pub fn denominators(&self, plan: &RowPlan) -> Vec<f64> {
        self.counts_to_divide_by(plan).iter().map(|count| count.max(1.0)).collect()
    }

    /// The same, 0 where a step learns nothing, so that sums over batches are exact.
    fn counts_to_divide_by(&self, plan: &RowPlan) -> Vec<f64> {
        let padded = self.config.compat.is_some() && self.config.loss == Eagle3Loss::Ce;
        let of_step = |learned| if padded { plan.padded_tokens() } else { learned };
        plan.counts().iter().map(|(_, learned)| of_step(*learned) as f64).collect()
    }
}

/// The teacher's states of every token, `[T, Ht]`.
fn teacher_hidden(features: &BatchFeatures) -> Result<&Tensor> {
    match &features.teacher {
        TeacherFeatures::EveryToken { hidden } => Ok(hidden),
        _ => Err(untapped("the teacher at every token").into()),
    }
}

fn refuse(problems: Problems, what: &str) -> Result<()> {
    Ok(problems.into_result(Path::new(what))?)
}

impl Objective for Eagle3Objective {
    fn draft(&self) -> &dyn Draft {
        &self.draft
    }

    fn draft_mut(&mut self) -> &mut dyn Draft {
        &mut self.draft
    }

    fn needs(&self) -> FeatureNeeds {
        let teacher = self.distribution.needs();
        FeatureNeeds { taps: self.draft.taps(), teacher, ahead: self.config.ttt_steps }
    }

    /// The whole distribution, so that acceptance is exact.
    fn held_out_needs(&self) -> FeatureNeeds {
        FeatureNeeds { teacher: TeacherKind::EveryToken, ..self.needs() }
    }

    fn normalisation(&self) -> Normalisation {
        match self.config.compat {
            Some(_) => Normalisation::MeanOfBatches,
            None => Normalisation::WholeStep,
        }
    }

    /// Which rows are learned depends on the teacher, unless rows that the draft cannot propose
    /// are kept.
    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>> {
        let kept = self.config.compat.is_none() && self.config.oov_rows == OovRows::Keep;
        let count = |rows: &Vec<u32>| rows.len() as f64;
        kept.then(|| supervised_rows(&self.config, batch).iter().map(count).collect())
    }

    fn prepare(&self, batch: &Batch, features: &BatchFeatures) -> Result<Prepared> {
        let plan = self.plan(batch, features)?;
        Ok(Prepared::new(self.counts_to_divide_by(&plan), plan))
    }

    fn share(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        prepared: &Prepared,
        denominators: &[f64],
        train: bool,
    ) -> Result<Share> {
        let plan = prepared.plan()?;
        let denominators: Vec<f64> = denominators.iter().map(|count| count.max(1.0)).collect();
        let outcome = self.evaluate(batch, features, plan, &denominators, train)?;
        Ok(Share { loss: outcome.loss, metrics: outcome.metrics })
    }

    fn quantities(&self, teacher: TeacherKind) -> Quantities {
        let target = Quantities::TARGET.to_owned();
        let (distribution, acceptance) = match (teacher, self.distribution) {
            (
                TeacherKind::TopK(k) | TeacherKind::EveryTokenTopK(k),
                TeacherDistribution::TopK { tail, .. },
            ) => (tail.in_words(k), format!("{target}'s top {k}")),
            _ => (target.clone(), target.clone()),
        };
        let form = match self.config.loss {
            Eagle3Loss::Ce => "",
            Eagle3Loss::LkAlpha => "LK (-log acceptance), ",
            Eagle3Loss::LkLambda => "LK (mixed with rejection), ",
        };
        let weights: Vec<String> =
            self.config.weights().iter().map(|weight| format!("{weight:.2}")).collect();
        let loss = format!("{form}{distribution}; steps weighted {}", weights.join(" "));
        Quantities { loss, hard_loss: String::new(), agreement: target, acceptance }
    }

    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics> {
        let plan = self.plan_with(batch, features, TeacherDistribution::Whole)?;
        let steps = self.take_steps(batch, features, &plan)?;
        let judged =
            |plan: &RowPlan| self.judge(&steps, features, (plan, &self.denominators(plan)), false);
        let outcome = judged(&plan)?;
        let mut metrics = outcome.metrics;
        if is_replayed(batch, features) {
            metrics.replayed = plan.replay(batch, &outcome.agrees);
        }
        if self.distribution != TeacherDistribution::Whole {
            let read = self.teacher_tokens(batch);
            let teacher = self.teacher(features, self.distribution, (&read, batch.ids.len()))?;
            metrics.as_trained = Some(Box::new(judged(&plan.taught_by(teacher))?.metrics));
        }
        Ok(metrics)
    }

    fn draft_len(&self) -> usize {
        self.config.ttt_steps
    }

    fn teacher_tokens(&self, batch: &Batch) -> Vec<u32> {
        rows_read(batch.ids.len(), &supervised_rows(&self.config, batch))
    }
}
