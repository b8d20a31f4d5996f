//! Times: of the system's clock, and as the protobuf message.

use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;
use time::OffsetDateTime;

/// A time since 1970 in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Whole seconds.
    pub seconds: u64,
    /// Nanoseconds of the second.
    pub nanos: u32,
}

impl Moment {
    /// The system's clock.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { seconds: since.as_secs(), nanos: since.subsec_nanos() }
    }

    /// Seconds with a fraction.
    pub fn as_f64(self) -> f64 {
        self.seconds as f64 + f64::from(self.nanos) * 1e-9
    }

    /// Whole milliseconds.
    pub fn milliseconds(self) -> u64 {
        self.seconds * 1000 + u64::from(self.nanos / 1_000_000)
    }

    /// `YYYYMMDD_HHMMSS`.
    pub fn stamp(self) -> String {
        let [year, month, day, hour, minute, second] = self.fields();
        format!("{year:04}{month:02}{day:02}_{hour:02}{minute:02}{second:02}")
    }

    /// `YYYY-MM-DDTHH:MM:SSZ` (RFC 3339).
    pub fn rfc3339(self) -> String {
        let [year, month, day, hour, minute, second] = self.fields();
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
    }

    /// Year, month, day, hour, minute, second.
    fn fields(self) -> [i32; 6] {
        let time = OffsetDateTime::from_unix_timestamp(self.seconds as i64);
        let time = time.unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let (date, clock) = (time.date(), time.time());
        let (hour, minute, second) = clock.as_hms();
        let rest = [u8::from(date.month()), date.day(), hour, minute, second].map(i32::from);
        [date.year(), rest[0], rest[1], rest[2], rest[3], rest[4]]
    }
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Timestamp {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanos: i32,
}

impl Timestamp {
    /// Seconds with a fraction.
    pub(super) fn as_f64(self) -> f64 {
        self.seconds as f64 + f64::from(self.nanos) * 1e-9
    }
}

impl From<Moment> for Timestamp {
    fn from(moment: Moment) -> Self {
        Self { seconds: moment.seconds as i64, nanos: moment.nanos as i32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_in_utc() {
        let moment = Moment { seconds: 1_709_210_096, nanos: 250_000_000 };
        assert_eq!(moment.stamp(), "20240229_123456");
        assert_eq!(moment.rfc3339(), "2024-02-29T12:34:56Z");
        assert_eq!(moment.milliseconds(), 1_709_210_096_250);
        assert!((Timestamp::from(moment).as_f64() - 1_709_210_096.25).abs() < 1e-6);
    }
}
