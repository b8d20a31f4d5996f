//! What the target contributes to a batch, computed on the spot or captured earlier.
//!
//! ```text
//! batch -> target                                    online, or once a row into main memory
//!       -> store of `longdraft capture`              on disk or in an object store
//!       -> records of another trainer or engine      on disk
//!            \-> BatchFeatures { last_kv, aux_hidden, teacher }
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod error;
mod memory;
mod mode;
pub mod records;
pub mod store;

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::token_ranges::TokenRanges;
use longdraft_kernels::top_k::TopK;
use longdraft_models::target_model::{
    Features, KeyValues, PackedSequence, RowPart, Tap, Taps, Target,
};

pub use error::{FeatureError, Result};
pub use memory::MemoryFeatures;
pub use mode::FeatureMode;
pub use records::RecordFeatures;
pub use store::{Part, StoredFeatures};

/// Which form of the teacher's distribution is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TeacherKind {
    /// None.
    None,
    /// Final hidden states; the softmax is formed inside the loss.
    Full,
    /// The k most likely tokens.
    TopK(usize),
    /// Final hidden states of every token, whatever is learned.
    EveryToken,
    /// The same, or only the k most likely tokens where the teacher is read.
    EveryTokenTopK(usize),
}

/// What an objective asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureNeeds {
    /// Taps of the draft.
    pub taps: Vec<Tap>,
    /// Teacher of the loss.
    pub teacher: TeacherKind,
    /// How far after a token its teachers may stand: a rank that runs a part of a row gets the states
    /// of so many tokens after it.
    pub ahead: usize,
}

/// The teacher's distribution at the tokens where it is read, as an objective says which.
#[derive(Debug, Clone)]
pub enum TeacherFeatures {
    /// Not needed.
    None,
    /// Final hidden states, `[R, H]`.
    Full {
        /// After the target's final norm.
        hidden: Tensor,
    },
    /// Most likely tokens, `[R, k]`.
    TopK {
        /// Ids and log-probabilities.
        entries: TopK,
        /// Entries a token.
        k: usize,
        /// Final hidden states `[R, H]`, where statistics over the whole vocabulary are wanted.
        hidden: Option<Tensor>,
    },
    /// Final hidden states of every token, `[T, H]`, because the teacher of later tokens is read;
    /// of a part of a row, its own and those of [`FeatureNeeds::ahead`] tokens after it.
    EveryToken {
        /// After the target's final norm.
        hidden: Tensor,
    },
}

/// Features of one batch.
#[derive(Debug, Clone)]
pub struct BatchFeatures {
    /// Last-layer keys and values of every token, if the draft taps them.
    pub last_kv: Option<KeyValues>,
    /// The tapped layers' states side by side, `[T, L·H]`, if the draft taps any; of a part of a
    /// row, those of its own tokens.
    pub aux_hidden: Option<Tensor>,
    /// Teacher at the learned tokens.
    pub teacher: TeacherFeatures,
    /// What this rank runs where ranks share a row (`parallel.sequence`); `None`: all.
    pub part: Option<RowPart>,
}

impl BatchFeatures {
    /// Tokens that this rank runs; `None`: all.
    pub fn tokens(&self) -> Option<&TokenRanges> {
        self.part.as_ref().map(RowPart::rows)
    }

    /// The rows of the states of every token at which `tokens` of the whole row stand: a part of a row has those that
    /// [`RowPart::known`] names.
    ///
    /// # Errors
    /// - the states of one of them are another process's
    pub fn state_rows(&self, tokens: &[u32]) -> Result<Vec<u32>> {
        Ok(match &self.part {
            Some(part) => part.known().places_of(tokens)?,
            None => tokens.to_vec(),
        })
    }

    /// The same features where the teacher is read at fewer `tokens` than it was `read` at, both ascending.
    ///
    /// # Errors
    /// - it was not read at one of them
    pub fn with_teacher_at(&self, tokens: &[u32], read: &[u32]) -> Result<Self> {
        let places = || -> Result<Vec<u32>> {
            let place = |token: &u32| read.binary_search(token).ok().map(|place| place as u32);
            let places: Option<Vec<u32>> = tokens.iter().map(place).collect();
            places.ok_or_else(|| untapped("the teacher at a learned token"))
        };
        let teacher = match &self.teacher {
            TeacherFeatures::None | TeacherFeatures::EveryToken { .. } => self.teacher.clone(),
            TeacherFeatures::Full { hidden } => {
                TeacherFeatures::Full { hidden: select_rows(hidden, &places()?)? }
            }
            TeacherFeatures::TopK { entries, k, hidden } => {
                let places = places()?;
                let rows = |hidden| select_rows(hidden, &places);
                TeacherFeatures::TopK {
                    entries: select_entries(entries, (read.len(), &places), *k)?,
                    k: *k,
                    hidden: hidden.as_ref().map(rows).transpose()?,
                }
            }
        };
        Ok(Self { teacher, ..self.clone() })
    }

