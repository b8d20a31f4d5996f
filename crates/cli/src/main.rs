//! The `longdraft` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    longdraft::main()
}
