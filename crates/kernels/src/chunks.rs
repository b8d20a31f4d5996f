//! Chunks of logits on a GPU.

use candle_core::{Device, Result};

use crate::bend::Bend;
use crate::composed::CHUNK_VALUES;
use crate::cuda;

/// Logits, at most, that exist at a time on an NVIDIA GPU with much memory.
const MOST_LOGITS: usize = 1 << 28;

/// Bytes of a GPU's memory for each of these logits. The loss takes up to 12 for each.
const BYTES_OF_LOGIT: u64 = 512;

/// Rows of a library's tile of products: others are computed in vain.
const TILE: usize = 128;

/// Logits, at most, that exist at a time where the kernels of an NVIDIA GPU compute losses, normalisers or top tokens:
/// a power of two from 2^25 to 2^28, by the bytes of the GPU's memory in all. What is free does not count: the sum of a
/// head's gradient has its order from the chunks, and runs repeat bit for bit.
pub fn logits_at_once(memory: Option<u64>) -> usize {
    let logits = memory.map_or(0, |bytes| bytes / BYTES_OF_LOGIT);
    let logits = usize::try_from(logits).unwrap_or(MOST_LOGITS).clamp(CHUNK_VALUES, MOST_LOGITS);
    1 << logits.ilog2()
}

/// Rows of a chunk of at most so many logits on a GPU: one, or some, or several whole tiles.
pub fn rows_at_once(logits: usize, vocabulary: usize) -> usize {
    let rows = (logits / vocabulary.max(1)).max(1);
    if rows < 2 * TILE { rows } else { rows - rows % TILE }
}

/// Logits of a chunk on a device. Where they are bent, candle's ops hold them several times over.
/// It fails where the driver does not say what memory there is.
pub(crate) fn logits_on(device: &Device, bend: Bend) -> Result<usize> {
    let memory = if cuda::runs_on(device) { cuda::device::total_memory(device)? } else { None };
    Ok(logits_of(bend, memory))
}

fn logits_of(bend: Bend, memory: Option<u64>) -> usize {
    logits_at_once(memory.filter(|_| bend.is_plain()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_grow_with_a_gpu_s_memory_by_powers_of_two() {
        let gib = |gib: u64| logits_at_once(Some(gib << 30));
        assert_eq!(logits_at_once(None), CHUNK_VALUES);
        let all = [0, 16, 31, 32, 47, 64, 79, 127, 128, 139, 1 << 20].map(gib);
        assert_eq!(all.map(usize::ilog2), [25, 25, 25, 26, 26, 27, 27, 27, 28, 28, 28]);
        assert_eq!(logits_at_once(Some(u64::MAX)), MOST_LOGITS);
    }

    #[test]
    fn chunks_are_whole_tiles_or_less_than_two() {
        let rows = |vocabulary| rows_at_once(CHUNK_VALUES, vocabulary);
        assert_eq!([128_256, 32_000, 151_936, 1 << 18].map(rows), [256, 1024, 220, 128]);
        assert_eq!([(1 << 18) + 1, 1 << 25, usize::MAX].map(rows), [127, 1, 1]);
        assert_eq!([rows(0), rows(1)], [CHUNK_VALUES; 2]);
    }

    #[test]
    fn bent_logits_stay_few() -> Result<()> {
        let bend = Bend { softcap: Some(15.0), ..Bend::default() };
        let of_h200 = Some(139 << 30);
        assert_eq!(logits_of(bend, of_h200), CHUNK_VALUES);
        assert_eq!(logits_of(Bend::default(), of_h200), MOST_LOGITS);
        assert_eq!(logits_on(&Device::Cpu, Bend::default())?, CHUNK_VALUES);
        Ok(())
    }
}
