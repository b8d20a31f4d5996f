//! Folders of tokenizers, file by file.

use super::*;
use crate::test_support::assert_refused;

/// A folder with the tokenizer of `<s>`, `</s>`, `a` and `b`, and other files.
fn folder(after: &Value, files: &[(&str, &str)]) -> tempfile::TempDir {
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        })
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<s>"), special(1, "</s>")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": after, "decoder": null,
        "model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3}, "merges": []}
    });
    let folder = tempfile::tempdir().expect("folder");
    let tokenizer = ("tokenizer.json", tokenizer.to_string());
    let files = files.iter().map(|(name, text)| (*name, (*text).to_owned()));
    for (name, text) in files.chain([tokenizer]) {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, text).expect("written");
    }
    folder
}

/// A post-processor that puts these tokens around a text.
fn around(before: &[&str], after: &[&str]) -> Value {
    let special = |token: &&str| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let single: Vec<Value> =
        before.iter().map(special).chain([text("A")]).chain(after.iter().map(special)).collect();
    let known = |id: u32, token: &str| json!({"id": token, "ids": [id], "tokens": [token]});
    json!({
        "type": "TemplateProcessing", "single": single, "pair": [text("A"), text("B")],
        "special_tokens": {"<s>": known(0, "<s>"), "</s>": known(1, "</s>")}
    })
}

fn read(after: &Value, files: &[(&str, &str)]) -> Result<TextTokenizer> {
    TextTokenizer::from_folder(folder(after, files).path())
}

/// What the template of a folder with these files prints, without and with tools.
fn printed(files: &[(&str, &str)]) -> Option<[String; 2]> {
    let tokenizer = read(&Value::Null, files).expect("a tokenizer");
    let template = tokenizer.chat_template()?;
    let text = |tools| template.render_messages(&[], tools, false).expect("text");
    Some([text(None), text(Some(&json!([])))])
}

#[test]
fn templates_stand_in_one_of_several_files() {
    let (own, config, older, for_tools) = (
        ("chat_template.jinja", "own"),
        ("tokenizer_config.json", r#"{"chat_template": "config"}"#),
        ("chat_template.json", r#"{"chat_template": "older"}"#),
        ("additional_chat_templates/tool_use.jinja", "tools"),
    );
    let both = |text: &str| Some([text.to_owned(), text.to_owned()]);
    assert_eq!(printed(&[own, config, older]), both("own"));
    assert_eq!(printed(&[config, older]), both("config"));
    assert_eq!(printed(&[("tokenizer_config.json", "{}"), older]), both("older"));
    assert_eq!(printed(&[older]), both("older"));
    assert_eq!(printed(&[]), None);
    assert_eq!(printed(&[own, for_tools]), Some(["own".to_owned(), "tools".to_owned()]));
    let named = r#"{"chat_template": [{"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "plain"}]}"#;
    let named = printed(&[("tokenizer_config.json", named)]);
    assert_eq!(named, Some(["plain".to_owned(), "tools".to_owned()]));
}

#[test]
fn files_that_are_no_objects_hold_no_template_and_broken_ones_are_named() {
    for text in ["[]", "3", "null", r#"{"chat_template": 3, "bos_token": []}"#] {
        for name in ["tokenizer_config.json", "chat_template.json"] {
            assert_eq!(printed(&[(name, text)]), None, "{name}: {text}");
        }
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        assert_refused(read(&Value::Null, &[(name, "{")]), &[name]);
    }
}

#[test]
fn a_template_that_cannot_be_read_is_not_taken_for_absent() {
    let folder = tempfile::tempdir().expect("folder");
    let name = "chat_template.jinja";
    std::fs::write(folder.path().join(name), [0xff, 0xfe]).expect("write");
    assert_refused(templates(folder.path(), &Value::Null), &[name]);
    assert_eq!(optional_json(&folder.path().join("absent.json")).expect("absent"), Value::Null);
}

#[test]
fn a_prompt_begins_with_the_start_token_that_the_files_name() -> Result<()> {
    let config = ("tokenizer_config.json", r#"{"add_bos_token": true, "bos_token": "<s>"}"#);
    let adding = read(&Value::Null, &[config])?;
    assert_eq!(adding.encode_prompt("ab", None)?, [0, 2, 3]);
    assert_eq!(adding.encode_prompt("<s>ab", None)?, [0, 2, 3]);
    // The tokenizer's own wins over the model's, which counts where the tokenizer names none.
    assert_eq!(adding.encode_prompt("ab", Some(1))?, [0, 2, 3]);
    let nameless = read(&Value::Null, &[("tokenizer_config.json", r#"{"add_bos_token": true}"#)])?;
    assert_eq!(nameless.encode_prompt("ab", Some(1))?, [1, 2, 3]);
    let config = ("tokenizer_config.json", r#"{"bos_token": {"content": "<s>"}}"#);
    for (after, begins) in [
        (around(&["<s>"], &[]), true),
        (around(&["<s>"], &["</s>"]), true),
        (around(&[], &["</s>"]), false),
        (Value::Null, false),
    ] {
        let wanted: &[u32] = if begins { &[0, 2, 3] } else { &[2, 3] };
        assert_eq!(read(&after, &[config])?.encode_prompt("ab", None)?, wanted, "{after}");
    }
    Ok(())
}

#[test]
fn a_tokenizer_is_written_with_the_expressions_of_its_files() -> Result<()> {
    let read = folder(&Value::Null, &[]);
    let path = read.path().join("tokenizer.json");
    let mut document = optional_json(&path)?;
    document["pre_tokenizer"] = json!({
        "type": "Split", "pattern": {"Regex": r"(?=(\d{3})+(?!\d))"}, "behavior": "Isolated",
        "invert": false
    });
    std::fs::write(&path, document.to_string()).expect("written");
    let tokenizer = TextTokenizer::from_folder(read.path())?;
    let used = serde_json::to_value(tokenizer.inner.get_pre_tokenizer()).expect("steps");
    assert_ne!(used, document["pre_tokenizer"]);
    let own = Tokenizer::from_file(&path).and_then(|own| own.to_string(false)).expect("written");
    assert_eq!(tokenizer.fingerprint()?, blake3::hash(own.as_bytes()).to_hex()[..16].to_owned());
    let saved = tempfile::tempdir().expect("folder");
    tokenizer.save(saved.path())?;
    assert_eq!(side_files::read_text_if_there(&saved.path().join("tokenizer.json"))?, Some(own));
    Ok(())
}

#[cfg(unix)]
#[test]
fn what_never_ends_is_refused_wherever_a_folder_holds_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let link = |name: &str| {
        std::os::unix::fs::symlink("/dev/zero", folder.path().join(name)).expect("a link");
    };
    link("tokenizer.json");
    let Err(error) = TextTokenizer::from_folder(folder.path()) else { panic!("accepted") };
    let text = error.to_string();
    assert!(text.ends_with("tokenizer.json: not a regular file"), "{text}");
    let config = folder.path().join("config.json");
    let keys = r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}"#;
    std::fs::write(&config, keys).expect("written");
    assert!(crate::config::TargetConfig::from_file(&config).is_ok());
    link("generation_config.json");
    let text = crate::config::TargetConfig::from_file(&config).expect_err("refused").to_string();
    assert!(text.ends_with("generation_config.json: not a regular file"), "{text}");
}
