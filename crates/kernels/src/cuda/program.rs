//! The text of kernels that are compiled together.

use std::fmt::Write;
use std::sync::Arc;

/// What all kernels share.
const COMMON: &str = include_str!("common.cu");

/// A text and the numbers it is compiled with.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// Different for different text.
    pub(super) name: String,
    #[cfg_attr(
        not(any(test, feature = "cuda", feature = "emulate-cuda")),
        expect(dead_code, reason = "read where kernels are compiled")
    )]
    pub(super) text: Arc<str>,
    /// Whether it takes instructions that one architecture has and later ones do not.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "read where kernels are compiled for a device")
    )]
    pub(super) for_one_architecture: bool,
    /// Whether its kernels may be started while those before them run.
    #[cfg_attr(
        not(any(test, feature = "cuda", feature = "emulate-cuda")),
        expect(dead_code, reason = "read where kernels are started")
    )]
    pub(super) overlaps: bool,
}

impl Program {
    /// `body` with every number defined under its name.
    pub(crate) fn new(name: &str, body: &str, numbers: &[(&str, usize)]) -> Self {
        let (mut text, mut name) = (String::new(), name.to_owned());
        for (key, value) in numbers {
            // Writing to a string does not fail.
            let _ = write!(name, "_{value}");
            let _ = writeln!(text, "#define {key} {value}");
        }
        text.push_str(COMMON);
        text.push_str(body);
        Self { name, text: text.into(), for_one_architecture: false, overlaps: false }
    }

    /// The same, compiled with all that its device's architecture has.
    pub(crate) fn for_one_architecture(self) -> Self {
        Self { for_one_architecture: true, ..self }
    }

    /// The same, whose kernels may be started while those before them still run: each of them waits for those
    /// (`wait_for_kernels_before`) in all of its threads. Before that it reads nothing and writes nothing, but may prefetch. No
    /// pointer is `__restrict__`: the compiler could read ahead of the wait.
    pub(crate) fn overlapping(self) -> Self {
        Self { overlaps: true, ..self }
    }
}
