//! A run as it goes, in words: the same on the page and on the terminal.

use super::{Left, Live, Pulse, Stand};
use crate::events::Advance;
use crate::progress::clock;
use crate::report::ticks::{number, whole};

impl Live {
    /// Whether it goes on, in a sentence; empty while it does.
    pub(crate) fn pulse_in_words(&self) -> String {
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
            Some(left) => format!("{what}, about {} left", clock(left.seconds)),
            None => what.to_owned(),
        }
    }
}

impl Left {
    /// `12m00s (10m00s to 15m00s)`
    pub(crate) fn range_in_words(self) -> String {
        format!("{} to {}", clock(self.low), clock(self.high))
    }
}

impl Advance {
    /// `120 of 300 prompts`
    pub(crate) fn in_words(&self) -> String {
        let of =
            if self.all > 0 { format!(" of {}", whole(self.all as u64)) } else { String::new() };
        format!("{}{of} {}", whole(self.done as u64), self.what)
    }

    /// From 0 to 1.
    pub(crate) fn share(&self) -> f64 {
        (self.done as f64 / self.all.max(1) as f64).clamp(0.0, 1.0)
    }
}

/// Tokens a second.
pub(crate) fn speed(tokens: f64) -> String {
    format!("{} tok/s", number(tokens, 3))
}

/// Memory.
pub(crate) fn memory(mib: f64) -> String {
    if mib < 1024.0 { format!("{mib:.0} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}
