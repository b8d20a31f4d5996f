//! Calls are found wherever their text is cut, and what is none stays as it was.

use std::sync::{Arc, LazyLock};

use longdraft_decode::stop::AnswerText;
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use proptest::prelude::*;

use super::super::Calls;
use super::super::tests::{
    ALL, HERMES, LIST, LLAMA, NAMED, SPECIAL, TAGS, Told, bytes_of, calls, calls_by, pieces,
    renamed, told,
};
use crate::events::Piece;

/// What an answer says, in whichever two parts it comes, and character by character.
#[track_caller]
fn told_in_every_split(calls: &Arc<Calls>, answer: &str) -> Told {
    let whole = told(calls, pieces([answer]));
    for cut in (0..answer.len()).filter(|at| answer.is_char_boundary(*at)) {
        let (before, after) = answer.split_at(cut);
        assert_eq!(told(calls, pieces([before, after])), whole, "{before:?} {after:?}");
    }
    let characters = answer.split_inclusive(|_: char| true);
    assert_eq!(told(calls, pieces(characters)), whole, "{answer:?}");
    whole
}

#[test]
fn calls_are_found_wherever_their_text_is_cut() {
    let now = ("now", "{}");
    let rome = ("weather", "{\"city\": \"Rom\"}");
    for (template, answer, text, wanted) in [
        (
            HERMES,
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"K\u{f6}ln\", \"days\": 2.50}}\n</tool_call>",
            "",
            vec![("weather", "{\"city\": \"K\u{f6}ln\", \"days\": 2.50}")],
        ),
        (
            HERMES,
            "I look \u{1F600}.\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n\
             <tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rom\"}}</tool_call>\n",
            "I look \u{1F600}.",
            vec![now, rome],
        ),
        // Marks of calls within strings, text after a call, no end of it, and arguments in other ways.
        (
            HERMES,
            "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"</tool_call> \\\"} <tool_call> {[\"}}</tool_call> Done.",
            " Done.",
            vec![("weather", "{\"city\": \"</tool_call> \\\"} <tool_call> {[\"}")],
        ),
        (HERMES, "<tool_call>{\"name\": \"now\"}", "", vec![now]),
        (HERMES, "<tool_call>{\"name\": \"now\", \"arguments\": null}\n</tool", "", vec![now]),
        (
            HERMES,
            "<tool_call>[{\"name\": \"now\"}, {\"parameters\": \"{\\\"city\\\": \\\"Rom\\\"}\", \"name\": \"weather\"}]</tool_call>",
            "",
            vec![now, rome],
        ),
        // What is no call before one that is.
        (
            HERMES,
            "<tool_call>{bad <tool_call>{\"name\": \"now\"}</tool_call>",
            "<tool_call>{bad ",
            vec![now],
        ),
        (
            TAGS,
            "Then:\n<tool_call>\n<function=weather>\n<parameter=city>\nK\u{f6}ln </parameter\n\n</parameter>\n\
             <parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            "Then:",
            vec![("weather", "{\"city\":\"K\u{f6}ln </parameter\\n\",\"days\":2}")],
        ),
        (TAGS, "<function=now>\n</function>\n</tool_call>", "", vec![now]),
        (TAGS, "<tool_call><function=now></function>", "", vec![now]),
        (
            NAMED,
            "[TOOL_CALLS]weather[ARGS]{\"city\": \"Rom\"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
            "",
            vec![rome, now],
        ),
        (NAMED, "So: [TOOL_CALLS]now{}", "So:", vec![now]),
        (
            NAMED,
            "[TOOL_CALLS]other[ARGS]{}[TOOL_CALLS]now{}",
            "[TOOL_CALLS]other[ARGS]{}",
            vec![now],
        ),
        (
            LIST,
            "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Rom\"}}, \
             {\"name\": \"now\", \"arguments\": {}, \"id\": \"abcdefghi\"}]",
            "",
            vec![rome, now],
        ),
        (LLAMA, "\n{\"name\": \"weather\", \"parameters\": {\"city\": \"Rom\"}}", "", vec![rome]),
        (
            LLAMA,
            "I look. <|python_tag|>{\"name\": \"now\", \"parameters\": {}}; {\"name\": \"now\"}",
            "I look.",
            vec![now, now],
        ),
    ] {
        let found = told_in_every_split(&calls(template), answer);
        let wanted = wanted.into_iter().map(|(name, arguments)| (name.into(), arguments.into()));
        assert_eq!(found, (text.to_owned(), wanted.collect()), "{answer:?}");
    }
}

