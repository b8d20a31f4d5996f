//! Which charts a report shows, and from which records.

use super::decoding;
use super::ink::Ink;
use super::metrics_log::{Agreement, StepRecord};
use super::plot::{Chart, Curve, Mark, Scale, Style};
use super::run::{Run, Stage};
use super::series::{Point, smooth};

/// Delays shown at most: no draft looks further.
const MOST_DELAYS: usize = 32;

const TOKENS: &str = "training tokens";

/// Charts under one heading.
pub(crate) struct Section {
    /// Heading.
    pub(crate) title: &'static str,
    /// What one must know to read them.
    pub(crate) note: String,
    /// Colours that are not those of the runs.
    pub(crate) legend: Vec<(Ink, String)>,
    /// None of them empty.
    pub(crate) charts: Vec<(String, Chart)>,
}

/// Figures of a training step or an evaluation, one for each delay.
type OfDelays = fn(&Agreement) -> &[Option<f64>];

/// Figure of a training step.
type OfStep = fn(&StepRecord) -> Option<f64>;

/// Every section that has something to show.
pub(crate) fn sections(runs: &[Run]) -> Vec<Section> {
    let mut sections = vec![loss(runs), length(runs), by_delay(runs), at_the_end(runs)];
    sections.extend([decoding::section(runs), optimizer(runs), machine(runs)]);
    for section in &mut sections {
        section.charts.retain(|(_, chart)| !chart.is_empty());
    }
    sections.retain(|section| !section.charts.is_empty());
    sections
}

fn loss(runs: &[Run]) -> Section {
    let mut hard = both(runs, |agreement| agreement.hard_loss);
    hard.extend(each_run(runs, |run, ink| {
        let target = segments(run, |stage| of_steps(stage, |record| record.target_loss));
        vec![Curve { ink, style: Style::Dashed, segments: target }]
    }));
    let mut total = train_curves(runs, |record| record.loss);
    total.extend(each_run(runs, |run, ink| {
        let held_out = segments(run, |stage| {
            // Runs of before the held-out loss was logged have its parts.
            let weight = stage.soft_weight();
            of_held_out(stage, |agreement| {
                if agreement.loss.is_some() {
                    return agreement.loss;
                }
                let weight = weight?;
                Some((1.0 - weight) * agreement.hard_loss? + weight * agreement.soft_loss?)
            })
        });
        vec![Curve { ink: held_out_ink(runs, ink), style: Style::Dots, segments: held_out }]
    }));
    let unit = "nats per learned row";
    Section {
        title: "Loss",
        note: "Faint: every logged step. Line: smoothed. Dots: held-out rows. Dashed: the \
               target’s own loss on the same rows. The loss mixes hard and soft loss as each \
               run’s objective says; the hard loss compares runs whose objectives differ."
            .into(),
        legend: kinds(runs),
        charts: vec![
            ("Loss".into(), over_tokens(runs, unit, Scale::Fitting, total)),
            ("Hard loss".into(), over_tokens(runs, unit, Scale::Fitting, hard)),
        ],
    }
}

fn length(runs: &[Run]) -> Section {
    let chart = |of| over_tokens(runs, "tokens per target pass", Scale::Fitting, both(runs, of));
    Section {
        title: "Simulated acceptance length",
        note: "1 + Σ Π a over the delays, the target’s own token included: what chains of full \
               length would commit per target pass if positions were independent."
            .into(),
        legend: kinds(runs),
        charts: vec![
            ("Greedy (a: top-1 agreement)".into(), chart(|a| a.simulated_acceptance_length)),
            ("Sampling (a: Σ min(p, q))".into(), chart(|a| a.simulated_acceptance_length_sampling)),
        ],
    }
}

