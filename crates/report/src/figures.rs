//! Which series share a chart: those of the same quantity.
//!
//! A figure of training rows and one of held-out rows may have one name and be measured against
//! different things, such as the target's whole distribution and its most likely tokens. The log says
//! against what; series stand in one chart where it says the same. Where it does not say (a method of
//! one's own), training rows and held-out rows get a chart each.

use longdraft_train::metrics::Quantities;

use super::chart::{Curve, Scale, Style};
use super::ink::Ink;
use super::metrics_log::Agreement;
use super::run::{Run, Stage};
use super::section::{Card, held_out_ink, over_training};
use super::series::{Point, point, smooth};

/// Rows that a series is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rows {
    Training,
    HeldOut,
    /// The target's own figure at training rows.
    Target,
}

/// What a chart is of.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Quantity {
    /// Measured against this.
    Known(String),
    /// Not known: of held-out rows, or of training rows.
    Unknown(Rows),
}

/// A figure that training steps and evaluations have.
pub(super) struct Figure {
    /// As its charts are called.
    pub(super) name: String,
    pub(super) unit: &'static str,
    /// Of the vertical axis.
    pub(super) scale: Scale,
    /// One for each curve that is wanted, such as those of several delays.
    pub(super) parts: Vec<Part>,
    /// Which text says what it is measured against.
    pub(super) against: fn(&Quantities) -> &str,
    /// Whether logged steps are drawn beside their mean.
    pub(super) every_step: bool,
    /// Whether the target's own loss is the same quantity.
    pub(super) with_target: bool,
}

/// A value among those of an evaluation or a step, if it is there.
pub(super) type Value = Box<dyn Fn(&Agreement) -> Option<f64>>;

/// A curve's values.
pub(super) struct Part {
    /// As the page names it; empty for the only one.
    pub(super) label: String,
    /// Its colour where a chart shows one run; the run's, if there is none.
    pub(super) ink: Option<Ink>,
    /// Its value among an evaluation's or a step's.
    pub(super) of: Value,
}

impl Part {
    /// The only part of a figure.
    pub(super) fn only(of: fn(&Agreement) -> Option<f64>) -> Vec<Self> {
        vec![Self { label: String::new(), ink: None, of: Box::new(of) }]
    }
}

/// Points of a stage that are one quantity of some rows.
struct Series {
    rows: Rows,
    quantity: Quantity,
    points: Vec<Point>,
}

impl Figure {
    /// A card for each quantity that some run has, those with the most kinds of rows first.
    pub(super) fn cards(&self, runs: &[Run]) -> Vec<Card> {
        let mut quantities: Vec<(Quantity, Vec<Rows>)> = Vec::new();
        for run in runs {
            for series in run.stages.iter().flat_map(|stage| self.all_series(stage)) {
                let at = quantities.iter().position(|(known, _)| *known == series.quantity);
                let at = at.unwrap_or_else(|| {
                    quantities.push((series.quantity.clone(), Vec::new()));
                    quantities.len() - 1
                });
                if !quantities[at].1.contains(&series.rows) {
                    quantities[at].1.push(series.rows);
                }
            }
        }
        // A sort that keeps the order of equals.
        quantities.sort_by_key(|(_, rows)| std::cmp::Reverse(rows.len()));
        quantities.iter().map(|(quantity, rows)| self.card(runs, quantity, rows)).collect()
    }

    fn card(&self, runs: &[Run], quantity: &Quantity, rows: &[Rows]) -> Card {
        let mut curves: Vec<Curve> = Vec::new();
        let mut drawn: Vec<&Run> = Vec::new();
        for (i, run) in runs.iter().enumerate() {
            let before = curves.len();
            for part in &self.parts {
                let ink = part.ink.unwrap_or(Ink::Series(i));
                let held_out = part.ink.unwrap_or_else(|| held_out_ink(runs, ink));
                let of = |rows| self.segments(run, part, rows, quantity);
                let (training, target) = (of(Rows::Training), of(Rows::Target));
                let smoothed = training.iter().map(|segment| smooth(segment)).collect();
                let mut curve = |kind: &str, ink, style, segments: Vec<Vec<Point>>| {
                    let whose = if runs.len() > 1 { run.name.as_str() } else { "" };
                    let words = [whose, kind, part.label.as_str()];
                    let words = words.into_iter().filter(|word| !word.is_empty());
                    let label = words.collect::<Vec<_>>().join(", ");
                    curves.push(Curve { label, ink, style, segments });
                };
                if self.every_step {
                    curve("", ink, Style::Faint, training);
                }
                curve("training, smoothed", ink, Style::Line, smoothed);
                curve("held-out", held_out, Style::Dots, of(Rows::HeldOut));
                curve("the target itself", ink, Style::Dashed, target);
            }
            let is_drawn = |curve: &Curve| curve.segments.iter().any(|points| !points.is_empty());
            if curves[before..].iter().any(is_drawn) {
                drawn.push(run);
            }
        }
        let which = match rows {
            [Rows::HeldOut] => "held-out rows only",
            [Rows::HeldOut, ..] | [_, Rows::HeldOut, ..] | [_, _, Rows::HeldOut] => "",
            _ => "training rows only",
        };
        let detail = match quantity {
            Quantity::Known(against) if which.is_empty() => format!("measured against: {against}"),
            Quantity::Known(against) => format!("measured against: {against}; {which}"),
            Quantity::Unknown(_) => {
                format!("{which}: the log does not say what it was measured against")
            }
        };
        let chart = over_training(drawn, self.unit, self.scale, curves);
        Card { title: self.name.clone(), detail, chart }
    }

