//! The loss from plain tensor ops; logits `[R, V]` are materialised.

use candle_core::{D, DType, Result, Tensor};

use crate::factors::as_of_type;
use crate::linear::composed as linear;
use crate::storage::{from_f64, host_f64};

use super::{
    Inputs, LowRank, Output, Rejection, RowStatistics, SoftTargets, TAIL_FLOOR, Tail, Weighted,
    check, sparse,
};

/// As [`super::linear_cross_entropy`], for any device and float type.
pub(crate) fn reference(inputs: &Inputs<'_>) -> Result<Output> {
    check(inputs)?;
    inputs.with_tensors(of_tensors)
}

fn of_tensors(inputs: &Inputs<'_>) -> Result<Output> {
    let wide = if inputs.hidden.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let logits = logits(inputs)?;
    if let SoftTargets::Sparse(distributions, factors) = &inputs.soft {
        return sparse::reference(inputs, distributions, factors, &logits.to_dtype(wide)?);
    }
    let log_q = log_softmax(&logits.to_dtype(wide)?)?;
    let device = logits.device();
    let labels = Tensor::from_slice(inputs.labels, (inputs.labels.len(), 1), device)?;
    let hard = log_q.gather(&labels, 1)?.squeeze(1)?.neg()?;
    let teacher = match inputs.teacher {
        Some(teacher) => {
            let head = teacher.head.to_tensor()?.detach();
            let logits = linear(&teacher.hidden.detach(), &head, None)?;
            let logits = inputs.teacher_bend.of(logits)?;
            let logits = match teacher.rows {
                Some(rows) => {
                    let rows = Tensor::from_slice(rows, rows.len(), logits.device())?;
                    logits.index_select(&rows, 0)?
                }
                None => logits,
            };
            let weighted = matches!(inputs.soft, SoftTargets::Weighted(_));
            let logits = if weighted { as_of_type(&logits, teacher.head.dtype())? } else { logits };
            Some(logits.to_dtype(wide)?.detach())
        }
        None => None,
    };
    let log_p = teacher.as_ref().map(log_softmax).transpose()?;
    if let (SoftTargets::Weighted(factors), Some(log_p), Some(logits)) =
        (inputs.soft, &log_p, &teacher)
    {
        return weighted(inputs, &factors, &hard, &log_q, log_p, logits);
    }
    let soft = match (inputs.soft, &log_p) {
        (SoftTargets::Full, Some(log_p)) => (log_p.exp()? * &log_q)?.sum(D::Minus1)?.neg()?,
        (SoftTargets::TopK { ids, log_probs, k, tail }, _) => {
            let shape = (inputs.labels.len(), k);
            let ids = Tensor::from_slice(ids, shape, device)?;
            let log_p = Tensor::from_slice(log_probs, shape, device)?.to_dtype(wide)?;
            top_k_loss(&log_q, &ids, &log_p, tail)?
        }
        _ => hard.zeros_like()?,
    };
    let loss_sum = (of_labels(inputs, &hard)? + (&soft * inputs.soft_weight)?)?.sum_all()?;
    let (agrees, acceptance) = statistics(inputs, &log_q, log_p.as_ref())?;
    let rows = RowStatistics { hard: host_f64(&hard)?, soft: host_f64(&soft)?, agrees, acceptance };
    Ok(Output { loss_sum, rows })
}

/// `bend(h Wᵀ)`, and `m W₂ᵀ` where there is a second part.
pub(super) fn logits(inputs: &Inputs<'_>) -> Result<Tensor> {
    let logits = inputs.bend.of(linear(inputs.hidden, &inputs.head.to_tensor()?, None)?)?;
    match &inputs.low_rank {
        Some(LowRank { hidden, head }) => logits + linear(hidden, head, None)?,
        None => Ok(logits),
    }
}

/// Losses against the labels `[R]` under their weights.
fn of_labels(inputs: &Inputs<'_>, hard: &Tensor) -> Result<Tensor> {
    match inputs.label_weights {
        Some(weights) => {
            let weights = Tensor::from_slice(weights, weights.len(), hard.device())?;
            hard * weights.to_dtype(hard.dtype())?
        }
        None => hard * (1.0 - inputs.soft_weight),
    }
}

fn weighted(
    inputs: &Inputs<'_>,
    factors: &Weighted<'_>,
    hard: &Tensor,
    log_q: &Tensor,
    log_p: &Tensor,
    teacher_logits: &Tensor,
) -> Result<Output> {
    let true_log_p = match factors.log_sum_exp {
        Some(normaliser) => {
            let shape = (normaliser.len(), 1);
            let normaliser = from_f64(normaliser, shape, log_q.dtype(), log_q.device())?;
            teacher_logits.broadcast_sub(&normaliser)?
        }
        None => log_p.clone(),
    };
    let soft = (log_p.exp()? * log_q)?.sum(D::Minus1)?.neg()?;
    let alpha = true_log_p.exp()?.minimum(&log_q.exp()?)?.sum(D::Minus1)?;
    weighted_output(inputs, factors, (hard, &soft, &alpha), log_q)
}

