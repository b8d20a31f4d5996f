//! Products with a right operand of quantised blocks, as GGUF files store them.
//!
//! Every block of 32 values of a column is 4 to 8 bits a value with a scale. With few rows the
//! blocks of 16 columns are turned around as bytes and widened in registers, so each is read once;
//! with more, columns are widened to f32 in parts. Values, and the order in which they are added,
//! are those of the widened matrix: so are the bits of the product.

use std::ops::Range;

use half::f16;
use rayon::prelude::*;

use super::blocks::{Output, SCRATCH, block, depth_of};
use super::micro::{Destination, Isa};
use super::unpacked::{self, GROUP, MOST_ROWS, Operands, ROWS};
use super::{Mat, SMALLEST_TASK};

/// Values of a block.
pub(crate) const BLOCK: usize = 32;
/// Values that are widened at a time for a product with many rows.
const WIDENED: usize = 1 << 22;

/// Block layouts of GGML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockFormat {
    /// f16 scale; 16 bytes of 4 bits: low halves first, minus 8.
    Q4_0,
    /// f16 scale, f16 minimum; 16 bytes of 4 bits: low halves first.
    Q4_1,
    /// f16 scale; 32 signed bytes.
    Q8_0,
}

impl BlockFormat {
    /// Bytes of a block of 32 values.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
        }
    }

    /// The values of a block; rounded after the multiplication and after the addition.
    fn widen(self, block: &[u8], out: &mut [f32]) {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let scale = half(0);
        match self {
            Self::Q4_0 => {
                for (i, byte) in block[2..18].iter().enumerate() {
                    out[i] = (f32::from(byte & 15) - 8.0) * scale;
                    out[16 + i] = (f32::from(byte >> 4) - 8.0) * scale;
                }
            }
            Self::Q4_1 => {
                let least = half(2);
                for (i, byte) in block[4..20].iter().enumerate() {
                    out[i] = f32::from(byte & 15) * scale + least;
                    out[16 + i] = f32::from(byte >> 4) * scale + least;
                }
            }
            Self::Q8_0 => {
                for (out, byte) in out.iter_mut().zip(&block[2..34]) {
                    *out = f32::from(byte.cast_signed()) * scale;
                }
            }
        }
    }
}

/// A `[steps, columns]` operand whose columns lie one behind the other, each in blocks.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    data: &'a [u8],
    format: BlockFormat,
    /// Steps, a multiple of [`BLOCK`].
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl<'a> Blocks<'a> {
    /// The transposed view of an `[outputs, inputs]` matrix.
    pub(crate) fn transposed(
        data: &'a [u8],
        format: BlockFormat,
        outputs: usize,
        inputs: usize,
    ) -> Self {
        assert!(inputs.is_multiple_of(BLOCK), "a row does not consist of blocks");
        assert_eq!(data.len(), outputs * (inputs / BLOCK) * format.bytes(), "bytes of a matrix");
        Self { data, format, rows: inputs, cols: outputs }
    }

    /// Bytes from one column to the next.
    fn stride(&self) -> usize {
        self.rows / BLOCK * self.format.bytes()
    }

    pub(super) fn columns(self, range: Range<usize>) -> Self {
        let data = &self.data[range.start * self.stride()..range.end * self.stride()];
        Self { data, cols: range.len(), ..self }
    }

    /// Some steps of some columns as f32, column by column; steps begin and end with blocks.
    fn widen(&self, cols: Range<usize>, steps: Range<usize>, out: &mut [f32]) {
        let size = self.format.bytes();
        let column = steps.start / BLOCK * size..steps.end / BLOCK * size;
        for (col, out) in cols.zip(out.chunks_exact_mut(steps.len().max(1))) {
            let blocks = &self.data[col * self.stride()..][column.clone()];
            for (block, out) in blocks.chunks_exact(size).zip(out.chunks_exact_mut(BLOCK)) {
                self.format.widen(block, out);
            }
        }
    }

    /// All values, column by column.
    pub(crate) fn widened(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        let columns = (WIDENED / 16 / self.rows.max(1)).max(1);
        out.par_chunks_mut((columns * self.rows).max(1)).enumerate().for_each(|(index, out)| {
            let first = index * columns;
            self.widen(first..(first + columns).min(self.cols), 0..self.rows, out);
        });
        out
    }
}

