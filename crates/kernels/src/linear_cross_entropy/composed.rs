//! The loss on any device: the reference or a GPU's kernel of some rows at a time, gradients along
//! with it.

use std::borrow::Cow;

use candle_core::{DType, Result, Tensor, Var};

use super::reference::reference;
use super::teacher::order_by_teacher;
use super::{
    Inputs, Output, RowStatistics, SoftTargets, SparseDistributions, Teacher, Weighted, check, gpu,
};
use crate::composed::{CHUNK_VALUES, differentiable};
use crate::cuda;
use crate::linear::{factor_type, with_factor};
use crate::storage::{from_f64, host_f64};

/// As [`super::linear_cross_entropy`], on any device; `[R, V]` is never materialised.
///
/// # Errors
/// - as [`super::linear_cross_entropy`]
pub fn composed(inputs: &Inputs<'_>) -> Result<Output> {
    composed_within(CHUNK_VALUES, inputs)
}

/// The same with at most so many logits at a time.
pub(super) fn composed_within(logits: usize, inputs: &Inputs<'_>) -> Result<Output> {
    check(inputs)?;
    let order = order_by_teacher(inputs);
    in_chunks(logits, inputs.hidden, inputs.head, order, |rows, hidden, head| {
        let part = Part::of(inputs, rows)?;
        let part = part.inputs(hidden, head, inputs.soft_weight);
        if cuda::takes(&[hidden]) { gpu::output(&part) } else { reference(&part) }
    })
}

/// Sums `loss_of` over chunks of rows in `order` (default: as they come). It gets the rows'
/// indices, their hidden states and the head, and the graph of a chunk is gone before the next one
/// begins. A chunk has at most `logits` logits.
pub(super) fn in_chunks(
    logits: usize,
    hidden: &Tensor,
    head: &Tensor,
    order: Option<Vec<u32>>,
    loss_of: impl Fn(&[u32], &Tensor, &Tensor) -> Result<Output>,
) -> Result<Output> {
    let (count, (vocabulary, _)) = (hidden.dim(0)?, head.dims2()?);
    let (want_hidden, want_head) = (hidden.track_op(), head.track_op());
    let reordered = order.is_some();
    let rows = order.unwrap_or_else(|| (0..count as u32).collect());
    // Turned into the type of the products once, not for every chunk; a head that trains gets its
    // gradients in its own type, as a chunk's are rounded before they are added.
    let factor = head.detach().to_dtype(factor_type(hidden, head))?.contiguous()?;
    let leaf = if !want_head {
        Leaf::Frozen(factor.clone())
    } else if head.is_variable() {
        Leaf::Trained(Var::from_tensor(head)?)
    } else {
        Leaf::new(&head.detach(), true)?
    };
    let mut sums = Sums::new(count);
    for rows in rows.chunks((logits / vocabulary.max(1)).max(1)) {
        let part = if reordered {
            hidden.index_select(&indices(rows, hidden)?, 0)?
        } else {
            hidden.narrow(0, rows[0] as usize, rows.len())?
        };
        let part = Leaf::new(&part.detach(), want_hidden)?;
        let loss = || loss_of(rows, part.tensor(), leaf.tensor());
        let output = with_factor(leaf.tensor(), &factor, loss)?;
        sums.add(rows, &output, (&part, &leaf))?;
    }
    let dtype = if hidden.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let loss = from_f64(&[sums.loss], (), dtype, hidden.device())?;
    let d_hidden = match (want_hidden, sums.hidden.is_empty()) {
        (false, _) => None,
        (true, true) => Some(hidden.zeros_like()?),
        (true, false) => {
            let all = Tensor::cat(&sums.hidden, 0)?;
            Some(if reordered {
                all.index_select(&indices(&inverse(&rows), hidden)?, 0)?
            } else {
                all
            })
        }
    };
    let d_head = match (want_head, sums.head) {
        (false, _) => None,
        (true, None) => Some(head.zeros_like()?),
        (true, Some(sum)) => Some(sum.to_dtype(head.dtype())?),
    };
    let loss_sum =
        differentiable("linear_cross_entropy", [hidden, head, head], loss, move |gradient| {
            let scaled = |own: &Option<Tensor>| -> Result<Option<Tensor>> {
                let scale = |own: &Tensor| own.broadcast_mul(&gradient.to_dtype(own.dtype())?);
                own.as_ref().map(scale).transpose()
            };
            Ok([scaled(&d_hidden)?, scaled(&d_head)?, None])
        })?;
    Ok(Output { loss_sum, rows: sums.rows })
}

