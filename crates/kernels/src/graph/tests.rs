use std::sync::Arc;

use candle_core::{CpuStorage, D, Device, Result, Storage, Tensor, Var};

use super::{Backward, add, cat, differentiable, differentiable_new, narrow, node, reshape, scale};
use crate::cuda::emulator::emulated;
use crate::dispatch::with_half_products;
use crate::linear::{self, linear, linear_onto};
use crate::linear_cross_entropy::{Inputs, linear_cross_entropy};
use crate::rms_norm::{self, rms_norm};
use crate::test_support::{Noise, assert_close};

/// An op of two arguments.
type Two = fn(&Tensor, &Tensor) -> Result<Tensor>;
/// An op of three.
type Three = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

/// Holds the gradients of both losses together: the second is made of candle's ops alone.
fn compare(variables: &[&Var], own: &Tensor, plain: &Tensor, tolerance: f64) -> Result<()> {
    assert_close("loss", own, plain, tolerance);
    let (own, plain) = (own.gradients()?, plain.backward()?);
    for (i, variable) in variables.iter().enumerate() {
        let want = plain.get(variable).expect("candle's");
        assert_close(&format!("variable {i}"), own.get(variable).expect("own"), want, tolerance);
    }
    Ok(())
}

/// `Σ −log softmax(hidden headᵀ)[label]` of candle's ops.
fn plain_loss(hidden: &Tensor, head: &Tensor, labels: &[u32]) -> Result<Tensor> {
    let logits = hidden.matmul(&head.t()?)?;
    let labels = Tensor::from_slice(labels, (labels.len(), 1), &Device::Cpu)?;
    let chosen = logits.gather(&labels, 1)?.sum_all()?;
    logits.exp()?.sum(D::Minus1)?.log()?.sum_all()? - chosen
}

#[test]
fn a_weight_used_again_and_again_gets_the_same_gradient() -> Result<()> {
    let mut noise = Noise::new(61);
    let (x, w, head) = (noise.var(&[9, 12]), noise.var(&[12, 12]), noise.var(&[30, 12]));
    let labels: Vec<u32> = (0..9).map(|row| row * 7 % 30).collect();
    let loss = |map: Two, of: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<Tensor> {
        let once = map(&x, &w)?;
        let twice = map(&once.tanh()?, &w)?;
        // Some of the weight's gradient comes from elsewhere, and a loss has a factor.
        (of(&once)? + (of(&twice)? * 0.5)?)? + w.sqr()?.sum_all()?
    };
    let both = |tolerance: f64| {
        let own = loss(|x, w| linear(x, w, None), &|hidden| {
            Ok(linear_cross_entropy(&Inputs::of_labels(hidden, &head, &labels))?.loss_sum)
        })?;
        let plain = |hidden: &Tensor| plain_loss(hidden, &head, &labels);
        let plain = loss(|x, w| linear::reference(x, w, None), &plain)?;
        compare(&[&x, &w, &head], &own, &plain, tolerance)
    };
    both(1e-5)?;
    emulated(|| both(1e-5))?;
    emulated(|| with_half_products(|| both(3e-2)))
}

