//! The GPU's kernels, emulated, against the CPU's.

use crate::graph::Backward;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor, Var};

use super::super::gpu::tables::{NOWHERE, OfKeys};
use super::super::gpu::{self, Way};
use super::super::{Delays, KeyRanges, Reach, TILE_KEYS, attention};
use super::{random_ranges, ranges_with_singles, variables};
use crate::cuda::block_memory;
use crate::cuda::emulator::emulated;
use crate::dispatch::Products;
use crate::test_support::{Noise, assert_alike, assert_close, bits, relative_error};

/// Largest errors of results and gradients with bf16 factors.
const HALF: (f64, f64) = (2e-2, 3e-2);

/// Forward and backward along a random direction in one way.
fn assert_near(
    way: Way,
    [q, k, v]: [&Var; 3],
    ranges: &Arc<KeyRanges>,
    tolerances: (f64, f64),
) -> Result<()> {
    assert_near_within((way, block_memory(q.device())?), [q, k, v], ranges, tolerances)
}

/// The same where a block has so much memory.
fn assert_near_within(
    way: (Way, usize),
    [q, k, v]: [&Var; 3],
    ranges: &Arc<KeyRanges>,
    tolerances: (f64, f64),
) -> Result<()> {
    let direction = Noise::new(5).tensor(q.dims());
    let plain = attention(q, k, v, ranges)?;
    emulated(|| {
        let own = gpu::attention_within(way, q, k, v, ranges)?.expect("narrow heads");
        assert_alike(&[("q", q), ("k", k), ("v", v)], &direction, [&own, &plain], tolerances);
        Ok(())
    })
}

#[test]
fn documents_windows_and_delays_match_the_cpu() -> Result<()> {
    for seed in 0..8 {
        let mut noise = Noise::new(seed + 1);
        let tokens = [1, 2, 17, 64, 65, 97, 150, 200][seed as usize];
        let (kv_heads, group) = (1 + noise.below(3), 1 + noise.below(4));
        let head_dim = [2, 8, 20, 64, 9][noise.below(5)];
        let ranges = random_ranges(&mut noise, tokens);
        let heads = [tokens, kv_heads * group];
        let [q, k, v] = variables(&mut noise, heads, [tokens, kv_heads], head_dim);
        assert_near(Way::Terms(3), [&q, &k, &v], &ranges, (2e-6, 3e-5))?;
        // Where few keys are seen a query's gradient is all cancellation, of rounded products.
        if tokens > 60 {
            assert_near(Way::Terms(1), [&q, &k, &v], &ranges, HALF)?;
        }
    }
    Ok(())
}

#[test]
fn test_time_steps_and_trees_match_the_cpu() -> Result<()> {
    for seed in 0..6 {
        let mut noise = Noise::new(seed + 60);
        let tokens = [1, 3, 17, 70, 100, 20][seed as usize];
        let (kv_heads, group, head_dim) = (1 + noise.below(2), 1 + noise.below(3), 16);
        let ranges = ranges_with_singles(&mut noise, seed, tokens);
        let keys = ranges.max_end() + noise.below(3);
        let ranges = Arc::new(ranges);
        let heads = [tokens, kv_heads * group];
        let [q, k, v] = variables(&mut noise, heads, [keys, kv_heads], head_dim);
        assert_near(Way::Terms(3), [&q, &k, &v], &ranges, (2e-6, 3e-5))?;
        // Without gradients single keys are taken in order.
        let [q, k, v] = [q, k, v].map(|t| t.detach());
        let own = emulated(|| attention(&q, &k, &v, &ranges))?;
        assert_close("in order", &own, &attention(&q, &k, &v, &ranges)?, 2e-6);
    }
    Ok(())
}

/// Tiles of 128 rows and keys, several in a row: documents, windows, delays, rows that see nothing, single keys.
#[test]
fn bf16_tiles_that_are_copied_ahead_match_the_cpu() -> Result<()> {
    for (seed, tokens, kv_heads, group) in
        [(0, 3, 2, 1), (1, 70, 1, 3), (2, 150, 2, 2), (3, 300, 1, 1), (4, 97, 1, 4)]
    {
        let mut noise = Noise::new(seed + 200);
        let ranges = if seed % 2 == 0 {
            random_ranges(&mut noise, tokens)
        } else {
            Arc::new(ranges_with_singles(&mut noise, seed / 2, tokens))
        };
        let keys = ranges.max_end().max(tokens) + noise.below(3);
        for (way, head_dim) in [
            (Way::Pipelined, [16, 80, 64, 32, 128][seed as usize]),
            (Way::Groups, [64, 64, 128, 64, 64][seed as usize]),
        ] {
            let heads = [tokens, kv_heads * group];
            let [q, k, v] = variables(&mut noise, heads, [keys, kv_heads], head_dim);
            // Where few keys are seen a query's gradient is all cancellation, of rounded products.
            let allowed = if tokens > 60 { HALF } else { (2e-2, 2e-1) };
            assert_near(way, [&q, &k, &v], &ranges, allowed)?;
        }
    }
    Ok(())
}

