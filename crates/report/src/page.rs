//! The page: HTML around the charts. Everything that comes from a run is escaped by the template
//! engine; only the charts, escaped by the drawing library, go in as they are. The one script is
//! named by its hash, so nothing that got in otherwise would run.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use minijinja::{AutoEscape, Environment, Value, context};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::axes::TrainingAxis;
use super::charts::sections;
use super::error::{ReportError, Result};
use super::header::facts;
use super::ink::{Ink, schemes};
use super::live::shown::cards;
use super::live::{Live, Pulse};
use super::plot::{Drawing, draw};
use super::run::{Run, training_axes};
use super::section::{Card, Section};
use super::summary::StageSummary;
use super::ticks::{number, percent, whole};
use super::words::clock;
use super::{differences, result};

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Words that the page explains, as `docs/concepts/glossary.md` does.
const GLOSSARY: [(&str, &str); 10] = [
    ("target", "the model whose output is wanted; it is never changed"),
    ("draft", "the small model that proposes tokens for the target to check"),
    ("round", "one pass of the target over what was proposed"),
    ("tau", "tokens per target pass: those accepted in a round, and the target’s own"),
    ("chain", "proposals in a row, each following on the one before; a tree has alternatives"),
    ("position, delay", "the d-th token that the draft writes after the target’s last one"),
    ("acceptance", "whether the target keeps a proposal; as a rate, how often it does"),
    ("row", "a piece of training text; learned rows in a loss are its tokens that count"),
    ("held-out", "rows that no training step sees"),
    (
        "simulated, replayed acceptance length",
        "tau as training can tell it: from rates by position, or round by round over the text",
    ),
];

#[derive(Serialize)]
struct LegendEntry {
    colour: String,
    label: String,
}

#[derive(Serialize)]
struct DrawnChart {
    title: String,
    detail: String,
    svg: String,
    values: String,
}

#[derive(Serialize)]
struct DrawnSection {
    title: &'static str,
    note: String,
    legend: Vec<LegendEntry>,
    charts: Vec<DrawnChart>,
    is_folded: bool,
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

const COLUMNS: [&str; 7] = [
    "steps",
    "tokens",
    "acceptance length, simulated",
    "replayed",
    "agreement at position 1",
    "hard loss",
    "time in steps",
];

/// The whole page.
///
/// # Errors
/// - a chart cannot be drawn
pub fn render(runs: &[Run]) -> Result<String> {
    render_live(runs, &[], 0)
}

/// The page of runs as they go, each with its `lives`; it asks where it was served what it has become.
/// It names pages of `others` runs by themselves.
///
/// # Errors
/// - a chart cannot be drawn
pub fn render_live(runs: &[Run], lives: &[Live], others: usize) -> Result<String> {
    let axes = training_axes(runs);
    let sections = sections(runs);
    // The first section with charts that change with the axis.
    let switched = sections.iter().find(|section| section.is_over_training());
    let switched = switched.map(|section| section.title);
    let sections = sections.into_iter().map(|section| draw_section(section, &axes));
    let sections = sections.collect::<Result<Vec<DrawnSection>>>()?;
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
    let page = context! {
        version => env!("CARGO_PKG_VERSION"), names, sections, configurations,
        differences, texts, problems, schemes => schemes(), columns => COLUMNS,
        style => STYLE, script => SCRIPT, script_hash => hash(SCRIPT),
        glossary => GLOSSARY, switched,
        is_live => !lives.is_empty(), lives => cards(lives),
        others => if others > 1 { others } else { 0 },
        axes => axes.iter().map(|axis| axis.name()).collect::<Vec<_>>(),
        ..of_result(runs, lives)
    };
    Ok(environment.render_str(TEMPLATE, page)?)
}

/// What the page opens with, and the table of stages.
fn of_result(runs: &[Run], lives: &[Live]) -> Value {
    let has_begun = |run: &&Run| !run.stages.is_empty() || run.decoding.is_some();
    let single = match runs {
        [run] => Some(run).filter(has_begun),
        _ => None,
    };
    let going = lives.iter().find(|live| runs.len() == 1 && live.pulse != Pulse::Finished);
    let rows: Vec<Row> = runs.iter().enumerate().flat_map(|(i, run)| rows(i, run)).collect();
    context! {
        headline => going.map_or_else(|| result::headline(runs), Live::headline),
        // While a run goes on its card says it.
        facts => single.filter(|_| going.is_none()).map_or_else(Vec::new, facts),
        tiles => single.filter(|_| going.is_none()).map_or_else(Vec::new, result::tiles),
        ways => result::ways(runs),
        sample => result::sample(runs),
        runs => legend(runs), rows,
    }
}

/// As a content security policy names a script.
fn hash(script: &str) -> String {
    format!("sha256-{}", STANDARD.encode(Sha256::digest(script.as_bytes())))
}

fn legend(runs: &[Run]) -> Vec<LegendEntry> {
    let entries = runs.iter().enumerate();
    let entry = |(i, run): (usize, &Run)| LegendEntry {
        colour: Ink::Series(i).hex(),
        label: run.name.clone(),
    };
    entries.map(entry).collect()
}

fn draw_section(section: Section, axes: &[TrainingAxis]) -> Result<DrawnSection> {
    let charts = section.cards.into_iter().map(|card| draw_card(card, axes));
    let charts = charts.collect::<Result<Vec<DrawnChart>>>()?;
    let legend = section.legend.into_iter();
    let legend = legend.map(|(ink, label)| LegendEntry { colour: ink.hex(), label }).collect();
    let Section { title, note, is_folded, .. } = section;
    Ok(DrawnSection { title, note, legend, charts, is_folded })
}

fn draw_card(card: Card, axes: &[TrainingAxis]) -> Result<DrawnChart> {
    let Card { title, detail, chart } = card;
    let name = if detail.is_empty() { title.clone() } else { format!("{title} ({detail})") };
    let Drawing { svg, values } = draw(&name, &chart, axes)
        .map_err(|cause| ReportError::Chart { title: title.clone(), cause })?;
    let axis = if chart.is_logarithmic() { "logarithmic" } else { "" };
    let details = [detail.as_str(), axis].into_iter().filter(|detail| !detail.is_empty());
    let detail = details.collect::<Vec<_>>().join("; ");
    Ok(DrawnChart { title, detail, svg, values: values.to_string() })
}

fn rows(index: usize, run: &Run) -> Vec<Row> {
    let row = |summary: StageSummary| {
        let three = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.3}"));
        let first = summary.held_out_top1_by_delay.first().copied().flatten();
        let cells = vec![
            whole(summary.steps),
            number(summary.tokens as f64, 3),
            three(summary.simulated_acceptance_length),
            three(summary.replayed_acceptance_length),
            first.map_or("–".into(), |rate| format!("{} %", percent(rate))),
            three(summary.held_out_hard_loss),
            clock(summary.seconds),
        ];
        Row { colour: Ink::Series(index).hex(), name: summary.name, cells }
    };
    StageSummary::of_run(run).into_iter().map(row).collect()
}
