//! How block drafts are set up where only a target and a budget are given.

use serde_json::{Value, json};

use crate::method::recipe::{keys, rate_at, starts};
use crate::method::{Evidence, Passes, Recipe, Room, Round};

/// Tokens of a row for each block: the drafts of the evidence had 128 blocks in rows of 1024.
const TOKENS_PER_BLOCK: usize = 8;
/// Hours of training from which a draft has more than one layer.
const HOURS_OF_LAYERS: [(f64, usize); 2] = [(24.0, 5), (6.0, 2)];

/// Layers of a draft: those of short trainings begin with the target's last one and learn little more.
fn depth(seconds: f64) -> usize {
    let found = HOURS_OF_LAYERS.iter().find(|(hours, _)| seconds >= 3600.0 * hours);
    found.map_or(1, |(_, layers)| *layers)
}

/// Four of the target's layers, the last one that engines hand out among them; none where it has too few.
fn tapped(layers: usize) -> Option<[usize; 4]> {
    let ids = [layers / 4, layers / 2, 3 * layers / 4, layers.checked_sub(2)?];
    ids.windows(2).all(|pair| pair[0] < pair[1]).then_some(ids)
}

/// A draft that proposes `proposals` tokens in `slots` slots; `more` are keys of its method.
pub(in crate::method) fn recipe(
    room: &Room<'_>,
    (slots, proposals): (usize, usize),
    at_576: f64,
    more: Value,
    evidence: &'static [Evidence],
) -> Option<Recipe> {
    let layers = tapped(room.target.num_hidden_layers)?;
    let rate = rate_at(room.target.hidden_size, at_576);
    let starts = starts(room.target, rate, rate);
    let mut draft = keys(json!({
        "layers": depth(room.seconds), "target_layers": layers, "block_size": slots, "init": starts[0].init,
        "blocks_per_row": (room.row_tokens / TOKENS_PER_BLOCK).max(1),
    }));
    draft.extend(keys(more));
    Some(Recipe {
        draft,
        teacher: keys(json!({})),
        starts,
        learning_rate: rate,
        round: Round { most: proposals, passes: Passes::OneBlock, vocabulary: None },
        evidence,
    })
}
