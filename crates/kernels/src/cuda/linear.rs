//! Products of few rows, as decoding has them: one start that reads every weight once, in the type it is
//! held in.

use std::sync::LazyLock;

use candle_core::{DType, Result, Shape, Tensor};

use super::{Launch, Program, exactly, takes};

static PROGRAM: LazyLock<Program> =
    LazyLock::new(|| Program::new("linear", include_str!("linear.cu"), &[]));

const THREADS: usize = 128;
/// Rows and columns that a warp computes: `ROWS` and `OUTPUTS` of the kernels.
const ROWS: usize = 8;
const OUTPUTS: usize = 4;

/// `x Wᵀ` of `[R, I]` and `[O, I]` in f32; `None` where the library has to do it. A row's bits do not
/// depend on the rows beside it.
///
/// # Errors
/// - the kernel cannot be compiled or started
pub(crate) fn few_rows(x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
    let ((rows, inputs), outputs) = (x.dims2()?, weight.dim(0)?);
    let kernel = match weight.dtype() {
        DType::F32 => "few_rows_f32",
        DType::BF16 => "few_rows_bf16",
        _ => return Ok(None),
    };
    if !takes(&[x]) || inputs == 0 || !inputs.is_multiple_of(2) || !weight.is_contiguous() {
        return Ok(None);
    }
    let (x, weight) = (x.detach().contiguous()?, weight.detach());
    let launch = Launch {
        program: &PROGRAM,
        kernel,
        grid: [outputs.div_ceil(THREADS / 32 * OUTPUTS), rows.div_ceil(ROWS), 1],
        threads: THREADS,
        memory: 0,
        arguments: &[(&x).into(), (&weight).into(), rows.into(), inputs.into(), outputs.into()],
        results: &[Shape::from((rows, outputs))],
    };
    let [out] = exactly(launch.run(x.device())?)?;
    Ok(Some(out))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Result, Tensor};

    use super::super::emulator::emulated;
    use crate::linear::linear;
    use crate::test_support::{Noise, assert_close};

    #[test]
    fn few_rows_match_the_cpu_and_have_the_bits_that_they_have_alone() -> Result<()> {
        let mut noise = Noise::new(7);
        for (rows, inputs, outputs) in [(1, 2, 1), (3, 130, 5), (8, 64, 33), (21, 96, 40)] {
            let (x, weight) = (noise.tensor(&[rows, inputs]), noise.tensor(&[outputs, inputs]));
            let bias = noise.tensor(&[outputs]);
            for dtype in [DType::F32, DType::BF16] {
                let weight = weight.to_dtype(dtype)?;
                let plain = linear(&x, &weight, Some(&bias))?;
                let own = emulated(|| linear(&x, &weight, Some(&bias)))?;
                assert_close("product", &own, &plain, 2e-6);
                let bits = |t: &Tensor| -> Result<Vec<u32>> {
                    Ok(t.flatten_all()?.to_vec1::<f32>()?.iter().map(|v| v.to_bits()).collect())
                };
                for row in 0..rows {
                    let one = x.narrow(0, row, 1)?;
                    let alone = emulated(|| linear(&one, &weight, Some(&bias)))?;
                    assert_eq!(bits(&alone)?, bits(&own.narrow(0, row, 1)?)?, "row {row}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn rows_that_train_and_odd_widths_go_the_composed_way() -> Result<()> {
        let mut noise = Noise::new(8);
        let (x, weight) = (noise.var(&[3, 7]), noise.tensor(&[4, 7]));
        let plain = linear(&x, &weight, None)?.sqr()?.sum_all()?.backward()?;
        let own = emulated(|| linear(&x, &weight, None)?.sqr()?.sum_all()?.backward())?;
        assert_close("dx", own.get(&x).expect("own"), plain.get(&x).expect("cpu"), 1e-5);
        let own = emulated(|| linear(&x.detach(), &weight, None))?;
        assert_close("odd", &own, &linear(&x.detach(), &weight, None)?, 2e-6);
        Ok(())
    }
}
