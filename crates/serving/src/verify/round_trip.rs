//! The network itself: read back as an engine's loader would hand it over, and run.

use super::VerifyOptions;
use crate::checks::rules::Rule;
use crate::checks::{Checks, Problem, Severity};
use crate::formats::Format;
use crate::parity::Difference;

const NOT_LOADABLE: Rule = Rule::rejects(
    "not-loadable",
    "a network that runs",
    "what longdraft cannot load, engines load otherwise than meant",
);

const OTHER_OUTPUTS: Rule = Rule::garbage(
    "other-outputs",
    "",
    "it loads and computes another network: tensors were transposed, permuted, swapped or changed",
);

/// Relative difference that the same weights may show.
const SAME: f32 = 1e-5;

/// Errors of networks that cannot be run.
const BROKEN: [&str; 15] = [
    "weights-file",
    "missing-tensor",
    "shape",
    "no-config",
    "config-json",
    "sizes",
    "map",
    "not-finite",
    "no-map",
    "map-length",
    "absolute-d2t",
    "two-layers",
    "gguf",
    "missing-key",
    "not-the-target",
];

/// Compares what the files compute with what was exported and, if it is given, with the checkpoint.
pub(super) fn check(
    checks: &mut Checks<'_>,
    format: &dyn Format,
    options: &VerifyOptions<'_>,
) -> Option<Difference> {
    // A network that cannot be read has been reported.
    let is_broken =
        |problem: &Problem| problem.severity == Severity::Error && BROKEN.contains(&problem.code);
    if checks.problems.iter().any(is_broken) {
        return None;
    }
    let recorded = checks.manifest.as_ref().and_then(|manifest| manifest.parity.clone());
    if recorded.is_none() && options.checkpoint.is_none() {
        checks.no_reference("nothing to compare them with", "a manifest, or the checkpoint");
        return None;
    }
    let vector = match format.outputs(checks) {
        Ok(Some(vector)) => vector,
        Ok(None) => return None,
        Err(error) => {
            checks.broken(&NOT_LOADABLE, "outputs", error.to_string());
            return None;
        }
    };
    let mut shown = None;
    for (reference, what) in [
        (recorded.as_ref(), "the exported network"),
        (options.checkpoint.as_ref(), "the checkpoint"),
    ] {
        let Some(reference) = reference else { continue };
        let Some(difference) = reference.difference(&vector) else {
            let problem = Problem::new(
                Severity::Warning,
                "no-reference",
                "outputs",
                "recorded on another input",
                "a vector of this version",
            );
            checks.push(problem.remedy("export again with this version"));
            continue;
        };
        shown = shown.or(Some(difference));
        if difference.relative > SAME || difference.other_tokens > 0 || difference.relative.is_nan()
        {
            let found = format!(
                "{} of {} rows propose another token than {what}; outputs differ by {:.1e}",
                difference.other_tokens, difference.rows, difference.relative
            );
            let expected = format!("a difference below {SAME:.0e}");
            checks.differs(&OTHER_OUTPUTS, "outputs", found, expected);
        }
    }
    shown
}
