//! `init`: by options, by default, and with somebody at a terminal.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::{last_json, longdraft, require_words, stderr, stdout, succeeded, told_by};

fn init(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = longdraft(&[&["init"], arguments].concat());
    command.current_dir(folder).stdin(Stdio::null()).output().expect("the binary starts")
}

#[track_caller]
fn run(folder: &Path, arguments: &[&str]) -> Output {
    let output = longdraft(arguments).current_dir(folder).output().expect("the binary starts");
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    output
}

#[track_caller]
fn run_printed(folder: &Path, command: &str) -> Output {
    let words = shlex::split(command).expect("a command");
    assert_eq!(words[0], "longdraft", "{command}");
    run(folder, &words[1..].iter().map(String::as_str).collect::<Vec<_>>())
}

#[track_caller]
fn refusal(output: &Output) -> String {
    let text = told_by(output, 2);
    assert!(text.contains("error: ") && !text.contains("panicked"), "{text}");
    text
}

/// Every key has a comment above it.
#[track_caller]
fn require_comments(text: &str) {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    for (index, line) in lines.iter().enumerate() {
        if !line.starts_with('#') && *line != "-" {
            let before = index.checked_sub(1).map(|before| lines[before]);
            assert!(before.is_some_and(|before| before.starts_with("# ")), "{line} in {text}");
        }
    }
}

#[test]
fn without_any_answer_it_writes_what_runs() {
    let dir = tempfile::tempdir().expect("tempdir");
    let output = succeeded(init(dir.path(), &["--yes"]));
    let file = dir.path().join("longdraft.yaml");
    let text = std::fs::read_to_string(&file).expect("a file");
    require_comments(&text);
    require_words(&text, &["  method: glide\n", "\noutput: runs/demonstration\n"]);
    let told = stdout(&output);
    require_words(&told, &["wrote longdraft.yaml", "longdraft train longdraft.yaml"]);
    let checked = run(dir.path(), &["config", "check", "longdraft.yaml"]);
    assert!(stdout(&checked).contains("1 configuration is fine"));
    let short =
        ["train.steps=1", "train.features=online", "data.row_tokens=64", "train.max_minutes=null"];
    run(dir.path(), &[&["train", "longdraft.yaml"], &short[..]].concat());

    // What is there stays.
    std::fs::write(&file, "mine").expect("written");
    let text = refusal(&init(dir.path(), &["--yes"]));
    assert!(text.contains("is there already") && text.contains("--force"), "{text}");
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "mine");
    assert!(init(dir.path(), &["--yes", "--force"]).status.success());
    assert_ne!(std::fs::read_to_string(&file).expect("a file"), "mine");
    let names = std::fs::read_dir(dir.path()).expect("folder").flatten();
    let mut names: Vec<String> =
        names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    assert_eq!(names, ["longdraft.yaml", "runs"], "nothing else is left");
}

#[test]
fn every_purpose_and_method_gives_a_configuration_that_is_accepted() {
    let dir = tempfile::tempdir().expect("tempdir");
    std::fs::write(
        dir.path().join("my rows.jsonl"),
        "{\"text\": \"one row of text\"}\n".repeat(50),
    )
    .expect("rows");
    for purpose in ["train", "long"] {
        for method in ["glide", "eagle3", "dflash", "dflash2", "dspark"] {
            let file = format!("{purpose}-{method}.yaml");
            let wanted = ["--for", purpose, "--method", method, "--yes", "--json"];
            let data = ["--data", "my rows.jsonl", "--data", "shipped"];
            let more = ["--output", "runs/x y", "--time", "90m"];
            let output = init(dir.path(), &[&[file.as_str()], &wanted[..], &data, &more].concat());
            assert!(output.status.success(), "{file}: {}", stderr(&output));
            assert_eq!(last_json(&stdout(&output))["config"], file);
            let text = std::fs::read_to_string(dir.path().join(&file)).expect("a file");
            require_comments(&text);
            assert!(text.contains("path: \"my rows.jsonl\""), "{text}");
            run(dir.path(), &["config", "check", &file]);
        }
    }
    let text = std::fs::read_to_string(dir.path().join("long-glide.yaml")).expect("a file");
    require_words(&text, &["name: short", "name: long", "max_minutes: 45.0"]);
}

