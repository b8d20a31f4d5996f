use longdraft_records::events::Events;
use serde_json::json;

use super::*;

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
    std::fs::write(path, text).expect("write");
}

fn look(folder: &Path) -> Live {
    Follower::of(folder).look().1.clone()
}

fn state(phase: &str) -> String {
    let range = json!({ "low": 1.0, "middle": 1.2, "high": 1.5 });
    let plan = json!({
        "answering": 100.0, "training": 200.0, "proof": 50.0, "tau": range, "speed_up": range,
    });
    json!({ "phase": phase, "rounds": [{ "plan": plan }] }).to_string()
}

#[test]
fn a_fit_is_shown_as_far_as_it_is_there() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    // Nothing, or something torn.
    let live = look(&folder.join("absent"));
    assert_eq!((live.phases.len(), live.left), (1, None));
    write(&folder.join("fit.json"), "{\"phase\": \"ans");
    write(&folder.join("events.jsonl"), "{\"at\": 1}\n\u{0}\n");
    let live = look(folder);
    assert!(live.phases.iter().all(|phase| phase.stand == Stand::ToCome), "{live:?}");
    assert!(live.headline().contains("Nothing has begun"), "{}", live.headline());

    write(&folder.join("fit.json"), &state("answers"));
    let mut events = Events::open(folder).expect("opened");
    events.phase(FitPhase::Answers, 1);
    let advance = |done| Advance {
        what: "prompts".to_owned(),
        done,
        all: 10,
        tokens: Some(100 * done as u64),
        at_most: Some(30.0),
    };
    events.progress(advance(1));
    let live = look(folder);
    let stands: Vec<Stand> = live.phases.iter().map(|phase| phase.stand).collect();
    assert_eq!(stands, [Stand::Done, Stand::Now, Stand::ToCome, Stand::ToCome, Stand::ToCome]);
    assert_eq!((live.pulse, live.work), (Pulse::Running, Some(advance(1))));
    // The phase ends after 30 s wherever it stands; two others were planned with 250 s.
    let (own, all) = (live.left_of_phase.expect("own"), live.left.expect("all"));
    assert!(
        own.high <= 30.0 && (all.seconds - own.seconds - 250.0).abs() < 1e-6,
        "{own:?} {all:?}"
    );
    assert!(live.memory_mib.is_none_or(|memory| memory > 1.0));
    assert!((live.expected.expect("planned").1.high - 1.5).abs() < 1e-9);

    events.stopped();
    let live = look(folder);
    assert_eq!((live.pulse, live.left), (Pulse::Stopped, None));
    assert!(live.headline().starts_with("Stopped"));
    write(&folder.join("fit.json"), &state("finished"));
    assert_eq!(look(folder).pulse, Pulse::Finished);
}

#[test]
fn a_fit_of_another_version_is_told_as_one() {
    let folder = tempfile::tempdir().expect("folder");
    let mut fit: serde_json::Value = serde_json::from_str(&state("training")).expect("JSON");
    fit["version"] = FIT_LAYOUT.into();
    write(&folder.path().join("fit.json"), &fit.to_string());
    assert_eq!(look(folder.path()).pulse, Pulse::Running);
    // Its phases may be called as ours and mean something else.
    for phase in ["weighing", "training", "finished"] {
        fit["version"] = 1.into();
        fit["phase"] = phase.into();
        write(&folder.path().join("fit.json"), &fit.to_string());
        let live = look(folder.path());
        assert_eq!((live.pulse, live.left, live.expected), (Pulse::Foreign(1), None, None));
        assert!(live.headline().contains("not known"), "{}", live.headline());
        let told = live.pulse_in_words();
        assert!(told.contains("another version wrote fit.json (layout 1)"), "{told}");
    }
}

/// A page may be asked for before the run begins, or of a name that is wrong.
#[test]
fn a_folder_that_is_not_there_is_waited_for_by_its_path() {
    let shelf = tempfile::tempdir().expect("folder");
    let folder = shelf.path().join("typo/run");
    let live = look(&folder);
    assert_eq!((live.pulse, live.headline().as_str()), (Pulse::Absent, "Nothing has begun yet"));
    let told = live.pulse_in_words();
    assert!(
        told.starts_with("waiting for ") && told.contains(&folder.display().to_string()),
        "{told}"
    );
    std::fs::create_dir_all(&folder).expect("folder");
    let live = look(&folder);
    assert_eq!((live.pulse, live.name.as_str()), (Pulse::Running, "run"));
}

#[test]
fn the_rounds_of_a_fit_are_stages_of_one_run() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    write(&folder.join("fit.json"), &state("training"));
    let step = |step: u64, loss: f64| {
        let record = json!({
            "step": step, "tokens": 512 * step, "loss": loss, "tokens_per_second": 256.0,
            "simulated_acceptance_length": 1.5, "top1_by_delay": [0.4, 0.3], "memory_mib": 700.0,
        });
        format!("{record}\n")
    };
    write(&folder.join("training-1/metrics.jsonl"), &(step(1, 5.0) + &step(2, 4.0)));
    let live = look(folder);
    assert_eq!((live.loss.len(), live.speed, live.positions.len()), (2, Some(256.0), 2));
    assert_eq!((live.memory_mib, live.positions_are_held_out), (Some(700.0), false));
    write(&folder.join("training-2/metrics.jsonl"), &(step(1, 3.0) + "{\"step\": 2, \"to"));
    write(&folder.join("training-x/metrics.jsonl"), &step(1, 3.0));
    let run = Run::read(folder);
    let names: Vec<Option<&str>> = run.stages.iter().map(|stage| stage.name.as_deref()).collect();
    assert_eq!(names, [Some("round 1"), Some("round 2")]);
    assert_eq!(look(folder).loss, [(1.0, 3.0)]);
}

