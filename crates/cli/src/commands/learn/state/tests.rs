//! Tests of what was learned so far.

use super::*;

#[test]
fn what_was_learned_belongs_to_a_target_and_to_a_draft() {
    let folder = tempfile::tempdir().expect("folder");
    let open = |target: &str, base: &str| State::open(folder.path(), target, base);
    let mut state = open("target", "draft").expect("fresh");
    state.add(Outcome { draft: Some(3), at: 9, rows_at: 8, ..Outcome::default() });
    state.add(Outcome { at: 12, rows_at: 11, ..Outcome::default() });
    assert_eq!((state.current(), state.trained_until()), (Some(3), 11));
    state.write(folder.path()).expect("written");
    assert_eq!(open("target", "draft").expect("again"), state);
    // Another draft begins anew, and the one before finds what it learned.
    for base in ["", "another"] {
        let other = open("target", base).expect("another draft");
        assert_eq!((other.current(), other.trainings.len()), (None, 2));
        other.write(folder.path()).expect("written");
    }
    assert_eq!(open("target", "draft").expect("again").current(), Some(3));
    assert!(open("another", "draft").is_err());
    // Whatever else another version writes there.
    for (text, problem) in [(r#"{"version": 2, "learned": 7}"#, "(layout 2)"), ("{", "unreadable")]
    {
        std::fs::write(folder.path().join(STATE_FILE), text).expect("file");
        let failure = open("target", "draft").expect_err(problem);
        assert!(failure.message().contains(problem), "{}", failure.message());
        assert!(!failure.hint.expect("a hint").contains("purge"));
    }
    assert_eq!(State::read(folder.path()), None);
}

/// However often a check's outcome is taken, and whatever was learned before it.
#[test]
fn a_learned_draft_rests_until_it_is_better_again() {
    let folder = tempfile::tempdir().expect("folder");
    let open = || State::open(folder.path(), "target", "draft").expect("opened");
    let mut state = open();
    state.add(Outcome { draft: Some(1), rows_at: 5, ..Outcome::default() });
    state.add(Outcome { rows_at: 9, ..Outcome::default() });
    assert_eq!((state.known_until(), state.trained_until()), (5, 9));
    let check = |interval, rested| {
        let rested = Some(rested);
        Outcome { interval, rested, rows_at: 20, ..Outcome::default() }
    };
    // In doubt nothing changes.
    state.add(check((-0.1, 0.2), Origin::Given));
    assert_eq!(state.proposing(), Some(1));
    for _ in 0..2 {
        state.add(check((0.1, 0.2), Origin::Given));
        state.write(folder.path()).expect("written");
        state = open();
        assert_eq!((state.proposes(), state.proposing()), (Origin::Given, None));
        assert_eq!(state.current(), Some(1));
    }
    state.add(check((-0.1, 0.2), Origin::Learned));
    assert_eq!(state.proposing(), None);
    for _ in 0..2 {
        state.add(check((0.1, 0.2), Origin::Learned));
        assert_eq!(state.proposing(), Some(1));
    }
    assert_eq!((state.trainings.len(), state.trained_until()), (2, 9), "no checks");
    // A new one does not rest.
    state.add(check((0.1, 0.2), Origin::Given));
    state.add(Outcome { draft: Some(2), ..Outcome::default() });
    assert_eq!(state.proposing(), Some(2));
}

#[test]
fn a_check_is_told_by_origin() {
    let told = |held_out, rested| {
        let (before, after, interval) = (2.0, 3.0, (0.5, 1.5));
        let outcome = Outcome { held_out, before, after, interval, rested, ..Outcome::default() };
        outcome.told_as_check().map(|check| (check.given, check.learned, check.interval))
    };
    let (given, learned) = (Some(Origin::Given), Some(Origin::Learned));
    assert_eq!(told(LEAST_CHECKED, learned), Some((2.0, 3.0, (0.5, 1.5))));
    assert_eq!(told(LEAST_CHECKED, given), Some((3.0, 2.0, (-1.5, -0.5))));
    assert_eq!(told(LEAST_CHECKED - 1, given), None);
    assert_eq!(told(LEAST_CHECKED, None), None, "a training");
}

#[test]
fn drafts_that_may_propose_again_are_kept_and_others_are_not() {
    let folder = tempfile::tempdir().expect("folder");
    let mut state = State::open(folder.path(), "target", "0").expect("fresh");
    let taken = |number| Outcome { draft: Some(number), ..Outcome::default() };
    for number in 1..=3 {
        state.add(taken(number));
    }
    let kept = |state: &State| (0..20).filter(|n| state.keeps(*n)).collect::<Vec<u32>>();
    assert_eq!(kept(&state), [2, 3]);
    for base in 1..=6 {
        state.base = base.to_string();
        state.add(taken(3 + base));
    }
    assert_eq!(kept(&state), [6, 7, 8, 9]);
    // However long ago it was taken.
    state.base = "3".into();
    assert_eq!(state.current(), Some(6));
    assert_eq!(state.next_number(folder.path()), 10);
    state.forget();
    assert_eq!(state.current(), None);
    assert_eq!(kept(&state), [7, 8, 9]);
}
