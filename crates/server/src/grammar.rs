//! Answers of a given form: `response_format` and its relatives, compiled by llguidance.

use std::sync::{Arc, OnceLock};
use std::thread;

use axum::http::StatusCode;
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use longdraft_decode::{DecodeError, Grammar};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Value, json};

use crate::Model;
use crate::error::{ApiError, Result};

/// Largest description of a form, in bytes.
pub(crate) const LARGEST: usize = 1 << 16;
/// Tokens that may come next among which it is looked for a single way on; the beginnings of a token are
/// fewer.
const FEW: usize = 64;
/// Fields that ask for a form; a request has one of them. `json_schema` is llama.cpp's, the next ones are vLLM's.
const FIELDS: [&str; 7] = [
    "response_format",
    "json_schema",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
];

/// The form that a request asks its answers to have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    /// JSON that a schema describes.
    Schema(Value),
    /// What a regular expression matches as a whole.
    Regex(String),
    /// One of some texts.
    Choice(Vec<String>),
    /// A context-free grammar in Lark's notation.
    Lark(String),
}

impl Form {
    /// What a request asks for, if it does. A field that asks for nothing counts as left out.
    pub(crate) fn of(value: &Value) -> Result<Option<(&'static str, Self)>> {
        let mut found: Option<(&'static str, Self)> = None;
        for field in FIELDS {
            let Some(form) = Self::of_field(field, &value[field])? else { continue };
            if let Some((first, _)) = found {
                let message = format!("{field} and {first}: an answer has one form");
                return Err(ApiError::field(field, message));
            }
            found = Some((field, form));
        }
        Ok(found)
    }

    /// What one field asks for.
    fn of_field(field: &'static str, asked: &Value) -> Result<Option<Self>> {
        let wrong = |problem: &str| ApiError::field(field, format!("{field}: {problem}"));
        if asked.is_null() {
            return Ok(None);
        }
        if asked.to_string().len() > LARGEST {
            return Err(wrong(&format!("at most {LARGEST} bytes are read")));
        }
        match field {
            "response_format" => response_format(asked),
            "structured_outputs" => structured(asked),
            "json_schema" => Self::of_kind("json", asked).map(Some).map_err(|said| wrong(&said)),
            guided => {
                let kind = guided.trim_start_matches("guided_");
                Self::of_kind(kind, asked).map(Some).map_err(|said| wrong(&said))
            }
        }
    }

    /// A form as vLLM has it: `json`, `regex`, `choice` or `grammar`, or what is wrong with it.
    fn of_kind(kind: &str, asked: &Value) -> std::result::Result<Self, String> {
        let text = || asked.as_str().map(str::to_owned).ok_or("a text is needed");
        Ok(match kind {
            "json" => Self::Schema(match asked {
                Value::String(text) => {
                    serde_json::from_str(text).map_err(|error| error.to_string())?
                }
                schema => schema.clone(),
            }),
            "regex" => Self::Regex(text()?),
            "choice" => {
                let texts = asked.as_array().into_iter().flatten();
                let texts: Option<Vec<String>> =
                    texts.map(|text| text.as_str().map(str::to_owned)).collect();
                let texts = texts.filter(|texts| !texts.is_empty());
                Self::Choice(texts.ok_or("a list of texts is needed")?)
            }
            "grammar" => Self::Lark(text()?),
            _ => return Err("json, regex, choice, grammar or json_object is needed".to_owned()),
        })
    }

    fn compiled(&self) -> TopLevelGrammar {
        match self {
            Self::Schema(schema) => TopLevelGrammar::from_json_schema(on_one_line(schema)),
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Choice(texts) => {
                let texts: Vec<String> =
                    texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        }
    }
}

/// The schema of JSON on one line, unless it says how it is to be laid out: small models else write spaces
/// for ever.
pub(crate) fn on_one_line(schema: &Value) -> Value {
    let layout =
        json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
    let mut schema = match schema {
        Value::Object(schema) => schema.clone(),
        // `true` allows everything, `false` nothing.
        other => [("allOf".to_owned(), json!([other]))].into_iter().collect(),
    };
    schema.entry("x-guidance").or_insert(layout);
    Value::Object(schema)
}

fn response_format(format: &Value) -> Result<Option<Form>> {
    let wrong =
        |param: &str, problem: &str| Err(ApiError::field(param, format!("{param}: {problem}")));
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => match &format["schema"] {
            Value::Null => Ok(Some(any_object())),
            schema @ (Value::Object(_) | Value::Bool(_)) => Ok(Some(Form::Schema(schema.clone()))),
            _ => wrong("response_format.schema", "a JSON schema is needed"),
        },
        // llama.cpp has the schema in either place.
        Some("json_schema") => match (&format["json_schema"]["schema"], &format["schema"]) {
            (schema @ (Value::Object(_) | Value::Bool(_)), _)
            | (Value::Null, schema @ (Value::Object(_) | Value::Bool(_))) => {
                Ok(Some(Form::Schema(schema.clone())))
            }
            _ => wrong("response_format.json_schema.schema", "a JSON schema is needed"),
        },
        _ => wrong("response_format.type", "text, json_object or json_schema is needed"),
    }
}

/// JSON that is an object.
fn any_object() -> Form {
    Form::Schema(json!({ "type": "object" }))
}

/// Keys of vLLM's `structured_outputs` that change nothing here: JSON is on one line anyway.
const HARMLESS: [&str; 2] = ["disable_any_whitespace", "disable_fallback"];

/// The form in an object that has at most one, as vLLM has them since it dropped `guided_*`.
fn structured(asked: &Value) -> Result<Option<Form>> {
    let wrong = |param: &str, problem: &str| ApiError::field(param, format!("{param}: {problem}"));
    let field = "structured_outputs";
    let Value::Object(fields) = asked else { return Err(wrong(field, "an object is needed")) };
    let asks = |(key, asked): &(&String, &Value)| {
        !HARMLESS.contains(&key.as_str()) && !matches!(asked, Value::Null | Value::Bool(false))
    };
    let mut kinds = fields.iter().filter(asks);
    let Some((kind, asked)) = kinds.next() else { return Ok(None) };
    if let Some((second, _)) = kinds.next() {
        return Err(wrong(field, &format!("{second} and {kind}: an answer has one form")));
    }
    if kind == "json_object" {
        return Ok(Some(any_object()));
    }
    let form = Form::of_kind(kind, asked);
    form.map(Some).map_err(|problem| wrong(&format!("{field}.{kind}"), &problem))
}

/// The vocabulary as grammars see it; made when the first request needs it.
#[derive(Default)]
pub(crate) struct Vocabulary(OnceLock<std::result::Result<ParserFactory, String>>);

impl Vocabulary {
    /// A form's state at the start of an answer.
    pub(crate) fn start(
        &self,
        (field, form): (&str, &Form),
        model: &Model,
        tokenizer: &TextTokenizer,
    ) -> Result<FormState> {
        let refused = |problem: String| ApiError::field(field, format!("{field}: {problem}"));
        let factory = self.0.get_or_init(|| factory(model, tokenizer));
        let factory = factory.as_ref().map_err(|problem| refused(problem.clone()))?;
        let matcher = on_large_stack(|| compiled(factory, form))?.map_err(refused)?;
        Ok(FormState { matcher, after: 0 })
    }
}

/// Enough for forms of the largest size, whatever nests in them. Pages that are not touched take no memory.
/// The first one that can be had is taken.
const STACKS: [usize; 2] = [512 << 20, 64 << 20];

/// Works where recursion may be deep: a stack that overflows ends the process.
fn on_large_stack<T: Send>(work: impl Fn() -> T + Sync) -> Result<T> {
    thread::scope(|scope| {
        let start =
            |size: &usize| thread::Builder::new().stack_size(*size).spawn_scoped(scope, &work).ok();
        let Some(thread) = STACKS.iter().find_map(start) else {
            let problem = "no thread could be had: too little memory, or too many threads";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, problem));
        };
        let failed =
            |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the form could not be read");
        thread.join().map_err(failed)
    })
}

