//! How trees grow from a draft's logits.
//!
//! Certain trees are functions of the text: any node may be left out. Drawn ones are exact only if
//! every decision about a node falls before it is drawn, so their layout is fixed beforehand.

use std::sync::Arc;

use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;

use super::{DraftContext, DraftModel, Drafted, Plan, Reading, Worth};
use crate::distribution::normalise;
use crate::draws::{Place, Purpose};
use crate::error::Result;
use crate::shape::DraftShape;
use crate::tree::{Origin, Tree};

/// A node whose logits are there.
struct Expandable {
    /// Row in the tree.
    row: usize,
    /// Number of the reading, 0 for the root.
    reading: usize,
    log_prob: f32,
    logits: Vec<f32>,
}

/// A possible child.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    /// Index among the expandable nodes.
    of: usize,
    token: TargetTokenId,
    log_prob: f32,
}

/// Grows the tree that the plan asks for.
///
/// # Errors
/// - the draft cannot run, or its logits are not numbers
pub fn grow(
    model: &mut dyn DraftModel,
    context: DraftContext<'_>,
    plan: &mut Plan<'_>,
) -> Result<Tree> {
    let root = context.tokens[context.tokens.len() - 1];
    if plan.shape.depth() == 0 {
        return Ok(Tree::new(root));
    }
    let shape = plan.shape.clone();
    let tree = match &shape {
        DraftShape::Chain { length } if plan.drawn => {
            drawn(model, context, plan, &vec![1; *length])
        }
        DraftShape::Sampled { children } if plan.drawn => drawn(model, context, plan, children),
        DraftShape::Chain { length } => {
            certain(model, context, plan, *length, &mut |_, nodes| best(nodes, 1, 1))
        }
        DraftShape::Static { widths } => {
            let level =
                &mut |level: usize, nodes: &[Scored]| best(nodes, widths[level], widths[level]);
            certain(model, context, plan, widths.len(), level)
        }
        DraftShape::Sampled { children } => {
            let level = &mut |level: usize, nodes: &[Scored]| {
                best(nodes, children[level], nodes.len() * children[level])
            };
            certain(model, context, plan, children.len(), level)
        }
        DraftShape::Dynamic { width, depth, budget } => {
            dynamic(model, context, plan, (*width, *depth, *budget))
        }
    }?;
    plan.drafted = Drafted::Levels(tree.depth().max(1));
    Ok(tree)
}

/// Log-probabilities of an expandable node's children, best first.
struct Scored {
    log_prob: f32,
    children: Vec<(TargetTokenId, f32)>,
}

/// The `count` best pairs over all nodes, of at most `each` children a node: by cumulative
/// log-probability, ties to the earlier node, then the lower token.
fn best(nodes: &[Scored], each: usize, count: usize) -> Vec<Candidate> {
    let mut all: Vec<Candidate> = Vec::new();
    for (of, node) in nodes.iter().enumerate() {
        let children = node.children.iter().take(each);
        all.extend(children.map(|&(token, log_prob)| Candidate {
            of,
            token,
            log_prob: node.log_prob + log_prob,
        }));
    }
    all.sort_by(|a, b| {
        b.log_prob.total_cmp(&a.log_prob).then((a.of, a.token).cmp(&(b.of, b.token)))
    });
    all.truncate(count);
    all
}

/// Children of a level by scored nodes.
type ChooseLevel<'f> = dyn FnMut(usize, &[Scored]) -> Vec<Candidate> + 'f;

