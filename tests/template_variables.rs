//! Variables of the chat template, through the commands that render one.

use std::io::Write;
use std::process::Stdio;

use ::longdraft::{AnswerOptions, Message, Session, SessionOptions, Target, template_variables};
use serde_json::{Value, json};

use crate::support::files::read_json;
use crate::support::processes::start_kept;
use crate::support::{Workshop, fail, last_json, longdraft, run, stderr, succeed};

/// Shows in every text and in every prompt that thinking is off, and refuses any effort.
const TEMPLATE: &str = "{% if effort is defined %}{{ raise_exception('effort ' ~ effort) }}{% endif %}\
{% if enable_thinking is false %}<off>{% endif %}\
{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<shut>{% endif %}{% endif %}";

const OFF: [&str; 2] = ["--chat-template-kwargs", r#"{"enable_thinking": false}"#];
const EFFORT: [&str; 2] = ["--chat-template-kwargs", r#"{"effort": "low"}"#];

fn shop() -> Workshop {
    Workshop::with_chat(TEMPLATE)
}

/// A conversation with variables of its own, if there are some.
fn row(own: &Value) -> Value {
    let turns = json!([
        { "role": "user", "content": "hi" }, { "role": "assistant", "content": "ho" },
    ]);
    if own.is_null() {
        return json!({ "messages": turns });
    }
    json!({ "messages": turns, "chat_template_kwargs": own })
}

#[test]
fn rows_are_read_with_their_own_variables_and_those_of_the_option() {
    let shop = shop();
    let target = shop.target();
    let rows = [row(&Value::Null), row(&json!({ "enable_thinking": true })), row(&json!(3))];
    let path = shop.write_rows("chat.jsonl", &rows);
    let inspect = ["data", "inspect", &path, "--target", &target];
    let text = succeed(&[&inspect[..], &OFF].concat());
    assert!(text.contains("<off><user>hi</s><assistant>[[ho</s>]]"), "{text}");
    assert_eq!(text.matches("<off>").count(), 1, "{text}");
    assert!(text.contains("`chat_template_kwargs` is not an object of variables"), "{text}");
    assert!(!succeed(&inspect).contains("<off>"));
    // Shards that were made with others are not gone on with.
    let good = shop.write_rows("good.jsonl", &rows[..2]);
    let shards = shop.path("shards");
    let prepare = ["data", "prepare", &good, "--target", &target, "--output", &shards];
    succeed(&[&prepare[..], &OFF].concat());
    succeed(&[&prepare[..], &OFF].concat());
    let text = fail(&prepare, 1);
    assert!(text.contains("another recipe (chat_template differ)"), "{text}");
}

#[test]
fn a_configuration_has_variables_that_options_go_over() {
    let shop = shop();
    let (config, good) =
        (shop.config(), shop.write_rows("good.jsonl", &vec![row(&Value::Null); 20]));
    let data = format!("data.train=[{{path: {good}}}]");
    let off = "data.chat_template_kwargs.enable_thinking=false";
    let inspect = ["data", "inspect", &config, &data];
    assert!(!succeed(&inspect).contains("<off>"));
    assert!(succeed(&[&inspect[..], &[off]].concat()).contains("<off>"));
    let on = ["--chat-template-kwargs", r#"{"enable_thinking": true}"#];
    assert!(!succeed(&[&inspect[..], &[off], &on].concat()).contains("<off>"));
    // Training reads rows so, too.
    let train = ["train", &config, &data, "data.held_out_rows=0", "train.steps=1"];
    let output = run(&[&train[..], &["data.chat_template_kwargs.effort=low"]].concat());
    assert!(!output.status.success() && stderr(&output).contains("effort low"));
    let output = run(&[&train[..], &["data.chat_template_kwargs.messages=[]"]].concat());
    let told = stderr(&output);
    assert!(!output.status.success() && told.contains("`messages` is set for every"), "{told}");
    succeed(&[&train[..], &[off]].concat());
    // Rows are tried with the variables of each stage that reads them.
    let text = std::fs::read_to_string(&config).expect("a configuration");
    let stages =
        "stages:\n- name: plain\n- name: tried\n  data: {chat_template_kwargs: {effort: low}}\n";
    let text = text.replace("rows.jsonl", "good.jsonl") + stages;
    let curriculum = shop.path("curriculum.yaml");
    std::fs::write(&curriculum, text).expect("written");
    let output = run(&["config", "check", &curriculum]);
    assert!(!output.status.success() && stderr(&output).contains("effort low"));
}

#[test]
fn every_command_that_asks_a_target_gives_its_template_the_variables() {
    let shop = shop();
    let target = shop.target();
    let prompts = shop.write_rows("prompts.jsonl", &[json!({ "prompt": "a" })]);
    let answers = shop.path("answers.jsonl");
    let chat = ["generate", "--target", &target, "--no-draft", "--max-tokens", "4", "--chat"];
    let generate = [&chat[..], &["--prompt", "a"]].concat();
    let eval = ["eval", "decode", "--target", &target, "--prompts", &prompts, "--runs", "1"];
    let eval = [&eval[..], &["--max-tokens", "4"]].concat();
    let with_chat = [&eval[..], &["--chat"]].concat();
    let regenerate = ["data", "regenerate", &prompts, "--target", &target, "--output", &answers];
    for command in [&generate[..], &with_chat[..], &regenerate[..]] {
        let output = run(&[command, &EFFORT].concat());
        let told = stderr(&output);
        assert!(!output.status.success() && told.contains("effort low"), "{told}");
    }
    succeed(&[&generate[..], &OFF].concat());
    // A conversation as well.
    let mut command = longdraft(&[&chat[..], &EFFORT].concat());
    let mut child = start_kept(command.stdin(Stdio::piped()));
    child.stdin.take().expect("stdin").write_all(b"hello\n").expect("text");
    let output = child.wait_with_output().expect("the binary ends");
    assert!(!output.status.success() && stderr(&output).contains("effort low"));
    // Nothing reads them where a text is continued.
    let plain = ["generate", "--target", &target, "--prompt", "a"];
    for command in [&plain[..], &eval[..]] {
        let text = fail(&[command, &OFF].concat(), 2);
        assert!(text.contains("no chat template") && text.contains("add --chat"), "{text}");
    }
    // Variables that a prompt brings itself win over the option, and need a template as well.
    let own = json!({ "prompt": "a", "chat_template_kwargs": { "effort": "high" } });
    shop.write_rows("prompts.jsonl", &[own]);
    let output = run(&[&with_chat[..], &EFFORT].concat());
    let told = stderr(&output);
    assert!(!output.status.success() && told.contains("effort high"), "{told}");
    let text = fail(&eval, 2);
    assert!(text.contains("prompts.jsonl:1: `chat_template_kwargs`"), "{text}");
    assert!(text.contains("add --chat"), "{text}");
    for (wrong, says) in [
        ("enable_thinking=false", "give a JSON object in quotes"),
        ("[1]", "give a JSON object in quotes"),
        (r#"{"messages": []}"#, "`messages` is set for every conversation: leave it out"),
    ] {
        let text = fail(&[&generate[..], &["--chat-template-kwargs", wrong]].concat(), 2);
        assert!(text.contains(says), "{text}");
    }
    std::fs::remove_file(shop.target.join("tokenizer_config.json")).expect("removed");
    let text = fail(&[&regenerate[..], &OFF].concat(), 2);
    assert!(text.contains("no chat template that reads variables"), "{text}");
}

#[test]
fn measurements_say_with_which_variables_prompts_were_asked() {
    let shop = shop();
    let (target, output) = (shop.target(), shop.path("measured"));
    let prompts = shop.write_rows("prompts.jsonl", &[json!({ "prompt": "a" })]);
    let eval = ["eval", "decode", "--target", &target, "--prompts", &prompts, "--runs", "1"];
    let eval = [&eval[..], &["--max-tokens", "4", "--chat", "--output", &output]].concat();
    let record = |more: &[&str]| {
        succeed(&[&eval[..], more].concat());
        read_json(format!("{output}/decode.json"))
    };
    assert_eq!(record(&OFF)["chat_template_kwargs"], json!({ "enable_thinking": false }));
    assert_eq!(record(&[]).get("chat_template_kwargs"), None);
}

#[test]
fn regenerated_rows_say_with_which_variables_they_were_answered() {
    let shop = shop();
    let (target, output) = (shop.target(), shop.path("answers.jsonl"));
    let on = json!({ "enable_thinking": true });
    let rows = [json!({ "prompt": "a" }), json!({ "prompt": "b", "chat_template_kwargs": on })];
    let prompts = shop.write_rows("prompts.jsonl", &rows);
    let command = ["data", "regenerate", &prompts, "--target", &target, "--max-tokens", "12"];
    let command = [&command[..], &["--json", "--output", &output]].concat();
    let with_off = [&command[..], &OFF].concat();
    assert_eq!(last_json(&succeed(&with_off))["success"], 2);
    let written = std::fs::read_to_string(&output).expect("answers");
    let lines: Vec<Value> =
        written.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of = |row: usize| &lines[row]["chat_template_kwargs"];
    assert_eq!((of(0), of(1)), (&json!({ "enable_thinking": false }), &on));
    // Whoever learns the rows needs no option: the answer follows its prompt as the target had it.
    let text = succeed(&["data", "inspect", &output, "--target", &target]);
    assert!(text.contains("<off><user>a</s><assistant><shut>[["), "{text}");
    assert!(text.contains("<user>b</s><assistant>[["), "{text}");
    assert_eq!(text.matches("<off>").count(), 1, "{text}");

    assert_eq!(last_json(&succeed(&with_off))["from_before"], 2);
    let text = fail(&command, 1);
    let differ = r#"was written with --chat-template-kwargs {"enable_thinking":false}"#;
    assert!(text.contains(differ), "{text}");
    // A row that asks with others now is another prompt.
    shop.write_rows("prompts.jsonl", &[rows[0].clone(), json!({ "prompt": "b" })]);
    let text = fail(&with_off, 1);
    assert!(text.contains("answers another prompt"), "{text}");
    // Without variables nothing tells of them.
    let plain = shop.path("plain.jsonl");
    let prompts = shop.write_rows("plain-prompts.jsonl", &rows[..1]);
    let command = ["data", "regenerate", &prompts, "--target", &target, "--output", &plain];
    succeed(&[&command[..], &["--max-tokens", "4"]].concat());
    let written = std::fs::read_to_string(&plain).expect("answers");
    assert!(!written.contains("chat_template_kwargs"), "{written}");
}

#[test]
fn sessions_of_programs_take_variables_and_those_of_a_turn_win() {
    let shop = shop();
    let target = Target::open(&shop.target()).expect("target");
    let given = |text: &str| template_variables(text).expect("variables");
    let (off, on) = (given(OFF[1]), given(r#"{"enable_thinking": true}"#));
    let said = [Message::new("user", "hi")];
    let plain = target.encode_chat(&said).expect("encoded");
    let shut = target.encode_chat_with(&said, &off).expect("encoded");
    assert!(shut.len() > plain.len());

    let with = |chat_template_kwargs| {
        let options = SessionOptions { chat_template_kwargs, ..SessionOptions::default() };
        Session::with(&target, None, &options)
    };
    let asked = |chat_template_kwargs| AnswerOptions {
        max_tokens: 1,
        chat_template_kwargs,
        ..AnswerOptions::default()
    };
    let session = with(off.clone()).expect("session");
    for (own, tokens) in [(given("{}"), &shut), (on, &plain)] {
        session.restart(Vec::new());
        let answer = session.chat("hi", &asked(own)).expect("answer");
        assert_eq!(answer.prompt_tokens, tokens.len());
    }
    assert!(session.chat("hi", &asked(given(EFFORT[1]))).is_err());
    assert!(session.generate("hi", &asked(off)).is_err());
    assert!(with(given(r#"{"messages": []}"#)).is_err());
    assert!(template_variables("[1]").is_err());
}
