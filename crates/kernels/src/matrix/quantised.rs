//! Quantised blocks in main memory.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::{Result, bail};
use rayon::prelude::*;

use super::BlockFormat;
use crate::gemm::quantised::{FixedRows, matmul_quantised};
use crate::gemm::{BLOCK, Blocks, GROUP, Mat, held_bytes, put_side_by_side};
use crate::large_pages::WeightBytes;

/// An `[O, I]` matrix of quantised blocks.
#[derive(Debug)]
pub struct QuantisedMatrix {
    format: BlockFormat,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// Of 16 rows side by side.
    bytes: WeightBytes,
}

/// Bytes of stored rows that are put side by side at a time.
const PIECE: usize = 1 << 20;

impl QuantisedMatrix {
    /// From blocks as a file holds them, row after row.
    ///
    /// # Errors
    /// - a row does not consist of whole blocks, or the bytes are not those of the shape
    pub fn new(format: BlockFormat, outputs: usize, inputs: usize, bytes: &[u8]) -> Result<Self> {
        let row = inputs / format.values() * format.bytes();
        if outputs.checked_mul(row) != Some(bytes.len()) {
            bail!("{} bytes are no [{outputs}, {inputs}] matrix of {}", bytes.len(), format.name());
        }
        Self::read(format, outputs, inputs, |rows| {
            Ok(Cow::Borrowed(&bytes[rows.start * row..rows.end * row]))
        })
    }

    /// From rows as a file holds them, some at a time on every thread, so that the whole is never held
    /// twice.
    ///
    /// # Errors
    /// - those of `read`, which gives the blocks of a range of rows; a row does not consist of whole
    ///   blocks, or the bytes are not those of its rows
    pub fn read<'a, E: From<candle_core::Error> + Send>(
        format: BlockFormat,
        outputs: usize,
        inputs: usize,
        read: impl Fn(Range<usize>) -> std::result::Result<Cow<'a, [u8]>, E> + Sync,
    ) -> std::result::Result<Self, E> {
        let wrong = |what: String| E::from(candle_core::Error::Msg(what));
        let Some(held) = held_bytes(format, outputs, inputs) else {
            let name = format.name();
            return Err(wrong(format!("[{outputs}, {inputs}] is no matrix of blocks of {name}")));
        };
        let row = inputs / format.values() * format.bytes();
        let mut bytes = WeightBytes::zeroed(held);
        let groups = outputs.div_ceil(GROUP);
        let together = (PIECE / (GROUP * row).max(1)).max(1);
        let pieces = bytes.par_chunks_mut((together * held / groups.max(1)).max(1)).enumerate();
        pieces.try_for_each(|(piece, out)| {
            let first = piece * together * GROUP;
            let rows = first..(first + together * GROUP).min(outputs);
            let stored = read(rows.clone())?;
            if stored.len() != rows.len() * row {
                let found = stored.len();
                return Err(wrong(format!("{found} bytes for {} rows of {row}", rows.len())));
            }
            put_side_by_side(format, inputs, &stored, out);
            Ok(())
        })?;
        Ok(Self { format, outputs, inputs, bytes })
    }

    /// From the bytes of [`Self::side_by_side`].
    ///
    /// # Errors
    /// - the bytes are not those of the shape
    pub fn from_side_by_side(
        format: BlockFormat,
        outputs: usize,
        inputs: usize,
        bytes: Vec<u8>,
    ) -> Result<Self> {
        if held_bytes(format, outputs, inputs) != Some(bytes.len()) {
            bail!("{} bytes are no [{outputs}, {inputs}] matrix of {}", bytes.len(), format.name());
        }
        Ok(Self { format, outputs, inputs, bytes: WeightBytes::Own(bytes) })
    }

    /// The blocks as they lie in memory, for [`Self::from_side_by_side`].
    pub fn side_by_side(&self) -> &[u8] {
        &self.bytes
    }

    /// Format, outputs and inputs.
    pub fn layout(&self) -> (BlockFormat, usize, usize) {
        (self.format, self.outputs, self.inputs)
    }

    /// `W x` for activations that were rounded before: `x = code · scale`, with a scale for every 32
    /// codes. What [`Matrix::linear`](super::Matrix::linear) computes after its own rounding.
    ///
    /// # Shapes
    /// - `codes`: `[I]`, `scales`: `[I / 32]` → `[O]`
    ///
    /// # Errors
    /// - the lengths are others, or a code is -128
    pub fn of_codes(&self, codes: &[i8], scales: &[f32]) -> Result<Vec<f32>> {
        if codes.len() != self.inputs || codes.len() != scales.len() * BLOCK {
            let (codes, scales) = (codes.len(), scales.len());
            bail!("{codes} codes and {scales} scales for a matrix of {} inputs", self.inputs);
        }
        if codes.contains(&i8::MIN) {
            bail!("codes of activations are -127 and more");
        }
        let mut out = vec![0.0; self.outputs];
        matmul_quantised(&mut out, &FixedRows::of_codes(codes, scales), self.blocks(), false);
        Ok(out)
    }

    /// `W x` of rows without gaps, `[R, I]` → `[R, O]`: what the CPU computes, on whatever device a matrix is held.
    pub(crate) fn product(&self, x: &[f32], rows: usize) -> Vec<f32> {
        let mut out = vec![0.0; rows * self.outputs];
        let fixed = FixedRows::of(Mat::rows(x, rows, self.inputs, self.inputs));
        matmul_quantised(&mut out, &fixed, self.blocks(), false);
        out
    }

    /// One row in f32, which lies within the matrix.
    pub(crate) fn row(&self, row: usize) -> Vec<f32> {
        self.blocks().column(row)
    }

    pub(super) fn blocks(&self) -> Blocks<'_> {
        Blocks::transposed(&self.bytes, self.format, self.outputs, self.inputs)
    }

    pub(super) fn check(&self, rows: &[u32]) -> Result<()> {
        match rows.iter().find(|row| **row as usize >= self.outputs) {
            Some(row) => bail!("row {row} lies outside a matrix of {} rows", self.outputs),
            None => Ok(()),
        }
    }

    pub(super) fn select(&self, rows: &[u32]) -> Result<Self> {
        self.check(rows)?;
        let &Self { format, inputs, .. } = self;
        let bytes = WeightBytes::Own(self.blocks().gathered(rows));
        Ok(Self { format, outputs: rows.len(), inputs, bytes })
    }

    pub(super) fn columns(&self, inputs: Range<usize>) -> Result<Self> {
        let &Self { format, outputs, inputs: width, .. } = self;
        let values = format.values();
        let cut = [inputs.start, inputs.end].iter().any(|end| !end.is_multiple_of(values));
        if cut || inputs.start > inputs.end || inputs.end > width {
            bail!("inputs {inputs:?} of {width} are no whole blocks of {values} of a matrix");
        }
        let groups = outputs.div_ceil(GROUP);
        let group = self.bytes.len() / groups.max(1);
        let size = group / (width / values).max(1);
        let part = inputs.start / values * size..inputs.end / values * size;
        let mut bytes = Vec::with_capacity(groups * part.len());
        for group in self.bytes.chunks_exact(group.max(1)) {
            bytes.extend_from_slice(&group[part.clone()]);
        }
        let bytes = WeightBytes::Own(bytes);
        Ok(Self { format, outputs, inputs: inputs.len(), bytes })
    }
}
