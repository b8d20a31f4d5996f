use std::borrow::Cow;

use super::*;
use crate::cuda::emulator::emulated;
use crate::graph::Backward;
use crate::test_support::{Noise, bits};

#[test]
fn maps_of_one_input_have_the_bits_of_each_alone() -> Result<()> {
    let mut noise = Noise::new(24);
    for (rows, inputs) in [(0, 3), (1, 600), (1, 3), (5, 577), (16, 64), (17, 64), (90, 33)] {
        let x = noise.tensor(&[rows, inputs]);
        let dense = |outputs, noise: &mut Noise| noise.tensor(&[outputs, inputs]);
        let first = Matrix::Dense(dense(70, &mut noise));
        let half = Matrix::Dense(dense(192, &mut noise).to_dtype(DType::BF16)?);
        let (bias, var) = (noise.tensor(&[600]), noise.var(&[600, inputs]));
        for last in [dense(600, &mut noise), var.as_tensor().clone()] {
            let last = Matrix::Dense(last);
            let maps = [(&first, None), (&half, None), (&last, Some(&bias))];
            let together = linear_each(&x, maps)?;
            for (together, (matrix, bias)) in together.iter().zip(maps) {
                let alone = matrix.linear(&x, bias)?;
                assert_eq!(together.track_op(), alone.track_op());
                assert_eq!(together.dims(), alone.dims());
                assert_eq!(together.to_vec2::<f32>()?, alone.to_vec2::<f32>()?);
            }
        }
        let wrong = Matrix::Dense(noise.tensor(&[4, inputs + 1]));
        assert!(linear_each(&x, [(&first, None), (&wrong, None)]).is_err());
        assert!(linear_each(&x, [(&first, Some(&bias))]).is_err());
    }
    Ok(())
}

#[test]
fn halves_with_one_input_have_the_bits_of_each_alone() -> Result<()> {
    let mut noise = Noise::new(25);
    for (rows, inputs) in [(5, 600), (24, 64), (48, 500), (48, 600), (49, 64)] {
        let x = noise.tensor(&[rows, inputs]);
        let mut half = |outputs| -> Result<Matrix> {
            Ok(Matrix::Dense(noise.tensor(&[outputs, inputs]).to_dtype(DType::BF16)?))
        };
        let maps = [half(70)?, half(192)?];
        let together = linear_each(&x, [(&maps[0], None), (&maps[1], None)])?;
        for (together, matrix) in together.iter().zip(&maps) {
            let alone = matrix.linear(&x, None)?;
            assert_eq!(together.to_vec2::<f32>()?, alone.to_vec2::<f32>()?);
        }
    }
    Ok(())
}

/// Random bytes, whose scales are all finite because they are small.
fn stored(noise: &mut Noise, format: BlockFormat, outputs: usize, inputs: usize) -> Vec<u8> {
    let size = outputs * inputs / format.values() * format.bytes();
    (0..size).map(|_| noise.below(64) as u8).collect()
}

fn quantised(format: BlockFormat, outputs: usize, inputs: usize, stored: &[u8]) -> Result<Matrix> {
    Ok(Matrix::Quantised(Arc::new(QuantisedMatrix::new(format, outputs, inputs, stored)?)))
}

