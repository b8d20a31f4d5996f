//! What all requests share: the model's description, the way to the decoder, room for answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use axum::http::StatusCode;
use longdraft_decode::DecodeError;
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::drafts::{Line, OpenDraft, Swap, Work};
use crate::error::{ApiError, Result};
use crate::events::{Event, Share, Task};
use crate::grammar::{Form, FormState, Vocabulary};
use crate::meters::Meters;
use crate::request::Asked;
use crate::{Limits, Model, Settings, TOKENISING_THREADS};

/// Marks the draws of requests without a seed.
const UNSEEDED: u64 = u64::MAX;

/// The HTTP side.
pub(crate) struct App {
    pub(crate) settings: Settings,
    pub(crate) tokenizer: TextTokenizer,
    /// When the server began, in seconds since 1970.
    pub(crate) began: u64,
    line: Line,
    open_draft: Option<Arc<OpenDraft>>,
    /// Requests that may be read.
    entries: Arc<Semaphore>,
    /// Answers that may run or wait.
    room: Arc<Semaphore>,
    capacity: usize,
    /// Tokens that requests may have between them, if that is limited.
    tokens: Option<Arc<Semaphore>>,
    meters: Arc<Meters>,
    vocabulary: Vocabulary,
    requests: AtomicU64,
}

/// Answers under way.
pub(crate) struct Submitted {
    /// Which request of this server.
    pub(crate) number: u64,
    pub(crate) prompt_tokens: usize,
    pub(crate) answers: usize,
    /// Answers to each prompt.
    pub(crate) count: usize,
    pub(crate) events: UnboundedReceiver<(usize, Event)>,
}

