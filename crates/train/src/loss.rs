//! A loss as a fraction, so that means are right across micro-batches and ranks.

use candle_core::Tensor;

use crate::metrics::DraftMetrics;

/// `Σ ℓ` over learned rows and their number, of one micro-batch.
#[derive(Debug)]
pub struct Loss {
    /// `Σ ℓ` in nats, a scalar that carries the gradient; `None` if nothing is learned.
    pub numerator: Option<Tensor>,
    /// Learned rows.
    pub denominator: usize,
    /// Counters of the same rows.
    pub metrics: DraftMetrics,
}

/// A micro-batch's share of an optimizer step's loss.
#[derive(Debug)]
pub struct Share {
    /// Divided by the whole step's denominators, a scalar that carries the gradient; `None` if
    /// nothing is learned.
    pub loss: Option<Tensor>,
    /// Counters of the micro-batch.
    pub metrics: DraftMetrics,
}
