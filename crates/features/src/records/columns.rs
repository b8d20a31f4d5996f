//! Which of the layers in a record are those that a draft taps.

use crate::store::{Contents, StoredTeacher};

/// Places in a record's `[T, L, H]`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Columns {
    /// The draft's layers, in its order.
    pub(super) aux: Vec<usize>,
    /// The target's last layer, where nothing else holds the final states.
    pub(super) last: Option<usize>,
}

impl Columns {
    /// The places of what `contents` name. `told` are the layers' ids; without them the layers must be those of
    /// the draft, and one more, the target's last, if the final states do not stand by themselves.
    ///
    /// # Errors
    /// - ids that are no layers of the target, or a layer that is not held
    pub(super) fn of(
        told: Option<&[usize]>,
        (held, has_final): (usize, bool),
        contents: &Contents,
        layers: usize,
    ) -> Result<Self, String> {
        let needs_final = contents.teacher != StoredTeacher::None && !has_final;
        let Some(told) = told else {
            return Self::in_order(held, needs_final, has_final, contents);
        };
        if told.len() != held {
            return Err(format!("{held} layers, and ids of {} are told: {told:?}", told.len()));
        }
        for (at, id) in told.iter().enumerate() {
            if *id >= layers {
                return Err(format!(
                    "layer {id} of a target of {layers}: ids count from 0, vLLM's and speculators' are one \
                     larger"
                ));
            }
            if told[..at].contains(id) {
                return Err(format!("layer {id} is told twice: {told:?}"));
            }
        }
        let place = |id: usize| told.iter().position(|told| *told == id);
        let aux: Result<Vec<usize>, String> = contents
            .layers
            .iter()
            .map(|id| {
                place(*id).ok_or_else(|| format!("holds layers {told:?}, not {id}: {REMEDY}"))
            })
            .collect();
        let last = layers.checked_sub(1).and_then(place).filter(|_| !has_final);
        if needs_final && last.is_none() {
            return Err(NO_FINAL.to_owned());
        }
        Ok(Self { aux: aux?, last })
    }

    fn in_order(
        held: usize,
        needs_final: bool,
        has_final: bool,
        contents: &Contents,
    ) -> Result<Self, String> {
        let own = contents.layers.len();
        let last = (!has_final && held == own + 1).then_some(own);
        if held != own && last.is_none() {
            let wanted = if has_final { format!("{own}") } else { format!("{own} or {}", own + 1) };
            return Err(format!(
                "{held} layers where {wanted} are needed: another target, or other layers than the draft's \
                 target_layers; which layers they are can be told in capture.record_layers"
            ));
        }
        if needs_final && last.is_none() {
            return Err(NO_FINAL.to_owned());
        }
        Ok(Self { aux: (0..own).collect(), last })
    }
}

const REMEDY: &str = "capture it too, or choose other draft.target_layers";

const NO_FINAL: &str = "no final states, which the loss reads: capture the target's last layer too, or choose a \
                        loss without a teacher";

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(layers: &[usize], teacher: StoredTeacher) -> Contents {
        Contents { last_kv: false, layers: layers.to_vec(), teacher }
    }

    fn columns(aux: &[usize], last: Option<usize>) -> Columns {
        Columns { aux: aux.to_vec(), last }
    }

    #[test]
    fn told_layers_are_found_wherever_they_stand() {
        let wanted = contents(&[5, 1], StoredTeacher::FinalHidden);
        let told: &[usize] = &[1, 3, 7, 5];
        assert_eq!(Columns::of(Some(told), (4, false), &wanted, 8), Ok(columns(&[3, 0], Some(2))));
        assert_eq!(Columns::of(Some(told), (4, true), &wanted, 9), Ok(columns(&[3, 0], None)));
        for (told, held, layers, text) in [
            (&[1, 5][..], 3, 8, "3 layers"),
            (&[1, 5, 8], 3, 8, "layer 8 of a target of 8"),
            (&[1, 5, 1], 3, 8, "twice"),
            (&[1, 4, 7], 3, 8, "not 5"),
            (&[1, 5, 6], 3, 8, "no final states"),
        ] {
            let error =
                Columns::of(Some(told), (held, false), &wanted, layers).expect_err("refused");
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn layers_that_nobody_names_are_the_drafts_and_the_last() {
        let wanted = contents(&[5, 1], StoredTeacher::FinalHidden);
        assert_eq!(Columns::of(None, (3, false), &wanted, 8), Ok(columns(&[0, 1], Some(2))));
        assert_eq!(Columns::of(None, (2, true), &wanted, 8), Ok(columns(&[0, 1], None)));
        let alone = contents(&[5, 1], StoredTeacher::None);
        assert_eq!(Columns::of(None, (2, false), &alone, 8), Ok(columns(&[0, 1], None)));
        assert!(Columns::of(None, (2, false), &wanted, 8).expect_err("none").contains("final"));
        for (held, has_final) in [(4, false), (1, false), (3, true)] {
            let error = Columns::of(None, (held, has_final), &wanted, 8).expect_err("refused");
            assert!(error.contains("target_layers"), "{error}");
        }
    }
}
