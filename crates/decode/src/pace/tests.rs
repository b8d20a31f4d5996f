//! Rounds of simulated requests: what a draft or lookup costs and brings.

use longdraft_models::TargetTokenId;

use super::*;
use crate::acceptance::RoundSeconds;
use crate::drafter::{Match, MatchClass};

/// What drafting costs in plain steps: each of 4 levels, or a block of 8 slots.
#[derive(Clone, Copy)]
enum Cost {
    Level(f64),
    Block(f64),
}

/// Has a pace learn from a round of one request alone.
fn learn(pace: &mut Pace, record: &RoundRecord, proposals: &Proposals) {
    let pass = Pass { seconds: record.seconds.verify, nodes: record.nodes };
    pace.add_pass(&pass);
    pace.add((record, &pass), proposals);
}

fn teach(costs: &mut Costs, record: &RoundRecord, proposals: &Proposals) {
    let pass = Pass { seconds: record.seconds.verify, nodes: record.nodes };
    costs.add_pass(&pass);
    costs.add((record, &pass), proposals);
}

/// What decoding came to.
struct Outcome {
    /// Seconds a token, of which plain decoding takes 1.
    time: f64,
    /// Tokens that were verified in the rounds that drafted.
    depths: Vec<usize>,
}

/// Decodes `tokens` tokens when every proposal at each depth is accepted with the given regular
/// pattern. Of a block as much is verified as pays.
fn decode(tokens: usize, cost: Cost, row: f64, accepts: impl Fn(usize) -> usize) -> Outcome {
    let mut pace = Pace::default();
    let (mut done, mut time, mut depths) = (0, 0.0, Vec::new());
    while done < tokens {
        let mode = pace.mode(false);
        let mut record = RoundRecord { committed: 1, ..RoundRecord::default() };
        let mut proposals = Proposals::default();
        record.seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
        if mode == Mode::Draft {
            let (depth, draft, drafted) = match cost {
                Cost::Level(level) => (4, 4.0 * level, Drafted::Levels(4)),
                Cost::Block(pass) => {
                    (pace.cut(&DraftShape::Chain { length: 8 }).depth(), pass, Drafted::Block)
                }
            };
            record.accepted = accepts(depths.len()).min(depth);
            record.committed = record.accepted + 1;
            (record.depth, record.nodes) = (depth, depth);
            record.seconds.draft = draft;
            record.seconds.verify += row * depth as f64;
            proposals.drafted = drafted;
            depths.push(depth);
        }
        done += record.committed;
        time += record.seconds.total();
        learn(&mut pace, &record, &proposals);
    }
    Outcome { time: time / done as f64, depths }
}

fn simulate(tokens: usize, level: f64, row: f64, accepts: impl Fn(usize) -> usize) -> f64 {
    decode(tokens, Cost::Level(level), row, accepts).time
}

#[test]
fn an_untrained_block_is_soon_left_for_plain_steps() {
    for (pass, row, most) in [(0.05, 0.02, 90), (0.3, 0.05, 25), (1.0, 0.1, 12), (2.0, 0.2, 8)] {
        let Outcome { time, depths } = decode(256, Cost::Block(pass), row, |_| 0);
        assert!(time < 1.05 && depths.len() < most, "{pass} {row}: {time} {}", depths.len());
        // Trials become rare.
        let Outcome { time, depths } = decode(4096, Cost::Block(pass), row, |_| 0);
        assert!(time < 1.01 && depths.len() < 3 * most, "{pass} {row}: {time} {}", depths.len());
    }
}

#[test]
fn a_block_is_verified_as_far_as_its_rows_pay() {
    let accepts = |round: usize| [8, 3, 5, 1, 8][round % 5];
    let last = |row| {
        let Outcome { time, depths } = decode(2000, Cost::Block(0.5), row, accepts);
        assert!(time < 1.0, "{row}: {time}");
        depths[depths.len() - 1]
    };
    // The pass is the same: only rows of the target tell how many slots to verify.
    let (cheap, dear) = (last(0.01), last(0.3));
    assert!(cheap == 8 && dear < 6, "{cheap} {dear}");
}

#[test]
fn a_useless_draft_costs_less_than_five_percent() {
    for (level, row) in [(0.05, 0.02), (0.2, 0.1), (0.3, 0.2), (0.5, 0.3)] {
        let time = simulate(256, level, row, |_| 0);
        assert!(time < 1.05, "{level} {row}: {time}");
    }
}

#[test]
fn a_good_draft_keeps_nearly_all_of_its_gain() {
    let accepts = |round: usize| [3, 1, 4, 0, 2][round % 5];
    // 3 tokens for 1.6 plain steps.
    let ideal = (1.0 + 4.0 * 0.15) / 3.0;
    assert!(simulate(2000, 0.1, 0.05, accepts) < ideal / 0.9);
}

