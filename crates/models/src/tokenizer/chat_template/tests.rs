mod filters;
mod jinja;
mod values;

use super::*;
use crate::test_support::assert_refused;

const CHATML: &str = "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message.content.strip() + '<|im_end|>' }}\n{% endfor %}\n{%- if add_generation_prompt %}{{ bos_token }}go{% endif %}";

/// Templates without messages print what is wanted.
#[track_caller]
fn assert_printed(cases: &[(&str, &str)]) -> Result<()> {
    for (source, wanted) in cases {
        let text = ChatTemplate::new(source, Map::new())?.render(&[], false)?;
        assert_eq!(text, *wanted, "{source}");
    }
    Ok(())
}

#[test]
fn python_methods_and_special_tokens_work() -> Result<()> {
    let mut tokens = Map::new();
    tokens.insert("bos_token".into(), "<s>".into());
    let template = ChatTemplate::new(CHATML, tokens)?;
    let text = template.render(&[Message::new("user", " hi ")], true)?;
    assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n<s>go");
    Ok(())
}

#[test]
fn a_template_can_refuse() -> Result<()> {
    let template = ChatTemplate::new("{{ raise_exception('no tools here') }}", Map::new())?;
    assert_refused(template.render(&[], false), &["no tools here"]);
    Ok(())
}

#[test]
fn variables_of_others_reach_templates_and_own_ones_stay() -> Result<()> {
    let source = "{{ bos_token }}{{ messages | length }}{{ enable_thinking is defined and not enable_thinking }}";
    let tokens = json!({"bos_token": "<s>"}).as_object().expect("object").clone();
    let plain =
        ChatTemplate::new(source, tokens)?.with_tools(Some("tools {{ enable_thinking }}"))?;
    let given = json!({"enable_thinking": false, "bos_token": "x", "messages": [1, 2]});
    let more = plain.with_variables(given.as_object().expect("object"));
    assert_eq!(more.render(&[], false)?, "<s>0True");
    assert_eq!(more.render_messages(&[], Some(&json!([1])), false)?, "tools False");
    assert_eq!(plain.render(&[], false)?, "<s>0False");
    let own = ["messages", "tools", "add_generation_prompt", "mark_generation", "bos_token"];
    assert!(own.iter().all(|name| plain.sets(name)) && !plain.sets("enable_thinking"));
    Ok(())
}

#[test]
fn later_variables_win_key_by_key_and_tell_templates_apart() -> Result<()> {
    let given = |value: Value| value.as_object().expect("object").clone();
    let source = "{{ enable_thinking }} {{ effort }} {{ strftime_now('%Y') }}";
    let plain = ChatTemplate::new(source, Map::new())?;
    let first = plain.with_variables(&given(json!({"enable_thinking": false, "effort": "low"})));
    let second = first.with_variables(&given(json!({"enable_thinking": true, "messages": 1})));
    // An undated template keeps them.
    assert_eq!(second.undated()?.render(&[], false)?, "True low 2025");
    let known = given(json!({"effort": "low", "enable_thinking": true}));
    assert_eq!((second.variables(), plain.variables()), (&known, &Map::new()));
    let again = plain.with_variables(&known);
    assert_eq!(again.fingerprint(), second.fingerprint());
    assert_eq!(again.undated()?.fingerprint(), second.fingerprint());
    assert_ne!(first.fingerprint(), second.fingerprint());
    // Without variables it is the hash of the template alone, which older files hold.
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(source.len() as u64).to_le_bytes());
    hasher.update(source.as_bytes());
    assert_eq!(plain.fingerprint(), hasher.finalize().to_hex()[..16].to_owned());
    assert_eq!(plain.with_variables(&Map::new()).fingerprint(), plain.fingerprint());
    Ok(())
}

#[test]
fn variables_of_others_take_no_function_away() -> Result<()> {
    let template = ChatTemplate::new("{{ debug }}{{ raise_exception('never') }}", Map::new())?;
    let functions = ["raise_exception", "strftime_now", "cycler", "joiner", "namespace", "range"];
    assert!(functions.iter().all(|name| template.sets(name)) && !template.sets("debug"));
    let given = json!({"raise_exception": "said", "debug": "a"});
    let more = template.with_variables(given.as_object().expect("object"));
    assert_refused(more.render(&[], false), &["never"]);
    Ok(())
}

