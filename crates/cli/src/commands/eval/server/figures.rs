//! What was measured of a server, as JSON and in words.

use longdraft_data::conversation::VARIABLES;
use longdraft_decode::evaluate::{Comparison, PromptFigures, Side};
use serde_json::{Value, json};

use super::answer::Answer;
use super::client::Server;
use super::passes::Revealed;
use crate::cli::EvalDecodeArguments;
use crate::terminal::counted;
use longdraft_records::decode::FEW_PROMPTS;
use longdraft_report::words;

/// Shares of a sample that are told.
const SHARES: [f64; 2] = [0.5, 0.95];

/// Times of a server's answers, in seconds.
#[derive(Debug, Clone, Default)]
pub(super) struct Times {
    /// To the first token, in the first run: later ones may find the prompt in a cache.
    first: Vec<f64>,
    /// Mean from token to token, of every answer.
    token: Vec<f64>,
    /// From one event with text to the next.
    event: Vec<f64>,
}

impl Times {
    pub(super) fn add(&mut self, run: usize, tokens: usize, answer: &Answer) {
        if run == 0 {
            self.first.push(answer.first);
        }
        if tokens > 1 {
            self.token.push((answer.end - answer.first) / (tokens - 1) as f64);
        }
        self.event.extend(&answer.gaps);
    }

    fn to_json(&self) -> Value {
        json!({
            "first_token_ms": percentiles(&self.first),
            "between_tokens_ms": percentiles(&self.token),
            "between_events_ms": percentiles(&self.event),
        })
    }

    fn in_words(&self) -> String {
        format!(
            "first token {}; from token to token {}; from event to event {}",
            shown(&self.first),
            shown(&self.token),
            shown(&self.event)
        )
    }
}

/// A server, or two, at one temperature.
pub(super) struct Cell {
    pub(super) temperature: f64,
    pub(super) runs: usize,
    /// Prompts that were refused.
    pub(super) left_out: usize,
    /// The server as the side with drafting, the other one as the plain side.
    pub(super) comparison: Comparison,
    pub(super) times: Times,
    /// Whether events were counted where a server told no tokens.
    pub(super) counts_events: bool,
    pub(super) other: Option<Times>,
    pub(super) revealed: Revealed,
    /// The servers, in words.
    pub(super) names: (String, Option<String>),
}

/// p50 and p95 in milliseconds; nothing of an empty sample.
fn percentiles(seconds: &[f64]) -> Value {
    match percentiles_of(seconds) {
        Some([p50, p95]) => json!({ "p50": p50, "p95": p95 }),
        None => Value::Null,
    }
}

fn percentiles_of(seconds: &[f64]) -> Option<[f64; 2]> {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    Some(SHARES.map(|share| 1e3 * sorted[(share * last as f64).round() as usize]))
}

fn shown(seconds: &[f64]) -> String {
    percentiles_of(seconds)
        .map_or_else(|| "-".to_owned(), |[p50, p95]| format!("{p50:.1} ms (p95 {p95:.1})"))
}

/// A server's address, what it is, and its model.
pub(super) fn named(server: &Server) -> String {
    let model = server.model.as_ref().map_or_else(String::new, |model| format!(", {model}"));
    format!("{} ({}{model})", server.address(), server.kind.name())
}

impl Cell {
    /// Tokens per target pass with its interval, where they are told by answer.
    fn tau(&self) -> Option<(f64, Option<(f64, f64)>)> {
        if let Some(gauge) = self.revealed.gauge {
            return Some((gauge, None));
        }
        self.revealed.told?;
        let acceptance = self.comparison.acceptance();
        let interval = self.comparison.acceptance_length_interval();
        (acceptance.rounds > 0).then(|| (acceptance.acceptance_length(), Some(interval)))
    }

