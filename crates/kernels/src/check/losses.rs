//! Head products with their losses, normalisers and most likely tokens.

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, Input, Output, frozen, trained, up_to};
use crate::bend::Bend;
use crate::linear;
use crate::linear_cross_entropy as loss;
use crate::linear_cross_entropy::{
    Inputs, Rejection, SoftTargets, SparseDistributions, Tail, Teacher, Weighted,
};
use crate::log_sum_exp::{self, HeadSummary, linear_log_sum_exp};
use crate::random::CounterRng;
use crate::top_k::linear_top_k;

/// Standard deviation of logits.
const SPREAD: f64 = 2.0;

/// The same where a loss compares `q < p`: probabilities of the draft are then near `1 / V`, the
/// teacher's are two values far from that, and rounding changes no comparison.
const NARROW_SPREAD: f64 = 0.1;

/// The teacher's logits where a loss compares, with both signs.
const TWO_LOGITS: f64 = 2.0;

/// Largest error with f32 products where a loss sums probabilities of a whole vocabulary in f32.
const OF_SUMS: f64 = 1e-4;

/// Entries a row of top-k targets.
const K: usize = 4;

/// Weights whose logits spread so.
fn head(input: Input, width: usize, spread: f64) -> Input {
    input.times(3.0 * spread / (width as f64).sqrt())
}

/// The soft part of a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Hard,
    HardWithTeacher,
    Full,
    TopKBucket,
    TopKRenormalised,
    TopKWithTeacher,
    LinearRejection,
    LogRejection,
    LogRejectionOfAll,
    Sparse,
}

const KINDS: [Kind; 10] = [
    Kind::Hard,
    Kind::HardWithTeacher,
    Kind::Full,
    Kind::TopKBucket,
    Kind::TopKRenormalised,
    Kind::TopKWithTeacher,
    Kind::LinearRejection,
    Kind::LogRejection,
    Kind::LogRejectionOfAll,
    Kind::Sparse,
];

impl Kind {
    fn has_teacher(self) -> bool {
        use Kind::{Hard, Sparse, TopKBucket, TopKRenormalised};
        !matches!(self, Hard | TopKBucket | TopKRenormalised | Sparse)
    }

    fn compares(self) -> bool {
        use Kind::{LinearRejection, LogRejection, LogRejectionOfAll, Sparse};
        matches!(self, LinearRejection | LogRejection | LogRejectionOfAll | Sparse)
    }
}

/// Targets of every row; any distributions will do, they need not be those of the teacher.
struct Targets {
    labels: Vec<u32>,
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    cross_entropy: Vec<f32>,
    rejection: Vec<f32>,
    log_sum_exp: Vec<f64>,
    teacher_rows: Vec<u32>,
    starts: Vec<usize>,
    tails: Vec<f64>,
    distributions: Vec<u32>,
}

impl Targets {
    fn new(rows: usize, teachers: usize, vocabulary: usize) -> Self {
        let mut rng = CounterRng::new(0, "targets", &[rows as u64, vocabulary as u64]);
        let below = |rng: &mut CounterRng, n: usize| rng.below(n as u64) as u32;
        let (mut ids, mut log_probs) = (Vec::new(), Vec::new());
        for _ in 0..rows {
            let first = rng.below(vocabulary as u64);
            // Different ones, as K is no larger than any vocabulary here.
            let step = (vocabulary / K).max(1) as u64;
            ids.extend((0..K as u64).map(|i| ((first + i * step) % vocabulary as u64) as u32));
            let shares: Vec<f64> = (0..=K).map(|_| 0.05 + rng.uniform()).collect();
            let total: f64 = shares.iter().sum();
            log_probs.extend(shares[..K].iter().map(|share| (share / total).ln() as f32));
        }
        // As if the vocabulary went on.
        let normaliser = (vocabulary as f64).ln() + TWO_LOGITS.cosh().ln() + 0.1;
        Self {
            labels: (0..rows).map(|_| below(&mut rng, vocabulary)).collect(),
            cross_entropy: (0..rows).map(|row| [0.7, 0.0, 1.3][row % 3]).collect(),
            rejection: (0..rows).map(|row| [0.4, 1.0, 0.0, 0.6][row % 4]).collect(),
            log_sum_exp: vec![normaliser; rows],
            teacher_rows: (0..rows).map(|_| below(&mut rng, teachers)).collect(),
            starts: (0..=rows).map(|distribution| distribution * K).collect(),
            tails: (0..rows).map(|distribution| [0.0, 0.1][distribution % 2]).collect(),
            distributions: (0..rows).map(|_| below(&mut rng, rows)).collect(),
            ids,
            log_probs,
        }
    }

