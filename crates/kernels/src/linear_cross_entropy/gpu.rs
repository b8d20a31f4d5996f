//! The loss of some rows on an NVIDIA GPU: the products are the library's, one kernel turns a row
//! of logits into loss, statistics and gradient.

use std::sync::LazyLock;

use candle_core::{Result, Shape, Tensor};

use super::reference::logits;
use super::top_k::best_of;
use super::{
    Inputs, Output, Rejection, RowStatistics, SoftTargets, SparseDistributions, Tail, Teacher,
    Weighted,
};
use crate::composed::differentiable;
use crate::cuda::{Argument, Launch, Program, exactly, upload};
use crate::linear::composed as linear;
use crate::log_sum_exp::as_of_type;

static PROGRAM: LazyLock<Program> =
    LazyLock::new(|| Program::new("cross_entropy", include_str!("gpu.cu"), &[]));

const THREADS: usize = 512;
/// Numbers of a row: `STATISTICS` of the kernel.
const STATISTICS: usize = 7;

/// As [`super::reference()`]; all rows' logits exist at the same time. The loss has to be what a
/// backward pass begins at, as [`super::composed()`] has it: the gradient of the logits is handed
/// on as it is, without a pass over `[R, V]` to multiply it by 1.
///
/// # Errors
/// - as [`super::linear_cross_entropy`]
pub(super) fn output(inputs: &Inputs<'_>) -> Result<Output> {
    let logits = logits(inputs)?.contiguous()?;
    let weighted = matches!(inputs.soft, SoftTargets::Weighted(_));
    let teacher =
        inputs.teacher.map(|teacher| TeacherLogits::new(&teacher, weighted)).transpose()?;
    let (gradient, statistics) = start(inputs, &logits, teacher.as_ref())?;
    let statistics = statistics.to_vec2::<f32>()?;
    let loss: f64 = statistics.iter().map(|row| f64::from(row[6])).sum();
    let loss = Tensor::new(loss as f32, logits.device())?;
    let loss_sum = differentiable("cross_entropy_rows", [&logits; 3], loss, move |_| {
        Ok([Some(gradient.clone()), None, None])
    })?;
    Ok(Output { loss_sum, rows: row_statistics(inputs, &statistics) })
}

/// A teacher's logits, each row once, and which of them every row has.
struct TeacherLogits {
    logits: Tensor,
    of: Vec<u32>,
}

impl TeacherLogits {
    fn new(teacher: &Teacher<'_>, rounded: bool) -> Result<Self> {
        let logits = linear(&teacher.hidden.detach(), &teacher.head.detach(), None)?;
        let logits = if rounded { as_of_type(&logits, teacher.head.dtype())? } else { logits };
        let of = match teacher.rows {
            Some(rows) => rows.to_vec(),
            None => (0..teacher.hidden.dim(0)? as u32).collect(),
        };
        Ok(Self { logits: logits.contiguous()?, of })
    }
}

/// Targets of which only some tokens are known, as the kernel reads them.
#[derive(Default)]
struct Entries {
    /// Where every row's entries begin and end.
    from: Vec<u32>,
    until: Vec<u32>,
    ids: Vec<u32>,
    /// Sum to 1 with `rest`.
    probabilities: Vec<f32>,
    /// Mass of the bucket for all other tokens, a number a row.
    rest: Vec<f32>,
    /// Makes `probabilities` true, a number a row.
    rescale: Vec<f32>,
    bucket: bool,
}

impl Entries {
    fn top_k(ids: &[u32], log_probs: &[f32], k: usize, tail: Tail) -> Self {
        let mut entries =
            Self { ids: ids.to_vec(), bucket: tail == Tail::Bucket, ..Self::default() };
        for (row, log_probs) in (0..).zip(log_probs.chunks(k.max(1))) {
            let p: Vec<f64> = log_probs.iter().map(|&lp| f64::from(lp).exp()).collect();
            let mass: f64 = p.iter().sum();
            let (rest, rescale) =
                if entries.bucket { ((1.0 - mass).max(0.0), 1.0) } else { (0.0, mass) };
            entries.add_row(row * k, k, (rest, rescale));
            entries.probabilities.extend(p.iter().map(|p| (p / rescale) as f32));
        }
        entries
    }

    fn sparse(distributions: &SparseDistributions<'_>) -> Self {
        let mut entries = Self { ids: distributions.ids.to_vec(), bucket: true, ..Self::default() };
        let mass_of = |distribution: usize| distributions.of_distribution(distribution).mass();
        for distribution in 0..distributions.tails.len() {
            let mass = mass_of(distribution);
            let of = &distributions.log_probs
                [distributions.starts[distribution]..distributions.starts[distribution + 1]];
            let scaled = of.iter().map(|&lp| (f64::from(lp).exp() / mass) as f32);
            entries.probabilities.extend(scaled);
        }
        for &distribution in distributions.rows {
            let distribution = distribution as usize;
            let (start, mass) = (distributions.starts[distribution], mass_of(distribution));
            let shares = (distributions.tails[distribution] / mass, mass);
            entries.add_row(start, distributions.starts[distribution + 1] - start, shares);
        }
        entries
    }

