//! What all requests share: the model's description, the way to the decoder, room for answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use axum::http::StatusCode;
use longdraft_decode::DecodeError;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::drafts::{OpenDraft, Swap, Work};
use crate::error::{ApiError, Result};
use crate::events::{Event, Share, Task};
use crate::grammar::{Form, FormState, Vocabulary};
use crate::meters::Meters;
use crate::request::Asked;
use crate::{Limits, Settings};

/// Marks the draws of requests without a seed.
const UNSEEDED: u64 = u64::MAX;

/// The HTTP side.
pub(crate) struct App {
    pub(crate) settings: Settings,
    pub(crate) tokenizer: TextTokenizer,
    /// When the server began, in seconds since 1970.
    pub(crate) began: u64,
    work: UnboundedSender<Work>,
    /// Opens the draft anew.
    open_draft: Option<Arc<OpenDraft>>,
    /// Answers that may run or wait.
    room: Arc<Semaphore>,
    capacity: usize,
    /// Tokens that requests may have between them, if that is limited.
    tokens: Option<Arc<Semaphore>>,
    meters: Arc<Meters>,
    vocabulary: Vocabulary,
    /// Requests so far.
    requests: AtomicU64,
}

/// Answers under way.
pub(crate) struct Submitted {
    /// Which request of this server.
    pub(crate) number: u64,
    /// Tokens of all prompts.
    pub(crate) prompt_tokens: usize,
    /// Answers to come.
    pub(crate) answers: usize,
    /// Of them, to each prompt.
    pub(crate) count: usize,
    pub(crate) events: UnboundedReceiver<(usize, Event)>,
}

impl App {
    /// The HTTP side of a decoder of so many places.
    pub(crate) fn new(
        settings: Settings,
        tokenizer: TextTokenizer,
        (places, open_draft, work): (usize, Option<Arc<OpenDraft>>, UnboundedSender<Work>),
    ) -> Arc<Self> {
        let capacity = (places + settings.limits.queue).min(Semaphore::MAX_PERMITS);
        let board = settings.lessons.as_ref().map(|lessons| Arc::clone(&lessons.board));
        let tokens = settings.limits.total_tokens.map(|most| most.min(Semaphore::MAX_PERMITS));
        let app = Self {
            settings,
            tokenizer,
            began: seconds_since_1970(),
            work,
            open_draft,
            room: Arc::new(Semaphore::new(capacity)),
            capacity,
            tokens: tokens.map(|most| Arc::new(Semaphore::new(most))),
            meters: Arc::new(Meters::new(board)),
            vocabulary: Vocabulary::default(),
            requests: AtomicU64::new(0),
        };
        Arc::new(app)
    }

    pub(crate) fn meters(&self) -> Arc<Meters> {
        Arc::clone(&self.meters)
    }

