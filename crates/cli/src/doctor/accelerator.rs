//! GPUs and the library that connects them.

use std::path::{Path, PathBuf};

use longdraft_models::{DeviceChoice, ModelError};

use super::finding::{Finding, Status};
use super::program::{Answer, ask};

const GPU: &str = "gpu";
const NCCL: &str = "nccl";
const NCCL_FILE: &str = "libnccl.so";

/// What there is of NVIDIA.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Nvidia {
    /// Neither driver nor tools.
    None,
    /// One line for each GPU.
    Gpus(Vec<String>),
    /// A driver or tool that does not work, or shows no GPU.
    Broken(String),
}

pub(super) fn examine() -> Vec<Finding> {
    let query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"];
    let driver = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    let nvidia = nvidia(ask("nvidia-smi", &query), driver.as_deref());
    let built = (candle_core::utils::cuda_is_available(), candle_core::utils::metal_is_available());
    let opened = built.0.then(|| DeviceChoice::Cuda(0).open(0).err()).flatten();
    let mut findings = vec![judge_opened(judge_gpu(&nvidia, built), opened)];
    if let Nvidia::Gpus(gpus) = &nvidia {
        findings.push(judge_nccl(gpus.len(), find_nccl().as_deref()));
    }
    findings
}

fn nvidia(answer: Answer, driver: Option<&str>) -> Nvidia {
    match answer {
        Answer::Said(text) => {
            let gpus: Vec<String> = text.lines().filter_map(parse_gpu).collect();
            if gpus.is_empty() {
                Nvidia::Broken("nvidia-smi lists no GPU".into())
            } else {
                Nvidia::Gpus(gpus)
            }
        }
        Answer::Failed(cause) => Nvidia::Broken(format!("nvidia-smi: {cause}")),
        Answer::Absent => match driver.and_then(|text| text.lines().next()) {
            Some(line) => Nvidia::Broken(format!("{}, but no nvidia-smi", line.trim())),
            None => Nvidia::None,
        },
    }
}

/// `name, 143771 MiB, 550.54.15`.
fn parse_gpu(line: &str) -> Option<String> {
    let parts: Vec<&str> = line.split(',').map(str::trim).collect();
    match parts.as_slice() {
        [name, memory, driver] if !name.is_empty() => {
            Some(format!("{name} ({memory}, driver {driver})"))
        }
        _ => None,
    }
}

fn judge_gpu(nvidia: &Nvidia, (cuda, metal): (bool, bool)) -> Finding {
    let repair = "check the driver with nvidia-smi; in a container, start it with its GPUs \
                  (docker run --gpus all)";
    match nvidia {
        Nvidia::Gpus(gpus) if cuda => Finding::ok(GPU, gpus.join(", ")),
        Nvidia::Gpus(gpus) => Finding::note(
            GPU,
            format!("{}; this build has no CUDA support", gpus.join(", ")),
            "everything runs on the processor; build with --features cuda to use the GPU (docs/guides/gpu.md)",
        ),
        Nvidia::Broken(cause) if cuda => Finding::problem(GPU, cause, repair),
        Nvidia::Broken(cause) => {
            Finding::note(GPU, format!("{cause}; this build has no CUDA support"), repair)
        }
        Nvidia::None if cuda => {
            let fact = "this build has CUDA support, but there is no NVIDIA driver";
            Finding::problem(GPU, fact, repair)
        }
        Nvidia::None if metal => Finding::ok(GPU, "Metal"),
        Nvidia::None => Finding::ok(GPU, "none; this build computes on the processor"),
    }
}

/// A GPU that the tools show but this build cannot open is a problem.
fn judge_opened(found: Finding, error: Option<ModelError>) -> Finding {
    match error {
        Some(ModelError::Device { problem, remedy, .. }) if found.status == Status::Ok => {
            Finding::problem(GPU, format!("{}, but {problem}", found.fact), remedy)
        }
        _ => found,
    }
}

fn judge_nccl(gpus: usize, library: Option<&Path>) -> Finding {
    match library {
        Some(path) => Finding::ok(NCCL, path.display().to_string()),
        None if gpus < 2 => Finding::ok(NCCL, "not found, and not needed for one GPU"),
        None => Finding::note(
            NCCL,
            format!("{NCCL_FILE} is not found, and there are {gpus} GPUs"),
            "only needed to train on several GPUs: install libnccl2, or put its folder into \
             LD_LIBRARY_PATH",
        ),
    }
}

