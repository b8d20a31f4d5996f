//! Arguments by place or by name, as Python takes them.

use minijinja::value::{Kwargs, from_args};
use minijinja::{Error, ErrorKind, Value};

/// What a call gives for parameters of these names.
pub(super) struct Arguments(Vec<Option<Value>>);

impl Arguments {
    /// Sorts what a call gives. `none` is nothing.
    ///
    /// # Errors
    /// - there are more arguments, or ones of other names
    pub(super) fn of(given: &[Value], names: &[&str]) -> Result<Self, Error> {
        let (placed, named): (&[Value], Kwargs) = from_args(given)?;
        if placed.len() > names.len() {
            return Err(ErrorKind::TooManyArguments.into());
        }
        let mut values: Vec<Option<Value>> = placed.iter().cloned().map(Some).collect();
        for name in &names[placed.len()..] {
            values.push(named.get::<Option<Value>>(name)?);
        }
        named.assert_all_used()?;
        Ok(Self(values.into_iter().map(|value| value.filter(|value| !value.is_none())).collect()))
    }

    pub(super) fn value(&self, at: usize) -> Option<&Value> {
        self.0.get(at).and_then(Option::as_ref)
    }

    pub(super) fn is_true(&self, at: usize) -> bool {
        self.value(at).is_some_and(Value::is_true)
    }

    /// A text.
    ///
    /// # Errors
    /// - the argument is another value
    pub(super) fn text(&self, at: usize) -> Result<Option<&str>, Error> {
        let wrong = || Error::new(ErrorKind::InvalidOperation, "an argument is no text");
        self.value(at).map(|value| value.as_str().ok_or_else(wrong)).transpose()
    }

    /// A number without a fraction.
    ///
    /// # Errors
    /// - the argument is another value
    pub(super) fn number(&self, at: usize) -> Result<Option<i64>, Error> {
        self.value(at).map(|value| i64::try_from(value.clone())).transpose()
    }
}
