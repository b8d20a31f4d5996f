//! `longdraft doctor`: what this machine offers, and what to do where it falls short.

use longdraft_models::hub::ModelId;

use crate::cli::DoctorArguments;
use crate::doctor::{Finding, Status, examine, examine_target};
use crate::failure::{Failure, Result};

/// Prints every finding; fails if no work is possible.
pub(crate) fn run(arguments: &DoctorArguments, json: bool) -> Result<()> {
    let mut findings = examine();
    if let Some(path) = &arguments.target {
        let on_hub = ModelId::parse(&path.to_string_lossy()).filter(|_| !path.exists());
        let way_out =
            on_hub.map(|id| format!("`longdraft fetch {id}` prints where a model of the hub lies"));
        findings.extend(examine_target(path).map_err(|failure| failure.hinted(way_out))?);
    }
    let count = |status| findings.iter().filter(|finding| finding.status == status).count();
    let (ok, notes, problems) = (count(Status::Ok), count(Status::Note), count(Status::Problem));
    let blocking: Vec<&Finding> = findings.iter().filter(|finding| finding.blocking).collect();
    if json {
        outjson!({
            "version": env!("CARGO_PKG_VERSION"), "findings": findings, "ok": ok,
            "notes": notes, "problems": problems, "can_work": blocking.is_empty(),
        });
    } else {
        findings.iter().for_each(print);
        outln!("{ok} ok, {notes} notes, {problems} problems");
    }
    if blocking.is_empty() {
        return Ok(());
    }
    let facts: Vec<String> = blocking.iter().map(|f| format!("{}: {}", f.check, f.fact)).collect();
    let remedies: Vec<&str> = blocking.iter().filter_map(|f| f.remedy.as_deref()).collect();
    Err(Failure::work(format!("no work is possible here: {}", facts.join("; ")))
        .hint(remedies.join("; "))
        .in_result())
}

fn print(finding: &Finding) {
    outln!("{:<8} {}: {}", finding.status, finding.check, finding.fact);
    if let Some(remedy) = &finding.remedy {
        outln!("         -> {remedy}");
    }
}
