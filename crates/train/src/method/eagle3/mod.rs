//! EAGLE-3: one layer over three of the target's layers and its own states, trained for several
//! steps, with its draft vocabulary from the supervised tokens.

mod config;
mod footprint;
mod objective;

use std::path::Path;
use std::sync::Arc;

use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft, tensor_specs};
use longdraft_models::draft::files::SavedDraft;
use longdraft_models::draft::{Ties, TokenCounts, VocabularyMap};
use longdraft_models::error::Problems;
use longdraft_models::weights::TensorSpec;
use longdraft_models::{LayerId, ModelError, TargetConfig};
use longdraft_rules::{Problem, Rules};
use serde_json::{Map, Value, json};

use super::recipe::{keys, rate_at};
use super::{
    DraftMethod, Evidence, Materials, MethodKeys, Passes, Recipe, Room, Round, StageContext,
    require_sizes, vocabulary,
};
use crate::error::Result;
use crate::footprint::Footprint;
use crate::limits;
use crate::objective::{Objective, SoftTargetKind, TeacherConfig};
use crate::observer::Observer;
use footprint::Eagle3Footprint;

pub use config::{Eagle3, Eagle3DraftConfig};
pub use objective::{
    Eagle3Compat, Eagle3Loss, Eagle3Objective, Eagle3ObjectiveConfig, Eagle3Outcome, MaskRule,
    OovRows, RowPlan, TeacherDistribution,
};

/// Test-time steps, and proposals of a round, where nothing else is given.
const PROPOSALS: usize = 5;
/// Tokens that a draft can propose where nothing else is given.
const VOCABULARY: usize = 8192;
/// SmolLM2-135M: 205 k tokens of its own answers three times.
const EVIDENCE: [Evidence; 1] = [Evidence { tokens: 6.15e5, draft_len: 5, tau: 1.69 }];

