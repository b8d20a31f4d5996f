//! Charts of what `eval decode` measured.

use super::charts::{Section, point};
use super::ink::Ink;
use super::plot::{Chart, Curve, Scale, Style};
use super::run::Run;
use super::series::Point;
use crate::decode_record::{Cell, Figures};

/// What `eval decode` measured: a colour for each way to draft.
pub(super) fn section(runs: &[Run]) -> Section {
    let records = runs.iter().filter_map(|run| Some((run, run.decoding.as_ref()?)));
    let cells: Vec<(&Run, &Cell)> = records
        .flat_map(|(run, record)| record.cells.iter().map(move |cell| (run, cell)))
        .collect();
    let curves = |points: &dyn Fn(&Cell) -> Vec<Point>| -> Vec<Curve> {
        let curve = |(i, (_, cell)): (usize, &(&Run, &Cell))| Curve {
            ink: Ink::Series(i),
            style: Style::Dots,
            segments: vec![points(cell)],
        };
        cells.iter().enumerate().map(curve).collect()
    };
    let by_position = |of: fn(&Cell) -> &[f64]| {
        let rates = |cell: &Cell| {
            let rates = of(cell).iter().enumerate();
            rates.filter_map(|(i, rate)| point((i + 1) as f64, Some(*rate))).collect()
        };
        plain_chart(("draft position", true), "share of proposals", Scale::Share, curves(&rates))
    };
    let by_context = |y_title: &str, of: fn(&Figures) -> f64| {
        let lengths = |cell: &Cell| {
            let place = |row: &Figures| point(row.name.parse().ok()?, Some(of(row)));
            cell.contexts.iter().filter_map(place).collect()
        };
        plain_chart(("prompt tokens, at most", false), y_title, Scale::FromZero, curves(&lengths))
    };
    let label = |(run, cell): &(&Run, &Cell)| {
        let Cell { drafter, rule, temperature, .. } = cell;
        format!("{}: {drafter}, {rule}, temperature {temperature}", run.name)
    };
    Section {
        title: "Decoding",
        note: "Measured by eval decode. Tested: share of the proposals at a position that were \
               accepted where all before them were. Drafted: of all proposals at that position. \
               Tokens per target pass count the target’s own."
            .into(),
        legend: cells.iter().enumerate().map(|(i, cell)| (Ink::Series(i), label(cell))).collect(),
        charts: vec![
            ("Acceptance where tested".into(), by_position(|cell| &cell.conditional_acceptance)),
            ("Acceptance where drafted".into(), by_position(|cell| &cell.survival)),
            (
                "Acceptance length by context".into(),
                by_context("tokens per target pass", |row| row.tau_incl_bonus),
            ),
            ("Speed-up by context".into(), by_context("times plain decoding", |row| row.speed_up)),
        ],
    }
}

fn plain_chart(
    (x_title, x_counts): (&'static str, bool),
    y_title: &str,
    scale: Scale,
    curves: Vec<Curve>,
) -> Chart {
    Chart { x_title, x_counts, y_title: y_title.into(), scale, curves, marks: Vec::new() }
}
