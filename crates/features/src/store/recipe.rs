//! What a store is made of.

mod differences;

use candle_core::DType;
use longdraft_data::batch::AnchorOffset;
use longdraft_models::target_model::{Tap, Taps};
use longdraft_models::{LayerId, TargetConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FeatureNeeds, TeacherKind};

/// Bytes of a row's share of a shard's header, about.
const HEADER_BYTES: u64 = 1024;

/// Training rows or held-out rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Trained on.
    Train,
    /// Measured.
    HeldOut,
}

impl Part {
    /// Both, in the order of capture.
    pub const ALL: [Self; 2] = [Self::Train, Self::HeldOut];

    /// As in file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "held_out",
        }
    }
}

/// How numbers are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StoreDtype {
    /// Half the size; losses agree within rounding.
    #[default]
    Bf16,
    /// Losses are those of the target online, bit for bit.
    F32,
    /// Tapped layers in 8 bits with a scale for every token and layer, the rest as bf16.
    Int8,
}

impl StoreDtype {
    /// What states, keys and values are held as, where they are not 8 bits.
    pub(super) fn of_states(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 | Self::Int8 => DType::BF16,
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::Int8 => 2,
            Self::F32 => 4,
        }
    }

    /// Bytes of a token's state of one tapped layer.
    fn layer_bytes(self, hidden: u64) -> u64 {
        match self {
            Self::Int8 => hidden + 4,
            Self::Bf16 | Self::F32 => hidden * self.bytes(),
        }
    }
}

/// Compression of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// None: shards are read where they lie.
    #[default]
    None,
    /// A tenth to a fifth smaller; a shard is unpacked before it is read.
    Zstd,
}

/// The teacher as it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredTeacher {
    /// Not at all.
    #[default]
    None,
    /// Final hidden states of the rows that are read.
    FinalHidden,
    /// Their k most likely tokens.
    TopK(usize),
    /// Both, for drafts of which some read the one and some the other.
    FinalHiddenAndTopK(usize),
}

impl StoredTeacher {
    fn of(final_hidden: bool, top_k: Option<usize>) -> Self {
        match (final_hidden, top_k) {
            (false, None) => Self::None,
            (true, None) => Self::FinalHidden,
            (false, Some(k)) => Self::TopK(k),
            (true, Some(k)) => Self::FinalHiddenAndTopK(k),
        }
    }

    /// Whether it has final states.
    pub fn final_hidden(self) -> bool {
        matches!(self, Self::FinalHidden | Self::FinalHiddenAndTopK(_))
    }

    /// How many most likely tokens it has.
    pub fn top_k(self) -> Option<usize> {
        match self {
            Self::TopK(k) | Self::FinalHiddenAndTopK(k) => Some(k),
            Self::None | Self::FinalHidden => None,
        }
    }

    /// What both keep together.
    fn and(self, other: Self) -> Self {
        let final_hidden = self.final_hidden() || other.final_hidden();
        Self::of(final_hidden, self.top_k().max(other.top_k()))
    }

    /// What of it is read where `wanted` is needed, if it serves: the most likely tokens are the first of more of them,
    /// and follow from final states.
    fn read_for(self, wanted: Self) -> Option<Self> {
        let top_k = self.top_k().filter(|own| wanted.top_k().is_some_and(|k| k <= *own));
        let final_hidden = wanted.final_hidden() || (wanted.top_k().is_some() && top_k.is_none());
        let serves = self.final_hidden() || !final_hidden;
        serves.then(|| Self::of(final_hidden, top_k))
    }
}

/// What is kept of every row.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Contents {
    /// Keys before rotary embedding and values of the target's last layer.
    pub last_kv: bool,
    /// Layers whose output is kept, side by side in this order.
    pub layers: Vec<usize>,
    /// The teacher.
    pub teacher: StoredTeacher,
}

impl Contents {
    /// What an objective needs.
    pub fn of(needs: &FeatureNeeds) -> Self {
        let layer = |tap: &Tap| match tap {
            Tap::Hidden(layer) => Some(layer.0),
            _ => None,
        };
        Self {
            last_kv: needs.taps.contains(&Tap::LastKv),
            layers: needs.taps.iter().filter_map(layer).collect(),
            teacher: match needs.teacher {
                TeacherKind::None => StoredTeacher::None,
                TeacherKind::Full | TeacherKind::EveryToken => StoredTeacher::FinalHidden,
                TeacherKind::TopK(k) | TeacherKind::EveryTokenTopK(k) => StoredTeacher::TopK(k),
            },
        }
    }

