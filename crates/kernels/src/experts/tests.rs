use candle_core::DType;

use super::routes::{best, sigma};
use super::*;
use crate::cuda::emulator::emulated;
use crate::cuda::trace::starts_of;
use crate::dispatch::with_half_products;
use crate::test_support::{Noise, assert_close, bits};

const HIDDEN: usize = 24;

fn experts(count: usize, width: usize, dtype: DType, noise: &mut Noise) -> Result<Vec<Expert>> {
    let mut matrix = |outputs, inputs| -> Result<Matrix> {
        Ok(Matrix::Dense(noise.tensor(&[outputs, inputs]).to_dtype(dtype)?))
    };
    (0..count)
        .map(|_| {
            Ok(Expert {
                gate: matrix(width, HIDDEN)?,
                up: matrix(width, HIDDEN)?,
                down: matrix(HIDDEN, width)?,
                biases: None,
                unit: Unit::Silu,
            })
        })
        .collect()
}

#[test]
fn grouping_by_expert_equals_every_expert_on_every_row() -> Result<()> {
    let mut noise = Noise::new(71);
    for (rows, count, per_row, width, dtype, normalise) in [
        (1, 1, 1, 5, DType::F32, false),
        (1, 8, 2, 33, DType::F32, true),
        (7, 8, 8, 16, DType::F32, false),
        (40, 5, 2, 17, DType::BF16, true),
        (130, 16, 3, 8, DType::F32, true),
    ] {
        let experts = experts(count, width, dtype, &mut noise)?;
        let (x, residual) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, HIDDEN]));
        let logits = noise.tensor(&[rows, count]);
        let routes = Routes::choose(&logits, per_row, normalise)?;
        let want = reference(&residual, &x, &experts, &logits, per_row, normalise)?;
        assert_close("fused", &experts_onto(&residual, &x, &experts, &routes)?, &want, 1e-5);
        assert_close("gathered", &gathered(&residual, &x, &experts, &routes)?, &want, 1e-5);
        let on_gpu = emulated(|| {
            let routes = Routes::choose(&logits, per_row, normalise)?;
            experts_onto(&residual, &x, &experts, &routes)
        })?;
        assert_close("the GPU's", &on_gpu, &want, 1e-5);
    }
    Ok(())
}

#[test]
fn rows_that_visit_nobody_are_the_residual() -> Result<()> {
    let mut noise = Noise::new(74);
    let experts = experts(3, 8, DType::F32, &mut noise)?;
    let none = Tensor::zeros((0, HIDDEN), DType::F32, &candle_core::Device::Cpu)?;
    let logits = Tensor::zeros((0, 3), DType::F32, &candle_core::Device::Cpu)?;
    let run = || {
        let routes = Routes::choose(&logits, 2, true)?;
        experts_onto(&none, &none, &experts, &routes)
    };
    assert_eq!(run()?.dims(), [0, HIDDEN]);
    assert_eq!(emulated(run)?.dims(), [0, HIDDEN]);
    Ok(())
}

#[test]
fn a_row_has_the_bits_that_it_has_alone() -> Result<()> {
    let mut noise = Noise::new(72);
    let experts = experts(6, 40, DType::F32, &mut noise)?;
    let (rows, per_row) = (50, 2);
    let (x, residual) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, HIDDEN]));
    let logits = noise.tensor(&[rows, 6]);
    let of = |first: usize, count: usize| -> Result<Vec<Vec<f32>>> {
        let part = |t: &Tensor| t.narrow(0, first, count);
        let routes = Routes::choose(&part(&logits)?, per_row, true)?;
        experts_onto(&part(&residual)?, &part(&x)?, &experts, &routes)?.to_vec2()
    };
    let check = || -> Result<()> {
        let together = of(0, rows)?;
        for (row, together) in together.iter().enumerate() {
            assert_eq!(&of(row, 1)?[0], together);
        }
        assert_eq!(of(3, 20)?, together[3..23]);
        Ok(())
    };
    check()?;
    emulated(check)
}

