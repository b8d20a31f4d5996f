//! Weights as products multiply them, kept for a step of learning in which they do not change, and their inputs.
//!
//! Where products take 16-bit factors, a weight that trains in f32 is turned into 16 bits before each of them.
//! A step that uses it seven times forward and seven times backward turns it once within [`with_factors`], and not at all
//! where the optimizer wrote the factor beside the weight ([`Written`]).
//!
//! An input that a product keeps for the gradient of its weight is kept as the factor that it was, half the bytes, where
//! nobody else keeps its values (`kept_input`). Products of the same input share it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use candle_core::{DType, Result, Tensor, TensorId, Var};

use crate::at_end::AtEnd;
use crate::cuda::rows::to_halves;
use crate::cuda::takes;
use crate::graph::is_let_go;

type Factors = HashMap<(TensorId, DType), Tensor>;

thread_local! {
    /// Those that the step so far has needed.
    static KEPT: RefCell<Option<Factors>> = const { RefCell::new(None) };
    /// Factors of inputs, as long as a node of the graph keeps them.
    static INPUTS: RefCell<HashMap<(TensorId, DType), Weak<Tensor>>> = RefCell::default();
}

/// bf16 factors of variables, as the optimizer that gave these their values wrote them. Whoever gives them others has to
/// [`clear`](Self::clear) it.
#[derive(Debug, Default)]
pub struct Written(Factors);

impl Written {
    /// Keeps the values of a variable in bf16.
    pub fn put(&mut self, variable: &Var, factor: Tensor) {
        self.0.insert((variable.id(), factor.dtype()), factor);
    }

    /// Forgets all factors.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Runs `f` as [`with_factors`] does, with these factors in place of such as it would make.
    pub fn with<R>(&self, f: impl FnOnce() -> R) -> R {
        with_known(self.0.clone(), f)
    }
}

/// Runs `f`, the forward and backward pass of a step. No variable may get other values meanwhile: factors of
/// those that products read are kept until `f` ends, half the bytes of the weights themselves.
pub fn with_factors<R>(f: impl FnOnce() -> R) -> R {
    with_known(Factors::new(), f)
}

fn with_known<R>(known: Factors, f: impl FnOnce() -> R) -> R {
    if KEPT.with_borrow(Option::is_some) {
        return f();
    }
    KEPT.set(Some(known));
    let _forget = AtEnd(|| KEPT.set(None));
    f()
}

/// `weight` as products of `factors` multiply it, if it is kept: a variable of another type within
/// [`with_factors`]. It fails where the device has no memory for it.
pub(crate) fn kept_factor(weight: &Tensor, factors: DType) -> Result<Option<Tensor>> {
    if !weight.is_variable() || weight.dtype() == factors {
        return Ok(None);
    }
    let key = (weight.id(), factors);
    let known = KEPT.with_borrow(|kept| kept.as_ref().map(|kept| kept.get(&key).cloned()));
    let Some(known) = known else { return Ok(None) };
    if known.is_some() {
        return Ok(known);
    }
    let factor = as_factor(weight, factors)?;
    KEPT.with_borrow_mut(|kept| kept.as_mut().map(|kept| kept.insert(key, factor.clone())));
    Ok(Some(factor))
}

/// The same, made for this product where it is not kept. It fails as [`kept_factor`] does.
pub(crate) fn weight_factor(weight: &Tensor, factors: DType) -> Result<Tensor> {
    kept_factor(weight, factors)?.map_or_else(|| as_factor(weight, factors), Ok)
}

/// An input as products of `factors` multiply it: the one that an earlier product keeps, or a new one. It fails where the
/// device has no memory for it.
pub(crate) fn input_factor(x: &Tensor, factors: DType) -> Result<Arc<Tensor>> {
    let key = (x.id(), factors);
    let known = INPUTS.with_borrow(|inputs| inputs.get(&key).and_then(Weak::upgrade));
    known.map_or_else(|| as_factor(x, factors).map(Arc::new), Ok)
}

/// What a product keeps of its input for its backward pass, where [`as_factor`] makes the same factor of it: the factor, if
/// the graph then lets go of `x`, else `x` itself. Values of variables and of what does not train may change in place,
/// so their factors are not kept.
pub(crate) fn kept_input(x: &Tensor, factor: &Arc<Tensor>) -> Arc<Tensor> {
    if factor.dtype() == x.dtype() || !is_let_go(x) {
        return Arc::new(x.detach());
    }
    INPUTS.with_borrow_mut(|inputs| {
        inputs.retain(|_, kept| kept.strong_count() > 0);
        inputs.insert((x.id(), factor.dtype()), Arc::downgrade(factor));
    });
    Arc::clone(factor)
}

