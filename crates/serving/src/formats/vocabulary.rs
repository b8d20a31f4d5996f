//! `d2t` and `t2d`, the map of a vocabulary of the draft's own that no engine checks.

use candle_core::Tensor;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::ids::TargetTokenId;
use longdraft_models::sha256;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::gguf::header::ElementType;

use crate::checks::gguf::GgufFile;
use crate::checks::rules::{Rule, tensor_place};
use crate::checks::weights_file::FoundTensor;
use crate::checks::{Checks, Effect};

const OTHER_MAP: Rule = Rule::garbage(
    "other-map",
    "the recorded one",
    "every draft token stands for another one than in training",
);
const MAP_TYPE: Rule = Rule::rejects("map-type", "", "the buffer is of another type");
const MAP_LENGTH: Rule = Rule::rejects("map-length", "", "the buffer has another size");
const NO_STOP: Rule = Rule::garbage(
    "no-stop",
    "every token that ends a text or a turn",
    "the draft never proposes an end",
)
.effect(Effect::Works)
.doubtful()
.remedy("train with the chat template, or with a larger draft vocabulary");

/// What engines do with a wrong map.
const SILENT: &str =
    "draft logits are scattered to wrong tokens: an index error, or no message at all";
const NO_MAP: Rule = Rule::garbage("no-map", "", SILENT);
const ABSOLUTE: Rule = Rule::garbage("absolute-d2t", "target id less draft id", SILENT);
const MAP: Rule =
    Rule::garbage("map", "kept tokens ascending within the target's vocabulary", SILENT);

/// What files of absolute ids break.
const NO_ABSOLUTE: Rule = Rule::rejects("no-map", "", "head and vocabulary differ in size");
const ABSOLUTE_TYPE: Rule = Rule::rejects("map-type", "I64", "the tensor is of another type");
const OFFSETS: Rule = Rule::garbage(
    "offset-d2t",
    "the target id of every draft token",
    "draft tokens stand for wrong target tokens, without a message",
);

/// `d2t` with absolute ids, as GGUF files hold it, `[Vd]` of offsets → `[Vd]`.
/// It fails where it holds no whole numbers.
pub(super) fn absolute(offsets: &Tensor) -> candle_core::Result<Tensor> {
    let values: Vec<i64> = offsets.to_vec1()?;
    let ids: Vec<i64> = values.iter().zip(0..).map(|(offset, i)| offset + i).collect();
    Tensor::from_vec(ids, offsets.dims(), offsets.device())
}

/// Identifies a map in manifests.
pub(super) fn hash(map: &VocabularyMap) -> String {
    let bytes: Vec<u8> = map.kept().iter().flat_map(|id| id.0.to_le_bytes()).collect();
    sha256::of_bytes(&bytes)
}

/// Checks a folder's map of `draft` to `target` tokens.
pub(super) fn check(checks: &mut Checks<'_>, [draft, target]: [usize; 2]) {
    for (name, dtype, length) in [("d2t", "I64", draft), ("t2d", "BOOL", target)] {
        let place = tensor_place(name);
        let Some(FoundTensor { dtype: found, shape, .. }) = checks.tensors.get(name).cloned()
        else {
            if draft < target {
                let map = format!("{dtype} [{length}]");
                let expected = format!("{map}: the draft proposes {draft} of {target} tokens");
                checks.differs(&NO_MAP, place, "missing", expected);
            }
            continue;
        };
        if found != dtype {
            checks.differs(&MAP_TYPE, place.clone(), found, dtype);
        }
        if shape != [length] {
            checks.differs(&MAP_LENGTH, place, format!("shape {shape:?}"), format!("[{length}]"));
        }
    }
    let Some(offsets) = checks.tensors.get("d2t").and_then(integers) else { return };
    let flags = checks.tensors.get("t2d").and_then(integers);
    check_offsets(checks, &offsets, flags.as_deref(), target);
}