/// A tensor that begins a graph, or a frozen one.
enum Leaf {
    Trained(Var),
    Frozen(Tensor),
}

impl Leaf {
    fn new(tensor: &Tensor, trained: bool) -> Result<Self> {
        Ok(if trained {
            Self::Trained(Var::from_tensor(tensor)?)
        } else {
            Self::Frozen(tensor.clone())
        })
    }

    fn tensor(&self) -> &Tensor {
        match self {
            Self::Trained(var) => var.as_tensor(),
            Self::Frozen(tensor) => tensor,
        }
    }
}

/// What the chunks so far come to.
struct Sums {
    loss: f64,
    rows: RowStatistics,
    /// In the order of the chunks.
    hidden: Vec<Tensor>,
    head: Option<Tensor>,
}

impl Sums {
    fn new(rows: usize) -> Self {
        let rows = RowStatistics {
            hard: vec![0.0; rows],
            soft: vec![0.0; rows],
            agrees: vec![false; rows],
            acceptance: vec![0.0; rows],
        };
        Self { loss: 0.0, rows, hidden: Vec::new(), head: None }
    }

    fn add(&mut self, rows: &[u32], output: &Output, (hidden, head): (&Leaf, &Leaf)) -> Result<()> {
        self.loss += host_f64(&output.loss_sum)?.iter().sum::<f64>();
        let of = &output.rows;
        for (i, &row) in rows.iter().enumerate() {
            let row = row as usize;
            self.rows.hard[row] = of.hard[i];
            self.rows.soft[row] = of.soft[i];
            self.rows.agrees[row] = of.agrees[i];
            self.rows.acceptance[row] = of.acceptance[i];
        }
        if !matches!(hidden, Leaf::Trained(_)) && !matches!(head, Leaf::Trained(_)) {
            return Ok(());
        }
        let gradients = output.loss_sum.backward()?;
        if let Leaf::Trained(hidden) = hidden {
            self.hidden.push(match gradients.get(hidden) {
                Some(gradient) => gradient.clone(),
                None => hidden.zeros_like()?,
            });
        }
        if let Leaf::Trained(head) = head
            && let Some(gradient) = gradients.get(head)
        {
            let wide = if gradient.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let gradient = gradient.to_dtype(wide)?;
            self.head = Some(match &self.head {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            });
        }
        Ok(())
    }
}

fn indices(rows: &[u32], like: &Tensor) -> Result<Tensor> {
    Tensor::from_slice(rows, rows.len(), like.device())
}

/// Where every row went.
fn inverse(order: &[u32]) -> Vec<u32> {
    let mut places = vec![0; order.len()];
    for (place, &row) in (0..).zip(order) {
        places[row as usize] = place;
    }
    places
}

/// The arguments of some rows.
struct Part<'a> {
    labels: Vec<u32>,
    soft: SoftPart<'a>,
    /// Hidden states of the rows' teachers, each once, which of them every row has, and their head.
    teacher: Option<(Tensor, Vec<u32>, &'a Tensor)>,
}

