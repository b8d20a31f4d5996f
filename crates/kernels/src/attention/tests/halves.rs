//! The GPU's kernels, emulated, on bf16 arguments.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::{KeyRanges, attention, keeps_halves};
use super::{random_ranges, ranges_with_singles, variables};
use crate::cuda::emulator::emulated;
use crate::dispatch::with_half_products;
use crate::factors::input_factor;
use crate::graph::{Backward, cat, narrow, node};
use crate::rope::{Rope, RopeScaling, RopeTable, rope};
use crate::test_support::{Noise, assert_close, bits};

fn half(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::BF16)
}

fn wide(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32)
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    wide(tensor)?.flatten_all()?.to_vec1()
}

/// bf16 queries, keys and values of a network that does not train: what the f32 ones of the same values give, rounded.
#[test]
fn bf16_arguments_have_the_result_of_their_values() -> Result<()> {
    for (seed, tokens, head_dim) in
        [(0, 97, 64), (1, 70, 80), (2, 130, 128), (3, 66, 20), (4, 70, 256), (5, 70, 200)]
    {
        let mut noise = Noise::new(seed + 400);
        let ranges = if seed == 1 || seed == 5 {
            Arc::new(ranges_with_singles(&mut noise, 3, tokens))
        } else {
            random_ranges(&mut noise, tokens)
        };
        let keys = ranges.max_end().max(tokens);
        let q = half(&noise.tensor(&[tokens, 4, head_dim]))?;
        let k = half(&noise.tensor(&[keys, 2, head_dim]))?;
        let v = half(&noise.tensor(&[keys, 2, head_dim]))?;
        let (wide_q, wide_k, wide_v) = (wide(&q)?, wide(&k)?, wide(&v)?);
        with_half_products(|| {
            emulated(|| {
                let of_values = attention(&wide_q, &wide_k, &wide_v, &ranges)?;
                let own = attention(&q, &k, &v, &ranges)?;
                assert_eq!(own.dtype(), DType::BF16);
                assert_eq!(values(&own)?, values(&half(&of_values)?)?);
                // One of them alone.
                let mixed = attention(&wide_q, &k, &wide_v, &ranges)?;
                assert_eq!(values(&mixed)?, values(&of_values)?);
                Ok::<_, candle_core::Error>(())
            })
        })?;
        // Where the kernels do not run they are widened.
        let plain = attention(&q, &k, &v, &ranges)?;
        assert_eq!(plain.dtype(), DType::BF16);
        let of_values = attention(&wide_q, &wide_k, &wide_v, &ranges)?;
        assert_eq!(values(&plain)?, values(&half(&of_values)?)?);
    }
    Ok(())
}

/// Ranges of keys, for odd seeds with single ones beside them.
fn ranges_of(seed: u64, tokens: usize) -> Arc<KeyRanges> {
    let mut noise = Noise::new(seed + 600);
    match seed % 2 {
        1 => Arc::new(ranges_with_singles(&mut noise, seed / 2, tokens)),
        _ => random_ranges(&mut noise, tokens),
    }
}

/// Bits of a result, and of the gradients of variables that it was computed from.
fn all_bits(out: &Tensor, variables: [&Var; 3]) -> Result<Vec<Vec<u32>>> {
    let gradients = out.sqr()?.sum_all()?.gradients()?;
    let of_variables = variables.map(|t| bits(gradients.get(t).expect("a gradient")));
    Ok([vec![bits(out)], of_variables.to_vec()].concat())
}

/// Tokens, and widths of heads: of all kinds of kernels, the last one of those that read f32.
const TRAINED: [(u64, usize, usize); 7] =
    [(0, 97, 64), (1, 70, 64), (2, 70, 80), (3, 70, 80), (4, 130, 128), (5, 66, 256), (6, 70, 20)];

/// Queries, keys and values that train are rounded once. The graph keeps them so if it lets go of the f32 ones, which
/// changes no bit: neither of results nor of gradients.
#[test]
fn what_trains_is_kept_in_bf16_with_the_bits_of_its_rounded_values() -> Result<()> {
    for (seed, tokens, head_dim) in TRAINED {
        let ranges = ranges_of(seed, tokens);
        let keys = ranges.max_end().max(tokens);
        let [q, k, v] = variables(&mut Noise::new(seed + 700), [tokens, 4], [keys, 2], head_dim);
        let of_halves = |t: &Var| Var::from_tensor(&wide(&half(t)?)?);
        let rounded = [of_halves(&q)?, of_halves(&k)?, of_halves(&v)?];
        with_half_products(|| {
            emulated(|| {
                // Values of variables may change, so that they are kept themselves.
                let of_variables = all_bits(&attention(&q, &k, &v, &ranges)?, [&q, &k, &v])?;
                let nodes = [node(&q)?, node(&k)?, node(&v)?];
                let out = attention(&nodes[0], &nodes[1], &nodes[2], &ranges)?;
                for t in &nodes {
                    let [kept, again] = [0; 2].map(|_| input_factor(t, DType::BF16));
                    let are_kept = Arc::ptr_eq(&kept?, &again?);
                    assert_eq!(are_kept, keeps_halves(head_dim), "heads of {head_dim}");
                }
                let of_nodes = all_bits(&out, [&q, &k, &v])?;
                assert!(of_nodes == of_variables, "heads of {head_dim}");
                let [q, k, v] = &rounded;
                let of_rounded = all_bits(&attention(q, k, v, &ranges)?, [q, k, v])?;
                // In f32 single keys are read as they are.
                let are_read = keeps_halves(head_dim) || seed % 2 == 0;
                assert_eq!(of_nodes == of_rounded, are_read, "heads of {head_dim}");
                Ok::<_, candle_core::Error>(())
            })
        })?;
    }
    Ok(())
}

