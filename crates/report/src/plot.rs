//! A chart as SVG, with what its page needs to name values under the pointer.
//!
//! A picture holds what all axes share once, then for each axis of training a group of its own, of
//! which the page shows one. Drawn larger than shown, because the backend rounds to whole pixels.

use std::fmt::{Display, Write};

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde_json::{Value, json};

use super::axes::TrainingAxis;
use super::chart::{Axis, Chart, Curve, Horizontal, Mark, Scale, Style, XAxis};
use super::ink::Ink;
use super::series::{Point, THINNED_PARTS, thin};
use super::svg::{Stroke, dots, line};
use super::ticks::number;

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
/// Attributes that the page's style sheet gives, or that are as good as not there.
const NEEDLESS: [&str; 2] = [" opacity=\"1\"", " font-family=\"sans-serif\""];

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

/// Draws a chart that is not empty: one over training on each of `axes`.
pub(crate) fn draw(title: &str, chart: &Chart, axes: &[TrainingAxis]) -> Result<Drawing, String> {
    let is_training = chart.across == Horizontal::Training;
    // Any will do for a chart whose places are the same on all.
    let axes = if is_training { axes } else { &[TrainingAxis::Tokens] };
    let axes: Vec<XAxis> = axes.iter().map(|of| chart.x_axis(*of)).collect();
    let y = chart.y_axis();
    let mut frame = json!(null);
    let without_ticks = |axis: &Axis| Axis { ticks: Vec::new(), ..axis.clone() };
    let any = axes.first().ok_or("no axis")?;
    let mut inner = layer(&without_ticks(&any.axis), &y, |context, _| {
        let (across, down) = context.plotting_area().get_pixel_range();
        frame = json!([across.start, down.start, across.end, down.end]);
        mesh(context, chart, None)
    })?;
    for x in &axes {
        let group = layer(&x.axis, &without_ticks(&y), |context, out| {
            mesh(context, chart, Some(x))?;
            draw_marks(context, chart, x, &y, out)?;
            draw_curves(context, chart, x, &y, out);
            Ok(())
        })?;
        let class =
            if is_training { format!(" class=\"by-{}\"", x.of.name()) } else { String::new() };
        let _ = write!(inner, "<g{class}>\n{group}</g>\n");
    }
    let across = axes.iter().map(
        |x| json!({ "name": x.of.name(), "title": x.title, "range": [x.axis.low, x.axis.high] }),
    );
    let values = json!({
        "frame": frame, "x": across.collect::<Vec<_>>(), "y": [y.low, y.high],
        "log": chart.is_logarithmic(), "share": chart.scale == Scale::Share,
        "xCounts": matches!(chart.across, Horizontal::Counts(_)),
        "curves": chart.curves.iter().filter_map(|c| named_values(c, &axes)).collect::<Vec<_>>(),
    });
    Ok(Drawing { svg: picture(title, &inner), values })
}

