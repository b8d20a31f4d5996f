//! The loss on an NVIDIA GPU: the products are the library's, one kernel turns a row of logits into loss,
//! statistics and gradient.

mod product;
mod targets;

use std::sync::LazyLock;

use candle_core::{DType, Result, Shape, Tensor, bail};

use super::composed::{Part, inverse};
use super::reference::logits;
use super::teacher::order_by_teacher;
use super::top_k::best_of;
use super::{Inputs, LowRank, Output, Rejection, RowStatistics, SoftTargets, Weighted};
use crate::chunks::rows_at_once;
use crate::cuda::{Arguments, Launch, Program, takes, upload};
use crate::graph::{add_to, differentiable};
use product::Product;
use targets::{Entries, TeacherLogits};

static PROGRAM: LazyLock<Program> = LazyLock::new(program);

fn program() -> Program {
    Program::new("cross_entropy", include_str!("gpu.cu"), &[])
}

/// To compile it without a device.
#[cfg(all(test, feature = "cuda"))]
pub(crate) fn compiled() -> crate::cuda::Compiled {
    let kernels = ["cross_entropy_rows", "log_sum_exp_rows", "scale"];
    (program(), kernels.map(|kernel| crate::cuda::Block::plain(kernel, THREADS)).to_vec())
}

const THREADS: usize = 512;
/// Numbers of a row: `STATISTICS` of the kernel.
const STATISTICS: usize = 7;
/// Values that a thread scales.
const SCALED: usize = 4;

/// As [`super::reference()`]; all rows' logits exist at the same time. The loss has to be what a
/// backward pass begins at, as [`super::composed`] has it: the gradient of the logits is handed
/// on as it is, without a pass over `[R, V]` to multiply it by 1. It fails as [`super::linear_cross_entropy`] does.
pub(super) fn output(inputs: &Inputs<'_>) -> Result<Output> {
    let logits = logits(inputs)?.contiguous()?;
    let weighted = matches!(inputs.soft, SoftTargets::Weighted(_));
    let teacher =
        inputs.teacher.map(|teacher| TeacherLogits::new(&teacher, weighted)).transpose()?;
    let wanted = logits.track_op().then_some(DType::F32);
    let (gradient, statistics) = start(inputs, &logits, teacher.as_ref(), wanted)?;
    let statistics = numbers(&statistics)?;
    let loss = Tensor::new(loss_of(&statistics), logits.device())?;
    let loss_sum = differentiable("cross_entropy_rows", [&logits; 3], loss, move |_| {
        Ok([Some(gradient.clone()), None, None])
    })?;
    Ok(Output { loss_sum, rows: row_statistics(inputs, &statistics) })
}

/// The kernel's numbers of a row.
type Numbers = [f32; STATISTICS];

fn numbers(statistics: &Tensor) -> Result<Vec<Numbers>> {
    let all = statistics.flatten_all()?.to_vec1::<f32>()?;
    let rows = all.chunks_exact(STATISTICS);
    Ok(rows.map(|row| std::array::from_fn(|i| row[i])).collect())
}

fn loss_of(statistics: &[Numbers]) -> f32 {
    statistics.iter().map(|row| f64::from(row[6])).sum::<f64>() as f32
}

/// Whether [`in_chunks`] computes the loss: something trains, and logits are not bent.
pub(super) fn learns(inputs: &Inputs<'_>) -> bool {
    let plain = inputs.bend.is_plain() && inputs.teacher_bend.is_plain();
    let second = inputs.low_rank.map_or(inputs.hidden, |part| part.hidden);
    let trains = inputs.trained().iter().any(|tensor| tensor.track_op());
    trains && plain && !inputs.labels.is_empty() && takes(&[inputs.hidden, second])
}

