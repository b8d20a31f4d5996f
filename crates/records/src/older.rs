//! Records of older versions: they have no values for a drafter's parts and a layout, only their names.

use longdraft_decode::DraftShape;

use crate::drafter_parts::{DrafterParts, Lookup};

/// The parts that a name tells of.
pub(crate) fn drafter_parts(name: &str) -> DrafterParts {
    let (draft, lookup) = match (name.split_once(" + lookup"), name.strip_prefix("lookup")) {
        (Some((draft, lookup)), _) => (Some(draft), Some(lookup)),
        (None, Some(lookup)) => (None, Some(lookup)),
        (None, None) => (Some(name).filter(|name| *name != "none"), None),
    };
    let reduced = draft.and_then(|draft| {
        let (method, tokens) = draft.split_once(" with ")?;
        Some((method, tokens.strip_suffix(" tokens")?.parse().ok()?))
    });
    let (how, texts) = lookup.map_or(("", None), |lookup| match lookup.split_once(" in ") {
        Some((how, texts)) => (how, Some(texts)),
        None => (lookup, None),
    });
    DrafterParts {
        method: reduced.map(|(method, _)| method).or(draft).map(str::to_owned),
        vocabulary: reduced.map(|(_, tokens)| tokens),
        lookup: lookup.map(|_| match how.trim() {
            "(merged)" => Lookup::Merged,
            "(switched)" => Lookup::Switched,
            _ => Lookup::Alone,
        }),
        datastore: texts.map(str::to_owned),
    }
}

/// The layout of a name; `None` where no layout has this name.
pub(crate) fn shape(name: &str) -> Option<DraftShape> {
    let (kind, sizes) = name.split_once(' ')?;
    let levels =
        || -> Option<Vec<usize>> { sizes.split(',').map(|size| size.parse().ok()).collect() };
    let shape = match kind {
        "chain" => DraftShape::Chain { length: sizes.parse().ok()? },
        "tree-static" => DraftShape::Static { widths: levels()? },
        "tree-dynamic" => {
            // Every size after its name.
            let words: Vec<&str> = sizes.split(' ').collect();
            let [_, width, _, depth, _, budget] = words[..] else { return None };
            DraftShape::Dynamic {
                width: width.parse().ok()?,
                depth: depth.parse().ok()?,
                budget: budget.parse().ok()?,
            }
        }
        "tree-sampled(wor)" => DraftShape::Sampled { children: levels()? },
        _ => return None,
    };
    (shape.name() == name).then_some(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_drafter_is_found_by_the_name_that_it_writes() {
        let method = || Some("glide".to_owned());
        let texts = || Some("90 tokens of other texts".to_owned());
        for written in [
            DrafterParts::default(),
            DrafterParts { method: method(), ..DrafterParts::default() },
            DrafterParts { method: method(), vocabulary: Some(512), ..DrafterParts::default() },
            DrafterParts { lookup: Some(Lookup::Alone), ..DrafterParts::default() },
            DrafterParts {
                lookup: Some(Lookup::Alone),
                datastore: texts(),
                ..DrafterParts::default()
            },
            DrafterParts {
                method: method(),
                lookup: Some(Lookup::Merged),
                ..DrafterParts::default()
            },
            DrafterParts {
                method: method(),
                vocabulary: Some(512),
                lookup: Some(Lookup::Switched),
                datastore: texts(),
            },
        ] {
            assert_eq!(drafter_parts(&written.to_string()), written);
        }
        assert_eq!(drafter_parts("<b> with x").method.as_deref(), Some("<b> with x"));
    }

    #[test]
    fn every_layout_is_found_by_the_name_that_it_writes() {
        for written in [
            DraftShape::Chain { length: 4 },
            DraftShape::Static { widths: DraftShape::STATIC.to_vec() },
            DraftShape::Dynamic { width: 10, depth: 6, budget: 60 },
            DraftShape::Sampled { children: vec![4, 2, 1] },
        ] {
            assert_eq!(shape(&written.name()).as_ref(), Some(&written));
        }
    }

    #[test]
    fn other_names_are_of_no_layout() {
        for name in [
            "",
            "chain",
            "chain 4 5",
            "chain +4",
            "chain -4",
            "chain 99999999999999999999999",
            "tree-static ",
            "tree-static 4,",
            "tree-dynamic width 10 depth 6",
            "tree-dynamic depth 6 width 10 budget 60",
            "<b>",
        ] {
            assert_eq!(shape(name), None, "{name}");
        }
    }
}
