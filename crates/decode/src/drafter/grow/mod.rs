//! How trees grow from a draft's logits.
//!
//! Certain trees are functions of the text: any node may be left out. Drawn ones are exact only if
//! every decision about a node falls before it is drawn: their layout is fixed beforehand, and only a
//! confidence that reads no token still to be drawn may cut it.

mod score;

use std::borrow::Cow;
use std::sync::Arc;

use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;

use self::score::{Candidate, Expandable, Likelihood, best, chance_of, score};
use super::{Asked, DraftContext, DraftModel, Drafted, Forecast, Logits, Plan, Reading, Worth};
use crate::distribution::{Sampling, normalise};
use crate::draws::{Place, Purpose};
use crate::error::{DecodeError, Result};
use crate::layout::DraftShape;
use crate::tree::{Distribution, Origin, Tree};

/// A tree that grows: what is said after its newest nodes is asked for, and decides about their children.
pub struct Growth {
    tree: Tree,
    shape: DraftShape,
    /// Whether nothing more is asked for.
    is_grown: bool,
    /// The level of the nodes that are asked for; the root's is 0.
    level: usize,
    /// These nodes: their rows, and how likely they are.
    nodes: Vec<(usize, Likelihood)>,
    /// The same as readings, none of the root.
    readings: Vec<Reading>,
    /// Number of the first of them among all that were read; the root's is 0.
    first: usize,
}

impl Growth {
    /// A root below which a layout grows.
    pub fn new(root: TargetTokenId, shape: DraftShape) -> Self {
        Self {
            tree: Tree::new(root),
            is_grown: shape.depth() == 0,
            shape,
            level: 0,
            nodes: vec![(0, Likelihood::CERTAIN)],
            readings: Vec::new(),
            first: 0,
        }
    }

    /// A tree that has grown already.
    pub fn whole(tree: Tree) -> Self {
        let shape = DraftShape::Chain { length: 0 };
        Self { tree, ..Self::new(TargetTokenId(0), shape) }
    }

    /// A layout below the root of a text, or nothing if the plan wants none that takes time.
    pub(super) fn planned(context: DraftContext<'_>, plan: &Plan<'_>, shape: DraftShape) -> Self {
        let root = context.tokens[context.tokens.len() - 1];
        if plan.paid { Self::new(root, shape) } else { Self::whole(Tree::new(root)) }
    }

