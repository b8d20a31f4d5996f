//! Which prompts are set aside.

use std::collections::HashSet;

use longdraft_models::sha256;

use super::Asked;
use super::wording::normalised;

/// Prompts that prove the result: at most, and at most this part of all. Where groups give fewer than so many, every
/// prompt is a group of its own.
pub(super) const MOST_HELD_OUT: usize = 32;
const HELD_OUT_PART: usize = 4;
const FEW_HELD_OUT: usize = 8;

/// The groups whose names have the smallest hashes are set aside, so that the choice depends on nothing
/// else; then the rest in the order of their hashes. What is set aside is at most a part of all prompts: groups that
/// are too large for that are learned from. Where hardly any group is small enough, prompts are parted one by one.
pub(super) fn part(prompts: Vec<Asked>) -> (Vec<Asked>, Vec<Asked>) {
    let most = (prompts.len() / HELD_OUT_PART).max(1);
    let wanted = most.min(MOST_HELD_OUT);
    let hash = |text: &str| sha256::of_text(&normalised(text));
    let mut hashed: Vec<Hashed> = prompts
        .into_iter()
        .map(|asked| Hashed { group: hash(&asked.group), text: hash(&asked.text()), asked })
        .collect();
    let mut aside = groups_aside(&mut hashed, most, wanted);
    if aside.len() < wanted.min(FEW_HELD_OUT) {
        hashed.iter_mut().for_each(|prompt| prompt.group.clone_from(&prompt.text));
        aside = groups_aside(&mut hashed, most, wanted);
    }
    let (mut held_out, mut training) = (Vec::new(), Vec::new());
    let mut last = String::new();
    for prompt in hashed {
        if !aside.contains(&prompt.group) {
            training.push(prompt);
        } else if prompt.group != last {
            // Of a group that is set aside one prompt proves as much as all.
            held_out.push(prompt.asked);
            last = prompt.group;
        }
    }
    training.sort_by(|a, b| a.text.cmp(&b.text));
    (held_out, training.into_iter().map(|prompt| prompt.asked).collect())
}

/// A prompt with the hashes of its group's name and of its text.
struct Hashed {
    group: String,
    text: String,
    asked: Asked,
}

/// Sorts prompts by their hashes; returns the first groups that hold at most `most` prompts together, at most
/// `wanted` of them.
fn groups_aside(prompts: &mut [Hashed], most: usize, wanted: usize) -> HashSet<String> {
    prompts.sort_by(|a, b| (&a.group, &a.text).cmp(&(&b.group, &b.text)));
    let (mut aside, mut held) = (HashSet::new(), 0);
    for group in prompts.chunk_by(|a, b| a.group == b.group) {
        if aside.len() < wanted && held + group.len() <= most {
            held += group.len();
            aside.insert(group[0].group.clone());
        }
    }
    aside
}
