//! Kernels on a CPU, to check them: their text becomes a shared library by way of a C++ compiler.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;
use std::rc::Rc;

use candle_core::{CpuStorage, DType, Result, Shape, Storage, Tensor, WithDType, bail};
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
    ON.set(true);
    let _off = crate::at_end::AtEnd(|| ON.set(false));
    f()
}

/// The emulator keeps a block's state in variables of the library, so every thread has its own copy.
fn library(program: &Program) -> Result<Rc<libloading::Library>> {
    if let Some(library) = LOADED.with_borrow(|all| all.get(&program.name).cloned()) {
        return Ok(library);
    }
    let text = format!("{EMULATOR}\n{}", program.text);
    let kept = kept(&text);
    // One of another machine, or a damaged one, is made anew.
    let known = kept.as_deref().and_then(|kept| {
        let folder = tempfile::tempdir().ok()?;
        let own = folder.path().join("kernels.so");
        std::fs::copy(kept, &own).ok()?;
        load(&own).ok()
    });
    let library = Rc::new(match known {
        Some(library) => library,
        None => compiled(&text, kept.as_deref())?,
    });
    LOADED.with_borrow_mut(|all| all.insert(program.name.clone(), Rc::clone(&library)));
    Ok(library)
}

const FLAGS: [&str; 8] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    // Hardened jumps would take one to another fibre's stack for a mistake.
    "-U_FORTIFY_SOURCE",
    // A read of 16 bytes that is not aligned ends the test, as it ends a GPU's process.
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
];

fn load(built: &Path) -> Result<libloading::Library> {
    // SAFETY: the library is compiled from our own text and runs nothing when it is loaded.
    unsafe { libloading::Library::new(built) }.map_err(candle_core::Error::wrap)
}

fn compiled(text: &str, kept: Option<&Path>) -> Result<libloading::Library> {
    let folder = tempfile::tempdir()?;
    let (source, built) = (folder.path().join("kernels.cpp"), folder.path().join("kernels.so"));
    std::fs::write(&source, text)?;
    compile(&source, &built)?;
    if let Some(kept) = kept {
        keep(&built, kept);
    }
    load(&built)
}

/// Where a library is kept for other processes, beside the program that runs; compiling takes seconds.
fn kept(text: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let mut hasher = DefaultHasher::new();
    (text, FLAGS, std::env::consts::ARCH).hash(&mut hasher);
    let name = format!("{:016x}.so", hasher.finish());
    Some(program.parent()?.join("emulated").join(name))
}

/// Nothing is kept where nothing can be written.
fn keep(built: &Path, kept: &Path) {
    let Some(folder) = kept.parent() else { return };
    let written = || {
        std::fs::create_dir_all(folder)?;
        let mut whole = tempfile::NamedTempFile::new_in(folder)?;
        std::io::copy(&mut std::fs::File::open(built)?, &mut whole)?;
        whole.as_file().sync_all()?;
        whole.persist(kept).map_err(|error| error.error)
    };
    let _: std::io::Result<_> = written();
}

fn compile(source: &Path, built: &Path) -> Result<()> {
    let made = Command::new("c++").args(FLAGS).arg("-o").args([built, source]).output()?;
    if !made.status.success() {
        bail!("c++: {}", String::from_utf8_lossy(&made.stderr));
    }
    Ok(())
}

type Start = unsafe extern "C" fn(*const u32, u32, u32, *mut *mut c_void);

type Waits = unsafe extern "C" fn() -> u64;
type Memory = unsafe extern "C" fn(usize) -> *mut c_void;
type Release = unsafe extern "C" fn(*mut c_void, usize);

/// Bytes of which a kernel's memory has a multiple.
const UNIT: usize = 16;

/// Values that a kernel reads or writes: an access after their end ends the process, and what is never written shows.
struct Guarded<'a> {
    code: &'a libloading::Library,
    memory: NonNull<c_void>,
    /// Bytes of the memory, of which the first `within` are before the values.
    bytes: usize,
    within: usize,
}

impl<'a> Guarded<'a> {
    fn new(library: &'a libloading::Library, bytes: usize) -> Result<Self> {
        // SAFETY: emulator.h defines the symbol with this type.
        let memory = unsafe { library.get::<Memory>(b"emulator_memory") };
        let memory = memory.map_err(candle_core::Error::wrap)?;
        // SAFETY: it takes any number.
        let Some(memory) = NonNull::new(unsafe { memory(bytes) }) else {
            bail!("no memory for {bytes} bytes of a kernel")
        };
        Ok(Self { code: library, memory, bytes, within: 0 })
    }

    /// A copy that begins as far after a multiple of [`UNIT`] as the values do.
    fn of<T: Copy>(library: &'a libloading::Library, values: &[T]) -> Result<Self> {
        let (within, bytes) = (values.as_ptr().addr() % UNIT, size_of_val(values));
        let mut own = Self::new(library, within + bytes)?;
        own.within = within;
        // SAFETY: the memory is as large as that, and new.
        unsafe { own.first().copy_from(values.as_ptr().cast(), bytes) };
        Ok(own)
    }

