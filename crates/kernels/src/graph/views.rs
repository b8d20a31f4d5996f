//! Ops that move or share values, or add them: their gradients are the result's, or parts of it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use candle_core::shape::ShapeWithOneHole;
use candle_core::{Result, Tensor, TensorId};

use super::node::{Held, Node, join, node_of, taken};
use super::{add_to, differentiable, differentiable_new, trains};

/// Views that are remembered. What comes after a view takes it up at once; one that is forgotten goes through candle.
const REMEMBERED: usize = 64;

thread_local! {
    /// Results of candle that are the result of a node in another shape.
    static VIEWS: RefCell<VecDeque<(TensorId, Weak<Node>)>> = const { RefCell::new(VecDeque::new()) };
}

/// The node that a tensor is a view of.
pub(super) fn viewed(tensor: &Tensor) -> Option<Arc<Node>> {
    VIEWS.with_borrow(|views| {
        let (_, node) = views.iter().find(|(id, _)| *id == tensor.id())?;
        node.upgrade()
    })
}

/// [`Tensor::reshape`], whose gradient is the result's in another shape.
///
/// # Errors
/// - the shape has another number of values
pub fn reshape(x: &Tensor, shape: impl ShapeWithOneHole) -> Result<Tensor> {
    let view = x.reshape(shape)?;
    if view.id() != x.id()
        && view.track_op()
        && let Some(node) = node_of(x)
    {
        VIEWS.with_borrow_mut(|views| {
            views.truncate(REMEMBERED - 1);
            views.push_front((view.id(), Arc::downgrade(&node)));
        });
    }
    Ok(view)
}

/// `a + b`, whose gradient is that of both.
///
/// # Shapes
/// - equal → the same
///
/// # Errors
/// - the shapes differ
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let sum = (a.detach() + b.detach())?;
    if sum.elem_count() == 0 {
        return Ok(sum);
    }
    differentiable_new("add", [a, b, b], sum, |gradient| {
        Ok([Some(gradient.clone()), Some(gradient.clone()), None])
    })
}

/// `factor · x`.
///
/// # Errors
/// - the device has no memory for it
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    let scaled = (x.detach() * factor)?;
    if scaled.elem_count() == 0 {
        return Ok(scaled);
    }
    differentiable_new("scale", [x; 3], scaled, move |gradient| {
        Ok([Some((gradient * factor)?), None, None])
    })
}

/// The same values as the result of a node. The way back through candle's ops begins there, once for all that read it:
/// for a state that goes from step to step.
///
/// # Errors
/// - the device has no memory for them
pub fn node(x: &Tensor) -> Result<Tensor> {
    differentiable("node", [x; 3], x.detach(), |gradient| Ok([Some(gradient.clone()), None, None]))
}

/// [`Tensor::cat`], whose gradients are parts of the result's.
///
/// # Shapes
/// - equal but for `dim` → their sum there
///
/// # Errors
/// - there is no tensor, or they differ in more than one dimension
pub fn cat(tensors: &[impl AsRef<Tensor>], dim: usize) -> Result<Tensor> {
    let tensors: Vec<&Tensor> = tensors.iter().map(AsRef::as_ref).collect();
    if let [tensor] = tensors[..] {
        return Ok(tensor.clone());
    }
    let values: Vec<Tensor> = tensors.iter().map(|tensor| tensor.detach()).collect();
    let all = Tensor::cat(&values, dim)?;
    if !trains(&tensors) || all.elem_count() == 0 {
        return Ok(all);
    }
    let sizes: Vec<usize> = values.iter().map(|value| value.dim(dim)).collect::<Result<_>>()?;
    let wanted: Vec<bool> = tensors.iter().map(|tensor| tensor.track_op()).collect();
    let backward = move |_: &Tensor, gradient: &Tensor| {
        let mut first = 0;
        let part = |(&size, &wanted): (&usize, &bool)| {
            first += size;
            // A view would keep the whole gradient until the last part is used.
            let part = || gradient.narrow(dim, first - size, size)?.force_contiguous();
            wanted.then(part).transpose()
        };
        sizes.iter().zip(&wanted).map(part).collect()
    };
    let shape = all.shape().clone();
    join("cat", &tensors, (taken("cat", &all)?, shape), (Held::Nothing, backward))
}

/// A copy of [`Tensor::narrow`]. Its gradient is added to a part of the argument's.
///
/// # Errors
/// - the part reaches beyond the dimension
pub fn narrow(x: &Tensor, dim: usize, start: usize, length: usize) -> Result<Tensor> {
    let part = x.detach().narrow(dim, start, length)?;
    if !x.track_op() || part.elem_count() == 0 {
        return part.contiguous();
    }
    let shape = x.shape().clone();
    differentiable_new("narrow", [x; 3], part.force_contiguous()?, move |gradient| {
        add_to(0, |sum| match sum {
            None => {
                let sum = Tensor::zeros(&shape, gradient.dtype(), gradient.device())?;
                sum.slice_set(&gradient.contiguous()?, dim, start)?;
                Ok(sum)
            }
            Some(sum) => {
                let more = (sum.narrow(dim, start, length)? + gradient)?;
                sum.slice_set(&more, dim, start)?;
                Ok(sum.clone())
            }
        })?;
        Ok([None, None, None])
    })
}
