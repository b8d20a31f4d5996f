//! `scripts/gpu-check` and `scripts/gpu-bundle`, rehearsed with programs that stand in for the real ones:
//! they print figures, hang, crash half-way, print for ever, fill the disk.

mod bundle;
mod compiled;
#[cfg(target_os = "linux")]
mod exchange;
mod machine;
mod recorded;
mod summary;

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::files::read_json;
use crate::support::processes::wait_until;
use machine::{Machine, python, text};

#[test]
fn all_plans_run_and_come_back_in_one_file() {
    let Some(()) = python() else { return };
    for (plan, rows) in [
        (
            "call1",
            ["| kernels_small | 0 |", "pass, 2 checks |", "| attention T 9 bf16 | tflops 99.5 |"],
        ),
        (
            "call2",
            [
                "| glide 8b 4096 tokens soft | 300 | 100 | 3 | 7 | 9 | sdpa, compiled |",
                "| capture 8b 4096 tokens soft | 300 | - |",
                "| pytorch_eagle3 | 0 |",
            ],
        ),
        (
            "call3",
            [
                "| profile_attention_forward | 0 |",
                "| glide 8b 4096 tokens soft | attention_forward | 2 | 14 | 70.0 % |",
                "| capture 8b 4096 tokens soft | other ops, copies, gaps | - | 6 | 30.0 % |",
            ],
        ),
        (
            "call4",
            [
                "| quickstart_f32 | 0 |",
                "| train_dflash_cpu | 0 |",
                "| decode 8b 4096 tokens soft |",
            ],
        ),
    ] {
        let machine = Machine::new();
        let (output, report) = machine.run(plan, &[], &[]);
        assert_eq!(output.status.code(), Some(0), "{plan}: {}", text(&output));
        assert_eq!((&report["pass"], &report["plan"]), (&true.into(), &plan.into()));
        let steps = report["steps"].as_object().expect("steps");
        for (name, step) in steps {
            assert_eq!(step["code"], 0, "{name} of {plan}");
            assert_eq!(step["gpu"], json!(["GPU, 1, 40, 1980, 3201, 99"]), "{name}");
        }
        let (names, table) = machine.archived("table.md");
        assert!(String::from_utf8_lossy(&output.stdout).contains(&table));
        for row in rows {
            assert!(table.contains(row), "{row} not in {table}");
        }
        // Report, table and steps; three files a step; curves of nine.
        assert!(names.len() <= 3 + 3 * steps.len() + 9, "{names:?}");
        assert!(names.iter().all(|name| !name.contains("scratch")), "{names:?}");
        let left = std::fs::read_dir(machine.path("results")).expect("results");
        let left = left.map(|entry| entry.expect("entry").file_name());
        assert!(left.into_iter().all(|name| !name.to_string_lossy().contains("scratch")));
    }
}

#[test]
fn steps_of_all_plans_are_chosen_by_name() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    let only = |names: &str| machine.command_of(["--only", names], &[]).output().expect("python");
    let output = only("dflash,gpu,train_dflash,kernels_small");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let (_, steps) = machine.archived("steps.json");
    let steps: Value = serde_json::from_str(&steps).expect("JSON");
    let ran: Vec<_> =
        steps["steps"].as_array().expect("steps").iter().map(|s| &s["name"]).collect();
    assert_eq!(ran, ["dflash", "gpu", "train_dflash", "kernels_small"]);
    let report = read_json(machine.path("results/gpu-check.json"));
    assert_eq!((&report["pass"], &report["plan"]), (&true.into(), &"only".into()));
    for (names, says) in [
        ("gpu,dflsh", "no step is called `dflsh`: take machine, gpu, doctor"),
        ("", "no step is called ``: take machine"),
        ("gpu,dflash,gpu", "`gpu` is there more than once"),
    ] {
        let output = only(names);
        assert_eq!(output.status.code(), Some(2), "{names}");
        assert!(text(&output).contains(says), "{says} not in {}", text(&output));
    }
    let mut both = machine.command("call1", &[]);
    assert_eq!(both.args(["--only", "gpu"]).output().expect("python").status.code(), Some(2));
}

