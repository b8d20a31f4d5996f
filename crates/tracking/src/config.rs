//! The `tracking:` section of a configuration.

use std::path::Path;

use longdraft_rules::{Problem, Rules};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where metrics go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Sink {
    /// `events.out.tfevents.*` in the run directory.
    TensorBoard,
    /// A Weights & Biases offline run, uploaded at the end if it can be.
    Wandb,
    /// A SwanLab offline run.
    SwanLab,
    /// An MLflow tracking server.
    Mlflow,
    /// `metrics.jsonl`; written whether it is listed or not, because resuming needs it.
    Jsonl,
}

/// Experiment tracking.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrackingConfig {
    /// Where metrics go.
    pub report_to: Vec<Sink>,
    /// Project that runs are grouped under (W&B, SwanLab).
    pub project: String,
    /// Name of the run (default: the run directory's).
    pub name: Option<String>,
    /// Runs that belong together (W&B, SwanLab).
    pub group: Option<String>,
    /// Labels of the run.
    pub tags: Vec<String>,
    /// Free text about the run.
    pub notes: Option<String>,
    /// Weights & Biases.
    pub wandb: WandbConfig,
    /// SwanLab.
    pub swanlab: SwanLabConfig,
    /// MLflow.
    pub mlflow: MlflowConfig,
}

impl Default for TrackingConfig {
    fn default() -> Self {
        Self {
            report_to: vec![Sink::TensorBoard, Sink::Jsonl],
            project: "longdraft".to_owned(),
            name: None,
            group: None,
            tags: Vec::new(),
            notes: None,
            wandb: WandbConfig::default(),
            swanlab: SwanLabConfig::default(),
            mlflow: MlflowConfig::default(),
        }
    }
}

/// Weights & Biases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WandbConfig {
    /// User or team (default: the account's).
    pub entity: Option<String>,
    /// Run `wandb sync` at the end if `WANDB_API_KEY` is set and the program is installed.
    pub sync: bool,
}

impl Default for WandbConfig {
    fn default() -> Self {
        Self { entity: None, sync: true }
    }
}

/// SwanLab.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SwanLabConfig {
    /// User or organisation (default: the account's).
    pub workspace: Option<String>,
}

/// MLflow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MlflowConfig {
    /// `http://` or `https://` address of the server (default: `MLFLOW_TRACKING_URI`).
    pub uri: Option<String>,
    /// Experiment, created if it does not exist (default: `MLFLOW_EXPERIMENT_NAME`, then `project`).
    pub experiment: Option<String>,
}

impl TrackingConfig {
    /// Everything that makes no sense, by key of this section.
    pub fn problems(&self) -> Vec<Problem> {
        let mut rules = Rules::default();
        // The stricter of the rules of W&B and SwanLab.
        rules.require(
            !self.project.is_empty()
                && self.project.len() <= 100
                && self.project.chars().all(|c| c.is_ascii_alphanumeric() || "-_.+".contains(c)),
            "project",
            "must be 1 to 100 letters, digits, `-`, `_`, `.` or `+`",
        );
        rules.require(
            self.name.as_ref().is_none_or(|name| !name.trim().is_empty()),
            "name",
            "must not be empty",
        );
        rules.require(
            self.tags.iter().all(|tag| (1..=64).contains(&tag.chars().count())),
            "tags",
            "must have 1 to 64 characters each",
        );
        if let Some(uri) = &self.mlflow.uri {
            rules.require(
                uri.starts_with("http://") || uri.starts_with("https://"),
                "mlflow.uri",
                "must start with http:// or https:// (start a server with \
                 `mlflow server`)",
            );
            // The composed configuration is kept beside the run: no secret may be in it.
            rules.require(
                !uri.contains('@'),
                "mlflow.uri",
                "must not hold a password: set MLFLOW_TRACKING_USERNAME and \
                 MLFLOW_TRACKING_PASSWORD",
            );
        }
        rules.into_problems()
    }

    /// Name of a run in `output`.
    pub fn run_name(&self, output: &Path) -> String {
        let folder = || output.file_name().map(|name| name.to_string_lossy().into_owned());
        self.name.clone().or_else(folder).unwrap_or_else(|| "run".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinks_are_spelt_as_their_projects_spell_them() {
        let text = r#"{"report_to": ["tensorboard", "wandb", "swanlab", "mlflow", "jsonl"]}"#;
        let config: TrackingConfig = serde_json::from_str(text).expect("valid");
        assert_eq!(config.report_to.len(), 5);
        assert!(serde_json::from_str::<TrackingConfig>(r#"{"report_to": ["comet"]}"#).is_err());
        assert!(serde_json::from_str::<TrackingConfig>(r#"{"reportto": []}"#).is_err());
    }

    #[test]
    fn every_senseless_value_is_named_at_once() {
        let config = TrackingConfig {
            project: "a/b".to_owned(),
            name: Some(" ".to_owned()),
            tags: vec![String::new()],
            mlflow: MlflowConfig { uri: Some("sqlite://u:p@x".to_owned()), experiment: None },
            ..TrackingConfig::default()
        };
        assert_eq!(config.problems().len(), 5, "{:?}", config.problems());
        assert!(TrackingConfig::default().problems().is_empty());
    }

    #[test]
    fn a_run_is_called_like_its_directory() {
        let mut config = TrackingConfig::default();
        assert_eq!(config.run_name(Path::new("runs/first")), "first");
        assert_eq!(config.run_name(Path::new("/")), "run");
        config.name = Some("other".to_owned());
        assert_eq!(config.run_name(Path::new("runs/first")), "other");
    }
}
