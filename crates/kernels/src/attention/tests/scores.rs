//! Scores that are bent, or share the softmax with sinks.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::{KeyRanges, Reach, Scores, attention, frozen_attention};
use super::{capped, composed, random_tree};
use crate::test_support::{Noise, assert_close};

#[test]
fn soft_capped_scores_are_bent_before_the_softmax() -> Result<()> {
    let mut noise = Noise::new(81);
    let ([q, k, v], parents) = random_tree(&mut noise, 40, 9);
    let q = (q * 6.0)?;
    let ranges = Arc::new(KeyRanges::tree_in(40, &parents, Reach::Window(30)));
    let got = frozen_attention(&q, &k, &v, &ranges, capped(1.5))?;
    assert_close("composed", &composed([&q, &k, &v], &ranges, capped(1.5))?, &got, 1e-5);
    assert!(
        (got.sub(&attention(&q, &k, &v, &ranges)?)?).abs()?.max_all()?.to_scalar::<f32>()? > 0.05
    );
    // Query 7, head 4 by hand.
    let (query, head) = (7, 4);
    let seen = ranges.of(query).map(|key| key as u32).chain(ranges.singles_of(query).to_vec());
    let seen = Tensor::from_iter(seen, &Device::Cpu)?;
    let of =
        |t: &Tensor| t.narrow(1, head / 3, 1)?.squeeze(1)?.contiguous()?.index_select(&seen, 0);
    let row = q.get(query)?.narrow(0, head, 1)?;
    let scores = (row.matmul(&of(&k)?.t()?)? / 16.0_f64.sqrt())?;
    let weights = (((scores / 1.5)?.tanh()? * 1.5)?).exp()?;
    let sum = weights.sum_all()?.to_scalar::<f32>()?;
    let want = (weights.matmul(&of(&v)?)? / f64::from(sum))?;
    assert_close("one row", &got.get(query)?.narrow(0, head, 1)?, &want, 1e-5);
    // Wide ones bend nothing that f32 shows.
    let wide = frozen_attention(&q, &k, &v, &ranges, capped(1e4))?;
    assert_close("wide", &wide, &attention(&q, &k, &v, &ranges)?, 1e-4);
    let var = Var::from_tensor(&q)?;
    assert!(frozen_attention(&var, &k, &v, &ranges, capped(1.5)).is_err());
    for softcap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(frozen_attention(&q, &k, &v, &ranges, capped(softcap)).is_err());
    }
    Ok(())
}

#[test]
fn sinks_take_their_share_of_the_softmax_in_every_version_and_cache() -> Result<()> {
    let mut noise = Noise::new(82);
    let ([q, k, v], parents) = random_tree(&mut noise, 300, 9);
    let ranges = Arc::new(KeyRanges::tree_in(300, &parents, Reach::Window(290)));
    let heads = q.dim(1)?;
    let sinks = (noise.tensor(&[heads]) * 3.0)?;
    let scores = Scores { softcap: None, sinks: Some(&sinks) };
    let got = frozen_attention(&q, &k, &v, &ranges, scores)?;
    assert_close("composed", &composed([&q, &k, &v], &ranges, scores)?, &got, 1e-5);
    // As one more key per head: q · k' / √D is the sink, and its value is 0.
    let (query, head) = (5, 3);
    let kv = head / (heads / k.dim(1)?);
    let seen = ranges.of(query).map(|key| key as u32).chain(ranges.singles_of(query).to_vec());
    let seen = Tensor::from_iter(seen, &Device::Cpu)?;
    let of = |t: &Tensor| t.narrow(1, kv, 1)?.squeeze(1)?.contiguous()?.index_select(&seen, 0);
    let row = q.get(query)?.narrow(0, head, 1)?;
    let weights = (row.matmul(&of(&k)?.t()?)? / (q.dim(2)? as f64).sqrt())?.exp()?;
    let sink = f64::from(sinks.to_vec1::<f32>()?[head]).exp();
    let sum = f64::from(weights.sum_all()?.to_scalar::<f32>()?) + sink;
    let want = (weights.matmul(&of(&v)?)? / sum)?;
    assert_close("one row", &got.get(query)?.narrow(0, head, 1)?, &want, 1e-5);
    // Caches of 16 and of 8 bits, and queries beyond one tile.
    let half = |t: &Tensor| t.to_dtype(DType::F16);
    let halves = frozen_attention(&q, &half(&k)?, &half(&v)?, &ranges, scores)?;
    assert_close("f16", &halves, &got, 2e-2);
    let many = Arc::new(KeyRanges::appended_in(0, 309, Reach::Window(290)));
    let q = noise.tensor(&[309, heads, q.dim(2)?]);
    let got = frozen_attention(&q, &k, &v, &many, scores)?;
    assert_close("many", &composed([&q, &k, &v], &many, scores)?, &got, 1e-5);
    let few = noise.tensor(&[heads - 1]);
    assert!(frozen_attention(&q, &k, &v, &many, Scores { sinks: Some(&few), ..scores }).is_err());
    Ok(())
}