/// `dst = a · b`, or `dst += a · b` with `accumulate`; `dst` is row-major without gaps.
pub(crate) fn matmul_quantised(dst: &mut [f32], a: Mat<'_>, b: Blocks<'_>, accumulate: bool) {
    assert_eq!(a.cols, b.rows, "inner sizes of a product differ");
    assert!(a.rows * b.cols <= dst.len(), "product leaves its destination");
    if a.rows <= MOST_ROWS {
        few_rows(Isa::detect(), dst, a, b, accumulate);
        return;
    }
    let columns = (WIDENED / b.rows.max(1)).max(1);
    for first in (0..b.cols).step_by(columns) {
        let part = b.columns(first..(first + columns).min(b.cols));
        let values = part.widened();
        let right = Mat::rows(&values, part.cols, b.rows, b.rows).t();
        super::matmul(&mut dst[first..], b.cols, a, right, accumulate, super::Threads::Pool);
    }
}

fn few_rows(isa: Isa, dst: &mut [f32], a: Mat<'_>, b: Blocks<'_>, accumulate: bool) {
    let whole = Output { at: dst.as_mut_ptr(), stride: b.cols, accumulate };
    let width = if a.rows * b.cols * a.cols < 2 * SMALLEST_TASK {
        b.cols.max(1)
    } else {
        unpacked::TASK_COLUMNS
    };
    (0..b.cols.div_ceil(width)).into_par_iter().for_each(|task| {
        let range = task * width..((task + 1) * width).min(b.cols);
        // SAFETY: the caller bounds the product to `dst`, of which tasks have disjoint columns.
        unsafe {
            let part = Output { at: whole.pointer().add(range.start), ..whole };
            columns(isa, part, a, b.columns(range));
        }
    });
}

/// One task's product, on the calling thread.
///
/// # Safety
/// `dst` is writable for `a.rows` x `b.cols` elements, and nobody else touches them; `a` has as
/// many columns as `b` rows, and at most [`MOST_ROWS`] rows.
pub(super) unsafe fn columns(isa: Isa, dst: Output, a: Mat<'_>, b: Blocks<'_>) {
    if a.cols == 0 {
        // SAFETY: passed on to the caller.
        unsafe { block::<f32>(isa, dst, a, Mat::rows(&[], 0, b.cols, b.cols)) };
        return;
    }
    assert_eq!(a.col_stride, 1, "rows of the left operand have gaps");
    let depth = depth_of(a.cols);
    for first_col in (0..b.cols).step_by(GROUP) {
        let cols = first_col..(first_col + GROUP).min(b.cols);
        for first_step in (0..a.cols).step_by(depth) {
            let steps = first_step..(first_step + depth).min(a.cols);
            let a = a.columns(steps.clone());
            for first_row in (0..a.rows).step_by(ROWS) {
                let rows = ROWS.min(a.rows - first_row);
                // SAFETY: row and column lie within the destination.
                let Output { at, stride, accumulate } =
                    unsafe { dst.part(first_row, first_col, first_step) };
                let dst = Destination { at, stride, rows, cols: cols.len(), accumulate };
                let a = a.t().columns(first_row..first_row + rows).t();
                // SAFETY: the views bound both operands; the caller vouches for the destination.
                unsafe { tile(isa, dst, a, b, cols.clone(), steps.clone()) };
            }
        }
    }
}

