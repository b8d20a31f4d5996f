mod gpu;
mod halves;
mod held;
mod one_pass;
mod rounded;
mod scores;

use crate::graph::Backward;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};

use super::composed::within;
use super::{
    Delays, KeyRanges, Reach, Scores, TILE_KEYS, attention, frozen_attention, quantised_keys,
    reference,
};
use crate::composed::CHUNK_VALUES;
use crate::test_support::{Noise, assert_alike, assert_close, bits, gradcheck};

/// Random runs of documents, some of them padding, some of one token.
fn random_documents(noise: &mut Noise, tokens: usize) -> Vec<i32> {
    let mut ids = Vec::with_capacity(tokens);
    let mut id = 0;
    while ids.len() < tokens {
        let run = 1 + noise.below(tokens);
        let id_or_padding = if noise.below(5) == 0 { -1 } else { id };
        ids.extend(std::iter::repeat_n(id_or_padding, run.min(tokens - ids.len())));
        id += 1;
    }
    ids
}

fn random_ranges(noise: &mut Noise, tokens: usize) -> Arc<KeyRanges> {
    let documents = random_documents(noise, tokens);
    let delays: Vec<u32> = (0..tokens).map(|_| noise.below(4) as u32).collect();
    let window = (noise.below(2) == 0).then(|| noise.below(tokens + 1));
    Arc::new(KeyRanges::packed(&documents, window, Delays::PerToken(&delays)))
}

/// Test-time steps over random documents for even seeds, random trees for odd ones.
fn ranges_with_singles(noise: &mut Noise, seed: u64, tokens: usize) -> KeyRanges {
    if seed.is_multiple_of(2) {
        let documents = random_documents(noise, tokens);
        let window = (noise.below(2) == 0).then(|| noise.below(tokens + 1));
        let context = KeyRanges::packed(&documents, window, Delays::Same(0));
        context.with_own_columns(1 + noise.below(6))
    } else {
        let parents: Vec<Option<usize>> =
            (0..tokens).map(|i| (i > 0 && noise.below(6) > 0).then(|| noise.below(i))).collect();
        KeyRanges::tree(noise.below(40), &parents)
    }
}

/// Queries `[tokens, heads, head_dim]`, and keys and values `[keys, kv_heads, head_dim]`.
fn variables(
    noise: &mut Noise,
    [tokens, heads]: [usize; 2],
    [keys, kv_heads]: [usize; 2],
    head_dim: usize,
) -> [Var; 3] {
    let of_keys = [keys, kv_heads, head_dim];
    [[tokens, heads, head_dim], of_keys, of_keys].map(|shape| noise.var(&shape))
}

/// From tensor ops.
fn composed(
    arguments: [&Tensor; 3],
    ranges: &Arc<KeyRanges>,
    scores: Scores<'_>,
) -> Result<Tensor> {
    within(CHUNK_VALUES, arguments, ranges, scores)
}

/// Forward and backward against the composed version, along a random direction.
fn assert_matches_reference(
    noise: &mut Noise,
    [q, k, v]: [&Var; 3],
    ranges: &Arc<KeyRanges>,
) -> Result<()> {
    let direction = noise.tensor(q.dims());
    let (fused, plain) = (attention(q, k, v, ranges)?, reference(q, k, v, ranges)?);
    for own in [&fused, &composed([q, k, v], ranges, Scores::default())?] {
        assert_alike(&[("q", q), ("k", k), ("v", v)], &direction, [own, &plain], (1e-5, 3e-5));
    }
    let [q, k, v] = [q, k, v].map(|t| t.detach());
    let frozen = composed([&q, &k, &v], ranges, Scores::default())?;
    assert_close("without gradients", &frozen, &fused, 1e-5);
    Ok(())
}

#[test]
fn composed_blocks_meet_at_their_borders() -> Result<()> {
    let mut noise = Noise::new(41);
    let (tokens, heads) = (150, 4);
    for window in [None, Some(20)] {
        let ranges = KeyRanges::packed(&vec![0; tokens], window, Delays::Same(0));
        let ranges = Arc::new(ranges.with_own_columns(1));
        let [q, k, v] = variables(&mut noise, [tokens, heads], [2 * tokens, 2], 8);
        let direction = noise.tensor(q.dims());
        let own = within(4 * 20 * 50, [&q, &k, &v], &ranges, Scores::default())?;
        let fused = attention(&q, &k, &v, &ranges)?;
        let named = [("q", &q), ("k", &k), ("v", &v)];
        assert_alike(&named, &direction, [&own, &fused], (1e-5, 3e-5));
    }
    Ok(())
}

