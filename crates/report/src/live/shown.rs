//! A run as it goes, as the page shows it.

use longdraft_records::events::FitPhase;
use serde::Serialize;

use super::{Live, Phase, Pulse, Stand};
use crate::ink::Ink;
use crate::result::{ShownToken, Tile};
use crate::ticks::percent;
use crate::words::{self, clock};

/// A card of the page.
#[derive(Debug, Serialize)]
pub(crate) struct Shown {
    name: String,
    colour: String,
    headline: String,
    /// Whether it goes on, where it does not.
    pulse: String,
    phases: Vec<ShownPhase>,
    work: Option<Work>,
    tiles: Vec<Tile>,
    prompt: String,
    tokens: Vec<ShownToken>,
    has_lookup: bool,
}

#[derive(Debug, Serialize)]
struct ShownPhase {
    name: FitPhase,
    class: &'static str,
    time: String,
}

#[derive(Debug, Serialize)]
struct Work {
    text: String,
    /// In percent.
    width: String,
}

/// Cards of the runs that are not finished.
pub(crate) fn cards(lives: &[Live]) -> Vec<Shown> {
    let going = lives.iter().enumerate().filter(|(_, live)| live.pulse != Pulse::Finished);
    going.map(|(index, live)| card(index, live)).collect()
}

fn card(index: usize, live: &Live) -> Shown {
    let answer = live.answer.clone().unwrap_or_default();
    let tokens = ShownToken::of(&answer.tokens);
    let work = live.work.as_ref().map(|work| Work {
        text: words::work(work),
        width: format!("{:.1}", 100.0 * work.share()),
    });
    Shown {
        name: live.name.clone(),
        colour: Ink::Series(index).hex(),
        headline: live.headline(),
        pulse: live.pulse_in_words(),
        phases: live.phases.iter().map(phase).collect(),
        work: work.filter(|_| live.work.as_ref().is_some_and(|work| work.all > 0)),
        tiles: tiles(live),
        prompt: answer.prompt,
        has_lookup: tokens.iter().any(ShownToken::is_of_lookup),
        tokens,
    }
}

fn phase(phase: &Phase) -> ShownPhase {
    let time = match (phase.stand, phase.spent, phase.planned) {
        (Stand::Done, Some(spent), _) | (Stand::Now, Some(spent), None) => clock(spent),
        (Stand::Now, Some(spent), Some(planned)) => {
            format!("{} of {}", clock(spent), words::about(planned))
        }
        (Stand::Now | Stand::ToCome, _, Some(planned)) => format!("some {}", words::about(planned)),
        _ => String::new(),
    };
    let class = match phase.stand {
        Stand::Done => "done",
        Stand::Now => "now",
        Stand::ToCome => "later",
    };
    ShownPhase { name: phase.name, class, time }
}

fn tiles(live: &Live) -> Vec<Tile> {
    let mut tiles = Vec::new();
    if let Some(left) = live.left {
        let phase = live
            .left_of_phase
            .map_or(String::new(), |left| format!("; this phase {}", words::about(left.seconds)));
        let note = format!("{}{phase}", left.range_in_words());
        tiles.push(Tile::new("Time left", words::about(left.seconds), note));
    }
    if let Some(speed) = live.speed {
        tiles.push(Tile::new("Speed", words::speed(speed), "of late".to_owned()));
    }
    if let Some((_, length)) = live.length.last() {
        let note = "tokens per target pass, training rows".to_owned();
        tiles.push(Tile::new("Simulated length", format!("{length:.2}"), note));
    }
    if let Some(first) = live.positions.first() {
        let rows = if live.positions_are_held_out { "held-out rows" } else { "training rows" };
        let note = format!("first position, {rows}");
        tiles.push(Tile::new("Agreement", format!("{} %", percent(*first)), note));
    }
    if let Some(memory) = live.memory_mib {
        tiles.push(Tile::new("Memory", words::memory(memory), "resident".to_owned()));
    }
    if let Some((tau, speed_up)) = live.expected {
        let note = format!("{:.2} to {:.2}; tau {:.2}", speed_up.low, speed_up.high, tau.middle);
        tiles.push(Tile::new("Expected speed-up", format!("{:.2}×", speed_up.middle), note));
    }
    tiles
}
