//! Head product and cross-entropy in one op: `z = h Wᵀ`, hard labels and soft teacher targets.
//!
//! Per row, with `q = softmax(z)`, label `y`, teacher `p`, weight λ of the soft part and weight `h` of
//! the label, by default `1 − λ`: `ℓ = h ℓ_hard + λ ℓ_soft`, `ℓ_hard = lse(z) − z_y`, and `ℓ_soft` one of
//!
//! - full: `−Σ_v p_v log q_v`, gradient `q − p`; the teacher's logits are computed chunk by chunk
//!   from its hidden states and head and never stored;
//! - top-k with a tail bucket: `−Σ_i p_i log q_{v_i} − r log max(q_tail, 1e-6)`, `r = 1 − Σ p_i`,
//!   `q_tail = 1 − Σ q_{v_i}`, gradient `q_v − p_v` on the k ids and `q_v (1 − r/q_tail)`
//!   elsewhere; when the floor is active the tail term is a constant;
//! - top-k renormalised: `p` rescaled to 1 over the k ids, no tail term;
//! - weighted: `a (−Σ_v p_v log q_v) + b (1 − α)`, or `− b log α` for the second term, with factors
//!   `a`, `b` a row and `α = Σ_v min(p̄_v, q_v)`, the chance that speculative sampling accepts.
//!   `p̄` is `p` with the normaliser of a larger vocabulary, of which the head holds some rows; the
//!   teacher's logits are rounded to its head's type.
//!   `∂α/∂z_v = q_v (1[q_v < p̄_v] − Σ_u q_u 1[q_u < p̄_u])` (LK losses, arXiv 2602.23881);
//! - sparse: the same for distributions of which only the most likely tokens are known
//!   (`sparse.rs`).
//!
//! Rows go through in chunks, so memory is `O(chunk · V)`, those that share a teacher side by side;
//! the gradients are computed in the forward pass, `dh = dz W` and, if the head trains, `dW = dzᵀ
//! h`, and scaled when backward comes. Top-1 agreement and `Σ min(p, q)` come from the same pass.
//!
//! Logits may be bent ([`Bend`]): `z = c tanh(h Wᵀ / c)`, and gradients of products have the slope as a further factor.
//!
//! A head of quantised blocks ([`Head`]) is frozen. The fused op widens some rows of it at a time; what it
//! computes has the bits that the widened head gives.
//!
//! A frozen head may have a trained part of low rank beside it, `z = bend(h Wᵀ) + m W₂ᵀ`: no gradient of
//! the size of `W` is made then, and the part is not bent (DSpark's bias on a target with a soft-cap).

mod composed;
mod fused;
mod gpu;
mod likelihood_loss;
mod reference;
mod row;
mod sparse;
mod teacher;
mod top_k;

use candle_core::{Result, Tensor, bail};

use crate::bend::Bend;
use crate::graph::{add_to, differentiable};
use crate::matrix::Head;

#[cfg(all(test, feature = "cuda"))]
pub(crate) use gpu::compiled;
pub(crate) use gpu::log_sum_exp as log_sum_exp_of_rows;
pub(crate) use reference::reference;

pub use crate::chunks::{logits_at_once, rows_at_once};
pub use composed::in_chunks;
pub use fused::chunk_rows;
pub use reference::log_softmax;
pub use sparse::SparseDistributions;

/// Smallest tail probability that the tail bucket takes the logarithm of.
pub const TAIL_FLOOR: f64 = 1e-6;

/// What becomes of the teacher's mass outside the top k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// One bucket for everything else.
    Bucket,
    /// Dropped; the k probabilities are rescaled to sum to 1.
    Renormalise,
}