#[test]
fn fused_matches_reference_forward_and_backward() -> Result<()> {
    for seed in 0..24 {
        let mut noise = Noise::new(seed + 1);
        let tokens = [1, 2, 16, 17, 33, 97, 300, 530][seed as usize % 8];
        let (kv_heads, group) = (1 + noise.below(3), 1 + noise.below(4));
        let head_dim = [2, 8, 16, 20, 64][noise.below(5)];
        let ranges = random_ranges(&mut noise, tokens);
        let heads = [tokens, kv_heads * group];
        let [q, k, v] = variables(&mut noise, heads, [tokens, kv_heads], head_dim);
        assert_matches_reference(&mut noise, [&q, &k, &v], &ranges)?;
    }
    Ok(())
}

#[test]
fn test_time_steps_and_trees_match_reference_forward_and_backward() -> Result<()> {
    for seed in 0..16 {
        let mut noise = Noise::new(seed + 60);
        let tokens = [1, 3, 16, 17, 70, 130, 300][seed as usize % 7];
        let (kv_heads, group, head_dim) = (1 + noise.below(2), 1 + noise.below(3), 16);
        let ranges = ranges_with_singles(&mut noise, seed, tokens);
        let keys = ranges.max_end() + noise.below(3);
        let ranges = Arc::new(ranges);
        let heads = [tokens, kv_heads * group];
        let [q, k, v] = variables(&mut noise, heads, [keys, kv_heads], head_dim);
        assert_matches_reference(&mut noise, [&q, &k, &v], &ranges)?;
    }
    Ok(())
}

/// A random tree after `cached` tokens: queries, keys and values, and the parents.
fn random_tree(
    noise: &mut Noise,
    cached: usize,
    nodes: usize,
) -> ([Tensor; 3], Vec<Option<usize>>) {
    let (q, k) = (noise.tensor(&[nodes, 6, 16]), noise.tensor(&[cached + nodes, 2, 16]));
    let v = noise.tensor(k.dims());
    let parents = (0..nodes).map(|i| (i > 0).then(|| i - 1 - noise.below(i.min(3)))).collect();
    ([q, k, v], parents)
}

/// Scores that are bent.
fn capped(softcap: f64) -> Scores<'static> {
    Scores { softcap: Some(softcap), sinks: None }
}

#[test]
fn keys_that_are_dropped_by_whole_tiles_leave_every_bit() -> Result<()> {
    let mut noise = Noise::new(83);
    let (cached, nodes) = (3 * TILE_KEYS - 5, 14);
    let ([q, k, v], parents) = random_tree(&mut noise, cached, nodes);
    let sinks = noise.tensor(&[q.dim(1)?]);
    let all = [Scores::default(), capped(0.7), Scores { softcap: None, sinks: Some(&sinks) }];
    let ways: [fn(Tensor) -> Result<Tensor>; 3] =
        [Ok, |keys| keys.to_dtype(DType::F16), |keys| quantised_keys(&keys)];
    for reach in [Reach::Window(40), Reach::Window(TILE_KEYS - 9), Reach::Chunk(TILE_KEYS + 30)] {
        let tree = KeyRanges::tree_in(cached, &parents, reach);
        let chain = KeyRanges::appended_in(cached, nodes, reach);
        let dropped = reach.first(cached + 1) / TILE_KEYS * TILE_KEYS;
        assert!(dropped > 0);
        for (ranges, scores) in [tree, chain].iter().flat_map(|r| all.iter().map(move |s| (r, *s)))
        {
            for held in ways {
                let wide = |t: &Tensor| t.pad_with_zeros(2, 0, 16);
                let (q, k, v) = (wide(&q)?, held(wide(&k)?)?, held(wide(&v)?)?);
                let whole = frozen_attention(&q, &k, &v, &Arc::new(ranges.clone()), scores)?;
                let rest =
                    |t: &Tensor| t.narrow(0, dropped, cached + nodes - dropped)?.force_contiguous();
                let ranges = Arc::new(ranges.clone().without_first(dropped).expect("unseen"));
                let part = frozen_attention(&q, &rest(&k)?, &rest(&v)?, &ranges, scores)?;
                assert_same_bits(&whole, &part);
            }
        }
    }
    Ok(())
}

