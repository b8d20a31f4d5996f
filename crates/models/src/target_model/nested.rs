//! The text part of a model that also sees: its tensors stand under a prefix of their own.

use crate::weights::WeightSource;
use crate::weights::aliases::{Aliased, Aliases};

/// What text parts' names begin with in files, in place of `model.`.
const PREFIXES: [&str; 2] = ["language_model.model.", "model.language_model."];
/// What names of blocks that predict further tokens begin with, beside the text part.
const FURTHER: &str = "mtp.";
/// Where an own head may stand.
const HEADS: [&str; 2] = ["language_model.lm_head.weight", "lm_head.weight"];

/// A source under the names that its text part would have alone.
pub(super) struct TextPart {
    source: Box<dyn WeightSource>,
    prefix: &'static str,
}

impl TextPart {
    /// The source as it is, or its text part if it holds one under a prefix.
    pub(super) fn of(source: impl WeightSource + 'static) -> Box<dyn WeightSource> {
        let names = source.names();
        let holds = |prefix: &&str| names.iter().any(|name| name.starts_with(prefix));
        match PREFIXES.into_iter().find(holds) {
            Some(prefix) => Box::new(Aliased(Self { source: Box::new(source), prefix })),
            None => Box::new(source),
        }
    }
}

impl Aliases for TextPart {
    fn source(&self) -> &dyn WeightSource {
        self.source.as_ref()
    }

    fn stored(&self, name: &str) -> String {
        if name == HEADS[1] {
            let head = HEADS.into_iter().find(|head| self.source.shape(head).is_some());
            return head.unwrap_or(HEADS[1]).to_owned();
        }
        match name.strip_prefix("model.") {
            Some(rest) => format!("{}{rest}", self.prefix),
            None => name.to_owned(),
        }
    }

    fn names(&self) -> Vec<String> {
        let names = self.source.names().into_iter();
        let text = names.filter_map(|name| {
            if HEADS.contains(&name.as_str()) {
                return Some(HEADS[1].to_owned());
            }
            if name.starts_with(FURTHER) {
                return Some(name);
            }
            name.strip_prefix(self.prefix).map(|rest| format!("model.{rest}"))
        });
        text.collect()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::weights::TensorSpec;
    use crate::weights::memory::MemorySource;

    fn source(names: &[&str]) -> Box<dyn WeightSource> {
        let specs: Vec<_> = names.iter().map(|name| TensorSpec::new(*name, &[2, 2])).collect();
        TextPart::of(MemorySource::random(&specs, 0.1, 1).expect("values"))
    }

    #[test]
    fn both_prefixes_are_taken_off_and_other_parts_left_out() {
        for prefix in PREFIXES {
            for head in HEADS {
                let table = format!("{prefix}embed_tokens.weight");
                let source = source(&[&table, head, "vision_tower.patch.weight", "mtp.fc.weight"]);
                let mut names = source.names();
                names.sort();
                assert_eq!(names, ["lm_head.weight", "model.embed_tokens.weight", "mtp.fc.weight"]);
                for name in names {
                    assert_eq!(source.shape(&name), Some(vec![2, 2]), "{name}");
                    source.load(&name, DType::F32).expect("loaded");
                }
                assert_eq!(source.shape("vision_tower.patch.weight"), Some(vec![2, 2]));
                assert!(source.load("model.norm.weight", DType::F32).is_err());
            }
        }
    }

    #[test]
    fn a_model_of_text_alone_keeps_its_names() {
        assert_eq!(source(&["model.norm.weight"]).names(), ["model.norm.weight"]);
    }
}
