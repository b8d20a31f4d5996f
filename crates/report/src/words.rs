//! What records name in short, in plain words; figures as they read.

use longdraft_decode::DraftShape;
use longdraft_models::disk::readable_bytes;
use longdraft_models::draft::DraftKind;
use longdraft_records::events::Advance;

use super::named::shape;
use super::ticks::{number, whole};

/// Without a drafter.
const PLAIN: &str = "plain decoding";

/// Name of a way to draft: "draft + prompt lookup".
pub fn way(drafter: &str) -> String {
    let (model, lookup) = parts(drafter);
    match (model, lookup) {
        (Some(_), Some(_)) => "draft + prompt lookup".into(),
        (Some(_), None) => "draft alone".into(),
        (None, Some(_)) => "prompt lookup alone".into(),
        (None, None) => PLAIN.to_owned(),
    }
}

/// The same in detail: which draft, what it may propose, how lookup takes part.
pub(crate) fn drafter(drafter: &str) -> String {
    let (model, lookup) = parts(drafter);
    let mut all = Vec::new();
    if let Some(model) = model {
        let (method, tokens) = match model.split_once(" with ") {
            Some((method, tokens)) => (method, Some(tokens)),
            None => (model, None),
        };
        let method = DraftKind::named(method)
            .map_or_else(|_| method.to_owned(), |kind| format!("{} draft", kind.title));
        all.push(match tokens {
            Some(tokens) => {
                let count = tokens.trim().trim_end_matches(" tokens");
                format!("{method} that proposes the {count} most frequent tokens")
            }
            None => method,
        });
    }
    if let Some(lookup) = lookup {
        let (how, store) = match lookup.split_once(" in ") {
            Some((how, store)) => (how.trim(), Some(store)),
            None => (lookup.trim(), None),
        };
        let how = match how {
            "(merged)" => "prompt lookup beside it, in one tree",
            "(switched)" => "prompt lookup in its place where that finds much",
            _ => "prompt lookup",
        };
        all.push(match store {
            Some(store) => format!("{how}, also in {store}"),
            None => how.to_owned(),
        });
    }
    if all.is_empty() { PLAIN.to_owned() } else { all.join("; ") }
}

/// Draft model and lookup of a drafter's name.
fn parts(drafter: &str) -> (Option<&str>, Option<&str>) {
    if let Some((model, lookup)) = drafter.split_once(" + lookup") {
        return (Some(model), Some(lookup));
    }
    match drafter.strip_prefix("lookup") {
        Some(lookup) => (None, Some(lookup)),
        None if drafter == "none" => (None, None),
        None => (Some(drafter), None),
    }
}

/// How proposals are laid out: `chain 4` as "chains of 4 tokens".
pub fn rule(rule: &str) -> String {
    let levels = |sizes: &[usize]| -> String {
        sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
    };
    match shape(rule) {
        Some(DraftShape::Chain { length }) => format!("chains of {length} tokens"),
        Some(DraftShape::Static { widths }) => {
            format!("fixed tree of {} tokens a level", levels(&widths))
        }
        Some(DraftShape::Dynamic { width, depth, budget }) => {
            format!("tree by confidence, width {width} depth {depth} budget {budget}")
        }
        Some(DraftShape::Sampled { children }) => {
            format!("drawn tree of {} children a level", levels(&children))
        }
        None => rule.to_owned(),
    }
}

/// `0` as "greedy".
pub fn temperature(temperature: f64) -> String {
    if temperature == 0.0 { "greedy".into() } else { format!("temperature {temperature}") }
}

/// Seconds as `1h02m`, `3m05s` or `12s`.
pub fn clock(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m{s:02}s"),
        (h, m, _) => format!("{h}h{m:02}m"),
    }
}

/// `120 of 300 prompts`
pub fn work(work: &Advance) -> String {
    let of = if work.all > 0 { format!(" of {}", whole(work.all as u64)) } else { String::new() };
    format!("{}{of} {}", whole(work.done as u64), work.what)
}

/// Seconds as exactly as they can be foreseen: `40s`, `3m10s`, `38m`, `2h05m`.
pub fn about(seconds: f64) -> String {
    let round = |unit: f64| unit * (seconds.max(0.0) / unit).round();
    match seconds {
        ..60.0 => clock(round(5.0)),
        60.0..600.0 => clock(round(10.0)),
        600.0..3600.0 => format!("{:.0}m", round(60.0) / 60.0),
        _ => clock(round(300.0)),
    }
}

/// Tokens a second.
pub fn speed(tokens: f64) -> String {
    format!("{} tok/s", number(tokens, 3))
}

/// Memory.
pub fn memory(mib: f64) -> String {
    readable_bytes((mib * f64::from(1 << 20)) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_records_become_plain_words() {
        let long = "glide with 512 tokens + lookup (switched)";
        assert_eq!(way(long), "draft + prompt lookup");
        assert_eq!(
            drafter(long),
            "GLIDE draft that proposes the 512 most frequent tokens; prompt lookup in its place where that \
             finds much"
        );
        assert_eq!(
            (way("eagle3"), drafter("eagle3")),
            ("draft alone".into(), "EAGLE-3 draft".into())
        );
        assert_eq!(drafter("lookup in 3 texts"), "prompt lookup, also in 3 texts");
        assert_eq!(
            (way("lookup"), drafter("lookup")),
            ("prompt lookup alone".into(), "prompt lookup".into())
        );
        assert_eq!((way("none"), drafter("<b>")), (PLAIN.into(), "<b>".into()));
        assert_eq!(rule("chain 4"), "chains of 4 tokens");
        assert_eq!(rule("tree-static 4,8"), "fixed tree of 4,8 tokens a level");
        assert_eq!(
            rule("tree-dynamic width 10 depth 6 budget 60"),
            "tree by confidence, width 10 depth 6 budget 60"
        );
        assert_eq!(rule("tree-sampled(wor) 4,2"), "drawn tree of 4,2 children a level");
        assert_eq!(rule("odd"), "odd");
        assert_eq!(
            (temperature(0.0), temperature(0.7)),
            ("greedy".into(), "temperature 0.7".into())
        );
    }

    #[test]
    fn what_is_foreseen_is_told_roughly() {
        let told = [-3.0, 13.0, 58.0, 187.0, 614.0, 3599.0, 7384.0, 9e4].map(about);
        assert_eq!(told, ["0s", "15s", "1m00s", "3m10s", "10m", "60m", "2h05m", "25h00m"]);
    }

    #[test]
    fn work_and_its_share_are_told() {
        let steps =
            Advance { what: "steps".to_owned(), done: 1200, all: 4000, ..Advance::default() };
        assert_eq!(work(&steps), "1,200 of 4,000 steps");
        assert!((steps.share() - 0.3).abs() < 1e-9);
        let open = Advance { all: 0, ..steps };
        assert_eq!(work(&open), "1,200 steps");
    }
}
