//! Losses of block drafts beside plain ops: every distance, weight, divisor and label.

mod blocks;
#[path = "blocks/chains.rs"]
mod chains;
#[path = "blocks/gradients.rs"]
mod gradients;
#[path = "blocks/own_head.rs"]
mod own_head;
#[path = "blocks/selectors.rs"]
mod selectors;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Result, Tensor, Var};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_kernels::graph::Backward;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::top_k::linear_top_k;
use longdraft_models::draft::block::{
    Anchor, BlockConfig, BlockDraft, ChainKind, ChainSizes, LayerKind, SelectorSizes, Visible,
};
use longdraft_models::draft::{Draft, Parameter};
use longdraft_models::weights::memory::MemorySource;
use longdraft_train::loss::Share;
use longdraft_train::method::block::{
    BlockBudget, BlockDraws, BlockLoss, BlockObjective, Divisor, SelectorLoss, SlotForm,
    SlotLabels, SlotLoss, SlotWeights, SoftLoss,
};
use longdraft_train::method::dspark::{ChainLoss, ChainObjective};
use longdraft_train::metrics::{DelayCounts, DraftMetrics};
use longdraft_train::objective::{Objective, TailKind, TeacherDistribution};

use blocks::{batch, random};

/// Where the blocks of the two documents begin, with the first token of their document.
const ANCHORS: [(usize, usize); 2] = [(3, 0), (12, 9)];
const DECAY: f64 = 3.0;
const ALPHA: f64 = 0.4;
const ALL: [SlotLoss; 9] = [
    SlotLoss::Ce,
    SlotLoss::Tv,
    SlotLoss::L1,
    SlotLoss::LkAlpha,
    SlotLoss::LkLambda,
    SlotLoss::LkHybrid,
    SlotLoss::ReverseKl,
    SlotLoss::Jsd,
    SlotLoss::Renyi,
];

/// A draft of which the second layer slides.
fn toy() -> BlockConfig {
    let layers = vec![LayerKind::Full, LayerKind::Sliding];
    BlockConfig { layers, sliding_window: Some(3), is_causal: None, ..blocks::toy() }
}

/// What a row is learned from.
struct Row {
    batch: Batch,
    states: Tensor,
    teacher: Tensor,
    head: Tensor,
}

impl Row {
    /// Two documents of 9 and 11 tokens, of which the first two are not learned.
    fn new() -> Self {
        let batch = batch(&[9, 11]);
        let (states, teacher, head) =
            (random((20, 32), 5), random((20, 16), 6), random((30, 16), 3));
        Self { batch, states, teacher, head }
    }

    fn features(&self) -> BatchFeatures {
        let teacher = TeacherFeatures::EveryToken { hidden: self.teacher.clone() };
        BatchFeatures { last_kv: None, aux_hidden: Some(self.states.clone()), teacher, part: None }
    }
}

/// A learned slot beside its teacher, from plain ops with the draft's gradients.
struct Slot {
    /// `[1, V]`
    log_q: Tensor,
    log_p: Tensor,
    /// State, `[1, H]`
    state: Tensor,
    label: usize,
    before: u32,
    /// Place in its block, and the block.
    k: usize,
    block: usize,
}

fn log_softmax(logits: &Tensor) -> Result<Tensor> {
    logits.broadcast_sub(&logits.exp()?.sum_keepdim(1)?.log()?)
}

