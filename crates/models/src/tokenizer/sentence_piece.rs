//! SentencePiece models: the pieces of the protobuf, and a tokenizer made of them.
//!
//! Read are field 1 (pieces: 1 text, 2 score, 3 type), of field 2 the model type and byte
//! fallback, and field 3, the normaliser.

use std::path::{Path, PathBuf};

use base64::Engine;
use prost::Message;
use serde_json::{Value, json};

use super::TextTokenizer;
use super::checked::{self, LONGEST_PIECE};
use crate::error::{ModelError, Result};
use crate::side_files;

/// What a piece is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceKind {
    /// Text.
    Normal,
    /// What cannot be said with pieces.
    Unknown,
    /// Never text: start and end of documents, padding.
    Control,
    /// Text that is always one piece.
    UserDefined,
    /// Not in use.
    Unused,
    /// One byte, `<0x41>`.
    Byte,
}

/// One entry of the vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// With U+2581 for a space.
    pub text: String,
    /// Log-probability, or minus the rank of its merge.
    pub score: f32,
    /// What it is.
    pub kind: PieceKind,
}

/// A SentencePiece model.
#[derive(Debug, Clone, PartialEq)]
pub struct SentencePieces {
    /// By id.
    pub pieces: Vec<Piece>,
    bpe: bool,
    normalizer: NormalizerSpec,
    hash: String,
    /// The file, if it is one.
    path: Option<PathBuf>,
}

#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<PieceProto>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<NormalizerSpec>,
}

