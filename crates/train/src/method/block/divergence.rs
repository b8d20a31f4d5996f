//! Divergences of whole distributions, which the linear cross-entropy does not know, composed of plain tensor ops.
//!
//! Some rows of logits exist at a time: a chunk's gradients are formed in the forward pass, handed on when backward
//! comes, and its graph is gone before the next chunk begins ([`in_chunks`]). So memory is `O(chunk · V)` as with the
//! fused op, and every value of a chunk is stored many times over ([`chunk_bytes`]). Logits are those of
//! [`linear_cross_entropy`](longdraft_kernels::linear_cross_entropy), the teacher's rounded to its head's type.

use candle_core::{D, DType, Device, Result, Tensor, bail};
use longdraft_kernels::bend::Bend;
use longdraft_kernels::linear_cross_entropy::{
    Inputs, Output, RowStatistics, Teacher, in_chunks, log_softmax,
};
use longdraft_kernels::matrix::Head;
use longdraft_kernels::rows::select_rows;

use super::slot_loss::SlotLoss;
use crate::footprint::F32;

/// Logits that exist at the same time: 240 MiB with what is made of them, of `jsd` 704. A chain and a bend add to it
/// ([`chunk_bytes`]).
const CHUNK_VALUES: usize = 1 << 22;

/// Bytes of a chunk of `rows` rows at most, with the gradients of their states, `width` values a row, and for a part
/// of low rank with its table and what a chunk adds to the table's gradient.
pub(super) fn chunk_bytes(
    loss: SlotLoss,
    (rows, width, vocabulary): (u64, u64, u64),
    (bend, low_rank): (Bend, Option<u64>),
) -> u64 {
    let chunk = rows.min(chunk_rows(CHUNK_VALUES, vocabulary as usize) as u64);
    // Both parts of the logits, beside their sum.
    let parts = if low_rank.is_some() { 2 } else { 0 };
    let of_bend = match bend.softcap {
        Some(_) => 3,
        None => u64::from(!bend.is_plain()),
    };
    let copies = copies(loss) + parts + of_bend;
    // The table as products take it, its gradient, and zeros that it is added to with their sum; that of all chunks
    // waits elsewhere.
    let tables = 4 * low_rank.unwrap_or(0) * vocabulary;
    F32 * (chunk * (copies * vocabulary + width) + rows * width + tables)
}

/// How often the graph of a chunk and its backward pass hold each of the logits, at most. Kept are the logits, what
/// makes them log-probabilities (3) and the teacher's, then the steps of [`between`]; gradients come beside these.
fn copies(loss: SlotLoss) -> u64 {
    let (steps, gradients) = match loss {
        SlotLoss::Jsd => (16, 23),
        SlotLoss::Renyi => (4, 6),
        _ => (3, 7),
    };
    5 + steps + gradients
}

/// Rows of a chunk of at most so many logits.
fn chunk_rows(values: usize, vocabulary: usize) -> usize {
    (values / vocabulary.max(1)).max(1)
}

/// `Σ (h · cross-entropy of the label + w · divergence)` against the teacher of `inputs`, whose head is frozen. The
/// statistics' soft loss is the divergence.
///
/// # Shapes
/// - `weights`: `[R]`
///
/// # Errors
/// - there is no teacher, the head trains, or shapes do not fit
pub(super) fn divergence(inputs: &Inputs<'_>, weights: &[f32], loss: SlotLoss) -> Result<Output> {
    divergence_within(CHUNK_VALUES, inputs, weights, loss)
}

/// The same with at most so many logits at a time.
fn divergence_within(
    values: usize,
    inputs: &Inputs<'_>,
    weights: &[f32],
    loss: SlotLoss,
) -> Result<Output> {
    let Some(teacher) = inputs.teacher.filter(|_| !inputs.head.trains()) else {
        bail!("divergence: a teacher and a frozen head expected")
    };
    let rows = inputs.hidden.dim(0)?;
    let of_labels = inputs.label_weights.map_or(rows, <[f32]>::len);
    let of_teacher = teacher.rows.map_or(rows, <[u32]>::len);
    let lengths = [inputs.labels.len(), weights.len(), of_labels, of_teacher];
    if lengths.iter().any(|length| *length != rows) {
        bail!("divergence: {lengths:?} labels, weights and teachers for {rows} rows");
    }
    let mut products = vec![(inputs.hidden, inputs.head)];
    products.extend(inputs.low_rank.map(|part| (part.hidden, part.head.into())));
    in_chunks(values, &products, None, |rows, products| {
        let log_p = teachers(inputs, &teacher, rows)?;
        let log_q = log_softmax(&logits(inputs.bend, products)?)?;
        let labels = of_rows(inputs.labels, rows);
        let ids = Tensor::from_slice(&labels, (labels.len(), 1), log_q.device())?;
        let hard = log_q.gather(&ids, 1)?.squeeze(1)?.neg()?;
        let soft = between(&log_p, &log_q, loss)?;
        let weighted = |losses: &Tensor, weights: &[f32]| -> Result<Tensor> {
            let weights = Tensor::from_vec(of_rows(weights, rows), rows.len(), losses.device())?;
            (losses * weights.to_dtype(losses.dtype())?)?.sum_all()
        };
        let mut loss_sum = weighted(&soft, weights)?;
        if let Some(of_labels) = inputs.label_weights {
            loss_sum = (loss_sum + weighted(&hard, of_labels)?)?;
        }
        let rows = statistics((&hard, &soft), (&log_p, &log_q), &labels)?;
        Ok(Output { loss_sum, rows })
    })
}

