//! What this machine offers, and what to do where it falls short.
//!
//! Each file looks at one thing and returns [`Finding`]s. Reading (files, programs, the network) is
//! kept apart from judging, so that the judgement can be tested anywhere. Nothing secret is shown.

mod accelerator;
mod cgroup;
mod cluster;
mod finding;
mod memory;
mod processor;
mod program;
mod services;
mod storage;
mod target;

pub(crate) use finding::{Finding, Status};
pub(crate) use memory::available as available_memory;
pub(crate) use processor::{processor_name, processors};
pub(crate) use target::examine as examine_target;

/// Looks at everything; what waits for others (programs, the network) is done at the same time.
pub(crate) fn examine() -> Vec<Finding> {
    let limits = cgroup::Limits::of_this_process();
    std::thread::scope(|scope| {
        let waiting: [fn() -> Vec<Finding>; 3] =
            [accelerator::examine, cluster::examine, services::examine];
        let waiting = waiting.map(|examine| scope.spawn(examine));
        let mut findings = processor::examine(&limits);
        findings.extend(memory::examine(&limits));
        findings.extend(storage::examine());
        for thread in waiting {
            findings.extend(thread.join().unwrap_or_default());
        }
        findings
    })
}
