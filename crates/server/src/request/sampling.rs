//! What requests of both kinds say about sampling and limits.

use std::collections::BTreeMap;

use longdraft_decode::{DecodeOptions, LateTokens, Sampling};
use longdraft_models::TargetTokenId;
use serde::Deserialize;

use super::{Asked, OneOrMany, StreamOptions, Telling, require_ids};
use crate::error::{ApiError, Result};
use crate::{Model, Settings};

/// Most texts that end an answer, and the longest of them in bytes.
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 1024;
/// Most tokens that end an answer beside the model's own: each token is compared with them.
const MOST_STOP_TOKENS: usize = 128;
const MOST_ANSWERS: usize = 128;
/// Largest penalty and bias.
const PENALTY: f64 = 2.0;
const BIAS: f32 = 100.0;
/// Entries that a bias may have, however small the vocabulary is; else as many as that has tokens.
const LEAST_BIASED: usize = 300;
/// Largest temperature.
const TEMPERATURE: f64 = 2.0;

/// Fields that chats and completions have in common.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct SamplingRequest {
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    n: Option<usize>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    seed: Option<i64>,
    stop: Option<OneOrMany<String>>,
    /// Not OpenAI's, but of vLLM and SGLang, as the next two.
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    min_tokens: Option<usize>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    logit_bias: Option<BTreeMap<String, f32>>,
    /// Not OpenAI's: events of a stream say where their token comes from.
    origins: Option<bool>,
}

impl SamplingRequest {
    /// What is asked for: answers to `prompts`, of `otherwise` tokens where the request does not say, with
    /// log-probabilities of so many tokens beside the own one, if there are to be some.
    pub(super) fn asked(
        &self,
        settings: &Settings,
        (prompts, is_chat): (Vec<Vec<TargetTokenId>>, bool),
        (otherwise, log_probs): (usize, Option<usize>),
    ) -> Result<Asked> {
        let most = (otherwise, settings.limits.max_tokens);
        let mut options = self.options(&settings.model, &settings.defaults, most)?;
        options.log_probs = log_probs;
        let own_ends = self.set_ends(&mut options, &settings.model, otherwise)?;
        let (streams, streams_usage) = self.streams()?;
        let (log_probs, origins) = (log_probs.is_some(), self.origins.unwrap_or(false));
        Ok(Asked {
            prompts,
            count: self.count()?,
            options,
            is_seeded: self.seed.is_some(),
            names_limit: self.limit().is_some(),
            stops: self.stops()?,
            own_ends,
            form: None,
            calls: None,
            telling: Telling { is_chat, streams, streams_usage, log_probs, origins },
        })
    }

    /// Answers to each prompt.
    pub(super) fn count(&self) -> Result<usize> {
        match self.n.unwrap_or(1) {
            count @ 1..=MOST_ANSWERS => Ok(count),
            count => Err(ApiError::field("n", format!("n is 1 to {MOST_ANSWERS}, not {count}"))),
        }
    }

    /// Texts that end an answer.
    fn stops(&self) -> Result<Vec<String>> {
        let stops = self.stop.clone().map(OneOrMany::into_vec).unwrap_or_default();
        if stops.len() > MOST_STOPS || stops.iter().any(|stop| stop.len() > LONGEST_STOP) {
            let most = format!("at most {MOST_STOPS} texts, each of at most {LONGEST_STOP} bytes");
            return Err(ApiError::field("stop", format!("stop: {most}")));
        }
        Ok(stops)
    }

    /// Sets which tokens end an answer, of `otherwise` tokens where the request does not say, and from where on they
    /// may; whether both is as the model has it.
    fn set_ends(
        &self,
        options: &mut DecodeOptions,
        model: &Model,
        otherwise: usize,
    ) -> Result<bool> {
        let named = self.stop_token_ids.as_deref().unwrap_or_default();
        if named.len() > MOST_STOP_TOKENS {
            let message = format!("stop_token_ids: at most {MOST_STOP_TOKENS} are read");
            return Err(ApiError::field("stop_token_ids", message));
        }
        require_ids("stop_token_ids", named, model)?;
        let (least, most) = (self.min_tokens.unwrap_or(0), self.limit().unwrap_or(otherwise));
        if least > most {
            let message = format!("min_tokens: {least} are more than the answer may have, {most}");
            return Err(ApiError::field("min_tokens", message));
        }
        let mut ends = model.stop_tokens.clone();
        ends.extend(named.iter().map(|id| TargetTokenId(*id)));
        let ignores = self.ignore_eos.unwrap_or(false);
        let ignored = if ignores { model.stop_tokens.len() } else { 0 };
        options.stop_tokens = ends[ignored..].to_vec();
        // Ends that are ignored may not come early either, as vLLM has it.
        options.late = LateTokens { tokens: ends, after: least };
        Ok(named.is_empty() && !ignores && least == 0)
    }