#[test]
fn drafting_comes_back_when_it_pays_again() {
    let accepts = |round: usize| if round < 6 { 0 } else { 4 };
    assert!(simulate(4000, 0.1, 0.05, accepts) < 0.5);
}

#[test]
fn depth_follows_acceptance_and_cost() {
    let mut costs = Costs::default();
    assert_eq!(costs.best_depth(6), 6);
    let mut taught = |accepted, level: f64| {
        for _ in 0..100 {
            let seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
            let plain = RoundRecord { committed: 1, seconds, ..RoundRecord::default() };
            teach(&mut costs, &plain, &Proposals::default());
            let seconds = RoundSeconds { draft: 6.0 * level, verify: 1.3, rest: 0.0 };
            let round = RoundRecord {
                depth: 6,
                nodes: 6,
                accepted,
                committed: accepted + 1,
                seconds,
                ..RoundRecord::default()
            };
            let predicted = Some(0.5);
            let proposals = Proposals { drafted: Drafted::Levels(6), predicted };
            teach(&mut costs, &round, &proposals);
        }
        (costs.best_depth(6), costs.worth().expect("measured"))
    };
    let (shallow, _) = taught(0, 0.2);
    let (deep, worth) = taught(6, 0.05);
    assert!(shallow == 1 && deep == 6, "{shallow} {deep}");
    assert!(worth.calibration > 1.5 && worth.node < 0.5, "{worth:?}");
}

#[test]
fn a_block_costs_its_pass_whatever_its_depth() {
    let taught = |drafted, draft: f64| {
        let mut costs = Costs::default();
        for _ in 0..100 {
            let seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
            let plain = RoundRecord { committed: 1, seconds, ..RoundRecord::default() };
            teach(&mut costs, &plain, &Proposals::default());
            let seconds = RoundSeconds { draft, verify: 1.06, rest: 0.0 };
            let (depth, nodes, accepted, committed) = (6, 6, 3, 4);
            let round =
                RoundRecord { depth, nodes, accepted, committed, seconds, ..Default::default() };
            teach(&mut costs, &round, &Proposals { drafted, ..Proposals::default() });
        }
        (costs.best_depth(6), costs.worth().expect("measured").level)
    };
    // The same seconds: a sixth of them a level, or all of them once.
    let (by_level, level) = taught(Drafted::Levels(6), 1.2);
    let (at_once, free) = taught(Drafted::Block, 1.2);
    assert!(at_once >= by_level && free < 0.5 * level, "{by_level} {at_once} {level} {free}");
}

/// Decodes with lookup, beside a draft that never pays, where `together` decode, all alike: of what was found
/// the first `good` tokens hold in every `one_in`th round, of each request at another time. A proposal more
/// takes `row` of a plain step, and any at all `jump`. Tokens of each for a plain step's time in the last
/// half, proposals of each round, and rounds of the draft.
fn look_up(
    together: usize,
    (good, one_in): (usize, usize),
    (jump, row): (f64, f64),
) -> (f64, f64, usize) {
    let mut paces = Paces::default();
    let class = MatchClass::of_text(3);
    let (mut tokens, mut seconds, mut nodes, mut drafted) = (0, 0.0, 0, 0);
    let rounds = 600;
    for number in 0..rounds {
        let pace = paces.of(together);
        let (mut pass, mut records) = (Pass { seconds: 1.0, nodes: 0 }, Vec::new());
        for request in 0..together {
            let mut record = RoundRecord { committed: 1, ..RoundRecord::default() };
            let mut proposals = Proposals::default();
            let holds = if (number + request) % one_in == 0 { good } else { 0 };
            let mode = pace.mode(false);
            if mode != Mode::Plain {
                let found = Match { class, continuation: vec![TargetTokenId(1); 6] };
                let kept = found.worthy(pace.worth().as_ref()).continuation.len();
                let accepted = kept.min(holds);
                (record.nodes, record.depth, record.accepted) = (kept, kept, accepted);
                record.committed = accepted + 1;
                pace.add_lookup(LookedUp { class, tested: (holds + 1).min(6), held: holds });
            }
            if mode == Mode::Draft {
                (proposals.drafted, record.seconds.draft) = (Drafted::Levels(4), 4.0);
                drafted += 1;
            }
            pass.nodes += record.nodes;
            records.push((record, proposals));
        }
        if pass.nodes > 0 {
            pass.seconds += jump + row * pass.nodes as f64;
        }
        pace.add_pass(&pass);
        let is_late = 2 * number >= rounds;
        seconds += if is_late { pass.seconds } else { 0.0 };
        for (record, proposals) in records {
            pace.add((&record, &pass), &proposals);
            if is_late {
                tokens += record.committed;
                nodes += record.nodes;
                seconds += record.seconds.draft;
            }
        }
    }
    let of_each = |count: usize| count as f64 / together as f64;
    (of_each(tokens) / seconds, of_each(nodes) / f64::from(rounds as u32 / 2), drafted)
}

