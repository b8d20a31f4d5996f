//! Appending tokens to cached sequences: decoding.

use std::sync::Arc;

use candle_core::DType;
use longdraft_kernels::attention::{KeyRanges, Reach};
use longdraft_kernels::recurrence::Walk;
use longdraft_kernels::threads::awake;

use super::Target;
use super::cache::{KvCache, Layout};
use super::features::{Features, Taps};
use super::layer::{Appended, Context};
use super::pass::Visible;
use super::repeats::Rows;
use super::run::Keeping;
use crate::config::LayerHeads;
use crate::error::{Result, refused};
use crate::ids::check_ids;

/// Tokens to append to one sequence.
pub struct Extension<'a> {
    /// Token ids, `[T]`.
    pub ids: &'a [u32],
    /// Rotary positions, `[T]`.
    pub position_ids: &'a [u32],
    /// Of a token tree, the parent of every node (none: the cache's last token); without it the
    /// tokens follow one another.
    pub parents: Option<&'a [Option<usize>]>,
    /// Whether the tokens are text that stays: no more than the last of them is taken back. States of recurrent
    /// layers are then put aside at the pass's end.
    pub is_text: bool,
    /// Of the sequence.
    pub cache: &'a mut KvCache,
}

/// Whether parents come before their children.
fn ordered(parents: &[Option<usize>]) -> bool {
    parents.iter().enumerate().all(|(i, parent)| parent.is_none_or(|parent| parent < i))
}

impl Target {
    /// Appends tokens to a cached context and returns what `taps` ask for. A row's bits do not
    /// depend on the rows beside it.
    ///
    /// # Errors
    /// - as [`Self::forward`]; the cache keeps its old length
    pub fn extend(
        &self,
        ids: &[u32],
        position_ids: &[u32],
        cache: &mut KvCache,
        taps: &Taps,
    ) -> Result<Features> {
        self.extend_each(
            &mut [Extension { ids, position_ids, parents: None, is_text: false, cache }],
            taps,
        )
    }

    /// Appends to several sequences in one pass, which reads every weight once. The rows of the
    /// features stand one sequence after the other, with the bits that each would have alone. A node of a token
    /// tree sees the cache, its ancestors and itself, and gets the bits that it would have if its path stood
    /// alone; [`KvCache::compact`] then keeps a path.
    ///
    /// # Errors
    /// - as [`Self::extend`], or a node's parent does not come before it; every cache keeps its old length. Where
    ///   the device fails within a pass, caches with recurrent states take no other pass until they are truncated
    pub fn extend_each(&self, sequences: &mut [Extension<'_>], taps: &Taps) -> Result<Features> {
        self.require_whole_layers("decoding")?;
        let (mut ids, mut position_ids) = (Vec::new(), Vec::new());
        let mut appended = Vec::with_capacity(sequences.len());
        let mut long = Vec::new();
        self.check(taps)?;
        for Extension { ids, position_ids, parents, cache, .. } in sequences.iter() {
            check_ids(ids, self.config.vocab_size)?;
            cache.check_open()?;
            if parents.is_some_and(|parents| !ordered(parents)) {
                return Err(refused("a tree's parents must come before their children"));
            }
            if ids.len() != position_ids.len() {
                return Err(refused("every appended token needs a position"));
            }
        }
        for Extension { ids: new, position_ids: positions, parents, is_text, cache } in
            sequences.iter_mut()
        {
            let (cached, parents) = (cache.len(), *parents);
            cache.reserve(new.len())?;
            let visible = Visible::new(&self.config.parts, |reach| match parents {
                None => KeyRanges::appended_in(cached, new.len(), reach),
                Some(parents) => KeyRanges::tree_in(cached, parents, reach),
            });
            let visible = visible.without_first(cache.first_held())?;
            if let Some(border) = self.ropes.border() {
                let last = positions.iter().max().map_or(0, |last| *last as usize);
                long.resize(long.len() + new.len(), cache.decide_length(last >= border));
            }
            ids.extend_from_slice(new);
            position_ids.extend_from_slice(positions);
            cache.begin(&match parents {
                None => Walk::chain(new.len()),
                Some(parents) => Walk::tree(parents),
            });
            let is_text = *is_text && parents.is_none();
            let rows = new.len();
            appended.push(Appended { cache, visible, rows, is_text, place: None });
        }
        let mut context = Context::Cached(appended);
        let tokens = (&ids[..], &position_ids[..]);
        let rows = Rows { ids: &ids, position_ids: &position_ids };
        let features = self.run_again(&rows, &mut context, taps, |context| {
            awake(|| self.run(tokens, &long, context, (taps, Keeping::All)))
        })?;
        drop(context);
        for Extension { ids, cache, parents, is_text, .. } in sequences {
            cache.end_pass(ids.len(), *is_text && parents.is_none());
        }
        Ok(features)
    }

    /// An empty cache for one sequence; where frequencies depend on the sequence's length, its first tokens
    /// decide unless [`Self::prepare_cache`] does. Layers with a window hold what it leaves; drafts that read the
    /// last layer's keys ask for all of them ([`KvCache::keep_last_layer`]).
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn new_cache(&self) -> Result<KvCache> {
        let config = &self.config;
        let layout = |index: usize| match (self.rules.get(index), config.parts.latent) {
            (Some(Some(rule)), _) => Layout::State(Arc::clone(rule)),
            (_, Some(latent)) => Layout::Rows(latent.cached()),
            _ if config.keys_owner(index).is_some() => Layout::Shared,
            _ => {
                let LayerHeads { kv_heads, head_dim } = config.heads_of(index);
                match config.window_of(index) {
                    Some(_) => Layout::Windowed(kv_heads, head_dim),
                    None => Layout::Keys(kv_heads, head_dim),
                }
            }
        };
        let layouts = (0..config.num_hidden_layers).map(layout);
        let reach = config.parts.reach().unwrap_or(Reach::All);
        let cache = KvCache::of(layouts, reach, self.cache_dtype, &self.device)?;
        Ok(cache.ending_with(config.last_attention_layer()))
    }

    /// Bytes that a cache holds of a sequence of `tokens` that is read in passes of up to `rows`, states among them.
    /// The room of layers without a window grows by doubling, up to twice of what is counted here.
    pub fn cache_bytes(&self, tokens: usize, rows: usize) -> u64 {
        let values = self.config.cache_values(tokens, rows) as u64;
        let keys = match self.cache_dtype {
            // A scale of 2 bytes for 32 values of one.
            DType::U8 => values + values / 16,
            dtype => values * dtype.size_in_bytes() as u64,
        };
        keys + (self.config.cached_state_values() * size_of::<f32>()) as u64
    }

    /// Tells a cache how many tokens its sequence will have at most: where that decides on rotary frequencies
    /// and tokens were cached for others, these are forgotten.
    pub fn prepare_cache(&self, cache: &mut KvCache, limit: usize) {
        if let Some(border) = self.ropes.border() {
            cache.set_length(limit > border);
        }
    }
}
