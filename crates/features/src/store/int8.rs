//! Tapped layers in 8 bits: `x ≈ scale · q`, `q` in −127..=127, a scale for every token and layer.

/// Largest magnitude of a code.
const LARGEST: f32 = 127.0;

/// Codes and scales of vectors of `width` finite values; a vector of zeros has scale 0.
pub(super) fn quantise(values: &[f32], width: usize) -> (Vec<i8>, Vec<f32>) {
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(values.len() / width.max(1));
    for vector in values.chunks(width.max(1)) {
        let largest = vector.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let inverse = if largest > 0.0 { LARGEST / largest } else { 0.0 };
        scales.push(largest / LARGEST);
        codes.extend(vector.iter().map(|x| (x * inverse).round() as i8));
    }
    (codes, scales)
}

/// The values again; `None` if there is not a scale a vector.
pub(super) fn widen(codes: &[i8], scales: &[f32]) -> Option<Vec<f32>> {
    if scales.is_empty() || !codes.len().is_multiple_of(scales.len()) {
        return None;
    }
    let vectors = codes.chunks((codes.len() / scales.len()).max(1)).zip(scales);
    let widened =
        vectors.flat_map(|(codes, scale)| codes.iter().map(move |q| f32::from(*q) * scale));
    Some(widened.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_within_half_a_step_of_their_vector() {
        let values: Vec<f32> = (0..60).map(|i| ((i * 37 % 61) as f32 - 30.0) * 0.3).collect();
        let mut values = [values, vec![0.0; 20]].concat();
        values[5] = 1000.0;
        let (codes, scales) = quantise(&values, 20);
        assert_eq!((codes.len(), scales.len(), scales[3]), (80, 4, 0.0));
        let widened = widen(&codes, &scales).expect("fits");
        for (vector, scale) in scales.iter().enumerate() {
            for i in vector * 20..(vector + 1) * 20 {
                let error = (values[i] - widened[i]).abs();
                assert!(error <= 0.5001 * scale, "{i}: {} {}", values[i], widened[i]);
            }
        }
        assert!(widen(&codes, &scales[..3]).is_none() && widen(&codes, &[]).is_none());
    }
}
