//! Passes of the target over a few rows after a cached context, logits included: one row is a plain
//! decoding step, more rows are a verification.

use longdraft_kernels::device::repeat_passes;
use longdraft_kernels::matrix::BlockFormat;
use longdraft_models::TargetConfig;
use longdraft_models::target_model::{KvCache, Tap, Taps, Target, TargetOptions, tensor_specs};
use longdraft_models::weights::{TensorRole, TensorSpec};
use serde_json::{Value, json};

use super::clock::{Timed, time};
use super::products::read_bandwidth;
use super::{Cases, Place, shape, stored};
use crate::cli::DecodeBenchArguments;
use crate::failure::Result;

/// Tokens of the context that are cached at once.
const PREFILL: usize = 2048;
/// Passes after which a kind of passes may be made of recorded starts.
const KNOWN: usize = 3;

/// Every number of rows after one context.
pub(super) fn run(arguments: &DecodeBenchArguments, cases: &mut Cases) -> Result<()> {
    let place = Place::open(&arguments.bench)?;
    repeat_passes(!arguments.no_graphs);
    let target = target(arguments, &place)?;
    let mut cache = context(&target, arguments.context)?;
    let held = |spec: &TensorSpec| stored::held_bytes(spec, arguments.stored, place.options.dtype);
    let bytes = weight_bytes(target.config(), held);
    let bandwidth = arguments.read_bandwidth.then(read_bandwidth);
    for &rows in &arguments.rows {
        let own = json!({
            "shape": arguments.shape.shape, "layers": target.config().num_hidden_layers,
            "context": arguments.context, "tokens": rows,
            "stored": arguments.stored.map(BlockFormat::name),
        });
        let about = place.describe("decode", own);
        cases.case(about, || {
            let before = target.repeated_passes();
            let timed = passes(arguments, &place, &target, &mut cache, rows)?;
            let mut figures = timed.figures(rows);
            figures.insert("graphs".to_owned(), graphs(&target, before));
            let median = figures["median_s"].as_f64().unwrap_or(f64::NAN);
            figures.insert("weights_gb_s".to_owned(), json!(1e-9 * bytes as f64 / median));
            figures.insert("read_gb_s".to_owned(), json!(bandwidth));
            Ok(figures)
        });
    }
    Ok(())
}

/// Passes that were made of recorded starts, beside those `before`, and why others are not.
fn graphs(target: &Target, before: usize) -> Value {
    let passes = target.repeated_passes() - before;
    json!({"passes": passes, "none_because": target.not_repeated_because()})
}

fn target(arguments: &DecodeBenchArguments, place: &Place) -> Result<Target> {
    let Some(format) = arguments.stored else { return shape::target(&arguments.shape, place) };
    let config = shape::config(&arguments.shape.shape, arguments.shape.layers)?;
    let source = stored::Blocks::new(&config, format, place);
    let options = TargetOptions { as_stored: true, ..place.options.clone() };
    Ok(Target::from_source(config.clone(), &source, &options)?)
}

/// Bytes of weights that a pass over few rows reads: all matrices but the embedding table, which is read as the
/// head where the two are tied.
fn weight_bytes(config: &TargetConfig, held: impl Fn(&TensorSpec) -> usize) -> usize {
    let specs = tensor_specs(config);
    let matrices = specs.iter().filter(|spec| spec.shape.len() == 2);
    matrices.filter(|spec| spec.role != TensorRole::Embedding).map(held).sum()
}

fn context(target: &Target, tokens: usize) -> Result<KvCache> {
    let (mut cache, vocabulary) = (target.new_cache()?, target.config().vocab_size);
    for start in (0..tokens).step_by(PREFILL) {
        let places = start..tokens.min(start + PREFILL);
        let ids: Vec<u32> = places.clone().map(|t| shape::token(t, 0, vocabulary)).collect();
        let positions: Vec<u32> = places.map(|t| t as u32).collect();
        target.extend(&ids, &positions, &mut cache, &Taps::of(&[]))?;
    }
    Ok(cache)
}

fn passes(
    arguments: &DecodeBenchArguments,
    place: &Place,
    target: &Target,
    cache: &mut KvCache,
    rows: usize,
) -> Result<Timed> {
    let (first, vocabulary) = (arguments.context, target.config().vocab_size);
    // Passes that are timed are those of one room.
    cache.truncate(first);
    cache.reserve(rows)?;
    // Passes that repeat are known by others after fewer tokens.
    for at in first.saturating_sub(KNOWN)..first {
        let positions: Vec<u32> = (at..at + rows).map(|t| t as u32).collect();
        cache.truncate(at);
        target.extend(&vec![0; rows], &positions, cache, &Taps::of(&[Tap::FinalHidden]))?;
    }
    cache.truncate(first);
    let positions: Vec<u32> = (first..first + rows).map(|t| t as u32).collect();
    let prepare = |step| -> Result<Vec<u32>> {
        Ok((0..rows).map(|row| shape::token(row, step + 1, vocabulary)).collect())
    };
    time(place, &arguments.bench, prepare, |ids| {
        let features = target.extend(&ids, &positions, cache, &Taps::of(&[Tap::FinalHidden]))?;
        target.hold_ends()?.logits(features.final_hidden()?)?;
        cache.truncate(first);
        Ok(None)
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use longdraft_models::{DeviceChoice, Precision, StepProducts};

    use super::*;
    use crate::cli::{BenchArguments, ShapeArguments};

    #[test]
    fn a_pass_reads_all_matrices_but_the_table() {
        let config = shape::config("tiny", None).expect("known");
        let (hidden, inner, kv) = (64, 128, 32);
        let layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner;
        let values = 8 * layer + 512 * hidden;
        let held = |format| move |spec: &TensorSpec| stored::held_bytes(spec, format, DType::F32);
        assert_eq!(weight_bytes(&config, held(None)), 4 * values);
        // 32 values of Q8_0 take 34 bytes.
        assert_eq!(weight_bytes(&config, held(Some(BlockFormat::Q8_0))), values / 32 * 34);
        // No row of them is a block of 256 values.
        assert_eq!(weight_bytes(&config, held(Some(BlockFormat::Q4K))), 4 * values);
    }

    #[test]
    fn a_target_of_blocks_holds_them_and_says_something() {
        let place = Place { device: Device::Cpu, options: TargetOptions::default() };
        let bench = BenchArguments {
            device: DeviceChoice::Cpu,
            precision: Precision::F32,
            products: StepProducts::F32,
            warm_ups: 0,
            steps: 1,
            trace: false,
            in_turn: false,
            one_pass: false,
        };
        let arguments = DecodeBenchArguments {
            shape: ShapeArguments { shape: "tiny".to_owned(), layers: None },
            bench,
            rows: vec![1],
            context: 3,
            stored: Some(BlockFormat::Q4_1),
            read_bandwidth: false,
            no_graphs: false,
        };
        let target = target(&arguments, &place).expect("target");
        let mut cache = context(&target, 3).expect("context");
        let features = target.extend(&[1], &[3], &mut cache, &Taps::of(&[Tap::FinalHidden]));
        let features = features.expect("pass");
        let ends = target.hold_ends().expect("ends");
        let logits = ends.logits(features.final_hidden().expect("states")).expect("logits");
        let logits: Vec<f32> = logits.flatten_all().expect("flat").to_vec1().expect("values");
        assert!(logits.iter().all(|value| value.is_finite()));
        assert!(logits.iter().any(|value| value.to_bits() != logits[0].to_bits()));
    }
}
