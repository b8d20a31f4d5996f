mod gpu;
mod low_rank;
mod sparse;

use crate::graph::Backward;
use candle_core::{DType, Device, Result, Tensor, Var};

use super::composed::composed_within;
use super::{
    Bend, Inputs, Output, Rejection, SoftTargets, Tail, Teacher, Weighted, composed,
    linear_cross_entropy, reference,
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
                head: &self.teacher_head,
            }),
            ..Inputs::of_labels(hidden, &self.head, &self.labels)
        }
    }
}

const KINDS: [&str; 7] =
    ["none", "full", "bucket", "renormalise", "linear", "log", "log of the whole"];

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
                for (part, var) in [("dh", &case.hidden), ("dW", &case.head)] {
                    let (got, want) = (got.get(var).expect("own"), want.get(var).expect("plain"));
                    assert_close(&format!("{soft} {name} {part}"), got, want, 2e-5);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn bent_labels_are_those_of_the_op_for_labels_alone() -> Result<()> {
    let case = Case::random(43, 20, 6, 30, 3);
    let bend = Bend { divisor: 1.0, softcap: Some(1.5) };
    let inputs = case.inputs(case.hidden.as_tensor(), "none", false).bent(bend);
    let (hidden, head) = (case.hidden.as_tensor(), case.head.as_tensor());
    let other = super::softcapped_linear_cross_entropy(hidden, head, &case.labels, 1.5)?;
    let own = linear_cross_entropy(&inputs)?;
    assert_close("loss", &own.loss_sum, &other.loss_sum, 2e-6);
    let (a, b) = (own.loss_sum.gradients()?, other.loss_sum.gradients()?);
    assert_close("dh", a.get(hidden).expect("own"), b.get(hidden).expect("other"), 1e-5);
    Ok(())
}

#[test]
fn fused_matches_reference_in_loss_gradient_and_statistics() -> Result<()> {
    let sizes = [(1, 4, 5, 2), (3, 8, 17, 4), (130, 12, 40, 6), (20, 6, 300, 32)];
    for (seed, (rows, width, vocabulary, k)) in (1..).zip(sizes) {
        let case = Case::random(seed, rows, width, vocabulary, k);
        for soft in KINDS {
            for teacher in [true, false] {
                if !teacher && !["none", "bucket", "renormalise"].contains(&soft) {
                    continue;
                }
                let inputs = case.inputs(case.hidden.as_tensor(), soft, teacher);
                let fused = linear_cross_entropy(&inputs)?;
                let plain = reference(&inputs)?;
                assert_close("loss", &fused.loss_sum, &plain.loss_sum, 2e-6);
                assert_eq!(fused.rows.agrees, plain.rows.agrees);
                for (name, a, b) in [
                    ("hard", &fused.rows.hard, &plain.rows.hard),
                    ("soft", &fused.rows.soft, &plain.rows.soft),
                    ("acceptance", &fused.rows.acceptance, &plain.rows.acceptance),
                ] {
                    for (a, b) in a.iter().zip(b) {
                        assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{soft} {name}: {a} {b}");
                    }
                }
                let (a, b) = (fused.loss_sum.gradients()?, plain.loss_sum.gradients()?);
                for (name, var) in [("dh", &case.hidden), ("dW", &case.head)] {
                    let (a, b) = (a.get(var).expect("fused"), b.get(var).expect("plain"));
                    assert_close(&format!("{soft} {name}"), a, b, 2e-5);
                }
            }
        }
    }
    Ok(())
}

#[track_caller]
fn assert_same(fused: &Output, own: &Output, [hidden, head]: [&Var; 2]) -> Result<()> {
    assert_close("loss", &own.loss_sum, &fused.loss_sum, 2e-6);
    assert_eq!(own.rows.agrees, fused.rows.agrees);
    let columns = |rows: &super::RowStatistics| {
        [rows.hard.clone(), rows.soft.clone(), rows.acceptance.clone()].concat()
    };
    for (a, b) in columns(&own.rows).iter().zip(&columns(&fused.rows)) {
        assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} {b}");
    }
    // A factor after the loss, as the mean over rows is.
    let (a, b) = ((&own.loss_sum * 0.3)?.gradients()?, (&fused.loss_sum * 0.3)?.gradients()?);
    for (name, var) in [("dh", hidden), ("dW", head)] {
        let (a, b) = (a.get(var).expect("composed"), b.get(var).expect("fused"));
        assert_close(name, a, b, 2e-5);
    }
    Ok(())
}

