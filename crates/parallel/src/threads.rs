//! Ranks as threads of one process: tests of everything that is spread need no MPI.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::Duration;

use candle_core::{Device, Tensor};

use super::World;
use super::transport::{GpuRanks, Transport};

type Letters = VecDeque<Vec<u8>>;

struct Shared {
    barrier: Barrier,
    slots: Mutex<Vec<Vec<u8>>>,
    /// Messages under way, by sender and receiver.
    letters: Mutex<HashMap<(usize, usize), Letters>>,
    arrived: Condvar,
}

struct Thread {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
}

impl Thread {
    /// Everybody's bytes, whatever their lengths.
    fn exchange(&self, own: &[u8]) -> Vec<Vec<u8>> {
        self.shared.slots.lock().expect("slots")[self.rank] = own.to_vec();
        self.barrier();
        let all = self.shared.slots.lock().expect("slots").clone();
        self.barrier();
        all
    }
}

impl Transport for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn barrier(&self) {
        self.shared.barrier.wait();
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) {
        let all = self.exchange(bytes);
        bytes.copy_from_slice(&all[root]);
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) {
        all.copy_from_slice(&self.exchange(own).concat());
    }

    fn all_to_all(&self, bytes: &[u8], send: &[usize], received: &mut [u8], receive: &[usize]) {
        let sizes: Vec<u8> = send.iter().flat_map(|count| (*count as u64).to_le_bytes()).collect();
        let sizes = self.exchange(&sizes);
        let all = self.exchange(bytes);
        let mut end = 0;
        for (rank, bytes) in all.iter().enumerate() {
            let size = |to: usize| {
                let bytes = sizes[rank][8 * to..8 * to + 8].try_into().expect("8 bytes");
                u64::from_le_bytes(bytes) as usize
            };
            let start: usize = (0..self.rank).map(size).sum();
            assert_eq!(size(self.rank), receive[rank], "from rank {rank}");
            received[end..end + receive[rank]]
                .copy_from_slice(&bytes[start..start + receive[rank]]);
            end += receive[rank];
        }
    }

    fn sum_blocks(&self, values: &[f32], own: &mut [f32]) {
        let all = self.exchange(bytemuck::cast_slice(values));
        own.fill(0.0);
        // Another order than that of the ranks.
        for values in all.iter().rev() {
            let value = |b: &[u8]| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
            let values: Vec<f32> = values.chunks_exact(4).map(value).collect();
            let block = &values[self.rank * own.len()..][..own.len()];
            own.iter_mut().zip(block).for_each(|(sum, value)| *sum += value);
        }
    }

    fn send_receive(&self, to: usize, bytes: &[u8], from: usize, received: &mut [u8]) {
        let mut letters = self.shared.letters.lock().expect("letters");
        letters.entry((self.rank, to)).or_default().push_back(bytes.to_vec());
        self.shared.arrived.notify_all();
        let letter = loop {
            match letters.get_mut(&(from, self.rank)).and_then(VecDeque::pop_front) {
                Some(letter) => break letter,
                None => letters = self.shared.arrived.wait(letters).expect("letters"),
            }
        };
        received.copy_from_slice(&letter);
    }

    fn abort(&self, code: u8) -> ! {
        panic!("rank {} aborted with {code}", self.rank)
    }

    fn set_timeout(&self, _: Duration) {}
}

/// Runs every rank of a world in a thread; returns what each came to.
///
/// # Panics
/// - a rank panics
pub fn in_threads<T: Send>(size: usize, run: impl Fn(World) -> T + Sync) -> Vec<T> {
    let slots = Mutex::new(vec![Vec::new(); size]);
    let (letters, arrived) = (Mutex::default(), Condvar::new());
    let shared = Arc::new(Shared { barrier: Barrier::new(size), slots, letters, arrived });
    let run = &run;
    std::thread::scope(|scope| {
        let start = |rank| {
            let shared = Arc::clone(&shared);
            scope.spawn(move || run(World::over(Arc::new(Thread { rank, size, shared }))))
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("the rank's thread")).collect()
    })
}

/// Sums of ranks that hold their tensors on the CPU.
struct Gpus(World);

impl GpuRanks for Gpus {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn sum(&self, tensors: &[Tensor], limit: Duration) -> candle_core::Result<Vec<Tensor>> {
        assert_eq!(limit, super::ParallelConfig::default().timeout());
        let sum = |tensor: &Tensor| {
            let mut values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
            self.0.all_reduce_sum(&mut values);
            Tensor::from_vec(values, tensor.shape(), &Device::Cpu)
        };
        tensors.iter().map(sum).collect()
    }
}

/// The same ranks, as if each had a GPU of its own: gradients are summed there.
pub fn with_gpus(world: &World) -> World {
    world.over_gpus(Arc::new(Gpus(world.clone())))
}