/// Rotated queries and keys, some of them laid end to end as test-time steps have them, have the gradients of the rotation
/// of what attention gives to rotated variables, whether attention rounds them or the rotation does.
#[test]
fn rotated_heads_that_are_kept_in_bf16_have_the_bits_of_variables() -> Result<()> {
    for (seed, tokens, head_dim) in TRAINED {
        let ranges = ranges_of(seed, tokens);
        let keys = ranges.max_end().max(tokens);
        let [q, k, v] = variables(&mut Noise::new(seed + 800), [tokens, 4], [keys, 2], head_dim);
        let positions = |count: usize| (0..count as u32).map(|t| 5 * t).collect::<Vec<_>>();
        let rotation = Rope::new(head_dim, 1e4, RopeScaling::None)?;
        let table = |count| rotation.table(&positions(count), &Device::Cpu);
        let (of_q, of_k) = (table(tokens)?, table(keys)?);
        let rounded = [of_q.clone().attended(), of_k.clone().attended()];
        let rounding = |[to_q, to_k]: [&RopeTable; 2]| -> Result<()> {
            emulated(|| {
                let turned = rope(&k, to_k)?;
                let first = keys / 2;
                let parts =
                    [narrow(&turned, 0, 0, first)?, narrow(&turned, 0, first, keys - first)?];
                let own = attention(&rope(&q, to_q)?, &cat(&parts, 0)?, &node(&v)?, &ranges)?;
                let [turned_q, turned_k] = [rope(&q, &of_q)?, rope(&k, &of_k)?];
                let dtype = if keeps_halves(head_dim) { DType::BF16 } else { DType::F32 };
                let is_rounded = std::ptr::eq(to_k, &raw const rounded[1]);
                assert_eq!(turned.dtype(), if is_rounded { dtype } else { DType::F32 });
                let turned_q = Var::from_tensor(&turned_q.detach())?;
                let turned_k = Var::from_tensor(&turned_k.detach())?;
                let plain = attention(&turned_q, &turned_k, &v, &ranges)?;
                assert_eq!(bits(&own), bits(&plain));
                let (own, plain) =
                    (own.sqr()?.sum_all()?.gradients()?, plain.sqr()?.sum_all()?.gradients()?);
                let gradient = |store: &candle_core::backprop::GradStore, of: &Var| {
                    store.get(of).expect("a gradient").clone()
                };
                let back = |t: Tensor, table: &RopeTable| rope(&t, &table.reversed()?);
                assert_eq!(bits(&gradient(&own, &v)), bits(&gradient(&plain, &v)));
                let want = back(gradient(&plain, &turned_q), &of_q)?;
                assert_eq!(bits(&gradient(&own, &q)), bits(&want), "heads of {head_dim}");
                let want = back(gradient(&plain, &turned_k), &of_k)?;
                assert_eq!(bits(&gradient(&own, &k)), bits(&want), "heads of {head_dim}");
                Ok(())
            })
        };
        with_half_products(|| {
            rounding([&of_q, &of_k])?;
            rounding([&rounded[0], &rounded[1]])
        })?;
    }
    Ok(())
}

/// Few queries over keys and values that a cache holds in bf16.
#[test]
fn few_queries_read_bf16_keys_as_they_lie() -> Result<()> {
    // Heads of which a lane reads eight values at once, four, and one.
    for (seed, head_dim) in [(0, 128), (1, 64), (2, 80), (3, 20), (4, 9), (5, 256), (6, 320)] {
        let mut noise = Noise::new(seed + 500);
        let cached = 100 + noise.below(200);
        let parents = [None, Some(0), Some(0), Some(2), Some(1)];
        let all = [KeyRanges::appended(cached, 5), KeyRanges::tree(cached, &parents)];
        for ranges in all.map(Arc::new) {
            let q = noise.tensor(&[5, 6, head_dim]);
            // A part of a cache that has room for more.
            let mut held =
                || half(&noise.tensor(&[cached + 9, 2, head_dim]))?.narrow(0, 0, cached + 5);
            let (k, v) = (held()?, held()?);
            let plain = attention(&q, &wide(&k)?, &wide(&v)?, &ranges)?;
            let own = emulated(|| attention(&q, &k, &v, &ranges))?;
            assert_close("halves", &own, &plain, 2e-6);
            let of_types = emulated(|| attention(&q, &k, &wide(&v)?, &ranges))?;
            assert_close("halves beside f32", &of_types, &plain, 2e-6);
            // A query has the bits that it has alone.
            let first = Arc::new(KeyRanges::appended(cached, 1));
            let (k, v) = (k.narrow(0, 0, cached + 1)?, v.narrow(0, 0, cached + 1)?);
            let alone = emulated(|| attention(&q.narrow(0, 0, 1)?, &k, &v, &first))?;
            assert_eq!(values(&alone)?, values(&own.narrow(0, 0, 1)?)?);
        }
    }
    Ok(())
}
