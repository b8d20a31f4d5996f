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
        let error = Error::new_err(failure.message().to_owned());
        let value = error.value(py);
        let told = || -> PyResult<()> {
            value.setattr(intern!(py, "help"), failure.help())?;
            value.setattr(intern!(py, "problems"), failure.problems().to_vec())?;
            value.setattr(intern!(py, "code"), failure.code())?;
            // Tracebacks show notes from Python 3.11 on.
            if let (Some(help), true) = (failure.help(), value.hasattr(intern!(py, "add_note"))?) {
                value.call_method1(intern!(py, "add_note"), (format!("hint: {help}"),))?;
            }
            Ok(())
        };
        match told() {
            Ok(()) => error,
            Err(other) => other,
        }
    })
}

/// An error of this module's own.
pub(crate) fn refused(py: Python<'_>, message: &str, help: &str) -> PyErr {
    let error = Error::new_err(message.to_owned());
    let value = error.value(py);
    let told = value
        .setattr(intern!(py, "help"), help)
        .and_then(|()| value.setattr(intern!(py, "problems"), Vec::<String>::new()))
        .and_then(|()| value.setattr(intern!(py, "code"), 1));
    match told {
        Ok(()) => error,
        Err(other) => other,
    }
}