/// One run: a colour for each delay in one chart. Several: a chart for each delay.
fn by_delay(runs: &[Run]) -> Section {
    let delays = (0..delays(runs)).collect::<Vec<_>>();
    let rates: [(&str, &str, Scale, OfDelays); 3] = [
        ("Top-1 agreement", "share of rows", Scale::Share, |a| &a.top1_by_delay),
        ("Acceptance", "Σ min(p, q)", Scale::Share, |a| &a.acceptance_by_delay),
        ("Loss by step", "nats per learned row", Scale::Fitting, |a| &a.loss_by_step),
    ];
    let mut charts = Vec::new();
    for (name, y_title, scale, of) in rates {
        let at = |delay: usize| move |a: &Agreement| of(a).get(delay).copied().flatten();
        if let [run] = runs {
            let curves = delays
                .iter()
                .flat_map(|delay| smoothed_and_held_out(run, Ink::Series(*delay), at(*delay)))
                .collect();
            charts.push((name.to_owned(), over_tokens(runs, y_title, scale, curves)));
        } else {
            charts.extend(delays.iter().map(|delay| {
                let curves = each_run(runs, |run, ink| smoothed_and_held_out(run, ink, at(*delay)));
                let title = format!("{name}, position {}", delay + 1);
                (title, over_tokens(runs, y_title, scale, curves))
            }));
        }
    }
    let legend = match runs {
        [_] => delays.iter().map(|d| (Ink::Series(*d), format!("position {}", d + 1))).collect(),
        _ => Vec::new(),
    };
    Section {
        title: "Agreement by draft position",
        note: "Position d is delay d: the draft writes its d-th token after the target’s last \
               one. Top-1: share of rows where draft and target have the same most likely token. \
               Acceptance: mean overlap of their laws. Loss by step: EAGLE-3’s, before the \
               step’s weight. Line: training rows, smoothed. Dots: \
               held-out rows."
            .into(),
        legend,
        charts,
    }
}

/// The last evaluation of the last evaluated stage, over the positions.
fn at_the_end(runs: &[Run]) -> Section {
    let chart = |of: OfDelays, y_title: &str| {
        let curves = each_run(runs, |run, ink| {
            let last = run.stages.iter().rev().find_map(|stage| stage.log.held_out.last());
            let rates = last.map_or(&[][..], |record| of(&record.held_out));
            let points = rates.iter().take(MOST_DELAYS).enumerate();
            let points = points.filter_map(|(i, y)| point((i + 1) as f64, *y)).collect();
            vec![Curve { ink, style: Style::Dots, segments: vec![points] }]
        });
        Chart {
            x_title: "draft position",
            x_counts: true,
            y_title: y_title.into(),
            scale: Scale::Share,
            curves,
            marks: Vec::new(),
        }
    };
    Section {
        title: "Held-out agreement at the end",
        note: "The last evaluation of each run.".into(),
        legend: Vec::new(),
        charts: vec![
            ("Top-1 agreement".into(), chart(|a| &a.top1_by_delay, "share of rows")),
            ("Acceptance".into(), chart(|a| &a.acceptance_by_delay, "Σ min(p, q)")),
        ],
    }
}

fn optimizer(runs: &[Run]) -> Section {
    let rate = each_run(runs, |run, ink| {
        let segments = segments(run, |stage| of_steps(stage, |record| record.learning_rate));
        vec![Curve { ink, style: Style::Line, segments }]
    });
    let norm = train_curves(runs, |record| record.grad_norm);
    Section {
        title: "Optimizer",
        note: "The gradient norm is that before clipping.".into(),
        legend: Vec::new(),
        charts: vec![
            ("Learning rate".into(), over_tokens(runs, "learning rate", Scale::FromZero, rate)),
            ("Gradient norm".into(), over_tokens(runs, "L2 norm", Scale::Fitting, norm)),
        ],
    }
}