    /// What a model is to read next; `None` of a tree that has grown.
    pub fn asked(&self) -> Option<Asked<'_>> {
        match self.level {
            _ if self.is_grown => None,
            0 => Some(Asked::Root { depth: self.shape.depth(), room: self.shape.most_read() }),
            level => Some(Asked::After { level, readings: &self.readings }),
        }
    }

    /// The proposals.
    pub fn into_tree(self) -> Tree {
        match self.shape {
            DraftShape::Dynamic { budget, .. } => self.tree.best(budget),
            _ => self.tree,
        }
    }

    /// Adds the next level from what `model` said after the nodes that were asked for.
    ///
    /// # Errors
    /// - it did not say something after each of them
    pub fn add(
        &mut self,
        model: &dyn DraftModel,
        vocabulary: usize,
        plan: &mut Plan<'_>,
        forecasts: Vec<Forecast>,
    ) -> Result<()> {
        let (said, asked) = (forecasts.len(), self.nodes.len());
        if said != asked {
            let problem = format!("a draft said what follows {said} tokens, and not {asked}");
            return Err(DecodeError::Shape(problem));
        }
        let nodes = self.nodes.drain(..).zip(forecasts);
        let nodes: Vec<Expandable> =
            nodes.map(|((row, path), forecast)| Expandable { row, path, forecast }).collect();
        let draws = plan.drawn
            && matches!(self.shape, DraftShape::Chain { .. } | DraftShape::Sampled { .. });
        let (chosen, rows) = if draws {
            self.drawn(model, vocabulary, plan, &nodes)
        } else if let DraftShape::Dynamic { width, budget, .. } = self.shape {
            self.dynamic(model, plan, &nodes, (width, budget))
        } else {
            self.certain(model, plan, &nodes)
        };
        let may_go_on = draws || another_level(plan.worth.as_ref(), &chosen);
        let passes = self.level + 1;
        let is_block = model.block_len().is_some();
        plan.drafted = if is_block { Drafted::Block } else { Drafted::Levels(passes) };
        self.is_grown = chosen.is_empty() || passes == self.shape.depth() || !may_go_on;
        let first = self.first;
        let reading = |c: &Candidate| Reading { token: c.token, parent: first + c.of, after: c.of };
        self.readings = chosen.iter().map(reading).collect();
        self.nodes = rows.into_iter().zip(chosen.iter().map(|candidate| candidate.path)).collect();
        self.first += nodes.len();
        self.level = passes;
        Ok(())
    }

    /// Children of one level: every chosen node is part of the tree and is read.
    fn certain(
        &mut self,
        model: &dyn DraftModel,
        plan: &Plan<'_>,
        nodes: &[Expandable],
    ) -> (Vec<Candidate>, Vec<usize>) {
        let scored = score(model, nodes, widest(&self.shape), plan.confidence_threshold);
        let (each, count) = match &self.shape {
            DraftShape::Static { widths } => (widths[self.level], widths[self.level]),
            DraftShape::Sampled { children } => {
                (children[self.level], nodes.len() * children[self.level])
            }
            _ => (1, 1),
        };
        let mut chosen = best(&scored, each, count);
        chosen.retain(|candidate| pays(plan, candidate));
        let rows = add(&mut self.tree, nodes, &chosen);
        (chosen, rows)
    }

    /// Expands the best `width` nodes of a level to `width` children each; of all of them the best `budget` are kept
    /// in the end. Where reading is free, every node is expanded that can be among the best, to all children that
    /// can: the tree then holds the `budget` most likely paths.
    fn dynamic(
        &mut self,
        model: &dyn DraftModel,
        plan: &Plan<'_>,
        nodes: &[Expandable],
        (width, budget): (usize, usize),
    ) -> (Vec<Candidate>, Vec<usize>) {
        let is_free = model.block_len().is_some();
        let each = if is_free { budget } else { width };
        let scored = score(model, nodes, each, plan.confidence_threshold);
        let mut all = best(&scored, each, if is_free { budget } else { usize::MAX });
        all.retain(|candidate| pays(plan, candidate));
        // No level has more than the budget among the tree's best.
        all.truncate(budget.max(width));
        if is_free {
            // Paths never grow likelier: what comes after so many others leads to nothing.
            let among_best = |(place, candidate): &(usize, &Candidate)| {
                let least = candidate.path.log_prob;
                let before = self.tree.nodes().iter().filter(|node| node.log_prob >= least).count();
                before + place < budget
            };
            let kept = all.iter().enumerate().take_while(among_best).count();
            all.truncate(kept);
        }
        let rows = add(&mut self.tree, nodes, &all);
        if !is_free {
            all.truncate(width);
        }
        (all, rows)
    }

    /// Drawn children of one level, without replacement. A node has none where the draft's confidence, which no
    /// child has a part in, is too low.
    fn drawn(
        &mut self,
        model: &dyn DraftModel,
        vocabulary: usize,
        plan: &mut Plan<'_>,
        nodes: &[Expandable],
    ) -> (Vec<Candidate>, Vec<usize>) {
        let count = match &self.shape {
            DraftShape::Sampled { children } => children[self.level],
            _ => 1,
        };
        let (mut chosen, mut rows) = (Vec::new(), Vec::new());
        // A block's nodes of a level share their logits, and so their distribution.
        let mut known: Option<(&Logits, Vec<f64>, Arc<Distribution>)> = None;
        for (of, node) in nodes.iter().enumerate() {
            let confidence = node.forecast.confidence;
            if confidence.is_some_and(|confidence| !draws_after(node, confidence, plan)) {
                continue;
            }
            let logits = &node.forecast.logits;
            let is_known = matches!(
                (&known, logits),
                (Some((Logits::All(before), ..)), Logits::All(values)) if Arc::ptr_eq(before, values)
            );
            if !is_known {
                let made = distribution_of(model, logits, vocabulary, plan.sampling);
                known = made.map(|(all, held)| (logits, all, Arc::new(held)));
            }
            // Logits that are no numbers make no distribution: such a draft proposes nothing.
            let Some((_, distribution, held)) = &known else { continue };
            let drawn = draw_children(distribution, count, node.row, plan);
            let probability = |token: &TargetTokenId| distribution[token.0 as usize];
            let first = drawn.first().map_or(0.0, probability);
            for (place, token) in drawn.iter().enumerate() {
                let own = probability(token);
                let log_prob = node.path.log_prob + own.ln() as f32;
                let row = self.tree.push_drawn(node.row, *token, log_prob);
                // A token's own probability is no chance that it is kept.
                let chance = confidence.map_or(1.0, |_| chance_of(confidence, place, own, first));
                let path = Likelihood { log_prob, chance: node.path.chance * chance };
                if confidence.is_some() {
                    self.tree.set_chance(row, path.chance);
                }
                rows.push(row);
                chosen.push(Candidate { of, token: *token, path });
            }
            self.tree.set_distribution(node.row, Arc::clone(held));
        }
        (chosen, rows)
    }
}