#[test]
fn what_is_no_call_stays_as_it_was() {
    let long_name = format!("<function={}", "x".repeat(300));
    let no_name = format!("[TOOL_CALLS]{}", "weather ".repeat(60));
    for (template, answers) in [
        (
            HERMES,
            vec![
                "",
                "plain",
                " \n ",
                "the end. \n",
                "a < b <tool_ca",
                "<tool_call>",
                "<tool_call><tool_call>\n",
                "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rom\"",
                "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"}}</tool_call>",
                "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}\n</tool_call> and more",
                "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
                "<tool_call>[{\"name\": \"now\"}, {\"name\": \"other\"}]</tool_call>",
                "<tool_call>[]</tool_call>",
                "<tool_call>{'name': 'now'}</tool_call>",
                "<tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>",
                "<tool_call>{\"name\": \"now\", \"arguments\": \"7\"}</tool_call>",
                "<tool_call>{\"name\": 7, \"arguments\": {}}</tool_call>",
                "<tool_call>{\"name\": \"now\", \"arguments\": {]}</tool_call>",
                "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"\n\"}}</tool_call>",
                "<tool_call>{\"name\" \"now\"}</tool_call>",
                "<tool_call>\u{e9}{}</tool_call>",
                "{\"name\": \"now\", \"arguments\": {}}",
                "[TOOL_CALLS][{\"name\": \"now\"}]",
            ],
        ),
        (
            TAGS,
            vec![
                "<tool_call>{\"name\": \"now\"}</tool_call>",
                "<function=other></function>",
                "<tool_call>\n<function=other>\n</function>\n</tool_call>",
                "<function=weather>\n<parameter=city>\nRom",
                "<function=weather> Rom </function>",
                "<function=weather>",
                long_name.as_str(),
            ],
        ),
        (
            NAMED,
            vec![
                "[TOOL_CALLS]",
                "[TOOL_CALLS]other[ARGS]{}",
                "[TOOL_CALLS]weather",
                "[TOOL_CALLS]weather[ARGS]{\"city\": }",
                "[TOOL_CALLS]weather[ARGS]{\"city\": \"Rom\"",
                "[TOOL_CALLS]weather [ARGS] is {}",
                "[TOOL_CALLS]weather[CALL_ID]abc{}",
                no_name.as_str(),
            ],
        ),
        (LIST, vec!["[TOOL_CALLS] [{\"name\": \"now\"}", "[TOOL_CALLS] []"]),
        (
            LLAMA,
            vec![
                "{",
                "{\"a\": 1} and more",
                "{\"name\": \"other\", \"parameters\": {}}",
                "Like this: {\"name\": \"now\", \"parameters\": {}}",
                "<|python_tag|>print(1)",
            ],
        ),
    ] {
        let calls = calls(template);
        for answer in answers {
            let found = told_in_every_split(&calls, answer);
            assert_eq!(found, (answer.to_owned(), Vec::new()), "{template}");
        }
    }
}

/// Answers that keep a reader waiting: time that is quadratic in them would be hours.
#[test]
fn a_large_answer_is_read_in_linear_time() {
    let filling = "0123456789abcde ".repeat(1 << 16);
    let open = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"";
    let tags = "<function=weather><parameter=city>";
    for (template, begin, end, is_call) in [
        (HERMES, open, "\"}}</tool_call>", true),
        (HERMES, open, "", false),
        (TAGS, tags, "</parameter></function>", true),
        (TAGS, tags, "</paramete", false),
    ] {
        let texts = [begin].into_iter();
        let filled = filling.as_bytes().chunks(16).map(|chunk| std::str::from_utf8(chunk));
        let filled = filled.map(|chunk| chunk.expect("ASCII"));
        let answer = pieces(texts.chain(filled).chain([end]));
        let (text, found) = told(&calls(template), answer);
        assert_eq!(found.len(), usize::from(is_call), "{begin}");
        let length = begin.len() + filling.len() + end.len();
        assert_eq!(text.len(), if is_call { 0 } else { length }, "{begin}");
        assert!(found.iter().all(|(_, arguments)| arguments.contains(&filling)));
    }
    // White space may stand before a call.
    let blank = " \n".repeat(1 << 19);
    let (text, found) = told(&calls(HERMES), pieces(blank.split_inclusive('\n')));
    assert_eq!((text.len(), found), (blank.len(), Vec::new()));
}