    fn soft(&self, kind: Kind) -> SoftTargets<'_> {
        let top_k =
            |tail| SoftTargets::TopK { ids: &self.ids, log_probs: &self.log_probs, k: K, tail };
        let weighted = |form, normaliser| Weighted {
            cross_entropy: &self.cross_entropy,
            rejection: &self.rejection,
            form,
            log_sum_exp: normaliser,
        };
        let part = Some(self.log_sum_exp.as_slice());
        match kind {
            Kind::Hard | Kind::HardWithTeacher => SoftTargets::None,
            Kind::Full => SoftTargets::Full,
            Kind::TopKBucket | Kind::TopKWithTeacher => top_k(Tail::Bucket),
            Kind::TopKRenormalised => top_k(Tail::Renormalise),
            Kind::LinearRejection => SoftTargets::Weighted(weighted(Rejection::Linear, part)),
            Kind::LogRejection => SoftTargets::Weighted(weighted(Rejection::Log, part)),
            Kind::LogRejectionOfAll => SoftTargets::Weighted(weighted(Rejection::Log, None)),
            Kind::Sparse => {
                let distributions = SparseDistributions {
                    starts: &self.starts,
                    ids: &self.ids,
                    log_probs: &self.log_probs,
                    tails: &self.tails,
                    rows: &self.distributions,
                };
                SoftTargets::Sparse(distributions, weighted(Rejection::Log, None))
            }
        }
    }

    /// Arguments from hidden states, head, and the teacher's.
    fn inputs<'a>(&'a self, kind: Kind, t: &'a [Tensor]) -> Inputs<'a> {
        let head = (&t[3]).into();
        let teacher = Teacher { hidden: &t[2], rows: Some(&self.teacher_rows), head };
        Inputs {
            label_weights: kind.compares().then_some(&self.rejection),
            soft: self.soft(kind),
            soft_weight: if matches!(kind, Kind::Hard | Kind::HardWithTeacher) { 0.0 } else { 0.7 },
            teacher: kind.has_teacher().then_some(teacher),
            ..Inputs::of_labels(&t[0], &t[1], &self.labels)
        }
    }
}

fn outputs(output: &loss::Output) -> Result<Vec<Output>> {
    let rows = &output.rows;
    let agrees: Vec<u32> = rows.agrees.iter().map(|agrees| u32::from(*agrees)).collect();
    Ok(vec![
        Output::new("loss", output.loss_sum.clone()),
        Output::numbers("hard", &rows.hard)?,
        Output::numbers("soft", &rows.soft)?,
        Output::numbers("acceptance", &rows.acceptance)?,
        Output::choices("agreement", &agrees)?,
    ])
}

/// Those of a case with many logits, whose reference takes seconds.
const FEW_KINDS: [Kind; 4] = [Kind::Hard, Kind::Full, Kind::TopKBucket, Kind::LogRejection];

