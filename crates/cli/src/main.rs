//! The `longdraft` program.

use std::process::ExitCode;

use longdraft_kernels::memory::Allocator;

/// A process without memory says so.
#[global_allocator]
static MEMORY: Allocator = Allocator::new();

fn main() -> ExitCode {
    longdraft::main()
}
