//! Macros that take any arguments, as Jinja2's do where they name `varargs` or `kwargs`.

use std::sync::Arc;

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::tuples::tuple;

/// Name of the function [`opened`].
pub(super) const OPENED: &str = "opened_macro";

/// What gathers a call's other arguments, by place and by name, with what it is where there are none.
pub(super) const GATHERED: [(&str, &str); 2] = [("varargs", "[]"), ("kwargs", "{}")];

/// A macro whose last parameters are these of [`GATHERED`], as one that takes any arguments.
pub(super) fn opened(own: Value, Rest(gathered): Rest<String>) -> Result<Value, Error> {
    let mut parameters: Vec<Value> = own.get_attr("arguments")?.try_iter()?.collect();
    parameters.truncate(parameters.len().saturating_sub(gathered.len()));
    let gathers = GATHERED.map(|(name, _)| gathered.iter().any(|one| one == name));
    Ok(Value::from_object(Opened { own, parameters, gathers }))
}

#[derive(Debug)]
struct Opened {
    own: Value,
    /// Names of the parameters without those of [`GATHERED`].
    parameters: Vec<Value>,
    gathers: [bool; 2],
}

impl Object for Opened {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "arguments" => Some(self.parameters.clone().into()),
            name => self.own.get_attr(name).ok().filter(|value| !value.is_undefined()),
        }
    }

    fn call(self: &Arc<Self>, state: &State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        let (given, named): (&[Value], Kwargs) = from_args(arguments)?;
        let (taken, more) = given.split_at(self.parameters.len().min(given.len()));
        let [gathers_more, gathers_named] = self.gathers;
        if !more.is_empty() && !gathers_more {
            return Err(ErrorKind::TooManyArguments.into());
        }
        let (mut known, mut other) = (Vec::new(), Vec::new());
        for name in named.args() {
            let is_known =
                name == "caller" || self.parameters.iter().any(|one| one.as_str() == Some(name));
            if !is_known && !gathers_named {
                let problem = format!("unknown keyword argument `{name}`");
                return Err(Error::new(ErrorKind::TooManyArguments, problem));
            }
            let list = if is_known { &mut known } else { &mut other };
            list.push((name, named.get::<Value>(name)?));
        }
        if gathers_more {
            known.push(("varargs", tuple(more.iter().cloned())));
        }
        if gathers_named {
            known.push(("kwargs", other.into_iter().collect::<Value>()));
        }
        let mut all = taken.to_vec();
        all.push(known.into_iter().collect::<Kwargs>().into());
        self.own.call(state, &all)
    }
}