    /// The points of a part, a segment a stage, moved to their places on the axis.
    fn segments(&self, run: &Run, part: &Part, rows: Rows, of: &Quantity) -> Vec<Vec<Point>> {
        run.segments(|stage| {
            let series = self.series(stage, part).into_iter();
            let wanted = series.filter(|series| series.rows == rows && series.quantity == *of);
            wanted.flat_map(|series| series.points).collect()
        })
    }

    fn all_series(&self, stage: &Stage) -> Vec<Series> {
        self.parts.iter().flat_map(|part| self.series(stage, part)).collect()
    }

    fn series(&self, stage: &Stage, part: &Part) -> Vec<Series> {
        let mut all: Vec<Series> = Vec::new();
        let mut add = |rows, quantity: Quantity, point: Option<Point>| {
            let Some(point) = point else { return };
            let known = |series: &&mut Series| series.rows == rows && series.quantity == quantity;
            match all.iter_mut().find(known) {
                Some(series) => series.points.push(point),
                None => all.push(Series { rows, quantity, points: vec![point] }),
            }
        };
        for record in &stage.log.steps {
            let (at, agreement) = (record.place(), &record.agreement);
            let quantity = self.quantity(agreement, Rows::Training);
            if self.with_target {
                add(Rows::Target, quantity.clone(), point(at, record.target_loss));
            }
            add(Rows::Training, quantity, point(at, (part.of)(agreement)));
        }
        for record in &stage.log.held_out {
            let at = stage.log.place_at(record.step);
            let own = self.quantity(&record.held_out, Rows::HeldOut);
            if let Some(as_trained) = &record.held_out.as_trained {
                let quantity = self.quantity(as_trained, Rows::HeldOut);
                if quantity != own {
                    add(Rows::HeldOut, quantity, point(at, (part.of)(as_trained)));
                }
            }
            add(Rows::HeldOut, own, point(at, (part.of)(&record.held_out)));
        }
        all
    }

    fn quantity(&self, agreement: &Agreement, rows: Rows) -> Quantity {
        let against = agreement.measured_against.as_ref().map(self.against);
        match against.filter(|text| !text.is_empty()) {
            Some(text) => Quantity::Known(text.to_owned()),
            None => Quantity::Unknown(rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics_log::MetricsLog;

    /// A figure's charts: what each says of its quantity, and the labels of its curves with points.
    fn charts(log: &str) -> Vec<(String, Vec<String>)> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, log).expect("write");
        let log = MetricsLog::read(&path).expect("readable");
        assert!(log.problems.is_empty(), "{:?}", log.problems);
        let stage = Stage { name: None, round: 0, log, config: None };
        let run = Run { name: "r".into(), stages: vec![stage], ..Run::default() };
        let figure = Figure {
            name: "Loss".into(),
            unit: "nats",
            scale: Scale::Fitting,
            parts: Part::only(|agreement| agreement.loss),
            against: |quantities| &quantities.loss,
            every_step: true,
            with_target: false,
        };
        let drawn = |curve: &&Curve| {
            curve.style != Style::Faint && curve.segments.iter().any(|points| !points.is_empty())
        };
        let labels = |card: &Card| {
            card.chart.curves.iter().filter(drawn).map(|curve| curve.label.clone()).collect()
        };
        figure.cards(&[run]).iter().map(|card| (card.detail.clone(), labels(card))).collect()
    }

    #[test]
    fn equal_quantities_share_a_chart_and_others_do_not() {
        let step = "{\"step\":1,\"tokens\":10,\"loss\":3,\"measured_against\":{\"loss\":\"a\"}}\n";
        let held_out = |against: &str, more: &str| {
            format!(
                "{{\"step\":1,\"held_out\":{{\"loss\":4,\"measured_against\":{{\"loss\":\
                 \"{against}\"}}{more}}}}}\n"
            )
        };
        let (training, held) = ("training, smoothed".to_owned(), "held-out".to_owned());
        let both = || vec![training.clone(), held.clone()];
        let same = charts(&format!("{step}{}", held_out("a", "")));
        assert_eq!(same, [("measured against: a".to_owned(), both())]);
        let other = charts(&format!("{step}{}", held_out("b", "")));
        assert_eq!(
            other,
            [
                ("measured against: a; training rows only".to_owned(), vec![training.clone()]),
                ("measured against: b; held-out rows only".to_owned(), vec![held.clone()]),
            ]
        );
        let more = ",\"as_trained\":{\"loss\":3.5,\"measured_against\":{\"loss\":\"a\"}}";
        let as_trained = charts(&format!("{step}{}", held_out("b", more)));
        assert_eq!(
            as_trained,
            [
                ("measured against: a".to_owned(), both()),
                ("measured against: b; held-out rows only".to_owned(), vec![held]),
            ]
        );
    }
}
