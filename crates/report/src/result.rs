//! What the page opens with: the result in figures, every way that was measured, a sample answer.

use longdraft_decode::Origin;
use longdraft_records::decode::{Cell, DecodeRecord, SampleToken};
use serde::Serialize;

use super::decoding::{cells, detail, inks, name};
use super::run::Run;
use super::summary::StageSummary;
use super::ticks::{number, percent, whole};
use super::words::{self, clock};

/// One figure that matters.
#[derive(Debug, Serialize)]
pub(super) struct Tile {
    label: &'static str,
    value: String,
    note: String,
    /// `good`, `bad` or nothing.
    tone: &'static str,
}

/// A way to draft beside plain decoding.
#[derive(Debug, Serialize)]
pub(super) struct Way {
    colour: String,
    name: String,
    detail: String,
    speed_up: String,
    interval: String,
    tau: String,
    speed: String,
    plain_speed: String,
    equal: String,
    /// Of the fastest one's tokens a second, in percent.
    bar: String,
    /// The same of plain decoding.
    plain_bar: String,
}

/// An answer with what was proposed marked.
#[derive(Debug, Serialize)]
pub(super) struct ShownSample {
    way: String,
    prompt: String,
    tokens: Vec<ShownToken>,
    accepted: usize,
    all: usize,
    has_lookup: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct ShownToken {
    text: String,
    class: &'static str,
}

impl ShownToken {
    /// Tokens with what proposed them.
    pub(super) fn of(tokens: &[SampleToken]) -> Vec<Self> {
        let class = |origin| match origin {
            Some(Origin::Draft) => "draft",
            Some(Origin::Lookup) => "lookup",
            // Not the target's choice, and shown in no other way.
            Some(Origin::Grammar) | None => "own",
        };
        let shown = |token: &SampleToken| Self {
            text: token.text.clone(),
            class: class(token.proposed_by),
        };
        tokens.iter().map(shown).collect()
    }