/// The teacher's part of the loss.
#[derive(Debug, Clone, Copy)]
pub enum SoftTargets<'a> {
    /// Hard labels only.
    None,
    /// The whole softmax of [`Inputs::teacher`].
    Full,
    /// `k` ids a row with log-probabilities under the full softmax, `[R, k]` each.
    TopK {
        /// Token ids.
        ids: &'a [u32],
        /// Their log-probabilities.
        log_probs: &'a [f32],
        /// Entries a row.
        k: usize,
        /// What becomes of the rest.
        tail: Tail,
    },
    /// The whole softmax of [`Inputs::teacher`] with factors of every row.
    Weighted(Weighted<'a>),
    /// Distributions known at their most likely tokens with factors of every row; no teacher.
    Sparse(SparseDistributions<'a>, Weighted<'a>),
}

/// How the chance of acceptance `α` enters a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// `1 − α`
    Linear,
    /// `−log α`; 0 where `α` is 0.
    Log,
}

/// A loss with factors of every row: `a (−Σ p log q) + b (1 − α)` or `… − b log α`.
#[derive(Debug, Clone, Copy)]
pub struct Weighted<'a> {
    /// `a`, `[R]`
    pub cross_entropy: &'a [f32],
    /// `b`, `[R]`
    pub rejection: &'a [f32],
    /// Form of the second term.
    pub form: Rejection,
    /// `log Σ e^z` over the teacher's whole vocabulary, `[R]`, when its head holds only some of
    /// the rows; without it `p̄` is `p`.
    pub log_sum_exp: Option<&'a [f64]>,
}

impl Weighted<'_> {
    fn check(&self, rows: usize) -> Result<()> {
        let lengths = [
            self.cross_entropy.len(),
            self.rejection.len(),
            self.log_sum_exp.map_or(rows, <[f64]>::len),
        ];
        if lengths.iter().any(|&length| length != rows) {
            bail!("linear_cross_entropy: {lengths:?} factors and normalisers for {rows} rows");
        }
        Ok(())
    }
}

/// The teacher's final hidden states (after its norm) and head `[V, Ht]`.
#[derive(Debug, Clone, Copy)]
pub struct Teacher<'a> {
    /// `[R, Ht]`, or `[T, Ht]` of which `rows` chooses.
    pub hidden: &'a Tensor,
    /// Row of `hidden` that every row has for a teacher, `[R]`; without it, its own. Rows may share
    /// one: its probabilities are computed once.
    pub rows: Option<&'a [u32]>,
    /// `[V, Ht]`
    pub head: Head<'a>,
}

/// What is added to the logits of a frozen head: `m W₂ᵀ`.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a> {
    /// `m`, `[R, r]`
    pub hidden: &'a Tensor,
    /// `W₂`, `[V, r]`
    pub head: &'a Tensor,
}

/// One call's arguments.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Draft hidden states of the learned rows, `[R, H]`.
    pub hidden: &'a Tensor,
    /// Head, `[V, H]`; a variable in f32 gets a gradient, quantised blocks are frozen.
    pub head: Head<'a>,
    /// A second part of the logits, both factors of which may train; the head is frozen then.
    pub low_rank: Option<LowRank<'a>>,
    /// Label of every row, `[R]`.
    pub labels: &'a [u32],
    /// Weight `h` of `ℓ_hard` in a row's loss, `[R]`; without it `1 − λ`.
    pub label_weights: Option<&'a [f32]>,
    /// Soft targets.
    pub soft: SoftTargets<'a>,
    /// Weight λ of the soft part, 0 to 1.
    pub soft_weight: f64,
    /// Needed for [`SoftTargets::Full`] and [`SoftTargets::Weighted`]; beside other targets it
    /// makes the statistics exact.
    pub teacher: Option<Teacher<'a>>,
    /// What becomes of the head's products before they are logits: `z = bend(h Wᵀ)`.
    pub bend: Bend,
    /// The same of the teacher's.
    pub teacher_bend: Bend,
}

