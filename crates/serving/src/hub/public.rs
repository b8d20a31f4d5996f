//! What of a manifest goes to others: nothing that tells of the machine that it was made on.

use serde_json::Value;

use crate::Manifest;
use crate::hub_name::{HUB_NAME, is_hub_name};
use crate::shell::quoted;

impl Manifest {
    /// The manifest without paths of this machine: a model of the hub keeps its name, of everything
    /// else the last part of its path stays.
    #[must_use]
    pub fn public(&self) -> Self {
        let mut public = self.clone();
        public_name(&self.target.name).clone_into(&mut public.target.name);
        let loaded = format!(" {} ", quoted(in_command(&self.target.name)));
        for command in public.serve.values_mut() {
            // Earlier versions did not quote names.
            for name in [quoted(&self.target.name), self.target.name.clone()] {
                *command = command.replace(&format!(" {name} "), &loaded);
            }
        }
        if let Some(evaluation) = &mut public.provenance.evaluation {
            // As the card names them, whether the path was whole or not.
            if let Some(Value::String(prompts)) = evaluation.get_mut("prompts") {
                *prompts = last_part(prompts).to_owned();
            }
            each_text(evaluation, &without_path);
        }
        public
    }
}

/// What a command of the card loads: no path of this machine, but for a file's name.
fn in_command(name: &str) -> &str {
    if is_hub_name(name) || name.to_ascii_lowercase().ends_with(".gguf") {
        public_name(name)
    } else {
        HUB_NAME
    }
}

/// A name that tells nothing about the machine that it was made on.
fn public_name(name: &str) -> &str {
    if is_hub_name(name) { name } else { last_part(name) }
}

fn last_part(path: &str) -> &str {
    let separators = ['/', '\\'];
    path.trim_end_matches(separators).rsplit(separators).next().unwrap_or(path)
}

/// The last part of a text that is a path on this machine.
fn without_path(text: &mut String) {
    let starts = ["/", "./", "../", "~", "\\\\", ".\\", "..\\"];
    let has_drive =
        matches!(text.as_bytes(), [drive, b':', b'/' | b'\\', ..] if drive.is_ascii_alphabetic());
    if has_drive || starts.iter().any(|start| text.starts_with(start)) {
        *text = last_part(text).to_owned();
    }
}

fn each_text(value: &mut Value, change: &dyn Fn(&mut String)) {
    match value {
        Value::String(text) => change(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_text(item, change)),
        Value::Object(map) => map.values_mut().for_each(|item| each_text(item, change)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hub_names_are_told() {
        assert!(is_hub_name("Qwen/Qwen3-8B"));
        for path in ["/data/models/x", "models/x.gguf", "./a", "a", "a/b/c", "../b"] {
            assert!(!is_hub_name(path), "{path}");
        }
        assert_eq!(public_name("/data/models/smollm/"), "smollm");
        assert_eq!(public_name("C:\\models\\smollm"), "smollm");
        assert_eq!(in_command("/data/models/smollm"), HUB_NAME);
        assert_eq!(in_command("/data/models/smollm.Q4_1.gguf"), "smollm.Q4_1.gguf");
        assert_eq!(in_command("Qwen/Qwen3-8B"), "Qwen/Qwen3-8B");
    }

    #[test]
    fn paths_of_this_machine_keep_their_last_part() {
        for (text, public) in [
            ("/home/me/drafts/mine", "mine"),
            ("../drafts/mine/", "mine"),
            ("~/drafts/mine", "mine"),
            ("D:\\drafts\\mine", "mine"),
            ("D:/drafts/mine", "mine"),
            ("chain 4", "chain 4"),
            ("org/name", "org/name"),
            ("tree-static 3,4", "tree-static 3,4"),
            ("", ""),
        ] {
            let mut text = text.to_owned();
            without_path(&mut text);
            assert_eq!(text, public);
        }
    }
}
