//! What orthogonal updates of matrices (Muon) have in common.

/// Relative work of a parameter's update; `matrix`: the size of one that is orthogonalised.
pub fn update_cost(elements: usize, matrix: Option<(usize, usize)>) -> u64 {
    let count = elements as u64;
    match matrix {
        // Five iterations of three products.
        Some((rows, columns)) => 15 * count * rows.min(columns) as u64,
        None => count,
    }
}

/// Adds a gradient to the momentum sum and looks ahead (Nesterov).
pub fn direction(sum: &mut [f32], gradient: &[f32], momentum: f64, clip_factor: f64) -> Vec<f32> {
    let (momentum, clip) = (momentum as f32, clip_factor as f32);
    sum.iter_mut()
        .zip(gradient)
        .map(|(sum, gradient)| {
            let gradient = gradient * clip;
            *sum = momentum * *sum + gradient;
            gradient + momentum * *sum
        })
        .collect()
}
