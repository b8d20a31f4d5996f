//! `longdraft eval decode --server`: a server of any engine measured on the same prompts, alone or against
//! a second one without a draft.
//!
//! ```text
//! client     requests and their streams
//! answer     text, times and fields of a stream
//! counters   /metrics
//! passes     tokens per pass, from whatever the server reveals
//! prompts    prompt sets as requests
//! figures    what is measured, as JSON and in words
//! ```

mod answer;
mod client;
mod counters;
mod figures;
mod passes;
mod prompts;

use std::time::Duration;

use longdraft_decode::evaluate::{Comparison, PromptFigures, Side};
use longdraft_models::hub::Token;
use serde_json::{Value, json};

use super::prompts::{PromptSet, read_for};
use crate::cli::{EvalDecodeArguments, ServerArguments};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::Lines;
use crate::terminal::counted;
use answer::Answer;
use client::{Prompt, Server, Unanswered};
use figures::{Cell, Times};
use passes::Listener;
use prompts::{Asked, Remote};

/// File in `--output`.
const FILE: &str = "decode-server.json";
/// Tokens of the request that warms a server up.
const WARM_UP_TOKENS: usize = 8;
/// What it continues; no prompt of a set begins so.
const WARM_UP: &str = "A short text to warm up:";

/// Measures the servers that are named.
pub(super) fn run(arguments: &EvalDecodeArguments, json: bool) -> Result<()> {
    let options = &arguments.server;
    super::check(arguments)?;
    if options.timeout == 0 {
        return Err(Failure::usage("--timeout must be at least 1"));
    }
    let _held = super::take_output(arguments)?;
    let address = options.server.as_deref().unwrap_or_default();
    let server = open(options, address)?;
    let compared = options.compare_server.as_deref().map(|address| open(options, address));
    let compared = compared.transpose()?;
    let remote = Remote::new(compared.as_ref().unwrap_or(&server), arguments)?;
    let prompts = read_for(&PromptSet::of(arguments), &remote)?;
    let interrupts = Interrupts::listen();
    let against = compared.as_ref().map_or_else(String::new, |other| {
        format!(", in turns with {} ({})", other.address(), other.kind.name())
    });
    errln!(
        "{}, each answered {} by {} ({}){against}",
        counted(prompts.len(), "prompt"),
        counted(arguments.runs, "time"),
        server.address(),
        server.kind.name()
    );
    let mut cells = Vec::new();
    for &temperature in &arguments.temperature {
        let measuring = Measuring {
            arguments,
            server: &server,
            compared: compared.as_ref(),
            prompts: &prompts,
            request: request(arguments, temperature),
            interrupts: &interrupts,
        };
        let cell = measuring.run(temperature)?;
        figures::print(&cell);
        cells.push(cell);
    }
    let record = figures::record(arguments, (&server, compared.as_ref()), &cells);
    if let Some(folder) = &arguments.output {
        super::keep(folder, FILE, &record)?;
        outln!("wrote {}", folder.join(FILE).display());
    }
    if json {
        outln!("{record}");
    }
    Ok(())
}

fn open(options: &ServerArguments, address: &str) -> Result<Server> {
    let key = std::env::var(&options.api_key_env).ok().filter(|key| !key.trim().is_empty());
    let key = key.map(|key| {
        Token::parse(&key).ok_or_else(|| {
            Failure::usage(format!("{}: a key is one word of ASCII", options.api_key_env))
                .hint("set the variable anew, or unset it")
        })
    });
    let key = key.transpose()?;
    let silence = Duration::from_secs(options.timeout);
    Server::open(address, (key.as_ref(), options.server_model.as_deref()), silence)
}

/// What a request asks beside its prompt.
fn request(arguments: &EvalDecodeArguments, temperature: f64) -> Value {
    let decoding = &arguments.decoding;
    let mut request = json!({ "max_tokens": arguments.max_tokens, "temperature": temperature });
    if temperature > 0.0 {
        request["seed"] = json!(decoding.seed);
        if decoding.top_p < 1.0 {
            request["top_p"] = json!(decoding.top_p);
        }
        // Not OpenAI's, but known to all four.
        if let Some(top_k) = decoding.top_k {
            request["top_k"] = json!(top_k);
        }
        if decoding.min_p > 0.0 {
            request["min_p"] = json!(decoding.min_p);
        }
    }
    request
}