#[test]
fn ops_of_candle_may_stand_anywhere_between_ours() -> Result<()> {
    let mut noise = Noise::new(63);
    let (x, w, scale) = (noise.var(&[6, 8]), noise.var(&[8, 8]), noise.var(&[8]));
    let direction = noise.tensor(&[4, 3, 8]);
    let loss = |norm: Two, map: Three, own: bool| -> Result<Tensor> {
        let shaped = |t: &Tensor| if own { reshape(t, (4, 3, 8)) } else { t.reshape((4, 3, 8)) };
        let joined =
            |a: &Tensor, b: &Tensor| if own { cat(&[a, b], 0) } else { Tensor::cat(&[a, b], 0) };
        let sum = |a: &Tensor, b: &Tensor| if own { add(a, b) } else { a + b };
        let normed = norm(&x, &scale)?;
        // A result of ours that ours and candle read, in its own shape and in others, and a part of it.
        let first = map(&normed, &normed, &w)?;
        let bent = (first.sqr()? + normed.narrow(0, 0, 6)?)?;
        let second = map(&bent, &sum(&first, &x)?, &w)?;
        let all = joined(&first, &second)?;
        let heads = shaped(&all)?;
        let flat = if own { reshape(&heads, (12, 8))? } else { heads.reshape((12, 8))? };
        let third = map(&flat, &flat, &w.t()?.contiguous()?)?;
        let turned = third.t()?.contiguous()?.t()?;
        let last = norm(&turned, &scale.affine(0.5, 0.1)?)?;
        ((heads * &direction)?.sum_all()? + last.tanh()?.sum_all()?)? + scale.sum_all()?
    };
    let both = || {
        let own = loss(|x, w| rms_norm(x, w, 1e-5), |r, x, w| linear_onto(r, x, w, None), true)?;
        let plain = loss(
            |x, w| rms_norm::reference(x, w, 1e-5),
            |r, x, w| r + linear::reference(x, w, None)?,
            false,
        )?;
        compare(&[&x, &w, &scale], &own, &plain, 2e-5)
    };
    both()?;
    emulated(both)
}

#[test]
fn sums_are_those_of_one_pass() -> Result<()> {
    let mut noise = Noise::new(62);
    let (x, w) = (noise.tensor(&[3, 4]), noise.var(&[5, 4]));
    emulated(|| {
        let loss = linear(&x, &w, None)?.sum_all()?;
        let first = loss.gradients()?;
        let kept = first.get(&w).expect("a gradient").copy()?;
        let second = loss.gradients()?;
        assert_close("first", first.get(&w).expect("a gradient"), &kept, 0.0);
        assert_close("second", second.get(&w).expect("a gradient"), &kept, 0.0);
        assert!(loss.backward().is_err(), "candle's own pass would lose gradients");
        Ok(())
    })
}

#[test]
fn gradients_are_added_to_sums_where_they_lie() -> Result<()> {
    let mut noise = Noise::new(68);
    let (x, w, head) = (noise.tensor(&[9, 12]), noise.var(&[12, 12]), noise.var(&[30, 12]));
    // One that candle's ops alone read, and one that nothing reads.
    let (scale, other) = (noise.var(&[12]), noise.var(&[2, 2]));
    let loss = |labels: &[u32]| {
        let hidden = linear(&linear(&x, &w, None)?.tanh()?, &w, None)?.broadcast_mul(&scale)?;
        Ok::<_, candle_core::Error>(
            linear_cross_entropy(&Inputs::of_labels(&hidden, &head, labels))?.loss_sum,
        )
    };
    let place = |tensor: &Tensor| {
        let (storage, _) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cpu(CpuStorage::F32(values)) => values.as_ptr().addr(),
            _ => 0,
        }
    };
    let variables = [&w, &head, &scale, &other];
    emulated(|| {
        let rows = [0, 1].map(|first| (first..first + 9).collect::<Vec<u32>>());
        let [first, second] = rows.map(|labels| loss(&labels));
        let (first, second) = (first?, second?);
        let alone = [first.gradients()?, second.gradients()?];
        let mut sums = first.gradients()?;
        sums.insert(&other, Tensor::full(7.0_f32, (2, 2), &Device::Cpu)?);
        let sums = variables.map(|variable| sums.remove(variable).expect("a sum"));
        let places = [0, 3].map(|index| place(&sums[index]));
        let onto = variables.map(Var::clone).into_iter().zip(sums).collect();
        let all = second.gradients_onto(onto)?;
        for variable in [&w, &head, &scale] {
            let [a, b] = [0, 1].map(|row| alone[row].get(variable).expect("a gradient"));
            assert_close("both rows", all.get(variable).expect("a sum"), &(a + b)?, 1e-5);
        }
        let at = [&w, &other].map(|variable| place(all.get(variable).expect("a sum")));
        assert_eq!(at, places, "no copy");
        assert_eq!(all.get(&other).expect("a sum").to_vec2::<f32>()?, [[7.0; 2]; 2]);
        // A sum that lies within other values is not written to.
        let many = Tensor::ones((3, 12, 12), candle_core::DType::F32, &Device::Cpu)?;
        let all = second.gradients_onto(vec![(w.clone(), many.get(1)?)])?;
        let want = (alone[1].get(&w).expect("a gradient") + 1.0)?;
        assert_close("a part", all.get(&w).expect("a sum"), &want, 1e-5);
        assert_close("the whole", &many, &many.ones_like()?, 0.0);
        Ok(())
    })
}

