//! Variables of chat templates, which several commands take.

use longdraft_data::conversation::given_variables;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Map, Value};

use crate::failure::{Failure, Result};

/// The option, as messages name it.
const OPTION: &str = "--chat-template-kwargs";

/// What the target's chat template is given.
#[derive(Debug, Clone, Default, PartialEq, clap::Args)]
pub(crate) struct TemplateArguments {
    /// Variables of the target's chat template, a JSON object: with `{"enable_thinking": false}` Qwen3 answers without
    /// thinking. Those of a request or of a row (`chat_template_kwargs`) win over them.
    #[arg(long, value_name = "JSON", value_parser = parse_variables, help_heading = None)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

impl TemplateArguments {
    /// As they would be read from a command line.
    pub(crate) fn of(variables: Map<String, Value>) -> Self {
        Self { chat_template_kwargs: Some(variables).filter(|variables| !variables.is_empty()) }
    }

    /// The variables; empty where none are given.
    pub(crate) fn variables(&self) -> Map<String, Value> {
        self.chat_template_kwargs.clone().unwrap_or_default()
    }

    /// Refuses variables where no chat template is used; `hint` says how one would be.
    pub(crate) fn require_chat(&self, is_chat: bool, hint: &str) -> Result<()> {
        if is_chat || self.variables().is_empty() {
            return Ok(());
        }
        Err(Failure::usage(format!("{OPTION}: the text goes through no chat template")).hint(hint))
    }

    /// A target's tokenizer whose chat template has them.
    ///
    /// # Errors
    /// - there is no chat template, or it sets one of them itself
    pub(crate) fn apply(&self, tokenizer: TextTokenizer) -> Result<TextTokenizer> {
        self.check(&tokenizer)?;
        Ok(tokenizer.with_variables(&self.variables()))
    }

    /// Refuses variables that a target's tokenizer does not take.
    ///
    /// # Errors
    /// - as [`Self::apply`]
    pub(crate) fn check(&self, tokenizer: &TextTokenizer) -> Result<()> {
        let checked = tokenizer.check_variables(&self.variables());
        checked.map_err(|problem| Failure::usage(format!("{OPTION}: {problem}")))
    }
}

/// Reads a JSON object. What is null there is left out, as in rows: what is written with them is read alike.
pub(crate) fn parse_variables(text: &str) -> std::result::Result<Map<String, Value>, String> {
    serde_json::from_str(text).map(given_variables).map_err(|error| {
        format!("{error}: give a JSON object in quotes, such as '{{\"enable_thinking\": false}}'")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_a_json_object_or_refused_with_an_example() {
        let given = parse_variables(r#"{"a": 1, "b": "c"}"#).expect("read");
        assert_eq!(TemplateArguments::of(given.clone()).variables(), given);
        assert_eq!(parse_variables(r#"{"a": 1, "b": "c", "d": null}"#), Ok(given));
        let none = parse_variables(r#"{"d": null}"#).expect("read");
        assert_eq!(TemplateArguments::of(none), TemplateArguments::default());
        for wrong in ["", "enable_thinking=false", "false", "[1]", r#""a""#, "{'a': 1}"] {
            let problem = parse_variables(wrong).expect_err("refused");
            assert!(problem.contains(r#"such as '{"enable_thinking": false}'"#), "{problem}");
        }
    }

    #[test]
    fn variables_need_a_template_that_reads_them() {
        let given = TemplateArguments::of(parse_variables(r#"{"a": 1}"#).expect("read"));
        assert!(given.require_chat(true, "h").is_ok());
        assert!(TemplateArguments::default().require_chat(false, "h").is_ok());
        let refused = given.require_chat(false, "add --chat").expect_err("refused");
        assert_eq!(refused.hint.as_deref(), Some("add --chat"));
    }
}
