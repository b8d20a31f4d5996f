//! What a chart shows, and how its axes are laid out.

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};

use super::axes::{Place, TrainingAxis};
use super::ink::Ink;
use super::series::Point;
use super::ticks::{linear_ticks, logarithmic_ticks, number};

/// A positive range this many times its smallest value is shown logarithmically.
const LOGARITHMIC_FROM: f64 = 20.0;

/// How a curve is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Under the others: every record.
    Faint,
    Line,
    /// A line with a dot at each point.
    Dots,
    Dashed,
}

#[derive(Debug, Clone)]
pub(crate) struct Curve {
    /// What it is of, as the page names it under the pointer.
    pub(crate) label: String,
    pub(crate) ink: Ink,
    pub(crate) style: Style,
    /// Drawn apart: one for each stage.
    pub(crate) segments: Vec<Vec<Point>>,
}

/// A line across a chart where a stage begins.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mark {
    pub(crate) at: Place,
    pub(crate) label: String,
}

/// What the horizontal axis shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Horizontal {
    /// Progress of training, on every axis that there is.
    Training,
    /// Whole numbers of this from 1, with a tick each.
    Counts(&'static str),
    /// This, from zero.
    FromZero(&'static str),
}

/// How the vertical axis is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// Logarithmic when the values are positive and far apart.
    Fitting,
    FromZero,
    /// Shares from zero to at most one, read as percent.
    Share,
}

/// What is drawn in one frame.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    /// Of the horizontal axis.
    pub(crate) across: Horizontal,
    /// Of the vertical axis, with its unit.
    pub(crate) y_title: String,
    /// Of the vertical axis.
    pub(crate) scale: Scale,
    /// Later ones are drawn over earlier ones.
    pub(crate) curves: Vec<Curve>,
    /// Beginnings of stages.
    pub(crate) marks: Vec<Mark>,
    /// A value that a line across the chart shows.
    pub(crate) line_at: Option<f64>,
}

impl Chart {
    /// Of curves alone.
    pub(crate) fn of(across: Horizontal, y_title: &str, scale: Scale, curves: Vec<Curve>) -> Self {
        let y_title = y_title.to_owned();
        Self { across, y_title, scale, curves, marks: Vec::new(), line_at: None }
    }

    fn points(&self) -> impl Iterator<Item = &Point> {
        self.curves.iter().flat_map(|curve| curve.segments.iter().flatten())
    }

    /// Whether nothing would be drawn.
    pub(crate) fn is_empty(&self) -> bool {
        self.points().next().is_none()
    }

    /// Whether the vertical axis is logarithmic.
    pub(crate) fn is_logarithmic(&self) -> bool {
        let (low, high) = range(self.points().map(|point| point.y));
        self.scale == Scale::Fitting && low > 0.0 && high / low >= LOGARITHMIC_FROM
    }

    /// Laid out for its points.
    pub(super) fn x_axis(&self, of: TrainingAxis) -> XAxis {
        let (low, high) = range(self.points().map(|point| point.at.on(of)));
        let (title, unit) = match self.across {
            Horizontal::Training => of.unit(high),
            Horizontal::Counts(title) | Horizontal::FromZero(title) => (title, 1.0),
        };
        let axis = if let Horizontal::Counts(_) = self.across {
            let ticks = (low.ceil() as i64..=high.floor() as i64).map(|i| i as f64).collect();
            Axis { low: low - 0.25, high: high + 0.25, ticks }
        } else {
            let high = if high > 0.0 { high / unit } else { 1.0 };
            Axis { low: 0.0, high, ticks: linear_ticks(0.0, high, 6) }
        };
        XAxis { of, title, unit, axis }
    }

    /// The vertical axis in the drawn coordinate, which is log10 of the value on a logarithmic one.
    pub(super) fn y_axis(&self) -> Axis {
        let values = self.points().map(|point| point.y).chain(self.line_at);
        let (low, high) = range(values);
        if self.is_logarithmic() {
            let margin = 0.03 * (high / low).log10();
            let (low, high) = (low.log10() - margin, high.log10() + margin);
            let ticks = logarithmic_ticks(10_f64.powf(low), 10_f64.powf(high));
            return Axis { low, high, ticks: ticks.into_iter().map(f64::log10).collect() };
        }
        let (low, high) = match self.scale {
            Scale::Fitting => {
                let margin =
                    if high > low { 0.05 * (high - low) } else { 0.05 * high.abs() + 1e-9 };
                (low - margin, high + margin)
            }
            Scale::FromZero => (0.0, if high > 0.0 { 1.08 * high } else { 1.0 }),
            // A little above all, so that a curve at 100 % is not hidden by the frame.
            Scale::Share => (0.0, (1.08 * high).clamp(0.05, 1.02)),
        };
        Axis { low, high, ticks: linear_ticks(low, high, 6) }
    }

    /// What stands at a tick of the vertical axis.
    pub(super) fn y_label(&self, drawn: f64) -> String {
        let value = if self.is_logarithmic() { 10_f64.powf(drawn) } else { drawn };
        match self.scale {
            Scale::Share => format!("{} %", number(100.0 * value, 3)),
            // A tick at zero may be off by rounding.
            _ if !self.is_logarithmic() && value.abs() < 1e-12 => "0".into(),
            _ => number(value, 4),
        }
    }
}

/// A linear axis with ticks of our choice.
#[derive(Clone)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) ticks: Vec<f64>,
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        // Halved, so that the largest numbers do not overflow.
        let share = (value / 2.0 - self.low / 2.0) / (self.high / 2.0 - self.low / 2.0);
        (f64::from(limit.0) + share * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.low..self.high
    }
}

/// A horizontal axis of a chart.
pub(super) struct XAxis {
    pub(super) of: TrainingAxis,
    pub(super) title: &'static str,
    /// How much one is.
    unit: f64,
    pub(super) axis: Axis,
}

impl XAxis {
    /// A place in the axis's unit.
    pub(super) fn place(&self, at: Place) -> f64 {
        at.on(self.of) / self.unit
    }
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_positive_ranges_are_logarithmic() {
        let chart = |scale, ys: &[f64]| {
            let points = ys.iter().map(|y| Point { at: Place::fixed(*y), y: *y }).collect();
            let (label, ink, style) = (String::new(), Ink::Series(0), Style::Line);
            let curve = Curve { label, ink, style, segments: vec![points] };
            Chart::of(Horizontal::Training, "loss", scale, vec![curve])
        };
        assert!(chart(Scale::Fitting, &[54.0, 2.0]).is_logarithmic());
        assert!(!chart(Scale::Fitting, &[5.0, 2.0]).is_logarithmic());
        assert!(!chart(Scale::Fitting, &[54.0, 0.0]).is_logarithmic());
        assert!(!chart(Scale::FromZero, &[54.0, 2.0]).is_logarithmic());
    }
}