    /// Why there is no tau.
    fn why_not(&self) -> &'static str {
        self.revealed.why_not.unwrap_or("the server counted no pass meanwhile")
    }

    fn acceptance_rate(&self) -> Option<f64> {
        let acceptance = self.comparison.acceptance();
        (acceptance.nodes > 0).then(|| acceptance.accepted as f64 / acceptance.nodes as f64)
    }

    fn to_json(&self) -> Value {
        let side = self.comparison.drafted();
        let tau = self.tau();
        let mut cell = json!({
            "temperature": self.temperature,
            "runs": self.runs,
            "prompts": self.comparison.prompts.len(),
            "left_out": self.left_out,
            "small_sample": self.is_small(),
            "server": of_side(&side, &self.times),
            "tokens_are_events": self.counts_events,
            "tau": tau.map(|(tau, _)| tau),
            "tau_interval": tau.and_then(|(_, interval)| interval),
            "tau_from": self.revealed.told.map(super::passes::Told::name),
            "tau_missing": tau.is_none().then(|| self.why_not()),
            "acceptance_rate": self.acceptance_rate(),
            "survival": self.revealed.survival,
            "categories": self.groups(),
        });
        if let Some(times) = &self.other {
            let (checked, equal) = self.comparison.equal();
            cell["compared"] = of_side(&self.comparison.plain(), times);
            cell["speed_up"] = json!(self.comparison.speed_up());
            cell["speed_up_interval"] = json!(self.comparison.speed_up_interval());
            cell["speed_up_of_runs"] = json!(self.comparison.speed_up_of_runs);
            cell["checked"] = json!(checked);
            cell["equal"] = json!(equal);
        }
        cell
    }

    fn is_small(&self) -> bool {
        self.comparison.prompts.len() < FEW_PROMPTS
    }

    /// Figures by category.
    fn groups(&self) -> Value {
        let groups = self.comparison.groups(|prompt: &PromptFigures| prompt.category.clone());
        let of_group = |(name, group): (String, Comparison)| {
            let acceptance = group.acceptance();
            let tau = (acceptance.rounds > 0).then(|| acceptance.acceptance_length());
            json!({
                "name": name,
                "prompts": group.prompts.len(),
                "tau": tau,
                "tokens_per_second": group.drafted().decode_tokens_per_second(),
                "speed_up": self.other.as_ref().map(|_| group.speed_up()),
            })
        };
        groups.into_iter().map(of_group).collect()
    }
}

fn of_side(side: &Side, times: &Times) -> Value {
    let mut told = times.to_json();
    told["tokens"] = json!(side.tokens);
    told["tokens_per_second"] = json!(side.decode_tokens_per_second());
    told["end_to_end_tokens_per_second"] = json!(side.tokens_per_second());
    told
}

/// The first cell's main figures, and all of them under `cells`.
pub(super) fn record(
    arguments: &EvalDecodeArguments,
    (server, compared): (&Server, Option<&Server>),
    cells: &[Cell],
) -> Value {
    let about = |server: &Server| {
        json!({
            "address": server.address(), "engine": server.kind.name(), "model": server.model,
        })
    };
    let cells: Vec<Value> = cells.iter().map(Cell::to_json).collect();
    let first = cells.first().cloned().unwrap_or_default();
    let mut record = json!({
        "server": about(server),
        "compared": compared.map(about),
        "prompts": arguments.prompts,
        "max_tokens": arguments.max_tokens,
        "tau": first["tau"],
        "tokens_per_second": first["server"]["tokens_per_second"],
        "speed_up": first["speed_up"],
        "equal": first["equal"],
        "cells": cells,
    });
    let variables = arguments.decoding.template.variables();
    if !variables.is_empty() {
        record[VARIABLES] = json!(variables);
    }
    record
}