    /// What the target's pass over a row taps: the same for all rows, because ranks that share its layers
    /// make it together.
    pub fn taps(&self) -> Taps {
        let mut taps: Vec<Tap> = self.layers.iter().map(|id| Tap::Hidden(LayerId(*id))).collect();
        if self.last_kv {
            taps.push(Tap::LastKv);
        }
        if self.teacher != StoredTeacher::None {
            taps.push(Tap::FinalHidden);
        }
        Taps::of(&taps)
    }

    /// What of these contents is read where `wanted` is needed; `None`: they do not serve.
    pub fn read_for(&self, wanted: &Self) -> Option<Self> {
        let has = |layer| self.layers.contains(layer);
        let serves = (self.last_kv || !wanted.last_kv) && wanted.layers.iter().all(has);
        let teacher = self.teacher.read_for(wanted.teacher).filter(|_| serves)?;
        Some(Self { teacher, ..wanted.clone() })
    }

    /// What serves both.
    #[must_use]
    pub fn and(self, other: &Self) -> Self {
        let further = other.layers.iter().filter(|layer| !self.layers.contains(layer));
        Self {
            last_kv: self.last_kv || other.last_kv,
            layers: self.layers.iter().chain(further).copied().collect(),
            teacher: self.teacher.and(other.teacher),
        }
    }

    /// Bytes of a row of `tokens` tokens with `teacher` rows of the teacher.
    pub fn row_bytes(
        &self,
        target: &TargetConfig,
        dtype: StoreDtype,
        (tokens, teacher): (usize, usize),
    ) -> u64 {
        let (tokens, teacher, number) = (tokens as u64, teacher as u64, dtype.bytes());
        let (hidden, kv) = (target.hidden_size as u64, target.kv_size() as u64);
        let last_kv = if self.last_kv { 2 * kv * number } else { 0 };
        let layers = self.layers.len() as u64 * dtype.layer_bytes(hidden);
        let of_states = if self.teacher.final_hidden() { hidden * number } else { 0 };
        let of_top_k = self.teacher.top_k().map_or(0, |k| k as u64 * (4 + number));
        let of_teacher = match self.teacher {
            StoredTeacher::None => 0,
            _ => 4 + of_states + of_top_k,
        };
        // Ids and positions of 4 bytes, mask bits.
        let of_tokens = tokens * (8 + last_kv + layers) + tokens.div_ceil(8);
        HEADER_BYTES + of_tokens + teacher * of_teacher
    }
}

impl std::fmt::Display for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = Vec::new();
        if self.last_kv {
            parts.push("keys and values of the last layer".to_owned());
        }
        if !self.layers.is_empty() {
            let layers: Vec<String> = self.layers.iter().map(usize::to_string).collect();
            parts.push(format!("layers {}", layers.join(", ")));
        }
        if self.teacher.final_hidden() {
            parts.push("final states".to_owned());
        }
        if let Some(k) = self.teacher.top_k() {
            parts.push(format!("the {k} most likely tokens"));
        }
        if parts.is_empty() {
            return f.write_str("nothing");
        }
        f.write_str(&parts.join(" + "))
    }
}

/// Rows of one part and how they are cut into shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRecipe {
    /// What is kept of every row.
    pub contents: Contents,
    /// Hash of tokens, masks and documents of every row.
    pub text: String,
    /// Hash of the tokens at which the teacher is kept.
    #[serde(rename = "teacher_rows")]
    pub teacher_tokens: String,
    /// Packed rows.
    pub rows: usize,
    /// Their tokens.
    pub tokens: usize,
    /// First row of every shard.
    pub shards: Vec<usize>,
}

impl PartRecipe {
    /// Rows of a shard.
    pub fn rows_of(&self, shard: usize) -> std::ops::Range<usize> {
        let end = self.shards.get(shard + 1).copied().unwrap_or(self.rows);
        self.shards[shard]..end
    }
}

