//! Where an axis has its ticks, and how numbers read.

/// Round values (1, 2, 2.5 or 5 times a power of ten) within a range, about `count` of them.
pub(crate) fn linear_ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let step = round_step((high - low) / count.max(1) as f64);
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    if !step.is_normal() || !first.is_finite() || last < first {
        return Vec::new();
    }
    (0..=(last - first) as usize).map(|i| (first + i as f64) * step).collect()
}

/// Smallest round value that is no less.
fn round_step(least: f64) -> f64 {
    let power = 10.0_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    steps.map(|step| step * power).into_iter().find(|step| *step >= least * 0.999).unwrap_or(least)
}

/// Round values within a positive range for a logarithmic axis: 1, 2, 5 in each decade, or powers
/// of ten alone when there are many decades.
pub(crate) fn logarithmic_ticks(low: f64, high: f64) -> Vec<f64> {
    let decades = (high / low).log10();
    if !(low > 0.0 && decades.is_finite()) {
        return Vec::new();
    }
    let mantissas: &[f64] = if decades <= 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let stride = (decades / 7.0).ceil().max(1.0) as usize;
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    (first..=last)
        .step_by(stride)
        .flat_map(|power| mantissas.iter().map(move |mantissa| mantissa * 10.0_f64.powi(power)))
        .filter(|tick| (low..=high).contains(tick))
        .collect()
}

/// A number with about `digits` significant digits: `0.00025` as `2.5e-4`, `1234567` as `1.23M`.
pub(crate) fn number(value: f64, digits: usize) -> String {
    let size = value.abs();
    if size == 0.0 {
        return "0".into();
    }
    if !value.is_finite() {
        return "–".into();
    }
    for (unit, suffix) in [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")] {
        if size >= unit * 0.9995 {
            let unit = if suffix == "k" { 1e3 } else { unit };
            return format!("{}{suffix}", plain(value / unit, digits));
        }
    }
    if size < 1e-2 {
        let text = format!("{value:.*e}", digits.saturating_sub(1));
        return match text.split_once('e') {
            Some((mantissa, power)) => format!("{}e{power}", trimmed(mantissa)),
            None => text,
        };
    }
    plain(value, digits)
}

fn plain(value: f64, digits: usize) -> String {
    let before = value.abs().log10().floor() as i32 + 1;
    let decimals = (digits as i32 - before).clamp(0, 12) as usize;
    trimmed(&format!("{value:.decimals$}")).to_owned()
}

fn trimmed(text: &str) -> &str {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text }
}

/// `0.4312` as `43.1`, in percent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

/// `1234567` as `1,234,567`.
pub(crate) fn whole(value: u64) -> String {
    let digits = value.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).unwrap_or_default())
        .collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_ticks_are_round_and_within() {
        assert_eq!(linear_ticks(0.0, 100.0, 5), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(linear_ticks(-0.3, 1.1, 3), [0.0, 0.5, 1.0]);
        assert_eq!(linear_ticks(0.0, 230_000.0, 5).len(), 5);
        assert!(linear_ticks(1.0, 1.0, 5).is_empty());
        assert!(linear_ticks(0.0, f64::INFINITY, 5).is_empty());
    }

    #[test]
    fn logarithmic_ticks_thin_out_over_many_decades() {
        let ticks = logarithmic_ticks(1.5, 60.0);
        assert_eq!(ticks, [2.0, 5.0, 10.0, 20.0, 50.0]);
        let wide = logarithmic_ticks(1e-9, 1e9);
        assert!((4..=10).contains(&wide.len()), "{wide:?}");
        assert!(logarithmic_ticks(0.0, 1.0).is_empty());
    }

    #[test]
    fn numbers_read_well() {
        let cases = [
            (0.0, "0"),
            (0.00025, "2.5e-4"),
            (0.5, "0.5"),
            (2.763_233, "2.76"),
            (54.064, "54.1"),
            (1372.97, "1373"),
            (15_983.0, "16k"),
            (234_618.0, "235k"),
            (1_234_567.0, "1.23M"),
            (2.5e9, "2.5B"),
            (-3.0, "-3"),
            (f64::NAN, "–"),
        ];
        for (value, want) in cases {
            assert_eq!(number(value, 3), want, "{value}");
        }
        assert_eq!((percent(0.4312), whole(1_234_567)), ("43.1".into(), "1,234,567".into()));
        assert_eq!((whole(0), whole(999)), ("0".into(), "999".into()));
    }
}