#[test]
fn a_tree_node_has_the_bits_of_the_last_of_appended_tokens() -> Result<()> {
    // Caches that end before, at and after the end of a tile of keys; windows that end in the cache, within
    // the tree, and nowhere.
    for (seed, cached) in [0, 20, 250, 256, 300, 512].into_iter().enumerate() {
        for window in [1, 3, 6, 70, 256, 290, usize::MAX] {
            let mut noise = Noise::new(80 + seed as u64);
            let nodes = 14;
            let ([q, k, v], parents) = random_tree(&mut noise, cached, nodes);
            let whole = KeyRanges::tree(cached, &parents);
            let tree = Arc::new(KeyRanges::tree_in(cached, &parents, Reach::Window(window)));
            let together = attention(&q, &k, &v, &tree)?;
            let bent = frozen_attention(&q, &k, &v, &tree, capped(0.7))?;
            let sinks = noise.tensor(&[q.dim(1)?]);
            let sinking = Scores { softcap: None, sinks: Some(&sinks) };
            let sunk = frozen_attention(&q, &k, &v, &tree, sinking)?;
            for node in 0..nodes {
                let path: Vec<u32> =
                    (0..cached as u32).chain(whole.singles_of(node).iter().copied()).collect();
                let keys = Tensor::from_slice(&path, path.len(), &Device::Cpu)?;
                let (k, v) = (k.index_select(&keys, 0)?, v.index_select(&keys, 0)?);
                let ranges =
                    Arc::new(KeyRanges::appended_in(path.len() - 1, 1, Reach::Window(window)));
                let q = q.narrow(0, node, 1)?;
                let alone = attention(&q, &k, &v, &ranges)?;
                assert_same_bits(&alone, &together.narrow(0, node, 1)?);
                let alone = frozen_attention(&q, &k, &v, &ranges, capped(0.7))?;
                assert_same_bits(&alone, &bent.narrow(0, node, 1)?);
                let alone = frozen_attention(&q, &k, &v, &ranges, sinking)?;
                assert_same_bits(&alone, &sunk.narrow(0, node, 1)?);
            }
        }
    }
    Ok(())
}

#[test]
fn chunks_are_cut_at_multiples_of_positions_in_packed_cached_and_tree_tokens() {
    let reach = Reach::Chunk(4);
    let packed = KeyRanges::packed_in(&[0, 0, 0, 0, 0, 0, 1, 1, -1], reach);
    let starts: Vec<_> = (0..9).map(|t| packed.of(t)).collect();
    let want = [0..1, 0..2, 0..3, 0..4, 4..5, 4..6, 6..7, 6..8, 0..0];
    assert_eq!(starts, want);
    let appended = KeyRanges::appended_in(6, 3, reach);
    assert_eq!([appended.of(0), appended.of(1), appended.of(2)], [4..7, 4..8, 8..9]);
    // A path of three nodes after six tokens; the last begins a chunk.
    let tree = KeyRanges::tree_in(6, &[None, Some(0), Some(1), None], reach);
    assert_eq!([tree.of(0), tree.of(1), tree.of(3)], [4..6, 4..6, 4..6]);
    assert_eq!((tree.of(2), tree.singles_of(2)), (8..8, &[8][..]));
    assert_eq!(tree.singles_of(1), [6, 7]);
}

#[track_caller]
fn assert_same_bits(a: &Tensor, b: &Tensor) {
    assert_eq!(bits(a), bits(b));
}

#[test]
fn reference_gradient_matches_differences() {
    let mut noise = Noise::new(40);
    let ranges = KeyRanges::packed(&[0, 0, 0, 1, 1], Some(1), Delays::PerToken(&[0, 1, 0, 0, 1]));
    let inputs = [noise.tensor(&[5, 4, 2]), noise.tensor(&[5, 2, 2]), noise.tensor(&[5, 2, 2])];
    gradcheck(&inputs, |t| reference(&t[0], &t[1], &t[2], &ranges));
}

