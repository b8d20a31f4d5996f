//! Tests of the state of a fit.

use super::*;

/// Rounds of 10 steps of 100 tokens each, with the drafts that they kept.
fn state(kept: &[Option<usize>]) -> State {
    let plan = Plan { steps: 10, row_tokens: 100, ..Plan::default() };
    let round =
        |kept: &Option<usize>| Round { plan: Some(plan.clone()), kept: *kept, ..Round::default() };
    let rounds: Vec<Round> = kept.iter().map(round).collect();
    let split = serde_json::json!({
        "source": "x", "training": 1, "shipped": 0, "held_out": 1, "general": 0, "duplicates": 0,
        "unusable": 0, "alike": 0,
    });
    State {
        version: FIT_LAYOUT,
        noted: 0.0,
        phase: FitPhase::Measure,
        settings: Settings::default(),
        split: serde_json::from_value(split).expect("a split"),
        machine: None,
        trial: None,
        rounds,
        exported: BTreeMap::new(),
    }
}

#[test]
fn a_round_s_result_may_be_an_earlier_draft() {
    let all = state(&[None, Some(1), Some(3), None]);
    let kept: Vec<usize> = (1..=4).map(|round| all.kept(round)).collect();
    assert_eq!(kept, [1, 1, 3, 4]);
    // A file may say anything.
    assert_eq!(
        (state(&[Some(7)]).kept(1), state(&[Some(0)]).kept(1), state(&[]).kept(0)),
        (1, 1, 0)
    );
}

#[test]
fn a_file_of_another_version_is_refused_as_one() {
    let known = state(&[]);
    let mut file = serde_json::to_value(&known).expect("JSON");
    let found = |file: &serde_json::Value| {
        read(Path::new(STATE_FILE), &file.to_string(), &known.settings)
            .map_err(|failure| failure.to_json()["error"]["message"].to_string())
    };
    assert_eq!(found(&file).as_ref(), Ok(&known));
    file["phase"] = "weighing".into();
    let error = found(&file).expect_err("a phase that does not exist");
    assert!(error.contains("unreadable"), "{error}");
    file["version"] = (FIT_LAYOUT - 1).into();
    let error = found(&file).expect_err("another version's");
    assert!(error.contains("another version wrote it (layout 1)"), "{error}");
}

#[test]
fn other_weights_in_files_of_the_same_sizes_are_another_target() {
    let of = |weights: &str| {
        let mut known = state(&[]);
        known.settings.weights = weights.to_owned();
        known
    };
    let reads = |file: &State, now: &str| {
        let text = serde_json::to_string(file).expect("JSON");
        read(Path::new(STATE_FILE), &text, &of(now).settings).is_ok()
    };
    assert!(reads(&of("a-1"), "a-1"));
    assert!(!reads(&of("a-1"), "a-2"));
}

#[test]
fn the_time_of_a_call_that_was_killed_counts_up_to_its_last_event() {
    let folder = tempfile::tempdir().expect("folder");
    let mut known = state(&[None]);
    known.noted = now() - 9000.0;
    let at = |seconds: f64| serde_json::json!({ "at": known.noted + seconds, "event": "stopped" });
    // One of a call before it, and two between which the machine slept.
    let events = [-60.0, 30.0, 90.0, 5000.0].map(|seconds| format!("{}\n", at(seconds)));
    std::fs::write(folder.path().join(EVENTS_FILE), events.concat()).expect("events");
    write_json(&folder.path().join(STATE_FILE), &known).expect("state");
    let open = || Ledger::open(folder.path(), &known.settings, &known.split).expect("opened");
    let spent = || open().state.rounds[0].spent;
    assert!((spent() - 90.0 - LONGEST_GAP).abs() < 30.0);
    // It counts once.
    assert!((spent() - 90.0 - LONGEST_GAP).abs() < 30.0);
}

#[test]
fn tokens_that_a_dropped_draft_learned_do_not_count() {
    assert!(state(&[None]).learned().abs() < 1e-9);
    assert!((state(&[None, None]).learned() - 1000.0).abs() < 1e-9);
    // The second draft was dropped: the third one goes on from the first.
    assert!((state(&[None, Some(1), None]).learned() - 1000.0).abs() < 1e-9);
    assert!((state(&[None, Some(2), None]).learned() - 2000.0).abs() < 1e-9);
}
