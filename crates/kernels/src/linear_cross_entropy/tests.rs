mod blocks;
mod gpu;
mod low_rank;
mod sparse;
mod teachers;

use crate::graph::Backward;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};

use super::composed::{composed, composed_within};
use super::{
    Bend, Inputs, Output, Rejection, SoftTargets, Tail, Teacher, Weighted, linear_cross_entropy,
    reference,
};
use crate::test_support::{Noise, assert_close, gradcheck};

struct Case {
    hidden: Var,
    head: Var,
    labels: Vec<u32>,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    k: usize,
    factors: (Vec<f32>, Vec<f32>),
    /// As if the teacher's vocabulary went on after that of its head.
    log_sum_exp: Vec<f64>,
}

impl Case {
    fn random(seed: u64, rows: usize, width: usize, vocabulary: usize, k: usize) -> Self {
        let mut noise = Noise::new(seed);
        let teacher_hidden = noise.tensor(&[rows, width + 1]);
        let teacher_head = (noise.tensor(&[vocabulary, width + 1]) * 2.0).expect("scale");
        let logits = teacher_hidden.matmul(&teacher_head.t().expect("t")).expect("logits");
        let (mut ids, mut log_probs, mut log_sum_exp) = (Vec::new(), Vec::new(), Vec::new());
        for z in logits.to_vec2::<f32>().expect("rows") {
            let lse = z.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
            log_sum_exp.push(lse + noise.next().abs());
            let mut order: Vec<usize> = (0..vocabulary).collect();
            order.sort_by(|&a, &b| z[b].total_cmp(&z[a]));
            for &id in &order[..k] {
                ids.push(id as u32);
                log_probs.push((f64::from(z[id]) - lse) as f32);
            }
        }
        let factors: Vec<f32> = (0..2 * rows)
            .map(|i| if i % 5 == 2 { 0.0 } else { noise.next().abs() as f32 })
            .collect();
        Self {
            factors: (factors[..rows].to_vec(), factors[rows..].to_vec()),
            log_sum_exp,
            hidden: noise.var(&[rows, width]),
            head: noise.var(&[vocabulary, width]),
            labels: (0..rows).map(|_| noise.below(vocabulary) as u32).collect(),
            teacher_hidden,
            teacher_head,
            ids,
            log_probs,
            k,
        }
    }

    /// Holds the gradients of hidden states and head together.
    #[track_caller]
    fn assert_gradients(&self, kind: &str, own: &GradStore, plain: &GradStore) {
        for (name, variable) in [("dh", &self.hidden), ("dW", &self.head)] {
            let (a, b) = (own.get(variable).expect("own"), plain.get(variable).expect("plain"));
            assert_close(&format!("{kind} {name}"), a, b, 2e-5);
        }
    }

    fn inputs<'a>(&'a self, hidden: &'a Tensor, soft: &str, teacher: bool) -> Inputs<'a> {
        let top_k = |tail| SoftTargets::TopK {
            ids: &self.ids,
            log_probs: &self.log_probs,
            k: self.k,
            tail,
        };
        let weighted = |form, whole| {
            SoftTargets::Weighted(Weighted {
                cross_entropy: &self.factors.0,
                rejection: &self.factors.1,
                form,
                log_sum_exp: if whole { None } else { Some(&self.log_sum_exp) },
            })
        };
        Inputs {
            soft: match soft {
                "none" => SoftTargets::None,
                "full" => SoftTargets::Full,
                "bucket" => top_k(Tail::Bucket),
                "linear" => weighted(Rejection::Linear, false),
                "log" => weighted(Rejection::Log, false),
                "log of the whole" => weighted(Rejection::Log, true),
                _ => top_k(Tail::Renormalise),
            },
            soft_weight: if soft == "none" { 0.0 } else { 0.7 },
            teacher: teacher.then_some(Teacher {
                hidden: &self.teacher_hidden,
                rows: None,
                head: (&self.teacher_head).into(),
            }),
            ..Inputs::of_labels(hidden, &self.head, &self.labels)
        }
    }
}

const KINDS: [&str; 7] =
    ["none", "full", "bucket", "renormalise", "linear", "log", "log of the whole"];

/// Every kind with a teacher, then without one where it needs none.
fn kinds_and_teachers() -> impl Iterator<Item = (&'static str, bool)> {
    let alone = ["none", "bucket", "renormalise"].map(|kind| (kind, false));
    KINDS.into_iter().map(|kind| (kind, true)).chain(alone)
}

