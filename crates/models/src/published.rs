//! Shapes of published targets, for questions about a target that is not on this machine.

use serde_json::Value;

use crate::config::TargetConfig;

/// Published configuration keys by hub name: the targets of the ready configurations, and larger ones that plans are made of.
const SHAPES: &str = include_str!("target_shapes.json");

/// The configuration of a published target `org/name`; `None` for others.
pub fn published_config(name: &str) -> Option<TargetConfig> {
    let shapes: Value = serde_json::from_str(SHAPES).ok()?;
    TargetConfig::from_json(shapes.get(name)?).ok()
}

/// Hub names of the targets whose shapes are known.
pub fn published_names() -> Vec<String> {
    let shapes: Value = serde_json::from_str(SHAPES).unwrap_or_default();
    shapes.as_object().map(|shapes| shapes.keys().cloned().collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_a_valid_configuration() {
        let names = published_names();
        assert!(names.len() >= 6, "{names:?}");
        for name in names {
            let shapes: Value = serde_json::from_str(SHAPES).expect("JSON");
            let config = TargetConfig::from_json(&shapes[&name]);
            assert!(config.is_ok(), "{name}: {:?}", config.err());
            assert_eq!(published_config(&name), config.ok());
        }
        assert_eq!(published_config("nobody/nothing"), None);
    }
}
