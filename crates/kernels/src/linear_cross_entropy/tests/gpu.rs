//! The GPU's kernel, emulated, against the CPU's loss.

use candle_core::backprop::GradStore;
use candle_core::{Result, Var};

use super::super::composed::composed_within;
use super::super::{Inputs, Rejection, RowStatistics, Teacher, linear_cross_entropy};
use super::sparse::Distributions;
use super::{Case, KINDS, assert_rows, kinds_and_teachers};
use crate::composed::CHUNK_VALUES;
use crate::cuda::emulator::emulated;
use crate::dispatch::with_half_products;
use crate::graph::Backward;
use crate::test_support::{assert_close, relative_error};

/// The kernel's loss, of at most so many logits at a time, against the CPU's.
fn assert_near_within(logits: usize, name: &str, inputs: &Inputs<'_>, case: &Case) -> Result<()> {
    let own = emulated(|| composed_within(logits, inputs))?;
    let plain = linear_cross_entropy(inputs)?;
    assert_rows(name, &own, &plain, 3e-6);
    let of_own = emulated(|| own.loss_sum.gradients())?;
    case.assert_gradients(name, &of_own, &plain.loss_sum.gradients()?);
    Ok(())
}

fn assert_near(name: &str, inputs: &Inputs<'_>, case: &Case) -> Result<()> {
    assert_near_within(CHUNK_VALUES, name, inputs, case)
}

#[test]
fn every_kind_of_targets_matches_the_cpu() -> Result<()> {
    let sizes = [(1, 4, 5, 2), (3, 8, 17, 4), (40, 6, 700, 32)];
    for (seed, (rows, width, vocabulary, k)) in (11..).zip(sizes) {
        let case = Case::random(seed, rows, width, vocabulary, k);
        for (soft, teacher) in kinds_and_teachers() {
            assert_near(soft, &case.inputs(&case.hidden, soft, teacher), &case)?;
        }
    }
    Ok(())
}

#[test]
fn sparse_distributions_match_the_cpu() -> Result<()> {
    let case = Case::random(21, 9, 6, 60, 8);
    for (tail, form) in [(true, Rejection::Linear), (true, Rejection::Log), (false, Rejection::Log)]
    {
        let distributions = Distributions::of(&case, |distribution| distribution * 3 % 9, tail);
        assert_near("sparse", &distributions.inputs(&case, &case.hidden, form), &case)?;
    }
    Ok(())
}

#[test]
fn frozen_arguments_have_the_same_loss_without_a_gradient() -> Result<()> {
    let case = Case::random(4, 7, 6, 30, 4);
    for soft in KINDS {
        let hidden = case.hidden.detach();
        let head = case.head.detach();
        let inputs = Inputs { head: (&head).into(), ..case.inputs(&hidden, soft, true) };
        let own = emulated(|| linear_cross_entropy(&inputs))?;
        assert_close(soft, &own.loss_sum, &linear_cross_entropy(&inputs)?.loss_sum, 3e-6);
        assert!(!own.loss_sum.track_op());
    }
    Ok(())
}

#[test]
fn rows_that_share_teachers_match_the_cpu_in_chunks_also() -> Result<()> {
    let case = Case::random(9, 14, 6, 40, 4);
    let of: Vec<u32> = (0..14).map(|row| row * 5 % 14 / 3).collect();
    for soft in ["full", "log", "bucket"] {
        let inputs = case.inputs(&case.hidden, soft, true);
        let teacher = inputs.teacher.map(|teacher| Teacher { rows: Some(&of), ..teacher });
        let inputs = Inputs { teacher, ..inputs };
        assert_near(soft, &inputs, &case)?;
        // Three rows at a time.
        assert_near_within(3 * 40, soft, &inputs, &case)?;
    }
    Ok(())
}

#[test]
fn products_of_halves_give_the_same_up_to_their_digits() -> Result<()> {
    for vocabulary in [64, 67] {
        let case = Case::random(23, 30, 16, vocabulary, 8);
        for soft in ["none", "full", "bucket", "renormalise"] {
            let inputs = case.inputs(case.hidden.as_tensor(), soft, soft != "none");
            let halves =
                || with_half_products(|| linear_cross_entropy(&inputs)?.loss_sum.gradients());
            let own = emulated(halves)?;
            let exact = linear_cross_entropy(&inputs)?.loss_sum.gradients()?;
            for variable in [&case.hidden, &case.head] {
                let (own, exact) =
                    (own.get(variable).expect("own"), exact.get(variable).expect("cpu"));
                let error = relative_error(own, exact);
                assert!((1e-5..5e-2).contains(&error), "{soft} {vocabulary}: {error:.1e}");
            }
        }
    }
    Ok(())
}

