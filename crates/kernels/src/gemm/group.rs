//! Products of one left operand with several right ones.

use half::{bf16, f16};

use super::blocks::{Output, block};
use super::factors::Factors;
use super::micro::Isa;
use super::quantised::{self, Blocks, FixedRows, Kernel, matmul_quantised};
use super::{Mat, Room, SMALLEST_TASK, Threads, matmul, unpacked};
use crate::threads::split;

/// A right operand in one of the storage types.
#[derive(Clone, Copy)]
pub(crate) enum Right<'a> {
    F32(Mat<'a, f32>),
    Bf16(Mat<'a, bf16>),
    F16(Mat<'a, f16>),
    Quantised(Blocks<'a>),
}

/// Evaluates an expression with the operand, whatever its type.
macro_rules! for_each_type {
    ($right:expr, $b:ident => $product:expr, $q:ident => $quantised:expr) => {
        match $right {
            Right::F32($b) => $product,
            Right::Bf16($b) => $product,
            Right::F16($b) => $product,
            Right::Quantised($q) => $quantised,
        }
    };
}

impl Right<'_> {
    fn cols(&self) -> usize {
        for_each_type!(self, b => b.cols, q => q.cols)
    }

    fn fits(&self, isa: Isa, a: Mat<'_>) -> bool {
        for_each_type!(
            self,
            b => a.cols == b.rows && unpacked::fits(isa, a, *b),
            q => a.cols == q.rows && a.rows <= unpacked::MOST_ROWS
        )
    }
}

/// One product and its destination, row-major without gaps.
pub(crate) struct Product<'a> {
    pub(crate) dst: Room<'a>,
    pub(crate) right: Right<'a>,
    /// Whether the product is added to what is there.
    pub(crate) accumulate: bool,
}

/// All products; with few rows in one parallel step, because waking a thread costs as much as reading a small weight.
///
/// Destinations are written as by [`matmul`]. Every element has the bits that it or [`matmul_quantised`] gives it.
pub(crate) fn matmul_each(a: Mat<'_>, products: &mut [Product<'_>]) {
    let total: usize = products.iter().map(|product| product.right.cols()).sum();
    let factors = Factors::detect();
    let isa = factors.isa;
    let apart = !products.iter().all(|product| product.right.fits(isa, a))
        || a.rows * total * a.cols < 2 * SMALLEST_TASK
        || rayon::current_num_threads() == 1;
    let quantised = |product: &Product<'_>| matches!(product.right, Right::Quantised(_));
    let fixed =
        if products.iter().any(quantised) { FixedRows::of(a) } else { FixedRows::default() };
    if apart {
        for Product { dst, right, accumulate } in products {
            for_each_type!(
                *right,
                b => matmul(dst.from(0), b.cols, a, b, *accumulate, Threads::Pool),
                q => matmul_quantised(dst.from(0), &fixed, q, *accumulate)
            );
        }
        return;
    }
    let mut tasks = Vec::with_capacity(total / unpacked::TASK_COLUMNS + products.len());
    for Product { dst, right, accumulate } in products {
        let cols = right.cols();
        assert!(a.rows * cols <= dst.len, "product leaves its destination");
        let (at, accumulate) = (dst.at, *accumulate);
        let whole = Output { at, stride: cols, accumulate, diagonal: None };
        for first in (0..cols).step_by(unpacked::TASK_COLUMNS) {
            tasks.push((whole, *right, first..(first + unpacked::TASK_COLUMNS).min(cols)));
        }
    }
    let kernel = Kernel::detect();
    split(tasks.len(), |task| {
        let (whole, right, range) = tasks[task].clone();
        // SAFETY: the assertion above bounds every product to its destination, of which the tasks
        // have disjoint columns.
        unsafe {
            let part = Output { at: whole.pointer().add(range.start), ..whole };
            for_each_type!(
                right,
                b => block(factors, part, a, b.columns(range)),
                q => quantised::columns(kernel, part, (&fixed, 0..a.rows), q.columns(range))
            );
        }
    });
}