#[test]
fn losses_are_held_against_those_of_the_cpu() {
    let Some(()) = python() else { return };
    let (_, report) = Machine::new().run("call4", &[], &[]);
    for (name, code) in [("quickstart", 0), ("quickstart_f32", 0)] {
        let step = &report["steps"][name];
        let curve = &step["loss_beside_cpu"]["quickstart-base-metrics.jsonl"];
        assert!((curve["largest"].as_f64().expect("a figure") - 0.25).abs() < 1e-9, "{step}");
        assert_eq!((&step["tau"], &step["code"]), (&2.5.into(), &code.into()));
    }
}

#[test]
fn training_from_a_carried_store_is_compared_where_the_cpu_came_to() {
    let Some(()) = python() else { return };
    // The CPU is cut off in one of them, after two steps of three.
    let machine = Machine::new();
    let (output, report) = machine.run("call4", &[("CUT", "glide")], &["--ceiling", "2"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let steps = &report["steps"];
    assert_eq!(
        (&steps["train_glide"]["code"], &steps["train_glide_cpu"]["code"]),
        (&0.into(), &124.into())
    );
    assert_eq!(steps["train_eagle3"]["held_out_loss"], 5.5);
    for (name, run) in
        [("train_glide", "glide"), ("train_eagle3", "eagle3"), ("train_dflash", "dflash")]
    {
        let curve = &steps[name]["loss_beside_cpu"][format!("{run}-metrics.jsonl")];
        assert_eq!((&curve["steps"], &curve["largest"]), (&2.into(), &0.5.into()), "{curve}");
        assert_eq!(curve["losses"], json!([[1, 7, 14], [2, 6, 12]]));
    }
    assert_eq!(steps["train_glide_cpu"].get("loss_beside_cpu"), None);
    let row = "| train_glide glide | 2 | 0.5 | 0.5 | 1: 7 / 14, 2: 6 / 12 |";
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains(row), "{row} not in {table}");
}

#[test]
fn caches_stay_in_the_folder_and_libraries_are_appended() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    machine.run("call2", &[], &[]);
    let (_, printed) = machine.archived("glide.out");
    let line = printed.lines().last().expect("a line");
    let line: Value = serde_json::from_str(line).expect("JSON");
    let caches = line["name"].as_str().expect("a folder");
    assert!(Path::new(caches).starts_with(machine.folder.path()), "{caches}");
    assert_eq!(line["path"], "/its/own");
}

