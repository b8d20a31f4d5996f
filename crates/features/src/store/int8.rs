//! Tapped layers in 8 bits: `x ≈ scale · q`, `q` in −127..=127, a scale for every token and layer.

/// Largest magnitude of a code.
const LARGEST: f32 = 127.0;

/// Codes and scales of rows of `width` values; a row of zeros has scale 0.
pub(super) fn quantise(values: &[f32], width: usize) -> (Vec<i8>, Vec<f32>) {
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(values.len() / width.max(1));
    for row in values.chunks(width.max(1)) {
        let largest = row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let inverse = if largest > 0.0 { LARGEST / largest } else { 0.0 };
        scales.push(largest / LARGEST);
        codes.extend(row.iter().map(|x| (x * inverse).round() as i8));
    }
    (codes, scales)
}

/// The values again; `None` if there is not a scale a row.
pub(super) fn widen(codes: &[i8], scales: &[f32]) -> Option<Vec<f32>> {
    if scales.is_empty() || !codes.len().is_multiple_of(scales.len()) {
        return None;
    }
    let rows = codes.chunks((codes.len() / scales.len()).max(1)).zip(scales);
    Some(rows.flat_map(|(row, scale)| row.iter().map(move |q| f32::from(*q) * scale)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_within_half_a_step_of_their_row() {
        let values: Vec<f32> = (0..60).map(|i| ((i * 37 % 61) as f32 - 30.0) * 0.3).collect();
        let mut rows = [values, vec![0.0; 20]].concat();
        rows[5] = 1000.0;
        let (codes, scales) = quantise(&rows, 20);
        assert_eq!((codes.len(), scales.len(), scales[3]), (80, 4, 0.0));
        let widened = widen(&codes, &scales).expect("fits");
        for (row, scale) in scales.iter().enumerate() {
            for i in row * 20..(row + 1) * 20 {
                let error = (rows[i] - widened[i]).abs();
                assert!(error <= 0.5001 * scale, "{i}: {} {}", rows[i], widened[i]);
            }
        }
        assert!(widen(&codes, &scales[..3]).is_none() && widen(&codes, &[]).is_none());
    }
}
