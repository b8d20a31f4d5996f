//! Waiting for what other processes take part in.

use std::time::{Duration, Instant};

use candle_core::{Result, bail};

/// Between two looks, at first and at most. Between them it is a part of the time so far: short waits are not made
/// much longer, and long ones take no processor.
const LOOK_EVERY: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
const PART: u32 = 8;

/// Waits until `is_done`, looking at `failure` beside.
///
/// # Errors
/// - `failure` says what went wrong, it takes longer than `limit`, or a look fails
pub(super) fn until(
    mut is_done: impl FnMut() -> Result<bool>,
    mut failure: impl FnMut() -> Option<String>,
    limit: Duration,
) -> Result<()> {
    let (started, (shortest, longest)) = (Instant::now(), LOOK_EVERY);
    while !is_done()? {
        if let Some(failure) = failure() {
            bail!("{failure}");
        }
        let elapsed = started.elapsed();
        if elapsed >= limit {
            bail!(
                "no answer of the other ranks for {:.0} s: a process or a link is gone \
                 (parallel.timeout_seconds sets the wait)",
                limit.as_secs_f64()
            );
        }
        std::thread::sleep((elapsed / PART).clamp(shortest, longest));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Done at the n-th look.
    fn after(looks: usize) -> impl FnMut() -> Result<bool> {
        let mut left = looks;
        move || {
            left -= usize::from(left > 0);
            Ok(left == 0)
        }
    }

    #[test]
    fn what_comes_is_waited_for_and_what_fails_or_never_comes_is_an_error() {
        let limit = Duration::from_hours(1);
        let fine = || None;
        until(after(1), fine, Duration::ZERO).expect("done before the first pause");
        until(after(4), fine, limit).expect("done");
        let failed = until(after(usize::MAX), || Some("a peer is gone".to_owned()), limit);
        assert!(failed.expect_err("failed").to_string().starts_with("a peer is gone"));
        let late = until(after(usize::MAX), fine, Duration::from_millis(5));
        assert!(late.expect_err("late").to_string().contains("parallel.timeout_seconds"));
        let broken = until(|| bail!("the driver fails"), fine, limit);
        assert!(broken.expect_err("broken").to_string().starts_with("the driver fails"));
    }
}
