//! Rows' own teachers, shared ones, and teachers of 16 bits.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::{
    Inputs, Output, Rejection, SoftTargets, Teacher, Weighted, linear_cross_entropy, reference,
};
use super::Case;
use crate::graph::Backward;
use crate::test_support::{Noise, assert_close};

#[test]
fn rows_that_share_teachers_match_rows_with_their_own() -> Result<()> {
    // More rows than one chunk holds, in no order of their teachers.
    for (seed, rows, teachers) in [(31, 1, 1), (32, 7, 3), (33, 600, 90)] {
        let case = Case::random(seed, rows, 8, 17, 4);
        let mut noise = Noise::new(seed + 100);
        let of: Vec<u32> = (0..rows).map(|_| noise.below(teachers) as u32).collect();
        let states = noise.tensor(&[teachers, 9]);
        let own = states.index_select(&Tensor::new(of.as_slice(), &Device::Cpu)?, 0)?;
        let head = (&case.teacher_head).into();
        for soft in ["none", "full", "bucket", "linear", "log"] {
            let inputs = case.inputs(case.hidden.as_tensor(), soft, true);
            let shared = Teacher { hidden: &states, rows: Some(&of), head };
            let shared = Inputs { teacher: Some(shared), ..inputs };
            let own =
                Inputs { teacher: Some(Teacher { hidden: &own, rows: None, head }), ..inputs };
            let (own, plain) = (linear_cross_entropy(&own)?, reference(&shared)?);
            let shared = linear_cross_entropy(&shared)?;
            // A row's bits do not depend on where it stands.
            assert_eq!(shared.rows, own.rows, "{soft}");
            assert_close("loss", &shared.loss_sum, &own.loss_sum, 0.0);
            assert_close("loss", &shared.loss_sum, &plain.loss_sum, 2e-6);
            let (a, b) = (shared.loss_sum.gradients()?, own.loss_sum.gradients()?);
            let of = |grads: &GradStore, var: &Var| grads.get(var).cloned().expect("gradient");
            assert_close("dh", &of(&a, &case.hidden), &of(&b, &case.hidden), 0.0);
            assert_close("dW", &of(&a, &case.head), &of(&b, &case.head), 1e-5);
        }
        let hidden = case.hidden.as_tensor();
        let mut wrong = of.clone();
        wrong[0] = teachers as u32;
        for rows in [&wrong[..], &of[1..]] {
            let teacher = Some(Teacher { hidden: &states, rows: Some(rows), head });
            let inputs = Inputs { teacher, ..case.inputs(hidden, "full", true) };
            assert!(linear_cross_entropy(&inputs).is_err());
        }
    }
    Ok(())
}

#[test]
fn a_teacher_that_accepts_nothing_gives_no_nan() -> Result<()> {
    let hidden = Var::from_tensor(&Tensor::new(&[[1.0_f32]], &Device::Cpu)?)?;
    let head = Tensor::new(&[[1.0_f32], [-1.0]], &Device::Cpu)?;
    let teacher = Tensor::new(&[[1.0_f32]], &Device::Cpu)?;
    let inputs = Inputs {
        soft: SoftTargets::Weighted(Weighted {
            cross_entropy: &[0.0],
            rejection: &[1.0],
            form: Rejection::Log,
            log_sum_exp: Some(&[f64::INFINITY]),
        }),
        soft_weight: 1.0,
        teacher: Some(Teacher { hidden: &teacher, rows: None, head: (&head).into() }),
        ..Inputs::of_labels(&hidden, &head, &[0])
    };
    for output in [linear_cross_entropy(&inputs)?, reference(&inputs)?] {
        assert_eq!(output.loss_sum.to_scalar::<f32>()?.to_bits(), 0.0_f32.to_bits());
        let grads = output.loss_sum.gradients()?;
        let moved = grads.get(&hidden).expect("dh").flatten_all()?.to_vec1::<f32>()?;
        assert!(moved[0] == 0.0, "{moved:?}");
    }
    Ok(())
}

#[test]
fn a_16_bit_teacher_s_logits_are_rounded() -> Result<()> {
    let case = Case::random(16, 5, 4, 40, 3);
    let head = case.teacher_head.to_dtype(DType::BF16)?;
    // Few enough bits that products add up exactly in any order.
    let hidden = ((&case.teacher_hidden * 16.0)?.round()? / 16.0)?;
    let teacher = Teacher { hidden: &hidden, rows: None, head: (&head).into() };
    let inputs = case.inputs(case.hidden.as_tensor(), "linear", true);
    let rounded = linear_cross_entropy(&Inputs { teacher: Some(teacher), ..inputs })?;
    let plain = reference(&Inputs { teacher: Some(teacher), ..inputs })?;
    let widened = head.to_dtype(DType::F32)?;
    let widened = Teacher { head: (&widened).into(), ..teacher };
    let exact = linear_cross_entropy(&Inputs { teacher: Some(widened), ..inputs })?;
    let differences = |other: &Output| -> f64 {
        let pairs = rounded.rows.soft.iter().zip(&other.rows.soft);
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    // The last bit of bf16 is worth about 1e-2 of a logit here, that of f32 nothing.
    assert!(differences(&plain) < 1e-4 && differences(&exact) > 1e-4);
    Ok(())
}