impl<'a> Inputs<'a> {
    /// The labels alone, each with weight 1.
    pub fn of_labels(hidden: &'a Tensor, head: impl Into<Head<'a>>, labels: &'a [u32]) -> Self {
        Self {
            hidden,
            head: head.into(),
            low_rank: None,
            labels,
            label_weights: None,
            soft: SoftTargets::None,
            soft_weight: 0.0,
            teacher: None,
            bend: Bend::default(),
            teacher_bend: Bend::default(),
        }
    }

    /// The same with logits of draft and teacher bent alike.
    #[must_use]
    pub fn bent(self, bend: Bend) -> Self {
        Self { bend, teacher_bend: bend, ..self }
    }

    /// `h` of a row.
    fn label_weight(&self, row: usize) -> f64 {
        self.label_weights.map_or(1.0 - self.soft_weight, |weights| f64::from(weights[row]))
    }

    /// The tensors that may train, in the order of [`Gradients`]: hidden states, the head or what
    /// multiplies the second part, and the second part's hidden states. Hidden states stand where there is none.
    fn trained(&self) -> [&'a Tensor; 3] {
        if let Some(LowRank { hidden, head }) = self.low_rank {
            return [self.hidden, head, hidden];
        }
        let head = self.head.tensor().unwrap_or(self.hidden);
        [self.hidden, head, head]
    }

    /// Calls `f` with heads that are tensors, for ops that know no blocks.
    fn with_tensors<R>(&self, f: impl FnOnce(&Inputs<'_>) -> Result<R>) -> Result<R> {
        let head = self.head.to_tensor()?;
        let of_teacher = self.teacher.map(|teacher| teacher.head.to_tensor()).transpose()?;
        let teacher = self.teacher.zip(of_teacher.as_ref());
        let teacher = teacher.map(|(teacher, head)| Teacher { head: head.into(), ..teacher });
        f(&Inputs { head: (&head).into(), teacher, ..*self })
    }
}

/// Per-row results, `[R]` each.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowStatistics {
    /// `ℓ_hard` in nats.
    pub hard: Vec<f64>,
    /// `ℓ_soft` in nats; 0 without soft targets; `−Σ p log q` without its factor when weighted.
    pub soft: Vec<f64>,
    /// Whether draft and teacher have the same most likely token (the label without a teacher, and
    /// when weighted).
    pub agrees: Vec<bool>,
    /// `Σ_v min(p_v, q_v)` (`p̄` when weighted): over the whole vocabulary with a teacher, over the
    /// k ids with top-k targets alone (a lower bound), `q_y` with labels alone.
    pub acceptance: Vec<f64>,
}

/// Loss and statistics.
#[derive(Debug)]
pub struct Output {
    /// `Σ_rows ℓ`, a scalar that carries the gradients of hidden states and head.
    pub loss_sum: Tensor,
    /// Per row.
    pub rows: RowStatistics,
}

/// The loss: fused for f32 hidden states on the CPU, otherwise composed of tensor ops.
///
/// # Errors
/// - shapes do not fit, a label or id lies outside the vocabulary
/// - [`SoftTargets::Full`] or [`SoftTargets::Weighted`] without a teacher, [`SoftTargets::Sparse`]
///   with one, or not a factor a row
pub fn linear_cross_entropy(inputs: &Inputs<'_>) -> Result<Output> {
    check(inputs)?;
    if !crate::dispatch::fused(&[inputs.hidden]) {
        return composed::composed(inputs);
    }
    let (loss, rows, gradients) = fused::forward(inputs)?;
    let loss_sum = with_gradients(loss, gradients, inputs.trained())?;
    Ok(Output { loss_sum, rows })
}

