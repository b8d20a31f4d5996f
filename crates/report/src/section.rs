//! Charts under one heading, and what those over training have in common.

use super::chart::{Chart, Curve, Horizontal, Mark, Scale, Style};
use super::ink::Ink;
use super::run::Run;

/// Charts under one heading.
pub(crate) struct Section {
    pub(crate) title: &'static str,
    /// What one must know to read them.
    pub(crate) note: String,
    /// Colours that are not those of the runs.
    pub(crate) legend: Vec<(Ink, String)>,
    /// None of them empty.
    pub(crate) cards: Vec<Card>,
    /// Whether the reader has to ask for it.
    pub(crate) is_folded: bool,
}

/// A chart with what stands above it.
pub(crate) struct Card {
    pub(crate) title: String,
    /// In which sense; may be empty.
    pub(crate) detail: String,
    /// Never empty in a section.
    pub(crate) chart: Chart,
}

impl Section {
    /// Whether some of its charts are over training, on whichever axis the reader wants.
    pub(crate) fn is_over_training(&self) -> bool {
        self.cards.iter().any(|card| card.chart.across == Horizontal::Training)
    }
}

/// A chart over the training of all stages, whose marks are those of `runs`.
pub(super) fn over_training<'a>(
    runs: impl IntoIterator<Item = &'a Run>,
    y_title: &str,
    scale: Scale,
    curves: Vec<Curve>,
) -> Chart {
    // Smoothed over faint, whatever the run.
    let (mut faint, others): (Vec<Curve>, Vec<Curve>) =
        curves.into_iter().partition(|curve| curve.style == Style::Faint);
    faint.extend(others);
    Chart { marks: marks(runs), ..Chart::of(Horizontal::Training, y_title, scale, faint) }
}

/// Where the stages of curricula begin.
fn marks<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Vec<Mark> {
    let stages = runs.into_iter().flat_map(Run::stages_on_axis);
    stages.filter_map(|(at, stage)| Some(Mark { at, label: stage.name.clone()? })).collect()
}

/// Colour of held-out rows: a single run has colours to spare.
pub(super) fn held_out_ink(runs: &[Run], ink: Ink) -> Ink {
    if runs.len() == 1 { Ink::Series(1) } else { ink }
}
