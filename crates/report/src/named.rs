//! What records name in short, as values.

use longdraft_decode::DraftShape;

/// The layout of proposals that a record names; `None` where no layout has this name.
pub fn shape(rule: &str) -> Option<DraftShape> {
    let (kind, sizes) = rule.split_once(' ')?;
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
    (shape.name() == rule).then_some(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

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