impl App {
    /// The HTTP side of a decoder of so many places.
    pub(crate) fn new(
        settings: Settings,
        tokenizer: TextTokenizer,
        (places, open_draft, line): (usize, Option<Arc<OpenDraft>>, Line),
    ) -> Arc<Self> {
        let capacity = (places + settings.limits.queue).min(Semaphore::MAX_PERMITS);
        let board = settings.lessons.as_ref().map(|lessons| Arc::clone(&lessons.board));
        let tokens = settings.limits.total_tokens.map(|most| most.min(Semaphore::MAX_PERMITS));
        let app = Self {
            settings,
            tokenizer,
            began: seconds_since_1970(),
            line,
            open_draft,
            entries: Arc::new(Semaphore::new(capacity.max(TOKENISING_THREADS))),
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

    /// Lets a request in, if not too many are read.
    pub(crate) fn enter(&self) -> Result<OwnedSemaphorePermit> {
        let entry = Arc::clone(&self.entries).try_acquire_owned();
        entry.map_err(|_| ApiError::busy(self.meters.retry_after()))
    }

    /// Works on a thread that may take its time. The place of the request is free again when that is done, also
    /// where nobody waits for it any more.
    pub(crate) async fn aside<T: Send + 'static>(
        self: &Arc<Self>,
        place: OwnedSemaphorePermit,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let app = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || {
            let done = work(&app);
            drop(place);
            done
        });
        done.await.unwrap_or_else(|_| {
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

    /// What a request asks for, with the form that it wants its answers to have. Answers of a form of its own
    /// make no calls.
    pub(crate) fn formed(&self, mut asked: Asked, value: &Value) -> Result<Asked> {
        let forced = asked.calls.as_mut().and_then(|calls| calls.forced.take());
        let (field, form) = match (Form::of(value)?, forced) {
            (None, None) => return Ok(asked),
            (None, Some(form)) => ("tool_choice", form),
            (Some(form), None) => {
                asked.calls = None;
                form
            }
            (Some((field, _)), Some(_)) => {
                let message = format!("{field} and tool_choice: an answer has one form");
                return Err(ApiError::field(field, message));
            }
        };
        if asked.options.late.after > 0 {
            let message = format!("min_tokens and {field}: an answer ends where its form does");
            return Err(ApiError::field("min_tokens", message));
        }
        let Settings { model, .. } = &self.settings;
        let form = self.vocabulary.start((field, &form), model, &self.tokenizer)?;
        Ok(Asked { form: Some(form), ..asked })
    }

    /// Hands answers to the decoder, all of them or none.
    ///
    /// # Errors
    /// - a prompt does not fit, there is no room, or the server ends
    pub(crate) fn submit(&self, asked: Asked) -> Result<Submitted> {
        self.require_prompts(&asked)?;
        let Asked { prompts, count, mut options, is_seeded, names_limit, .. } = asked;
        let Asked { stops, own_ends, form, .. } = asked;
        let is_chat = asked.telling.is_chat;
        let answers = prompts.len() * count;
        if !names_limit {
            options.max_new_tokens = options.max_new_tokens.min(self.left(&prompts, count));
        }
        let context = self.settings.model.context;
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
                // A seed gives each prompt the draws that it has alone.
                let nth = if is_seeded { choice % count } else { choice };
                if nth > 0 {
                    options.request.push(nth as u64);
                }
                let Some(own) = room.split(1) else { return Err(ApiError::ending()) };
                let size = sizes[place];
                let tokens = tokens.as_mut().and_then(|tokens| tokens.split(size));
                let task = Task {
                    choice,
                    prompt: Arc::clone(&prompt),
                    options,
                    stops: stops.clone(),
                    own_ends,
                    goes_on: !is_chat,
                    form: form.as_ref().map(FormState::copy),
                    events: sender.clone(),
                    asked,
                    share: Arc::new(Share { _place: own, _tokens: tokens }),
                };
                let work = Work::Answer(Box::new(task));
                self.line.sender.send(work).map_err(|_| ApiError::ending())?;
            }
        }
        Ok(Submitted { number, prompt_tokens, answers, count, events })
    }

    /// Refuses prompts that cannot be answered, and more answers than there are places.
    fn require_prompts(&self, Asked { prompts, count, telling, .. }: &Asked) -> Result<()> {
        let Model { context, vocabulary, .. } = self.settings.model;
        let own = if telling.is_chat { "messages" } else { "prompt" };
        for prompt in prompts {
            let fits = DecodeError::check_prompt(prompt, context, vocabulary);
            fits.map_err(|error| match error {
                DecodeError::EmptyPrompt => ApiError::field(own, format!("{own}: {error}")),
                other => other.into(),
            })?;
        }
        if prompts.len() * count > self.capacity {
            let (most, field) = (self.capacity, if *count > 1 { "n" } else { own });
            let message = format!("{field}: at most {most} answers are given at once");
            return Err(ApiError::field(field, message));
        }
        Ok(())
    }

    /// Tokens that the limits leave each answer, at least one.
    fn left(&self, prompts: &[Vec<TargetTokenId>], count: usize) -> usize {
        let of_prompts = prompts.iter().map(Vec::len).sum::<usize>().saturating_mul(count);
        let answers = (prompts.len() * count).max(1);
        let left = |most: usize| most.saturating_sub(of_prompts) / answers;
        self.most_tokens().map_or(usize::MAX, left).max(1)
    }

    /// Most tokens of a request, if they are limited.
    fn most_tokens(&self) -> Option<usize> {
        let Limits { request_tokens, total_tokens, .. } = &self.settings.limits;
        request_tokens.iter().chain(total_tokens).copied().min()
    }

    /// Opens the draft anew and has it propose from now on; its method.
    pub(crate) async fn reload(
        self: &Arc<Self>,
        place: OwnedSemaphorePermit,
    ) -> Result<&'static str> {
        let Some(open) = self.open_draft.clone() else {
            let message = "the server was started without --draft: there is nothing to open anew";
            return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
        };
        let refused = |problem: String| {
            let message = format!("{problem}; the draft before it goes on");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message).code("draft_not_opened")
        };
        let Ok(_alone) = Arc::clone(&self.line.changes).try_lock_owned() else {
            let message = "another draft is opened at this moment: ask again when it proposes";
            let error = ApiError::new(StatusCode::CONFLICT, message);
            return Err(error.code("reload_under_way"));
        };
        let proposer = self.aside(place, move |_| open().map_err(refused)).await?;
        let method = proposer.draft.method();
        let (done, told) = oneshot::channel();
        let swap = Work::Swap(Swap { proposer, done });
        self.line.sender.send(swap).map_err(|_| ApiError::ending())?;
        told.await.map_err(|_| ApiError::ending())?.map_err(refused)?;
        Ok(method)
    }

    /// Sets tokens of a request aside, if these are limited.
    fn reserve(&self, wanted: usize) -> Result<Option<OwnedSemaphorePermit>> {
        if let Some(most) = self.most_tokens().filter(|most| wanted > *most) {
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

pub(crate) fn seconds_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
