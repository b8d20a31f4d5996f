//! Kind `forward`: outputs of a real model for fixed inputs.
//!
//! Tolerances follow the case's own record of how far f32 deviates from f64: another correct f32
//! implementation stays within about ten times that.

mod files;
mod passage;
mod states;

use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_models::LayerId;
use longdraft_models::target_model::{Features, KeyValues, PackedSequence, Tap, Taps, Target};
use longdraft_models::tokenizer::{Message, TextTokenizer};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use serde_json::Value;

use super::{
    CaseReport, Part, Place, ROUNDED, absolute_error, malformed, on_host, read_json, relative,
    stored, worst,
};
use crate::error::{ParityError, Result};

use files::{check_gguf_tensors, check_hash, check_tokenizer, ids, numbers, weights_file};

/// Allowed multiple of the recorded deviation.
const MARGIN: f64 = 12.0;

/// Smallest tolerance of each quantity: absolute, hidden vectors relative.
const FLOORS: [(&str, f64); 5] = [
    ("logits", 2e-4),
    ("k_last", 1e-4),
    ("v_last", 1e-4),
    ("hidden_rel", 5e-5),
    ("final_norm", 1e-4),
];

/// Prompts up to this length share the largest deviation among them.
const SHORT_PROMPT: u64 = 64;

/// Where a case holds weights of its own.
const OWN_WEIGHTS: &str = "target";

/// Recomputes the case with its own weights, or those at `target`.
pub(super) fn run(
    folder: &Path,
    meta: &Value,
    name: &str,
    target: Option<&Path>,
    place: &Place,
) -> Result<CaseReport> {
    let own = folder.join(OWN_WEIGHTS);
    let given = if own.is_dir() { Some(own.as_path()) } else { target };
    let Some(path) = given else {
        let file = meta["source"]["file"].as_str().unwrap_or("the weights").to_owned();
        return Err(ParityError::NeedsWeights { folder: folder.to_path_buf(), file });
    };
    let weights = weights_file(path, meta);
    check_hash(folder, meta, &weights)?;
    let mut report = CaseReport::new(name, "forward");
    let target = Target::open_path(path, &place.target_options())?;
    check_gguf_tensors(folder, &weights, &mut report)?;
    let prompts = read_json(&folder.join("prompts.json"))?;
    let prompts =
        prompts.as_array().ok_or_else(|| malformed(folder, "prompts.json is not a list"))?;
    let speaks = folder.join("tokenizer.json").is_file()
        || prompts.iter().any(|prompt| prompt["text"].is_string());
    let tokenizer = if speaks {
        let tokenizer = Target::open_tokenizer(&path.to_string_lossy())?;
        check_tokenizer(folder, &tokenizer, &mut report)?;
        Some(tokenizer)
    } else {
        None
    };
    let layers = ids(&meta["capture_layers"]).into_iter();
    let capture: Vec<LayerId> = layers.map(|layer| LayerId(layer as usize)).collect();
    let tokenizer = tokenizer.as_ref();
    let has_keys = meta["last_layer_has_kv"] != false;
    let state_cut = meta["state_cut"].as_u64().map(|cut| cut as usize);
    let target = &target;
    let case =
        ForwardCase { folder, place, target, tokenizer, capture, has_keys, state_cut, prompts };
    for prompt in prompts {
        case.check_prompt(prompt, &mut report)?;
    }
    case.check_nll(&mut report)?;
    Ok(report)
}

struct ForwardCase<'a> {
    folder: &'a Path,
    place: &'a Place,
    target: &'a Target,
    /// For cases with text.
    tokenizer: Option<&'a TextTokenizer>,
    capture: Vec<LayerId>,
    /// Whether the last layer has keys and values.
    has_keys: bool,
    /// Tokens from which on recurrent states are taken back.
    state_cut: Option<usize>,
    prompts: &'a [Value],
}

