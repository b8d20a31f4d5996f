//! A run as it goes, in words: the same on the page and on the terminal.

use super::{Left, Live, Pulse, Stand};
use crate::words::{about, clock};

impl Live {
    /// Whether it goes on, in a sentence; empty while it does.
    pub fn pulse_in_words(&self) -> String {
        match self.pulse {
            Pulse::Running | Pulse::Finished => String::new(),
            Pulse::Stopped => "stopped: the same command goes on from there".to_owned(),
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
            (_, Some("measure")) => "Measuring this machine",
            (_, Some("answers")) => "The target answers prompts",
            (_, Some("training")) => "The draft is trained",
            (_, Some("proof")) => "Held-out prompts prove the draft",
            (_, Some("delivery")) => "The draft is handed over",
            _ => "Nothing has begun yet",
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
