//! Which of the kept answers a training learns from, and on which it is judged.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::store::Row;

/// Newest tokens that are learned from at a time.
const MOST_TOKENS: usize = 1 << 18;
/// Tokens that drafts are compared on.
const HELD_OUT_TOKENS: usize = 1 << 18;
/// Answers that drafts are compared on, at least and at most, each to another prompt.
pub(super) const LEAST_HELD_OUT: usize = 8;
const MOST_HELD_OUT: usize = 256;
/// Of the newest of these, so many at least decide.
const LEAST_JUDGED: usize = 32;
/// Newest answers on which the learned draft is compared with the given one, at least and at most.
pub(super) const LEAST_CHECKED: usize = 32;
const MOST_CHECKED: usize = 64;
/// Answers to one prompt that are learned from at a time.
const MOST_OF_A_PROMPT: usize = 4;
/// One prompt in so many is set aside.
const PART: u64 = 6;

/// Tokens and which of them are learned, as a training reads them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Text {
    pub(super) input_ids: Vec<u32>,
    pub(super) loss_mask: Vec<u8>,
    /// When the answer was written, in seconds since 1970.
    pub(super) at: u64,
}

/// What a training is made of.
#[derive(Debug, Default)]
pub(super) struct Choice {
    /// To learn from.
    pub(super) train: Vec<Text>,
    /// To compare drafts on: a text for each of several prompts that are never learned.
    pub(super) held_out: Vec<Text>,
}

/// Texts that are taken, and how many tokens more may be.
struct Taken {
    texts: Vec<(f64, Vec<Text>)>,
    left: usize,
}

impl Taken {
    fn up_to(left: usize) -> Self {
        Self { texts: Vec::new(), left }
    }

    /// Whether there was room.
    fn take(&mut self, share: f64, texts: Vec<Text>) -> bool {
        let tokens = texts.iter().map(|text| text.input_ids.len()).sum();
        let rest = self.left.checked_sub(tokens);
        if let Some(rest) = rest {
            self.left = rest;
            self.texts.push((share, texts));
        }
        rest.is_some()
    }
}

/// Chooses among rows, the newest one first, for training rows of so many tokens. Both kinds have a budget of
/// their own: a row that does not fit any more is passed over.
pub(super) fn choose(newest: impl Iterator<Item = Row>, row_tokens: usize) -> Choice {
    let (mut train, mut held_out) = (Taken::up_to(MOST_TOKENS), Taken::up_to(HELD_OUT_TOKENS));
    let mut taken_of: HashMap<String, usize> = HashMap::new();
    for row in newest {
        let key = hash_of_prompt(&row);
        let is_aside = is_held_out(&key);
        let mut texts = pieces(&row, row_tokens);
        let (kind, most) = if is_aside {
            // Pieces of one answer would count as several.
            texts.truncate(1);
            (&mut held_out, 1)
        } else {
            (&mut train, MOST_OF_A_PROMPT)
        };
        let is_full = is_aside && kind.texts.len() == MOST_HELD_OUT;
        let of_prompt = taken_of.entry(key).or_default();
        if *of_prompt < most && !texts.is_empty() && !is_full && kind.take(row.own_share(), texts) {
            *of_prompt += 1;
        }
    }
    let held_out = held_out.texts.into_iter().flat_map(|(_, texts)| texts).collect();
    Choice { train: weighted(train.texts), held_out }
}

/// Of texts to learn from, the newest ones of so many tokens.
pub(super) fn learned(newest: &[Text], tokens: usize) -> &[Text] {
    let mut left = tokens;
    let fits = |text: &&Text| {
        let has_room = left > 0;
        left = left.saturating_sub(text.input_ids.len());
        has_room
    };
    &newest[..newest.iter().take_while(fits).count()]
}

/// How many texts there are. One that stands twice is one.
pub(super) fn different(texts: &[Text]) -> usize {
    texts.iter().collect::<HashSet<&Text>>().len()
}

/// How many of the newest answers that are set aside are as new as those that are learned, and enough of them for an
/// interval. Older ones are of what was asked before: a draft that learned what is asked now would be judged on them.
pub(super) fn judged(held_out: &[Text], learned: &[Text]) -> usize {
    let oldest = learned.iter().map(|text| text.at).min().unwrap_or_default();
    held_out.iter().take_while(|text| text.at >= oldest).count().max(LEAST_JUDGED)
}

