//! Keys and values that are held in 16 and in 8 bits.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::{KeyRanges, attention, half_keys, keys, quantised_keys, reference};
use super::assert_same_bits;
use crate::graph::Backward;
use crate::test_support::{Noise, assert_close};

/// Turns keys or values into another type.
type Turn = fn(&Tensor) -> Result<Tensor>;

/// Keys and values held in another type give the bits of their widened values.
fn assert_count_as_their_values(
    sizes: (usize, usize, usize),
    (held, widened): (Turn, Turn),
) -> Result<()> {
    let (queries, cached, head_dim) = sizes;
    let mut noise = Noise::new(71 + queries as u64);
    let keys = cached + queries;
    let q = noise.tensor(&[queries, 6, head_dim]);
    let k = held(&noise.tensor(&[keys, 2, head_dim]))?;
    let v = held(&noise.tensor(&[keys, 2, head_dim]))?;
    let (wide_k, wide_v) = (widened(&k)?, widened(&v)?);
    let parents: Vec<Option<usize>> = (0..queries).map(|i| i.checked_sub(2)).collect();
    for ranges in [KeyRanges::appended(cached, queries), KeyRanges::tree(cached, &parents)] {
        let ranges = Arc::new(ranges);
        let (own, wide) =
            (attention(&q, &k, &v, &ranges)?, attention(&q, &wide_k, &wide_v, &ranges)?);
        assert_eq!(own.flatten_all()?.to_vec1::<f32>()?, wide.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(())
}

#[test]
fn keys_of_16_bits_count_as_their_values() -> Result<()> {
    // 24: not whole vectors. One query and a few, as at decoding, and more than a tile of them; 5, 9, 16 and 17 queries are
    // 15, 27, 48 and 51 rows of a head.
    for sizes in [
        (1, 700, 64),
        (5, 300, 24),
        (3, 0, 16),
        (80, 260, 32),
        (5, 1100, 64),
        (9, 1100, 64),
        (16, 700, 32),
        (17, 700, 32),
    ] {
        let halves: (Turn, Turn) = (|t| t.to_dtype(DType::F16), |t| t.to_dtype(DType::F32));
        assert_count_as_their_values(sizes, halves)?;
    }
    Ok(())
}

#[test]
fn keys_of_8_bits_count_as_their_values() -> Result<()> {
    for sizes in [(1, 700, 64), (5, 300, 32), (3, 0, 96), (80, 260, 32)] {
        assert_count_as_their_values(sizes, (quantised_keys, keys::widened_keys))?;
    }
    Ok(())
}

#[test]
fn blocks_of_8_bits_beside_floats_fit_nothing() -> Result<()> {
    let zeros = Tensor::zeros((3, 2, 32), DType::F32, &Device::Cpu)?;
    let ranges = Arc::new(KeyRanges::appended(0, 3));
    let blocks = quantised_keys(&zeros)?;
    assert!(attention(&zeros, &blocks, &zeros, &ranges).is_err());
    // As many bytes a head as whole blocks would have, but not their values.
    let wider = Tensor::zeros((3, 2, 48), DType::F32, &Device::Cpu)?;
    assert!(attention(&wider, &blocks, &blocks, &ranges).is_err());
    Ok(())
}

#[test]
fn queries_keys_and_values_of_16_bits_count_as_their_values() -> Result<()> {
    let mut noise = Noise::new(90);
    let ranges = Arc::new(KeyRanges::appended(4, 3));
    let [q, k, v] = [[3, 4, 32], [7, 2, 32], [7, 2, 32]]
        .map(|shape| noise.tensor(&shape).to_dtype(DType::F16).expect("f16"));
    let own = attention(&q, &k, &v, &ranges)?;
    assert_eq!(own.dtype(), DType::F16);
    let wide = |t: &Tensor| t.to_dtype(DType::F32);
    let want = reference(&wide(&q)?, &wide(&k)?, &wide(&v)?, &ranges)?;
    assert_close("f16", &wide(&own)?, &want, 1e-3);
    Ok(())
}

#[test]
fn queries_train_against_narrow_keys() -> Result<()> {
    let mut noise = Noise::new(89);
    let ranges = Arc::new(KeyRanges::appended(0, 3));
    let query = Var::from_tensor(&noise.tensor(&[3, 2, 32]))?;
    let keys = noise.tensor(&[3, 2, 32]);
    let gradient_for = |held: &Tensor| -> Result<Tensor> {
        let out = attention(query.as_tensor(), held, held, &ranges)?;
        let gradients = out.sqr()?.sum_all()?.gradients()?;
        Ok(gradients.get(&query).expect("a gradient").clone())
    };
    let halves = keys.to_dtype(DType::F16)?;
    let (narrow, wide) = (gradient_for(&halves)?, gradient_for(&halves.to_dtype(DType::F32)?)?);
    let error = (narrow - &wide)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(error < 1e-4, "{error}");
    Ok(())
}

#[test]
fn values_beyond_16_bits_reach_no_row_that_does_not_see_them() -> Result<()> {
    let mut noise = Noise::new(97);
    let (tokens, before) = (5, 4);
    let [q, k, v] = [2, 1, 1].map(|heads| noise.tensor(&[tokens, heads, 16]));
    let large = (v.narrow(0, before, 1)? * 1e7)?;
    let v = half_keys(&Tensor::cat(&[v.narrow(0, 0, before)?, large], 0)?)?;
    let k = half_keys(&k)?;
    let attended = |rows: usize| {
        let of = |t: &Tensor| t.narrow(0, 0, rows);
        attention(&of(&q)?, &of(&k)?, &of(&v)?, &Arc::new(KeyRanges::appended(0, rows)))
    };
    let all = attended(tokens)?;
    assert_same_bits(&all.narrow(0, 0, before)?, &attended(before)?);
    assert!(all.flatten_all()?.to_vec1::<f32>()?.iter().all(|value| value.is_finite()));
    Ok(())
}
