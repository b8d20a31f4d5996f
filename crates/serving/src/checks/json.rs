//! JSON read strictly: keys that are there twice are reported, not overwritten.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// A value and the keys that are there twice.
pub(crate) fn parse(text: &str) -> serde_json::Result<(Value, Vec<String>)> {
    let twice = RefCell::new(Vec::new());
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = Strict(&twice).deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok((value, twice.into_inner()))
}

struct Strict<'a>(&'a RefCell<Vec<String>>);

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Methods for what holds no keys.
macro_rules! scalars {
    ($($method:ident: $type:ty,)*) => {$(
        fn $method<E>(self, value: $type) -> Result<Value, E> {
            Ok(Value::from(value))
        }
    )*};
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    scalars! {
        visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str,
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        while let Some(item) = items.next_element_seed(Strict(self.0))? {
            out.push(item);
        }
        Ok(Value::Array(out))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(Strict(self.0))?;
            if out.insert(key.clone(), value).is_some() {
                self.0.borrow_mut().push(key);
            }
        }
        Ok(Value::Object(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_there_twice_are_named_at_any_depth() {
        let (value, twice) =
            parse(r#"{"a": 1, "b": {"c": [true, null], "c": 2.5}, "a": "x"}"#).expect("JSON");
        assert_eq!(twice, ["c", "a"]);
        assert_eq!(value["a"], "x");
        assert!(parse("{} x").is_err() && parse(r#"{"a": NaN}"#).is_err());
    }
}
