//! GLIDE: hard labels mixed with the target's own distribution, every row at its own delay.
//!
//! The row at token `t` with delay `d` computes what the decoder computes at level `d` after
//! `d − 1` accepted tokens, because the one-layer draft feeds no hidden state back.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, FeatureNeeds, TeacherFeatures, TeacherKind, untapped};
use longdraft_kernels::attention::{Delays, KeyRanges};
use longdraft_kernels::linear_cross_entropy::{
    Inputs, Output, SoftTargets, Tail, Teacher, linear_cross_entropy,
};
use longdraft_kernels::matrix::{Head, Matrix};
use longdraft_kernels::rope::RopeTable;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::token_ranges::TokenRanges;
use longdraft_models::draft::glide::{CrossContext, GlideDraft, Trace};
use longdraft_models::draft::{Draft, Seen, VocabularyMap};
use longdraft_models::target_model::{Ends, Tap, Target};

use super::config::Glide;
use super::delays::DelayDraws;
use super::proposed::{Known, Proposed};
use crate::error::Result;
use crate::loss::{Loss, Share};
use crate::metrics::{DraftMetrics, LossPart, Quantities};
use crate::objective::{
    Normalisation, Objective, Prepared, SoftTargetKind, TailKind, TeacherConfig, mixed_in_words,
};
use crate::replay::{Rounds, is_replayed};

/// Switches of the objective; defaults are the default mode's.
#[derive(Debug, Clone, PartialEq)]
pub struct GlideObjectiveConfig {
    /// Weight λ of the teacher's part, 0 to 1; 0 turns it off.
    pub soft_weight: f64,
    /// Form of the teacher's part.
    pub soft_targets: SoftTargetKind,
    /// Entries of a top-k teacher.
    pub top_k: usize,
    /// What becomes of the rest.
    pub tail: TailKind,
}

impl Default for GlideObjectiveConfig {
    fn default() -> Self {
        Glide::default().objective(&TeacherConfig::default())
    }
}

/// The GLIDE objective.
pub struct GlideObjective {
    target: Arc<Target>,
    draft: GlideDraft,
    config: GlideObjectiveConfig,
    draws: DelayDraws,
    /// The tokens that it learns to propose, if not all.
    proposed: Option<Proposed>,
}

/// All tokens of a row run where less than one in so many is not learned: keys and queries then share their norm, and no
/// row takes more memory than one whose tokens are all learned.
const DENSE: usize = 8;

