//! GGUF files: header, keys that have defaults of their own, tensors.

use std::path::Path;

use longdraft_models::draft::block::gguf_file::{ARCHITECTURE, GgufBlockSource, MASK_TOKEN};
use longdraft_models::draft::block::{BlockConfig, LayerKind};
use longdraft_models::weights::WeightSource;

use super::network;
use super::{LAYOUT, MISSING_LAYOUT, NETWORK};
use crate::checks::gguf::{self, GgufFile};
use crate::checks::{Checks, Effect, Rule};
use crate::formats::of_target;

const CAUSALITY: Rule = Rule::garbage(
    "causality",
    "true or false, as it was trained",
    "blocks do not run causally, and a draft trained otherwise loses acceptance without a message",
);
const CONVOLUTIONS: Rule =
    Rule::rejects("selector", "sizes of convolutions", "loading ends: metadata is missing");

/// Keys of the architecture without which loading ends, or another network is built.
const REQUIRED: [&str; 9] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "block_size",
    "target_layers",
];

/// The same of the tokenizer.
const TOKENIZER: [&str; 4] =
    ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", MASK_TOKEN];

/// Checks a file, or the one in a folder; nothing if it cannot be read.
pub(super) fn check(checks: &mut Checks<'_>, path: &Path) -> Option<()> {
    let file = gguf::open(checks, path, ARCHITECTURE)?;
    let required = REQUIRED.map(key);
    file.require(checks, required.iter().map(String::as_str).chain(TOKENIZER));
    for name in file.header.tensors.keys() {
        file.check_values(checks, name);
    }
    let source = GgufBlockSource::open(&file.path).ok()?;
    match source.config(checks.target.map(crate::TargetFacts::config)) {
        Ok(config) => {
            layout(checks, &file, &config);
            causality(checks, &file, &config);
            selector(checks, &file, &config);
            confidence(checks, &file, &config);
            network::layers(checks, &config, &file.place(&key("target_layers")));
            network::target(checks, &config, |name| file.place_of(name));
            of_target::check_file(checks, &file, &super::repeated(&config));
            let found = source.names().into_iter().map(|name| {
                let shape = source.shape(&name).unwrap_or_default();
                (name, shape)
            });
            network::tensors(checks, &config, &found.collect());
            checks.sizes = Some(Box::new(config));
        }
        Err(problems) => {
            for problem in problems.0 {
                checks.broken(&NETWORK, file.name.clone(), problem);
            }
        }
    }
    Some(())
}

fn key(name: &str) -> String {
    format!("{ARCHITECTURE}.{name}")
}

/// Whether slot 0 proposes is true where it is absent, as a chain may leave it.
fn layout(checks: &mut Checks<'_>, file: &GgufFile, config: &BlockConfig) {
    let key = key("sample_from_anchor");
    let said = file.header.flag(&key);
    let wanted = config.chain.is_some_and(|chain| chain.rank > 0);
    match said {
        Some(said) if said == wanted => {}
        Some(said) => checks.broken(&LAYOUT, file.place(&key), said.to_string()),
        None if wanted => checks.doubtful(&LAYOUT, file.place(&key), MISSING_LAYOUT),
        None => checks.broken(&LAYOUT, file.place(&key), "missing, which means true"),
    }
}

/// Nothing is causal unless a switch says so, whatever slides.
fn causality(checks: &mut Checks<'_>, file: &GgufFile, config: &BlockConfig) {
    let key = key("attention.causal");
    if file.header.flag(&key).is_none() && config.layers.contains(&LayerKind::Sliding) {
        checks.broken(&CAUSALITY, file.place(&key), "missing for a draft of sliding layers");
    }
}

/// Candidates are laid side by side in a row of states.
fn selector(checks: &mut Checks<'_>, file: &GgufFile, config: &BlockConfig) {
    let Some(sizes) = config.selector else { return };
    let needed = sizes.top_k.saturating_mul(sizes.top_k + 1);
    if config.hidden_size < needed {
        checks.error(
            "selector",
            file.place(&key("selector_top_k")),
            format!("{} candidates, width {}", sizes.top_k, config.hidden_size),
            format!("a width of K (K + 1) = {needed}"),
            Effect::Rejects,
            "loading ends: the width is too small",
        );
    }
    if config.convolution.is_none() {
        checks.broken(
            &CONVOLUTIONS,
            file.place(&key("conv_kernel_size")),
            "missing beside a selector",
        );
    }
}

/// A head is expected unless a switch says that there is none.
fn confidence(checks: &mut Checks<'_>, file: &GgufFile, config: &BlockConfig) {
    let Some(chain) = config.chain else { return };
    let key = key("has_confidence_head");
    let said = file.header.flag(&key).unwrap_or(true);
    if said != chain.confidence.is_some() {
        checks.error(
            "confidence",
            file.place(&key),
            said.to_string(),
            chain.confidence.is_some().to_string(),
            Effect::Garbage,
            "drafts are cut by a head that is not there, or not where they should be",
        );
    }
}