#[test]
fn composed_chunks_match_fused_in_loss_gradient_and_statistics() -> Result<()> {
    for (seed, (rows, width, vocabulary)) in (51..).zip([(1, 4, 5), (40, 6, 33)]) {
        let case = Case::random(seed, rows, width, vocabulary, 3);
        for soft in KINDS {
            let inputs = case.inputs(case.hidden.as_tensor(), soft, true);
            let (fused, own) = (linear_cross_entropy(&inputs)?, composed(&inputs)?);
            assert_same(&fused, &own, [&case.hidden, &case.head])?;
        }
    }
    // Rows that share teachers, in no order, over several chunks of seven rows.
    let (rows, vocabulary) = (40, 17);
    let case = Case::random(61, rows, 6, vocabulary, 3);
    let mut noise = Noise::new(62);
    let states = noise.tensor(&[7, 7]);
    let of: Vec<u32> = (0..rows).map(|_| noise.below(7) as u32).collect();
    for soft in KINDS {
        let teacher = Teacher { hidden: &states, rows: Some(&of), head: &case.teacher_head };
        let inputs = case.inputs(case.hidden.as_tensor(), soft, true);
        let inputs = Inputs { teacher: Some(teacher), ..inputs };
        let (fused, own) =
            (linear_cross_entropy(&inputs)?, composed_within(7 * vocabulary + 3, &inputs)?);
        assert_same(&fused, &own, [&case.hidden, &case.head])?;
    }
    Ok(())
}

#[test]
fn frozen_heads_get_no_gradient_from_the_composed_loss() -> Result<()> {
    let case = Case::random(71, 9, 4, 11, 3);
    let frozen = case.head.detach();
    let inputs = case.inputs(case.hidden.as_tensor(), "full", true);
    let inputs = Inputs { head: &frozen, ..inputs };
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
fn rows_that_share_teachers_match_rows_with_their_own() -> Result<()> {
    // More rows than one chunk holds, in no order of their teachers.
    for (seed, rows, teachers) in [(31, 1, 1), (32, 7, 3), (33, 600, 90)] {
        let case = Case::random(seed, rows, 8, 17, 4);
        let mut noise = Noise::new(seed + 100);
        let of: Vec<u32> = (0..rows).map(|_| noise.below(teachers) as u32).collect();
        let states = noise.tensor(&[teachers, 9]);
        let own = states.index_select(&Tensor::new(of.as_slice(), &Device::Cpu)?, 0)?;
        let head = &case.teacher_head;
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
            let of = |grads: &candle_core::backprop::GradStore, var: &Var| {
                grads.get(var).cloned().expect("gradient")
            };
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
fn reference_gradient_matches_differences() {
    let case = Case::random(9, 3, 4, 7, 3);
    for soft in KINDS {
        let (hidden, head) = (case.hidden.as_tensor().clone(), case.head.as_tensor().clone());
        gradcheck(&[hidden, head], |t| {
            let teacher_hidden = case.teacher_hidden.to_dtype(DType::F64)?;
            let mut inputs = case.inputs(&t[0], soft, true);
            inputs.head = &t[1];
            inputs.teacher =
                Some(Teacher { hidden: &teacher_hidden, rows: None, head: &case.teacher_head });
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
    let inputs = Inputs { head: &head, ..case.inputs(&hidden, "full", true) };
    assert!(!linear_cross_entropy(&inputs)?.loss_sum.track_op());
    let inputs = Inputs { head: &head, ..case.inputs(&case.hidden, "full", true) };
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
        teacher: Some(Teacher { hidden: &teacher, rows: None, head: &head }),
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
    let teacher = Teacher { hidden: &hidden, rows: None, head: &head };
    let inputs = case.inputs(case.hidden.as_tensor(), "linear", true);
    let rounded = linear_cross_entropy(&Inputs { teacher: Some(teacher), ..inputs })?;
    let plain = reference(&Inputs { teacher: Some(teacher), ..inputs })?;
    let widened = head.to_dtype(DType::F32)?;
    let widened = Teacher { head: &widened, ..teacher };
    let exact = linear_cross_entropy(&Inputs { teacher: Some(widened), ..inputs })?;
    let differences = |other: &super::Output| -> f64 {
        let pairs = rounded.rows.soft.iter().zip(&other.rows.soft);
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    // The last bit of bf16 is worth about 1e-2 of a logit here, that of f32 nothing.
    assert!(differences(&plain) < 1e-4 && differences(&exact) > 1e-4);
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