/// What states at the learned rows are compared with.
enum Aim<'a> {
    /// The target's whole vocabulary, whose head it is.
    All(&'a TeacherFeatures, Matrix),
    /// The tokens that are proposed.
    Proposed(&'a Proposed, Known),
}

impl GlideObjective {
    /// Trains `draft` against `target`, every delay as often as the others.
    pub fn new(target: Arc<Target>, draft: GlideDraft, config: GlideObjectiveConfig) -> Self {
        let weights = vec![1.0; draft.config().gamma];
        let draws = DelayDraws { seed: 0, weights, shared: false };
        Self { target, draft, config, draws, proposed: None }
    }

    /// The same with other draws of the delays.
    #[must_use]
    pub fn with_delays(self, draws: DelayDraws) -> Self {
        Self { draws, ..self }
    }

    /// The same for a draft that learns to propose these tokens only.
    ///
    /// # Errors
    /// - one lies outside the target's vocabulary
    pub fn with_vocabulary(self, vocabulary: VocabularyMap) -> Result<Self> {
        let proposed = Some(Proposed::new(vocabulary, &self.target)?);
        Ok(Self { proposed, ..self })
    }

    /// The draft.
    pub fn glide(&self) -> &GlideDraft {
        &self.draft
    }

    /// `Σ ℓ` over the batch's learned rows at these delays `[T]`, with the gradient to the draft if `train`.
    ///
    /// # Errors
    /// - the features are not those that [`Objective::needs`] names, or shapes do not fit
    pub fn loss(
        &self,
        (batch, delays): (&Batch, &[u32]),
        features: &BatchFeatures,
        train: bool,
    ) -> Result<Loss> {
        if batch.learned.is_empty() {
            let metrics = DraftMetrics::default();
            return Ok(Loss { numerator: None, denominator: 0, metrics });
        }
        let hidden = self.learned_states((batch, delays), features, train)?;
        let aim = self.aim(&self.target.hold_ends()?, batch, &features.teacher)?;
        Ok(self.judge((batch, delays), &hidden, &aim)?.0)
    }

    /// The draft's final states for a batch at these delays, `[T, H]`, with intermediate values in `trace`.
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn hidden(
        &self,
        (batch, delays): (&Batch, &[u32]),
        features: &BatchFeatures,
        trace: &mut Trace,
    ) -> Result<Tensor> {
        let ends = self.target.hold_ends()?;
        let window = Some(self.draft.config().self_window);
        let own = KeyRanges::packed(&batch.document_ids, window, Delays::Same(0));
        let target_keys = KeyRanges::packed(&batch.document_ids, None, Delays::PerToken(delays));
        let embeddings = ends.embed(&batch.ids)?;
        trace.push(("input", embeddings.clone()));
        let table = self.table(batch, &(0..batch.ids.len()).into())?;
        let cross = CrossContext { last_kv: features.last_kv()?, ranges: Arc::new(target_keys) };
        Ok(self.draft.forward(&embeddings, &table, &Arc::new(own), &cross, trace)?)
    }

    /// Angles of some tokens of a row, as the target's last layer has them.
    fn table(&self, batch: &Batch, rows: &TokenRanges) -> Result<RopeTable> {
        let table = self.target.rope_table((&batch.position_ids, &batch.document_ids), rows)?;
        Ok(table.attended())
    }

    /// The draft's final states at the learned rows, `[R, H]`; nothing learns from them unless `train`. Where many tokens
    /// of a row are not learned, as of long prompts, they do not run through the layer.
    fn learned_states(
        &self,
        (batch, delays): (&Batch, &[u32]),
        features: &BatchFeatures,
        train: bool,
    ) -> Result<Tensor> {
        let tokens = batch.ids.len();
        let here = features.tokens().cloned().unwrap_or_else(|| TokenRanges::from(0..tokens));
        let learned = TokenRanges::of(batch.learned.iter().map(|&t| t as usize..t as usize + 1));
        let unlearned = here.len().saturating_sub(learned.len());
        let rows = if DENSE * unlearned < here.len() { &here } else { &learned };
        let hidden = if rows.len() == tokens {
            self.hidden((batch, delays), features, &mut Vec::new())?
        } else {
            self.hidden_of(rows, (batch, delays), features)?
        };
        let states = select_rows(&hidden, &rows.places_of(&batch.learned)?)?;
        Ok(if train { states } else { states.detach() })
    }

    /// The states of some tokens, `[rows, H]`. Self-attention reaches back by its window: keys
    /// there depend on embeddings and positions alone, so that those of the tokens before are
    /// computed here, too, and their gradients reach the same weights.
    fn hidden_of(
        &self,
        rows: &TokenRanges,
        (batch, delays): (&Batch, &[u32]),
        features: &BatchFeatures,
    ) -> Result<Tensor> {
        let ends = self.target.hold_ends()?;
        let (window, documents) = (self.draft.config().self_window, &batch.document_ids);
        let seen = rows.with_before(window);
        let own = KeyRanges::packed(documents, Some(window), Delays::Same(0));
        // What a token sees stands side by side there, too.
        let own = KeyRanges::of_each(rows.iter().map(|row| {
            let range = own.of(row);
            let first = seen.place_of(range.start).unwrap_or_default();
            first..first + range.len()
        }));
        let target_keys = KeyRanges::packed(documents, None, Delays::PerToken(delays));
        let embed = |tokens: &TokenRanges| ends.embed(&tokens.select(&batch.ids));
        let keys = self.draft.self_kv(&embed(&seen)?, &self.table(batch, &seen)?)?;
        let queries: Vec<u32> = rows.iter().map(|row| row as u32).collect();
        let of_target = Arc::new(target_keys.select(&queries));
        let own = [Seen { keys, ranges: Arc::new(own) }];
        let cross = [Seen { keys: features.last_kv()?.clone(), ranges: of_target }];
        let table = self.table(batch, rows)?;
        Ok(self.draft.forward_each(&embed(rows)?, &table, (&own, &cross))?)
    }

    /// The teacher as training rows have it, where held-out rows have more of it.
    fn teacher_of_training(
        &self,
        ends: &Ends<'_>,
        held_out: &TeacherFeatures,
    ) -> Result<Option<TeacherFeatures>> {
        let TeacherFeatures::Full { hidden } = held_out else { return Ok(None) };
        Ok(match self.needs().teacher {
            TeacherKind::None => Some(TeacherFeatures::None),
            TeacherKind::TopK(k) => {
                let k = k.min(self.target.config().vocab_size);
                let entries = ends.top_k(hidden, k)?;
                Some(TeacherFeatures::TopK { entries, k, hidden: None })
            }
            _ => None,
        })
    }

    /// What the states at the learned rows are compared with.
    fn aim<'a>(
        &'a self,
        ends: &Ends<'_>,
        batch: &Batch,
        teacher: &'a TeacherFeatures,
    ) -> Result<Aim<'a>> {
        let Some(proposed) = &self.proposed else {
            return Ok(Aim::All(teacher, ends.loss_head()?));
        };
        let known = proposed.known((ends, &self.config), batch, teacher)?;
        Ok(Aim::Proposed(proposed, known))
    }

    /// The loss of the learned rows' states over the whole vocabulary, and the weight of its soft part.
    fn judge_all(
        &self,
        batch: &Batch,
        hidden: &Tensor,
        (teacher, head): (&TeacherFeatures, &Matrix),
    ) -> Result<(Output, f64)> {
        let head = Head::from(head);
        let (teacher, soft, soft_weight) = match teacher {
            TeacherFeatures::None => (None, SoftTargets::None, 0.0),
            TeacherFeatures::Full { hidden } => {
                let teacher = Teacher { hidden, rows: None, head };
                (Some(teacher), SoftTargets::Full, self.config.soft_weight)
            }
            TeacherFeatures::EveryToken { .. } => {
                return Err(untapped("the teacher at the learned rows").into());
            }
            TeacherFeatures::TopK { entries, k, hidden } => {
                let tail = match self.config.tail {
                    TailKind::Bucket => Tail::Bucket,
                    TailKind::Renormalise => Tail::Renormalise,
                };
                let soft = SoftTargets::TopK {
                    ids: &entries.ids,
                    log_probs: &entries.log_probs,
                    k: *k,
                    tail,
                };
                let teacher = hidden.as_ref().map(|hidden| Teacher { hidden, rows: None, head });
                (teacher, soft, self.config.soft_weight)
            }
        };
        let labels = batch.labels();
        let labels = Inputs::of_labels(hidden, head, &labels).bent(self.target.bend());
        Ok((linear_cross_entropy(&Inputs { soft, soft_weight, teacher, ..labels })?, soft_weight))
    }

    /// The loss of the learned rows' states, and whether draft and target have the same most likely
    /// token at each of them.
    fn judge(
        &self,
        (batch, delays): (&Batch, &[u32]),
        hidden: &Tensor,
        aim: &Aim<'_>,
    ) -> Result<(Loss, Vec<bool>)> {
        let rows = batch.learned.len();
        let (output, soft_weight) = match aim {
            Aim::All(teacher, head) => self.judge_all(batch, hidden, (teacher, head))?,
            Aim::Proposed(proposed, known) => {
                let output = proposed.judge(hidden, known, (&self.target, &self.config))?;
                (output, if known.is_soft() { self.config.soft_weight } else { 0.0 })
            }
        };
        let mut metrics = DraftMetrics::default();
        metrics.add_rows(batch.learned.iter().map(|t| delays[*t as usize]), &output.rows);
        let sum = (1.0 - soft_weight) * metrics.hard_sum + soft_weight * metrics.soft_sum;
        metrics.parts = vec![LossPart { weight: 1.0, sum, denominator: rows as f64 }];
        let loss = Loss { numerator: Some(output.loss_sum), denominator: rows, metrics };
        Ok((loss, output.rows.agrees))
    }
}

