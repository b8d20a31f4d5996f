//! An answer as it is written, plainly and with drafting.
//!
//! ```sh
//! cargo run --release --example decode -- model.gguf "Once upon a time" runs/mine/draft
//! ```

#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::io::Write;

use longdraft::{AnswerOptions, Draft, LookupChoice, Result, Session, SessionOptions, Target};

/// Streams an answer to stdout; returns its text. Without a draft, lookup proposes.
pub(crate) fn run(target: &str, prompt: &str, draft: Option<&str>) -> Result<String> {
    let target = Target::open(target)?;
    let draft = draft.map(Draft::open).transpose()?;
    let lookup = draft.is_none().then_some(LookupChoice::Merge);
    let options = SessionOptions { lookup, ..SessionOptions::default() };
    let asked = AnswerOptions { max_tokens: 48, ..AnswerOptions::default() };

    let session = Session::with(&target, draft.as_ref(), &options)?;
    let mut stream = session.stream(prompt, &asked)?;
    for piece in &mut stream {
        print!("{}", piece?.text);
        std::io::stdout().flush().ok();
    }
    let answer = stream.answer()?;
    println!("\n{}: {:.2} tokens per target pass", session.drafter(), answer.tau);

    // Drafting changes the time, never the text.
    let plain = Session::new(&target, None)?.generate(prompt, &asked)?;
    assert_eq!(plain.text, answer.text);
    Ok(answer.text)
}

#[allow(dead_code, reason = "tests call `run`")]
fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [target, prompt] => run(target, prompt, None).map(drop),
        [target, prompt, draft] => run(target, prompt, Some(draft)).map(drop),
        _ => {
            eprintln!("give a target, a prompt, and perhaps a draft");
            Ok(())
        }
    }
}