    fn add_row(&mut self, first: usize, count: usize, (rest, rescale): (f64, f64)) {
        self.from.push(first as u32);
        self.until.push((first + count) as u32);
        self.rest.push(rest as f32);
        self.rescale.push(rescale as f32);
    }
}

/// Gradient `[R, V]`, of use if the logits are tracked, and statistics `[R, STATISTICS]`.
fn start(
    inputs: &Inputs<'_>,
    logits: &Tensor,
    teacher: Option<&TeacherLogits>,
) -> Result<(Tensor, Tensor)> {
    let (rows, vocabulary) = logits.dims2()?;
    let device = logits.device();
    let ones = || vec![1.0_f32; rows];
    let none = || vec![0.0_f32; rows];
    let of_factors =
        |weighted: &Weighted<'_>| (weighted.cross_entropy.to_vec(), weighted.rejection.to_vec());
    // SOFT_NONE, SOFT_TEACHER and SOFT_ENTRIES of the kernel.
    let (soft, entries, (cross_entropy, rejection), form) = match &inputs.soft {
        SoftTargets::None => (0_usize, Entries::default(), (ones(), none()), Rejection::Linear),
        SoftTargets::Full => (1, Entries::default(), (ones(), none()), Rejection::Linear),
        SoftTargets::Weighted(all) => (1, Entries::default(), of_factors(all), all.form),
        SoftTargets::TopK { ids, log_probs, k, tail } => {
            let entries = Entries::top_k(ids, log_probs, *k, *tail);
            (2, entries, (ones(), none()), Rejection::Linear)
        }
        SoftTargets::Sparse(distributions, all) => {
            (2, Entries::sparse(distributions), of_factors(all), all.form)
        }
    };
    let true_lse: Vec<f32> = match &inputs.soft {
        SoftTargets::Weighted(Weighted { log_sum_exp: Some(all), .. }) => {
            all.iter().map(|&lse| lse as f32).collect()
        }
        _ => Vec::new(),
    };
    let teacher_of = upload(teacher.map_or(&[][..], |teacher| &teacher.of), device)?;
    let floats = |values: &[f32]| upload(values, device);
    let integers = |values: &[u32]| upload(values, device);
    let normalisers = floats(&true_lse)?;
    let labels = integers(inputs.labels)?;
    let (from, until) = (integers(&entries.from)?, integers(&entries.until)?);
    let (ids, probabilities) = (integers(&entries.ids)?, floats(&entries.probabilities)?);
    let (rest, rescale) = (floats(&entries.rest)?, floats(&entries.rescale)?);
    let of_labels: Vec<f32> = (0..rows).map(|row| inputs.label_weight(row) as f32).collect();
    let of_labels = floats(&of_labels)?;
    let (of_soft, of_rejection) = (floats(&cross_entropy)?, floats(&rejection)?);
    let arguments: [Argument<'_>; 22] = [
        logits.into(),
        teacher.map_or(logits, |teacher| &teacher.logits).into(),
        (&teacher_of).into(),
        (&normalisers).into(),
        (&labels).into(),
        (&from).into(),
        (&until).into(),
        (&ids).into(),
        (&probabilities).into(),
        (&rest).into(),
        (&rescale).into(),
        (&of_labels).into(),
        (&of_soft).into(),
        (&of_rejection).into(),
        vocabulary.into(),
        soft.into(),
        teacher.is_some().into(),
        (!true_lse.is_empty()).into(),
        entries.bucket.into(),
        (form == Rejection::Log).into(),
        inputs.soft_weight.into(),
        logits.track_op().into(),
    ];
    let needs_room = logits.track_op() || soft == 2;
    let room = if needs_room { Shape::from((rows, vocabulary)) } else { Shape::from(1) };
    let shapes = [room, Shape::from((rows, STATISTICS))];
    let launch = Launch {
        program: &PROGRAM,
        kernel: "cross_entropy_rows",
        grid: [rows, 1, 1],
        threads: THREADS,
        memory: 0,
        arguments: &arguments,
        results: &shapes,
    };
    let [gradient, statistics] = exactly(launch.run(device)?)?;
    Ok((gradient, statistics))
}

fn row_statistics(inputs: &Inputs<'_>, rows: &[Vec<f32>]) -> RowStatistics {
    let mut all = RowStatistics::default();
    for (index, row) in rows.iter().enumerate() {
        let [hard, soft, by_teacher, by_entries] = [row[0], row[1], row[2], row[3]].map(f64::from);
        let (best, teachers_best, label) = (row[4] as u32, row[5] as u32, inputs.labels[index]);
        let (wanted, acceptance) = match (&inputs.soft, inputs.teacher) {
            (SoftTargets::Weighted(_), _) => (label, by_teacher),
            (SoftTargets::Sparse(..), _) => (label, by_entries),
            (_, Some(_)) => (teachers_best, by_teacher),
            (SoftTargets::TopK { ids, log_probs, k, .. }, None) => {
                let entries = index * k..(index + 1) * k;
                (best_of(&ids[entries.clone()], &log_probs[entries]), by_entries)
            }
            (_, None) => (label, (-hard).exp()),
        };
        all.hard.push(hard);
        all.soft.push(soft);
        all.agrees.push(best == wanted);
        all.acceptance.push(acceptance);
    }
    all
}
