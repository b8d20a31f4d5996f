//! What records name in short, in plain words; figures as they read.

use longdraft_decode::DraftShape;
use longdraft_models::disk::readable_bytes;
use longdraft_models::draft::DraftKind;
use longdraft_records::decode::{DrafterParts, Lookup};
use longdraft_records::events::Advance;

use super::ticks::{number, whole};

/// Without a drafter.
const PLAIN: &str = "plain decoding";

/// Name of a way to draft: "draft + prompt lookup".
pub fn way(parts: &DrafterParts) -> String {
    let name = match (&parts.method, parts.lookup) {
        (Some(_), Some(_)) => "draft + prompt lookup",
        (Some(_), None) => "draft alone",
        (None, Some(_)) => "prompt lookup alone",
        (None, None) => PLAIN,
    };
    name.to_owned()
}

/// The same in detail: which draft, what it may propose, how lookup takes part.
pub(crate) fn drafter(parts: &DrafterParts) -> String {
    let draft = parts.method.as_ref().map(|method| {
        let draft = DraftKind::named(method)
            .map_or_else(|_| method.clone(), |kind| format!("{} draft", kind.title));
        match parts.vocabulary {
            Some(count) => format!("{draft} that proposes the {count} most frequent tokens"),
            None => draft,
        }
    });
    let lookup = parts.lookup.map(|lookup| {
        let how = match lookup {
            Lookup::Alone => "prompt lookup",
            Lookup::Merged => "prompt lookup beside it, in one tree",
            Lookup::Switched => "prompt lookup in its place where that finds much",
        };
        match &parts.datastore {
            Some(texts) => format!("{how}, also in {texts}"),
            None => how.to_owned(),
        }
    });
    let all: Vec<String> = draft.into_iter().chain(lookup).collect();
    if all.is_empty() { PLAIN.to_owned() } else { all.join("; ") }
}

/// How proposals are laid out: `chain 4` as "chains of 4 tokens".
pub fn layout(shape: &DraftShape) -> String {
    let levels = |sizes: &[usize]| -> String {
        sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
    };
    match shape {
        DraftShape::Chain { length } => format!("chains of {length} tokens"),
        DraftShape::Static { widths } => format!("fixed tree of {} tokens a level", levels(widths)),
        DraftShape::Dynamic { width, depth, budget } => {
            format!("tree by confidence, width {width} depth {depth} budget {budget}")
        }
        DraftShape::Sampled { children } => {
            format!("drawn tree of {} children a level", levels(children))
        }
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
    fn parts_of_a_drafter_become_plain_words() {
        let none = DrafterParts::default;
        let alone = |method: &str| DrafterParts { method: Some(method.into()), ..none() };
        let all = DrafterParts {
            vocabulary: Some(512),
            lookup: Some(Lookup::Switched),
            ..alone("glide")
        };
        let lookup = DrafterParts { lookup: Some(Lookup::Alone), ..none() };
        let store = DrafterParts { datastore: Some("3 texts".into()), ..lookup.clone() };
        let told = |parts: &DrafterParts| (way(parts), drafter(parts));
        let words = |way: &str, drafter: &str| (way.to_owned(), drafter.to_owned());
        assert_eq!(
            told(&all),
            words(
                "draft + prompt lookup",
                "GLIDE draft that proposes the 512 most frequent tokens; prompt lookup in its place \
                 where that finds much"
            )
        );
        assert_eq!(told(&alone("eagle3")), words("draft alone", "EAGLE-3 draft"));
        assert_eq!(told(&alone("<b>")), words("draft alone", "<b>"));
        assert_eq!(told(&lookup), words("prompt lookup alone", "prompt lookup"));
        assert_eq!(drafter(&store), "prompt lookup, also in 3 texts");
        assert_eq!(told(&none()), words(PLAIN, PLAIN));
        assert_eq!(temperature(0.0), "greedy");
        assert_eq!(temperature(0.7), "temperature 0.7");
    }

    #[test]
    fn layouts_are_told_by_their_sizes() {
        let told = [
            DraftShape::Chain { length: 4 },
            DraftShape::Static { widths: vec![4, 8] },
            DraftShape::Dynamic { width: 10, depth: 6, budget: 60 },
            DraftShape::Sampled { children: vec![4, 2] },
        ]
        .map(|shape| layout(&shape));
        assert_eq!(
            told,
            [
                "chains of 4 tokens",
                "fixed tree of 4,8 tokens a level",
                "tree by confidence, width 10 depth 6 budget 60",
                "drawn tree of 4,2 children a level"
            ]
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