#[derive(Clone, PartialEq, Message)]
struct PieceProto {
    #[prost(string, optional, tag = "1")]
    text: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct TrainerSpec {
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct NormalizerSpec {
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    remove_extra_whitespaces: Option<bool>,
}

const BPE: i32 = 2;

impl SentencePieces {
    /// Reads a `.model` file.
    ///
    /// # Errors
    /// - unreadable, no such protobuf, no pieces, or a type that does not exist
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = side_files::read(path)?;
        let pieces = Self::parse(&bytes).map_err(|problem| ModelError::invalid(path, problem))?;
        Ok(Self { path: Some(path.to_path_buf()), ..pieces })
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let proto = ModelProto::decode(bytes)
            .map_err(|error| format!("no SentencePiece model: {error}"))?;
        if proto.pieces.is_empty() {
            return Err("no SentencePiece model: it has no pieces".to_owned());
        }
        let piece = |(id, piece): (usize, PieceProto)| {
            let kind = match piece.kind.unwrap_or(1) {
                1 => PieceKind::Normal,
                2 => PieceKind::Unknown,
                3 => PieceKind::Control,
                4 => PieceKind::UserDefined,
                5 => PieceKind::Unused,
                6 => PieceKind::Byte,
                other => return Err(format!("piece {id} has the unknown type {other}")),
            };
            let text = piece.text.unwrap_or_default();
            if text.len() > LONGEST_PIECE {
                let length = text.len();
                return Err(format!(
                    "piece {id} has {length} bytes, at most {LONGEST_PIECE} are read"
                ));
            }
            Ok(Piece { text, score: piece.score.unwrap_or(0.0), kind })
        };
        let pieces = proto.pieces.into_iter().enumerate().map(piece);
        let normalizer = proto.normalizer.unwrap_or_default();
        check_table(normalizer.precompiled_charsmap.as_deref().unwrap_or_default())?;
        Ok(Self {
            pieces: pieces.collect::<std::result::Result<_, _>>()?,
            bpe: proto.trainer.and_then(|spec| spec.model_type).unwrap_or(1) == BPE,
            normalizer,
            hash: blake3::hash(bytes).to_hex().to_string(),
            path: None,
        })
    }

    /// A BPE model of these pieces, without a normaliser.
    pub fn of(pieces: Vec<Piece>) -> Self {
        let normalizer = NormalizerSpec::default();
        Self { pieces, bpe: true, normalizer, hash: String::new(), path: None }
    }

    /// Number of ids.
    pub fn vocabulary(&self) -> usize {
        self.pieces.len()
    }

    /// Hash of the file.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Id of a control piece such as `<s>`.
    pub fn control(&self, text: &str) -> Option<u32> {
        let is = |piece: &Piece| piece.kind == PieceKind::Control && piece.text == text;
        self.pieces.iter().position(is).map(|id| id as u32)
    }

    /// A tokenizer that encodes text with these pieces.
    ///
    /// # Errors
    /// - the pieces make no tokenizer
    pub fn tokenizer(&self) -> Result<TextTokenizer> {
        let tokenizer = self
            .document()
            .and_then(|document| serde_json::to_vec(&document).map_err(|error| error.to_string()))
            .and_then(checked::from_json)
            .map(|inner| TextTokenizer::new(inner, None, true));
        match (tokenizer, &self.path) {
            (Ok(tokenizer), Some(path)) => Ok(tokenizer.of_file(path)),
            (Ok(tokenizer), None) => Ok(tokenizer),
            (Err(problem), Some(path)) => Err(ModelError::invalid(path, problem)),
            (Err(problem), None) => Err(ModelError::Tokenizer(problem)),
        }
    }

    /// The same as a `tokenizer.json`.
    fn document(&self) -> std::result::Result<Value, String> {
        Ok(json!({
            "version": "1.0", "added_tokens": self.added_tokens(), "normalizer": self.normalizer(),
            "pre_tokenizer": null, "post_processor": null, "model": self.model()?,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
            ]},
        }))
    }

    fn added_tokens(&self) -> Value {
        let of_kind = |kind| matches!(kind, PieceKind::Control | PieceKind::UserDefined);
        let pieces = self.pieces.iter().enumerate().filter(|(_, piece)| of_kind(piece.kind));
        pieces
            .map(|(id, piece)| {
                json!({
                    "id": id, "content": piece.text, "special": piece.kind == PieceKind::Control,
                    "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
                })
            })
            .collect()
    }

    fn normalizer(&self) -> Value {
        let mut steps = Vec::new();
        if let Some(map) = self.normalizer.precompiled_charsmap.as_ref().filter(|m| !m.is_empty()) {
            let map = base64::engine::general_purpose::STANDARD.encode(map);
            steps.push(json!({"type": "Precompiled", "precompiled_charsmap": map}));
        }
        if self.normalizer.remove_extra_whitespaces.unwrap_or(true) {
            steps.push(json!({"type": "Strip", "strip_left": true, "strip_right": true}));
            steps.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}));
        }
        if self.normalizer.add_dummy_prefix.unwrap_or(true) {
            steps.push(json!({"type": "Prepend", "prepend": " "}));
        }
        let mark = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        steps.push(mark);
        json!({"type": "Sequence", "normalizers": steps})
    }

    fn model(&self) -> std::result::Result<Value, String> {
        let unknown = self.pieces.iter().position(|piece| piece.kind == PieceKind::Unknown);
        let fallback = self.pieces.iter().any(|piece| piece.kind == PieceKind::Byte);
        if !self.bpe {
            let vocabulary: Vec<Value> =
                self.pieces.iter().map(|piece| json!([piece.text, piece.score])).collect();
            return Ok(json!({
                "type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": fallback
            }));
        }
        let ids: serde_json::Map<String, Value> =
            self.pieces.iter().enumerate().map(|(id, p)| (p.text.clone(), json!(id))).collect();
        Ok(json!({
            "type": "BPE", "vocab": ids, "merges": self.merges()?, "byte_fallback": fallback,
            "unk_token": unknown.map(|id| self.pieces[id].text.as_str()), "fuse_unk": true
        }))
    }

    /// Every way to build a piece from two others, best score of the result first.
    fn merges(&self) -> std::result::Result<Vec<(&str, &str)>, String> {
        let most = checked::most_merges(self.pieces.len());
        let whole = |piece: &Piece| matches!(piece.kind, PieceKind::Normal);
        let known: std::collections::HashMap<&str, f32> =
            self.pieces.iter().filter(|p| whole(p)).map(|p| (p.text.as_str(), p.score)).collect();
        let mut merges = Vec::new();
        for (id, piece) in self.pieces.iter().enumerate().filter(|(_, piece)| whole(piece)) {
            for (at, _) in piece.text.char_indices().skip(1) {
                let (left, right) = piece.text.split_at(at);
                if let (Some(a), Some(b)) = (known.get(left), known.get(right)) {
                    if merges.len() == most {
                        return Err(format!("its pieces have more than {most} merges"));
                    }
                    merges.push((piece.score, id, a + b, left, right));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(b.2.total_cmp(&a.2)));
        Ok(merges.into_iter().map(|merge| (merge.3, merge.4)).collect())
    }
}

/// Refuses a map of characters whose table is longer than the map: its reader asks for the memory
/// before it looks.
fn check_table(map: &[u8]) -> std::result::Result<(), String> {
    let Some((size, rest)) = map.split_first_chunk() else { return Ok(()) };
    let size = u32::from_le_bytes(*size) as usize;
    if size > rest.len() {
        let length = rest.len();
        return Err(format!(
            "its map of characters has a table of {size} bytes, but {length} bytes follow"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::assert_refused;

    fn piece(text: &str, score: f32, kind: i32) -> PieceProto {
        PieceProto { text: Some(text.to_owned()), score: Some(score), kind: Some(kind) }
    }

    fn model() -> Vec<u8> {
        let mut pieces = vec![piece("<pad>", 0.0, 3), piece("<s>", 0.0, 3), piece("<unk>", 0.0, 2)];
        pieces.extend((0..=255).map(|byte| piece(&format!("<0x{byte:02X}>"), 0.0, 6)));
        for (rank, text) in ["ab", "\u{2581}ab", "\u{2581}", "a", "b", "c"].iter().enumerate() {
            pieces.push(piece(text, -(rank as f32), 1));
        }
        let normalizer = NormalizerSpec {
            precompiled_charsmap: None,
            add_dummy_prefix: Some(false),
            remove_extra_whitespaces: Some(false),
        };
        let trainer = Some(TrainerSpec { model_type: Some(BPE) });
        ModelProto { pieces, trainer, normalizer: Some(normalizer) }.encode_to_vec()
    }

    #[test]
    fn pieces_that_make_merges_without_measure_are_refused() {
        let piece =
            |length| Piece { text: "a".repeat(length), score: 0.0, kind: PieceKind::Normal };
        let pieces = SentencePieces::of((1..=512).map(piece).collect());
        assert_refused(pieces.tokenizer(), &["more than"]);
    }

    #[test]
    fn pieces_encode_and_decode_text_with_bytes_for_the_rest() -> Result<()> {
        let pieces = SentencePieces::parse(&model()).expect("model");
        assert_eq!((pieces.control("<s>"), pieces.vocabulary()), (Some(1), 265));
        let tokenizer = pieces.tokenizer()?;
        let ids = tokenizer.encode("ab abc é")?.ids;
        assert_eq!(ids, [259, 260, 264, 261, 3 + 0xC3, 3 + 0xA9]);
        assert_eq!(tokenizer.decode(&ids, false)?, "ab abc é");
        Ok(())
    }

    #[test]
    fn a_stream_goes_on_after_bytes_that_are_no_character() -> Result<()> {
        let tokenizer = SentencePieces::parse(&model()).expect("model").tokenizer()?;
        let mut stream = tokenizer.stream();
        let mut text = String::new();
        // "é", a byte that begins no character, "ab", "é".
        for id in [3 + 0xC3, 3 + 0xA9, 3 + 0xFF, 259, 3 + 0xC3, 3 + 0xA9] {
            text += &stream.push(id)?;
        }
        text += &stream.finish()?;
        assert_eq!(text, "é\u{FFFD}abé");
        Ok(())
    }

    #[test]
    fn damaged_models_are_errors_without_a_panic() {
        let whole = model();
        for length in 0..whole.len().min(400) {
            let _ = SentencePieces::parse(&whole[..length]);
        }
        assert!(SentencePieces::parse(b"").is_err());
        assert!(SentencePieces::parse(b"no protobuf at all").is_err());
        let odd = ModelProto { pieces: vec![piece("x", 0.0, 9)], trainer: None, normalizer: None };
        assert_refused(SentencePieces::parse(&odd.encode_to_vec()), &["unknown type 9"]);
        let pieces = vec![piece(&"x".repeat(5000), 0.0, 1)];
        let long = ModelProto { pieces, trainer: None, normalizer: None };
        assert_refused(SentencePieces::parse(&long.encode_to_vec()), &["piece 0 has 5000 bytes"]);
    }

    #[test]
    fn a_damaged_map_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("t.model");
        // The size of a table, less than that, a table whose places lie outside of it, a text cut off.
        let outside = [&4_u32.to_le_bytes()[..], &[0xff; 4], b"a\0"].concat();
        for map in [b"\xff\xff\xff\x7f".to_vec(), b"\x04".to_vec(), outside, vec![0; 4]] {
            let normalizer = NormalizerSpec {
                precompiled_charsmap: Some(map),
                add_dummy_prefix: Some(true),
                remove_extra_whitespaces: Some(true),
            };
            let pieces = vec![piece("<unk>", 0.0, 2), piece("a", 0.0, 1)];
            let proto = ModelProto { pieces, trainer: None, normalizer: Some(normalizer) };
            std::fs::write(&path, proto.encode_to_vec()).expect("written");
            let used = SentencePieces::open(&path)
                .and_then(|pieces| pieces.tokenizer())
                .and_then(|tokenizer| tokenizer.encode("a b"));
            assert_refused(used, &["t.model: "]);
        }
    }
}
