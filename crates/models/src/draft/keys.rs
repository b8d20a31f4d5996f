//! Keys of a draft's `config.json`, read one by one; every problem is collected.

use serde_json::Value;

use crate::error::Problems;

/// Reads keys, collecting what is wrong.
pub(super) struct Keys<'a> {
    /// The JSON object.
    pub(super) value: &'a Value,
    /// What is wrong so far.
    pub(super) problems: &'a mut Problems,
}

impl<'a> Keys<'a> {
    /// The value of a key; `None` if it is missing or null.
    pub(super) fn present(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    /// A whole number; 1 if it is unusable.
    pub(super) fn size(&mut self, key: &str, default: Option<usize>) -> usize {
        let problem = match (self.present(key), default) {
            (None, Some(default)) => return default,
            (None, None) => format!("`{key}` is missing"),
            (Some(value), _) => match value.as_u64() {
                Some(size) => return size as usize,
                None => format!("`{key}` = {value} is not a whole number"),
            },
        };
        self.problems.push(problem);
        1
    }

    /// A number.
    pub(super) fn number(&mut self, key: &str, default: f64) -> f64 {
        let Some(value) = self.present(key) else { return default };
        let number = value.as_f64();
        if number.is_none() {
            let problem = format!("`{key}` = {value} is not a number");
            self.problems.push(problem);
        }
        number.unwrap_or(default)
    }

    /// A switch.
    pub(super) fn flag(&mut self, key: &str, default: bool) -> bool {
        let Some(value) = self.present(key) else { return default };
        let flag = value.as_bool();
        if flag.is_none() {
            let problem = format!("`{key}` = {value} is neither true nor false");
            self.problems.push(problem);
        }
        flag.unwrap_or(default)
    }
}
