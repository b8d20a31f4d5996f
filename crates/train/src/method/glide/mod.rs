//! GLIDE: one layer over the target's last-layer keys and values, trained at several delays.

mod config;
mod delays;
mod footprint;
mod objective;
mod proposed;

use std::path::Path;
use std::sync::Arc;

use longdraft_features::{FeatureMode, TeacherKind};
use longdraft_models::TargetConfig;
use longdraft_models::draft::files::SavedDraft;
use longdraft_models::draft::glide::{FinalNorm, GlideConfig, GlideDraft};
use longdraft_models::draft::{Ties, VocabularyMap};
use longdraft_models::error::Problems;
use longdraft_rules::{Problem, Rules};
use serde_json::{Map, Value, json};

use super::recipe::{keys, proposed, rate_at, starts};
use super::{
    DraftMethod, Evidence, Materials, MethodKeys, Passes, Recipe, Room, Round, StageContext,
    require_sizes,
};
use crate::error::Result;
use crate::footprint::Footprint;
use crate::limits;
use crate::objective::{Objective, SoftTargetKind, TeacherConfig};
use crate::observer::Observer;
use footprint::GlideFootprint;

pub use config::Glide;
pub use delays::DelayDraws;
pub use objective::{GlideObjective, GlideObjectiveConfig};

/// Proposals of a round that a draft is trained for where nothing else is given.
const PROPOSALS: usize = 5;
/// SmolLM2-135M on prompts like those of its training: 200 k tokens once, 117 k three times (quickstart), 205 k of
/// its own answers three times, 1.18 M twice (replayed).
const EVIDENCE: [Evidence; 4] = [
    Evidence { tokens: 2.0e5, draft_len: 4, tau: 1.23 },
    Evidence { tokens: 3.5e5, draft_len: 4, tau: 1.54 },
    Evidence { tokens: 6.15e5, draft_len: 5, tau: 1.69 },
    Evidence { tokens: 2.36e6, draft_len: 5, tau: 1.86 },
];

impl DraftMethod for Glide {
    fn name(&self) -> &'static str {
        "glide"
    }

    fn problems(&self, stage: &StageContext<'_>) -> Vec<Problem> {
        problems(self, stage)
    }

    fn is_compat(&self) -> bool {
        self.compat.is_some()
    }

    fn masks_padding(&self) -> bool {
        self.is_compat()
    }

    fn footprint(
        &self,
        teacher: &TeacherConfig,
        target: &TargetConfig,
    ) -> Result<Arc<dyn Footprint>> {
        let path = Path::new("draft configuration");
        GlideConfig::problems_of(target).into_result(path)?;
        let teacher = match teacher.soft_targets {
            _ if self.soft_weight == 0.0 => TeacherKind::None,
            SoftTargetKind::TopK => TeacherKind::TopK(teacher.top_k),
            SoftTargetKind::Full => TeacherKind::Full,
        };
        Ok(Arc::new(GlideFootprint { sizes: self.layer(target), teacher }))
    }

    fn recipe(&self, room: &Room<'_>) -> Option<Recipe> {
        if !GlideConfig::problems_of(room.target).0.is_empty() {
            return None;
        }
        let rate = |at_576| rate_at(room.target.hidden_size, at_576);
        // Random values learn better at a half to a quarter of the rate (docs/results/training-choices.md).
        let starts = starts(room.target, rate(4e-3), rate(1.4e-3));
        Some(Recipe {
            draft: keys(json!({
                "init": starts[0].init, "final_norm": "target", "gamma": PROPOSALS, "soft_weight": 0.9,
                "draft_vocab_size": proposed(room.target.vocab_size),
            })),
            teacher: keys(json!({ "soft_targets": "top_k", "top_k": 64 })),
            learning_rate: starts[0].learning_rate,
            starts,
            round: Round { most: PROPOSALS, passes: Passes::EachToken, vocabulary: None },
            evidence: &EVIDENCE,
        })
    }

    fn check_start(&self, target: &TargetConfig, start: &SavedDraft) -> Result<()> {
        let glide = continued(self.layer(target), start)?;
        glide.problems_with(target).into_result(&start.path)?;
        Ok(GlideDraft::check_file(&start.path, &glide)?)
    }

    fn keys_of(&self, start: &SavedDraft) -> Result<Map<String, Value>> {
        let Some(found) = GlideConfig::of_saved(start)? else { return Ok(Map::new()) };
        let mut known = keys(json!({
            "compat": found.compat, "final_norm": found.final_norm, "gamma": found.gamma,
            "draft_vocab_size": found.draft_vocab_size,
        }));
        if found.compat.is_some() {
            known.insert("soft_weight".into(), 0.0.into());
        }
        Ok(known)
    }

    fn open_keys(&self) -> &'static [&'static [&'static str]] {
        // Weights of delays say how many there are.
        &[&["draft_vocab_size"], &["gamma", "delay_weights"]]
    }

    /// How long its chains are is no part of its network: all drafts are measured with the same.
    fn as_saved(&self, draft: &SavedDraft) -> Result<Box<dyn DraftMethod>> {
        let mut known = self.keys_of(draft)?;
        known.shift_remove("gamma");
        known.entry("draft_vocab_size").or_insert(Value::Null);
        self.with(known)
    }

    fn build(&self, materials: &Materials<'_>, _: &mut dyn Observer) -> Result<Box<dyn Objective>> {
        let Materials { teacher, seed, target, .. } = materials;
        let glide = self.layer(target.config());
        let glide = match materials.start {
            Some(start) => continued(glide, start)?,
            None => glide,
        };
        let draft = match materials.start {
            Some(start) => GlideDraft::load(&start.path, &glide, target)?,
            None => GlideDraft::initialise(&glide, target, self.init, *seed)?,
        };
        let weights = self.delay_weights.clone();
        let draws = DelayDraws {
            seed: *seed,
            weights: weights.unwrap_or_else(|| vec![1.0; glide.gamma]),
            shared: self.is_compat(),
        };
        let objective = GlideObjective::new(Arc::clone(target), draft, self.objective(teacher));
        let objective = objective.with_delays(draws);
        Ok(Box::new(match vocabulary(&glide, materials)? {
            Some(vocabulary) => objective.with_vocabulary(vocabulary)?,
            None => objective,
        }))
    }
}

