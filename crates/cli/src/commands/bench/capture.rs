//! Rows through the target into a store: the pass, the encoding and the writing of a shard a row.

use longdraft_data::batch::AnchorOffset;
use longdraft_features::FeatureNeeds;
use longdraft_features::store::{Contents, Recipe, Record, StoreDtype, StoreWriter, Turn};
use longdraft_models::target_model::Target;
use longdraft_train::config::TrainConfig;
use longdraft_train::method::Method;
use serde_json::json;

use super::clock::{Timed, time};
use super::{Cases, Place, shape};
use crate::cli::CaptureBenchArguments;
use crate::failure::{Failure, Result};

/// Every length, over one target.
pub(super) fn run(arguments: &CaptureBenchArguments, cases: &mut Cases) -> Result<()> {
    let rows = &arguments.rows;
    let place = Place::open(&rows.bench)?;
    let target = shape::target(&rows.shape, &place)?;
    let contents = contents(arguments.method, &target)?;
    let dtype = StoreDtype::Bf16;
    for &tokens in &rows.tokens {
        let own = json!({
            "shape": rows.shape.shape, "layers": target.config().num_hidden_layers,
            "method": arguments.method.name(), "store_dtype": dtype,
            "row_bytes": contents.row_bytes(target.config(), dtype, (tokens, tokens)),
        });
        let about = place.describe("capture", own);
        cases.steps(about, tokens, || steps(arguments, &place, &target, &contents, tokens));
    }
    Ok(())
}

/// What a method's default configuration keeps of a row.
fn contents(method: Method, target: &Target) -> Result<Contents> {
    let config = json!({
        "target": "", "output": "", "data": { "train": [] }, "draft": { "method": method.name() },
    });
    let config: TrainConfig = serde_json::from_value(config).map_err(Failure::work)?;
    let draft = config.draft.method.footprint(&config.teacher, target.config())?;
    let needs = FeatureNeeds { taps: draft.taps(), teacher: draft.teacher(), ahead: draft.ahead() };
    Ok(Contents::of(&needs))
}

/// A store of `rows` rows, each a shard.
fn recipe(target: &Target, contents: &Contents, rows: usize, tokens: usize) -> Recipe {
    Recipe {
        target: target.fingerprint().to_owned(),
        anchor: AnchorOffset { enabled: false, ..AnchorOffset::default() },
        ..Recipe::of_rows(contents, rows, tokens)
    }
}

fn steps(
    arguments: &CaptureBenchArguments,
    place: &Place,
    target: &Target,
    contents: &Contents,
    tokens: usize,
) -> Result<Timed> {
    let folder =
        tempfile::tempdir().map_err(|error| Failure::work(format!("a folder: {error}")))?;
    let bench = &arguments.rows.bench;
    let rows = bench.warm_ups + bench.steps;
    let recipe = recipe(target, contents, rows, tokens);
    let store = StoreWriter::open(&folder.path().display().to_string(), recipe, false)?;
    store.begin()?;
    let shards = store.shards();
    let teacher_tokens: Vec<u32> = (0..tokens as u32).collect();
    let vocabulary = target.config().vocab_size;
    let prepare = |step| Ok((&shards[step], shape::batch(tokens, step, vocabulary)));
    let timed = time(place, bench, prepare, |(shard, batch)| {
        let Turn::Mine(mut work) = store.take(shard)? else {
            let place = folder.path().display();
            return Err(Failure::work(format!("another process writes to {place}")));
        };
        let record = Record::capture(target, &batch, contents, &teacher_tokens)?;
        store.add(&mut work, batch, record)?;
        store.complete(work)?;
        Ok(None)
    })?;
    // Only a whole store has an index.
    store.finish()?;
    Ok(timed)
}

#[cfg(test)]
mod tests {
    use longdraft_features::store::{PartRecipe, ShardPlan};
    use longdraft_models::target_model::TargetOptions;

    use super::*;

    #[test]
    fn a_row_is_a_shard_and_nothing_is_held_out() {
        let plan = |recipe: &PartRecipe| recipe.shards.len();
        let config = shape::config("tiny", None).expect("known");
        let target = Target::random(config, 0, &TargetOptions::default()).expect("target");
        let method = *Method::named("eagle3").expect("a method");
        let contents = contents(method, &target).expect("contents");
        assert_eq!(contents.layers.len(), 3);
        let recipe = recipe(&target, &contents, 4, 16);
        assert_eq!((plan(&recipe.train), plan(&recipe.held_out), recipe.train.tokens), (4, 0, 64));
        let folder = tempfile::tempdir().expect("tempdir");
        let store = StoreWriter::open(&folder.path().display().to_string(), recipe, false);
        let shards: Vec<ShardPlan> = store.expect("a store").shards();
        assert!(shards.iter().all(|shard| shard.rows.len() == 1));
    }
}
