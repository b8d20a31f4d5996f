//! What is forced is a call.

use std::sync::Arc;

use longdraft_decode::Grammar;
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Value, json};

use super::super::tests::{HERMES, LIST, LLAMA, NAMED, SPECIAL, pieces, renamed, told, tool};
use super::super::{Calls, Choice};
use crate::Model;
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
    for template in [HERMES, NAMED, LIST, LLAMA] {
        let tokenizer = renamed(template, &SPECIAL);
        let vocabulary = Vocabulary::default();
        let model = Model {
            name: "small".to_owned(),
            context: 4096,
            vocabulary: tokenizer.vocabulary(),
            bos: Some(1),
            stop_tokens: vec![TargetTokenId(2)],
        };
        let named = Choice::Named("get".to_owned());
        for (choice, is_parallel) in
            [(named, true), (Choice::Required, false), (Choice::Required, true)]
        {
            let mut calls = forced(&tokenizer, &choice, is_parallel).expect("forced");
            let form = calls.forced.take().expect("a form");
            let state = vocabulary.start(("tool_choice", &form), &model, &tokenizer);
            let state = state.unwrap_or_else(|error| panic!("{template}: {error:?}"));
            let calls = Arc::new(calls);
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
