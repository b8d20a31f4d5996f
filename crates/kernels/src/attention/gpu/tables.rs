//! What a call's queries see, and what sees its keys, as the kernels read it: one buffer of u32 a pass.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use candle_core::{Device, Result, Tensor};

use super::super::KeyRanges;
use super::TILE;
use super::few::Pieces;
use crate::cuda::{exactly, upload_words};

/// No place among the single keys.
pub(in super::super) const NOWHERE: u32 = u32::MAX;

/// A call's ranges on the device, u32.
pub(super) struct Tables {
    pub(super) pieces: Pieces,
    /// What [`few`](super::few) computes of its pieces, `[4]`.
    pub(super) sizes: Tensor,
    pub(super) start: Tensor,
    pub(super) end: Tensor,
    pub(super) singles: Tensor,
    pub(super) singles_end: Tensor,
    pub(super) has_singles: bool,
    /// Where keys train.
    pub(super) seen_by: Option<SeenBy>,
    /// Where all gradients are formed in one pass.
    pub(super) visits: Option<Visits>,
}

/// What tables are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Wanted {
    /// How many keys there are, where they train.
    pub(super) trained_keys: Option<usize>,
    /// How work is cut, where all gradients are formed in one pass.
    pub(super) one_pass: Option<Cut>,
}

/// Tiles of keys against tiles of rows, which are (token, query head) pairs of a key-value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Cut {
    pub(in super::super) keys: usize,
    pub(in super::super) rows: usize,
    /// Query heads of a key-value head.
    pub(in super::super) group: usize,
}

/// Which tiles of keys and of rows meet in one pass: [`OfTiles`] on the device.
pub(super) struct Visits {
    cut: Cut,
    all: [Tensor; 4],
}

impl Visits {
    /// In the order of the fields of [`OfTiles`].
    pub(super) fn all(&self) -> [&Tensor; 4] {
        self.all.each_ref()
    }
}

/// What the gradients of keys need beside: the queries of every tile of keys, and of every single key.
pub(super) struct SeenBy {
    keys: usize,
    pub(super) from: Tensor,
    pub(super) until: Tensor,
    /// Distinct single keys.
    pub(super) single: Tensor,
    pub(super) count: usize,
    /// Where the queries of each of them begin; a last entry says where they end.
    pub(super) queries_from: Tensor,
    pub(super) queries: Tensor,
    /// Place of every key among `single`.
    pub(super) slot: Tensor,
}

impl Tables {
    fn new(ranges: &KeyRanges, wanted: Wanted, device: &Device) -> Result<Self> {
        let of_queries = OfQueries::new(ranges);
        let of_keys = wanted.trained_keys.map(|keys| (keys, OfKeys::new(ranges, keys)));
        let of_tiles = wanted.trained_keys.zip(wanted.one_pass);
        let of_tiles = of_tiles.map(|(keys, cut)| (cut, OfTiles::new(ranges, keys, cut)));
        let mut pieces = of_queries.all().to_vec();
        if let Some((_, of)) = &of_keys {
            let of: [&[u32]; 6] =
                [&of.from, &of.until, &of.single, &of.queries_from, &of.queries, &of.slot];
            pieces.extend(of);
        }
        if let Some((_, of)) = &of_tiles {
            let of: [&[u32]; 4] = [&of.rows_from, &of.rows_until, &of.keys_from, &of.keys_until];
            pieces.extend(of);
        }
        let mut tensors = uploaded(&pieces, device)?;
        let visits = match &of_tiles {
            Some((cut, _)) => {
                let all = exactly(tensors.split_off(tensors.len() - 4))?;
                Some(Visits { cut: *cut, all })
            }
            None => None,
        };
        let of_keys_tensors = tensors.split_off(of_queries.all().len());
        let [sizes, start, end, singles_end, singles] = exactly(tensors)?;
        let seen_by = match of_keys {
            Some((keys, of)) => {
                let [from, until, single, queries_from, queries, slot] = exactly(of_keys_tensors)?;
                let count = of.single.len();
                Some(SeenBy { keys, from, until, single, count, queries_from, queries, slot })
            }
            None => None,
        };
        let (pieces, has_singles) = (Pieces::of(ranges), !of_queries.singles.is_empty());
        Ok(Self { pieces, sizes, start, end, singles, singles_end, has_singles, seen_by, visits })
    }

