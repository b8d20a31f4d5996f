//! Runs that get a later end.

use super::*;
use crate::support::processes::killed_when;

#[test]
fn a_run_is_extended_on_demand_and_says_what_becomes_of_its_schedule() {
    let (shop, config) = Workshop::new().with_config();
    let train = |name: &str, kind: &str, steps: u64, extra: &[&'static str]| -> Vec<String> {
        let output = format!("output={}", shop.path(name));
        let (kind, steps) = (format!("schedule.kind={kind}"), format!("train.steps={steps}"));
        let mut arguments = vec!["train".to_owned(), config.clone(), output, kind, steps];
        arguments.extend(extra.iter().map(ToString::to_string));
        arguments
    };
    let ok = |arguments: Vec<String>| noted(&borrowed(&arguments));
    let refused = |arguments: Vec<String>| fail(&borrowed(&arguments), 1);
    // With a constant rate nothing tells an extended run from one that was as long from the start.
    ok(train("short", "constant", 8, &[]));
    let text = refused(train("short", "constant", 12, &[]));
    assert!(text.contains("train.steps was 8, now 12") && text.contains("--extend"), "{text}");
    let told = ok(train("short", "constant", 12, &["--extend"]));
    assert!(told.contains("8 steps become 12: the learning rate goes from 5.000e-4"), "{told}");
    ok(train("long", "constant", 12, &[]));
    assert_eq!(draft_bytes(&shop.path("short")), draft_bytes(&shop.path("long")));
    // Shorter is refused with and without it; so is an extension to nowhere.
    for extra in [&[][..], &["--extend"]] {
        let text = refused(train("short", "constant", 9, extra));
        assert!(text.contains("cannot become shorter"), "{text}");
    }
    let text = refused(train("short", "constant", 12, &["--extend"]));
    assert!(text.contains("nothing to extend"), "{text}");
    let mut other = train("short", "constant", 14, &["--extend"]);
    other.push("train.seed=3".to_owned());
    assert!(refused(other).contains("train.seed was 0, now 3"));
    // A cosine falls to the later end; a kill on the way changes nothing.
    let rates = |name: &str| -> Vec<f64> {
        let records = metrics(&shop.path(name)).into_iter();
        records.filter_map(|record| record["learning_rate"].as_f64()).collect()
    };
    for name in ["whole", "killed"] {
        ok(train(name, "warmup_cosine", 40, &[]));
    }
    ok(train("whole", "warmup_cosine", 120, &["--extend"]));
    let extended = train("killed", "warmup_cosine", 120, &["--extend"]);
    let killed = shop.path("killed");
    let begins = || last_state(&killed)["step"].as_u64() > Some(48);
    killed_when(&mut longdraft(&borrowed(&extended)), "steps", begins);
    // From here on the length is that of the run.
    ok(train("killed", "warmup_cosine", 120, &[]));
    assert_eq!(rates("whole"), rates("killed"));
    assert_eq!(draft_bytes(&shop.path("whole")), draft_bytes(&killed));
    let rates = rates("whole");
    assert_eq!(rates.len(), 120);
    assert!(rates[39] < 1e-6 && rates[40] > 3e-4 && rates[119] < 1e-6, "{rates:?}");
}

#[test]
fn the_last_stage_that_has_begun_can_be_extended() {
    let shop = Workshop::new();
    let stages = "- {name: one, train: {steps: 3}}\n- {name: two, train: {steps: 3}}\n";
    let curriculum = shop.with_stages(stages);
    let first = stdout(&run(&["train", &curriculum, "--json"]));
    let first = last_json(&first);
    assert_eq!(first["finished"], true);
    // Finished stages are not opened again, and their figures are told as they were.
    std::fs::rename(shop.target(), shop.path("away")).expect("rename");
    let again = succeeded(run(&["train", &curriculum, "--json"]));
    let told = stderr(&again);
    assert_eq!(last_json(&stdout(&again))["held_out"], first["held_out"]);
    assert!(told.contains("stage 2/2 two: already finished, after 3 steps"), "{told}");
    std::fs::rename(shop.path("away"), shop.target()).expect("rename");

    let text = fail(&["train", &curriculum, "stages.0.train.steps=5", "--extend"], 1);
    assert!(text.contains("stage `two` was trained from its draft"), "{text}");
    let told = noted(&["train", &curriculum, "stages.1.train.steps=5", "--extend"]);
    require_words(&told, &["3 steps become 5", "already finished"]);
    assert_eq!(last_state(&shop.path("run/two"))["step"], 5);
}

#[test]
fn a_stage_that_patience_ended_stays_so_while_a_later_one_is_extended() {
    let shop = Workshop::new();
    let text = std::fs::read_to_string(&shop.config).expect("config");
    // A rate of next to nothing: no evaluation is better than the first.
    let stages = "stages:\n  - {name: one, train: {steps: 40, evaluate_every: 1, patience: 2}, \
                  schedule: {learning_rate: 1e-12}}\n  - {name: two, train: {steps: 3}}\n";
    let text = text.replace("  epochs: 3\n", "");
    let curriculum = shop.write("curriculum.yaml", format!("{text}{stages}"));
    succeed(&["train", &curriculum]);
    let ended = last_state(&shop.path("run/one"))["step"].clone();
    assert_eq!(ended, 3);
    succeed(&["train", &curriculum, "stages.1.train.steps=5", "--extend"]);
    assert_eq!(last_state(&shop.path("run/one"))["step"], ended);
    assert_eq!(last_state(&shop.path("run/two"))["step"], 5);
    let text = fail(&["train", &curriculum, "stages.0.train.steps=50", "--extend"], 1);
    assert!(text.contains("stage `two` was trained from its draft"), "{text}");
}

#[test]
fn time_that_ended_a_run_can_be_raised() {
    let (shop, config) = Workshop::new().with_config();
    let train = |minutes: &'static str| ["train", &config, "train.steps=12", minutes];
    succeed(&train("train.max_minutes=0.000001"));
    assert_eq!(last_state(&shop.path("run"))["step"], 1);
    let words = ["train.max_minutes was 0.000001, now 60", "--extend"];
    fail_with(&train("train.max_minutes=60"), 1, &words);
    succeed(&[&train("train.max_minutes=60")[..], &["--extend"]].concat());
    assert_eq!(last_state(&shop.path("run"))["step"], 12);
}
