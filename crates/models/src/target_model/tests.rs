//! A head that is held as blocks says what its logits say.

use std::path::Path;

use candle_core::{Device, Tensor};
use longdraft_kernels::random::CounterRng;

use super::{Target, TargetOptions};

/// The small target that the program carries, held as its file holds it.
fn stored() -> Target {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/target/demonstration.gguf");
    let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
    let target = Target::open(path.to_str().expect("path"), &options).expect("target");
    assert!(target.head_matrix().expect("head").dense().is_none(), "held as blocks");
    target
}

/// States like those after a final norm, `[rows, H]`.
fn states(target: &Target, rows: usize) -> Tensor {
    let hidden = target.config().hidden_size;
    let mut random = CounterRng::new(7, "states", &[]);
    let values: Vec<f32> = (0..rows * hidden).map(|_| random.normal() as f32).collect();
    Tensor::from_vec(values, (rows, hidden), &Device::Cpu).expect("states")
}

#[test]
fn the_most_likely_tokens_of_a_head_of_blocks_are_those_of_its_logits() {
    let target = stored();
    // More rows than are read at a time.
    let states = states(&target, 150);
    let logits = target.logits(&states).expect("logits").to_vec2::<f32>().expect("values");
    let summary = target.head_summary(&states).expect("summary");
    for k in [1, 7, target.config().vocab_size] {
        let found = target.top_k(&states, k).expect("tokens");
        assert_eq!(found.ids.len(), logits.len() * k);
        for (row, logits) in logits.iter().enumerate() {
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            let all: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum::<f64>().ln();
            assert_eq!(found.ids[row * k..][..k], order[..k], "row {row}, {k} tokens");
            assert!((summary.log_sum_exp[row] - all).abs() < 1e-5, "row {row}");
            assert_eq!(summary.argmax[row], order[0]);
            for (id, log_prob) in order.iter().zip(&found.log_probs[row * k..][..k]) {
                let want = f64::from(logits[*id as usize]) - all;
                assert!((f64::from(*log_prob) - want).abs() < 1e-5, "row {row}, token {id}");
            }
        }
    }
}