    /// Where the values begin.
    fn first(&self) -> *mut u8 {
        self.memory.cast::<u8>().as_ptr().wrapping_add(self.within)
    }

    /// To numbers of whatever bits.
    fn copy_to<T: Copy>(&self, values: &mut [T]) {
        let bytes = size_of_val(values).min(self.bytes - self.within);
        // SAFETY: both are as large as that, and no kernel runs.
        unsafe { values.as_mut_ptr().cast::<u8>().copy_from(self.first(), bytes) };
    }

    fn tensor(&self, dtype: DType, shape: &Shape) -> Result<Tensor> {
        match dtype {
            DType::BF16 => self.values(bf16::ZERO, shape),
            DType::U32 => self.values(0_u32, shape),
            _ => self.values(0.0_f32, shape),
        }
    }

    fn values<T: WithDType>(&self, zero: T, shape: &Shape) -> Result<Tensor> {
        let mut values = vec![zero; shape.elem_count()];
        self.copy_to(&mut values);
        Tensor::from_vec(values, shape, &candle_core::Device::Cpu)
    }
}

impl Drop for Guarded<'_> {
    fn drop(&mut self) {
        // SAFETY: emulator.h defines the symbol with this type; the memory is its own.
        let release = unsafe { self.code.get::<Release>(b"emulator_free") };
        if let Ok(release) = release {
            // SAFETY: as above; nobody uses the memory any more.
            unsafe { release(self.memory.as_ptr(), self.bytes) };
        }
    }
}

/// A tensor's values as a kernel reads them.
fn guarded<'a>(
    library: &'a libloading::Library,
    kernel: &str,
    tensor: &Tensor,
) -> Result<Guarded<'a>> {
    let (storage, layout) = tensor.storage_and_layout();
    let first = layout.start_offset();
    let own = first..first + layout.shape().elem_count();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => Guarded::of(library, &values[own]),
        Storage::Cpu(CpuStorage::BF16(values)) => Guarded::of(library, &values[own]),
        Storage::Cpu(CpuStorage::U32(values)) => Guarded::of(library, &values[own]),
        Storage::Cpu(CpuStorage::U8(values)) => Guarded::of(library, &values[own]),
        _ => bail!("{kernel}: an argument is neither f32, bf16, u32 nor u8"),
    }
}

/// `into`: the kernel's last argument, which it writes.
pub(super) fn run(
    launch: &Launch<'_>,
    results: &[(Shape, DType)],
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
    // Eight bytes hold any argument.
    let (mut values, mut read): (Vec<u64>, Vec<Guarded<'_>>) = (Vec::new(), Vec::new());
    let address = |memory: &Guarded<'_>| memory.first().addr() as u64;
    for argument in launch.arguments {
        values.push(match argument {
            Argument::Tensor(tensor) => {
                read.push(guarded(&library, launch.kernel, tensor)?);
                read.last().map_or(0, address)
            }
            Argument::U32(value) => u64::from(*value),
            Argument::Count(value) => *value as u64,
            Argument::F32(value) => u64::from(value.to_bits()),
        });
    }
    let made: Vec<Guarded<'_>> = results
        .iter()
        .map(|(shape, of)| Guarded::new(&library, shape.elem_count() * of.size_in_bytes()))
        .collect::<Result<_>>()?;
    values.extend(made.iter().map(address));
    let written = into.as_deref().map(|into| Guarded::of(&library, into)).transpose()?;
    values.extend(written.as_ref().map(address));
    let mut pointers: Vec<*mut c_void> =
        values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
    let grid = launch.grid.map(|blocks| blocks as u32);
    // SAFETY: the arguments are those of the kernel's signature (their number and types are what the
    // tests are there to find out); copies of the tensors and memory for the results live until it returns.
    unsafe {
        start(grid.as_ptr(), launch.threads as u32, launch.memory as u32, pointers.as_mut_ptr());
    }
    if launch.program.overlaps {
        if launch.program.text.contains("__restrict__") {
            bail!(
                "{}: a compiler may read what is `__restrict__` ahead of the wait",
                launch.kernel
            );
        }
        // SAFETY: emulator.h defines the symbol with this type.
        let waits = unsafe { library.get::<Waits>(b"emulator_waits") };
        // SAFETY: it reads a number of this thread's library.
        let waits = unsafe { waits.map_err(candle_core::Error::wrap)?() };
        let threads = (launch.grid.iter().product::<usize>() * launch.threads) as u64;
        if waits != threads {
            bail!("{}: {waits} of {threads} threads wait for the kernels before", launch.kernel);
        }
    }
    if let (Some(into), Some(written)) = (into, &written) {
        written.copy_to(into);
    }
    made.iter().zip(results).map(|(memory, (shape, of))| memory.tensor(*of, shape)).collect()
}

#[cfg(test)]
mod tests;
