//! What surrounds the work: completions, manual pages, how much is told, colours, runs on disk.

use crate::support::{
    Workshop, fail, fail_with, last_json, longdraft, require_words, run, stderr, stdout, succeed,
    succeeded,
};

#[test]
fn completions_and_manual_pages_know_every_command() {
    for (shell, sign) in [
        ("bash", "complete -F _longdraft"),
        ("zsh", "#compdef longdraft"),
        ("fish", "complete -c longdraft"),
        ("powershell", "Register-ArgumentCompleter"),
    ] {
        let script = succeed(&["completions", shell]);
        require_words(&script, &[sign, "quickstart", "draft-len"]);
        assert_eq!(last_json(&succeed(&["completions", shell, "--json"]))["page"], script);
    }
    let wrong = run(&["completions", "tcsh"]);
    assert_eq!(wrong.status.code(), Some(2));
    let page = succeed(&["man"]);
    assert!(page.contains(".TH longdraft 1") && page.contains("quickstart"), "{page}");
    let folder = tempfile::tempdir().expect("folder");
    let pages = folder.path().join("man1");
    succeed(&["man", "--output", &pages.display().to_string()]);
    let train = std::fs::read_to_string(pages.join("longdraft-train.1")).expect("a page");
    assert!(train.contains("force\\-resume"), "{train}");
    let told = last_json(&succeed(&["man", "--json"]));
    assert_eq!(told["page"], page);
    let told = last_json(&succeed(&["man", "--output", &pages.display().to_string(), "--json"]));
    assert_eq!(told["output"], pages.display().to_string());
    for kind in [&[][..], &["--pretrain"]] {
        let schema = [&["config", "schema"], kind].concat();
        let tables = [&schema[..], &["--markdown"]].concat();
        let told = last_json(&succeed(&[&tables[..], &["--json"]].concat()));
        assert_eq!(told["page"], succeed(&tables));
        let told = last_json(&succeed(&[&schema[..], &["--json"]].concat()));
        assert!(told["properties"]["train"].is_object(), "{told}");
    }
    let taken = folder.path().join("taken");
    std::fs::write(&taken, "").expect("a file");
    fail(&["man", "--output", &taken.display().to_string()], 1);
}

#[test]
fn a_mistyped_command_or_option_names_the_nearest() {
    for (wrong, right) in [
        (&["trian", "x.yaml"][..], "'train'"),
        (&["quickstrat"][..], "'quickstart'"),
        (&["runs", "lst"][..], "'list'"),
        (&["generate", "--target", "t", "--promt", "a"][..], "'--prompt'"),
    ] {
        fail_with(wrong, 2, &[right]);
    }
}

#[test]
fn quiet_and_verbose_say_less_and_more_and_the_same_result() {
    let shop = Workshop::new();
    let target = shop.target();
    let told = |more: &[&str]| {
        let words = ["generate", "--target", &target, "--prompt", "abc", "--max-tokens", "4"];
        let output = succeeded(run(&[&words[..], more].concat()));
        (stdout(&output), stderr(&output))
    };
    let (said, normal) = told(&[]);
    assert!(normal.contains("tok/s") && !normal.contains("took"), "{normal}");
    assert_eq!(told(&["--quiet"]), (said.clone(), String::new()));
    let (same, verbose) = told(&["-v"]);
    assert_eq!(same, said);
    let version = concat!("longdraft ", env!("CARGO_PKG_VERSION"), ", 1 thread");
    assert!(verbose.contains(version) && verbose.contains("took"), "{verbose}");
    // What is wrong is always told.
    let failed = run(&["generate", "--target", "no/such.gguf", "--prompt", "a", "--quiet"]);
    assert!(stderr(&failed).contains("error: "), "{}", stderr(&failed));
    fail(&["doctor", "--target", "no/such.gguf", "-q"], 2);
    fail(&["doctor", "-q", "-v"], 2);
}

