//! The examples of the Rust interface, on the small target that the program carries.

use std::path::Path;

use longdraft::{Configuration, Draft, Error, Session, Stop, Target, TrainOptions};

use crate::support::files::{demonstration, read_rows, repository};
use crate::support::succeed;

#[path = "../crates/cli/examples/custom_tracker.rs"]
mod custom_tracker;
#[path = "../crates/cli/examples/decode.rs"]
mod decode;
#[path = "../crates/cli/examples/train.rs"]
mod train;
#[path = "../crates/cli/examples/verify_export.rs"]
mod verify_export;

/// Keys of a run of some seconds.
fn changes(output: &Path) -> Vec<String> {
    let data = repository("assets/corpus/books-excerpt.jsonl");
    let quoted = |path: &Path| serde_json::json!(path).to_string();
    [
        format!("target={}", serde_json::json!(demonstration())),
        format!("output={}", quoted(output)),
        format!("data.train=[{{path: {}}}]", quoted(&data)),
        "data.row_tokens=128".into(),
        "data.held_out_rows=1".into(),
    ]
    .to_vec()
}

/// A draft of one stage for the small target.
fn configuration(folder: &Path) -> String {
    let path = folder.join("small.yaml");
    let text = "target: t\noutput: o\ndraft: {init: last_layer, final_norm: none, gamma: 3}\n\
                data: {train: [{path: p}], anchor: {enabled: false}}\n\
                schedule: {learning_rate: 1.0e-2}\n\
                train: {steps: 4, rows_per_step: 1}\n";
    std::fs::write(&path, text).expect("configuration");
    path.display().to_string()
}

#[test]
fn a_draft_is_trained_stopped_gone_on_with_exported_and_decodes() {
    let folder = tempfile::tempdir().expect("folder");
    let (output, file) = (folder.path().join("run"), configuration(folder.path()));
    let changes = changes(&output);
    let mut losses = train::Losses { limit: 2, ..train::Losses::default() };
    let stopped = train::run(&file, &changes, &mut losses).expect("trained");
    assert!(!stopped.finished && stopped.steps == 2, "{stopped:?}");
    let mut rest = train::Losses::default();
    let trained = train::run(&file, &changes, &mut rest).expect("trained");
    assert!(trained.finished && trained.steps == 4, "{trained:?}");
    assert_eq!((losses.all.len(), rest.all.len()), (2, 2));
    assert!(trained.held_out.is_some_and(|figures| figures["loss"].as_f64() > Some(0.0)));
    // The same steps as one that nobody stopped, and as the command's.
    let whole = folder.path().join("whole");
    let words = [&["train".to_owned(), file.clone()][..], &self::changes(&whole)[..]].concat();
    succeed(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let loss = |run: &Path| -> Vec<f64> {
        let rows = read_rows(run.join("metrics.jsonl"));
        rows.iter().filter_map(|row| row["grad_norm"].as_f64()).collect()
    };
    assert_eq!(loss(&whole), loss(&output));
    // Nothing is left to do.
    let mut none = train::Losses::default();
    assert!(train::run(&file, &changes, &mut none).expect("finished").finished);
    assert!(none.all.is_empty());

    let run = output.display().to_string();
    let text = decode::run(&demonstration(), "Once upon a time", Some(&run)).expect("decoded");
    assert!(!text.is_empty());
    let exported = folder.path().join("export").display().to_string();
    let findings = verify_export::run(&run, &exported, "longspec").expect("exported");
    assert!(findings.iter().all(|finding| finding.clean), "{findings:?}");
}

#[test]
fn a_tracker_of_ones_own_holds_every_step_once() {
    let folder = tempfile::tempdir().expect("folder");
    let (output, file) = (folder.path().join("run"), configuration(folder.path()));
    let table = folder.path().join("losses.csv");
    let changes = [&changes(&output)[..], &["train.evaluate_every=2".to_owned()]].concat();
    // A training that was killed after its second step left a line that no checkpoint knows.
    std::fs::write(&table, "step,loss\n1,1e9,,,\n2,1e9,,,\n").expect("table");
    let trained = custom_tracker::run(&table, &file, &changes).expect("trained");
    assert!(trained.finished);
    let text = std::fs::read_to_string(&table).expect("table");
    let cells: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    let column = |at: usize| cells[1..].iter().map(|row| row[at]).collect::<Vec<_>>();
    assert_eq!(column(0), ["1", "2", "3", "4"], "{text}");
    assert!(column(1).iter().all(|loss| loss.parse::<f64>().is_ok_and(|loss| loss < 1e6)));
    let measured = column(4).iter().map(|loss| loss.parse::<f64>().is_ok()).collect::<Vec<_>>();
    assert_eq!(measured, [false, true, false, true], "{text}");
    // Nothing is left to do, and nothing is lost.
    custom_tracker::run(&table, &file, &changes).expect("finished");
    assert_eq!(std::fs::read_to_string(&table).expect("table"), text);
}

#[test]
fn two_sessions_answer_at_once_what_they_answer_alone() {
    let target = Target::open(&demonstration()).expect("target");
    let options = longdraft::AnswerOptions { max_tokens: 24, ..Default::default() };
    let lookup = Some(longdraft::LookupChoice::Merge);
    let drafting = longdraft::SessionOptions { lookup, ..Default::default() };
    let prompts = ["The sea was calm and", "Tom has 3 boxes with 12 pens each."];
    let alone = prompts.map(|prompt| {
        Session::new(&target, None).and_then(|s| s.generate(prompt, &options)).expect("answer").text
    });
    let together: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let session = Session::with(&target, None, &drafting).expect("session");
                let options = &options;
                scope.spawn(move || session.generate(prompt, options).expect("answer").text)
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("thread")).collect()
    });
    assert_eq!(together, alone);
}

