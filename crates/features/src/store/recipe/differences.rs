//! What is not the same in two recipes, in words.

use longdraft_models::target_model::is_same_target;

use super::{Part, PartRecipe, Recipe};

impl PartRecipe {
    /// How many shards there are, and the first row of the first one that begins elsewhere in another part.
    fn borders_beside(&self, other: &Self) -> String {
        let count = self.shards.len();
        match self.shards.iter().zip(&other.shards).position(|(own, other)| own != other) {
            Some(shard) => format!("{count} (the {}. from row {})", shard + 1, self.shards[shard]),
            None => count.to_string(),
        }
    }
}

impl Recipe {
    /// What differs from a recipe whose shards must be the same.
    pub(in super::super) fn differences(&self, new: &Self) -> Vec<String> {
        let mut differences = Differences::default();
        self.compare_text(new, &Part::ALL, &mut differences);
        self.compare_form(new, &mut differences);
        for part in Part::ALL {
            let (old, new, name) = (self.part(part), new.part(part), part.name());
            let contents = |of: &PartRecipe| of.contents.to_string();
            differences.compare(&format!("{name} features"), contents(old), contents(new));
            let what = format!("{name} teacher tokens");
            differences.compare(&what, &old.teacher_tokens, &new.teacher_tokens);
            let shards = (old.borders_beside(new), new.borders_beside(old));
            differences.compare(&format!("{name} shards"), shards.0, shards.1);
        }
        differences.told(|what, old, new| format!("{what} was {old}, now {new}"))
    }

    /// What keeps this store from serving a run that would make `new`. The run does not read a part of which it has no row.
    pub(in super::super) fn differences_in_use(&self, new: &Self) -> Vec<String> {
        let read: Vec<_> = Part::ALL.into_iter().filter(|part| new.part(*part).rows > 0).collect();
        let mut differences = Differences::default();
        self.compare_text(new, &read, &mut differences);
        let mut told = differences.told(|what, old, new| format!("{what} was {old}, now {new}"));
        for part in read {
            let (old, new) = (&self.part(part).contents, &new.part(part).contents);
            if old.read_for(new).is_none() {
                let name = part.name();
                told.push(format!("{name} features are {old}; needed are {new}"));
            }
        }
        told
    }

    /// What keeps one store from serving this recipe's run and another's.
    pub fn differences_beside(&self, other: &Self) -> Vec<String> {
        let mut differences = Differences::default();
        self.compare_text(other, &Part::ALL, &mut differences);
        self.compare_form(other, &mut differences);
        differences.told(|what, own, other| format!("{what}: {own} and {other}"))
    }

    /// Target and rows.
    fn compare_text(&self, other: &Self, parts: &[Part], differences: &mut Differences) {
        differences.compare("format", &self.format, &other.format);
        if !is_same_target(&self.target, &other.target) {
            differences.compare("target", &self.target, &other.target);
        }
        differences.compare("tokenizer", &self.tokenizer, &other.tokenizer);
        for part in parts {
            let name = match part {
                Part::Train => "training text",
                Part::HeldOut => "held-out text",
            };
            differences.compare(name, &self.part(*part).text, &other.part(*part).text);
        }
    }

    /// How features are made and held.
    fn compare_form(&self, other: &Self, differences: &mut Differences) {
        let dtype = |of: &Self| written(&of.dtype);
        differences.compare("capture.dtype", dtype(self), dtype(other));
        if let (Some(own), Some(other)) = (&self.precision, &other.precision) {
            differences.compare("precision", own, other);
        }
        if let (Some(own), Some(other)) = (&self.products, &other.products) {
            differences.compare("products", own, other);
        }
        let compression = |of: &Self| written(&of.compression);
        differences.compare("capture.compression", compression(self), compression(other));
        differences.compare("train.seed", self.seed.to_string(), other.seed.to_string());
        let source = |of: &Self| match &of.records {
            Some(records) => format!("records {records}"),
            None => "the target".to_owned(),
        };
        differences.compare("source", source(self), source(other));
        let anchor = |of: &Self| written(&of.anchor);
        differences.compare("data.anchor", anchor(self), anchor(other));
    }
}

/// A value as configurations have it.
fn written(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default().replace('"', "")
}

/// What is not the same in two recipes: its name, and how each has it.
#[derive(Default)]
struct Differences(Vec<[String; 3]>);

impl Differences {
    fn compare(&mut self, what: &str, own: impl AsRef<str>, other: impl AsRef<str>) {
        let (own, other) = (own.as_ref(), other.as_ref());
        if own != other {
            self.0.push([what, own, other].map(str::to_owned));
        }
    }

    fn told(self, of: impl Fn(&str, &str, &str) -> String) -> Vec<String> {
        self.0.iter().map(|[what, own, other]| of(what, own, other)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Contents;
    use super::*;

    #[test]
    fn shards_of_other_rows_are_others() {
        let part = |shards: &[usize]| PartRecipe {
            contents: Contents::default(),
            text: String::new(),
            teacher_tokens: String::new(),
            rows: 100,
            tokens: 6400,
            shards: shards.to_vec(),
        };
        let told = |one: &[usize], other: &[usize]| part(one).borders_beside(&part(other));
        assert_eq!((told(&[0, 60], &[0, 60]), told(&[0, 60], &[0])), ("2".into(), "2".into()));
        assert_eq!(told(&[0, 60], &[0, 64]), "2 (the 2. from row 60)");
    }
}
