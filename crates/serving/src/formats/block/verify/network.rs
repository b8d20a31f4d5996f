//! What folders and files have in common: layers, the target's sizes, tensors.

use std::collections::BTreeMap;

use longdraft_models::draft::block::{BlockConfig, tensor_specs};
use longdraft_models::weights::TensorSpec;

use crate::checks::{Checks, Effect, Rule, meant, nearest};

const FROZEN_TENSOR: Rule = Rule::garbage(
    "unexpected-tensor",
    "the trained tensors alone: table and head are the target's",
    "some readers ignore it without a message",
);

/// Tensors that make a reader share nothing with the target, or draft from another vocabulary.
const FOREIGN: [(&str, &str); 4] = [
    ("d2t", "a reduced vocabulary needs a head of its own"),
    ("t2d", "a reduced vocabulary needs a head of its own"),
    ("mask_hidden", "vLLM refuses it"),
    ("mask_embedding", "vLLM puts it in the mask token's place"),
];

/// The target's tensors, which some trainers write along and readers share anyway.
pub(super) const FROZEN: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

/// The layers that a reader hands to the draft: those that were exported, below the target's last.
pub(super) fn layers(checks: &mut Checks<'_>, config: &BlockConfig, place: &str) {
    let ids: Vec<usize> = config.target_layers.iter().map(|layer| layer.0).collect();
    let exported = checks.manifest.as_ref().map(|manifest| manifest.target_layers.clone());
    if let Some(exported) = exported.filter(|exported| *exported != ids) {
        let pairs = || ids.iter().zip(&exported);
        let same_length = ids.len() == exported.len();
        let what = if same_length
            && pairs().all(|(found, wanted)| found.checked_sub(1) == Some(*wanted))
        {
            ": every layer is one too high (+1), the list counts as another reader does"
        } else if same_length
            && pairs().all(|(found, wanted)| wanted.checked_sub(1) == Some(*found))
        {
            ": every layer is one too low (-1), the list counts as another reader does"
        } else {
            ""
        };
        checks.error(
            "layers",
            place,
            format!("outputs of layers {ids:?}, counted from 0{what}"),
            format!("{exported:?}, as they were exported"),
            Effect::Garbage,
            "the draft reads other layers, and accepts little without a message",
        );
    }
    let Some(count) = checks.target_layers() else { return };
    // Files that do not count the target's layers are taken for those of this one, or of a smaller one.
    let is_counted = checks.config.get("num_target_layers").is_some();
    if (is_counted && count != config.num_target_layers)
        || ids.last().is_some_and(|last| last + 1 >= count)
    {
        checks.error(
            "layers",
            place,
            format!("outputs of layers {ids:?} of {}", config.num_target_layers),
            format!("layers below the last one of {count}, counted from 0"),
            Effect::Garbage,
            "the numbers are those of another target, or count as another reader does",
        );
    }
}

/// Sizes that are the target's, and the mask token among its tokens; `place` of a key in findings.
pub(super) fn target(
    checks: &mut Checks<'_>,
    config: &BlockConfig,
    place: impl Fn(&str) -> String,
) {
    let Some(target) = checks.target else { return };
    let wanted = target.config();
    let mut wrong = Vec::new();
    for (key, found, wanted) in [
        ("hidden_size", config.hidden_size, wanted.hidden_size),
        ("vocab_size", config.vocab_size, wanted.vocab_size),
    ] {
        if found != wanted {
            wrong.push((key, found.to_string(), wanted.to_string()));
        }
    }
    let mask = config.mask_token_id as usize;
    if mask >= wanted.vocab_size {
        wrong.push(("mask_token_id", mask.to_string(), "a row of the target's table".into()));
    }
    if wanted.eos_token_ids.contains(&config.mask_token_id) {
        wrong.push(("mask_token_id", mask.to_string(), "a token that texts do not hold".into()));
    }
    if !config.bends_like(wanted) {
        let (found, own) = (format!("{:?}", config.bend), format!("{:?}", wanted.bend()));
        wrong.push(("output_multiplier", found, own));
    }
    for (key, found, wanted) in wrong {
        checks.error(
            "not-the-target",
            place(key),
            found,
            wanted,
            Effect::Rejects,
            "the draft is another target's",
        );
    }
}

/// The trained tensors in their shapes, and no other but the target's; `found` has published names.
pub(super) fn tensors(
    checks: &mut Checks<'_>,
    config: &BlockConfig,
    found: &BTreeMap<String, Vec<usize>>,
) {
    let specs = tensor_specs(config);
    let of_target =
        FROZEN.map(|name| TensorSpec::new(name, &[config.vocab_size, config.hidden_size]));
    for spec in specs.iter().chain(&of_target) {
        match found.get(&spec.name) {
            None if FROZEN.contains(&spec.name.as_str()) => {}
            None => checks.error(
                "missing-tensor",
                format!("tensor `{}`", spec.name),
                "missing",
                format!("shape {:?}", spec.shape),
                Effect::Rejects,
                "the network has it",
            ),
            Some(found) if *found != spec.shape => checks.error(
                "shape",
                format!("tensor `{}`", spec.name),
                format!("shape {found:?}"),
                format!("{:?}", spec.shape),
                Effect::Rejects,
                "the parameter has another size",
            ),
            Some(_) => {}
        }
    }
    for name in found.keys() {
        if let Some((_, why)) = FOREIGN.iter().find(|(foreign, _)| foreign == name) {
            checks.error(
                "foreign-tensor",
                format!("tensor `{name}`"),
                "not of this network",
                "the trained tensors alone",
                Effect::Garbage,
                why,
            );
        } else if !FROZEN.contains(&name.as_str()) && !specs.iter().any(|spec| spec.name == *name) {
            let hint = meant(nearest(name, specs.iter().map(|spec| spec.name.as_str())));
            checks.broken(
                &FROZEN_TENSOR,
                format!("tensor `{name}`"),
                format!("not of this network{hint}"),
            );
        }
    }
}