/// What a store is made of; nothing else goes into its shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// The layout's name.
    pub format: String,
    /// Fingerprint of the target.
    pub target: String,
    /// Fingerprint of the tokenizer.
    pub tokenizer: String,
    /// How numbers are held.
    pub dtype: StoreDtype,
    /// How shards are compressed.
    pub compression: Compression,
    /// Key of the positions' draws.
    pub seed: u64,
    /// How positions are drawn, bounded by the target's context.
    pub anchor: AnchorOffset,
    /// What the target's weights were held as: `f32`, `bf16`, `stored` (quantised blocks). Records do not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// Factors of the large products of the target's f32 and 16-bit matrices: `rounded`, `f32`. Records do not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub products: Option<String>,
    /// Fingerprint of the records that took the place of the target's passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<String>,
    /// Training rows.
    pub train: PartRecipe,
    /// Held-out rows.
    pub held_out: PartRecipe,
}

impl Recipe {
    /// Name of this layout.
    pub const FORMAT: &str = "longdraft-features-1";

    /// A store of `rows` training rows of `tokens` tokens, each in a shard of its own, in bf16. Nothing is held out, and
    /// text and target have no names.
    pub fn of_rows(contents: &Contents, rows: usize, tokens: usize) -> Self {
        let part = |rows: usize| PartRecipe {
            contents: contents.clone(),
            text: String::new(),
            teacher_tokens: String::new(),
            rows,
            tokens: rows * tokens,
            shards: (0..rows).collect(),
        };
        Self {
            format: Self::FORMAT.to_owned(),
            target: String::new(),
            tokenizer: String::new(),
            dtype: StoreDtype::Bf16,
            compression: Compression::None,
            seed: 0,
            anchor: AnchorOffset::default(),
            precision: None,
            products: None,
            records: None,
            train: part(rows),
            held_out: part(0),
        }
    }

    /// A part.
    pub fn part(&self, part: Part) -> &PartRecipe {
        match part {
            Part::Train => &self.train,
            Part::HeldOut => &self.held_out,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(teacher: StoredTeacher) -> Contents {
        Contents { last_kv: true, layers: vec![1, 5], teacher }
    }

    #[test]
    fn what_is_read_is_what_is_needed_and_no_more() {
        let [full, top] = [StoredTeacher::FinalHidden, StoredTeacher::TopK(8)].map(contents);
        assert_eq!(
            full.read_for(&contents(StoredTeacher::None)),
            Some(contents(StoredTeacher::None))
        );
        // The most likely tokens follow from the states, and are the first of more of them.
        assert_eq!(full.read_for(&top), Some(full.clone()));
        assert_eq!(top.read_for(&contents(StoredTeacher::TopK(3))), Some(top.clone()));
        assert_eq!(top.read_for(&full), None);
        assert_eq!(top.read_for(&contents(StoredTeacher::TopK(9))), None);
        // Layers in the order of who reads them.
        let turned = Contents { layers: vec![5, 1], ..full.clone() };
        assert_eq!(full.read_for(&turned), Some(turned));
        let other = Contents { layers: vec![5, 2], ..full.clone() };
        assert_eq!(full.read_for(&other), None);
        let states = Contents { layers: Vec::new(), last_kv: false, ..full.clone() };
        assert_eq!(full.read_for(&states), Some(states.clone()));
        assert_eq!(states.read_for(&full), None);
        assert_eq!(Contents { last_kv: false, ..full.clone() }.read_for(&full), None);
    }

    #[test]
    fn one_store_for_several_serves_each_from_what_costs_it_least() {
        let kv = Contents { last_kv: true, layers: vec![], teacher: StoredTeacher::TopK(64) };
        let layers = |layers: &[usize], teacher| Contents {
            last_kv: false,
            layers: layers.to_vec(),
            teacher,
        };
        let three = layers(&[2, 14, 25], StoredTeacher::FinalHidden);
        let four = layers(&[25, 6, 2, 18], StoredTeacher::TopK(32));
        let all = [&three, &four].into_iter().fold(kv.clone(), Contents::and);
        assert_eq!(all.layers, [2, 14, 25, 6, 18]);
        assert_eq!(all.teacher, StoredTeacher::FinalHiddenAndTopK(64));
        let read = |wanted: &Contents| all.read_for(wanted).expect("served");
        assert_eq!(read(&kv), kv);
        assert_eq!(read(&three), three);
        assert_eq!(read(&four), Contents { teacher: StoredTeacher::TopK(64), ..four });
    }
}