#[test]
fn quantised_weights_are_near_their_widened_selves() -> Result<()> {
    let mut noise = Noise::new(25);
    for format in BlockFormat::ALL {
        let (outputs, block) = (96, format.values());
        let inputs = 2 * block;
        let stored = stored(&mut noise, format, outputs, inputs);
        let stored = quantised(format, outputs, inputs, &stored)?;
        let widened = Matrix::Dense(stored.to_dense()?);
        let bias = noise.tensor(&[outputs]);
        let near = |ours: &[Vec<f32>], wanted: &[Vec<f32>]| {
            let largest = wanted.iter().flatten().fold(0.0, |all: f32, y| all.max(y.abs()));
            let mut pairs = ours.iter().flatten().zip(wanted.iter().flatten());
            assert!(pairs.all(|(x, y)| (x - y).abs() <= 2e-2 * largest), "{format:?}");
        };
        for rows in [1, 5, 40] {
            let (x, residual) = (noise.tensor(&[rows, inputs]), noise.tensor(&[rows, outputs]));
            for bias in [None, Some(&bias)] {
                let of = |matrix: &Matrix| -> Result<_> {
                    let (plain, onto) =
                        (matrix.linear(&x, bias)?, matrix.linear_onto(&residual, &x, bias)?);
                    Ok((plain.to_vec2::<f32>()?, onto.to_vec2::<f32>()?))
                };
                let (ours, wanted) = (of(&stored)?, of(&widened)?);
                near(&ours.0, &wanted.0);
                near(&ours.1, &wanted.1);
            }
        }
        let ids = [95, 0, 7];
        let rows = |matrix: &Matrix| matrix.rows(&ids).and_then(|rows| rows.to_vec2::<f32>());
        assert_eq!(rows(&stored)?, rows(&widened)?);
        assert_eq!(stored.select(&ids)?.to_dense()?.to_vec2::<f32>()?, rows(&stored)?);
        for inputs in [0..block, block..inputs, 0..inputs] {
            let part = stored.columns(inputs.clone())?.to_dense()?.to_vec2::<f32>()?;
            let wanted = widened.columns(inputs.clone())?.to_dense()?;
            assert_eq!(wanted.dims(), [outputs, inputs.len()]);
            assert_eq!(part, wanted.to_vec2::<f32>()?);
        }
        assert!(stored.columns(0..block - 8).is_err());
        assert!(stored.columns(block..3 * block).is_err());
        assert!(widened.columns(block..3 * block).is_err());
        assert!(stored.rows(&[96]).is_err() && stored.select(&[96]).is_err());
        let trained = noise.var(&[2, inputs]);
        let residual = candle_core::Var::zeros((2, outputs), DType::F32, &Device::Cpu)?;
        assert!(stored.linear(&trained, None).is_err());
        assert!(stored.linear_onto(&residual.detach(), &trained, None).is_err());
        let sum = stored.linear_onto(&residual, &trained.detach(), None)?;
        assert!(sum.sum_all()?.gradients()?.get(&residual).is_some(), "{format:?}");
        assert!(stored.linear(&noise.tensor(&[2, inputs + 1]), None).is_err());
    }
    Ok(())
}

#[test]
fn maps_of_several_formats_have_the_bits_of_each_alone_whatever_the_threads() -> Result<()> {
    let mut noise = Noise::new(26);
    let inputs = 512;
    let matrices = BlockFormat::ALL.map(|format| {
        let stored = stored(&mut noise, format, 70, inputs);
        quantised(format, 70, inputs, &stored).expect("a matrix")
    });
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pools = [1, 3].map(|threads| pool(threads).expect("a pool"));
    for rows in [1, 5, 16, 21] {
        let x = noise.tensor(&[rows, inputs]);
        let each = || linear_each(&x, std::array::from_fn::<_, 13, _>(|i| (&matrices[i], None)));
        let [one, three] = [&pools[0], &pools[1]].map(|pool| pool.install(each));
        for ((one, three), matrix) in one?.iter().zip(&three?).zip(&matrices) {
            let alone = matrix.linear(&x, None)?.to_vec2::<f32>()?;
            assert_eq!(one.to_vec2::<f32>()?, alone);
            assert_eq!(three.to_vec2::<f32>()?, alone);
        }
    }
    Ok(())
}