/// # Safety
/// The CPU has the instruction set; `dst` is writable for `a.rows` <= [`ROWS`] rows and the columns, at
/// most [`GROUP`].
unsafe fn tile(
    isa: Isa,
    dst: Destination,
    a: Mat<'_>,
    b: Blocks<'_>,
    cols: Range<usize>,
    steps: Range<usize>,
) {
    let (depth, a_strides) = (a.cols, (a.row_stride, a.col_stride));
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        let stride = b.stride();
        let first = cols.start * stride + steps.start / BLOCK * b.format.bytes();
        // Columns lie one behind the other: the next tile's bytes are fetched as this one's are
        // read, as many for every block.
        let before = steps.start / BLOCK * b.format.bytes();
        let whole = cols.end + cols.len() <= b.cols;
        let ahead = if whole { cols.len() * (stride + before) - before } else { 0 };
        let a = a.data.as_ptr();
        let at = b.data[first..].as_ptr();
        let operands = Operands { depth, a, a_strides, b: at, b_stride: stride, ahead };
        // SAFETY: all blocks of these columns and steps lie within the data.
        unsafe { x86::tile(b.format, operands, dst) };
        return;
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let wide = &mut scratch.wide;
        wide.resize(cols.len() * depth, 0.0);
        b.widen(cols, steps, wide);
        let (a, b) = (a.data.as_ptr(), wide.as_ptr());
        let operands = Operands { depth, a, a_strides, b, b_stride: depth, ahead: 0 };
        // SAFETY: the scratch holds `depth` steps of every column.
        unsafe { unpacked::tile(isa, operands, dst) };
    });
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m512, __m512i, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm_setr_epi32,
        _mm512_add_ps, _mm512_and_si512, _mm512_castsi128_si512, _mm512_cvtepi8_epi32,
        _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtph_ps,
        _mm512_extracti32x4_epi32, _mm512_fmadd_ps, _mm512_inserti32x4, _mm512_mul_ps,
        _mm512_permutexvar_epi32, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32,
        _mm512_setzero_ps, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_ps,
        _mm512_unpackhi_epi8, _mm512_unpackhi_epi16, _mm512_unpacklo_epi8, _mm512_unpacklo_epi16,
    };

    use super::super::micro::{Destination, store};
    use super::super::unpacked::{GROUP, Operands};
    use super::{BLOCK, BlockFormat};

    const Q4_0: u8 = 0;
    const Q4_1: u8 = 1;
    const Q8_0: u8 = 2;

    /// # Safety
    /// AVX-512F and AVX-512BW; the operands hold `dst.rows` <= 8 rows, each of them without gaps, and
    /// `dst.cols` <= 16 columns of `depth` steps in blocks; `dst` is writable for them.
    pub(super) unsafe fn tile(format: BlockFormat, operands: Operands<u8>, dst: Destination) {
        macro_rules! by_rows {
            ($format:ident) => {
                match dst.rows {
                    1 => columns::<1, $format>(operands, dst),
                    2 => columns::<2, $format>(operands, dst),
                    3 => columns::<3, $format>(operands, dst),
                    4 => columns::<4, $format>(operands, dst),
                    5 => columns::<5, $format>(operands, dst),
                    6 => columns::<6, $format>(operands, dst),
                    7 => columns::<7, $format>(operands, dst),
                    _ => columns::<8, $format>(operands, dst),
                }
            };
        }
        // SAFETY: passed on to the caller.
        unsafe {
            match format {
                BlockFormat::Q4_0 => by_rows!(Q4_0),
                BlockFormat::Q4_1 => by_rows!(Q4_1),
                BlockFormat::Q8_0 => by_rows!(Q8_0),
            }
        }
    }

    /// # Safety
    /// As [`tile`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn columns<const ROWS: usize, const FORMAT: u8>(
        operands: Operands<u8>,
        dst: Destination,
    ) {
        let (bytes, head) = match FORMAT {
            Q4_0 => (18, 2),
            Q4_1 => (20, 4),
            _ => (34, 2),
        };
        let starts: [*const u8; GROUP] = operands.starts(0, dst.cols);
        let rows: [*const f32; ROWS] =
            std::array::from_fn(|row| operands.a.wrapping_add(row * operands.a_strides.0));
        let mut acc = [_mm512_setzero_ps(); ROWS];
        for block in 0..operands.depth / BLOCK {
            let at = block * bytes;
            // SAFETY: the block lies within every column and has more than four bytes, and its
            // steps within every row; the memory ahead is only fetched.
            unsafe {
                if operands.ahead > 0 {
                    let next = starts[0].wrapping_add(operands.ahead + at * GROUP);
                    for line in 0..(bytes * GROUP).div_ceil(64) {
                        _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line * 64).cast());
                    }
                }
                let scales = scales::<FORMAT>(&starts, at);
                let mut low = turned(&starts, at + head);
                let mut high = low;
                if FORMAT == Q8_0 {
                    high = turned(&starts, at + head + 16);
                } else {
                    let mask = _mm512_set1_epi32(0x0f0f_0f0f);
                    for (low, high) in low.iter_mut().zip(&mut high) {
                        *high = _mm512_and_si512(_mm512_srli_epi32::<4>(*low), mask);
                        *low = _mm512_and_si512(*low, mask);
                    }
                }
                add::<ROWS, FORMAT>(&rows, block * BLOCK, &low, &scales, &mut acc);
                add::<ROWS, FORMAT>(&rows, block * BLOCK + 16, &high, &scales, &mut acc);
            }
        }
        for (row, acc) in acc.into_iter().enumerate() {
            let mut values = [0.0; GROUP];
            // SAFETY: 16 values fit, and the row lies within the destination.
            unsafe {
                _mm512_storeu_ps(values.as_mut_ptr(), acc);
                store(&values, dst, row, 0);
            }
        }
    }

    /// Scale and minimum of a block of every column.
    ///
    /// # Safety
    /// Four bytes are readable behind every start plus `at`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales<const FORMAT: u8>(starts: &[*const u8; GROUP], at: usize) -> (__m512, __m512) {
        macro_rules! pair {
            ($i:expr) => {
                // SAFETY: passed on to the caller.
                unsafe { starts[$i].add(at).cast::<i32>().read_unaligned() }
            };
        }
        // One by one: gathering takes longer.
        let mut pairs =
            _mm512_castsi128_si512(_mm_setr_epi32(pair!(0), pair!(1), pair!(2), pair!(3)));
        let four = _mm_setr_epi32(pair!(4), pair!(5), pair!(6), pair!(7));
        pairs = _mm512_inserti32x4::<1>(pairs, four);
        let four = _mm_setr_epi32(pair!(8), pair!(9), pair!(10), pair!(11));
        pairs = _mm512_inserti32x4::<2>(pairs, four);
        let four = _mm_setr_epi32(pair!(12), pair!(13), pair!(14), pair!(15));
        pairs = _mm512_inserti32x4::<3>(pairs, four);
        let scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
        let least = if FORMAT == Q4_1 {
            _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs)))
        } else {
            _mm512_setzero_ps()
        };
        (scale, least)
    }

    /// 16 bytes of 16 columns: quarter `j` of vector `i` holds step `4 i + j` of every column.
    ///
    /// # Safety
    /// 16 bytes are readable behind every start plus `at`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn turned(starts: &[*const u8; GROUP], at: usize) -> [__m512i; 4] {
        macro_rules! column {
            ($i:expr) => {
                // SAFETY: passed on to the caller.
                unsafe { _mm_loadu_si128(starts[$i].add(at).cast()) }
            };
        }
        // Quarter `l` of vector `z` is column `4 l + z`.
        macro_rules! four {
            ($z:expr) => {{
                let v = _mm512_castsi128_si512(column!($z));
                let v = _mm512_inserti32x4::<1>(v, column!(4 + $z));
                let v = _mm512_inserti32x4::<2>(v, column!(8 + $z));
                _mm512_inserti32x4::<3>(v, column!(12 + $z))
            }};
        }
        let (a, b, c, d) = (four!(0), four!(1), four!(2), four!(3));
        let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        // Word `j` of quarter `l` holds one step of columns `4 l` to `4 l + 3`.
        [
            _mm512_permutexvar_epi32(order, _mm512_unpacklo_epi16(ab, cd)),
            _mm512_permutexvar_epi32(order, _mm512_unpackhi_epi16(ab, cd)),
            _mm512_permutexvar_epi32(order, _mm512_unpacklo_epi16(ab_high, cd_high)),
            _mm512_permutexvar_epi32(order, _mm512_unpackhi_epi16(ab_high, cd_high)),
        ]
    }

    /// Adds 16 steps of 16 columns to every row's sums.
    ///
    /// # Safety
    /// The steps lie within every row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn add<const ROWS: usize, const FORMAT: u8>(
        rows: &[*const f32; ROWS],
        first_step: usize,
        turned: &[__m512i; 4],
        scales: &(__m512, __m512),
        acc: &mut [__m512; ROWS],
    ) {
        for (i, four) in turned.iter().enumerate() {
            let quarters = [
                _mm512_extracti32x4_epi32::<0>(*four),
                _mm512_extracti32x4_epi32::<1>(*four),
                _mm512_extracti32x4_epi32::<2>(*four),
                _mm512_extracti32x4_epi32::<3>(*four),
            ];
            for (j, quarter) in quarters.into_iter().enumerate() {
                let values = widened::<FORMAT>(quarter, scales);
                for (row, acc) in rows.iter().zip(acc.iter_mut()) {
                    // SAFETY: passed on to the caller.
                    let x = unsafe { *row.add(first_step + 4 * i + j) };
                    *acc = _mm512_fmadd_ps(_mm512_set1_ps(x), values, *acc);
                }
            }
        }
    }

    /// One step of 16 columns as f32.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn widened<const FORMAT: u8>(quants: __m128i, (scale, least): &(__m512, __m512)) -> __m512 {
        match FORMAT {
            Q8_0 => _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(quants)), *scale),
            Q4_0 => {
                let quants = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(quants));
                _mm512_mul_ps(_mm512_sub_ps(quants, _mm512_set1_ps(8.0)), *scale)
            }
            _ => {
                let quants = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(quants));
                _mm512_add_ps(_mm512_mul_ps(quants, *scale), *least)
            }
        }
    }
}

#[cfg(test)]
mod tests;
