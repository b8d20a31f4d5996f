//! Some ranks of a world as a world of their own.
//!
//! Its collectives are made of messages between two ranks, so that groups need not wait for each
//! other. Blocks travel in rings: every rank sends and receives each block once, which is what the
//! best all-gather needs.

use std::sync::Arc;
use std::time::Duration;

use super::transport::Transport;

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

    /// The member `steps` before this one in the ring.
    fn ahead(&self, steps: usize) -> usize {
        (self.rank + steps) % self.members.len()
    }

    /// The member `steps` before this one.
    fn before_in_ring(&self, steps: usize) -> usize {
        (self.rank + self.members.len() - steps) % self.members.len()
    }
}

/// Where each block begins.
fn starts(lengths: &[usize]) -> Vec<usize> {
    let starts = lengths.iter().scan(0, |end, length| {
        let start = *end;
        *end += length;
        Some(start)
    });
    starts.collect()
}

impl Transport for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn barrier(&self) {
        self.all_gather(&[0], &mut vec![0; self.size()]);
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) {
        let mut all = vec![0; bytes.len() * self.size()];
        self.all_gather(bytes, &mut all);
        bytes.copy_from_slice(&all[root * bytes.len()..][..bytes.len()]);
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) {
        let size = own.len();
        all[self.rank * size..][..size].copy_from_slice(own);
        let mut block = own.to_vec();
        for step in 1..self.size() {
            let mut received = vec![0; size];
            let (to, from) = (self.members[self.ahead(1)], self.members[self.before_in_ring(1)]);
            self.world.send_receive(to, &block, from, &mut received);
            all[self.before_in_ring(step) * size..][..size].copy_from_slice(&received);
            block = received;
        }
    }

    fn all_to_all(&self, bytes: &[u8], send: &[usize], received: &mut [u8], receive: &[usize]) {
        let (out, into) = (starts(send), starts(receive));
        for step in 0..self.size() {
            let (to, from) = (self.ahead(step), self.before_in_ring(step));
            let sent = &bytes[out[to]..][..send[to]];
            let place = &mut received[into[from]..][..receive[from]];
            if step == 0 {
                place.copy_from_slice(sent);
            } else {
                self.world.send_receive(self.members[to], sent, self.members[from], place);
            }
        }
    }

    fn sum_blocks(&self, values: &[f32], own: &mut [f32]) {
        let block = size_of_val(own);
        let mut received = vec![0.0_f32; values.len()];
        self.all_to_all(
            bytemuck::cast_slice(values),
            &vec![block; self.size()],
            bytemuck::cast_slice_mut(&mut received),
            &vec![block; self.size()],
        );
        own.fill(0.0);
        for values in received.chunks(own.len().max(1)) {
            own.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
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

    fn watched(&self, work: &mut dyn FnMut()) {
        self.world.watched(work);
    }
}