impl DraftMethod for Eagle3 {
    fn name(&self) -> &'static str {
        "eagle3"
    }

    fn problems(&self, stage: &StageContext<'_>) -> Vec<Problem> {
        let objective = &self.objective;
        let mut rules = Rules::default();
        rules.add("draft", objective.problems());
        rules.require(
            objective.compat.is_none() || stage.teacher.soft_targets == SoftTargetKind::Full,
            "draft.compat",
            "learns the whole distribution: set `teacher.soft_targets: full`",
        );
        rules.require(
            stage.sequence == 1 || objective.compat.is_none(),
            "draft.compat",
            "divides every batch by its own rows, and a rank that runs a part \
             of it knows its own: set `parallel.sequence: 1`",
        );
        let network = &self.network;
        let sizes = [
            ("draft_vocab_size", network.draft_vocab_size, 1, 1 << 24),
            ("hidden_size", network.hidden_size, 1, 1 << 16),
            ("intermediate_size", network.intermediate_size, 1, 1 << 20),
            ("num_attention_heads", network.num_attention_heads, 1, 1 << 12),
            ("num_key_value_heads", network.num_key_value_heads, 1, 1 << 12),
            ("head_dim", network.head_dim, 1, 1 << 12),
            ("attention_window", network.attention_window, 1, limits::ROW_TOKENS),
        ];
        require_sizes(&mut rules, &sizes);
        rules.require(
            !network.remap || stage.has_start,
            "draft.remap",
            "changes the vocabulary of a trained draft: set `draft.from`",
        );
        rules.require(
            objective.compat.is_none() || !stage.anchor.enabled,
            "draft.compat",
            "knows no anchor offsets: set `data.anchor.enabled: false`",
        );
        rules.into_problems()
    }

    fn is_compat(&self) -> bool {
        self.objective.compat.is_some()
    }

    fn footprint(
        &self,
        teacher: &TeacherConfig,
        target: &TargetConfig,
    ) -> Result<Arc<dyn Footprint>> {
        let teacher = teacher.distribution().needs();
        let objective = &self.objective;
        let of_masks = objective.compat.is_none() && objective.oov_rows == OovRows::Keep;
        Ok(Arc::new(Eagle3Footprint {
            sizes: sizes(&self.network, target)?,
            steps: objective.ttt_steps,
            teacher,
            holds_step: !of_masks,
        }))
    }

    fn recipe(&self, room: &Room<'_>) -> Option<Recipe> {
        let vocabulary = room.target.vocab_size.min(VOCABULARY);
        sizes(&self.network, room.target).ok().map(|_| Recipe {
            draft: keys(json!({ "draft_vocab_size": vocabulary, "ttt_steps": PROPOSALS })),
            teacher: keys(json!({})),
            starts: Vec::new(),
            learning_rate: rate_at(room.target.hidden_size, 2e-3),
            round: Round {
                most: PROPOSALS,
                passes: Passes::EachToken,
                vocabulary: Some(vocabulary),
            },
            evidence: &EVIDENCE,
        })
    }

    fn check_start(&self, target: &TargetConfig, start: &SavedDraft) -> Result<()> {
        let sizes = sizes(&self.network, target)?;
        Eagle3Config::of_saved(start, Some(target))?;
        Ok(Eagle3Draft::check_file(start, &sizes)?)
    }

    fn keys_of(&self, start: &SavedDraft) -> Result<Map<String, Value>> {
        let Some(found) = Eagle3Config::of_saved(start, None)? else { return Ok(Map::new()) };
        // Without a word of it the head's rows decide.
        let is_said =
            start.config.as_ref().is_none_or(|said| said.get("draft_vocab_size").is_some());
        let mut known = keys(json!({
            "draft_vocab_size": is_said.then_some(found.draft_vocab_size),
            "target_layers": found.target_layers.map(|layer| layer.0),
            "fc_norm": found.fc_norm, "norm_output": found.norm_output,
            "norm_before_residual": found.norm_before_residual, "embed_proj": found.embed_proj,
            "attention_window": found.attention_window, "hidden_size": found.hidden_size,
            "intermediate_size": found.intermediate_size,
            "num_attention_heads": found.num_attention_heads,
            "num_key_value_heads": found.num_key_value_heads, "head_dim": found.head_dim,
        }));
        if !Eagle3Config::says_layers(start) {
            known.shift_remove("target_layers");
        }
        Ok(known)
    }

    fn open_keys(&self) -> &'static [&'static [&'static str]] {
        &[
            &["draft_vocab_size"],
            &["target_layers"],
            &["attention_window"],
            &["hidden_size"],
            &["intermediate_size"],
            &["num_attention_heads"],
            &["num_key_value_heads"],
            &["head_dim"],
        ]
    }

    fn as_saved(&self, draft: &SavedDraft) -> Result<Box<dyn DraftMethod>> {
        let mut known = self.keys_of(draft)?;
        known.insert("remap".into(), false.into());
        self.with(known)
    }

    fn build(
        &self,
        materials: &Materials<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Box<dyn Objective>> {
        let Materials { teacher, seed, target, .. } = materials;
        let wanted = &self.network;
        let mut sizes = sizes(wanted, target.config())?;
        let of_start = |start: &SavedDraft| Eagle3Config::of_saved(start, Some(target.config()));
        if let Some(found) = materials.start.map(of_start).transpose()?.flatten() {
            // Its weights were trained with these numbers, whatever those of the target are.
            sizes.rms_norm_eps = found.rms_norm_eps;
            if found.rope.is_kept_beside(&sizes.rope) {
                sizes.rope = found.rope;
            }
            if found.dynamic_ntk.is_some() {
                sizes.dynamic_ntk = found.dynamic_ntk;
                sizes.max_position_embeddings = found.max_position_embeddings;
            }
        }
        let counts = materials.counts_of_documents()?;
        // The draft keeps the table, its objective the head.
        let ends = target.hold_ends()?;
        let trained = match materials.start {
            None => {
                let map = chosen(self, materials, &counts, sizes.draft_vocab_size)?;
                Eagle3Draft::initialise(&sizes, map, ends.embedding_matrix(), *seed)?
            }
            Some(start) => {
                let trained = Eagle3Draft::load(start, &sizes, target)?;
                let kept = trained.vocabulary().draft_size();
                if wanted.remap {
                    trained.remapped(
                        chosen(self, materials, &counts, sizes.draft_vocab_size)?,
                        *seed,
                    )?
                } else if wanted.draft_vocab_size.is_some_and(|size| size != kept) {
                    let problem = format!(
                        "the draft proposes {kept} tokens, `draft.draft_vocab_size` is {}: a \
                         trained vocabulary stays as it is unless `draft.remap` is set",
                        sizes.draft_vocab_size
                    );
                    return Err(ModelError::invalid(&start.path, problem).into());
                } else {
                    trained
                }
            }
        };
        vocabulary::report(trained.vocabulary(), &counts, observer);
        let objective = Eagle3Objective::new(trained, ends.loss_head()?, self.objective.clone())?;
        let objective = objective.with_bend(target.bend());
        Ok(Box::new(objective.with_distribution(teacher.distribution())))
    }
}

