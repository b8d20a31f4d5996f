//! What is forced is a call.

use std::sync::Arc;

use longdraft_decode::Grammar;
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Value, json};

use super::super::tests::{
    HERMES, LIST, LLAMA, NAMED, SPECIAL, TAGS, bytes_of, pieces, renamed, told, tool,
};
use super::super::{Calls, Choice};
use crate::answer::tests::model;
use crate::error::Result;
use crate::grammar::{FormState, Vocabulary};

fn forced(tokenizer: &TextTokenizer, choice: &Choice, is_parallel: bool) -> Result<Calls> {
    let size = json!({ "enum": ["small", "large"] });
    let parameters = json!({
        "type": "object", "required": ["size", "is_sure"], "additionalProperties": false,
        "properties": { "size": { "$ref": "#/$defs/size" }, "is_sure": { "type": "boolean" } },
        "$defs": { "size": size },
    });
    let tools = [tool("get", Some(parameters)), tool("get_all", None)];
    Calls::of(&tools, choice, is_parallel, tokenizer).map(|calls| calls.expect("a syntax"))
}

/// The state of an answer that must be calls, and what reads these.
fn started(mut calls: Calls, tokenizer: &TextTokenizer) -> (FormState, Arc<Calls>) {
    let model = model(tokenizer.vocabulary());
    let form = calls.forced.take().expect("a form");
    let state = Vocabulary::default().start(("tool_choice", &form), &model, tokenizer);
    (state.unwrap_or_else(|error| panic!("{form:?}: {error:?}")), Arc::new(calls))
}

/// An answer of random tokens that a form allows, with its special tokens; none if it is too long.
fn random_answer(
    state: &mut FormState,
    tokenizer: &TextTokenizer,
    rng: &mut CounterRng,
) -> Option<String> {
    let mut ids = Vec::new();
    for _ in 0..2000 {
        let words = state.allowed().expect("allowed");
        let ids_of = 0..32 * words.len() as u32;
        let allowed: Vec<u32> =
            ids_of.filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        let next = allowed[rng.below(allowed.len() as u64) as usize];
        state.advance(TargetTokenId(next)).expect("goes on");
        if next == 2 {
            return Some(tokenizer.decode(&ids, false).expect("text"));
        }
        ids.push(next);
    }
    None
}

#[test]
fn forced_answers_are_calls_and_nothing_else() {
    let mut rng = CounterRng::new(1, "calls", &[]);
    for template in [HERMES, TAGS, NAMED, LIST, LLAMA] {
        let tokenizer = renamed(template, &SPECIAL);
        let named = Choice::Named("get".to_owned());
        for (choice, is_parallel) in
            [(named, true), (Choice::Required, false), (Choice::Required, true)]
        {
            let calls = forced(&tokenizer, &choice, is_parallel).expect("forced");
            let (state, calls) = started(calls, &tokenizer);
            let (mut ended, mut most) = (0, 0);
            for _ in 0..12 {
                let Some(answer) = random_answer(&mut state.copy(), &tokenizer, &mut rng) else {
                    continue;
                };
                let (text, found) = told(&calls, pieces([answer.as_str()]));
                assert!(text.is_empty() && !found.is_empty(), "{answer}");
                for (name, arguments) in &found {
                    let read: Value = serde_json::from_str(arguments).expect("JSON");
                    let is_get = read["is_sure"].is_boolean() && name == "get";
                    assert!(is_get || (name == "get_all" && arguments == "{}"), "{answer}");
                    assert!(name == "get" || !matches!(choice, Choice::Named(_)), "{answer}");
                }
                (ended, most) = (ended + 1, most.max(found.len()));
            }
            assert!(ended >= 6, "{template} {ended}");
            let may_be_many = is_parallel && choice == Choice::Required && template != LLAMA;
            assert_eq!(most > 1, may_be_many, "{template} {choice:?} {most}");
        }
    }
}

/// What stands between tags is as free as readers take it, and fits the schema.
#[test]
fn text_between_tags_ends_with_the_tag_that_ends_it() {
    let tokenizer = renamed(TAGS, &[]);
    let parameters = json!({
        "type": "object", "required": ["text", "kind"],
        "properties": {
            "text": { "type": "string" }, "kind": { "enum": ["a", "a\nb", "b\n", "</parameter>"] },
            "count": { "$ref": "#/$defs/count" },
        },
        "$defs": { "count": { "type": "integer" } },
    });
    let tools = [tool("say", Some(parameters))];
    let calls = Calls::of(&tools, &Choice::Required, false, &tokenizer).expect("read");
    let (state, calls) = started(calls.expect("a syntax"), &tokenizer);
    let value = |name: &str, value: &str| format!("<parameter={name}>\n{value}\n</parameter>\n");
    let call = |values: &[String]| {
        format!("<tool_call>\n<function=say>\n{}</function>\n</tool_call>", values.concat())
    };
    let free = "a < b </parameter \"\\\n<parameter=kind>\n\u{e9}";
    let (text, kind) = (value("text", free), value("kind", "a"));
    let said = |kind: &str| json!({ "text": free, "kind": kind });
    let mut counted = said("a");
    counted["count"] = 7.into();
    for (values, wanted) in [
        (vec![text.clone(), kind.clone()], Some(said("a"))),
        (vec![text.clone(), value("kind", "a\nb")], Some(said("a\nb"))),
        (vec![text.clone(), value("kind", "b\n")], Some(said("b\n"))),
        (vec![text.clone(), kind.clone(), value("count", "7")], Some(counted)),
        (vec![text.clone(), kind.clone(), value("count", "x")], None),
        (vec![text.clone(), value("kind", "c")], None),
        (vec![text.clone(), value("kind", "</parameter>")], None),
        (vec![kind.clone(), text.clone()], None),
        (vec![value("text", "a</parameter>\n"), kind.clone()], None),
        (vec![text.clone()], None),
        (vec![text.clone(), kind.clone(), value("other", "7")], None),
    ] {
        let answer = call(&values);
        let ids: Vec<_> = bytes_of(&tokenizer, &answer).into_iter().map(TargetTokenId).collect();
        let mut state = state.copy();
        let accepted = state.accepts(&ids).expect("told");
        assert_eq!(accepted == ids.len(), wanted.is_some(), "{answer}: {accepted}");
        let Some(wanted) = wanted else { continue };
        ids.iter().for_each(|id| state.advance(*id).expect("goes on"));
        assert_eq!(state.allowed().expect("allowed")[0] >> 2 & 1, 1, "{answer} may end");
        let (text, found) = told(&calls, pieces([answer.as_str()]));
        assert_eq!((text.as_str(), found.len(), found[0].0.as_str()), ("", 1, "say"));
        let read: Value = serde_json::from_str(&found[0].1).expect("JSON");
        assert_eq!(read, wanted, "{answer}");
    }
}
