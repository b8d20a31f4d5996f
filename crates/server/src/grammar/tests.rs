//! Random answers have the form that is asked for; whatever is asked for is compiled or refused.

use std::sync::LazyLock;

use longdraft_kernels::random::CounterRng;
use longdraft_models::target_model::Target;
use proptest::prelude::*;

use super::*;
use crate::answer::tests::{self as server, TARGET};

static TOKENIZER: LazyLock<TextTokenizer> =
    LazyLock::new(|| Target::open_tokenizer(TARGET).expect("tokenizer"));
static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(Vocabulary::default);

fn model() -> Model {
    // Some ids have no token.
    let vocabulary = TOKENIZER.vocabulary() + 5;
    let stop_tokens = vec![TargetTokenId(2), TargetTokenId(3)];
    Model { stop_tokens, ..server::model(vocabulary) }
}

fn start(request: &Value) -> Result<FormState> {
    let (field, form) = Form::of(request)?.expect("a form");
    VOCABULARY.start((field, &form), &model(), &TOKENIZER)
}

fn allowed(state: &mut FormState) -> Vec<u32> {
    let words = state.allowed().expect("allowed");
    (0..32 * words.len() as u32)
        .filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1)
        .collect()
}

/// An answer of random tokens, of at most so many; whether it ended.
fn answer(state: &mut FormState, rng: &mut CounterRng, most: usize) -> (String, bool) {
    let mut ids = Vec::new();
    for _ in 0..most {
        let allowed = allowed(state);
        let next = allowed[rng.below(allowed.len() as u64) as usize];
        assert!(next < model().vocabulary as u32);
        assert_eq!(state.accepts(&[TargetTokenId(next)]).expect("told"), usize::from(next > 3));
        state.advance(TargetTokenId(next)).expect("goes on");
        if [2, 3].contains(&next) {
            return (TOKENIZER.decode(&ids, true).expect("text"), true);
        }
        ids.push(next);
    }
    (TOKENIZER.decode(&ids, true).expect("text"), false)
}

/// Deep enough for any stack of usual size: an overflow would end the process.
#[test]
fn forms_that_nest_without_end_are_refused() {
    let rules: String = (0..4000).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    let texts = [
        format!("start: {}", "a{".repeat(30_000)),
        format!("start: \"a\" %if {}", "not(".repeat(15_000)),
        format!("start: r0\n{rules}r4000: \"a\"\n"),
        format!("start: {}", "(".repeat(60_000)),
    ];
    for text in texts {
        assert!(text.len() < LARGEST);
        let is_open = text.ends_with(['{', '(']);
        assert!(start(&json!({ "guided_grammar": text })).is_err() || !is_open);
    }
    let nested = format!("{}{}", "(".repeat(30_000), ")".repeat(30_000));
    let _ = start(&json!({ "guided_regex": nested }));
}

#[test]
fn forms_that_cannot_take_tokens_back_are_refused() {
    for rule in ["num[max_tokens=5]: /[0-9]+/", "num[stop=\"\\n\"]: /.*/", "num[stop=\"\"]: /.*/"] {
        let grammar = format!("start: num\n{rule}\n");
        let error = start(&json!({ "guided_grammar": grammar })).err().expect("refused").to_json();
        assert_eq!(error["error"]["param"], "guided_grammar", "{error}");
        assert!(
            error["error"]["message"].as_str().is_some_and(|said| said.contains("rollback")),
            "{error}"
        );
    }
    assert!(start(&json!({ "guided_grammar": "start: num\nnum: /[0-9]+/\n" })).is_ok());
}

