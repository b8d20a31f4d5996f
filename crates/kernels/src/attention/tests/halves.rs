//! The GPU's kernels, emulated, on bf16 arguments.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::super::{KeyRanges, attention};
use super::{random_ranges, ranges_with_singles};
use crate::cuda::emulator::emulated;
use crate::dispatch::with_half_products;
use crate::test_support::{Noise, assert_close};

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
