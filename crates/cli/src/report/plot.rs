//! A chart as SVG, with what its page needs to name values under the pointer.
//!
//! Drawn larger than shown, because the backend rounds to whole pixels.

use std::fmt::Display;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde_json::{Value, json};

use super::ink::Ink;
use super::series::{Point, THINNED_PARTS, thin};
use super::ticks::{linear_ticks, logarithmic_ticks, number};

/// Drawn pixels for each that is shown.
const SCALE: i32 = 3;
/// Shown size.
const SIZE: (u32, u32) = (560, 300);
const FONT: &str = "sans-serif";
/// The backend divides font sizes by this.
const FONT_FACTOR: f64 = 1.24;
/// Points on a curve of [`Style::Dots`] that still get a dot each.
const MOST_DOTS: usize = 60;
/// Parts that a curve is thinned to for naming its values; each keeps up to four points.
const NAMED_PARTS: usize = 40;
/// Width and height of a letter of a stage's label, as shown.
const LETTER: (f64, i32) = (6.6, 13);
/// Letters of a stage's label at most.
const LABEL_LETTERS: usize = 28;
/// A positive range this many times its smallest value is shown logarithmically.
const LOGARITHMIC_FROM: f64 = 20.0;

/// How a curve is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Behind the others: every record.
    Faint,
    /// A line.
    Line,
    /// A line with a dot at each point.
    Dots,
    /// A dashed line.
    Dashed,
}

/// One curve.
#[derive(Debug, Clone)]
pub(crate) struct Curve {
    /// What it is of, as the page names it under the pointer.
    pub(crate) label: String,
    /// Colour.
    pub(crate) ink: Ink,
    /// Looks.
    pub(crate) style: Style,
    /// Drawn apart: one for each stage.
    pub(crate) segments: Vec<Vec<Point>>,
}

/// A line across a chart where a stage begins.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mark {
    /// Place.
    pub(crate) x: f64,
    /// Stage.
    pub(crate) label: String,
}

/// How the vertical axis is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// Logarithmic when the values are positive and far apart.
    Fitting,
    /// From zero.
    FromZero,
    /// Shares from zero to at most one, read as percent.
    Share,
}

/// What is drawn in one frame.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    /// Of the horizontal axis, with its unit.
    pub(crate) x_title: &'static str,
    /// Whole numbers from 1 get a tick each.
    pub(crate) x_counts: bool,
    /// Of the vertical axis, with its unit.
    pub(crate) y_title: String,
    /// Of the vertical axis.
    pub(crate) scale: Scale,
    /// First ones lie behind.
    pub(crate) curves: Vec<Curve>,
    /// Beginnings of stages.
    pub(crate) marks: Vec<Mark>,
    /// A value that a line across the chart shows.
    pub(crate) line_at: Option<f64>,
}

impl Chart {
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

    fn x_axis(&self) -> Axis {
        let (low, high) = range(self.points().map(|point| point.x));
        if self.x_counts {
            let ticks = (low.ceil() as i64..=high.floor() as i64).map(|i| i as f64).collect();
            return Axis { low: low - 0.25, high: high + 0.25, ticks };
        }
        let high = if high > 0.0 { high } else { 1.0 };
        Axis { low: 0.0, high, ticks: linear_ticks(0.0, high, 6) }
    }

