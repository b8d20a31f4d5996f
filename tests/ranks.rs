//! Several ranks without MPI, started by `--ranks` or by launchers' variables: the same losses as one process, and how
//! jobs end.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::processes::start_kept;
use crate::support::ranks::{self, SOON, assert_same_numbers, joined, process_of, wait};
use crate::support::runs::{draft_bytes, metrics};
use crate::support::{
    Workshop, fail, fail_with, finished, last_json, longdraft, require_words, stderr, stdout,
    succeed, succeeded, told_by,
};

/// Starts a job, its output kept.
fn started(ranks: usize, arguments: &[&str]) -> Child {
    start_kept(longdraft(arguments).args(["--ranks", &ranks.to_string()]))
}

#[track_caller]
fn succeed_on(ranks: usize, arguments: &[&str]) -> Output {
    let output = wait(started(ranks, arguments));
    assert!(output.status.success(), "{ranks} ranks, {arguments:?}: {}", stderr(&output));
    output
}

#[test]
fn ranks_that_it_starts_train_like_one_process() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let set = ["train.rows_per_step=4", "train.steps=5", "train.evaluate_every=5", "--json"];
    let train = |name: &str, ranks: usize, more: &[&str]| {
        let run = shop.path(name);
        let place = format!("output={run}");
        (succeed_on(ranks, &joined(&[&["train", &config, &place], &set, more])), run)
    };
    let (_, plain) = train("plain", 1, &[]);
    let want = metrics(&plain);
    for (name, ranks, more) in [
        ("whole", 3, &[][..]),
        ("again", 3, &[]),
        ("library", 2, &["parallel.reduction=library", "parallel.bucket_bytes=1024"]),
        ("spread", 2, &["parallel.zero=3"]),
        ("rows", 2, &["parallel.sequence=2"]),
        ("layers", 4, &["parallel.tensor=2", "parallel.zero=1"]),
    ] {
        let (output, run) = train(name, ranks, more);
        assert_same_numbers(&want, &metrics(&run));
        assert_eq!(last_json(&stdout(&output))["steps"], 5);
        assert_eq!(stdout(&output).lines().count(), 1, "one rank answers: {}", stdout(&output));
        let shown = stderr(&output);
        assert!(shown.contains(&format!("{ranks} ranks on 1 host: ")), "{shown}");
        assert!(process_of(&run, 1).is_some(), "a log a rank");
    }
    assert_eq!(draft_bytes(&shop.path("whole")), draft_bytes(&shop.path("again")));
}

#[test]
fn ranks_of_a_launcher_meet_by_its_variables() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let set = ["train.rows_per_step=4", "train.steps=5"];
    let plain = format!("output={}", shop.path("plain"));
    succeed(&joined(&[&["train", &config, &plain], &set]));
    // Another service has the port, as torchrun's own has.
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let of = |rank: &str, more: &[(&str, &str)]| -> Command {
        let mut command = longdraft(&joined(&[&["train", &config], &set]));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")]);
        command.envs([("MASTER_PORT", port.as_str()), ("TORCHELASTIC_RUN_ID", "job")]);
        command.env("LOCAL_RANK", rank);
        command.envs(more.iter().copied());
        command
    };
    // The second comes first, and waits.
    let second = of("1", &[]).spawn().expect("starts");
    // A rank of another job is none of ours.
    let mut stranger = of("1", &[("TORCHELASTIC_RUN_ID", "other")]).spawn().expect("starts");
    let first = of("0", &[]).spawn().expect("starts");
    for rank in [first, second] {
        succeeded(wait(rank));
    }
    stranger.kill().expect("it waits for its own job");
    stranger.wait().expect("reap");
    assert_same_numbers(&metrics(&shop.path("plain")), &metrics(&shop.path("run")));
    // What contradicts is told before any work.
    require_words(&told_by(&finished(&mut of("2", &[])), 2), &["rank 2 is not below"]);
    let text = told_by(&finished(&mut of("0", &[("LOCAL_RANK", "first")])), 2);
    require_words(&text, &["LOCAL_RANK=first is not a number: set LOCAL_RANK to ", "or unset it"]);
    let other = of("0", &[]).args(["--ranks", "3"]).output().expect("starts");
    assert!(stderr(&other).contains("a launcher started 2 processes"), "{}", stderr(&other));
}