/// The learned slots of both blocks, of a draft with a chain from slot 0 on.
fn slots(draft: &BlockDraft, row: &Row) -> Result<Vec<Slot>> {
    let (batch, head) = (&row.batch, &row.head);
    let anchors = ANCHORS.map(|(index, document_start)| Anchor { index, document_start });
    let known = anchors.iter().map(|a| (batch.ids[a.index], batch.position_ids[a.index]));
    let (ids, positions) = draft.config().inputs(known);
    let context = draft.context(&row.states, &batch.position_ids).expect("context");
    let visible = Visible::new(draft.config(), &anchors, 4, batch.ids.len());
    let all = draft.blocks(&ids, &positions, &context, &visible).expect("states");
    let first = usize::from(draft.chain().is_none());
    let mut slots = Vec::new();
    for (block, anchor) in anchors.iter().enumerate() {
        for k in first..4 {
            let place = anchor.index + k + 1 - first;
            let before = batch.ids[place - 1];
            let state = all.narrow(0, 4 * block + k, 1)?;
            let mut logits = state.matmul(&head.t()?)?;
            if let Some(chain) = draft.chain()
                && let Some(embedded) = chain.embed(&[before]).expect("a token")
            {
                logits = (logits + embedded.matmul(&chain.output().expect("a head").t()?)?)?;
            }
            let teacher = row.teacher.narrow(0, place - 1, 1)?;
            slots.push(Slot {
                log_q: log_softmax(&logits)?,
                log_p: log_softmax(&teacher.matmul(&head.t()?)?)?,
                state,
                label: batch.ids[place] as usize,
                before,
                k: k - first,
                block,
            });
        }
    }
    Ok(slots)
}

impl Slot {
    fn hard(&self) -> Result<Tensor> {
        self.log_q.narrow(1, self.label, 1)?.sum_all()?.neg()
    }

    fn accepted(&self) -> Result<Tensor> {
        self.log_p.exp()?.minimum(&self.log_q.exp()?)?.sum_all()
    }

    fn chance(&self) -> Result<f64> {
        Ok(f64::from(self.accepted()?.detach().to_scalar::<f32>()?))
    }

    /// The distance to the teacher; `mean` is the chance of acceptance of all slots.
    fn distance(&self, form: SlotForm, mean: f64) -> Result<Tensor> {
        let (p, q) = (self.log_p.exp()?, self.log_q.exp()?);
        let cross_entropy = || (&p * &self.log_q)?.sum_all()?.neg();
        let rejected = || 1.0 - self.accepted()?;
        let mixed = |chance: f64| mixed(form, chance, (&cross_entropy()?, &rejected()?));
        match form.loss {
            SlotLoss::Ce => cross_entropy(),
            SlotLoss::Tv => rejected(),
            SlotLoss::L1 => (&p - &q)?.abs()?.sum_all(),
            SlotLoss::LkAlpha => self.accepted()?.log()?.neg(),
            SlotLoss::LkLambda => mixed(mean),
            SlotLoss::LkHybrid => mixed(self.chance()?),
            SlotLoss::ReverseKl => (&q * (&self.log_q - &self.log_p)?)?.sum_all(),
            SlotLoss::Jsd => {
                let m = ((&p + &q)? * 0.5)?.log()?;
                let of_p = (&p * (&self.log_p - &m)?)?.sum_all()?;
                (of_p + (&q * (&self.log_q - &m)?)?.sum_all()?)? * 0.5
            }
            SlotLoss::Renyi => (&p * &q)?.sqrt()?.sum_all()?.log()? * -2.0,
        }
    }

    /// Cross-entropy with a part of the teacher's distribution.
    fn cross_entropy(&self, distribution: TeacherDistribution) -> Result<Tensor> {
        let p = self.log_p.exp()?;
        let TeacherDistribution::TopK { k, tail } = distribution else {
            return (&p * &self.log_q)?.sum_all()?.neg();
        };
        let mut values: Vec<f32> = p.flatten_all()?.to_vec1()?;
        values.sort_by(|a, b| b.total_cmp(a));
        let chosen = p.ge(f64::from(values[k - 1]))?.to_dtype(DType::F32)?;
        let (p, q) = ((&p * &chosen)?, (self.log_q.exp()? * &chosen)?);
        let learned = (&p * &self.log_q)?.sum_all()?.neg()?;
        let mass = p.sum_all()?;
        match tail {
            TailKind::Renormalise => learned / mass,
            TailKind::Bucket => {
                let left = (1.0 - q.sum_all()?)?.log()?;
                learned - ((1.0 - mass)? * left)?
            }
        }
    }