#[test]
fn messages_keep_their_fields_and_json_is_written_as_in_python() -> Result<()> {
    let source = "{% for m in messages %}{{ m.tool_calls[0].arguments | tojson }}{% endfor %}\
                  {% if tools %}{{ tools[0] | tojson(indent=2) }}{% endif %}";
    let template = ChatTemplate::new(source, Map::new())?;
    let message = json!({"tool_calls": [{"arguments": {"a": "<b & c>", "d": [1, 2.0]}}]});
    let messages = [message.as_object().expect("object").clone()];
    let text = template.render_messages(&messages, Some(&json!([{"n": "é"}])), false)?;
    assert_eq!(text, "{\"a\": \"<b & c>\", \"d\": [1, 2.0]}{\n  \"n\": \"é\"\n}");
    let text = template.render_messages(&messages, None, false)?;
    assert_eq!(text, "{\"a\": \"<b & c>\", \"d\": [1, 2.0]}");
    Ok(())
}

#[test]
fn json_has_python_s_numbers_separators_and_lines() -> Result<()> {
    assert_printed(&[
        (
            "{{ {'a': [1e-5, 1e16, 1.0, [], {}]} | tojson }}",
            r#"{"a": [1e-05, 1e+16, 1.0, [], {}]}"#,
        ),
        (
            "{{ {'a': [1e-5, [], {}], 'b': {'c': 1}} | tojson(indent=2) }}",
            "{\n  \"a\": [\n    1e-05,\n    [],\n    {}\n  ],\n  \"b\": {\n    \"c\": 1\n  }\n}",
        ),
        (
            "{{ {'a': [1, 2]} | tojson(indent=1, separators=(';', '=')) }}",
            "{\n \"a\"=[\n  1;\n  2\n ]\n}",
        ),
        ("{{ [1, [2]] | tojson(indent=0) }}", "[\n1,\n[\n2\n]\n]"),
        (
            "{{ {'b': [1, 2], 'a': {'d': 3, 'c': 4}} | tojson(separators=(',', ':'), sort_keys=true) }}",
            r#"{"a":{"c":4,"d":3},"b":[1,2]}"#,
        ),
    ])
}

#[test]
fn generation_blocks_are_plain_text_that_can_be_asked_for() -> Result<()> {
    let source = "{% for m in messages %}\n{%- if m.role == 'assistant' %}\n<a>\n\
                  {%- generation %}{{ m.content }}<end>{% endgeneration -%}\n\
                  {% else %}<u>{{ m.content }}{% endif %}{% endfor %}";
    let template = ChatTemplate::new(source, Map::new())?;
    let turns = [("user", "é?"), ("assistant", "b"), ("user", "c"), ("assistant", "")];
    let turns = turns.map(|(role, text)| Message::new(role, text));
    let text = template.render(&turns, false)?;
    assert_eq!(text, "<u>é?<a>b<end><u>c<a><end>");
    let turn = |m: &Message| json!(m).as_object().cloned().unwrap_or_default();
    let messages: Vec<_> = turns.iter().map(turn).collect();
    let (same, ranges) = template.render_generated(&messages, None)?.expect("blocks");
    let generated: Vec<&str> = ranges.into_iter().map(|range| &text[range]).collect();
    assert_eq!((same.as_str(), generated), (text.as_str(), vec!["b<end>", "<end>"]));
    let marked = [turn(&Message::new("assistant", "a\u{10FFFF}b"))];
    assert!(template.render_generated(&marked, None).is_err());
    assert!(ChatTemplate::new(CHATML, Map::new())?.render_generated(&messages, None)?.is_none());
    assert!(ChatTemplate::new("{% generation %}{% endfor %}", Map::new()).is_err());
    Ok(())
}

/// What a template without an end is told.
fn refused(source: &str) -> String {
    let text = ChatTemplate::new(source, Map::new())
        .and_then(|template| template.render(&[Message::new("user", "hi")], false));
    text.map(|text| text.len()).expect_err(source).to_string()
}