/// Bytes that a block of compute capability 8.6, 8.0 and 9.0 may have.
const MEMORIES: [usize; 3] = [99 << 10, 163 << 10, 227 << 10];

/// Heads above 128, and such that do not fill whole tiles, with the tiles of each size of a block's memory.
#[test]
fn wide_heads_with_bf16_tiles_match_the_cpu_and_repeat_their_bits() -> Result<()> {
    for (seed, memory, head_dim, tokens, [kv_heads, group]) in [
        (0, 0, 256, 150, [1, 2]),
        (1, 0, 256, 70, [2, 1]),
        (2, 0, 224, 130, [1, 1]),
        (3, 0, 192, 97, [1, 3]),
        (4, 0, 160, 140, [1, 1]),
        (5, 0, 136, 70, [2, 2]),
        (6, 0, 128, 97, [1, 2]),
        (7, 0, 72, 150, [1, 2]),
        (8, 1, 256, 150, [1, 2]),
        (9, 1, 224, 97, [1, 1]),
        (10, 1, 144, 150, [1, 1]),
        (11, 1, 192, 70, [1, 4]),
        (12, 2, 256, 200, [1, 1]),
        (13, 2, 256, 70, [1, 3]),
        (14, 2, 200, 97, [2, 1]),
        (15, 2, 8, 97, [1, 2]),
        (16, 0, 256, 3, [1, 2]),
    ] {
        let mut noise = Noise::new(seed + 300);
        let ranges = if seed % 3 == 2 {
            Arc::new(ranges_with_singles(&mut noise, seed / 3, tokens))
        } else {
            random_ranges(&mut noise, tokens)
        };
        let keys = ranges.max_end().max(tokens) + noise.below(3);
        let heads = [tokens, kv_heads * group];
        let [q, k, v] = variables(&mut noise, heads, [keys, kv_heads], head_dim);
        let way = (Way::Pipelined, MEMORIES[memory]);
        let allowed = if tokens > 60 { HALF } else { (2e-2, 2e-1) };
        assert_near_within(way, [&q, &k, &v], &ranges, allowed)?;
        let all = || {
            let out = gpu::attention_within(way, &q, &k, &v, &ranges)?.expect("takes all heads");
            let gradients = out.sqr()?.sum_all()?.gradients()?;
            let of = |t: &Var| bits(gradients.get(t).expect("a gradient"));
            Ok::<_, candle_core::Error>([bits(&out), of(&q), of(&k), of(&v)])
        };
        assert!(emulated(|| Ok::<_, candle_core::Error>(all()? == all()?))?, "{way:?} {head_dim}");
    }
    Ok(())
}

#[test]
fn bf16_products_of_wide_heads_have_tiles_that_are_copied_ahead() {
    let way = |head_dim| emulated(|| Way::of(Products::Half, head_dim, &Device::Cpu));
    assert_eq!([64, 128].map(way), [Way::Groups; 2]);
    assert_eq!([8, 72, 120, 136, 160, 192, 256].map(way), [Way::Pipelined; 7]);
    assert_eq!([20, 129, 264, 512].map(way), [Way::Terms(1); 4]);
    let single = emulated(|| Way::of(Products::Single, 256, &Device::Cpu));
    assert_eq!(single, Way::Terms(3));
}