#[test]
fn lookup_goes_on_while_a_useless_draft_rests_and_is_cut_to_what_holds() {
    let (speed, nodes, drafted) = look_up(1, (2, 1), (0.0, 0.1));
    // Three tokens in the time of a step and two rows.
    assert!(speed > 2.3 && nodes < 2.2 && drafted < 40, "{speed} {nodes} {drafted}");
}

#[test]
fn lookup_that_seldom_holds_costs_nothing_to_speak_of() {
    for (holds, costs) in [((0, 1), (0.0, 0.1)), ((1, 8), (0.15, 0.05)), ((1, 5), (0.3, 0.1))] {
        for together in [1, 4, 16] {
            let (speed, _, drafted) = look_up(together, holds, costs);
            assert!(speed > 0.96, "{together} {holds:?} {costs:?}: {speed}");
            // One request tries the draft, not all of them at once.
            assert!(drafted < 8, "{together} {holds:?} {costs:?}: {drafted}");
        }
    }
}

#[test]
fn lookup_comes_back_when_it_holds_again() {
    let mut pace = Pace::default();
    let class = MatchClass::of_text(2);
    for _ in 0..3 {
        let seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
        let plain = RoundRecord { committed: 1, seconds, ..RoundRecord::default() };
        learn(&mut pace, &plain, &Proposals::default());
    }
    let mut proposed_after = |held, times| {
        (0..times).for_each(|_| pace.add_lookup(LookedUp { class, tested: 1, held }));
        let found = Match { class, continuation: vec![TargetTokenId(1)] };
        !found.worthy(pace.worth().as_ref()).continuation.is_empty()
    };
    assert!(proposed_after(1, 0) && !proposed_after(0, 60) && proposed_after(1, 8));
}

#[test]
fn many_requests_together_propose_only_what_is_sure() {
    // A row takes a twentieth of the pass: worth it for one, not for what all wait for.
    let of = |together, one_in| look_up(together, (1, one_in), (0.0, 0.05));
    let (alone, among, sure) = (of(1, 3), of(16, 3), of(16, 1));
    assert!(alone.1 > 0.9 && alone.0 > 1.2, "{alone:?}");
    assert!(among.1 < 0.1 && among.0 > 0.97, "{among:?}");
    assert!(sure.1 > 0.9 && sure.0 > 1.05, "{sure:?}");
}

/// Decodes where `together` decode with a chain of 4, of which `accepted(request)` tokens hold. Its levels
/// take `draft` plain steps, for all in passes that they share, or for each. A row takes a hundredth of a step.
/// Tokens of each for a plain step's time, and the share of rounds that drafted.
fn draft_together(
    together: usize,
    accepted: impl Fn(usize) -> usize,
    draft: f64,
    shares: bool,
) -> (f64, f64) {
    draft_in_rounds(&[together; 400], accepted, draft, shares)
}

/// The same where each round has another number of requests.
fn draft_in_rounds(
    rounds: &[usize],
    accepted: impl Fn(usize) -> usize,
    draft: f64,
    shares: bool,
) -> (f64, f64) {
    let mut paces = Paces::default();
    let (mut steps, mut seconds, mut drafted) = (0.0, 0.0, 0);
    for &together in rounds {
        let pace = paces.of(together);
        let modes: Vec<Mode> = (0..together).map(|_| pace.mode(shares)).collect();
        let drafting = modes.iter().filter(|mode| **mode == Mode::Draft).count();
        let parts = if shares { drafting.max(1) } else { 1 };
        let pass = Pass { seconds: 1.0 + 0.01 * (4 * drafting) as f64, nodes: 4 * drafting };
        pace.add_pass(&pass);
        seconds += pass.seconds + draft * drafting as f64 / parts as f64;
        drafted += usize::from(drafting > 0);
        let mut tokens = 0;
        for (request, mode) in modes.into_iter().enumerate() {
            let mut record = RoundRecord { committed: 1, ..RoundRecord::default() };
            let mut proposals = Proposals::default();
            if mode == Mode::Draft {
                (record.depth, record.nodes, record.accepted) = (4, 4, accepted(request));
                record.committed = record.accepted + 1;
                record.seconds.draft = draft / parts as f64;
                proposals.drafted = Drafted::Levels(4);
            }
            tokens += record.committed;
            pace.add((&record, &pass), &proposals);
        }
        steps += tokens as f64 / together as f64;
    }
    (steps / seconds, drafted as f64 / rounds.len() as f64)
}