/// The pieces of an answer of these tokens, as the decoder's side makes them.
fn decoded(tokenizer: &TextTokenizer, ids: &[u32], stops: &[String]) -> Vec<Piece> {
    let mut answer = AnswerText::new(tokenizer, None, stops).expect("no tokens before");
    let mut pieces = Vec::new();
    for id in ids {
        let offset = answer.length();
        let streamed = answer.push(*id).expect("decoded");
        let (text, token) = (streamed.text, Some(TargetTokenId(*id)));
        pieces.push(Piece { text, token, offset, ..Piece::default() });
        if streamed.stopped {
            return pieces;
        }
    }
    let text = answer.finish().expect("decoded").text;
    pieces.push(Piece { text, ..Piece::default() });
    pieces
}

#[test]
fn a_marker_that_is_a_special_token_begins_a_call_and_is_no_text() {
    let tokenizer = renamed(NAMED, &SPECIAL);
    let calls = calls_by(&tokenizer);
    let stops = ["zz".to_owned(), "STOP".to_owned()];
    let call = |city: &str| vec![("weather".to_owned(), format!("{{\"city\": \"{city}\"}}"))];
    for (answer, text, wanted) in [
        ("[TOOL_CALLS]weather[ARGS]{\"city\": \"K\u{f6}ln\"}", "", call("K\u{f6}ln")),
        (
            "H\u{e9} [TOOL_CALLS]weather[ARGS]{\"city\": \"\u{1F600}\"}",
            "H\u{e9}",
            call("\u{1F600}"),
        ),
        // Text before the token that may begin a stop string comes after it.
        ("a z[TOOL_CALLS]weather[ARGS]{\"city\": \"z\"}z", "a zz", call("z")),
        // What is no call is told as any text is.
        ("H\u{e9} [TOOL_CALLS]other[ARGS]{} <s>on", "H\u{e9} other{} on", Vec::new()),
        ("[ARGS]", "", Vec::new()),
        ("[TOOL_CALLS]weather[ARGS]{\"city\": \"STOP\"}", "weather{\"city\": \"", Vec::new()),
    ] {
        let found = told(&calls, decoded(&tokenizer, &bytes_of(&tokenizer, answer), &stops));
        assert_eq!(found, (text.to_owned(), wanted), "{answer}");
    }
}

static CALLS: LazyLock<[Arc<Calls>; 5]> = LazyLock::new(|| ALL.map(calls));

fn fragments() -> impl Strategy<Value = Vec<&'static str>> {
    let all = vec![
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"now\"}",
        "{\"name\": \"weather\", \"arguments\": {\"city\": \"",
        "\"}}",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ":",
        ",",
        ";",
        "now",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<function=now>",
        "<function=",
        "</function>",
        "<parameter=city>",
        "</parameter>",
        "<|python_tag|>",
        "<",
        " ",
        "\n",
        "\u{e9}",
    ];
    prop::collection::vec(prop::sample::select(all), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn any_answer_says_the_same_however_it_is_cut(fragments in fragments()) {
        let answer = fragments.concat();
        for calls in &*CALLS {
            let whole = told(calls, pieces([answer.as_str()]));
            prop_assert_eq!(&told(calls, pieces(fragments.iter().copied())), &whole);
            let characters = pieces(answer.split_inclusive(|_: char| true));
            prop_assert_eq!(&told(calls, characters), &whole);
            prop_assert!(!whole.1.is_empty() || whole.0 == answer, "{:?}", whole);
        }
    }
}
