//! A run as it goes, in words: the same on the page and on the terminal.

use longdraft_records::events::Advance;

use super::{Left, Live, Pulse, Stand};
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
            Some(left) => format!("{what}, about {} left", about(left.seconds)),
            None => what.to_owned(),
        }
    }
}

impl Left {
    /// `10m to 15m`
    pub(crate) fn range_in_words(self) -> String {
        format!("{} to {}", about(self.low), about(self.high))
    }
}

/// `120 of 300 prompts`
pub(crate) fn work(work: &Advance) -> String {
    let of = if work.all > 0 { format!(" of {}", whole(work.all as u64)) } else { String::new() };
    format!("{}{of} {}", whole(work.done as u64), work.what)
}

/// Seconds as exactly as they can be foreseen: `40s`, `3m10s`, `38m`, `2h05m`.
pub(crate) fn about(seconds: f64) -> String {
    let round = |unit: f64| unit * (seconds.max(0.0) / unit).round();
    match seconds {
        ..60.0 => clock(round(5.0)),
        60.0..600.0 => clock(round(10.0)),
        600.0..3600.0 => format!("{:.0}m", round(60.0) / 60.0),
        _ => clock(round(300.0)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_foreseen_is_told_roughly() {
        let told = [-3.0, 13.0, 58.0, 187.0, 614.0, 3599.0, 7384.0, 9e4].map(about);
        assert_eq!(told, ["0s", "15s", "1m00s", "3m10s", "10m", "60m", "2h05m", "25h00m"]);
    }

    #[test]
    fn work_and_its_share_are_told() {
        let steps =
            Advance { what: "steps".to_owned(), done: 1200, all: 4000, ..Advance::default() };
        assert_eq!(work(&steps), "1,200 of 4,000 steps");
        assert!((steps.share() - 0.3).abs() < 1e-9);
        let open = Advance { all: 0, ..steps };
        assert_eq!(work(&open), "1,200 steps");
    }
}