#[test]
fn weights_are_probabilities_or_shares_and_ties_go_to_the_lower_expert() {
    let logits = [0.0_f32, 1.0, -3.0, 1.0];
    let total: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
    let p = (1.0_f64.exp() / total) as f32;
    for (per_row, normalise, want) in
        [(1, false, &[(1, p)][..]), (2, false, &[(1, p), (3, p)]), (2, true, &[(1, 0.5), (3, 0.5)])]
    {
        let row = Tensor::new(&[logits], &candle_core::Device::Cpu).expect("a row");
        let routes = Routes::choose(&row, per_row, normalise).expect("routes");
        let visits = routes.visits().enumerate().filter(|(_, visits)| !visits.is_empty());
        let got: Vec<_> =
            visits.map(|(expert, visits)| (expert, routes.weights[visits.start])).collect();
        assert_eq!(got.len(), want.len());
        for ((expert, weight), (wanted, share)) in got.iter().zip(want) {
            assert_eq!(expert, wanted);
            assert!((weight - share).abs() < 1e-6, "{weight} {share}");
        }
    }
}

/// The sum over every row's experts as their weights say, each expert alone.
fn by_hand(x: &Tensor, experts: &[Expert], of_rows: &[Vec<(usize, f32)>]) -> Result<Vec<Tensor>> {
    let rows = of_rows.iter().enumerate().map(|(row, chosen)| {
        let own = x.narrow(0, row, 1)?;
        let mut sum = own.zeros_like()?;
        for (expert, weight) in chosen {
            sum = (sum + (experts[*expert].apply(&own)? * f64::from(*weight))?)?;
        }
        Ok(sum)
    });
    rows.collect()
}

#[test]
fn sigmoid_routers_choose_by_corrected_scores_within_the_best_groups() -> Result<()> {
    let logits = [[0.0_f32, 2.0, 1.0, 1.0, 3.0, -4.0]];
    let rows = Tensor::new(&logits, &candle_core::Device::Cpu)?;
    let s: Vec<f32> = logits[0].iter().map(|z| sigma(*z)).collect();
    let mut numbers = SigmoidChoice { bias: vec![0.0; 6], groups: 3, kept_groups: 2, scale: 1.5 };
    let chosen = |numbers: &SigmoidChoice, normalise| -> Result<Vec<(usize, f32)>> {
        let routes = Routes::choose_by(&rows, 2, normalise, Choice::Sigmoid(numbers))?;
        let visits = routes.visits().enumerate().filter(|(_, visits)| !visits.is_empty());
        Ok(visits.map(|(expert, visits)| (expert, routes.weights[visits.start])).collect())
    };
    // The last group holds the best expert, but its two sum lowest.
    let total = s[1] + s[2];
    assert_eq!(chosen(&numbers, false)?, [(1, s[1] * 1.5), (2, s[2] * 1.5)]);
    assert_eq!(
        chosen(&numbers, true)?,
        [(1, s[1] * (1.5 / (total + 1e-20))), (2, s[2] * (1.5 / (total + 1e-20)))]
    );
    // A bias changes who is chosen and not what it weighs.
    numbers.bias[3] = 2.0;
    numbers.bias[0] = -9.0;
    assert_eq!(chosen(&numbers, false)?, [(3, s[3] * 1.5), (4, s[4] * 1.5)]);
    for (groups, kept_groups, biases) in
        [(4, 1, 6), (0, 0, 6), (3, 4, 6), (3, 0, 6), (6, 1, 6), (3, 2, 5)]
    {
        let wrong = SigmoidChoice { bias: vec![0.0; biases], groups, kept_groups, scale: 1.0 };
        assert!(Routes::choose_by(&rows, 2, true, Choice::Sigmoid(&wrong)).is_err());
    }
    Ok(())
}

