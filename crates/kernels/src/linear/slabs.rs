//! Products of f32 rows with quantised blocks as with the f32 values that they stand for: some rows of the weight, a
//! slab, are widened into one buffer and multiplied, then the next.
//!
//! Results have the bits of the product with the whole widened weight. Outputs are independent of each other. Sums over
//! outputs (`g W`) are cut where that product adds to its destination, too. Factors are rounded where that product rounds them.

use crate::gemm::quantised::steps_of_a_sum;
use crate::gemm::{Blocks, Mat, Room, Threads, matmul_as, rounds};

/// Values of a slab, as far as a part of a sum allows.
const SLAB_VALUES: usize = 1 << 22;

/// Bytes of the buffer that a product with quantised blocks `[O, I]` widens them in.
pub fn slab_bytes(outputs: usize, inputs: usize) -> usize {
    slab_rows(outputs, inputs).min(outputs) * inputs * size_of::<f32>()
}

/// Rows of a slab: whole parts of a sum over outputs.
fn slab_rows(outputs: usize, inputs: usize) -> usize {
    let part = steps_of_a_sum(outputs);
    (SLAB_VALUES / (part * inputs).max(1)).max(1) * part
}

/// `out[R, O] = x[R, I] · Wᵀ`, or added to what is there.
pub(super) fn product_nt_into(
    mut out: Room<'_>,
    x: &[f32],
    blocks: Blocks<'_>,
    (inputs, outputs): (usize, usize),
    accumulate: bool,
) {
    let rows = x.len() / inputs.max(1);
    if rows == 0 {
        return;
    }
    let x = Mat::rows(x, rows, inputs, inputs);
    let rounded = rounds((rows, inputs, outputs));
    each_slab(blocks, (inputs, outputs), |first, slab| {
        let w = Mat::rows(slab, slab.len() / inputs, inputs, inputs).t();
        matmul_as(rounded, out.from(first), outputs, x, w, accumulate, Threads::Pool);
    });
}

/// `out[R, I] = g[R, O] · W`, or added to what is there.
pub(super) fn product_nn_into(
    mut out: Room<'_>,
    g: &[f32],
    blocks: Blocks<'_>,
    (inputs, outputs): (usize, usize),
    accumulate: bool,
) {
    let rows = g.len() / outputs.max(1);
    if rows == 0 || inputs == 0 {
        return;
    }
    let part = steps_of_a_sum(outputs);
    let rounded = rounds((rows, outputs, inputs));
    each_slab(blocks, (inputs, outputs), |first, slab| {
        for (index, slab) in slab.chunks(part * inputs).enumerate() {
            let (first, steps) = (first + index * part, slab.len() / inputs);
            let g = Mat::rows(&g[first..], rows, steps, outputs);
            let w = Mat::rows(slab, steps, inputs, inputs);
            matmul_as(rounded, out.from(0), inputs, g, w, accumulate || first > 0, Threads::Pool);
        }
    });
}

/// Hands on the values of each slab with its first row.
fn each_slab(
    blocks: Blocks<'_>,
    (inputs, outputs): (usize, usize),
    mut multiply: impl FnMut(usize, &[f32]),
) {
    let each = slab_rows(outputs, inputs);
    let mut buffer = vec![0.0; each.min(outputs) * inputs];
    for first in (0..outputs).step_by(each) {
        let rows = first..(first + each).min(outputs);
        let slab = &mut buffer[..rows.len() * inputs];
        blocks.widen_columns(rows, slab);
        multiply(first, slab);
    }
}