#[test]
fn bent_logits_have_the_slope_in_their_gradients_in_every_version() -> Result<()> {
    let bends = [
        Bend { divisor: 1.0, softcap: Some(1.2) },
        Bend { divisor: 1.6, softcap: None },
        Bend { divisor: 0.7, softcap: Some(2.0) },
    ];
    for (seed, (rows, width, vocabulary, k)) in (41..).zip([(3, 8, 17, 4), (70, 12, 40, 6)]) {
        let case = Case::random(seed, rows, width, vocabulary, k);
        for (soft, bend) in KINDS.into_iter().zip(bends.into_iter().cycle()) {
            let inputs = case.inputs(case.hidden.as_tensor(), soft, true).bent(bend);
            let plain = reference(&inputs)?;
            let straight = reference(&case.inputs(case.hidden.as_tensor(), soft, true))?;
            let [bent, straight] = [&plain, &straight].map(|of| of.loss_sum.to_scalar::<f32>());
            assert!((bent? - straight?).abs() > 1e-3, "{soft}: nothing was bent");
            let want = plain.loss_sum.gradients()?;
            for (name, other) in
                [("fused", linear_cross_entropy(&inputs)?), ("composed", composed(&inputs)?)]
            {
                assert_close(name, &other.loss_sum, &plain.loss_sum, 2e-6);
                assert_eq!(other.rows.agrees, plain.rows.agrees);
                let got = other.loss_sum.gradients()?;
                case.assert_gradients(&format!("{soft} {name}"), &got, &want);
            }
        }
    }
    Ok(())
}

#[test]
fn fused_matches_reference_in_loss_gradient_and_statistics() -> Result<()> {
    let sizes = [(1, 4, 5, 2), (3, 8, 17, 4), (130, 12, 40, 6), (20, 6, 300, 32)];
    for (seed, (rows, width, vocabulary, k)) in (1..).zip(sizes) {
        let case = Case::random(seed, rows, width, vocabulary, k);
        for (soft, teacher) in kinds_and_teachers() {
            let inputs = case.inputs(case.hidden.as_tensor(), soft, teacher);
            let fused = linear_cross_entropy(&inputs)?;
            let plain = reference(&inputs)?;
            assert_rows(soft, &fused, &plain, 2e-6);
            let (a, b) = (fused.loss_sum.gradients()?, plain.loss_sum.gradients()?);
            case.assert_gradients(soft, &a, &b);
        }
    }
    Ok(())
}

/// Holds losses, up to an error, and statistics of rows together.
#[track_caller]
fn assert_rows(kind: &str, own: &Output, plain: &Output, loss: f64) {
    assert_close(kind, &own.loss_sum, &plain.loss_sum, loss);
    let (own, plain) = (&own.rows, &plain.rows);
    assert_eq!(own.agrees, plain.agrees, "{kind}");
    for (name, own, plain) in [
        ("hard", &own.hard, &plain.hard),
        ("soft", &own.soft, &plain.soft),
        ("acceptance", &own.acceptance, &plain.acceptance),
    ] {
        assert_eq!(own.len(), plain.len(), "{kind} {name}");
        for (a, b) in own.iter().zip(plain) {
            assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{kind} {name}: {a} {b}");
        }
    }
}

#[track_caller]
fn assert_same(kind: &str, fused: &Output, own: &Output, case: &Case) -> Result<()> {
    assert_rows(kind, own, fused, 2e-6);
    // A factor after the loss, as the mean over rows is.
    let (a, b) = ((&own.loss_sum * 0.3)?.gradients()?, (&fused.loss_sum * 0.3)?.gradients()?);
    case.assert_gradients(kind, &a, &b);
    Ok(())
}

#[test]
fn composed_chunks_match_fused_in_loss_gradient_and_statistics() -> Result<()> {
    for (seed, (rows, width, vocabulary)) in (51..).zip([(1, 4, 5), (40, 6, 33)]) {
        let case = Case::random(seed, rows, width, vocabulary, 3);
        for soft in KINDS {
            let inputs = case.inputs(case.hidden.as_tensor(), soft, true);
            let (fused, own) = (linear_cross_entropy(&inputs)?, composed(&inputs)?);
            assert_same(soft, &fused, &own, &case)?;
        }
    }
    // Rows that share teachers, in no order, over several chunks of seven rows.
    let (rows, vocabulary) = (40, 17);
    let case = Case::random(61, rows, 6, vocabulary, 3);
    let mut noise = Noise::new(62);
    let states = noise.tensor(&[7, 7]);
    let of: Vec<u32> = (0..rows).map(|_| noise.below(7) as u32).collect();
    for soft in KINDS {
        let head = (&case.teacher_head).into();
        let teacher = Teacher { hidden: &states, rows: Some(&of), head };
        let inputs = case.inputs(case.hidden.as_tensor(), soft, true);
        let inputs = Inputs { teacher: Some(teacher), ..inputs };
        let (fused, own) =
            (linear_cross_entropy(&inputs)?, composed_within(7 * vocabulary + 3, &inputs)?);
        assert_same(soft, &fused, &own, &case)?;
    }
    Ok(())
}

