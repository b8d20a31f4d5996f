//! The rounds of a fit, each of which trains a draft in its time.

use longdraft_report::words::clock;

use super::state::{Ledger, Round};
use crate::cli::FitArguments;
use crate::failure::Result;

/// Seconds of a call beyond what earlier rounds were given, from which they make a round of their own.
const LEAST_MORE: f64 = 10.0;

/// A later call with more time gets a round of its own; one that is under way goes on.
pub(super) fn begin(ledger: &mut Ledger, arguments: &FitArguments) -> Result<()> {
    let under_way = ledger.state.rounds.last().filter(|round| !round.delivered);
    match under_way.map(Round::has_begun) {
        None => add(ledger, arguments).map(drop),
        Some(false) => {
            // Nothing but measuring was done: the time of this call counts.
            let budget = arguments.time - (given(ledger) - ledger.round().budget);
            if ledger.number() > 1 && budget < LEAST_MORE {
                return ledger.drop_round();
            }
            let round = ledger.round();
            (round.budget, round.plan) = (budget, None);
            ledger.write()
        }
        Some(true) => {
            let (phase, folder) = (&ledger.state.phase, ledger.folder.display());
            errln!("going on in the phase `{phase}` of {folder}");
            let given = given(ledger);
            if arguments.time < given - LEAST_MORE {
                errln!("note: what has begun keeps its time of {}", clock(given));
            }
            Ok(())
        }
    }
}

/// Seconds of all rounds.
fn given(ledger: &Ledger) -> f64 {
    ledger.state.rounds.iter().map(|round| round.budget).sum()
}

/// Begins a further round if the call has time for it, and the first one at any rate.
pub(super) fn add(ledger: &mut Ledger, arguments: &FitArguments) -> Result<bool> {
    let more = arguments.time - given(ledger);
    let adds = ledger.state.rounds.is_empty() || more >= LEAST_MORE;
    if adds {
        ledger.state.rounds.push(Round::of(more));
        ledger.write()?;
    }
    Ok(adds)
}
