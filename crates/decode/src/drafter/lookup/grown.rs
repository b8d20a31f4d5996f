//! Texts in which lookup looks and to which others are added while it does.

use std::sync::{Arc, PoisonError, RwLock};

use longdraft_models::TargetTokenId;

use super::{Datastore, Match, MatchClass};

/// Parts that what was kept is added in.
const PORTIONS: usize = 8;

/// A datastore that grows: several that are ordered each by itself. A text is one of its own at first; two
/// neighbours of about one size become one, so that there are few, and a text is ordered anew only as often
/// as the logarithm of their number. None becomes larger than half of what may be kept: the oldest one goes as
/// a whole.
#[derive(Debug)]
pub struct GrownDatastore {
    /// Oldest first; each has more than twice the tokens of the next, or both would be too large together.
    parts: RwLock<Vec<Arc<Datastore>>>,
    /// Tokens from which the oldest part goes.
    most: usize,
}

impl GrownDatastore {
    /// Nothing yet, and never more than `most` tokens.
    pub fn new(most: usize) -> Self {
        Self { parts: RwLock::new(Vec::new()), most }
    }

    /// Adds texts. Whoever looks meanwhile finds what was there before. One thread adds at a time.
    pub fn add<'a>(&self, texts: impl IntoIterator<Item = &'a [u32]>) {
        let mut parts = self.parts();
        let mut newest = Datastore::new(texts);
        if newest.is_empty() || newest.len() > self.most {
            return;
        }
        let joins = |before: &Datastore, newest: &Datastore| {
            before.len() <= 2 * newest.len() && before.len() + newest.len() <= self.most / 2
        };
        while let Some(before) = parts.pop_if(|before| joins(before, &newest)) {
            newest = Datastore::new(before.texts().chain(newest.texts()));
        }
        parts.push(Arc::new(newest));
        let mut tokens: usize = parts.iter().map(|part| part.len()).sum();
        while tokens > self.most {
            tokens -= parts.remove(0).len();
        }
        *self.parts.write().unwrap_or_else(PoisonError::into_inner) = parts;
    }

    /// Adds texts that were kept before, the newest one given first, until it is full. A text that does not fit
    /// any more is passed over.
    pub fn refill(&self, newest_first: impl IntoIterator<Item = Vec<u32>>) {
        let mut left = self.most;
        let mut kept: Vec<Vec<u32>> = Vec::new();
        for text in newest_first {
            if let Some(rest) = left.checked_sub(text.len()) {
                left = rest;
                kept.push(text);
            } else if left < self.most / PORTIONS {
                break;
            }
        }
        // Portions are ordered and let go of by themselves.
        let (mut portion, mut tokens): (Vec<&[u32]>, usize) = (Vec::new(), 0);
        for text in kept.iter().rev() {
            if tokens + text.len() > self.most / PORTIONS && tokens > 0 {
                self.add(portion.drain(..));
                tokens = 0;
            }
            portion.push(text);
            tokens += text.len();
        }
        self.add(portion);
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.parts().iter().map(|part| part.len()).sum()
    }

    /// Whether there is nothing to look in.
    pub fn is_empty(&self) -> bool {
        self.parts().is_empty()
    }

    fn parts(&self) -> Vec<Arc<Datastore>> {
        self.parts.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What each part finds, as [`Datastore::find`]; the newest one's first.
    pub(super) fn find(
        &self,
        tokens: &[TargetTokenId],
        count: impl Fn(MatchClass) -> usize,
    ) -> Vec<Match> {
        let parts = self.parts();
        parts.iter().rev().filter_map(|part| part.find(tokens, &count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(store: &GrownDatastore, text: &[u32]) -> Option<u32> {
        let text: Vec<TargetTokenId> = text.iter().map(|id| TargetTokenId(*id)).collect();
        let found = store.find(&text, |_| 1);
        found.first().map(|found| found.continuation[0].0)
    }

    #[test]
    fn what_is_added_is_found_at_once_and_parts_stay_few() {
        let store = GrownDatastore::new(usize::MAX);
        assert!(store.is_empty() && next(&store, &[1, 2]).is_none());
        for text in 0..200_u32 {
            store.add([&[text, text + 1000, text + 2000][..]]);
            assert_eq!(next(&store, &[text, text + 1000]), Some(text + 2000));
            assert_eq!(next(&store, &[text / 2, text / 2 + 1000]), Some(text / 2 + 2000));
            assert_eq!(store.len(), 3 * (text as usize + 1));
            assert!(store.parts().len() <= 8, "{}", store.parts().len());
        }
        // Texts do not run into one another, whatever was put together.
        assert_eq!(next(&store, &[1000, 2000]), None);
        store.add([&[][..]]);
        assert_eq!(store.len(), 600);
    }

    #[test]
    fn the_oldest_texts_go_when_there_is_too_much() {
        let store = GrownDatastore::new(100);
        for text in 0..300_u32 {
            store.add([&[text, text + 1000, text + 2000][..]]);
            assert!(store.len() <= 100, "{}", store.len());
            assert_eq!(next(&store, &[text, text + 1000]), Some(text + 2000));
        }
        assert_eq!(next(&store, &[0, 1000]), None);
        // Half of what may be kept is there at any time.
        assert!(store.len() >= 48 && store.parts().len() <= 8, "{}", store.len());
        // One that is too large by itself is not kept, and takes nothing away.
        let (long, before): (Vec<u32>, usize) = ((0..200).collect(), store.len());
        store.add([&long[..]]);
        assert_eq!(store.len(), before);
    }

    #[test]
    fn what_was_kept_is_there_again_up_to_the_limit_the_newest_first() {
        let text = |text: u32| vec![text, text + 1000, text + 2000];
        for (texts, found) in [(20_u32, 20), (33, 33), (34, 33), (500, 33)] {
            let store = GrownDatastore::new(100);
            store.refill((0..texts).rev().map(text));
            assert_eq!(store.len(), 3 * found, "{texts}");
            let is_there = |id: u32| next(&store, &[id, id + 1000]) == Some(id + 2000);
            let all = (0..texts).filter(|id| is_there(*id)).count();
            assert_eq!(all, found, "{texts}");
            assert!(is_there(texts - 1), "{texts}");
        }
        // One that is too long is passed over, wherever it stands.
        let store = GrownDatastore::new(100);
        store.refill([text(1), (0..200).collect(), text(2)]);
        assert_eq!(store.len(), 6);
        store.refill([]);
        assert_eq!(store.len(), 6);
    }
}
