//! The rows of ranks that share the layers: all run each of them, one after the other.

use super::super::Target;
use super::super::features::{Features, PackedSequence, Taps};
use super::super::run::Keeping;
use super::super::spread::Ranks;
use crate::error::Result;

impl Target {
    /// Runs every rank's row and keeps the features of this rank's, if it has one; rows that are the same
    /// are run once. All ranks that share the layers call it, with the same taps.
    pub(in crate::target_model) fn run_in_turn(
        &self,
        ranks: &dyn Ranks,
        own: Option<&PackedSequence>,
        taps: &Taps,
    ) -> Result<Features> {
        self.check(taps)?;
        let rows = rows_of_all(ranks, own);
        let mut features = Features::default();
        for (turn, row) in rows.iter().enumerate() {
            if row.ids.is_empty() || rows[..turn].contains(row) {
                continue;
            }
            if own == Some(row) {
                features = self.run_packed(row, (taps, Keeping::All))?;
            } else {
                self.run_packed(row, (taps, Keeping::Nothing))?;
            }
        }
        Ok(features)
    }
}

/// Everybody's rows in the order of the ranks, empty ones of ranks that have none.
fn rows_of_all(ranks: &dyn Ranks, own: Option<&PackedSequence>) -> Vec<PackedSequence> {
    let own_length = own.map_or(0, |row| row.ids.len());
    let mut lengths = vec![0_u64; ranks.size()];
    let length = [own_length as u64];
    ranks.all_gather(bytemuck::cast_slice(&length), bytemuck::cast_slice_mut(&mut lengths));
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    if longest == 0 {
        return Vec::new();
    }
    // Ids, positions and documents, each filled up to the longest row.
    let mut values = vec![0_u32; 3 * longest];
    if let Some(PackedSequence { ids, position_ids, document_ids }) = own {
        values[..own_length].copy_from_slice(ids);
        values[longest..][..own_length].copy_from_slice(position_ids);
        values[2 * longest..][..own_length].copy_from_slice(bytemuck::cast_slice(document_ids));
    }
    let mut all = vec![0_u32; 3 * longest * ranks.size()];
    ranks.all_gather(bytemuck::cast_slice(&values), bytemuck::cast_slice_mut(&mut all));
    let row = |(values, length): (&[u32], &u64)| {
        let part = |start: usize| &values[start..][..*length as usize];
        PackedSequence {
            ids: part(0).to_vec(),
            position_ids: part(longest).to_vec(),
            document_ids: bytemuck::cast_slice(part(2 * longest)).to_vec(),
        }
    };
    all.chunks(3 * longest).zip(&lengths).map(row).collect()
}