/// Stands in for Slurm's `srun`: as many tasks of a command as the job has, all on this machine, with the variables of a
/// step.
const SRUN: &str = r#"
while [ "${1#-}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS="$SLURM_NTASKS" SLURM_STEP_NODELIST="$SLURM_JOB_NODELIST" SLURM_NODEID=0
tasks=
rank=0
while [ "$rank" -lt "$SLURM_NTASKS" ]; do
    SLURM_PROCID="$rank" SLURM_LOCALID="$rank" "$@" &
    tasks="$tasks $!"
    rank=$((rank + 1))
done
code=0
for task in $tasks; do
    wait "$task" || code=$?
done
exit "$code"
"#;

#[test]
fn tasks_of_a_slurm_step_meet_by_its_variables() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let (srun, plain, run) = (shop.write("srun", SRUN), shop.path("plain"), shop.path("run"));
    let set = ["train.rows_per_step=4", "train.steps=5"];
    succeed(&joined(&[&["train", &config, &format!("output={plain}")], &set]));
    let step = |more: &[&str]| {
        let program = longdraft(&joined(&[&["train", &config], &set, more]));
        let mut command = Command::new("sh");
        command.args([srun.as_str(), "--cpus-per-task=1"]).arg(program.get_program());
        command.args(program.get_args()).env("NO_COLOR", "1");
        // The port follows from the job's number.
        command.env("SLURM_JOB_ID", std::process::id().to_string());
        command.envs([("SLURM_NTASKS", "2"), ("SLURM_JOB_NODELIST", "localhost")]);
        // A job's script is itself the one task of a step.
        command.envs([("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")]);
        wait(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("sh starts"))
    };
    let shown = stderr(&succeeded(step(&[])));
    assert!(shown.contains("2 ranks on 1 host: "), "{shown}");
    assert!(process_of(&run, 1).is_some(), "a log a rank");
    assert_same_numbers(&metrics(&plain), &metrics(&run));
    // The step has as many ranks as are asked for, or is refused.
    let again = shop.path("again");
    let output = format!("output={again}");
    succeeded(step(&[output.as_str(), "--ranks", "2"]));
    assert_eq!(draft_bytes(&run), draft_bytes(&again));
    let text = told_by(&step(&["--ranks", "3"]), 2);
    require_words(&text, &["--ranks 3, but a launcher started 2 processes"]);
}

#[test]
fn a_killed_rank_is_named_and_the_job_resumes_bit_for_bit() {
    ranks::killed_ranks_lose_nothing(started, 3, [0, 2], |run, killed, text| {
        if killed == 2 {
            assert!(text.contains("rank 2 on ") && text.contains("signal: 9"), "{text}");
            assert_eq!(text.matches("error: ").count(), 1, "one tells: {text}");
        }
        for rank in 0..3 {
            assert_ends(&process_of(run, rank).expect("a log a rank"));
        }
    });
}

/// A process is gone soon.
#[track_caller]
fn assert_ends(process: &str) {
    let started = Instant::now();
    let is_there = || {
        let sent = Command::new("kill").args(["-0", process]).stderr(Stdio::null()).status();
        sent.expect("kill").success() && !is_defunct(process)
    };
    while is_there() {
        assert!(started.elapsed() < SOON, "process {process} goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process has ended and waits for whoever started it.
fn is_defunct(process: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && line.contains('Z'))
}

#[test]
fn the_rank_that_hangs_is_named_also_where_others_wait_for_each_other() {
    let (text, process) = ranks::told_of_a_rank_that_hangs(started, 3);
    require_words(&text, &["no answer for 8 s of rank 2 on ", "its process is stopped"]);
    assert_ends(&process);
}

#[test]
fn a_rank_that_is_asked_to_stop_lets_all_save_first() {
    ranks::all_save_where_one_is_asked_to_stop(started);
}

#[test]
fn an_error_of_one_rank_ends_all_with_its_message_and_code() {
    ranks::an_error_ends_all(started);
}

#[test]
fn what_cannot_be_started_is_refused() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    assert!(fail(&["train", &config, "--ranks", "2000"], 2).contains("with --plan any number"));
    fail(&["train", &config, "--ranks", "0"], 2);
    fail(&["train", &config, "--ranks", "2", "--gpus", "2"], 2);
    // No machine of the tests has so many.
    fail_with(&["train", &config, "--gpus", "1024"], 2, &["cuda:1023", "hint: "]);
    assert!(!std::path::Path::new(&shop.path("run")).exists(), "nothing was begun");
}

#[test]
fn ranks_that_it_starts_fill_one_store() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let place = |name: &str| format!("train.features={}", shop.path(name));
    let (one, shared) = (place("one"), place("shared"));
    let set = ["draft.method=eagle3", "draft.target_layers=[2,0,1]", "capture.shard_mib=1"];
    succeed(&joined(&[&["capture", &config, &one], &set]));
    succeed_on(2, &joined(&[&["capture", &config, &shared], &set]));
    let train = |features: &str, name: &str| {
        let run = shop.path(name);
        let output = format!("output={run}");
        succeed(&joined(&[&["train", &config, features, &output, "train.steps=3"], &set]));
        draft_bytes(&run)
    };
    assert_eq!(train(&one, "of-one"), train(&shared, "of-shared"));
}
