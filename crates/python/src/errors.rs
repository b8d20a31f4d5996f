//! Errors as Python's exceptions, with the command line's sentences.

use longdraft::Error as Failure;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::{create_exception, intern};

create_exception!(
    longdraft,
    Error,
    PyException,
    "Something could not be done; `help` may say what to do."
);

/// An error that is raised.
pub(crate) fn raised(failure: Failure) -> PyErr {
    Python::attach(|py| {
        error(py, failure.message(), failure.help(), failure.problems(), failure.code())
    })
}

/// An error of this module's own; `help` may be empty.
pub(crate) fn refused(py: Python<'_>, message: &str, help: &str) -> PyErr {
    error(py, message, Some(help).filter(|help| !help.is_empty()), &[], 1)
}

fn error(
    py: Python<'_>,
    message: &str,
    help: Option<&str>,
    problems: &[String],
    code: u8,
) -> PyErr {
    let error = Error::new_err(message.to_owned());
    let value = error.value(py);
    let told = || -> PyResult<()> {
        value.setattr(intern!(py, "help"), help)?;
        value.setattr(intern!(py, "problems"), problems.to_vec())?;
        value.setattr(intern!(py, "code"), code)?;
        // Tracebacks show notes from Python 3.11 on.
        if let (Some(help), true) = (help, value.hasattr(intern!(py, "add_note"))?) {
            value.call_method1(intern!(py, "add_note"), (format!("hint: {help}"),))?;
        }
        Ok(())
    };
    match told() {
        Ok(()) => error,
        Err(other) => other,
    }
}