/// Certain trees level by level: every chosen node is part of the tree and is read.
fn certain(
    model: &mut dyn DraftModel,
    context: DraftContext<'_>,
    plan: &Plan<'_>,
    depth: usize,
    choose: &mut ChooseLevel<'_>,
) -> Result<Tree> {
    let most = widest(plan.shape);
    let mut tree = Tree::new(context.tokens[context.tokens.len() - 1]);
    let mut nodes = vec![root(model, context, plan)?];
    let mut read = 0;
    for level in 0..depth {
        let scored: Vec<Scored> = nodes.iter().map(|node| score(model, node, most)).collect();
        let mut chosen = choose(level, &scored);
        if let Some(worth) = &plan.worth {
            let worthy = chosen.iter().filter(|c| worth.chance(c.log_prob) >= worth.node).count();
            // The likeliest first: what is left out lies below.
            chosen.truncate(worthy);
        }
        let rows: Vec<usize> = chosen
            .iter()
            .map(|c| tree.push(nodes[c.of].row, c.token, c.log_prob, Origin::Draft))
            .collect();
        if chosen.is_empty() || level + 1 == depth || !another_level(plan.worth.as_ref(), &chosen) {
            break;
        }
        nodes = read_level(model, context, &nodes, &chosen, &rows, &mut read)?;
    }
    Ok(tree)
}

/// Expands the best `width` nodes of a level to `width` children each and keeps the best `budget`
/// of all of them.
fn dynamic(
    model: &mut dyn DraftModel,
    context: DraftContext<'_>,
    plan: &Plan<'_>,
    (width, depth, budget): (usize, usize, usize),
) -> Result<Tree> {
    let mut tree = Tree::new(context.tokens[context.tokens.len() - 1]);
    let mut nodes = vec![root(model, context, plan)?];
    let mut read = 0;
    for level in 0..depth {
        let scored: Vec<Scored> = nodes.iter().map(|node| score(model, node, width)).collect();
        let all = best(&scored, width, usize::MAX);
        let rows: Vec<usize> = all
            .iter()
            .map(|c| tree.push(nodes[c.of].row, c.token, c.log_prob, Origin::Draft))
            .collect();
        let frontier = &all[..width.min(all.len())];
        if frontier.is_empty()
            || level + 1 == depth
            || !another_level(plan.worth.as_ref(), frontier)
        {
            break;
        }
        nodes = read_level(model, context, &nodes, frontier, &rows, &mut read)?;
    }
    let worthy = plan.worth.as_ref().map_or(budget, |worth| {
        let worthy = |node: &&crate::tree::TreeNode| worth.chance(node.log_prob) >= worth.node;
        budget.min(tree.nodes().iter().filter(worthy).count())
    });
    Ok(tree.best(worthy))
}

/// Trees of drawn children, `children[d]` of each node of level d, without replacement.
fn drawn(
    model: &mut dyn DraftModel,
    context: DraftContext<'_>,
    plan: &mut Plan<'_>,
    children: &[usize],
) -> Result<Tree> {
    let vocabulary = context.target.config().vocab_size;
    let mut tree = Tree::new(context.tokens[context.tokens.len() - 1]);
    let mut nodes = vec![root(model, context, plan)?];
    let mut read = 0;
    for (level, &count) in children.iter().enumerate() {
        let (mut chosen, mut rows) = (Vec::new(), Vec::new());
        for (of, node) in nodes.iter().enumerate() {
            let logits = over_target(model.vocabulary(), &node.logits, vocabulary);
            // Logits that are no numbers make no distribution: such a draft proposes nothing.
            let Ok(distribution) = plan.sampling.distribution(&logits) else { continue };
            let drawn = draw_children(&distribution, count, node.row, plan);
            for &token in &drawn {
                let log_prob = node.log_prob + distribution[token.0 as usize].ln() as f32;
                rows.push(tree.push_drawn(node.row, token, log_prob));
                chosen.push(Candidate { of, token, log_prob });
            }
            tree.set_distribution(node.row, Arc::new(distribution));
        }
        if chosen.is_empty() || level + 1 == children.len() {
            break;
        }
        nodes = read_level(model, context, &nodes, &chosen, &rows, &mut read)?;
    }
    Ok(tree)
}