    /// What a rank that runs `part` of a row keeps of the whole row's features.
    fn cut(self, part: Option<&RowPart>, ahead: usize) -> Result<Self> {
        let Some(part) = part else { return Ok(self) };
        let part = part.seeing_ahead(ahead);
        let aux_hidden =
            self.aux_hidden.as_ref().map(|all| part.rows().rows_of(all)).transpose()?;
        let teacher = match self.teacher {
            TeacherFeatures::EveryToken { hidden } => {
                TeacherFeatures::EveryToken { hidden: part.known().rows_of(&hidden)? }
            }
            other => other,
        };
        Ok(Self { aux_hidden, teacher, part: Some(part), ..self })
    }

    /// The last layer's keys and values.
    ///
    /// # Errors
    /// - the draft did not ask for them
    pub fn last_kv(&self) -> Result<&KeyValues> {
        self.last_kv.as_ref().ok_or_else(|| untapped("last-layer keys and values"))
    }

    /// The tapped layers' states side by side, `[T, L·H]`.
    ///
    /// # Errors
    /// - the draft did not ask for them
    pub fn aux_hidden(&self) -> Result<&Tensor> {
        self.aux_hidden.as_ref().ok_or_else(|| untapped("hidden states of tapped layers"))
    }
}

/// The first `k` entries at some of the `tokens` tokens that have any.
fn select_entries(held: &TopK, (tokens, places): (usize, &[u32]), k: usize) -> Result<TopK> {
    let each = held.ids.len() / tokens.max(1);
    if k > each {
        return Err(untapped(&format!("{k} most likely tokens: they have {each}")));
    }
    let of = |place: &u32| *place as usize * each..*place as usize * each + k;
    Ok(TopK {
        ids: places.iter().flat_map(|place| held.ids[of(place)].iter().copied()).collect(),
        log_probs: places
            .iter()
            .flat_map(|place| held.log_probs[of(place)].iter().copied())
            .collect(),
    })
}

/// The error of an objective that reads what it did not ask for.
pub fn untapped(what: &str) -> FeatureError {
    let message = format!("the features lack {what}");
    candle_core::Error::Msg(message).into()
}

/// Where features come from.
pub enum FeatureSource {
    /// The target runs for every batch.
    Online(Arc<Target>),
    /// Captured by this process; the target does not run again.
    Memory(MemoryFeatures),
    /// Captured earlier into a store; of the target only its ends are loaded.
    Stored(StoredFeatures),
    /// Captured by another trainer or engine; of the target only its ends are loaded.
    Records(RecordFeatures),
}

impl FeatureSource {
    /// Features of a batch, or of the part of it that this rank runs, whose teacher is read at
    /// `teacher_tokens` only.
    ///
    /// # Errors
    /// - the target cannot run, or the store lacks the batch's row
    pub fn features(
        &self,
        part: Part,
        (batch, row_part): (&Batch, Option<&RowPart>),
        needs: &FeatureNeeds,
        teacher_tokens: &[u32],
    ) -> Result<BatchFeatures> {
        match self {
            Self::Online(target) => run_target(target, batch, row_part, needs),
            Self::Memory(memory) => memory.features(batch),
            Self::Stored(store) => {
                store.features(part, batch, needs, teacher_tokens)?.cut(row_part, needs.ahead)
            }
            Self::Records(records) => {
                records.features(batch, needs, teacher_tokens)?.cut(row_part, needs.ahead)
            }
        }
    }

    /// Takes part in what the ranks of a spread target gather for another's batch.
    ///
    /// # Errors
    /// - the target cannot run
    pub fn join(&self, needs: &FeatureNeeds) -> Result<()> {
        let target = match self {
            Self::Online(target) => return join_target(target, needs),
            // Who captures joins.
            Self::Memory(_) => return Ok(()),
            Self::Stored(store) => store.target(),
            Self::Records(records) => records.target(),
        };
        drop(target.hold_ends()?);
        Ok(())
    }

    /// Says which row comes next and what is needed of it, so that a store can read it meanwhile.
    pub fn read_ahead(&self, part: Part, row: usize, needs: &FeatureNeeds) {
        if let Self::Stored(store) = self {
            store.read_ahead(part, row, needs);
        }
    }

    /// Whether positions are those of the capture, whatever the epoch.
    pub fn pins_positions(&self) -> bool {
        !matches!(self, Self::Online(_))
    }
}

/// Hash of what the target sees of a batch.
pub(crate) fn key(batch: &Batch) -> String {
    let mut hasher = blake3::Hasher::new();
    for values in [&batch.ids, &batch.position_ids] {
        values.iter().for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
    }
    batch.document_ids.iter().for_each(|id| {
        hasher.update(&id.to_le_bytes());
    });
    hasher.finalize().to_hex()[..16].to_owned()
}

/// What the target runs of a batch.
pub fn sequence_of(batch: &Batch) -> PackedSequence {
    PackedSequence {
        ids: batch.ids.clone(),
        position_ids: batch.position_ids.clone(),
        document_ids: batch.document_ids.clone(),
    }
}

