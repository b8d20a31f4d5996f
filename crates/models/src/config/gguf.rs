//! The header of a GGUF file.

mod rotary;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::families::{self, Sizes};
use super::{Architecture, ExpertsConfig, TargetConfig, end_tokens, limits};
use crate::error::Problems;
use crate::weights::gguf::header::Header;
pub(super) use rotary::LOG_MULTIPLIER;

/// Keys of an architecture, collecting what is wrong.
pub(crate) struct Keys<'a> {
    header: &'a Header,
    prefix: &'a str,
    pub(crate) problems: Problems,
    /// Keys that hold another kind of value than theirs, each once however often it is read.
    misread: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    /// The keys of the architecture `prefix`.
    pub(crate) fn of(header: &'a Header, prefix: &'a str) -> Self {
        Self { header, prefix, problems: Problems::default(), misread: RefCell::default() }
    }

    /// All that was found to be wrong.
    pub(crate) fn into_problems(self) -> Problems {
        let Self { mut problems, misread, .. } = self;
        problems.0.extend(misread.into_inner());
        problems
    }

    /// A number, if there is one; a value of another kind is told.
    pub(crate) fn number(&self, key: &str) -> Option<f64> {
        let number = self.number_or_list(key);
        if number.is_none() {
            self.tell_if_there(key, "is not a number");
        }
        number
    }

    /// A number, where a list is read elsewhere.
    fn number_or_list(&self, key: &str) -> Option<f64> {
        self.header.number(&format!("{}.{key}", self.prefix))
    }

    fn tell_if_there(&self, key: &str, wrong: &str) {
        if self.is_there(key) {
            let problem = format!("`{}.{key}` {wrong}", self.prefix);
            self.misread.borrow_mut().insert(problem);
        }
    }

    /// A number, if there is one; one that is not finite is told.
    pub(super) fn finite(&mut self, key: &str) -> Option<f64> {
        self.checked(key, "is not finite", f64::is_finite)
    }

    /// A factor of activations, if there is one; what is wrong with another is told.
    pub(super) fn scale(&mut self, key: &str) -> Option<f64> {
        let number = self.number(key)?;
        limits::scale(&mut self.problems, &format!("{}.{key}", self.prefix), number)
    }

    /// The same, of which 0 is none.
    pub(crate) fn scale_or_none(&mut self, key: &str) -> Option<f64> {
        self.number(key).filter(|scale| *scale != 0.0)?;
        self.scale(key)
    }

    /// A number of tokens from 1, if there is one; what is wrong with another is told.
    pub(super) fn tokens_in(&mut self, key: &str) -> Option<f64> {
        let most = limits::CONTEXT as f64;
        self.checked(key, "is not a number of tokens", |x| (1.0..=most).contains(&x))
    }

    /// A positive number, if there is one; what is wrong with another is told.
    pub(super) fn positive(&mut self, key: &str) -> Option<f64> {
        self.checked(key, "is not positive", |x| x.is_finite() && x > 0.0)
    }

    /// A whole number from 1, if there is one; what is wrong with another is told.
    pub(super) fn whole(&mut self, key: &str) -> Option<usize> {
        let fits = |x: f64| x.fract() == 0.0 && (1.0..=limits::CONTEXT as f64).contains(&x);
        self.checked(key, "is not a whole number from 1", fits).map(|x| x as usize)
    }

    fn checked(&mut self, key: &str, wrong: &str, fits: impl Fn(f64) -> bool) -> Option<f64> {
        let number = self.number(key)?;
        if !fits(number) {
            self.problems.push(format!("`{}.{key}` = {number} {wrong}", self.prefix));
            return None;
        }
        Some(number)
    }

    /// A flag, if there is one; a value of another kind is told.
    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        let flag = self.header.flag(&format!("{}.{key}", self.prefix));
        if flag.is_none() {
            self.tell_if_there(key, "is not a flag");
        }
        flag
    }

    /// A list of flags, or of numbers of which 0 is none, if there is one.
    pub(super) fn flags(&self, key: &str) -> Option<Vec<bool>> {
        let numbers = || Some(self.integers(key)?.into_iter().map(|flag| flag != 0).collect());
        self.header.flags(&format!("{}.{key}", self.prefix)).or_else(numbers)
    }

    /// A list of whole numbers, if there is one.
    pub(super) fn integers(&self, key: &str) -> Option<Vec<i64>> {
        self.header.integers(&format!("{}.{key}", self.prefix))
    }

    /// Whether there is a key, whatever it holds.
    pub(crate) fn is_there(&self, key: &str) -> bool {
        self.header.metadata.contains_key(&format!("{}.{key}", self.prefix))
    }

    /// Shape of a tensor, if there is one.
    pub(super) fn shape(&self, tensor: &str) -> Option<&'a [usize]> {
        self.header.tensors.get(tensor).map(|tensor| tensor.shape.as_slice())
    }

    /// Whether some layer holds a tensor of this name.
    pub(super) fn holds(&self, tensor: &str) -> bool {
        let in_layer = |name: &String| {
            let rest = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            rest.is_some_and(|(_, rest)| rest == tensor)
        };
        self.header.tensors.keys().any(in_layer)
    }

    /// One number, or the largest of those of all layers.
    fn largest(&self, key: &str) -> Option<f64> {
        let listed = || self.integers(key)?.into_iter().max().map(|largest| largest as f64);
        self.number_or_list(key).or_else(listed)
    }

    /// Names the last block of the file if the header counts fewer: the model would stop in its middle.
    fn check_blocks(&mut self, blocks: usize) {
        let number =
            |name: &String| name.strip_prefix("blk.")?.split_once('.')?.0.parse::<usize>().ok();
        let last = self.header.tensors.keys().filter_map(number).max();
        if let Some(last) = last.filter(|last| *last >= blocks) {
            let prefix = self.prefix;
            self.problems.push(format!(
                "`{prefix}.block_count` = {blocks}, but tensors of `blk.{last}` are there"
            ));
        }
    }

    /// Decoder layers; blocks that predict further tokens come after them.
    fn layers(&mut self) -> usize {
        let blocks = self.size("block_count");
        self.check_blocks(blocks);
        let further = self.number("nextn_predict_layers").unwrap_or(0.0);
        if !(further >= 0.0 && further < blocks.max(1) as f64) {
            let prefix = self.prefix;
            self.problems
                .push(format!("`{prefix}.nextn_predict_layers` = {further} of {blocks} blocks"));
            return blocks;
        }
        blocks - further as usize
    }

    /// A size where files may leave it out: then it is the one that is known, if one is.
    pub(crate) fn size_or(&mut self, key: &str, known: Option<usize>) -> usize {
        known.filter(|_| !self.is_there(key)).unwrap_or_else(|| self.size(key))
    }

    /// A size; 1 and a problem without one.
    pub(crate) fn size(&mut self, key: &str) -> usize {
        self.number_or_list(key).filter(|x| *x >= 0.0).map_or_else(
            || {
                self.problems.push(format!("`{}.{key}` is missing or not a number", self.prefix));
                1
            },
            |x| x as usize,
        )
    }

    /// Experts, if the header counts any. Every layer without a router has a plain MLP; whether
    /// weights are normalised is the architecture's, as the format's reader has it.
    fn experts(&mut self, architecture: Architecture) -> Option<ExpertsConfig> {
        let counted = self.number("expert_count").is_some_and(|count| count != 0.0);
        if !architecture.is_mixture() || (families::may_be_dense(architecture) && !counted) {
            return None;
        }
        let layers = self.number("block_count").unwrap_or(0.0) as usize;
        let routed = |layer: &usize| self.has(&format!("blk.{layer}.ffn_gate_inp.weight"));
        // Bounded by what the file holds, whatever the header says.
        let listed = layers.min(self.header.tensors.len());
        let mlp_only_layers = (0..listed).filter(|layer| !routed(layer)).collect();
        let width = self.largest("expert_feed_forward_length");
        let width = width.or_else(|| self.largest("feed_forward_length"));
        let shared = self.header.tensors.iter().find_map(|(name, tensor)| {
            name.ends_with(".ffn_up_shexp.weight").then(|| tensor.shape[0])
        });
        Some(ExpertsConfig {
            num_experts: self.size("expert_count"),
            num_experts_per_tok: self.size("expert_used_count"),
            moe_intermediate_size: width.unwrap_or(0.0) as usize,
            shared_expert_intermediate_size: shared,
            norm_topk_prob: families::normalises(self, architecture),
            decoder_sparse_step: 1,
            mlp_only_layers,
        })
    }

    fn token(&self, key: &str) -> Option<u32> {
        let id = self.header.number(&format!("tokenizer.ggml.{key}"));
        // Some files say -1 for none.
        id.filter(|id| *id >= 0.0).map(|id| id as u32)
    }

    pub(super) fn has(&self, tensor: &str) -> bool {
        self.header.tensors.contains_key(tensor)
    }
}

