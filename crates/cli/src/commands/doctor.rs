//! `longdraft doctor`: what this machine offers, and what to do where it falls short.

use serde_json::json;

use crate::doctor::{Finding, Status, examine};
use crate::failure::{Failure, Result};

/// Prints every finding; fails if no work is possible.
pub(crate) fn run(json: bool) -> Result<()> {
    let findings = examine();
    let count = |status| findings.iter().filter(|finding| finding.status == status).count();
    let (ok, notes, problems) = (count(Status::Ok), count(Status::Note), count(Status::Problem));
    let blocking: Vec<&Finding> = findings.iter().filter(|finding| finding.blocking).collect();
    if json {
        outln!(
            "{}",
            json!({
                "version": env!("CARGO_PKG_VERSION"), "findings": findings, "ok": ok,
                "notes": notes, "problems": problems, "can_work": blocking.is_empty(),
            })
        );
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
    outln!("{:<8} {}: {}", finding.status.name(), finding.check, finding.fact);
    if let Some(remedy) = &finding.remedy {
        outln!("         -> {remedy}");
    }
}