/// Takes part in what the ranks of a spread target gather for [`run_target`].
///
/// # Errors
/// - as [`Target::join_forward`]
pub fn join_target(target: &Target, needs: &FeatureNeeds) -> Result<()> {
    target.join_forward(&taps_of(needs))?;
    if matches!(needs.teacher, TeacherKind::TopK(_)) {
        drop(target.hold_ends()?);
    }
    Ok(())
}

/// The target's pass over a batch, or over this rank's part of it.
///
/// # Errors
/// - as [`Target::forward`]
pub fn forward(
    target: &Target,
    batch: &Batch,
    part: Option<&RowPart>,
    taps: &Taps,
) -> Result<Features> {
    let sequence = sequence_of(batch);
    Ok(match part {
        None => target.forward(&sequence, taps)?,
        Some(part) => target.forward_part(&sequence, part, taps)?,
    })
}

/// Where the learned tokens stand among those that this rank runs.
///
/// # Errors
/// - it does not run one of them
pub fn learned_of(batch: &Batch, own: Option<&TokenRanges>) -> Result<Vec<u32>> {
    Ok(match own {
        Some(own) => own.places_of(&batch.learned)?,
        None => batch.learned.clone(),
    })
}

fn taps_of(needs: &FeatureNeeds) -> Taps {
    let mut taps = needs.taps.clone();
    if needs.teacher != TeacherKind::None {
        taps.push(Tap::FinalHidden);
    }
    Taps::of(&taps)
}

/// Runs the frozen target on a batch, or on this rank's part of it. All ranks of a spread target
/// do, or [`join_target`].
///
/// # Errors
/// - as [`Target::forward`]
pub fn run_target(
    target: &Target,
    batch: &Batch,
    part: Option<&RowPart>,
    needs: &FeatureNeeds,
) -> Result<BatchFeatures> {
    let features = forward(target, batch, part, &taps_of(needs))?;
    let own = part.map(RowPart::rows);
    let learned_hidden = || -> Result<Tensor> {
        let hidden = features.final_hidden()?;
        Ok(select_rows(hidden, &learned_of(batch, own)?)?)
    };
    let teacher = match needs.teacher {
        TeacherKind::None => TeacherFeatures::None,
        TeacherKind::EveryToken | TeacherKind::EveryTokenTopK(_) => {
            let own = features.final_hidden()?;
            let hidden = match part {
                Some(part) => part.with_rows_after(own, needs.ahead)?,
                None => own.clone(),
            };
            TeacherFeatures::EveryToken { hidden }
        }
        TeacherKind::TopK(k) => {
            // What a rank gathers does not depend on its batch.
            let ends = target.hold_ends()?;
            if batch.learned.is_empty() {
                TeacherFeatures::None
            } else {
                let k = k.min(target.config().vocab_size);
                let entries = ends.top_k(&learned_hidden()?, k)?;
                TeacherFeatures::TopK { entries, k, hidden: None }
            }
        }
        TeacherKind::Full if batch.learned.is_empty() => TeacherFeatures::None,
        TeacherKind::Full => TeacherFeatures::Full { hidden: learned_hidden()? },
    };
    let layers = needs.taps.iter().filter_map(|tap| match tap {
        Tap::Hidden(layer) => features.hidden.get(layer),
        _ => None,
    });
    let layers: Vec<&Tensor> = layers.collect();
    let aux_hidden = (!layers.is_empty()).then(|| Tensor::cat(&layers, 1)).transpose()?;
    let last_kv = features.last_kv.clone();
    let part = part.map(|part| part.seeing_ahead(needs.ahead));
    Ok(BatchFeatures { last_kv, aux_hidden, teacher, part })
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_teacher_is_read_at_fewer_tokens() {
        let hidden = Tensor::arange(0.0_f32, 8.0, &Device::Cpu).and_then(|all| all.reshape((4, 2)));
        let entries = TopK { ids: (0..8).collect(), log_probs: vec![0.5; 8] };
        let of = |teacher| BatchFeatures { last_kv: None, aux_hidden: None, teacher, part: None };
        let read = [2, 3, 7, 9];
        let full = of(TeacherFeatures::Full { hidden: hidden.expect("states") });
        let narrowed = full.with_teacher_at(&[3, 9], &read).expect("read tokens").teacher;
        let TeacherFeatures::Full { hidden } = narrowed else { panic!("{narrowed:?}") };
        assert_eq!(hidden.to_vec2::<f32>().expect("rows"), [[2.0, 3.0], [6.0, 7.0]]);
        let top = of(TeacherFeatures::TopK { entries, k: 2, hidden: None });
        let narrowed = top.with_teacher_at(&[2, 7], &read).expect("read tokens").teacher;
        let TeacherFeatures::TopK { entries, .. } = narrowed else { panic!("{narrowed:?}") };
        assert_eq!(entries.ids, [0, 1, 4, 5]);
        assert!(full.with_teacher_at(&[4], &read).is_err());
    }
}
