//! Tuples, which the library has not: lists that are printed in round brackets.

use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::arguments::Arguments;

/// Name of the filter that makes a tuple of a list.
pub(super) const TUPLE: &str = "as_tuple";

#[derive(Debug)]
struct Tuple(Vec<Value>);

impl Object for Tuple {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}

/// Teaches an environment tuples, and the filters that give some.
pub(super) fn teach(environment: &mut Environment<'_>) {
    environment.add_filter(TUPLE, as_tuple);
    environment.add_filter("items", items);
    environment.add_filter("dictsort", sorted);
}

/// A tuple of these values.
pub(super) fn tuple(items: impl IntoIterator<Item = Value>) -> Value {
    Value::from_object(Tuple(items.into_iter().collect()))
}

/// The filter that makes a tuple of a list.
fn as_tuple(list: &Value) -> Result<Value, Error> {
    list.try_iter().map(tuple)
}

pub(super) fn is_tuple(value: &Value) -> bool {
    value.downcast_object_ref::<Tuple>().is_some()
}

/// Pairs of a mapping. What does not exist has none.
pub(super) fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => return Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => {}
        _ => return Err(Error::new(ErrorKind::InvalidOperation, "only a mapping has items")),
    }
    let mut pairs = Vec::new();
    for key in value.try_iter()? {
        let item = value.get_item(&key)?;
        pairs.push(tuple([key, item]));
    }
    Ok(pairs.into())
}

/// Pairs of a mapping in order.
fn sorted(value: &Value, Rest(given): Rest<Value>) -> Result<Value, Error> {
    let names = ["case_sensitive", "by", "reverse"];
    let arguments = Arguments::of(&given, &names)?;
    let named = (0..names.len()).filter_map(|at| Some((names[at], arguments.value(at)?.clone())));
    let pairs = minijinja::filters::dictsort(value, named.collect::<Kwargs>())?;
    let pairs: Result<Vec<Value>, Error> = pairs.try_iter()?.map(|pair| as_tuple(&pair)).collect();
    pairs.map(Value::from)
}
