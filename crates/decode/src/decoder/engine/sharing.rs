//! What another place holds of a prompt: its rows are copied instead of computed again.
//!
//! A row's bits depend on its token and on those before it alone, so a copy has the bits of a pass. A prompt is shared
//! as far as it agrees with the text of another place, of a request that runs or of the last one, and as far as that
//! place's caches can be cut. Of requests that begin alike and come together, one reads what they share, and the others
//! wait for it.

use std::cmp::Reverse;

use longdraft_models::TargetTokenId;
use longdraft_models::target_model::KvCache;

use super::{BatchEngine, Place, READ_BESIDE};
use crate::decoder::request::Request;
use crate::decoder::sequence::common;
use crate::error::Result;

impl Place<'_> {
    /// The text here and the cache of its first tokens.
    fn text(&self) -> Option<(&[TargetTokenId], &KvCache)> {
        match &self.running {
            Some(running) => Some((&running.request.tokens, &running.request.cache)),
            None => self.sequence.kept(),
        }
    }

    /// The cache of another place, if a request here can go on from what that place holds.
    fn shares<'o>(&self, request: &Request, other: &'o Place<'_>) -> Option<&'o KvCache> {
        let (_, cache) = other.text()?;
        let goes_on = self.sequence.state().goes_on_from(&other.sequence.state());
        (goes_on && request.cache.is_like(cache)).then_some(cache)
    }

    /// Tokens at the start of a request's prompt here that another place holds.
    fn held_at(&self, request: &Request, other: &Place<'_>) -> usize {
        let Some(cache) = self.shares(request, other) else { return 0 };
        let Some((tokens, _)) = other.text() else { return 0 };
        let common = common(&request.tokens, &tokens[..cache.len().min(tokens.len())]);
        // Features of the last common token are needed anew.
        cache.reusable(common.saturating_sub(1).min(other.sequence.state().tokens()))
    }
}

