//! Heads of quantised blocks beside the same values in f32.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use half::f16;

use super::super::composed::composed;
use super::super::{Inputs, LowRank, Teacher, linear_cross_entropy};
use super::{Case, kinds_and_teachers};
use crate::bend::Bend;
use crate::chosen_products::chosen_products;
use crate::dispatch::with_rounded_products;
use crate::graph::Backward;
use crate::log_sum_exp::bent_log_sum_exp;
use crate::matrix::{BlockFormat, Head, Matrix, QuantisedMatrix};
use crate::test_support::{Noise, assert_close};
use crate::top_k::bent_top_k;

const WIDTH: usize = 64;
const BEND: Bend = Bend { divisor: 1.3, softcap: Some(1.1) };

/// A head of random blocks of 8 bits, and its values.
fn heads(noise: &mut Noise, vocabulary: usize, width: usize) -> Result<(Matrix, Tensor)> {
    let mut bytes = Vec::new();
    for _ in 0..vocabulary * width / 32 {
        bytes.extend(f16::from_f32(0.01).to_le_bytes());
        bytes.extend((0..32).map(|_| noise.below(256) as u8));
    }
    let blocks = QuantisedMatrix::new(BlockFormat::Q8_0, vocabulary, width, &bytes)?;
    let stored = Matrix::Quantised(Arc::new(blocks));
    let widened = stored.to_dense()?;
    Ok((stored, widened))
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

#[test]
fn losses_and_gradients_have_the_bits_of_the_widened_head() -> Result<()> {
    for (seed, (rows, vocabulary)) in (101..).zip([(1, 5), (5, 700), (40, 512), (200, 1100)]) {
        let case = Case::random(seed, rows, WIDTH, vocabulary, 4);
        let mut noise = Noise::new(seed);
        let (stored, widened) = heads(&mut noise, vocabulary, WIDTH)?;
        let states = noise.tensor(&[rows, WIDTH]);
        let second = (noise.var(&[rows, 3]), noise.var(&[vocabulary, 3]));
        let second = LowRank { hidden: &second.0, head: &second.1 };
        for (kind, has_teacher) in kinds_and_teachers() {
            for (bend, low_rank) in [(Bend::default(), None), (BEND, None), (BEND, Some(second))] {
                let with = |head: Head<'_>| {
                    let teacher = Teacher { hidden: &states, rows: None, head };
                    let inputs = case.inputs(&case.hidden, kind, has_teacher);
                    let teacher = has_teacher.then_some(teacher);
                    linear_cross_entropy(&Inputs { head, low_rank, teacher, ..inputs }.bent(bend))
                };
                let (own, plain) = (with((&stored).into())?, with((&widened).into())?);
                assert_eq!(own.rows, plain.rows, "{kind}");
                assert_eq!(values(&own.loss_sum)?, values(&plain.loss_sum)?, "{kind}");
                let (a, b) = (own.loss_sum.gradients()?, plain.loss_sum.gradients()?);
                for variable in [case.hidden.as_tensor(), second.hidden, second.head] {
                    let (a, b) = (a.get(variable), b.get(variable));
                    let [a, b] = [a, b].map(|gradient| gradient.map(values).transpose());
                    assert_eq!(a?, b?, "{kind}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_head_of_several_slabs_has_the_bits_of_the_widened_one() -> Result<()> {
    // With many rows the whole product is large enough for rounded factors, and the second slab alone is not.
    for (rows, rounded) in [(3, false), (64, true)] {
        with_rounded_products(rounded, || assert_same_of_slabs(rows))?;
    }
    Ok(())
}

/// Two slabs, the second one of which ends within a part of the sum.
fn assert_same_of_slabs(rows: usize) -> Result<()> {
    let (vocabulary, width) = (17_000, 256);
    assert!(crate::linear::slab_bytes(vocabulary, width) < 4 * vocabulary * width);
    let mut noise = Noise::new(111);
    let (stored, widened) = heads(&mut noise, vocabulary, width)?;
    let x = noise.var(&[rows, width]);
    let (stored, widened) = (Head::from(&stored), Head::from(&widened));
    let (own, plain) = (stored.linear(&x)?, widened.linear(&x)?);
    assert_eq!(values(&own)?, values(&plain)?);
    let direction = noise.tensor(&[rows, vocabulary]);
    let gradient = |product: Tensor| -> Result<Vec<f32>> {
        let gradients = (product * &direction)?.sum_all()?.gradients()?;
        values(gradients.get(&x).expect("a gradient"))
    };
    assert_eq!(gradient(own)?, gradient(plain)?);
    Ok(())
}

#[test]
fn what_else_reads_a_head_has_the_bits_of_the_widened_one() -> Result<()> {
    let mut noise = Noise::new(121);
    let (stored, widened) = heads(&mut noise, 700, WIDTH)?;
    let x = noise.var(&[30, WIDTH]);
    for bend in [Bend::default(), BEND] {
        let [a, b] = [Head::from(&stored), Head::from(&widened)];
        assert_eq!(bent_log_sum_exp(&x, a, bend)?, bent_log_sum_exp(&x, b, bend)?);
        assert_eq!(bent_top_k(&x, a, 6, bend)?, bent_top_k(&x, b, 6, bend)?);
    }
    let ids: Vec<u32> = (0..30 * 5).map(|_| noise.below(700) as u32).collect();
    let (own, plain) = (chosen_products(&x, &stored, &ids)?, chosen_products(&x, &widened, &ids)?);
    assert_eq!(values(&own)?, values(&plain)?);
    let (a, b) = (own.sum_all()?.gradients()?, plain.sum_all()?.gradients()?);
    let [a, b] = [&a, &b].map(|gradients| values(gradients.get(&x).expect("a gradient")));
    assert_eq!(a?, b?);
    Ok(())
}

#[test]
fn ops_that_know_no_blocks_read_widened_values() -> Result<()> {
    let case = Case::random(131, 9, WIDTH, 70, 4);
    let (stored, widened) = heads(&mut Noise::new(131), 70, WIDTH)?;
    let with =
        |head: Head<'_>| composed(&Inputs { head, ..case.inputs(&case.hidden, "bucket", false) });
    let (own, plain) = (with((&stored).into())?, with((&widened).into())?);
    assert_close("loss", &own.loss_sum, &plain.loss_sum, 0.0);
    let narrow = Inputs::of_labels(&case.hidden, &stored, &case.labels);
    let short = case.hidden.narrow(1, 0, WIDTH - 1)?;
    assert!(linear_cross_entropy(&narrow).is_ok());
    assert!(linear_cross_entropy(&Inputs { hidden: &short, ..narrow }).is_err());
    Ok(())
}
