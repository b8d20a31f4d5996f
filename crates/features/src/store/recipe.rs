//! What a store is made of.

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredTeacher {
    /// Not at all.
    None,
    /// Final hidden states of the rows that are read.
    FinalHidden,
    /// Their k most likely tokens.
    TopK(usize),
}

/// What is kept of every row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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

    /// Whether these contents serve who needs `wanted`: a top-k teacher follows from final states.
    pub fn serve(&self, wanted: &Self) -> bool {
        let teacher = match (self.teacher, wanted.teacher) {
            (_, StoredTeacher::None) | (StoredTeacher::FinalHidden, _) => true,
            (stored, wanted) => stored == wanted,
        };
        teacher
            && (self.last_kv || !wanted.last_kv)
            && (wanted.layers.is_empty() || self.layers == wanted.layers)
    }

    /// Bytes of a row without its share of the header.
    fn bytes(&self, target: &TargetConfig, dtype: StoreDtype, tokens: u64, teacher: u64) -> u64 {
        let number = dtype.bytes();
        let (hidden, kv) = (target.hidden_size as u64, target.kv_size() as u64);
        let last_kv = if self.last_kv { 2 * kv * number } else { 0 };
        let layers = self.layers.len() as u64 * dtype.layer_bytes(hidden);
        let of_teacher = match self.teacher {
            StoredTeacher::None => 0,
            StoredTeacher::FinalHidden => 4 + hidden * number,
            StoredTeacher::TopK(k) => 4 + k as u64 * (4 + number),
        };
        // Ids and positions of 4 bytes, mask bits.
        tokens * (8 + last_kv + layers) + tokens.div_ceil(8) + teacher * of_teacher
    }

    /// Bytes of a row of `tokens` tokens with `teacher` rows of the teacher.
    pub fn row_bytes(
        &self,
        target: &TargetConfig,
        dtype: StoreDtype,
        (tokens, teacher): (usize, usize),
    ) -> u64 {
        HEADER_BYTES + self.bytes(target, dtype, tokens as u64, teacher as u64)
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

    /// A part.
    pub fn part(&self, part: Part) -> &PartRecipe {
        match part {
            Part::Train => &self.train,
            Part::HeldOut => &self.held_out,
        }
    }

    /// What differs from a recipe whose shards must be the same.
    pub(super) fn differences(&self, new: &Self) -> Vec<String> {
        let mut differences = self.differences_of(new, &Part::ALL);
        let mut compare = |name: &str, old: String, new: String| {
            if old != new {
                differences.push(format!("{name} was {old}, now {new}"));
            }
        };
        compare("dtype", format!("{:?}", self.dtype), format!("{:?}", new.dtype));
        compare("compression", format!("{:?}", self.compression), format!("{:?}", new.compression));
        compare("train.seed", self.seed.to_string(), new.seed.to_string());
        let source = |records: &Option<String>| match records {
            Some(records) => format!("records {records}"),
            None => "the target".to_owned(),
        };
        compare("source", source(&self.records), source(&new.records));
        compare("data.anchor", format!("{:?}", self.anchor), format!("{:?}", new.anchor));
        for part in Part::ALL {
            let (old, new) = (self.part(part), new.part(part));
            let name = part.name();
            let what = |recipe: &PartRecipe| format!("{:?}", recipe.contents);
            compare(&format!("{name} features"), what(old), what(new));
            let taught = |recipe: &PartRecipe| recipe.teacher_tokens.clone();
            compare(&format!("{name} teacher tokens"), taught(old), taught(new));
            let shards = |recipe: &PartRecipe| recipe.shards.len().to_string();
            compare(&format!("{name} shards"), shards(old), shards(new));
        }
        differences
    }

    /// What keeps this store from serving a run that would make `new`. The run does not read a part of which it has no row.
    pub(super) fn differences_in_use(&self, new: &Self) -> Vec<String> {
        let read: Vec<_> = Part::ALL.into_iter().filter(|part| new.part(*part).rows > 0).collect();
        self.differences_of(new, &read)
    }

    fn differences_of(&self, new: &Self, parts: &[Part]) -> Vec<String> {
        let mut differences = Vec::new();
        let mut compare = |name: &str, old: &str, new: &str| {
            if old != new {
                differences.push(format!("{name} was {old}, now {new}"));
            }
        };
        compare("format", &self.format, &new.format);
        compare("target", &self.target, &new.target);
        compare("tokenizer", &self.tokenizer, &new.tokenizer);
        for part in parts {
            let name = match part {
                Part::Train => "training text",
                Part::HeldOut => "held-out text",
            };
            compare(name, &self.part(*part).text, &new.part(*part).text);
        }
        for part in parts {
            let (old, new) = (&self.part(*part).contents, &new.part(*part).contents);
            if !old.serve(new) {
                let name = part.name();
                differences.push(format!("{name} features are {old:?}, {new:?} are needed"));
            }
        }
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn final_states_serve_every_teacher_and_layers_have_an_order() {
        let contents = |teacher| Contents { last_kv: true, layers: vec![1, 5], teacher };
        let full = contents(StoredTeacher::FinalHidden);
        let top = contents(StoredTeacher::TopK(8));
        assert!(full.serve(&top) && full.serve(&contents(StoredTeacher::None)));
        assert!(!top.serve(&full) && !top.serve(&contents(StoredTeacher::TopK(9))));
        assert!(!full.serve(&Contents { layers: vec![5, 1], ..full.clone() }));
        assert!(full.serve(&Contents { layers: Vec::new(), last_kv: false, ..full.clone() }));
        assert!(!Contents { last_kv: false, ..full.clone() }.serve(&full));
    }
}