impl Objective for GlideObjective {
    fn draft(&self) -> &dyn Draft {
        &self.draft
    }

    fn draft_mut(&mut self) -> &mut dyn Draft {
        &mut self.draft
    }

    fn needs(&self) -> FeatureNeeds {
        let teacher = match self.config.soft_targets {
            _ if self.config.soft_weight == 0.0 => TeacherKind::None,
            SoftTargetKind::Full => TeacherKind::Full,
            SoftTargetKind::TopK => TeacherKind::TopK(self.config.top_k),
        };
        FeatureNeeds { taps: vec![Tap::LastKv], teacher, ahead: 0 }
    }

    fn normalisation(&self) -> Normalisation {
        match self.draft.config().compat {
            Some(_) => Normalisation::MeanOfBatches,
            None => Normalisation::WholeStep,
        }
    }

    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>> {
        Some(vec![batch.learned.len() as f64])
    }

    fn prepare(&self, batch: &Batch, _: &BatchFeatures) -> Result<Prepared> {
        Ok(Prepared::new(vec![batch.learned.len() as f64], ()))
    }

    fn share(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        _: &Prepared,
        denominators: &[f64],
        train: bool,
    ) -> Result<Share> {
        let delays = self.draws.of(batch);
        let Loss { numerator, metrics, .. } = self.loss((batch, &delays), features, train)?;
        let share = 1.0 / denominators.first().copied().unwrap_or(1.0).max(1.0);
        let loss = numerator.map(|numerator| numerator * share).transpose()?;
        Ok(Share { loss, metrics })
    }

