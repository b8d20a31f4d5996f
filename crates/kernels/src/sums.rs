//! Which rows of a tensor are summed.

use candle_core::{Result, bail};

/// For every row of a result, which rows of another tensor it sums.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sums {
    /// Where every row's terms begin; a last entry says where they end.
    pub(crate) from: Vec<u32>,
    /// Rows of the other tensor, in the order in which they are added.
    pub(crate) places: Vec<u32>,
    /// A factor for each of them.
    pub(crate) weights: Option<Vec<f32>>,
}

impl Sums {
    /// Row `ids[i]` of `rows` sums the rows `i`, ascending.
    pub(crate) fn by_id(ids: &[u32], rows: usize) -> Result<Self> {
        if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
            bail!("row {id} of {rows}");
        }
        let mut from = vec![0_u32; rows + 1];
        ids.iter().for_each(|&id| from[id as usize + 1] += 1);
        (0..rows).for_each(|row| from[row + 1] += from[row]);
        let mut next = from.clone();
        let mut places = vec![0; ids.len()];
        for (i, &id) in (0..).zip(ids) {
            places[next[id as usize] as usize] = i;
            next[id as usize] += 1;
        }
        Ok(Self { from, places, weights: None })
    }

    /// Rows of the result.
    pub(crate) fn rows(&self) -> usize {
        self.from.len() - 1
    }
}
