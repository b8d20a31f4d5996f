//! Pictures at several sizes, as text: `UPDATE_PICTURES=1` writes them anew, then look at them.

use longdraft_records::decode::SampleToken;
use longdraft_records::events::{Advance, Answer, FitPhase};
use longdraft_report::Expected;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;

fn phases(now: usize) -> Vec<Phase> {
    let phase = |(index, name): (usize, FitPhase)| Phase {
        name,
        stand: match index.cmp(&now) {
            std::cmp::Ordering::Less => Stand::Done,
            std::cmp::Ordering::Equal => Stand::Now,
            std::cmp::Ordering::Greater => Stand::ToCome,
        },
        spent: (index <= now).then_some(61.0 * (index + 1) as f64),
        planned: (1..4).contains(&index).then_some(300.0),
    };
    FitPhase::WITH_WORK.into_iter().enumerate().map(phase).collect()
}

fn token(text: &str, proposed_by: Option<Origin>) -> SampleToken {
    SampleToken { text: text.to_owned(), proposed_by }
}

/// A fit in a phase.
fn live(now: usize) -> Live {
    let left = Left { seconds: 720.0, low: 600.0, high: 905.0 };
    let is_training = now == 2;
    let answers = Advance { what: "prompts".to_owned(), done: 120, all: 300, ..Advance::default() };
    let steps = Advance { what: "steps".to_owned(), done: 40, all: 100, ..Advance::default() };
    let curve = |from: f64, to: f64| {
        let at = |i: i32| (f64::from(i), to + (from - to) * (-f64::from(i) / 15.0).exp());
        if is_training { (1..=40).map(at).collect() } else { Vec::new() }
    };
    let answer = Answer {
        prompt: "Name three fruits.\u{1b}[2J\u{202e}".to_owned(),
        tokens: vec![
            token("Apples, pears", None),
            token(" and plums", Some(Origin::Lookup)),
            token(".\n\nAnd 日本 \u{7}more", Some(Origin::Draft)),
        ],
    };
    Live {
        name: "smollm2".to_owned(),
        pulse: Pulse::Running,
        phases: phases(now),
        work: Some(if is_training { steps } else { answers }),
        left_of_phase: Some(Left { seconds: 130.0, low: 120.0, high: 140.0 }),
        left: Some(left),
        speed: Some(812.0),
        memory_mib: Some(1536.0),
        loss: curve(9.0, 3.0),
        length: curve(1.0, 1.8),
        positions: if is_training { vec![0.44, 0.3, 0.2, 0.1] } else { Vec::new() },
        positions_are_held_out: true,
        expected: Some((
            Expected { low: 1.2, middle: 1.5, high: 1.8 },
            Expected { low: 1.0, middle: 1.25, high: 1.5 },
        )),
        answer: (!is_training).then_some(answer),
    }
}

fn picture(live: &Live, said: &[String], (columns, rows): (u16, u16)) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a terminal");
    terminal.draw(|frame| draw(frame, live, said)).expect("drawn");
    let text = terminal.backend().to_string();
    // What the backend notes of wide letters follows the closing quote.
    let lines = text.lines().map(|line| line.split("\" Hidden").next().unwrap_or_default());
    let lines = lines.map(|line| line.trim_matches('"').trim_end());
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn pictures_at_several_sizes_are_as_they_were() {
    let said = ["[answers] 12 answers".to_owned(), "warning: \u{1b}[31mred".to_owned()];
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/screen/draw/pictures");
    for (name, now) in [("answers", 1), ("training", 2)] {
        for size in [(120, 36), (80, 24), (40, 16), (30, 8)] {
            let text = picture(&live(now), &said, size);
            let path = format!("{folder}/{name}-{}x{}.txt", size.0, size.1);
            if std::env::var_os("UPDATE_PICTURES").is_some() {
                std::fs::create_dir_all(folder).expect("folder");
                std::fs::write(&path, &text).expect("picture");
            }
            let known = std::fs::read_to_string(&path).expect("UPDATE_PICTURES=1 writes it");
            assert_eq!(text, known, "{path}");
            assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{text}");
        }
    }
}

#[test]
fn no_size_and_no_state_fails() {
    let empty = Live {
        name: String::new(),
        pulse: Pulse::Quiet(1e9),
        phases: Vec::new(),
        work: None,
        left_of_phase: None,
        left: None,
        speed: None,
        memory_mib: None,
        loss: vec![(1.0, 2.0)],
        length: vec![(1.0, 1.0), (2.0, 1.0)],
        positions: vec![2.0, -1.0],
        positions_are_held_out: false,
        expected: None,
        answer: Some(Answer::default()),
    };
    for size in [(1, 1), (2, 3), (10, 5), (30, 8), (71, 13), (300, 90)] {
        for live in [&empty, &live(0), &live(1), &live(2), &live(4), &live(9)] {
            picture(live, &["x".to_owned()], size);
        }
    }
    assert!(picture(&empty, &[], (100, 10)).contains("no sign for"));
}
