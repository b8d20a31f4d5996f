//! A target whose bytes are spread over ranks (ZeRO-3): each holds `1/N` of every matrix.
//!
//! A layer is put together right before its use, while the one before computes, and let go of after
//! it: a rank holds its slices and two whole layers. Embedding table and head are put together for
//! a lookup or a loss. Vectors (norms, biases, routers) stay whole on every rank.
//!
//! Where the ranks' devices exchange tensors, the slices lie there in the target's type, and no weight
//! crosses main memory. Else they are bytes in main memory.
//!
//! Every pass is a collective: all ranks make it, and one without tokens of its own makes
//! [`super::Target::join_forward`] instead. ZeRO: Rajbhandari et al. 2020,
//! <https://arxiv.org/abs/1910.02054>.

mod layers;
mod slice;
mod table;

use longdraft_kernels::collectives::DeviceRanks;

pub(super) use layers::SpreadLayers;
pub(super) use table::{Held, Table};

/// The processes that a target is spread over. All make the same calls in the same order, each from
/// one thread at a time.
pub trait Ranks: Send + Sync + std::fmt::Debug {
    /// This process, from 0.
    fn rank(&self) -> usize;

    /// Processes.
    fn size(&self) -> usize;

    /// Everybody's bytes, as many of each, in the order of the ranks.
    fn all_gather(&self, own: &[u8], all: &mut [u8]);

    /// This rank's part of everybody's values, summed in the order of the ranks: `counts[0]` of them
    /// are rank 0's, the next `counts[1]` rank 1's and so on.
    fn sum_parts(&self, values: &[f32], counts: &[usize]) -> Vec<f32>;

    /// Their devices, where these exchange tensors themselves.
    fn devices(&self) -> Option<&dyn DeviceRanks> {
        None
    }
}
