//! How proposals are laid out.

use serde::{Deserialize, Serialize};

use crate::error::{DecodeError, Result};

/// Layout of a round's proposals; see [`crate::drafter::grow`] for how each grows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "rule")]
pub enum DraftShape {
    /// One token after the other: the most likely ones, or drawn ones at a temperature.
    Chain {
        /// Tokens.
        length: usize,
    },
    /// Beams: level d keeps the `widths[d]` most likely paths of that length.
    Static {
        /// Nodes of each level.
        widths: Vec<usize>,
    },
    /// Confidence decides (EAGLE-2, Li et al. 2024): the `width` best nodes of a level are
    /// expanded, the `budget` best of all are kept.
    Dynamic {
        /// Nodes expanded a level, and children of each.
        width: usize,
        /// Levels.
        depth: usize,
        /// Nodes kept.
        budget: usize,
    },
    /// Children drawn from the draft's distribution without replacement.
    Sampled {
        /// Children of each node of a level.
        children: Vec<usize>,
    },
}

/// Nodes of a tree at most: one row each of the target's pass.
const MOST_NODES: usize = 1024;

impl DraftShape {
    /// The published static tree.
    pub const STATIC: [usize; 5] = [4, 16, 16, 16, 16];

    /// Levels.
    pub fn depth(&self) -> usize {
        match self {
            Self::Chain { length } => *length,
            Self::Static { widths } => widths.len(),
            Self::Dynamic { depth, .. } => *depth,
            Self::Sampled { children } => children.len(),
        }
    }

    /// Nodes that the draft reads at most, the root not counted.
    pub fn most_read(&self) -> usize {
        match self {
            Self::Chain { length } => length.saturating_sub(1),
            Self::Static { widths } => widths.iter().rev().skip(1).sum(),
            Self::Dynamic { width, depth, .. } => width * depth.saturating_sub(1),
            Self::Sampled { children } => {
                let level = |size: &mut usize, children: &usize| {
                    *size *= children;
                    Some(*size)
                };
                children.iter().take(children.len().saturating_sub(1)).scan(1, level).sum()
            }
        }
    }

    /// Whether the layout can be.
    ///
    /// # Errors
    /// - a level without nodes, or more nodes than a pass takes
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str| Err(DecodeError::Shape(what.to_owned()));
        let nodes = match self {
            Self::Chain { length } => *length,
            Self::Static { widths } if widths.contains(&0) => {
                return wrong("every level of a tree needs at least 1 node");
            }
            Self::Static { widths } => widths.iter().fold(0, |sum, w| w.saturating_add(sum)),
            Self::Dynamic { width, depth, budget } => {
                if *width == 0 || *depth == 0 || *budget == 0 {
                    return wrong("width, depth and budget of a tree must be at least 1");
                }
                if width.saturating_mul(*depth) > MOST_NODES {
                    return wrong("a tree of this width and depth is too large");
                }
                *budget
            }
            Self::Sampled { children } if children.contains(&0) => {
                return wrong("every level of a tree needs at least 1 child a node");
            }
            Self::Sampled { children } => {
                let mut size = 1_usize;
                let level = children.iter().map(|c| {
                    size = size.saturating_mul(*c);
                    size
                });
                level.fold(0_usize, usize::saturating_add)
            }
        };
        if nodes > MOST_NODES {
            return wrong(&format!("a tree of {nodes} nodes exceeds {MOST_NODES}"));
        }
        Ok(())
    }

    /// The layout cut to `depth` levels.
    #[must_use]
    pub fn cut(&self, depth: usize) -> Self {
        let cut = |levels: &[usize]| levels.iter().copied().take(depth).collect();
        match self {
            Self::Chain { length } => Self::Chain { length: depth.min(*length) },
            Self::Static { widths } => Self::Static { widths: cut(widths) },
            Self::Dynamic { width, depth: full, budget } => {
                Self::Dynamic { width: *width, depth: depth.min(*full), budget: *budget }
            }
            Self::Sampled { children } => Self::Sampled { children: cut(children) },
        }
    }

    /// Name of the rule, as reports print it.
    pub fn name(&self) -> String {
        let list =
            |levels: &[usize]| levels.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        match self {
            Self::Chain { length } => format!("chain {length}"),
            Self::Static { widths } => format!("tree-static {}", list(widths)),
            Self::Dynamic { width, depth, budget } => {
                format!("tree-dynamic width {width} depth {depth} budget {budget}")
            }
            Self::Sampled { children } => format!("tree-sampled(wor) {}", list(children)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_cuts() {
        let tree = DraftShape::Static { widths: DraftShape::STATIC.to_vec() };
        assert_eq!((tree.depth(), tree.most_read()), (5, 52));
        assert_eq!(tree.cut(2), DraftShape::Static { widths: vec![4, 16] });
        let sampled = DraftShape::Sampled { children: vec![4, 2, 1] };
        assert_eq!(sampled.most_read(), 4 + 8);
        assert_eq!(DraftShape::Dynamic { width: 10, depth: 6, budget: 60 }.most_read(), 50);
        assert_eq!(DraftShape::Chain { length: 0 }.most_read(), 0);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for wrong in [
            DraftShape::Static { widths: vec![4, 0] },
            DraftShape::Dynamic { width: 0, depth: 1, budget: 1 },
            DraftShape::Sampled { children: vec![100, 100] },
            DraftShape::Chain { length: 100_000 },
            DraftShape::Static { widths: vec![usize::MAX, 2] },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
        assert!(DraftShape::Static { widths: DraftShape::STATIC.to_vec() }.check().is_ok());
    }
}