#[test]
fn stored_rows_that_do_not_fit_are_errors() {
    let read = |outputs, inputs, bytes: usize| {
        QuantisedMatrix::read(BlockFormat::Q4K, outputs, inputs, |rows| {
            Ok::<_, candle_core::Error>(Cow::Owned(vec![0; rows.len() * bytes]))
        })
    };
    assert!(read(40, 512, 288).is_ok());
    assert!(read(0, 512, 288).is_ok());
    assert!(read(40, 512, 287).is_err() && read(40, 256, 288).is_err());
    assert!(read(40, 288, 162).is_err() && read(usize::MAX, 512, 288).is_err());
    let failing = QuantisedMatrix::read(BlockFormat::Q4K, 1, 256, |_| {
        Err::<Cow<'_, [u8]>, _>(candle_core::Error::Msg("no such rows".into()))
    });
    assert!(failing.is_err_and(|error| error.to_string().contains("no such rows")));
}

#[test]
fn codes_of_activations_that_do_not_fit_are_errors() -> Result<()> {
    let matrix = QuantisedMatrix::new(BlockFormat::Q8_0, 2, 64, &[1; 2 * 68])?;
    assert_eq!(matrix.of_codes(&[0; 64], &[1.0; 2])?, [0.0; 2]);
    assert!(matrix.of_codes(&[0; 32], &[1.0]).is_err());
    assert!(matrix.of_codes(&[0; 64], &[1.0; 1]).is_err());
    assert!(matrix.of_codes(&[i8::MIN; 64], &[1.0; 2]).is_err());
    Ok(())
}

#[test]
fn bytes_of_another_shape_are_errors() {
    for (outputs, inputs, bytes) in [(1, 32, 33), (1, 33, 34), (2, 32, 34), (usize::MAX, 32, 34)] {
        let matrix = QuantisedMatrix::new(BlockFormat::Q8_0, outputs, inputs, &vec![0; bytes]);
        assert!(matrix.is_err());
    }
}

/// The same blocks on the CPU and where kernels for GPUs are emulated.
fn on_both(
    noise: &mut Noise,
    format: BlockFormat,
    outputs: usize,
    inputs: usize,
) -> Result<[Matrix; 2]> {
    let stored = stored(noise, format, outputs, inputs);
    let of = |stored: &[u8]| QuantisedMatrix::new(format, outputs, inputs, stored);
    let on_gpu = emulated(|| Matrix::of_blocks(of(&stored)?, &Device::Cpu))?;
    assert!(matches!(on_gpu, Matrix::OnGpu(_)));
    Ok([Matrix::of_blocks(of(&stored)?, &Device::Cpu)?, on_gpu])
}

