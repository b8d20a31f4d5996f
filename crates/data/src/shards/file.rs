//! The bytes of one shard, little-endian:
//!
//! ```text
//! "LDTOKENS"  u64 documents D  u64 tokens T
//! D x u64     tokens of each document
//! T x u32     ids
//! T bits      loss mask, lowest bit first, padded to a byte
//! D x (u32 length, UTF-8)   origins
//! ```

use crate::document::Document;

const MAGIC: &[u8; 8] = b"LDTOKENS";

/// Documents as bytes.
pub(crate) fn encode(documents: &[Document]) -> Vec<u8> {
    let tokens: usize = documents.iter().map(|document| document.ids.len()).sum();
    let mut bytes = Vec::with_capacity(24 + documents.len() * 40 + tokens * 5);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&(documents.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&(tokens as u64).to_le_bytes());
    for document in documents {
        bytes.extend_from_slice(&(document.ids.len() as u64).to_le_bytes());
    }
    for id in documents.iter().flat_map(|document| &document.ids) {
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    let mut bits = vec![0_u8; tokens.div_ceil(8)];
    let learned = documents.iter().flat_map(|document| &document.loss_mask).enumerate();
    learned.filter(|(_, learned)| **learned).for_each(|(t, _)| bits[t / 8] |= 1 << (t % 8));
    bytes.extend_from_slice(&bits);
    for document in documents {
        bytes.extend_from_slice(&(document.origin.len() as u32).to_le_bytes());
        bytes.extend_from_slice(document.origin.as_bytes());
    }
    bytes
}

/// Documents from bytes; every length is checked before it is used.
pub(crate) fn decode(bytes: &[u8]) -> Result<Vec<Document>, String> {
    let mut rest = bytes.strip_prefix(MAGIC).ok_or("no shard of tokens")?;
    let (documents, tokens) = (number(&mut rest)?, number(&mut rest)?);
    let mut lengths = words::<8>(&mut rest, documents)?.map(u64::from_le_bytes);
    let mut ids = words::<4>(&mut rest, tokens)?.map(u32::from_le_bytes);
    let bits = take(&mut rest, tokens.div_ceil(8))?;
    let (mut result, mut first) = (Vec::new(), 0_usize);
    for length in lengths.by_ref() {
        let end = usize::try_from(length).ok().and_then(|length| first.checked_add(length));
        let end = end.filter(|end| *end <= tokens).ok_or("documents are longer than the shard")?;
        let mask = (first..end).map(|t| bits[t / 8] >> (t % 8) & 1 == 1).collect();
        let name = take(&mut rest, 4)?;
        let name = name.iter().rev().fold(0_usize, |sum, byte| sum << 8 | usize::from(*byte));
        let origin = std::str::from_utf8(take(&mut rest, name)?).map_err(|e| e.to_string())?;
        result.push(Document {
            ids: ids.by_ref().take(end - first).collect(),
            loss_mask: mask,
            origin: origin.to_owned(),
        });
        first = end;
    }
    if first != tokens || !rest.is_empty() {
        return Err("documents and shard differ in length".to_owned());
    }
    Ok(result)
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], String> {
    let (head, tail) = rest.split_at_checked(length).ok_or("the shard is cut off")?;
    *rest = tail;
    Ok(head)
}

fn number(rest: &mut &[u8]) -> Result<usize, String> {
    let value = words::<8>(rest, 1)?.map(u64::from_le_bytes).next().unwrap_or(0);
    usize::try_from(value).map_err(|error| error.to_string())
}

fn words<'a, const N: usize>(
    rest: &mut &'a [u8],
    count: usize,
) -> Result<impl Iterator<Item = [u8; N]> + use<'a, N>, String> {
    let length = count.checked_mul(N).ok_or("an absurd length")?;
    let (words, _) = take(rest, length)?.as_chunks::<N>();
    Ok(words.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn documents(lengths: &[usize]) -> Vec<Document> {
        let document = |(i, &n): (usize, &usize)| Document {
            ids: (0..n).map(|t| (i * 70_000 + t) as u32).collect(),
            loss_mask: (0..n).map(|t| (t * 7 + i) % 3 == 0).collect(),
            origin: format!("é.jsonl:{i}"),
        };
        lengths.iter().enumerate().map(document).collect()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(lengths in proptest::collection::vec(0_usize..40, 0..9)) {
            let documents = documents(&lengths);
            prop_assert_eq!(decode(&encode(&documents)).expect("a shard"), documents);
        }

        #[test]
        fn damaged_shards_never_panic(at in 0_usize..200, value: u8, cut in 0_usize..200) {
            let mut bytes = encode(&documents(&[3, 9, 0, 4]));
            let at = at % bytes.len();
            bytes[at] = value;
            bytes.truncate(bytes.len() - cut % bytes.len());
            let _ = decode(&bytes);
        }
    }
}
