//! Several processes that train one draft: ranks, collectives, and what is spread over them.
//!
//! ```text
//! rows of a step -> cut over the ranks -> gradients of each rank's rows
//!   -> reduce-scatter in buckets: a rank gets the sums of the elements that it owns
//!   -> ZeRO-0: all-gather the sums, every rank updates everything
//!   -> ZeRO-1: the rank updates what it owns, where it was summed, all-gather the new values
//!   -> ZeRO-3: the same, but the values are gathered when they are used, and let go of after it
//! ```
//!
//! One process is a world of one and walks the same code. Sums through main memory run in the order of
//! the ranks unless the configuration leaves it to MPI, so that a run can be repeated and resumed bit
//! for bit with the same number of ranks; another number differs by rounding. Ranks with a GPU each sum
//! and gather there, in NCCL's order.
//! ZeRO: Rajbhandari et al. 2020, <https://arxiv.org/abs/1910.02054>.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod communicators;
mod config;
mod data_parallel;
mod device_exchange;
mod error;
mod exchange;
mod gpus;
mod gradients;
mod group;
mod launcher;
mod layer_groups;
#[cfg(feature = "mpi")]
mod mpi;
mod partition;
mod row_groups;
mod spread_weights;
mod tcp;
#[cfg(any(test, feature = "threads"))]
pub mod threads;
mod traffic;
mod transport;
mod values;
mod watch;
mod watched;
mod world;
mod zero;

pub use config::{ParallelConfig, Reduction, StatePlace};
pub use data_parallel::DataParallel;
pub use error::{ParallelError, Result};
pub use exchange::{Exchanged, exchanged_bytes};
pub use gpus::{SUMS_BY_NCCL, TargetRanks};
pub use gradients::Gradients;
pub use launcher::{Launch, Place, mpi_library};
pub use partition::{Partition, Run, share_of};
pub use row_groups::RowGroups;
pub use traffic::Traffic;
pub use values::Values;
pub use watch::set_teller;
pub use world::{Element, World};
pub use zero::ZeroStage;