/// A draft that is sure of a wrong token, and one that is sure of the right one. What entries leave is no difference of
/// near-equal numbers.
#[test]
fn large_logits_keep_their_digits() -> Result<()> {
    for (seed, rows, vocabulary, soft, teacher) in
        [(24, 12, 96, "none", false), (24, 12, 96, "full", true), (5, 6, 50, "bucket", false)]
    {
        let case = Case::random(seed, rows, 8, vocabulary, 4);
        let hidden = (case.hidden.as_tensor() * 12.0)?;
        assert_near(soft, &case.inputs(&hidden, soft, teacher), &case)?;
    }
    Ok(())
}

#[test]
fn gradients_of_chunks_are_not_rounded_to_halves_before_they_are_added() -> Result<()> {
    let vocabulary = 300;
    let case = Case::random(22, 60, 16, vocabulary, 8);
    let inputs = case.inputs(case.hidden.as_tensor(), "full", true);
    let gradients = |rows: usize| {
        emulated(|| {
            with_half_products(|| composed_within(rows * vocabulary, &inputs)?.loss_sum.gradients())
        })
    };
    let (whole, chunks) = (gradients(60)?, gradients(2)?);
    for (name, variable) in [("dh", &case.hidden), ("dW", &case.head)] {
        let (a, b) = (chunks.get(variable).expect("chunks"), whole.get(variable).expect("whole"));
        assert_close(name, a, b, 2e-4);
    }
    // Factors are halves.
    let exact = linear_cross_entropy(&inputs)?.loss_sum.gradients()?;
    let exact = exact.get(&case.head).expect("exact");
    let error = relative_error(chunks.get(&case.head).expect("chunks"), exact);
    assert!((1e-4..2e-2).contains(&error), "{error:.1e}");
    Ok(())
}

/// The sum of a head's gradient has its order from the chunks, so its last digits do; a row's numbers have not.
#[test]
fn chunks_of_any_size_give_a_row_the_same_loss_and_repeat_their_bits() -> Result<()> {
    let (rows, vocabulary) = (300, 40);
    let case = Case::random(31, rows, 16, vocabulary, 4);
    for soft in ["none", "full", "log", "bucket"] {
        let inputs = case.inputs(case.hidden.as_tensor(), soft, soft != "none");
        let within = |rows: usize| -> Result<(GradStore, RowStatistics)> {
            emulated(|| {
                let own = composed_within(rows * vocabulary, &inputs)?;
                Ok((own.loss_sum.gradients()?, own.rows))
            })
        };
        let bits = |gradients: &GradStore, variable: &Var| -> Result<Vec<u32>> {
            let own = gradients.get(variable).expect("a gradient").flatten_all()?;
            Ok(own.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
        };
        let (whole, of_whole) = within(rows)?;
        for each in [1, 7, 128, 290] {
            let ((own, of_own), (again, _)) = (within(each)?, within(each)?);
            for (own, plain) in [(&of_own.hard, &of_whole.hard), (&of_own.soft, &of_whole.soft)] {
                // Products are a library's, whose last digits hang on the number of rows.
                let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * (1.0 + b.abs());
                assert!(own.iter().zip(plain).all(is_near), "{soft}, {each} rows");
            }
            assert_eq!(of_own.agrees, of_whole.agrees);
            for variable in [&case.hidden, &case.head] {
                assert_eq!(bits(&own, variable)?, bits(&again, variable)?, "{soft}, {each} rows");
                let [a, b] = [&own, &whole].map(|of| of.get(variable).expect("a gradient"));
                assert_close(soft, a, b, 3e-6);
            }
        }
        // Whole tiles: 290 rows at most are 256.
        let [tiles, most] = [256, 290].map(within);
        assert_eq!(bits(&tiles?.0, &case.head)?, bits(&most?.0, &case.head)?, "{soft}");
    }
    Ok(())
}
