//! Memory of the linear cross-entropy.

use super::{F32, Row};

/// Bytes of a value of 16 bits.
const HALF: u64 = 2;

/// What the logits of a chunk are held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Against {
    /// A token a row.
    Labels,
    /// Some tokens a row, with their probabilities.
    Entries,
    /// A teacher's logits, of which every row has its own.
    Teacher,
    /// A teacher's logits as its head's type rounds them; rows that share a teacher stand side by side.
    SharedTeacher {
        /// Teachers of all rows, at most.
        teachers: u64,
    },
}

impl Against {
    /// Whether a teacher's logits are formed.
    pub fn has_teacher(self) -> bool {
        matches!(self, Self::Teacher | Self::SharedTeacher { .. })
    }
}

/// Bytes of the loss while a chunk of `c` rows is there: the draft's logits and, with a whole teacher, the teacher's,
/// `4 c V` each, the gradients of their states, `4 c H`, and the rows of a head of blocks that are widened.
pub fn chunk_bytes(row: &Row, width: u64, vocabulary: u64, against: Against) -> u64 {
    if row.is_accelerator() {
        return on_accelerator(row, width, vocabulary, against);
    }
    let distributions = if against.has_teacher() { 2 } else { 1 };
    F32 * row.chunk(vocabulary) * (distributions * vocabulary + width)
        + row.slab_bytes(width, vocabulary)
}

/// The same on an accelerator. It forms the gradient of a chunk's logits beside them, in the type of the products'
/// factors; from entries in f32, which become factors once the logits are gone. A teacher's logits are rounded while
/// there is no gradient. All states are there as factors, in the order of their teachers once more. Gradients of the
/// chunks' states are joined in the end, `4 R H`.
fn on_accelerator(row: &Row, width: u64, vocabulary: u64, against: Against) -> u64 {
    let (factor, copies) = if row.half_products { (HALF, 1) } else { (F32, 0) };
    let rows = row.chunk(vocabulary);
    let (gradient, teachers, ordered) = match against {
        Against::Labels => (factor, 0, 0),
        Against::Entries => (F32, 0, 0),
        Against::Teacher => (factor, rows, 0),
        Against::SharedTeacher { teachers } => {
            let all = row.learned.max(1);
            (factor, (rows * teachers.min(all)).div_ceil(all), 1)
        }
    };
    let logits = vocabulary * (rows * (F32 + gradient) + teachers * F32);
    let states = row.learned * width;
    (copies + ordered) * factor * states + logits.max(F32 * states)
}

/// Bytes of the results and factors of `rows` rows, numbers that are no tensors: 40 in results, 25
/// in statistics, 40 in plans, factors, labels and normalisers.
pub fn row_bytes(rows: u64) -> u64 {
    (40 + 25 + 40) * rows
}

/// Bytes of the logits that are there at a time while a teacher's normalisers are computed, and of the rows of a head
/// of blocks that are widened.
pub(crate) fn summary_bytes(row: &Row, width: u64, vocabulary: u64) -> u64 {
    const ROWS: u64 = 128;
    let rows = if row.is_accelerator() { row.chunk(vocabulary) } else { ROWS.min(row.tokens) };
    F32 * rows * vocabulary + row.slab_bytes(width, vocabulary)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{on_cpu, on_gpu};
    use super::*;

    #[test]
    fn some_rows_of_a_head_of_blocks_are_widened_on_a_cpu() {
        let (width, vocabulary) = (896, 151_936);
        for (row, widened) in [(on_cpu(4096, 1), 1 << 24), (on_gpu(4096), 0)] {
            let stored = Row { stored_head: true, ..row };
            let more = |bytes: &dyn Fn(&Row) -> u64| bytes(&stored) - bytes(&row);
            let chunks = more(&|row: &Row| chunk_bytes(row, width, vocabulary, Against::Labels));
            let summary = more(&|row: &Row| summary_bytes(row, width, vocabulary));
            assert_eq!(chunks, summary);
            assert!(chunks <= widened && 10 * chunks >= 9 * widened, "{chunks}");
        }
    }

    #[test]
    fn an_accelerator_holds_the_gradients_of_a_chunks_logits() {
        let (width, vocabulary) = (64, 1 << 16);
        let bytes = |row: &Row, against| chunk_bytes(row, width, vocabulary, against);
        let (cpu, gpu) = (on_cpu(4096, 1), on_gpu(4096));
        let single = Row { half_products: false, ..gpu };
        let (states, logits) = (4096 * 64, 1 << 25);
        assert_eq!(gpu.chunk(vocabulary), 512);
        let of_cpu = 4 * cpu.chunk(vocabulary) * (2 * vocabulary + width);
        assert_eq!(bytes(&cpu, Against::Teacher), of_cpu);
        for (against, half, whole) in [
            (Against::Labels, 6, 8),
            (Against::Entries, 8, 8),
            (Against::Teacher, 10, 12),
            (Against::SharedTeacher { teachers: 5000 }, 10, 12),
            (Against::SharedTeacher { teachers: 1024 }, 7, 9),
        ] {
            let ordered = u64::from(matches!(against, Against::SharedTeacher { .. }));
            assert_eq!(bytes(&gpu, against), half * logits + (1 + ordered) * 2 * states);
            assert_eq!(bytes(&single, against), whole * logits + ordered * 4 * states);
        }
        // Where logits are few, the joined gradients are more.
        let wide = chunk_bytes(&gpu, 1 << 20, 2, Against::Labels);
        assert_eq!(wide, (2 + 4) * 4096 * (1 << 20));
    }
}
