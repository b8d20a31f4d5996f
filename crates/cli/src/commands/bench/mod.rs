//! `longdraft bench`: times steps at the shapes of published models, with random weights.
//!
//! Weights are drawn on the device, so that 8B parameters take seconds. A case prints its line as soon
//! as it is done; one that fails prints its error in place of figures and the others go on. The
//! PyTorch programs of `benches/gpu` print lines of the same keys.

mod capture;
mod clock;
mod decode;
mod dflash;
mod drafting;
mod eagle3;
mod glide;
mod pretrain;
mod products;
mod shape;
mod stored;

use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::Device;
use longdraft_kernels::device::overlap_kernels;
use longdraft_kernels::dispatch::set_one_pass_attention;
use longdraft_kernels::trace::Trace;
use longdraft_models::device::name_of;
use longdraft_models::target_model::TargetOptions;
use serde_json::{Map, Value, json};

use crate::cli::{BenchArguments, BenchCommand};
use crate::failure::{Failure, Result};

use clock::Timed;

/// Times what the arguments name.
pub(crate) fn run(command: &BenchCommand) -> Result<()> {
    let mut cases = Cases::default();
    measure(command, &mut cases)?;
    cases.outcome()
}

fn measure(command: &BenchCommand, cases: &mut Cases) -> Result<()> {
    match command {
        BenchCommand::Glide(arguments) => {
            arguments.rows.bench.products.within(|| glide::run(arguments, cases))
        }
        BenchCommand::Eagle3(arguments) => {
            arguments.rows.bench.products.within(|| eagle3::run(arguments, cases))
        }
        BenchCommand::Dflash(arguments) => {
            arguments.rows.bench.products.within(|| dflash::run(arguments, cases))
        }
        BenchCommand::Pretrain(arguments) => {
            arguments.bench.products.within(|| pretrain::run(arguments, cases))
        }
        BenchCommand::Capture(arguments) => capture::run(arguments, cases),
        BenchCommand::Decode(arguments) => decode::run(arguments, cases),
        BenchCommand::Products => {
            products::run(cases);
            Ok(())
        }
    }
}

/// Where steps run.
struct Place {
    device: Device,
    options: TargetOptions,
}

impl Place {
    fn open(arguments: &BenchArguments) -> Result<Self> {
        let device = arguments.device.open(0)?;
        if arguments.trace && Trace::of(&device).is_err() {
            let problem =
                format!("--trace times kernels of NVIDIA GPUs; {} has none", name_of(&device));
            return Err(Failure::usage(problem).hint("add --device cuda:0, or leave --trace out"));
        }
        overlap_kernels(!arguments.in_turn);
        set_one_pass_attention(arguments.one_pass);
        let dtype = arguments.precision.apply(&device);
        let options = TargetOptions { dtype, device: device.clone(), ..TargetOptions::default() };
        Ok(Self { device, options })
    }

    /// What a case is, with what it has of its own.
    fn describe(&self, case: &str, own: Value) -> Map<String, Value> {
        let mut about = object(json!({
            "impl": "longdraft", "case": case, "device": name_of(&self.device),
            "dtype": self.options.dtype.as_str(), "threads": rayon::current_num_threads(),
        }));
        about.extend(object(own));
        about
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(entries) => entries,
        _ => Map::new(),
    }
}

/// Cases and what became of them.
#[derive(Default)]
struct Cases {
    lines: Vec<Value>,
    failed: usize,
}

impl Cases {
    /// Runs one case, described by `about`, and prints its line.
    fn case(
        &mut self,
        mut about: Map<String, Value>,
        work: impl FnOnce() -> Result<Map<String, Value>>,
    ) {
        let error = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(figures)) => {
                about.extend(figures);
                None
            }
            Ok(Err(failure)) => Some(failure.to_json()["error"]["message"].clone()),
            Err(panic) => Some(format!("panicked: {}", words(panic.as_ref())).into()),
        };
        if let Some(error) = error {
            self.failed += 1;
            about.insert("error".to_owned(), error);
        }
        let line = Value::Object(about);
        outln!("{line}");
        crate::terminal::flush();
        self.lines.push(line);
    }

    /// The same for steps over `tokens` tokens each.
    fn steps(
        &mut self,
        mut about: Map<String, Value>,
        tokens: usize,
        work: impl FnOnce() -> Result<Timed>,
    ) {
        about.insert("tokens".to_owned(), tokens.into());
        self.case(about, || Ok(work()?.figures(tokens)));
    }

    fn outcome(&self) -> Result<()> {
        match self.failed {
            0 => Ok(()),
            failed => {
                let all = self.lines.len();
                Err(Failure::work(format!("{failed} of {all} cases failed")).in_result())
            }
        }
    }
}

