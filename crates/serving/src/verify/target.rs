//! The target that is given, beside the one that the draft was exported for.

use std::path::Path;

use longdraft_models::target_model::is_same_target;
use longdraft_models::tokenizer::{ChatTemplate, TextTokenizer};

use crate::checks::rules::Rule;
use crate::checks::{Checks, gguf};
use crate::manifest::MANIFEST_FILE;
use crate::profile::Profile;

/// Weights of another precision make another target, too.
const OTHER_TARGET: Rule = Rule::garbage(
    "other-target",
    "",
    "the draft reads other states than it was trained on: acceptance falls without a message",
)
.doubtful()
.remedy("serve the target that the draft was trained for, or train for the one that you serve");
const OTHER_TOKENIZER: Rule = Rule::garbage(
    "other-tokenizer",
    "",
    "texts are other tokens than in training: acceptance falls without a message",
)
.doubtful()
.remedy("serve the tokenizer of the training, or train with the one that you serve");
const OTHER_TEMPLATE: Rule = Rule::garbage(
    "chat-template",
    "the target's",
    "answers begin otherwise than in training: acceptance falls without a message",
)
.doubtful()
.remedy("serve with the template beside the draft, or train on texts of the one that you serve");

/// Warns where the target, its tokenizer or its chat template is not the one of the export.
pub(super) fn check(checks: &mut Checks<'_>, path: &Path) {
    let Some(target) = checks.target else { return };
    if let Some(recorded) = checks.manifest.as_ref().map(|manifest| manifest.target.clone()) {
        let weights = target.target.fingerprint().to_owned();
        let weights = Some(weights).filter(|own| !is_same_target(&recorded.fingerprint, own));
        let tokenizer = target.tokenizer.fingerprint().ok();
        let tokenizer = tokenizer.filter(|own| *own != recorded.tokenizer);
        for (rule, found, other) in [
            (&OTHER_TARGET, recorded.fingerprint, weights),
            (&OTHER_TOKENIZER, recorded.tokenizer, tokenizer),
        ] {
            let Some(own) = other else { continue };
            let found = format!("exported for fingerprint `{found}`");
            checks.differs(rule, MANIFEST_FILE, found, format!("`{own}`, the target's"));
        }
    }
    let own = target.tokenizer.chat_template().map(ChatTemplate::source_with_tools);
    let Some(own) = own else { return };
    if template_beside(checks, path).is_some_and(|beside| beside != own) {
        checks.broken(&OTHER_TEMPLATE, "chat template", "another one than the target's");
    }
}

/// The chat template that lies with the draft, if one does; of several that for conversations with tools.
fn template_beside(checks: &Checks<'_>, path: &Path) -> Option<String> {
    if checks.profile == Profile::Llamacpp {
        let header = gguf::header(path)?;
        let text = |key| header.text(key).map(str::to_owned);
        return text("tokenizer.chat_template.tool_use")
            .or_else(|| text("tokenizer.chat_template"));
    }
    let tokenizer = TextTokenizer::from_folder(&checks.folder).ok()?;
    tokenizer.chat_template().map(|template| template.source_with_tools().to_owned())
}
