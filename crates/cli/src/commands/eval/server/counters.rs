//! What servers count, in the text format of Prometheus.

use std::collections::BTreeMap;

use super::client::Kind;

/// Counters of vLLM: drafts that were tested, their tokens, and those that were accepted, also by position.
const DRAFTS: &str = "vllm:spec_decode_num_drafts";
const DRAFTED: &str = "vllm:spec_decode_num_draft_tokens";
const ACCEPTED: &str = "vllm:spec_decode_num_accepted_tokens";
const BY_POSITION: &str = "vllm:spec_decode_num_accepted_tokens_per_pos";
/// Tokens of all answers.
const WRITTEN: &str = "vllm:generation_tokens";
/// SGLang's mean of tokens per pass in its last interval.
const LENGTH: &str = "sglang:spec_accept_length";
/// Ending that the text format gives counters.
const TOTAL: &str = "_total";
/// Position that a counter is of.
const POSITION: &str = "position=\"";

/// Values at a time: by name, sums over all other labels, and by position.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Counters {
    sums: BTreeMap<String, (f64, usize)>,
    by_position: BTreeMap<usize, f64>,
}

/// Passes that vLLM counted between two looks.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Counted {
    pub(super) drafts: usize,
    pub(super) proposed: usize,
    pub(super) accepted: usize,
    pub(super) by_position: Vec<usize>,
    /// Tokens of all answers in that time, others' among them; if they are counted.
    pub(super) written: Option<usize>,
}

impl Counters {
    /// Reads a page; lines that are none are left out.
    pub(super) fn read(page: &str) -> Self {
        let mut counters = Self::default();
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, labels, value)) = sample(line) else { continue };
            let name = name.strip_suffix(TOTAL).unwrap_or(name);
            if name == BY_POSITION {
                let position =
                    labels.split_once(POSITION).and_then(|(_, rest)| rest.split_once('"'));
                let Some(position) = position.and_then(|(at, _)| at.parse().ok()) else { continue };
                *counters.by_position.entry(position).or_default() += value;
            } else {
                let (sum, count) = counters.sums.entry(name.to_owned()).or_default();
                *sum += value;
                *count += 1;
            }
        }
        counters
    }

    /// Whose counters these are.
    pub(super) fn kind(&self) -> Kind {
        let begins = |start: &str| self.sums.keys().any(|name| name.starts_with(start));
        if begins("vllm:") {
            Kind::Vllm
        } else if begins("sglang:") {
            Kind::Sglang
        } else if begins("longdraft_") {
            Kind::Longdraft
        } else if begins("llamacpp:") {
            Kind::LlamaCpp
        } else {
            Kind::Unknown
        }
    }

    fn sum(&self, name: &str) -> Option<f64> {
        self.sums.get(name).map(|(sum, _)| *sum)
    }

    /// What vLLM counted since; nothing where it counts no drafts.
    pub(super) fn since(&self, before: &Self) -> Option<Counted> {
        let more = |name: &str| {
            let (now, then) = (self.sum(name)?, before.sum(name).unwrap_or(0.0));
            Some((now - then).max(0.0) as usize)
        };
        let position = |(at, now): (&usize, &f64)| {
            (now - before.by_position.get(at).unwrap_or(&0.0)).max(0.0) as usize
        };
        Some(Counted {
            drafts: more(DRAFTS)?,
            proposed: more(DRAFTED)?,
            accepted: more(ACCEPTED)?,
            by_position: self.by_position.iter().map(position).collect(),
            written: more(WRITTEN),
        })
    }

    /// SGLang's mean of tokens per pass; 0 until it drafted.
    pub(super) fn accept_length(&self) -> Option<f64> {
        self.sums.get(LENGTH).map(|(sum, count)| sum / (*count).max(1) as f64)
    }
}

/// Name, labels and value of a line.
fn sample(line: &str) -> Option<(&str, &str, f64)> {
    let (name, labels, rest) = if let Some((name, rest)) = line.split_once('{') {
        let (labels, rest) = rest.rsplit_once('}')?;
        (name, labels, rest)
    } else {
        let (name, rest) = line.split_once(char::is_whitespace)?;
        (name, "", rest)
    };
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    value.is_finite().then_some((name.trim(), labels, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_over_engines_and_told_by_position() {
        let page = |drafts: usize, accepted: usize| {
            Counters::read(&format!(
                "# HELP vllm:spec_decode_num_drafts_total Number\n\
                 vllm:spec_decode_num_drafts_total{{engine=\"0\",model_name=\"a {{b}}\"}} {drafts}.0\n\
                 vllm:spec_decode_num_drafts_total{{engine=\"1\",model_name=\"a\"}} 1.0\n\
                 vllm:spec_decode_num_draft_tokens_total{{engine=\"0\"}} 1.2e1 1700000000\n\
                 vllm:spec_decode_num_accepted_tokens_total{{engine=\"0\"}} {accepted}\n\
                 vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",position=\"1\"}} 2\n\
                 vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",position=\"0\"}} {accepted}\n\
                 vllm:spec_decode_num_drafts_created{{engine=\"0\"}} 1.7e9\n\
                 rubbish\n{{}}\nnan NaN\n\
                 vllm:generation_tokens_total{{engine=\"0\"}} 40.0\n"
            ))
        };
        let (before, after) = (page(3, 4), page(8, 10));
        assert_eq!(before.kind(), Kind::Vllm);
        let counted = after.since(&before).expect("drafts");
        let want = Counted {
            drafts: 5,
            proposed: 0,
            accepted: 6,
            by_position: vec![6, 0],
            written: Some(0),
        };
        assert_eq!(counted, want);
        // A server that began anew counts nothing backwards.
        assert_eq!(before.since(&after).expect("drafts").drafts, 0);
        assert_eq!(Counters::read("vllm:generation_tokens_total 1").since(&before), None);
        let ranks = "sglang:spec_accept_length{dp_rank=\"0\"} 2.0\nsglang:spec_accept_length{dp_rank=\"1\"} 3.0";
        assert_eq!(Counters::read(ranks).accept_length(), Some(2.5));
        assert_eq!(Counters::read("").kind(), Kind::Unknown);
    }
}
