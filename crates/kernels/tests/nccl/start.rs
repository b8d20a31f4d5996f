//! Starts ranks as processes of this test.

use std::process::{Command, Stdio};

use candle_core::cuda::cudarc::driver::CudaContext;
use longdraft_kernels::nccl::new_name;

pub(crate) const RANK: &str = "NCCL_TEST_RANK";
pub(crate) const SIZE: &str = "NCCL_TEST_SIZE";
pub(crate) const PLAY: &str = "NCCL_TEST_PLAY";
pub(crate) const NAME: &str = "NCCL_TEST_NAME";

/// Ranks that play the same.
#[derive(Clone)]
pub(crate) struct Ranks {
    size: usize,
    play: &'static str,
    environment: Vec<(&'static str, &'static str)>,
}

/// Whether what stands in for driver and NCCL is there, which fails where it is asked to.
pub(crate) fn can_fail() -> bool {
    let name = CudaContext::new(0).and_then(|gpu| gpu.name());
    let can_fail = name.is_ok_and(|name| name == "recording driver");
    if !can_fail {
        eprintln!(
            "skipped: this NCCL does not fail on demand; scripts/check-nccl has one that does"
        );
    }
    can_fail
}

impl Ranks {
    /// `None` where there are not so many GPUs; the test says so.
    pub(crate) fn of(size: usize, play: &'static str) -> Option<Self> {
        let there = CudaContext::device_count().unwrap_or(0);
        if (there as usize) < size {
            eprintln!("skipped: needs {size} GPUs, found {there}; scripts/check-nccl needs none");
            return None;
        }
        Some(Self { size, play, environment: Vec::new() })
    }

    pub(crate) fn with(&self, variable: &'static str, value: &'static str) -> Self {
        let environment = [&self.environment[..], &[(variable, value)]].concat();
        Self { environment, ..self.clone() }
    }

    /// Over stand-ins: every piece of work and every collective takes a while, so what is not waited for comes too late.
    pub(crate) fn late(&self) -> Self {
        self.with("GPU_DELAY_US", "2000").with("GPU_NCCL_DELAY_MS", "30")
    }

    /// What each rank says. Fails where one of them does.
    pub(crate) fn run(&self) -> Vec<String> {
        let name: String = new_name().unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "rank", "--ignored", "--nocapture"]);
            command.envs(self.environment.iter().copied()).env("RUST_BACKTRACE", "0");
            command.env(RANK, rank.to_string()).env(SIZE, self.size.to_string());
            command.env(PLAY, self.play).env(NAME, &name);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let started: Vec<_> = (0..self.size).map(start).collect();
        let ended = started.into_iter().map(|rank| rank.wait_with_output().unwrap());
        let all: Vec<_> = ended.collect();
        let said: Vec<_> = all
            .iter()
            .map(|rank| {
                let (out, err) = (&rank.stdout, &rank.stderr);
                format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
            })
            .collect();
        assert!(all.iter().all(|rank| rank.status.success()), "{}", said.join("\n"));
        said
    }
}
