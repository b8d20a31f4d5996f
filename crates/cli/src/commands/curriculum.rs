//! The stages of a curriculum: run in order, finished ones skipped, drafts handed on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use longdraft_models::target::{Layers, Target};
use longdraft_models::{DeviceChoice, Precision};
use longdraft_train::curriculum::{CurriculumFile, StageEntry, StartFrom};
use longdraft_train::parallel::World;
use longdraft_train::stage::{Ending, Evaluator, ResumePolicy, RowMetrics};
use serde_json::{Value, json};

use crate::commands::{report, train};
use crate::configuration::LocatedStage;
use crate::failure::Result;
use crate::progress::{TrainingProgress, stop_on_interrupt};
use crate::ranks::Voice;

/// What has to be the same for stages to share an open target.
#[derive(PartialEq)]
struct OpenedAs {
    target: String,
    layers: Layers,
    is_spread: bool,
    ranks_a_row: usize,
    ranks_a_layer: usize,
    device: DeviceChoice,
    precision: Precision,
}

/// Held-out figures of every stage's draft (rows) on every stage's text (columns).
const TABLE_FILE: &str = "held_out.json";

/// Runs every stage; a second call goes on where the first one stopped.
pub(crate) fn run(
    output: &Path,
    stages: Vec<LocatedStage>,
    policy: ResumePolicy,
    world: &World,
    json: bool,
) -> Result<()> {
    let finished = match train_all(output, stages, policy, world, &mut |_| {})? {
        End::Stopped(stage) => {
            if world.is_first() {
                outln!("stopped in stage {stage}: the same command goes on from there");
            }
            return Ok(());
        }
        End::OnFirstRank => return Ok(()),
        End::Finished(finished) => finished,
    };
    let page = report::write_page(output)?;
    if json {
        let held_out = &finished.held_out;
        outln!(
            "{}",
            json!({ "output": output, "finished": true, "report": page, "held_out": held_out })
        );
    } else {
        outln!(
            "done, plots: {}; write the draft with `longdraft extract {}`",
            page.display(),
            finished.last_run.display()
        );
    }
    Ok(())
}

/// How the stages ended.
pub(crate) enum End {
    /// The user stopped this one.
    Stopped(String),
    /// All of them are trained, and the first rank compares them.
    OnFirstRank,
    /// All of them are trained.
    Finished(Finished),
}

/// What trained stages leave.
pub(crate) struct Finished {
    /// Run directory of the last stage.
    pub(crate) last_run: PathBuf,
    /// Every stage's draft on every stage's held-out text, as written to `held_out.json`.
    pub(crate) held_out: Value,
}

/// Trains all stages and compares their drafts; `before_stage` hears the name of each as it starts.
pub(crate) fn train_all(
    output: &Path,
    stages: Vec<LocatedStage>,
    policy: ResumePolicy,
    world: &World,
    before_stage: &mut dyn FnMut(&str),
) -> Result<End> {
    for stage in &stages {
        stage.located.config.check_shared_layers(world.size())?;
    }
    if world.is_first() {
        describe(output, &stages).write(output)?;
    }
    let stop = stop_on_interrupt();
    let mut target: Option<(OpenedAs, Arc<Target>)> = None;
    let mut evaluators: Vec<(String, Evaluator)> = Vec::new();
    let mut before: Option<PathBuf> = None;
    let mut any_shared = false;
    let count = stages.len();
    for (index, stage) in stages.into_iter().enumerate() {
        let LocatedStage { name, start_from, located } = stage;
        let mut config = located.config;
        if let Some(before) = &before
            && let Some(checkpoint) = start_from.checkpoint(before)?
        {
            config.draft.from = Some(checkpoint);
        }
        let is_spread = config.parallel.spreads_weights(world);
        let is_shared = config.parallel.tensor > 1;
        let opened_as = OpenedAs {
            target: config.target.clone(),
            layers: config.needed_layers(),
            is_spread,
            ranks_a_row: config.parallel.sequence,
            ranks_a_layer: config.parallel.tensor,
            device: config.device,
            precision: config.precision,
        };
        let opened = match target.take() {
            Some((other, opened)) if other == opened_as => opened,
            _ => train::open_target(&config, world)?,
        };
        let from = match (&before, start_from) {
            (Some(_), StartFrom::Last) => "from the last draft of the stage before",
            (Some(_), StartFrom::Best) => "from the best draft of the stage before",
            _ => "from its own start",
        };
        before_stage(&name);
        let voice = Voice::of(world, &config.output)?;
        voice.say(&format!("[stage {}/{count}] {name}, {from}", index + 1));
        let mut progress = TrainingProgress::new(Arc::clone(&stop), voice);
        let run = config.output.clone();
        let (ending, trained) = train::train(config, &opened, policy, world, &mut progress)?;
        if ending == Ending::Stopped {
            return Ok(End::Stopped(name));
        }
        evaluators.push((name, trained.into_evaluator()?));
        any_shared |= is_spread || is_shared;
        target = Some((opened_as, opened));
        before = Some(run);
    }
    // A target that is spread or shared runs on all ranks or none.
    let measured = world.is_first() || any_shared;
    let table = measured.then(|| HeldOutTable::measure(&evaluators)).transpose()?;
    let Some(table) = table.filter(|_| world.is_first()) else {
        return Ok(End::OnFirstRank);
    };
    table.print();
    let held_out = table.to_json();
    let path = output.join(TABLE_FILE);
    std::fs::write(&path, format!("{held_out:#}\n"))
        .map_err(|error| crate::failure::Failure::work(format!("{}: {error}", path.display())))?;
    Ok(End::Finished(Finished { last_run: before.unwrap_or_default(), held_out }))
}