#[test]
fn random_answers_have_the_form() {
    let schema = json!({
        "type": "object",
        "properties": {
            "kind": { "enum": ["cat", "dog"] }, "legs": { "type": "integer" },
            "tame": { "type": "boolean" },
        },
        "required": ["kind", "legs", "tame"], "additionalProperties": false,
    });
    let is_animal = |text: &str| {
        let read: Value = serde_json::from_str(text).expect("JSON");
        let fields = read.as_object().expect("an object");
        fields.len() == 3
            && ["cat", "dog"].contains(&fields["kind"].as_str().expect("a text"))
            && fields["legs"].is_i64() | fields["legs"].is_u64() | fields["legs"].is_f64()
            && fields["tame"].is_boolean()
    };
    let named = json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema } });
    let mut rng = CounterRng::new(1, "answers", &[]);
    for request in [
        json!({ "response_format": named }),
        json!({ "guided_json": schema }),
        json!({ "guided_json": schema.to_string() }),
        json!({ "json_schema": schema }),
        json!({ "structured_outputs": { "json": schema, "regex": null, "json_object": false } }),
        json!({ "response_format": { "type": "json_object", "schema": schema } }),
        json!({ "response_format": { "type": "json_schema", "schema": schema } }),
    ] {
        let first = start(&request).expect("compiled");
        let mut ended = 0;
        for _ in 0..20 {
            let (text, is_whole) = answer(&mut first.copy(), &mut rng, 60);
            ended += usize::from(is_whole);
            assert!(!is_whole || is_animal(&text), "{text}");
        }
        assert!(ended >= 5, "{ended}");
    }
    for _ in 0..10 {
        let regex = json!({ "guided_regex": "[a-c]{2,4}-[0-9]" });
        let (text, is_whole) = answer(&mut start(&regex).expect("compiled"), &mut rng, 60);
        let (letters, digit) = text.split_once('-').expect("a dash");
        assert!(is_whole && letters.chars().all(|c| "abc".contains(c)), "{text}");
        assert!((2..=4).contains(&letters.len()) && digit.len() == 1, "{text}");
        let choice = json!({ "guided_choice": ["yes", "no \"at all\"\n", "\u{e9}\\"] });
        let (text, is_whole) = answer(&mut start(&choice).expect("compiled"), &mut rng, 60);
        assert!(
            is_whole && ["yes", "no \"at all\"\n", "\u{e9}\\"].contains(&text.as_str()),
            "{text}"
        );
        let lark = json!({ "guided_grammar": "start: \"(\" start \")\" | \"x\"" });
        let (text, is_whole) = answer(&mut start(&lark).expect("compiled"), &mut rng, 200);
        let half = text.len() / 2;
        let whole = format!("{}x{}", "(".repeat(half), ")".repeat(half));
        assert!(!is_whole || text == whole, "{text}");
        let any = json!({ "response_format": { "type": "json_object" } });
        let (text, is_whole) = answer(&mut start(&any).expect("compiled"), &mut rng, 200);
        assert!(!is_whole || serde_json::from_str::<Value>(&text).is_ok_and(|v| v.is_object()));
    }
}

#[test]
fn what_is_taken_back_was_never_there() {
    // The second form ends with the end of the answer, of which its parser keeps no trace.
    let suffix = "start: t\nt[suffix=\"\"]: /[ab]+/\n";
    for request in [json!({ "guided_regex": "(ab|ac)+" }), json!({ "guided_grammar": suffix })] {
        let mut state = start(&request).expect("compiled");
        let mut rng = CounterRng::new(2, "steps", &[]);
        let (mut before, mut ended) = (Vec::new(), 0);
        for _ in 0..200 {
            let now = allowed(&mut state);
            if !before.is_empty() && rng.below(3) == 0 {
                let count = 1 + rng.below(before.len() as u64) as usize;
                state.take_back(count).expect("taken back");
                let place = before.len() - count;
                assert_eq!(allowed(&mut state), before[place], "{request}: {count}");
                before.truncate(place);
            } else {
                // Ends and what comes after them, too.
                let next = now[rng.below(now.len() as u64) as usize];
                ended += usize::from([2, 3].contains(&next));
                state.advance(TargetTokenId(next)).expect("goes on");
                before.push(now);
            }
        }
        assert!(ended > 5, "{request}: {ended}");
    }
}

/// After `aw` and `bw` the same may go on the word, and something else follow it.
#[test]
fn what_may_come_next_is_not_that_of_a_text_that_was_taken_back() {
    let grammar = "start: \"a\" W \"i\" | \"b\" W \"e\"\nW: /w+/\n";
    let first = start(&json!({ "guided_grammar": grammar })).expect("compiled");
    let known = TOKENIZER.token_bytes();
    let say = |state: &mut FormState, text: &str| {
        for letter in text.bytes() {
            let id = known.iter().position(|bytes| bytes.as_deref() == Some(&[letter][..]));
            let token = TargetTokenId(id.expect("a token of one letter") as u32);
            state.advance(token).expect("goes on");
        }
    };
    let mut fresh = first.copy();
    say(&mut fresh, "bw");
    let expected = allowed(&mut fresh);
    let mut state = first.copy();
    say(&mut state, "aw");
    assert_ne!(allowed(&mut state), expected);
    state.take_back(2).expect("taken back");
    say(&mut state, "bw");
    assert_eq!(allowed(&mut state), expected);
}