/// Values of some rows.
fn of_rows<T: Copy>(all: &[T], rows: &[u32]) -> Vec<T> {
    rows.iter().map(|row| all[*row as usize]).collect()
}

/// Logits of a chunk `[r, V]`: the first product bent, and the second one where there is one.
fn logits(bend: Bend, products: &[(&Tensor, Head<'_>)]) -> Result<Tensor> {
    let product = |(hidden, head): &(&Tensor, Head<'_>)| head.linear(hidden);
    let logits = bend.of(product(&products[0])?)?;
    match products.get(1) {
        Some(second) => logits + product(second)?,
        None => Ok(logits),
    }
}

/// The divergence of every row, `[R]`, from log-probabilities `[R, V]`.
fn between(log_p: &Tensor, log_q: &Tensor, loss: SlotLoss) -> Result<Tensor> {
    match loss {
        SlotLoss::ReverseKl => (log_q.exp()? * (log_q - log_p)?)?.sum(D::Minus1),
        SlotLoss::Jsd => {
            // log((p + q) / 2) without a sum that may vanish.
            let above = log_p.maximum(log_q)?;
            let apart = (log_p - log_q)?.abs()?;
            let mixed = ((above + (apart.neg()?.exp()? + 1.0)?.log()?)? - 2.0_f64.ln())?;
            let of_p = (log_p.exp()? * (log_p - &mixed)?)?;
            let of_q = (log_q.exp()? * (log_q - &mixed)?)?;
            (of_p + of_q)?.sum(D::Minus1)? * 0.5
        }
        SlotLoss::Renyi => {
            let halves = ((log_p + log_q)? * 0.5)?;
            let most = halves.max_keepdim(D::Minus1)?.detach();
            let rest = halves.broadcast_sub(&most)?.exp()?.sum(D::Minus1)?.log()?;
            (rest + most.squeeze(D::Minus1)?)? * -2.0
        }
        other => bail!("divergence: {other:?} is none"),
    }
}

/// The teachers' log-probabilities of some rows, `[r, V]`.
fn teachers(inputs: &Inputs<'_>, teacher: &Teacher<'_>, rows: &[u32]) -> Result<Tensor> {
    let hidden = teacher.hidden.detach();
    let hidden = match teacher.rows {
        Some(of) => select_rows(&hidden, &of_rows(of, rows))?,
        None => select_rows(&hidden, rows)?,
    };
    let logits = teacher.head.linear(&hidden)?.detach();
    let logits = inputs.teacher_bend.of(logits)?;
    let logits = match teacher.head.dtype() {
        half @ (DType::BF16 | DType::F16) => logits.to_dtype(half)?.to_dtype(logits.dtype())?,
        _ => logits,
    };
    log_softmax(&logits)
}

/// Statistics of a chunk's rows.
fn statistics(
    (hard, soft): (&Tensor, &Tensor),
    (log_p, log_q): (&Tensor, &Tensor),
    labels: &[u32],
) -> Result<RowStatistics> {
    let numbers = |tensor: &Tensor| -> Result<Vec<f64>> {
        let host = tensor.detach().to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
        host.flatten_all()?.to_vec1()
    };
    let log_q = log_q.detach();
    let accepted = log_p.exp()?.minimum(&log_q.exp()?)?.sum(D::Minus1)?;
    let best: Vec<u32> = log_q.argmax(D::Minus1)?.to_vec1()?;
    Ok(RowStatistics {
        hard: numbers(hard)?,
        soft: numbers(soft)?,
        agrees: best.iter().zip(labels).map(|(best, label)| best == label).collect(),
        acceptance: numbers(&accepted)?,
    })
}

#[cfg(test)]
mod tests {
    use candle_core::Var;
    use longdraft_kernels::graph::Backward;
    use longdraft_kernels::linear_cross_entropy::LowRank;
    use longdraft_kernels::random::CounterRng;

    use super::*;

    const KINDS: [SlotLoss; 3] = [SlotLoss::ReverseKl, SlotLoss::Jsd, SlotLoss::Renyi];
    /// Rows, width, tokens, rank.
    const SIZES: [usize; 4] = [5, 4, 11, 3];
    const LABELS: [u32; 5] = [3, 10, 0, 3, 7];
    const TEACHERS: [u32; 5] = [2, 0, 2, 5, 1];
    const OF_LABELS: [f32; 5] = [0.0, 0.5, 1.0, 0.25, 2.0];
    const WEIGHTS: [f32; 5] = [1.0, 0.0, 0.5, 2.0, 0.75];
    const BEND: Bend = Bend { divisor: 0.8, softcap: Some(3.0) };

    fn noise(shape: (usize, usize), seed: u64) -> Vec<f64> {
        let mut rng = CounterRng::new(seed, "noise", &[]);
        (0..shape.0 * shape.1).map(|_| rng.below(2001) as f64 / 1000.0 - 1.0).collect()
    }

    /// The loss in plain numbers, of values `[R, H]`, `[R, r]` and `[V, r]`.
    fn plain(values: &[Vec<f64>; 3], loss: SlotLoss, bend: Bend) -> f64 {
        let [rows, width, vocabulary, rank] = SIZES;
        let (head, teacher) = (noise((vocabulary, width), 4), noise((6, width), 5));
        let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let bent = |x: f64| match bend.softcap {
            Some(cap) => cap * (x / (bend.divisor * cap)).tanh(),
            None => x / bend.divisor,
        };
        let softmax = |logits: Vec<f64>| -> Vec<f64> {
            let total: f64 = logits.iter().map(|z| z.exp()).sum();
            logits.iter().map(|z| z.exp() / total).collect()
        };
        let of_row = |row: usize| {
            let of = |all: &[f64], i: usize, w: usize| all[i * w..(i + 1) * w].to_vec();
            let (h, m) = (of(&values[0], row, width), of(&values[1], row, rank));
            let t = of(&teacher, TEACHERS[row] as usize, width);
            let logit = |v: usize| {
                let own = bent(product(&h, &of(&head, v, width)));
                own + product(&m, &of(&values[2], v, rank))
            };
            let q = softmax((0..vocabulary).map(logit).collect());
            let told = |v: usize| bent(product(&t, &of(&head, v, width)));
            let p = softmax((0..vocabulary).map(told).collect());
            let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
                p.iter().zip(&q).map(|(p, q)| f(*p, *q)).sum()
            };
            let apart = match loss {
                SlotLoss::ReverseKl => sum(&|p, q| q * (q / p).ln()),
                SlotLoss::Jsd => sum(&|p, q| {
                    let m = 0.5 * (p + q);
                    0.5 * (p * (p / m).ln() + q * (q / m).ln())
                }),
                _ => -2.0 * sum(&|p, q| (p * q).sqrt()).ln(),
            };
            let hard = -q[LABELS[row] as usize].ln();
            f64::from(OF_LABELS[row]) * hard + f64::from(WEIGHTS[row]) * apart
        };
        (0..rows).map(of_row).sum()
    }

    fn values() -> [Vec<f64>; 3] {
        let [rows, width, vocabulary, rank] = SIZES;
        [noise((rows, width), 1), noise((rows, rank), 2), noise((vocabulary, rank), 3)]
    }

    /// The op's loss, statistics and gradients, with so many logits at a time.
    fn own(loss: SlotLoss, bend: Bend, chunk: usize) -> Result<(Output, Vec<Vec<f64>>)> {
        let [rows, width, vocabulary, rank] = SIZES;
        let tensor = |values: &[f64], shape| Tensor::from_slice(values, shape, &Device::Cpu);
        let values = values();
        let shapes = [(rows, width), (rows, rank), (vocabulary, rank)];
        let var = |i: usize| Var::from_tensor(&tensor(&values[i], shapes[i])?);
        let vars = [var(0)?, var(1)?, var(2)?];
        let head = tensor(&noise((vocabulary, width), 4), (vocabulary, width))?;
        let teacher = tensor(&noise((6, width), 5), (6, width))?;
        let low_rank = LowRank { hidden: vars[1].as_tensor(), head: vars[2].as_tensor() };
        let inputs = Inputs {
            low_rank: Some(low_rank),
            label_weights: Some(&OF_LABELS),
            teacher: Some(Teacher {
                hidden: &teacher,
                rows: Some(&TEACHERS),
                head: (&head).into(),
            }),
            ..Inputs::of_labels(vars[0].as_tensor(), &head, &LABELS).bent(bend)
        };
        let output = divergence_within(chunk, &inputs, &WEIGHTS, loss)?;
        // The gradient of twice the loss.
        let gradients = (&output.loss_sum * 2.0)?.gradients()?;
        let of = |var: &Var| -> Result<Vec<f64>> {
            let Some(gradient) = gradients.get(var.as_tensor()) else { bail!("no gradient") };
            gradient.flatten_all()?.to_vec1()
        };
        let gradients = vars.iter().map(of).collect::<Result<_>>()?;
        Ok((output, gradients))
    }

    #[test]
    fn values_are_those_of_plain_numbers_and_gradients_those_of_finite_differences() -> Result<()> {
        const STEP: f64 = 1e-5;
        for (loss, bend) in KINDS.into_iter().flat_map(|l| [(l, Bend::default()), (l, BEND)]) {
            let (output, gradients) = own(loss, bend, 1 << 20)?;
            let (found, want) = (output.loss_sum.to_scalar::<f64>()?, plain(&values(), loss, bend));
            assert!((found - want).abs() < 1e-10 * want.abs(), "{loss:?}: {found} {want}");
            for (tensor, own) in gradients.iter().enumerate() {
                for (i, own) in own.iter().enumerate() {
                    let at = |step: f64| {
                        let mut values = values();
                        values[tensor][i] += step;
                        plain(&values, loss, bend)
                    };
                    let want = 2.0 * (at(STEP) - at(-STEP)) / (2.0 * STEP);
                    let error = (own - want).abs();
                    assert!(error < 1e-6, "{loss:?} {bend:?} tensor {tensor}, {i}: {own} {want}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn chunks_of_rows_come_to_the_same() -> Result<()> {
        for loss in KINDS {
            let (whole, wanted) = own(loss, BEND, 1 << 20)?;
            let (parts, gradients) = own(loss, BEND, 2 * SIZES[2])?;
            let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
            let numbers = |output: &Output| -> Result<Vec<f64>> {
                let RowStatistics { hard, soft, acceptance, .. } = output.rows.clone();
                let sum = vec![output.loss_sum.to_scalar::<f64>()?];
                Ok([sum, hard, soft, acceptance].concat())
            };
            assert_eq!(parts.rows.agrees, whole.rows.agrees);
            for (own, wanted) in numbers(&parts)?.into_iter().zip(numbers(&whole)?) {
                assert!(close(own, wanted), "{loss:?}: {own} {wanted}");
            }
            for (own, wanted) in gradients.iter().flatten().zip(wanted.iter().flatten()) {
                assert!(close(*own, *wanted), "{loss:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn equal_distributions_are_0_apart_and_far_ones_stay_finite() -> Result<()> {
        let tensor = |values: &[f32]| Tensor::from_slice(values, (1, 3), &Device::Cpu);
        let (near, far) = (tensor(&[90.0, -90.0, 0.0])?, tensor(&[-90.0, 90.0, 0.0])?);
        for loss in KINDS {
            for (q, is_equal) in [(&near, true), (&far, false)] {
                let q = Var::from_tensor(q)?;
                let apart = between(&log_softmax(&near)?, &log_softmax(&q)?, loss)?;
                let gradients = apart.sum_all()?.gradients()?;
                let value = apart.to_vec1::<f32>()?[0];
                assert!(
                    if is_equal { value.abs() < 1e-5 } else { value > 0.5 },
                    "{loss:?} {value}"
                );
                let gradient = gradients.get(&q).map(Tensor::flatten_all).transpose()?;
                let values: Vec<f32> =
                    gradient.map(|g| g.to_vec1()).transpose()?.unwrap_or_default();
                assert!(values.len() == 3 && values.iter().all(|g| g.is_finite()), "{values:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn a_head_that_trains_no_teacher_and_labels_of_other_rows_are_refused() -> Result<()> {
        let x = Tensor::zeros((1, 2), DType::F32, &Device::Cpu)?;
        let head = Var::from_tensor(&Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?)?;
        let teacher = Some(Teacher { hidden: &x, rows: None, head: (&head).into() });
        let frozen = head.as_tensor().detach();
        let trained = Inputs { teacher, ..Inputs::of_labels(&x, head.as_tensor(), &[0]) };
        let alone = Inputs::of_labels(&x, &frozen, &[0]);
        let teacher = Some(Teacher { hidden: &x, rows: None, head: (&frozen).into() });
        let none = Inputs { teacher, ..Inputs::of_labels(&x, &frozen, &[]) };
        for inputs in [trained, alone, none] {
            assert!(divergence(&inputs, &[1.0], SlotLoss::Jsd).is_err());
        }
        Ok(())
    }
}
