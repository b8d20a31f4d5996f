//! One source as a configuration names it.

use std::path::PathBuf;

use longdraft_rules::Problem;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::align::Aligner;
use crate::template::{Learn, Template};

/// One source of text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceConfig {
    /// A file, a folder of files, a folder of prepared shards, or `hf://org/name[/path][@revision]`.
    pub path: PathBuf,
    /// Changes to a row's fields before the template sees them, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aligners: Vec<Aligner>,
    /// How a row becomes text (default: recognised by the fields of the first rows).
    #[serde(default)]
    pub template: Template,
    /// Which tokens are learned (default: `assistant` of conversations, `answer` of rows of a prompt and
    /// its answer, `all` of text).
    #[serde(default)]
    pub learn: Option<Learn>,
    /// Stop reading after this many tokens.
    #[serde(default)]
    pub limit_tokens: Option<usize>,
    /// Most tokens before the first learned one (long chains of thought).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_prompt_tokens: Option<usize>,
    /// What becomes of a row with a longer prompt.
    #[serde(default, skip_serializing_if = "PromptOverflow::is_default")]
    pub prompt_overflow: PromptOverflow,
}

/// What becomes of a row whose prompt is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PromptOverflow {
    /// The row is left out and counted.
    #[default]
    Drop,
    /// The prompt loses its first tokens, but not a start token.
    TruncateLeft,
}

impl PromptOverflow {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl SourceConfig {
    /// What makes no sense together.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.template.problems(self.learn, false);
        for (index, aligner) in self.aligners.iter().enumerate() {
            let problem = aligner.problem();
            problems.extend(problem.map(|problem| problem.under(&format!("aligners.{index}"))));
        }
        problems.extend(self.learn.and_then(|learn| self.prompt_problem(learn)));
        problems
    }

    /// Why prompts cannot be counted where `learn` is what is learned.
    pub(crate) fn prompt_problem(&self, learn: Learn) -> Option<Problem> {
        let nothing_before = matches!(learn, Learn::All | Learn::NoSystem);
        (self.max_prompt_tokens.is_some() && nothing_before).then(|| {
            let text = "needs `learn: answer`, `last` or `assistant`: with everything learned there is \
                        no prompt";
            Problem { reads: vec!["learn".into()], ..Problem::new("max_prompt_tokens", text) }
        })
    }
}