    /// Layers of a pass share their ranges, those with a window and those without: the tables of the last
    /// two ranges are kept. It fails where the device has no memory for them.
    pub(super) fn of(
        ranges: &Arc<KeyRanges>,
        wanted: Wanted,
        device: &Device,
    ) -> Result<Arc<Self>> {
        type Kept = (Weak<KeyRanges>, Device, Arc<Tables>);
        static LAST: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let found = last.iter().find(|(kept, of_device, tables)| {
            kept.upgrade().is_some_and(|kept| Arc::ptr_eq(&kept, ranges))
                && of_device.same_device(device)
                && tables.hold(wanted)
        });
        if let Some((_, _, tables)) = found {
            return Ok(Arc::clone(tables));
        }
        let tables = Arc::new(Self::new(ranges, wanted, device)?);
        last.retain(|(kept, ..)| kept.strong_count() > 0);
        last.truncate(1);
        last.insert(0, (Arc::downgrade(ranges), device.clone(), Arc::clone(&tables)));
        Ok(tables)
    }

    /// Whether all that is wanted is there.
    fn hold(&self, wanted: Wanted) -> bool {
        let keys = self.seen_by.as_ref().map(|seen| seen.keys);
        let cut = self.visits.as_ref().map(|visits| visits.cut);
        (wanted.trained_keys.is_none() || keys == wanted.trained_keys)
            && (wanted.one_pass.is_none() || cut == wanted.one_pass)
    }
}

/// Views of one upload of all `pieces`, in their order; a kernel's argument must not be empty, so an empty
/// piece is a 0.
fn uploaded(pieces: &[&[u32]], device: &Device) -> Result<Vec<Tensor>> {
    let all = upload_words(&joined(pieces), device)?;
    let mut first = 0;
    let mut next = |piece: &&[u32]| {
        let view = all.narrow(0, first, room(piece));
        first += room(piece);
        view
    };
    pieces.iter().map(&mut next).collect()
}

fn room(piece: &[u32]) -> usize {
    piece.len().max(1)
}

fn joined(pieces: &[&[u32]]) -> Vec<u32> {
    let mut all = Vec::with_capacity(pieces.iter().map(|piece| room(piece)).sum());
    for piece in pieces {
        all.extend_from_slice(piece);
        all.resize(all.len() + room(piece) - piece.len(), 0);
    }
    all
}

/// The words of a call whose keys do not train, as [`Tables`] uploads them.
pub(in super::super) fn words(ranges: &KeyRanges) -> Vec<u32> {
    joined(&OfQueries::new(ranges).all())
}

/// Trees of like sizes have equally many words: their single keys are filled up to a multiple of so many.
const SINGLES: usize = 64;

/// The host's part of [`Tables`] for queries.
struct OfQueries {
    sizes: [u32; 4],
    start: Vec<u32>,
    end: Vec<u32>,
    singles_end: Vec<u32>,
    /// Their number may change from pass to pass: they are the last.
    singles: Vec<u32>,
}

impl OfQueries {
    fn new(ranges: &KeyRanges) -> Self {
        let (mut start, mut end, mut singles_end) = (Vec::new(), Vec::new(), Vec::new());
        let mut singles: Vec<u32> = Vec::new();
        for t in 0..ranges.queries() {
            let range = ranges.of(t);
            start.push(range.start as u32);
            end.push(range.end as u32);
            singles.extend(ranges.singles_of(t));
            singles_end.push(singles.len() as u32);
        }
        singles.resize(singles.len().next_multiple_of(SINGLES), 0);
        let Pieces { first, count, together } = Pieces::of(ranges);
        let keys = end.iter().copied().max().unwrap_or(0);
        let sizes = [keys, first as u32, together as u32, count as u32];
        Self { sizes, start, end, singles_end, singles }
    }

    fn all(&self) -> [&[u32]; 5] {
        [&self.sizes, &self.start, &self.end, &self.singles_end, &self.singles]
    }
}

/// The host's part of [`SeenBy`].
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) struct OfKeys {
    /// The first query that sees a key of a tile by its range, and the one after the last; 0 and 0 for
    /// a tile that nobody sees.
    pub(in super::super) from: Vec<u32>,
    pub(in super::super) until: Vec<u32>,
    pub(in super::super) single: Vec<u32>,
    pub(in super::super) queries_from: Vec<u32>,
    pub(in super::super) queries: Vec<u32>,
    pub(in super::super) slot: Vec<u32>,
}