/// Where the loader would find it: LD_LIBRARY_PATH, its cache, the usual folders.
fn find_nccl() -> Option<PathBuf> {
    let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders: Vec<PathBuf> =
        std::env::split_paths(&variable).filter(|path| !path.as_os_str().is_empty()).collect();
    let cached = || match ask("ldconfig", &["-p"]) {
        Answer::Said(text) => in_loader_cache(&text),
        Answer::Absent | Answer::Failed(_) => None,
    };
    let usual =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let usual = usual.map(PathBuf::from);
    in_folders(&folders).or_else(cached).or_else(|| in_folders(&usual))
}

fn in_folders(folders: &[PathBuf]) -> Option<PathBuf> {
    let names = [format!("{NCCL_FILE}.2"), NCCL_FILE.to_owned()];
    let paths = folders.iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    paths.into_iter().find(|path| path.is_file())
}

/// Lines `libnccl.so.2 (libc6,x86-64) => /usr/lib/libnccl.so.2`.
fn in_loader_cache(text: &str) -> Option<PathBuf> {
    let line = text.lines().find(|line| line.trim_start().starts_with(NCCL_FILE))?;
    line.split_once("=> ").map(|(_, path)| PathBuf::from(path.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "NVIDIA A100-SXM4-80GB, 81920 MiB, 550.54.15\nNVIDIA A100-SXM4-80GB, 81920 MiB, 550.54.15\n";

    #[test]
    fn gpus_are_listed_and_the_build_is_told() {
        let found = nvidia(Answer::Said(TWO.into()), None);
        let finding = judge_gpu(&found, (false, false));
        assert_eq!(finding.status, Status::Note);
        assert!(finding.fact.contains("NVIDIA A100-SXM4-80GB (81920 MiB, driver 550.54.15)"));
        assert!(finding.fact.contains("this build has no CUDA support"));
        assert_eq!(judge_gpu(&found, (true, false)).status, Status::Ok);
    }

    #[test]
    fn a_gpu_that_does_not_open_is_a_problem() {
        let found = || judge_gpu(&nvidia(Answer::Said(TWO.into()), None), (true, false));
        let (device, problem, remedy) = ("cuda:0".into(), "no context".into(), "restart".into());
        let error = ModelError::Device { device, problem, remedy };
        let finding = judge_opened(found(), Some(error));
        assert_eq!(finding.status, Status::Problem);
        assert!(finding.fact.ends_with("but no context"));
        assert_eq!(judge_opened(found(), None).status, Status::Ok);
    }

    #[test]
    fn broken_drivers_matter_to_a_build_that_needs_them() {
        let failed = || Answer::Failed("couldn't communicate with the NVIDIA driver".into());
        for (answer, driver) in [
            (failed(), None),
            (Answer::Said("No devices were found\n".into()), None),
            (Answer::Absent, Some("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550\nGCC\n")),
        ] {
            let found = nvidia(answer, driver);
            assert!(matches!(found, Nvidia::Broken(_)), "{found:?}");
            assert_eq!(judge_gpu(&found, (true, false)).status, Status::Problem);
            assert_eq!(judge_gpu(&found, (false, false)).status, Status::Note);
        }
        assert_eq!(nvidia(Answer::Absent, None), Nvidia::None);
        assert_eq!(judge_gpu(&Nvidia::None, (false, false)).status, Status::Ok);
        assert_eq!(judge_gpu(&Nvidia::None, (true, false)).status, Status::Problem);
    }

    #[test]
    fn the_loader_cache_and_folders_are_searched() {
        let cache = "2 libs found\n\tlibncurses.so.6 (libc6) => /lib/libncurses.so.6\n\
                     \tlibnccl.so.2 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libnccl.so.2\n";
        let path = in_loader_cache(cache).expect("in the cache");
        assert!(path.ends_with("libnccl.so.2"));
        assert_eq!(in_loader_cache("\tlibncurses.so.6 => /lib/x\n"), None);
        let dir = tempfile::tempdir().expect("tempdir");
        assert_eq!(in_folders(&[dir.path().to_path_buf()]), None);
        std::fs::write(dir.path().join("libnccl.so.2"), "").expect("file");
        assert!(in_folders(&["absent".into(), dir.path().to_path_buf()]).is_some());
    }

    #[test]
    fn nccl_is_missed_by_several_gpus_only() {
        assert_eq!(judge_nccl(1, None).status, Status::Ok);
        assert_eq!(judge_nccl(8, None).status, Status::Note);
        assert_eq!(judge_nccl(8, Some(Path::new("libnccl.so.2"))).status, Status::Ok);
    }
}