/// Rows, width, vocabulary, whether the head trains, and the soft parts.
type Losses = ([usize; 3], bool, &'static [Kind]);

const LOSSES: [(Size, Losses); 5] = [
    (Smoke, ([1, 4, 5], true, &KINDS)),
    (Smoke, ([9, 12, 307], true, &KINDS)),
    (Small, ([24, 64, 128_256], true, &KINDS)),
    (Real, ([300, 256, 128_256], false, &FEW_KINDS)),
    (Real, ([64, 4096, 32_000], true, &KINDS)),
];

pub(super) fn cross_entropy(size: Size) -> Vec<Case> {
    let case = |([rows, width, vocabulary], head_trains, kind): ([usize; 3], bool, Kind)| {
        let teachers = rows.div_ceil(2);
        let targets = Arc::new(Targets::new(rows, teachers, vocabulary));
        let own = if head_trains { trained } else { frozen };
        let [teachers_states, teachers_head] = if kind.compares() {
            let signs = |name, rows| frozen(name, [rows, 1]).signs();
            let head = signs("teacher's head", vocabulary).times(TWO_LOGITS);
            [signs("teacher's states", teachers), head]
        } else {
            let whole = frozen("teacher's head", [vocabulary, width]);
            [frozen("teacher's states", [teachers, width]), head(whole, width, SPREAD)]
        };
        let spread = if kind.compares() { NARROW_SPREAD } else { SPREAD };
        let inputs = [
            trained("hidden", [rows, width]),
            head(own("head", vec![vocabulary, width]), width, spread),
            teachers_states,
            teachers_head,
        ];
        let frozen_head = if head_trains { "" } else { ", frozen head" };
        let shape = format!("{kind:?}, [{rows}, {width}], V {vocabulary}{frozen_head}");
        let of_device = Arc::clone(&targets);
        let op =
            move |t: &[Tensor]| outputs(&loss::linear_cross_entropy(&of_device.inputs(kind, t))?);
        let case = Case::new(shape, inputs, op, move |t| {
            outputs(&loss::reference(&targets.inputs(kind, t))?)
        });
        if kind.compares() { case.within(OF_SUMS, 2e-2) } else { case }
    };
    let of_kinds = |(sizes, head_trains, kinds): Losses| {
        kinds.iter().map(move |kind| (sizes, head_trains, *kind))
    };
    up_to(size, &LOSSES).flat_map(of_kinds).map(case).collect()
}

pub(super) fn softcapped(size: Size) -> Vec<Case> {
    const CAP: f64 = 5.0;
    fn capped<'a>(t: &'a [Tensor], labels: &'a [u32]) -> Inputs<'a> {
        let bend = Bend { softcap: Some(CAP), ..Bend::default() };
        Inputs::of_labels(&t[0], &t[1], labels).bent(bend)
    }
    let case = |[rows, width, vocabulary]: [usize; 3]| {
        let targets = Targets::new(rows, 1, vocabulary);
        let (labels, own) = (targets.labels.clone(), targets.labels);
        let inputs = [
            trained("hidden", [rows, width]),
            head(trained("head", [vocabulary, width]), width, SPREAD),
        ];
        let shape = format!("[{rows}, {width}], V {vocabulary}, cap {CAP}");
        let op = move |t: &[Tensor]| outputs(&loss::linear_cross_entropy(&capped(t, &own))?);
        Case::new(shape, inputs, op, move |t| outputs(&loss::reference(&capped(t, &labels))?))
    };
    up_to(size, &HEADS).map(case).collect()
}

/// Rows, width, vocabulary.
const HEADS: [(Size, [usize; 3]); 6] = [
    (Smoke, [1, 3, 1]),
    (Smoke, [5, 8, 17]),
    (Smoke, [131, 6, 33]),
    (Small, [300, 64, 1024]),
    (Small, [20, 64, 128_256]),
    (Real, [512, 1024, 50_304]),
];

fn summary(summary: &HeadSummary) -> Result<Vec<Output>> {
    Ok(vec![
        Output::numbers("log-sum-exp", &summary.log_sum_exp)?,
        Output::choices("most likely tokens", &summary.argmax)?,
    ])
}

fn frozen_head([rows, width, vocabulary]: [usize; 3]) -> [Input; 2] {
    [frozen("hidden", [rows, width]), head(frozen("head", [vocabulary, width]), width, SPREAD)]
}

pub(super) fn log_sum_exp(size: Size) -> Vec<Case> {
    let case = |shape: [usize; 3]| {
        let label = format!("[{}, {}], V {}", shape[0], shape[1], shape[2]);
        let op = |t: &[Tensor]| summary(&linear_log_sum_exp(&t[0], &t[1])?);
        Case::new(label, frozen_head(shape), op, |t| {
            summary(&log_sum_exp::reference(&t[0], &t[1])?)
        })
    };
    up_to(size, &HEADS).map(case).collect()
}

pub(super) fn top_k(size: Size) -> Vec<Case> {
    const LARGEST: usize = 16;
    let case = |shape: [usize; 3]| {
        let label = format!("{LARGEST} of [{}, {}], V {}", shape[0], shape[1], shape[2]);
        let op = |t: &[Tensor]| {
            let found = linear_top_k(&t[0], &t[1], LARGEST)?;
            let width = LARGEST.min(t[1].dim(0)?);
            let log_probs = found.log_probs;
            let log_probs = Tensor::from_vec(log_probs, (t[0].dim(0)?, width), &Device::Cpu)?;
            let log_probs = Output::new("log-probabilities", log_probs);
            Ok(vec![log_probs, Output::choices("ids", &found.ids)?])
        };
        Case::new(label, frozen_head(shape), op, |t| largest(t, LARGEST))
    };
    up_to(size, &HEADS).map(case).collect()
}

/// The most likely tokens of rows by sorting all.
fn largest(t: &[Tensor], k: usize) -> Result<Vec<Output>> {
    let logits = linear::reference(&t[0], &t[1], None)?;
    let normalisers = logits.log_sum_exp(D::Minus1)?.unsqueeze(1)?;
    let log_probs = logits.broadcast_sub(&normalisers)?.to_dtype(DType::F64)?;
    let (mut ids, mut values, mut width) = (Vec::new(), Vec::new(), 0);
    for row in log_probs.to_vec2::<f64>()? {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        order.truncate(k);
        width = order.len();
        values.extend(order.iter().map(|id| row[*id]));
        ids.extend(order.iter().map(|id| *id as u32));
    }
    let values = Tensor::from_vec(values, (log_probs.dim(0)?, width), &Device::Cpu)?;
    Ok(vec![Output::new("log-probabilities", values), Output::choices("ids", &ids)?])
}
