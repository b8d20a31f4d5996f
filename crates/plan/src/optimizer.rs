//! Memory of gradients, optimizer state, their exchange and checkpoints.

use longdraft_parallel::{Partition, ZeroStage};
use longdraft_train::footprint::F32;

use crate::place::Places;
use crate::roofline::{Kernel, Part, Term};

/// Sizes of a draft's tensors and how ranks share them.
#[derive(Debug, Clone)]
pub(crate) struct Parameters {
    /// Elements of every tensor.
    pub(crate) sizes: Vec<usize>,
    /// Values that the optimizer keeps for each element of a tensor.
    pub(crate) moments: Vec<u64>,
    /// Elements of all that train.
    pub(crate) trained: u64,
    pub(crate) ranks: u64,
    pub(crate) zero: ZeroStage,
    pub(crate) bucket_bytes: u64,
    /// Whether whole tensors are dealt out, as Muon needs.
    pub(crate) whole_tensors: bool,
    /// Whether the optimizer's state lies in a file.
    pub(crate) state_in_file: bool,
}

impl Parameters {
    pub(crate) fn all(&self) -> u64 {
        self.sizes.iter().map(|size| *size as u64).sum()
    }

    /// Whether ranks update different elements.
    pub(crate) fn is_sharded(&self) -> bool {
        self.ranks > 1 && (self.zero != ZeroStage::Replicated || self.whole_tensors)
    }

    fn partition(&self) -> Partition {
        let ranks = self.ranks as usize;
        if self.whole_tensors {
            let costs: Vec<u64> = self.sizes.iter().map(|size| *size as u64).collect();
            return Partition::by_cost(&self.sizes, &costs, ranks);
        }
        Partition::by_blocks(&self.sizes, ranks)
    }

    /// Elements that each rank updates.
    pub(crate) fn shares(&self) -> Vec<usize> {
        self.partition().sizes()
    }

    /// Elements of the largest share.
    fn largest_share(&self) -> u64 {
        self.shares().into_iter().max().unwrap_or(0) as u64
    }

    /// Bytes of the weights that a rank holds all the time: `4 P`, under ZeRO-3 `4 P / N`.
    pub(crate) fn weight_bytes(&self) -> u64 {
        match self.zero {
            ZeroStage::Weights => F32 * self.all().div_ceil(self.ranks),
            _ => F32 * self.all(),
        }
    }

    /// Bytes that a rank gathers while the draft is at work: `4 P` under ZeRO-3.
    pub(crate) fn gathered_weight_bytes(&self) -> u64 {
        if self.zero == ZeroStage::Weights && self.ranks > 1 { F32 * self.all() } else { 0 }
    }

    /// Bytes of the optimizer's state: `8 P` under AdamW, `4 P` for matrices under Muon, or their `N`th
    /// part where they are spread. Tensors without a gradient are never touched. None in a file.
    pub(crate) fn state_bytes(&self) -> u64 {
        if self.state_in_file {
            return 0;
        }
        let kept = |(size, moments): (&usize, &u64)| *size as u64 * moments;
        let values: u64 = self.sizes.iter().zip(&self.moments).map(kept).sum();
        F32 * (values as f64 * self.own() as f64 / self.all().max(1) as f64) as u64
    }

    /// Elements that a rank updates.
    fn own(&self) -> u64 {
        if self.is_sharded() { self.largest_share() } else { self.trained }
    }

    /// Which part of all elements Muon updates: those of which the optimizer keeps one value.
    fn share_by_muon(&self) -> f64 {
        let of_muon = self.sizes.iter().zip(&self.moments).filter(|(_, moments)| **moments == 1);
        of_muon.map(|(size, _)| *size as f64).sum::<f64>() / self.all().max(1) as f64
    }

    /// The update. On an accelerator the norm reads gradients, AdamW reads weights, gradients and both moments and writes
    /// all but gradients, and products get weights of 16 bits: `34 P`. Of a rank's part these are not written. Otherwise gradients and the weights that a rank
    /// updates go to main memory, and new weights come back. Where NCCL brings sums and new weights of a spread update,
    /// that is the rank's part alone, its gradients twice, the first time for their norm. Under ZeRO-3 the weights
    /// are there already. Muon's directions go to the accelerator and come back. Their products are not counted, nor what
    /// the machine computes.
    pub(crate) fn update_term(&self, places: Places) -> Term {
        let own = self.own();
        if places.updates_on_accelerator() {
            let moved = if self.is_sharded() { 4 + 28 } else { 4 + 28 + 2 };
            let (bytes, starts) = ((moved * own) as f64, 2.0 * self.sizes.len() as f64);
            return Term { bytes, starts, ..Term::new(Part::Optimizer, Kernel::Memory) };
        }
        let is_part = self.is_sharded() && !places.exchanges_on_host();
        let (gradients, new) = if is_part { (2 * own, own) } else { (self.trained, self.all()) };
        let is_there = self.zero == ZeroStage::Weights && self.ranks > 1;
        let read = if is_there { 0 } else { own };
        let directions = 2.0 * own as f64 * self.share_by_muon();
        let bytes = F32 as f64 * ((gradients + read + new) as f64 + directions);
        Term { bytes, ..Term::new(Part::Optimizer, Kernel::Upload) }
    }

    /// Bytes of the gradients of a rank's rows: `4 P`.
    pub(crate) fn gradient_bytes(&self) -> u64 {
        F32 * self.trained
    }

    pub(crate) fn largest_tensor_bytes(&self) -> u64 {
        F32 * self.sizes.iter().copied().max().unwrap_or(0) as u64
    }

    fn bucket(&self) -> u64 {
        self.bucket_bytes.min(F32 * self.all())
    }

    /// Bytes while gradients are summed over the ranks, beside them: the rank's sums `4 P / N`, a bucket
    /// that is sent and one that is received. Without ZeRO all sums come back: `4 P` in place of the
    /// gradients, with a bucket as it arrives, as it is padded and as it is cut.
    pub(crate) fn reduction_bytes(&self) -> u64 {
        if self.ranks == 1 {
            return 0;
        }
        F32 * self.largest_share() + 2 * self.bucket() + self.bucket() / self.ranks
    }

    /// Bytes of the update, summed gradients included: `4 P` and a copy of the largest tensor, on an accelerator its
    /// new values with both new moments; where it is spread, the rank's sums and its new values, `4 P / N` each, on an
    /// accelerator with the new moments of one run. From a file come a tensor's moments.
    pub(crate) fn update_bytes(&self, on_accelerator: bool) -> u64 {
        let moments = if self.state_in_file { 2 * self.largest_tensor_bytes() } else { 0 };
        if !self.is_sharded() {
            let copies = if on_accelerator { 3 } else { 1 };
            return self.gradient_bytes() + copies * self.largest_tensor_bytes() + moments;
        }
        let share = F32 * self.largest_share();
        let run = if on_accelerator { share.min(self.largest_tensor_bytes()) } else { 0 };
        moments + 2 * share + 2 * run
    }

    /// Bytes of all new values as they are gathered where the update is spread: `4 P` and two buckets.
    pub(crate) fn new_weights_bytes(&self) -> u64 {
        if !self.is_sharded() {
            return 0;
        }
        F32 * self.all() + 2 * self.bucket() + 2 * self.bucket() / self.ranks
    }

    /// Bytes of writing a checkpoint: the weights as a file; and a tensor, of them or of the state, as
    /// values and as bytes.
    pub(crate) fn checkpoint_bytes(&self) -> u64 {
        F32 * self.all() + 2 * self.largest_tensor_bytes()
    }
}
