//! Whether an estimate fits, and what to lower when it does not.

use std::sync::Arc;

use longdraft_features::FeatureMode;
use longdraft_models::ModelError;
use longdraft_models::disk::readable_bytes;
use longdraft_parallel::ZeroStage;
use longdraft_train::TrainError;

use crate::estimate::Estimate;
use crate::workload::Workload;

/// What becomes of an estimate beside free memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the estimate is at most what is free; `None` where that is not known.
    pub fits: Option<bool>,
    /// What to change if it does not, the most effective first. Where free memory is known, only
    /// changes that are enough, if there are any.
    pub remedies: Vec<String>,
    /// Whether each of `remedies` is enough; `None` where that is not known.
    pub is_enough: Option<bool>,
}

/// Changes of a combination at most.
const MOST_CHANGES: usize = 12;

impl Verdict {
    /// An estimate beside `free` bytes; `remedies` lists changes with what the estimate would be then.
    pub fn of(
        estimate: &Estimate,
        free: Option<u64>,
        remedies: impl FnOnce() -> Vec<(String, u64)>,
    ) -> Self {
        let fits = free.map(|free| estimate.bytes() <= free);
        if fits == Some(true) {
            return Self { fits, remedies: Vec::new(), is_enough: None };
        }
        let mut remedies = remedies();
        let enough = |bytes: u64| free.is_some_and(|free| bytes <= free);
        let is_enough = free.map(|_| remedies.iter().any(|(_, bytes)| enough(*bytes)));
        if is_enough == Some(true) {
            remedies.retain(|(_, bytes)| enough(*bytes));
        }
        let text = |(text, bytes)| format!("{text}: {}", readable_bytes(bytes));
        Self { fits, remedies: remedies.into_iter().map(text).collect(), is_enough }
    }
}

impl Workload {
    /// Whether this fits into `free` bytes, with what each change would bring; several together where
    /// none alone is enough.
    pub fn verdict(&self, estimate: &Estimate, free: Option<u64>) -> Verdict {
        Verdict::of(estimate, free, || {
            let single = self.remedies(estimate.bytes());
            match free {
                Some(free) if single.iter().all(|(_, bytes)| *bytes > free) => {
                    self.combination(estimate.bytes(), free).map_or(single, |all| vec![all])
                }
                _ => single,
            }
        })
    }

    /// Changes that make it fit together, the most effective one first at each turn.
    fn combination(&self, mut bytes: u64, free: u64) -> Option<(String, u64)> {
        let mut workload = self.clone();
        let mut taken: Vec<String> = Vec::new();
        let key = |text: &str| text.split('=').next().unwrap_or_default().to_owned();
        for _ in 0..MOST_CHANGES {
            let changes = workload.changes().into_iter();
            let with_bytes = changes.map(|(text, other)| (other.estimate().bytes(), text, other));
            let (lower, text, other) = with_bytes.min_by_key(|(bytes, ..)| *bytes)?;
            if lower >= bytes {
                return None;
            }
            // A value that is halved again stands once.
            taken.retain(|known| key(known) != key(&text));
            taken.push(text);
            (bytes, workload) = (lower, other);
            if bytes <= free {
                return Some((taken.join(" and "), bytes));
            }
        }
        None
    }

    /// Changes that lower the estimate, with what it would be then; the most effective first.
    fn remedies(&self, bytes: u64) -> Vec<(String, u64)> {
        let changes = self.changes().into_iter();
        let with_bytes = changes.map(|(text, other)| (text, other.estimate().bytes()));
        let mut lower: Vec<(String, u64)> = with_bytes.filter(|(_, b)| *b < bytes).collect();
        lower.sort_by_key(|(_, bytes)| *bytes);
        lower
    }

    /// What can be changed, with what the workload is then.
    fn changes(&self) -> Vec<(String, Self)> {
        let mut changes: Vec<(String, Self)> = Vec::new();
        let mut change = |text: String, edit: &dyn Fn(&mut Self)| {
            let mut other = self.clone();
            edit(&mut other);
            changes.push((text, other));
        };
        let half = self.row_tokens / 2;
        if half > 1 {
            change(format!("data.row_tokens={half}"), &|other| other.row_tokens = half);
        }
        if self.own_rows() > 1 {
            let fewer = (self.rows_per_step / 2).max(1);
            change(format!("train.rows_per_step={fewer}"), &|other| other.rows_per_step = fewer);
        }
        if self.features.store().is_none() {
            let text = "train.features=FOLDER after `longdraft capture` (no layers of the target)";
            change(text.to_owned(), &|other| {
                other.features = FeatureMode::Stored("FOLDER".to_owned());
                other.layers = longdraft_models::target_model::Layers::None;
            });
        }
        for (text, draft) in self.draft.changes() {
            change(text, &|other| other.draft = Arc::clone(&draft));
        }
        if self.layout.ranks > 1 && self.zero == ZeroStage::Replicated {
            change("parallel.zero=1".to_owned(), &|other| other.zero = ZeroStage::OptimizerState);
        }
        if self.layout.ranks > 1 && self.zero != ZeroStage::Weights && self.tensor() == 1 {
            change("parallel.zero=3".to_owned(), &|other| other.zero = ZeroStage::Weights);
        }
        let fits = |tensor: &usize| *tensor > 1 && self.layout.ranks.is_multiple_of(*tensor);
        let shared = self.target.sharing_ranks().into_iter().rfind(fits);
        let whole_rows = self.zero != ZeroStage::Weights && self.parts() == 1;
        if let Some(tensor) = shared.filter(|_| whole_rows && self.features.store().is_none()) {
            change(format!("parallel.tensor={tensor}"), &|other| other.layout.tensor = tensor);
        }
        changes
    }
}

