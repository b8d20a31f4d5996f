//! Attention of few queries without gradients, as decoding has it: pieces of keys beside one another, then their
//! sum. Keys and values are f32, or bf16 as a cache holds them; all else is f32.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor};

use super::super::{Dims, KeyRanges, TILE_KEYS};
use super::tables::Tables;
use super::{Programs, of_width};
#[cfg(all(test, feature = "cuda"))]
use crate::cuda::Block;
use crate::cuda::{Argument, Arguments, Launch, Program, aligned};

/// Threads of a block of [`PIECE`] keys: `THREADS` of the kernels.
const THREADS: usize = 256;
/// Keys of a piece, as the kernels cut them.
const PIECE: usize = 128;
const _: () = assert!(TILE_KEYS.is_multiple_of(PIECE), "dropped tiles would move the pieces");
/// The widest heads.
const WIDEST: usize = 512;
const WARP: usize = 32;

/// The program for one width of heads, whose keys and values are f32.
pub(super) fn program(head_dim: usize) -> Program {
    program_of(head_dim, false)
}

/// The same with bf16 keys and values.
pub(super) fn program_of_halves(head_dim: usize) -> Program {
    program_of(head_dim, true)
}

fn program_of(head_dim: usize, halves: bool) -> Program {
    let numbers = [("HEAD_DIM", head_dim), ("HALVES", usize::from(halves))];
    Program::new("attention_few", include_str!("few.cu"), &numbers).overlapping()
}

/// What blocks of its kernels have.
#[cfg(all(test, feature = "cuda"))]
pub(super) fn blocks(head_dim: usize) -> [Block; 2] {
    let join = head_dim.next_multiple_of(WARP);
    [Block::plain("attention_few", THREADS), Block::plain("attention_few_join", join)]
}

/// The program for keys and values of a type.
fn known(head_dim: usize, dtype: DType) -> Arc<Program> {
    static KNOWN: Programs = Programs::new(BTreeMap::new());
    static OF_HALVES: Programs = Programs::new(BTreeMap::new());
    match dtype {
        DType::BF16 => of_width(&OF_HALVES, head_dim, program_of_halves),
        _ => of_width(&KNOWN, head_dim, program),
    }
}

/// Rows that a block computes at most: `ROWS` of the kernels.
fn most_rows(head_dim: usize) -> usize {
    let lanes_of_a_key = match head_dim {
        0..=128 => 8,
        129..=256 => 16,
        _ => 32,
    };
    256 / lanes_of_a_key
}

/// Pieces that some query sees.
#[derive(Debug, PartialEq, Eq)]
struct Pieces {
    first: usize,
    count: usize,
    /// In so many of them, from the first on, a place is the same key for all queries.
    together: usize,
}

impl Pieces {
    fn of(ranges: &KeyRanges) -> Self {
        let places = |t: usize| {
            let range = ranges.of(t);
            range.start..range.end + ranges.singles_of(t).len()
        };
        let seeing = || (0..ranges.queries()).filter(|&t| !places(t).is_empty());
        let first = seeing().map(|t| places(t).start / PIECE).min().unwrap_or(0);
        let end = seeing().map(|t| places(t).end.div_ceil(PIECE)).max().unwrap_or(1);
        let has_singles = seeing().any(|t| !ranges.singles_of(t).is_empty());
        let apart = has_singles.then(|| seeing().map(|t| ranges.of(t).end / PIECE).min()).flatten();
        let together = apart.unwrap_or(end).min(end) - first;
        Self { first, count: end - first, together }
    }
}

/// As [`super::attention`], without gradients; single keys are in order after the ranges. `None` where a head
/// is too wide. It fails where the device has no memory, or the kernels cannot be compiled.
pub(super) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
) -> Result<Option<Tensor>> {
    let dims = Dims::new(q.shape(), k.shape())?;
    if dims.head_dim == 0 || dims.head_dim > WIDEST {
        return Ok(None);
    }
    let held = if k.dtype() == v.dtype() { k.dtype() } else { DType::F32 };
    let program = known(dims.head_dim, held);
    let plain = |t: &Tensor, dtype| aligned(&t.detach().to_dtype(dtype)?);
    let [q, k, v] = [plain(q, DType::F32)?, plain(k, held)?, plain(v, held)?];
    let pieces = Pieces::of(ranges);
    let (parts, softmax) = parts(&program, [&q, &k, &v], dims, ranges, &pieces)?;
    let arguments = [(&parts).into(), (&softmax).into(), pieces.count.into()];
    let blocks = ([q.dim(0)? * dims.heads, 1, 1], dims.head_dim.next_multiple_of(WARP));
    let [out] = Launch::new(&program, "attention_few_join", blocks, &arguments)
        .run(q.device(), [q.shape().clone()])?;
    Ok(Some(out))
}

/// Sums of every row over every piece, `[Tq · N · pieces, D]`, with the largest score and the total.
fn parts(
    program: &Program,
    [q, k, v]: [&Tensor; 3],
    dims: Dims,
    ranges: &Arc<KeyRanges>,
    pieces: &Pieces,
) -> Result<(Tensor, Tensor)> {
    let (queries, keys) = (q.dim(0)?, k.dim(0)?);
    let tables = Tables::of(ranges, None, q.device())?;
    let arguments = Arguments::of([q, k, v, &tables.start, &tables.end])
        .and([&tables.singles, &tables.singles_end])
        .and([tables.has_singles])
        .and([queries, keys, dims.heads, dims.kv_heads])
        .and([pieces.first, pieces.together, pieces.count])
        .and([Argument::F32(dims.scale())]);
    let most = most_rows(dims.head_dim);
    let together = pieces.together * (queries * dims.group()).div_ceil(most);
    let apart = (pieces.count - pieces.together) * queries * dims.group().div_ceil(most);
    let all = queries * dims.heads * pieces.count;
    let blocks = ([together + apart, dims.kv_heads, 1], THREADS);
    Launch::new(program, "attention_few", blocks, &arguments)
        .run(q.device(), [Shape::from((all, dims.head_dim)), Shape::from((all, 2))])
        .map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::super::super::{Delays, Reach};
    use super::*;

    #[test]
    fn pieces_begin_with_the_first_seen_and_stay_together_until_paths_part() {
        let chain = KeyRanges::appended(300, 4);
        assert_eq!(Pieces::of(&chain), Pieces { first: 0, count: 3, together: 3 });
        let window = KeyRanges::appended_in(300, 4, Reach::Window(40));
        assert_eq!(Pieces::of(&window), Pieces { first: 2, count: 1, together: 1 });
        let parents = [None, Some(0), Some(0), Some(2)];
        let tree = KeyRanges::tree(2 * PIECE - 2, &parents);
        assert_eq!(Pieces::of(&tree), Pieces { first: 0, count: 3, together: 1 });
        // Queries that see nothing do not count.
        let padded = KeyRanges::packed(&[-1, -1], None, Delays::Same(0));
        assert_eq!(Pieces::of(&padded), Pieces { first: 0, count: 1, together: 1 });
        let late = KeyRanges::of_each([0..0, 5 * PIECE..5 * PIECE + 1]);
        assert_eq!(Pieces::of(&late), Pieces { first: 5, count: 1, together: 1 });
    }
}
