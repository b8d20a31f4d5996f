//! Passes of few rows that start the same kernels again and again: they are recorded, then started as a whole.
//!
//! A pass of one kind after a cache is run as it is the first time. The next two are recorded, at different lengths of the cache; what
//! changes between them lies in words on the device. Where both started the same, the starts are made once more. If they
//! give the pass's bits, later passes of this kind are made of them, which spares the host all but three calls.
//! [`longdraft_kernels::repeat`] says what is checked. If anything differs, the target goes on as before.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Tensor, TensorId};
use longdraft_kernels::attention::words_of_ranges;
use longdraft_kernels::repeat::{Inputs, Recording, Repeat, may_repeat, record, words};

use super::layer::{Appended, Context};
use super::{Features, Taps, Target};
use crate::error::Result;

/// Kinds of passes of which a cache keeps something.
const KINDS: usize = 4;

/// Whether a target's passes repeat, and how many did.
#[derive(Debug, Default)]
pub(super) struct Repeating {
    refused: OnceLock<String>,
    /// Why some kinds of passes are not recorded.
    never: OnceLock<String>,
    /// Pairs of recordings that were not alike.
    unlike: AtomicUsize,
    passes: AtomicUsize,
}

/// Pairs that may differ before a target's passes go on as they were: another thread may have come between one of them.
const UNLIKE: usize = 2;

/// What starts depend on beside the words: sizes, and the memory that is read and written.
#[derive(Debug, PartialEq)]
struct Kind {
    memory: Vec<TensorId>,
    words: Vec<usize>,
    taps: Taps,
}

/// What passes of a cache repeat; the last kind that was used is the first.
#[derive(Debug, Default)]
pub(super) struct Repeats(Vec<(Kind, State)>);

#[derive(Debug)]
enum State {
    /// One pass was run.
    Seen,
    /// Another one was recorded, after so many tokens.
    Recorded(Inputs, Recording, usize),
    /// It takes too much memory.
    Never,
    /// The features are written anew by every run.
    Ready(Inputs, Repeat, Features),
}

/// Tokens of a pass and what their positions need to know.
pub(super) struct Rows<'a> {
    pub(super) ids: &'a [u32],
    pub(super) position_ids: &'a [u32],
}

impl Rows<'_> {
    /// What a pass reads, in the order in which it asks for it.
    fn words(&self, own: &Appended<'_>) -> [Vec<u32>; 4] {
        let place = vec![own.cache.len() as u32];
        let ranges = words_of_ranges(own.visible.whole());
        [place, self.position_ids.to_vec(), self.ids.to_vec(), ranges]
    }
}

impl Target {
    /// Passes that were made of recorded starts.
    pub fn repeated_passes(&self) -> usize {
        self.repeating.passes.load(Ordering::Relaxed)
    }

    /// Why passes are not made of recorded starts, if they were recorded in vain.
    pub fn not_repeated_because(&self) -> Option<&str> {
        self.repeating.refused.get().or_else(|| self.repeating.never.get()).map(String::as_str)
    }

    /// Whether a pass may repeat: few rows of one sequence whose layers hold every token's keys in bf16.
    fn may_repeat(&self, own: &Appended<'_>) -> bool {
        self.repeating.refused.get().is_none()
            && may_repeat(own.rows, &self.device)
            && self.ropes.border().is_none()
            && self.config.parts.reach().is_none()
            && own.cache.whole_keys().is_some()
    }

    fn kind_of(&self, own: &Appended<'_>, words: &[Vec<u32>], taps: &Taps) -> Kind {
        let keys = own.cache.whole_keys().into_iter().flatten();
        let memory = [&self.final_norm].into_iter().chain(keys).map(Tensor::id).collect();
        Kind { memory, words: words.iter().map(Vec::len).collect(), taps: taps.clone() }
    }

