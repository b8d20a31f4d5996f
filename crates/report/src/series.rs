//! Points of a curve: smoothing for the eye, thinning for the page.

use super::axes::Place;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    /// Progress of training, or a draft position.
    pub(crate) at: Place,
    /// Always finite.
    pub(crate) y: f64,
}

/// A point, where there is a finite value.
pub(crate) fn point(at: Place, y: Option<f64>) -> Option<Point> {
    let y = y.filter(|y| y.is_finite())?;
    Some(Point { at, y })
}

/// Share of a curve's points that smoothing reaches back and forth.
const SMOOTHING_SHARE: f64 = 0.01;

/// Parts that a curve is thinned to; each keeps up to four points. More than a plot has pixels.
pub(crate) const THINNED_PARTS: usize = 400;

/// Mean of all points, nearer ones weighing more: weight `r^|i-j|`. Unlike a running average it
/// looks both ways, so a falling curve is not shown later than it falls.
pub(crate) fn smooth(points: &[Point]) -> Vec<Point> {
    let reach = (points.len() as f64 * SMOOTHING_SHARE).max(0.5);
    let ratio = reach / (1.0 + reach);
    let forward = decayed_sums(points.iter(), ratio);
    let mut backward = decayed_sums(points.iter().rev(), ratio);
    backward.reverse();
    points
        .iter()
        .zip(forward.iter().zip(&backward))
        // Both sums hold the point itself.
        .map(|(point, (f, b))| Point { at: point.at, y: (f.0 + b.0 - point.y) / (f.1 + b.1 - 1.0) })
        .collect()
}

/// `Σ_{j≤i} r^(i-j) y_j` and the sum of its weights, for each i.
fn decayed_sums<'a>(points: impl Iterator<Item = &'a Point>, ratio: f64) -> Vec<(f64, f64)> {
    points
        .scan((0.0, 0.0), |sums, point| {
            *sums = (sums.0 * ratio + point.y, sums.1 * ratio + 1.0);
            Some(*sums)
        })
        .collect()
}

/// Keeps the first, smallest, largest and last point of each of `parts` equal parts, in order, so
/// that no spike is lost.
pub(crate) fn thin(points: &[Point], parts: usize) -> Vec<Point> {
    let parts = parts.max(1);
    if points.len() <= 4 * parts {
        return points.to_vec();
    }
    let mut kept = Vec::with_capacity(4 * parts);
    for part in 0..parts {
        let from = part * points.len() / parts;
        let to = (part + 1) * points.len() / parts;
        let by_height = |a: &usize, b: &usize| points[*a].y.total_cmp(&points[*b].y);
        let low = (from..to).min_by(by_height).unwrap_or(from);
        let high = (from..to).max_by(by_height).unwrap_or(from);
        let mut indices = [from, low, high, to - 1];
        indices.sort_unstable();
        for (i, index) in indices.iter().enumerate() {
            if i == 0 || indices[i - 1] != *index {
                kept.push(points[*index]);
            }
        }
    }
    kept
}

/// Mean of the last twentieth (at least one value).
pub(crate) fn mean_of_last(values: &[f64]) -> Option<f64> {
    let count = values.len().div_ceil(20);
    let last = &values[values.len() - count..];
    (count > 0).then(|| last.iter().sum::<f64>() / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(ys: impl IntoIterator<Item = f64>) -> Vec<Point> {
        let point = |(i, y)| Point { at: Place::fixed(i as f64), y };
        ys.into_iter().enumerate().map(point).collect()
    }

    #[test]
    fn smoothing_is_the_weighted_mean_that_it_says() {
        let curve = points((0..120).map(|i| f64::from(i * i % 17)));
        let reach = 120.0 * SMOOTHING_SHARE;
        let ratio = reach / (1.0 + reach);
        for (i, smoothed) in smooth(&curve).iter().enumerate() {
            let weight = |j: usize| f64::powi(ratio, i.abs_diff(j) as i32);
            let sum: f64 = (0..120).map(|j| weight(j) * curve[j].y).sum();
            let want = sum / (0..120).map(weight).sum::<f64>();
            assert!((smoothed.y - want).abs() < 1e-9, "{i}: {} for {want}", smoothed.y);
        }
    }

    #[test]
    fn smoothing_keeps_constants_and_centres_slopes() {
        assert!(smooth(&points([3.0; 50])).iter().all(|point| (point.y - 3.0).abs() < 1e-12));
        let slope = smooth(&points((0..201).map(f64::from)));
        assert!((slope[100].y - 100.0).abs() < 1e-9);
        assert!(smooth(&[]).is_empty());
        assert_eq!(smooth(&points([7.0])), points([7.0]));
    }

    #[test]
    fn thinning_keeps_ends_spikes_and_order() {
        let mut curve = points((0..100_000).map(|i| f64::from(i % 10)));
        curve[31_415].y = 1e6;
        curve[92_653].y = -1e6;
        let thinned = thin(&curve, 100);
        assert!(thinned.len() <= 400, "{}", thinned.len());
        assert!(thinned.windows(2).all(|pair| pair[0].at.tokens < pair[1].at.tokens), "order");
        for index in [0, 31_415, 92_653, 99_999] {
            assert!(thinned.contains(&curve[index]), "{index} is lost");
        }
    }

    #[test]
    fn short_curves_are_not_thinned() {
        let curve = points((0..400).map(f64::from));
        assert_eq!(thin(&curve, 100), curve);
        assert!(thin(&[], 100).is_empty());
    }

    #[test]
    fn the_end_of_a_run_is_its_last_twentieth() {
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!(mean_of_last(&values), Some(97.0));
        assert_eq!(mean_of_last(&[4.0]), Some(4.0));
        assert_eq!(mean_of_last(&[]), None);
    }
}
