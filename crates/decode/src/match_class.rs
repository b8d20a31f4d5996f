//! What speaks for a proposal that was found in a text.

/// Where a match was found and how much speaks for it: matches of one class are measured together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatchClass(usize);

/// Lengths of matches in the text that are told apart.
const TEXT_LENGTHS: usize = MatchClass::LONGEST_IN_TEXT - MatchClass::SHORTEST + 1;
/// Lengths of matches in a datastore that are told apart; longer ones count as the last.
const STORE_LENGTHS: usize = 5;
/// Few of several places agree, there is one place, most places agree.
const STORE_SHARES: usize = 3;
/// Share of the places from which most agree.
const MOST: f64 = 0.6;

impl MatchClass {
    /// Fewest tokens that have to agree.
    pub const SHORTEST: usize = 2;
    /// Most that are looked for in the text.
    pub const LONGEST_IN_TEXT: usize = 4;
    /// Number of classes.
    pub const COUNT: usize = TEXT_LENGTHS + STORE_LENGTHS * STORE_SHARES;
    /// All of them, by index.
    pub const ALL: [Self; Self::COUNT] = {
        let mut all = [Self(0); Self::COUNT];
        let mut index = 0;
        while index < Self::COUNT {
            all[index] = Self(index);
            index += 1;
        }
        all
    };

    /// In the text itself, after so many tokens that agree.
    pub fn of_text(length: usize) -> Self {
        Self(length.clamp(Self::SHORTEST, Self::LONGEST_IN_TEXT) - Self::SHORTEST)
    }

    /// In a datastore: a share of `places` goes on with the token that is proposed.
    pub fn of_datastore(length: usize, places: usize, share: f64) -> Self {
        let length = (length.max(Self::SHORTEST) - Self::SHORTEST).min(STORE_LENGTHS - 1);
        let agreement = match places {
            0 | 1 => 1,
            _ if share < MOST => 0,
            _ => 2,
        };
        Self(TEXT_LENGTHS + STORE_SHARES * length + agreement)
    }

    /// From 0 to [`Self::COUNT`].
    pub fn index(self) -> usize {
        self.0
    }

    /// Whether so many tokens agree, and in a datastore most of several places go on alike.
    pub(crate) fn agrees_in(self, length: usize) -> bool {
        match self.0.checked_sub(TEXT_LENGTHS) {
            None => Self::SHORTEST + self.0 >= length,
            Some(store) => {
                let is_most = store % STORE_SHARES == STORE_SHARES - 1;
                is_most && Self::SHORTEST + store / STORE_SHARES >= length
            }
        }
    }

    /// What is assumed of the first token before anything is measured.
    pub fn prior(self) -> f64 {
        match self.0.checked_sub(TEXT_LENGTHS).map(|store| store % STORE_SHARES) {
            Some(0) => 0.2,
            Some(1) => 0.35,
            None | Some(_) => 0.5,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_a_place_of_its_own() {
        let mut seen: Vec<usize> = (2..=4).map(|n| MatchClass::of_text(n).index()).collect();
        for length in 2..7 {
            for (places, share) in [(9, 0.3), (1, 1.0), (9, 0.9)] {
                seen.push(MatchClass::of_datastore(length, places, share).index());
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..MatchClass::COUNT).collect::<Vec<_>>());
        assert_eq!(MatchClass::of_text(9), MatchClass::of_text(4));
        assert_eq!(MatchClass::of_datastore(30, 1, 1.0), MatchClass::of_datastore(6, 1, 1.0));
        assert!(MatchClass::of_datastore(2, 9, 0.1).prior() < MatchClass::of_text(2).prior());
    }

    #[test]
    fn a_match_agrees_in_as_many_tokens_as_it_was_made_of() {
        for length in 2..5 {
            let of_text = MatchClass::of_text(length);
            let of_store = |places, share| MatchClass::of_datastore(length, places, share);
            for least in 2..6 {
                assert_eq!(of_text.agrees_in(least), length >= least, "{length} {least}");
                assert_eq!(of_store(9, 0.9).agrees_in(least), length >= least, "{length} {least}");
                let is_unsure = [of_store(9, 0.3), of_store(1, 1.0)];
                assert!(!is_unsure.iter().any(|class| class.agrees_in(least)));
            }
        }
    }
}
