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

use self::score::{Candidate, Expandable, Likelihood, Scored, best, chance_of, score};
use super::{DraftContext, DraftModel, Drafted, Logits, Plan, Reading, Worth};
use crate::distribution::normalise;
use crate::draws::{Place, Purpose};
use crate::error::Result;
use crate::shape::DraftShape;
use crate::tree::{Origin, Tree};

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
        let scored = score(model, &nodes, most, plan.confidence_threshold);
        let mut chosen = choose(level, &scored);
        chosen.retain(|candidate| pays(plan, candidate));
        let rows = add(&mut tree, &nodes, &chosen);
        if chosen.is_empty() || level + 1 == depth || !another_level(plan.worth.as_ref(), &chosen) {
            break;
        }
        nodes = read_level(model, context, &nodes, &chosen, &rows, &mut read)?;
    }
    Ok(tree)
}

/// Expands the best `width` nodes of a level to `width` children each and keeps the best `budget`
/// of all of them. Where reading is free, every node is expanded that can be among the best, to all
/// children that can: the tree then holds the `budget` most likely paths of at most `depth` tokens.
fn dynamic(
    model: &mut dyn DraftModel,
    context: DraftContext<'_>,
    plan: &Plan<'_>,
    (width, depth, budget): (usize, usize, usize),
) -> Result<Tree> {
    let is_free = model.reads_are_free();
    let each = if is_free { budget } else { width };
    let mut tree = Tree::new(context.tokens[context.tokens.len() - 1]);
    let mut nodes = vec![root(model, context, plan)?];
    let mut read = 0;
    for level in 0..depth {
        let scored = score(model, &nodes, each, plan.confidence_threshold);
        let mut all = best(&scored, each, if is_free { budget } else { usize::MAX });
        all.retain(|candidate| pays(plan, candidate));
        if is_free {
            // Paths never grow likelier: what comes after so many others leads to nothing.
            let among_best = |(place, candidate): &(usize, &Candidate)| {
                let least = candidate.path.log_prob;
                let before = tree.nodes().iter().filter(|node| node.log_prob >= least).count();
                before + place < budget
            };
            let kept = all.iter().enumerate().take_while(among_best).count();
            all.truncate(kept);
        }
        let rows = add(&mut tree, &nodes, &all);
        let frontier = &all[..if is_free { all.len() } else { width.min(all.len()) }];
        if frontier.is_empty()
            || level + 1 == depth
            || !another_level(plan.worth.as_ref(), frontier)
        {
            break;
        }
        nodes = read_level(model, context, &nodes, frontier, &rows, &mut read)?;
    }
    Ok(tree.best(budget))
}

/// Trees of drawn children, `children[d]` of each node of level d, without replacement. A node has
/// none where the draft's confidence, which no child has a part in, is too low.
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
            let confidence = node.forecast.confidence;
            if confidence.is_some_and(|confidence| !draws_after(node, confidence, plan)) {
                continue;
            }
            let logits = over_target(model.vocabulary(), &node.forecast.logits, vocabulary);
            let logits = plan.sampling.adjusted(&logits, std::iter::empty());
            // Logits that are no numbers make no distribution: such a draft proposes nothing.
            let Ok(distribution) = plan.sampling.distribution(&logits) else { continue };
            let drawn = draw_children(&distribution, count, node.row, plan);
            let probability = |token: &TargetTokenId| distribution[token.0 as usize];
            let first = drawn.first().map_or(0.0, probability);
            for (place, token) in drawn.iter().enumerate() {
                let own = probability(token);
                let log_prob = node.path.log_prob + own.ln() as f32;
                let row = tree.push_drawn(node.row, *token, log_prob);
                // A token's own probability is no chance that it is kept.
                let chance = confidence.map_or(1.0, |_| chance_of(confidence, place, own, first));
                let path = Likelihood { log_prob, chance: node.path.chance * chance };
                if confidence.is_some() {
                    tree.set_chance(row, path.chance);
                }
                rows.push(row);
                chosen.push(Candidate { of, token: *token, path });
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
            round: plan.round,
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

fn root(
    model: &mut dyn DraftModel,
    context: DraftContext<'_>,
    plan: &Plan<'_>,
) -> Result<Expandable> {
    let forecast = model.read_root(context, plan.shape.most_read())?;
    Ok(Expandable { row: 0, reading: 0, path: Likelihood::CERTAIN, forecast })
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
    let forecasts = model.read(context, &readings)?;
    let level = chosen.iter().zip(rows).zip(forecasts).enumerate();
    let level = level.map(|(i, ((candidate, &row), forecast))| Expandable {
        row,
        reading: *read + i + 1,
        path: candidate.path,
        forecast,
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
