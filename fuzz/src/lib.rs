//! Hostile inputs for everything that longdraft reads.
//!
//! [`READERS`] lists every kind of input that may come from elsewhere. [`Reader::accepts`] feeds bytes
//! to the product's own reader, and on to what uses the result at once. It returns whether the reader
//! accepted them. Bytes may be refused, but a reader never panics, never hangs and never takes
//! more than [`MEMORY_LIMIT`].
//!
//! The fuzzer (`scripts/check-fuzz`) and an ordinary test (`tests/seeds.rs`) call the same functions.

#![forbid(unsafe_code)]

mod fixtures;
mod readers;
mod scratch;
mod seeds;

use std::alloc::System;

use cap::Cap;
use longdraft_kernels::memory::Allocator;

pub use readers::{READERS, Reader};
pub use seeds::{Seed, dictionary, seeds};

/// Bytes that reading an input may hold at once; beyond them the process ends, and a fuzzer keeps the
/// input.
pub const MEMORY_LIMIT: usize = 512 << 20;

#[global_allocator]
static ALLOCATOR: Allocator<Cap<System>> = Allocator::over(Cap::new(System, MEMORY_LIMIT));

/// Allows [`MEMORY_LIMIT`] on top of what is held now: fixtures, and what earlier inputs left.
fn allow_memory() {
    let memory = ALLOCATOR.inner();
    // It cannot be refused: more is allowed than is held.
    let _ = memory.set_limit(memory.allocated() + MEMORY_LIMIT);
}
