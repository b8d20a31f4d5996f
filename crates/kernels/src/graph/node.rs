//! Nodes, and how candle sees them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, DeviceLocation, InplaceOp1, Layout,
    MetalStorage, Result, Shape, Storage, Tensor, TensorId, Var, bail,
};

use super::{pass, views};

/// What the gradients of a node's arguments are computed by, from its result (if it is [`Held`]) and its gradient.
type BackwardOf = dyn Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

/// Whether a node keeps its result for its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// `backward` gets the gradient in its place.
    Nothing,
    Result,
}

/// A result that gradients flow through.
pub(super) struct Node {
    pub(super) name: &'static str,
    /// Later nodes have higher ones: none depends on one after it.
    pub(super) order: u64,
    pub(super) shape: Shape,
    /// The type of its gradient.
    pub(super) gradient: DType,
    pub(super) arguments: Vec<Argument>,
    pub(super) way: Way,
    /// The result's.
    id: OnceLock<TensorId>,
    /// The result without its graph, where it is held.
    result: OnceLock<Tensor>,
}

/// How a gradient goes on from a node.
pub(super) enum Way {
    Own(Box<BackwardOf>),
    /// Through candle's graph, from a result of candle that an op of ours reads.
    Candle(Tensor),
}

impl Node {
    fn new(
        name: &'static str,
        (shape, gradient): (&Shape, DType),
        arguments: Vec<Argument>,
        way: Way,
    ) -> Arc<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        Arc::new(Self {
            name,
            order: COUNT.fetch_add(1, Ordering::Relaxed),
            shape: shape.clone(),
            gradient,
            arguments,
            way,
            id: OnceLock::new(),
            result: OnceLock::new(),
        })
    }

    /// What the node's gradients are computed from: its result if it is held, else its gradient.
    pub(super) fn result<'a>(&'a self, gradient: &'a Tensor) -> &'a Tensor {
        self.result.get().unwrap_or(gradient)
    }

    /// Lets others find the node by its result.
    fn found_by(self: &Arc<Self>, result: &Tensor) {
        nodes().insert(result.id(), Arc::downgrade(self));
        let _ = self.id.set(result.id());
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(id) = self.id.get() {
            nodes().remove(id);
        }
    }
}

/// What an argument's gradient is added to.
#[derive(Clone)]
pub(super) enum Source {
    /// Nothing: it does not train.
    None,
    Variable(Tensor),
    /// The result of a node. Its values are kept only if somebody reads them.
    Node(Arc<Node>),
}

/// An argument of a node.
#[derive(Clone)]
pub(super) struct Argument {
    pub(super) source: Source,
    pub(super) shape: Shape,
    /// Of its gradient.
    pub(super) dtype: DType,
}

impl Argument {
    fn of(tensor: &Tensor) -> Self {
        let source = if !tensor.track_op() {
            Source::None
        } else if let Some(node) = node_of(tensor) {
            Source::Node(node)
        } else if tensor.is_variable() {
            Source::Variable(tensor.clone())
        } else {
            // Made after all that it was computed from, and before all of ours that read it.
            let way = Way::Candle(tensor.clone());
            let of = (tensor.shape(), tensor.dtype());
            let node = Node::new("candle", of, Vec::new(), way);
            node.found_by(tensor);
            Source::Node(node)
        };
        let dtype = match &source {
            Source::Node(node) => node.gradient,
            Source::None | Source::Variable(_) => tensor.dtype(),
        };
        Self { source, shape: tensor.shape().clone(), dtype }
    }
}

/// Nodes by their results.
type Nodes = HashMap<TensorId, Weak<Node>>;

fn nodes() -> MutexGuard<'static, Nodes> {
    static NODES: LazyLock<Mutex<Nodes>> = LazyLock::new(Mutex::default);
    NODES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The node whose result a tensor is, perhaps in another shape.
pub(super) fn node_of(tensor: &Tensor) -> Option<Arc<Node>> {
    let own = nodes().get(&tensor.id()).and_then(Weak::upgrade);
    own.or_else(|| views::viewed(tensor))
}

/// Whether the graph itself keeps no values of a tensor: it is the result of an op of ours that does not hold it.
pub(crate) fn is_let_go(tensor: &Tensor) -> bool {
    node_of(tensor)
        .is_some_and(|node| matches!(node.way, Way::Own(_)) && node.result.get().is_none())
}

/// Whether a tensor holds bf16 values that train by a gradient in f32.
pub(crate) fn has_wide_gradient(tensor: &Tensor) -> bool {
    let node = (tensor.dtype() == DType::BF16 && tensor.track_op()).then(|| node_of(tensor));
    node.flatten().is_some_and(|node| node.gradient == DType::F32)
}

