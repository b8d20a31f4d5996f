//! Rows of every format, good and bad, as documents. Who changes the text or the mask that is expected of a row
//! raises [`crate::template::RULES`]: shards say by which rules they were made.

use super::*;
use crate::document::tests::Bytes;
use serde_json::{Value, json};

fn read(config: Value, rows: &[&str]) -> Result<(Vec<Document>, SourceReport, Vec<BadRow>)> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("rows.jsonl");
    std::fs::write(&path, rows.join("\n")).expect("write");
    let mut config: SourceConfig = serde_json::from_value(config).expect("a source");
    config.path.clone_from(&path);
    let reader = SourceReader::open(&config, vec![path], &Bytes)?;
    let aside = dir.path().join("quarantine.jsonl");
    let mut quarantine = Quarantine::new(Some(aside.clone()), 0.5)?;
    let (documents, report) = read_documents(&reader, &mut quarantine)?;
    let text = std::fs::read_to_string(aside).unwrap_or_default();
    let bad = text.lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
    Ok((documents, report, bad))
}

/// Learned bytes in square brackets.
fn shown(document: &Document) -> String {
    let mut text = String::new();
    for (id, learned) in document.ids.iter().zip(&document.loss_mask) {
        let c = char::from_u32(*id).filter(|_| *id < 256).unwrap_or('$');
        if *learned {
            text.extend(['[', c, ']']);
        } else {
            text.push(c);
        }
    }
    text.replace("][", "")
}

#[track_caller]
fn shows(config: Value, row: &str, expected: &str) {
    let (documents, ..) = read(config, &[row]).expect("readable");
    assert_eq!(shown(&documents[0]), expected);
}

