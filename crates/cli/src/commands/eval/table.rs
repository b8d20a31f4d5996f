//! A cell on the terminal.

use longdraft_records::decode::{Cell, Figures};
use longdraft_report::words;

/// The result first, then how it came about.
pub(crate) fn print(cell: &Cell) {
    let Cell { figures, milliseconds: ms, .. } = cell;
    outln!("{}", title(cell));
    let runs: Vec<String> = cell.speed_up_of_runs.iter().map(|s| format!("{s:.2}")).collect();
    outln!(
        "  speed-up {:.2} [{:.2}, {:.2}]: {:.1} tok/s, {:.1} plain; runs {}{}",
        figures.speed_up,
        figures.speed_up_interval.0,
        figures.speed_up_interval.1,
        figures.decode_tok_s,
        figures.plain_decode_tok_s,
        runs.join(" "),
        if figures.small_sample { " (small sample)" } else { "" }
    );
    outln!(
        "  tau {:.3} [{:.3}, {:.3}] tokens per target pass{}",
        figures.tau_incl_bonus,
        figures.tau_interval.0,
        figures.tau_interval.1,
        sum_of_tau(figures.tau_incl_bonus, &cell.accepted_share)
    );
    match (cell.checked, cell.largest_regret) {
        (0, _) => outln!(
            "  outputs follow the target's distribution and need not be equal (--verify match \
             makes them)"
        ),
        (checked, None) => outln!("  outputs equal: {} of {checked}", cell.equal),
        (checked, Some(regret)) => outln!(
            "  outputs equal: {} of {checked}; where they part, the target prefers plain \
             decoding's token by up to {regret:.4} nats",
            cell.equal
        ),
    }
    if !cell.survival.is_empty() {
        print_acceptance(cell);
    }
    outln!(
        "  a round: draft {:.1} ms, target {:.1} ms, rest {:.1} ms; a plain step {:.1} ms; {:.0} % of \
         rounds plain",
        ms.draft,
        ms.verify,
        ms.rest,
        ms.plain_step,
        100.0 * ms.plain_share
    );
    outln!(
        "  with the prompt's time: {:.1} tok/s, {:.1} plain; tau as mean over prompts {:.3}",
        figures.e2e_tok_s,
        figures.plain_e2e_tok_s,
        figures.tau_per_prompt
    );
    for (title, rows) in [("category", &cell.categories), ("prompt tokens <=", &cell.contexts)] {
        if rows.len() > 1 {
            print_rows(title, rows);
        }
    }
}

/// Who drafts, and how; plain decoding lays out and verifies nothing.
fn title(cell: &Cell) -> String {
    let parts = &cell.drafter_parts;
    let (way, temperature) = (words::way(parts), words::temperature(cell.temperature));
    if parts.method.is_none() && parts.lookup.is_none() {
        return format!("{way} ({temperature})");
    }
    let (layout, verifier, pace) = (words::layout(&cell.shape), &cell.verifier, &cell.pace);
    format!("{way} ({layout}, {temperature}, verified by {verifier}, pace {pace})")
}

fn print_acceptance(cell: &Cell) {
    let percent = |rates: &[f64]| {
        rates.iter().map(|rate| format!("{:.0} %", 100.0 * rate)).collect::<Vec<_>>().join(", ")
    };
    outln!("  proposal 1, 2, ... accepted, of passes that");
    outln!("      drafted it: {}", percent(&cell.survival));
    outln!("      had accepted all before it: {}", percent(&cell.conditional_acceptance));
    if cell.lookup_share > 0.0 {
        outln!("  accepted tokens from prompt lookup: {:.0} %", 100.0 * cell.lookup_share);
    }
}

/// What tau consists of: passes that a stop or limit cut commit no token of the target's own.
fn sum_of_tau(tau: f64, shares: &[f64]) -> String {
    if shares.is_empty() {
        return String::new();
    }
    let cut = 1.0 + shares.iter().sum::<f64>() - tau;
    let shares: Vec<String> = shares.iter().map(|share| format!("{share:.3}")).collect();
    let cut = if cut < 5e-4 { String::new() } else { format!(" - {cut:.3} (cut at a stop)") };
    format!(
        " = the target's own + {} (shares of passes that accepted proposal 1, 2, ...){cut}",
        shares.join(" + ")
    )
}

fn print_rows(title: &str, rows: &[Figures]) {
    outln!("{title:>18} {:>7} {:>7} {:>8} {:>9} {:>7}", "prompts", "tau", "first", "tok/s", "x");
    for row in rows {
        let first =
            row.first_acceptance.map_or("-".into(), |rate| format!("{:.0} %", 100.0 * rate));
        outln!(
            "{:>18} {:>7} {:>7.3} {first:>8} {:>9.1} {:>7.2}{}",
            row.name,
            row.prompts,
            row.tau_incl_bonus,
            row.decode_tok_s,
            row.speed_up,
            if row.speed_up < 1.0 { "  slower" } else { "" }
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_tau_add_up() {
        assert_eq!(
            sum_of_tau(1.7, &[0.5, 0.2]),
            " = the target's own + 0.500 + 0.200 (shares of passes that accepted proposal 1, 2, ...)"
        );
        assert!(sum_of_tau(1.65, &[0.5, 0.2]).ends_with(" - 0.050 (cut at a stop)"));
        assert_eq!(sum_of_tau(1.0, &[]), "");
    }
}
