//! Prompt sets as requests.

use longdraft_data::conversation::VARIABLES;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::{Message, TextTokenizer};
use serde_json::{Map, Value, json};

use super::client::{Prompt, Server, Unanswered};
use crate::cli::EvalDecodeArguments;
use crate::commands::eval::prompts::Reader;
use crate::decoding::encode_chat_with;
use crate::failure::{Failure, Result};

/// A prompt with the group it is reported in.
pub(super) struct Asked {
    pub(super) category: String,
    pub(super) prompt: Prompt,
    /// The same for a tokenizer.
    messages: Vec<Message>,
    /// Variables of the chat template.
    variables: Map<String, Value>,
}

impl Asked {
    /// A request with the prompt's variables of the chat template: not OpenAI's, but known to all four.
    pub(super) fn options(&self, mut request: Value) -> Value {
        if !self.variables.is_empty() {
            request[VARIABLES] = json!(self.variables);
        }
        request
    }
}

/// The server that is asked; with a target's tokenizer tokens are counted here.
pub(super) struct Remote<'a> {
    server: &'a Server,
    /// Tokenizer and length of the context.
    ruler: Option<(TextTokenizer, usize)>,
    /// Variables of the chat template, which a prompt's own ones win over.
    variables: Map<String, Value>,
}

impl<'a> Remote<'a> {
    /// Second turns follow on the answers of `server`.
    pub(super) fn new(server: &'a Server, arguments: &EvalDecodeArguments) -> Result<Self> {
        let variables = arguments.decoding.template.variables();
        let ruler = arguments.target.as_deref().map(|target| {
            let (config, tokenizer) = Target::open_description(target)?;
            let tokenizer = tokenizer.with_variables(&variables);
            Ok::<_, Failure>((tokenizer, config.max_position_embeddings))
        });
        let ruler = ruler.transpose()?;
        if ruler.is_none() && !arguments.contexts.is_empty() {
            return Err(Failure::usage("--contexts counts tokens, and a server does not say how")
                .hint("give --target, too: its tokenizer counts, its weights are not read"));
        }
        Ok(Self { server, ruler, variables })
    }
}

impl Reader for Remote<'_> {
    type Prompt = Asked;

    fn text(&self, category: &str, text: &str) -> Result<Asked> {
        let messages = vec![Message::new("user", text)];
        let (prompt, variables) = (Prompt::Text(text.to_owned()), Map::new());
        Ok(Asked { category: category.to_owned(), prompt, messages, variables })
    }

    fn turns(
        &self,
        category: &str,
        messages: &[Message],
        own: &Map<String, Value>,
    ) -> Result<Asked> {
        let turn = |message: &Message| json!({ "role": message.role, "content": message.content });
        let turns: Value = messages.iter().map(turn).collect();
        let (prompt, messages) = (Prompt::Turns(turns), messages.to_vec());
        let mut variables = self.variables.clone();
        variables.extend(own.clone());
        Ok(Asked { category: category.to_owned(), prompt, messages, variables })
    }

    /// A server has a chat's path; whether its model knows turns shows when it is asked.
    fn knows_turns(&self) -> bool {
        true
    }

    fn length(&self, asked: &Asked) -> Result<Option<usize>> {
        let Some((tokenizer, _)) = &self.ruler else { return Ok(None) };
        if matches!(asked.prompt, Prompt::Turns(_)) && tokenizer.chat_template().is_some() {
            let tokens = encode_chat_with(&asked.messages, &asked.variables, tokenizer)?;
            return Ok(Some(tokens.len()));
        }
        let texts = asked.messages.iter().map(|message| tokenizer.encode(&message.content));
        let lengths: std::result::Result<Vec<usize>, _> =
            texts.map(|text| text.map(|text| text.ids.len())).collect();
        Ok(Some(lengths?.into_iter().sum()))
    }

    fn ruler(&self) -> Option<(&TextTokenizer, usize)> {
        self.ruler.as_ref().map(|(tokenizer, context)| (tokenizer, *context))
    }

    fn answer(&self, asked: &Asked, max_tokens: usize) -> Result<Option<String>> {
        let request = asked.options(json!({ "max_tokens": max_tokens, "temperature": 0 }));
        match self.server.ask(&asked.prompt, &request) {
            Ok(answer) => Ok(Some(answer.text)),
            Err(Unanswered::Refused(problem)) => {
                errln!("{problem}");
                Ok(None)
            }
            Err(Unanswered::Failed(failure)) => Err(failure),
        }
    }
}
