//! The backward pass: nodes from the last to the first, each with the sum of its gradients.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, MetalStorage, Result, Shape, Storage,
    Tensor, TensorId, Var, bail,
};
use rayon::prelude::*;

use super::node::{self, Argument, Node, Source, Way, begins_its_storage};
use crate::at_end::AtEnd;
use crate::simd::map_two;
use crate::storage::{change_f32, values_like, with_each_f32, with_f32};

/// Values that a thread adds at a time.
const CHUNK: usize = 1 << 14;

/// A loss that gradients can be formed of.
pub trait Backward {
    /// The gradients of variables, as [`Tensor::backward`] has them for ops of candle alone. That one fails where
    /// ops of ours are in the graph. No two of them share memory.
    ///
    /// # Errors
    /// - an op has no gradients, or the device has no memory for them
    fn gradients(&self) -> Result<GradStore> {
        self.gradients_onto(Vec::new())
    }

    /// The same added to sums so far of some variables, which have the variables' shapes and types and are nobody else's:
    /// products are added to them while they are formed. A sum that nothing is added to comes back as it is.
    ///
    /// # Errors
    /// - as [`Self::gradients`]; the sums are lost then
    fn gradients_onto(&self, sums: Vec<(Var, Tensor)>) -> Result<GradStore>;
}

impl Backward for Tensor {
    fn gradients_onto(&self, sums: Vec<(Var, Tensor)>) -> Result<GradStore> {
        // The pass that the thread was in before, which it is in again after this one, even after an error.
        let mut before = PASS.replace(Some(Pass::onto(sums)));
        let outer = AtEnd(|| PASS.set(before.take()));
        let mut store = self.backward()?;
        while let Some((node, gradient)) = next() {
            match &node.way {
                Way::Own(backward) => {
                    set_current(Some(Arc::clone(&node)));
                    let gradients = backward(node.result(&gradient), &gradient);
                    set_current(None);
                    hand_on(&node, gradients?)?;
                }
                Way::Candle(tensor) => {
                    let start = tensor.apply_op1(Start(gradient))?;
                    store.extend(start.backward()?)?;
                }
            }
        }
        let pass = PASS.take().unwrap_or_default();
        drop(outer);
        for (variable, sum) in pass.variables.into_values() {
            let sum = match store.remove(&variable) {
                Some(others) => (sum.value + others)?,
                None if sum.is_own => sum.value.contiguous()?,
                // Another gradient, or what a node holds, may lie there.
                None => sum.value.force_contiguous()?,
            };
            store.insert(&variable, sum);
        }
        Ok(store)
    }
}

/// The f32 values of a gradient of a variable, as [`Backward::gradients`] gives it: nobody else reads them, so those
/// in the host's memory are not copied.
///
/// # Errors
/// - values are of another type, or cannot be read from their device
pub fn into_values(gradient: Tensor) -> Result<Vec<f32>> {
    let flat = gradient.flatten_all()?;
    if flat.device().is_cpu() && flat.dtype() == DType::F32 {
        drop(gradient);
        let values = flat.elem_count();
        if let Storage::Cpu(CpuStorage::F32(mut all)) = node::taken("gradient", &flat)? {
            all.truncate(values);
            return Ok(all);
        }
    }
    flat.to_vec1()
}

/// What a pass has so far.
#[derive(Default)]
struct Pass {
    /// By the order of nodes.
    pending: BTreeMap<u64, (Arc<Node>, Sum)>,
    /// With the variables.
    variables: HashMap<TensorId, (Tensor, Sum)>,
    /// The node whose backward pass runs.
    current: Option<Arc<Node>>,
}

impl Pass {
    /// One whose variables have sums already.
    fn onto(sums: Vec<(Var, Tensor)>) -> Self {
        let of = |(variable, value): (Var, Tensor)| {
            let is_own = begins_its_storage(&value);
            (variable.id(), (variable.as_tensor().clone(), Sum { value, is_own }))
        };
        Self { variables: sums.into_iter().map(of).collect(), ..Self::default() }
    }
}

/// A sum of gradients.
struct Sum {
    value: Tensor,
    /// Whether nobody else reads its memory, so that more is added in place.
    is_own: bool,
}

