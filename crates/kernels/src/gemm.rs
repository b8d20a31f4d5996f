//! Strided f32 matrix products, a bounds-checked door to the `gemm` crate.

use gemm::Parallelism;

/// A read-only strided matrix: element `(i, j)` is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A row-major matrix whose rows are `row_stride` values apart.
    pub(crate) fn rows(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let mat = Self { data, rows, cols, row_stride, col_stride: 1 };
        assert!(mat.last_index() <= data.len(), "matrix view leaves its slice");
        mat
    }

    /// The transposed view of the same memory.
    pub(crate) fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    fn last_index(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride + 1
    }
}

/// Whether a product may use the thread pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The calling thread only: for tiles inside an already parallel loop.
    One,
    /// The whole rayon pool.
    Pool,
}

/// `dst = a · b`, or `dst += a · b` with `accumulate`; `dst` has rows `dst_stride` apart.
pub(crate) fn matmul(
    dst: &mut [f32],
    dst_stride: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    accumulate: bool,
    threads: Threads,
) {
    assert_eq!(a.cols, b.rows, "inner sizes of a product differ");
    let (m, n, k) = (a.rows, b.cols, a.cols);
    if m == 0 || n == 0 {
        return;
    }
    assert!((m - 1) * dst_stride + n <= dst.len(), "product leaves its destination");
    assert!(dst_stride >= n, "rows of the destination overlap");
    let parallelism = match threads {
        Threads::Pool if rayon::current_num_threads() > 1 => {
            Parallelism::Rayon(rayon::current_num_threads())
        }
        _ => Parallelism::None,
    };
    // SAFETY: `Mat::rows` and the assertions above bound every element that the product reads
    // (m x k, k x n) and writes (m x n, rows disjoint) to the slices, and `dst` is borrowed
    // mutably, so nothing aliases it.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            dst_stride as isize,
            accumulate,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0_f32,
            1.0_f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_of_strided_views_matches_triple_loop() {
        let a: Vec<f32> = (0..5 * 7).map(|i| i as f32 * 0.1 - 1.0).collect();
        let b: Vec<f32> = (0..3 * 9).map(|i| i as f32 * 0.2 - 2.0).collect();
        let mut dst = vec![1.0_f32; 5 * 4];
        // a: 5 x 6 of a stride-7 buffer, b: (3 x 6 of stride 9) transposed.
        matmul(&mut dst, 4, Mat::rows(&a, 5, 6, 7), Mat::rows(&b, 3, 6, 9).t(), true, Threads::One);
        for i in 0..5 {
            for j in 0..3 {
                let want: f32 = 1.0 + (0..6).map(|k| a[i * 7 + k] * b[j * 9 + k]).sum::<f32>();
                assert!((dst[i * 4 + j] - want).abs() < 1e-4);
            }
            assert_eq!(dst[i * 4 + 3].to_bits(), 1.0_f32.to_bits());
        }
    }
}
