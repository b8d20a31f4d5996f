//! What records name in short, in plain words.

use longdraft_models::draft::DraftKind;

/// Without a drafter.
const PLAIN: &str = "plain decoding";

/// Name of a way to draft: "draft + prompt lookup".
pub(crate) fn way(drafter: &str) -> String {
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
pub(crate) fn rule(rule: &str) -> String {
    let (kind, sizes) = rule.split_once(' ').unwrap_or((rule, ""));
    match kind {
        "chain" => format!("chains of {sizes} tokens"),
        "tree-static" => format!("fixed tree of {sizes} tokens a level"),
        "tree-dynamic" => format!("tree by confidence, {sizes}"),
        "tree-sampled(wor)" => format!("drawn tree of {sizes} children a level"),
        _ => rule.to_owned(),
    }
}

/// `0` as "greedy".
pub(crate) fn temperature(temperature: f64) -> String {
    if temperature == 0.0 { "greedy".into() } else { format!("temperature {temperature}") }
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
        assert_eq!(rule("odd"), "odd");
        assert_eq!(
            (temperature(0.0), temperature(0.7)),
            ("greedy".into(), "temperature 0.7".into())
        );
    }
}
