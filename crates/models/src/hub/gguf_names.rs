//! GGUF models among the names of a repository's files.
//!
//! A name tells the quantisation (`model-Q4_K_M.gguf`, `model.q8_0.gguf`, `BF16/model-BF16-00001-of-00002.gguf`)
//! and whether the file is a part of a model.

use crate::weights::gguf::split::part_of;

/// What a name begins with, where it is no model: an image encoder, statistics for quantising.
const OTHERS: [&str; 2] = ["mmproj", "imatrix"];
/// What stands around a word of a name. Quantisations hold underscores.
const AROUND: [char; 3] = ['-', '.', '/'];
/// What may stand before a quantisation.
const BEFORE: [char; 4] = ['-', '.', '/', '_'];

/// A model in one file, or in parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GgufModel<'a> {
    /// Path in the repository, without the number of a part and without the ending.
    pub(super) name: String,
    /// Its quantisation in capitals, if the name tells one.
    pub(super) label: Option<String>,
    /// Files that are listed, in order.
    pub(super) files: Vec<&'a str>,
    /// Files that it has.
    pub(super) parts: usize,
}

impl GgufModel<'_> {
    /// The first part that is not listed.
    pub(super) fn missing(&self) -> Option<String> {
        if self.parts == 1 {
            return None;
        }
        let has = |part: usize| {
            self.files.iter().any(|file| split(file).is_some_and(|(_, number, _)| number == part))
        };
        let part = (1..=self.parts).find(|part| !has(*part))?;
        Some(format!("{}-{part:05}-of-{:05}.gguf", self.name, self.parts))
    }
}

/// Name without number and ending, number and count of a part.
fn split(file: &str) -> Option<(&str, usize, usize)> {
    part_of(without_ending(file)?)
}

fn without_ending(file: &str) -> Option<&str> {
    let at = file.len().checked_sub(".gguf".len())?;
    let ending = file.get(at..)?;
    ending.eq_ignore_ascii_case(".gguf").then(|| &file[..at])
}

/// The models that a repository holds, by name.
pub(super) fn gguf_models(names: &[String]) -> Vec<GgufModel<'_>> {
    let mut models: Vec<GgufModel<'_>> = Vec::new();
    let mut sorted: Vec<&str> = names.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    for file in sorted {
        let Some(stem) = without_ending(file) else { continue };
        let last = stem.rsplit('/').next().unwrap_or(stem).to_ascii_lowercase();
        if OTHERS.iter().any(|other| last.contains(other)) {
            continue;
        }
        let (name, parts) = split(file).map_or((stem, 1), |(name, _, parts)| (name, parts));
        match models.iter_mut().find(|model| model.name == name && model.parts == parts) {
            Some(model) => model.files.push(file),
            None => models.push(GgufModel {
                name: name.to_owned(),
                label: label(name),
                files: vec![file],
                parts,
            }),
        }
    }
    models
}

/// Models that a word means: those of that path, else of that name in any folder, else of that
/// quantisation, else those whose name holds it as a word.
pub(super) fn matching<'m, 'n>(
    models: &'m [GgufModel<'n>],
    wanted: &str,
) -> Vec<&'m GgufModel<'n>> {
    let wanted = without_ending(wanted).unwrap_or(wanted).to_ascii_uppercase();
    let is = |text: &str| text.eq_ignore_ascii_case(&wanted);
    let of_path = |model: &GgufModel<'_>| {
        is(&model.name) || model.files.iter().any(|file| without_ending(file).is_some_and(is))
    };
    let of_name = |model: &GgufModel<'_>| model.name.rsplit('/').next().is_some_and(is);
    let of_label = |model: &GgufModel<'_>| model.label.as_deref().is_some_and(is);
    let holds = |model: &GgufModel<'_>| holds_word(&model.name.to_ascii_uppercase(), &wanted);
    let tests: [&dyn Fn(&GgufModel<'_>) -> bool; 4] = [&of_path, &of_name, &of_label, &holds];
    let mut found = tests.iter().map(|test| models.iter().filter(|model| test(model)).collect());
    found.find(|found: &Vec<_>| !found.is_empty()).unwrap_or_default()
}

fn holds_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        (before.is_empty() || before.ends_with(AROUND))
            && (after.is_empty() || after.starts_with(AROUND))
    })
}

/// The quantisation that a name tells last, in capitals.
fn label(name: &str) -> Option<String> {
    let name = name.to_ascii_uppercase();
    let starts = std::iter::once(0).chain(name.match_indices(BEFORE).map(|(at, _)| at + 1));
    let start = starts.rev().find(|at| is_type(&name[*at..]))?;
    let end = name[start..].find(AROUND).map_or(name.len(), |length| start + length);
    // Unsloth's own mixtures of types are called `UD-Q4_K_XL`.
    let own = name[..start].strip_suffix("UD-");
    let own = own.is_some_and(|rest| rest.is_empty() || rest.ends_with(BEFORE));
    Some(format!("{}{}", if own { "UD-" } else { "" }, &name[start..end]))
}

