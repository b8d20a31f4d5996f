//! Sessions, their streams, and what is measured of drafting.

use std::sync::{Mutex, PoisonError};

use longdraft::{
    Answer, AnswerOptions, EvaluationOptions, Next, Origin, Prompts, SessionOptions, Stop, choice,
    layout, template_variables,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Map, Value, json};

use crate::errors::{raised, refused};
use crate::keywords::{given, read};
use crate::models::{Draft, Target, turns};
use crate::running::{TICK, require_owner, run};

/// Variables of a chat template, of keyword arguments.
fn variables(all: &Bound<'_, PyAny>) -> PyResult<Map<String, Value>> {
    let given = read(all, "chat_template_kwargs", |_, text| template_variables(text))?;
    Ok(given.unwrap_or_default())
}

/// How a session drafts, of keyword arguments.
fn session_options(all: &Bound<'_, PyAny>) -> PyResult<SessionOptions> {
    Ok(SessionOptions {
        mtp: given(all, "mtp")?,
        draft_len: given(all, "draft_len")?,
        tree: read(all, "tree", |_, tree| layout(tree))?,
        lookup: read(all, "lookup", choice)?,
        datastore: given(all, "datastore")?,
        confidence_threshold: given(all, "confidence_threshold")?,
        verify: choice("verify", &given::<String>(all, "verify")?).map_err(raised)?,
        draft_vocab: given(all, "draft_vocab")?,
        draft_vocab_size: given(all, "draft_vocab_size")?,
        pace: choice("pace", &given::<String>(all, "pace")?).map_err(raised)?,
        chat_template_kwargs: variables(all)?,
    })
}

/// What is asked of an answer, of keyword arguments.
fn answer_options(all: &Bound<'_, PyAny>) -> PyResult<AnswerOptions> {
    Ok(AnswerOptions {
        max_tokens: given(all, "max_tokens")?,
        temperature: given(all, "temperature")?,
        top_k: given(all, "top_k")?,
        top_p: given(all, "top_p")?,
        min_p: given(all, "min_p")?,
        seed: given(all, "seed")?,
        stop: given(all, "stop")?,
        stop_tokens: given(all, "stop_tokens")?,
        ignore_eos: given(all, "ignore_eos")?,
        chat_template_kwargs: variables(all)?,
    })
}

/// Answers prompts on a thread of its own.
#[pyclass(frozen, module = "longdraft._longdraft")]
pub(crate) struct Session(longdraft::Session);

#[pymethods]
impl Session {
    #[new]
    fn new(
        py: Python<'_>,
        target: &Target,
        draft: Option<&Draft>,
        drafting: Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let options = session_options(&drafting)?;
        let (target, draft) = (target.0.clone(), draft.map(|draft| draft.0.clone()));
        run(py, &Stop::new(), move || longdraft::Session::with(&target, draft.as_ref(), &options))
            .map(Self)
    }

    #[getter]
    fn drafter(&self) -> &str {
        self.0.drafter()
    }

    /// An answer to a prompt, or to a user's turn of the conversation.
    fn stream(
        &self,
        py: Python<'_>,
        text: &str,
        chat: bool,
        asked: Bound<'_, PyAny>,
    ) -> PyResult<Stream> {
        require_owner(py)?;
        let options = answer_options(&asked)?;
        let stream = py.detach(|| {
            if chat { self.0.chat_stream(text, &options) } else { self.0.stream(text, &options) }
        });
        Ok(Stream(Mutex::new(Some(stream.map_err(raised)?))))
    }

    fn messages(&self) -> Vec<(String, String)> {
        self.0.messages().into_iter().map(|message| (message.role, message.content)).collect()
    }

    fn restart(&self, messages: Vec<(String, String)>) {
        self.0.restart(turns(messages));
    }
}

/// An answer while it is written.
#[pyclass(frozen, module = "longdraft._longdraft")]
pub(crate) struct Stream(Mutex<Option<longdraft::Stream>>);

#[pymethods]
impl Stream {
    /// The next piece with what proposed it; nothing after the last one. Ctrl-C ends the answer.
    fn next_piece(&self, py: Python<'_>) -> PyResult<Option<(String, Option<&'static str>)>> {
        // The thread that would answer is not in a process that was forked off.
        require_owner(py)?;
        loop {
            let next = py.detach(|| {
                let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                stream.as_mut().map_or(Next::End, |stream| stream.next_within(TICK))
            });
            match next {
                Next::Piece(piece) => {
                    let origin = piece.proposed_by.map(|origin| match origin {
                        Origin::Draft => "draft",
                        Origin::Lookup => "lookup",
                        Origin::Grammar => "grammar",
                    });
                    return Ok(Some((piece.text, origin)));
                }
                Next::End => return Ok(None),
                Next::Nothing => {}
            }
            if let Err(signal) = py.check_signals() {
                self.cancel(py);
                return Err(signal);
            }
        }
    }

    /// Ends the answer after the round that is under way.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| {
            if let Some(stream) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
                stream.cancel();
            }
        });
    }

    /// The whole answer as JSON, after the last piece; once.
    fn answer(&self, py: Python<'_>) -> PyResult<String> {
        while self.next_piece(py)?.is_some() {}
        let stream = py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
        let Some(stream) = stream else {
            return Err(refused(py, "the answer was taken already", "keep what it returned"));
        };
        let Answer { prompt_tokens, mut figures, .. } = stream.answer().map_err(raised)?;
        figures["prompt_tokens"] = json!(prompt_tokens);
        Ok(figures.to_string())
    }
}

/// What was measured, as JSON.
#[pyfunction]
pub(crate) fn evaluate(
    py: Python<'_>,
    target: &Target,
    draft: Option<&Draft>,
    prompts: (Option<String>, String),
    drafting: Bound<'_, PyAny>,
    evaluating: Bound<'_, PyAny>,
) -> PyResult<String> {
    let options = EvaluationOptions {
        session: session_options(&drafting)?,
        max_tokens: given(&evaluating, "max_tokens")?,
        temperatures: given(&evaluating, "temperatures")?,
        top_k: given(&evaluating, "top_k")?,
        top_p: given(&evaluating, "top_p")?,
        min_p: given(&evaluating, "min_p")?,
        seed: given(&evaluating, "seed")?,
        runs: given(&evaluating, "runs")?,
        limit: given(&evaluating, "limit")?,
        field: given(&evaluating, "field")?,
        chat: given(&evaluating, "chat")?,
        output: given(&evaluating, "output")?,
    };
    let (name, rows) = prompts;
    let rows =
        serde_json::from_str(&rows).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let (target, draft) = (target.0.clone(), draft.map(|draft| draft.0.clone()));
    let stop = Stop::new();
    let asked = stop.clone();
    run(py, &stop, move || {
        let draft = draft.as_ref();
        let measured = match name.map(Prompts::Named) {
            Some(named) => longdraft::evaluate(&target, draft, &named, &options, &asked)?,
            None => longdraft::evaluate_rows(&target, draft, rows, &options, &asked)?,
        };
        Ok(measured.to_string())
    })
}