/// Values as products of a type multiply them, without their graph.
pub(crate) fn as_factor(values: &Tensor, factors: DType) -> Result<Tensor> {
    let by_kernel = factors == DType::BF16 && values.is_contiguous() && takes(&[values]);
    let values = values.detach();
    if by_kernel && (1..MOST_ROUNDED).contains(&values.elem_count()) {
        return to_halves(&values);
    }
    values.to_dtype(factors)?.contiguous()
}

/// So many values, or more, are not rounded by one start.
const MOST_ROUNDED: usize = 1 << 31;

/// Values rounded to a 16-bit type and widened again; as they are for other types.
pub(crate) fn as_of_type(values: &Tensor, dtype: DType) -> Result<Tensor> {
    match dtype {
        DType::BF16 | DType::F16 => values.to_dtype(dtype)?.to_dtype(values.dtype()),
        _ => Ok(values.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::scale;
    use crate::test_support::{Noise, assert_close};

    #[test]
    fn a_weight_is_turned_once_and_anew_after_a_step() -> Result<()> {
        let w = Noise::new(71).var(&[5, 4]);
        with_factors(|| -> Result<()> {
            let first = kept_factor(&w, DType::BF16)?.expect("kept");
            assert_eq!(first.dtype(), DType::BF16);
            let again = with_factors(|| kept_factor(&w, DType::BF16))?.expect("kept");
            assert_eq!(first.id(), again.id());
            assert_ne!(first.id(), kept_factor(&w, DType::F16)?.expect("kept").id());
            assert!(kept_factor(&w, DType::F32)?.is_none(), "it is a factor as it is");
            assert!(kept_factor(&w.detach(), DType::BF16)?.is_none(), "no variable");
            Ok(())
        })?;
        assert!(kept_factor(&w, DType::BF16)?.is_none(), "no step");
        w.set(&(w.as_tensor() * 2.0)?)?;
        let doubled = with_factors(|| kept_factor(&w, DType::BF16))?.expect("kept");
        assert_close("new values", &doubled.to_dtype(DType::F32)?, &w, 1e-2);
        Ok(())
    }

    #[test]
    fn products_of_an_input_share_its_factor_while_one_keeps_it() -> Result<()> {
        let x = scale(&Noise::new(73).var(&[5, 4]), 2.0)?;
        let factor = input_factor(&x, DType::BF16)?;
        let unkept = input_factor(&x, DType::BF16)?;
        assert!(!Arc::ptr_eq(&factor, &unkept), "nobody keeps it");
        let kept = kept_input(&x, &factor);
        assert!(Arc::ptr_eq(&factor, &kept));
        assert!(Arc::ptr_eq(&kept, &input_factor(&x, DType::BF16)?));
        assert_eq!(input_factor(&x, DType::F16)?.dtype(), DType::F16);
        let ended = Arc::downgrade(&kept);
        drop((factor, kept));
        assert!(ended.upgrade().is_none(), "the graph alone keeps it");
        assert_eq!(input_factor(&x, DType::BF16)?.dtype(), DType::BF16);
        Ok(())
    }

    #[test]
    fn an_input_that_is_kept_anyway_is_not_kept_twice() -> Result<()> {
        let variable = Noise::new(74).var(&[5, 4]);
        let single = scale(&variable, 2.0)?;
        let of_candle = (variable.as_tensor() * 2.0)?;
        for (x, factors) in [
            (variable.as_tensor(), DType::BF16),
            (&variable.detach(), DType::BF16),
            (&of_candle, DType::BF16),
            (&single, DType::F32),
        ] {
            let factor = input_factor(x, factors)?;
            assert_eq!(kept_input(x, &factor).dtype(), DType::F32, "{x:?}");
            assert_eq!(Arc::strong_count(&factor), 1, "{x:?}");
        }
        Ok(())
    }

    #[test]
    fn written_factors_are_taken_until_they_are_cleared() -> Result<()> {
        let mut noise = Noise::new(72);
        let (w, other) = (noise.var(&[5, 4]), noise.var(&[2, 2]));
        let factor = w.to_dtype(DType::BF16)?;
        let mut written = Written::default();
        written.put(&w, factor.clone());
        written.with(|| -> Result<()> {
            let kept = kept_factor(&w, DType::BF16)?.expect("kept");
            assert_eq!(kept.id(), factor.id());
            // Others are made once, as without any.
            let made = kept_factor(&other, DType::BF16)?.expect("kept").id();
            assert_eq!(made, kept_factor(&other, DType::BF16)?.expect("kept").id());
            Ok(())
        })?;
        written.clear();
        let made = written.with(|| kept_factor(&w, DType::BF16))?.expect("kept");
        assert_ne!(made.id(), factor.id());
        Ok(())
    }
}
