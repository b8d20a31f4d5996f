//! Constant-size ring of the draft's own keys and values.
//!
//! The slot of token `i` is `i mod slots`; keys are stored rotated, so slots never change. With
//! `slots = W + 1` it holds exactly what the newest token may see, whatever the context.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use longdraft_models::target_model::KeyValues;

use crate::error::Result;

/// Keys and values of the newest tokens.
pub(super) struct DraftWindow {
    k: Tensor,
    v: Tensor,
    slots: usize,
    /// Tokens pushed or skipped so far: the next token's index.
    next: usize,
    /// Index of the oldest token that was pushed.
    first: usize,
}

impl DraftWindow {
    /// An empty ring of `slots` tokens, `[slots, K, D]` for keys and for values.
    pub(super) fn new(
        slots: usize,
        kv_heads: usize,
        head_dim: usize,
        device: &Device,
    ) -> Result<Self> {
        let zeros = || Tensor::zeros((slots, kv_heads, head_dim), DType::F32, device);
        Ok(Self { k: zeros()?, v: zeros()?, slots, next: 0, first: 0 })
    }

    /// Tokens it can hold.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Forgets everything; the next token pushed has index `next`.
    pub(super) fn restart_at(&mut self, next: usize) {
        self.next = next;
        self.first = next;
    }

    /// Indices of the tokens that are held.
    pub(super) fn held(&self) -> Range<usize> {
        self.first.max(self.next.saturating_sub(self.slots))..self.next
    }

    /// Appends keys and values of the next tokens, `[T, K, D]` each, `T ≤ slots`.
    pub(super) fn push(&mut self, new: &KeyValues) -> Result<()> {
        let tokens = new.k.dim(0)?;
        let mut done = 0;
        while done < tokens {
            let slot = (self.next + done) % self.slots;
            let run = (tokens - done).min(self.slots - slot);
            for (ring, new) in [(&self.k, &new.k), (&self.v, &new.v)] {
                ring.slice_set(&new.narrow(0, done, run)?.contiguous()?, 0, slot)?;
            }
            done += run;
        }
        self.next += tokens;
        Ok(())
    }

    /// Copies what is held, oldest first, into the start of a buffer with room for `extra` more.
    pub(super) fn unrolled(&self, extra: usize) -> Result<KeyValues> {
        let held = self.held();
        let (_, heads, head_dim) = self.k.dims3()?;
        let shape = (held.len() + extra, heads, head_dim);
        let unroll = |ring: &Tensor| -> Result<Tensor> {
            let out = Tensor::zeros(shape, ring.dtype(), ring.device())?;
            let mut done = 0;
            while done < held.len() {
                let slot = (held.start + done) % self.slots;
                let run = (held.len() - done).min(self.slots - slot);
                out.slice_set(&ring.narrow(0, slot, run)?, 0, done)?;
                done += run;
            }
            Ok(out)
        };
        Ok(KeyValues { k: unroll(&self.k)?, v: unroll(&self.v)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(i: usize) -> KeyValues {
        let k = Tensor::full(i as f32, (1, 1, 2), &Device::Cpu).expect("k");
        KeyValues { v: k.neg().expect("v"), k }
    }

    fn first_values(kv: &KeyValues) -> Vec<f32> {
        let k = kv.k.flatten_all().and_then(|k| k.to_vec1::<f32>()).expect("values");
        k.chunks(2).map(|pair| pair[0]).collect()
    }

    #[test]
    fn the_newest_tokens_come_out_in_order_after_wrapping() -> Result<()> {
        let mut window = DraftWindow::new(4, 1, 2, &Device::Cpu)?;
        for i in 0..7 {
            window.push(&token(i))?;
        }
        assert_eq!(window.held(), 3..7);
        assert_eq!(first_values(&window.unrolled(1)?), [3.0, 4.0, 5.0, 6.0, 0.0]);
        assert_eq!([window.k.elem_count(), window.v.elem_count()], [4 * 2; 2]);
        Ok(())
    }

    #[test]
    fn a_long_prompt_starts_late_and_pushes_in_one_piece() -> Result<()> {
        let mut window = DraftWindow::new(4, 1, 2, &Device::Cpu)?;
        window.restart_at(10);
        let rows: Vec<KeyValues> = (10..13).map(token).collect();
        let k = Tensor::cat(&rows.iter().map(|r| &r.k).collect::<Vec<_>>(), 0)?;
        window.push(&KeyValues { v: k.neg()?, k })?;
        assert_eq!(window.held(), 10..13);
        assert_eq!(first_values(&window.unrolled(0)?), [10.0, 11.0, 12.0]);
        Ok(())
    }
}