#[test]
fn gradients_of_variables_share_no_memory() -> Result<()> {
    let mut noise = Noise::new(64);
    let (a, b) = (noise.var(&[3, 4]), noise.var(&[3, 4]));
    let gradients = add(&a, &b)?.sqr()?.sum_all()?.gradients()?;
    let (of_a, of_b) = (gradients.get(&a).expect("a"), gradients.get(&b).expect("b"));
    let kept = of_b.copy()?;
    crate::storage::change_f32(of_a, |values| {
        values.fill(7.0);
        Ok(())
    })?;
    assert_close("the other", of_b, &kept, 0.0);
    Ok(())
}

#[test]
fn a_pass_that_fails_leaves_nothing_to_the_next() -> Result<()> {
    let mut noise = Noise::new(65);
    let (x, w) = (noise.var(&[3, 4]), noise.var(&[4, 4]));
    let product = linear(&x, &w, None)?;
    let failing = differentiable("failing", [&product; 3], product.detach(), |_| {
        candle_core::bail!("no gradient")
    })?;
    let loss = (failing.sum_all()? + product.sum_all()?)?;
    assert!(loss.gradients().is_err());
    compare(&[&x, &w], &product.sum_all()?, &x.matmul(&w.t()?)?.sum_all()?, 1e-6)?;
    let misshapen = differentiable("misshapen", [&product; 3], product.detach(), |gradient| {
        Ok([Some(gradient.narrow(0, 0, 2)?), None, None])
    })?;
    let message = misshapen.sum_all()?.gradients().expect_err("another shape").to_string();
    assert!(message.contains("misshapen"), "{message}");
    Ok(())
}

#[test]
fn what_a_graph_holds_goes_with_it() -> Result<()> {
    let x = Noise::new(66).var(&[2, 2]);
    let held = Arc::new(());
    let within = Arc::clone(&held);
    let doubled = differentiable("double", [x.as_tensor(); 3], (x.detach() * 2.0)?, move |g| {
        let _ = &within;
        Ok([Some((g * 2.0)?), None, None])
    })?;
    let loss = reshape(&doubled, 4)?.sum_all()?;
    let gradients = loss.gradients()?;
    assert_close(
        "x",
        gradients.get(&x).expect("x"),
        &Tensor::full(2.0_f32, (2, 2), &Device::Cpu)?,
        0.0,
    );
    drop(doubled);
    assert_eq!(Arc::strong_count(&held), 2);
    drop(loss);
    assert_eq!(Arc::strong_count(&held), 1);
    Ok(())
}