/// Servers at one temperature.
struct Measuring<'a> {
    arguments: &'a EvalDecodeArguments,
    server: &'a Server,
    compared: Option<&'a Server>,
    prompts: &'a [Asked],
    request: Value,
    interrupts: &'a Interrupts,
}

/// What a server's answers have come to.
struct Heard<'a> {
    /// Hears of passes; the other server's do not matter.
    listener: Option<Listener<'a>>,
    /// By prompt.
    sides: Vec<Side>,
    times: Times,
    /// Whether events stood for tokens.
    counts_events: bool,
}

impl<'a> Heard<'a> {
    fn new(listener: Option<Listener<'a>>, prompts: usize) -> Self {
        let (sides, times) = (vec![Side::default(); prompts], Times::default());
        Self { listener, sides, times, counts_events: false }
    }

    fn add(&mut self, run: usize, prompt: usize, answer: &Answer) {
        let tokens = answer.tokens.unwrap_or(answer.events);
        self.counts_events |= answer.tokens.is_none();
        let side = &mut self.sides[prompt];
        side.tokens += tokens;
        side.requests += 1;
        side.prefill_seconds += answer.first;
        side.decode_seconds += answer.end - answer.first;
        if let Some(listener) = &mut self.listener {
            listener.hear(prompt, answer);
        }
        self.times.add(run, tokens, answer);
    }

    fn pooled(&self) -> Side {
        Side::pooled(&self.sides)
    }
}

/// All answers so far.
struct Rounds<'a> {
    heard: Heard<'a>,
    other: Option<Heard<'a>>,
    /// By prompt: whether the answers of both servers were equal in every run.
    equal: Vec<Option<bool>>,
    /// By prompt: what a server that refused it said.
    refused: Vec<Option<String>>,
    /// By prompt.
    prompt_tokens: Vec<usize>,
    speed_up_of_runs: Vec<f64>,
}

