//! Which charts a report shows of training, and from which records.

use super::axes::Place;
use super::chart::{Chart, Curve, Horizontal, Scale, Style};
use super::decoding;
use super::figures::{Figure, Part};
use super::ink::Ink;
use super::metrics_log::{Agreement, StepRecord};
use super::run::{Run, Stage};
use super::section::{Card, Section, held_out_ink, over_training};
use super::series::{Point, point, smooth};

/// Delays shown at most: no draft looks further.
const MOST_DELAYS: usize = 32;

const NATS: &str = "nats per learned row";
const PER_PASS: &str = "tokens per target pass";

/// Figures of a training step or an evaluation, one for each delay.
type OfDelays = fn(&Agreement) -> &[Option<f64>];

/// Figure of a training step.
type OfStep = fn(&StepRecord) -> Option<f64>;

/// Every section that has something to show: decoding, training, the machine.
pub(crate) fn sections(runs: &[Run]) -> Vec<Section> {
    let mut sections = vec![decoding::section(runs)];
    sections.extend(training(runs));
    sections.extend([by_delay(runs), at_the_end(runs), machine(runs)]);
    for section in &mut sections {
        section.cards.retain(|card| !card.chart.is_empty());
    }
    sections.retain(|section| !section.cards.is_empty());
    sections
}

/// What compares training and held-out rows, and the same figures in other senses.
fn training(runs: &[Run]) -> [Section; 2] {
    let figure = |name: &str, unit, of| Figure {
        name: name.to_owned(),
        unit,
        scale: Scale::Fitting,
        parts: Part::only(of),
        against: |quantities| &quantities.loss,
        every_step: true,
        with_target: false,
    };
    let length = Figure {
        against: |quantities| &quantities.agreement,
        ..figure("Simulated acceptance length, greedy", PER_PASS, |a| a.simulated_acceptance_length)
    };
    let hard = Figure {
        against: |quantities| &quantities.hard_loss,
        with_target: true,
        ..figure("Hard loss", NATS, |a| a.hard_loss)
    };
    let sampling = Figure {
        against: |quantities| &quantities.acceptance,
        ..figure("Simulated acceptance length, sampling", PER_PASS, |a| {
            a.simulated_acceptance_length_sampling
        })
    };
    let recall = Figure {
        scale: Scale::Share,
        against: |quantities| &quantities.agreement,
        ..figure("Candidate recall", "share of rows", |a| a.candidate_recall)
    };
    let selector = figure("Selector loss", NATS, |a| a.selector_loss);
    let mut loss = figure("Loss", NATS, |a| a.loss).cards(runs);
    let mut first = length.cards(runs);
    // The loss against which the draft was trained comes first, other senses of it below.
    let trained = loss.iter().position(|card| !card.chart.is_empty()).map(|at| loss.remove(at));
    first.extend(trained);
    let mut others = hard.cards(runs);
    others.extend(loss);
    others.extend(sampling.cards(runs));
    others.extend([recall, selector].iter().flat_map(|figure| figure.cards(runs)));
    let shown = Section {
        title: "Training",
        note: "Faint: every logged step. Line: smoothed. Dots: held-out rows. A chart holds one \
               quantity: what it was measured against stands above it. Simulated acceptance \
               length: tokens per target pass that chains of full length would bring if \
               positions were independent of each other."
            .into(),
        legend: kinds(runs),
        cards: first,
        is_folded: false,
    };
    let folded = Section {
        title: "More losses, and sampling",
        note: "Hard loss: that of the text’s next token, which compares runs of different \
               objectives; dashed: the target’s own. A loss against another distribution is \
               another quantity, so it has a chart of its own. Candidate recall: share of labels among \
               the tokens that a selector chooses from; its loss counts these rows."
            .into(),
        legend: kinds(runs),
        cards: others,
        is_folded: true,
    };
    [shown, folded]
}