/// The tokens that a draft learns to propose; `None` for all.
fn vocabulary(glide: &GlideConfig, materials: &Materials<'_>) -> Result<Option<VocabularyMap>> {
    let counts = materials.token_counts;
    // Where nothing is known of its text, all that it could propose counts.
    let Some(size) = glide.draft_vocab_size.filter(|_| !counts.is_empty()) else {
        return Ok(None);
    };
    let (kept, _) = VocabularyMap::most_frequent(counts, size, Ties::LowerId, &[])?;
    Ok(Some(kept))
}

/// The layer that goes on from a draft: it looks back as far as the draft does, for which there is no key.
fn continued(mut wanted: GlideConfig, start: &SavedDraft) -> Result<GlideConfig> {
    check_same_network(&wanted, start)?;
    if let Some(found) = GlideConfig::of_saved(start)? {
        wanted.self_window = found.self_window;
    }
    Ok(wanted)
}

/// Weights fit a layer with the target's norm and one without: what is said of them must hold.
fn check_same_network(wanted: &GlideConfig, start: &SavedDraft) -> Result<()> {
    let Some(found) = GlideConfig::of_saved(start)? else { return Ok(()) };
    let mut problems = Problems::default();
    if found.final_norm != wanted.final_norm {
        let [found, wanted] =
            [found, wanted.clone()].map(|layer| format!("{:?}", layer.final_norm).to_lowercase());
        problems.push(format!(
            "the draft has `final_norm` = {found}, {wanted} is configured: set `draft.final_norm: {found}`"
        ));
    }
    Ok(problems.into_result(&start.path)?)
}