pub(super) fn read(header: &Header) -> Result<TargetConfig, Problems> {
    let Some(name) = header.text("general.architecture") else {
        return Err(Problems(vec!["`general.architecture` is missing".to_owned()]));
    };
    let mut keys = Keys::of(header, name);
    let named = Architecture::parse(name, &Architecture::GGUF_NAMES, &mut keys.problems);
    if keys.flag("attention.causal") == Some(false) {
        let message = format!("`{name}.attention.causal` = false is not supported");
        keys.problems.push(message);
    }
    let counted = keys.number("expert_count").is_some_and(|count| count > 0.0);
    let architecture =
        if named == Architecture::Llama && counted { Architecture::Mixtral } else { named };
    let hidden_size = keys.size("embedding_length");
    let num_attention_heads = match keys.largest("attention.head_count") {
        Some(heads) if heads >= 0.0 => heads as usize,
        _ => keys.size("attention.head_count"),
    };
    let context = keys.size("context_length");
    let own = families::own_sizes(&keys, architecture, num_attention_heads);
    let head_dim = own.head_dim.unwrap_or_else(|| {
        let key_length = keys.number("attention.key_length");
        key_length.map_or(hidden_size / num_attention_heads.max(1), |x| x as usize)
    });
    let vocab_size = match header.tensors.get("token_embd.weight") {
        Some(tensor) if tensor.shape.len() == 2 => tensor.shape[0],
        _ => {
            keys.problems.push("tensor `token_embd.weight` [V, H] is missing");
            1
        }
    };
    let sizes = Sizes {
        architecture,
        hidden_size,
        num_hidden_layers: keys.layers(),
        num_attention_heads,
        head_dim,
        max_position_embeddings: context,
    };
    let experts = keys.experts(architecture);
    let width = own.intermediate_size.or_else(|| keys.largest("feed_forward_length"));
    let intermediate_size = match (width, &experts) {
        (Some(width), _) if width >= 1.0 => width as usize,
        (None, Some(experts)) => experts.width_of_a_token(),
        _ => keys.size("feed_forward_length"),
    };
    let mut config = TargetConfig {
        architecture,
        hidden_size,
        intermediate_size,
        num_hidden_layers: sizes.num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: own.kv_heads.unwrap_or_else(|| {
            let kv_heads = keys.largest("attention.head_count_kv");
            kv_heads.map_or(num_attention_heads, |x| x as usize)
        }),
        head_dim,
        vocab_size,
        max_position_embeddings: context,
        rms_norm_eps: keys.number("attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
        rope: keys.rope(context),
        tie_word_embeddings: !keys.has("output.weight"),
        qkv_bias: keys.holds("attn_q.bias") || keys.holds("attn_qkv.bias"),
        attention_output_bias: keys.holds("attn_output.bias"),
        mlp_bias: keys.has("blk.0.ffn_gate.bias"),
        experts,
        initializer_range: 0.02,
        bos_token_id: keys.token("bos_token_id").filter(|id| (*id as usize) < vocab_size),
        eos_token_ids: keys
            .token("eos_token_id")
            .into_iter()
            .chain(keys.token("eot_token_id"))
            .collect(),
        pad_token_id: keys.token("padding_token_id"),
        parts: families::of_gguf(&mut keys, sizes),
        further_end_ids: Vec::new(),
    };
    config.parts.sliding_rope = keys.sliding_rope(&config);
    keys.check_turning(&config);
    config.add_ends(end_tokens::of_header(header));
    config.add_ends(keys.token("eom_token_id").into_iter().collect());
    let mut problems = keys.into_problems();
    config.validate(&mut problems);
    if problems.0.is_empty() { Ok(config) } else { Err(problems) }
}