thread_local! {
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

/// The last node that has a gradient; all that depend on it are done.
fn next() -> Option<(Arc<Node>, Tensor)> {
    PASS.with_borrow_mut(|pass| {
        let (_, (node, sum)) = pass.as_mut()?.pending.pop_last()?;
        Some((node, sum.value))
    })
}

/// Hands gradients to a node's arguments.
fn hand_on(node: &Node, gradients: Vec<Option<Tensor>>) -> Result<()> {
    for (argument, gradient) in node.arguments.iter().zip(gradients) {
        let Some(gradient) = gradient.filter(|_| !matches!(argument.source, Source::None)) else {
            continue;
        };
        if gradient.shape() != &argument.shape || gradient.dtype() != argument.dtype {
            bail!(
                "{}: a gradient {gradient:?} of an argument {:?} in {:?}",
                node.name,
                argument.shape,
                argument.dtype
            );
        }
        put(&argument.source, Sum { value: gradient.detach(), is_own: false })?;
    }
    Ok(())
}

fn set_current(node: Option<Arc<Node>>) {
    PASS.with_borrow_mut(|pass| {
        if let Some(pass) = pass {
            pass.current = node;
        }
    });
}

/// A gradient that candle's pass brings to a node's result. It fails where candle's pass was not started by ours.
pub(super) fn receive(node: &Arc<Node>, gradient: &Tensor) -> Result<()> {
    let value = gradient.detach().to_dtype(node.gradient)?;
    put(&Source::Node(Arc::clone(node)), Sum { value, is_own: false })
}

/// Adds to the sum of a variable or of a node's result.
fn put(source: &Source, gradient: Sum) -> Result<()> {
    let sum = match taken(source) {
        None => gradient,
        Some(sum) => added(sum, &gradient.value)?,
    };
    set(source, sum)
}

fn added(sum: Sum, gradient: &Tensor) -> Result<Sum> {
    let Sum { value, is_own } = sum;
    let shaped = gradient.reshape(value.shape())?;
    let on_cpu = |t: &Tensor| t.device().is_cpu() && t.dtype() == DType::F32;
    let value = match (on_cpu(&value) && on_cpu(&shaped), is_own) {
        (false, _) => (value + shaped)?,
        (true, true) => {
            with_f32(&shaped, |more| {
                change_f32(&value, |sum| {
                    add_each(sum, more);
                    Ok(())
                })
            })?;
            value
        }
        (true, false) => {
            let sum = with_each_f32([&value, &shaped], |[sum, more]| Ok(sums(sum, more)))?;
            values_like(&value, sum)?
        }
    };
    Ok(Sum { value, is_own: true })
}

fn sums(a: &[f32], b: &[f32]) -> Vec<f32> {
    map_two(a, b, |a, b, sums| {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum = a + b);
    })
}

/// `sum += more`, on all threads.
pub fn add_each(sum: &mut [f32], more: &[f32]) {
    let chunks = sum.par_chunks_mut(CHUNK).zip(more.par_chunks(CHUNK));
    chunks.for_each(|(sum, more)| sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more));
}

/// Takes the sum so far out of the pass.
fn taken(source: &Source) -> Option<Sum> {
    PASS.with_borrow_mut(|pass| {
        let pass = pass.as_mut()?;
        match source {
            Source::Node(node) => pass.pending.remove(&node.order).map(|(_, sum)| sum),
            Source::Variable(variable) => pass.variables.remove(&variable.id()).map(|(_, sum)| sum),
            Source::None => None,
        }
    })
}

fn set(source: &Source, sum: Sum) -> Result<()> {
    PASS.with_borrow_mut(|pass| {
        let Some(pass) = pass.as_mut() else {
            bail!("candle's `backward` does not go through ops of ours: `Backward::gradients` does")
        };
        match source {
            Source::Node(node) => {
                let value = sum.value.reshape(&node.shape)?;
                let sum = Sum { value, ..sum };
                pass.pending.insert(node.order, (Arc::clone(node), sum));
            }
            Source::Variable(variable) => {
                pass.variables.insert(variable.id(), (variable.clone(), sum));
            }
            Source::None => {}
        }
        Ok(())
    })
}

/// Makes a gradient of an argument with `onto`, which gets the sum of those before it, if there are some, in memory
/// that it may change. To be called in a node's backward pass. Does nothing if the argument does not train.
/// It fails as `onto` does.
pub(crate) fn add_to(
    argument: usize,
    onto: impl FnOnce(Option<&Tensor>) -> Result<Tensor>,
) -> Result<()> {
    let Some(Argument { source, shape, dtype }) = trained(argument) else { return Ok(()) };
    let so_far = match taken(&source) {
        None => None,
        Some(Sum { value, is_own: true }) => Some(value.reshape(&shape)?),
        Some(Sum { value, is_own: false }) => Some(value.reshape(&shape)?.force_contiguous()?),
    };
    let value = onto(so_far.as_ref())?;
    if value.shape() != &shape || value.dtype() != dtype {
        bail!("gradients {value:?} of an argument {shape:?} in {dtype:?}");
    }
    set(&source, Sum { value, is_own: true })
}

/// The type of an argument of the node whose backward pass runs, if it trains.
pub(crate) fn trained_type(argument: usize) -> Option<DType> {
    trained(argument).map(|argument| argument.dtype)
}

fn trained(argument: usize) -> Option<Argument> {
    PASS.with_borrow(|pass| {
        let argument = pass.as_ref()?.current.as_ref()?.arguments.get(argument)?;
        (!matches!(argument.source, Source::None)).then(|| argument.clone())
    })
}

/// A number that depends on a result of candle, with the gradient that the result has already.
struct Start(Tensor);

impl CustomOp1 for Start {
    fn name(&self) -> &'static str {
        "start"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, result: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let shape = Shape::from(());
        Ok((result.device().zeros_impl(&shape, DType::F32)?, shape))
    }

    fn metal_fwd(&self, result: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        let shape = Shape::from(());
        Ok((result.device().zeros_impl(&shape, DType::F32)?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
