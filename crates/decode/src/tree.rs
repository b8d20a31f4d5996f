//! What is proposed below the root (the last committed token): a tree of tokens, a chain included.
//!
//! Row 0 is the root, parents come before children, and the row of a node is its row in the
//! target's pass. A child is *certain* if it follows from the text before it (arg max, beam,
//! lookup: its own distribution is one-hot), or *drawn* from the distribution that is kept with its
//! parent.

use std::collections::HashMap;
use std::sync::Arc;

use longdraft_models::TargetTokenId;
use serde::{Deserialize, Serialize};

use crate::distribution::Sampling;

/// What proposed a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A draft model.
    Draft,
    /// An earlier place of the text.
    Lookup,
    /// The form of the answer, which leaves the text one way to go on.
    Grammar,
}

/// A proposed token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TreeNode {
    /// The token.
    pub token: TargetTokenId,
    /// Row of the node that it follows.
    pub parent: usize,
    /// Tokens from the root to it.
    pub depth: usize,
    /// Log-probability of the path from the root under the draft; 0 if it gives none.
    pub log_prob: f32,
    /// The draft's chance that the path is kept, if it tells one.
    pub chance: Option<f64>,
    /// Who proposed it.
    pub origin: Origin,
    /// Drawn from its parent's distribution, not certain.
    pub drawn: bool,
}

/// A distribution `[V]`, exactly: held by the tokens that have a chance where these are few.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    size: usize,
    /// The tokens that have a chance; none where the chances are those of all tokens.
    tokens: Option<Vec<u32>>,
    chances: Vec<f64>,
    /// What the chances of all tokens follow from, held in their place.
    logits: Option<(Arc<Vec<f32>>, Sampling)>,
}

impl Distribution {
    /// Holds the chances of all tokens.
    pub fn of(all: &[f64]) -> Self {
        let (size, possible) = (all.len(), possible(all));
        if is_many(all) {
            return Self { size, tokens: None, chances: all.to_vec(), logits: None };
        }
        let mut tokens = Vec::with_capacity(possible);
        let mut chances = Vec::with_capacity(possible);
        for (token, chance) in (0..).zip(all).filter(|(_, chance)| **chance > 0.0) {
            tokens.push(token);
            chances.push(*chance);
        }
        Self { size, tokens: Some(tokens), chances, logits: None }
    }

    /// The same of chances that `sampling` makes of logits `[V]`, which `logits` gives: where many tokens have a
    /// chance, the logits are held, half as large, and give the same bits again.
    pub fn made(all: &[f64], sampling: &Sampling, logits: impl FnOnce() -> Arc<Vec<f32>>) -> Self {
        if !is_many(all) {
            return Self::of(all);
        }
        let Sampling { temperature, top_k, top_p, min_p, .. } = *sampling;
        let rule = Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() };
        let (tokens, chances) = (None, Vec::new());
        Self { size: all.len(), tokens, chances, logits: Some((logits(), rule)) }
    }

    /// The chances of all tokens.
    pub fn to_vec(&self) -> Vec<f64> {
        if let Some((logits, sampling)) = &self.logits {
            return sampling.distribution(logits).unwrap_or_default();
        }
        let Some(tokens) = &self.tokens else { return self.chances.clone() };
        let mut all = vec![0.0; self.size];
        for (token, chance) in tokens.iter().zip(&self.chances) {
            all[*token as usize] = *chance;
        }
        all
    }
}

/// Tokens that have a chance.
fn possible(all: &[f64]) -> usize {
    all.iter().filter(|chance| **chance > 0.0).count()
}

/// Whether so many tokens have a chance that it is not held beside each of them: a token takes half of what its chance
/// does.
fn is_many(all: &[f64]) -> bool {
    3 * possible(all) >= 2 * all.len()
}

/// Proposals below a root.
#[derive(Debug, Clone, PartialEq)]
pub struct Tree {
    root: TargetTokenId,
    nodes: Vec<TreeNode>,
    /// The distribution that the drawn children of a row come from, by row.
    distributions: HashMap<usize, Arc<Distribution>>,
}

impl Tree {
    /// No proposals: the target's pass is a plain step.
    pub fn new(root: TargetTokenId) -> Self {
        Self { root, nodes: Vec::new(), distributions: HashMap::new() }
    }

    /// A certain chain.
    pub fn chain(root: TargetTokenId, tokens: &[TargetTokenId]) -> Self {
        let mut tree = Self::new(root);
        tree.insert_chain(tokens, Origin::Draft);
        tree
    }

    /// Adds a certain chain below the root and returns its rows; where the tree has the same
    /// certain path it is shared.
    pub fn insert_chain(&mut self, tokens: &[TargetTokenId], origin: Origin) -> Vec<usize> {
        let mut row = 0;
        let mut rows = Vec::with_capacity(tokens.len());
        for token in tokens {
            let log_prob = self.node(row).map_or(0.0, |node| node.log_prob);
            row = self.push(row, *token, log_prob, origin);
            rows.push(row);
        }
        rows
    }