#[test]
fn frozen_heads_get_no_gradient_from_the_composed_loss() -> Result<()> {
    let case = Case::random(71, 9, 4, 11, 3);
    let frozen = case.head.detach();
    let inputs = case.inputs(case.hidden.as_tensor(), "full", true);
    let inputs = Inputs { head: (&frozen).into(), ..inputs };
    let (fused, own) = (linear_cross_entropy(&inputs)?, composed(&inputs)?);
    let (a, b) = (own.loss_sum.gradients()?, fused.loss_sum.gradients()?);
    let (a, b) = (a.get(&case.hidden).expect("composed"), b.get(&case.hidden).expect("fused"));
    assert_close("dh", a, b, 2e-5);
    let detached = case.hidden.detach();
    let inputs = Inputs { hidden: &detached, ..inputs };
    assert!(!composed(&inputs)?.loss_sum.track_op());
    Ok(())
}

#[test]
fn reference_gradient_matches_differences() {
    let case = Case::random(9, 3, 4, 7, 3);
    for soft in KINDS {
        let (hidden, head) = (case.hidden.as_tensor().clone(), case.head.as_tensor().clone());
        gradcheck(&[hidden, head], |t| {
            let teacher_hidden = case.teacher_hidden.to_dtype(DType::F64)?;
            let mut inputs = case.inputs(&t[0], soft, true);
            inputs.head = (&t[1]).into();
            let head = (&case.teacher_head).into();
            inputs.teacher = Some(Teacher { hidden: &teacher_hidden, rows: None, head });
            Ok(reference(&inputs)?.loss_sum)
        });
    }
}

#[test]
fn peaked_draft_activates_the_tail_floor_without_nan() -> Result<()> {
    let hidden = Var::from_tensor(&Tensor::new(&[[1.0_f32]], &Device::Cpu)?)?;
    let head = Tensor::new(&[[60.0_f32], [-60.0], [-60.0]], &Device::Cpu)?;
    let inputs = Inputs {
        soft: SoftTargets::TopK { ids: &[0], log_probs: &[0.5_f32.ln()], k: 1, tail: Tail::Bucket },
        soft_weight: 0.9,
        ..Inputs::of_labels(&hidden, &head, &[1])
    };
    let (fused, plain) = (linear_cross_entropy(&inputs)?, reference(&inputs)?);
    assert_close("loss", &fused.loss_sum, &plain.loss_sum, 1e-6);
    let (a, b) = (fused.loss_sum.gradients()?, plain.loss_sum.gradients()?);
    assert_close("dh", a.get(&hidden).expect("dh"), b.get(&hidden).expect("dh"), 1e-6);
    Ok(())
}

#[test]
fn labels_and_ids_outside_the_vocabulary_are_errors() {
    let mut case = Case::random(11, 3, 4, 7, 3);
    let hidden = case.hidden.as_tensor().clone();
    case.labels[1] = 7;
    assert!(linear_cross_entropy(&case.inputs(&hidden, "none", false)).is_err());
    case.labels[1] = 6;
    case.ids[0] = 7;
    assert!(linear_cross_entropy(&case.inputs(&hidden, "bucket", false)).is_err());
}

#[test]
fn frozen_arguments_compute_no_gradient() -> Result<()> {
    let case = Case::random(12, 3, 4, 7, 3);
    let hidden = case.hidden.as_tensor().detach();
    let head = case.head.as_tensor().detach();
    let inputs = Inputs { head: (&head).into(), ..case.inputs(&hidden, "full", true) };
    assert!(!linear_cross_entropy(&inputs)?.loss_sum.track_op());
    let inputs = Inputs { head: (&head).into(), ..case.inputs(&case.hidden, "full", true) };
    let grads = linear_cross_entropy(&inputs)?.loss_sum.gradients()?;
    assert!(grads.get(&case.hidden).is_some() && grads.get(&case.head).is_none());
    Ok(())
}

#[test]
fn rows_with_zero_factors_are_measured_and_move_nothing() -> Result<()> {
    let mut case = Case::random(14, 6, 4, 9, 3);
    let whole = linear_cross_entropy(&case.inputs(case.hidden.as_tensor(), "log", true))?;
    case.factors = (vec![0.0; 6], vec![0.0; 6]);
    let inputs = Inputs { soft_weight: 1.0, ..case.inputs(case.hidden.as_tensor(), "log", true) };
    let none = linear_cross_entropy(&inputs)?;
    assert_eq!(
        (&none.rows.soft, &none.rows.acceptance),
        (&whole.rows.soft, &whole.rows.acceptance)
    );
    let grads = none.loss_sum.gradients()?;
    let moved = grads.get(&case.hidden).expect("dh").abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(moved == 0.0, "{moved}");
    Ok(())
}

#[test]
fn factors_of_another_length_are_an_error() {
    let mut case = Case::random(15, 4, 4, 9, 3);
    case.factors.1.pop();
    let hidden = case.hidden.as_tensor().clone();
    assert!(linear_cross_entropy(&case.inputs(&hidden, "linear", true)).is_err());
    assert!(linear_cross_entropy(&case.inputs(&hidden, "linear", false)).is_err());
}
