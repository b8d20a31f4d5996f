//! GGUF files: header, keys that have defaults of their own, tensors.

use std::path::Path;

use longdraft_models::draft::block::gguf_file::{ARCHITECTURE, GgufBlockSource, MASK_TOKEN};
use longdraft_models::draft::block::key_names::{BLOCK_SIZE, CONVOLUTION, FROM_ANCHOR, SELECTOR};
use longdraft_models::draft::block::{BlockConfig, LayerKind};
use longdraft_models::weights::WeightSource;

use super::network;
use super::{LAYOUT, MISSING_LAYOUT, NETWORK};
use crate::checks::Checks;
use crate::checks::gguf::{self, GgufFile};
use crate::checks::rules::Rule;
use crate::formats::{of_target, vocabulary};

const CAUSALITY: Rule = Rule::garbage(
    "causality",
    "true or false, as it was trained",
    "blocks do not run causally, and a draft trained otherwise loses acceptance without a message",
);
const CONVOLUTIONS: Rule =
    Rule::rejects("selector", "sizes of convolutions", "loading ends: metadata is missing");
const WIDTH: Rule = Rule::rejects("selector", "", "loading ends: the width is too small");
const CONFIDENCE: Rule = Rule::garbage(
    "confidence",
    "",
    "drafts are cut by a head that is not there, or not where they should be",
);

/// Checks a file, or the one in a folder; nothing if it cannot be read.
pub(super) fn check(checks: &mut Checks<'_>, path: &Path) -> Option<()> {
    let file = gguf::open(checks, path, ARCHITECTURE)?;
    file.require(checks, &[BLOCK_SIZE, MASK_TOKEN]);
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
            network::layers(checks, &config, &file.place("target_layers"));
            network::target(checks, &config, |name| file.place_of(name));
            of_target::check_file(checks, &file, &super::repeated(&config));
            let found = source.names().into_iter().map(|name| {
                let shape = source.shape(&name).unwrap_or_default();
                (name, shape)
            });
            network::tensors(checks, &config, &found.collect());
            if config.has_own_head() {
                vocabulary::check_absolute(checks, &file, &source, config.vocab_size);
            }
            checks.sizes = Some(Box::new(config));
        }
        Err(problems) => checks.each(&NETWORK, &file.name, problems.0),
    }
    Some(())
}

/// Whether slot 0 proposes is true where it is absent, as a chain may leave it.
fn layout(checks: &mut Checks<'_>, file: &GgufFile, config: &BlockConfig) {
    let place = file.place(FROM_ANCHOR);
    let wanted = config.chain.is_some_and(|chain| chain.rank > 0);
    match file.flag(FROM_ANCHOR) {
        Some(said) if said == wanted => {}
        Some(said) => checks.broken(&LAYOUT, place, said.to_string()),
        None if wanted => checks.broken(&LAYOUT.doubtful(), place, MISSING_LAYOUT),
        None => checks.broken(&LAYOUT, place, "missing, which means true"),
    }
}

/// Nothing is causal unless a switch says so, whatever slides.
fn causality(checks: &mut Checks<'_>, file: &GgufFile, config: &BlockConfig) {
    const KEY: &str = "attention.causal";
    if file.flag(KEY).is_none() && config.layers.contains(&LayerKind::Sliding) {
        checks.broken(&CAUSALITY, file.place(KEY), "missing for a draft of sliding layers");
    }
}

/// Candidates are laid side by side in a row of states.
fn selector(checks: &mut Checks<'_>, file: &GgufFile, config: &BlockConfig) {
    let Some(sizes) = config.selector else { return };
    let needed = sizes.top_k.saturating_mul(sizes.top_k + 1);
    if config.hidden_size < needed {
        let found = format!("{} candidates, width {}", sizes.top_k, config.hidden_size);
        let expected = format!("a width of K (K + 1) = {needed}");
        checks.differs(&WIDTH, file.place(SELECTOR[1]), found, expected);
    }
    if config.convolution.is_none() {
        checks.broken(&CONVOLUTIONS, file.place(CONVOLUTION[0]), "missing beside a selector");
    }
}

/// A head is expected unless a switch says that there is none.
fn confidence(checks: &mut Checks<'_>, file: &GgufFile, config: &BlockConfig) {
    const KEY: &str = "has_confidence_head";
    let Some(chain) = config.chain else { return };
    let (said, wanted) = (file.flag(KEY).unwrap_or(true), chain.confidence.is_some());
    if said != wanted {
        checks.differs(&CONFIDENCE, file.place(KEY), said.to_string(), wanted.to_string());
    }
}