/// The loss as a scalar that hands on the gradients computed along with it.
fn with_gradients(loss: f64, gradients: fused::Gradients, trained: [&Tensor; 3]) -> Result<Tensor> {
    let device = trained[0].device();
    let of = |values: Option<Vec<f32>>, like: &Tensor| {
        let tensor =
            |values| Tensor::from_vec(values, like.shape(), device)?.to_dtype(like.dtype());
        values.map(tensor).transpose()
    };
    let fused::Gradients { hidden, head, low_rank } = gradients;
    let own = [of(hidden, trained[0])?, of(head, trained[1])?, of(low_rank, trained[2])?];
    let loss = Tensor::new(loss as f32, device)?;
    differentiable("linear_cross_entropy", trained, loss, move |gradient| {
        for (argument, own) in own.iter().enumerate() {
            let Some(own) = own else { continue };
            let scaled = own.broadcast_mul(gradient)?;
            add_to(argument, |sum| sum.map_or(Ok(scaled.clone()), |sum| sum + &scaled))?;
        }
        Ok([None, None, None])
    })
}

fn check(inputs: &Inputs<'_>) -> Result<()> {
    inputs.bend.check()?;
    inputs.teacher_bend.check()?;
    let (rows, hidden) = inputs.hidden.dims2()?;
    let (vocabulary, head_hidden) = inputs.head.dims()?;
    if hidden != head_hidden || inputs.labels.len() != rows {
        bail!(
            "linear_cross_entropy: hidden {:?}, head [{vocabulary}, {head_hidden}] and {} labels do \
             not fit",
            inputs.hidden.shape(),
            inputs.labels.len()
        );
    }
    if let Some(low_rank) = &inputs.low_rank {
        let ([of_hidden, rank], of_head) = (dims2(low_rank.hidden)?, dims2(low_rank.head)?);
        if of_hidden != rows || of_head != [vocabulary, rank] || inputs.head.trains() {
            bail!(
                "linear_cross_entropy: a part of low rank {:?} and {:?} does not fit {rows} rows and a \
                 frozen head of {vocabulary}",
                low_rank.hidden.shape(),
                low_rank.head.shape()
            );
        }
    }
    if let Some(weights) = inputs.label_weights.filter(|weights| weights.len() != rows) {
        bail!("linear_cross_entropy: {} weights of labels for {rows} rows", weights.len());
    }
    if let Some(label) = inputs.labels.iter().find(|&&y| y as usize >= vocabulary) {
        bail!("linear_cross_entropy: label {label} outside the vocabulary of {vocabulary}");
    }
    match (inputs.soft, inputs.teacher) {
        (SoftTargets::Full | SoftTargets::Weighted(_), None) => {
            bail!("linear_cross_entropy: full soft targets need a teacher")
        }
        (SoftTargets::Sparse(distributions, weighted), None) => {
            weighted.check(rows)?;
            distributions.check(rows, vocabulary)?;
        }
        (SoftTargets::Sparse(..), Some(_)) => {
            bail!("linear_cross_entropy: sparse distributions beside a teacher")
        }
        (SoftTargets::Weighted(weighted), _) => weighted.check(rows)?,
        (SoftTargets::TopK { ids, log_probs, k, .. }, _) => {
            if k == 0 || ids.len() != rows * k || log_probs.len() != rows * k {
                bail!(
                    "linear_cross_entropy: [{rows}, {k}] top-k entries expected, of one or more a row"
                );
            }
            if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
                bail!("linear_cross_entropy: id {id} outside the vocabulary of {vocabulary}");
            }
        }
        _ => {}
    }
    if let Some(teacher) = inputs.teacher {
        let (teacher_rows, width) = teacher.hidden.dims2()?;
        let fits = match teacher.rows {
            Some(of) => of.len() == rows && of.iter().all(|&row| (row as usize) < teacher_rows),
            None => teacher_rows == rows,
        };
        let of_head = teacher.head.dims()?;
        if of_head != (vocabulary, width) || !fits {
            bail!(
                "linear_cross_entropy: teacher hidden {:?} and head {of_head:?} do not fit {rows} \
                 rows",
                teacher.hidden.shape()
            );
        }
    }
    Ok(())
}

fn dims2(tensor: &Tensor) -> Result<[usize; 2]> {
    tensor.dims2().map(|(rows, columns)| [rows, columns])
}

#[cfg(test)]
mod tests;
