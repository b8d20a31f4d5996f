//! The text of kernels that are compiled together.

use std::fmt::Write;

/// What all kernels share.
const COMMON: &str = include_str!("common.cu");

/// A text and the numbers it is compiled with.
#[derive(Debug)]
pub(crate) struct Program {
    /// Different for different text.
    pub(super) name: String,
    pub(super) text: String,
    /// Whether it takes instructions that one architecture has and later ones do not.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "read where kernels are compiled for a device")
    )]
    pub(super) for_one_architecture: bool,
}

impl Program {
    /// `body` with every number defined under its name.
    pub(crate) fn new(name: &str, body: &str, numbers: &[(&str, usize)]) -> Self {
        let mut program =
            Self { name: name.to_owned(), text: String::new(), for_one_architecture: false };
        for (key, value) in numbers {
            // Writing to a string does not fail.
            let _ = write!(program.name, "_{value}");
            let _ = writeln!(program.text, "#define {key} {value}");
        }
        program.text.push_str(COMMON);
        program.text.push_str(body);
        program
    }

    /// The same, compiled with all that its device's architecture has.
    pub(crate) fn for_one_architecture(self) -> Self {
        Self { for_one_architecture: true, ..self }
    }
}
