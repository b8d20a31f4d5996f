//! Records of `metrics.jsonl` as named scalars, so that trackers show what the file holds.

use serde_json::Value;

/// Scalars of a record under `group/`: numbers keep their key; the entries of a list get their
/// place, `acceptance_by_delay: [..]` becomes `group/acceptance_1`, `group/acceptance_2`, ...
/// A figure inside of another one's object has the object's key in its name: `group/as_trained/loss`.
/// Numbers that are not finite are null in a record and left out.
pub fn scalars(group: &str, record: &Value) -> Vec<(String, f64)> {
    let mut scalars = Vec::new();
    for (key, value) in record.as_object().into_iter().flatten() {
        match value {
            // Trackers have an axis for steps.
            Value::Number(number) if key != "step" => {
                scalars.extend(number.as_f64().map(|value| (format!("{group}/{key}"), value)));
            }
            Value::Object(_) => {
                let of_object = self::scalars(&format!("{group}/{key}"), value);
                scalars.extend(of_object);
            }
            Value::Array(values) => {
                let key = key.split_once("_by_").map_or(key.as_str(), |(name, _)| name);
                let numbered = values.iter().enumerate();
                scalars.extend(numbered.filter_map(|(index, value)| {
                    Some((format!("{group}/{key}_{}", index + 1), value.as_f64()?))
                }));
            }
            _ => {}
        }
    }
    scalars
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_are_numbered_from_one_and_nulls_left_out() {
        let record = json!({
            "step": 3, "loss": 0.5, "grad_norm": f64::NAN, "name": "x",
            "acceptance_by_delay": [0.25, 0.5], "learning_rate": 1e-4,
            "as_trained": { "loss": 0.75 }, "measured_against": { "loss": "text" }
        });
        let expected = [
            ("train/loss", 0.5),
            ("train/acceptance_1", 0.25),
            ("train/acceptance_2", 0.5),
            ("train/learning_rate", 1e-4),
            ("train/as_trained/loss", 0.75),
        ];
        let expected: Vec<_> = expected.map(|(name, value)| (name.to_owned(), value)).into();
        assert_eq!(scalars("train", &record), expected);
    }
}
