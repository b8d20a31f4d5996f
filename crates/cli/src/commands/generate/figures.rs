//! What an answer came to, in words.

use longdraft_decode::acceptance::AcceptanceMetrics;
use longdraft_decode::{EndReason, Generation};

use crate::cli::PaceChoice;
use crate::terminal::counted;

/// Who proposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drafts {
    /// A draft, perhaps beside lookup.
    Model(PaceChoice),
    /// Lookup alone.
    Lookup,
}

/// Two sentences about an answer.
pub(super) fn summary(generation: &Generation, prompt: usize, drafts: Option<Drafts>) -> String {
    let kept = match generation.reused_tokens {
        0 => String::new(),
        kept => format!(" ({kept} kept from before)"),
    };
    let speed = speed(generation).map_or_else(String::new, |speed| format!("{speed} decoding, "));
    format!(
        "{} after a prompt of {prompt}{kept}{}: {}; {speed}prompt {:.2} s",
        counted(generation.tokens.len(), "token"),
        end(generation),
        drafting(&generation.metrics, drafts),
        generation.prefill_seconds
    )
}

/// A line about an answer.
pub(super) fn line(generation: &Generation, drafts: Option<Drafts>) -> String {
    let metrics = &generation.metrics;
    let tau = match drafts {
        Some(_) if metrics.accepted > 0 => {
            format!(" · {:.2} tokens per target pass", metrics.acceptance_length())
        }
        _ => String::new(),
    };
    let plain = drafts.and_then(|drafts| plain_rounds(metrics, drafts));
    let beside = |part: Option<String>| part.map_or_else(String::new, |part| format!(" · {part}"));
    format!(
        "{}{}{}{tau}{}",
        counted(generation.tokens.len(), "token"),
        end(generation),
        beside(speed(generation)),
        beside(plain)
    )
}

/// Speed after the first token, which comes with the prompt; none if there is no other.
fn speed(generation: &Generation) -> Option<String> {
    (generation.tokens.len() > 1)
        .then(|| format!("{:.1} tok/s", generation.decode_tokens_per_second()))
}

fn end(generation: &Generation) -> &'static str {
    if generation.end == EndReason::Interrupted { ", interrupted" } else { "" }
}

/// What drafting brought.
fn drafting(metrics: &AcceptanceMetrics, drafts: Option<Drafts>) -> String {
    let Some(drafts) = drafts else { return "plain decoding".to_owned() };
    let plain = plain_rounds(metrics, drafts);
    if metrics.nodes == 0 {
        return plain.unwrap_or_else(|| "the prompt's pass gave them all".to_owned());
    }
    let cut = if metrics.cut_rounds > 0 { "; the last pass was cut at the stop" } else { "" };
    let shares: Vec<String> =
        metrics.accepted_share().iter().map(|share| format!("{:.0}", 100.0 * share)).collect();
    format!(
        "tau {:.3} tokens per target pass (its own, and a 1st, 2nd, ... proposal in {} % of the \
         passes){cut}{}",
        metrics.acceptance_length(),
        shares.join(" "),
        plain.map_or_else(String::new, |plain| format!("; {plain}"))
    )
}

/// Why rounds had no proposals, if any had none.
fn plain_rounds(metrics: &AcceptanceMetrics, drafts: Drafts) -> Option<String> {
    let &AcceptanceMetrics { plain_rounds, rounds, .. } = metrics;
    if plain_rounds == 0 {
        return None;
    }
    Some(match drafts {
        Drafts::Model(PaceChoice::Measured) => format!(
            "the draft did not pay (measured) in {plain_rounds} of {rounds} rounds, which were plain"
        ),
        Drafts::Model(PaceChoice::Fixed) => {
            format!("nothing was proposed in {plain_rounds} of {rounds} rounds")
        }
        Drafts::Lookup => {
            format!("nothing to propose was found in {plain_rounds} of {rounds} rounds")
        }
    })
}

#[cfg(test)]
mod tests {
    use longdraft_decode::acceptance::RoundRecord;
    use longdraft_models::TargetTokenId;

    use super::*;

    fn of(rounds: &[(usize, usize)]) -> AcceptanceMetrics {
        let mut metrics = AcceptanceMetrics::default();
        for &(depth, accepted) in rounds {
            let committed = accepted + 1;
            let round =
                RoundRecord { depth, nodes: depth, accepted, committed, ..Default::default() };
            metrics.add_round(&round);
        }
        metrics
    }

    #[test]
    fn a_draft_that_was_left_out_is_not_called_absent() {
        let measured = Some(Drafts::Model(PaceChoice::Measured));
        let told = drafting(&of(&[(0, 0), (0, 0)]), measured);
        assert_eq!(told, "the draft did not pay (measured) in 2 of 2 rounds, which were plain");
        assert_eq!(drafting(&of(&[(0, 0)]), None), "plain decoding");
        let lookup = drafting(&of(&[(0, 0), (2, 1)]), Some(Drafts::Lookup));
        assert!(lookup.ends_with("nothing to propose was found in 1 of 2 rounds"), "{lookup}");
        assert_eq!(drafting(&of(&[]), measured), "the prompt's pass gave them all");
    }

    #[test]
    fn one_token_has_no_speed() {
        let of_tokens = |count: u32| Generation {
            tokens: (0..count).map(TargetTokenId).collect(),
            metrics: of(&[]),
            end: EndReason::TokenLimit,
            reused_tokens: 0,
            prefill_seconds: 0.5,
            decode_seconds: 0.25,
        };
        let told = summary(&of_tokens(1), 7, None);
        assert_eq!(told, "1 token after a prompt of 7: plain decoding; prompt 0.50 s");
        assert_eq!(line(&of_tokens(1), None), "1 token");
        assert_eq!(line(&of_tokens(2), None), "2 tokens · 4.0 tok/s");
        let told = summary(&of_tokens(2), 7, None);
        assert!(told.ends_with("plain decoding; 4.0 tok/s decoding, prompt 0.50 s"), "{told}");
    }

    #[test]
    fn shares_of_the_passes_add_up_to_tau() {
        let metrics = of(&[(2, 2), (2, 1), (0, 0), (2, 0)]);
        let told = drafting(&metrics, Some(Drafts::Model(PaceChoice::Fixed)));
        assert!(told.starts_with("tau 1.750 tokens per target pass"), "{told}");
        assert!(told.contains("proposal in 50 25 % of the passes"), "{told}");
    }
}
