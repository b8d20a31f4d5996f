//! Features of committed tokens that a draft has yet to read: it reads them when it drafts, with those of other
//! requests.

use std::ops::Range;

use candle_core::Tensor;

use crate::error::Result;

/// Rows that wait for drafting at most; more are read at once, so that memory stays small.
const MOST_WAITING: usize = 128;

/// Features `[T, ...]` of the tokens after those that were read.
#[derive(Default)]
pub(super) struct Waiting(Vec<Tensor>);

impl From<Vec<Tensor>> for Waiting {
    fn from(features: Vec<Tensor>) -> Self {
        Self(features)
    }
}

impl Waiting {
    /// Features in their order.
    pub(super) fn features(&self) -> &[Tensor] {
        &self.0
    }

    pub(super) fn rows(&self) -> Result<usize> {
        let rows = self.0.iter().map(|features| features.dim(0));
        Ok(rows.sum::<candle_core::Result<usize>>()?)
    }

    /// Adds features, and says whether too many wait now.
    pub(super) fn push(&mut self, features: Tensor) -> Result<bool> {
        self.0.push(features);
        Ok(self.rows()? > MOST_WAITING)
    }

    /// Keeps the first rows only.
    pub(super) fn keep(&mut self, rows: usize) -> Result<()> {
        if rows == 0 {
            self.0.clear();
        } else if rows < self.rows()? {
            self.0 = vec![own_rows(&Tensor::cat(&self.0, 0)?, 0..rows)?];
        }
        Ok(())
    }

    /// Takes the first rows, if these are some.
    pub(super) fn take(&mut self, rows: usize) -> Result<Option<Tensor>> {
        if rows == 0 {
            return Ok(None);
        }
        let (waiting, all) = (self.rows()?, Tensor::cat(&self.0, 0)?);
        self.0.clear();
        if rows < waiting {
            self.0.push(own_rows(&all, rows..waiting)?);
        }
        Ok(Some(all.narrow(0, 0, rows)?))
    }
}

/// Rows with memory of their own: a view would keep all others alive.
fn own_rows(tensor: &Tensor, rows: Range<usize>) -> Result<Tensor> {
    Ok(tensor.narrow(0, rows.start, rows.len())?.force_contiguous()?)
}

#[cfg(test)]
mod tests {
    use candle_core::{CpuStorage, Device, Storage};

    use super::*;

    fn features(rows: Range<i64>) -> Tensor {
        let values: Vec<f32> = rows.map(|row| row as f32).collect();
        Tensor::from_vec(values.clone(), (values.len(), 1), &Device::Cpu).expect("tensor")
    }

    fn values(features: &Tensor) -> Vec<f32> {
        features.flatten_all().and_then(|all| all.to_vec1()).expect("values")
    }

    #[test]
    fn rows_are_taken_in_order_and_what_is_left_holds_no_others_in_memory() -> Result<()> {
        let mut waiting = Waiting::default();
        assert!(!waiting.push(features(0..2))? && !waiting.push(features(2..6))?);
        assert!(waiting.take(0)?.is_none());
        assert_eq!(values(&waiting.take(3)?.expect("rows")), [0.0, 1.0, 2.0]);
        waiting.keep(9)?;
        assert_eq!(waiting.rows()?, 3);
        waiting.keep(2)?;
        assert_eq!(values(&waiting.features()[0]), [3.0, 4.0]);
        let (storage, _) = waiting.features()[0].storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(held)) = &*storage else { panic!("not on the CPU") };
        assert_eq!(held.len(), 2);
        Ok(())
    }

    #[test]
    fn too_many_rows_are_told() -> Result<()> {
        let mut waiting = Waiting::default();
        assert!(!waiting.push(features(0..MOST_WAITING as i64))?);
        assert!(waiting.push(features(0..1))?);
        waiting.keep(0)?;
        assert_eq!(waiting.rows()?, 0);
        Ok(())
    }
}