    /// Works on a thread that may take its time.
    pub(crate) async fn aside<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let app = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || work(&app)).await;
        done.unwrap_or_else(|_| {
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            Err(ApiError::new(status, "the request could not be read"))
        })
    }

    /// Refuses a request that would find no room, before work is spent on it.
    pub(crate) fn require_room(&self) -> Result<()> {
        match self.room.available_permits() {
            0 => Err(ApiError::busy(self.meters.retry_after())),
            _ => Ok(()),
        }
    }

    /// What a request asks for, with the form that it wants its answers to have.
    pub(crate) fn formed(&self, asked: Asked, value: &Value) -> Result<Asked> {
        let Some((field, form)) = Form::of(value)? else { return Ok(asked) };
        let Settings { model, .. } = &self.settings;
        let form = self.vocabulary.start((field, &form), model, &self.tokenizer)?;
        Ok(Asked { form: Some(form), ..asked })
    }

    /// Hands answers to the decoder, all of them or none.
    ///
    /// # Errors
    /// - a prompt does not fit, there is no room, or the server ends
    pub(crate) fn submit(&self, asked: Asked) -> Result<Submitted> {
        let Asked { prompts, count, options, is_seeded, stops, form, .. } = asked;
        let context = self.settings.model.context;
        for prompt in &prompts {
            if prompt.is_empty() {
                return Err(DecodeError::EmptyPrompt.into());
            }
            if prompt.len() >= context {
                return Err(DecodeError::PromptTooLong { prompt: prompt.len(), context }.into());
            }
        }
        let answers = prompts.len() * count;
        if answers > self.capacity {
            let most = self.capacity;
            return Err(ApiError::field(
                "n",
                format!("n: at most {most} answers are given at once"),
            ));
        }
        let sizes: Vec<usize> = prompts
            .iter()
            .map(|prompt| prompt.len().saturating_add(options.max_new_tokens).min(context))
            .collect();
        let mut tokens = self.reserve(sizes.iter().sum::<usize>().saturating_mul(count))?;
        let room = Arc::clone(&self.room).try_acquire_many_owned(answers as u32);
        let mut room = room.map_err(|_| ApiError::busy(self.meters.retry_after()))?;
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let (sender, events) = unbounded_channel();
        let prompt_tokens = prompts.iter().map(Vec::len).sum();
        let asked = Instant::now();
        for (place, prompt) in prompts.into_iter().enumerate() {
            let prompt = Arc::new(prompt);
            for choice in place * count..(place + 1) * count {
                let mut options = options.clone();
                if !is_seeded {
                    options.request = vec![UNSEEDED, number];
                }
                if choice > 0 {
                    options.request.push(choice as u64);
                }
                let Some(own) = room.split(1) else { return Err(ApiError::ending()) };
                let size = sizes[place];
                let tokens = tokens.as_mut().and_then(|tokens| tokens.split(size));
                let share = Share { _place: own, _tokens: tokens };
                let task = Task {
                    choice,
                    prompt: Arc::clone(&prompt),
                    options,
                    stops: stops.clone(),
                    form: form.as_ref().map(FormState::copy),
                    events: sender.clone(),
                    asked,
                    _share: share,
                };
                self.work.send(Work::Answer(Box::new(task))).map_err(|_| ApiError::ending())?;
            }
        }
        Ok(Submitted { number, prompt_tokens, answers, count, events })
    }

    /// Opens the draft anew and has it propose from now on; its method.
    pub(crate) async fn reload(self: &Arc<Self>) -> Result<&'static str> {
        let Some(open) = self.open_draft.clone() else {
            let message = "the server was started without --draft: there is nothing to open anew";
            return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
        };
        let refused = |problem: String| {
            let message = format!("{problem}; the draft before it goes on");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message).code("draft_not_opened")
        };
        let draft = self.aside(move |_| open().map_err(refused)).await?;
        let method = draft.method();
        let (done, told) = oneshot::channel();
        let swap = Work::Swap(Swap { draft, done });
        self.work.send(swap).map_err(|_| ApiError::ending())?;
        told.await.map_err(|_| ApiError::ending())?.map_err(refused)?;
        Ok(method)
    }

    /// Sets tokens of a request aside, if these are limited.
    fn reserve(&self, wanted: usize) -> Result<Option<OwnedSemaphorePermit>> {
        let Limits { request_tokens, total_tokens, .. } = &self.settings.limits;
        let most = request_tokens.iter().chain(total_tokens).copied().min();
        if let Some(most) = most.filter(|most| wanted > *most) {
            let message = format!(
                "the prompts and answers of this request may have {wanted} tokens, and at most {most} are \
                 allowed: shorten the prompt, or lower max_tokens or n"
            );
            return Err(ApiError::new(StatusCode::BAD_REQUEST, message).code("too_many_tokens"));
        }
        let Some(tokens) = &self.tokens else { return Ok(None) };
        let busy = || ApiError::busy(self.meters.retry_after());
        let wanted = u32::try_from(wanted).map_err(|_| busy())?;
        let reserved = Arc::clone(tokens).try_acquire_many_owned(wanted).map_err(|_| busy())?;
        Ok(Some(reserved))
    }
}

/// Now.
pub(crate) fn seconds_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