/// The loss with its gradients, in chunks of at most so many logits: without a graph, and with one wait for
/// the device. It fails as [`super::linear_cross_entropy`] does.
pub(super) fn in_chunks(logits: usize, inputs: &Inputs<'_>) -> Result<Output> {
    let (hidden, head) = (inputs.hidden, &inputs.head.to_tensor()?);
    let count = hidden.dim(0)?;
    let order = order_by_teacher(inputs);
    let all = order.clone().unwrap_or_else(|| (0..count as u32).collect());
    let (products, statistics) = sums(logits, inputs, (&all, order.is_some()))?;
    let places = order.map(|order| inverse(&order));
    let own = products.into_iter().map(|product| product.gradients(places.as_deref()));
    let own: Vec<_> = own.collect::<Result<_>>()?;
    let mut of_rows = vec![[0.0; STATISTICS]; count];
    for (row, numbers) in all.iter().zip(numbers(&statistics)?) {
        of_rows[*row as usize] = numbers;
    }
    let loss = Tensor::new(loss_of(&of_rows), hidden.device())?;
    // A head beside a second product is frozen.
    let (trained, [d_hidden, d_head, d_second]) = match (inputs.low_rank, own.as_slice()) {
        (Some(_), [[d_hidden, _], [d_second, d_head]]) => {
            (inputs.trained(), [d_hidden, d_head, d_second].map(Clone::clone))
        }
        (_, own) => {
            let [d_hidden, d_head] = own.first().cloned().unwrap_or_default();
            ([hidden, head, head], [d_hidden, d_head, None])
        }
    };
    let head_type = trained[1].dtype();
    let loss_sum = differentiable("linear_cross_entropy", trained, loss, move |g| {
        let of = |own: &Option<Tensor>| own.as_ref().map(|own| scaled(own, g)).transpose();
        let (dh, dm) = (of(&d_hidden)?, of(&d_second)?);
        match &d_head {
            Some(own) if head_type != DType::F32 => {
                Ok([dh, Some(scaled(own, g)?.to_dtype(head_type)?), dm])
            }
            Some(own) => {
                add_to(1, |sum| scaled_onto(sum, own, g))?;
                Ok([dh, None, dm])
            }
            None => Ok([dh, None, dm]),
        }
    })?;
    Ok(Output { loss_sum, rows: row_statistics(inputs, &of_rows) })
}

/// Runs all rows in the order given, which may not be that of the hidden states: the products with what the chunks
/// come to, and statistics `[R, STATISTICS]` in the order of the chunks.
fn sums(
    logits: usize,
    inputs: &Inputs<'_>,
    (all, reordered): (&[u32], bool),
) -> Result<(Vec<Product>, Tensor)> {
    let (head, order) = (&inputs.head.to_tensor()?, reordered.then_some(all));
    let mut products = vec![Product::new(inputs.hidden, head, order)?];
    if let Some(LowRank { hidden, head }) = inputs.low_rank {
        products.push(Product::new(hidden, head, order)?);
    }
    let mut statistics = Vec::new();
    let step = rows_at_once(logits, head.dim(0)?);
    for (first, rows) in (0..).step_by(step).zip(all.chunks(step)) {
        let (gradient, of_rows) = chunk(inputs, (first, rows), &products)?;
        statistics.push(of_rows);
        for product in &mut products {
            product.take(&gradient, (first, rows.len()))?;
        }
    }
    Ok((products, Tensor::cat(&statistics, 0)?))
}

/// Gradient of some rows' logits, in bf16 where products have such factors, and the rows' statistics.
fn chunk(
    inputs: &Inputs<'_>,
    (first, rows): (usize, &[u32]),
    products: &[Product],
) -> Result<(Tensor, Tensor)> {
    let (part, of_chunk) = (Part::of(inputs, rows)?, (first, rows.len()));
    let mut logits = None;
    for product in products {
        logits = Some(product.onto(logits, of_chunk)?);
    }
    let (Some(logits), [own, ..]) = (logits, products) else {
        bail!("linear_cross_entropy: no product")
    };
    let states = own.states(of_chunk)?;
    let part = part.inputs(&[(&states, own.head().into())], inputs.soft_weight);
    let weighted = matches!(part.soft, SoftTargets::Weighted(_));
    let teacher = part.teacher.map(|teacher| TeacherLogits::new(&teacher, weighted)).transpose()?;
    // The kernel writes no f16, and needs f32 for sums of entries.
    let entries = matches!(part.soft, SoftTargets::TopK { .. } | SoftTargets::Sparse(..));
    let half = states.dtype() == DType::BF16 && !entries;
    let written = if half { DType::BF16 } else { DType::F32 };
    start(&part, &logits, teacher.as_ref(), Some(written))
}