#[test]
fn experts_with_biases_bounds_and_weighed_inputs_equal_each_alone() -> Result<()> {
    let mut noise = Noise::new(75);
    let mut experts = experts(5, 12, DType::F32, &mut noise)?;
    for expert in &mut experts {
        let biases = [12, 12, HIDDEN].map(|width| noise.tensor(&[width]));
        let bounds = Clamped { alpha: 1.7, limit: 0.4 };
        (expert.biases, expert.unit) = (Some(biases), Unit::Clamped(bounds));
    }
    let (x, logits) = (noise.tensor(&[9, HIDDEN]), noise.tensor(&[9, 5]));
    let routes = Routes::choose(&logits, 2, true)?;
    let of_rows = logits.to_vec2::<f32>()?.into_iter().map(|row| {
        let chosen = best(&row, 2);
        let sum: f32 = chosen.iter().map(|&e| row[e].exp()).sum();
        chosen.into_iter().map(|e| (e, row[e].exp() / sum)).collect()
    });
    let want = Tensor::cat(&by_hand(&x, &experts, &of_rows.collect::<Vec<_>>())?, 0)?;
    let zeros = x.zeros_like()?;
    assert_close("fused", &experts_onto(&zeros, &x, &experts, &routes)?, &want, 1e-5);
    assert_close("gathered", &gathered(&zeros, &x, &experts, &routes)?, &want, 1e-5);
    let routes = Routes::choose_by(&logits, 1, false, Choice::SigmoidOnInput)?;
    let rows = logits.to_vec2::<f32>()?.into_iter().enumerate().map(|(row, logits)| {
        let expert = best(&logits, 1)[0];
        experts[expert].apply(&(x.narrow(0, row, 1)? * f64::from(sigma(logits[expert])))?)
    });
    let want = Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?;
    assert_close("fused", &experts_onto(&zeros, &x, &experts, &routes)?, &want, 1e-5);
    assert_close("gathered", &gathered(&zeros, &x, &experts, &routes)?, &want, 1e-5);
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() -> Result<()> {
    let mut noise = Noise::new(73);
    let experts = experts(3, 8, DType::F32, &mut noise)?;
    let (x, logits) = (noise.tensor(&[4, HIDDEN]), noise.tensor(&[4, 3]));
    assert!(Routes::choose(&logits, 4, true).is_err());
    assert!(Routes::choose(&logits, 0, true).is_err());
    let routes = Routes::choose(&logits, 2, true)?;
    assert!(experts_onto(&x, &x, &experts[..2], &routes).is_err());
    assert!(experts_onto(&x, &noise.tensor(&[5, HIDDEN]), &experts, &routes).is_err());
    assert!(experts_onto(&noise.tensor(&[4, 9]), &x, &experts, &routes).is_err());
    let trained = noise.var(&[4, HIDDEN]);
    assert!(experts_onto(&x, trained.as_tensor(), &experts, &routes).is_err());
    Ok(())
}

/// Every unit, with and without biases.
fn variants(experts: &mut [Expert], noise: &mut Noise) {
    let bounds = Clamped { alpha: 1.7, limit: 0.4 };
    let units = [Unit::Silu, Unit::GeluTanh, Unit::Clamped(bounds)];
    let unit = units[noise.below(3)];
    let (inner, _) = experts[0].gate.dims().expect("a matrix");
    let has_biases = noise.below(2) == 1;
    for expert in experts {
        expert.unit = unit;
        expert.biases =
            has_biases.then(|| [inner, inner, HIDDEN].map(|width| noise.tensor(&[width])));
    }
}

/// Logits with which every row goes where `expert` says first, and to whom it likes after that.
fn logits_towards(
    rows: usize,
    count: usize,
    noise: &mut Noise,
    expert: fn(usize) -> usize,
) -> Tensor {
    let mut logits = noise.tensor(&[rows, count]).to_vec2::<f32>().expect("rows");
    logits.iter_mut().enumerate().for_each(|(row, logits)| logits[expert(row) % count] += 4.0);
    Tensor::new(logits, &candle_core::Device::Cpu).expect("rows")
}

/// Rows that all go to one expert, to some of them, and to whomever.
const TOWARDS: [fn(usize) -> usize; 3] = [|_| 1, |row| row % 3, |row| row * row];

#[test]
fn few_rows_are_five_starts_and_have_the_bits_of_single_experts() -> Result<()> {
    let mut noise = Noise::new(81);
    for (round, rows) in [1, 2, 9, 63, 1, 40, 7].into_iter().enumerate() {
        for dtype in [DType::F32, DType::BF16] {
            let mut experts = experts(6, 20, dtype, &mut noise)?;
            variants(&mut experts, &mut noise);
            let (x, residual) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, HIDDEN]));
            let logits = logits_towards(rows, 6, &mut noise, TOWARDS[round % 3]);
            let routes = Routes::choose(&logits, 2, true)?;
            let run = || starts_of(|| experts_onto(&residual, &x, &experts, &routes));
            let (own, starts) = emulated(run);
            let own = own?;
            let want = gathered(&residual, &x, &experts, &routes)?;
            assert_close("the GPU's", &own, &want, 1e-5);
            let alone = emulated(|| gathered(&residual, &x, &experts, &routes))?;
            if experts[0].unit == Unit::Silu {
                assert_eq!(bits(&own), bits(&alone), "{rows} rows in {dtype:?}");
            }
            assert_eq!(bits(&own), bits(&emulated(run).0?), "again");
            assert_eq!(starts.len(), 5, "{starts:?}");
            for (start, name) in starts.iter().zip([
                "rows_of_visitors",
                "few_rows_",
                "expert_units",
                "few_rows_",
                "sum_rows",
            ]) {
                assert!(start.starts_with(name), "{starts:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn many_rows_are_four_starts_of_bf16_factors() -> Result<()> {
    let mut noise = Noise::new(82);
    // An inner width of several tiles, and rows of several pieces.
    for (round, (rows, count, per_row, inner)) in
        [(64, 5, 1, 8), (70, 3, 2, 136), (150, 2, 1, 200)].into_iter().enumerate()
    {
        let mut experts = experts(count, inner, DType::BF16, &mut noise)?;
        variants(&mut experts, &mut noise);
        let (x, residual) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, HIDDEN]));
        let logits = logits_towards(rows, count, &mut noise, TOWARDS[round % 3]);
        let routes = Routes::choose(&logits, per_row, true)?;
        let want = gathered(&residual, &x, &experts, &routes)?;
        let run = |x: &Tensor, routes: &Routes| {
            let residual = residual.narrow(0, 0, x.dim(0)?)?;
            with_half_products(|| emulated(|| experts_onto(&residual, x, &experts, routes)))
        };
        let (own, starts) = starts_of(|| run(&x, &routes));
        let own = own?;
        assert_close("the GPU's", &own, &want, 1e-2);
        assert_eq!(starts, ["rows_of_visitors", "expert_gates", "expert_outputs", "sum_rows"]);
        assert_eq!(bits(&own), bits(&run(&x, &routes)?), "again");
        // A row has the bits that it has beside fewer others.
        if rows > 64 {
            let routes = Routes::choose(&logits.narrow(0, 0, 64)?, per_row, true)?;
            let some = run(&x.narrow(0, 0, 64)?, &routes)?;
            assert_eq!(bits(&some), bits(&own.narrow(0, 0, 64)?), "{rows} rows");
        }
    }
    Ok(())
}

