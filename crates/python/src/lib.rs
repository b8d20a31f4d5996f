//! What the Python module `longdraft` calls. Its typed interface stands in `python/longdraft`; here is as
//! little as can be: values cross as numbers, texts and JSON.

#![allow(clippy::needless_pass_by_value, reason = "Python hands over what is owned")]

mod errors;
mod exporting;
mod keywords;
mod models;
mod running;
mod session;
mod training;

use longdraft_kernels::memory::Allocator;
use pyo3::pymodule;

/// Counts what work on foreign files takes, as in the program. Python's own memory comes from elsewhere.
#[global_allocator]
static MEMORY: Allocator = Allocator::new();

/// What `longdraft` wraps.
#[pymodule]
mod _longdraft {
    use std::ffi::OsString;

    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::errors::Error;
    #[pymodule_export]
    use crate::exporting::{export, verify};
    #[pymodule_export]
    use crate::models::{Draft, Target};
    #[pymodule_export]
    use crate::running::settle;
    #[pymodule_export]
    use crate::session::{Session, Stream, evaluate};
    #[pymodule_export]
    use crate::training::{capture, output_of, train};

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn begin() {
        // Programs hear of progress by callbacks.
        longdraft::set_quiet(true);
    }

    /// Runs a command of the command line; returns its exit code.
    #[pyfunction]
    fn main(py: Python<'_>, words: Vec<OsString>) -> PyResult<u8> {
        let python: OsString = py.import("sys")?.getattr("executable")?.extract()?;
        longdraft::set_program(vec![python, "-m".into(), "longdraft".into()]);
        Ok(py.detach(|| longdraft::main_of(words)))
    }

    /// Threads that everything computes on.
    #[pyfunction]
    fn set_threads(threads: usize) -> PyResult<()> {
        longdraft::set_threads(threads).map_err(crate::errors::raised)
    }
}
