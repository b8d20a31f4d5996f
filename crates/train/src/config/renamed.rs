//! Keys that stood elsewhere in earlier versions: refused in files and arguments, by their new names,
//! and read in what earlier versions recorded.

use serde_json::{Map, Value, json};

use super::DraftConfig;
use crate::method::Method;
use crate::objective::TeacherConfig;

/// Whether the teacher's section has a key.
fn is_teachers(key: &str) -> bool {
    json!(TeacherConfig::default()).get(key).is_some()
}

/// Where a dotted key of an earlier version stands now.
pub fn renamed(key: &str) -> Option<String> {
    let (section, rest) = key.split_once('.')?;
    if !["draft", "objective"].contains(&section) {
        return None;
    }
    let (owner, name) = rest.split_once('.').unwrap_or(("", rest));
    let mut methods = Method::all().filter(|method| owner.is_empty() || method.name() == owner);
    if owner.is_empty() && section == "objective" && is_teachers(name) {
        return Some(format!("teacher.{name}"));
    }
    let is_old = section == "objective" || !owner.is_empty();
    (is_old && methods.any(|method| method.knows(name))).then(|| format!("draft.{name}"))
}

/// Brings `draft` and `objective` of a record of an earlier version to `draft` and `teacher`, if they are
/// there. Sections of methods that were not chosen held nothing but defaults.
pub fn upgrade(record: &mut Map<String, Value>) {
    let Some(Value::Object(objective)) = record.get("objective").cloned() else { return };
    let draft = record.get("draft").and_then(Value::as_object).cloned().unwrap_or_default();
    let name = draft.get("method").and_then(Value::as_str);
    let Some(method) = name.map_or(Some(Method::first()), Method::named) else { return };
    let (mut teacher, mut flat, mut own) = (Map::new(), Map::new(), Map::new());
    for (key, value) in draft.into_iter().chain(objective) {
        match value {
            Value::Object(inner) if key == method.name() => own.extend(inner),
            _ if is_teachers(&key) => drop(teacher.insert(key, value)),
            _ if key == "method" || key == "from" || method.knows(&key) => {
                drop(flat.insert(key, value));
            }
            _ => {}
        }
    }
    flat.extend(own);
    if let Ok(draft) = serde_json::from_value::<DraftConfig>(Value::Object(flat))
        && let Ok(teacher) = serde_json::from_value::<TeacherConfig>(Value::Object(teacher))
    {
        record.shift_remove("objective");
        record.insert("draft".into(), json!(draft));
        record.insert("teacher".into(), json!(teacher));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_earlier_key_has_a_new_name_or_none() {
        for (old, new) in [
            ("objective.top_k", "teacher.top_k"),
            ("objective.soft_weight", "draft.soft_weight"),
            ("objective.eagle3.ttt_steps", "draft.ttt_steps"),
            ("draft.eagle3.hidden_size", "draft.hidden_size"),
        ] {
            assert_eq!(renamed(old).as_deref(), Some(new), "{old}");
        }
        for key in ["draft.gamma", "objective.eagle3.gamma", "objective.none", "train.steps"] {
            assert_eq!(renamed(key), None, "{key}");
        }
    }

    #[test]
    fn records_of_earlier_versions_come_to_the_same_configuration() {
        let mut record = json!({
            "draft": {"method": "eagle3", "compat": null, "gamma": null, "from": "a",
                      "eagle3": {"hidden_size": 64}},
            "objective": {"soft_weight": 0.9, "top_k": 8, "eagle3": {"ttt_steps": 3}},
        });
        let record = record.as_object_mut().expect("a map");
        upgrade(record);
        let draft = &record["draft"];
        assert_eq!((&draft["hidden_size"], &draft["ttt_steps"]), (&64.into(), &3.into()));
        assert_eq!((&draft["from"], draft.get("gamma")), (&"a".into(), None));
        assert_eq!(record["teacher"]["top_k"], 8);
        assert!(!record.contains_key("objective"));
        let before = record.clone();
        upgrade(record);
        assert_eq!(*record, before);
    }
}