    /// Adds the only way on that a grammar leaves; what is there already counts as its own from here on.
    pub fn insert_forced(&mut self, tokens: &[TargetTokenId]) {
        for row in self.insert_chain(tokens, Origin::Grammar) {
            if let Some(node) = row.checked_sub(1).and_then(|place| self.nodes.get_mut(place)) {
                node.origin = Origin::Grammar;
            }
        }
    }

    /// Adds a certain child and returns its row; an equal certain sibling is that row.
    ///
    /// # Panics
    /// - `parent` is no row
    pub fn push(
        &mut self,
        parent: usize,
        token: TargetTokenId,
        log_prob: f32,
        origin: Origin,
    ) -> usize {
        let equal = |(_, node): &(usize, &TreeNode)| node.token == token && !node.drawn;
        let sibling = self.children(parent).find(equal).map(|(row, _)| row);
        sibling.unwrap_or_else(|| self.add(parent, token, log_prob, origin, false))
    }

    /// Adds a child that was drawn from the distribution of `parent`, see
    /// [`Self::set_distribution`].
    ///
    /// # Panics
    /// - `parent` is no row
    pub fn push_drawn(&mut self, parent: usize, token: TargetTokenId, log_prob: f32) -> usize {
        self.add(parent, token, log_prob, Origin::Draft, true)
    }

    fn add(
        &mut self,
        parent: usize,
        token: TargetTokenId,
        log_prob: f32,
        origin: Origin,
        drawn: bool,
    ) -> usize {
        assert!(parent < self.rows(), "a parent comes before its children");
        let depth = self.depth_of(parent) + 1;
        let chance = None;
        self.nodes.push(TreeNode { token, parent, depth, log_prob, chance, origin, drawn });
        self.nodes.len()
    }

    /// Sets the draft's chance that the path to `row` is kept; the root is kept anyway.
    pub fn set_chance(&mut self, row: usize, chance: f64) {
        if let Some(node) = row.checked_sub(1).and_then(|place| self.nodes.get_mut(place)) {
            node.chance = Some(chance);
        }
    }

    /// Sets the distribution that the drawn children of `row` come from: exactly the numbers that they
    /// were drawn with. Rows may share one.
    pub fn set_distribution(&mut self, row: usize, distribution: Arc<Distribution>) {
        self.distributions.insert(row, distribution);
    }

    /// The distribution `[V]` of the drawn children of `row`.
    pub fn distribution(&self, row: usize) -> Option<Vec<f64>> {
        self.distributions.get(&row).map(|distribution| distribution.to_vec())
    }

    /// Proposed tokens.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether nothing is proposed.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Rows of the target's pass: the root and the nodes.
    pub fn rows(&self) -> usize {
        self.nodes.len() + 1
    }

    /// The node of a row; none for the root.
    pub fn node(&self, row: usize) -> Option<&TreeNode> {
        self.nodes.get(row.checked_sub(1)?)
    }

    /// Nodes, that of row 1 first.
    pub fn nodes(&self) -> &[TreeNode] {
        &self.nodes
    }

    /// The token of a row.
    pub fn token(&self, row: usize) -> TargetTokenId {
        self.node(row).map_or(self.root, |node| node.token)
    }

    fn depth_of(&self, row: usize) -> usize {
        self.node(row).map_or(0, |node| node.depth)
    }

    /// Largest depth.
    pub fn depth(&self) -> usize {
        self.nodes.iter().map(|node| node.depth).max().unwrap_or(0)
    }

    /// Children of a row in the order in which they were added, with their rows.
    pub fn children(&self, row: usize) -> impl Iterator<Item = (usize, &TreeNode)> {
        let rows = self.nodes.iter().enumerate().map(|(i, node)| (i + 1, node));
        rows.filter(move |(_, node)| node.parent == row)
    }

    /// The child of `row` with this token.
    pub fn child(&self, row: usize, token: TargetTokenId) -> Option<usize> {
        self.children(row).find(|(_, node)| node.token == token).map(|(row, _)| row)
    }

    /// Whether every row follows the row before it.
    pub fn is_chain(&self) -> bool {
        self.nodes.iter().enumerate().all(|(i, node)| node.parent == i)
    }

    /// Token ids of the rows.
    pub fn ids(&self) -> Vec<u32> {
        (0..self.rows()).map(|row| self.token(row).0).collect()
    }

    /// Parents of the rows, as the attention's mask takes them.
    pub fn parents(&self) -> Vec<Option<usize>> {
        std::iter::once(None).chain(self.nodes.iter().map(|node| Some(node.parent))).collect()
    }

    /// Token indices of the rows when the root's is `root`.
    pub fn positions(&self, root: usize) -> Vec<u32> {
        (0..self.rows()).map(|row| (root + self.depth_of(row)) as u32).collect()
    }