/// A device or the machine has no memory left.
#[derive(Debug, thiserror::Error)]
#[error("out of memory: {cause}; the run needs about {needed}")]
pub struct OutOfMemory {
    /// What the device said.
    cause: String,
    needed: String,
    /// What to lower, the most effective first.
    pub remedies: Vec<String>,
}

/// Of an allocation that failed on a device, the error that says what was estimated, what takes most, and
/// what to lower; `None` of other errors. `free` is what was free before the run.
pub fn explain(error: &TrainError, workload: &Workload, free: Option<u64>) -> Option<OutOfMemory> {
    let TrainError::Model(ModelError::DeviceMemory { source }) = error else { return None };
    let estimate = workload.estimate();
    let remedies = Verdict::of(&estimate, None, || workload.remedies(estimate.bytes())).remedies;
    let peak = estimate.peak();
    let mut items = peak.items.clone();
    items.retain(|item| item.place == estimate.place);
    items.sort_by_key(|item| std::cmp::Reverse(item.bytes));
    let most: Vec<String> = items
        .iter()
        .take(3)
        .map(|item| format!("{} {}", item.name, readable_bytes(item.bytes)))
        .collect();
    let free = free.map_or_else(String::new, |free| format!(" of {} free", readable_bytes(free)));
    Some(OutOfMemory {
        cause: source.to_string(),
        needed: format!(
            "{}{free}, most of it in the {} phase: {}",
            readable_bytes(estimate.bytes()),
            peak.name,
            most.join(", ")
        ),
        remedies,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Layout, sample};

    fn workload(ranks: usize) -> Workload {
        let given = json!({ "data": { "row_tokens": 8192 }, "train": { "rows_per_step": 16 } });
        sample::workload("eagle3", &given, Layout::of(ranks, 1))
    }

    #[test]
    fn a_failed_allocation_says_what_was_needed_and_what_to_lower() {
        let driver = candle_core::Error::Msg("CUDA_ERROR_OUT_OF_MEMORY".into());
        let error = explain(&TrainError::from(driver), &workload(1), Some(80 << 30));
        let error = error.expect("a device without memory");
        let text = error.to_string();
        assert!(
            text.starts_with("out of memory: CUDA_ERROR_OUT_OF_MEMORY; the run needs about "),
            "{text}"
        );
        assert!(text.contains(" of 80.0 GiB free, most of it in the "), "{text}");
        let remedies = error.remedies;
        for wanted in
            ["data.row_tokens=4096: ", "train.features=FOLDER", "oov_rows=keep", "ttt_steps=4"]
        {
            assert!(remedies.iter().any(|r| r.contains(wanted)), "{wanted}: {remedies:?}");
        }
        assert!(!remedies.iter().any(|r| r.contains("parallel.zero")), "one rank: {remedies:?}");
        let other = candle_core::Error::Msg("shapes differ".into());
        assert!(explain(&TrainError::from(other), &workload(1), None).is_none());
    }

    #[test]
    fn remedies_come_by_what_they_bring_and_only_where_needed() {
        let workload = workload(4);
        let estimate = workload.estimate();
        let lower = workload.remedies(estimate.bytes());
        assert!(lower.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{lower:?}");
        assert!(lower.iter().all(|(_, bytes)| *bytes < estimate.bytes()), "{lower:?}");
        for sharing in ["parallel.zero=3", "parallel.tensor=4"] {
            assert!(lower.iter().any(|(text, _)| text == sharing), "{lower:?}");
        }
        let fits = workload.verdict(&estimate, Some(estimate.bytes()));
        assert_eq!(fits, Verdict { fits: Some(true), remedies: Vec::new(), is_enough: None });
        let tight = workload.verdict(&estimate, Some(estimate.bytes() - 1));
        assert_eq!((tight.fits, tight.remedies.len()), (Some(false), lower.len()));
        assert_eq!(tight.is_enough, Some(true));
        let unknown = workload.verdict(&estimate, None);
        assert_eq!((unknown.fits, unknown.is_enough), (None, None));
    }

    #[test]
    fn advice_is_enough_or_says_that_it_is_not() {
        let workload = workload(1);
        let estimate = workload.estimate();
        let single = workload.remedies(estimate.bytes());
        let (best, second) = (single[0].1, single[1].1);
        // Room for the best change alone: nothing else is told.
        let narrow = workload.verdict(&estimate, Some(best));
        assert!(best < second && narrow.remedies.len() == 1, "{narrow:?}");
        assert!(narrow.remedies[0].starts_with(&single[0].0) && narrow.is_enough == Some(true));
        // Room for several together.
        let together = workload.verdict(&estimate, Some(best - 1));
        assert_eq!((together.remedies.len(), together.is_enough), (1, Some(true)), "{together:?}");
        assert!(together.remedies[0].contains(" and "), "{together:?}");
        // Room for nothing.
        let nothing = workload.verdict(&estimate, Some(1));
        assert_eq!((nothing.remedies.len(), nothing.is_enough), (single.len(), Some(false)));
    }
}
