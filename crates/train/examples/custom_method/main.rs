//! A draft method that no crate of this project knows: two heads over the target's last hidden
//! state, for the two tokens after the next one.
//!
//! ```text
//! s_i    = h_t + W_i h_t                 i = 1, 2; W_i starts as 0
//! logits = W_head s_i                    the target's head; proposes x_{t+1+i}
//! ```
//!
//! `draft` is the network and its files, `method` what trains it, `drafter` what decodes with it. The
//! program trains it on a small text, is stopped and goes on, writes the draft to a folder, reads it
//! back and decodes.
//!
//!     cargo run --example custom_method

mod draft;
mod drafter;
mod method;

use std::error::Error;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use longdraft_decode::drafter::{Drafter, ModelDrafter};
use longdraft_decode::{DecodeOptions, DraftShape, Generation, SpeculativeDecoder};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::Draft;
use longdraft_models::draft::files::open_weights;
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::weights::memory::MemorySource;
use longdraft_parallel::World;
use longdraft_rules::Checked;
use longdraft_train::checkpoint::{ResumePolicy, read_draft, read_state};
use longdraft_train::config::TrainConfig;
use longdraft_train::stage::{Ending, Event, Observer, Stage};
use serde_json::json;

use draft::TwoHeads;
use drafter::TwoHeadsModel;
use method::TwoHeadsMethod;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Steps of the run.
const STEPS: u64 = 8;

fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets").join(name)
}

fn configuration(output: &Path) -> Outcome<Checked<TrainConfig>> {
    let mut config: TrainConfig = serde_json::from_value(json!({
        "target": asset("target/demonstration.gguf"),
        "output": output,
        "data": {
            "train": [{
                "path": asset("corpus/gsm8k-train-excerpt.jsonl"), "limit_tokens": 4000,
                "template": { "kind": "raw", "fields": ["question", "answer"] },
            }],
            "row_tokens": 256, "held_out_rows": 1, "anchor": { "enabled": false },
        },
        "schedule": { "learning_rate": 2e-3 },
        "train": { "steps": STEPS, "rows_per_step": 2 },
    }))?;
    config.draft.method = Box::new(TwoHeadsMethod {});
    Checked::new(config).map_err(|problems| format!("{problems:?}").into())
}

/// Stops after some steps, and remembers where a run went on.
struct Watch {
    stop_after: u64,
    step: u64,
    resumed_at: Option<u64>,
}

impl Observer for Watch {
    fn on_event(&mut self, event: Event<'_>) {
        match event {
            Event::Step(report) => self.step = report.step,
            Event::Resumed(step) => self.resumed_at = Some(step),
            _ => {}
        }
    }

    fn should_stop(&self) -> bool {
        self.step >= self.stop_after
    }
}

/// Trains up to a step; returns how the run ended and where it had gone on.
fn train(output: &Path, target: &Arc<Target>, stop_after: u64) -> Outcome<(Ending, Option<u64>)> {
    let config = configuration(output)?;
    let tokenizer = Target::open_tokenizer(&config.target)?;
    let mut watch = Watch { stop_after, step: 0, resumed_at: None };
    let (policy, world) = (ResumePolicy::default(), World::single());
    let mut stage =
        Stage::prepare(config, Arc::clone(target), tokenizer, policy, &world, &mut watch)?;
    let ending = stage.run(&mut watch)?;
    Ok((ending, watch.resumed_at))
}

/// Reads the last checkpoint's draft and writes it to a folder.
fn extract(run: &Path, folder: &Path, target: &Target) -> Outcome<()> {
    let checkpoint = run.join("checkpoints/last");
    let state = read_state(&checkpoint)?;
    let source = MemorySource::new(read_draft(&checkpoint)?);
    let draft = TwoHeads::from_source(&source, target)?;
    std::fs::create_dir_all(folder)?;
    Ok(draft.save(folder, &state.target_fingerprint)?)
}

/// Decodes a text, greedily.
fn decode(target: &Target, drafter: Option<Box<dyn Drafter + '_>>) -> Outcome<Generation> {
    let prompt: Vec<TargetTokenId> = (3..20).map(TargetTokenId).collect();
    let shape = DraftShape::Chain { length: draft::HEADS };
    let options = DecodeOptions { max_new_tokens: 48, shape, ..DecodeOptions::default() };
    let mut decoder = SpeculativeDecoder::new(target, drafter);
    Ok(decoder.generate(&prompt, &options, &mut |_| ControlFlow::Continue(()))?)
}

/// The values of a run's last draft.
fn weights(run: &Path) -> Outcome<Vec<Vec<f32>>> {
    let tensors = read_draft(&run.join("checkpoints/last"))?;
    let values = tensors.into_iter().map(|(_, tensor)| tensor.flatten_all()?.to_vec1());
    Ok(values.collect::<Result<_, _>>()?)
}

/// All of it, in a folder; returns tokens emitted by pass of the target.
fn run(folder: &Path) -> Outcome<f64> {
    let name = asset("target/demonstration.gguf").display().to_string();
    let target = Arc::new(Target::open(&name, &TargetOptions::default())?);
    let (stopped, whole) = (folder.join("stopped"), folder.join("whole"));
    let half = train(&stopped, &target, STEPS / 2)?;
    let rest = train(&stopped, &target, u64::MAX)?;
    let all = train(&whole, &target, u64::MAX)?;
    let ends =
        [(Ending::Stopped, None), (Ending::Finished, Some(STEPS / 2)), (Ending::Finished, None)];
    if [half, rest, all] != ends {
        return Err("a run ended otherwise than it should".into());
    }
    if weights(&stopped)? != weights(&whole)? {
        return Err("a resumed run is another one".into());
    }
    let extracted = folder.join("draft");
    extract(&whole, &extracted, &target)?;
    let draft = TwoHeads::from_source(open_weights(&extracted)?.as_ref(), &target)?;
    let plain = decode(&target, None)?;
    let drafted = decode(&target, Some(Box::new(ModelDrafter::new(TwoHeadsModel::new(&draft)))))?;
    if plain.tokens != drafted.tokens {
        return Err(format!("{} changed what is written", draft.method()).into());
    }
    Ok(drafted.metrics.acceptance_length())
}

fn main() -> Outcome<()> {
    let folder = tempfile::tempdir()?;
    let length = run(folder.path())?;
    let text =
        format!("trained, resumed, extracted; {length:.2} tokens a pass, as decoded plainly\n");
    Ok(std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes())?)
}

#[test]
fn a_method_from_outside_trains_resumes_and_decodes_losslessly() {
    let folder = tempfile::tempdir().expect("a folder");
    let length = run(folder.path()).expect("every step of the example");
    assert!(length >= 1.0, "{length}");
}