enum SoftPart<'a> {
    /// Targets without values of their own for every row.
    Same(SoftTargets<'a>),
    TopK(SoftTargets<'a>, Vec<u32>, Vec<f32>),
    Weighted(Weighted<'a>, Factors),
    Sparse(SparseDistributions<'a>, Vec<u32>, Weighted<'a>, Factors),
}

/// [`Weighted`] of some rows.
struct Factors {
    cross_entropy: Vec<f32>,
    rejection: Vec<f32>,
    log_sum_exp: Option<Vec<f64>>,
}

impl Factors {
    fn of(all: &Weighted<'_>, rows: &[u32]) -> Self {
        Self {
            cross_entropy: chosen(all.cross_entropy, rows, 1),
            rejection: chosen(all.rejection, rows, 1),
            log_sum_exp: all.log_sum_exp.map(|all| chosen(all, rows, 1)),
        }
    }

    fn weighted<'b>(&'b self, all: &Weighted<'b>) -> Weighted<'b> {
        Weighted {
            cross_entropy: &self.cross_entropy,
            rejection: &self.rejection,
            form: all.form,
            log_sum_exp: self.log_sum_exp.as_deref(),
        }
    }
}

/// Rows of a row-major `[R, width]`.
fn chosen<T: Copy>(values: &[T], rows: &[u32], width: usize) -> Vec<T> {
    rows.iter().flat_map(|&row| &values[row as usize * width..][..width]).copied().collect()
}

impl<'a> Part<'a> {
    fn of(inputs: &Inputs<'a>, rows: &[u32]) -> Result<Self> {
        let soft = match inputs.soft {
            SoftTargets::TopK { ids, log_probs, k, .. } => {
                SoftPart::TopK(inputs.soft, chosen(ids, rows, k), chosen(log_probs, rows, k))
            }
            SoftTargets::Weighted(factors) => {
                SoftPart::Weighted(factors, Factors::of(&factors, rows))
            }
            SoftTargets::Sparse(distributions, factors) => {
                let of_rows = chosen(distributions.rows, rows, 1);
                SoftPart::Sparse(distributions, of_rows, factors, Factors::of(&factors, rows))
            }
            same @ (SoftTargets::None | SoftTargets::Full) => SoftPart::Same(same),
        };
        let teacher = inputs.teacher.map(|teacher| distinct(&teacher, rows)).transpose()?;
        Ok(Self { labels: chosen(inputs.labels, rows, 1), soft, teacher })
    }

    fn inputs<'b>(&'b self, hidden: &'b Tensor, head: &'b Tensor, soft_weight: f64) -> Inputs<'b> {
        let soft = match &self.soft {
            SoftPart::Same(same) => *same,
            SoftPart::TopK(SoftTargets::TopK { k, tail, .. }, ids, log_probs) => {
                SoftTargets::TopK { ids, log_probs, k: *k, tail: *tail }
            }
            SoftPart::TopK(other, ..) => *other,
            SoftPart::Weighted(all, factors) => SoftTargets::Weighted(factors.weighted(all)),
            SoftPart::Sparse(distributions, rows, all, factors) => SoftTargets::Sparse(
                SparseDistributions { rows, ..*distributions },
                factors.weighted(all),
            ),
        };
        let teacher = self.teacher.as_ref().map(|(hidden, rows, head)| Teacher {
            hidden,
            rows: Some(rows),
            head,
        });
        Inputs { hidden, head, labels: &self.labels, soft, soft_weight, teacher }
    }
}

/// Teachers of rows, in the order of their teachers.
fn distinct<'a>(teacher: &Teacher<'a>, rows: &[u32]) -> Result<(Tensor, Vec<u32>, &'a Tensor)> {
    let of: Cow<'_, [u32]> = match teacher.rows {
        Some(all) => chosen(all, rows, 1).into(),
        None => rows.into(),
    };
    let mut unique = of.to_vec();
    unique.dedup();
    let mut place = 0;
    let places = of
        .iter()
        .map(|row| {
            if unique[place] != *row {
                place += 1;
            }
            place as u32
        })
        .collect();
    let hidden = teacher.hidden.index_select(&indices(&unique, teacher.hidden)?, 0)?;
    Ok((hidden.detach(), places, teacher.head))
}