#[test]
fn the_stages_of_a_round_follow_one_another() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    let mut fit: serde_json::Value = serde_json::from_str(&state("training")).expect("JSON");
    let seconds = |seconds: f64| json!({ "seconds": seconds });
    fit["rounds"][0]["plan"]["stages"] = json!([seconds(120.0), seconds(50.0), seconds(30.0)]);
    write(&folder.join("fit.json"), &fit.to_string());
    let stages = ["base", "long", "answers"].map(|name| json!({ "name": name, "output": name }));
    let stages = json!({ "stages": stages }).to_string();
    write(&folder.join("training-1/curriculum.json"), &stages);
    let step = |step: u64, loss: f64| {
        let record = json!({ "step": step, "tokens": 512 * step, "loss": loss });
        format!("{record}\n")
    };
    let base = folder.join("training-1/base/metrics.jsonl");
    write(&base, &(step(1, 5.0) + &step(2, 4.0)));
    assert_eq!(look(folder).loss.len(), 2);
    let long = folder.join("training-1/long/metrics.jsonl");
    write(&long, &(step(1, 3.0) + &step(2, 2.0)));
    let run = Run::read(folder);
    let names: Vec<Option<&str>> = run.stages.iter().map(|stage| stage.name.as_deref()).collect();
    assert_eq!(names, [Some("base"), Some("long")]);
    let steps: Vec<f64> = look(folder).loss.iter().map(|(at, _)| *at).collect();
    assert_eq!(steps, [1.0, 2.0, 3.0, 4.0]);
    let plan: FitState = serde_json::from_value(fit).expect("a fit");
    let plan = plan.rounds[0].plan.as_ref().expect("a plan");
    assert!((plan.after(1) - 80.0).abs() < 1e-9 && (plan.after(2) - 30.0).abs() < 1e-9);
    // A further round is named with its number.
    write(&folder.join("training-2/curriculum.json"), &stages);
    write(&folder.join("training-2/base/metrics.jsonl"), &step(1, 1.5));
    let run = Run::read(folder);
    let names: Vec<Option<&str>> = run.stages.iter().map(|stage| stage.name.as_deref()).collect();
    assert_eq!(names, [Some("round 1, base"), Some("round 1, long"), Some("round 2, base")]);
    assert_eq!(look(folder).loss, [(1.0, 1.5)]);
}

#[test]
fn a_run_of_train_tells_its_steps_by_its_configuration() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    let steps: String = (1..=20)
        .map(|step| {
            format!("{{\"step\":{step},\"tokens\":{},\"tokens_per_second\":100}}\n", 100 * step)
        })
        .collect();
    write(&folder.join("metrics.jsonl"), &steps);
    let live = look(folder);
    assert_eq!((live.work.as_ref().map(|work| work.all), live.left), (Some(0), None));
    write(&folder.join("config.yaml"), "train: {steps: 50}\n");
    let live = look(folder);
    let left = live.left.expect("steady");
    assert!((left.seconds - 30.0).abs() < 1e-6 && live.pulse == Pulse::Running, "{left:?}");
    write(&folder.join("config.yaml"), "train: {tokens: 3000}\n");
    let live = look(folder);
    assert_eq!(live.work.as_ref().map(|work| (work.done, work.all)), Some((2000, 3000)));
    assert!((live.left.expect("steady").seconds - 10.0).abs() < 1e-6);
    write(&folder.join("config.yaml"), "train: {steps: 20}\n");
    assert_eq!(look(folder).pulse, Pulse::Finished);
}

#[test]
fn a_run_that_its_time_ends_is_finished_and_no_longer_than_it() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    let step = |step: u64| {
        format!("{{\"step\":{step},\"tokens\":{},\"tokens_per_second\":100}}\n", 100 * step)
    };
    write(&folder.join("metrics.jsonl"), &(1..=20).map(step).collect::<String>());
    write(&folder.join("config.yaml"), "train: {steps: 5000, max_minutes: 0.5}\n");
    let left = look(folder).left.expect("steady");
    assert!(left.seconds <= 11.0 && left.high <= 11.0, "{left:?}");
    // The form of a language model's checkpoint.
    let saved = |step: u64| json!({ "progress": { "step": step, "ended": true } }).to_string();
    let state = folder.join("checkpoints/last/state.json");
    write(&state, &saved(19));
    assert_eq!(look(folder).pulse, Pulse::Running, "it was extended");
    write(&state, &saved(20));
    assert_eq!((look(folder).pulse, look(folder).left), (Pulse::Finished, None));
}

#[test]
fn a_curriculum_is_not_finished_before_its_last_stage() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    let stages = ["base", "long"].map(|name| json!({ "name": name, "output": name }));
    write(&folder.join("curriculum.json"), &json!({ "stages": stages }).to_string());
    for (stage, pulse) in [("base", Pulse::Running), ("long", Pulse::Finished)] {
        write(&folder.join(stage).join("config.yaml"), "train: {steps: 2}\n");
        let steps = "{\"step\":1,\"tokens\":100}\n{\"step\":2,\"tokens\":200}\n";
        write(&folder.join(stage).join("metrics.jsonl"), steps);
        assert_eq!((look(folder).pulse, look(folder).left), (pulse, None), "{stage}");
    }
}
