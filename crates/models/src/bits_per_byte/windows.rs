//! Which targets are scored in which window.
//!
//! Sliding: starts at `0, s, 2s, ...` while `ws = 0` or `ws + (Lw − s) < N`; length `min(Lw, N − ws)`;
//! the first window scores all of its targets, a later one those from `Lw − s` on. Every target is
//! scored exactly once, and has at least `Lw − s` tokens before its input but for the stream's first.

use std::ops::Range;

/// Inputs `start..start + length`; `scored` counts from `start`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// First input.
    pub start: usize,
    /// Inputs.
    pub length: usize,
    /// Scored positions of the window.
    pub scored: Range<usize>,
}

/// What becomes of targets after the last complete window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tail {
    /// A last, shorter window scores them.
    #[default]
    Score,
    /// They are left out, as published.
    Drop,
}

/// Windows of `window` inputs that move on by `stride` targets.
///
/// # Panics
/// - `stride` is not in `1..=window`
pub fn sliding_windows(targets: usize, window: usize, stride: usize, tail: Tail) -> Vec<Window> {
    assert!((1..=window).contains(&stride), "a stride of {stride} in windows of {window}");
    let overlap = window - stride;
    let starts = (0..).map(|i| i * stride).take_while(|&start| match tail {
        Tail::Score => (start == 0 && targets > 0) || start + overlap < targets,
        Tail::Drop => start + window <= targets,
    });
    starts
        .map(|start| {
            let length = window.min(targets - start);
            Window { start, length, scored: if start == 0 { 0..length } else { overlap..length } }
        })
        .collect()
}

/// Windows that follow one another without overlap; what does not fill the last one is left out.
///
/// # Panics
/// - `window` is 0
pub fn plain_windows(targets: usize, window: usize) -> Vec<Window> {
    let whole = |index: usize| Window { start: index * window, length: window, scored: 0..window };
    (0..targets / window).map(whole).collect()
}

/// Sliding windows that start anew at every start token: no target sees another document.
///
/// # Panics
/// - `stride` is not in `1..=window`
pub fn isolated_windows(
    tokens: &[u32],
    start_of_document: u32,
    window: usize,
    stride: usize,
) -> Vec<Window> {
    let inputs = tokens.len().saturating_sub(1);
    let starts = (0..inputs).filter(|at| *at == 0 || tokens[*at] == start_of_document);
    let starts: Vec<usize> = starts.chain([inputs]).collect();
    let mut windows = Vec::new();
    for (&start, &end) in starts.iter().zip(starts.iter().skip(1)) {
        let own = sliding_windows(end - start, window, stride, Tail::Score);
        windows.extend(own.into_iter().map(|w| Window { start: start + w.start, ..w }));
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_scored_exactly_once() {
        for window in 1..=64 {
            for stride in 1..=window {
                for targets in (1..=40).chain((41..300).step_by(7)) {
                    let windows = sliding_windows(targets, window, stride, Tail::Score);
                    let mut next = 0;
                    for w in &windows {
                        assert_eq!(w.start + w.scored.start, next, "{targets} {window} {stride}");
                        assert!(w.scored.end == w.length && !w.scored.is_empty());
                        next = w.start + w.scored.end;
                    }
                    assert_eq!(next, targets);
                    let count =
                        if targets <= window { 0 } else { (targets - window).div_ceil(stride) };
                    assert_eq!(windows.len(), 1 + count);
                }
            }
        }
    }

    #[test]
    fn a_dropped_tail_leaves_complete_windows() {
        let windows = sliding_windows(2682, 128, 32, Tail::Drop);
        assert_eq!(windows.len(), 80);
        assert_eq!(windows.iter().map(|w| w.scored.len()).sum::<usize>(), 2656);
        assert!(windows.iter().all(|w| w.length == 128));
        assert!(sliding_windows(5, 8, 2, Tail::Drop).is_empty());
    }

    #[test]
    fn isolated_windows_score_every_target_within_its_document() {
        let tokens = [1, 5, 6, 7, 8, 9, 1, 5, 1, 1, 4, 4];
        let windows = isolated_windows(&tokens, 1, 4, 2);
        let scored: Vec<usize> =
            windows.iter().flat_map(|w| w.start + w.scored.start..w.start + w.scored.end).collect();
        assert!(scored.into_iter().eq(0..11));
        assert!(
            windows.iter().all(|w| tokens[w.start + 1..w.start + w.length].iter().all(|t| *t != 1))
        );
    }

    #[test]
    fn plain_windows_leave_out_what_does_not_fill_one() {
        let windows = plain_windows(25, 8);
        assert_eq!(windows.len(), 3);
        assert_eq!(windows[2], Window { start: 16, length: 8, scored: 0..8 });
        assert!(plain_windows(7, 8).is_empty() && sliding_windows(0, 4, 2, Tail::Score).is_empty());
    }
}
