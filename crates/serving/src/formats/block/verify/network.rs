//! What folders and files have in common: layers, the target's sizes, tensors.

use longdraft_models::draft::block::key_names::{
    BEND, COUNTED_LAYERS, EMBEDDING_SCALE, MASK_TOKEN,
};
use longdraft_models::draft::block::{BlockConfig, FROZEN, default_layers, file_specs};
use longdraft_models::draft::vocabulary::MAP;
use longdraft_models::weights::TensorSpec;

use crate::checks::Checks;
use crate::checks::rules::{Rule, tensor_place};
use crate::checks::shapes::{self, Shapes};
use crate::formats::of_target::shift;

const OTHER_LAYERS: Rule = Rule::garbage(
    "layers",
    "",
    "the draft reads other layers, and accepts little without a message",
);
const ONE_OFF: Rule = Rule::garbage(
    "layers",
    "",
    "where the list was meant otherwise, the draft reads other layers, and accepts little without a message",
)
.doubtful();
const OUTSIDE: Rule = Rule::garbage(
    "layers",
    "",
    "the numbers are those of another target, or count as another reader does",
);
const NOT_THE_TARGET: Rule = Rule::rejects("not-the-target", "", "the draft is another target's");
/// The speculators library's own choice for a tokenizer without a mask token whose table has no spare row.
const ENDS_ANSWERS: Rule = Rule::garbage(
    "mask-token",
    "a token that texts do not hold",
    "where the draft was trained with another one, it guesses badly without a message; the speculators library \
     takes one that ends answers where no row of the table is spare",
)
.doubtful();
/// Engines read these numbers from the draft's files, not from the target's.
const NOT_BENT: Rule = Rule::garbage(
    "not-bent",
    "",
    "the draft's logits stay as they are: probabilities are off, and so are the choices of a selector",
);
const MISSING_TENSOR: Rule = Rule::rejects("missing-tensor", "", "the network has it");
const UNEXPECTED_TENSOR: Rule = Rule::garbage(
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

/// The layers that a reader hands to the draft: those that were exported, below the target's last.
pub(super) fn layers(checks: &mut Checks<'_>, config: &BlockConfig, place: &str) {
    let ids: Vec<i64> = config.target_layers.iter().map(|layer| layer.0 as i64).collect();
    if let Some(exported) = checks.exported_layers().filter(|exported| *exported != ids) {
        let hint = shift(&ids, &exported).map(|shift| format!(": {shift}")).unwrap_or_default();
        let found = format!("outputs of layers {ids:?}, counted from 0{hint}");
        checks.differs(&OTHER_LAYERS, place, found, format!("{exported:?}, as they were exported"));
    }
    let Some(count) = checks.target_layers() else { return };
    one_off(checks, (&ids, count), place);
    // Files that do not count the target's layers are taken for those of this one, or of a smaller one.
    let is_counted = checks.config.get(COUNTED_LAYERS).is_some();
    let is_outside = config.target_layers.last().is_some_and(|last| last.0 + 1 >= count);
    if is_outside || (is_counted && count != config.num_target_layers) {
        let found = format!("outputs of layers {ids:?} of {}", config.num_target_layers);
        let expected = format!("layers below the last one of {count}, counted from 0");
        checks.differs(&OUTSIDE, place, found, expected);
    }
}

/// Where nothing says which layers were trained: the usual ones, counted from another layer, are rarely meant so.
fn one_off(checks: &mut Checks<'_>, (ids, count): (&[i64], usize), place: &str) {
    if checks.exported_layers().is_some() || ids.len() < 2 {
        return;
    }
    let usual = default_layers(count, ids.len());
    let usual: Vec<i64> = usual.into_iter().map(|layer| layer.0 as i64).collect();
    let Some(shift) = shift(ids, &usual) else { return };
    let found = format!("outputs of layers {ids:?}, counted from 0: {shift}");
    checks.differs(&ONE_OFF, place, found, format!("{usual:?}, as published drafts have them"));
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
        wrong.push((MASK_TOKEN, mask.to_string(), "a row of the target's table".into()));
    }
    if wanted.eos_token_ids.contains(&config.mask_token_id) {
        checks.broken(&ENDS_ANSWERS, place(MASK_TOKEN), format!("{mask}, which ends answers"));
    }
    if !config.bends_like(wanted) {
        let (found, own) = (format!("{:?}", config.bend), format!("{:?}", wanted.bend()));
        wrong.push((BEND[0], found, own));
    }
    if let Some(scale) = config.embedding_scale.filter(|_| !config.scales_like(wanted)) {
        let own = wanted.parts.embedding_scale.unwrap_or(1.0);
        wrong.push((EMBEDDING_SCALE, format!("{scale:?}"), format!("{own:?}")));
    }
    if config.bend.is_plain() && !wanted.bend().is_plain() {
        // Without a selector the likeliest tokens are the same. How engines add a chain is not known.
        let rule = if config.selector.is_some() { NOT_BENT } else { NOT_BENT.doubtful() };
        checks.differs(&rule, place(BEND[0]), "missing", format!("{:?}", wanted.bend()));
    }
    for (key, found, wanted) in wrong {
        checks.differs(&NOT_THE_TARGET, place(key), found, wanted);
    }
}

/// The trained tensors in their shapes, and no other but the target's; `found` has published names.
pub(super) fn tensors(checks: &mut Checks<'_>, config: &BlockConfig, found: &Shapes) {
    let mut specs = file_specs(config);
    let table = [config.vocab_size, config.hidden_size];
    let is_own = |name: &str| file_specs(config).iter().any(|spec| spec.name == name);
    let frozen = FROZEN.into_iter().filter(|name| found.contains_key(*name) && !is_own(name));
    specs.extend(frozen.map(|name| TensorSpec::new(name, &table)));
    shapes::check(checks, &specs, found, &MISSING_TENSOR);
    for name in found.keys().filter(|name| !config.has_own_head() || !MAP.contains(&name.as_str()))
    {
        let place = tensor_place(name);
        if let Some(&(_, why)) = FOREIGN.iter().find(|(foreign, _)| foreign == name) {
            let rule = Rule::garbage("foreign-tensor", "the trained tensors alone", why);
            checks.broken(&rule, place, "not of this network");
        } else if let Some(words) = shapes::stranger(name, &specs) {
            checks.broken(&UNEXPECTED_TENSOR, place, words);
        }
    }
}