/// A part of a picture: what the library paints, then what is written to its second argument.
fn layer(
    x: &Axis,
    y: &Axis,
    paint: impl FnOnce(&mut Context<'_>, &mut String) -> Drawn,
) -> Result<String, String> {
    let (mut svg, mut after) = (String::new(), String::new());
    {
        let area: Area<'_> = SVGBackend::with_string(&mut svg, drawn_size()).into_drawing_area();
        let mut context = ChartBuilder::on(&area)
            .margin_top(8 * SCALE)
            .margin_right(14 * SCALE)
            .margin_left(2 * SCALE)
            .x_label_area_size(42 * SCALE)
            .y_label_area_size(66 * SCALE)
            .build_cartesian_2d(x.clone(), y.clone())
            .map_err(text)?;
        paint(&mut context, &mut after)?;
        area.present().map_err(text)?;
    }
    let inner = svg.split_once('>').map_or("", |(_, rest)| rest).trim_start();
    let inner = inner.rsplit_once("</svg>").map_or(inner, |(inner, _)| inner);
    Ok(NEEDLESS.iter().fold(inner.to_owned(), |inner, part| inner.replace(part, "")) + &after)
}

fn drawn_size() -> (u32, u32) {
    (SIZE.0 * SCALE as u32, SIZE.1 * SCALE as u32)
}

/// What the script needs of a curve, a height and a place on every axis for each point; nothing for
/// one that another curve covers.
fn named_values(curve: &Curve, axes: &[XAxis]) -> Option<Value> {
    if curve.style == Style::Faint {
        return None;
    }
    let points = curve.segments.iter().flat_map(|segment| thin(segment, NAMED_PARTS));
    let place = |x: &XAxis, at| match x.of {
        TrainingAxis::Time => significant(x.place(at)),
        TrainingAxis::Tokens | TrainingAxis::Steps => x.place(at).round(),
    };
    let numbers = |point: Point| -> Vec<Value> {
        let places = axes.iter().map(|x| place(x, point.at));
        [significant(point.y)].into_iter().chain(places).map(short).collect()
    };
    let points: Vec<Vec<Value>> = points.map(numbers).collect();
    let colour = curve.ink.hex();
    (!points.is_empty()).then(|| json!({ "label": curve.label, "ink": colour, "points": points }))
}

/// A whole number without its `.0`.
fn short(number: f64) -> Value {
    let is_whole = number.fract() == 0.0 && number.abs() < 1e15;
    if is_whole { (number as i64).into() } else { number.into() }
}

/// Five significant digits.
fn significant(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

/// A picture with a title for who cannot see it.
fn picture(title: &str, inner: &str) -> String {
    let (width, height) = drawn_size();
    let title = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!(
        "<svg role=\"img\" viewBox=\"0 0 {width} {height}\"><title>{title}</title>\n{inner}</svg>"
    )
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

/// Lines, ticks and title of the horizontal axis `x`, or else those of the vertical one.
fn mesh(context: &mut Context<'_>, chart: &Chart, x: Option<&XAxis>) -> Drawn {
    let thin_line = |ink: Ink| ink.colour().stroke_width(SCALE as u32);
    let y_label = |value: &f64| chart.y_label(*value);
    let mut mesh = context.configure_mesh();
    mesh.bold_line_style(thin_line(Ink::Grid))
        .light_line_style(TRANSPARENT)
        .axis_style(thin_line(Ink::Axis))
        .label_style(font(13.0, Ink::Text))
        .axis_desc_style(font(13.0, Ink::Text))
        .x_label_formatter(&|value| number(*value, 4))
        .y_label_formatter(&y_label)
        .set_all_tick_mark_size(4 * SCALE);
    match x {
        Some(x) => mesh.disable_y_axis().x_desc(x.title),
        None => mesh.disable_x_axis().y_desc(&chart.y_title),
    };
    mesh.draw().map_err(text)
}

/// Dashed lines where stages begin, every one named: names that would meet stand one below the other.
fn draw_marks(
    context: &mut Context<'_>,
    chart: &Chart,
    x: &XAxis,
    y: &Axis,
    out: &mut String,
) -> Drawn {
    let Axis { low, high, .. } = x.axis;
    let shown = f64::from(SIZE.0 - 82);
    // Where the last name of each row ends, as shown.
    let mut ends: Vec<f64> = Vec::new();
    for (place, label) in merged(&chart.marks, x).into_iter().filter(|(place, _)| *place < high) {
        if place > low {
            let stroke =
                Stroke { dashes: Some((4 * SCALE, 3 * SCALE)), ..Stroke::plain(Ink::Axis, SCALE) };
            let across = [(place, y.low), (place, y.high)];
            line(out, stroke, &across.map(|end| pixel(context, end)));
        }
        let label = shorten(&label, LABEL_LETTERS);
        let long = LETTER.0 * (label.chars().count() + 1) as f64;
        let at = (place - low) / (high - low) * shown;
        // At the right edge a name stands left of its line.
        let flips = at + long > shown;
        let start = if flips { at - long } else { at };
        let row = ends.iter().position(|end| *end <= start).unwrap_or(ends.len());
        ends.resize(ends.len().max(row + 1), 0.0);
        ends[row] = start + long;
        let (side, away) = if flips { (HPos::Right, -4) } else { (HPos::Left, 4) };
        let style = font(12.0, Ink::Text).pos(Pos::new(side, VPos::Top));
        let offset = (away * SCALE, (1 + LETTER.1 * row as i32) * SCALE);
        let element = EmptyElement::at((place, y.high)) + Text::new(label, offset, style);
        context.draw_series([element]).map_err(text)?;
    }
    Ok(())
}

/// Marks from left to right; a place where several runs begin a stage is marked once.
fn merged(marks: &[Mark], x: &XAxis) -> Vec<(f64, String)> {
    let mut merged: Vec<(f64, String)> = Vec::new();
    for mark in marks {
        let place = x.place(mark.at);
        match merged.iter_mut().find(|(known, _)| known.total_cmp(&place).is_eq()) {
            Some((_, label)) if !label.split(" · ").any(|part| part == mark.label) => {
                *label = format!("{label} · {}", mark.label);
            }
            Some(_) => {}
            None => merged.push((place, mark.label.clone())),
        }
    }
    merged.sort_by(|a, b| a.0.total_cmp(&b.0));
    merged
}

fn shorten(label: &str, letters: usize) -> String {
    if label.chars().count() <= letters {
        return label.to_owned();
    }
    let kept: String = label.chars().take(letters.saturating_sub(1)).collect();
    format!("{kept}…")
}

/// Every curve, and the line across, such as that of plain decoding's speed.
fn draw_curves(context: &Context<'_>, chart: &Chart, x: &XAxis, y: &Axis, out: &mut String) {
    if let Some(at) = chart.line_at.filter(|at| (y.low..=y.high).contains(at)) {
        let ends = [(x.axis.low, at), (x.axis.high, at)];
        let dashes = Some((6 * SCALE, 4 * SCALE));
        let stroke = Stroke { dashes, ..Stroke::plain(Ink::Axis, 2 * SCALE) };
        line(out, stroke, &ends.map(|end| pixel(context, end)));
    }
    let logarithmic = chart.is_logarithmic();
    let pixel = |point: &Point| {
        let height = if logarithmic { point.y.log10() } else { point.y };
        pixel(context, (x.place(point.at), height))
    };
    for curve in &chart.curves {
        for segment in &curve.segments {
            let points: Vec<_> = thin(segment, THINNED_PARTS).iter().map(pixel).collect();
            draw_segment(curve, &points, out);
        }
    }
}

/// Where a place is drawn; one beyond all numbers at the picture's edge.
fn pixel(context: &Context<'_>, place: (f64, f64)) -> (i32, i32) {
    let (x, y) = context.backend_coord(&place);
    let (width, height) = drawn_size();
    (x.clamp(0, width as i32), y.clamp(0, height as i32))
}

fn draw_segment(curve: &Curve, points: &[(i32, i32)], out: &mut String) {
    let width = |shown: f64| (shown * f64::from(SCALE)).round() as i32;
    let has_dots = curve.style == Style::Dots && points.len() <= MOST_DOTS;
    if has_dots || points.len() == 1 {
        dots(out, curve.ink, width(6.0), points);
    }
    let (shown, opacity, dashes) = match curve.style {
        Style::Faint => (1.0, 0.28, None),
        Style::Line => (1.8, 1.0, None),
        Style::Dots => (1.2, 0.75, None),
        Style::Dashed => (1.4, 1.0, Some((5 * SCALE, 4 * SCALE))),
    };
    if points.len() > 1 {
        line(out, Stroke { ink: curve.ink, width: width(shown), opacity, dashes }, points);
    }
}

#[cfg(test)]
mod tests;
