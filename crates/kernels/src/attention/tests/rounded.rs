//! Products of rounded factors.

use std::sync::Arc;

use candle_core::{Result, Tensor, Var};

use super::super::{KeyRanges, attention};
use super::variables;
use crate::dispatch::with_rounded_products;
use crate::gemm::pays_for_rounding;
use crate::graph::Backward;
use crate::test_support::{Noise, bits, relative_error};

/// The result, and the gradients of the arguments along a direction.
fn all(arguments: &[Var; 3], ranges: &Arc<KeyRanges>, direction: &Tensor) -> Result<Vec<Tensor>> {
    let [q, k, v] = arguments;
    let out = attention(q, k, v, ranges)?;
    let gradients = (&out * direction)?.sum_all()?.gradients()?;
    let mut all = vec![out.detach()];
    for argument in arguments {
        all.push(gradients.get(argument).expect("gradient").clone());
    }
    Ok(all)
}

#[test]
fn rounded_factors_change_less_than_bf16_would() -> Result<()> {
    let mut noise = Noise::new(31);
    let (tokens, heads, kv_heads, head_dim) = (600, 4, 2, 64);
    let arguments = variables(&mut noise, [tokens, heads], [3 * tokens, kv_heads], head_dim);
    let direction = noise.tensor(&[tokens, heads, head_dim]);
    let rounds = pays_for_rounding((tokens * heads / kv_heads, head_dim, 3 * tokens));
    for ranges in
        [KeyRanges::appended(0, tokens), KeyRanges::appended(0, tokens).with_own_columns(2)]
    {
        let ranges = Arc::new(ranges);
        let exact = all(&arguments, &ranges, &direction)?;
        let rounded = with_rounded_products(true, || all(&arguments, &ranges, &direction))?;
        let again = with_rounded_products(true, || all(&arguments, &ranges, &direction))?;
        for (index, exact) in exact.iter().enumerate() {
            assert_eq!(bits(&rounded[index]), bits(&again[index]), "{index}");
            let error = relative_error(&rounded[index], exact);
            assert_eq!(error > 0.0, rounds, "{index}: {error}");
            // What bf16 rounds of a single factor.
            assert!(error < 2.0_f64.powi(-9), "{index}: {error}");
        }
    }
    Ok(())
}

/// The gradients are those of the op, whatever the thread asks for when they are formed.
#[test]
fn a_backward_pass_rounds_as_its_forward_pass() -> Result<()> {
    let mut noise = Noise::new(32);
    let arguments = variables(&mut noise, [600, 2], [600, 2], 64);
    let ranges = Arc::new(KeyRanges::appended(0, 600));
    let [q, k, v] = &arguments;
    let of = |outside: bool| -> Result<Vec<u32>> {
        let out = with_rounded_products(true, || attention(q, k, v, &ranges))?;
        let gradients = with_rounded_products(outside, || out.sum_all()?.gradients())?;
        Ok(bits(gradients.get(k).expect("gradient")))
    };
    assert_eq!(of(true)?, of(false)?);
    Ok(())
}
