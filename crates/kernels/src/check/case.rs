//! One case: inputs, the op, what is expected.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::Size;
use crate::random::CounterRng;

/// Largest relative error with f32 products, and with bf16 ones.
const TOLERANCES: [f64; 2] = [1e-5, 2e-2];

/// An input of a case: values uniform in `[-scale, scale)`, the same on every machine.
pub(super) struct Input {
    pub(super) name: &'static str,
    shape: Vec<usize>,
    scale: f64,
    dtype: DType,
    trained: bool,
    signs: bool,
}

/// An f32 input that gets a gradient.
pub(super) fn trained(name: &'static str, shape: impl Into<Vec<usize>>) -> Input {
    Input { trained: true, ..frozen(name, shape) }
}

/// An f32 input that gets none.
pub(super) fn frozen(name: &'static str, shape: impl Into<Vec<usize>>) -> Input {
    let (dtype, trained, signs) = (DType::F32, false, false);
    Input { name, shape: shape.into(), scale: 1.0, dtype, trained, signs }
}

impl Input {
    pub(super) fn times(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    pub(super) fn of(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// With the scale and its negative for values, and none between.
    pub(super) fn signs(self) -> Self {
        Self { signs: true, ..self }
    }

    /// Bytes of the values.
    pub(super) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()
    }

    /// The values in the CPU's memory.
    pub(super) fn on_host(&self) -> Result<Tensor> {
        let sizes: Vec<u64> = self.shape.iter().map(|size| *size as u64).collect();
        let mut rng = CounterRng::new(0, self.name, &sizes);
        let mut next = || {
            let value = 2.0 * rng.uniform() - 1.0;
            let value = if self.signs { value.signum() } else { value };
            (value * self.scale) as f32
        };
        let values: Vec<f32> = (0..self.shape.iter().product()).map(|_| next()).collect();
        Tensor::from_vec(values, self.shape.as_slice(), &Device::Cpu)?.to_dtype(self.dtype)
    }

    /// Values that repeat after a million, made on the device without a transfer of them all.
    pub(super) fn repeated_on(&self, device: &Device) -> Result<Tensor> {
        const PERIOD: usize = 1 << 20;
        let count: usize = self.shape.iter().product();
        let period = Self { shape: vec![PERIOD.min(count)], ..*self };
        let period = period.on_host()?.to_device(device)?;
        let turns = count.div_ceil(PERIOD.min(count).max(1)).max(1);
        let all = period.unsqueeze(0)?.broadcast_as((turns, period.elem_count()))?.contiguous()?;
        all.flatten_all()?.narrow(0, 0, count)?.reshape(self.shape.as_slice())
    }

    /// `values` as the op takes them.
    pub(super) fn leaf(&self, values: Tensor) -> Result<Leaf> {
        Ok(if self.trained {
            Leaf::Trained(Var::from_tensor(&values)?)
        } else {
            Leaf::Frozen(values)
        })
    }
}

/// An argument where it is used.
pub(super) enum Leaf {
    Trained(Var),
    Frozen(Tensor),
}

impl Leaf {
    pub(super) fn tensor(&self) -> Tensor {
        match self {
            Self::Trained(variable) => variable.as_tensor().clone(),
            Self::Frozen(tensor) => tensor.clone(),
        }
    }

    pub(super) fn variable(&self) -> Option<&Var> {
        match self {
            Self::Trained(variable) => Some(variable),
            Self::Frozen(_) => None,
        }
    }
}

/// A result of an op; gradients are those of the first one.
pub(super) struct Output {
    pub(super) name: &'static str,
    pub(super) tensor: Tensor,
    /// A choice (an id, a flag), which rounded products may rightly make another way.
    pub(super) is_choice: bool,
}

impl Output {
    pub(super) fn new(name: &'static str, tensor: Tensor) -> Self {
        Self { name, tensor, is_choice: false }
    }

    pub(super) fn numbers(name: &'static str, values: &[f64]) -> Result<Self> {
        Ok(Self::new(name, Tensor::from_slice(values, values.len(), &Device::Cpu)?))
    }

    pub(super) fn choices(name: &'static str, values: &[u32]) -> Result<Self> {
        let tensor = Tensor::from_slice(values, values.len(), &Device::Cpu)?;
        Ok(Self { is_choice: true, ..Self::new(name, tensor) })
    }
}

/// The results of an op that has one.
pub(super) fn only(result: Result<Tensor>) -> Result<Vec<Output>> {
    Ok(vec![Output::new("result", result?)])
}

/// From arguments, in the order of the inputs, to results.
pub(super) type Function = Box<dyn Fn(&[Tensor]) -> Result<Vec<Output>>>;

/// What a case's results are held against.
pub(super) enum Expected {
    /// The function of the same values in f64 on the CPU.
    InF64(Function),
    /// The function on the device, whose results must be equal.
    OnDevice(Function),
}

/// One case.
pub(super) struct Case {
    /// Sizes and kind, for people.
    pub(super) shape: String,
    pub(super) inputs: Vec<Input>,
    pub(super) op: Function,
    pub(super) expected: Expected,
    /// With f32 products, and with bf16 ones.
    pub(super) tolerances: [f64; 2],
    /// Whether only fused ops and kernels promise it, and ops composed of others do not.
    pub(super) of_kernels: bool,
}

impl Case {
    /// `op` against `reference` in f64.
    pub(super) fn new(
        shape: impl Into<String>,
        inputs: impl Into<Vec<Input>>,
        op: impl Fn(&[Tensor]) -> Result<Vec<Output>> + 'static,
        reference: impl Fn(&[Tensor]) -> Result<Vec<Output>> + 'static,
    ) -> Self {
        Self {
            shape: shape.into(),
            inputs: inputs.into(),
            op: Box::new(op),
            expected: Expected::InF64(Box::new(reference)),
            tolerances: TOLERANCES,
            of_kernels: false,
        }
    }

    /// `op` against `other` on the same device, bit by bit.
    pub(super) fn same(
        shape: impl Into<String>,
        inputs: impl Into<Vec<Input>>,
        op: impl Fn(&[Tensor]) -> Result<Vec<Output>> + 'static,
        other: impl Fn(&[Tensor]) -> Result<Vec<Output>> + 'static,
    ) -> Self {
        let expected = Expected::OnDevice(Box::new(other));
        Self { expected, ..Self::new(shape, inputs, op, |_| Ok(Vec::new())) }.within(0.0, 0.0)
    }

    /// With other tolerances for f32 and bf16 products.
    pub(super) fn within(self, single: f64, half: f64) -> Self {
        Self { tolerances: [single, half], ..self }
    }

    /// Ops composed of others do not promise it.
    pub(super) fn of_kernels(self) -> Self {
        Self { of_kernels: true, ..self }
    }
}

/// The rows of a table whose sizes are no larger than `size`.
pub(super) fn up_to<T: Copy>(size: Size, table: &[(Size, T)]) -> impl Iterator<Item = T> {
    table.iter().filter(move |(of, _)| *of <= size).map(|(_, row)| *row)
}
