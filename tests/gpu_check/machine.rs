//! A machine whose programs stand in for the real ones.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::support::files::{read_json, repository};

/// Stands in for `longdraft`: what a command does is chosen by `STUB_COMMAND`, for `bench` by its kind.
const LONGDRAFT: &str = r#"#!/bin/sh
key=$1; case $1 in bench) key=$2;; capture) key=store;; esac
traced=; case "$*" in *--trace*) traced=',"trace":{"steps":5,"all_ms":100.0,"other_ms":30.0,"ops":[{"op":"attention_forward","starts":10,"ms":70.0}]}';; esac
figures() { echo '{"impl":"longdraft","case":"'$key'","shape":"8b","tokens":4096,"soft":true,"cached":false,"tokens_per_s":300.0,"peak_device_mib":7'$traced'}'; }
eval "mode=\$STUB_$(echo $key | tr - _)"
case ${mode:-ok} in
  hang) figures; sleep 300 & echo $! > "$STUB_CHILD"; wait;;
  crash) figures; printf '{"impl":"longdraft","case":"torn'; kill -SEGV $$;;
  chatter) figures; while :; do printf '%01024d\n' 0; done;;
  heap) figures; head -c 67108864 /dev/zero > heap; sleep 300;;
  lacks) echo "error: unrecognized subcommand '$1'" >&2; exit 2;;
  refuse) echo "error: no memory" >&2; exit 1;;
esac
[ "${mode:-ok}" = ok ] || exit 9
case $key in
  doctor) echo '{"can_work":true}';;
  kernel-check) echo '{"name":"rms_norm","shape":"8x4","passed":true}'; echo '{"name":"attention","shape":"T 9","products":"bf16","passed":true,"tflops":99.5}'; echo '{"checks":2,"passed":2,"pass":true}';;
  parity) echo '{"case":"a","kind":"glide","pass":true,"checks":[{"name":"loss","error":5e-5,"tolerance":1e-4,"pass":true}]}';;
  store) folder=${2%.yaml}-store; mkdir $folder $folder/claims; echo '{}' > $folder/index.json;;
  train)
    [ -f "$TRAINING/glide-store/index.json" ] || exit 3
    run=$(basename $2 .yaml); mkdir $run
    for step in 1 2 3; do
      loss=$((8 - step)); case "$*" in *device=cpu*) loss=$((2 * loss)); [ $step = 3 ] && break;; esac
      echo '{"step":'$step',"loss":'$loss'}' >> $run/metrics.jsonl
    done
    [ "$STUB_CUT" = $run ] && case "$*" in *device=cpu*) sleep 300;; esac
    echo '{"steps":3,"held_out":{"loss":5.5},"median_tokens_per_second":9}';;
  quickstart)
    mkdir -p quickstart/base; loss=2.0; case "$*" in *device=cpu*) loss=1.6;; esac
    echo '{"step":1,"loss":'$loss'}' > quickstart/base/metrics.jsonl; echo '{"tau":2.5,"lossless":true,"seconds":3}';;
  *) figures; echo '{"case":"environment","name":"'$CUDA_CACHE_PATH'","path":"'$LD_LIBRARY_PATH'"}';;
esac
"#;

/// Stands in for a Python with PyTorch.
const PYTHON: &str = r#"#!/bin/sh
case $1 in
  *glide.py) echo '{"impl":"pytorch-2","case":"glide","shape":"8b","tokens":4096,"soft":true,"tokens_per_s":100.0,"peak_device_mib":9,"attention":"sdpa","compile":true}';;
  *attention.py) echo '{"impl":"pytorch-2","name":"attention","shape":"T 4096","products":"bf16","backend":"flash","ms":0.5,"tflops":300.0}';;
  *) echo '{"what":"probe"}';;
esac
"#;

/// `None` where there is no Python; the test says so.
pub(crate) fn python() -> Option<()> {
    let found = Command::new("python3").arg("--version").output().ok().map(drop);
    if found.is_none() {
        eprintln!("skipped: there is no python3");
    }
    found
}

pub(crate) fn program(path: &Path, text: &str) {
    std::fs::write(path, text).expect("a program");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("a program");
}

/// A folder with stand-ins for every program that a plan starts.
pub(crate) struct Machine {
    pub(crate) folder: tempfile::TempDir,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("tempdir");
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("bin")).expect("bin");
        program(&path("longdraft"), LONGDRAFT);
        std::fs::create_dir_all(path("training/glide-store")).expect("a store");
        std::fs::write(path("training/glide-store/index.json"), "{}").expect("a store");
        program(&path("python"), PYTHON);
        program(&path("bin/nvidia-smi"), "#!/bin/sh\necho 'GPU, 1, 40, 1980, 3201, 99'\n");
        program(&path("bin/ncu"), "#!/bin/sh\necho profile\n");
        // Starts what it watches, as the real one does.
        let sanitizer =
            "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift 2; done\nexec \"$@\"\n";
        program(&path("bin/compute-sanitizer"), sanitizer);
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `gpu-check` on this machine, with a plan.
    pub(crate) fn command(&self, plan: &str, modes: &[(&str, &str)]) -> Command {
        self.command_of(["--plan", plan], modes)
    }

    /// The same with another choice of steps.
    pub(crate) fn command_of(&self, steps: [&str; 2], modes: &[(&str, &str)]) -> Command {
        let mut command = Command::new("python3");
        command.arg(repository("scripts/gpu-check")).args(steps);
        for (name, file) in [
            ("--longdraft", "longdraft"),
            ("--python", "python"),
            ("--archive", "gpu.tar.gz"),
            ("--output", "results"),
            ("--training", "training"),
        ] {
            command.arg(name).arg(self.path(file));
        }
        let known = std::env::var("PATH").expect("PATH");
        command.env("PATH", format!("{}:{known}", self.path("bin").display()));
        // The stand-ins write next to nothing: a full machine may test them. A test's own limit comes later and wins.
        command.args(["--free-mib", "1"]);
        command.env("STUB_CHILD", self.path("child")).env("LD_LIBRARY_PATH", "/its/own");
        command.envs(modes.iter().map(|(key, mode)| (format!("STUB_{key}"), mode)));
        command
    }

    pub(crate) fn run(
        &self,
        plan: &str,
        modes: &[(&str, &str)],
        arguments: &[&str],
    ) -> (Output, Value) {
        let output = self.command(plan, modes).args(arguments).output().expect("python");
        (output, read_json(self.path("results/gpu-check.json")))
    }

    /// Names of the archive's files, and the text of the one that a name ends.
    pub(crate) fn archived(&self, name: &str) -> (Vec<String>, String) {
        let archive = self.path("gpu.tar.gz");
        let tar = |arguments: &[&str]| {
            let mut command = Command::new("tar");
            let output = command.args(arguments).arg("-f").arg(&archive).output().expect("tar");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let names: Vec<String> = tar(&["-tz"]).lines().map(str::to_owned).collect();
        (names, tar(&["-xzO", "--wildcards", &format!("*/{name}")]))
    }

    pub(crate) fn child_lives(&self) -> bool {
        let text = std::fs::read_to_string(self.path("child")).expect("a child was started");
        let state = std::fs::read_to_string(format!("/proc/{}/stat", text.trim()));
        state.is_ok_and(|state| !state.contains(") Z "))
    }
}

pub(crate) fn text(output: &Output) -> String {
    let streams = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    streams.concat()
}