#[test]
fn a_router_that_weighs_inputs_weighs_them_on_the_gpu() -> Result<()> {
    let mut noise = Noise::new(83);
    let experts = experts(4, 16, DType::BF16, &mut noise)?;
    for rows in [1, 20, 80] {
        let (x, logits) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, 4]));
        let routes = Routes::choose_by(&logits, 1, false, Choice::SigmoidOnInput)?;
        let want = gathered(&x, &x, &experts, &routes)?;
        let run = || starts_of(|| emulated(|| experts_onto(&x, &x, &experts, &routes)));
        let (own, starts) = with_half_products(run);
        assert_close("the GPU's", &own?, &want, if rows < 64 { 1e-5 } else { 1e-2 });
        assert_eq!(starts.len(), if rows < 64 { 5 } else { 4 }, "{starts:?}");
    }
    Ok(())
}

/// Widths that kernels do not read, f32 weights of many rows, and experts that differ go one by one.
#[test]
fn experts_that_the_kernels_do_not_take_are_computed_alone() -> Result<()> {
    let mut noise = Noise::new(84);
    for (rows, inner, dtype) in [(5, 7, DType::BF16), (70, 12, DType::BF16), (70, 16, DType::F32)] {
        let mut experts = experts(3, inner, dtype, &mut noise)?;
        let (x, logits) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, 3]));
        let routes = Routes::choose(&logits, 2, true)?;
        let check = |experts: &[Expert]| -> Result<()> {
            let want = gathered(&x, &x, experts, &routes)?;
            let run = || starts_of(|| emulated(|| experts_onto(&x, &x, experts, &routes)));
            let (own, starts) = with_half_products(run);
            assert_close("the GPU's", &own?, &want, 2e-2);
            assert!(!starts.iter().any(|name| name == "rows_of_visitors"), "{starts:?}");
            Ok(())
        };
        check(&experts)?;
        experts[1].unit = Unit::GeluTanh;
        check(&experts)?;
    }
    Ok(())
}