/// The distribution `[V]` of a draft's logits, and what is held of it, unless they make none.
fn distribution_of(
    model: &dyn DraftModel,
    logits: &Logits,
    vocabulary: usize,
    sampling: &Sampling,
) -> Option<(Vec<f64>, Distribution)> {
    let map = model.vocabulary();
    let of_target = over_target(map, logits, vocabulary);
    let adjusted = sampling.adjusted(&of_target, std::iter::empty());
    let all = sampling.distribution(&adjusted).ok()?;
    let held = Distribution::made(&all, sampling, || match (logits, &adjusted) {
        (Logits::All(values), Cow::Borrowed(_)) if map.is_none() => Arc::clone(values),
        _ => Arc::new(adjusted.to_vec()),
    });
    Some((all, held))
}

/// Whether children are drawn after a node of this confidence.
fn draws_after(node: &Expandable, confidence: f64, plan: &Plan<'_>) -> bool {
    let pays = |worth: &Worth| worth.pays(node.path.chance * confidence);
    confidence >= plan.confidence_threshold && plan.worth.as_ref().is_none_or(pays)
}

/// At most `count` different tokens of `distribution`, each from what the ones before it left.
pub fn draw_children(
    distribution: &[f64],
    count: usize,
    row: usize,
    plan: &mut Plan<'_>,
) -> Vec<TargetTokenId> {
    let mut left = Cow::Borrowed(distribution);
    let mut drawn = Vec::with_capacity(count);
    for child in 0..count {
        let place = Place {
            purpose: Purpose::Draft,
            round: plan.position,
            row: row as u64,
            child: child as u64,
        };
        let token = plan.draws.choose(place, &left);
        drawn.push(TargetTokenId(token as u32));
        if child + 1 == count {
            break;
        }
        let left = left.to_mut();
        left[token] = 0.0;
        if normalise(left) <= 0.0 {
            break;
        }
    }
    drawn
}

/// Whether a certain node pays its row, as far as that is measured.
fn pays(plan: &Plan<'_>, candidate: &Candidate) -> bool {
    plan.worth.as_ref().is_none_or(|worth| worth.pays(candidate.path.chance))
}

/// Adds certain children and returns their rows.
fn add(tree: &mut Tree, nodes: &[Expandable], chosen: &[Candidate]) -> Vec<usize> {
    let rows = chosen.iter().map(|Candidate { of, token, path }| {
        let row = tree.push(nodes[*of].row, *token, path.log_prob, Origin::Draft);
        tree.set_chance(row, path.chance);
        row
    });
    rows.collect()
}

/// Whether reading `frontier` promises enough.
fn another_level(worth: Option<&Worth>, frontier: &[Candidate]) -> bool {
    worth.is_none_or(|worth| {
        let reached: f64 = frontier.iter().map(|c| worth.expected(c.path.chance)).sum();
        reached.min(1.0) >= worth.level
    })
}

/// Children that one node can have in a level at most.
fn widest(shape: &DraftShape) -> usize {
    match shape {
        DraftShape::Chain { .. } => 1,
        DraftShape::Static { widths: levels } | DraftShape::Sampled { children: levels } => {
            levels.iter().copied().max().unwrap_or(1)
        }
        DraftShape::Dynamic { width, .. } => *width,
    }
}

/// Draft logits at the places of the target's vocabulary; what the draft cannot say is −∞.
fn over_target<'l>(
    map: Option<&VocabularyMap>,
    logits: &'l Logits,
    vocabulary: usize,
) -> Cow<'l, [f32]> {
    let token = |column: usize| map.map_or(column, |map| map.kept()[column].0 as usize);
    let spread = |all: &mut dyn Iterator<Item = (usize, f32)>| {
        let mut spread = vec![f32::NEG_INFINITY; vocabulary];
        all.for_each(|(column, logit)| spread[token(column)] = logit);
        Cow::Owned(spread)
    };
    match logits {
        Logits::All(values) if map.is_none() => Cow::Borrowed(values),
        Logits::All(values) => spread(&mut values.iter().copied().enumerate()),
        Logits::Some { columns, values } => {
            let columns = columns.iter().map(|column| *column as usize);
            spread(&mut columns.zip(values.iter().copied()))
        }
    }
}
