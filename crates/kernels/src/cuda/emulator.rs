//! Kernels on a CPU, to check them: their text becomes a shared library by way of a C++ compiler.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;

use candle_core::{CpuStorage, DType, Result, Shape, Storage, Tensor, bail};
use half::bf16;

use super::{Argument, Launch, Program};

const EMULATOR: &str = include_str!("emulator.h");

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    static LOADED: RefCell<HashMap<String, Rc<libloading::Library>>> = RefCell::default();
}

pub(super) fn is_on() -> bool {
    ON.get() || crate::settings::emulates()
}

/// What `f` computes with the GPU's kernels in place of the CPU's.
#[cfg(test)]
pub(crate) fn emulated<R>(f: impl FnOnce() -> R) -> R {
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            ON.set(false);
        }
    }
    ON.set(true);
    let _off = Off;
    f()
}

/// The emulator keeps a block's state in variables of the library, so every thread has its own copy.
fn library(program: &Program) -> Result<Rc<libloading::Library>> {
    if let Some(library) = LOADED.with_borrow(|all| all.get(&program.name).cloned()) {
        return Ok(library);
    }
    let folder = tempfile::tempdir()?;
    let source = folder.path().join("kernels.cpp");
    std::fs::write(&source, format!("{EMULATOR}\n{}", program.text))?;
    let built = folder.path().join("kernels.so");
    compile(&source, &built)?;
    // SAFETY: the library is compiled from our own text and runs nothing when it is loaded.
    let library = unsafe { libloading::Library::new(&built) }.map_err(candle_core::Error::wrap)?;
    let library = Rc::new(library);
    LOADED.with_borrow_mut(|all| all.insert(program.name.clone(), Rc::clone(&library)));
    Ok(library)
}

fn compile(source: &Path, built: &Path) -> Result<()> {
    let made = Command::new("c++")
        .args(["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-o"])
        .args([built, source])
        .output()?;
    if !made.status.success() {
        bail!("c++: {}", String::from_utf8_lossy(&made.stderr));
    }
    Ok(())
}

type Start = unsafe extern "C" fn(*const u32, u32, u32, *mut *mut c_void);

/// A result whose values show if they are never written.
enum Made {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Made {
    fn new(dtype: DType, count: usize) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16(vec![bf16::NAN; count]),
            _ => Self::F32(vec![f32::NAN; count]),
        }
    }

    fn address(&mut self) -> u64 {
        match self {
            Self::F32(values) => values.as_mut_ptr().addr() as u64,
            Self::Bf16(values) => values.as_mut_ptr().addr() as u64,
        }
    }

    fn tensor(self, shape: &Shape) -> Result<Tensor> {
        match self {
            Self::F32(values) => Tensor::from_vec(values, shape, &candle_core::Device::Cpu),
            Self::Bf16(values) => Tensor::from_vec(values, shape, &candle_core::Device::Cpu),
        }
    }
}

/// `into`: the kernel's last argument, which it writes.
pub(super) fn run(
    launch: &Launch<'_>,
    types: &[DType],
    into: Option<&mut [bf16]>,
) -> Result<Vec<Tensor>> {
    if launch.grid.contains(&0) || launch.threads == 0 {
        bail!("{}: a driver refuses to start a kernel without blocks", launch.kernel);
    }
    let library = library(launch.program)?;
    let symbol = format!("launch_{}", launch.kernel);
    // SAFETY: every kernel's text ends with KERNEL(name), which defines this symbol with this type.
    let start = unsafe { library.get::<Start>(symbol.as_bytes()) };
    let start = start.map_err(candle_core::Error::wrap)?;
    let held: Vec<_> = launch
        .arguments
        .iter()
        .filter_map(|argument| match argument {
            Argument::Tensor(tensor) => Some(tensor.storage_and_layout()),
            _ => None,
        })
        .collect();
    let mut tensors = held.iter().map(|(storage, layout)| match &**storage {
        Storage::Cpu(CpuStorage::F32(values)) => {
            Ok(values[layout.start_offset()..].as_ptr().cast::<c_void>())
        }
        Storage::Cpu(CpuStorage::BF16(values)) => {
            Ok(values[layout.start_offset()..].as_ptr().cast::<c_void>())
        }
        Storage::Cpu(CpuStorage::U32(values)) => {
            Ok(values[layout.start_offset()..].as_ptr().cast::<c_void>())
        }
        _ => bail!("{}: an argument is neither f32, bf16 nor u32", launch.kernel),
    });
    // Eight bytes hold any argument.
    let mut values: Vec<u64> = Vec::new();
    for argument in launch.arguments {
        values.push(match argument {
            Argument::Tensor(_) => match tensors.next() {
                Some(pointer) => pointer?.addr() as u64,
                None => bail!("{}: an argument is missing", launch.kernel),
            },
            Argument::U32(value) => u64::from(*value),
            Argument::Count(value) => *value as u64,
            Argument::F32(value) => u64::from(value.to_bits()),
        });
    }
    let shapes = launch.results.iter();
    let mut results: Vec<Made> =
        shapes.zip(types).map(|(shape, of)| Made::new(*of, shape.elem_count())).collect();
    values.extend(results.iter_mut().map(Made::address));
    values.extend(into.map(|into| into.as_mut_ptr().addr() as u64));
    let mut pointers: Vec<*mut c_void> =
        values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
    let grid = launch.grid.map(|blocks| blocks as u32);
    // SAFETY: the arguments are those of the kernel's signature (their number and types are what the
    // tests are there to find out); the tensors are held and the results live until it returns.
    unsafe {
        start(grid.as_ptr(), launch.threads as u32, launch.memory as u32, pointers.as_mut_ptr());
    }
    let made = results.into_iter().zip(launch.results);
    made.map(|(result, shape)| result.tensor(shape)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use candle_core::Device;

    use super::*;

    const THREADS: usize = 4;
    const BLOCKS: usize = 64;
    const STARTS: usize = 20;

    const PROBE: &str = "
extern \"C\" __global__ void thread_probe(const float *in, float *out) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x;
  __syncthreads();
  out[at] = 2 * in[at];
}
KERNEL(thread_probe)
";

    fn start(x: &Tensor) -> Result<Vec<f32>> {
        let launch = Launch {
            program: &Program::new("thread_probe", PROBE, &[]),
            kernel: "thread_probe",
            grid: [BLOCKS, 1, 1],
            threads: 32,
            memory: 0,
            arguments: &[Argument::from(x)],
            results: &[x.shape().clone()],
        };
        launch.run(&Device::Cpu)?[0].to_vec1()
    }

    #[test]
    fn threads_run_a_kernel_side_by_side() {
        let compiled = Barrier::new(THREADS);
        let run = |own: usize| -> Result<Vec<Vec<f32>>> {
            let x = Tensor::full(own as f32, 32 * BLOCKS, &Device::Cpu)?;
            let first = start(&x);
            compiled.wait();
            let others = (0..STARTS).map(|_| start(&x));
            std::iter::once(first).chain(others).collect()
        };
        let run = &run;
        let found: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|own| scope.spawn(move || run(own))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
        });
        for (own, results) in found.into_iter().enumerate() {
            let results = results.expect("emulated");
            assert_eq!(results, vec![vec![2.0 * own as f32; 32 * BLOCKS]; STARTS + 1], "{own}");
        }
    }
}
