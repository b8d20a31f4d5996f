//! All gradients by one kernel, emulated: beside two kernels, in f64, and the order in which its blocks add.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::gpu::tables::{Cut, OfTiles};
use super::super::gpu::{self, Way};
use super::super::{Delays, KeyRanges, reference};
use super::{random_ranges, ranges_with_singles, variables};
use crate::cuda::emulator::emulated;
use crate::dispatch::Products;
use crate::graph::Backward;
use crate::test_support::{Noise, bits, relative_error};

/// Gradients of queries, keys and values along a direction.
fn gradients(variables: [&Var; 3], out: &Tensor, direction: &Tensor) -> Result<[Tensor; 3]> {
    let all = (out * direction)?.sum_all()?.gradients()?;
    Ok(variables.map(|variable| all.get(variable).expect("a gradient").clone()))
}

/// The same in one way of the GPU's.
fn of_way(
    way: Way,
    variables: [&Var; 3],
    ranges: &Arc<KeyRanges>,
    direction: &Tensor,
) -> Result<[Tensor; 3]> {
    let [q, k, v] = variables;
    emulated(|| {
        let out = gpu::attention_of(way, q, k, v, ranges)?.expect("heads of 64 and 128");
        gradients(variables, &out, direction)
    })
}

/// In f64, score by score.
fn in_f64(variables: [&Var; 3], ranges: &KeyRanges, direction: &Tensor) -> Result<[Tensor; 3]> {
    let wide = |t: &Tensor| t.detach().to_dtype(DType::F64);
    let [q, k, v] = variables.map(|variable| Var::from_tensor(&wide(variable)?));
    let (q, k, v) = (q?, k?, v?);
    let out = reference(&q, &k, &v, ranges)?;
    let all = gradients([&q, &k, &v], &out, &wide(direction)?)?;
    let narrow = all.map(|gradient| gradient.to_dtype(DType::F32));
    let [q, k, v] = narrow;
    Ok([q?, k?, v?])
}

/// Near what two kernels compute, and f64; every run has the same bits.
#[track_caller]
fn assert_holds(variables: [&Var; 3], ranges: &Arc<KeyRanges>, what: &str) -> Result<()> {
    let direction = Noise::new(5).tensor(variables[0].dims());
    let own = of_way(Way::OnePass, variables, ranges, &direction)?;
    let again = of_way(Way::OnePass, variables, ranges, &direction)?;
    let two = of_way(Way::Groups, variables, ranges, &direction)?;
    let exact = in_f64(variables, ranges, &direction)?;
    for (i, name) in ["q", "k", "v"].into_iter().enumerate() {
        assert_eq!(bits(&own[i]), bits(&again[i]), "{what}: {name} again");
        // Factors are the same: only sums have another order.
        let beside = relative_error(&own[i], &two[i]);
        assert!(beside < 1e-5, "{what}: {name} beside two kernels: {beside:e}");
        let error = relative_error(&own[i], &exact[i]);
        assert!(error < 3e-2, "{what}: {name} in f64: {error:e}");
    }
    Ok(())
}

#[test]
fn documents_windows_delays_and_single_keys_have_the_gradients_of_two_kernels() -> Result<()> {
    for (seed, tokens, kv_heads, group, head_dim) in
        [(0, 300, 1, 1, 64), (1, 150, 2, 2, 128), (2, 290, 1, 3, 128), (4, 135, 1, 2, 128)]
    {
        let mut noise = Noise::new(seed + 500);
        let ranges = if seed % 3 == 1 {
            Arc::new(ranges_with_singles(&mut noise, seed / 3, tokens))
        } else {
            random_ranges(&mut noise, tokens)
        };
        let keys = ranges.max_end().max(tokens) + noise.below(3);
        let heads = [tokens, kv_heads * group];
        let [q, k, v] = variables(&mut noise, heads, [keys, kv_heads], head_dim);
        assert_holds([&q, &k, &v], &ranges, &format!("seed {seed}"))?;
    }
    Ok(())
}

/// What a query sees, by its place.
type RangeOf = fn(usize) -> Range<usize>;

