//! How byte-level tokenizers split text before merging, by the name that GGUF headers give. The expressions are those of
//! the models' own `tokenizer.json`.

mod letters;
mod linear;

use serde_json::{Value, json};

use letters::cased_letters;
pub(super) use linear::split_in_linear_time;
use linear::{BEFORE_THREES, THREES_OF_WORDS};

/// What comes with a name.
pub(super) struct Splitting {
    /// Steps of a `tokenizer.json`.
    pub(super) steps: Value,
    /// Whether text is composed (NFC) before.
    pub(super) composes: bool,
    /// Whether a part that is a token is that token, whatever the merges say.
    pub(super) whole_parts: bool,
}

/// Names and the way that each stands for.
const NAMES: [(&[&str], Way); 28] = [
    (&["default", "gpt-2", "gpt2", "olmo", "mpt", "phi-2", "granite-docling"], Way::ByteLevel),
    (&["a.x-4.0", "mellum", "trillion", "gigachat", "exaone4", "jais"], Way::ByteLevel),
    (
        &[
            "smollm",
            "refact",
            "command-r",
            "starcoder",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        Way::Digits,
    ),
    (&["qwen2", "deepseek-r1-qwen", "qwen3", "megrez"], Way::Words("")),
    (&["stablelm2", "hunyuan", "solar-open", "kormo", "grok-2"], Way::Words("")),
    (&["llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "lfm2"], Way::Words("{1,3}")),
    (&["falcon3", "pixtral", "midm-2.0"], Way::Words("{1,3}")),
    (&["glm4", "chatglm-bpe"], Way::Words("{1,3}")),
    (&["qwen35"], Way::WordsWithMarks),
    (&["gpt-4o", "llama4", "kanana2", "minimax-m2"], Way::Cases),
    (&["tekken"], Way::Tekken),
    (&["deepseek-llm"], Way::DeepseekLlm),
    (&["deepseek-coder"], Way::DeepseekCoder),
    (&["deepseek-v3", "joyai-llm", "hunyuan-dense"], Way::DeepseekV3),
    (&["kimi-k2"], Way::Kimi),
    (&["seed-coder"], Way::SeedCoder),
    (&["bailingmoe", "bailingmoe2", "llada-moe"], Way::Bailing),
    (&["youtu"], Way::Youtu),
    (&["bloom", "poro-chat", "gpt3-finnish"], Way::Bloom),
    (&["viking"], Way::Viking),
    (&["superbpe"], Way::SuperBpe),
    (&["chameleon"], Way::Chameleon),
    (&["afmoe"], Way::Afmoe),
    (&["tiny_aya", "cohere2moe"], Way::TinyAya),
    (&["exaone-moe"], Way::ExaoneMoe),
    (&["laguna"], Way::Laguna),
    (&["k2-horizon"], Way::K2Horizon),
    (&["minicpm5"], Way::MiniCpm5),
];

/// Names of tokenizers that look a part up before they merge.
const WHOLE_PARTS: [&str; 12] = [
    "llama-bpe",
    "llama3",
    "llama-v3",
    "lfm2",
    "falcon3",
    "pixtral",
    "midm-2.0",
    "glm4",
    "tekken",
    "kimi-k2",
    "youtu",
    "minicpm5",
];

/// Names of tokenizers that put the start token before a text, unless the header says otherwise.
const WITH_BOS: [&str; 9] = [
    "llama-bpe",
    "llama3",
    "llama-v3",
    "lfm2",
    "falcon3",
    "pixtral",
    "midm-2.0",
    "tekken",
    "chameleon",
];

#[derive(Clone, Copy)]
enum Way {
    /// GPT-2's own.
    ByteLevel,
    /// The same after single digits.
    Digits,
    /// Words, and so many digits at a time.
    Words(&'static str),
    /// Words with their marks, single digits.
    WordsWithMarks,
    /// Words that end where small letters do.
    Cases,
    /// The same without contractions, single digits.
    Tekken,
    DeepseekLlm,
    DeepseekCoder,
    DeepseekV3,
    Kimi,
    /// Words, single digits, marks without the ends of lines after them.
    SeedCoder,
    Bailing,
    Youtu,
    /// What stands between spaces and some marks.
    Bloom,
    /// The same, and single digits.
    Viking,
    /// Threes of digits from the last one on; all else is one part.
    SuperBpe,
    /// Names of pictures, spaces by two and four, single digits and marks, then words.
    Chameleon,
    /// Threes of digits from the last one on, runs of scripts without spaces, then DeepSeek-V3's words.
    Afmoe,
    /// Threes of digits from the last one of a word on, then words that end where small letters do.
    TinyAya,
    /// Words with the spaces between them.
    ExaoneMoe,
    /// Words that end with their line.
    Laguna,
    /// Words with marks and joiners.
    K2Horizon,
    /// Three digits at a time before words.
    MiniCpm5,
}

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
/// Lines and spaces, the end of most expressions.
const SPACES: &str = r"\s*[\r\n]+|\s+(?!\S)|\s+";
/// Chinese characters and what stands beside them in DeepSeek's first tokenizers.
const CHINESE: &str = "[一-龥ࠀ-一가-퟿]+";
/// What stands between spaces and some marks in Bloom.
const BETWEEN_MARKS: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";
/// Korean, marks, Bopomofo, and Chinese with Japanese, as Youtu cuts them out.
const ASIAN: &str = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+";

/// Bailing's words: its contractions and ends of lines are told otherwise than others'.
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

/// Words of marks or letters, with their marks, as DeepSeek-V3 and AFMoE have them.
const MARKED_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Threes of digits from the last one on.
const THREES: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))";
/// Chinese, Japanese, Thai, Lao, Khmer, Burmese and Korean, as AFMoE cuts them out.
const WITHOUT_SPACES: &str = "[一-鿿㐀-䶿\u{f900}-\u{faff}\u{3040}-\u{309f}\u{30a0}-\u{30ff}\u{ff65}-\u{ff9f}\u{2f00}-\u{2fdf}\u{e40}-\u{e7f}\u{e80}-\u{eff}\u{1780}-\u{17ff}\u{1000}-\u{109f}\u{aa60}-\u{aa7f}\u{a9e0}-\u{a9ff}\u{ac00}-\u{d7af}\u{1100}-\u{11ff}]+";

/// Exaone's words with the spaces between them.
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
/// Letters with their marks and the characters that join them or keep them apart, in K2 Horizon.
const JOINED_LETTERS: &str = "(?:\\p{L}|\\p{M}|\u{200c}|\u{200d})";

/// What Chameleon cuts out before digits and marks.
const CHAMELEON: [&str; 3] =
    ["<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )"];

/// The splitting of a name.
///
/// # Errors
/// - the name is unknown
pub(super) fn named(name: &str) -> Result<Splitting, String> {
    let found = NAMES.iter().find(|(names, _)| names.contains(&name));
    let Some((_, way)) = found else {
        let known: Vec<&str> = NAMES.iter().map(|(names, _)| names[0]).collect();
        return Err(format!("unknown pre-tokenizer `{name}` (known: {})", known.join(", ")));
    };
    Ok(Splitting {
        steps: way.steps(),
        composes: name.contains("qwen"),
        whole_parts: WHOLE_PARTS.contains(&name),
    })
}

/// Whether the tokenizer of a name puts the start token before a text where the header does not say.
pub(super) fn begins_with_bos(name: &str) -> bool {
    WITH_BOS.contains(&name)
}

/// The name of the steps of a `tokenizer.json`, if there is one.
pub fn name_of(steps: &Value) -> Option<&'static str> {
    let wanted = expressions(steps);
    let same = |(_, way): &&(&[&str], Way)| expressions(&way.steps()) == wanted;
    let found = NAMES.iter().find(same).filter(|_| !wanted.is_empty());
    found.map(|(names, _)| names[0])
}

/// Expressions of the splits among some steps, with tabs and ends of lines as escapes.
fn expressions(steps: &Value) -> Vec<String> {
    let escaped = |text: &str| text.replace('\r', r"\r").replace('\n', r"\n").replace('\t', r"\t");
    match steps {
        Value::Array(steps) => steps.iter().flat_map(expressions).collect(),
        Value::Object(_) if steps["type"] == "Sequence" => expressions(&steps["pretokenizers"]),
        Value::Object(_) => steps["pattern"]["Regex"].as_str().map(escaped).into_iter().collect(),
        _ => Vec::new(),
    }
}

impl Way {
    fn steps(self) -> Value {
        let digits = json!({"type": "Digits", "individual_digits": true});
        match self {
            Self::ByteLevel => byte_level(true),
            Self::Digits => sequence(&[digits, byte_level(true)]),
            Self::Words(digits) => splits(&[&words(r"\p{L}", &format!(r"\p{{N}}{digits}"))], None),
            Self::WordsWithMarks => {
                let words = format!(
                    r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
                );
                splits(&[&words], None)
            }
            Self::Cases => {
                let after_word = format!("{CONTRACTIONS}?");
                splits(&[&cased("", &after_word, r"\p{N}{1,3}", r"[\r\n/]*")], None)
            }
            Self::Tekken => splits(&[&cased("", "", r"\p{N}", r"[\r\n/]*")], None),
            Self::SeedCoder => {
                let words = format!(
                    r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
                );
                splits(&[&words], None)
            }
            Self::Bailing => splits(&[BAILING], None),
            Self::Youtu => {
                let after_word = format!("{CONTRACTIONS}?");
                splits(&[ASIAN, &cased("", &after_word, r"\p{N}", r"[\r\n/]*")], None)
            }
            Self::Bloom => splits(&[BETWEEN_MARKS], None),
            Self::Viking => splits(&[BETWEEN_MARKS, r"\p{N}"], None),
            Self::SuperBpe => splits(&[r"\p{N}+", BEFORE_THREES], None),
            Self::Chameleon => {
                let marks = json!({"type": "Punctuation", "behavior": "Isolated"});
                sequence(&[&CHAMELEON.map(split)[..], &[digits, marks, byte_level(true)]].concat())
            }
            Self::Kimi => {
                let after_word = format!("{CONTRACTIONS}?");
                let words = cased(r"&&[^\p{Han}]", &after_word, r"\p{N}{1,3}", r"[\r\n]*");
                splits(&[&format!(r"[\p{{Han}}]+|{words}")], None)
            }
            Self::DeepseekLlm => {
                let words = format!(r"\s?[{}]+", cased_letters());
                let marks = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";
                splits(&[r"[\r\n]", &words, marks, r"\s+$", CHINESE], Some(digits))
            }
            Self::DeepseekCoder => {
                splits(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE], Some(digits))
            }
            Self::DeepseekV3 => splits(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", MARKED_WORDS], None),
            Self::Afmoe => splits(&[THREES, WITHOUT_SPACES, MARKED_WORDS], None),
            Self::TinyAya => {
                let after_word = format!("{CONTRACTIONS}?");
                let words = cased("", &after_word, r"\p{N}{1,3}", r"[\r\n/]*");
                splits(&[THREES_OF_WORDS, &words], None)
            }
            Self::ExaoneMoe => splits(&[EXAONE_MOE], None),
            Self::Laguna => splits(&[r"[^\n]+|[\n]+", &words(r"\p{L}", r"\p{N}")], None),
            Self::K2Horizon => splits(&[&words(JOINED_LETTERS, r"\p{N}{1,3}")], None),
            Self::MiniCpm5 => splits(&[r"\p{N}{1,3}", &words(r"\p{L}", r"\p{N}+")], None),
        }
    }
}

/// Words of these letters, digits, and marks with the ends of lines after them.
fn words(letters: &str, digits: &str) -> String {
    format!(
        r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
    )
}

/// Words that end where small letters do, of letters that are also in `also`, with what may follow them; digits; marks
/// with what follows these.
fn cased(also: &str, after_word: &str, digits: &str, after_marks: &str) -> String {
    let large = format!(r"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{also}]");
    let small = format!(r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{also}]");
    let before = r"[^\r\n\p{L}\p{N}]?";
    let marks = format!(r" ?[^\s\p{{L}}\p{{N}}]+{after_marks}");
    format!(
        "{before}{large}*{small}+{after_word}|{before}{large}+{small}*{after_word}|{digits}|{marks}|{SPACES}"
    )
}

fn byte_level(use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex
    })
}

fn sequence(steps: &[Value]) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// Cuts out what matches.
fn split(expression: &str) -> Value {
    json!({
        "type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false
    })
}

/// Splits one after the other, another step, and bytes as characters.
fn splits(expressions: &[&str], then: Option<Value>) -> Value {
    let steps = expressions.iter().copied().map(split).chain(then).chain([byte_level(false)]);
    sequence(&steps.collect::<Vec<_>>())
}

/// How the bytes of tokens are put together again.
pub(super) fn decoder() -> Value {
    byte_level(false)
}