    /// Whether a stream is wanted, and with usage.
    fn streams(&self) -> Result<(bool, bool)> {
        let streams = self.stream.unwrap_or(false);
        let usage = self.stream_options.and_then(|options| options.include_usage);
        if self.stream_options.is_some() && !streams {
            let message = "stream_options is for streams: set stream to true";
            return Err(ApiError::field("stream_options", message));
        }
        Ok((streams, usage.unwrap_or(false)))
    }

    /// Most tokens of an answer, if the request says so.
    fn limit(&self) -> Option<usize> {
        self.max_completion_tokens.or(self.max_tokens)
    }

    /// Options of an answer: `defaults` where nothing is said, at most `most` tokens.
    fn options(
        &self,
        model: &Model,
        defaults: &DecodeOptions,
        (otherwise, most): (usize, usize),
    ) -> Result<DecodeOptions> {
        let asked = self.limit();
        if asked == Some(0) {
            let newer = self.max_completion_tokens.is_some();
            let field = if newer { "max_completion_tokens" } else { "max_tokens" };
            return Err(ApiError::field(field, format!("{field} must be at least 1")));
        }
        let own = &defaults.sampling;
        let within = |name: &str, value: Option<f64>, least: f64, most: f64| match value {
            Some(value) if !(least..=most).contains(&value) => {
                let message = format!("{name} is {least} to {most}, not {value}");
                Err(ApiError::field(name, message))
            }
            value => Ok(value),
        };
        let temperature = within("temperature", self.temperature, 0.0, TEMPERATURE)?;
        let top_p = within("top_p", self.top_p, 0.0, 1.0)?;
        let min_p = within("min_p", self.min_p, 0.0, 1.0)?;
        let presence = within("presence_penalty", self.presence_penalty, -PENALTY, PENALTY)?;
        let frequency = within("frequency_penalty", self.frequency_penalty, -PENALTY, PENALTY)?;
        let sampling = Sampling {
            temperature: temperature.unwrap_or(own.temperature),
            // 0 and −1 keep all, as other servers have it.
            top_k: self.top_k.map_or(own.top_k, |k| usize::try_from(k).ok().filter(|k| *k > 0)),
            // 0 keeps the most likely token alone.
            top_p: top_p.unwrap_or(own.top_p).max(f64::MIN_POSITIVE),
            min_p: min_p.unwrap_or(own.min_p),
            presence_penalty: presence.unwrap_or(own.presence_penalty),
            frequency_penalty: frequency.unwrap_or(own.frequency_penalty),
            bias: self.bias(model.vocabulary)?,
        };
        sampling.check()?;
        Ok(DecodeOptions {
            sampling,
            max_new_tokens: asked.unwrap_or(otherwise).min(most),
            seed: self.seed.map_or(defaults.seed, |seed| seed as u64),
            reuse_prefix: true,
            ..defaults.clone()
        })
    }

    fn bias(&self, vocabulary: usize) -> Result<BTreeMap<TargetTokenId, f32>> {
        let wrong = |message: String| ApiError::field("logit_bias", message);
        let most = vocabulary.max(LEAST_BIASED);
        if let Some(asked) = &self.logit_bias
            && asked.len() > most
        {
            return Err(wrong(format!(
                "logit_bias: at most {most} tokens are named, not {}",
                asked.len()
            )));
        }
        let bias = self.logit_bias.iter().flatten().map(|(id, bias)| {
            let token = id.parse().ok().filter(|id| (*id as usize) < vocabulary);
            let token =
                token.ok_or_else(|| wrong(format!("logit_bias: `{id}` is not a token id")))?;
            if !(-BIAS..=BIAS).contains(bias) {
                return Err(wrong(format!("logit_bias is -{BIAS} to {BIAS}, not {bias}")));
            }
            Ok((TargetTokenId(token), *bias))
        });
        bias.collect()
    }
}
