//! Appending tokens to cached sequences: decoding.

use std::sync::Arc;

use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::recurrence::Walk;
use longdraft_kernels::threads::awake;

use super::cache::{KvCache, Layout};
use super::features::{Features, Taps};
use super::layer::{Appended, Context};
use super::pass::Visible;
use super::{Keeping, Target, refused};
use crate::config::LayerHeads;
use crate::error::Result;

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

    /// Appends the nodes of a token tree: each sees the cache, its ancestors and itself, and gets
    /// the bits that it would have if its path stood alone. [`KvCache::compact`] then keeps a path.
    ///
    /// # Errors
    /// - as [`Self::forward`], or a parent does not come before its child; the cache keeps its old
    ///   length
    pub fn extend_tree(
        &self,
        ids: &[u32],
        position_ids: &[u32],
        parents: &[Option<usize>],
        cache: &mut KvCache,
        taps: &Taps,
    ) -> Result<Features> {
        let parents = Some(parents);
        self.extend_each(
            &mut [Extension { ids, position_ids, parents, is_text: false, cache }],
            taps,
        )
    }

    /// Appends to several sequences in one pass, which reads every weight once. The rows of the
    /// features stand one sequence after the other, with the bits that each would have alone.
    ///
    /// # Errors
    /// - as [`Self::extend`] and [`Self::extend_tree`]; every cache keeps its old length. Where the device fails
    ///   within a pass, caches with recurrent states take no other pass until they are truncated
    pub fn extend_each(&self, sequences: &mut [Extension<'_>], taps: &Taps) -> Result<Features> {
        self.require_whole_layers("decoding")?;
        let (mut ids, mut position_ids) = (Vec::new(), Vec::new());
        let mut appended = Vec::with_capacity(sequences.len());
        self.check(taps)?;
        for Extension { ids, position_ids, parents, cache, .. } in sequences.iter() {
            self.check_ids(ids)?;
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
            let visible = Visible::new(&self.config.parts, |window| {
                let window = window.unwrap_or(usize::MAX);
                match parents {
                    None => KeyRanges::appended_within(cached, new.len(), window),
                    Some(parents) => KeyRanges::tree_within(cached, parents, window),
                }
            });
            ids.extend_from_slice(new);
            position_ids.extend_from_slice(positions);
            cache.reserve(new.len())?;
            cache.begin(&match parents {
                None => Walk::chain(new.len()),
                Some(parents) => Walk::tree(parents),
            });
            let is_text = *is_text && parents.is_none();
            appended.push(Appended { cache, visible, rows: new.len(), is_text });
        }
        let (mut context, taps) = (Context::Cached(appended), (taps, Keeping::All));
        let features = awake(|| self.run(&ids, &position_ids, &mut context, taps))?;
        drop(context);
        for Extension { ids, cache, parents, is_text, .. } in sequences {
            cache.end_pass(ids.len(), *is_text && parents.is_none());
        }
        Ok(features)
    }

    /// An empty cache for one sequence.
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
                Layout::Keys(kv_heads, head_dim)
            }
        };
        let layouts = (0..config.num_hidden_layers).map(layout);
        let cache = KvCache::of(layouts, self.cache_dtype, &self.device)?;
        Ok(cache.ending_with(config.last_attention_layer()))
    }
}
