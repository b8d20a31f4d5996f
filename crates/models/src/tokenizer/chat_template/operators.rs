//! Python's operators, where the library's give other values.

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::{repr, tuples};

/// Names of the filters that take the places of `%`, `//`, `**`, of a slice with a step, and of what a loop goes over.
pub(super) const MODULO: &str = "modulo";
pub(super) const FLOORED: &str = "floored";
pub(super) const POWER: &str = "power";
pub(super) const SLICED: &str = "sliced";
pub(super) const ITEMS: &str = "items_of_loop";

/// Teaches an environment the operators.
pub(super) fn teach(environment: &mut Environment<'_>) {
    environment.add_filter(MODULO, modulo);
    environment.add_filter(FLOORED, floored);
    environment.add_filter(POWER, power);
    environment.add_filter(SLICED, sliced);
    environment.add_filter(ITEMS, items_of_loop);
}

fn wrong(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// Python's `%`: it formats a text, and of numbers it gives what division leaves, with the divisor's sign.
fn modulo(value: &Value, arguments: Rest<Value>) -> Result<Value, Error> {
    if value.as_str().is_some() {
        let arguments = match arguments.as_slice() {
            [one] if tuples::is_tuple(one) => Rest(one.try_iter()?.collect()),
            _ => arguments,
        };
        return repr::format(value, arguments).map(Value::from);
    }
    let [divisor] = arguments.as_slice() else {
        return Err(wrong("only a text takes several values after `%`"));
    };
    if let (Some(whole), Some(by)) = (integer(value), integer(divisor)) {
        let left = whole.checked_rem(by).ok_or_else(|| wrong("`%` by zero"))?;
        let has_sign = left == 0 || (left < 0) == (by < 0);
        let left = if has_sign { left } else { left + by };
        return Ok(left.into());
    }
    let (Some(whole), Some(by)) = (number(value), number(divisor)) else {
        return Err(wrong("`%` takes a text and values, or two numbers"));
    };
    let left = whole % by;
    if by == 0.0 {
        return Err(wrong("`%` by zero"));
    }
    let has_sign = left == 0.0 || (left < 0.0) == (by < 0.0);
    let left = if has_sign { left.abs().copysign(by) } else { left + by };
    Ok(left.into())
}

/// Python's `//`: the next whole number below what division gives.
fn floored(value: &Value, divisor: &Value) -> Result<Value, Error> {
    if let (Some(whole), Some(by)) = (integer(value), integer(divisor)) {
        let times = whole.checked_div(by).ok_or_else(|| wrong("`//` by zero"))?;
        let is_cut = times * by != whole && (whole < 0) != (by < 0);
        return Ok((times - i128::from(is_cut)).into());
    }
    let (Some(whole), Some(by)) = (number(value), number(divisor)) else {
        return Err(wrong("`//` takes two numbers"));
    };
    if by == 0.0 {
        return Err(wrong("`//` by zero"));
    }
    // What is left is taken off first: a quotient that is rounded may be the next whole number.
    let left = whole % by;
    let times = (whole - left) / by;
    let times = if left != 0.0 && (left < 0.0) != (by < 0.0) { times - 1.0 } else { times };
    let rounded = times.round();
    Ok((if rounded == 0.0 { 0.0_f64.copysign(whole / by) } else { rounded }).into())
}

/// Python's `**`: a power below one of a whole number is a fraction.
fn power(value: &Value, exponent: &Value) -> Result<Value, Error> {
    let wholes = integer(value).zip(integer(exponent));
    if let Some((base, exponent)) = wholes.filter(|(_, exponent)| *exponent >= 0) {
        let power = u32::try_from(exponent).ok().and_then(|exponent| base.checked_pow(exponent));
        return power.map(Value::from).ok_or_else(|| wrong("`**` gives too large a number"));
    }
    let (Some(base), Some(exponent)) = (number(value), number(exponent)) else {
        return Err(wrong("`**` takes two numbers"));
    };
    let power = base.powf(exponent);
    let is_defined = power.is_finite() || !base.is_finite() || !exponent.is_finite();
    is_defined.then(|| power.into()).ok_or_else(|| wrong("`**` gives no number"))
}

/// A number without a fraction; to Python truth values are such.
fn integer(value: &Value) -> Option<i128> {
    let is_integer = value.is_integer() || value.kind() == ValueKind::Bool;
    is_integer.then(|| i128::try_from(value.clone()).ok()).flatten()
}

/// Any number.
fn number(value: &Value) -> Option<f64> {
    f64::try_from(value.clone()).ok().or_else(|| integer(value).map(|whole| whole as f64))
}

/// Python's `value[start:stop:step]`.
fn sliced(
    value: &Value,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(wrong("a slice takes no steps of 0"));
    }
    if let Some(text) = value.as_str() {
        let characters: Vec<char> = text.chars().collect();
        let cut = places(characters.len(), [start, stop], step).map(|at| characters[at]);
        return Ok(cut.collect::<String>().into());
    }
    let items: Vec<Value> = match value.kind() {
        ValueKind::Undefined | ValueKind::None => Vec::new(),
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.collect(),
        _ => return Err(wrong("only texts and lists have slices")),
    };
    let cut = places(items.len(), [start, stop], step).map(|at| items[at].clone());
    Ok(if tuples::is_tuple(value) { tuples::tuple(cut) } else { cut.collect() })
}

/// The places of a slice among so many.
fn places(
    length: usize,
    [start, stop]: [Option<i64>; 2],
    step: i64,
) -> impl Iterator<Item = usize> {
    let length = length as i64;
    // A slice to the left ends before the first place.
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    let bound = |at: i64| {
        let at = if at < 0 { at.saturating_add(length) } else { at };
        at.clamp(low, high)
    };
    let (start, stop) = (start.map_or(first, bound), stop.map_or(last, bound));
    let distance = if step > 0 { stop - start } else { start - stop };
    let count = u64::try_from(distance).unwrap_or(0).div_ceil(step.unsigned_abs());
    (0..count).map(move |at| (start + at as i64 * step) as usize)
}

/// What a loop goes over. Of a text that are its characters, whose number a loop then knows.
fn items_of_loop(value: &Value) -> Value {
    match value.as_str() {
        Some(text) => text.chars().map(Value::from).collect(),
        None => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_slices_are_those_of_python() {
        for (length, bounds, step, wanted) in [
            (0, [None, None], -1, &[][..]),
            (3, [None, None], -1, &[2, 1, 0]),
            (5, [Some(3), Some(0)], -2, &[3, 1]),
            (3, [Some(2), Some(0)], -1, &[2, 1]),
            (3, [None, Some(-3)], -1, &[2, 1]),
            (3, [Some(-9), None], -1, &[]),
            (3, [None, Some(-9)], -1, &[2, 1, 0]),
            (3, [Some(1), Some(2)], -1, &[]),
            (6, [Some(-4), Some(-1)], 2, &[2, 4]),
            (3, [Some(i64::MIN), Some(i64::MAX)], i64::MAX, &[0]),
            (3, [Some(i64::MAX), Some(i64::MIN)], i64::MIN, &[2]),
        ] {
            let found: Vec<usize> = places(length, bounds, step).collect();
            assert_eq!(found, wanted, "{length} {bounds:?} {step}");
        }
    }
}