impl ForwardCase<'_> {
    /// Allowed error of a quantity whose largest value is `largest` (1 of relative errors): the
    /// recorded deviation of this prompt, or the largest one of all short prompts at ordinary positions,
    /// times the margin; with 16-bit values a part of the largest value.
    fn tolerance(&self, prompt: &Value, key: &str, largest: f64) -> f64 {
        let deviation = |p: &Value| p["max_abs_deviation_from_float64"][key].as_f64();
        let short = |p: &Value| {
            p["n_tokens"].as_u64().is_some_and(|n| n <= SHORT_PROMPT) && p["position_ids"].is_null()
        };
        let own = deviation(prompt).unwrap_or(0.0);
        let shared = if short(prompt) {
            self.prompts.iter().filter(|p| short(p)).filter_map(deviation).fold(own, f64::max)
        } else {
            own
        };
        let floor = FLOORS.iter().find(|(name, _)| *name == key).map_or(0.0, |(_, floor)| *floor);
        self.place.allowed((MARGIN * shared).max(floor), ROUNDED.grad * largest)
    }

    fn taps(&self) -> Taps {
        let mut taps = vec![Tap::FinalHidden];
        if self.has_keys {
            taps.push(Tap::LastKv);
        }
        taps.extend(self.capture.iter().map(|layer| Tap::Hidden(*layer)));
        Taps::of(&taps)
    }

    fn check_prompt(&self, prompt: &Value, report: &mut CaseReport) -> Result<()> {
        let name = prompt["name"].as_str().unwrap_or("prompt");
        let ids = ids(&prompt["ids"]);
        if ids.is_empty() {
            return Err(malformed(self.folder, format!("prompts.json: `{name}` has no ids")));
        }
        let part = &mut report.part(name);
        self.check_text(prompt, &ids, part)?;
        let mut sequence = PackedSequence::single(&ids);
        let positions = files::ids(&prompt["position_ids"]);
        if !positions.is_empty() {
            sequence.position_ids = positions;
        }
        let features = self.target.forward(&sequence, &self.taps())?;
        self.check_logits(prompt, &features, part)?;
        if self.has_keys {
            self.check_kv(prompt, features.last_kv()?, part)?;
        }
        self.check_capture(prompt, &features, part)?;
        self.check_tensors(prompt, &features, part)?;
        self.check_states(&sequence, part)?;
        self.check_greedy(prompt, &sequence, part)
    }

    /// Rendered template and token ids.
    fn check_text(&self, prompt: &Value, want: &[u32], part: &mut Part<'_>) -> Result<()> {
        let (Some(text), Some(tokenizer)) = (prompt["text"].as_str(), self.tokenizer) else {
            return Ok(());
        };
        if let (Some(messages), Some(template)) =
            (prompt["messages"].as_array(), tokenizer.chat_template())
        {
            let field = |m: &Value, key: &str| m[key].as_str().unwrap_or_default().to_owned();
            let messages: Vec<Message> = messages
                .iter()
                .map(|m| Message::new(&field(m, "role"), field(m, "content")))
                .collect();
            let rendered = template.render(&messages, true)?;
            part.check_equal("rendered template", &[rendered], &[text.to_owned()]);
        }
        let mut got = tokenizer.encode(text)?.ids;
        // A start token before the prompt is the user's to put, not the tokenizer's.
        if let (Some(bos), Some(first)) = (self.target.config().bos_token_id, want.first())
            && bos == *first
            && got.first() != Some(first)
        {
            got.insert(0, bos);
        }
        part.check_equal("token ids", &got, want);
        Ok(())
    }

    fn check_logits(&self, prompt: &Value, features: &Features, part: &mut Part<'_>) -> Result<()> {
        let hidden = features.final_hidden()?;
        let last = hidden.dim(0)? - 1;
        let logits = self.target.hold_ends()?.logits(&hidden.narrow(0, last, 1)?)?;
        let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        let wanted = numbers(&prompt["top20_logits"]);
        let tolerance = self.tolerance(prompt, "logits", largest(&wanted));
        let top = ids(&prompt["top20_ids"]).into_iter().zip(wanted);
        let error = top
            .map(|(id, want)| {
                logits.get(id as usize).map_or(f64::INFINITY, |z| (f64::from(*z) - want).abs())
            })
            .fold(0.0, worst);
        part.check("top-20 logits", error, tolerance);
        if let Some(want) = prompt["logsumexp"].as_f64() {
            let sum: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
            part.check("log-sum-exp", (sum.ln() - want).abs(), tolerance);
        }
        let want = ids(&prompt["argmax_per_position"]);
        if !want.is_empty() {
            let got = self.target.hold_ends()?.logits(hidden)?.argmax(1)?.to_vec1::<u32>()?;
            let share = self.place.allowed(0.0, ROUNDED.count);
            let name = format!("{} argmax per position", part.name);
            part.report.check_choices(name, &got, &want, share);
        }
        Ok(())
    }

    fn check_kv(&self, prompt: &Value, last_kv: &KeyValues, part: &mut Part<'_>) -> Result<()> {
        let tokens = last_kv.k.dim(0)?;
        for (key, tensor) in [("k", &last_kv.k), ("v", &last_kv.v)] {
            let (mut error, mut size) = (0.0_f64, 0.0_f64);
            for (place, t) in [("first", 0), ("last", tokens - 1)] {
                let heads = tensor.get(t)?.to_vec2::<f32>()?;
                let want = &prompt["last_layer_kv"][place][format!("{key}_first8_per_head")];
                for (head, want) in heads.iter().zip(want.as_array().into_iter().flatten()) {
                    for (got, want) in head.iter().zip(numbers(want)) {
                        error = worst(error, (f64::from(*got) - want).abs());
                        size = size.max(want.abs());
                    }
                }
            }
            let tolerance = self.tolerance(prompt, &format!("{key}_last"), size);
            part.check(&format!("last-layer {key}"), error, tolerance);
        }
        Ok(())
    }

    /// L2 norms and first values of the residual stream at the capture layers.
    fn check_capture(
        &self,
        prompt: &Value,
        features: &Features,
        part: &mut Part<'_>,
    ) -> Result<()> {
        let tolerance = self.tolerance(prompt, "hidden_rel", 1.0);
        for (layer, hidden) in &features.hidden {
            let tokens = hidden.dim(0)?;
            let mut error = 0.0_f64;
            for (place, t) in [("first", 0), ("last", tokens - 1)] {
                let want = &prompt["capture"][layer.0.to_string()][place];
                let Some(norm) = want["l2"].as_f64() else {
                    continue;
                };
                let got = hidden.get(t)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
                let length = got.iter().map(|x| x * x).sum::<f64>().sqrt();
                error = worst(error, relative(length, norm));
                for (got, want) in got.iter().zip(numbers(&want["first8"])) {
                    error = worst(error, (got - want).abs() / norm);
                }
            }
            part.check(&format!("hidden after layer {}", layer.0), error, tolerance);
        }
        Ok(())
    }

    /// Whole tensors, for the one prompt that has them.
    fn check_tensors(
        &self,
        prompt: &Value,
        features: &Features,
        part: &mut Part<'_>,
    ) -> Result<()> {
        let path = self.folder.join("tensors.safetensors");
        if !path.is_file() {
            return Ok(());
        }
        let file = SafetensorsSource::open_file(&path)?;
        let hidden = features.final_hidden()?;
        let last = hidden.narrow(0, hidden.dim(0)? - 1, 1)?;
        let logits = self.target.hold_ends()?.logits(&last)?.squeeze(0)?;
        let mut of_tensors =
            vec![("final_norm", "final_norm", hidden), ("logits_last", "logits", &logits)];
        if let Some(KeyValues { k, v }) = &features.last_kv {
            of_tensors.extend([("last_layer_k", "k_last", k), ("last_layer_v", "v_last", v)]);
        }
        let some = self.logits_at(&file, &part.name, hidden)?;
        of_tensors.extend(some.iter().map(|some| ("logits_at", "logits", some)));
        for (what, key, got) in of_tensors {
            if let Some(want) = stored(&file, &format!("{}.{what}", part.name))? {
                let (error, largest) = absolute_error(got, &want)?;
                part.check(what, error, self.tolerance(prompt, key, largest));
            }
        }
        for (layer, got) in &features.hidden {
            let what = format!("hidden_after_layer_{}", layer.0);
            if let Some(want) = stored(&file, &format!("{}.{what}", part.name))? {
                let error = largest_row_error(got, &want)?;
                part.check(&what, error, self.tolerance(prompt, "hidden_rel", 1.0));
            }
        }
        Ok(())
    }

    /// Logits at the positions that the case lists, if it lists any.
    fn logits_at(
        &self,
        file: &SafetensorsSource,
        name: &str,
        hidden: &Tensor,
    ) -> Result<Option<Tensor>> {
        let key = format!("{name}.logits_at_positions");
        if file.shape(&key).is_none() {
            return Ok(None);
        }
        let positions = file.load_integers(&key)?.into_iter().map(|position| position as u32);
        let positions = Tensor::new(positions.collect::<Vec<u32>>(), hidden.device())?;
        Ok(Some(self.target.hold_ends()?.logits(&hidden.index_select(&positions, 0)?)?))
    }

    /// Greedy continuation through the cache, token for token while the margin is clear.
    fn check_greedy(
        &self,
        prompt: &Value,
        sequence: &PackedSequence,
        part: &mut Part<'_>,
    ) -> Result<()> {
        let want = ids(&prompt["greedy_ids"]);
        if want.is_empty() {
            return Ok(());
        }
        let margins = numbers(&prompt["greedy_margin"]);
        let size = largest(&numbers(&prompt["top20_logits"]));
        let tolerance = 2.0 * self.tolerance(prompt, "logits", size);
        let clear = margins.iter().take_while(|margin| **margin > tolerance).count();
        let clear = clear.min(want.len());
        let taps = Taps::of(&[Tap::FinalHidden]);
        let mut cache = self.target.new_cache()?;
        let mut features =
            self.target.extend(&sequence.ids, &sequence.position_ids, &mut cache, &taps)?;
        let mut position = sequence.position_ids.last().copied().unwrap_or(0);
        let mut got = Vec::new();
        while got.len() < clear {
            let hidden = features.final_hidden()?;
            let last = hidden.narrow(0, hidden.dim(0)? - 1, 1)?;
            let next = self.target.hold_ends()?.logits(&last)?.argmax(1)?.to_vec1::<u32>()?[0];
            got.push(next);
            position += 1;
            features = self.target.extend(&[next], &[position], &mut cache, &taps)?;
        }
        part.check_equal(&format!("greedy, {clear} tokens"), &got, &want[..clear]);
        Ok(())
    }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// Largest relative L2 error of a row.
fn largest_row_error(a: &Tensor, b: &Tensor) -> Result<f64> {
    if a.dims() != b.dims() {
        return Ok(f64::INFINITY);
    }
    let rows = |t: &Tensor| on_host(t)?.to_dtype(DType::F64)?.to_vec2::<f64>();
    let (a, b) = (rows(a)?, rows(b)?);
    let errors = a.iter().zip(&b).map(|(a, b)| {
        let difference: f64 = a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum();
        let length: f64 = b.iter().map(|y| y * y).sum();
        (difference / length).sqrt()
    });
    Ok(errors.fold(0.0, worst))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_row_that_is_no_number_never_passes() -> Result<()> {
        let rows = |first: f32| Tensor::new(&[[first, 1.0], [2.0, 2.0]], &Device::Cpu);
        let error = |a: f32, b: f32| -> Result<f64> { largest_row_error(&rows(a)?, &rows(b)?) };
        assert!(error(f32::NAN, 1.0)?.is_nan() && error(1.0, f32::NAN)?.is_nan());
        assert!(error(1.0, 1.0)? < 1e-9 && error(2.0, 1.0)? > 0.5);
        Ok(())
    }
}