#[test]
fn a_gpus_products_have_the_bits_of_the_cpus_however_many_rows_there_are() -> Result<()> {
    let mut noise = Noise::new(27);
    for format in BlockFormat::ALL {
        for (rows, outputs, blocks) in
            [(1, 1, 1), (1, 40, 5), (3, 35, 3), (5, 17, 2), (16, 70, 1), (70, 18, 2)]
        {
            let inputs = blocks * format.values();
            let [cpu, gpu] = on_both(&mut noise, format, outputs, inputs)?;
            let (x, bias) = (noise.tensor(&[rows, inputs]), noise.tensor(&[outputs]));
            let residual = noise.tensor(&[rows, outputs]);
            for bias in [None, Some(&bias)] {
                let own = emulated(|| gpu.linear(&x, bias))?;
                assert_eq!(bits(&own), bits(&cpu.linear(&x, bias)?), "{format:?} {rows}");
            }
            let own = emulated(|| gpu.linear_onto(&residual, &x, None))?;
            assert_eq!(bits(&own), bits(&cpu.linear_onto(&residual, &x, None)?), "{format:?}");
            let none = noise.tensor(&[0, inputs]);
            for bias in [None, Some(&bias)] {
                let empty = residual.narrow(0, 0, 0)?;
                let of = || Ok([gpu.linear(&none, bias)?, gpu.linear_onto(&empty, &none, bias)?]);
                let of: Result<[Tensor; 2]> = emulated(of);
                assert!(of?.iter().all(|out| out.dims() == [0, outputs]), "{format:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_gpus_products_of_one_input_have_the_bits_of_single_ones() -> Result<()> {
    use BlockFormat::{Q4K, Q6K, Q8_0};
    let (mut noise, inputs) = (Noise::new(29), 512);
    // Neighbours of one format are one start, whose products lie one after the other.
    for (formats, starts) in [([Q4K, Q4K, Q4K], 1), ([Q4K, Q4K, Q6K], 2), ([Q8_0, Q6K, Q8_0], 3)] {
        for rows in [1, 5, 20] {
            let x = noise.tensor(&[rows, inputs]);
            let sizes = [35, 16, 7];
            let mut matrices = Vec::new();
            for (format, outputs) in formats.into_iter().zip(sizes) {
                matrices.push(on_both(&mut noise, format, outputs, inputs)?);
            }
            let bias = noise.tensor(&[sizes[1]]);
            let biases = [None, Some(&bias), None];
            let gpu = std::array::from_fn::<_, 3, _>(|i| (&matrices[i][1], biases[i]));
            let together = emulated(|| linear_each(&x, gpu))?;
            let first = |own: &&Tensor| own.layout().start_offset() == 0;
            assert_eq!(together.iter().filter(first).count(), starts);
            for (i, own) in together.iter().enumerate() {
                let alone = matrices[i][0].linear(&x, biases[i])?;
                assert_eq!(own.dims(), alone.dims());
                assert_eq!(bits(own), bits(&alone), "{formats:?} {rows} {i}");
            }
        }
    }
    let x = noise.tensor(&[1, inputs]);
    let [[_, first], [_, narrow]] =
        [on_both(&mut noise, Q4K, 4, inputs)?, on_both(&mut noise, Q4K, 4, 256)?];
    let refused = emulated(|| linear_each(&x, [(&first, None), (&narrow, None)]));
    assert!(refused.is_err());
    Ok(())
}

#[test]
fn a_gpus_blocks_have_the_values_of_the_cpus() -> Result<()> {
    let mut noise = Noise::new(28);
    for format in BlockFormat::ALL {
        let (outputs, block) = (37, format.values());
        let inputs = 3 * block;
        let [cpu, gpu] = on_both(&mut noise, format, outputs, inputs)?;
        let whole = cpu.to_dense()?;
        assert_eq!(bits(&emulated(|| gpu.to_dense())?), bits(&whole), "{format:?}");
        assert_eq!(bits(&gpu.to_dense()?), bits(&whole), "without kernels");
        let ids = [36, 0, 7, 7];
        assert_eq!(bits(&emulated(|| gpu.rows(&ids))?), bits(&cpu.rows(&ids)?), "{format:?}");
        assert_eq!(bits(&gpu.rows(&ids)?), bits(&cpu.rows(&ids)?));
        let narrow = emulated(|| crate::dispatch::with_half_products(|| gpu.to_dense()))?;
        assert_eq!(narrow.dtype(), DType::BF16);
        let wide = narrow.to_dtype(DType::F32)?;
        assert_eq!(bits(&wide), bits(&whole.to_dtype(DType::BF16)?.to_dtype(DType::F32)?));
        emulated(|| -> Result<()> {
            let some = gpu.select(&ids)?;
            assert!(matches!(some, Matrix::OnGpu(_)));
            assert_eq!(bits(&some.to_dense()?), bits(&cpu.rows(&ids)?));
            let part = gpu.columns(block..3 * block)?.to_dense()?;
            let want = whole.narrow(1, block, 2 * block)?.force_contiguous()?;
            assert_eq!(bits(&part), bits(&want));
            assert!(gpu.rows(&[37]).is_err() && gpu.select(&[37]).is_err());
            assert!(gpu.rows(&[])?.dims() == [0, inputs]);
            assert!(gpu.columns(0..block - 8).is_err());
            Ok(())
        })?;
    }
    Ok(())
}
