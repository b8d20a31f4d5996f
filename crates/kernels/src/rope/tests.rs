use super::*;
use crate::test_support::{Noise, assert_alike, assert_close, gradcheck};

#[test]
fn fused_matches_reference_forward_and_backward() -> Result<()> {
    for (seed, tokens, heads, head_dim) in [(1, 1, 1, 2), (2, 33, 3, 16), (3, 70, 1, 80)] {
        let rope_of = Rope::new(head_dim, 10_000.0, RopeScaling::None)?;
        let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 37).collect();
        let table = rope_of.table(&positions, &Device::Cpu)?;
        let mut noise = Noise::new(seed);
        let x = noise.var(&[tokens, heads, head_dim]);
        let direction = noise.tensor(&[tokens, heads, head_dim]);
        let plain = reference(&x, &table)?;
        for own in [rope(&x, &table)?, composed(&x, &table)?] {
            assert_alike(&[("x", &x)], &direction, [&own, &plain], (1e-6, 1e-6));
        }
    }
    Ok(())
}

#[test]
fn neighbours_and_parts_of_a_head_turn_alike_in_every_version() -> Result<()> {
    let positions = [0, 5, 41, 1000];
    for (turning, head_dim, neighbours) in
        [(8, 8, true), (6, 10, false), (4, 12, true), (2, 3, true)]
    {
        let of = Rope::new(turning, 1e4, RopeScaling::None)?.within(head_dim)?;
        let of = if neighbours { of.of_neighbours() } else { of };
        assert_eq!(of.head_dim(), head_dim);
        let table = of.table(&positions, &Device::Cpu)?;
        let mut noise = Noise::new(9);
        let x = noise.var(&[4, 3, head_dim]);
        let direction = noise.tensor(&[4, 3, head_dim]);
        let (fused, plain) = (rope(&x, &table)?, reference(&x, &table)?);
        assert_alike(&[("x", &x)], &direction, [&fused, &plain], (1e-6, 1e-6));
        // The half-split version of re-ordered dimensions is the same rotation.
        let place = |i: usize| match i {
            i if i >= turning || !neighbours => i,
            i => 2 * (i % (turning / 2)) + i / (turning / 2),
        };
        let order: Vec<u32> = (0..head_dim).map(|i| place(i) as u32).collect();
        let order = Tensor::new(order, &Device::Cpu)?;
        let split = RopeTable { interleaved: false, ..table.clone() };
        let turned = reference(&x.index_select(&order, 2)?, &split)?;
        assert_close("re-ordered", &fused.index_select(&order, 2)?, &turned, 1e-6);
        let back = rope(&fused.detach(), &table.reversed()?)?;
        assert_close("back", &back, &x, 1e-5);
    }
    let still = Rope::still(6).table(&positions, &Device::Cpu)?;
    let x = Noise::new(4).tensor(&[4, 2, 6]);
    assert_close("still", &rope(&x, &still)?, &x, 0.0);
    let wide = Rope::new(8, 1e4, RopeScaling::None)?;
    assert!(wide.clone().within(6).is_err());
    assert!(rope(&x, &wide.table(&positions, &Device::Cpu)?).is_err());
    Ok(())
}

#[test]
fn reference_gradient_matches_differences() -> Result<()> {
    let table = Rope::new(4, 100.0, RopeScaling::None)?.table(&[0, 3, 9], &Device::Cpu)?;
    gradcheck(&[Noise::new(5).tensor(&[3, 2, 4])], |t| reference(&t[0], &table));
    Ok(())
}

#[test]
fn position_zero_is_the_identity() -> Result<()> {
    let table = Rope::new(8, 1e6, RopeScaling::None)?.table(&[0], &Device::Cpu)?;
    let x = Noise::new(6).tensor(&[1, 2, 8]);
    assert_close("identity", &rope(&x, &table)?, &x, 0.0);
    Ok(())
}

#[test]
fn linear_scaling_equals_positions_divided() -> Result<()> {
    let plain = Rope::new(8, 1e4, RopeScaling::None)?.table(&[5], &Device::Cpu)?;
    let scaled =
        Rope::new(8, 1e4, RopeScaling::Linear { factor: 4.0 })?.table(&[20], &Device::Cpu)?;
    assert_close("cos", scaled.cos(), plain.cos(), 1e-6);
    Ok(())
}

#[test]
fn llama3_keeps_short_and_divides_long_wavelengths() -> Result<()> {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192.0,
    };
    let base = Rope::new(128, 500_000.0, RopeScaling::None)?.inv_freq;
    let scaled = Rope::new(128, 500_000.0, scaling)?.inv_freq;
    assert_eq!(base[0].to_bits(), scaled[0].to_bits());
    assert!((base[63] / scaled[63] - 8.0).abs() < 1e-5);
    // Wavelength 2π·500000^(2·32/128) ≈ 4443 lies in the band: hand-computed blend.
    let s = (8192.0 * base[32] / (2.0 * std::f32::consts::PI) - 1.0) / 3.0;
    let want = (1.0 - s) * base[32] / 8.0 + s * base[32];
    assert!((scaled[32] - want).abs() < 1e-9);
    Ok(())
}

#[test]
fn yarn_keeps_fast_dimensions_divides_slow_and_scales_amplitude() -> Result<()> {
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 32768.0,
        attention_factor: 0.1 * 4.0_f64.ln() + 1.0,
        truncate: true,
    };
    let base = Rope::new(128, 1e6, RopeScaling::None)?.inv_freq;
    let rope_of = Rope::new(128, 1e6, scaling)?;
    assert_eq!(base[0].to_bits(), rope_of.inv_freq[0].to_bits());
    assert!((base[63] / rope_of.inv_freq[63] - 4.0).abs() < 1e-5);
    assert!((rope_of.amplitude - 1.138_629).abs() < 1e-5);
    Ok(())
}

#[test]
fn a_narrower_table_turns_the_first_values_of_a_head() -> Result<()> {
    let table = Rope::new(4, 1e4, RopeScaling::None)?.table(&[3, 8], &Device::Cpu)?;
    let x = Noise::new(9).tensor(&[2, 3, 10]);
    let (some, rest) = (rope(&x, &table)?, x.narrow(2, 4, 6)?);
    let first = rope(&x.narrow(2, 0, 4)?.contiguous()?, &table)?;
    assert_close("turned", &some.narrow(2, 0, 4)?, &first, 0.0);
    assert_close("kept", &some.narrow(2, 4, 6)?, &rest, 0.0);
    assert!(rope(&x.narrow(2, 0, 2)?, &table).is_err());
    assert!(rope(&x.narrow(0, 0, 1)?, &table).is_err());
    Ok(())
}

#[test]
fn odd_head_dim_is_an_error() {
    assert!(Rope::new(7, 1e4, RopeScaling::None).is_err());
}