/// A row's bits depend on what it sees alone: documents beside it, or a longer pass, change none.
#[test]
fn a_document_has_the_bits_that_it_has_alone_with_bf16_tiles() -> Result<()> {
    let mut noise = Noise::new(77);
    let (tokens, first, last) = (290, 128, 270);
    let documents: Vec<_> =
        (0..tokens).map(|t| i32::from(t >= first) + i32::from(t >= last)).collect();
    let all = Arc::new(KeyRanges::packed(&documents, None, Delays::Same(0)));
    let own = vec![0; (last - first) as usize];
    let own = Arc::new(KeyRanges::packed(&own, None, Delays::Same(0)));
    let [low, _, high] = MEMORIES;
    for (way, head_dim) in [
        ((Way::Pipelined, high), 64),
        ((Way::Groups, high), 64),
        ((Way::Pipelined, high), 192),
        ((Way::Pipelined, low), 256),
    ] {
        let [q, k, v] = [3, 1, 1].map(|heads| noise.var(&[tokens as usize, heads, head_dim]));
        let (packed, alone) = emulated(|| -> Result<_> {
            let packed = gpu::attention_within(way, &q, &k, &v, &all)?.expect("narrow heads");
            let part = |t: &Var| {
                Var::from_tensor(&t.narrow(0, first as usize, (last - first) as usize)?)
            };
            let (q, k, v) = (part(&q)?, part(&k)?, part(&v)?);
            Ok((packed, gpu::attention_within(way, &q, &k, &v, &own)?.expect("narrow heads")))
        })?;
        let of_document = packed.narrow(0, first as usize, (last - first) as usize)?;
        assert_eq!(bits(&of_document), bits(&alone), "{way:?}, heads of {head_dim}");
    }
    Ok(())
}

#[test]
fn wide_heads_take_smaller_tiles_and_the_widest_go_the_composed_way() -> Result<()> {
    let mut noise = Noise::new(31);
    let ranges = Arc::new(KeyRanges::packed(&[0; 40], None, Delays::Same(0)));
    for (head_dim, terms) in [(96, 3), (128, 1), (128, 3), (256, 1)] {
        let [q, k, v] = [2, 1, 1].map(|heads| noise.var(&[40, heads, head_dim]));
        let allowed = if terms == 3 { (2e-6, 3e-5) } else { HALF };
        assert_near(Way::Terms(terms), [&q, &k, &v], &ranges, allowed)?;
    }
    let [q, k, v] = [2, 1, 1].map(|heads| noise.var(&[40, heads, 512]));
    assert!(gpu::attention_of(Way::Terms(3), &q, &k, &v, &ranges)?.is_none());
    let own = emulated(|| attention(&q, &k, &v, &ranges))?;
    assert_close("composed", &own, &attention(&q, &k, &v, &ranges)?, 1e-5);
    Ok(())
}

#[test]
fn frozen_keys_get_no_gradient() -> Result<()> {
    let mut noise = Noise::new(8);
    let q = noise.var(&[9, 2, 8]);
    let (k, v) = (noise.tensor(&[9, 1, 8]), noise.tensor(&[9, 1, 8]));
    let ranges = Arc::new(KeyRanges::packed(&[0; 9], None, Delays::Same(1)));
    let plain = attention(&q, &k, &v, &ranges)?.sqr()?.sum_all()?.gradients()?;
    let own = emulated(|| attention(&q, &k, &v, &ranges)?.sqr()?.sum_all()?.gradients())?;
    assert_close("q", own.get(&q).expect("own"), plain.get(&q).expect("cpu"), 1e-5);
    assert!(own.get(&k).is_none() && own.get(&v).is_none());
    Ok(())
}

/// Widths of heads that fill their quads and those that do not, groups that fill a block's rows and larger ones,
/// ranges within a piece and over several, windows, and queries that see nothing.
#[test]
fn few_queries_match_the_cpu() -> Result<()> {
    let mut noise = Noise::new(90);
    for (queries, kv_heads, group, head_dim, cached) in [
        (1, 2, 4, 128, 300),
        (3, 1, 7, 9, 0),
        (8, 1, 40, 64, 129),
        (2, 1, 20, 200, 260),
        (1, 1, 9, 512, 120),
        (64, 2, 1, 2, 40),
        (5, 3, 2, 80, 127),
        // More pieces than are joined at a time.
        (2, 1, 1, 8, 4200),
    ] {
        let keys = cached + queries;
        let q = noise.tensor(&[queries, kv_heads * group, head_dim]);
        let [k, v] = [0; 2].map(|_| noise.tensor(&[keys, kv_heads, head_dim]));
        let random = (0..queries).map(|_| {
            let first = noise.below(keys);
            if noise.below(3) == 0 { 0..0 } else { first..first + noise.below(keys - first) + 1 }
        });
        for ranges in [
            KeyRanges::appended(cached, queries),
            KeyRanges::appended_in(cached, queries, Reach::Window(30)),
            KeyRanges::of_each(random),
        ] {
            let ranges = Arc::new(ranges);
            let few = emulated(|| attention(&q, &k, &v, &ranges))?;
            let what = format!("{queries} queries of {group} heads of {head_dim} after {cached}");
            assert_close(&what, &few, &attention(&q, &k, &v, &ranges)?, 2e-6);
        }
    }
    // Values that do not begin at a multiple of 16 bytes.
    let store = noise.tensor(&[2 + 3 * 8]);
    let odd = store.narrow(0, 2, 3 * 8)?.reshape((3, 1, 8))?;
    let ranges = Arc::new(KeyRanges::appended(0, 3));
    let few = emulated(|| attention(&odd, &odd, &odd, &ranges))?;
    assert_close("odd place", &few, &attention(&odd, &odd, &odd, &ranges)?, 2e-6);
    let wider = noise.tensor(&[2, 1, 516]);
    let ranges = Arc::new(KeyRanges::appended(0, 2));
    assert!(gpu::attention_of(Way::Terms(1), &wider, &wider, &wider, &ranges)?.is_none());
    Ok(())
}

