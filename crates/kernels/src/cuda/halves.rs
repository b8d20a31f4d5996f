//! Norms, rotations and gates of what a frozen network computes in bf16 between its norms and its f32 sums: one pass over
//! memory each, computed in f32, nothing in a gradient graph.

use std::sync::LazyLock;

use candle_core::{DType, Result, Tensor};

use super::rows::{THREADS, threads_of_row};
use super::{Argument, Arguments, Launch, Program, aligned};

static PROGRAM: LazyLock<Program> = LazyLock::new(program);

pub(super) fn program() -> Program {
    Program::new("halves", concat!(include_str!("values.cu"), include_str!("halves.cu")), &[])
}

/// What blocks of its kernels have, where rows are 4096 wide.
#[cfg(all(test, feature = "cuda"))]
pub(super) fn kernel_blocks() -> Vec<super::Block> {
    let norms = ["rms_norm_of_halves", "rms_norm_to_halves"];
    let norms = norms.map(|kernel| (kernel, threads_of_row(4096)));
    let all = norms.into_iter().chain([("rope_halves", THREADS), ("swiglu_halves", THREADS)]);
    all.map(|(kernel, threads)| super::Block::plain(kernel, threads)).collect()
}

/// Neighbours that a thread turns, of either half of a head.
const TURNED: usize = 2;
/// Values that a thread gates.
const GATED: usize = 8;

/// A result in bf16, of the shape of `like`.
fn run(
    kernel: &str,
    (blocks, threads): (usize, usize),
    arguments: &[Argument<'_>],
    like: &Tensor,
) -> Result<Tensor> {
    let launch = Launch::new(&PROGRAM, kernel, ([blocks, 1, 1], threads), arguments);
    let [out] = launch.run_as(like.device(), &[(like.shape().clone(), DType::BF16)])?;
    Ok(out)
}

/// [`crate::rms_norm::rms_norm`] of `[.., H]` values of f32 or bf16.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let (x, weight) = (aligned(x)?, aligned(weight)?);
    let hidden = weight.elem_count();
    let blocks = (x.elem_count() / hidden.max(1), threads_of_row(hidden));
    let kernel = if x.dtype() == DType::BF16 { "rms_norm_of_halves" } else { "rms_norm_to_halves" };
    run(kernel, blocks, &[(&x).into(), (&weight).into(), hidden.into(), eps.into()], &x)
}

/// Whether [`rope`] turns heads of such a width.
pub(crate) fn turns(head_dim: usize) -> bool {
    head_dim.is_multiple_of(2 * TURNED)
}

/// [`crate::rope::rope`] of `[T, N, D]` by whole heads.
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let x = aligned(x)?;
    let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
    let (_, heads, head_dim) = x.dims3()?;
    let count = x.elem_count() / (2 * TURNED);
    let arguments = Arguments::of([&x, &cos, &sin]).and([count, heads, head_dim / 2]);
    run("rope_halves", (count.div_ceil(THREADS), THREADS), &arguments, &x)
}

/// [`crate::swiglu::swiglu`].
pub(crate) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let count = gate.elem_count();
    let blocks = (count.div_ceil(GATED * THREADS), THREADS);
    run("swiglu_halves", blocks, &[(&gate).into(), (&up).into(), count.into()], &gate)
}

#[cfg(test)]
mod tests {
    use crate::graph::Backward;
    use candle_core::{DType, Device, Result, Tensor};

    use super::super::emulator::emulated;
    use crate::rms_norm::{rms_norm, rms_norm_as};
    use crate::rope::{Rope, RopeScaling, rope};
    use crate::swiglu::swiglu;
    use crate::test_support::Noise;

    fn halves(noise: &mut Noise, shape: &[usize]) -> Result<Tensor> {
        noise.tensor(shape).to_dtype(DType::BF16)
    }

