//! Long texts, encoded piece by piece.
//!
//! While the library encodes a text it keeps more than a hundred bytes for every byte of it: that is fine for a book, but not for a
//! corpus in one file. Pieces begin where a line does. Each goes on beyond the beginning of the next one, and both must have the
//! same tokens there. That holds for tokenizers that split a text before they merge; for any other the text is encoded as a whole.

use rayon::prelude::*;

use super::Encoded;
use crate::error::Result;

/// Bytes of pieces.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// From one beginning to the next, at least.
    piece: usize,
    /// Beyond the beginning of the next one, at least.
    shared: usize,
}

/// Every thread holds what the library makes of one piece.
pub(super) const USUAL: Sizes = Sizes { piece: 1 << 18, shared: 1 << 12 };

/// What `whole` makes of a text, which it gets in pieces where that comes to the same.
///
/// # Errors
/// - those of `whole`
pub(super) fn encode(
    text: &str,
    sizes: Sizes,
    whole: impl Fn(&str) -> Result<Encoded> + Sync,
) -> Result<Encoded> {
    let mut starts = vec![0];
    while let Some(start) = line_from(text, starts[starts.len() - 1] + sizes.piece) {
        starts.push(start);
    }
    let encoded = |index: usize| -> Result<Encoded> {
        let first = starts[index];
        let next = starts.get(index + 1);
        let end = next.and_then(|next| line_from(text, next + sizes.shared)).unwrap_or(text.len());
        let mut piece = whole(&text[first..end])?;
        for range in &mut piece.offsets {
            *range = range.start + first..range.end + first;
        }
        Ok(piece)
    };
    let fits = |piece: &Encoded, next: &Encoded, index: usize| {
        tokens_before(starts[index + 1], sizes.shared, piece, next)
    };
    if starts.len() == 1 {
        return whole(text);
    }
    let mut pieces = vec![encoded(0)?, encoded(1)?];
    // Where the first two do not fit together, others need not be tried.
    if fits(&pieces[0], &pieces[1], 0).is_none() {
        return whole(text);
    }
    let rest: Result<Vec<_>> = (2..starts.len()).into_par_iter().map(encoded).collect();
    pieces.extend(rest?);
    let mut all = Encoded { ids: Vec::new(), offsets: Vec::new() };
    for (index, piece) in pieces.iter().enumerate() {
        let count = match pieces.get(index + 1) {
            Some(next) => fits(piece, next, index),
            None => Some(piece.ids.len()),
        };
        let Some(count) = count else { return whole(text) };
        all.ids.extend(&piece.ids[..count]);
        all.offsets.extend_from_slice(&piece.offsets[..count]);
    }
    Ok(all)
}

/// The first line from a byte on that begins with a letter or a digit.
fn line_from(text: &str, from: usize) -> Option<usize> {
    let ends = text.as_bytes().get(from..)?.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    let mut starts = ends.map(|(at, _)| from + at + 1);
    starts.find(|start| text[*start..].chars().next().is_some_and(char::is_alphanumeric))
}

/// How many tokens of a piece stand before the beginning of the next one, where both have the same tokens from there on.
fn tokens_before(start: usize, shared: usize, piece: &Encoded, next: &Encoded) -> Option<usize> {
    // Tokens of white space may have empty ranges.
    let count = piece.offsets.partition_point(|range| range.end <= start);
    let (ids, offsets) = (&piece.ids[count..], &piece.offsets[count..]);
    // The last ones may be other tokens where the text goes on.
    let compared = offsets.partition_point(|range| range.end <= start + shared / 2);
    let is_same = compared > 0
        && next.ids.get(..compared) == Some(&ids[..compared])
        && next.offsets.get(..compared) == Some(&offsets[..compared]);
    is_same.then_some(count)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::{TextTokenizer, train_bpe};
    use super::*;

    const SMALL: Sizes = Sizes { piece: 300, shared: 80 };

    /// Encodes a text in small pieces. Returns the bytes of the longest part that the library got, too.
    fn in_pieces(tokenizer: &TextTokenizer, text: &str) -> (Encoded, usize) {
        let longest = AtomicUsize::new(0);
        let whole = |part: &str| {
            longest.fetch_max(part.len(), Ordering::Relaxed);
            tokenizer.encode(part)
        };
        let encoded = encode(text, SMALL, whole).expect("encoded");
        (encoded, longest.into_inner())
    }

    /// Lines of words, numbers, blank lines and characters of several bytes.
    fn lines(count: usize) -> String {
        let line = |index: usize| match index % 5 {
            0 => format!("the cat {index} sat on the mat.\n"),
            1 => format!("Ünder 東京 {} \r\n", index * 7919),
            2 => "\n\n  indented = {}\n".to_owned(),
            3 => "été\n \n".to_owned(),
            _ => format!("{index}\tnaïve, as ever!\n"),
        };
        (0..count).map(line).collect()
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole_text() -> Result<()> {
        let text = lines(400);
        let tokenizer = train_bpe(vec![text.clone()].into_iter(), 400)?;
        let (encoded, longest) = in_pieces(&tokenizer, &text);
        assert_eq!(encoded, tokenizer.encode(&text)?);
        assert!(longest < 1000 && text.len() > 5000, "{longest} of {} bytes", text.len());
        for short in ["", "one line", &lines(3)] {
            assert_eq!(in_pieces(&tokenizer, short).0, tokenizer.encode(short)?);
        }
        Ok(())
    }

    #[test]
    fn a_text_without_lines_is_encoded_as_a_whole() -> Result<()> {
        let text = "the cat sat on the mat ".repeat(200);
        let tokenizer = train_bpe(vec![text.clone()].into_iter(), 300)?;
        let (encoded, longest) = in_pieces(&tokenizer, &text);
        assert_eq!((encoded, longest), (tokenizer.encode(&text)?, text.len()));
        Ok(())
    }

    #[test]
    fn what_pieces_would_change_is_encoded_as_a_whole() {
        // Every text begins with a token of its own.
        let whole = |part: &str| {
            let ids = std::iter::once(1).chain(part.bytes().map(u32::from)).collect();
            let offsets = std::iter::once(0..0).chain((0..part.len()).map(|at| at..at + 1));
            Ok(Encoded { ids, offsets: offsets.collect() })
        };
        let text = lines(100);
        assert_eq!(encode(&text, SMALL, whole).expect("encoded"), whole(&text).expect("encoded"));
    }
}