/// The newest answers that were kept after a moment, one to each prompt: a draft that learned from those before has
/// not seen them.
pub(super) fn unseen(
    newest: impl Iterator<Item = Row>,
    since: u64,
    row_tokens: usize,
) -> Vec<Text> {
    let mut prompts = HashSet::new();
    newest
        .take_while(|row| row.at > since)
        .filter(|row| prompts.insert(hash_of_prompt(row)))
        .filter_map(|row| pieces(&row, row_tokens).into_iter().next())
        .take(MOST_CHECKED)
        .collect()
}

fn hash_of_prompt(row: &Row) -> String {
    longdraft_models::sha256::of_text(&format!("{:?}", row.prompt()))
}

/// Whether a prompt of a hash is set aside: always or never.
fn is_held_out(hash: &str) -> bool {
    let digits = hash.bytes().take(8).fold(0_u64, |sum, digit| 131 * sum + u64::from(digit));
    digits.is_multiple_of(PART)
}

/// An answer in texts of at most so many tokens. The first one has the end of the prompt before it, the others
/// what comes before them, at most half of a text: each has labels, and a long prompt takes nobody's place.
fn pieces(row: &Row, row_tokens: usize) -> Vec<Text> {
    let (ids, prompt) = (&row.input_ids, row.prompt().len());
    let half = (row_tokens / 2).max(1);
    let mut texts = Vec::new();
    // A first token has nothing to be predicted from.
    let mut from = prompt.max(1);
    while from < ids.len() {
        let before = from.min(half);
        let end = ids.len().min(from + (row_tokens - before).max(1));
        let loss_mask = [vec![0; before], vec![1; end - from]].concat();
        texts.push(Text { input_ids: ids[from - before..end].to_vec(), loss_mask, at: row.at });
        from = end;
    }
    texts
}

