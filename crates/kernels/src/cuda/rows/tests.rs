use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::emulator::emulated;
use super::{HELD, MOST_THREADS};
use crate::rms_norm::rms_norm;
use crate::rope::{Rope, RopeScaling, rope};
use crate::test_support::{Noise, assert_alike, assert_close};

/// The GPU's result and gradients against the CPU's, along a random direction.
fn assert_same(op: impl Fn() -> Result<Tensor>, variables: &[&Var]) -> Result<()> {
    let plain = op()?;
    let direction = Noise::new(77).tensor(plain.dims());
    let named: Vec<_> = ["first", "second"].into_iter().zip(variables.iter().copied()).collect();
    emulated(|| {
        assert_alike(&named, &direction, [&op()?, &plain], (1e-6, 1e-5));
        Ok(())
    })
}

#[test]
fn norms_match_the_cpu() -> Result<()> {
    for (seed, shape) in [
        (1, vec![1, 1]),
        (2, vec![3, 2, 48]),
        (3, vec![140, 321]),
        // Wider than what a block's threads keep.
        (4, vec![1, HELD * MOST_THREADS + 36]),
    ] {
        let mut noise = Noise::new(seed);
        let (x, w) = (noise.var(&shape), noise.var(&shape[shape.len() - 1..]));
        assert_same(|| rms_norm(&x, &w, 1e-5), &[&x, &w])?;
        // Where only one trains.
        assert_same(|| rms_norm(&x, &w.detach(), 1e-5), &[&x])?;
        assert_same(|| rms_norm(&x.detach(), &w, 1e-5), &[&w])?;
    }
    Ok(())
}

#[test]
fn a_normed_row_has_the_bits_that_it_has_alone_at_any_place() -> Result<()> {
    let mut noise = Noise::new(5);
    for hidden in [48, 321, 1000] {
        let (x, w) = (noise.tensor(&[5, hidden]), noise.tensor(&[hidden]));
        let all = emulated(|| rms_norm(&x, &w, 1e-5))?.to_vec2::<f32>()?;
        for (i, of_all) in all.iter().enumerate() {
            let row = x.narrow(0, i, 1)?;
            // At a place that is no multiple of 16 bytes.
            let shifted = Tensor::cat(&[&noise.tensor(&[1]), &row.flatten_all()?], 0)?;
            let shifted = shifted.narrow(0, 1, hidden)?.reshape((1, hidden))?;
            for one in [row, shifted] {
                let alone = emulated(|| rms_norm(&one, &w, 1e-5))?.to_vec2::<f32>()?;
                assert_eq!(&alone[0], of_all, "row {i} of {hidden} values");
            }
        }
    }
    Ok(())
}

#[test]
fn rotations_match_the_cpu() -> Result<()> {
    for (tokens, heads, head_dim) in [(1, 1, 2), (33, 3, 16), (70, 1, 80)] {
        let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 37).collect();
        let table = Rope::new(head_dim, 1e4, RopeScaling::None)?.table(&positions, &Device::Cpu)?;
        let x = Noise::new(4).var(&[tokens, heads, head_dim]);
        assert_same(|| rope(&x, &table), &[&x])?;
        let part = x.narrow(1, heads - 1, 1)?;
        assert_same(|| rope(&part, &table), &[&x])?;
    }
    Ok(())
}

#[test]
fn values_are_rounded_as_elsewhere() -> Result<()> {
    let mut noise = Noise::new(12);
    for shape in [[1, 1], [3, 5], [40, 64], [33, 129]] {
        let x = (noise.tensor(&shape) * 7.0)?;
        // Halfway between two bf16 values.
        let x = Tensor::cat(&[&x, &(x.ones_like()? * (1.0 + 1.0 / 256.0))?], 0)?;
        let (own, want) = (emulated(|| super::to_halves(&x))?, x.to_dtype(DType::BF16)?);
        assert_eq!(own.dtype(), DType::BF16);
        let wide = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec2::<f32>();
        assert_eq!(wide(&own)?, wide(&want)?);
    }
    Ok(())
}

#[test]
fn tables_of_angles_match_the_cpu() -> Result<()> {
    let positions: Vec<u32> = (0..70).map(|t| t * t * 31).collect();
    let rope = Rope::new(80, 1e4, RopeScaling::None)?.amplified(1.25);
    let table = |positions: &[u32]| rope.table(positions, &Device::Cpu);
    let (own, plain) = (emulated(|| table(&positions))?, table(&positions)?);
    assert_close("cos", own.cos(), plain.cos(), 1e-7);
    assert_close("sin", own.sin(), plain.sin(), 1e-7);
    // The longest wave comes last, the shortest first; both start at 1 and 0.
    let first = |of: &Tensor, row: usize| of.to_vec2::<f32>().map(|rows| rows[row].clone());
    assert_eq!(first(own.cos(), 0)?, [1.25; 40]);
    assert_eq!(first(own.sin(), 0)?, [0.0; 40]);
    assert!((first(own.sin(), 1)?[0] - 1.25 * 31_f32.sin()).abs() < 1e-6);
    assert_eq!(emulated(|| table(&[]))?.cos().dims(), [0, 40]);
    Ok(())
}