/// One run: a colour for each delay in one chart. Several: a chart for each delay.
fn by_delay(runs: &[Run]) -> Section {
    let delays = (0..delays(runs)).collect::<Vec<_>>();
    let agreement = |name: &str, of: OfDelays| Figure {
        name: name.to_owned(),
        unit: "share of rows",
        scale: Scale::Share,
        parts: parts(runs, &delays, of),
        against: |quantities| &quantities.agreement,
        every_step: false,
        with_target: false,
    };
    let top1 = agreement("Top-1 agreement", |a| &a.top1_by_delay);
    let acceptance = Figure {
        unit: "Σ min(p, q)",
        against: |quantities| &quantities.acceptance,
        ..agreement("Acceptance rate", |a| &a.acceptance_by_delay)
    };
    let steps = Figure {
        unit: NATS,
        scale: Scale::Fitting,
        against: |quantities| &quantities.loss,
        ..agreement("Loss by step", |a| &a.loss_by_step)
    };
    let figures = [top1, acceptance, steps];
    let cards = if runs.len() == 1 {
        figures.iter().flat_map(|figure| figure.cards(runs)).collect()
    } else {
        figures.into_iter().flat_map(|figure| of_each_part(runs, figure)).collect()
    };
    let legend = match runs {
        [_] => delays.iter().map(|d| (Ink::Series(*d), format!("position {}", d + 1))).collect(),
        _ => Vec::new(),
    };
    Section {
        title: "Agreement by draft position, over training",
        note:
            "Position d: the d-th token that the draft writes after the target’s last one. Top-1 \
               agreement: share of rows where draft and target have the same most likely token. \
               Acceptance rate: the mean overlap of their distributions. Loss by step: of drafts that \
               train over several steps, before the step’s weight. Line: training rows, smoothed. \
               Dots: held-out rows."
                .into(),
        legend,
        cards,
        is_folded: true,
    }
}

/// A part for each delay: with its own colour where there is one run.
fn parts(runs: &[Run], delays: &[usize], of: OfDelays) -> Vec<Part> {
    let part = |delay: usize| Part {
        label: format!("position {}", delay + 1),
        ink: (runs.len() == 1).then_some(Ink::Series(delay)),
        of: Box::new(move |agreement| of(agreement).get(delay).copied().flatten()),
    };
    delays.iter().map(|delay| part(*delay)).collect()
}

/// The cards of every part by itself.
fn of_each_part(runs: &[Run], figure: Figure) -> Vec<Card> {
    let Figure { name, unit, scale, against, every_step, with_target, parts } = figure;
    let single = |mut part: Part| {
        let name = format!("{name}, {}", std::mem::take(&mut part.label));
        let parts = vec![part];
        Figure { name, unit, scale, parts, against, every_step, with_target }.cards(runs)
    };
    parts.into_iter().flat_map(single).collect()
}

/// The last evaluation of the last evaluated stage, over the positions.
fn at_the_end(runs: &[Run]) -> Section {
    let card = |title: &str, of: OfDelays, y_title: &str| {
        let curves = each_run(runs, |run, ink| {
            let last = run.stages.iter().rev().find_map(|stage| stage.log.held_out.last());
            let rates = last.map_or(&[][..], |record| of(&record.held_out));
            let points = rates.iter().take(MOST_DELAYS).enumerate();
            let points =
                points.filter_map(|(i, y)| point(Place::fixed((i + 1) as f64), *y)).collect();
            let label = run.name.clone();
            vec![Curve { label, ink, style: Style::Dots, segments: vec![points] }]
        });
        let across = Horizontal::Counts("draft position");
        let chart = Chart::of(across, y_title, Scale::Share, curves);
        Card { title: title.into(), detail: "held-out rows".into(), chart }
    };
    Section {
        title: "Agreement by draft position, after training",
        note: "The last evaluation of each run.".into(),
        legend: Vec::new(),
        cards: vec![
            card("Top-1 agreement by position", |a| &a.top1_by_delay, "share of rows"),
            card("Acceptance rate by position", |a| &a.acceptance_by_delay, "Σ min(p, q)"),
        ],
        is_folded: runs.len() == 1,
    }
}

fn machine(runs: &[Run]) -> Section {
    let card = |title: &str, unit: &str, scale, curves| {
        let chart = over_training(runs, unit, scale, curves);
        Card { title: title.into(), detail: String::new(), chart }
    };
    let plain = |of: OfStep| {
        each_run(runs, |run, ink| {
            let segments = run.segments(|stage| of_steps(stage, of));
            vec![Curve { label: run.name.clone(), ink, style: Style::Line, segments }]
        })
    };
    let norm = train_curves(runs, |record| record.grad_norm);
    let speed = train_curves(runs, |record| record.tokens_per_second);
    let share = train_curves(runs, |record| record.learned_share);
    Section {
        title: "Optimizer and machine",
        note: "The gradient norm is that before clipping. Learned share: rows that the loss \
               counts, of all tokens. Memory: the largest resident set of the process so far."
            .into(),
        legend: Vec::new(),
        cards: vec![
            card("Learning rate", "learning rate", Scale::FromZero, plain(|r| r.learning_rate)),
            card("Gradient norm", "L2 norm", Scale::Fitting, norm),
            card("Throughput", "tokens/s", Scale::FromZero, speed),
            card("Learned share", "share of tokens", Scale::Share, share),
            card("Peak memory", "MiB", Scale::FromZero, plain(|r| r.memory_mib)),
        ],
        is_folded: true,
    }
}

