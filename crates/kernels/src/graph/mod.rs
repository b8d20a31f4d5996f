//! The graph of a step: which tensors a result was computed from, and how its gradient becomes theirs.
//!
//! candle has such a graph for its own ops. It begins the sum of every tensor's gradients with zeros and adds each
//! gradient in a pass over memory: two to four passes for a result that is used once. Here results of our ops are
//! nodes of a graph of our own. A node names what its arguments stem from, and [`Backward::gradients`] hands a gradient
//! on without touching its values; it adds only where a result is used again, and products are added to the
//! sum while they are formed.
//!
//! Ops of candle between ours keep candle's graph. To candle the result of a node is a leaf: a gradient that candle's
//! backward pass brings there goes on in ours, and ours starts candle's where it meets one of its results. So any op
//! of candle may stand anywhere, and costs what it costs there. If candle hands a state on through many steps, every
//! step that an op of ours reads is followed back to the first one. [`node`] cuts such a chain.

mod node;
mod pass;
mod views;

use candle_core::{DType, Result, Tensor};

use node::{join_as, taken};

pub use pass::{Backward, add_each, into_values};
pub use views::{add, cat, narrow, node, reshape, scale};

pub(crate) use node::{Held, has_wide_gradient, is_let_go, join};
pub(crate) use pass::{add_to, trained_type};

/// Gradients of the arguments, in their order.
pub type Gradients<const N: usize = 3> = [Option<Tensor>; N];

/// `result`, which was computed from `arguments` without a graph, as a node of the graph whose
/// gradients `backward` computes from its own gradient. Two arguments may be the same tensor.
///
/// # Errors
/// - the device has no memory for a copy of the result
pub fn differentiable(
    name: &'static str,
    arguments: [&Tensor; 3],
    result: Tensor,
    backward: impl Fn(&Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !trains(&arguments) {
        return Ok(result);
    }
    differentiable_new(name, arguments, result.force_contiguous()?, backward)
}

/// The same of a new result: no other tensor has its values, so they are taken over without a copy.
/// It fails as [`differentiable`] does.
pub(crate) fn differentiable_new(
    name: &'static str,
    arguments: [&Tensor; 3],
    result: Tensor,
    backward: impl Fn(&Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    let backward = move |_: &Tensor, gradient: &Tensor| backward(gradient);
    of_new(name, arguments, result, (Held::Nothing, backward))
}

/// The same of a bf16 result that was rounded from f32: its gradient is f32. It fails as [`differentiable`] does.
pub(crate) fn differentiable_rounded(
    name: &'static str,
    arguments: [&Tensor; 3],
    result: Tensor,
    backward: impl Fn(&Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !trains(&arguments) {
        return Ok(result);
    }
    let of = (taken(name, &result)?, result.shape().clone());
    let backward = move |_: &Tensor, gradient: &Tensor| backward(gradient).map(Vec::from);
    join_as(name, &arguments, of, (DType::F32, Held::Nothing, backward))
}

/// The same where `backward` reads the result, too, as its first argument. It fails as [`differentiable`] does.
pub(crate) fn differentiable_by_result(
    name: &'static str,
    arguments: [&Tensor; 3],
    result: Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    of_new(name, arguments, result, (Held::Result, backward))
}

fn of_new(
    name: &'static str,
    arguments: [&Tensor; 3],
    result: Tensor,
    (held, backward): (
        Held,
        impl Fn(&Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
    ),
) -> Result<Tensor> {
    if !trains(&arguments) {
        return Ok(result);
    }
    let of = (taken(name, &result)?, result.shape().clone());
    let backward = move |out: &Tensor, gradient: &Tensor| backward(out, gradient).map(Vec::from);
    join(name, &arguments, of, (held, backward))
}

/// Whether one of the arguments trains.
pub(crate) fn trains(arguments: &[&Tensor]) -> bool {
    arguments.iter().any(|argument| argument.track_op())
}

#[cfg(test)]
mod tests;
