//! Means over seeds with their intervals.

/// Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
const T_95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

/// Mean, standard deviation, half width of the 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Summary {
    pub(super) n: usize,
    pub(super) mean: f64,
    pub(super) deviation: f64,
    pub(super) half_width: f64,
}

impl Summary {
    /// Of some values; without an interval for one, nothing of none.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let n = values.len();
        if n == 0 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / n as f64;
        if n == 1 {
            return Some(Self { n, mean, deviation: f64::NAN, half_width: f64::NAN });
        }
        let square = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        let deviation = (square / (n - 1) as f64).sqrt();
        let t = T_95.get(n - 2).copied().unwrap_or(1.96);
        Some(Self { n, mean, deviation, half_width: t * deviation / (n as f64).sqrt() })
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Bytes and speeds need no fractions.
        let digits = if self.mean.abs() < 1000.0 { 4 } else { 0 };
        if self.n == 1 {
            return write!(f, "{:.digits$} (n 1)", self.mean);
        }
        write!(f, "{:.digits$} ± {:.digits$}", self.mean, self.half_width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_values_have_students_interval() {
        let mean = Summary::of(&[1.0, 2.0, 3.0]).expect("values");
        assert!((mean.mean - 2.0).abs() < 1e-12 && (mean.deviation - 1.0).abs() < 1e-12);
        assert!((mean.half_width - 4.303 / 3.0_f64.sqrt()).abs() < 1e-9);
        assert_eq!(mean.to_string(), "2.0000 ± 2.4843");
        assert_eq!(Summary::of(&[1.5]).expect("one").to_string(), "1.5000 (n 1)");
        assert_eq!(Summary::of(&[51234.6]).expect("bytes").to_string(), "51235 (n 1)");
        assert!(Summary::of(&[]).is_none());
    }
}