#[test]
fn row_without_keys_is_exactly_zero_and_passes_no_gradient() -> Result<()> {
    let mut noise = Noise::new(41);
    for tokens in [4, 40] {
        let documents = vec![0; tokens];
        let ranges = Arc::new(KeyRanges::packed(&documents, None, Delays::Same(3)));
        let [q, k, v] = variables(&mut noise, [tokens, 2], [tokens, 1], 8);
        let out = attention(&q, &k, &v, &ranges)?;
        assert!(out.narrow(0, 0, 3)?.flatten_all()?.to_vec1::<f32>()?.iter().all(|&x| x == 0.0));
        let grads = out.sqr()?.sum_all()?.gradients()?;
        let dq = grads.get(&q).expect("gradient").narrow(0, 0, 3)?.abs()?.sum_all()?;
        assert!(dq.to_scalar::<f32>()? == 0.0);
    }
    Ok(())
}

#[test]
fn keys_far_below_the_softmax_get_zeros_and_no_subnormal_numbers() -> Result<()> {
    let mut noise = Noise::new(43);
    let (far, tokens, head_dim) = (TILE_KEYS + 30, 3 * TILE_KEYS, 16);
    let ranges = Arc::new(KeyRanges::packed(&vec![0; tokens], None, Delays::Same(0)));
    // The first value of a key is a score of its own: 80 to the later ones, e^-80 beside them for the far ones.
    let own = |of: &dyn Fn(usize) -> f32| -> Result<Tensor> {
        Tensor::from_vec((0..tokens).map(of).collect::<Vec<_>>(), (tokens, 1, 1), &Device::Cpu)
    };
    let later = own(&|t| if t < far { 0.0 } else { 80.0 })?;
    let ones = own(&|_| (head_dim as f32).sqrt())?;
    let rest = |noise: &mut Noise| noise.tensor(&[tokens, 1, head_dim - 1]);
    let q = Var::from_tensor(&Tensor::cat(&[&ones, &rest(&mut noise)], 2)?)?;
    let k = Var::from_tensor(&Tensor::cat(&[&later, &rest(&mut noise)], 2)?)?;
    let v = noise.var(&[tokens, 1, head_dim]);
    // Queries that see far keys alone have no gradient. Those of others are as small as a mean over a long row makes them.
    let direction = noise.tensor(q.dims());
    let small = own(&|t| if t < far { 0.0 } else { 1e-5 })?;
    let small = direction.broadcast_mul(&small)?;
    let fused = (attention(&q, &k, &v, &ranges)? * &small)?.sum_all()?.gradients()?;
    let plain = (reference(&q, &k, &v, &ranges)? * &small)?.sum_all()?.gradients()?;
    for (name, var) in [("q", &q), ("k", &k), ("v", &v)] {
        let (a, b) = (fused.get(var).expect("fused"), plain.get(var).expect("plain"));
        assert_close(name, &(a * 1e5)?, &(b * 1e5)?, 3e-5);
        let values = a.flatten_all()?.to_vec1::<f32>()?;
        assert!(values.iter().all(|x| !x.is_subnormal()), "{name}: a subnormal number");
        let of_far = &values[..far * head_dim];
        assert!(
            of_far.iter().all(|x| *x == 0.0),
            "{name}: a gradient of keys that count for nothing"
        );
    }
    Ok(())
}

#[test]
fn frozen_keys_get_no_gradient() -> Result<()> {
    let mut noise = Noise::new(42);
    let ranges = Arc::new(KeyRanges::packed(&[0; 20], None, Delays::Same(1)));
    let (q, k, v) = (noise.var(&[20, 2, 4]), noise.tensor(&[20, 1, 4]), noise.tensor(&[20, 1, 4]));
    let grads = attention(&q, &k, &v, &ranges)?.sum_all()?.gradients()?;
    assert!(grads.get(&q).is_some() && grads.get(&k).is_none() && grads.get(&v).is_none());
    Ok(())
}