/// A tensor with the values of a storage, whose gradient flows to the arguments. Its gradient has its own
/// type; that of a bf16 result is f32 if an argument's is.
///
/// # Errors
/// - candle's, which knows no reason
pub(crate) fn join(
    name: &'static str,
    arguments: &[&Tensor],
    (storage, shape): (Storage, Shape),
    (held, backward): (
        Held,
        impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ),
) -> Result<Tensor> {
    let is_wide = arguments.iter().any(|argument| has_wide_gradient(argument));
    let gradient = match storage.dtype() {
        DType::BF16 if is_wide => DType::F32,
        dtype => dtype,
    };
    join_as(name, arguments, (storage, shape), (gradient, held, backward))
}

/// The same whose gradient is of a type.
pub(super) fn join_as(
    name: &'static str,
    arguments: &[&Tensor],
    (storage, shape): (Storage, Shape),
    (gradient, held, backward): (
        DType,
        Held,
        impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ),
) -> Result<Tensor> {
    let arguments = arguments.iter().map(|argument| Argument::of(argument)).collect();
    let node = Node::new(name, (&shape, gradient), arguments, Way::Own(Box::new(backward)));
    let begin = beginning(&storage)?;
    let leaf = Leaf { node: Arc::clone(&node), result: Mutex::new(Some((storage, shape))) };
    let result = begin.apply_op1(leaf)?;
    if held == Held::Result {
        let _ = node.result.set(result.detach());
    }
    node.found_by(&result);
    Ok(result)
}

/// A variable that candle takes for what results on the device of a storage were computed from. It gets no gradient.
fn beginning(storage: &Storage) -> Result<Tensor> {
    static KNOWN: LazyLock<Mutex<HashMap<DeviceLocation, Var>>> = LazyLock::new(Mutex::default);
    let device = match storage {
        Storage::Cpu(_) => Device::Cpu,
        Storage::Cuda(storage) => Device::Cuda(storage.device().clone()),
        Storage::Metal(storage) => Device::Metal(storage.device().clone()),
    };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(variable) = known.get(&device.location()) {
        return Ok(variable.as_tensor().clone());
    }
    let variable = Var::zeros(1, DType::F32, &device)?;
    let begin = variable.as_tensor().clone();
    known.insert(device.location(), variable);
    Ok(begin)
}

/// A node's result in candle's graph.
struct Leaf {
    node: Arc<Node>,
    /// Until the forward pass has taken it.
    result: Mutex<Option<(Storage, Shape)>>,
}

impl Leaf {
    fn take(&self) -> Result<(Storage, Shape)> {
        let taken = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(result) = taken else { bail!("{}: its result was taken before", self.node.name) };
        Ok(result)
    }

    fn elsewhere<S>(&self) -> Result<S> {
        bail!("{}: its result lies on another device than candle takes it for", self.node.name)
    }
}

impl CustomOp1 for Leaf {
    fn name(&self) -> &'static str {
        self.node.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.take()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => self.elsewhere(),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.take()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => self.elsewhere(),
        }
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        match self.take()? {
            (Storage::Metal(storage), shape) => Ok((storage, shape)),
            _ => self.elsewhere(),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        pass::receive(&self.node, gradient)?;
        Ok(None)
    }
}

/// Whether a tensor's values lie together at the beginning of their memory.
pub(super) fn begins_its_storage(result: &Tensor) -> bool {
    result.layout().start_offset() == 0 && result.is_contiguous()
}

fn copied(result: &Tensor) -> Result<Storage> {
    let (storage, layout) = result.storage_and_layout();
    Ok(match &*storage {
        Storage::Cpu(storage) => Storage::Cpu(storage.try_clone(layout)?),
        Storage::Cuda(storage) => Storage::Cuda(storage.try_clone(layout)?),
        Storage::Metal(storage) => Storage::Metal(storage.try_clone(layout)?),
    })
}

/// The storage of a new result, which nobody else reads; a copy where the result is a part of it.
pub(super) fn taken(name: &'static str, result: &Tensor) -> Result<Storage> {
    let own =
        if begins_its_storage(result) { result.clone() } else { result.force_contiguous()? };
    if matches!(own.device(), Device::Metal(_)) {
        return copied(&own);
    }
    let take = Take::default();
    own.inplace_op1(&take)?;
    let taken = take.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(storage) = taken else { bail!("{name}: its result was taken before") };
    Ok(storage)
}

/// Takes a tensor's values and leaves none.
#[derive(Default)]
struct Take(Mutex<Option<Storage>>);

impl Take {
    fn keep(&self, storage: Storage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(storage);
    }
}

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.keep(Storage::Cpu(std::mem::replace(storage, CpuStorage::U8(Vec::new()))));
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let device = storage.device.clone();
        // SAFETY: nobody reads the value.
        let empty = unsafe { device.alloc::<u8>(1) }?;
        let empty = CudaStorage::wrap_cuda_slice(empty, device);
        self.keep(Storage::Cuda(std::mem::replace(storage, empty)));
        Ok(())
    }
}
