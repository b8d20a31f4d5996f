//! Sessions, their streams, and what is measured of drafting.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use longdraft::{
    Answer, AnswerOptions, EvaluationOptions, Next, Origin, PaceChoice, Prompts, SessionOptions,
    Stop, choice, layout,
};
use pyo3::prelude::*;
use serde_json::json;

use crate::errors::{raised, refused};
use crate::models::{Draft, Target, turns};
use crate::running::{TICK, require_owner, run};

/// Keyword arguments about drafting.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Drafting {
    mtp: bool,
    draft_len: usize,
    tree: Option<String>,
    lookup: Option<String>,
    datastore: Vec<PathBuf>,
    confidence_threshold: f64,
    verify: String,
    draft_vocab: Option<PathBuf>,
    draft_vocab_size: Option<usize>,
    pace: String,
}

impl Drafting {
    fn options(self) -> longdraft::Result<SessionOptions> {
        Ok(SessionOptions {
            mtp: self.mtp,
            draft_len: self.draft_len,
            tree: self.tree.as_deref().map(layout).transpose()?,
            lookup: self.lookup.as_deref().map(|how| choice("lookup", how)).transpose()?,
            datastore: self.datastore,
            confidence_threshold: self.confidence_threshold,
            verify: choice("verify", &self.verify)?,
            draft_vocab: self.draft_vocab,
            draft_vocab_size: self.draft_vocab_size,
            pace: choice::<PaceChoice>("pace", &self.pace)?,
        })
    }
}

/// Keyword arguments about an answer.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Asked {
    max_tokens: usize,
    temperature: f64,
    top_k: Option<usize>,
    top_p: f64,
    min_p: f64,
    seed: u64,
    stop: Vec<String>,
    stop_tokens: Vec<String>,
    ignore_eos: bool,
}

impl From<Asked> for AnswerOptions {
    fn from(asked: Asked) -> Self {
        let Asked { max_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos, .. } = asked;
        let (stop, stop_tokens) = (asked.stop, asked.stop_tokens);
        Self { max_tokens, temperature, top_k, top_p, min_p, seed, stop, stop_tokens, ignore_eos }
    }
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
        drafting: Drafting,
    ) -> PyResult<Self> {
        let options = drafting.options().map_err(raised)?;
        let (target, draft) = (target.0.clone(), draft.map(|draft| draft.0.clone()));
        run(py, &Stop::new(), move || longdraft::Session::with(&target, draft.as_ref(), &options))
            .map(Self)
    }

    #[getter]
    fn drafter(&self) -> &str {
        self.0.drafter()
    }

    /// An answer to a prompt, or to a user's turn of the conversation.
    fn stream(&self, py: Python<'_>, text: &str, chat: bool, asked: Asked) -> PyResult<Stream> {
        require_owner(py)?;
        let options = asked.into();
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

/// Keyword arguments about an evaluation.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Evaluating {
    max_tokens: usize,
    temperatures: Vec<f64>,
    top_k: Option<usize>,
    top_p: f64,
    min_p: f64,
    seed: u64,
    runs: usize,
    limit: Option<usize>,
    field: String,
    chat: bool,
    output: Option<PathBuf>,
}

/// What was measured, as JSON.
#[pyfunction]
pub(crate) fn evaluate(
    py: Python<'_>,
    target: &Target,
    draft: Option<&Draft>,
    prompts: (Option<String>, Vec<String>),
    drafting: Drafting,
    evaluating: Evaluating,
) -> PyResult<String> {
    let Evaluating { max_tokens, temperatures, top_k, top_p, min_p, seed, .. } = evaluating;
    let Evaluating { runs, limit, field, chat, output, .. } = evaluating;
    let options = EvaluationOptions {
        session: drafting.options().map_err(raised)?,
        max_tokens,
        temperatures,
        top_k,
        top_p,
        min_p,
        seed,
        runs,
        limit,
        field,
        chat,
        output,
    };
    let (name, texts) = prompts;
    let prompts = name.map_or(Prompts::Texts(texts), Prompts::Named);
    let (target, draft) = (target.0.clone(), draft.map(|draft| draft.0.clone()));
    let stop = Stop::new();
    let asked = stop.clone();
    run(py, &stop, move || {
        let measured = longdraft::evaluate(&target, draft.as_ref(), &prompts, &options, &asked)?;
        Ok(measured.to_string())
    })
}