fn delays(runs: &[Run]) -> usize {
    let stages = runs.iter().flat_map(|run| &run.stages);
    stages
        .flat_map(|stage| {
            let steps = stage.log.steps.iter().map(|record| &record.agreement);
            steps.chain(stage.log.held_out.iter().map(|record| &record.held_out))
        })
        .map(|agreement| agreement.top1_by_delay.len().max(agreement.acceptance_by_delay.len()))
        .max()
        .unwrap_or(0)
        .min(MOST_DELAYS)
}

fn each_run(runs: &[Run], curves: impl Fn(&Run, Ink) -> Vec<Curve>) -> Vec<Curve> {
    runs.iter().enumerate().flat_map(|(i, run)| curves(run, Ink::Series(i))).collect()
}

/// Legend of training and held-out rows, where these differ in colour.
fn kinds(runs: &[Run]) -> Vec<(Ink, String)> {
    let [run] = runs else { return Vec::new() };
    if run.stages.iter().all(|stage| stage.log.held_out.is_empty()) {
        return Vec::new();
    }
    let train = Ink::Series(0);
    vec![(train, "training rows".into()), (held_out_ink(runs, train), "held-out rows".into())]
}

fn train_curves(runs: &[Run], of: OfStep) -> Vec<Curve> {
    each_run(runs, |run, ink| {
        let every = run.segments(|stage| of_steps(stage, of));
        let smoothed = every.iter().map(|segment| smooth(segment)).collect();
        let label = format!("{}, smoothed", run.name);
        vec![
            Curve { label: String::new(), ink, style: Style::Faint, segments: every },
            Curve { label, ink, style: Style::Line, segments: smoothed },
        ]
    })
}

fn of_steps(stage: &Stage, of: impl Fn(&StepRecord) -> Option<f64>) -> Vec<Point> {
    let records = stage.log.steps.iter();
    records.filter_map(|record| point(record.place(), of(record))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::axes::TrainingAxis;
    use crate::metrics_log::{HeldOutRecord, MetricsLog};

    fn agreement(rate: f64) -> Agreement {
        Agreement {
            loss: Some(3.0),
            hard_loss: Some(2.0),
            top1_by_delay: vec![Some(rate), Some(rate / 2.0)],
            ..Agreement::default()
        }
    }

    fn stage(name: Option<&str>, tokens: u64) -> Stage {
        let steps = (1..=10)
            .map(|step| StepRecord {
                step,
                tokens: tokens * step / 10,
                agreement: agreement(0.1),
                ..StepRecord::default()
            })
            .collect();
        let held_out = vec![HeldOutRecord { step: 10, held_out: agreement(0.4) }];
        let log = MetricsLog { steps, held_out, problems: Vec::new() };
        Stage { name: name.map(str::to_owned), round: 0, log, config: None }
    }

    fn run(stages: Vec<Stage>) -> Run {
        Run { name: "r".into(), stages, ..Run::default() }
    }

    fn titles(runs: &[Run]) -> Vec<String> {
        sections(runs)
            .iter()
            .flat_map(|section| &section.cards)
            .map(|card| card.title.clone())
            .collect()
    }

    #[test]
    fn charts_without_records_are_left_out() {
        let titles = titles(&[run(vec![stage(None, 100)])]);
        assert!(titles.contains(&"Hard loss".to_owned()), "{titles:?}");
        assert!(!titles.contains(&"Peak memory".to_owned()), "{titles:?}");
        assert!(!titles.contains(&"Learning rate".to_owned()), "{titles:?}");
    }

    #[test]
    fn stages_follow_each_other_on_the_axis_with_a_mark() {
        let runs = [run(vec![stage(Some("base"), 100), stage(Some("long"), 50)])];
        let sections = sections(&runs);
        let chart = &sections[0].cards[0].chart;
        let marks: Vec<_> =
            chart.marks.iter().map(|mark| (mark.at.tokens, mark.label.as_str())).collect();
        assert_eq!(marks, [(0.0, "base"), (100.0, "long")]);
        let ends = |axis| chart.curves[0].segments.iter().map(|s| s[9].at.on(axis)).collect();
        let ends: [Vec<f64>; 2] = [TrainingAxis::Tokens, TrainingAxis::Steps].map(ends);
        assert_eq!(ends, [vec![100.0, 150.0], vec![10.0, 20.0]]);
    }
}
