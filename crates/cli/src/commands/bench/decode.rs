//! Passes of the target over a few rows after a cached context, logits included: one row is a plain
//! decoding step, more rows are a verification.

use candle_core::DType;
use longdraft_models::TargetConfig;
use longdraft_models::target_model::{KvCache, Tap, Taps, Target};
use serde_json::json;

use super::clock::{Timed, time};
use super::products::read_bandwidth;
use super::{Cases, Place, shape};
use crate::cli::DecodeBenchArguments;
use crate::failure::Result;

/// Tokens of the context that are cached at once.
const PREFILL: usize = 2048;

/// Every number of rows after one context.
pub(super) fn run(arguments: &DecodeBenchArguments, cases: &mut Cases) -> Result<()> {
    let place = Place::open(&arguments.bench)?;
    let target = shape::target(&arguments.shape, &place)?;
    let mut cache = context(&target, arguments.context)?;
    let bytes = weight_bytes(target.config(), place.options.dtype);
    let bandwidth = arguments.read_bandwidth.then(read_bandwidth);
    for &rows in &arguments.rows {
        let own = json!({
            "shape": arguments.shape.shape, "layers": target.config().num_hidden_layers,
            "context": arguments.context, "tokens": rows,
        });
        let about = place.describe("decode", own);
        cases.case(about, || {
            let timed = passes(arguments, &place, &target, &mut cache, rows)?;
            let mut figures = timed.figures(rows);
            let median = figures["median_s"].as_f64().unwrap_or(f64::NAN);
            figures.insert("weights_gb_s".to_owned(), json!(1e-9 * bytes as f64 / median));
            figures.insert("read_gb_s".to_owned(), json!(bandwidth));
            Ok(figures)
        });
    }
    Ok(())
}

/// Bytes of weights that a pass over few rows reads: all but the embedding table, which is read as the
/// head where the two are tied.
fn weight_bytes(config: &TargetConfig, dtype: DType) -> usize {
    let layer = 2 * config.hidden_size * config.query_size()
        + 2 * config.hidden_size * config.kv_size()
        + 3 * config.hidden_size * config.intermediate_size;
    let values = layer * config.num_hidden_layers + config.vocab_size * config.hidden_size;
    values * dtype.size_in_bytes()
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
    use longdraft_models::target_model::TargetOptions;

    use super::*;

    #[test]
    fn a_pass_reads_all_matrices_but_the_table() {
        let config = shape::config("tiny", None).expect("known");
        let target = Target::random(config.clone(), 0, &TargetOptions::default()).expect("target");
        let specs = longdraft_models::target_model::tensor_specs(&config);
        let matrices = specs.iter().filter(|spec| spec.shape.len() == 2);
        let values: usize = matrices.map(|spec| spec.shape.iter().product::<usize>()).sum();
        let table = config.vocab_size * config.hidden_size;
        assert_eq!(weight_bytes(target.config(), DType::F32), 4 * (values - table));
    }
}
