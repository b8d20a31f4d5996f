//! What becomes of a head's products before they are logits: `b = c tanh(z / (d c))`, or `z / d` without a cap.
//!
//! Backward: `db/dz = (1 − (b/c)²) / d`.

use candle_core::{Result, Tensor, bail};

use crate::simd::{tanh, vectorised};

/// Divisor and soft-cap of logits; by default neither.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bend {
    /// `d`
    pub divisor: f64,
    /// `c` (Gemma 2, Riviere et al. 2024).
    pub softcap: Option<f64>,
}

impl Default for Bend {
    fn default() -> Self {
        Self { divisor: 1.0, softcap: None }
    }
}

impl Bend {
    /// Whether logits are the products themselves.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// # Errors
    /// - divisor or soft-cap is not positive
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |x: f64| !(x.is_finite() && x > 0.0);
        if wrong(self.divisor) || self.softcap.is_some_and(wrong) {
            bail!("logits: positive divisor and softcap expected, found {self:?}");
        }
        Ok(())
    }

    /// Logits of products of any shape and float type, with a gradient.
    ///
    /// # Errors
    /// - there is no memory for them
    pub fn of(&self, products: Tensor) -> Result<Tensor> {
        let Self { divisor, softcap } = *self;
        match softcap {
            _ if self.is_plain() => Ok(products),
            Some(softcap) => (products / (divisor * softcap))?.tanh()? * softcap,
            None => products / divisor,
        }
    }

    /// The same in place.
    pub fn bend(&self, products: &mut [f32]) {
        match self.softcap {
            _ if self.is_plain() => {}
            Some(softcap) => capped(products, softcap as f32, (self.divisor * softcap) as f32),
            None => divided(products, self.divisor as f32),
        }
    }

    /// Turns gradients of logits into those of their products, in place.
    pub(crate) fn back(&self, gradients: &mut [f32], logits: &[f32]) {
        match self.softcap {
            _ if self.is_plain() => {}
            Some(softcap) => sloped(gradients, logits, softcap as f32, self.divisor as f32),
            None => divided(gradients, self.divisor as f32),
        }
    }
}

vectorised! {
    /// `c tanh(z / scale)`
    pub(crate) fn capped(values: &mut [f32], softcap: f32, scale: f32) {
        for value in values {
            *value = softcap * tanh(*value / scale);
        }
    }

    fn divided(values: &mut [f32], divisor: f32) {
        for value in values {
            *value /= divisor;
        }
    }

    fn sloped(gradients: &mut [f32], logits: &[f32], softcap: f32, divisor: f32) {
        for (gradient, logit) in gradients.iter_mut().zip(logits) {
            let t = *logit / softcap;
            *gradient *= (1.0 - t * t) / divisor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Backward;
    use crate::test_support::{Noise, assert_close, gradcheck};

    #[test]
    fn values_and_slopes_in_place_are_those_of_tensor_ops() -> Result<()> {
        let mut noise = Noise::new(17);
        let z = (noise.tensor(&[5, 9]) * 3.0)?;
        for (divisor, softcap) in [(1.0, None), (1.7, None), (1.0, Some(2.5)), (0.6, Some(1.5))] {
            let bend = Bend { divisor, softcap };
            let want = bend.of(z.clone())?;
            let mut values = z.flatten_all()?.to_vec1::<f32>()?;
            bend.bend(&mut values);
            let got = Tensor::from_slice(&values, (5, 9), z.device())?;
            assert_close("values", &got, &want, 1e-5);
            gradcheck(std::slice::from_ref(&z), |t| bend.of(t[0].clone()));
            let var = candle_core::Var::from_tensor(&z)?;
            let slopes = bend.of(var.as_tensor().clone())?.sum_all()?.gradients()?;
            let mut own = vec![1.0; values.len()];
            bend.back(&mut own, &values);
            let own = Tensor::from_vec(own, (5, 9), z.device())?;
            match slopes.get(&var) {
                Some(slopes) => assert_close("slopes", &own, slopes, 1e-5),
                None => panic!("no gradient of {bend:?}"),
            }
        }
        for (divisor, softcap) in
            [(0.0, None), (f64::NAN, None), (1.0, Some(-1.0)), (1.0, Some(0.0))]
        {
            assert!(Bend { divisor, softcap }.check().is_err());
        }
        Ok(())
    }
}
