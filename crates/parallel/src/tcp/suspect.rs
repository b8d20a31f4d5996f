//! The rank that others wait for, where a wait takes longer than it may.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Job;
use super::link::Kind;

/// How long a rank may take to say whom it waits for.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Questions without an answer that end a patient wait: a busy machine may miss some.
const QUESTIONS: usize = 3;

/// What is known of a rank that others wait for.
#[derive(Debug, PartialEq, Eq)]
enum Suspect {
    /// It answers, and waits for nobody.
    AtWork(usize),
    Silent(usize),
    /// Ranks that wait for each other.
    Circle,
    /// Each answers, and waits for several: in a collective of their devices.
    Unknown,
}

impl Job {
    /// Ends all, for a wait took longer than it may. A patient one goes on while the rank waited for answers.
    pub(super) fn expired(&self, limit: Duration, is_patient: bool) {
        let suspect = self.suspect();
        if is_patient && !self.stays_silent(&suspect) {
            return;
        }
        let who = match suspect {
            Suspect::AtWork(rank) => {
                format!("{}: it works, or hangs", self.name(rank))
            }
            Suspect::Silent(rank) => {
                format!(
                    "{}: its process is stopped, or its machine or a link is gone",
                    self.name(rank)
                )
            }
            Suspect::Circle => "the other ranks: they wait for each other".to_owned(),
            Suspect::Unknown => self.of_devices().to_owned(),
        };
        self.end(&format!("no answer for {:.0} s of {who}", limit.as_secs_f64()))
    }