fn machine(runs: &[Run]) -> Section {
    let memory = each_run(runs, |run, ink| {
        let segments = segments(run, |stage| of_steps(stage, |record| record.memory_mib));
        vec![Curve { ink, style: Style::Line, segments }]
    });
    let chart = |unit, scale, of| over_tokens(runs, unit, scale, train_curves(runs, of));
    let speed = chart("tokens/s", Scale::FromZero, |record| record.tokens_per_second);
    let share = chart("share of tokens", Scale::Share, |record| record.learned_share);
    Section {
        title: "Data and machine",
        note: "Learned share: rows that the loss counts, of all tokens. Memory: the largest \
               resident set of the process so far."
            .into(),
        legend: Vec::new(),
        charts: vec![
            ("Throughput".into(), speed),
            ("Learned share".into(), share),
            ("Peak memory".into(), over_tokens(runs, "MiB", Scale::FromZero, memory)),
        ],
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

fn over_tokens(runs: &[Run], y_title: &str, scale: Scale, curves: Vec<Curve>) -> Chart {
    // Smoothed over faint, whatever the run.
    let (mut faint, others): (Vec<Curve>, Vec<Curve>) =
        curves.into_iter().partition(|curve| curve.style == Style::Faint);
    faint.extend(others);
    Chart {
        x_title: TOKENS,
        x_counts: false,
        y_title: y_title.into(),
        scale,
        curves: faint,
        marks: marks(runs),
    }
}

/// Where the stages of curricula begin; a place where several runs begin a stage is marked once.
fn marks(runs: &[Run]) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    for (x, stage) in runs.iter().flat_map(Run::stages_on_axis) {
        let Some(name) = &stage.name else { continue };
        match marks.iter_mut().find(|mark| mark.x.total_cmp(&x).is_eq()) {
            Some(mark) if !mark.label.split(" · ").any(|label| label == name) => {
                mark.label = format!("{} · {name}", mark.label);
            }
            Some(_) => {}
            None => marks.push(Mark { x, label: name.clone() }),
        }
    }
    marks.sort_by(|a, b| a.x.total_cmp(&b.x));
    marks
}

fn each_run(runs: &[Run], curves: impl Fn(&Run, Ink) -> Vec<Curve>) -> Vec<Curve> {
    runs.iter().enumerate().flat_map(|(i, run)| curves(run, Ink::Series(i))).collect()
}

/// Colour of held-out rows: a single run has colours to spare.
fn held_out_ink(runs: &[Run], ink: Ink) -> Ink {
    if runs.len() == 1 { Ink::Series(1) } else { ink }
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
        let every = segments(run, |stage| of_steps(stage, of));
        let smoothed = every.iter().map(|segment| smooth(segment)).collect();
        vec![
            Curve { ink, style: Style::Faint, segments: every },
            Curve { ink, style: Style::Line, segments: smoothed },
        ]
    })
}

/// Training rows, every record and smoothed, and held-out rows.
fn both(runs: &[Run], of: fn(&Agreement) -> Option<f64>) -> Vec<Curve> {
    each_run(runs, |run, ink| {
        let every = segments(run, |stage| of_steps(stage, |record| of(&record.agreement)));
        let mut curves = vec![Curve { ink, style: Style::Faint, segments: every }];
        let mut others = smoothed_and_held_out(run, ink, of);
        others[1].ink = held_out_ink(runs, ink);
        curves.append(&mut others);
        curves
    })
}

fn smoothed_and_held_out(
    run: &Run,
    ink: Ink,
    of: impl Fn(&Agreement) -> Option<f64>,
) -> Vec<Curve> {
    let trained = segments(run, |stage| smooth(&of_steps(stage, |record| of(&record.agreement))));
    let held_out = segments(run, |stage| of_held_out(stage, &of));
    vec![
        Curve { ink, style: Style::Line, segments: trained },
        Curve { ink, style: Style::Dots, segments: held_out },
    ]
}

/// A segment for each stage, moved to its place on the axis.
fn segments(run: &Run, points: impl Fn(&Stage) -> Vec<Point>) -> Vec<Vec<Point>> {
    run.stages_on_axis()
        .map(|(start, stage)| {
            let mut points = points(stage);
            points.iter_mut().for_each(|point| point.x += start);
            points
        })
        .collect()
}

