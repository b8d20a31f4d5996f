//! A passage whose tokens are scored.

use candle_core::DType;
use longdraft_models::target_model::{PackedSequence, Tap, Taps};
use longdraft_models::weights::safetensors::SafetensorsSource;

use super::files::{ids, numbers};
use super::{CaseReport, ForwardCase};
use crate::error::Result;
use crate::{malformed, read_json, stored, worst};

/// Scored tokens of the passage: per token, and their mean.
const TOLERANCE: (f64, f64) = (1e-3, 1e-5);

/// The same with 16-bit values.
const ROUNDED: (f64, f64) = (0.5, 2e-2);

impl ForwardCase<'_> {
    /// Log-likelihoods of the tokens of one passage, if the case has it.
    pub(super) fn check_nll(&self, report: &mut CaseReport) -> Result<()> {
        if !self.folder.join("nll.json").is_file() {
            return Ok(());
        }
        let passage = read_json(&self.folder.join("nll.json"))?;
        let ids = ids(&passage["ids"]);
        if ids.len() < 2 {
            return Err(malformed(self.folder, "nll.json: no ids"));
        }
        let taps = Taps::of(&[Tap::FinalHidden]);
        let features = self.target.forward(&PackedSequence::single(&ids), &taps)?;
        let logits = self.target.hold_ends()?.logits(features.final_hidden()?)?.to_vec2::<f32>()?;
        let nll: Vec<f64> =
            logits.iter().zip(&ids[1..]).map(|(z, label)| row_nll(z, *label)).collect();
        let mean = nll.iter().sum::<f64>() / nll.len() as f64;
        if let Some(want) = passage["mean_nll"].as_f64() {
            let tolerance = self.place.allowed(TOLERANCE.1, ROUNDED.1);
            report.check("passage mean NLL", (mean - want).abs(), tolerance);
        }
        let mut want = numbers(&passage["nll_first8"]);
        let path = self.folder.join("tensors.safetensors");
        if path.is_file() {
            let file = SafetensorsSource::open_file(&path)?;
            if let Some(all) = stored(&file, "nll.per_token")? {
                want = all.to_dtype(DType::F64)?.to_vec1()?;
            }
        }
        let error = nll.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, worst);
        let tolerance = self.place.allowed(TOLERANCE.0, ROUNDED.0);
        report.check(format!("passage NLL of {} tokens", want.len()), error, tolerance);
        Ok(())
    }
}

fn row_nll(logits: &[f32], label: u32) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|z| (f64::from(*z) - max).exp()).sum();
    max + sum.ln() - f64::from(logits[label as usize])
}
