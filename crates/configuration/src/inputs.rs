//! What runs open, with the lines that name it.

use longdraft_train::checkpoint::StartFrom;
use longdraft_train::inputs::{InputCheck, InputProblem, Purpose, Reach};

use super::tree::Node;
use super::{Composed, Located, LocatedPretrain, Problem};

/// Problems of all that the stages of a configuration open.
pub fn input_problems(composed: &Composed, reach: Reach, purpose: Purpose) -> Vec<Problem> {
    let mut check = InputCheck::new(reach, purpose);
    match composed {
        Composed::Stage(located) => problems_at(&located.tree, check.stage(&located.config, false)),
        Composed::Curriculum { stages, .. } => {
            let mut problems = Vec::new();
            for (index, stage) in stages.iter().enumerate() {
                let follows = index > 0 && stage.start_from != StartFrom::Scratch;
                let found = check.stage(&stage.located.config, follows);
                let context = format!("(stage `{}`)", stage.name);
                let found = problems_at(&stage.located.tree, found);
                problems.extend(found.into_iter().map(|problem| problem.context(&context)));
            }
            problems
        }
    }
}

/// The same for one stage.
pub fn stage_input_problems(stage: &Located, reach: Reach, purpose: Purpose) -> Vec<Problem> {
    problems_at(&stage.tree, InputCheck::new(reach, purpose).stage(&stage.config, false))
}

impl LocatedPretrain {
    /// Problems of the shards and the tokenizer.
    pub fn input_problems(&self) -> Vec<Problem> {
        problems_at(&self.tree, longdraft_pretrain::input_problems(&self.config))
    }
}

fn problems_at(tree: &Node, problems: Vec<InputProblem>) -> Vec<Problem> {
    let at =
        |InputProblem { key, problem }| Problem::of_key(tree, &key, format!("`{key}`: {problem}"));
    problems.into_iter().map(at).collect()
}
