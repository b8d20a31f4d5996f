//! The backward pass of a step: gradients of weights are summed by the products that form them.
//!
//! candle begins the sum of a variable's gradients with zeros and adds every one in a pass over memory of its
//! own. Where the products are ours, a GPU's library adds to the sum what it multiplies: a weight that is used
//! seven times in a step is written seven times, and not read and written twice as often.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, TensorId};

use crate::cuda::product::{add_product, product};
use crate::cuda::takes;

/// A variable, and its gradients so far.
type Sums = HashMap<TensorId, (Tensor, Tensor)>;

thread_local! {
    /// Of the backward pass that the thread is in.
    static SUMS: RefCell<Option<Sums>> = const { RefCell::new(None) };
}

/// The gradients of `loss`, as [`Tensor::backward`].
///
/// # Errors
/// - as [`Tensor::backward`]
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    struct Outer(Option<Sums>);
    impl Drop for Outer {
        fn drop(&mut self) {
            SUMS.set(self.0.take());
        }
    }
    let outer = Outer(SUMS.replace(Some(Sums::new())));
    let gradients = loss.backward();
    let sums = SUMS.take().unwrap_or_default();
    drop(outer);
    let mut gradients = gradients?;
    for (variable, sum) in sums.into_values() {
        let sum = match gradients.remove(&variable) {
            Some(others) => (sum + others)?,
            None => sum,
        };
        gradients.insert(&variable, sum);
    }
    Ok(gradients)
}

/// Whether the gradients of a weight are summed here: a variable on a GPU in a backward pass of [`backward`].
fn summed(weight: &Tensor) -> bool {
    weight.is_variable() && takes(&[weight]) && SUMS.with_borrow(Option::is_some)
}

/// Adds `a b` to the gradients of `weight`; `false` if they are not summed here.
///
/// # Errors
/// - as [`product`]
pub(crate) fn add_product_to(weight: &Tensor, a: &Tensor, b: &Tensor) -> Result<bool> {
    if !summed(weight) {
        return Ok(false);
    }
    match so_far(weight) {
        Some(sum) => add_product(&sum, a, b)?,
        None => put(weight, product(a, b)?),
    }
    Ok(true)
}

/// Makes a gradient of `weight` with `onto`, which gets the sum of those before it; `false` if they are not
/// summed here.
///
/// # Errors
/// - as `onto`
pub(crate) fn add_to(
    weight: &Tensor,
    onto: impl FnOnce(Option<&Tensor>) -> Result<Tensor>,
) -> Result<bool> {
    if !summed(weight) {
        return Ok(false);
    }
    let sum = onto(so_far(weight).as_ref())?;
    put(weight, sum);
    Ok(true)
}

fn so_far(weight: &Tensor) -> Option<Tensor> {
    SUMS.with_borrow(|all| {
        let (_, sum) = all.as_ref()?.get(&weight.id())?;
        Some(sum.clone())
    })
}

fn put(weight: &Tensor, sum: Tensor) {
    SUMS.with_borrow_mut(|all| {
        if let Some(all) = all {
            all.insert(weight.id(), (weight.clone(), sum));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::emulated;
    use crate::dispatch::with_half_products;
    use crate::linear::linear;
    use crate::linear_cross_entropy::{Inputs, linear_cross_entropy};
    use crate::test_support::{Noise, assert_close};

    #[test]
    fn a_weight_used_again_and_again_gets_the_same_gradient() -> Result<()> {
        let mut noise = Noise::new(61);
        let (x, w, head) = (noise.var(&[9, 12]), noise.var(&[12, 12]), noise.var(&[30, 12]));
        let labels: Vec<u32> = (0..9).map(|row| row * 7 % 30).collect();
        let loss = || -> Result<Tensor> {
            let once = linear(&x, &w, None)?;
            let twice = linear(&once.tanh()?, &w, None)?;
            let of = |hidden: &Tensor| -> Result<Tensor> {
                Ok(linear_cross_entropy(&Inputs::of_labels(hidden, &head, &labels))?.loss_sum)
            };
            // Some of the weight's gradient comes from elsewhere, and a loss has a factor.
            (of(&once)? + (of(&twice)? * 0.5)?)? + w.sqr()?.sum_all()?
        };
        let compare = |tolerance: f64| -> Result<()> {
            let (own, plain) = (backward(&loss()?)?, loss()?.backward()?);
            for (name, variable) in [("x", &x), ("w", &w), ("head", &head)] {
                let own = own.get(variable).expect("own");
                assert_close(name, own, plain.get(variable).expect("candle's"), tolerance);
            }
            Ok(())
        };
        compare(0.0)?;
        emulated(|| compare(1e-6))?;
        emulated(|| with_half_products(|| compare(1e-5)))
    }

    #[test]
    fn sums_are_those_of_one_pass() -> Result<()> {
        let mut noise = Noise::new(62);
        let (x, w) = (noise.tensor(&[3, 4]), noise.var(&[5, 4]));
        emulated(|| {
            let first = backward(&linear(&x, &w, None)?.sum_all()?)?;
            let kept = first.get(&w).expect("a gradient").copy()?;
            let second = backward(&linear(&x, &w, None)?.sum_all()?)?;
            assert_close("first", first.get(&w).expect("a gradient"), &kept, 0.0);
            assert_close("second", second.get(&w).expect("a gradient"), &kept, 0.0);
            // Without a pass of ours the gradient is where candle puts it.
            let plain = linear(&x, &w, None)?.sum_all()?.backward()?;
            assert_close("plain", plain.get(&w).expect("a gradient"), &kept, 0.0);
            Ok(())
        })
    }
}