impl OfKeys {
    /// In time linear in queries, keys and single keys.
    pub(in super::super) fn new(ranges: &KeyRanges, keys: usize) -> Self {
        let tiles = keys.div_ceil(TILE);
        let tiles_of = |t: usize| {
            let range = ranges.of(t);
            if range.is_empty() { 0..0 } else { range.start / TILE..(range.end - 1) / TILE + 1 }
        };
        let all = 0..ranges.queries();
        let from = first_over(tiles, all.clone().map(|t| (t as u32, tiles_of(t))));
        let until = first_over(tiles, all.rev().map(|t| (t as u32 + 1, tiles_of(t))));
        let mut slot = vec![NOWHERE; keys];
        let (mut single, mut queries_from, mut queries) = (Vec::new(), Vec::new(), Vec::new());
        for (key, query) in ranges.singles_by_key() {
            if single.last() != Some(&key) {
                slot[key as usize] = single.len() as u32;
                single.push(key);
                queries_from.push(queries.len() as u32);
            }
            queries.push(query);
        }
        queries_from.push(queries.len() as u32);
        Self { from, until, single, queries_from, queries, slot }
    }
}

/// The host's part of [`Visits`]: what each tile of keys visits, and who visits each tile of rows.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) struct OfTiles {
    /// The first tile of rows that a tile of keys visits and the one after the last; 0 and 0 if it visits none.
    pub(in super::super) rows_from: Vec<u32>,
    pub(in super::super) rows_until: Vec<u32>,
    /// The first tile of keys that visits a tile of rows and the one after the last. All between do, also where nobody
    /// sees their keys. One tile of keys is there at least, which writes zeros for rows that see nothing.
    pub(in super::super) keys_from: Vec<u32>,
    pub(in super::super) keys_until: Vec<u32>,
}

impl OfTiles {
    /// In time linear in rows and keys. There is a key at least where there are rows.
    pub(in super::super) fn new(ranges: &KeyRanges, keys: usize, cut: Cut) -> Self {
        let rows = ranges.queries() * cut.group;
        let (tiles_of_rows, tiles_of_keys) = (rows.div_ceil(cut.rows), keys.div_ceil(cut.keys));
        let visitors = |tile: usize| {
            let (first, end) = (tile * cut.rows, rows.min((tile + 1) * cut.rows));
            let tokens = first / cut.group..end.div_ceil(cut.group);
            let seen = tokens.map(|t| ranges.of(t)).filter(|range| !range.is_empty());
            let hull = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
            // Rows that see nothing are spread over all tiles of keys.
            let alone = tile * tiles_of_keys / tiles_of_rows;
            hull.map_or(alone..alone + 1, |hull| hull.start / cut.keys..hull.end.div_ceil(cut.keys))
        };
        let visitors: Vec<Range<usize>> = (0..tiles_of_rows).map(visitors).collect();
        let named = |next: u32| {
            visitors.iter().enumerate().map(move |(tile, of)| (tile as u32 + next, of.clone()))
        };
        Self {
            rows_from: first_over(tiles_of_keys, named(0)),
            rows_until: first_over(tiles_of_keys, named(1).rev()),
            keys_from: visitors.iter().map(|of| of.start as u32).collect(),
            keys_until: visitors.iter().map(|of| of.end as u32).collect(),
        }
    }
}

/// For every tile the name of the first interval that holds it, 0 where none does. A tile is written once;
/// later intervals step over it, by links that shorten as they are walked.
fn first_over(tiles: usize, intervals: impl Iterator<Item = (u32, Range<usize>)>) -> Vec<u32> {
    let mut names = vec![0; tiles];
    // The next tile from each on that may not be written yet; `tiles` is the end.
    let mut open: Vec<usize> = (0..=tiles).collect();
    for (name, interval) in intervals {
        let mut tile = next_open(&mut open, interval.start.min(tiles));
        while tile < interval.end.min(tiles) {
            names[tile] = name;
            open[tile] = tile + 1;
            tile = next_open(&mut open, tile);
        }
    }
    names
}

fn next_open(open: &mut [usize], mut tile: usize) -> usize {
    while open[tile] != tile {
        open[tile] = open[open[tile]];
        tile = open[tile];
    }
    tile
}
