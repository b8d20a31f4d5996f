//! Keyword arguments. Python's side hands over all of them in one mapping, those that nobody gave with their defaults.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::errors::raised;

/// The argument `name` of all that were handed over.
pub(crate) fn given<'py, T: FromPyObjectOwned<'py>>(
    all: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<T> {
    let value = all.get_item(name)?;
    let extracted: PyResult<T> = value.extract().map_err(Into::into);
    extracted.map_err(|error| {
        let refused = PyTypeError::new_err(format!("`{name}`: {error}"));
        refused.set_cause(all.py(), Some(error));
        refused
    })
}

/// What the text of an argument stands for, if it is not `None`; `read` gets the name and the text.
pub(crate) fn read<T>(
    all: &Bound<'_, PyAny>,
    name: &str,
    read: impl FnOnce(&str, &str) -> longdraft::Result<T>,
) -> PyResult<Option<T>> {
    let text: Option<String> = given(all, name)?;
    text.map(|text| read(name, &text)).transpose().map_err(raised)
}