#[test]
fn a_log_holds_what_is_told_with_times_and_details() {
    let shop = Workshop::new();
    let (target, log) = (shop.target(), shop.path("all.log"));
    let words = ["generate", "--target", &target, "--prompt", "abc", "--max-tokens", "4"];
    let logged = |more: &[&str]| {
        let output = succeeded(run(&[&words[..], &["--log-file", &log], more].concat()));
        assert!(!stderr(&output).contains("took"), "{}", stderr(&output));
        std::fs::read_to_string(&log).expect("log")
    };
    let once = logged(&["--quiet"]);
    require_words(&once, &["tok/s", "took ", concat!("longdraft ", env!("CARGO_PKG_VERSION"))]);
    for line in once.lines() {
        let (time, text) = line.split_once(' ').expect("a time before the text");
        assert!(time.len() == 20 && time.starts_with("20") && time.ends_with('Z'), "{line}");
        assert!(!text.is_empty() && !text.contains('\x1b'), "{line}");
    }
    // A second command goes on with the file, and a failure is in it.
    let twice = logged(&[]);
    assert!(twice.starts_with(&once) && twice.len() > once.len());
    let failed =
        run(&["generate", "--target", "/no/such.gguf", "--prompt", "a", "--log-file", &log]);
    assert_eq!(failed.status.code(), Some(2));
    let all = std::fs::read_to_string(&log).expect("log");
    assert!(all[twice.len()..].contains("Z error: ") && all.contains("/no/such.gguf"), "{all}");
    // A place that takes nothing is told before the work, or once when it is full.
    let nowhere = shop.path("no/such/folder.log");
    fail_with(&[&words[..], &["--log-file", &nowhere]].concat(), 2, &["--log-file", "hint: "]);
    if std::path::Path::new("/dev/full").exists() {
        let output = run(&[&words[..], &["--log-file", "/dev/full"]].concat());
        assert!(output.status.success());
        assert_eq!(stderr(&output).matches("nothing more is logged").count(), 1);
    }
}

#[test]
fn colours_follow_the_option_then_the_environment() {
    let coloured = |more: &[&str], no_color: Option<&str>| {
        let mut command = longdraft(&["export", "no/such/run", "--to", "hf", "--output", "o"]);
        command.args(more).env_remove("NO_COLOR");
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        let output = command.output().expect("the binary starts");
        assert_eq!(output.status.code(), Some(2));
        stderr(&output).contains("\x1b[")
    };
    // Nothing here is a terminal.
    assert!(!coloured(&[], None) && !coloured(&["--color", "never"], None));
    assert!(coloured(&["--color", "always"], None));
    assert!(coloured(&["--color=always"], Some("1")));
    assert!(!coloured(&["--color=auto"], Some("1")));
    // What is wrong with the arguments has colours, too.
    let usage = |colour: &str| stderr(&run(&["trian", colour])).contains("\x1b[");
    assert!(usage("--color=always") && !usage("--color=never"));
}