/// Texts of answers in which proposals failed more often than in half of them stand twice.
fn weighted(rows: Vec<(f64, Vec<Text>)>) -> Vec<Text> {
    let mut shares: Vec<f64> = rows.iter().map(|(share, _)| *share).collect();
    shares.sort_by(f64::total_cmp);
    let middle = shares.get(shares.len() / 2).copied().unwrap_or_default();
    rows.into_iter()
        .flat_map(|(share, texts)| {
            let times = if share > middle { 2 } else { 1 };
            std::iter::repeat_n(texts, times).flatten()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer to a prompt of its own, unless the first token is that of another.
    fn row(first: u32, prompt: usize, answer: usize) -> Row {
        let prompt: Vec<u32> = (0..prompt as u32).map(|place| first + place).collect();
        Row::new(&prompt, &vec![7; answer], answer / 2)
    }

    fn labels(text: &Text) -> usize {
        text.loss_mask.iter().skip(1).map(|label| usize::from(*label)).sum()
    }

    #[test]
    fn every_text_has_labels_and_fits_a_row_however_long_prompt_and_answer_are() {
        for (prompt, answer) in
            [(1, 1), (1, 9), (63, 1), (64, 5), (1000, 3), (5000, 700), (3, 64), (64, 65), (0, 40)]
        {
            let texts = pieces(&row(9, prompt, answer), 64);
            let all: usize = texts.iter().map(labels).sum();
            assert_eq!(all, if prompt == 0 { answer - 1 } else { answer }, "{prompt} {answer}");
            for text in &texts {
                assert!(labels(text) > 0 && text.input_ids.len() <= 64, "{prompt} {answer}");
                assert_eq!(text.input_ids.len(), text.loss_mask.len());
            }
        }
        // The end of the prompt stays.
        assert_eq!(pieces(&row(0, 100, 1), 64)[0].input_ids[..2], [68, 69]);
        assert!(pieces(&row(0, 0, 1), 64).is_empty());
    }

    #[test]
    fn a_prompt_is_set_aside_once_and_learned_a_few_times() {
        let copies = |first| (0..20).map(move |_| row(first, 10, 30));
        let choice = choose((0..40).flat_map(copies), 64);
        let mut prompts: Vec<_> =
            choice.held_out.iter().map(|text| &text.input_ids[..10]).collect();
        let all = prompts.len();
        prompts.sort_unstable();
        prompts.dedup();
        assert_eq!(prompts.len(), all, "another prompt each");
        assert!((2..15).contains(&all), "{all}");
        assert_eq!(choice.train.len(), (40 - all) * MOST_OF_A_PROMPT);
        let learned =
            |prompt: &[u32]| choice.train.iter().any(|text| text.input_ids[..10] == *prompt);
        assert!(!prompts.iter().any(|prompt| learned(prompt)));
    }

    #[test]
    fn what_is_learned_are_the_newest_texts_of_so_many_tokens() {
        let text = |id| Text { input_ids: vec![id; 10], loss_mask: vec![1; 10], at: 0 };
        let newest = [1, 1, 2, 3, 3, 4].map(text);
        let count = |tokens| {
            let learned = learned(&newest, tokens);
            (learned.len(), different(learned))
        };
        assert_eq!(count(0), (0, 0));
        assert_eq!(count(25), (3, 2), "a text that stands twice is one");
        assert_eq!(count(31), (4, 3));
        assert_eq!(count(1000), (6, 4));
    }

    /// However many answers each prompt has.
    #[test]
    fn drafts_are_judged_on_answers_as_new_as_those_that_are_learned() {
        for copies in [1, 4] {
            // Two answers a second, the newest one first.
            let rows = (0..1200_u32).map(|number| {
                let at = u64::from((1200 - number) / 2);
                Row { at, ..row(number / copies * 100, 10, 30) }
            });
            let choice = choose(rows, 64);
            let learned = learned(&choice.train, 600 * 40);
            let oldest = learned.iter().map(|text| text.at).min().expect("some");
            let count = judged(&choice.held_out, learned);
            let as_new = choice.held_out.iter().filter(|text| text.at >= oldest).count();
            assert_eq!(count, as_new.max(LEAST_JUDGED), "{copies}");
            assert!(copies == 4 || count > LEAST_JUDGED, "{count}");
            assert!(count < choice.held_out.len(), "{copies}: {count}");
        }
        assert_eq!(judged(&[], &[]), LEAST_JUDGED);
    }

    #[test]
    fn a_check_takes_the_newest_answers_that_were_not_learned_one_of_a_prompt() {
        // Two to each prompt; the second of a pair is older.
        let rows = |count: u32| {
            (0..count).map(move |number| Row {
                at: u64::from(1000 - number),
                ..row(number / 2 * 100, 10, 30)
            })
        };
        let found = unseen(rows(20), 985, 64);
        assert_eq!(
            found.iter().map(|text| text.at).collect::<Vec<u64>>(),
            (0..8).map(|pair| 1000 - 2 * pair).collect::<Vec<u64>>()
        );
        assert!(found.iter().all(|text| text.input_ids.len() == 40 && labels(text) == 30));
        assert!(unseen(rows(20), 1000, 64).is_empty());
        assert_eq!(unseen(rows(400), 0, 64).len(), MOST_CHECKED);
        // Of an answer in several pieces the first one.
        assert_eq!(unseen(std::iter::once(row(1, 10, 500)), 0, 64).len(), 1);
    }

    #[test]
    fn long_rows_leave_room_for_both_kinds() {
        // One that is too long by itself stands first and is passed over.
        let rows = std::iter::once(row(1 << 20, 1, MOST_TOKENS + 1))
            .chain((0..3000).map(|first| row(first * 10_000, 4000, 200)));
        let choice = choose(rows, 1024);
        assert!(choice.train.len() > 100, "{}", choice.train.len());
        assert!(choice.held_out.len() >= 100, "{}", choice.held_out.len());
        let tokens = |texts: &[Text]| texts.iter().map(|text| text.input_ids.len()).sum::<usize>();
        assert!(tokens(&choice.held_out) <= HELD_OUT_TOKENS);
        assert!(choice.held_out.iter().all(|text| text.input_ids.len() <= 1024));
    }

    #[test]
    fn answers_in_which_proposals_failed_stand_twice() {
        let text = |id| vec![Text { input_ids: vec![id; 2], loss_mask: vec![0, 1], at: 0 }];
        let rows = [0.2, 0.9, 0.1, 0.2].into_iter().zip([1, 2, 3, 4].map(text)).collect();
        let found: Vec<u32> = weighted(rows).iter().map(|text| text.input_ids[0]).collect();
        assert_eq!(found, [1, 2, 2, 3, 4]);
        assert!(weighted(Vec::new()).is_empty());
        assert_eq!(weighted(vec![(0.4, text(1))]).len(), 1);
    }
}