    /// The teacher is always the full softmax here, so that acceptance is exact.
    fn held_out_needs(&self) -> FeatureNeeds {
        FeatureNeeds { teacher: TeacherKind::Full, ..self.needs() }
    }

    fn quantities(&self, teacher: TeacherKind) -> Quantities {
        let (text, target) = (Quantities::TEXT, Quantities::TARGET);
        let delays = format!("mean over delays 1 to {}", self.draft.config().gamma);
        let (soft, agreement, acceptance) = match teacher {
            TeacherKind::None => (text.to_owned(), text, text.to_owned()),
            TeacherKind::TopK(k) | TeacherKind::EveryTokenTopK(k) => {
                let entries = self.config.tail.in_words(k);
                (entries, target, format!("{target}'s top {k}"))
            }
            TeacherKind::Full | TeacherKind::EveryToken => {
                (target.to_owned(), target, target.to_owned())
            }
        };
        let among = self.proposed.as_ref().map(Proposed::size);
        let mut loss = mixed_in_words(self.config.soft_weight, &soft);
        // A label is the target's own token there.
        let text = if among.is_some() && teacher != TeacherKind::None { target } else { text };
        if let Some(size) = among {
            loss = format!("{loss}, among the {size} tokens that are proposed");
        }
        Quantities {
            loss: format!("{loss}; {delays}"),
            hard_loss: format!("{text}; {delays}"),
            agreement: agreement.to_owned(),
            acceptance,
        }
    }

    fn training_quantities(&self) -> Quantities {
        let mut quantities = self.quantities(self.needs().teacher);
        // Held-out rows take every delay as often as every other one.
        let weights = &self.draws.weights;
        if weights.windows(2).any(|pair| pair[0].total_cmp(&pair[1]).is_ne()) {
            let weights: Vec<String> = weights.iter().map(f64::to_string).collect();
            for loss in [&mut quantities.loss, &mut quantities.hard_loss] {
                *loss = format!("{loss} weighted {}", weights.join(" "));
            }
        }
        quantities
    }

    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics> {
        let mut metrics = DraftMetrics::default();
        if batch.learned.is_empty() {
            return Ok(metrics);
        }
        let gamma = self.draft.config().gamma;
        let ends = self.target.hold_ends()?;
        let of_training = self.teacher_of_training(&ends, &features.teacher)?;
        let aim = self.aim(&ends, batch, &features.teacher)?;
        let aim_of_training =
            of_training.as_ref().map(|teacher| self.aim(&ends, batch, teacher)).transpose()?;
        // Whether level `d` has the token after `t`, `[gamma][T]`.
        let mut right = vec![vec![false; batch.ids.len()]; gamma];
        for (delay, right) in (1..).zip(&mut right) {
            let delays = vec![delay; batch.ids.len()];
            let hidden = self.learned_states((batch, &delays), features, false)?;
            let (loss, agrees) = self.judge((batch, &delays), &hidden, &aim)?;
            metrics.merge(&loss.metrics);
            if let Some(aim) = &aim_of_training {
                let (loss, _) = self.judge((batch, &delays), &hidden, aim)?;
                metrics.as_trained.get_or_insert_default().merge(&loss.metrics);
            }
            batch.learned.iter().zip(agrees).for_each(|(t, agrees)| right[*t as usize] = agrees);
        }
        if is_replayed(batch, features) {
            let holds = |root: usize, level: usize| right[level - 1][root + level - 1];
            metrics.replayed = Rounds::replay(batch, gamma, holds);
        }
        Ok(metrics)
    }

    fn draft_len(&self) -> usize {
        self.draft.config().gamma
    }

    fn teacher_tokens(&self, batch: &Batch) -> Vec<u32> {
        batch.learned.clone()
    }
}