#[test]
fn a_step_that_hangs_ends_with_all_that_it_started_and_its_lines_stay() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    let modes = [("glide", "hang"), ("eagle3", "crash"), ("capture", "refuse")];
    let (output, report) = machine.run("call2", &modes, &["--ceiling", "2"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let steps = &report["steps"];
    assert_eq!(
        (&steps["glide"]["code"], &steps["glide"]["timed_out"]),
        (&124.into(), &true.into())
    );
    assert!(!machine.child_lives(), "what the step started goes on");
    // What was printed before counts, torn lines do not.
    for name in ["glide", "eagle3"] {
        let lines = steps[name]["lines"].as_array().expect("lines");
        assert_eq!((lines.len(), &lines[0]["tokens_per_s"]), (1, &300.0.into()), "{name}");
    }
    assert_eq!(steps["eagle3"]["code"], 139);
    assert_eq!(steps["capture"]["last_words"], json!(["error: no memory"]));
    // The others ran.
    assert_eq!(
        (&steps["pytorch_glide"]["code"], &steps["glide_135m"]["code"]),
        (&0.into(), &124.into())
    );
    assert_eq!(steps["pytorch_eagle3"]["code"], 0);
    let (_, status) = machine.archived("glide.status");
    assert_eq!(status, "124\n");
    let (_, errors) = machine.archived("glide.err");
    assert!(errors.contains("gpu-check: stopped after 2 s"), "{errors}");
}

#[test]
fn the_budget_holds_and_what_it_leaves_out_is_named() {
    let Some(()) = python() else { return };
    let modes = [("glide", "hang"), ("eagle3", "hang"), ("capture", "hang")];
    let (output, report) =
        Machine::new().run("call2", &modes, &["--budget", "16", "--ceiling", "3"]);
    assert_eq!(output.status.code(), Some(1));
    let steps = report["steps"].as_object().expect("steps");
    let seconds: f64 = steps.values().filter_map(|step| step["seconds"].as_f64()).sum();
    assert!(seconds <= 16.0, "{seconds} s of 16");
    let skipped = steps.values().filter(|step| step["skipped"] == "no time left").count();
    assert!(skipped > 0 && steps["glide"]["code"] == 124, "{report}");
    assert_eq!(steps.len(), 15);
}

#[test]
fn a_step_that_prints_for_ever_or_fills_the_disk_is_stopped() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    let modes = [("glide", "chatter"), ("eagle3", "heap")];
    let limits = ["--output-mib", "4", "--scratch-mib", "16", "--ceiling", "60"];
    let (output, report) = machine.run("call2", &modes, &limits);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    for (name, words) in
        [("glide", "printed more than 4 MiB"), ("eagle3", "wrote more than 16 MiB")]
    {
        assert_eq!(report["steps"][name]["code"], 153, "{name}");
        let (_, errors) = machine.archived(&format!("{name}.err"));
        assert!(errors.contains(words), "{errors}");
    }
    assert_eq!(report["steps"]["capture"]["code"], 0);
    // Of what was printed, beginning and end are kept.
    let (_, printed) = machine.archived("glide.out");
    assert!(printed.len() < 2 << 20 && printed.contains("bytes left out]"), "{}", printed.len());
    assert_eq!(report["steps"]["glide"]["lines"][0]["tokens_per_s"], 300.0);
    // A disk that is full from the beginning.
    let limits = ["--free-mib", "1000000000"];
    let (output, report) = Machine::new().run("call1", &[("doctor", "hang")], &limits);
    assert_eq!((output.status.code(), &report["steps"]["doctor"]["code"]), (Some(1), &153.into()));
}

#[test]
fn results_that_cannot_be_written_do_not_end_the_run() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    let plain = machine.command("call4", &[]);
    // No file may grow beyond a kilobyte or so: the report does not fit.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 2; exec \"$@\"", "sh", "python3"]).args(plain.get_args());
    let variables = plain.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let output = limited.envs(variables).output().expect("sh");
    let told = text(&output);
    assert!(told.contains("the results cannot be written now"), "{told}");
    // The table on stdout has every step.
    assert!(told.contains("| decode_f32 | 0 |") && told.contains("| quickstart | 0 |"), "{told}");
    assert_eq!(output.status.code(), Some(0), "{told}");
}

#[test]
fn a_stopped_call_leaves_its_archive() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    let mut command = machine.command("call2", &[("eagle3", "hang")]);
    let mut running = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("python");
    wait_until("a child", || {
        assert_eq!(running.try_wait().expect("a state"), None, "it ended by itself");
        machine.path("child").exists()
    });
    let stopped = Command::new("kill").arg(running.id().to_string()).status().expect("kill");
    assert!(stopped.success());
    assert_eq!(running.wait().expect("an end").code(), Some(143));
    assert!(!machine.child_lives());
    let (_, report) = machine.archived("gpu-check.json");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["steps"]["glide"]["code"], 0, "{report}");
    assert_eq!(report["pass"], false);
}

#[test]
fn what_is_not_there_is_said() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    for other in ["nvidia-smi", "compute-sanitizer"] {
        std::fs::remove_file(machine.path("bin").join(other)).expect("removed");
    }
    let (output, report) = machine.run("call1", &[("kernel_check", "lacks")], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report["steps"]["kernels_small"]["lacks"], "kernel-check");
    let table = String::from_utf8_lossy(&output.stdout);
    for row in [
        "| kernels_small | 2 |",
        "FAIL: this build has no command kernel-check",
        "| racecheck | - | - | skipped: compute-sanitizer is not there |",
    ] {
        assert!(table.contains(row), "{row} not in {table}");
    }
    assert_eq!(report["steps"]["doctor"]["gpu"], Value::Null);
    let mut command = machine.command("call1", &[]);
    let output = command.arg("--longdraft").arg("no/such/program").output().expect("python");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("scripts/gpu-bundle"), "{}", text(&output));
}
