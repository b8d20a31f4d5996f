//! `longdraft data tokenizer` and `data pack`: from text to what `lm train` reads.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use longdraft_data::source::read_jsonl;
use longdraft_data::token_stream::{START_OF_DOCUMENT, ShardWriter, sidecar_path};
use longdraft_models::tokenizer::{TextTokenizer, train_bpe};
use longdraft_pretrain::Tokenizer;

use crate::cli::{DataPackArguments, DataTokenizerArguments, TextArguments};
use crate::failure::{Failure, Result};
use crate::terminal::counted;

/// The largest `--shard-tokens`. A header counts fewer than 2^31 tokens, and the last document of a shard may exceed
/// the option.
const MOST_TOKENS: usize = 1 << 30;

/// Calls `each` with the text of every row; it says whether to go on. Of several fields those that
/// a row has stand on lines of their own.
fn texts(of: &TextArguments, mut each: impl FnMut(&str) -> Result<bool>) -> Result<()> {
    let fields = &of.field;
    for input in &of.inputs {
        for row in read_jsonl(input)? {
            let row = row?;
            let mut present: Vec<&str> = fields
                .iter()
                .filter(|field| row.fields.get(*field).is_some_and(|value| !value.is_null()))
                .map(|field| row.text(field))
                .collect::<std::result::Result<_, _>>()?;
            if let (true, Some(field)) = (present.is_empty(), fields.first()) {
                present.push(row.text(field)?);
            }
            if !each(&present.join("\n"))? {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Refuses a folder whose tokenizer is that of a model, which would be written over.
fn require_no_model(output: &Path) -> Result<()> {
    let holds = |name: &&str| output.join(name).is_file();
    let tokenizers = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"];
    match tokenizers.iter().find(|name| holds(name)) {
        Some(name) if holds(&"config.json") => {
            let problem =
                format!("its {name} is that of a model, which would get another tokenizer");
            Err(Failure::usage(format!("{}: {problem}", output.display()))
                .hint("give another folder with --output"))
        }
        _ => Ok(()),
    }
}

/// Trains a tokenizer.
pub(super) fn tokenizer(arguments: &DataTokenizerArguments, json: bool) -> Result<()> {
    require_no_model(&arguments.output)?;
    let (mut all, mut bytes) = (Vec::new(), 0);
    let most = arguments.max_bytes.unwrap_or(usize::MAX);
    texts(&arguments.text, |text| {
        bytes += text.len();
        all.push(text.to_owned());
        Ok(bytes < most)
    })?;
    if all.is_empty() {
        return Err(Failure::usage("there is no text to train a tokenizer on"));
    }
    let tokenizer = train_bpe(all.into_iter(), arguments.vocabulary)?;
    let output = &arguments.output;
    std::fs::create_dir_all(output).map_err(Failure::unwritable(output))?;
    tokenizer.save(output)?;
    if json {
        let (vocabulary, output) = (tokenizer.vocabulary(), output.to_string_lossy());
        outjson!({"output": output, "vocabulary": vocabulary, "bytes": bytes});
    } else {
        let (tokens, output) = (tokenizer.vocabulary(), output.display());
        outln!("{tokens} tokens from {bytes} bytes of text in {output}");
    }
    Ok(())
}

/// Shards of one name, a new one every so many tokens.
struct Shards<'a> {
    arguments: &'a DataPackArguments,
    name: &'static str,
    writers: Option<(ShardWriter, Option<ShardWriter>)>,
    count: usize,
    tokens: u64,
    bytes: u64,
}

impl<'a> Shards<'a> {
    fn new(arguments: &'a DataPackArguments, name: &'static str) -> Self {
        Self { arguments, name, writers: None, count: 0, tokens: 0, bytes: 0 }
    }

    fn write(&mut self, tokens: &[u16], bytes: &[u16]) -> Result<()> {
        if self.writers.is_none() {
            let path = self.path(self.count);
            let counts = self.arguments.byte_counts;
            let counts = counts.then(|| ShardWriter::create(&sidecar_path(&path))).transpose()?;
            self.writers = Some((ShardWriter::create(&path)?, counts));
            self.count += 1;
        }
        if let Some((writer, counts)) = &mut self.writers {
            writer.write(tokens)?;
            if let Some(counts) = counts {
                counts.write(bytes)?;
            }
            self.tokens += tokens.len() as u64;
            self.bytes += bytes.iter().map(|count| u64::from(*count)).sum::<u64>();
            if writer.tokens() >= self.arguments.shard_tokens {
                self.finish()?;
            }
        }
        Ok(())
    }

    fn path(&self, index: usize) -> PathBuf {
        self.arguments.output.join(format!("{}_{index:06}.bin", self.name))
    }

    /// Shards and counts that this call did not write, and that trainings read with those that it did.
    fn others(&self) -> Vec<PathBuf> {
        let counts = (0..self.count).map(|index| sidecar_path(&self.path(index)));
        let counts = counts.filter(|_| !self.arguments.byte_counts);
        let later = (self.count..).map(|index| self.path(index)).take_while(|path| path.is_file());
        let later = later.filter(|_| self.count > 0);
        counts.filter(|path| path.is_file()).chain(later).collect()
    }

    fn finish(&mut self) -> Result<()> {
        if let Some((writer, counts)) = self.writers.take() {
            writer.finish()?;
            counts.map_or(Ok(()), ShardWriter::finish)?;
        }
        Ok(())
    }
}

/// Tokens of a text with the bytes that each newly covers: their sum is the text's length.
pub(crate) fn encode_with_bytes(
    tokenizer: &TextTokenizer,
    text: &str,
) -> Result<(Vec<u32>, Vec<u32>)> {
    let encoded = tokenizer.encode(text)?;
    let mut covered = 0;
    let mut bytes: Vec<u32> = Vec::with_capacity(encoded.ids.len());
    for range in &encoded.offsets {
        let end = range.end.max(covered).min(text.len());
        bytes.push((end - covered) as u32);
        covered = end;
    }
    if let Some(last) = bytes.last_mut() {
        *last += (text.len() - covered) as u32;
    }
    Ok((encoded.ids, bytes))
}

/// The last documents of few, with as many tokens as are held out of them at least, or all if these are fewer.
#[derive(Default)]
struct End {
    documents: VecDeque<(Vec<u16>, Vec<u16>)>,
    tokens: usize,
    /// Of all documents, those written before too.
    all: usize,
}

impl End {
    fn push(&mut self, document: (Vec<u16>, Vec<u16>)) {
        self.tokens += document.0.len();
        self.all += document.0.len();
        self.documents.push_back(document);
    }

    /// Tokens that are held out of its end: one in `every`, of fewer documents than that.
    fn wanted(&self, documents: usize, every: usize) -> usize {
        if documents < every { self.all / every } else { 0 }
    }

    /// The first document, if those after it have `wanted` tokens.
    fn pop(&mut self, wanted: usize) -> Option<(Vec<u16>, Vec<u16>)> {
        let first = self.documents.front()?.0.len();
        if self.tokens - first < wanted {
            return None;
        }
        self.tokens -= first;
        self.documents.pop_front()
    }

    /// Writes what is left: the last `wanted` tokens are held out. Returns their number.
    fn write(self, wanted: usize, [train, held_out]: [&mut Shards<'_>; 2]) -> Result<usize> {
        let Self { documents, tokens: mut after, .. } = self;
        let mut count = 0;
        for (tokens, bytes) in documents {
            after -= tokens.len();
            let held = wanted.saturating_sub(after).min(tokens.len());
            let (kept, rest) = tokens.split_at(tokens.len() - held);
            let (counts, of_rest) = bytes.split_at(kept.len());
            count += rest.len();
            if kept.len() <= 1 && !rest.is_empty() {
                held_out.write(&tokens, &bytes)?;
                continue;
            }
            train.write(kept, counts)?;
            if !rest.is_empty() {
                let tokens = [&[START_OF_DOCUMENT][..], rest].concat();
                held_out.write(&tokens, &[&[0][..], of_rest].concat())?;
            }
        }
        Ok(count)
    }
}

/// Writes shards.
pub(super) fn run(arguments: &DataPackArguments, json: bool) -> Result<()> {
    if !(1..=MOST_TOKENS).contains(&arguments.shard_tokens) {
        return Err(Failure::usage(format!("--shard-tokens must be 1 to {MOST_TOKENS}")));
    }
    let tokenizer = Tokenizer::open(&arguments.tokenizer)?.text_tokenizer()?;
    if tokenizer.vocabulary() > 1 << 16 {
        let problem = format!("{} tokens, shards hold 65536", tokenizer.vocabulary());
        return Err(Failure::usage(problem).hint("train one with `longdraft data tokenizer`"));
    }
    let start = u32::from(START_OF_DOCUMENT);
    if tokenizer.token(start).is_none() || !tokenizer.is_special(start) {
        let problem = "token 1 of the tokenizer is not a special token: documents begin with it";
        return Err(Failure::usage(problem).hint("train one with `longdraft data tokenizer`"));
    }
    std::fs::create_dir_all(&arguments.output).map_err(Failure::unwritable(&arguments.output))?;
    let mut train = Shards::new(arguments, "train");
    let mut validation = Shards::new(arguments, "val");
    let every = arguments.validation_every;
    let mut documents = 0_usize;
    // Of fewer documents than that the end is held out.
    let mut end = End::default();
    texts(&arguments.text, |text| {
        let (ids, counts) = encode_with_bytes(&tokenizer, text)?;
        let mut tokens = vec![START_OF_DOCUMENT];
        tokens.extend(ids.iter().map(|id| *id as u16));
        let mut bytes = vec![0];
        bytes.extend(counts.iter().map(|count| u16::try_from(*count).unwrap_or(u16::MAX)));
        documents += 1;
        if every > 0 && documents.is_multiple_of(every) {
            validation.write(&tokens, &bytes)?;
        } else {
            end.push((tokens, bytes));
        }
        let wanted = end.wanted(documents, every);
        while let Some((tokens, bytes)) = end.pop(wanted) {
            train.write(&tokens, &bytes)?;
        }
        Ok(true)
    })?;
    let wanted = end.wanted(documents, every);
    let of_end = end.write(wanted, [&mut train, &mut validation])?;
    if 0 < documents && documents < every {
        let of =
            format!("of {}, fewer than --validation-every {every}", counted(documents, "document"));
        if of_end > 0 {
            errln!("note: {of}, the last {} are held out", counted(of_end, "token"));
        } else {
            errln!(
                "warning: {of}, nothing is held out, for there are too few tokens: give more text"
            );
        }
    }
    train.finish()?;
    validation.finish()?;
    if documents == 0 {
        return Err(Failure::usage("there is no text to pack"));
    }
    for path in [train.others(), validation.others()].concat() {
        errln!(
            "warning: {} is of an earlier call, and trainings read it, too: remove it",
            path.display()
        );
    }
    let (output, tokens, held_out) = (&arguments.output, train.tokens, validation.tokens);
    let ratio = (tokens + held_out) as f64 / (train.bytes + validation.bytes).max(1) as f64;
    if json {
        let (files, output) = (train.count + validation.count, output.to_string_lossy());
        outjson!({"output": output, "documents": documents, "shards": files, "train_tokens": tokens,
                  "validation_tokens": held_out, "tokens_per_byte": ratio});
    } else {
        outln!(
            "{}: {tokens} tokens to train on, {held_out} to score, {ratio:.4} \
             tokens per byte, in {}",
            counted(documents, "document"),
            output.display()
        );
    }
    Ok(())
}
