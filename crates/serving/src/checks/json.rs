//! JSON read strictly: keys that are there twice are reported, not overwritten.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// A value and the keys that are there twice.
///
/// # Errors
/// - the text is no JSON
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

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
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
