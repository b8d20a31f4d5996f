//! The loss on any device: the reference or a GPU's kernel of some rows at a time, gradients along
//! with it.

mod product;

use std::borrow::Cow;

use candle_core::{DType, Result, Tensor, bail};

use super::reference::reference;
use super::teacher::order_by_teacher;
use super::{
    Inputs, LowRank, Output, RowStatistics, SoftTargets, SparseDistributions, Teacher, Weighted,
    check, gpu,
};
use crate::chunks::logits_on;
use crate::composed::CHUNK_VALUES;
use crate::cuda;
use crate::graph::{Backward, differentiable};
use crate::linear::with_factor;
use crate::matrix::Head;
use crate::storage::{from_f64, host_f64};
use product::{Leaf, Product};

/// As [`super::linear_cross_entropy`], on any device; `[R, V]` is never materialised.
pub(super) fn composed(inputs: &Inputs<'_>) -> Result<Output> {
    let learns = gpu::learns(inputs);
    let logits =
        if learns { logits_on(inputs.hidden.device(), inputs.bend)? } else { CHUNK_VALUES };
    composed_within(logits, inputs)
}

/// The same with at most so many logits at a time.
pub(super) fn composed_within(logits: usize, inputs: &Inputs<'_>) -> Result<Output> {
    check(inputs)?;
    inputs.with_tensors(|inputs| of_tensors(logits, inputs))
}

fn of_tensors(logits: usize, inputs: &Inputs<'_>) -> Result<Output> {
    if gpu::learns(inputs) {
        return gpu::in_chunks(logits, inputs);
    }
    let order = order_by_teacher(inputs);
    let mut products = vec![(inputs.hidden, inputs.head)];
    products.extend(inputs.low_rank.map(|part| (part.hidden, part.head.into())));
    in_chunks(logits, &products, order, |rows, products| {
        let part = Part::of(inputs, rows)?;
        let part = Inputs {
            bend: inputs.bend,
            teacher_bend: inputs.teacher_bend,
            ..part.inputs(products, inputs.soft_weight)
        };
        let plain = part.bend.is_plain() && part.teacher_bend.is_plain();
        if plain && cuda::takes(&[part.hidden]) { gpu::output(&part) } else { reference(&part) }
    })
}