    /// What is known where all wait for their devices.
    fn of_devices(&self) -> &'static str {
        if self.is_meeting.load(Ordering::Relaxed) {
            "the other ranks: their GPUs look for each other, and do not meet (NCCL_SOCKET_IFNAME \
             names a network that all of their machines share, NCCL_DEBUG=INFO says more)"
        } else {
            "the other ranks: all wait in a collective of their GPUs, of which one, or a link \
             between them, hangs or is gone (NCCL_DEBUG=INFO says more)"
        }
    }

    /// The rank that all wait for in the end: those waited for may wait for others themselves. Each is asked once.
    fn suspect(&self) -> Suspect {
        let mut waited_for = VecDeque::from(self.mail.waits_for());
        // Messages come from one rank. Ranks that all wait for several have lost each other in another way.
        let mut is_chain = waited_for.len() == 1;
        let mut asked = BTreeSet::from([self.rank]);
        while let Some(rank) = waited_for.pop_front() {
            if rank >= self.size() || !asked.insert(rank) {
                continue;
            }
            match self.ask(rank) {
                None => return Suspect::Silent(rank),
                Some(others) if others.is_empty() => return Suspect::AtWork(rank),
                Some(others) => {
                    is_chain &= others.len() == 1;
                    waited_for.extend(others);
                }
            }
        }
        if is_chain { Suspect::Circle } else { Suspect::Unknown }
    }

    /// Whether a rank answers no more, however often it is asked, and this one still waits.
    fn stays_silent(&self, suspect: &Suspect) -> bool {
        let Suspect::Silent(rank) = suspect else { return false };
        let waits = || !self.mail.waits_for().is_empty();
        (1..QUESTIONS).all(|_| waits() && self.ask(*rank).is_none()) && waits()
    }

    /// Whom a rank waits for, if it answers.
    fn ask(&self, rank: usize) -> Option<Vec<usize>> {
        let writer = self.writers[rank].as_ref()?;
        self.mail.forget_answer(rank);
        if !writer.write_within(Kind::Ask, 0, &[], ANSWER_WITHIN) {
            return None;
        }
        self.mail.answer(rank, ANSWER_WITHIN)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::super::super::transport::{Transport, Wait};
    use super::super::tests::of_tcp;
    use super::*;

    #[test]
    fn of_ranks_that_wait_for_several_the_one_that_does_not_come_is_named() {
        // Ranks 0 and 1 wait for 0 to 2, where 2 is at work; 3 belongs to nobody, and is at work, too.
        let (waits, asked) = (Barrier::new(4), Barrier::new(4));
        let suspects = of_tcp(4, |tcp| {
            let mut suspect = None;
            let mut wait = || {
                waits.wait();
                suspect = (tcp.rank() < 2).then(|| tcp.job.suspect());
                asked.wait();
            };
            if tcp.rank() < 2 {
                tcp.watched(Wait::Exchange, &[0, 1, 2], &mut wait);
                assert!(tcp.job.mail.waits_for().is_empty());
            } else {
                wait();
            }
            suspect
        });
        let named: Vec<_> = suspects.into_iter().flatten().collect();
        assert!(matches!(named[..], [Suspect::AtWork(2), Suspect::AtWork(2)]));
    }

    /// Whom the first rank suspects, where each waits for these.
    fn suspect_where(waits_for: &[&[usize]]) -> Suspect {
        let [wait, asked] = [0, 1].map(|_| Barrier::new(waits_for.len()));
        let suspects = of_tcp(waits_for.len(), |tcp| {
            tcp.job.mail.set_waits_for(waits_for[tcp.rank()]);
            wait.wait();
            let suspect = (tcp.rank() == 0).then(|| tcp.job.suspect());
            asked.wait();
            suspect
        });
        suspects.into_iter().flatten().next().expect("the first rank's")
    }

    #[test]
    fn the_rank_is_named_that_the_others_wait_for_in_the_end() {
        assert_eq!(suspect_where(&[&[1], &[2], &[]]), Suspect::AtWork(2));
        // One of several waits for a rank that is none of them.
        assert_eq!(suspect_where(&[&[0, 1], &[2], &[3], &[]]), Suspect::AtWork(3));
        // Nobody waits for rank 1, which is at work.
        assert_eq!(suspect_where(&[&[2], &[], &[2, 3], &[]]), Suspect::AtWork(3));
        assert_eq!(suspect_where(&[&[1], &[2], &[1], &[]]), Suspect::Circle);
        assert_eq!(suspect_where(&[&[0, 1], &[0, 1], &[]]), Suspect::Unknown);
    }

    #[test]
    fn devices_that_do_not_meet_are_told_with_what_helps() {
        of_tcp(2, |tcp| {
            let told = |wait| {
                let mut told = "";
                tcp.watched(wait, &[0, 1], &mut || told = tcp.job.of_devices());
                told
            };
            assert!(told(Wait::Meeting).contains("do not meet (NCCL_SOCKET_IFNAME"));
            assert!(told(Wait::Exchange).contains("in a collective of their GPUs"));
        });
    }

    #[test]
    fn a_patient_wait_goes_on_while_the_rank_waited_for_answers() {
        let [wait, asked] = [0, 1].map(|_| Barrier::new(2));
        let silent = of_tcp(2, |tcp| {
            // Whoever writes to the other one holds the way, as a rank that hangs holds its answers.
            let way = (tcp.rank() == 0).then(|| tcp.job.writers[1].clone().expect("a way"));
            let mut silent = Vec::new();
            for is_held in [false, true] {
                let held = way.as_ref().filter(|_| is_held).map(|way| way.hold());
                wait.wait();
                if tcp.rank() == 1 {
                    tcp.job.mail.set_waits_for(&[0]);
                    let suspect = tcp.job.suspect();
                    silent.push(tcp.job.stays_silent(&suspect));
                    if is_held {
                        // What came meanwhile ended the wait.
                        tcp.job.mail.set_waits_for(&[]);
                        silent.push(tcp.job.stays_silent(&suspect));
                    } else {
                        tcp.job.expired(Duration::from_secs(1), true);
                    }
                }
                asked.wait();
                drop(held);
            }
            silent
        });
        assert_eq!(silent, [vec![], vec![false, true, false]]);
    }
}