/// Lossless greedy decoding asks that a row's bits depend on what it sees alone: not on the rows
/// beside it, nor on the pieces that longer rows bring.
#[test]
fn a_row_of_a_pass_has_the_bits_that_it_has_alone() -> Result<()> {
    let mut noise = Noise::new(12);
    for cached in [3, 250, 254, 600] {
        let rows = 7;
        let (k, v) = (noise.tensor(&[cached + rows, 2, 32]), noise.tensor(&[cached + rows, 2, 32]));
        let q = noise.tensor(&[rows, 6, 32]);
        let all = Arc::new(KeyRanges::appended(cached, rows));
        let together = emulated(|| attention(&q, &k, &v, &all))?;
        let plain = attention(&q, &k, &v, &all)?;
        assert!(relative_error(&together, &plain) < 2e-6);
        for row in 0..rows {
            let keys = cached + row + 1;
            let (k, v) = (k.narrow(0, 0, keys)?, v.narrow(0, 0, keys)?);
            let one = Arc::new(KeyRanges::appended(cached + row, 1));
            let alone = emulated(|| attention(&q.narrow(0, row, 1)?, &k, &v, &one))?;
            assert_eq!(bits(&together.narrow(0, row, 1)?), bits(&alone), "row {row} of {cached}");
        }
    }
    Ok(())
}

/// Trees are verified in one pass: a node has the bits that plain decoding of its path gives it.
#[test]
fn a_node_of_a_tree_has_the_bits_that_it_has_in_a_chain() -> Result<()> {
    let mut noise = Noise::new(21);
    let all = usize::MAX;
    for (cached, nodes, head_dim, window) in [
        (0, 9, 8, all),
        (15, 30, 16, all),
        (250, 12, 32, all),
        (520, 40, 64, all),
        // Windows that end within the tree, and in the cache.
        (252, 8, 8, 3),
        (260, 3, 8, 257),
        (600, 3, 8, 40),
    ] {
        let parents: Vec<_> =
            (0..nodes).map(|node| (node > 0).then(|| noise.below(node))).collect();
        let whole = KeyRanges::tree(cached, &parents);
        let tree = Arc::new(KeyRanges::tree_in(cached, &parents, Reach::Window(window)));
        let keys = cached + nodes;
        let [k, v] = [0; 2].map(|_| noise.tensor(&[keys, 2, head_dim]));
        let q = noise.tensor(&[nodes, 6, head_dim]);
        let together = emulated(|| attention(&q, &k, &v, &tree))?;
        assert!(relative_error(&together, &attention(&q, &k, &v, &tree)?) < 2e-6);
        let dropped = cached.saturating_sub(window) / TILE_KEYS * TILE_KEYS;
        let held = Arc::new(tree.as_ref().clone().without_first(dropped).expect("unseen"));
        let rest = |t: &Tensor| t.narrow(0, dropped, keys - dropped)?.force_contiguous();
        let rest = emulated(|| attention(&q, &rest(&k)?, &rest(&v)?, &held))?;
        assert_eq!(bits(&rest), bits(&together), "{dropped} of {cached} dropped");
        for node in 0..nodes {
            let path = whole.singles_of(node).iter().copied();
            let seen: Vec<u32> = (0..cached as u32).chain(path).collect();
            let chain = KeyRanges::appended_in(seen.len() - 1, 1, Reach::Window(window));
            let chain = Arc::new(chain);
            let seen = Tensor::new(seen, q.device())?;
            let [k, v] = [k.index_select(&seen, 0)?, v.index_select(&seen, 0)?];
            let alone = emulated(|| attention(&q.narrow(0, node, 1)?, &k, &v, &chain))?;
            let of_tree = bits(&together.narrow(0, node, 1)?);
            assert_eq!(of_tree, bits(&alone), "node {node} after {cached}");
        }
    }
    Ok(())
}