    /// What kernels in bf16 make of values is what those in f32 make of them, rounded once.
    fn assert_rounded(own: &Tensor, wide: &Tensor) -> Result<()> {
        assert_eq!((own.dtype(), own.dims()), (DType::BF16, wide.dims()));
        let bits = |t: &Tensor| -> Result<Vec<f32>> {
            t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()
        };
        assert_eq!(bits(own)?, bits(&wide.to_dtype(DType::BF16)?)?);
        Ok(())
    }

    #[test]
    fn norms_are_those_in_f32_rounded_once() -> Result<()> {
        // Rows of quads and others, and one wider than what a block's threads keep.
        for shape in [vec![1, 1], vec![3, 2, 48], vec![40, 321], vec![1, 16 * 1024 + 36]] {
            let mut noise = Noise::new(31);
            let (x, w) = (noise.tensor(&shape), noise.tensor(&shape[shape.len() - 1..]));
            let narrow = x.to_dtype(DType::BF16)?;
            emulated(|| {
                assert_rounded(&rms_norm_as(&x, &w, 1e-5, DType::BF16)?, &rms_norm(&x, &w, 1e-5)?)?;
                let wide = rms_norm(&narrow.to_dtype(DType::F32)?, &w, 1e-5)?;
                assert_rounded(&rms_norm(&narrow, &w, 1e-5)?, &wide)
            })?;
        }
        Ok(())
    }

    /// Where the kernels do not run, or something trains, the norm is rounded after it.
    #[test]
    fn norms_in_a_type_have_it_everywhere() -> Result<()> {
        let mut noise = Noise::new(32);
        let (x, w) = (noise.var(&[3, 8]), noise.tensor(&[8]));
        let plain = rms_norm_as(&x, &w, 1e-5, DType::BF16)?;
        assert_rounded(&plain, &rms_norm(&x, &w, 1e-5)?)?;
        let trained = emulated(|| rms_norm_as(&x, &w, 1e-5, DType::BF16))?;
        assert!(trained.to_dtype(DType::F32)?.sum_all()?.gradients()?.get(&x).is_some());
        assert_eq!(rms_norm_as(&x, &w, 1e-5, DType::F32)?.dtype(), DType::F32);
        Ok(())
    }

    #[test]
    fn rotations_are_those_in_f32_rounded_once() -> Result<()> {
        // The last width is no multiple of four: composed ops turn it.
        for (tokens, heads, head_dim) in [(1, 1, 4), (33, 3, 16), (70, 2, 80), (5, 2, 6)] {
            let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 37).collect();
            let table =
                Rope::new(head_dim, 1e4, RopeScaling::None)?.table(&positions, &Device::Cpu)?;
            let x = halves(&mut Noise::new(4), &[tokens, heads, head_dim])?;
            for x in [x.narrow(1, heads - 1, 1)?, x] {
                let own = emulated(|| rope(&x, &table))?;
                let wide = emulated(|| rope(&x.to_dtype(DType::F32)?, &table))?;
                assert_rounded(&own, &wide)?;
            }
        }
        Ok(())
    }

    #[test]
    fn gates_are_those_in_f32_rounded_once() -> Result<()> {
        let mut noise = Noise::new(9);
        for (shape, factor) in [([40, 304], 1.0), ([7, 39], 8.0), ([3, 8], 500.0)] {
            let gate = (noise.tensor(&shape) * factor)?.to_dtype(DType::BF16)?;
            let up = halves(&mut noise, &shape)?;
            let own = emulated(|| swiglu(&gate, &up))?;
            let [gate, up] = [&gate, &up].map(|t| t.to_dtype(DType::F32));
            let (gate, up) = (gate?, up?);
            assert_rounded(&own, &emulated(|| swiglu(&gate, &up))?)?;
        }
        let empty = Tensor::zeros((0, 4), DType::BF16, &Device::Cpu)?;
        assert_eq!(emulated(|| swiglu(&empty, &empty))?.dims(), [0, 4]);
        Ok(())
    }
}
