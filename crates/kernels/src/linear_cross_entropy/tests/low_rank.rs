//! A trained part of low rank beside a frozen head, and weights of labels.

use std::cell::RefCell;

use crate::graph::Backward;
use candle_core::{DType, Result, Tensor, Var};

use super::super::composed::{composed_within, in_chunks};
use super::super::{Inputs, LowRank, Output, Rejection, Teacher, linear_cross_entropy, reference};
use super::sparse::Distributions;
use super::{Case, kinds_and_teachers};
use crate::bend::Bend;
use crate::composed::CHUNK_VALUES;
use crate::cuda::emulator::emulated;
use crate::linear::linear;
use crate::matrix::Head;
use crate::memory::Budget;
use crate::test_support::{Noise, assert_close, gradcheck};

/// The factors of the second part.
struct Second {
    hidden: Var,
    head: Var,
    label_weights: Vec<f32>,
}

impl Second {
    fn random(seed: u64, case: &Case, rank: usize) -> Self {
        let (mut noise, rows) = (Noise::new(seed), case.labels.len());
        Self {
            hidden: noise.var(&[rows, rank]),
            head: noise.var(&[case.head.dims()[0], rank]),
            label_weights: (0..rows).map(|row| [0.0, 0.6, 1.7][row % 3]).collect(),
        }
    }

    fn low_rank(&self) -> LowRank<'_> {
        LowRank { hidden: self.hidden.as_tensor(), head: self.head.as_tensor() }
    }
}