/// The weighted loss from every row's hard loss, cross-entropy and chance of acceptance.
pub(super) fn weighted_output(
    inputs: &Inputs<'_>,
    factors: &Weighted<'_>,
    (hard, soft, alpha): (&Tensor, &Tensor, &Tensor),
    log_q: &Tensor,
) -> Result<Output> {
    let column = |values: &[f32]| {
        Tensor::from_slice(values, values.len(), log_q.device())?.to_dtype(log_q.dtype())
    };
    let rejection = match factors.form {
        Rejection::Linear => (1.0 - alpha)?,
        Rejection::Log => {
            // log 1 = 0 where nothing is accepted, without a gradient.
            let none = alpha.eq(0.0)?.to_dtype(alpha.dtype())?;
            (alpha + none)?.log()?.neg()?
        }
    };
    let weighted =
        ((soft * column(factors.cross_entropy)?)? + (rejection * column(factors.rejection)?)?)?;
    let loss_sum = (of_labels(inputs, hard)? + (weighted * inputs.soft_weight)?)?.sum_all()?;
    let draft = log_q.argmax(D::Minus1)?.to_vec1::<u32>()?;
    let agrees = draft.iter().zip(inputs.labels).map(|(d, label)| d == label).collect();
    let rows = RowStatistics {
        hard: host_f64(hard)?,
        soft: host_f64(soft)?,
        agrees,
        acceptance: host_f64(alpha)?,
    };
    Ok(Output { loss_sum, rows })
}

/// Log-probabilities of every row.
///
/// # Shapes
/// - `[R, V]` → `[R, V]`
///
/// # Errors
/// - there is no memory for them
pub fn log_softmax(logits: &Tensor) -> Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(D::Minus1)?.log()?)
}

fn top_k_loss(log_q: &Tensor, ids: &Tensor, log_p: &Tensor, tail: Tail) -> Result<Tensor> {
    let p = log_p.exp()?;
    let log_q_k = log_q.gather(ids, 1)?;
    match tail {
        Tail::Renormalise => {
            let p = p.broadcast_div(&p.sum_keepdim(D::Minus1)?)?;
            (p * log_q_k)?.sum(D::Minus1)?.neg()
        }
        Tail::Bucket => {
            let rest = (1.0 - p.sum(D::Minus1)?)?.relu()?;
            let q_tail = (1.0 - log_q_k.exp()?.sum(D::Minus1)?)?;
            // Above the floor the value itself; at or below it a constant.
            let open = q_tail.gt(TAIL_FLOOR)?.to_dtype(q_tail.dtype())?;
            let floor = ((1.0 - &open)? * TAIL_FLOOR)?;
            let q_tail = ((q_tail * open)? + floor)?;
            ((p * log_q_k)?.sum(D::Minus1)? + (rest * q_tail.log()?)?)?.neg()
        }
    }
}

fn statistics(
    inputs: &Inputs<'_>,
    log_q: &Tensor,
    log_p: Option<&Tensor>,
) -> Result<(Vec<bool>, Vec<f64>)> {
    let draft = log_q.argmax(D::Minus1)?.to_vec1::<u32>()?;
    let (best, acceptance) = match (log_p, inputs.soft) {
        (Some(log_p), _) => {
            let accepted = log_p.exp()?.minimum(&log_q.exp()?)?.sum(D::Minus1)?;
            (log_p.argmax(D::Minus1)?.to_vec1::<u32>()?, host_f64(&accepted)?)
        }
        (None, SoftTargets::TopK { ids, log_probs, k, .. }) => {
            let best = ids.chunks(k).zip(log_probs.chunks(k));
            let best = best.map(|(ids, log_probs)| super::top_k::best_of(ids, log_probs)).collect();
            let shape = (inputs.labels.len(), k);
            let ids = Tensor::from_slice(ids, shape, log_q.device())?;
            let p = Tensor::from_slice(log_probs, shape, log_q.device())?.exp()?;
            let q = log_q.gather(&ids, 1)?.exp()?;
            (best, host_f64(&p.to_dtype(q.dtype())?.minimum(&q)?.sum(D::Minus1)?)?)
        }
        (None, _) => {
            let labels = Tensor::from_slice(inputs.labels, (draft.len(), 1), log_q.device())?;
            (inputs.labels.to_vec(), host_f64(&log_q.gather(&labels, 1)?.squeeze(1)?.exp()?)?)
        }
    };
    Ok((draft.iter().zip(&best).map(|(d, t)| d == t).collect(), acceptance))
}