    /// The same to the label alone.
    fn distance_to_label(&self, form: SlotForm, mean: f64) -> Result<Tensor> {
        let hard = self.hard()?;
        let own = f64::from(hard.neg()?.exp()?.detach().to_scalar::<f32>()?);
        let rejected = || 1.0 - hard.neg()?.exp()?;
        let mixed = |chance: f64| mixed(form, chance, (&hard, &rejected()?));
        match form.loss {
            SlotLoss::Tv => rejected(),
            SlotLoss::L1 => rejected()? * 2.0,
            SlotLoss::LkLambda => mixed(mean),
            SlotLoss::LkHybrid => mixed(own),
            _ => Ok(hard.clone()),
        }
    }
}

/// Cross-entropy mixed with rejection at a chance of acceptance.
fn mixed(form: SlotForm, chance: f64, (hard, rejected): (&Tensor, &Tensor)) -> Result<Tensor> {
    let mix = form.kl_scale * (-form.kl_decay * chance).exp();
    (hard * mix)? + (rejected * (1.0 - mix))?
}

/// `Σ_{j ≥ k} Π_{i ≤ j} ((1 − α) a_i + α)` of every slot, a block after the other.
fn credits(slots: &[Slot], chances: &[f64]) -> Vec<f64> {
    let of = |slot: &Slot| {
        let block = slots.iter().zip(chances).filter(|(other, _)| other.block == slot.block);
        let smooth: Vec<f64> = block.map(|(_, a)| (1.0 - ALPHA) * a + ALPHA).collect();
        (slot.k..smooth.len()).map(|j| smooth[..=j].iter().product::<f64>()).sum()
    };
    slots.iter().map(of).collect()
}

fn decays(slots: &[Slot]) -> Vec<f64> {
    slots.iter().map(|slot| (-(slot.k as f64) / DECAY).exp()).collect()
}

fn sum(losses: &[Tensor], weights: &[f64]) -> Result<Tensor> {
    let terms = losses.iter().zip(weights).map(|(loss, weight)| loss * *weight);
    Tensor::stack(&terms.collect::<Result<Vec<_>>>()?, 0)?.sum_all()
}

