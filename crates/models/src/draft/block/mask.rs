//! Who sees whom: context before a block's anchor, and the slots of the block itself.
//!
//! ```text
//! full layer      context s < a;                          slots of the same block
//! sliding layer   context s < a, s ≥ a + slot − (w − 1);  slots ≥ slot − (w − 1)
//! causal          and no slot after the own one
//! ```
//!
//! Everything stays in the anchor's document. Keys are those of the context, then those of the blocks.

use std::ops::Range;
use std::sync::Arc;

use longdraft_kernels::attention::KeyRanges;

use super::config::{BlockConfig, LayerKind};

/// A block in a row of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anchor {
    /// Index of the token in slot 0.
    pub index: usize,
    /// Index of the first token of its document.
    pub document_start: usize,
}

/// The keys that every slot sees, by the kind of layer.
#[derive(Debug, Clone)]
pub struct Visible {
    full: Arc<KeyRanges>,
    sliding: Arc<KeyRanges>,
    slots: usize,
}

impl Visible {
    /// For blocks of `slots` slots over `context` rows; block `i` has the `i`-th `slots` queries.
    pub fn new(config: &BlockConfig, anchors: &[Anchor], slots: usize, context: usize) -> Self {
        let of = |kind| Arc::new(ranges(config, kind, (anchors, slots), context));
        Self { full: of(LayerKind::Full), sliding: of(LayerKind::Sliding), slots }
    }

    /// Those of one kind of layer.
    pub fn of(&self, kind: LayerKind) -> &Arc<KeyRanges> {
        match kind {
            LayerKind::Full => &self.full,
            LayerKind::Sliding => &self.sliding,
        }
    }

    /// Slots of a block.
    pub fn slots(&self) -> usize {
        self.slots
    }
}

fn ranges(
    config: &BlockConfig,
    kind: LayerKind,
    (anchors, slots): (&[Anchor], usize),
    context: usize,
) -> KeyRanges {
    let window = config.sliding_window.filter(|_| kind == LayerKind::Sliding);
    let causal = config.is_causal_in(kind);
    let mut of_context = Vec::with_capacity(anchors.len() * slots);
    let mut of_block = Vec::with_capacity(anchors.len() * slots);
    for (block, anchor) in anchors.iter().enumerate() {
        let first_key = context + block * slots;
        for slot in 0..slots {
            of_context.push(context_of(*anchor, slot, window));
            let first = window.map_or(0, |window| (slot + 1).saturating_sub(window));
            let end = if causal { slot + 1 } else { slots };
            of_block.push((first..end).map(|key| (first_key + key) as u32).collect::<Vec<u32>>());
        }
    }
    KeyRanges::of_each(of_context).with_singles(of_block)
}

/// Context rows that a slot sees.
fn context_of(anchor: Anchor, slot: usize, window: Option<usize>) -> Range<usize> {
    let first = window.map_or(0, |window| (anchor.index + slot + 1).saturating_sub(window));
    first.max(anchor.document_start)..anchor.index
}

#[cfg(test)]
mod tests {
    use super::super::tests::toy;
    use super::*;

    /// Every pair of a query and a key, by the rules as they are written.
    fn allowed(
        anchors: &[(usize, usize)],
        (block, slot): (usize, usize),
        key: Result<usize, (usize, usize)>,
        (window, causal): (Option<usize>, bool),
    ) -> bool {
        let (anchor, start) = anchors[block];
        let reach = window.map_or(i64::MIN, |w| slot as i64 - (w as i64 - 1));
        match key {
            Ok(s) => s < anchor && s >= start && (s as i64 - anchor as i64) >= reach,
            Err((of, other)) => of == block && other as i64 >= reach && (!causal || other <= slot),
        }
    }

    #[test]
    fn the_mask_is_that_of_the_table() {
        let (context, slots) = (12, 4);
        for places in [[(2, 0), (7, 0)], [(2, 0), (7, 5)]] {
            let anchors = places.map(|(index, document_start)| Anchor { index, document_start });
            for window in [None, Some(4), Some(1), Some(3)] {
                for is_causal in [None, Some(false), Some(true)] {
                    let config = BlockConfig { sliding_window: window, is_causal, ..toy() };
                    let kind = if window.is_some() { LayerKind::Sliding } else { LayerKind::Full };
                    let causal = is_causal.unwrap_or(window.is_some());
                    let visible = Visible::new(&config, &anchors, slots, context);
                    let ranges = visible.of(kind);
                    for query in 0..places.len() * slots {
                        let own = (query / slots, query % slots);
                        let seen = |key: usize| {
                            ranges.of(query).contains(&key)
                                || ranges.singles_of(query).contains(&(key as u32))
                        };
                        for s in 0..context {
                            let want = allowed(&places, own, Ok(s), (window, causal));
                            assert_eq!(seen(s), want, "{own:?} {s} {window:?} {is_causal:?}");
                        }
                        for key in 0..places.len() * slots {
                            let of = (key / slots, key % slots);
                            let want = allowed(&places, own, Err(of), (window, causal));
                            assert_eq!(seen(context + key), want, "{own:?} {of:?} {window:?}");
                        }
                    }
                }
            }
        }
    }
}
