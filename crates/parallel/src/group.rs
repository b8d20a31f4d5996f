//! Some ranks of a world as a world of their own.
//!
//! Its collectives are made of messages between two ranks, so that groups need not wait for each
//! other.

use std::sync::Arc;
use std::time::Duration;

use super::transport::{Transport, Wait};

/// A group of ranks.
pub(super) struct Group {
    world: Arc<dyn Transport>,
    /// Ranks of the world, ascending.
    members: Vec<usize>,
    rank: usize,
}

impl Group {
    /// The group of `members`, of which this process is one.
    pub(super) fn new(world: Arc<dyn Transport>, members: Vec<usize>) -> Self {
        let own = world.rank();
        let rank = members.iter().position(|member| *member == own);
        Self { world, rank: rank.expect("a rank is a member of its group"), members }
    }
}

impl Transport for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn send_receive(&self, to: usize, bytes: &[u8], from: usize, received: &mut [u8]) {
        self.world.send_receive(self.members[to], bytes, self.members[from], received);
    }

    fn abort(&self, code: u8) -> ! {
        self.world.abort(code)
    }

    fn set_timeout(&self, limit: Duration) {
        self.world.set_timeout(limit);
    }

    fn set_patient(&self, is_patient: bool) {
        self.world.set_patient(is_patient);
    }

    fn watched(&self, wait: Wait, among: &[usize], work: &mut dyn FnMut()) {
        let among: Vec<usize> = among.iter().map(|rank| self.members[*rank]).collect();
        self.world.watched(wait, &among, work);
    }
}
