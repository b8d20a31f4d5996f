//! The CPU's top k, and the GPU's kernel, emulated, against it.

use candle_core::{DType, Device, Result, Tensor};

use super::{linear_top_k, row_top_k, top_k_of_row};
use crate::cuda::emulator::emulated;
use crate::dispatch::with_rounded_products;
use crate::test_support::Noise;

#[test]
fn most_likely_first_with_full_softmax_and_ties_to_the_lower_id() {
    let logits = [0.0, 2.0, 1.0, 2.0];
    let (ids, log_probs) = top_k_of_row(&logits, 3);
    assert_eq!(ids, [1, 3, 2]);
    let total: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
    assert!((f64::from(log_probs[2]) - (1.0 - total.ln())).abs() < 1e-6);
    assert_eq!(top_k_of_row(&logits, 9).0.len(), 4);
}

#[test]
fn rounded_products_find_the_same_whatever_rows_are_beside() -> Result<()> {
    let (width, vocabulary, k) = (256, 1100, 5);
    let mut noise = Noise::new(17);
    let (hidden, head) = (noise.tensor(&[150, width]), noise.tensor(&[vocabulary, width]));
    let of = |first: usize, count: usize| {
        let rows = hidden.narrow(0, first, count)?;
        with_rounded_products(true, || linear_top_k(&rows, &head, k))
    };
    let all = of(0, 150)?;
    for (first, count) in [(20, 128), (20, 70), (3, 1), (90, 50)] {
        let (some, places) = (of(first, count)?, first * k..(first + count) * k);
        assert_eq!(some.ids, all.ids[places.clone()], "{count} rows");
        assert_eq!(some.log_probs, all.log_probs[places], "{count} rows");
    }
    Ok(())
}

/// The kernel finds the CPU's ids, and its log-probabilities, in rows of logits.
fn assert_same(name: &str, rows: &[Vec<f32>], k: usize) -> Result<()> {
    let count = rows[0].len();
    let logits = Tensor::from_vec(rows.concat(), (rows.len(), count), &Device::Cpu)?;
    let plain = row_top_k(&logits, k)?;
    let own = emulated(|| row_top_k(&logits, k))?;
    assert_eq!(plain.ids.len(), rows.len() * k.min(count), "{name}");
    assert_eq!(own.ids, plain.ids, "{name}, {k} of {count}");
    for (a, b) in own.log_probs.iter().zip(&plain.log_probs) {
        let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(same || (a - b).abs() < 4e-6 * b.abs().max(1.0), "{name}, {k} of {count}: {a} {b}");
    }
    Ok(())
}

/// What every logit was looked at for.
#[test]
fn blocks_lose_none_of_the_largest() {
    let mut noise = Noise::new(11);
    for (count, levels, k) in
        [(64, 9, 1), (65, 9, 2), (5000, 7, 64), (20_000, 900, 64), (4096, 4000, 65)]
    {
        let logits: Vec<f32> = (0..count).map(|_| noise.below(levels) as f32 - 3.0).collect();
        let mut order: Vec<u32> = (0..count as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        assert_eq!(top_k_of_row(&logits, k).0, order[..k], "{count} {levels} {k}");
    }
}

fn random(noise: &mut Noise, count: usize) -> Vec<f32> {
    (0..count).map(|_| (noise.next() * 12.0) as f32).collect()
}

#[test]
fn the_kernel_finds_what_the_cpu_finds() -> Result<()> {
    let mut noise = Noise::new(3);
    for (count, k) in [
        (1, 1),
        (3, 9),
        (64, 64),
        (128, 8),
        (511, 200),
        (512, 256),
        (513, 64),
        (2000, 1),
        (128_256, 64),
        (262_144, 10),
        (262_144, 256),
    ] {
        let rows = if count > 10_000 { 1 } else { 3 };
        let rows: Vec<_> = (0..rows).map(|_| random(&mut noise, count)).collect();
        assert_same("random", &rows, k)?;
    }
    Ok(())
}

#[test]
fn ties_are_broken_alike() -> Result<()> {
    let mut noise = Noise::new(5);
    for (count, levels, k) in [(700, 1, 20), (3000, 2, 64), (3000, 40, 64), (5000, 3, 256)] {
        let rows: Vec<Vec<f32>> =
            (0..2).map(|_| (0..count).map(|_| noise.below(levels) as f32).collect()).collect();
        assert_same("ties", &rows, k)?;
    }
    // Zeros of both signs are not equal in the total order.
    let zeros = (0..1000).map(|i| if i % 3 == 0 { 0.0 } else { -0.0 }).collect();
    assert_same("zeros", &[zeros], 50)
}

#[test]
fn what_is_no_number_is_ordered_alike() -> Result<()> {
    let mut noise = Noise::new(6);
    let odd = [
        f32::NAN,
        -f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::from_bits(u32::MAX >> 1),
        f32::from_bits(u32::MAX),
        f32::MIN_POSITIVE / 4.0,
        f32::MAX,
        f32::MIN,
    ];
    for (place, value) in odd.into_iter().enumerate() {
        let mut row = random(&mut noise, 1500);
        // The first id also, and the same again.
        for at in [0, 3 * place + 1, 777] {
            row[at] = value;
        }
        let only = vec![value; 600];
        assert_same("odd values", &[row], 12)?;
        assert_same("nothing else", &[only], 30)?;
    }
    let mixed = (0..4000).map(|i| if i % 7 == 0 { odd[i / 7 % 9] } else { i as f32 }).collect();
    assert_same("mixed", &[mixed], 100)?;
    // Masked vocabularies.
    let mut masked = vec![f32::NEG_INFINITY; 2000];
    masked[1234] = 0.5;
    assert_same("masked", &[masked], 8)
}

/// All large logits are one thread's, so that far more than k reach the kernel's bound.
#[test]
fn rows_with_too_many_candidates_are_ranked_one_at_a_time() -> Result<()> {
    let count = 512 * 400;
    let row = (0..count).map(|i| {
        let few = i % 512 < 5;
        if few { 50.0 + (i * 7919 % 1013) as f32 } else { -((i % 512) as f32) }
    });
    assert_same("apart", &[row.collect()], 40)
}

#[test]
fn products_with_a_head_have_the_same_top_k_and_rows_beside_do_not_matter() -> Result<()> {
    let mut noise = Noise::new(8);
    for (rows, vocabulary, dtype) in
        [(0, 9, DType::F32), (3, 40, DType::BF16), (90, 600, DType::F32)]
    {
        let hidden = noise.tensor(&[rows, 16]);
        let head = noise.tensor(&[vocabulary, 16]).to_dtype(dtype)?;
        let plain = linear_top_k(&hidden, &head, 5)?;
        let own = emulated(|| linear_top_k(&hidden, &head, 5))?;
        assert_eq!(own.ids, plain.ids);
        for (a, b) in own.log_probs.iter().zip(&plain.log_probs) {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
    }
    Ok(())
}
