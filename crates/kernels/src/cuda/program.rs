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
}

impl Program {
    /// `body` with every number defined under its name.
    pub(crate) fn new(name: &str, body: &str, numbers: &[(&str, usize)]) -> Self {
        let mut program = Self { name: name.to_owned(), text: String::new() };
        for (key, value) in numbers {
            // Writing to a string does not fail.
            let _ = write!(program.name, "_{value}");
            let _ = writeln!(program.text, "#define {key} {value}");
        }
        program.text.push_str(COMMON);
        program.text.push_str(body);
        program
    }
}