/// What a panic says.
fn words(panic: &(dyn std::any::Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without words")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    /// Lines of `longdraft bench ...`.
    fn lines(arguments: &str) -> Vec<Value> {
        let arguments = format!("longdraft bench {arguments}");
        let read = Cli::try_parse_from(arguments.split(' ')).expect("arguments");
        let Command::Bench(command) = read.command else { panic!("another command") };
        let mut cases = Cases::default();
        measure(&command, &mut cases).expect("cases");
        cases.lines
    }

    fn figure(line: &Value, key: &str) -> f64 {
        line[key].as_f64().unwrap_or_else(|| panic!("{key} of {line}"))
    }

    #[test]
    fn every_case_has_its_figures() {
        for (arguments, tokens) in [
            ("glide --shape tiny --tokens 48,64 --documents 1,3", vec![48, 48, 64, 64]),
            ("glide --shape tiny --tokens 32 --soft --layers 2", vec![32]),
            ("glide --shape tiny --tokens 32 --cached", vec![32]),
            ("glide --shape tiny --tokens 32 --llm-loss --precision bf16", vec![32]),
            ("eagle3 --shape tiny --tokens 24,48", vec![24, 48]),
            ("eagle3 --shape tiny --tokens 24 --online --draft-vocab-size 64", vec![24]),
            ("dflash --shape tiny --tokens 40,48 --taps 3", vec![40, 48]),
            ("dflash --shape tiny --tokens 24 --online --blocks 5 --block-size 4", vec![24]),
            ("capture --shape tiny --tokens 32,48", vec![32, 48]),
            ("capture --shape tiny --tokens 32 --method glide", vec![32]),
            ("decode --shape tiny --rows 1,4 --context 20", vec![1, 4]),
        ] {
            let lines = lines(&format!("{arguments} --warm-ups 1 --steps 3"));
            assert_eq!(lines.len(), tokens.len(), "{arguments}");
            for (line, tokens) in lines.iter().zip(tokens) {
                assert_eq!(line["error"], Value::Null, "{line}");
                assert_eq!((&line["tokens"], &line["shape"]), (&tokens.into(), &"tiny".into()));
                assert_eq!(line["seconds"].as_array().map(Vec::len), Some(3), "{line}");
                assert!(figure(line, "tokens_per_s") > 0.0, "{line}");
                assert!(figure(line, "median_s") >= figure(line, "least_s"), "{line}");
            }
        }
    }

    #[test]
    fn a_random_draft_knows_nothing() {
        let lines = lines("glide --shape tiny --tokens 64 --warm-ups 0 --steps 1");
        // The loss of a uniform guess over 512 tokens.
        let uniform = 512.0_f64.ln();
        assert!((figure(&lines[0], "loss") - uniform).abs() < 0.5, "{}", lines[0]);
    }

    #[test]
    fn blocks_are_counted_by_the_tokens_unless_they_are_given() {
        for (more, blocks) in [("", 8), (" --blocks 3", 3), (" --blocks 3000", 63)] {
            let arguments = format!("dflash --shape tiny --tokens 64{more}");
            let lines = lines(&format!("{arguments} --warm-ups 0 --steps 1"));
            assert_eq!(lines[0]["blocks"], blocks, "{}", lines[0]);
            assert!((figure(&lines[0], "loss") - 512.0_f64.ln()).abs() < 0.5, "{}", lines[0]);
        }
    }

    #[test]
    fn pretraining_counts_all_sequences() {
        let lines = lines("pretrain --tokens 16 --sequences 2 --warm-ups 0 --steps 1");
        assert_eq!((&lines[0]["tokens"], &lines[0]["sequences"]), (&32.into(), &2.into()));
        assert!(figure(&lines[0], "loss") > 0.0);
    }

    #[test]
    fn a_case_that_fails_leaves_the_others_alone() {
        let mut cases = Cases::default();
        let about = |name: &str| Map::from_iter([("case".to_owned(), name.into())]);
        cases.case(about("error"), || Err(Failure::work("no memory")));
        cases.case(about("panic"), || panic!("a bug in step {}", 3));
        cases.case(about("works"), || Ok(Map::from_iter([("x".to_owned(), 1.into())])));
        assert_eq!(
            cases.lines,
            [
                json!({"case": "error", "error": "no memory"}),
                json!({"case": "panic", "error": "panicked: a bug in step 3"}),
                json!({"case": "works", "x": 1}),
            ]
        );
        let failure = cases.outcome().expect_err("two failed");
        assert_eq!(failure.to_json()["error"]["message"], "2 of 3 cases failed");
    }

    #[test]
    fn a_trace_of_a_cpu_is_refused() {
        let arguments = ["longdraft", "bench", "glide", "--shape", "tiny", "--trace"];
        let Command::Bench(command) = Cli::try_parse_from(arguments).expect("arguments").command
        else {
            panic!("another command")
        };
        let failure = measure(&command, &mut Cases::default()).expect_err("no kernels");
        assert_eq!(failure.code(), 2);
        let error = failure.to_json()["error"].clone();
        let message = error["message"].as_str().expect("a sentence");
        assert!(message.contains("--trace times kernels of NVIDIA GPUs"), "{message}");
    }

    #[test]
    fn a_shape_that_is_not_known_names_those_that_are() {
        let failure = shape::config("llama9", None).expect_err("unknown");
        let error = failure.to_json()["error"].clone();
        assert_eq!(failure.code(), 2);
        let hint = error["hint"].as_str().expect("a hint");
        assert!(hint.contains("llama3.1-8b") && hint.contains("Qwen/Qwen3-8B"), "{hint}");
        let known = shape::config("llama3.1-8b", Some(2)).expect("known");
        assert_eq!((known.num_hidden_layers, known.hidden_size), (2, 4096));
    }
}