fn of_steps(stage: &Stage, of: impl Fn(&StepRecord) -> Option<f64>) -> Vec<Point> {
    let records = stage.log.steps.iter();
    records.filter_map(|record| point(record.tokens as f64, of(record))).collect()
}

fn of_held_out(stage: &Stage, of: impl Fn(&Agreement) -> Option<f64>) -> Vec<Point> {
    let records = stage.log.held_out.iter();
    records
        .filter_map(|record| point(stage.log.tokens_at(record.step), of(&record.held_out)))
        .collect()
}

pub(super) fn point(x: f64, y: Option<f64>) -> Option<Point> {
    let y = y.filter(|y| y.is_finite())?;
    Some(Point { x, y })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::report::metrics_log::{HeldOutRecord, MetricsLog};

    fn agreement(rate: f64) -> Agreement {
        Agreement {
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
                loss: Some(3.0),
                agreement: agreement(0.1),
                ..StepRecord::default()
            })
            .collect();
        let held_out = vec![HeldOutRecord { step: 10, held_out: agreement(0.4) }];
        let log = MetricsLog { steps, held_out, problems: Vec::new() };
        Stage { name: name.map(str::to_owned), log, config: None }
    }

    fn run(stages: Vec<Stage>) -> Run {
        Run {
            name: "r".into(),
            folder: PathBuf::from("r"),
            stages,
            decoding: None,
            problems: Vec::new(),
        }
    }

    fn titles(runs: &[Run]) -> Vec<String> {
        sections(runs).iter().flat_map(|section| &section.charts).map(|c| c.0.clone()).collect()
    }

    #[test]
    fn charts_without_records_are_left_out() {
        let titles = titles(&[run(vec![stage(None, 100)])]);
        assert!(titles.contains(&"Hard loss".to_owned()), "{titles:?}");
        assert!(!titles.contains(&"Peak memory".to_owned()), "{titles:?}");
        assert!(!titles.contains(&"Learning rate".to_owned()), "{titles:?}");
    }

    #[test]
    fn several_runs_get_a_chart_for_each_position() {
        let titles = titles(&[run(vec![stage(None, 100)]), run(vec![stage(None, 50)])]);
        assert!(titles.contains(&"Top-1 agreement, position 2".to_owned()), "{titles:?}");
        assert!(!titles.contains(&"Top-1 agreement, position 3".to_owned()), "{titles:?}");
    }

    #[test]
    fn stages_follow_each_other_on_the_axis_with_a_mark() {
        let runs = [run(vec![stage(Some("base"), 100), stage(Some("long"), 50)])];
        let sections = sections(&runs);
        let (_, chart) = &sections[0].charts[0];
        let marks: Vec<(f64, &str)> =
            chart.marks.iter().map(|mark| (mark.x, mark.label.as_str())).collect();
        assert_eq!(marks, [(0.0, "base"), (100.0, "long")]);
        let ends: Vec<f64> = chart.curves[0].segments.iter().map(|s| s[9].x).collect();
        assert_eq!(ends, [100.0, 150.0]);
    }

    #[test]
    fn held_out_loss_needs_the_soft_weight() {
        let mut stage = stage(None, 100);
        stage.log.held_out[0].held_out.soft_loss = Some(1.0);
        let dots = |stage: &Stage| {
            let section = loss(&[run(vec![stage.clone()])]);
            let curves = section.charts[0].1.curves.iter();
            curves
                .filter(|curve| curve.style == Style::Dots)
                .flat_map(|curve| curve.segments.concat())
                .collect::<Vec<Point>>()
        };
        assert!(dots(&stage).is_empty());
        let value = Some(serde_json::json!({"objective": {"soft_weight": 0.25}}));
        stage.config = Some(crate::report::run::Config { text: String::new(), value });
        assert_eq!(dots(&stage), [Point { x: 100.0, y: 1.75 }]);
    }
}
