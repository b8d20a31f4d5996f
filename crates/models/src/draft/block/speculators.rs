//! Block drafts in folders of the speculators library, under the keys of plain folders.
//!
//! Layers count as states that enter one, whether blocks are causal is said of sliding layers alone, and
//! the type says which heads there are. Full layers see the whole block in this layout.

use serde_json::{Map, Value, json};

use super::config::no_embeddings;
use super::files::{CHAINED, EXTENDED, PLAIN};
use super::key_names::{
    BLOCK_SIZE, BONUS_ANCHOR, CAUSAL, CHAIN, CONVOLUTION, COUNTED_LAYERS, ENTERED_LAYERS,
    FROM_ANCHOR, NON_CAUSAL, SELECTOR, TARGET_LAYERS,
};
use crate::draft::DraftKind;
use crate::draft::speculators::flattened;
use crate::error::Problems;
use crate::ids::{EnteredLayerId, LayerId};

/// The key that says which network a folder holds.
const TYPE: &str = "speculators_model_type";

/// Sizes that the library takes where a folder with a selector has none.
const SIZES: [([&str; 2], [u64; 2]); 2] = [(CONVOLUTION, [2, 16]), (SELECTOR, [256, 16])];

/// The kind of draft that a folder of this layout holds; `None` if it is another layout, or no block
/// draft.
pub(super) fn kind_of(value: &Value) -> Option<&'static DraftKind> {
    let said = value[TYPE].as_str()?;
    let kind = [&PLAIN, &EXTENDED, &CHAINED].into_iter().find(|kind| kind.name == said)?;
    // Without a head, a draft that proposes from slot 0 on is a chain of rank 0.
    let proposes = value[FROM_ANCHOR] == true;
    Some(if kind.name == PLAIN.name && proposes { &CHAINED } else { kind })
}

/// The keys of a plain folder; `None` if the value is not of this layout. Defaults are the library's
/// own, by which such drafts were trained.
pub(super) fn plain(value: &Value, problems: &mut Problems) -> Option<Value> {
    let kind = kind_of(value)?;
    let mut flat: Map<String, Value> = flattened(value, problems).as_object().cloned()?;
    flat.entry(BLOCK_SIZE).or_insert_with(|| 8.into());
    set_layers(&mut flat, problems);
    // It is said of sliding layers; full ones are never causal, whatever vLLM is told besides.
    let non_causal = flat.remove(NON_CAUSAL).and_then(|value| value.as_bool());
    flat.remove(CAUSAL[0]);
    if non_causal.unwrap_or(kind.name == EXTENDED.name) {
        flat.insert(CAUSAL[0].into(), false.into());
    }
    if kind.name == CHAINED.name {
        set_chain(&mut flat, value[TYPE] == PLAIN.name);
    } else if flat.get(FROM_ANCHOR).is_some_and(|value| *value == true) {
        problems.push(format!("`{FROM_ANCHOR}` = true is not supported beside a selector"));
    }
    if kind.name == EXTENDED.name {
        for (names, sizes) in SIZES {
            for (key, size) in names.into_iter().zip(sizes) {
                flat.entry(key).or_insert_with(|| size.into());
            }
        }
    }
    Some(Value::Object(flat))
}

/// Layers as outputs. The layout does not count the target's: no draft reads the last one.
fn set_layers(flat: &mut Map<String, Value>, problems: &mut Problems) {
    let listed = flat.remove(ENTERED_LAYERS);
    match listed.as_ref().map(outputs) {
        Some(Some(ids)) => {
            let count = ids.last().map_or(1, |last| last.saturating_add(2));
            flat.entry(COUNTED_LAYERS).or_insert_with(|| count.into());
            flat.insert(TARGET_LAYERS.into(), json!(ids));
        }
        Some(None) => {
            let listed = listed.unwrap_or_default();
            let reason =
                no_embeddings(listed.as_array().is_some_and(|ids| ids.contains(&json!(0))));
            let told =
                format!("`{ENTERED_LAYERS}` = {listed} are not layers, counted from 1{reason}");
            problems.push(told);
        }
        None => problems.push(format!("`{ENTERED_LAYERS}` is missing")),
    }
}

/// Heads of a chain, or those that the plain type has not.
fn set_chain(flat: &mut Map<String, Value>, is_plain: bool) {
    let bonus = flat.remove(BONUS_ANCHOR).and_then(|value| value.as_bool());
    let said = flat.get(FROM_ANCHOR).and_then(Value::as_bool);
    flat.insert(FROM_ANCHOR.into(), said.unwrap_or(bonus != Some(true)).into());
    let [rank, _, has_confidence, _] = CHAIN;
    if is_plain {
        flat.insert(rank.into(), 0.into());
        return;
    }
    flat.entry(rank).or_insert_with(|| 256.into());
    flat.entry(has_confidence).or_insert_with(|| true.into());
}

/// The layers whose outputs a list names as states that enter the next one.
fn outputs(listed: &Value) -> Option<Vec<usize>> {
    let output = |id: &Value| EnteredLayerId(usize::try_from(id.as_u64()?).ok()?).output();
    let layers: Option<Vec<LayerId>> = listed.as_array()?.iter().map(output).collect();
    Some(layers?.into_iter().map(|layer| layer.0).collect())
}
