//! Which rows of its input a layer runs: one for every slot, for every token in them, or for the slots asked for.

use std::borrow::Cow;
use std::ops::Range;

/// Rows of a layer's input.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    /// The row that every slot has, where slots share some; its own where there is none.
    pub(super) of_slot: Option<&'a [u32]>,
    /// The slots whose results are asked for, ascending; all where there is none.
    pub(super) wanted: Option<&'a [u32]>,
}

impl<'a> Run<'a> {
    /// The rows of the slots asked for; `None` for all rows as they are.
    pub(super) fn rows(self) -> Option<Cow<'a, [u32]>> {
        match (self.of_slot, self.wanted) {
            (Some(rows), Some(wanted)) => {
                Some(wanted.iter().map(|&slot| rows[slot as usize]).collect())
            }
            (rows, wanted) => rows.or(wanted).map(Cow::Borrowed),
        }
    }
}

/// The different ids, ascending, and which of them every slot has; `None` where more than half are different.
pub(super) fn distinct(ids: &[u32]) -> Option<(Vec<u32>, Vec<u32>)> {
    let mut known = ids.to_vec();
    known.sort_unstable();
    known.dedup();
    if 2 * known.len() > ids.len() {
        return None;
    }
    let place = |id: &u32| known.partition_point(|other| other < id) as u32;
    let of_slot = ids.iter().map(place).collect();
    Some((known, of_slot))
}

/// The slots of one block among ascending ones of all, counted from its first.
pub(super) fn within(slots: &[u32], block: Range<usize>) -> Vec<u32> {
    let inside = slots.iter().filter(|slot| block.contains(&(**slot as usize)));
    inside.map(|slot| slot - block.start as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_have_the_rows_of_their_tokens() {
        let (known, of_slot) = distinct(&[7, 9, 9, 9, 3, 9, 9, 9]).expect("shared tokens");
        assert_eq!(
            (known.as_slice(), of_slot.as_slice()),
            ([3, 7, 9].as_slice(), [1, 2, 2, 2, 0, 2, 2, 2].as_slice())
        );
        assert!(distinct(&[7, 9, 8, 9, 3]).is_none());
        let run = |of_slot, wanted| Run { of_slot, wanted }.rows().map(Cow::into_owned);
        assert_eq!(run(Some(&of_slot), Some(&[0, 3, 4])), Some(vec![1, 2, 0]));
        assert_eq!(run(Some(&of_slot), None), Some(of_slot.clone()));
        assert_eq!(run(None, Some(&[0, 3])), Some(vec![0, 3]));
        assert_eq!(run(None, None), None);
    }

    #[test]
    fn slots_of_a_block_are_counted_from_its_first() {
        let slots = [1, 2, 5, 8, 11];
        assert_eq!(within(&slots, 0..4), [1, 2]);
        assert_eq!(within(&slots, 4..8), [1]);
        assert_eq!(within(&slots, 8..12), [0, 3]);
        assert_eq!(within(&slots, 12..16), [0; 0]);
    }
}
