//! A run as it goes, in words: the same on the page and on the terminal.

use longdraft_records::FIT_FILE;
use longdraft_records::events::FitPhase;

use super::{Left, Live, Pulse, Stand};
use crate::words::{about, clock};

impl Live {
    /// Whether it goes on, in a sentence; empty while it does.
    pub fn pulse_in_words(&self) -> String {
        match self.pulse {
            Pulse::Running | Pulse::Finished => String::new(),
            Pulse::Stopped => "stopped: the same command goes on from there".to_owned(),
            Pulse::Foreign(layout) => {
                format!(
                    "another version wrote {FIT_FILE} (layout {layout}): watch it with that one"
                )
            }
            Pulse::Absent => format!("waiting for {}, which is not there yet", self.name),
            Pulse::Quiet(seconds) => format!(
                "no sign for {}: it may have been killed, then the same command goes on",
                clock(seconds)
            ),
        }
    }

    /// What is done now.
    pub(crate) fn headline(&self) -> String {
        let now = self.phases.iter().find(|phase| phase.stand == Stand::Now);
        let what = match (self.pulse, now.map(|phase| phase.name)) {
            (Pulse::Finished, _) => "Finished",
            (Pulse::Stopped, _) => "Stopped",
            (Pulse::Foreign(_), _) => "How far it has come is not known",
            (_, Some(FitPhase::Measure)) => "Measuring this machine",
            (_, Some(FitPhase::Answers)) => "The target answers prompts",
            (_, Some(FitPhase::Training)) => "The draft is trained",
            (_, Some(FitPhase::Proof)) => "Held-out prompts prove the draft",
            (_, Some(FitPhase::Delivery)) => "The draft is handed over",
            (_, Some(FitPhase::Finished) | None) => "Nothing has begun yet",
        };
        match self.left {
            Some(left) => format!("{what}, about {} left", about(left.seconds)),
            None => what.to_owned(),
        }
    }
}

impl Left {
    /// `10m to 15m`
    pub fn range_in_words(self) -> String {
        format!("{} to {}", about(self.low), about(self.high))
    }
}