    pub(super) fn is_of_lookup(&self) -> bool {
        self.class == "lookup"
    }
}

impl Tile {
    /// A figure that is neither good nor bad.
    pub(super) fn new(label: &'static str, value: String, note: String) -> Self {
        Self { label, value, note, tone: "" }
    }
}

/// The way to use.
fn best(record: &DecodeRecord) -> Option<&Cell> {
    record.best(|_| true).map(|(_, cell)| cell)
}

/// The result in a sentence.
pub(super) fn headline(runs: &[Run]) -> String {
    let [run] = runs else { return format!("{} runs compared", runs.len()) };
    let Some(cell) = run.decoding.as_ref().and_then(best) else {
        return format!("Training of {}", run.name);
    };
    let output = match (cell.checked, cell.checked - cell.equal.min(cell.checked)) {
        (0, _) => "same distribution".to_owned(),
        (_, 0) => "same output".to_owned(),
        (checked, differing) => format!("{differing} of {checked} outputs differ"),
    };
    let (low, high) = cell.figures.speed_up_interval;
    let factor = cell.figures.speed_up;
    if low > 1.0 {
        format!("{factor:.2}× faster decoding, {output}")
    } else if high < 1.0 {
        format!("Slower decoding ({factor:.2}×), {output}")
    } else {
        format!("No clear speed-up ({factor:.2}×), {output}")
    }
}

pub(super) fn tiles(run: &Run) -> Vec<Tile> {
    let record = run.decoding.as_ref();
    let mut tiles = match record.and_then(best) {
        Some(cell) => of_decoding(cell),
        None => of_training(run),
    };
    tiles.extend(time(run));
    tiles.extend(record.map(machine));
    tiles
}

fn of_decoding(cell: &Cell) -> Vec<Tile> {
    let figures = &cell.figures;
    let range = |(low, high): (f64, f64)| format!("95 % interval {low:.2} to {high:.2}");
    let (low, high) = figures.speed_up_interval;
    let few = if figures.small_sample { ", small sample" } else { "" };
    let equal = match cell.checked {
        0 => ("–".to_owned(), "sampled: same distribution, other draws".to_owned(), ""),
        checked => (
            format!("{} of {checked}", cell.equal),
            "token for token those of plain decoding".to_owned(),
            if cell.equal == checked { "good" } else { "bad" },
        ),
    };
    vec![
        Tile {
            label: "Speed-up",
            value: format!("{:.2}×", figures.speed_up),
            note: format!(
                "{}; {} prompts{few}; {}",
                range(figures.speed_up_interval),
                figures.prompts,
                words::way(&cell.drafter_parts)
            ),
            tone: if low > 1.0 {
                "good"
            } else if high < 1.0 {
                "bad"
            } else {
                ""
            },
        },
        Tile::new(
            "Tokens per target pass (tau)",
            format!("{:.2}", figures.tau_incl_bonus),
            format!("{}; 1 without drafting", range(figures.tau_interval)),
        ),
        Tile { label: "Equal outputs", value: equal.0, note: equal.1, tone: equal.2 },
        Tile::new(
            "Decoding",
            words::speed(figures.decode_tok_s),
            format!("{} plain", words::speed(figures.plain_decode_tok_s)),
        ),
    ]
}

/// Where decoding was not measured: what the last evaluation promises.
fn of_training(run: &Run) -> Vec<Tile> {
    let stages = StageSummary::of_run(run);
    let tokens: u64 = stages.iter().map(|stage| stage.tokens).sum();
    let steps: u64 = stages.iter().map(|stage| stage.steps).sum();
    let mut tiles = Vec::new();
    if let Some((stage, length)) =
        stages.iter().rev().find_map(|stage| Some((stage, stage.simulated_acceptance_length?)))
    {
        let replayed = stage.replayed_acceptance_length;
        let note = replayed
            .map_or("simulated".into(), |length| format!("simulated; {length:.2} replayed"));
        tiles.push(Tile::new("Held-out acceptance length", format!("{length:.2}"), note));
        if let Some(rate) = stage.held_out_top1_by_delay.first().copied().flatten() {
            let note = "first draft position, greedy".to_owned();
            tiles.push(Tile::new("Held-out agreement", format!("{} %", percent(rate)), note));
        }
    }
    let trained = format!("{} tokens", number(tokens as f64, 3));
    tiles.push(Tile::new("Trained on", trained, format!("{} steps", whole(steps))));
    tiles
}

fn time(run: &Run) -> Option<Tile> {
    let training: f64 = run.stages.iter().map(|stage| stage.log.seconds()).sum();
    let measuring = run.decoding.as_ref().and_then(|record| record.circumstances.as_ref());
    let measuring = measuring.map_or(0.0, |circumstances| circumstances.seconds);
    let parts = [("training steps", training), ("measuring", measuring)];
    let parts: Vec<String> = parts
        .into_iter()
        .filter(|(_, seconds)| *seconds > 0.0)
        .map(|(name, seconds)| format!("{name} {}", clock(seconds)))
        .collect();
    (!parts.is_empty()).then(|| Tile::new("Time", clock(training + measuring), parts.join(", ")))
}

fn machine(record: &DecodeRecord) -> Tile {
    let threads = match record.threads {
        1 => "1 thread".to_owned(),
        count => format!("{count} threads"),
    };
    let held = match record.dtype.as_str() {
        "stored" => "weights held as their file holds them".to_owned(),
        dtype => format!("weights held in {dtype}"),
    };
    let processor = record.circumstances.as_ref().and_then(|known| known.processor.clone());
    let note = processor.map_or_else(|| held.clone(), |name| format!("{name}; {held}"));
    Tile::new("Machine", threads, note)
}

/// Every way of every run, with bars by tokens a second.
pub(super) fn ways(runs: &[Run]) -> Vec<Way> {
    let (cells, inks) = (cells(runs), inks(runs));
    let speeds = cells
        .iter()
        .flat_map(|(_, cell)| [cell.figures.decode_tok_s, cell.figures.plain_decode_tok_s]);
    let fastest = speeds.fold(f64::MIN_POSITIVE, f64::max);
    let share = |speed: f64| format!("{:.1}", (100.0 * speed / fastest).clamp(0.0, 100.0));
    let way = |(i, (run, cell)): (usize, &(&Run, &Cell))| {
        let figures = &cell.figures;
        let (low, high) = figures.speed_up_interval;
        Way {
            colour: inks[i].hex(),
            name: name(runs, run, cell),
            detail: detail(cell),
            speed_up: format!("{:.2}×", figures.speed_up),
            interval: format!("{low:.2} to {high:.2}"),
            tau: format!("{:.2}", figures.tau_incl_bonus),
            speed: number(figures.decode_tok_s, 3),
            plain_speed: number(figures.plain_decode_tok_s, 3),
            equal: match cell.checked {
                0 => "–".into(),
                checked => format!("{} of {checked}", cell.equal),
            },
            bar: share(figures.decode_tok_s),
            plain_bar: share(figures.plain_decode_tok_s),
        }
    };
    cells.iter().enumerate().map(way).collect()
}

/// The fastest way's answer, or that of another one if it kept none.
pub(super) fn sample(runs: &[Run]) -> Option<ShownSample> {
    let [run] = runs else { return None };
    let record = run.decoding.as_ref()?;
    let fastest = best(record).filter(|cell| cell.sample.is_some());
    let cell = fastest.or_else(|| record.cells.iter().find(|cell| cell.sample.is_some()))?;
    let sample = cell.sample.as_ref()?;
    let tokens = ShownToken::of(&sample.tokens);
    Some(ShownSample {
        way: words::way(&cell.drafter_parts),
        prompt: sample.prompt.clone(),
        accepted: tokens.iter().filter(|token| token.class != "own").count(),
        all: tokens.len(),
        has_lookup: tokens.iter().any(ShownToken::is_of_lookup),
        tokens,
    })
}