/// The parser of a form, at its start.
fn compiled(factory: &ParserFactory, form: &Form) -> std::result::Result<Matcher, String> {
    let parser = factory.create_parser(form.compiled()).map_err(|error| format!("{error:#}"))?;
    let matcher = Matcher::new(Ok(parser));
    match matcher.get_error() {
        Some(problem) => Err(problem),
        None => goes_back(&matcher).map(|()| matcher),
    }
}

/// Refuses a parser that cannot take tokens back, which drafting does: one with lexemes that end by `stop=` or
/// `max_tokens=`.
fn goes_back(matcher: &Matcher) -> std::result::Result<(), String> {
    let mut trial = matcher.deep_clone();
    let words = trial.compute_mask_or_eos().map_err(|error| format!("{error:#}"))?;
    let environment = trial.tok_env().map_err(|error| format!("{error:#}"))?;
    let goes_on = |id: &u32| !environment.tok_trie().eos_tokens().contains(id);
    let Some(first) = ids(words.as_slice()).find(goes_on) else { return Ok(()) };
    let back = trial.consume_token(first).and_then(|()| trial.rollback(1));
    back.map_err(|error| format!("{error:#}"))
}

/// The set bits.
fn ids(words: &[u32]) -> impl Iterator<Item = u32> {
    let bits = |(word, bits): (usize, &u32)| {
        let (word, bits) = (word as u32, *bits);
        (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| 32 * word + bit)
    };
    words.iter().enumerate().flat_map(bits)
}