#[test]
fn pretraining_begins_with_the_commands_that_make_its_data() {
    let dir = tempfile::tempdir().expect("tempdir");
    let output = init(dir.path(), &["small.yaml", "--for", "pretrain", "--yes", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(dir.path().join("small.yaml")).expect("a file");
    require_comments(&text);
    // Long text has several shards.
    assert!(text.contains("train_*.bin") && text.contains("val_*.bin"), "{text}");
    run(dir.path(), &["config", "check", "--keys", "small.yaml"]);
    let told = last_json(&stdout(&output));
    let next: Vec<&str> =
        told["next"].as_array().expect("commands").iter().filter_map(|c| c.as_str()).collect();
    assert_eq!(next.len(), 4, "{next:?}");
    // The last one trains.
    for command in &next[..3] {
        run_printed(dir.path(), command);
    }
    // What is held out fills rows.
    let held_out = dir.path().join("runs/small/data/val_000000.bin");
    let bytes = std::fs::metadata(held_out).expect("held-out text").len();
    assert!(bytes > 4 * 2 * 512, "{bytes}");
    // Shards that are there need their tokenizer.
    let shards = ["--for", "pretrain", "--yes", "--data", "runs/small/data/train_000000.bin"];
    let text = refusal(&init(dir.path(), &[&["a.yaml"], &shards[..]].concat()));
    assert!(text.contains("--tokenizer"), "{text}");
    let more = ["--tokenizer", "runs/small/data", "--output", "runs/b"];
    succeeded(init(dir.path(), &[&["b.yaml"], &shards[..], &more].concat()));
    run(dir.path(), &["config", "check", "b.yaml"]);
    // A configuration is text, and so is the name of what it names.
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::ffi::OsStrExt;
        let odd = dir.path().join(std::ffi::OsStr::from_bytes(b"odd-\xff"));
        std::fs::rename(dir.path().join("runs/small/data"), &odd).expect("renamed");
        let mut command = longdraft(&["init", "c.yaml", "--for", "pretrain", "--yes"]);
        command.arg("--tokenizer").arg(&odd).current_dir(dir.path());
        let text = refusal(&command.output().expect("the binary starts"));
        assert!(text.contains("UTF-8"), "{text}");
    }
}

#[test]
fn the_text_chooses_the_size_of_a_language_model_unless_an_option_does() {
    let dir = tempfile::tempdir().expect("tempdir");
    // A file that is long and holds nothing: init does not read it.
    let long = std::fs::File::create(dir.path().join("long.jsonl")).expect("a file");
    long.set_len(500 << 20).expect("its length");
    let written = |name: &str, more: &[&str]| {
        let arguments = [&[name, "--for", "pretrain", "--yes"], more].concat();
        let told = stderr(&succeeded(init(dir.path(), &arguments)));
        (std::fs::read_to_string(dir.path().join(name)).expect("a file"), told)
    };
    let (text, told) = written("small.yaml", &[]);
    assert!(text.contains("  hidden_size: 128\n"), "{text}");
    assert!(told.contains("small, 1.0 million parameters") && told.contains("--size"), "{told}");
    let (text, told) = written("medium.yaml", &["--data", "long.jsonl"]);
    assert!(text.contains("  hidden_size: 256\n"), "{text}");
    assert!(told.contains("20 for each parameter (Hoffmann et al. 2022)"), "{told}");
    let (text, told) = written("large.yaml", &["--size", "large"]);
    assert!(text.contains("  hidden_size: 512\n"), "{text}");
    assert!(told.contains("as --size says"), "{told}");
    for file in ["small.yaml", "medium.yaml", "large.yaml"] {
        run(dir.path(), &["config", "check", "--keys", file]);
    }
}

#[test]
fn fit_gets_a_command_and_wrong_answers_are_told() {
    let dir = tempfile::tempdir().expect("tempdir");
    let output =
        init(dir.path(), &["--for", "fit", "--target", "org/name:Q4_K_M", "--time", "2h", "--yes"]);
    let told = stdout(&output);
    let command = "longdraft fit org/name:Q4_K_M --time 2h --output runs/fit/name";
    assert!(told.contains(command), "{told} {}", stderr(&output));
    assert!(!dir.path().join("longdraft.yaml").exists());
    let several = ["--for", "fit", "--data", "shipped", "--data", ".", "--yes"];
    let text = refusal(&init(dir.path(), &several));
    assert!(text.contains("fit takes one file or folder"), "{text}");
    let demonstration = tempfile::tempdir().expect("tempdir");
    let output = init(
        demonstration.path(),
        &["--for", "fit", "--method", "glide", "--yes", "--json", "--output", "runs/my fit"],
    );
    let next = last_json(&stdout(&output))["next"][0].as_str().unwrap_or_default().to_owned();
    let words = shlex::split(&next).expect("a command");
    assert!(demonstration.path().join(&words[2]).is_file(), "{next} {}", stderr(&output));
    assert!(next.contains(" --method glide --time 30m "), "{next}");
    // The folder holds the target by now; fit begins in it all the same.
    let planned = format!("{} --plan", next.replace("--time 30m", "--time 1m"));
    let planned = run_printed(demonstration.path(), &planned);
    assert!(demonstration.path().join("runs/my fit/fit.json").is_file(), "{}", stderr(&planned));
    std::fs::write(dir.path().join("file"), "x").expect("written");
    for (wrong, says) in [
        (
            &["--target", "nothing"][..],
            "no such file or folder; a model of the hub is written org/name",
        ),
        (&["--method", "magic"], "[possible values: glide, eagle3, "),
        (&["--data", "nothing.jsonl"], "nothing.jsonl: no such file or folder"),
        (&["--output", "file"], "file: is a file, no folder"),
        (&["mine.txt"], "a configuration ends in .yaml"),
    ] {
        let text = refusal(&init(dir.path(), &[wrong, &["--yes"]].concat()));
        assert!(text.contains(says), "{says} not in {text}");
    }
    // Nobody can answer there.
    let text = refusal(&init(dir.path(), &[]));
    assert!(text.contains("no terminal") && text.contains("--yes"), "{text}");
    assert!(!dir.path().join("longdraft.yaml").exists() && !dir.path().join("runs").exists());
}

/// Somebody who waits for questions and answers them.
struct Person {
    child: std::process::Child,
    heard: String,
    /// How much of that was answered.
    answered: usize,
}

impl Person {
    /// At a terminal that `script` makes; nothing where there is no such program.
    fn sit_down(folder: &Path, arguments: &str) -> Option<Self> {
        let command = format!("{} init {arguments} --threads 1", env!("CARGO_BIN_EXE_longdraft"));
        let child = Command::new("script")
            .args(["-qfec", &command, "/dev/null"])
            .current_dir(folder)
            .envs([("NO_COLOR", "1"), ("TERM", "xterm")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        match child {
            Ok(child) => Some(Self { child, heard: String::new(), answered: 0 }),
            Err(error) => {
                eprintln!("skipped: no `script` makes a terminal: {error}");
                None
            }
        }
    }

    fn answer(&mut self, question: &str, answer: &str) {
        let stdout = self.child.stdout.as_mut().expect("stdout");
        let at = loop {
            if let Some(at) = self.heard[self.answered..].find(question) {
                break at;
            }
            let mut bytes = [0; 512];
            let count = stdout.read(&mut bytes).expect("a terminal");
            assert!(count > 0, "{question} was not asked: {}", self.heard);
            self.heard.push_str(&String::from_utf8_lossy(&bytes[..count]));
        };
        self.answered += at + question.len();
        let stdin = self.child.stdin.as_mut().expect("stdin");
        stdin.write_all(answer.as_bytes()).expect("a terminal");
        stdin.flush().expect("a terminal");
    }

    /// Waits for the end; its exit code and all that was shown.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = Vec::new();
        let _ = self.child.stdout.as_mut().expect("stdout").read_to_end(&mut rest);
        self.heard.push_str(&String::from_utf8_lossy(&rest));
        (self.child.wait().expect("an end").code(), self.heard)
    }
}

#[cfg(target_os = "linux")]
#[test]
fn questions_on_a_terminal_have_defaults_and_are_asked_again() {
    let dir = tempfile::tempdir().expect("tempdir");
    let Some(mut person) = Person::sit_down(dir.path(), "mine.yaml --output runs/mine") else {
        return;
    };
    person.answer("What for (fit, train, long, pretrain) [train]:", "dance\r");
    person.answer("`dance` is none of fit, train, long, pretrain", "");
    person.answer("[train]:", "\r");
    person
        .answer("Target (a folder, a GGUF file, org/name, org/name:Q4_K_M) [demonstration]:", "\r");
    person.answer("Method (glide, eagle3, dflash, dflash2, dspark) [glide]:", "eagle3\r");
    person.answer("[shipped]:", "\r");
    // The folder was given.
    person.answer("Time for it (90s, 30m, 2h) [30m]:", "10m\r");
    let (code, heard) = person.end();
    assert_eq!(code, Some(0), "{heard}");
    assert!(!heard.contains("Folder of the run"), "{heard}");
    let text = std::fs::read_to_string(dir.path().join("mine.yaml")).expect("a file");
    require_words(&text, &["  method: eagle3\n", "  max_minutes: 10.0\n"]);
    run(dir.path(), &["config", "check", "mine.yaml"]);
}

#[cfg(target_os = "linux")]
#[test]
fn who_leaves_gets_nothing_written() {
    // The end of the input, and Ctrl-C.
    for (key, exit) in [("\u{4}", 1), ("\u{3}", 130)] {
        let dir = tempfile::tempdir().expect("tempdir");
        let Some(mut person) = Person::sit_down(dir.path(), "") else { return };
        person.answer("[train]:", key);
        let (code, heard) = person.end();
        assert_eq!(code, Some(exit), "{heard}");
        assert!(heard.contains("nothing was written"), "{heard}");
        assert_eq!(std::fs::read_dir(dir.path()).expect("folder").count(), 0);
    }
}