    /// `run` of one sequence, or what it would give.
    pub(super) fn run_again(
        &self,
        rows: &Rows<'_>,
        context: &mut Context<'_>,
        taps: &Taps,
        run: impl Fn(&mut Context<'_>) -> Result<Features>,
    ) -> Result<Features> {
        let Context::Cached(sequences) = &mut *context else { return run(context) };
        let [own] = &mut sequences[..] else { return run(context) };
        if !self.may_repeat(own) {
            return run(context);
        }
        let parts = rows.words(own);
        let kind = self.kind_of(own, &parts, taps);
        let parts = parts.each_ref().map(Vec::as_slice);
        let length = own.cache.len();
        // A pass that fails leaves nothing.
        let mut all = std::mem::take(own.cache.repeats()).0;
        let known = all.iter().position(|(other, _)| *other == kind);
        let state = known.map(|place| all.remove(place).1);
        all.truncate(KINDS - 1);
        let (features, state) = match state {
            None => (run(context)?, State::Seen),
            Some(State::Never) => (run(context)?, State::Never),
            Some(State::Ready(inputs, mut repeat, features)) => {
                inputs.set(&parts)?;
                repeat.run()?;
                self.repeating.passes.fetch_add(1, Ordering::Relaxed);
                (features.copied()?, State::Ready(inputs, repeat, features))
            }
            Some(State::Recorded(inputs, recording, at)) if at == length => {
                (run(context)?, State::Recorded(inputs, recording, at))
            }
            Some(State::Recorded(inputs, recording, _)) => {
                let words = (inputs, &parts[..]);
                self.compared(words, &recording, context, &run)?
            }
            Some(State::Seen) => {
                let inputs = Inputs::new(&parts, &self.device)?;
                let (features, recording) = self.recorded((&inputs, &parts), context, &run)?;
                let state = self.given_up(&recording);
                (features, state.unwrap_or(State::Recorded(inputs, recording, length)))
            }
        };
        all.insert(0, (kind, state));
        if let Context::Cached(sequences) = context
            && let [own] = &mut sequences[..]
            && self.repeating.refused.get().is_none()
        {
            own.cache.repeats().0 = all;
        }
        Ok(features)
    }

    /// A pass whose cache's place lies on the device.
    fn recorded(
        &self,
        words_of: (&Inputs, &[&[u32]]),
        context: &mut Context<'_>,
        run: impl Fn(&mut Context<'_>) -> Result<Features>,
    ) -> Result<(Features, Recording)> {
        let place = words_of.1.first().copied().unwrap_or_default();
        let pass = || {
            let place = Arc::new(words(place, &self.device)?);
            set_place(context, Some(&place));
            let features = run(context);
            set_place(context, None);
            features
        };
        record(words_of, Features::tensors, pass)
    }

    /// What becomes of a kind whose recording took too much memory.
    fn given_up(&self, recording: &Recording) -> Option<State> {
        if let Some(reason) = recording.is_too_large() {
            self.repeating.never.get_or_init(|| reason.to_owned());
            return Some(State::Never);
        }
        recording.is_without_room().then_some(State::Seen)
    }

    /// Records another pass. If it is like the one before, and its starts give its bits once more, they are made for
    /// passes to come.
    fn compared(
        &self,
        (inputs, parts): (Inputs, &[&[u32]]),
        before: &Recording,
        context: &mut Context<'_>,
        run: impl Fn(&mut Context<'_>) -> Result<Features>,
    ) -> Result<(Features, State)> {
        let (features, recording) = self.recorded((&inputs, parts), context, &run)?;
        if let Some(state) = self.given_up(&recording) {
            return Ok((features, state));
        }
        let refused = |reason: String| self.repeating.refused.get_or_init(|| reason);
        if let Err(reason) = recording.is_like(before) {
            if self.repeating.unlike.fetch_add(1, Ordering::Relaxed) + 1 >= UNLIKE {
                refused(reason);
            }
            return Ok((features, State::Seen));
        }
        let plain = features.copied()?;
        let again = recording.repeat(&self.device).and_then(|mut repeat| {
            repeat.run()?;
            Ok(repeat)
        });
        match again {
            Ok(repeat) if features.has_bits_of(&plain)? => {
                return Ok((plain, State::Ready(inputs, repeat, features)));
            }
            Ok(_) => refused("its starts gave other bits than the pass".to_owned()),
            Err(error) => refused(error.to_string()),
        };
        // What was written to the cache may be wrong as well.
        Ok((run(context)?, State::Seen))
    }
}

fn set_place(context: &mut Context<'_>, place: Option<&Arc<Tensor>>) {
    if let Context::Cached(sequences) = context {
        sequences.iter_mut().for_each(|own| own.place = place.cloned());
    }
}

impl Features {
    /// All that was tapped.
    fn tensors(&self) -> Vec<Tensor> {
        let kv = self.last_kv.iter().flat_map(|kv| [&kv.k, &kv.v]);
        let rest = self.last_keys_unrotated.iter().chain(self.hidden.values());
        kv.chain(rest).chain(&self.final_hidden).cloned().collect()
    }

    /// In memory of its own.
    fn copied(&self) -> Result<Self> {
        self.each(Tensor::force_contiguous)
    }

    fn has_bits_of(&self, other: &Self) -> Result<bool> {
        let bits = |features: &Self| -> Result<Vec<Vec<u32>>> {
            let of = |tensor: &Tensor| -> Result<Vec<u32>> {
                let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                Ok(values.into_iter().map(f32::to_bits).collect())
            };
            features.tensors().iter().map(of).collect()
        };
        Ok(bits(self)? == bits(other)?)
    }
}