impl BatchEngine<'_> {
    /// The free place for a prompt: that whose text it goes on with, else an empty one, else the one that was used
    /// longest ago.
    ///
    /// A prompt goes on with a text that is for the larger part its start. While a place is empty no more than a few
    /// tokens of that text may be lost: another conversation begins alike, and what they share can be copied.
    pub(super) fn place_for(&self, prompt: &[TargetTokenId], reuse: bool) -> Option<usize> {
        let free = self.places.iter().enumerate().filter(|(_, place)| place.running.is_none());
        let empty: Vec<_> = free.clone().filter(|(_, place)| place.sequence.is_empty()).collect();
        let goes_on = |place: &Place<'_>| {
            let (common, kept) = place.sequence.kept_of(prompt);
            let is_start = 2 * (common + 1) > kept;
            let state = place.sequence.state();
            let moves =
                |(_, empty): &(usize, &Place<'_>)| empty.sequence.state().goes_on_from(&state);
            let stays = kept <= common + READ_BESIDE || !empty.iter().any(moves);
            if reuse && is_start && stays { common } else { 0 }
        };
        let order = |(_, place): &(usize, &Place<'_>)| {
            (goes_on(place), place.sequence.is_empty(), Reverse(place.last))
        };
        free.max_by_key(order).map(|(at, _)| at)
    }

    /// Copies what another place holds of the prompt of a request that is to read it at place `to`, if that is more
    /// than it has there. It fails where the device has no memory for the copies.
    pub(super) fn share(&mut self, to: usize, request: &mut Request) -> Result<()> {
        let Some((from, count)) = self.donor(to, request) else { return Ok(()) };
        let Ok([to, from]) = self.places.get_disjoint_mut([to, from]) else { return Ok(()) };
        let Some((_, cache)) = from.text() else { return Ok(()) };
        to.sequence.share(request, (cache, from.sequence.state()), count)
    }

    /// The place that holds most of a prompt, and how many tokens, if that is more than the request has at place `to`.
    fn donor(&self, to: usize, request: &Request) -> Option<(usize, usize)> {
        if !request.options.reuse_prefix {
            return None;
        }
        let others = self.places.iter().enumerate().filter(|(from, _)| *from != to);
        let held = others.map(|(from, other)| (from, self.places[to].held_at(request, other)));
        let more = held.filter(|(_, count)| *count > request.cache.len());
        more.max_by_key(|(_, count)| *count)
    }

    /// How many tokens of its prompt each place reads in a round, `most` in all, in equal parts: a long prompt keeps
    /// no short one waiting. One that begins shares what others have read until now, or waits for one that came earlier.
    pub(super) fn reads(&mut self, most: usize) -> Vec<usize> {
        let mut wanted = vec![0; self.places.len()];
        let order = self.reading();
        for (nth, &at) in order.iter().enumerate() {
            if let Some((reader, unread)) = self.awaited(at, &order[..nth]) {
                // The pass ends where the texts part: caches of every kind can be cut there.
                wanted[reader] = unread.min(wanted[reader]);
                continue;
            }
            // One for which nothing is left copies all the same: whoever reads on may drop what they share.
            let Some(mut running) = self.places[at].running.take() else { continue };
            let shared = if running.request.begins() {
                self.share(at, &mut running.request)
            } else {
                Ok(())
            };
            match shared {
                Ok(()) => wanted[at] = running.request.unread(),
                // There is no memory for its copies: the others go on.
                Err(error) => running.error = Some(error),
            }
            self.places[at].running = Some(running);
        }
        parts(&wanted, most)
    }

    /// Places whose requests read their prompts, in the order in which these came.
    fn reading(&self) -> Vec<usize> {
        let unread = |place: &Place<'_>| {
            place.running.as_ref().map_or(0, |running| running.request.unread())
        };
        let places = self.places.iter().enumerate().filter(|(_, place)| unread(place) > 0);
        let mut order: Vec<(u64, usize)> = places.map(|(at, place)| (place.last, at)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, at)| at).collect()
    }

    /// Whom a request that begins at place `to` waits for: that of the places `earlier` which is to read most of what
    /// their prompts share, and how many tokens of it. Less than a round reads beside others is not worth a round.
    fn awaited(&self, to: usize, earlier: &[usize]) -> Option<(usize, usize)> {
        let place = &self.places[to];
        let request = &place.running.as_ref()?.request;
        if !request.begins() || !request.options.reuse_prefix || earlier.is_empty() {
            return None;
        }
        let held = self.donor(to, request).map_or(request.cache.len(), |(_, count)| count);
        let shared = earlier.iter().filter_map(|&at| {
            let other = &self.places[at];
            let cache = place.shares(request, other)?;
            let common = common(&request.tokens, other.text()?.0);
            let is_worth = common > cache.len() && common > held + READ_BESIDE;
            is_worth.then(|| (common, at, common - cache.len()))
        });
        shared.max().map(|(_, at, unread)| (at, unread))
    }
}

/// Equal parts of `most` for those that want so many each. What one does not need goes to the others.
fn parts(wanted: &[usize], most: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..wanted.len()).filter(|&at| wanted[at] > 0).collect();
    order.sort_by_key(|&at| wanted[at]);
    let (mut parts, mut left) = (vec![0; wanted.len()], most);
    for (nth, &at) in order.iter().enumerate() {
        parts[at] = wanted[at].min(left.div_ceil(order.len() - nth));
        left -= parts[at];
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn short_wants_are_met_and_the_rest_is_shared_out_equally() {
        for (wanted, most, expected) in [
            (vec![], 64, vec![]),
            (vec![0, 700], 64, vec![0, 64]),
            (vec![100_000, 5, 0], 64, vec![59, 5, 0]),
            (vec![100_000, 50, 600], 64, vec![21, 22, 21]),
            (vec![20, 100, 1000, 300], 512, vec![20, 100, 196, 196]),
            (vec![10, 20], 512, vec![10, 20]),
            (vec![9, 9, 9], 2, vec![1, 1, 0]),
        ] {
            assert_eq!(parts(&wanted, most), expected, "{wanted:?} {most}");
        }
    }
}