#[test]
fn a_draft_whose_passes_are_shared_pays_where_it_would_not_for_each() {
    for together in [2, 4, 8] {
        let [shared, of_each] =
            [true, false].map(|shares| draft_together(together, |_| 2, 0.9, shares).0);
        assert!(shared > 1.1, "{together}: {shared}");
        assert!(together < 4 || (0.95..1.0).contains(&of_each), "{together}: {of_each}");
    }
}

#[test]
fn a_useless_draft_costs_little_where_its_passes_are_shared() {
    for (together, draft) in [(2, 0.3), (8, 0.3), (8, 1.0), (16, 2.0)] {
        let (speed, _) = draft_together(together, |_| 0, draft, true);
        assert!(speed > 0.97, "{together} {draft}: {speed}");
    }
}

#[test]
fn a_shared_draft_that_pays_goes_on_though_some_requests_lose() {
    // The lucky ones first, then the others.
    for accepted in [[4, 4, 4, 4, 0, 0, 0, 0], [0, 0, 0, 0, 4, 4, 4, 4]] {
        let (speed, drafted) = draft_together(8, |request| accepted[request], 0.5, true);
        assert!(speed > 1.5 && drafted > 0.9, "{accepted:?}: {speed} {drafted}");
    }
}

#[test]
fn a_useless_draft_costs_little_while_requests_come_and_go() {
    for (most, draft) in [(8, 0.3), (8, 0.6), (64, 0.6), (64, 1.0)] {
        // All at once, 150 tokens of each; then they end one after another.
        let mut rounds = vec![most; 150];
        rounds.extend((1..most).rev().flat_map(|left| [left; 4]));
        let (speed, _) = draft_in_rounds(&rounds, |_| 0, draft, true);
        assert!(speed > 0.96, "{most} {draft}: {speed}");
    }
}

#[test]
fn a_draft_that_pays_for_few_is_found_after_it_did_not_for_many() {
    // Of 8 it is verified in vain; alone it holds.
    let mut paces = Paces::default();
    let mut drafted = [0, 0];
    for (part, together) in [(0, 8), (1, 1)] {
        for _ in 0..100 {
            let pace = paces.of(together);
            let is_drafted = pace.mode(true) == Mode::Draft;
            drafted[part] += usize::from(is_drafted);
            let nodes = if is_drafted { 4 } else { 0 };
            let pass = Pass { seconds: 1.0 + 0.01 * nodes as f64, nodes };
            pace.add_pass(&pass);
            let accepted = if part == 1 { nodes } else { 0 };
            let mut record = RoundRecord { committed: accepted + 1, ..RoundRecord::default() };
            (record.depth, record.nodes, record.accepted) = (nodes, nodes, accepted);
            record.seconds.draft = if is_drafted { 0.5 } else { 0.0 };
            let drafted = if is_drafted { Drafted::Levels(4) } else { Drafted::Nothing };
            let proposals = Proposals { drafted, ..Proposals::default() };
            pace.add((&record, &pass), &proposals);
        }
    }
    assert!(drafted[0] < 20 && drafted[1] > 90, "{drafted:?}");
}

/// Beside one whose grammar forces a token in every round, so that no pass is a plain step.
#[test]
fn a_plain_step_is_waited_for_a_few_rounds_only() {
    for steps in [0, 3] {
        let mut pace = Pace::default();
        let seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
        let plain = RoundRecord { committed: 1, seconds, ..RoundRecord::default() };
        (0..steps).for_each(|_| learn(&mut pace, &plain, &Proposals::default()));
        let mut drafted = 0;
        for _ in 0..300 {
            let mut record = RoundRecord { committed: 1, ..RoundRecord::default() };
            let mut proposals = Proposals::default();
            if pace.mode(true) == Mode::Draft {
                (record.depth, record.nodes, record.accepted, record.committed) = (4, 4, 4, 5);
                record.seconds.draft = 0.2;
                proposals.drafted = Drafted::Levels(4);
                drafted += 1;
            }
            let nodes = record.nodes + 1;
            let pass = Pass { seconds: 1.0 + 0.01 * nodes as f64, nodes };
            pace.add_pass(&pass);
            pace.add((&record, &pass), &proposals);
        }
        // Some rounds in each 64 wait for it.
        assert!((270..290).contains(&drafted), "{steps}: {drafted}");
    }
}