fn problems(draft: &Glide, stage: &StageContext<'_>) -> Vec<Problem> {
    let mut rules = Rules::default();
    let unit = 0.0..=1.0;
    rules.require(
        unit.contains(&draft.soft_weight),
        "draft.soft_weight",
        "must be between 0 and 1",
    );
    if let Some(weights) = &draft.delay_weights {
        rules.require(
            weights.iter().all(|w| *w >= 0.0 && limits::is_f32(*w))
                && weights.iter().sum::<f64>() > 0.0,
            "draft.delay_weights",
            "must be non-negative with a positive sum",
        );
        rules.require(
            draft.gamma.is_none_or(|gamma| gamma == weights.len()),
            "draft.delay_weights",
            "needs one weight for each delay 1..gamma",
        );
    }
    require_sizes(&mut rules, &[("draft_vocab_size", draft.draft_vocab_size, 1, 1 << 24)]);
    let length = 1..=limits::DRAFT_LENGTH;
    rules.require(
        draft.gamma.is_none_or(|gamma| length.contains(&gamma)),
        "draft.gamma",
        "must be in 1 to 64: longer chains are never accepted whole",
    );
    rules.require(
        draft.delay_weights.as_ref().is_none_or(|weights| length.contains(&weights.len())),
        "draft.delay_weights",
        "holds 1 to 64 weights, one a delay",
    );
    if draft.compat.is_some() {
        rules.require(
            stage.sequence == 1,
            "draft.compat",
            "is `longspec`, which divides every row by its own tokens, of which a rank with a \
             part of it knows its own: set `parallel.sequence: 1`",
        );
        rules.require(
            draft.final_norm == FinalNorm::None,
            "draft.compat",
            "is `longspec`, which has no final norm: set `draft.final_norm: none`",
        );
        rules.require(
            draft.soft_weight == 0.0,
            "draft.compat",
            "is `longspec`, which learns hard labels: set `draft.soft_weight: 0`",
        );
        rules.require(
            draft.draft_vocab_size.is_none(),
            "draft.compat",
            "is `longspec`, which learns the whole vocabulary: leave out `draft.draft_vocab_size`",
        );
        rules.require(
            *stage.features == FeatureMode::Online || !stage.anchor.redraw,
            "draft.compat", "is `longspec`, which draws new positions every step: set `train.features: online`, or keep the first \
             ones with `data.anchor.redraw: false`",
        );
    }
    rules.require(
        *stage.features != FeatureMode::Memory
            || draft.soft_weight == 0.0
            || stage.teacher.soft_targets == SoftTargetKind::TopK,
        "train.features",
        "is `memory`, which keeps no full teacher: set `teacher.soft_targets: top_k`",
    );
    rules.into_problems()
}

#[cfg(test)]
mod tests {
    use longdraft_models::published::published_config;

    use super::*;

    #[test]
    fn nothing_is_proposed_for_a_target_that_no_layer_fits() {
        let recipe = |target: &TargetConfig| {
            Glide::default().recipe(&Room { target, seconds: 600.0, row_tokens: 512 }).is_some()
        };
        assert!(recipe(&published_config("Qwen/Qwen3-8B").expect("a published target")));
        let latent = TargetConfig::from_json(&json!({
            "model_type": "deepseek_v3", "hidden_size": 48, "num_hidden_layers": 4, "vocab_size": 61,
            "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 4,
            "q_lora_rank": null, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
            "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        }));
        assert!(!recipe(&latent.expect("configuration")));
    }

    /// Whatever the network of a saved draft is, its keys make it again.
    #[test]
    fn a_saved_draft_says_the_keys_of_its_network() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let draft = Glide { final_norm: FinalNorm::Target, gamma: Some(3), ..Glide::default() };
        let config = serde_json::to_value(draft.layer(&target)).expect("JSON");
        let start = SavedDraft { path: "draft".into(), config: Some(config) };
        let known = Glide::default().keys_of(&start).expect("keys");
        let again: Glide = serde_json::from_value(known.clone().into()).expect("read");
        assert_eq!(again.layer(&target), draft.layer(&target));
        assert!(check_same_network(&draft.layer(&target), &start).is_ok());
        let other = check_same_network(&Glide::default().layer(&target), &start);
        let error = other.expect_err("another norm").to_string();
        assert!(error.contains("set `draft.final_norm: target`"), "{error}");
        // Its length is its own where none is configured, and its window always.
        let left = |draft: Glide| draft.boxed().left_open(&known).get("gamma").cloned();
        assert_eq!(left(Glide::default()), Some(3.into()));
        assert_eq!(left(Glide { gamma: Some(7), ..Glide::default() }), None);
        assert_eq!(left(Glide { delay_weights: Some(vec![1.0; 2]), ..Glide::default() }), None);
        let narrow = GlideConfig { self_window: 64, ..draft.layer(&target) };
        let config = serde_json::to_value(&narrow).expect("JSON");
        let start_of_narrow = SavedDraft { path: "draft".into(), config: Some(config) };
        let layer = continued(draft.layer(&target), &start_of_narrow).expect("the same network");
        assert_eq!(layer, narrow);
        // Files that say nothing are those of any layer.
        let unsaid = SavedDraft { path: "draft".into(), config: None };
        assert!(Glide::default().keys_of(&unsaid).expect("keys").is_empty());
        assert!(check_same_network(&draft.layer(&target), &unsaid).is_ok());
    }
}