/// `values` times a scalar on their device. It fails where the shapes do not fit, or the device fails.
pub(super) fn scaled(values: &Tensor, scalar: &Tensor) -> Result<Tensor> {
    scaled_onto(None, values, scalar)
}

/// The same added to `base`, of the shape of `values`.
fn scaled_onto(base: Option<&Tensor>, values: &Tensor, scalar: &Tensor) -> Result<Tensor> {
    let count = values.elem_count();
    let lies_well = |t: &Tensor| takes(&[t]) && t.is_contiguous() && t.dims() == values.dims();
    let all = base.into_iter().chain([values]).all(lies_well);
    if !all || !takes(&[scalar]) || count > u32::MAX as usize {
        let own = values.broadcast_mul(&scalar.to_dtype(values.dtype())?)?;
        return base.map_or_else(|| Ok(own.clone()), |base| base + &own);
    }
    let scalar = scalar.contiguous()?;
    let arguments =
        Arguments::of([values, base.unwrap_or(values), &scalar]).and([count]).and([base.is_some()]);
    let blocks = ([count.div_ceil(SCALED * THREADS), 1, 1], THREADS);
    let [out] = Launch::new(&PROGRAM, "scale", blocks, &arguments)
        .run(values.device(), [values.shape().clone()])?;
    Ok(out)
}

/// `log Σ e^z` and the most likely token of every row of logits `[R, V]`, rounded to bf16 before if asked for:
/// `[R, 2]`, still on the device. It fails where the kernel cannot be compiled or started.
pub(crate) fn log_sum_exp(logits: &Tensor, rounded: bool) -> Result<Tensor> {
    let (rows, vocabulary) = logits.dims2()?;
    if vocabulary == 0 {
        bail!("log_sum_exp: logits of {:?}", logits.shape());
    }
    let logits = logits.contiguous()?;
    let arguments = [(&logits).into(), vocabulary.into(), rounded.into()];
    let [out] = Launch::new(&PROGRAM, "log_sum_exp_rows", ([rows, 1, 1], THREADS), &arguments)
        .run(logits.device(), [Shape::from((rows, 2))])?;
    Ok(out)
}

/// Gradient `[R, V]` in the type that is wanted, of no use if none is, and statistics `[R, STATISTICS]`.
fn start(
    inputs: &Inputs<'_>,
    logits: &Tensor,
    teacher: Option<&TeacherLogits>,
    wanted: Option<DType>,
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
    let written = wanted.unwrap_or(DType::F32);
    let of_teacher = teacher.map_or(logits, |teacher| &teacher.logits);
    let arguments = Arguments::of([logits, of_teacher, &teacher_of, &normalisers, &labels])
        .and([&from, &until, &ids, &probabilities, &rest, &rescale])
        .and([&of_labels, &of_soft, &of_rejection])
        .and([vocabulary, soft])
        .and([teacher.is_some(), !true_lse.is_empty(), entries.bucket, form == Rejection::Log])
        .and([inputs.soft_weight])
        .and([wanted.is_some(), written == DType::BF16]);
    let needs_room = wanted.is_some() || soft == 2;
    let room = if needs_room { Shape::from((rows, vocabulary)) } else { Shape::from(1) };
    let results = [(room, written), (Shape::from((rows, STATISTICS)), DType::F32)];
    Launch::new(&PROGRAM, "cross_entropy_rows", ([rows, 1, 1], THREADS), &arguments)
        .run_as(device, &results)
        .map(Into::into)
}

fn row_statistics(inputs: &Inputs<'_>, rows: &[Numbers]) -> RowStatistics {
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