#[test]
fn a_stream_that_is_cancelled_ends_and_the_session_answers_on() {
    let target = Target::open(&demonstration()).expect("target");
    let session = Session::new(&target, None).expect("session");
    let options = longdraft::AnswerOptions {
        max_tokens: 400,
        ignore_eos: true,
        ..longdraft::AnswerOptions::default()
    };
    let mut stream = session.stream("The", &options).expect("stream");
    assert!(stream.next().expect("a piece").is_ok());
    stream.cancel();
    let answer = stream.answer().expect("what is written");
    assert_eq!(answer.figures["finish"], "interrupted");
    let few = longdraft::AnswerOptions { max_tokens: 3, ..options };
    let next = session.generate("The", &few).expect("answer");
    assert_eq!(next.figures["tokens"].as_array().map(Vec::len), Some(3));
}

#[test]
fn errors_have_the_sentences_of_the_command_line() {
    let said = |error: Option<Error>| {
        let error = error.expect("refused");
        (error.to_string(), error.help().unwrap_or_default().to_owned(), error.code())
    };
    let (message, help, code) = said(Draft::open("no/such/run").err());
    assert!(message.contains("no/such/run: No such file"), "{message}");
    assert!(help.starts_with("give a run directory") && code == 2, "{help}");
    let (message, ..) = said(Target::open("no/such/file.gguf").err());
    assert!(message.contains("no/such/file.gguf"), "{message}");
    let wrong = Configuration::Text(r#"{"target": "t", "output": "o", "trian": {}}"#.into());
    let mut losses = train::Losses::default();
    let options = TrainOptions::default();
    let error = longdraft::train(&wrong, &options, &mut losses, &Stop::new()).expect_err("refused");
    assert!(error.to_string().contains("unknown key `trian`"), "{error}");
    let target = Target::open(&demonstration()).expect("target");
    let session = Session::new(&target, None).expect("session");
    let none = longdraft::AnswerOptions { max_tokens: 0, ..Default::default() };
    assert!(session.generate("a", &none).is_err());
    let cold = longdraft::AnswerOptions { temperature: -1.0, ..Default::default() };
    let (message, _, code) = said(session.generate("a", &cold).err());
    assert!(message.contains("temperature") && code == 2, "{message}");
    let nothing = longdraft::SessionOptions { draft_len: 0, ..Default::default() };
    let (message, help, _) = said(Session::with(&target, None, &nothing).err());
    assert!(message.contains("--draft-len 0") && help.starts_with("give at least 1"), "{help}");
    assert!(target.features(&[1, 2], &[99]).is_err());
    let rows = target.features(&[1, 2, 3], &[0, 2]).expect("features");
    assert_eq!(rows.len(), 3 * 2 * target.hidden_size());
}