#[test]
fn a_given_backward_pass_joins_the_graph() -> Result<()> {
    let mut noise = Noise::new(3);
    let (x, y) = (noise.var(&[4, 3]), noise.tensor(&[4, 3]));
    let other = y.clone();
    // A view whose values do not begin the storage.
    let product = (x.detach() * &y)?;
    let joined = Tensor::cat(&[&product, &product], 0)?.narrow(0, 4, 4)?;
    let out = differentiable("product", [x.as_tensor(), &y, &y], joined, move |gradient| {
        Ok([Some((gradient * &other)?), None, None])
    })?;
    assert_close("forward", &out, &(x.as_tensor() * &y)?, 0.0);
    let grads = out.sqr()?.sum_all()?.gradients()?;
    let want = (x.as_tensor() * &y)?.sqr()?.sum_all()?.backward()?;
    assert_close("x", grads.get(&x).expect("own"), want.get(&x).expect("plain"), 1e-6);
    let product = (x.detach() * &y)?;
    let other = y.clone();
    let own = differentiable_new("product", [x.as_tensor(), &y, &y], product, move |gradient| {
        Ok([Some((gradient * &other)?), None, None])
    })?;
    assert_close("forward", &own, &(x.as_tensor() * &y)?, 0.0);
    let grads = own.sqr()?.sum_all()?.gradients()?;
    assert_close("x", grads.get(&x).expect("own"), want.get(&x).expect("plain"), 1e-6);
    let frozen = differentiable("none", [&y, &y, &y], y.clone(), |_| Ok([None, None, None]))?;
    assert!(!frozen.track_op());
    Ok(())
}

#[test]
fn parts_and_sums_have_the_gradients_that_candle_has() -> Result<()> {
    let mut noise = Noise::new(67);
    let (x, y, frozen) = (noise.var(&[3, 4, 5]), noise.var(&[3, 2, 5]), noise.tensor(&[3, 1, 5]));
    let direction = noise.tensor(&[3, 7, 5]);
    let own = || -> Result<Tensor> {
        // The same part twice, parts that overlap, and the whole beside them.
        let parts = [narrow(&x, 1, 1, 2)?, narrow(&x, 1, 2, 2)?, narrow(&x, 1, 1, 2)?];
        let sum = scale(&add(&add(&parts[0], &parts[1])?, &parts[2])?, 0.5)?;
        let all = cat(&[&node(&x.sqr()?)?, &add(&sum, &y)?, &frozen], 1)?;
        let last = cat(&[&narrow(&all, 2, 0, 2)?, &narrow(&all, 2, 2, 3)?], 2)?;
        (last.tanh()? * &direction)?.sum_all()
    };
    let plain = || -> Result<Tensor> {
        let part = |start| x.narrow(1, start, 2);
        let sum = (((part(1)? + part(2)?)? + part(1)?)? * 0.5)?;
        let all = Tensor::cat(&[&x.sqr()?, &(sum + y.as_tensor())?, &frozen], 1)?;
        (all.tanh()? * &direction)?.sum_all()
    };
    compare(&[&x, &y], &own()?, &plain()?, 1e-6)?;
    emulated(|| compare(&[&x, &y], &own()?, &plain()?, 1e-6))
}

#[test]
fn nothing_of_no_values_is_taken() -> Result<()> {
    let x = Noise::new(68).var(&[2, 3]);
    let none = x.narrow(0, 0, 0)?;
    for empty in [add(&none, &none)?, scale(&none, 2.0)?, cat(&[&none, &none], 0)?] {
        assert_eq!(empty.to_vec2::<f32>()?, Vec::<Vec<f32>>::new());
    }
    assert_eq!(none.dims(), [0, 3]);
    assert_eq!(none.dtype(), candle_core::DType::F32);
    Ok(())
}

/// A state that every step reads, and that candle hands on.
#[test]
fn a_chain_of_candles_ops_is_cut_where_a_node_stands() -> Result<()> {
    let mut noise = Noise::new(69);
    let (x, w) = (noise.var(&[4, 6]), noise.var(&[6, 6]));
    let chain = |map: &dyn Fn(&Tensor) -> Result<Tensor>, own: bool| -> Result<Tensor> {
        let (mut state, mut all) = (x.as_tensor().clone(), Vec::new());
        for _ in 0..5 {
            all.push(map(&state)?.sqr()?.sum_all()?);
            let next = (state.tanh()? + map(&state)?)?;
            state = if own { node(&next)? } else { next };
        }
        Tensor::stack(&all, 0)?.sum_all()
    };
    let own = chain(&|x| linear(x, &w, None), true)?;
    let plain = chain(&|x| linear::reference(x, &w, None), false)?;
    compare(&[&x, &w], &own, &plain, 1e-5)
}