/// At most `count` different tokens of `distribution`, each from what the ones before it left.
pub fn draw_children(
    distribution: &[f64],
    count: usize,
    row: usize,
    plan: &mut Plan<'_>,
) -> Vec<TargetTokenId> {
    let mut left = distribution.to_vec();
    let mut drawn = Vec::with_capacity(count);
    for child in 0..count {
        let place = Place {
            purpose: Purpose::Draft,
            round: plan.round,
            row: row as u64,
            child: child as u64,
        };
        let token = plan.draws.choose(place, &left);
        drawn.push(TargetTokenId(token as u32));
        left[token] = 0.0;
        if normalise(&mut left) <= 0.0 {
            break;
        }
    }
    drawn
}

impl Worth {
    /// Expected chance that a path is accepted.
    fn chance(&self, log_prob: f32) -> f64 {
        (self.calibration * f64::from(log_prob).exp()).min(1.0)
    }
}

/// Whether reading `frontier` promises enough.
fn another_level(worth: Option<&Worth>, frontier: &[Candidate]) -> bool {
    worth.is_none_or(|worth| {
        let reached: f64 = frontier.iter().map(|c| worth.chance(c.log_prob)).sum();
        reached.min(1.0) >= worth.level
    })
}

fn root(
    model: &mut dyn DraftModel,
    context: DraftContext<'_>,
    plan: &Plan<'_>,
) -> Result<Expandable> {
    let logits = model.read_root(context, plan.shape.most_read())?;
    Ok(Expandable { row: 0, reading: 0, log_prob: 0.0, logits })
}

/// Reads chosen nodes, of which `rows` begins with the rows.
fn read_level(
    model: &mut dyn DraftModel,
    context: DraftContext<'_>,
    nodes: &[Expandable],
    chosen: &[Candidate],
    rows: &[usize],
    read: &mut usize,
) -> Result<Vec<Expandable>> {
    let readings: Vec<Reading> =
        chosen.iter().map(|c| Reading { token: c.token, parent: nodes[c.of].reading }).collect();
    let logits = model.read(context, &readings)?;
    let level = chosen.iter().zip(rows).zip(logits).enumerate();
    let level = level.map(|(i, ((candidate, &row), logits))| Expandable {
        row,
        reading: *read + i + 1,
        log_prob: candidate.log_prob,
        logits,
    });
    let level: Vec<Expandable> = level.collect();
    *read += level.len();
    Ok(level)
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

/// The `count` most likely children with their log-probabilities, ties to the lower id.
fn score(model: &dyn DraftModel, node: &Expandable, count: usize) -> Scored {
    let logits = &node.logits;
    let mut order: Vec<u32> = Vec::new();
    if count == 1 {
        order.push(crate::distribution::argmax(logits).0);
    } else {
        order.extend(0..logits.len() as u32);
        let by_logit =
            |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if count < order.len() {
            order.select_nth_unstable_by(count - 1, by_logit);
            order.truncate(count);
        }
        order.sort_unstable_by(by_logit);
    }
    let largest = order.first().map_or(0.0, |id| logits[*id as usize]);
    let total: f32 = logits.iter().map(|z| (z - largest).exp()).sum();
    let log_total = largest + total.ln();
    let child = |id: &u32| {
        let token = match model.vocabulary() {
            Some(map) => map.kept()[*id as usize],
            None => TargetTokenId(*id),
        };
        // Rounding must not let a path grow likelier.
        (token, (logits[*id as usize] - log_total).min(0.0))
    };
    // NaN has no order: such a draft proposes nothing.
    let children =
        if log_total.is_finite() { order.iter().map(child).collect() } else { Vec::new() };
    Scored { log_prob: node.log_prob, children }
}

/// Draft logits at the places of the target's vocabulary; what the draft cannot say is −∞.
fn over_target(map: Option<&VocabularyMap>, logits: &[f32], vocabulary: usize) -> Vec<f32> {
    let Some(map) = map else { return logits.to_vec() };
    let mut all = vec![f32::NEG_INFINITY; vocabulary];
    for (token, logit) in map.kept().iter().zip(logits) {
        all[token.0 as usize] = *logit;
    }
    all
}
