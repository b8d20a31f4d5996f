//! The page: HTML around the charts. Everything that comes from a run is escaped by the template
//! engine; only the charts, escaped by the drawing library, go in as they are.

use minijinja::{AutoEscape, Environment, context};
use serde::Serialize;

use super::charts::{Section, sections};
use super::differences;
use super::ink::{Ink, SERIES, schemes};
use super::plot::draw;
use super::run::Run;
use super::summary::StageSummary;
use super::ticks::{number, percent, whole};
use crate::failure::{Failure, Result};
use crate::progress::clock;

const TEMPLATE: &str = include_str!("page.html");

#[derive(Serialize)]
struct LegendEntry {
    colour: String,
    label: String,
}

#[derive(Serialize)]
struct DrawnChart {
    title: String,
    logarithmic: bool,
    svg: String,
}

#[derive(Serialize)]
struct DrawnSection {
    title: &'static str,
    note: String,
    legend: Vec<LegendEntry>,
    charts: Vec<DrawnChart>,
}

/// Readable figures of one stage.
#[derive(Serialize)]
struct Row {
    colour: String,
    name: String,
    cells: Vec<String>,
}

#[derive(Serialize)]
struct ShownConfig<'a> {
    name: String,
    text: &'a str,
}

const COLUMNS: [&str; 11] = [
    "steps",
    "tokens",
    "final loss",
    "held\u{2011}out hard loss",
    "held\u{2011}out top-1 by position, %",
    "held\u{2011}out acceptance by position, %",
    "simulated length, greedy",
    "simulated length, sampling",
    "median tokens/s",
    "time in steps",
    "peak memory",
];

/// The whole page.
///
/// # Errors
/// - a chart cannot be drawn
pub(crate) fn render(runs: &[Run]) -> Result<String> {
    let fail = |cause: String| Failure::work(format!("report: {cause}"));
    let sections =
        sections(runs).into_iter().map(draw_section).collect::<Result<Vec<DrawnSection>>>()?;
    let rows: Vec<Row> = runs.iter().enumerate().flat_map(|(i, run)| rows(i, run)).collect();
    let (configurations, differences) = differences::of_runs(runs);
    let texts: Vec<ShownConfig<'_>> = runs
        .iter()
        .flat_map(|run| run.stages.iter().map(move |stage| (run, stage)))
        .filter_map(|(run, stage)| {
            let config = stage.config.as_ref()?;
            Some(ShownConfig { name: run.stage_name(stage), text: &config.text })
        })
        .collect();
    let problems: Vec<&String> = runs.iter().flat_map(|run| &run.problems).collect();
    let names: Vec<&String> = runs.iter().map(|run| &run.name).collect();
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment
        .render_str(
            TEMPLATE,
            context! {
                version => env!("CARGO_PKG_VERSION"), names, runs => legend(runs),
                schemes => schemes(), columns => COLUMNS, rows, sections, configurations,
                differences, texts, problems,
            },
        )
        .map_err(|error| fail(error.to_string()))
}

fn colour(index: usize) -> String {
    format!("#{:06X}", SERIES[index % SERIES.len()].0)
}

fn legend(runs: &[Run]) -> Vec<LegendEntry> {
    let entries = runs.iter().enumerate();
    entries.map(|(i, run)| LegendEntry { colour: colour(i), label: run.name.clone() }).collect()
}

fn draw_section(section: Section) -> Result<DrawnSection> {
    let charts = section
        .charts
        .into_iter()
        .map(|(title, chart)| {
            let svg =
                draw(&chart).map_err(|cause| Failure::work(format!("chart `{title}`: {cause}")))?;
            let svg = svg.trim_end().to_owned();
            Ok(DrawnChart { logarithmic: chart.is_logarithmic(), title, svg })
        })
        .collect::<Result<Vec<DrawnChart>>>()?;
    let legend = section
        .legend
        .into_iter()
        .filter_map(|(ink, label)| match ink {
            Ink::Series(index) => Some(LegendEntry { colour: colour(index), label }),
            Ink::Axis | Ink::Grid | Ink::Text => None,
        })
        .collect();
    Ok(DrawnSection { title: section.title, note: section.note, legend, charts })
}

fn rows(index: usize, run: &Run) -> Vec<Row> {
    let row = |summary: StageSummary| {
        let figure = |value: Option<f64>| value.map_or("–".into(), |value| number(value, 4));
        let rates = |values: &[Option<f64>]| {
            let rates: Vec<String> =
                values.iter().map(|value| value.map_or("–".into(), percent)).collect();
            if rates.is_empty() { "–".into() } else { rates.join(" ") }
        };
        let three = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.3}"));
        let cells = vec![
            whole(summary.steps),
            whole(summary.tokens),
            three(summary.final_loss),
            three(summary.held_out_hard_loss),
            rates(&summary.held_out_top1_by_delay),
            rates(&summary.held_out_acceptance_by_delay),
            three(summary.simulated_acceptance_length),
            three(summary.simulated_acceptance_length_sampling),
            figure(summary.median_tokens_per_second),
            clock(summary.seconds),
            summary
                .peak_memory_mib
                .map_or("–".into(), |mib| format!("{} MiB", whole(mib.round() as u64))),
        ];
        Row { colour: colour(index), name: summary.name, cells }
    };
    StageSummary::of_run(run).into_iter().map(row).collect()
}
