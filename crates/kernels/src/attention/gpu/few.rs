//! Attention of few queries without gradients, as decoding has it: pieces of keys beside one another, then their
//! sum. Keys and values are f32, or bf16 as a cache holds them; all else is f32.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor};

use super::super::{Dims, KeyRanges, TILE_KEYS};
use super::tables::{Tables, Wanted};
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
pub(super) struct Pieces {
    pub(super) first: usize,
    pub(super) count: usize,
    /// In so many of them, from the first on, a place is the same key for all queries.
    pub(super) together: usize,
}

impl Pieces {
    pub(super) fn of(ranges: &KeyRanges) -> Self {
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

    /// Pieces for which there is room where `keys` are held. A cache that holds more than what is seen gives all passes that it
    /// has room for the same number.
    fn room(&self, keys: usize) -> usize {
        let all = if self.first == 0 { keys.div_ceil(PIECE) } else { 0 };
        all.max(self.count)
    }

    /// Those of them in which a token may have keys of its own, in a tree as many as its nodes reach at most.
    fn apart(&self, has_singles: bool) -> usize {
        let own = self.count - self.together;
        if has_singles { own.max(2) } else { own }
    }
}

/// Blocks of one call, from numbers that are the same for passes after caches of one room.
struct Blocks {
    /// Pieces of the results.
    room: usize,
    grid: [usize; 3],
}

impl Blocks {
    fn of(tables: &Tables, queries: usize, keys: usize, dims: Dims) -> Self {
        let (most, group) = (most_rows(dims.head_dim), dims.group());
        let room = tables.pieces.room(keys);
        let together = room * (queries * group).div_ceil(most);
        let apart = tables.pieces.apart(tables.has_singles) * queries * group.div_ceil(most);
        Self { room, grid: [together + apart, dims.kv_heads, 1] }
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
    let tables = Tables::of(ranges, Wanted::default(), q.device())?;
    let blocks = Blocks::of(&tables, q.dim(0)?, k.dim(0)?, dims);
    let (parts, softmax) = parts(&program, [&q, &k, &v], dims, &tables, &blocks)?;
    let arguments = Arguments::of([&parts, &softmax, &tables.sizes]).and([blocks.room]);
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
    tables: &Tables,
    blocks: &Blocks,
) -> Result<(Tensor, Tensor)> {
    let queries = q.dim(0)?;
    let arguments = Arguments::of([q, k, v, &tables.sizes, &tables.start, &tables.end])
        .and([&tables.singles, &tables.singles_end])
        .and([tables.has_singles])
        .and([queries, dims.heads, dims.kv_heads, blocks.room])
        .and([Argument::F32(dims.scale())]);
    let all = queries * dims.heads * blocks.room;
    Launch::new(program, "attention_few", (blocks.grid, THREADS), &arguments)
        .run(q.device(), [Shape::from((all, dims.head_dim)), Shape::from((all, 2))])
        .map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::super::super::{Delays, Reach};
    use super::*;
    use crate::cuda::emulator::emulated;
    use crate::test_support::{Noise, bits};

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

    /// Passes after caches of one room start the same, and what is not seen yet is not read: it changes no bit.
    #[test]
    fn room_for_more_keys_changes_no_bit() -> Result<()> {
        let mut noise = Noise::new(31);
        let parents = [None, Some(0), Some(0), Some(2)];
        for (cached, room, rows) in [(0, 256, 4), (125, 256, 4), (127, 256, 1), (300, 1024, 4)] {
            let chain = KeyRanges::appended(cached, rows);
            let tree = KeyRanges::tree(cached, &parents[..rows]);
            for (ranges, dtype) in [(&chain, DType::F32), (&tree, DType::F32), (&tree, DType::BF16)]
            {
                let ranges = Arc::new(ranges.clone());
                let q = noise.tensor(&[rows, 4, 16]);
                let held = [(); 2].map(|()| noise.tensor(&[cached + rows, 2, 16]).to_dtype(dtype));
                let [k, v] = held;
                let (k, v) = (k?, v?);
                let unseen =
                    (Tensor::ones((room - cached - rows, 2, 16), dtype, q.device())? * f64::NAN)?;
                let more = |t: &Tensor| Tensor::cat(&[t, &unseen], 0);
                emulated(|| -> Result<()> {
                    let own = attention(&q, &more(&k)?, &more(&v)?, &ranges)?.expect("narrow");
                    let plain = attention(&q, &k, &v, &ranges)?.expect("narrow");
                    assert_eq!(bits(&own), bits(&plain), "{rows} rows after {cached}");
                    Ok(())
                })?;
                let dims = Dims::new(q.shape(), more(&k)?.shape())?;
                let blocks = |cached: usize| -> Result<(usize, [usize; 3])> {
                    let is_chain = ranges.singles_of(0).is_empty();
                    let ranges = if is_chain {
                        KeyRanges::appended(cached, rows)
                    } else {
                        KeyRanges::tree(cached, &parents[..rows])
                    };
                    let tables = Tables::of(&Arc::new(ranges), Wanted::default(), q.device())?;
                    let blocks = Blocks::of(&tables, rows, room, dims);
                    Ok((blocks.room, blocks.grid))
                };
                for other in 0..room - rows {
                    assert_eq!(blocks(other)?, blocks(cached)?, "{other}");
                }
            }
        }
        Ok(())
    }
}
