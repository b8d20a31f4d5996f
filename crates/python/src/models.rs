//! Targets and drafts.

use std::path::PathBuf;

use longdraft::{Message, OpenOptions, Stop, choice, template_variables};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::errors::raised;
use crate::running::run;

/// A target that is open.
#[pyclass(frozen, module = "longdraft._longdraft")]
pub(crate) struct Target(pub(crate) longdraft::Target);

#[pymethods]
impl Target {
    #[staticmethod]
    fn open(
        py: Python<'_>,
        name: String,
        dtype: &str,
        cache: &str,
        device: &str,
    ) -> PyResult<Self> {
        let options = OpenOptions {
            dtype: choice("dtype", dtype).map_err(raised)?,
            cache: choice("cache", cache).map_err(raised)?,
            device: longdraft::device(device).map_err(raised)?,
        };
        run(py, &Stop::new(), move || longdraft::Target::open_with(&name, &options)).map(Self)
    }

    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        self.0.fingerprint()
    }

    #[getter]
    fn layers(&self) -> usize {
        self.0.layers()
    }

    #[getter]
    fn hidden_size(&self) -> usize {
        self.0.hidden_size()
    }

    #[getter]
    fn vocabulary(&self) -> usize {
        self.0.vocabulary()
    }

    #[getter]
    fn context(&self) -> usize {
        self.0.context()
    }

    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        py.detach(|| self.0.encode(text)).map_err(raised)
    }

    fn encode_chat(
        &self,
        py: Python<'_>,
        messages: Vec<(String, String)>,
        chat_template_kwargs: Option<String>,
    ) -> PyResult<Vec<u32>> {
        let variables = chat_template_kwargs.as_deref().map(template_variables).transpose();
        let variables = variables.map_err(raised)?.unwrap_or_default();
        py.detach(|| self.0.encode_chat_with(&turns(messages), &variables)).map_err(raised)
    }

    fn decode(&self, ids: Vec<u32>) -> PyResult<String> {
        self.0.decode(&ids).map_err(raised)
    }

    /// Values of `[T, L·H]` in row order, as native floats of 32 bits.
    fn features<'py>(
        &self,
        py: Python<'py>,
        ids: Vec<u32>,
        layers: Vec<usize>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let target = self.0.clone();
        let rows = run(py, &Stop::new(), move || target.features(&ids, &layers))?;
        let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_ne_bytes()).collect();
        Ok(PyByteArray::new(py, &bytes))
    }
}

/// Messages of roles and texts.
pub(crate) fn turns(messages: Vec<(String, String)>) -> Vec<Message> {
    messages.into_iter().map(|(role, content)| Message::new(&role, content)).collect()
}

/// A draft on disk.
#[pyclass(frozen, module = "longdraft._longdraft")]
pub(crate) struct Draft(pub(crate) longdraft::Draft);

#[pymethods]
impl Draft {
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| longdraft::Draft::open(path)).map(Self).map_err(raised)
    }

    #[getter]
    fn place(&self) -> PathBuf {
        self.0.place().to_path_buf()
    }

    #[getter]
    fn target(&self, py: Python<'_>) -> PyResult<Option<String>> {
        py.detach(|| self.0.target()).map_err(raised)
    }

    /// Weights are read for their hash.
    fn provenance(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.provenance().to_string())
    }
}
