//! Expressions that read a run of digits once, in place of ones that read what is left of it for each piece.
//!
//! The pieces are the same. A search begins where the last piece ends (`\G`), so that only the first piece of a run looks
//! ahead. What is no such run is passed in one go (`(?>...)\K`): the library gives up where it has to go back too often.

use serde_json::Value;
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;

use super::{THREES, sequence, split};

/// Threes of digits from the last one of a word on.
pub(super) const THREES_OF_WORDS: &str = r"\d{1,3}(?=(?:\d{3})*\b)";
/// The places before threes of digits from the last one on.
pub(super) const BEFORE_THREES: &str = r"(?=(\d{3})+(?!\d))";

/// Expressions, and those that stand in the place of each.
const LINEAR: [(&str, &[&str]); 3] = [
    (THREES, &[r"\G(?>\P{N}*)\K(?:(?<!\p{N})\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|\z))|\p{N}{3})"]),
    // A run before another character of a word is no match.
    (
        THREES_OF_WORDS,
        &[r"\G(?:(?<=\d)\d{3}|(?>(?:\D|\d+[\w&&\D])*)\K\d{1,3}(?=(?:\d{3})*(?:\W|\z)))"],
    ),
    // First the place before the first three of a run, then those between threes.
    (BEFORE_THREES, &[r"(?<!\d{3})(?=(?:\d{3})+(?:\D|\z))", r"\d{3}(?=\d)"]),
];

/// Has a tokenizer split texts by expressions whose work grows as the text does. Returns its own steps, where it had
/// other expressions.
pub(in crate::tokenizer) fn split_in_linear_time(
    tokenizer: &mut Tokenizer,
) -> Option<PreTokenizerWrapper> {
    let steps = serde_json::to_value(tokenizer.get_pre_tokenizer()?).ok()?;
    let linear = linear(steps.clone());
    if linear == steps {
        return None;
    }
    let linear: PreTokenizerWrapper = serde_json::from_value(linear).ok()?;
    let own = tokenizer.get_pre_tokenizer().cloned();
    tokenizer.with_pre_tokenizer(Some(linear));
    own
}

/// The same steps of a `tokenizer.json`, with expressions whose work grows as the text does.
fn linear(steps: Value) -> Value {
    let mut steps = in_place(steps);
    if steps.len() == 1 { steps.remove(0) } else { sequence(&steps) }
}

/// What stands in the place of a step.
fn in_place(mut step: Value) -> Vec<Value> {
    if let Some(inner) = step.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        *inner = std::mem::take(inner).into_iter().flat_map(in_place).collect();
        return vec![step];
    }
    let expression = step["pattern"]["Regex"].as_str();
    let known = LINEAR.iter().find(|(slow, _)| expression == Some(*slow));
    let is_plain = step["behavior"] == "Isolated" && step["invert"] == false;
    match known {
        Some((_, fast)) if is_plain => fast.iter().copied().map(split).collect(),
        _ => vec![step],
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    /// Where the pieces of a text begin and end, in bytes.
    fn pieces(steps: &Value, text: &str) -> Vec<(usize, usize)> {
        let steps: PreTokenizerWrapper = serde_json::from_value(steps.clone()).expect("steps");
        let mut parts = PreTokenizedString::from(text);
        steps.pre_tokenize(&mut parts).expect("pieces");
        let parts = parts.get_splits(OffsetReferential::Original, OffsetType::Byte);
        parts.into_iter().map(|(_, place, _)| place).collect()
    }

    #[track_caller]
    fn assert_same(text: &str) {
        for (slow, _) in LINEAR {
            let steps = split(slow);
            let fast = linear(steps.clone());
            assert_ne!(fast, steps);
            assert_eq!(pieces(&fast, text), pieces(&steps, text), "{slow}: {text:?}");
        }
    }

    #[test]
    fn pieces_of_runs_are_those_of_the_models_own_expressions() {
        for length in 0..14 {
            let digits = "1234567890123456"[..length].to_owned();
            for before in ["", "a", " ", "½", "٣", ".", "é ", "x9"] {
                for after in ["", "a", " ", "½", "_", "\u{301}", "²3456", " 12", "b1234 5"] {
                    assert_same(&format!("{before}{digits}{after}"));
                }
            }
        }
    }

    #[test]
    fn pieces_of_random_texts_are_those_of_the_models_own_expressions() {
        let signs: Vec<char> =
            "0123456789012345678901234567890123456789٣९½²Ⅷ五 .,_-\naéZ漢\u{301}\u{200d}😀"
                .chars()
                .collect();
        let mut state = 7_u64;
        let mut draw = |below: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..3000 {
            let length = draw(40);
            let text: String = (0..length).map(|_| signs[draw(signs.len())]).collect();
            assert_same(&text);
        }
    }

    #[test]
    fn digits_without_an_end_are_split_before_the_library_gives_up() {
        // It goes back a million times at most: the models' own expressions leave most of this text in one piece.
        let count = 1_600_000;
        let digits = "1".repeat(count);
        for (slow, _) in LINEAR {
            let places = pieces(&linear(split(slow)), &digits);
            assert_eq!(places.len(), count.div_ceil(3), "{slow}");
            assert_eq!(places[..2], [(0, 1), (1, 4)], "{slow}");
        }
    }

    #[test]
    fn digits_after_what_has_no_end_are_split() {
        for slow in [THREES, THREES_OF_WORDS] {
            let before = "a".repeat(1_100_000) + " ";
            let places = pieces(&linear(split(slow)), &(before.clone() + "1234"));
            let start = before.len();
            assert_eq!(places, [(0, start), (start, start + 1), (start + 1, start + 4)], "{slow}");
        }
        let before = "1".repeat(600_000) + "a ";
        let places = pieces(&linear(split(THREES_OF_WORDS)), &(before.clone() + "1234"));
        assert_eq!(places.len(), 3);
    }

    #[test]
    fn a_split_alone_and_in_a_sequence_is_found_and_others_stay() {
        let alone = linear(split(BEFORE_THREES));
        assert_eq!(alone["pretokenizers"].as_array().map(Vec::len), Some(2));
        let other = split(r"\p{N}+");
        let nested = linear(sequence(&[other.clone(), sequence(&[split(THREES)])]));
        assert_eq!(nested["pretokenizers"][0], other);
        assert_eq!(nested["pretokenizers"][1]["pretokenizers"][0], split(LINEAR[0].1[0]));
        let mut inverted = split(THREES);
        inverted["invert"] = true.into();
        for steps in [inverted, other, Value::Null] {
            assert_eq!(linear(steps.clone()), steps);
        }
    }
}