/// Names and folders of the stages, relative where they lie inside.
fn describe(output: &Path, stages: &[LocatedStage]) -> CurriculumFile {
    let entry = |stage: &LocatedStage| {
        let folder = &stage.located.config.output;
        let inside = folder.strip_prefix(output).unwrap_or(folder);
        StageEntry { name: stage.name.clone(), output: inside.to_path_buf() }
    };
    CurriculumFile { stages: stages.iter().map(entry).collect() }
}

/// Every stage's draft on every stage's held-out rows.
struct HeldOutTable {
    stages: Vec<String>,
    /// By text, then by draft.
    by_text: Vec<Vec<RowMetrics>>,
}

impl HeldOutTable {
    fn measure(evaluators: &[(String, Evaluator)]) -> Result<Self> {
        let drafts: Vec<&Evaluator> = evaluators.iter().map(|(_, draft)| draft).collect();
        let by_text = drafts.iter().map(|text| text.measure(&drafts));
        Ok(Self {
            stages: evaluators.iter().map(|(name, _)| name.clone()).collect(),
            by_text: by_text.collect::<std::result::Result<_, _>>()?,
        })
    }

    /// Each later stage with what its draft gains on its own text over the draft before.
    fn gains(&self) -> impl Iterator<Item = (&str, (f64, (f64, f64)))> {
        (1..self.stages.len()).map(|stage| {
            let text = &self.by_text[stage];
            (self.stages[stage].as_str(), text[stage].gain_over(&text[stage - 1]))
        })
    }

    fn print(&self) {
        outln!("simulated acceptance length (greedy, 95 % interval) of each stage's draft on");
        outln!("each stage's held-out rows:");
        out!("{:>16}", "draft \\ text");
        self.stages.iter().for_each(|name| out!("  {name:>22}"));
        outln!();
        for (draft, name) in self.stages.iter().enumerate() {
            out!("{name:>16}");
            for text in &self.by_text {
                let (low, high) = text[draft].interval();
                let cell = format!("{:.3} [{low:.3}, {high:.3}]", text[draft].simulated_length());
                out!("  {cell:>22}");
            }
            outln!();
        }
        for (name, (gain, (low, high))) in self.gains() {
            outln!(
                "{name} on its own text: {gain:+.3} [{low:+.3}, {high:+.3}] over the draft before"
            );
        }
    }

    fn to_json(&self) -> Value {
        let cell = |text: &Vec<RowMetrics>, draft: usize| {
            json!({
                "simulated_length": text[draft].simulated_length(),
                "interval": text[draft].interval(),
            })
        };
        let row = |draft| self.by_text.iter().map(|text| cell(text, draft)).collect();
        let cells: Vec<Vec<Value>> = (0..self.stages.len()).map(row).collect();
        let gain = |(stage, (gain, interval)): (&str, (f64, (f64, f64)))| json!({ "stage": stage, "gain": gain, "interval": interval });
        json!({
            "stages": self.stages, "by_draft": cells,
            "gains_on_own_text": self.gains().map(gain).collect::<Vec<_>>(),
        })
    }
}