fn factory(model: &Model, tokenizer: &TextTokenizer) -> std::result::Result<ParserFactory, String> {
    let ends: Vec<u32> = model.stop_tokens.iter().map(|token| token.0).collect();
    let ends: Vec<u32> = ends.into_iter().filter(|id| (*id as usize) < model.vocabulary).collect();
    let Some(first) = ends.first() else {
        return Err("this model has no token that ends an answer".into());
    };
    let mut tokens = tokenizer.token_bytes();
    tokens.resize(model.vocabulary, None);
    let words: Vec<Vec<u8>> = tokens
        .into_iter()
        .enumerate()
        // No grammar's text leads to a special token.
        .map(|(id, bytes)| bytes.unwrap_or_else(|| special(id)))
        .collect();
    let info = TokRxInfo::new(model.vocabulary as u32, *first);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = SlicedBiasComputer::general_slices();
    let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
    let mut factory = factory.map_err(|error| error.to_string())?;
    factory.quiet().limits_mut().verbose_errors = false;
    Ok(factory)
}

fn special(id: usize) -> Vec<u8> {
    let mut bytes = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    bytes.extend_from_slice(format!("[{id}]").as_bytes());
    bytes
}

/// Where an answer stands in its form.
pub(crate) struct FormState {
    matcher: Matcher,
    /// Tokens after the form's text: an end, which the matcher need not take back, and what follows.
    after: usize,
}

impl FormState {
    /// The same for another answer.
    pub(crate) fn copy(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), after: self.after }
    }

    /// The longest token that may come next, and whether it is special, where all others are beginnings
    /// of it: there is one way on.
    fn only_way(&mut self) -> longdraft_decode::Result<Option<(TargetTokenId, bool)>> {
        let allowed: Vec<u32> = ids(&self.allowed()?).take(FEW + 1).collect();
        if allowed.len() > FEW {
            return Ok(None);
        }
        let environment = self.matcher.tok_env().map_err(unfit)?;
        let trie = environment.tok_trie();
        let Some(longest) = allowed.iter().copied().max_by_key(|id| trie.token(*id).len()) else {
            return Ok(None);
        };
        let all = trie.token(longest);
        let is_only = allowed.iter().all(|id| all.starts_with(trie.token(*id)));
        let way = (TargetTokenId(longest), trie.is_special_token(longest));
        Ok(is_only.then_some(way))
    }

    /// The tokens that end an answer.
    fn ends(&self) -> longdraft_decode::Result<Vec<u32>> {
        let environment = self.matcher.tok_env().map_err(unfit)?;
        Ok(environment.tok_trie().eos_tokens().to_vec())
    }
}

fn unfit(error: impl std::fmt::Display) -> DecodeError {
    DecodeError::Grammar(format!("{error:#}"))
}

impl Grammar for FormState {
    fn allowed(&mut self) -> longdraft_decode::Result<Vec<u32>> {
        let mut words = self.matcher.compute_mask_or_eos().map_err(unfit)?.as_slice().to_vec();
        if self.after > 0 {
            words.fill(0);
            for end in self.ends()? {
                words[end as usize / 32] |= 1 << (end % 32);
            }
        }
        Ok(words)
    }

    fn accepts(&mut self, tokens: &[TargetTokenId]) -> longdraft_decode::Result<usize> {
        if self.after > 0 {
            return Ok(0);
        }
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        self.matcher.validate_tokens(&ids).map_err(unfit)
    }

    fn forced(&mut self, most: usize) -> longdraft_decode::Result<Vec<TargetTokenId>> {
        let mut run = Vec::new();
        while run.len() < most
            && let Some((token, ends)) = self.only_way()?
        {
            self.advance(token)?;
            run.push(token);
            if ends {
                break;
            }
        }
        self.take_back(run.len())?;
        Ok(run)
    }

    fn advance(&mut self, token: TargetTokenId) -> longdraft_decode::Result<()> {
        let is_over = self.matcher.is_stopped() && !self.matcher.is_error();
        // Some forms take an end without a trace, and could not take it back.
        let ends = |state: &mut Self| -> longdraft_decode::Result<bool> {
            let is_end = state.ends()?.contains(&token.0);
            Ok(is_end && ids(&state.allowed()?).any(|id| id == token.0))
        };
        if is_over || self.after > 0 || ends(self)? {
            self.after += 1;
            return Ok(());
        }
        self.matcher.consume_token(token.0).map_err(unfit)
    }

    fn take_back(&mut self, count: usize) -> longdraft_decode::Result<()> {
        let after = count.min(self.after);
        self.after -= after;
        self.matcher.rollback(count - after).map_err(unfit)?;
        if count > after {
            // It may be of a text that was taken back: states are told apart by their number alone.
            self.matcher.invalidate_bias_cache();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