#[test]
fn forms_that_cannot_be_are_refused_by_name() {
    let deep = (0..100).fold(
        json!({ "type": "null" }),
        |inner, _| json!({ "type": "array", "items": inner, "minItems": 1 }),
    );
    for (request, param) in [
        (json!({ "response_format": "json" }), "response_format.type"),
        (json!({ "response_format": { "type": "xml" } }), "response_format.type"),
        (
            json!({ "response_format": { "type": "json_schema" } }),
            "response_format.json_schema.schema",
        ),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": 3 } } }),
            "response_format.json_schema.schema",
        ),
        (json!({ "guided_json": "{" }), "guided_json"),
        (json!({ "guided_json": { "type": "nothing" } }), "guided_json"),
        (json!({ "guided_json": { "$ref": "#/nowhere" } }), "guided_json"),
        (json!({ "guided_json": { "type": "string", "pattern": "(" } }), "guided_json"),
        (
            json!({ "guided_json": { "type": "integer", "minimum": 3, "maximum": 1 } }),
            "guided_json",
        ),
        (
            json!({ "guided_json": { "allOf": [{ "type": "string" }, { "type": "null" }] } }),
            "guided_json",
        ),
        (json!({ "guided_json": false }), "guided_json"),
        (json!({ "guided_regex": "(" }), "guided_regex"),
        (json!({ "guided_regex": 3 }), "guided_regex"),
        (json!({ "guided_regex": "a".repeat(LARGEST) }), "guided_regex"),
        (json!({ "guided_choice": [] }), "guided_choice"),
        (json!({ "guided_choice": ["a", 3] }), "guided_choice"),
        (json!({ "guided_grammar": "start" }), "guided_grammar"),
        (json!({ "guided_grammar": "other: \"a\"" }), "guided_grammar"),
        (json!({ "guided_json": {}, "guided_regex": "a" }), "guided_regex"),
        (
            json!({ "response_format": { "type": "json_object", "schema": 3 } }),
            "response_format.schema",
        ),
        (json!({ "json_schema": { "type": "nothing" } }), "json_schema"),
        (json!({ "structured_outputs": "a" }), "structured_outputs"),
        (json!({ "structured_outputs": { "json": {}, "regex": "a" } }), "structured_outputs"),
        (json!({ "structured_outputs": { "choice": [] } }), "structured_outputs.choice"),
        (
            json!({ "structured_outputs": { "structural_tag": "{}" } }),
            "structured_outputs.structural_tag",
        ),
    ] {
        let error = start(&request).err().unwrap_or_else(|| panic!("{request} is compiled"));
        assert_eq!(error.to_json()["error"]["param"], param, "{request}");
    }
    assert!(start(&json!({ "guided_json": deep })).is_ok());
    for nothing in [
        json!({ "response_format": { "type": "text" }, "guided_json": null }),
        json!({ "structured_outputs": { "json": null, "disable_any_whitespace": true } }),
    ] {
        assert_eq!(Form::of(&nothing).expect("read"), None);
    }
    // What asks for nothing is no second form.
    for nothing in [
        json!({ "structured_outputs": { "json": null } }),
        json!({ "structured_outputs": { "json_object": false, "disable_fallback": true } }),
        json!({ "guided_regex": null, "structured_outputs": {} }),
    ] {
        let mut request = json!({ "response_format": { "type": "json_object" } });
        for (field, asked) in nothing.as_object().expect("an object") {
            request[field] = asked.clone();
        }
        let (field, _) = Form::of(&request).expect("read").expect("a form");
        assert_eq!(field, "response_format");
    }
    let text = json!({ "response_format": { "type": "text" }, "guided_regex": "a" });
    assert_eq!(Form::of(&text).expect("read"), Some(("guided_regex", Form::Regex("a".into()))));
    let endless = Model { stop_tokens: Vec::new(), ..model() };
    let form = Form::Regex("a".into());
    assert!(Vocabulary::default().start(("guided_regex", &form), &endless, &TOKENIZER).is_err());
}

fn schemas() -> impl Strategy<Value = Value> {
    let keys = prop::sample::select(vec![
        "type",
        "properties",
        "items",
        "enum",
        "const",
        "required",
        "anyOf",
        "oneOf",
        "allOf",
        "minLength",
        "maxItems",
        "pattern",
        "format",
        "$ref",
        "$defs",
        "additionalProperties",
        "minimum",
        "multipleOf",
        "x-guidance",
        "not",
        "prefixItems",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2_i64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec![
            "string",
            "object",
            "array",
            "integer",
            "number",
            "null",
            "date-time",
            "#",
            "#/$defs/type",
            "[a-z]+",
            "(",
            "email",
            "\u{0}",
            "a",
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 5, move |inner| {
        let pairs = prop::collection::vec((keys.clone(), inner.clone()), 0..5);
        let object = |pairs: Vec<(&str, Value)>| {
            pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
        };
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(Value::from),
            pairs.prop_map(move |pairs| Value::Object(object(pairs))),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn any_schema_is_compiled_or_refused(schema in schemas()) {
        let form = Form::of(&json!({ "guided_json": schema }));
        let state = form.map(|form| form.map(|(field, form)| {
            VOCABULARY.start((field, &form), &model(), &TOKENIZER)
        }));
        if let Ok(Some(Ok(mut state))) = state {
            let mut rng = CounterRng::new(3, "any", &[]);
            for _ in 0..8 {
                let Ok(words) = state.allowed() else { break };
                let ids = 0..32 * words.len() as u32;
                let all: Vec<u32> =
                    ids.filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
                if all.is_empty() { break }
                let next = all[rng.below(all.len() as u64) as usize];
                prop_assert!(state.advance(TargetTokenId(next)).is_ok());
            }
        }
    }

    #[test]
    fn any_grammar_is_compiled_or_refused(text in "[a-z:|()\"\\[\\]{}*+?/ \n%~0-9]{0,60}") {
        let _ = start(&json!({ "guided_grammar": text.clone() }));
        let _ = start(&json!({ "guided_regex": text }));
    }
}