/// `Σ w ℓ / Σ w` of the losses of some slots.
fn weighted<S>(
    slots: &[S],
    weights: &[f64],
    loss: impl Fn(&S) -> Result<Tensor>,
) -> Result<Tensor> {
    let losses = slots.iter().map(loss).collect::<Result<Vec<_>>>()?;
    sum(&losses, weights)? / weights.iter().sum::<f64>()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn draws() -> BlockDraws {
    BlockDraws { seed: 4, budget: BlockBudget::PerRow(6) }
}

fn fresh(config: &BlockConfig) -> BlockDraft {
    BlockDraft::initialise(config, &random((30, 16), 1), 2).expect("draft")
}

fn blocks(loss: BlockLoss, config: &BlockConfig, row: &Row) -> BlockObjective {
    let objective = BlockObjective::new(fresh(config), &row.head, loss, draws());
    objective.with_starts(|_| ANCHORS.map(|(index, _)| index).to_vec())
}

/// A step over the row alone.
fn step(objective: &dyn Objective, row: &Row, features: &BatchFeatures) -> Share {
    let prepared = objective.prepare(&row.batch, features).expect("prepared");
    let own = prepared.denominators.clone();
    if let Some(of_masks) = objective.denominators_of_masks(&row.batch) {
        assert_eq!(of_masks, own, "divisors that masks decide are those of features");
    }
    objective.share(&row.batch, features, &prepared, &own, true).expect("share")
}

fn values(gradients: &GradStore, parameter: &Parameter) -> Vec<f32> {
    let gradient = gradients.get(&parameter.var).map(Tensor::flatten_all).transpose();
    let gradient = gradient.expect("values");
    gradient.map(|g| g.to_vec1().expect("values")).unwrap_or_default()
}

/// Loss, told loss and gradients are those of plain ops on `draft`.
fn assert_same(
    name: &str,
    objective: &dyn Objective,
    row: &Row,
    draft: &BlockDraft,
    want: &Tensor,
) {
    // Sums in another order, in f32.
    assert_same_within(name, (objective, row, &row.features()), draft, want, (2e-5, 3e-4));
}

/// The same with errors of losses and of gradients.
fn assert_same_within(
    name: &str,
    (objective, row, features): (&dyn Objective, &Row, &BatchFeatures),
    draft: &BlockDraft,
    want: &Tensor,
    (of_loss, of_gradients): (f32, f32),
) {
    let share = step(objective, row, features);
    let gradients = want.gradients().expect("backward");
    let want = want.to_scalar::<f32>().expect("number");
    let (told, loss) = (share.metrics.loss(), share.loss.expect("a loss"));
    let found = loss.to_scalar::<f32>().expect("number");
    assert!((found - want).abs() < of_loss * want.abs(), "{name}: {found} {want}");
    let error = (told - f64::from(want)).abs();
    assert!(error < f64::from(of_loss) * told.abs(), "{name}: told {told} {want}");
    let own = loss.gradients().expect("backward");
    for (a, b) in draft.parameters().iter().zip(objective.draft().parameters()) {
        let (a_values, b_values) = (values(&gradients, a), values(&own, b));
        let largest = a_values.iter().chain(&b_values).fold(0.0_f32, |m, g| m.max(g.abs()));
        if a_values.is_empty() || b_values.is_empty() {
            assert!(largest == 0.0, "{name} {}: one has no gradient", a.name);
            continue;
        }
        for (x, y) in a_values.iter().zip(&b_values) {
            assert!((x - y).abs() <= of_gradients * largest, "{name} {}: {x} {y}", a.name);
        }
    }
}

#[test]
fn slots_are_held_to_the_target_as_plain_ops_say() -> Result<()> {
    let row = Row::new();
    for loss in ALL {
        for weight in [1.0, 0.3] {
            let form = SlotForm::new(loss, Some(0.8), None);
            let soft = SoftLoss { weight, distribution: TeacherDistribution::Whole };
            let block = BlockLoss { form, decay: DECAY, soft: Some(soft), ..BlockLoss::default() };
            let (draft, objective) = (fresh(&toy()), blocks(block, &toy(), &row));
            let all = slots(&draft, &row)?;
            let chances = all.iter().map(Slot::chance).collect::<Result<Vec<_>>>()?;
            let of = |slot: &Slot| {
                let learned = slot.distance(form, mean(&chances))?;
                (slot.hard()? * (1.0 - weight))? + (learned * weight)?
            };
            let want = weighted(&all, &decays(&all), of)?;
            assert_same(&format!("{loss:?} {weight}"), &objective, &row, &draft, &want);
        }
    }
    Ok(())
}

#[test]
fn parts_of_the_targets_distribution_are_learned_as_plain_ops_say() -> Result<()> {
    let (row, config) = (Row::new(), blocks::toy());
    let top = |k, tail| TeacherDistribution::TopK { k, tail };
    for (weight, distribution) in [
        (1.0, TeacherDistribution::Whole),
        (0.3, TeacherDistribution::Whole),
        (1.0, top(4, TailKind::Bucket)),
        (0.7, top(4, TailKind::Renormalise)),
        (0.5, top(30, TailKind::Renormalise)),
    ] {
        let soft = Some(SoftLoss { weight, distribution });
        let block = BlockLoss { decay: DECAY, soft, ..BlockLoss::default() };
        let (draft, objective) = (fresh(&config), blocks(block, &config, &row));
        let all = slots(&draft, &row)?;
        let of = |slot: &Slot| {
            let learned = slot.cross_entropy(distribution)?;
            (slot.hard()? * (1.0 - weight))? + (learned * weight)?
        };
        let want = weighted(&all, &decays(&all), of)?;
        // As the target gives it, and as a store keeps it.
        let mut given = vec![row.features()];
        if let TeacherDistribution::TopK { k, .. } = distribution {
            let rows = select_rows(&row.teacher, &objective.teacher_tokens(&row.batch))?;
            let entries = linear_top_k(&rows, &row.head, k)?;
            let teacher = TeacherFeatures::TopK { entries, k, hidden: None };
            given.push(BatchFeatures { teacher, ..row.features() });
        }
        for features in given {
            let of = (&objective as &dyn Objective, &row, &features);
            assert_same_within(&format!("{soft:?}"), of, &draft, &want, (1e-5, 2e-5));
        }
    }
    Ok(())
}

#[test]
fn slots_are_held_to_their_labels_as_plain_ops_say() -> Result<()> {
    let row = Row::new();
    for (loss, labels) in
        ALL[..6].iter().flat_map(|l| [(*l, SlotLabels::Text), (*l, SlotLabels::Target)])
    {
        let form = SlotForm::new(loss, None, None);
        let block = BlockLoss { form, labels, decay: DECAY, ..BlockLoss::default() };
        let (draft, objective) = (fresh(&toy()), blocks(block, &toy(), &row));
        let mut all = slots(&draft, &row)?;
        if labels == SlotLabels::Target {
            for slot in &mut all {
                slot.label = slot.log_p.argmax(D::Minus1)?.to_vec1::<u32>()?[0] as usize;
            }
        }
        let chance = |slot: &Slot| -> Result<f64> {
            Ok((-f64::from(slot.hard()?.to_scalar::<f32>()?)).exp())
        };
        let chances = all.iter().map(chance).collect::<Result<Vec<_>>>()?;
        let of = |slot: &Slot| slot.distance_to_label(form, mean(&chances));
        let want = weighted(&all, &decays(&all), of)?;
        assert_same(&format!("{loss:?} {labels:?}"), &objective, &row, &draft, &want);
    }
    Ok(())
}

#[test]
fn the_targets_most_likely_tokens_come_from_a_store_as_from_its_states() {
    let row = Row::new();
    let block = BlockLoss { labels: SlotLabels::Target, ..BlockLoss::default() };
    let objective = blocks(block, &toy(), &row);
    let rows = select_rows(&row.teacher, &objective.teacher_tokens(&row.batch)).expect("rows");
    let entries = linear_top_k(&rows, &row.head, 1).expect("entries");
    let teacher = TeacherFeatures::TopK { entries, k: 1, hidden: None };
    let stored = BatchFeatures { teacher, ..row.features() };
    let of = |features: &BatchFeatures| step(&objective, &row, features).metrics.loss();
    let (online, stored) = (of(&row.features()), of(&stored));
    assert!((online - stored).abs() < 1e-9, "{online} {stored}");
    let text = blocks(BlockLoss::default(), &toy(), &row);
    assert!((step(&text, &row, &row.features()).metrics.loss() - online).abs() > 1e-3);
    let none = BatchFeatures { teacher: TeacherFeatures::None, ..row.features() };
    assert!(objective.prepare(&row.batch, &none).is_err());
}

#[test]
fn weights_and_divisors_of_dpard_are_those_of_plain_ops() -> Result<()> {
    let row = Row::new();
    let form = SlotForm::new(SlotLoss::Renyi, None, None);
    let soft = Some(SoftLoss { weight: 1.0, distribution: TeacherDistribution::Whole });
    for divide_by in [Divisor::Weights, Divisor::Slots, Divisor::Rows] {
        let block = BlockLoss {
            weights: SlotWeights::Dpard,
            alpha: ALPHA,
            divide_by,
            form,
            soft,
            ..BlockLoss::default()
        };
        let (draft, objective) = (fresh(&toy()), blocks(block, &toy(), &row));
        let all = slots(&draft, &row)?;
        let chances = all.iter().map(Slot::chance).collect::<Result<Vec<_>>>()?;
        let losses = all.iter().map(|slot| slot.distance(form, 0.0)).collect::<Result<Vec<_>>>()?;
        let weights = credits(&all, &chances);
        let divisor = match divide_by {
            Divisor::Weights => weights.iter().sum(),
            Divisor::Slots => all.len() as f64,
            Divisor::Rows => 1.0,
        };
        let want = (sum(&losses, &weights)? / divisor)?;
        assert_same(&format!("{divide_by:?}"), &objective, &row, &draft, &want);
    }
    Ok(())
}