    /// Tokens from below the root down to a row.
    pub fn path(&self, mut row: usize) -> Vec<TargetTokenId> {
        let mut path = Vec::new();
        while let Some(node) = self.node(row) {
            path.push(node.token);
            row = node.parent;
        }
        path.reverse();
        path
    }

    /// Keeps the `count` most likely nodes of a certain tree. Log-probabilities never grow along a
    /// path and ties go to the lower depth, parent and token, so ancestors are always kept.
    #[must_use]
    pub fn best(&self, count: usize) -> Self {
        let mut order: Vec<usize> = (1..self.rows()).collect();
        let key = |row: &usize| {
            let TreeNode { log_prob, depth, parent, token, .. } = self.nodes[row - 1];
            (log_prob, depth, parent, token)
        };
        order.sort_by(|a, b| {
            let (a, b) = (key(a), key(b));
            b.0.total_cmp(&a.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3)))
        });
        order.truncate(count);
        let mut kept = vec![false; self.rows()];
        order.iter().for_each(|row| kept[*row] = true);
        self.keep(|row| kept[row])
    }

    /// The rows of a certain tree that are to be kept and whose ancestors are.
    #[must_use]
    pub fn keep(&self, keeps: impl Fn(usize) -> bool) -> Self {
        let mut kept = Self::new(self.root);
        let mut new_rows = HashMap::from([(0, 0)]);
        for row in (1..self.rows()).filter(|row| keeps(*row)) {
            let node = self.nodes[row - 1];
            if let Some(parent) = new_rows.get(&node.parent) {
                let new = kept.push(*parent, node.token, node.log_prob, node.origin);
                kept.nodes[new - 1].chance = node.chance;
                new_rows.insert(row, new);
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(id: u32) -> TargetTokenId {
        TargetTokenId(id)
    }

    #[test]
    fn paths_are_shared_and_rows_know_their_place() {
        let mut tree = Tree::chain(t(9), &[t(1), t(2)]);
        tree.insert_chain(&[t(1), t(3), t(4)], Origin::Lookup);
        assert_eq!(tree.ids(), [9, 1, 2, 3, 4]);
        assert_eq!(tree.parents(), [None, Some(0), Some(1), Some(1), Some(3)]);
        assert_eq!(tree.positions(7), [7, 8, 9, 9, 10]);
        assert_eq!((tree.len(), tree.depth(), tree.is_chain()), (4, 3, false));
        assert_eq!((tree.child(1, t(3)), tree.child(0, t(3))), (Some(3), None));
        assert!(Tree::chain(t(9), &[t(1), t(1)]).is_chain());
    }

    #[test]
    fn the_best_nodes_bring_their_ancestors_even_with_equal_scores() {
        let mut tree = Tree::new(t(0));
        let a = tree.push(0, t(5), -1.0, Origin::Draft);
        let b = tree.push(0, t(4), -0.5, Origin::Draft);
        tree.push(a, t(1), -1.0, Origin::Draft);
        tree.push(b, t(2), -3.0, Origin::Draft);
        let kept = tree.best(2);
        assert_eq!(kept.ids(), [0, 5, 4]);
        assert_eq!(tree.best(3).parents(), [None, Some(0), Some(0), Some(1)]);
        assert_eq!(tree.best(99).len(), 4);
    }

    #[test]
    fn a_distribution_is_held_by_the_few_tokens_that_have_a_chance() {
        let few = [0.0, 0.5, 0.0, 0.0, 0.25, 0.0, 0.25];
        for (all, held) in [(&few[..], 3), (&few[..2], 1), (&[0.25; 4][..], 4), (&few[..0], 0)] {
            let distribution = Distribution::of(all);
            assert_eq!(distribution.chances.len(), held, "{all:?}");
            assert_eq!(distribution.to_vec(), all);
        }
    }

    #[test]
    fn logits_are_held_in_the_place_of_many_chances_and_give_the_same_bits() {
        let logits = Arc::new((0..50).map(|i| (i * 37 % 50) as f32 / 7.0).collect::<Vec<f32>>());
        let held = |sampling: &Sampling| {
            let all = sampling.distribution(&logits).expect("a distribution");
            let distribution = Distribution::made(&all, sampling, || Arc::clone(&logits));
            assert_eq!(distribution.to_vec(), all);
            (distribution.logits.is_some(), distribution.chances.len())
        };
        let bias = [(t(3), 2.0)].into();
        assert_eq!(held(&Sampling { bias, ..Sampling::at(0.7) }), (true, 0));
        assert_eq!(held(&Sampling { min_p: 1e-3, ..Sampling::at(1.3) }).1, 0);
        assert_eq!(held(&Sampling { top_k: Some(5), ..Sampling::at(1.0) }), (false, 5));
    }

    #[test]
    fn a_drawn_child_is_not_merged_with_a_certain_one() {
        let mut tree = Tree::new(t(0));
        tree.push_drawn(0, t(3), -1.0);
        tree.insert_chain(&[t(3)], Origin::Lookup);
        assert_eq!(tree.len(), 2);
    }
}