/// The draft's sizes: as wanted, else the target's.
fn sizes(wanted: &Eagle3DraftConfig, target: &TargetConfig) -> Result<Eagle3Config> {
    let vocabulary = Eagle3Config::DRAFT_VOCABULARY.min(target.vocab_size);
    let vocabulary = wanted.draft_vocab_size.unwrap_or(vocabulary);
    let path = Path::new("`draft`");
    let refuse = |problems| ModelError::Invalid { path: path.to_path_buf(), problems };
    let layers = match wanted.target_layers {
        Some(ids) => ids.map(LayerId),
        None => Eagle3Config::published_layers(target.num_hidden_layers).map_err(|_| {
            let layers = target.num_hidden_layers;
            refuse(Problems(vec![format!(
                "a target of {layers} layers has no published choice of three: set \
                 `draft.target_layers`"
            )]))
        })?,
    };
    let plain = Eagle3Config::for_target_layers(target, vocabulary, layers);
    let sizes = Eagle3Config {
        hidden_size: wanted.hidden_size.unwrap_or(plain.hidden_size),
        intermediate_size: wanted.intermediate_size.unwrap_or(plain.intermediate_size),
        num_attention_heads: wanted.num_attention_heads.unwrap_or(plain.num_attention_heads),
        num_key_value_heads: wanted.num_key_value_heads.unwrap_or(plain.num_key_value_heads),
        head_dim: wanted.head_dim.unwrap_or(plain.head_dim),
        fc_norm: wanted.fc_norm,
        norm_output: wanted.norm_output,
        norm_before_residual: wanted.norm_before_residual,
        embed_proj: wanted.embed_proj,
        attention_window: wanted.attention_window,
        ..plain
    };
    sizes.problems_with(target).into_result(path)?;
    let values = |spec: TensorSpec| spec.shape.iter().map(|size| *size as u64).product::<u64>();
    let parameters: u64 = tensor_specs(&sizes).into_iter().map(values).sum();
    if parameters > limits::PARAMETERS {
        return Err(refuse(Problems(vec![format!(
            "a draft of {:.0} billion values, more than 17: lower `draft.hidden_size`, \
             `intermediate_size` or `num_attention_heads`",
            parameters as f64 / 1e9
        )]))
        .into());
    }
    Ok(sizes)
}

/// The most frequent supervised tokens.
fn chosen(
    draft: &Eagle3,
    materials: &Materials<'_>,
    counts: &TokenCounts,
    size: usize,
) -> Result<VocabularyMap> {
    if draft.is_compat() {
        let (map, _) = VocabularyMap::most_frequent(counts, size, Ties::FirstSeen, &[])?;
        return Ok(map);
    }
    vocabulary::of_documents(materials, counts, size)
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value as GgufValue;
    use longdraft_models::published::published_config;
    use longdraft_models::weights::gguf::write::save;

    use super::super::tests;
    use super::*;

    /// Flags hold whatever layers a draft reads; what cannot be read is told.
    #[test]
    fn a_draft_without_ids_of_layers_says_its_flags() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let wanted =
            Eagle3DraftConfig { norm_before_residual: true, ..Eagle3DraftConfig::default() };
        let mut said = sizes(&wanted, &target).expect("sizes").to_json();
        said["eagle_config"] = Value::Null;
        let start = |said: &Value| SavedDraft { path: "draft".into(), config: Some(said.clone()) };
        let known = Eagle3::default().keys_of(&start(&said)).expect("keys");
        assert_eq!(known["norm_before_residual"], true);
        assert!(!known.contains_key("target_layers"));
        let error = Eagle3::default().check_start(&target, &start(&said)).expect_err("refused");
        assert!(error.to_string().contains("set `draft.norm_before_residual: true`"), "{error}");
        said["norm_before_fc"] = true.into();
        let error = Eagle3::default().keys_of(&start(&said)).expect_err("refused").to_string();
        assert!(error.contains("`norm_before_fc` = true is not supported"), "{error}");
    }

    /// Such a file does not count as one of which nothing is known.
    #[test]
    fn a_start_in_a_gguf_file_that_is_unusable_is_refused() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("draft.gguf");
        let keys = [
            ("general.architecture", GgufValue::String("eagle3".into())),
            ("eagle3.norm_before_residual", GgufValue::U32(1)),
        ];
        save(&path, &keys.map(|(key, value)| (key.to_owned(), value)), &[]).expect("written");
        let refused = Eagle3::default().check_start(&target, &SavedDraft::at(&path));
        let text = refused.expect_err("refused").to_string();
        assert!(text.contains("`eagle3.norm_before_residual` is not a flag"), "{text}");
    }

    /// Whatever the network of a saved draft is, its keys make it again.
    #[test]
    fn a_saved_draft_says_the_keys_of_its_network() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let wanted = Eagle3DraftConfig {
            draft_vocab_size: Some(900),
            target_layers: Some([2, 5, 8]),
            fc_norm: true,
            norm_output: true,
            hidden_size: Some(256),
            embed_proj: true,
            attention_window: Some(77),
            head_dim: Some(32),
            ..Eagle3DraftConfig::default()
        };
        let network = sizes(&wanted, &target).expect("sizes");
        let again: Eagle3 = tests::again(network.to_json());
        assert_eq!(sizes(&again.network, &target).expect("sizes"), network);
    }
}
