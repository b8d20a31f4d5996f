//! Ranks as threads of one process: tests of everything that is spread need no MPI.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor, bail};
use longdraft_kernels::collectives::{DeviceRanks, Gathering};

use super::World;
use super::transport::Transport;

type Letters = VecDeque<Vec<u8>>;

#[derive(Default)]
struct Shared {
    /// Messages under way, by sender and receiver.
    letters: Mutex<HashMap<(usize, usize), Letters>>,
    arrived: Condvar,
}

struct Thread {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
}

impl Transport for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
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

    fn set_patient(&self, _: bool) {}
}

/// Runs every rank of a world in a thread; returns what each came to.
///
/// # Panics
/// - a rank panics
pub fn in_threads<T: Send>(size: usize, run: impl Fn(World) -> T + Sync) -> Vec<T> {
    let shared = Arc::new(Shared::default());
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

/// Ranks that hold their tensors on the CPU, in the place of GPUs.
#[derive(Debug)]
struct Gpus(World);

impl Gpus {
    /// Everybody's values in f32, in the order of the ranks.
    fn values(&self, own: &Tensor) -> Result<Vec<f32>> {
        let own: Vec<f32> = own.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
        Ok(self.0.all_gather(&own))
    }

    fn gather(&self, own: &Tensor) -> Result<Tensor> {
        let shape = [&[self.size()][..], own.dims()].concat();
        // f32 holds the values of the other types.
        Tensor::from_vec(self.values(own)?, shape, &Device::Cpu)?.to_dtype(own.dtype())
    }

    /// Refuses what NCCL does.
    fn check(&self, tensors: &[Tensor]) -> Result<()> {
        match tensors.iter().find(|tensor| !self.takes(tensor)) {
            Some(tensor) => bail!("a tensor of {:?}", tensor.dtype()),
            None => Ok(()),
        }
    }
}

impl DeviceRanks for Gpus {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn all_reduce(&self, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        self.check(tensors)?;
        tensors.iter().map(|tensor| self.gather(tensor)?.sum(0)).collect()
    }

    fn reduce_scatter(&self, blocks: &Tensor) -> Result<Tensor> {
        self.check(std::slice::from_ref(blocks))?;
        if blocks.dims().first() != Some(&self.size()) {
            bail!("{:?} is not one block of {}", blocks.dims(), self.size());
        }
        self.gather(blocks)?.sum(0)?.get(self.rank())?.contiguous()
    }

    fn start_all_gather(&self, own: &[Tensor]) -> Result<Box<dyn Gathering>> {
        self.check(own)?;
        let all = own.iter().map(|own| self.gather(own)).collect::<Result<_>>()?;
        Ok(Box::new(Gathered(all)))
    }
}

/// What came of everybody's values.
struct Gathered(Vec<Tensor>);

impl Gathering for Gathered {
    fn finish(self: Box<Self>) -> Result<Vec<Tensor>> {
        Ok(self.0)
    }
}

/// The same ranks, as if each had a GPU of its own: tensors are exchanged there.
pub fn with_gpus(world: &World) -> World {
    world.over_itself(gpus_of(world))
}

/// What stands in for their GPUs.
pub(super) fn gpus_of(world: &World) -> Arc<dyn DeviceRanks> {
    Arc::new(Gpus(world.clone()))
}

#[cfg(test)]
mod tests {
    use candle_core::Error;

    use super::super::traffic::Meter;
    use super::super::transport::Alone;
    use super::super::watched::Watched;
    use super::*;

    fn tensor(rank: usize, dtype: DType) -> Tensor {
        let values = Tensor::arange(0.0_f32, 6.0, &Device::Cpu).and_then(|t| t.reshape((3, 2)));
        let values = values.and_then(|values| (values + 10.0 * rank as f64)?.to_dtype(dtype));
        values.expect("a tensor")
    }

    fn numbers(tensor: &Tensor) -> Vec<f32> {
        let values = tensor.flatten_all().and_then(|t| t.to_dtype(DType::F32)?.to_vec1());
        values.expect("values")
    }

    #[test]
    fn tensors_are_exchanged_by_rank_in_their_type() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let all = in_threads(3, |world| {
                let world = with_gpus(&world);
                let devices = world.gpus().expect("devices");
                let own = tensor(world.rank(), dtype);
                let gathered = devices.all_gather(&[own.clone(), own.narrow(0, 1, 1)?])?;
                let sums = devices.all_reduce(std::slice::from_ref(&own))?;
                Ok::<_, Error>((gathered, sums, devices.reduce_scatter(&own)?))
            });
            let whole: Vec<f32> = (0..3).flat_map(|rank| numbers(&tensor(rank, dtype))).collect();
            for (rank, result) in all.into_iter().enumerate() {
                let (gathered, sums, part) = result.expect("exchanged");
                assert_eq!(gathered[0].dims(), [3, 3, 2]);
                assert_eq!((numbers(&gathered[0]), gathered[0].dtype()), (whole.clone(), dtype));
                assert_eq!(gathered[1].dims(), [3, 1, 2]);
                assert_eq!(numbers(&gathered[1]), [2.0, 3.0, 12.0, 13.0, 22.0, 23.0]);
                assert_eq!(numbers(&sums[0]), [30.0, 33.0, 36.0, 39.0, 42.0, 45.0]);
                assert_eq!((sums[0].dims(), sums[0].dtype()), (&[3, 2][..], dtype));
                assert_eq!(part.dims(), [2]);
                assert_eq!(numbers(&part), numbers(&sums[0])[2 * rank..][..2]);
            }
        }
    }

    #[test]
    fn what_devices_send_is_counted_as_what_ranks_send() {
        in_threads(3, |world| {
            let meter = Arc::new(Meter::default());
            let gpus = Arc::new(Gpus(world.clone()));
            let devices = Watched::new(gpus, Arc::new(Alone), Some(Arc::clone(&meter)));
            let own = tensor(world.rank(), DType::BF16);
            // Six values of two bytes: two thirds go to others; all go to both; two thirds go, and come back summed.
            let mut sent = Vec::new();
            devices.reduce_scatter(&own).expect("a part");
            sent.push(meter.read().sent_bytes);
            devices.all_gather(std::slice::from_ref(&own)).expect("all");
            sent.push(meter.read().sent_bytes);
            devices.all_reduce(&[own]).expect("sums");
            sent.push(meter.read().sent_bytes);
            assert_eq!(sent, [8, 8 + 24, 8 + 24 + 16]);
        });
    }

    #[test]
    fn a_group_of_all_keeps_their_gpus() {
        in_threads(4, |world| {
            let world = with_gpus(&world);
            let first = world.rank() / 2 * 2;
            let (all, some) = (world.group(0..4), world.group(first..first + 2));
            assert!(all.gpus().is_some() && all.size() == 4);
            assert!(some.gpus().is_none() && some.size() == 2);
        });
    }

    #[test]
    fn what_cannot_be_exchanged_is_an_error() {
        in_threads(2, |world| {
            let world = with_gpus(&world);
            let devices = world.gpus().expect("devices");
            let whole = Tensor::zeros((2, 2), DType::U32, &Device::Cpu).expect("a tensor");
            assert!(!devices.takes(&whole) && devices.all_reduce(&[whole]).is_err());
            assert!(devices.reduce_scatter(&tensor(0, DType::F32)).is_err(), "three blocks");
        });
    }
}