/// Checks a GGUF file's map, which holds absolute ids: offsets are the mistake.
pub(super) fn check_absolute(
    checks: &mut Checks<'_>,
    file: &GgufFile,
    source: &dyn WeightSource,
    target: usize,
) {
    let place = tensor_place("d2t");
    let tensors = &file.header.tensors;
    let Some(map) = tensors.get("d2t") else {
        let head = tensors.get("output.weight").and_then(|tensor| tensor.shape.first());
        if let Some(rows) = head.filter(|rows| **rows != target) {
            let tokens = format!("the head has {rows} rows, the target {target} tokens");
            checks.differs(&NO_ABSOLUTE, place, "missing", format!("I64 [{rows}]: {tokens}"));
        }
        return;
    };
    if map.element != ElementType::I64 {
        checks.broken(&ABSOLUTE_TYPE, place.clone(), format!("{:?}", map.element));
    }
    let Ok(offsets) = source.load_integers("d2t") else { return };
    let ids: Vec<i64> = offsets.iter().zip(0_i64..).map(|(offset, i)| offset + i).collect();
    let ascends = ids.windows(2).all(|pair| pair[0] < pair[1]);
    let grows = ids.windows(2).all(|pair| pair[0] <= pair[1]);
    if grows && !ascends {
        return checks.broken(&OFFSETS, place, "offsets where absolute ids are expected");
    }
    check_offsets(checks, &offsets, None, target);
}

/// Offsets as every reader of folders takes them.
fn check_offsets(checks: &mut Checks<'_>, offsets: &[i64], flags: Option<&[i64]>, target: usize) {
    let ascends = offsets.windows(2).all(|pair| pair[0] < pair[1]);
    let in_range = offsets.first().is_some_and(|first| *first >= 0)
        && offsets.last().is_some_and(|last| *last < target as i64);
    let mapped: Vec<i64> = offsets.iter().zip(0_i64..).map(|(d, i)| d.saturating_add(i)).collect();
    let kept: Option<Vec<i64>> = flags.map(|flags| {
        flags.iter().zip(0_i64..).filter(|(flag, _)| **flag != 0).map(|(_, id)| id).collect()
    });
    let read_as_ids =
        kept.as_deref().map_or(mapped.last().is_some_and(|last| *last >= target as i64), |kept| {
            kept == offsets && kept != mapped
        });
    if ascends && in_range && read_as_ids && offsets.len() > 1 {
        let found = "absolute ids where offsets are expected";
        checks.broken(&ABSOLUTE, "tensor `d2t`", found);
        return;
    }
    match VocabularyMap::from_offsets(offsets, flags, target) {
        Ok(map) => kept_tokens(checks, &map),
        Err(longdraft_models::ModelError::Invalid { problems, .. }) => {
            checks.each(&MAP, "tensor `d2t`", problems.0);
        }
        Err(error) => checks.broken(&MAP, "tensor `d2t`", error.to_string()),
    }
}

/// Tokens that end a text can be proposed; the map is the exported one.
fn kept_tokens(checks: &mut Checks<'_>, map: &VocabularyMap) {
    let recorded = checks.manifest.as_ref().and_then(|manifest| manifest.vocabulary_map.clone());
    if recorded.is_some_and(|recorded| recorded != hash(map)) {
        checks.broken(&OTHER_MAP, "tensor `d2t`", "another map than was exported");
    }
    let Some(target) = checks.target else { return };
    let ends: Vec<u32> = target.config().eos_token_ids.clone();
    let lost: Vec<u32> =
        ends.into_iter().filter(|id| map.to_draft(TargetTokenId(*id)).is_none()).collect();
    if !lost.is_empty() {
        let found = format!("tokens {lost:?}, which end a text, are not kept");
        checks.broken(&NO_STOP, "tensor `d2t`", found);
    }
}

fn integers(tensor: &FoundTensor) -> Option<Vec<i64>> {
    let bytes = tensor.read().ok()?;
    Some(match tensor.dtype.as_str() {
        "I64" => bytes
            .chunks_exact(8)
            .filter_map(|b| b.try_into().ok().map(i64::from_le_bytes))
            .collect(),
        "I32" => bytes
            .chunks_exact(4)
            .filter_map(|b| b.try_into().ok().map(i32::from_le_bytes))
            .map(i64::from)
            .collect(),
        "BOOL" | "U8" => bytes.into_iter().map(i64::from).collect(),
        _ => return None,
    })
}