/// Whether a text begins with the name of a type of weights.
fn is_type(text: &str) -> bool {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(text.len());
    let word = &text[..end];
    let numbered = ["IQ", "TQ", "Q"].iter().find_map(|start| word.strip_prefix(start));
    let is_number = |rest: &str| {
        let digits = rest.trim_end_matches(|c: char| c.is_ascii_uppercase());
        (1..=2).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit())
    };
    let floats = ["F16", "F32", "BF16", "FP16", "FP32", "FP8", "MXFP4", "NVFP4"];
    numbered.is_some_and(is_number) || floats.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_their_quantisation() {
        for (name, want) in [
            ("Qwen2.5-0.5B-Instruct-Q4_K_M", Some("Q4_K_M")),
            ("qwen2.5-0.5b-instruct-q4_k_m", Some("Q4_K_M")),
            ("SmolLM2-135M-Instruct.Q4_1", Some("Q4_1")),
            ("Qwen3-8B-UD-Q4_K_XL", Some("UD-Q4_K_XL")),
            ("UD-IQ1_S/DeepSeek-R1", Some("UD-IQ1_S")),
            ("Q8_0/model", Some("Q8_0")),
            ("llama_3_8b_IQ2_XXS", Some("IQ2_XXS")),
            ("gpt-oss-20b-mxfp4", Some("MXFP4")),
            ("model-Q4_0_4_8-imat", Some("Q4_0_4_8")),
            ("qwen2.5-fp16", Some("FP16")),
            ("Phi-3-mini-4k-instruct-q4", Some("Q4")),
            ("BF16/model-BF16", Some("BF16")),
            ("model", None),
            ("QWEN-Q", None),
            ("Q123456-F160", None),
        ] {
            assert_eq!(label(name).as_deref(), want, "{name}");
        }
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_word_means_the_closest_name() {
        let listed = names(&[
            "README.md",
            "m-Q4_K_M.gguf",
            "m-Q4_K_S.gguf",
            "m-Q4_K_XL.gguf",
            "m-UD-Q4_K_XL.GGUF",
            "m-Q4_0.gguf",
            "m-Q4_0-pure.gguf",
            "mmproj-m-f16.gguf",
            "m.imatrix.gguf",
            "BF16/m-BF16-00002-of-00002.gguf",
            "BF16/m-BF16-00001-of-00002.gguf",
            "Q4_0/m-Q4_0.gguf",
        ]);
        let models = gguf_models(&listed);
        let found = |word: &str| -> Vec<Vec<&str>> {
            matching(&models, word).iter().map(|model| model.files.clone()).collect()
        };
        assert_eq!(found("q4_k_m"), [["m-Q4_K_M.gguf"]]);
        assert_eq!(found("Q4_K_XL"), [["m-Q4_K_XL.gguf"]]);
        assert_eq!(found("ud-q4_k_xl"), [["m-UD-Q4_K_XL.GGUF"]]);
        let of_type = [["Q4_0/m-Q4_0.gguf"], ["m-Q4_0-pure.gguf"], ["m-Q4_0.gguf"]];
        assert_eq!(found("Q4_0"), of_type);
        assert_eq!(found("M-Q4_0"), [["m-Q4_0.gguf"]]);
        assert_eq!(found("q4_0/m-q4_0"), [["Q4_0/m-Q4_0.gguf"]]);
        assert_eq!(found("m-Q4_0-pure.gguf"), [["m-Q4_0-pure.gguf"]]);
        assert_eq!(found("pure"), [["m-Q4_0-pure.gguf"]]);
        let parts = ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"];
        for word in ["bf16", "m-BF16", "BF16/m-bf16", parts[0]] {
            assert_eq!(found(word), [parts], "{word}");
        }
        for word in ["Q4_K", "K_M", "f16", "imatrix", "Q", "", "4_K_M"] {
            assert!(found(word).is_empty(), "{word}: {:?}", found(word));
        }
    }

    #[test]
    fn parts_that_are_not_listed_are_missed() {
        let listed = names(&["m-00001-of-00003.gguf", "m-00003-of-00003.gguf", "n.gguf"]);
        let models = gguf_models(&listed);
        let missing: Vec<_> = models.iter().map(GgufModel::missing).collect();
        assert_eq!(missing, [Some("m-00002-of-00003.gguf".to_owned()), None]);
    }
}