/// Four tiles of keys: all seen by all, tiles that nobody sees between others, rows that see nothing.
#[test]
fn ranges_of_any_order_have_the_gradients_of_two_kernels() -> Result<()> {
    let tokens = 260;
    let keys = 450;
    let kinds: [(&str, RangeOf); 3] = [
        ("all", |_| 0..450),
        // Rows of a tile are at both ends, so tiles between are visited without being seen.
        ("ends", |t| if t % 2 == 0 { 0..60 } else { 400..450 }),
        ("falling", |t| if t < 130 { 0..0 } else { (260 - t) * 2..450 - t }),
    ];
    for (i, (what, range)) in kinds.into_iter().enumerate() {
        let mut noise = Noise::new(i as u64 + 600);
        let ranges = Arc::new(KeyRanges::of_each((0..tokens).map(range)));
        let head_dim = [64, 128, 64][i];
        let [q, k, v] = variables(&mut noise, [tokens, 2], [keys, 1], head_dim);
        assert_holds([&q, &k, &v], &ranges, what)?;
    }
    Ok(())
}

/// Every visit of a tile of rows has its turn: from the first tile of keys to the last, none left out.
#[test]
fn all_who_add_to_a_tile_of_rows_visit_it() {
    for seed in 0..60 {
        let mut noise = Noise::new(seed + 700);
        let tokens = 1 + noise.below(400);
        let ranges = match seed % 3 {
            0 => random_ranges(&mut noise, tokens).as_ref().clone(),
            1 => ranges_with_singles(&mut noise, seed, tokens),
            _ => KeyRanges::of_each((0..tokens).map(|_| {
                let first = noise.below(300);
                first..first + noise.below(3) * noise.below(150)
            })),
        };
        let keys = ranges.max_end() + 1 + noise.below(200);
        let cut = Cut { keys: 128, rows: [64, 128][noise.below(2)], group: 1 + noise.below(5) };
        let of = OfTiles::new(&ranges, keys, cut);
        let what = format!("seed {seed}: {of:?}");
        for (tile, (&from, &until)) in of.keys_from.iter().zip(&of.keys_until).enumerate() {
            assert!(from < until && until as usize <= keys.div_ceil(cut.keys), "{what}");
            for own in from as usize..until as usize {
                let visited = of.rows_from[own]..of.rows_until[own];
                assert!(visited.contains(&(tile as u32)), "{own} {tile} {what}");
            }
            let (first, end) = (tile * cut.rows, (tile + 1) * cut.rows);
            for token in (0..tokens).filter(|t| t * cut.group < end && (t + 1) * cut.group > first)
            {
                let sees = ranges.of(token);
                let visits = from as usize * cut.keys..until as usize * cut.keys;
                let within = visits.start <= sees.start && sees.end <= visits.end;
                assert!(sees.is_empty() || within, "{token} {what}");
            }
        }
    }
}

#[test]
fn two_kernels_form_gradients_unless_one_is_asked_for() -> Result<()> {
    let way = |one_pass, products, head_dim| {
        emulated(|| Way::with(one_pass, products, head_dim, &Device::Cpu))
    };
    assert_eq!(way(false, Products::Half, 128), Way::Groups);
    assert_eq!([64, 128].map(|dim| way(true, Products::Half, dim)), [Way::OnePass; 2]);
    assert_eq!(way(true, Products::Half, 80), Way::Pipelined);
    assert_eq!(way(true, Products::Single, 64), Way::Terms(3));
    // Frozen keys, as those of a target: the kernel of queries alone.
    let mut noise = Noise::new(8);
    let q = noise.var(&[70, 2, 64]);
    let (k, v) = (noise.tensor(&[70, 1, 64]), noise.tensor(&[70, 1, 64]));
    let ranges = Arc::new(KeyRanges::packed(&[0; 70], None, Delays::Same(1)));
    let of = |way| {
        emulated(|| {
            let out = gpu::attention_of(way, &q, &k, &v, &ranges)?.expect("heads of 64");
            let all = out.sqr()?.sum_all()?.gradients()?;
            assert!(all.get(&k).is_none() && all.get(&v).is_none());
            Ok::<_, candle_core::Error>(bits(all.get(&q).expect("a gradient")))
        })
    };
    assert_eq!(of(Way::OnePass)?, of(Way::Groups)?);
    Ok(())
}
