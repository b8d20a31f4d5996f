//! Documents that are in two streams: what is scored must not have been trained on.

use std::collections::HashSet;

use super::TokenStream;
use crate::error::Result;

/// Counts of documents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Documents of the first stream.
    pub train: u64,
    /// Documents of the second one.
    pub validation: u64,
    /// Documents of the first that are in the second.
    pub shared: u64,
}

/// Hashes the documents of both streams.
///
/// # Errors
/// - a file cannot be read
pub fn overlap(train: &TokenStream, validation: &TokenStream) -> Result<Overlap> {
    let hash = |document: &[u16]| {
        let bytes: Vec<u8> = document.iter().flat_map(|token| token.to_le_bytes()).collect();
        *blake3::hash(&bytes).as_bytes()
    };
    let mut counts = Overlap::default();
    let mut known = HashSet::new();
    validation.documents(|document| {
        counts.validation += 1;
        known.insert(hash(document));
    })?;
    train.documents(|document| {
        counts.train += 1;
        counts.shared += u64::from(known.contains(&hash(document)));
    })?;
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::super::write_shard;
    use super::*;

    #[test]
    fn a_document_in_both_streams_is_counted() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let (a, b) = (dir.path().join("a.bin"), dir.path().join("b.bin"));
        write_shard(&a, &[1, 5, 6, 1, 7])?;
        write_shard(&b, &[1, 5, 1, 5, 6])?;
        let counts = overlap(&TokenStream::open(&[a])?, &TokenStream::open(&[b])?)?;
        assert_eq!(counts, Overlap { train: 2, validation: 2, shared: 1 });
        Ok(())
    }
}
