//! Charts of what `eval decode` measured.

use longdraft_decode::Pacing;
use longdraft_records::decode::{Cell, Figures};

use super::axes::Place;
use super::chart::{Chart, Curve, Horizontal, Scale, Style};
use super::ink::Ink;
use super::run::Run;
use super::section::{Card, Section};
use super::series::{Point, point};
use super::words;

/// Every way to draft that was measured, in the order of their colours.
pub(super) fn cells(runs: &[Run]) -> Vec<(&Run, &Cell)> {
    let records = runs.iter().filter_map(|run| Some((run, run.decoding.as_ref()?)));
    records.flat_map(|(run, record)| record.cells.iter().map(move |cell| (run, cell))).collect()
}

/// Colour of every way: the run's where each run has one, else one of its own.
pub(super) fn inks(runs: &[Run]) -> Vec<Ink> {
    let of_run = |run: &Run| run.decoding.as_ref().map_or(0, |record| record.cells.len());
    let counts: Vec<usize> = runs.iter().map(of_run).collect();
    if counts.iter().all(|count| *count <= 1) {
        let with_cell = counts.iter().enumerate().filter(|(_, count)| **count == 1);
        return with_cell.map(|(run, _)| Ink::Series(run)).collect();
    }
    // Colours of several runs stand for these.
    let first = if runs.len() > 1 { runs.len() } else { 0 };
    (first..first + counts.iter().sum::<usize>()).map(Ink::Series).collect()
}

/// Name of a way, with its run where there are several.
pub(super) fn name(runs: &[Run], run: &Run, cell: &Cell) -> String {
    let whose = if runs.len() > 1 { format!("{}: ", run.name) } else { String::new() };
    format!("{whose}{}", words::way(&cell.drafter_parts))
}

/// How it drafts, in detail.
pub(super) fn detail(cell: &Cell) -> String {
    let pace = match cell.pace {
        Pacing::Measured => "; drafts only as much as pays here",
        Pacing::Fixed => "",
    };
    let stops = |least: f64| format!("; stops where the draft is sure of less than {least}");
    let stops = cell.confidence_threshold.map(stops).unwrap_or_default();
    format!(
        "{}; {}, {}{stops}{pace}",
        words::drafter(&cell.drafter_parts),
        words::layout(&cell.shape),
        words::temperature(cell.temperature)
    )
}

/// What `eval decode` measured: a colour for each way to draft.
pub(super) fn section(runs: &[Run]) -> Section {
    let cells = cells(runs);
    let inks = inks(runs);
    let curves = |points: &dyn Fn(&Cell) -> Vec<Point>| -> Vec<Curve> {
        let curve = |(i, (run, cell)): (usize, &(&Run, &Cell))| Curve {
            label: name(runs, run, cell),
            ink: inks[i],
            style: Style::Dots,
            segments: vec![points(cell)],
        };
        cells.iter().enumerate().map(curve).collect()
    };
    let by_position = |of: fn(&Cell) -> &[f64]| {
        let rates = |cell: &Cell| {
            let rates = of(cell).iter().enumerate();
            rates.filter_map(|(i, rate)| point(Place::fixed((i + 1) as f64), Some(*rate))).collect()
        };
        let across = Horizontal::Counts("draft position");
        Chart::of(across, "share accepted", Scale::Share, curves(&rates))
    };
    let by_context = |y_title: &str, of: fn(&Figures) -> f64| {
        // One length alone is no dependence on it.
        let several = |cell: &Cell| cell.contexts.len() > 1;
        let lengths = |cell: &Cell| {
            let place = |row: &Figures| point(Place::fixed(row.name.parse().ok()?), Some(of(row)));
            let rows = cell.contexts.iter().filter(|_| several(cell));
            rows.filter_map(place).collect()
        };
        let across = Horizontal::FromZero("prompt tokens, at most");
        Chart::of(across, y_title, Scale::FromZero, curves(&lengths))
    };
    let card = |title: &str, detail: &str, chart| Card {
        title: title.into(),
        detail: detail.into(),
        chart,
    };
    let speed =
        Chart { line_at: Some(1.0), ..by_context("times plain decoding", |row| row.speed_up) };
    let legend = cells
        .iter()
        .enumerate()
        .map(|(i, (run, cell))| (inks[i], format!("{} ({})", name(runs, run, cell), detail(cell))));
    Section {
        title: "Decoding in detail",
        note: "Measured by eval decode, against plain decoding of the same prompts in turns."
            .into(),
        legend: legend.collect(),
        cards: vec![
            card("Speed-up by prompt length", "dashed: plain decoding", speed),
            card(
                "Acceptance length by prompt length",
                "the target’s own token included",
                by_context("tokens per target pass", |row| row.tau_incl_bonus),
            ),
            card(
                "Acceptance by position, where reached",
                "of proposals with all earlier ones accepted",
                by_position(|cell| &cell.conditional_acceptance),
            ),
            card(
                "Acceptance by position, overall",
                "of all proposals at the position",
                by_position(|cell| &cell.survival),
            ),
        ],
        is_folded: false,
    }
}
