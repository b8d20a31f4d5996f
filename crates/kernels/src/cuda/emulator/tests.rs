use std::sync::Barrier;

use candle_core::Device;

use super::*;
use crate::cuda::Block;

const THREADS: usize = 4;
const BLOCKS: usize = 64;
const STARTS: usize = 20;

const PROBE: &str = "
extern \"C\" __global__ void thread_probe(const float *in, float *out) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x;
  __syncthreads();
  out[at] = 2 * in[at];
}
KERNEL(thread_probe)
";

/// Every thread copies 8 values, the last one zeros, and reads the first that its opposite copied.
const COPIES: &str = "
extern \"C\" __global__ void copies(const u16 *in, u32 waits, u32 meets, float *out) {
  DYNAMIC_SHARED(u16, tile);
  u32 own = threadIdx.x;
  copy_ahead(tile + 8 * own, in + 8 * own, own < 31);
  end_copies();
  if (waits) wait_for_copies<0>();
  if (meets) __syncthreads();
  out[32 * blockIdx.x + own] = unpack_low(tile[8 * (31 - own)]);
}
KERNEL(copies)
";

/// Threads after the first `waiting` go ahead.
const WAITS: &str = "
extern \"C\" __global__ void some_wait(u32 waiting, float *out) {
  if (threadIdx.x < waiting) begin_in_turn();
  out[threadIdx.x] = 1.0f;
}
KERNEL(some_wait)
";

#[test]
fn a_kernel_that_may_overlap_has_to_wait_in_every_thread() {
    let run = |waiting: usize| {
        let program = Program::new("some_wait", WAITS, &[]).overlapping();
        let arguments = [Argument::from(waiting)];
        Launch::new(&program, "some_wait", ([1, 1, 1], 32), &arguments)
            .run(&Device::Cpu, [Shape::from(32)])
    };
    assert!(run(32).is_ok());
    let error = run(31).expect_err("one goes ahead").to_string();
    assert!(error.contains("some_wait: 31 of 32 threads"), "{error}");
}

#[test]
fn copies_are_there_once_they_are_waited_for_and_everybody_has_met() -> Result<()> {
    let values: Vec<bf16> = (1..=8 * 32).map(|i| bf16::from_f32(i as f32)).collect();
    let x = Tensor::from_slice(&values, values.len(), &Device::Cpu)?;
    let copied = |waits: bool, meets: bool| -> Result<Vec<f32>> {
        let program = Program::new("copies", COPIES, &[]);
        let arguments = [Argument::from(&x), waits.into(), meets.into()];
        let block = Block { kernel: "copies", threads: 32, memory: 8 * 32 * 2 };
        let launch = Launch::of(&program, block, [2, 1, 1], &arguments);
        let [out] = launch.run(&Device::Cpu, [Shape::from(2 * 32)])?;
        out.to_vec1()
    };
    let first = |own: usize| if own == 0 { 0.0 } else { (8 * (31 - own) + 1) as f32 };
    let want: Vec<f32> = (0..2 * 32).map(|place| first(place % 32)).collect();
    assert_eq!(copied(true, true)?, want);
    assert!(copied(false, true)?.iter().all(|value| value.is_nan()));
    // In whichever order threads run, half of them read what is not there yet.
    let early = copied(true, false)?;
    for block in early.chunks(32) {
        assert!(block.iter().any(|value| value.is_nan()), "{block:?}");
    }
    Ok(())
}

fn start(x: &Tensor) -> Result<Vec<f32>> {
    let program = Program::new("thread_probe", PROBE, &[]);
    let arguments = [Argument::from(x)];
    let launch = Launch::new(&program, "thread_probe", ([BLOCKS, 1, 1], 32), &arguments);
    let [out] = launch.run(&Device::Cpu, [x.shape().clone()])?;
    out.to_vec1()
}

#[test]
fn threads_run_a_kernel_side_by_side() {
    let compiled = Barrier::new(THREADS);
    let run = |own: usize| -> Result<Vec<Vec<f32>>> {
        let x = Tensor::full(own as f32, 32 * BLOCKS, &Device::Cpu)?;
        let first = start(&x);
        compiled.wait();
        let others = (0..STARTS).map(|_| start(&x));
        std::iter::once(first).chain(others).collect()
    };
    let run = &run;
    let found: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|own| scope.spawn(move || run(own))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
    });
    for (own, results) in found.into_iter().enumerate() {
        let results = results.expect("emulated");
        assert_eq!(results, vec![vec![2.0 * own as f32; 32 * BLOCKS]; STARTS + 1], "{own}");
    }
}