#[test]
fn runs_are_listed_compared_and_deleted() {
    let shop = Workshop::new();
    let (config, runs) = (shop.config(), shop.path("all"));
    let place = |name: &str| format!("{runs}/{name}");
    for (name, seed) in [("a", "1"), ("deep/b", "2")] {
        let (output, seed) = (format!("output={}", place(name)), format!("train.seed={seed}"));
        succeed(&["train", &config, &output, &seed]);
    }
    let listed = last_json(&succeed(&["runs", "list", &runs, "--json"]));
    let rows = listed["runs"].as_array().expect("runs");
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!(row["state"], "finished");
        assert_eq!(row["step"], row["steps"]);
        assert!(row["bytes"].as_u64() > Some(1000), "{row}");
    }
    let table = succeed(&["runs", "list", &runs]);
    assert!(table.contains("finished") && table.contains("2 runs, "), "{table}");
    assert!(succeed(&["runs", "list", &place("a")]).contains("1 run, "));
    fail(&["runs", "list", &place("none")], 2);

    let compared = succeed(&["runs", "compare", &place("a"), &place("deep/b")]);
    assert!(compared.contains("train.seed: 1 | 2"), "{compared}");
    let compared =
        last_json(&succeed(&["runs", "compare", &place("a"), &place("deep/b"), "--json"]));
    assert_eq!(compared["stages"].as_array().map(Vec::len), Some(2));
    fail(&["runs", "compare", &place("deep")], 2);

    // Nobody is there to be asked; no other folder goes.
    fail_with(&["runs", "delete", &place("a")], 2, &["--yes"]);
    fail(&["runs", "delete", &place("deep"), "--yes"], 2);
    fail(&["runs", "delete", &place("a"), &place("none"), "--yes"], 2);
    assert!(std::path::Path::new(&place("a")).is_dir());
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(place("a"), place("link")).expect("a link");
        fail(&["runs", "delete", &place("link"), "--yes"], 2);
    }
    let held = std::fs::File::open(format!("{}/.lock", place("a"))).expect("the lock");
    held.lock().expect("held");
    fail_with(&["runs", "delete", &place("a"), "--yes"], 2, &["a process works in it"]);
    let listed = last_json(&succeed(&["runs", "list", &place("a"), "--json"]));
    assert_eq!(listed["runs"][0]["state"], "running");
    drop(held);
    // A fit that works around a run needs it.
    let around = std::fs::File::create(format!("{runs}/.lock")).expect("a lock");
    around.lock().expect("held");
    let told = fail(&["runs", "delete", &place("a"), "--yes"], 2);
    assert!(told.contains("a process works in ") && told.contains("wait for it"), "{told}");
    assert!(std::path::Path::new(&place("a")).is_dir());
    drop(around);
    let deleted = last_json(&succeed(&["runs", "delete", &place("a"), "--yes", "--json"]));
    assert!(deleted["bytes"].as_u64() > Some(1000), "{deleted}");
    assert!(!std::path::Path::new(&place("a")).exists());
    assert!(std::path::Path::new(&place("deep/b")).is_dir());
}

#[test]
fn a_run_directory_that_others_wrote_in_is_read_without_harm() {
    let folder = tempfile::tempdir().expect("folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(path, text).expect("file");
    };
    write("bad/config.yaml", "{{{");
    write("bad/metrics.jsonl", "no JSON\n");
    write("bad/checkpoints/last/state.json", "{\"step\": \"x\"}");
    write("odd/curriculum.json", "{\"stages\": [{\"name\": \"a\", \"output\": \"/\"}]}");
    write("decode/decode.json", "{}");
    let root = folder.path().display().to_string();
    let listed = last_json(&succeed(&["runs", "list", &root, "--json"]));
    let names: Vec<_> =
        listed["runs"].as_array().expect("runs").iter().map(|run| &run["run"]).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    let odd = format!("{root}/odd");
    succeed(&["runs", "delete", &odd, "--yes"]);
    assert!(std::path::Path::new("/").is_dir() && !std::path::Path::new("/.lock").exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_whose_name_is_no_text_is_listed_and_deleted() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().expect("folder");
    let odd = folder.path().join(std::ffi::OsStr::from_bytes(b"odd-\xff"));
    std::fs::create_dir(&odd).expect("a folder");
    std::fs::write(odd.join("config.yaml"), "{}").expect("a file");
    std::fs::write(odd.join("metrics.jsonl"), "").expect("a file");
    let told = |words: &[&str], path: &std::path::Path| {
        let output = succeeded(longdraft(words).arg(path).output().expect("the binary starts"));
        last_json(&stdout(&output))
    };
    let shown = odd.to_string_lossy().into_owned();
    let above = told(&["runs", "list", "--json"], folder.path());
    assert_eq!(above["runs"][0]["run"], shown);
    let itself = told(&["runs", "list", "--json"], &odd);
    assert_eq!(itself["folder"], shown);
    assert_eq!(told(&["runs", "delete", "--yes", "--json"], &odd)["deleted"][0], shown);
    assert!(!odd.exists());
}