#[test]
fn queries_that_see_nothing_get_zeros() -> Result<()> {
    let mut noise = Noise::new(3);
    let [q, k, v] = variables(&mut noise, [70, 2], [70, 2], 8);
    let ranges = Arc::new(KeyRanges::packed(&[-1; 70], None, Delays::Same(0)));
    let out = emulated(|| attention(&q, &k, &v, &ranges))?;
    let zeros = |t: &Tensor| bits(t).iter().all(|bits| *bits == 0);
    assert!(zeros(&out));
    let gradients = emulated(|| out.sum_all()?.gradients())?;
    for variable in [&q, &k, &v] {
        let gradient = gradients.get(variable).expect("a gradient");
        assert!(zeros(&gradient.abs()?));
    }
    Ok(())
}

/// The tables by looking at every tile of every query.
fn quadratic_tables(ranges: &KeyRanges, keys: usize) -> OfKeys {
    let tiles = keys.div_ceil(gpu::TILE);
    let (mut from, mut until) = (vec![0; tiles], vec![0; tiles]);
    for tile in 0..tiles {
        let own = tile * gpu::TILE..(tile + 1) * gpu::TILE;
        let sees = |t: &usize| {
            let range = ranges.of(*t);
            !range.is_empty() && range.start < own.end && own.start < range.end
        };
        from[tile] = (0..ranges.queries()).find(sees).unwrap_or(0) as u32;
        until[tile] = (0..ranges.queries()).rev().find(sees).map_or(0, |t| t as u32 + 1);
    }
    let sees = |key: usize| {
        let count = move |t: usize| {
            let times = ranges.singles_of(t).iter().filter(|&&single| single as usize == key);
            vec![t as u32; times.count()]
        };
        (0..ranges.queries()).flat_map(count).collect::<Vec<u32>>()
    };
    let of_key: Vec<Vec<u32>> = (0..keys).map(sees).collect();
    let single: Vec<u32> =
        (0..keys as u32).filter(|&key| !of_key[key as usize].is_empty()).collect();
    let place = |key: usize| single.binary_search(&(key as u32)).map_or(NOWHERE, |at| at as u32);
    let ends = single.iter().scan(0, |end, &key| {
        *end += of_key[key as usize].len() as u32;
        Some(*end)
    });
    OfKeys {
        from,
        until,
        queries_from: [0].into_iter().chain(ends).collect(),
        slot: (0..keys).map(place).collect(),
        queries: of_key.concat(),
        single,
    }
}

#[test]
fn tables_in_linear_time_are_those_of_every_tile_of_every_query() {
    for seed in 0..40 {
        let mut noise = Noise::new(seed + 500);
        let tokens = 1 + noise.below(400);
        let ranges = match seed % 4 {
            0 => (*random_ranges(&mut noise, tokens)).clone(),
            1 => ranges_with_singles(&mut noise, seed / 4, tokens),
            // Ranges in no order, as one may choose rows.
            2 => {
                let rows: Vec<u32> = (0..tokens).map(|_| noise.below(tokens) as u32).collect();
                random_ranges(&mut noise, tokens).select(&rows)
            }
            _ => KeyRanges::packed(&vec![-1; tokens], None, Delays::Same(0)),
        };
        let keys = ranges.max_end() + noise.below(3 * gpu::TILE);
        assert_eq!(OfKeys::new(&ranges, keys), quadratic_tables(&ranges, keys), "seed {seed}");
    }
    let none = KeyRanges::packed(&[], None, Delays::Same(0));
    assert_eq!(OfKeys::new(&none, 0), quadratic_tables(&none, 0));
}

/// Layers that train keys and layers that do not may share their ranges, in either order.
#[test]
fn tables_that_are_kept_serve_frozen_and_trained_keys() -> Result<()> {
    let mut noise = Noise::new(77);
    let ranges = Arc::new(KeyRanges::packed(&[0; 70], None, Delays::Same(0)).with_own_columns(1));
    let [q, k, v] = variables(&mut noise, [70, 2], [140, 1], 8);
    let loss = |k: &Tensor, v: &Tensor| attention(&q, k, v, &ranges)?.sqr()?.sum_all();
    let plain = loss(&k, &v)?.gradients()?;
    emulated(|| {
        for _ in 0..2 {
            let frozen = loss(&k.detach(), &v.detach())?.gradients()?;
            let trained = loss(&k, &v)?.gradients()?;
            assert!(frozen.get(&k).is_none());
            for variable in [&q, &k, &v] {
                let (own, cpu) = (trained.get(variable).expect("own"), plain.get(variable));
                assert_close("gradient", own, cpu.expect("cpu"), 3e-5);
            }
        }
        Ok(())
    })
}
