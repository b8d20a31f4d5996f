//! Distributions of which only some tokens are known.

use crate::graph::Backward;
use candle_core::{DType, Result, Tensor};

use super::super::composed::composed_within;
use super::super::{
    Inputs, Output, Rejection, SoftTargets, SparseDistributions, Weighted, linear_cross_entropy,
    reference,
};
use super::{Case, assert_rows};
use crate::test_support::gradcheck;

/// Distributions of different sizes, one without entries, one without a tail, shared by rows.
pub(super) struct Distributions {
    starts: Vec<usize>,
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    tails: Vec<f64>,
    rows: Vec<u32>,
}

impl Distributions {
    /// The `kept` first entries of every distribution of `case`; what is left goes to the tail or
    /// is dropped.
    pub(super) fn of(case: &Case, kept: impl Fn(usize) -> usize, tail: bool) -> Self {
        let rows = case.labels.len();
        let mut distributions = Self {
            starts: vec![0],
            ids: Vec::new(),
            log_probs: Vec::new(),
            tails: Vec::new(),
            rows: (0..rows as u32).map(|row| row / 2 * 2 % rows as u32).collect(),
        };
        for distribution in 0..rows {
            let entries =
                distribution * case.k..distribution * case.k + kept(distribution).min(case.k);
            distributions.ids.extend(&case.ids[entries.clone()]);
            let log_probs = &case.log_probs[entries];
            distributions.log_probs.extend(log_probs);
            distributions.starts.push(distributions.ids.len());
            let mass: f64 = log_probs.iter().map(|lp| f64::from(*lp).exp()).sum();
            distributions.tails.push(if tail && distribution != 2 {
                (1.0 - mass).max(0.0)
            } else {
                0.0
            });
        }
        distributions
    }

    pub(super) fn inputs<'a>(
        &'a self,
        case: &'a Case,
        hidden: &'a Tensor,
        form: Rejection,
    ) -> Inputs<'a> {
        let distributions = SparseDistributions {
            starts: &self.starts,
            ids: &self.ids,
            log_probs: &self.log_probs,
            tails: &self.tails,
            rows: &self.rows,
        };
        let factors = Weighted {
            cross_entropy: &case.factors.0,
            rejection: &case.factors.1,
            form,
            log_sum_exp: None,
        };
        Inputs {
            soft: SoftTargets::Sparse(distributions, factors),
            soft_weight: 0.7,
            ..Inputs::of_labels(hidden, &case.head, &case.labels)
        }
    }
}

#[track_caller]
fn assert_same(a: &Output, b: &Output, case: &Case) -> Result<()> {
    assert_rows("sparse", a, b, 5e-6);
    case.assert_gradients("sparse", &a.loss_sum.gradients()?, &b.loss_sum.gradients()?);
    Ok(())
}

#[test]
fn sparse_distributions_match_their_reference_and_finite_differences() -> Result<()> {
    for (seed, (rows, vocabulary, k)) in (61..).zip([(1, 5, 2), (9, 17, 6), (300, 40, 9)]) {
        let case = Case::random(seed, rows, 7, vocabulary, k);
        for tail in [true, false] {
            let distributions =
                Distributions::of(&case, |distribution| distribution % (k + 1), tail);
            for form in [Rejection::Linear, Rejection::Log] {
                let inputs = distributions.inputs(&case, case.hidden.as_tensor(), form);
                assert_same(&linear_cross_entropy(&inputs)?, &reference(&inputs)?, &case)?;
                let own = composed_within(7 * vocabulary, &inputs)?;
                assert_same(&own, &reference(&inputs)?, &case)?;
            }
        }
    }
    let case = Case::random(64, 4, 3, 6, 3);
    let distributions = Distributions::of(&case, |distribution| 1 + distribution % 3, true);
    let hidden = case.hidden.as_tensor().to_dtype(DType::F64)?;
    gradcheck(&[hidden], |x| {
        Ok(reference(&distributions.inputs(&case, &x[0], Rejection::Linear))?.loss_sum)
    });
    Ok(())
}

#[test]
fn sparse_distributions_of_the_whole_vocabulary_are_the_teacher_s() -> Result<()> {
    let vocabulary = 23;
    let case = Case::random(65, 40, 6, vocabulary, vocabulary);
    let mut distributions = Distributions::of(&case, |_| vocabulary, true);
    distributions.rows = (0..40).collect();
    let hidden = case.hidden.as_tensor();
    let sparse = linear_cross_entropy(&distributions.inputs(&case, hidden, Rejection::Log))?;
    let whole = linear_cross_entropy(&case.inputs(hidden, "log of the whole", true))?;
    assert_same(&sparse, &whole, &case)
}

#[test]
fn distributions_that_do_not_fit_are_errors() {
    let case = Case::random(66, 3, 4, 8, 2);
    let hidden = case.hidden.as_tensor();
    let good = || Distributions::of(&case, |_| 2, true);
    let refused = |distributions: &Distributions| {
        linear_cross_entropy(&distributions.inputs(&case, hidden, Rejection::Linear)).is_err()
    };
    assert!(!refused(&good()));
    assert!(refused(&Distributions { rows: vec![0, 1], ..good() }));
    assert!(refused(&Distributions { rows: vec![0, 1, 3], ..good() }));
    assert!(refused(&Distributions { tails: vec![0.0; 2], ..good() }));
    assert!(refused(&Distributions { starts: vec![0, 4, 2, 6], ..good() }));
    assert!(refused(&Distributions { ids: vec![8; 6], ..good() }));
}