impl Measuring<'_> {
    fn run(&self, temperature: f64) -> Result<Cell> {
        self.warm_up()?;
        let count = self.prompts.len();
        let mut rounds = Rounds {
            heard: Heard::new(Some(Listener::new(self.server, count)), count),
            other: self.compared.map(|_| Heard::new(None, count)),
            equal: vec![None; count],
            refused: vec![None; count],
            prompt_tokens: vec![0; count],
            speed_up_of_runs: Vec::new(),
        };
        for run in 0..self.arguments.runs {
            self.one_run(run, temperature, &mut rounds)?;
        }
        let Rounds { heard, other, equal, refused, prompt_tokens, speed_up_of_runs } = rounds;
        let refusals: Vec<&String> = refused.iter().flatten().collect();
        self.tell_refusals(&refusals)?;
        let revealed = heard.listener.map(Listener::end).unwrap_or_default();
        let prompt = |(index, asked): (usize, &Asked)| PromptFigures {
            category: asked.category.clone(),
            prompt_tokens: prompt_tokens[index],
            plain: other.as_ref().map(|other| other.sides[index]).unwrap_or_default(),
            drafted: heard.sides[index],
            acceptance: revealed.of_prompts.get(index).cloned().unwrap_or_default(),
            equal: equal[index],
            divergence: None,
        };
        let answered = self.prompts.iter().enumerate();
        // One that was answered in some runs only would weigh less than the others.
        let answered = answered.filter(|(index, _)| refused[*index].is_none());
        let prompts = answered.map(prompt).collect();
        let other_counts = other.as_ref().is_some_and(|other| other.counts_events);
        Ok(Cell {
            temperature,
            runs: self.arguments.runs,
            left_out: refusals.len(),
            comparison: Comparison { prompts, speed_up_of_runs, first_answer: Vec::new() },
            times: heard.times,
            counts_events: heard.counts_events || other_counts,
            other: other.map(|other| other.times),
            revealed,
            names: (
                figures::named(self.server),
                self.compared.map(|server| server.address().to_owned()),
            ),
        })
    }

    /// Every prompt once.
    fn one_run(&self, run: usize, temperature: f64, rounds: &mut Rounds<'_>) -> Result<()> {
        let before = (rounds.heard.pooled(), rounds.other.as_ref().map(Heard::pooled));
        let mut lines = Lines::later();
        for (index, asked) in self.prompts.iter().enumerate() {
            if rounds.refused[index].is_some() {
                continue;
            }
            if self.interrupts.asked() {
                errln!("stopped while measuring; nothing is kept");
                return Err(self.interrupts.failure());
            }
            // Who begins changes, so that neither has the warmer machine.
            let (own, theirs) = match self.answers(asked, (run + index) % 2 == 1) {
                Ok(answers) => answers,
                Err(Unanswered::Refused(problem)) => {
                    rounds.refused[index] = Some(problem);
                    continue;
                }
                Err(Unanswered::Failed(failure)) => return Err(failure),
            };
            rounds.prompt_tokens[index] = own.prompt_tokens;
            rounds.heard.add(run, index, &own);
            if let (Some(other), Some(theirs)) = (&mut rounds.other, theirs) {
                other.add(run, index, &theirs);
                if temperature == 0.0 {
                    let so_far = rounds.equal[index].unwrap_or(true);
                    rounds.equal[index] = Some(so_far && own.text == theirs.text);
                }
            }
            if lines.are_due(false) {
                self.tell(run, index, rounds);
            }
        }
        if let (Some(other), Some(then)) = (&rounds.other, before.1) {
            let (own, plain) =
                (speed(rounds.heard.pooled(), before.0), speed(other.pooled(), then));
            rounds.speed_up_of_runs.push(own / plain.max(1e-9));
        }
        Ok(())
    }

    /// Both answers to a prompt, or one where there is no second server.
    fn answers(
        &self,
        asked: &Asked,
        turned: bool,
    ) -> std::result::Result<(Answer, Option<Answer>), Unanswered> {
        let request = asked.options(self.request.clone());
        let ask = |server: &Server| server.ask(&asked.prompt, &request);
        match self.compared {
            None => Ok((ask(self.server)?, None)),
            Some(other) if turned => {
                let theirs = ask(other)?;
                Ok((ask(self.server)?, Some(theirs)))
            }
            Some(other) => {
                let own = ask(self.server)?;
                Ok((own, Some(ask(other)?)))
            }
        }
    }

    fn warm_up(&self) -> Result<()> {
        let mut request = self.prompts[0].options(self.request.clone());
        request["max_tokens"] = json!(WARM_UP_TOKENS);
        let prompt = match &self.prompts[0].prompt {
            Prompt::Text(_) => Prompt::Text(WARM_UP.to_owned()),
            Prompt::Turns(_) => Prompt::Turns(json!([{ "role": "user", "content": WARM_UP }])),
        };
        for server in [Some(self.server), self.compared].into_iter().flatten() {
            server.ask(&prompt, &request).map_err(|unanswered| self.unfit(unanswered))?;
        }
        Ok(())
    }

    /// A server that refuses a short prompt takes no prompts of this form.
    fn unfit(&self, unanswered: Unanswered) -> Failure {
        match (unanswered, &self.prompts[0].prompt) {
            (Unanswered::Refused(problem), Prompt::Turns(_)) => Failure::work(problem).hint(
                "has the model a chat template? A file of prompts without --chat is continued as text",
            ),
            (unanswered, _) => unanswered.into(),
        }
    }

    fn tell_refusals(&self, refused: &[&String]) -> Result<()> {
        match refused {
            [] => Ok(()),
            [first, ..] if refused.len() == self.prompts.len() => {
                Err(Unanswered::Refused((*first).clone()).into())
            }
            [first, ..] => {
                errln!("warning: {} prompts were refused and are left out: {first}", refused.len());
                Ok(())
            }
        }
    }

    fn tell(&self, run: usize, index: usize, rounds: &Rounds<'_>) {
        let there = rounds.other.as_ref().map_or_else(String::new, |other| {
            let speed = other.pooled().decode_tokens_per_second();
            format!(", {speed:.1} of the other server")
        });
        errln!(
            "    run {} of {}, {} of {} prompts: {:.1} tok/s{there}",
            run + 1,
            self.arguments.runs,
            index + 1,
            self.prompts.len(),
            rounds.heard.pooled().decode_tokens_per_second()
        );
    }
}

/// Tokens per second after the first ones, of what came between.
fn speed(now: Side, then: Side) -> f64 {
    let between = Side {
        tokens: now.tokens - then.tokens,
        requests: now.requests - then.requests,
        prefill_seconds: now.prefill_seconds - then.prefill_seconds,
        decode_seconds: now.decode_seconds - then.decode_seconds,
    };
    between.decode_tokens_per_second()
}
