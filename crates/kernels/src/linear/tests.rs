use std::sync::Arc;

use crate::graph::{Backward, cat, scale};
use candle_core::Var;

use super::*;
use crate::cuda::emulator::emulated;
use crate::dispatch::with_half_products;
use crate::factors::with_factors;
use crate::matrix::{Matrix, linear_each};
use crate::test_support::{Noise, assert_alike, assert_close, assert_gradients, bits, gradcheck};

#[test]
fn fused_matches_reference_forward_and_backward() -> Result<()> {
    for (seed, rows, inputs, outputs) in
        [(1, 1, 1, 1), (2, 3, 7, 5), (3, 16, 33, 70), (4, 17, 33, 70), (5, 90, 64, 300)]
    {
        let mut noise = Noise::new(seed);
        let (x, w, b) =
            (noise.var(&[rows, inputs]), noise.var(&[outputs, inputs]), noise.var(&[outputs]));
        let direction = noise.tensor(&[rows, outputs]);
        let fused = linear(&x, &w, Some(&b))?;
        let plain = reference(&x, &w, Some(&b))?;
        let variables = [("x", &x), ("weight", &w), ("bias", &b)];
        assert_alike(&variables, &direction, [&fused, &plain], (1e-6, 1e-5));
    }
    Ok(())
}

#[test]
fn products_of_nothing_are_zeros() -> Result<()> {
    let mut noise = Noise::new(8);
    let zeros = |of: &Tensor| -> Result<bool> {
        Ok(of.flatten_all()?.to_vec1::<f32>()?.iter().all(|value| value.to_bits() == 0))
    };
    for (rows, inputs, outputs) in [(3, 0, 4), (3, 4, 0), (0, 4, 3)] {
        // Memory that was just given back holds no zeros.
        drop(noise.tensor(&[4, 4]));
        let (x, w) = (noise.var(&[rows, inputs]), noise.var(&[outputs, inputs]));
        let product = linear(&x, &w, None)?;
        assert_eq!(product.dims(), [rows, outputs]);
        assert!(zeros(&product)?, "{rows} x {inputs} x {outputs}");
        let frozen = Matrix::Dense(w.detach());
        let [again, both] = linear_each(&x.detach(), [(&frozen, None), (&frozen, None)])?;
        assert!(zeros(&again)? && zeros(&both)?, "{rows} x {inputs} x {outputs}");
        let gradients = product.sum_all()?.gradients()?;
        for (name, variable) in [("x", &x), ("weight", &w)] {
            let gradient = gradients.get(variable).expect("gradient");
            assert!(zeros(gradient)?, "{name}, {rows} x {inputs} x {outputs}");
        }
    }
    Ok(())
}

#[test]
fn composed_matches_reference_and_trains_only_what_is_a_variable() -> Result<()> {
    for (seed, rows, inputs, outputs) in [(31, 1, 1, 1), (32, 5, 7, 9), (33, 90, 64, 30)] {
        let mut noise = Noise::new(seed);
        let (x, w, b) =
            (noise.var(&[rows, inputs]), noise.var(&[outputs, inputs]), noise.var(&[outputs]));
        let direction = noise.tensor(&[rows, outputs]);
        let plain = reference(&x, &w, Some(&b))?;
        let variables = [("x", &x), ("weight", &w), ("bias", &b)];
        for (factors, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3)] {
            let own = product_in(factors, &x, &w, Some(&b))?;
            assert_eq!(own.dtype(), DType::F32);
            assert_alike(&variables, &direction, [&own, &plain], (tolerance, tolerance));
        }
        let frozen = w.to_dtype(DType::BF16)?.detach();
        let (own, fused) = (composed(&x, &frozen, None)?, linear(&x, &frozen, None)?);
        assert_alike(&variables[..1], &direction, [&own, &fused], (1e-5, 1e-5));
        let alone = composed(&x.detach(), &frozen, None)?;
        assert!(!alone.track_op());
        assert_close("filled up", &alone, &linear(&x, &frozen, None)?, 1e-5);
    }
    Ok(())
}