    /// In the drawn coordinate, which is log10 of the value on a logarithmic axis.
    fn y_axis(&self) -> Axis {
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

    fn y_label(&self, drawn: f64) -> String {
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
struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
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

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
}

/// A chart as drawn.
pub(crate) struct Drawing {
    /// The picture, with its title.
    pub(crate) svg: String,
    /// For the page's script: frame and ranges in drawn pixels and values, and the curves' points.
    pub(crate) values: Value,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Context<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;
type Drawn = Result<(), String>;

/// Draws a chart that is not empty.
///
/// # Errors
/// - the drawing library's, as text
pub(crate) fn draw(title: &str, chart: &Chart) -> Result<Drawing, String> {
    let mut svg = String::new();
    let frame;
    let (x, y) = (chart.x_axis(), chart.y_axis());
    {
        let size = (SIZE.0 * SCALE as u32, SIZE.1 * SCALE as u32);
        let area: Area<'_> = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let mut context = ChartBuilder::on(&area)
            .margin_top(8 * SCALE)
            .margin_right(14 * SCALE)
            .margin_left(2 * SCALE)
            .x_label_area_size(42 * SCALE)
            .y_label_area_size(66 * SCALE)
            .build_cartesian_2d(x.clone(), y.clone())
            .map_err(text)?;
        draw_mesh(&mut context, chart)?;
        draw_line_at(&mut context, chart.line_at, &x, &y)?;
        draw_marks(&mut context, chart, &x, &y)?;
        let logarithmic = chart.is_logarithmic();
        for curve in &chart.curves {
            for segment in &curve.segments {
                draw_curve(&mut context, curve, segment, logarithmic)?;
            }
        }
        frame = context.plotting_area().get_pixel_range();
        area.present().map_err(text)?;
    }
    let (across, down) = frame;
    let values = json!({
        "frame": [across.start, down.start, across.end, down.end],
        "x": [x.low, x.high], "y": [y.low, y.high],
        "log": chart.is_logarithmic(), "share": chart.scale == Scale::Share,
        "xTitle": chart.x_title, "xCounts": chart.x_counts,
        "curves": chart.curves.iter().filter_map(named_values).collect::<Vec<_>>(),
    });
    Ok(Drawing { svg: with_title(&svg, title), values })
}

/// What the script needs of a curve; nothing for one that another curve covers.
fn named_values(curve: &Curve) -> Option<Value> {
    if curve.style == Style::Faint {
        return None;
    }
    let points = curve.segments.iter().flat_map(|segment| thin(segment, NAMED_PARTS));
    let points: Vec<[f64; 2]> = points.map(|p| [p.x.round(), significant(p.y)]).collect();
    let colour = curve.ink.hex();
    (!points.is_empty()).then(|| json!({ "label": curve.label, "ink": colour, "points": points }))
}

/// Five significant digits.
fn significant(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

/// The picture without the size and name space that a page does not need, and with a title for who
/// cannot see it.
fn with_title(svg: &str, title: &str) -> String {
    let svg = svg.trim_end();
    let (head, rest) = svg.split_once('>').unwrap_or(("<svg", svg));
    let view = head.split("viewBox=").nth(1).and_then(|rest| rest.split('"').nth(1));
    let view = view.map_or_else(String::new, |view| format!(" viewBox=\"{view}\""));
    let title = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<svg role=\"img\"{view}><title>{title}</title>{rest}")
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn font(points: f64, ink: Ink) -> TextStyle<'static> {
    let size = points * FONT_FACTOR * f64::from(SCALE);
    let mut style = TextStyle::from((FONT, size).into_font());
    style.color = ink.colour().to_backend_color();
    style
}

fn draw_mesh(context: &mut Context<'_>, chart: &Chart) -> Drawn {
    let thin_line = |ink: Ink| ink.colour().stroke_width(SCALE as u32);
    context
        .configure_mesh()
        .bold_line_style(thin_line(Ink::Grid))
        .light_line_style(TRANSPARENT)
        .axis_style(thin_line(Ink::Axis))
        .label_style(font(13.0, Ink::Text))
        .axis_desc_style(font(13.0, Ink::Text))
        .x_desc(chart.x_title)
        .y_desc(&chart.y_title)
        .x_label_formatter(&|value| number(*value, 4))
        .y_label_formatter(&|value| chart.y_label(*value))
        .set_all_tick_mark_size(4 * SCALE)
        .draw()
        .map_err(text)
}

/// A line across, such as that of plain decoding's speed.
fn draw_line_at(context: &mut Context<'_>, at: Option<f64>, x: &Axis, y: &Axis) -> Drawn {
    let Some(at) = at.filter(|at| (y.low..=y.high).contains(at)) else { return Ok(()) };
    let style = Ink::Axis.colour().stroke_width((2 * SCALE) as u32);
    let line = [(x.low, at), (x.high, at)];
    let dashes = DashedLineSeries::new(line, 6 * SCALE, 4 * SCALE, style);
    context.draw_series(dashes).map(drop).map_err(text)
}

/// Dashed lines where stages begin, every one named: names that would meet stand one below the other.
fn draw_marks(context: &mut Context<'_>, chart: &Chart, x: &Axis, y: &Axis) -> Drawn {
    let width = x.high - x.low;
    let shown = f64::from(SIZE.0 - 82);
    // Where the last name of each line ends, as shown.
    let mut ends: Vec<f64> = Vec::new();
    for mark in chart.marks.iter().filter(|mark| mark.x < x.high) {
        if mark.x > x.low {
            let line = [(mark.x, y.low), (mark.x, y.high)];
            let style = Ink::Axis.colour().stroke_width(SCALE as u32);
            let dashes = DashedLineSeries::new(line, 4 * SCALE, 3 * SCALE, style);
            context.draw_series(dashes).map_err(text)?;
        }
        let label = shorten(&mark.label, LABEL_LETTERS);
        let long = LETTER.0 * (label.chars().count() + 1) as f64;
        let at = (mark.x - x.low) / width * shown;
        // At the right edge a name stands left of its line.
        let flips = at + long > shown;
        let start = if flips { at - long } else { at };
        let line = ends.iter().position(|end| *end <= start).unwrap_or(ends.len());
        ends.resize(ends.len().max(line + 1), 0.0);
        ends[line] = start + long;
        let (side, away) = if flips { (HPos::Right, -4) } else { (HPos::Left, 4) };
        let style = font(12.0, Ink::Text).pos(Pos::new(side, VPos::Top));
        let offset = (away * SCALE, (1 + LETTER.1 * line as i32) * SCALE);
        let element = EmptyElement::at((mark.x, y.high)) + Text::new(label, offset, style);
        context.draw_series([element]).map_err(text)?;
    }
    Ok(())
}

fn shorten(label: &str, letters: usize) -> String {
    if label.chars().count() <= letters {
        return label.to_owned();
    }
    let kept: String = label.chars().take(letters.saturating_sub(1)).collect();
    format!("{kept}…")
}

fn draw_curve(
    context: &mut Context<'_>,
    curve: &Curve,
    segment: &[Point],
    logarithmic: bool,
) -> Drawn {
    let height = |y: f64| if logarithmic { y.log10() } else { y };
    let points: Vec<(f64, f64)> =
        thin(segment, THINNED_PARTS).iter().map(|point| (point.x, height(point.y))).collect();
    let colour = curve.ink.colour();
    let width = |shown: f64| (shown * f64::from(SCALE)).round() as u32;
    let dots = curve.style == Style::Dots && points.len() <= MOST_DOTS;
    if dots || points.len() == 1 {
        let radius = width(3.0);
        let circles = points.iter().map(|point| Circle::new(*point, radius, colour.filled()));
        context.draw_series(circles).map_err(text)?;
    }
    if points.len() < 2 {
        return Ok(());
    }
    let drawn = match curve.style {
        Style::Faint => {
            let style = colour.mix(0.28).stroke_width(width(1.0));
            context.draw_series(LineSeries::new(points, style)).map(drop)
        }
        Style::Line => {
            let style = colour.stroke_width(width(1.8));
            context.draw_series(LineSeries::new(points, style)).map(drop)
        }
        Style::Dots => {
            let style = colour.mix(0.75).stroke_width(width(1.2));
            context.draw_series(LineSeries::new(points, style)).map(drop)
        }
        Style::Dashed => {
            let style = colour.stroke_width(width(1.4));
            let dashes = DashedLineSeries::new(points, 5 * SCALE, 4 * SCALE, style);
            context.draw_series(dashes).map(drop)
        }
    };
    drawn.map_err(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: Scale, ys: &[f64]) -> Chart {
        let segment =
            ys.iter().enumerate().map(|(i, y)| Point { x: 1000.0 * i as f64, y: *y }).collect();
        Chart {
            x_title: "tokens",
            x_counts: false,
            y_title: "loss <nats>".into(),
            scale,
            curves: vec![Curve {
                label: "a".into(),
                ink: Ink::Series(1),
                style: Style::Line,
                segments: vec![segment],
            }],
            marks: vec![Mark { x: 0.0, label: "</svg><script>".into() }],
            line_at: None,
        }
    }

    #[test]
    fn labels_are_escaped_and_curves_are_in_the_frame() {
        let drawing = draw("<b>&", &chart(Scale::Fitting, &[3.0, 2.0, 1.0])).expect("drawn");
        let svg = drawing.svg;
        assert!(!svg.contains("<script") && svg.contains("&lt;script&gt;"), "{svg}");
        assert!(svg.contains("<title>&lt;b&gt;&amp;</title>") && !svg.contains("://"), "{svg}");
        assert_eq!(drawing.values["curves"][0]["points"][1], json!([1000.0, 2.0]));
        assert!(svg.contains("loss &lt;nats&gt;"));
        let polyline = svg.lines().find(|line| line.contains("#D55E00")).expect("the curve");
        let points = polyline.split("points=\"").nth(1).expect("points");
        for pair in points.trim_end_matches(" \"/>").split(' ') {
            let (x, y) = pair.split_once(',').expect("a pair");
            let (x, y): (i32, i32) = (x.parse().expect("x"), y.parse().expect("y"));
            let (width, height) = (SIZE.0 as i32 * SCALE, SIZE.1 as i32 * SCALE);
            assert!((0..=width).contains(&x) && (0..=height).contains(&y), "{x},{y}");
        }
    }

    #[test]
    fn wide_positive_ranges_are_logarithmic() {
        assert!(chart(Scale::Fitting, &[54.0, 2.0]).is_logarithmic());
        assert!(!chart(Scale::Fitting, &[5.0, 2.0]).is_logarithmic());
        assert!(!chart(Scale::Fitting, &[54.0, 0.0]).is_logarithmic());
        assert!(!chart(Scale::FromZero, &[54.0, 2.0]).is_logarithmic());
    }

    #[test]
    fn odd_ranges_are_drawn_without_a_panic() {
        for scale in [Scale::Fitting, Scale::FromZero, Scale::Share] {
            for ys in [&[0.0][..], &[1.0, 1.0], &[-5.0, 5.0], &[1e-300, 1e300], &[f64::MAX]] {
                draw("odd", &chart(scale, ys)).expect("drawn");
            }
        }
    }

    #[test]
    fn every_stage_is_named_however_short() {
        let mut chart = chart(Scale::Fitting, &[3.0, 2.0, 1.0]);
        let places = [(0.0, "base"), (1000.0, "long"), (1001.0, "reasoning"), (1999.0, "last one")];
        chart.marks =
            places.into_iter().map(|(x, label)| Mark { x, label: label.into() }).collect();
        let svg = draw("stages", &chart).expect("drawn").svg;
        let mut heights = Vec::new();
        for (_, label) in places {
            let at = svg.find(&format!("\n{label}\n")).expect(label);
            let text = &svg[svg[..at].rfind("<text").expect("a text")..at];
            heights.push(text.split(" y=\"").nth(1).and_then(|y| y.split('"').next()));
        }
        assert_ne!(heights[1], heights[2], "names that would meet stand one below the other");
    }
}