#[test]
fn templates_without_an_end_are_stopped() {
    let doubled = "{% set s = namespace(x='xxxxxxxx') %}{% for i in range(60) %}\
                   {% set s.x = s.x ~ s.x %}{% endfor %}";
    let long = "{% set s = namespace(x='xxxxxxxx') %}{% for i in range(22) %}\
                {% set s.x = s.x + s.x %}{% endfor %}";
    for (source, problem) in [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "instructions",
        ),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        (doubled, "more than 256 MiB"),
        ("{{ messages | tojson(indent=10000000000) }}", "an indent of 10000000000"),
        ("{{ 'a' | indent(100000000000) }}", "a width of 100000000000"),
        ("{{ [1] | batch(100000000000, 0) | list }}", "more than 256 MiB"),
        ("{{ [1] | slice(100000000000) | list }}", ""),
        ("{{ '%100000000000d' | format(1) }}", ""),
        ("{{ '{:100000000000}'.format(1) }}", ""),
        ("{{ ([1] * 100000000000) | list }}", "more than 256 MiB"),
        ("{{ ([1] * 100000000000) | join('x') }}", ""),
        ("{{ 3 in [1] * 10000000000000 }}", "not ended after"),
        ("{{ [1] * 4000000000 }}", "not ended after"),
        ("{{ 'x' * 90000000 }}", "longer than"),
        (&format!("{long}{{{{ s.x | replace('x', s.x) | length }}}}"), "more than 256 MiB"),
        (&format!("{long}{{{{ s.x.replace('x', s.x) | length }}}}"), "more than 256 MiB"),
        (&format!("{long}{{{{ s.x | list | length }}}}"), "more than 256 MiB"),
        (&format!("{{# {} #}}", "x".repeat(LONGEST_TEMPLATE)), "bytes, at most"),
    ] {
        let message = refused(source);
        // A slow processor ends some of them by their time.
        let is_told = message.contains(problem) || message.contains("not ended after");
        assert!(message.contains("chat template: ") && is_told, "{message}");
        assert!(message.len() < 2 * errors::SHOWN);
    }
}

#[test]
fn lists_that_nest_deeply_are_dropped_and_written() {
    let nested = "{% set s = namespace(x=[]) %}{% for i in range(300) %}{% for j in range(300) %}\
                  {% set s.x = [s.x] %}{% endfor %}{% endfor %}";
    for end in ["", "{{ s.x | tojson }}", "{{ s.x }}", "{{ s.x == [s.x] }}"] {
        let template = ChatTemplate::new(&format!("{nested}{end}"), Map::new()).expect("template");
        // Refused or written, but never the end of the process.
        let _ = template.render(&[], false);
    }
}

#[test]
fn a_rendering_that_is_given_up_leaves_others_until_there_are_too_many() -> Result<()> {
    let template = ChatTemplate::new(
        "{% if messages %}{{ ([1] * 100000000000) | list }}{% endif %}",
        Map::new(),
    )?;
    for _ in 0..MOST_GIVEN_UP {
        assert_eq!(template.clone().render(&[], false)?, "");
        assert_refused(template.render(&[Message::new("user", "")], false), &["more than 256 MiB"]);
    }
    // Their threads keep what they hold.
    assert_refused(template.clone().render(&[], false), &["4 renderings were given up"]);
    Ok(())
}

#[test]
fn errors_of_templates_are_short_and_steer_no_terminal() {
    let message = refused("{{ raise_exception('\u{1b}[31m' ~ 'red' * 90000) }}");
    assert!(message.contains("[31mred") && !message.contains('\u{1b}'), "{message}");
    assert!(message.len() < 2 * errors::SHOWN, "{}", message.len());
}

#[test]
fn methods_of_texts_count_characters() -> Result<()> {
    assert_printed(&[
        ("{{ '日本</think>x'.find('</think>') }} {{ 'ab'.find('c') }}", "2 -1"),
        ("{% set s = '日本</a>日' %}{{ s[:s.find('</a>')] }} {{ s.rfind('日') }}", "日本 6"),
        ("{{ 'a,b,c'.rsplit(',', 1) }} {{ 'a,b'.rsplit(',') }}", "['a,b', 'c'] ['a', 'b']"),
        ("{{ 'a=b=c'.partition('=') }}", "('a', '=', 'b=c')"),
        (
            "{{ 'a=b=c'.rpartition('=') }} {{ 'a'.rpartition('=') }}",
            "('a=b', '=', 'c') ('', '', 'a')",
        ),
        ("{{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('x') }}", "bc abc"),
        ("{{ ''.isdigit() }} {{ '12'.isdigit() }}", "False True"),
        ("{{ raise_exception is callable }} {{ 'a' is callable }}", "True False"),
        ("{{ documents is none }} {{ tools is none }}", "True True"),
        ("{{ 'aé'.count('') }} {{ 'aba'.count('a') }}", "3 2"),
    ])
}