#[test]
fn every_format_becomes_text_with_its_answer() {
    let answer = |template: Value| json!({"path": "", "template": template, "learn": "answer"});
    let all = |template: Value| json!({"path": "", "template": template});
    shows(
        all(json!({"kind": "raw", "fields": ["a", "b"], "separator": "-"})),
        r#"{"a": "x", "b": "yz"}"#,
        "[x-yz$]",
    );
    shows(all(json!({"kind": "source_target"})), r#"{"source": "web", "target": "yz"}"#, "[yz$]");
    shows(
        answer(json!({"kind": "source_target", "with_source": true, "separator": ">"})),
        r#"{"source": "x", "target": "yz"}"#,
        "x>[yz$]",
    );
    shows(
        answer(json!({"kind": "chat", "user": "q", "assistant": "a"})),
        r#"{"q": "1+1", "a": "2"}"#,
        "<user>1+1|<assistant>[2|]",
    );
    shows(
        answer(json!({"kind": "alpaca", "system": "S"})),
        r#"{"instruction": "i", "input": "x", "output": "o"}"#,
        "<system>S|<user>i\n\nx|<assistant>[o|]",
    );
    shows(
        answer(json!({"kind": "alpaca"})),
        r#"{"instruction": "i", "input": "", "output": "o"}"#,
        "<user>i|<assistant>[o|]",
    );
    shows(
        answer(json!({"kind": "gsm8k"})),
        r#"{"question": "q", "answer": "a"}"#,
        "<user>q|<assistant>[a|]",
    );
    shows(answer(json!({"kind": "code"})), r#"{"prefix": "p", "suffix": "s"}"#, "p[s$]");
    shows(
        answer(json!({"kind": "code", "prompt": "Go on: {prefix}"})),
        r#"{"prefix": "p", "suffix": "s"}"#,
        "<user>Go on: p|<assistant>[s|]",
    );
    shows(
        answer(json!({"kind": "problem_answer", "answer": "qwq"})),
        r#"{"problem": "p", "qwq": "long"}"#,
        "<user>p|<assistant>[long|]",
    );
    shows(
        all(json!({"kind": "tokens"})),
        r#"{"input_ids": [97, 98, 256], "loss_mask": [0, 1, true]}"#,
        "a[b$]",
    );
    let summarise = json!({"kind": "summarise", "prompt": "{article}?", "answer_prefix": ">"});
    shows(
        json!({"path": "", "template": summarise, "learn": "assistant"}),
        r#"{"article": ["a", "b"], "abstract": ["c", "d"]}"#,
        "<user>a?|<assistant>[>c|]<user>b?|<assistant>[>d|]",
    );
    shows(
        json!({"path": "", "template": {"kind": "sharegpt"}, "learn": "last"}),
        r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}"#,
        "<user>a|<assistant>b|<user>c|<assistant>[d|]",
    );
    shows(
        json!({"path": "", "template": {"kind": "auto"}, "learn": "no_system"}),
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
        "<system>s|[<user>a|<assistant>b|]",
    );
}

/// Tokens as `datasets` of other trainers hold them.
#[test]
fn masks_of_other_trainers_are_kept_and_padding_is_left_out() {
    let auto = || json!({"path": ""});
    shows(auto(), r#"{"input_ids": [97, 98, 99], "labels": [-100, 98, 99]}"#, "a[bc]");
    shows(auto(), r#"{"input_ids": [97, 98, 99], "assistant_masks": [0, 0, 1]}"#, "ab[c]");
    shows(auto(), r#"{"input_ids": [97, 98, 99], "completion_mask": [0, 1, 0]}"#, "a[b]c");
    let padded = r#"{"input_ids": [0, 97, 98, 99, 0], "attention_mask": [0, 1, 1, 1, 0], "labels": [-100, -100, 98, 99, -100]}"#;
    shows(auto(), padded, "a[bc]");
    let own = r#"{"input_ids": [97, 98, 99], "loss_mask": [0, 0, 1], "labels": [97, 98, 99]}"#;
    shows(auto(), own, "ab[c]");
    let problem = |row: &str| {
        let (.., bad) = read(auto(), &[own, row]).expect("a bad row is left out");
        bad[0].problem.clone()
    };
    let shifted = problem(r#"{"input_ids": [97, 98, 99], "labels": [98, 99, -100]}"#);
    assert!(shifted.contains("`labels` holds 98 at place 1"), "{shifted}");
    let short = problem(r#"{"input_ids": [97, 98, 99], "attention_mask": [1]}"#);
    assert!(short.contains("3 ids but 1 values of `attention_mask`"), "{short}");
}

/// Rows of OpenAI's fine-tuning say which answers are learned.
#[test]
fn answers_of_no_weight_are_not_learned() {
    let learn = |learn: &str| json!({"path": "", "learn": learn});
    let row = |first: &str, second: &str| {
        let turn = |weight: &str| {
            format!(
                r#"{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "b", "weight": {weight}}}"#
            )
        };
        format!(r#"{{"messages": [{}, {}]}}"#, turn(first), turn(second))
    };
    let (second, both) = (row("0", "1"), row("1", "1"));
    shows(learn("assistant"), &second, "<user>a|<assistant>b|<user>a|<assistant>[b|]");
    shows(learn("assistant"), &both, "<user>a|<assistant>[b|]<user>a|<assistant>[b|]");
    shows(learn("all"), &second, "[<user>a|<assistant>b|<user>a|<assistant>b|]");
    shows(learn("assistant"), &row("1", "0.0"), "<user>a|<assistant>[b|]<user>a|<assistant>b|");
    let turn = |weight: &str| {
        format!(
            r#"{{"from": "human", "value": "a"}}, {{"from": "gpt", "value": "b", "weight": {weight}}}"#
        )
    };
    let sharegpt = format!(r#"{{"conversations": [{}, {}]}}"#, turn("0"), turn("null"));
    shows(learn("assistant"), &sharegpt, "<user>a|<assistant>b|<user>a|<assistant>[b|]");
}

/// The model did not end an answer that was cut off.
#[test]
fn the_end_of_an_answer_that_was_cut_off_is_not_learned() {
    let row = |finish: &str| {
        let turns = r#"{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}"#;
        format!(r#"{{"messages": [{turns}, {turns}]{finish}}}"#)
    };
    let learn = |learn: &str| json!({"path": "", "learn": learn});
    let (cut, whole) = (row(r#", "finish": "length""#), row(r#", "finish": "stop""#));
    let both = "<user>a|<assistant>[b]|<user>a|<assistant>[b]|";
    shows(learn("assistant"), &cut, both);
    shows(learn("last"), &cut, "<user>a|<assistant>b|<user>a|<assistant>[b]|");
    shows(learn("no_system"), &cut, "[<user>a|<assistant>b]|[<user>a|<assistant>b]|");
    shows(learn("all"), &cut, "[<user>a|<assistant>b]|[<user>a|<assistant>b]|");
    for ended in [whole, row("")] {
        shows(learn("all"), &ended, "[<user>a|<assistant>b|<user>a|<assistant>b|]");
        shows(learn("assistant"), &ended, "<user>a|<assistant>[b|]<user>a|<assistant>[b|]");
    }
    // Where the row says which answer was cut, the others keep their ends.
    let first = row(r#", "finish": "length", "finishes": ["length", "stop"]"#);
    shows(learn("assistant"), &first, "<user>a|<assistant>[b]|<user>a|<assistant>[b|]");
    shows(learn("last"), &first, "<user>a|<assistant>b|<user>a|<assistant>[b|]");
    shows(learn("no_system"), &first, "[<user>a|<assistant>b]|[<user>a|<assistant>b|]");
    shows(learn("all"), &first, "[<user>a|<assistant>b]|[<user>a|<assistant>b|]");
    let second = row(r#", "finish": "length", "finishes": ["stop", "length"]"#);
    shows(learn("assistant"), &second, "<user>a|<assistant>[b|]<user>a|<assistant>[b]|");
    // An answer that the list does not speak of may have been cut.
    let short = row(r#", "finish": "length", "finishes": ["length"]"#);
    shows(learn("assistant"), &short, both);
    // Without a chat template the end of the text is the end of the answer.
    shows(json!({"path": ""}), r#"{"text": "ab", "finish": "length"}"#, "[ab]");
    shows(json!({"path": ""}), r#"{"text": "ab", "finish": "stop"}"#, "[ab$]");
}

#[test]
fn bad_rows_are_set_aside_with_place_and_text_and_the_rest_is_used() {
    let rows = [r#"{"text": "ab"}"#, "{broken", r#"{"text": 3}"#, r#"{"text": ""}"#];
    let (documents, report, bad) = read(json!({"path": ""}), &rows).expect("tolerated");
    assert_eq!(documents.len(), 1);
    assert_eq!((report.rows, report.bad, report.too_short, report.documents), (4, 2, 1, 1));
    assert_eq!((bad[0].origin.as_str(), bad[0].raw.as_str()), ("rows.jsonl:2", "{broken"));
    assert!(bad[1].problem.contains("field `text` is not a string"), "{}", bad[1].problem);
    assert_eq!(report.remarks().len(), 2);
}

#[test]
fn most_of_the_first_rows_decide_the_format_and_others_are_malformed() {
    let chat = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    for other in [r#"{"nope": 1}"#, r#"{"text": "x"}"#, "{broken"] {
        let (documents, report, bad) =
            read(json!({"path": ""}), &[other, chat, chat]).expect("a bad row is left out");
        assert_eq!(report.detected.as_deref(), Some("messages"), "{other}");
        assert_eq!((documents.len(), bad[0].origin.as_str()), (2, "rows.jsonl:1"));
        assert_eq!(shown(&documents[0]), "<user>a|<assistant>[b|]");
    }
    let (.., bad) = read(json!({"path": ""}), &[r#"{"text": "ab"}"#, r#"{"text": null}"#])
        .expect("a bad row is left out");
    assert!(bad[0].problem.contains("field `text` is null"), "{}", bad[0].problem);
    let error = read(json!({"path": ""}), &[r#"{"text": 3}"#]).expect_err("no format");
    assert!(error.to_string().contains("field `text` is not a string but 3"), "{error}");
}

#[test]
fn answers_to_prompts_are_learned_however_rows_hold_them() {
    let auto = || json!({"path": ""});
    let turns = r#"[{"role": "user", "content": "a"}]"#;
    let answer = r#"[{"role": "assistant", "content": "b"}]"#;
    let expected = "<user>a|<assistant>[b|]";
    shows(auto(), &format!(r#"{{"prompt": {turns}, "completion": {answer}}}"#), expected);
    shows(auto(), &format!(r#"{{"prompt": {turns}, "completion": "b"}}"#), expected);
    shows(auto(), r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#, expected);
    shows(auto(), &format!(r#"{{"prompt": "a", "chosen": {answer}, "rejected": []}}"#), expected);
    let whole = turns.replace(']', ",") + &answer[1..];
    shows(auto(), &format!(r#"{{"prompt": "a", "chosen": {whole}}}"#), expected);
    shows(auto(), &format!(r#"{{"chosen": {whole}, "rejected": []}}"#), expected);
    shows(auto(), r#"{"question": "a", "answer": "b"}"#, expected);
    shows(auto(), r#"{"prefix": "a", "suffix": "b"}"#, "a[b$]");
    shows(auto(), r#"{"source": "a", "target": "b"}"#, "[b$]");
    shows(json!({"path": "", "learn": "answer"}), r#"{"source": "a", "target": "b"}"#, "a\n[b$]");
    shows(
        json!({"path": "", "learn": "all"}),
        r#"{"prompt": "a", "chosen": "b"}"#,
        "[<user>a|<assistant>b|]",
    );
}

#[test]
fn the_first_rows_tell_whether_a_source_can_be_used() {
    let check = |config: Value, rows: &[&str]| {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, rows.join("\n")).expect("write");
        let mut config: SourceConfig = serde_json::from_value(config).expect("a source");
        config.path.clone_from(&path);
        check_source(&config, vec![path], &Bytes).map_err(|error| error.to_string())
    };
    assert_eq!(check(json!({"path": ""}), &["{broken", r#"{"text": "ab"}"#]), Ok(()));
    let raw = json!({"path": "", "template": {"kind": "raw"}});
    let problem = check(raw.clone(), &[r#"{"body": "ab"}"#]).expect_err("another field");
    assert!(problem.contains("rows.jsonl:1: field `text` is missing"), "{problem}");
    assert!(check(raw.clone(), &[]).expect_err("empty").contains("0 rows read"));
    // A row of more than is tokenised here counts.
    let long = format!(r#"{{"text": "{}"}}"#, "a".repeat(TRIED_BYTES));
    assert_eq!(check(raw, &[&long]), Ok(()));
    let text = json!({"path": "", "learn": "answer"});
    let problem = check(text, &[r#"{"text": "ab"}"#]).expect_err("no answer");
    assert!(problem.contains("read as `raw`: `learn` is `answer`, which needs"), "{problem}");
    let prompt = json!({"path": "", "max_prompt_tokens": 3});
    assert!(check(prompt, &[r#"{"text": "ab"}"#]).expect_err("no prompt").contains("max_prompt"));
}

#[test]
fn tokens_beyond_the_vocabulary_and_nothing_to_learn_are_told() {
    let tokens = json!({"path": "", "template": {"kind": "tokens"}});
    let error = read(tokens.clone(), &[r#"{"input_ids": [1, 257]}"#]).expect_err("beyond");
    assert!(error.to_string().contains("token id 257 is beyond"), "{error}");
    let error = read(tokens, &[r#"{"input_ids": [1, 2], "loss_mask": [1, 0]}"#]);
    assert!(matches!(error, Err(DataError::Empty { rows: 1, .. })), "{error:?}");
    assert!(matches!(read(json!({"path": ""}), &[]), Err(DataError::Empty { rows: 0, .. })));
}

#[test]
fn limits_stop_reading_and_cap_prompts() {
    let rows = [r#"{"prefix": "abcd", "suffix": "x"}"#, r#"{"prefix": "a", "suffix": "y"}"#];
    let code = |extra: (&str, Value)| {
        let mut config = json!({"path": "", "template": {"kind": "code"}, "learn": "answer"});
        config[extra.0] = extra.1;
        config
    };
    let (documents, ..) = read(code(("limit_tokens", json!(3))), &rows).expect("limited");
    assert_eq!(documents.len(), 1);
    let (documents, report, _) =
        read(code(("max_prompt_tokens", json!(2))), &rows).expect("capped");
    assert_eq!((documents.len(), report.prompt_too_long), (1, 1));
    assert_eq!(shown(&documents[0]), "a[y$]");
}

#[test]
fn of_many_files_one_is_open_at_a_time() {
    let dir = tempfile::tempdir().expect("tempdir");
    let paths = ["a.jsonl", "b.jsonl"].map(|name| dir.path().join(name));
    paths.iter().for_each(|path| std::fs::write(path, r#"{"text": "old"}"#).expect("write"));
    let rows = raw_rows(&paths).expect("files");
    // Who had opened it would read what stood there before.
    std::fs::remove_file(&paths[1]).expect("removed");
    std::fs::write(&paths[1], r#"{"text": "new"}"#).expect("write");
    let texts: Vec<String> = rows
        .map(|row| {
            row.expect("read").parse().expect("a row").text("text").expect("text").to_owned()
        })
        .collect();
    assert_eq!(texts, ["old", "new"]);
}