/// The result first, then how it came about.
pub(super) fn print(cell: &Cell) {
    let Cell { comparison, names, .. } = cell;
    let side = comparison.drafted();
    outln!("{}, {}", names.0, words::temperature(cell.temperature));
    outln!(
        "  {:.1} tok/s after the first token, {:.1} with the prompt's time, over {} and {}{}",
        side.decode_tokens_per_second(),
        side.tokens_per_second(),
        counted(comparison.prompts.len(), "prompt"),
        counted(cell.runs, "run"),
        if cell.is_small() { " (small sample)" } else { "" }
    );
    outln!("  {}", cell.times.in_words());
    if cell.counts_events {
        outln!("  a server tells no number of tokens: its events are counted in their place");
    }
    match cell.tau() {
        None => outln!("  tau unknown: {}", cell.why_not()),
        Some((tau, interval)) => {
            let interval =
                interval.map_or_else(String::new, |(low, high)| format!(" [{low:.3}, {high:.3}]"));
            let from = cell.revealed.told.map_or("", |told| told.name());
            outln!("  tau {tau:.3}{interval} tokens per target pass (from {from})");
        }
    }
    if let Some(rate) = cell.acceptance_rate() {
        let by_position = &cell.revealed.survival;
        let positions = by_position.iter().map(|share| format!("{:.0} %", 100.0 * share));
        let positions = positions.collect::<Vec<_>>().join(", ");
        let positions = if positions.is_empty() {
            String::new()
        } else {
            format!("; of drafts, proposal 1, 2, ... accepted: {positions}")
        };
        outln!("  accepted of all that was proposed: {:.0} %{positions}", 100.0 * rate);
    }
    if let (Some(times), Some(name)) = (&cell.other, &names.1) {
        print_compared(cell, times, name);
    }
    print_groups(cell);
}

fn print_compared(cell: &Cell, times: &Times, name: &str) {
    let Cell { comparison, .. } = cell;
    let (low, high) = comparison.speed_up_interval();
    let runs: Vec<String> =
        comparison.speed_up_of_runs.iter().map(|speed_up| format!("{speed_up:.2}")).collect();
    outln!(
        "  speed-up {:.2} [{low:.2}, {high:.2}] against {name}: {:.1} tok/s there; runs {}",
        comparison.speed_up(),
        comparison.plain().decode_tokens_per_second(),
        runs.join(" ")
    );
    outln!("  there: {}", times.in_words());
    match comparison.equal() {
        (0, _) => outln!("  answers are drawn and need not be equal"),
        (checked, equal) if checked == equal => {
            outln!("  answers equal: {equal} of {checked}");
        }
        (checked, equal) => outln!(
            "  answers equal: {equal} of {checked}; engines whose sums depend on the rows of a pass part at \
             near-ties"
        ),
    }
}

fn print_groups(cell: &Cell) {
    let Value::Array(groups) = cell.groups() else { return };
    if groups.len() < 2 {
        return;
    }
    outln!("{:>18} {:>7} {:>7} {:>9} {:>7}", "category", "prompts", "tau", "tok/s", "x");
    for group in groups {
        let number = |name: &str, digits: usize| {
            group[name].as_f64().map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        outln!(
            "{:>18} {:>7} {:>7} {:>9} {:>7}",
            group["name"].as_str().unwrap_or_default(),
            number("prompts", 0),
            number("tau", 3),
            number("tokens_per_second", 1),
            number("speed_up", 2)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sample() {
        let hundred: Vec<f64> = (0..=100).rev().map(|i| f64::from(i) / 1e3).collect();
        let [p50, p95] = percentiles_of(&hundred).expect("a sample");
        assert!((p50 - 50.0).abs() < 1e-9 && (p95 - 95.0).abs() < 1e-9);
        assert_eq!(percentiles(&[]), Value::Null);
        assert_eq!(shown(&[0.002]), "2.0 ms (p95 2.0)");
    }

    #[test]
    fn the_first_run_alone_tells_of_first_tokens() {
        let answer = Answer { first: 0.1, end: 0.5, gaps: vec![0.2, 0.2], ..Answer::default() };
        let mut times = Times::default();
        times.add(0, 5, &answer);
        times.add(1, 1, &answer);
        assert_eq!((times.first.len(), times.token.len(), times.event.len()), (1, 1, 4));
        assert!((times.token[0] - 0.1).abs() < 1e-9);
    }
}