/// Sums `loss_of` over chunks of rows in `order` (default: as they come). Logits are a product of hidden
/// states `[R, K]` with a head `[V, K]`, or the sum of two, the first of which has a frozen head.
/// `loss_of` gets the rows' indices and the products' factors for them; the graph of a chunk is gone
/// before the next one begins. A chunk has at most `logits` logits, or is one row.
///
/// # Errors
/// - of `loss_of`, there are neither one nor two products, or shapes do not fit
pub fn in_chunks(
    logits: usize,
    products: &[(&Tensor, Head<'_>)],
    order: Option<Vec<u32>>,
    loss_of: impl Fn(&[u32], &[(&Tensor, Head<'_>)]) -> Result<Output>,
) -> Result<Output> {
    let (&[(hidden, head)] | &[(hidden, _), (_, head)]) = products else {
        bail!("linear_cross_entropy: {} products in place of one or two", products.len())
    };
    let (count, (vocabulary, _)) = (hidden.dim(0)?, head.dims()?);
    let reordered = order.is_some();
    let rows = order.unwrap_or_else(|| (0..count as u32).collect());
    let mut all: Vec<Product<'_>> = products.iter().map(Product::new).collect::<Result<_>>()?;
    let trains = products.iter().any(|(hidden, head)| hidden.track_op() || head.trains());
    let mut sums = Sums::new(count);
    for rows in rows.chunks((logits / vocabulary.max(1)).max(1)) {
        let part = |product: &Product<'_>| product.part(rows, reordered);
        let parts: Vec<Leaf> = all.iter().map(part).collect::<Result<_>>()?;
        let pairs = parts.iter().zip(&all).map(|(part, all)| (part.tensor(), all.head_of_chunks()));
        let pairs: Vec<(&Tensor, Head<'_>)> = pairs.collect();
        // A frozen head is a factor already.
        let last = &all[all.len() - 1];
        let loss = || loss_of(rows, &pairs);
        let output = match (&last.factor, &last.leaf) {
            (Some(factor), Some(leaf)) => with_factor(leaf.tensor(), factor, loss)?,
            _ => loss()?,
        };
        sums.add(rows, &output)?;
        if trains {
            let gradients = output.loss_sum.gradients()?;
            for (product, part) in all.iter_mut().zip(&parts) {
                product.add(part, &gradients)?;
            }
        }
    }
    let dtype = if hidden.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let loss = from_f64(&[sums.loss], (), dtype, hidden.device())?;
    let places = reordered.then(|| inverse(&rows));
    let mut own = [None, None, None];
    let last = all.len() - 1;
    for (i, product) in all.iter().enumerate() {
        own[2 * i] = product.d_hidden(places.as_deref())?;
        if i == last {
            own[1] = product.d_head()?;
        }
    }
    let head = head.tensor().unwrap_or(hidden);
    let second = products.get(1).map_or(head, |(hidden, _)| *hidden);
    let trained = [hidden, head, second];
    let loss_sum = differentiable("linear_cross_entropy", trained, loss, move |gradient| {
        let scaled = |own: &Option<Tensor>| -> Result<Option<Tensor>> {
            own.as_ref().map(|own| gpu::scaled(own, gradient)).transpose()
        };
        Ok([scaled(&own[0])?, scaled(&own[1])?, scaled(&own[2])?])
    })?;
    Ok(Output { loss_sum, rows: sums.rows })
}

/// What the chunks so far come to.
struct Sums {
    loss: f64,
    rows: RowStatistics,
}

impl Sums {
    fn new(rows: usize) -> Self {
        let rows = RowStatistics {
            hard: vec![0.0; rows],
            soft: vec![0.0; rows],
            agrees: vec![false; rows],
            acceptance: vec![0.0; rows],
        };
        Self { loss: 0.0, rows }
    }

    fn add(&mut self, rows: &[u32], output: &Output) -> Result<()> {
        self.loss += host_f64(&output.loss_sum)?.iter().sum::<f64>();
        let of = &output.rows;
        for (i, &row) in rows.iter().enumerate() {
            let row = row as usize;
            self.rows.hard[row] = of.hard[i];
            self.rows.soft[row] = of.soft[i];
            self.rows.agrees[row] = of.agrees[i];
            self.rows.acceptance[row] = of.acceptance[i];
        }
        Ok(())
    }
}

fn indices(rows: &[u32], like: &Tensor) -> Result<Tensor> {
    Tensor::from_slice(rows, rows.len(), like.device())
}

/// Where every row went.
pub(super) fn inverse(order: &[u32]) -> Vec<u32> {
    let mut places = vec![0; order.len()];
    for (place, &row) in (0..).zip(order) {
        places[row as usize] = place;
    }
    places
}

/// The arguments of some rows.
pub(super) struct Part<'a> {
    labels: Vec<u32>,
    label_weights: Option<Vec<f32>>,
    soft: SoftPart<'a>,
    /// Hidden states of the rows' teachers, each once, which of them every row has, and their head.
    teacher: Option<(Tensor, Vec<u32>, Head<'a>)>,
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
    pub(super) fn of(inputs: &Inputs<'a>, rows: &[u32]) -> Result<Self> {
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
        let label_weights = inputs.label_weights.map(|all| chosen(all, rows, 1));
        Ok(Self { labels: chosen(inputs.labels, rows, 1), label_weights, soft, teacher })
    }

    pub(super) fn inputs<'b>(
        &'b self,
        products: &[(&'b Tensor, Head<'b>)],
        soft_weight: f64,
    ) -> Inputs<'b> {
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
            head: *head,
        });
        let (hidden, head) = products[0];
        let low_rank = products
            .get(1)
            .and_then(|&(hidden, head)| head.tensor().map(|head| LowRank { hidden, head }));
        let labels = &self.labels;
        let label_weights = self.label_weights.as_deref();
        let labels = Inputs::of_labels(hidden, head, labels);
        Inputs { low_rank, label_weights, soft, soft_weight, teacher, ..labels }
    }
}

/// Teachers of rows, in the order of their teachers.
fn distinct<'a>(teacher: &Teacher<'a>, rows: &[u32]) -> Result<(Tensor, Vec<u32>, Head<'a>)> {
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
