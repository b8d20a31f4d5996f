//! The settings of a process for its ops ([`crate::dispatch`]).

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::LocalKey;

/// Implementation of the ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ops {
    /// Fused where there is one: f32 activations on the CPU and on NVIDIA GPUs.
    #[default]
    Fused,
    /// Composed of tensor ops on every device: what a GPU computes, to find faults on a CPU.
    Composed,
    /// The kernels for NVIDIA GPUs, run by the CPU: slow, to check them.
    #[cfg(feature = "emulate-cuda")]
    Emulated,
}

/// Type in which a device other than the CPU, or the CPU in its place, multiplies f32 activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Products {
    /// f32: 16-bit weights are widened first.
    #[default]
    Single,
    /// Both factors in the weight's 16-bit type, bf16 for f32 weights; sums in f32. Products of
    /// attention are one bf16 product on an NVIDIA GPU, composed ones TF32 where the device has it.
    Half,
}

/// The widest vector instructions of kernels on the CPU. Results have the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(u8)]
pub enum Simd {
    /// None but what the compiler finds.
    None,
    /// AVX2 with FMA, and AVX-VNNI where the machine has it.
    Avx2,
    /// All that the machine has.
    #[default]
    Widest,
}

static WIDEST: AtomicU8 = AtomicU8::new(Simd::Widest as u8);
static COMPOSED: AtomicBool = AtomicBool::new(false);
static ONE_PASS: AtomicBool = AtomicBool::new(false);
#[cfg(any(test, feature = "emulate-cuda"))]
static EMULATED: AtomicBool = AtomicBool::new(false);
#[cfg(not(test))]
static HALF: AtomicBool = AtomicBool::new(false);
// Tests run side by side on threads of one process.
#[cfg(test)]
thread_local! {
    static HALF: AtomicBool = const { AtomicBool::new(false) };
}

thread_local! {
    /// Whether the products that this thread begins may have rounded factors.
    static ROUNDED: Cell<bool> = const { Cell::new(false) };
    /// Rows that these products count as having at least.
    static LEAST_ROWS: Cell<usize> = const { Cell::new(0) };
}

/// What `f` computes on the calling thread, on a CPU with rounded factors where `rounded`: factors of large products become integers
/// of 12 to 16 bits, with one scale for up to 512 of a row. Sums are f32. It pays where a machine multiplies integers faster than f32.
pub fn with_rounded_products<R>(rounded: bool, f: impl FnOnce() -> R) -> R {
    with(&ROUNDED, rounded, f)
}

/// What `f` computes, where a product of few rows has rounded factors if one of `rows` has: a row's bits do not depend on how many
/// others are beside it.
pub(crate) fn rounded_as_of_rows<R>(rows: usize, f: impl FnOnce() -> R) -> R {
    with(&LEAST_ROWS, rows, f)
}

/// Runs `f` with a value, which is what it was afterwards, also after a panic.
fn with<T: Copy + 'static, R>(
    cell: &'static LocalKey<Cell<T>>,
    value: T,
    f: impl FnOnce() -> R,
) -> R {
    struct Back<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);
    impl<T: Copy + 'static> Drop for Back<T> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _back = Back(cell, cell.replace(value));
    f()
}

/// Whether [`with_rounded_products`] asks for rounded factors.
pub fn rounds_products() -> bool {
    ROUNDED.get()
}

/// Rows that [`rounded_as_of_rows`] has a product count as having at least.
pub(crate) fn least_rows() -> usize {
    LEAST_ROWS.get()
}

/// Chooses the implementation for all later ops of the process.
pub fn set_ops(ops: Ops) {
    COMPOSED.store(ops == Ops::Composed, Ordering::Relaxed);
    #[cfg(feature = "emulate-cuda")]
    EMULATED.store(ops == Ops::Emulated, Ordering::Relaxed);
}

/// Chooses the type of all later products of the process.
pub fn set_products(products: Products) {
    let half = products == Products::Half;
    #[cfg(not(test))]
    HALF.store(half, Ordering::Relaxed);
    #[cfg(test)]
    HALF.with(|own| own.store(half, Ordering::Relaxed));
    // Only a build with CUDA has the switch.
    #[cfg(feature = "cuda")]
    candle_core::cuda::set_gemm_reduced_precision_f32(half);
}

/// Whether attention's backward pass forms its scores once for all gradients where there is a kernel for that: compute capability
/// 9.0, bf16 products, heads of 64 and 128. It forms them twice unless a benchmark asks what once brings: blocks of the one kernel wait
/// for each other, and no GPU has run it so far.
pub fn set_one_pass_attention(one_pass: bool) {
    ONE_PASS.store(one_pass, Ordering::Relaxed);
}

/// What [`set_one_pass_attention`] chose.
pub(crate) fn one_pass_attention() -> bool {
    ONE_PASS.load(Ordering::Relaxed)
}

/// Bounds the vector instructions of all later ops of the process.
pub fn set_simd(widest: Simd) {
    WIDEST.store(widest as u8, Ordering::Relaxed);
}

/// Whether kernels may use these vector instructions.
pub(crate) fn may_use(simd: Simd) -> bool {
    WIDEST.load(Ordering::Relaxed) >= simd as u8
}

/// Whether products in 16 bits are asked for.
pub(crate) fn half_products() -> bool {
    #[cfg(not(test))]
    return HALF.load(Ordering::Relaxed);
    #[cfg(test)]
    HALF.with(|own| own.load(Ordering::Relaxed))
}

/// Whether the kernels for NVIDIA GPUs take CPU tensors.
#[cfg(any(test, feature = "emulate-cuda"))]
pub(crate) fn emulates() -> bool {
    EMULATED.load(Ordering::Relaxed)
}

/// Whether ops are composed on every device.
pub(crate) fn composed_only() -> bool {
    COMPOSED.load(Ordering::Relaxed)
}
