//! How byte-level tokenizers split text before merging, by the name that GGUF headers give. The expressions are those of
//! the models' own `tokenizer.json`.

use serde_json::{Value, json};

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
const NAMES: [(&[&str], Way); 22] = [
    (&["default", "gpt-2", "gpt2", "olmo", "mpt", "phi-2", "granite-docling"], Way::ByteLevel),
    (&["a.x-4.0", "mellum", "trillion", "gigachat", "exaone4", "jais"], Way::ByteLevel),
    (
        &["smollm", "refact", "command-r", "starcoder", "codeshell", "exaone", "minerva-7b"],
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
];

/// Names of tokenizers that look a part up before they merge.
const WHOLE_PARTS: [&str; 11] = [
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
            Self::Words(digits) => {
                let words = format!(
                    r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
                );
                splits(&[&words], None)
            }
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
            Self::SuperBpe => splits(&[r"\p{N}+", r"(?=(\d{3})+(?!\d))"], None),
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
            Self::DeepseekV3 => {
                let words = format!(
                    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"##
                );
                splits(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", &words], None)
            }
        }
    }
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

/// Ranges of letters with two cases, as DeepSeek's first tokenizers list them.
const CASED_LETTERS: [(u32, u32); 84] = [
    (0x0041, 0x005A),
    (0x0061, 0x007A),
    (0x00B5, 0x00B5),
    (0x00C0, 0x00D6),
    (0x00D8, 0x00F6),
    (0x00F8, 0x01BA),
    (0x01BC, 0x01BF),
    (0x01C4, 0x0293),
    (0x0295, 0x02AF),
    (0x0370, 0x0373),
    (0x0376, 0x0377),
    (0x037B, 0x037D),
    (0x037F, 0x037F),
    (0x0386, 0x0386),
    (0x0388, 0x038A),
    (0x038C, 0x038C),
    (0x038E, 0x03A1),
    (0x03A3, 0x03F5),
    (0x03F7, 0x0481),
    (0x048A, 0x052F),
    (0x0531, 0x0556),
    (0x10A0, 0x10C5),
    (0x13A0, 0x13F5),
    (0x13F8, 0x13FD),
    (0x1C90, 0x1CBA),
    (0x1CBD, 0x1CBF),
    (0x1D00, 0x1D2B),
    (0x1D6B, 0x1D77),
    (0x1D79, 0x1D9A),
    (0x1E00, 0x1F15),
    (0x1F18, 0x1F1D),
    (0x1F20, 0x1F45),
    (0x1F48, 0x1F4D),
    (0x1F50, 0x1F57),
    (0x1F59, 0x1F59),
    (0x1F5B, 0x1F5B),
    (0x1F5D, 0x1F5D),
    (0x1F5F, 0x1F7D),
    (0x1F80, 0x1FB4),
    (0x1FB6, 0x1FBC),
    (0x1FBE, 0x1FBE),
    (0x1FC2, 0x1FC4),
    (0x1FC6, 0x1FCC),
    (0x1FD0, 0x1FD3),
    (0x1FD6, 0x1FDB),
    (0x1FE0, 0x1FEC),
    (0x1FF2, 0x1FF4),
    (0x1FF6, 0x1FFC),
    (0x2102, 0x2102),
    (0x2107, 0x2107),
    (0x210A, 0x2113),
    (0x2115, 0x2115),
    (0x2119, 0x211D),
    (0x2124, 0x2124),
    (0x2126, 0x2126),
    (0x2128, 0x2128),
    (0x212A, 0x212D),
    (0x212F, 0x2134),
    (0x2139, 0x2139),
    (0x213C, 0x213F),
    (0x2145, 0x2149),
    (0x214E, 0x214E),
    (0x2183, 0x2184),
    (0x2C00, 0x2C7B),
    (0x2C7E, 0x2CE4),
    (0x2CEB, 0x2CEE),
    (0x2CF2, 0x2CF3),
    (0xA640, 0xA66D),
    (0xA680, 0xA69B),
    (0xA722, 0xA76F),
    (0xA771, 0xA787),
    (0xA78B, 0xA78E),
    (0xAB70, 0xABBF),
    (0xFB00, 0xFB06),
    (0xFB13, 0xFB17),
    (0xFF21, 0xFF3A),
    (0xFF41, 0xFF5A),
    (0x1_0400, 0x1_044F),
    (0x1_04B0, 0x1_04D3),
    (0x1_04D8, 0x1_04FB),
    (0x1_0C80, 0x1_0CB2),
    (0x1_0CC0, 0x1_0CF2),
    (0x1_18A0, 0x1_18DF),
    (0x1_E900, 0x1_E943),
];

/// The same as they stand in an expression.
fn cased_letters() -> String {
    let character = |code: u32| char::from_u32(code).map(String::from).unwrap_or_default();
    let range = |&(first, last): &(u32, u32)| match last - first {
        0 => character(first),
        1 => character(first) + &character(last),
        _ => format!("{}-{}", character(first), character(last)),
    };
    CASED_LETTERS.iter().map(range).collect()
}

/// How the bytes of tokens are put together again.
pub(super) fn decoder() -> Value {
    byte_level(false)
}