/// Calls `f` with the arguments of every kind of targets, the head frozen and `second` beside it.
fn every_kind(
    case: &Case,
    second: &Second,
    mut f: impl FnMut(&str, &Inputs<'_>) -> Result<()>,
) -> Result<()> {
    let head = case.head.detach();
    let low_rank = Some(second.low_rank());
    for weights in [None, Some(second.label_weights.as_slice())] {
        let with =
            |inputs| Inputs { head: (&head).into(), low_rank, label_weights: weights, ..inputs };
        for (kind, teacher) in kinds_and_teachers() {
            f(kind, &with(case.inputs(&case.hidden, kind, teacher)))?;
        }
        let distributions = Distributions::of(case, |distribution| distribution, true);
        f("sparse", &with(distributions.inputs(case, &case.hidden, Rejection::Log)))?;
    }
    Ok(())
}

#[track_caller]
fn assert_near(kind: &str, own: &Output, plain: &Output, variables: [&Var; 3]) -> Result<()> {
    assert_close(kind, &own.loss_sum, &plain.loss_sum, 5e-6);
    assert_eq!(own.rows.agrees, plain.rows.agrees, "{kind}");
    for (a, b) in own.rows.acceptance.iter().zip(&plain.rows.acceptance) {
        assert!((a - b).abs() < 1e-5, "{kind}: {a} against {b}");
    }
    let (a, b) = (emulated(|| own.loss_sum.gradients())?, plain.loss_sum.gradients()?);
    for (name, variable) in ["dh", "dm", "dW2"].into_iter().zip(variables) {
        let (a, b) = (a.get(variable).expect("own"), b.get(variable).expect("plain"));
        assert_close(&format!("{kind} {name}"), a, b, 2e-5);
    }
    Ok(())
}

/// The same logits from factors side by side.
fn side_by_side(inputs: &Inputs<'_>, second: &Second) -> Result<Output> {
    let hidden = Tensor::cat(&[inputs.hidden, second.hidden.as_tensor()], 1)?;
    let head = Tensor::cat(&[&inputs.head.to_tensor()?, second.head.as_tensor()], 1)?;
    reference(&Inputs { hidden: &hidden, head: (&head).into(), low_rank: None, ..*inputs })
}

#[test]
fn every_implementation_is_that_of_factors_side_by_side() -> Result<()> {
    for (seed, (rows, vocabulary, rank)) in (31..).zip([(1, 5, 1), (9, 30, 3), (40, 300, 6)]) {
        let case = Case::random(seed, rows, 7, vocabulary, 4.min(vocabulary));
        let second = Second::random(seed, &case, rank);
        let variables = [&case.hidden, &second.hidden, &second.head];
        every_kind(&case, &second, |kind, inputs| {
            let plain = side_by_side(inputs, &second)?;
            assert_near(kind, &linear_cross_entropy(inputs)?, &plain, variables)?;
            assert_near(kind, &reference(inputs)?, &plain, variables)?;
            assert_near(kind, &composed_within(3 * vocabulary, inputs)?, &plain, variables)
        })?;
    }
    Ok(())
}

#[test]
fn a_second_part_is_added_to_bent_logits() -> Result<()> {
    let case = Case::random(37, 9, 7, 30, 4);
    let second = Second::random(37, &case, 3);
    let variables = [&case.hidden, &second.hidden, &second.head];
    let bend = Bend { divisor: 1.3, softcap: Some(1.1) };
    every_kind(&case, &second, |kind, inputs| {
        let inputs = inputs.bent(bend);
        // The same logits from tensor operations, as hidden states of a head that changes nothing.
        let bent = bend.of(inputs.head.linear(inputs.hidden)?)?;
        let logits = (bent + linear(&second.hidden, &second.head, None)?)?;
        let nothing = Tensor::eye(30, DType::F32, logits.device())?;
        let plain = Inputs {
            hidden: &logits,
            head: (&nothing).into(),
            low_rank: None,
            bend: Bend::default(),
            ..inputs
        };
        let plain = reference(&plain)?;
        assert_near(kind, &linear_cross_entropy(&inputs)?, &plain, variables)?;
        assert_near(kind, &reference(&inputs)?, &plain, variables)?;
        assert_near(kind, &composed_within(60, &inputs)?, &plain, variables)
    })
}

#[test]
fn a_gpu_s_kernel_is_that_of_factors_side_by_side_in_chunks_also() -> Result<()> {
    const VOCABULARY: usize = 30;
    let case = Case::random(34, 5, 7, VOCABULARY, 4);
    let second = Second::random(34, &case, 3);
    let variables = [&case.hidden, &second.hidden, &second.head];
    let shared = [3, 0, 3, 1, 0];
    every_kind(&case, &second, |kind, inputs| {
        let teacher = inputs.teacher.map(|teacher| Teacher { rows: Some(&shared), ..teacher });
        for inputs in [*inputs, Inputs { teacher, ..*inputs }] {
            let plain = side_by_side(&inputs, &second)?;
            for logits in [CHUNK_VALUES, 2 * VOCABULARY] {
                let own = emulated(|| composed_within(logits, &inputs))?;
                assert_near(kind, &own, &plain, variables)?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_gpu_holds_the_logits_of_a_chunk_once_beside_their_gradient() -> Result<()> {
    let (rows, vocabulary) = (60, 3000);
    let case = Case::random(38, rows, 7, vocabulary, 4);
    let (second, head) = (Second::random(38, &case, 3), case.head.detach());
    let labels = case.inputs(&case.hidden, "none", false);
    let inputs = Inputs { head: (&head).into(), low_rank: Some(second.low_rank()), ..labels };
    let loss = || emulated(|| linear_cross_entropy(&inputs)).map(drop);
    // The kernel's library is there after this.
    loss()?;
    let budget = Budget::new(1 << 40);
    budget.within(loss)?;
    let (held, logits) = (budget.most_held(), 4 * rows * vocabulary);
    assert!((2 * logits..5 * logits / 2).contains(&held), "{held} bytes, logits are {logits}");
    Ok(())
}

#[test]
fn gradients_match_differences() {
    let case = Case::random(35, 4, 3, 9, 3);
    let second = Second::random(35, &case, 2);
    let head = case.head.detach();
    let start = [case.hidden.detach(), second.hidden.detach(), second.head.detach()];
    for kind in ["none", "full", "bucket", "linear"] {
        gradcheck(&start, |t| {
            let head = head.to_dtype(t[0].dtype())?;
            let inputs = Inputs {
                head: (&head).into(),
                low_rank: Some(LowRank { hidden: &t[1], head: &t[2] }),
                label_weights: Some(&second.label_weights),
                ..case.inputs(&t[0], kind, true)
            };
            Ok(reference(&inputs)?.loss_sum)
        });
    }
}

#[test]
fn labels_without_weight_are_measured_and_move_nothing() -> Result<()> {
    let case = Case::random(36, 5, 4, 11, 3);
    let nothing = [0.0; 5];
    let labels = case.inputs(&case.hidden, "none", false);
    let weighted = Inputs { label_weights: Some(&nothing), ..labels };
    let (whole, none) = (linear_cross_entropy(&labels)?, linear_cross_entropy(&weighted)?);
    assert_eq!(whole.rows, none.rows);
    let gradients = none.loss_sum.gradients()?;
    let moved = gradients.get(&case.hidden).expect("dh").abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(moved == 0.0, "{moved}");
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() -> Result<()> {
    let case = Case::random(37, 4, 5, 9, 3);
    let second = Second::random(37, &case, 2);
    let (frozen, other) = (case.head.detach(), Tensor::zeros_like(&case.head)?);
    let labels = Inputs { head: (&frozen).into(), ..case.inputs(&case.hidden, "none", false) };
    let fits = Inputs { low_rank: Some(second.low_rank()), ..labels };
    assert!(linear_cross_entropy(&fits).is_ok());
    let wide = LowRank { head: &other, ..second.low_rank() };
    let short = second.hidden.narrow(0, 0, 3)?;
    let few = LowRank { hidden: &short, ..second.low_rank() };
    for wrong in [
        Inputs { low_rank: Some(wide), ..labels },
        Inputs { low_rank: Some(few), ..labels },
        Inputs { head: (&case.head).into(), ..fits },
        Inputs { label_weights: Some(&[1.0; 3]), ..labels },
    ] {
        assert!(linear_cross_entropy(&wrong).is_err() && reference(&wrong).is_err());
    }
    Ok(())
}

/// What a step's products make of a variable is kept by its id. A result begins a graph of its own.
#[test]
fn a_table_that_trains_is_read_itself_by_all_chunks() -> Result<()> {
    let case = Case::random(91, 6, 4, 11, 3);
    let second = Second::random(92, &case, 3);
    let (frozen, made) = (case.head.detach(), (second.head.as_tensor() * 2.0)?);
    for (table, is_itself) in [(second.head.as_tensor(), true), (&made, false)] {
        let heads = [Head::from(&frozen), Head::from(table)];
        let products = [(case.hidden.as_tensor(), heads[0]), (second.hidden.as_tensor(), heads[1])];
        let read = RefCell::new(Vec::new());
        in_chunks(2 * 11, &products, None, |rows, products| {
            let table = products[1].1.tensor().expect("a tensor");
            read.borrow_mut().push(table.id());
            let labels: Vec<u32> = rows.iter().map(|row| case.labels[*row as usize]).collect();
            let low_rank = Some(LowRank { hidden: products[1].0, head: table });
            let inputs = Inputs::of_labels(products[0].0, products[0].1, &labels);
            reference(&Inputs { low_rank, ..inputs })
        })?;
        let read = read.into_inner();
        assert_eq!(read.len(), 3);
        assert!(read.iter().all(|id| *id == read[0]));
        assert_eq!(read[0] == table.id(), is_itself);
    }
    Ok(())
}