#[test]
fn residual_matches_a_separate_addition_forward_and_backward() -> Result<()> {
    for (seed, rows, inputs, outputs) in [(21, 1, 3, 5), (22, 40, 33, 70), (23, 200, 64, 30)] {
        let mut noise = Noise::new(seed);
        let (x, w) = (noise.var(&[rows, inputs]), noise.var(&[outputs, inputs]));
        let (r, b) = (noise.var(&[rows, outputs]), noise.tensor(&[outputs]));
        let direction = noise.tensor(&[rows, outputs]);
        for bias in [None, Some(&b)] {
            let fused = linear_onto(&r, &x, &w, bias)?;
            let plain = (r.as_tensor() + reference(&x, &w, bias)?)?;
            let variables = [("x", &x), ("weight", &w), ("residual", &r)];
            assert_alike(&variables, &direction, [&fused, &plain], (1e-6, 1e-5));
        }
        assert!(linear_onto(&x, &x, &w, None).is_err() || inputs == outputs);
    }
    Ok(())
}

#[test]
fn rows_have_the_same_bits_alone_and_together() -> Result<()> {
    let mut noise = Noise::new(7);
    let all = 400;
    let types = [DType::F32, DType::BF16, DType::F16];
    for (inputs, dtype) in
        [577, 500].into_iter().flat_map(|inputs| types.map(|dtype| (inputs, dtype)))
    {
        let (x, w) = (noise.tensor(&[all, inputs]), noise.tensor(&[330, inputs]));
        let w = w.to_dtype(dtype)?;
        let together = linear(&x, &w, None)?.to_vec2::<f32>()?;
        for rows in [1, 2, 3, 13, 14, 15, 16, 17, 33, 47, 48, 49, 64, 167, 168, 169, 399] {
            let start = all - rows;
            let part = linear(&x.narrow(0, start, rows)?, &w, None)?.to_vec2::<f32>()?;
            for (a, b) in part.iter().flatten().zip(together[start..].iter().flatten()) {
                assert_eq!(a.to_bits(), b.to_bits(), "{rows} rows, {dtype:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn sixteen_bit_weights_equal_their_widened_selves() -> Result<()> {
    let mut noise = Noise::new(8);
    for rows in [2, 40] {
        let (x, w) = (noise.var(&[rows, 24]), noise.tensor(&[600, 24]));
        for dtype in [DType::BF16, DType::F16] {
            let narrow = w.to_dtype(dtype)?;
            let wide = narrow.to_dtype(DType::F32)?;
            let (a, b) = (linear(&x, &narrow, None)?, linear(&x, &wide, None)?);
            assert_close("forward", &a, &b, 0.0);
            let (a, b) = (a.sqr()?.sum_all()?.gradients()?, b.sqr()?.sum_all()?.gradients()?);
            assert_close("x", a.get(&x).expect("grad"), b.get(&x).expect("grad"), 0.0);
        }
    }
    Ok(())
}

#[test]
fn reference_gradient_matches_differences() {
    let mut noise = Noise::new(9);
    let inputs = [noise.tensor(&[3, 4]), noise.tensor(&[2, 4]), noise.tensor(&[2])];
    gradcheck(&inputs, |t| reference(&t[0], &t[1], Some(&t[2])));
}

#[test]
fn frozen_weight_gets_no_gradient() -> Result<()> {
    let mut noise = Noise::new(10);
    let (x, w) = (noise.var(&[3, 4]), noise.tensor(&[2, 4]));
    let grads = linear(&x, &w, None)?.sum_all()?.gradients()?;
    assert!(grads.get(&x).is_some() && grads.get(&w).is_none());
    Ok(())
}

#[test]
fn wrong_shapes_are_errors() {
    let mut noise = Noise::new(11);
    let x = noise.tensor(&[3, 4]);
    assert!(linear(&x, &noise.tensor(&[2, 5]), None).is_err());
    assert!(linear(&x, &noise.tensor(&[2, 4]), Some(&noise.tensor(&[3]))).is_err());
}

#[test]
fn the_experts_of_a_token_do_not_depend_on_the_tokens_beside_it() -> Result<()> {
    let mut noise = Noise::new(41);
    // Experts that are much alike.
    let own = (noise.tensor(&[16, 64]) * 0.02)?;
    let (x, router) = (noise.tensor(&[130, 64]), own.broadcast_add(&noise.tensor(&[1, 64]))?);
    let exact = |x: &Tensor| -> Result<Tensor> {
        emulated(|| with_half_products(|| linear_exact(x, &router, None)))
    };
    let chosen = |logits: &Tensor| -> Result<Vec<Vec<u32>>> {
        logits.arg_sort_last_dim(false)?.narrow(1, 0, 4)?.contiguous()?.to_vec2()
    };
    let (all, want) = (exact(&x)?, linear(&x, &router, None)?);
    assert_close("router", &all, &want, 2e-6);
    let experts = chosen(&all)?;
    for rows in [1, 8, 63, 64, 65] {
        let part = exact(&x.narrow(0, 130 - rows, rows)?)?;
        let own = all.narrow(0, 130 - rows, rows)?;
        assert_eq!(part.to_vec2::<f32>()?, own.to_vec2::<f32>()?, "{rows} rows");
        assert_eq!(chosen(&part)?, experts[130 - rows..], "{rows} rows");
    }
    // The rounded factors of other products do change them.
    let rounded = emulated(|| with_half_products(|| linear(&x, &router, None)))?;
    assert!(crate::test_support::relative_error(&rounded, &want) > 1e-4);
    assert_ne!(chosen(&rounded)?, experts);
    Ok(())
}

#[test]
fn exact_products_train_and_take_any_width() -> Result<()> {
    let mut noise = Noise::new(42);
    let (x, w, b) = (noise.var(&[70, 7]), noise.var(&[5, 7]), noise.tensor(&[5]));
    let want = linear(&x, &w, Some(&b))?;
    let own = emulated(|| with_half_products(|| linear_exact(&x, &w, Some(&b))))?;
    assert_close("forward", &own, &want, 1e-6);
    let gradients = |out: Tensor| out.sqr()?.sum_all()?.gradients();
    let (want, own) = (gradients(want)?, with_half_products(|| gradients(own))?);
    assert_gradients(&[("x", &x), ("weight", &w)], &own, &want, 1e-5);
    let nothing = emulated(|| linear_exact(&x.detach().narrow(0, 0, 0)?, &w.detach(), None))?;
    assert_eq!(nothing.dims(), [0, 5]);
    assert!(linear_exact(&x, &w.t()?, None).is_err());
    Ok(())
}

/// With half factors, results and gradients lose what rounding the factors loses, and nothing after the sums.
#[test]
fn half_products_are_sums_of_f32() -> Result<()> {
    let mut noise = Noise::new(43);
    let (x, w) = (noise.var(&[70, 96]), noise.var(&[33, 96]));
    let direction = noise.tensor(&[70, 33]);
    let run = |half: bool| -> Result<[Tensor; 3]> {
        let rounded = |t: &Tensor| t.to_dtype(DType::BF16)?.to_dtype(DType::F64);
        if half {
            return emulated(|| {
                with_half_products(|| {
                    let out = linear(&x, &w, None)?;
                    let gradients = (&out * &direction)?.sum_all()?.gradients()?;
                    let of = |var: &Var| gradients.get(var).cloned().expect("gradient");
                    Ok([out, of(&x), of(&w)])
                })
            });
        }
        let (x, w, g) = (rounded(&x)?, rounded(&w)?, rounded(&direction)?);
        let all = [x.matmul(&w.t()?)?, g.matmul(&w)?, g.t()?.matmul(&x)?];
        Ok(all.map(|t| t.to_dtype(DType::F32).expect("f32")))
    };
    for (name, (own, want)) in ["y", "x", "weight"].iter().zip(run(true)?.iter().zip(&run(false)?))
    {
        assert_close(name, own, want, 1e-6);
    }
    Ok(())
}

#[test]
fn kept_factors_give_the_same_bits() -> Result<()> {
    let mut noise = Noise::new(72);
    let (x, w) = (noise.var(&[70, 12]), noise.var(&[12, 12]));
    let step = || -> Result<_> {
        let out = linear(&linear(&x, &w, None)?, &w, None)?;
        let gradients = out.sqr()?.sum_all()?.gradients()?;
        let of = |variable| gradients.get(variable).cloned().expect("a gradient");
        Ok([out.detach(), of(x.as_tensor()), of(w.as_tensor())])
    };
    emulated(|| {
        with_half_products(|| {
            for (own, plain) in with_factors(step)?.iter().zip(&step()?) {
                assert_close("step", own, plain, 0.0);
            }
            Ok(())
        })
    })
}

/// An input that the graph lets go of is kept as one factor for all products whose weights train, with the bits of one
/// that is kept in f32 (as a result of candle is).
#[test]
fn products_keep_the_factor_of_their_input() -> Result<()> {
    let mut noise = Noise::new(91);
    let from = noise.var(&[70, 24]);
    let weights = [40, 8, 8].map(|outputs| noise.var(&[outputs, 24]));
    let step = |x: &Tensor, frozen: bool| -> Result<(usize, Vec<Option<Vec<u32>>>)> {
        let of = |w: &Var| if frozen { w.detach() } else { w.as_tensor().clone() };
        let products: Vec<Tensor> =
            weights.iter().map(|w| linear(x, &of(w), None)).collect::<Result<_>>()?;
        // All but the one that is asked for here.
        let keep = Arc::strong_count(&input_factor(x, DType::BF16)?) - 1;
        let gradients = cat(&products, 1)?.sqr()?.sum_all()?.gradients()?;
        let variables = weights.iter().chain([&from]);
        Ok((keep, variables.map(|variable| gradients.get(variable).map(bits)).collect()))
    };
    let both = |frozen: bool| -> Result<usize> {
        let (keep, own) = step(&scale(&from, 2.0)?, frozen)?;
        let (none, want) = step(&(from.as_tensor() * 2.0)?, frozen)?;
        assert_eq!(none, 0, "f32 values are kept");
        assert_eq!(own, want, "frozen: {frozen}");
        assert_eq!(
            own.iter().filter(|gradient| gradient.is_some()).count(),
            if frozen { 1 } else { 4 }
        );
        Ok(keep)
    };
    emulated(|| {
        with_half_products(|| -> Result<()> {
            assert_eq!(both(false)?, 3);
            assert_eq!(both(true)?, 0);
            Ok(())
        })?;
        assert_eq!(both(false)?, 0, "factors of f32");
        Ok(())
    })
}

/// bf16 rows of a network that does not train: as the f32 ones of the same values, rounded once where they are not added
/// to f32 sums.
#[test]
fn bf16_rows_have_the_products_of_their_values() -> Result<()> {
    let mut noise = Noise::new(81);
    for (rows, inputs, outputs) in [(64, 48, 40), (70, 33, 5)] {
        let x = noise.tensor(&[rows, inputs]).to_dtype(DType::BF16)?;
        let (b, r) = (noise.tensor(&[outputs]), noise.tensor(&[rows, outputs]));
        let (wide, before) = (x.to_dtype(DType::F32)?, r.to_vec2::<f32>()?);
        for held in [DType::BF16, DType::F32] {
            let w = noise.tensor(&[outputs, inputs]).to_dtype(held)?;
            let rounded = w.to_dtype(DType::BF16)?;
            with_half_products(|| {
                emulated(|| {
                    let plain = reference(&wide, &rounded, None)?;
                    let own = linear(&x, &w, None)?;
                    assert_eq!(own.dtype(), DType::BF16);
                    assert_close("product", &own.to_dtype(DType::F32)?, &plain, 4e-3);
                    let own = linear(&x, &w, Some(&b))?.to_dtype(DType::F32)?;
                    assert_close("with a bias", &own, &plain.broadcast_add(&b)?, 8e-3);
                    for bias in [None, Some(&b)] {
                        let own = linear_onto(&r, &x, &w, bias)?;
                        let want = (&r + reference(&wide, &rounded, bias)?)?;
                        assert_close("onto", &own, &want, 1e-6);
                    }
                    assert_eq!(r.to_vec2::<f32>()?, before, "the residual stays");
                    let (sums, onto) = (r.copy()?, linear_onto(&r, &x, &w, None)?);
                    add_linear(&sums, &x, &w)?;
                    assert_eq!(sums.to_vec2::<f32>()?, onto.to_vec2::<f32>()?, "in place");
                    assert!(add_linear(&sums, &wide, &w).is_err(), "f32 rows");
                    Ok::<_, candle_core::Error>(())
                })
            })?;
        }
    }
    Ok(())
}
