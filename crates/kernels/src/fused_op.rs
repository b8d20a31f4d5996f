//! Fused ops on the CPU as nodes of the graph.
//!
//! An op here is one trait over its arguments: slices come in, values and their shape go out, and `backward` gives the
//! gradients in the same order.

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, DType, Error, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};

use crate::graph::{Gradients, Held, join, trains};
use crate::storage::slice_of;

/// An argument in the CPU's memory.
#[derive(Clone, Copy)]
pub(crate) struct Argument<'a> {
    pub(crate) storage: &'a CpuStorage,
    pub(crate) layout: &'a Layout,
    op: &'static str,
}

impl<'a> Argument<'a> {
    /// The contiguous values; an error if they are of another type or have gaps.
    pub(crate) fn values<T: WithDType>(self) -> Result<&'a [T]> {
        slice_of(self.storage, self.layout, self.op)
    }

    pub(crate) fn f32(self) -> Result<&'a [f32]> {
        self.values()
    }

    pub(crate) fn shape(self) -> &'a Shape {
        self.layout.shape()
    }

    pub(crate) fn dtype(self) -> DType {
        self.storage.dtype()
    }
}

/// An argument in the backward pass.
#[derive(Clone)]
pub(crate) struct Input {
    /// Without its graph.
    pub(crate) tensor: Tensor,
    /// Whether a gradient is asked for.
    pub(crate) trains: bool,
}

/// An op of `N` arguments whose result is f32.
pub(crate) trait FusedOp<const N: usize>: Send + Sync + 'static {
    /// What errors call it.
    const NAME: &'static str;

    /// Whether `backward` reads the result; it gets the gradient in its place if not.
    const READS_RESULT: bool = false;

    /// The arguments whose values `backward` reads. Of the others it gets the shape alone.
    const READS: [bool; N] = [true; N];

    /// The result's values and shape. It fails where an argument is of another type or not contiguous.
    fn forward(&self, arguments: [Argument<'_>; N]) -> Result<(Vec<f32>, Shape)>;

    /// The arguments' gradients from the gradient of the result; none for arguments that do not train, and for those
    /// to whose sums `graph::add_to` has added them. It fails where the op has no gradients.
    fn backward(
        &self,
        _arguments: [&Input; N],
        _result: &Tensor,
        _gradient: &Tensor,
    ) -> Result<Gradients<N>> {
        Err(Error::BackwardNotSupported { op: Self::NAME })
    }
}

/// The op's result, in the graph if an argument trains. Arguments are copied if they have gaps.
/// It fails as [`FusedOp::forward`] does, or where an argument lies on another device.
pub(crate) fn fuse<F: FusedOp<N>, const N: usize>(
    op: F,
    arguments: [&Tensor; N],
) -> Result<Tensor> {
    let whole =
        arguments.iter().map(|argument| argument.contiguous()).collect::<Result<Vec<_>>>()?;
    let (values, shape) = forward(&op, &whole)?;
    if !trains(&arguments) {
        return Tensor::from_vec(values, shape, arguments[0].device());
    }
    let mut inputs = Vec::with_capacity(N);
    for (i, whole) in whole.iter().enumerate() {
        let tensor = if F::READS[i] { whole.detach() } else { without_values(whole)? };
        inputs.push(Input { tensor, trains: arguments[i].track_op() });
    }
    let held = if F::READS_RESULT { Held::Result } else { Held::Nothing };
    let backward = move |result: &Tensor, gradient: &Tensor| {
        let inputs = std::array::from_fn(|i| &inputs[i]);
        op.backward(inputs, result, gradient).map(Vec::from)
    };
    let storage = Storage::Cpu(CpuStorage::F32(values));
    join(F::NAME, &arguments, (storage, shape), (held, backward))
}

/// A tensor of the same shape that holds one number.
fn without_values(tensor: &Tensor) -> Result<Tensor> {
    Tensor::zeros((), tensor.dtype(), tensor.device())?.broadcast_as(tensor.shape())
}

fn forward<F: FusedOp<N>, const N: usize>(op: &F, whole: &[Tensor]) -> Result<(Vec<f32>, Shape)> {
    let held: Vec<_> = whole.iter().map(Tensor::storage_and_layout).collect();
    let mut arguments = Vec::with_capacity(N);
    for (storage, layout) in &held {
        let Storage::Cpu(storage) = &**storage else {
            bail!("{}: an argument on the CPU expected", F::NAME)
        };
        arguments.push(Argument { storage, layout, op: F::NAME });
    }
    let Ok(arguments) = arguments.try_into() else { bail!("{}: {N} arguments expected", F::NAME) };
    op.forward(arguments)
}