#[test]
fn lists_and_mappings_are_printed_as_python_writes_them() -> Result<()> {
    let tools = json!([{"a": "f", "b": "it's \"é\"\n", "c": [1, 1.0, 0.000_01, true, null, {}]}]);
    let wanted = r#"[{'a': 'f', 'b': 'it\'s "é"\n', 'c': [1, 1.0, 1e-05, True, None, {}]}]"#;
    for (source, wanted) in [
        ("{{ tools }}", wanted),
        ("{{ '' ~ tools | string }}", wanted),
        ("{{ tools[0].c[1:3] }} {{ tools[0].a }} {{ 'x' | string }}", "[1.0, 1e-05] f x"),
        ("{{ tools[0].c[1] | string }} {{ 3 | string }} {{ 2.5 }}", "1.0 3 2.5"),
        ("{{ [\"it's\", 'a', 'q\"'] }}", r#"["it's", 'a', 'q"']"#),
    ] {
        let template = ChatTemplate::new(source, Map::new())?;
        assert_eq!(template.render_messages(&[], Some(&tools), false)?, wanted, "{source}");
    }
    Ok(())
}

#[test]
fn broken_templates_are_errors() {
    let nested = format!("{{{{ {}1 }}}}", "(".repeat(1000));
    for source in ["{% for %}", "{{ 'a ~ 1 }}", "{{ (1 ~ }}", "{{ 1) }}", "{{ ~ 1 }}", &nested] {
        assert!(ChatTemplate::new(source, Map::new()).is_err(), "{source}");
    }
}

#[test]
fn errors_show_the_line_that_was_written() {
    for (source, line) in [
        ("a\n{{ 'a'\n %\n () }}\n  {{ 1 ~ 2 % 3, 4 }}\nb", "\n{{ 1 ~ 2 % 3, 4 }}"),
        ("{% generation %}{{ 1 ~ }}{% endgeneration %}", "\n{% generation %}{{ 1 ~ }}"),
        ("{% macro m() %}{{ varargs }}{% endmacro m %}", "{{ varargs }}{% endmacro m %}"),
        ("{{ % 1 }}", "\n{{ % 1 }}"),
    ] {
        let message = refused(source);
        assert!(message.contains(line), "{message}");
        assert!(!message.contains("|string") && !message.contains("opened"), "{message}");
    }
}

#[test]
fn kinds_are_those_of_jinja_and_the_date_is_known() -> Result<()> {
    assert_printed(&[
        ("{{ none is iterable }} {{ 'a' is iterable }} {{ 3 is iterable }}", "False True False"),
        ("{{ 'a' is sequence }} {{ {'a': 1} is sequence }}", "True True"),
        ("{{ [1] is sequence }} {{ none is sequence }}", "True False"),
        ("{% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}", "none"),
    ])?;
    let date = ChatTemplate::new("{{ strftime_now('%Y-%m-%d') }}", Map::new())?;
    assert_eq!(date.undated()?.render(&[], false)?, "2025-01-01");
    assert_eq!(date.undated()?.fingerprint(), date.fingerprint());
    let date = date.render(&[], false)?;
    assert!(date.len() == 10 && date.starts_with("20") && &date[4..5] == "-", "{date}");
    Ok(())
}

#[test]
fn conversations_with_tools_may_have_a_template_of_their_own() -> Result<()> {
    let config = json!({"bos_token": {"content": "<s>"}});
    let named = json!([
        {"name": "other", "template": "o"},
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "{{ bos_token }}{{ tools | length }}"},
    ]);
    let read = |templates: &Value| ChatTemplate::from_config(&config, templates);
    let template = read(&named)?.expect("a template");
    let tools = json!([{"name": "f"}]);
    assert_eq!(template.render_messages(&[], None, false)?, "d");
    assert_eq!(template.render_messages(&[], Some(&tools), false)?, "<s>1");
    assert_eq!(template.render(&[], false)?, "d");
    assert_eq!(template.source_with_tools(), "{{ bos_token }}{{ tools | length }}");
    let same = template.to_config();
    let same = ChatTemplate::from_config(&same, &same["chat_template"])?.expect("a template");
    assert_eq!(same.render_messages(&[], Some(&tools), false)?, "<s>1");
    let first = read(&json!([{"name": "other", "template": "o"}]))?.expect("a template");
    assert_eq!(first.render_messages(&[], Some(&tools), false)?, "o");
    let plain = read(&json!("p"))?.expect("a template");
    assert_eq!(plain.to_config()["chat_template"], "p");
    for none in [json!([]), json!([3]), json!([{"name": "default"}]), json!(7), json!({})] {
        assert!(read(&none)?.is_none(), "{none}");
    }
    let mut broken = named.clone();
    broken[2]["template"] = json!("{%");
    assert!(read(&broken).is_err());
    Ok(())
}
