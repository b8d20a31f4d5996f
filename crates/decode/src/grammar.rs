//! Answers of a given form: what a grammar forbids has no part in the distribution.

use std::borrow::Cow;

use longdraft_models::TargetTokenId;

use crate::distribution::Counts;
use crate::error::Result;
use crate::tree::Tree;

/// A grammar's state along one answer, from its first token on.
///
/// The target's distribution after a text is restricted to the tokens that may follow it, and so is what
/// verification tests proposals against: an answer with a draft follows the same restricted
/// distribution as one without.
pub trait Grammar: Send {
    /// The tokens that may come next, bit `id % 32` of word `id / 32`. Where the answer may end, its stop
    /// tokens are among them.
    ///
    /// # Errors
    /// - the grammar cannot be followed here (too many states)
    fn allowed(&mut self) -> Result<Vec<u32>>;

    /// How many of these tokens, one after the other, may come next.
    ///
    /// # Errors
    /// - as [`Self::allowed`]
    fn accepts(&mut self, tokens: &[TargetTokenId]) -> Result<usize>;

    /// At most `most` tokens of the only text that may come next, as far as there is only one. They are
    /// proposed, no more: the same text may be written in other tokens.
    ///
    /// # Errors
    /// - as [`Self::allowed`]
    fn forced(&mut self, most: usize) -> Result<Vec<TargetTokenId>> {
        let _ = most;
        Ok(Vec::new())
    }

    /// Goes on by a token that may come next.
    ///
    /// # Errors
    /// - it may not
    fn advance(&mut self, token: TargetTokenId) -> Result<()>;

    /// Takes back the last `count` tokens.
    ///
    /// # Errors
    /// - there are fewer
    fn take_back(&mut self, count: usize) -> Result<()>;
}

/// What an answer has so far.
pub struct SoFar<'a> {
    /// How often it has each of its tokens, a root that belongs to it included; penalties ask for it.
    pub counts: Counts,
    /// The grammar that it follows, after those tokens.
    pub grammar: Option<&'a mut dyn Grammar>,
    /// Tokens that may not come yet.
    pub late: &'a [TargetTokenId],
    /// How many other tokens come before them; 0: they may come.
    pub left: usize,
}

impl SoFar<'_> {
    /// Tokens of an answer that follows no grammar.
    pub fn of(generated: &[TargetTokenId]) -> Self {
        let mut counts = Counts::new();
        generated.iter().for_each(|token| *counts.entry(*token).or_default() += 1);
        Self { counts, grammar: None, late: &[], left: 0 }
    }

    /// The logits `[V]` of the next token, those of forbidden ones −∞.
    pub(crate) fn allowed<'l>(&mut self, mut logits: Cow<'l, [f32]>) -> Result<Cow<'l, [f32]>> {
        for token in self.late.iter().filter(|_| self.left > 0) {
            if let Some(logit) = logits.to_mut().get_mut(token.0 as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let Some(grammar) = &mut self.grammar else { return Ok(logits) };
        let allowed = grammar.allowed()?;
        let mut logits = logits.into_owned();
        for (id, logit) in logits.iter_mut().enumerate() {
            if allowed.get(id / 32).is_none_or(|word| word >> (id % 32) & 1 == 0) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(Cow::Owned(logits))
    }

    /// Goes on by an accepted token.
    pub(crate) fn advance(&mut self, token: TargetTokenId) -> Result<()> {
        self.left = self.left.saturating_sub(1);
        self.grammar.as_mut().map_or(Ok(()), |grammar| grammar.advance(token))
    }

    /// Returns the grammar to where it stood before the last `count` accepted tokens.
    pub(crate) fn take_back(&mut self, count: usize) -> Result<()> {
        self.grammar.as_mut().map_or(Ok(()), |grammar| grammar.take_back(count))
    }
}

/// The proposals that the grammar lets pass: what it forbids would be refused, and its row is saved.
/// Drawn ones all stay, because which were drawn is part of how they are tested.
pub(crate) fn fitting(tree: Tree, grammar: &mut dyn Grammar) -> Result<Tree> {
    if tree.is_empty() || tree.nodes().iter().any(|node| node.drawn) {
        return Ok(tree);
    }
    let mut keeps = Vec::with_capacity(tree.rows());
    for row in 0..tree.rows() {
        let path = tree.path(row);
        keeps.push(grammar.accepts(&path)? == path.len());
    }
    Ok(tree.keep(|row| keeps[row]))
}