#[test]
fn gradients_over_several_blocks_of_queries_and_keys_match_and_keep_those_of_queries_alone()
-> Result<()> {
    let mut noise = Noise::new(77);
    // Blocks of 4 tiles: 256 queries (64 of three heads), 1024 keys.
    let tokens = 4 * TILE_KEYS + 150;
    for documents in [vec![0; tokens], random_documents(&mut noise, tokens)] {
        let ranges = KeyRanges::packed(&documents, None, Delays::Same(0)).with_own_columns(1);
        let ranges = Arc::new(ranges);
        let [q, k, v] = variables(&mut noise, [tokens, 6], [2 * tokens, 2], 8);
        assert_matches_reference(&mut noise, [&q, &k, &v], &ranges)?;
        let direction = noise.tensor(q.dims());
        let of_queries = |k: &Tensor, v: &Tensor| -> Result<Tensor> {
            let out = (attention(&q, k, v, &ranges)? * &direction)?;
            Ok(out.sum_all()?.gradients()?.get(&q).expect("queries").clone())
        };
        assert_same_bits(&of_queries(&k, &v)?, &of_queries(&k.detach(), &v.detach())?);
    }
    Ok(())
}

#[test]
fn decoded_rows_have_the_same_bits_alone_and_together() -> Result<()> {
    let mut noise = Noise::new(43);
    for (head_dim, cached, queries) in [(16, 100, 5), (24, 250, 40), (80, 511, 300)] {
        let keys = cached + queries;
        let q = noise.tensor(&[queries, 6, head_dim]);
        let (k, v) = (noise.tensor(&[keys, 2, head_dim]), noise.tensor(&[keys, 2, head_dim]));
        for window in [usize::MAX, 1, 9, 77, 300] {
            let ranges = KeyRanges::appended_in(cached, queries, Reach::Window(window));
            let all = attention(&q, &k, &v, &Arc::new(ranges))?;
            for row in (0..queries).step_by(1 + queries / 7) {
                let one = attention(
                    &q.narrow(0, row, 1)?,
                    &k.narrow(0, 0, cached + row + 1)?,
                    &v.narrow(0, 0, cached + row + 1)?,
                    &Arc::new(KeyRanges::appended_in(cached + row, 1, Reach::Window(window))),
                )?;
                assert_same_bits(&one, &all.narrow(0, row, 1)?);
            }
        }
    }
    Ok(())
}

#[test]
fn result_does_not_depend_on_the_number_of_threads() {
    let mut noise = Noise::new(44);
    // Keys enough for blocks whose size the number of threads decides.
    let (tokens, keys) = (6 * TILE_KEYS, 18 * TILE_KEYS);
    let context = KeyRanges::packed(&vec![0; tokens], None, Delays::Same(0));
    let ranges = Arc::new(context.with_own_columns(2));
    let [q, k, v] = variables(&mut noise, [tokens, 4], [keys, 2], 16);
    let run = |threads: usize| -> Vec<f32> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("pool");
        pool.install(|| {
            let out = attention(&q, &k, &v, &ranges).expect("forward");
            let grads = out.sqr().and_then(|o| o.sum_all()?.gradients()).expect("backward");
            [&q, &k, &v]
                .iter()
                .flat_map(|var| {
                    let grad = grads.get(var.as_tensor()).expect("gradient");
                    grad.flatten_all().and_then(|g| g.to_vec1::<f32>()).expect("values")
                })
                .collect()
        })
    };
    let (one, eight) = (run(1), run(8));
    assert!(one.iter().zip(&eight).all(|(a, b)| a.to_bits() == b.to_bits()));
}

#[test]
fn wrong_shapes_are_errors() -> Result<()> {
    let zeros = |shape: (usize, usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let ranges = Arc::new(KeyRanges::appended(0, 3));
    let (q, k) = (zeros((3, 4, 8))?, zeros((3, 2, 8))?);
    assert!(attention(&q, &zeros((3, 3, 8))?, &zeros((3, 3, 8))?, &ranges).is_err());
    assert!(attention(&q, &k, &zeros((3, 2, 4))?, &ranges).is_err());
    assert!(attention(&q, &k, &k, &Arc::new(KeyRanges::appended(1, 3))).is_err());
    assert!(attention(&q, &k, &k, &Arc::new(KeyRanges::appended(0, 2))).is_err());
    Ok(())
}
