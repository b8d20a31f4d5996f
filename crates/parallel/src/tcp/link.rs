//! Frames between two ranks, and where those that came wait to be taken.
//!
//! A thread a peer reads all that comes. So a rank that writes never waits for one that computes, and questions
//! and ends are heard at any time.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Kind, a number and the bytes that follow, little-endian.
const HEADER: usize = 16;
/// Bytes up to which header and data go in one piece.
const ONE_PIECE: usize = 32 << 10;

/// What a peer may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Part of a collective.
    Data,
    /// The peer's work is done, and nothing follows.
    Bye,
    /// All end, with the number as exit code.
    Abort,
    /// Whom does this rank wait for?
    Ask,
    /// For the ranks that follow, none while it works.
    Answer,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Data, Self::Bye, Self::Abort, Self::Ask, Self::Answer];

    fn of(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == code)
    }
}

/// The way to a peer.
pub(super) struct Writer(Mutex<TcpStream>);

impl Writer {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self(Mutex::new(stream))
    }

    /// Writes a frame; waits as long as the peer takes nothing. It fails where the peer is gone.
    pub(super) fn write(&self, kind: Kind, number: u32, data: &[u8]) -> io::Result<()> {
        write(&mut lock(&self.0), kind, number, data)
    }

    /// Writes a frame, if that is possible within a time. No other write is limited by it.
    pub(super) fn write_within(
        &self,
        kind: Kind,
        number: u32,
        data: &[u8],
        limit: Duration,
    ) -> bool {
        let started = Instant::now();
        loop {
            match self.0.try_lock() {
                Ok(mut stream) => {
                    // A closed stream takes no limit, and the write tells that.
                    let _ = stream.set_write_timeout(Some(limit));
                    let is_written = write(&mut stream, kind, number, data).is_ok();
                    let _ = stream.set_write_timeout(None);
                    return is_written;
                }
                Err(TryLockError::Poisoned(_)) => return false,
                Err(TryLockError::WouldBlock) if started.elapsed() > limit => return false,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    pub(super) fn close(&self, way: Shutdown) {
        if let Ok(stream) = self.0.try_lock() {
            // It may be closed.
            let _ = stream.shutdown(way);
        }
    }

    /// Keeps all from writing.
    #[cfg(test)]
    pub(super) fn hold(&self) -> MutexGuard<'_, TcpStream> {
        lock(&self.0)
    }
}

fn write(stream: &mut TcpStream, kind: Kind, number: u32, data: &[u8]) -> io::Result<()> {
    let mut piece =
        Vec::with_capacity(HEADER + if data.len() <= ONE_PIECE { data.len() } else { 0 });
    piece.extend_from_slice(&(kind as u32).to_le_bytes());
    piece.extend_from_slice(&number.to_le_bytes());
    piece.extend_from_slice(&(data.len() as u64).to_le_bytes());
    if data.len() <= ONE_PIECE {
        piece.extend_from_slice(data);
        return stream.write_all(&piece);
    }
    stream.write_all(&piece)?;
    stream.write_all(data)
}

/// A frame; `None` where the stream ends between two.
fn read(stream: &mut TcpStream) -> io::Result<Option<(Kind, u32, Vec<u8>)>> {
    let mut header = [0; HEADER];
    let mut filled = 0;
    while filled < HEADER {
        match stream.read(&mut header[filled..]) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let word = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let kind = Kind::of(word(0)).ok_or(io::ErrorKind::InvalidData)?;
    let length = u64::from(word(8)) | u64::from(word(12)) << 32;
    let mut data = Vec::new();
    let size = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidData)?;
    data.try_reserve_exact(size).map_err(|_| io::ErrorKind::OutOfMemory)?;
    if stream.take(length).read_to_end(&mut data)? < size {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((kind, word(4), data)))
}

/// How a peer's stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// It said that its work is done.
    Done,
    /// Without a word.
    Lost,
}

/// Ranks in a frame.
fn bytes_of(ranks: &[usize]) -> Vec<u8> {
    ranks.iter().flat_map(|rank| (*rank as u32).to_le_bytes()).collect()
}

fn ranks_of(data: &[u8]) -> Vec<usize> {
    let rank = |word: &[u8]| u32::from_le_bytes([word[0], word[1], word[2], word[3]]) as usize;
    data.chunks_exact(size_of::<u32>()).map(rank).collect()
}

struct State {
    /// What came, by peer.
    data: Vec<VecDeque<Vec<u8>>>,
    ended: Vec<Option<Ended>>,
    /// Whom this rank waits for; nobody while it works.
    waits_for: Vec<usize>,
    /// The last answer of each peer: whom it waits for.
    answers: Vec<Option<Vec<usize>>>,
}

/// Where frames of all peers wait.
pub(super) struct Mail {
    state: Mutex<State>,
    changed: Condvar,
}

impl Mail {
    pub(super) fn new(size: usize) -> Self {
        let (data, ended) = (vec![VecDeque::new(); size], vec![None; size]);
        let (waits_for, answers) = (Vec::new(), vec![None; size]);
        let state = State { data, ended, waits_for, answers };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut lock(&self.state));
        self.changed.notify_all();
        result
    }

    /// Puts data there as if a peer had sent it.
    pub(super) fn put(&self, peer: usize, data: Vec<u8>) {
        self.change(|state| state.data[peer].push_back(data));
    }

    /// The next data of a peer. `Err`: a rank that is gone, of which nothing can come any more, or without which the
    /// work cannot end.
    pub(super) fn take(&self, peer: usize) -> Result<Vec<u8>, usize> {
        let mut state = lock(&self.state);
        state.waits_for = vec![peer];
        let taken = loop {
            if let Some(data) = state.data[peer].pop_front() {
                break Ok(data);
            }
            if let Some(lost) = lost(&state, peer) {
                break Err(lost);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.waits_for.clear();
        taken
    }

    /// Tells whom this rank waits for while it takes nothing.
    pub(super) fn set_waits_for(&self, ranks: &[usize]) {
        lock(&self.state).waits_for = ranks.to_vec();
    }

    /// Whom this rank waits for; nobody while it works.
    pub(super) fn waits_for(&self) -> Vec<usize> {
        lock(&self.state).waits_for.clone()
    }

    /// The rank that is to blame where a peer cannot be written to.
    pub(super) fn lost(&self, peer: usize) -> usize {
        lost(&lock(&self.state), peer).unwrap_or(peer)
    }

    /// Forgets a peer's answer, before it is asked.
    pub(super) fn forget_answer(&self, peer: usize) {
        lock(&self.state).answers[peer] = None;
    }

    /// Whom a peer waits for, as it answers within a time.
    pub(super) fn answer(&self, peer: usize, limit: Duration) -> Option<Vec<usize>> {
        let state = lock(&self.state);
        let waited = self.changed.wait_timeout_while(state, limit, |s| s.answers[peer].is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.answers[peer].clone()
    }

    /// Reads all that a peer writes until it ends; `heard` is told what ends this rank, too.
    pub(super) fn read_from(
        &self,
        peer: usize,
        mut stream: TcpStream,
        writer: &Writer,
        heard: &dyn Fn(News),
    ) {
        let ended = loop {
            match read(&mut stream) {
                Ok(Some((Kind::Data, _, data))) => self.put(peer, data),
                Ok(Some((Kind::Bye, ..))) => break Ended::Done,
                Ok(Some((Kind::Abort, code, _))) => {
                    heard(News::Abort(u8::try_from(code).unwrap_or(1)));
                }
                Ok(Some((Kind::Ask, ..))) => {
                    let waits_for = bytes_of(&self.waits_for());
                    writer.write_within(Kind::Answer, 0, &waits_for, ANSWER_WITHIN);
                }
                Ok(Some((Kind::Answer, _, data))) => self.change(|state| {
                    state.answers[peer] = Some(ranks_of(&data));
                }),
                Ok(None) | Err(_) => break Ended::Lost,
            }
        };
        self.change(|state| state.ended[peer] = Some(ended));
        if ended == Ended::Lost {
            return heard(News::Lost);
        }
        // What it still writes is of no use, and must not block it.
        while matches!(stream.read(&mut [0; HEADER]), Ok(1..)) {}
    }
}

/// What a peer's stream told that ends all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// With an exit code.
    Abort(u8),
    /// The peer is gone, without a word.
    Lost,
}

/// How long an answer may take until it can be written.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// A rank that is lost, or the peer itself where it has nothing more to say.
fn lost(state: &State, peer: usize) -> Option<usize> {
    let lost = state.ended.iter().position(|ended| *ended == Some(Ended::Lost));
    lost.or_else(|| state.ended[peer].map(|_| peer))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a peer's stream into the mail, on a thread. It fails where no thread can be started.
pub(super) fn listen(
    peer: usize,
    stream: TcpStream,
    (mail, writer): (&Arc<Mail>, &Arc<Writer>),
    heard: impl Fn(News) + Send + 'static,
) -> io::Result<()> {
    let (mail, writer) = (Arc::clone(mail), Arc::clone(writer));
    let read = move || mail.read_from(peer, stream, &writer, &heard);
    std::thread::Builder::new().name(format!("rank {peer}")).spawn(read).map(drop)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
        (stream, listener.accept().expect("accept").0)
    }

    /// Listens to a stream; the way back.
    fn heard(
        peer: usize,
        stream: TcpStream,
        mail: &Arc<Mail>,
        news: impl Fn(News) + Send + 'static,
    ) -> Arc<Writer> {
        let writer = Arc::new(Writer::new(stream.try_clone().expect("a handle")));
        listen(peer, stream, (mail, &writer), news).expect("a thread");
        writer
    }

    #[test]
    fn frames_of_any_size_arrive_as_they_were() {
        let (near, far) = pair();
        let mail = Arc::new(Mail::new(2));
        heard(1, far, &mail, |_| ());
        let writer = Writer::new(near);
        let sizes = [0, 1, ONE_PIECE, ONE_PIECE + 1, 3 << 20];
        for size in sizes {
            writer.write(Kind::Data, 0, &vec![size as u8; size]).expect("written");
        }
        for size in sizes {
            assert!(mail.take(1) == Ok(vec![size as u8; size]), "{size}");
        }
        writer.write(Kind::Bye, 0, &[]).expect("written");
        assert_eq!(mail.take(1), Err(1));
    }

    #[test]
    fn peers_that_end_without_a_word_or_talk_nonsense_are_lost() {
        for nonsense in [
            &[][..],
            &[9; 5],
            &[9; 40],
            &[0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255],
        ] {
            let (mut near, far) = pair();
            let mail = Arc::new(Mail::new(3));
            let (tell, told) = std::sync::mpsc::channel();
            heard(2, far, &mail, move |news| tell.send(news).expect("heard"));
            near.write_all(nonsense).expect("written");
            drop(near);
            assert_eq!(told.recv_timeout(Duration::from_secs(9)), Ok(News::Lost));
            // Whoever it is that a rank waits for.
            assert_eq!(mail.take(1), Err(2), "{nonsense:?}");
        }
    }

    #[test]
    fn ranks_tell_whom_they_wait_for_while_they_wait() {
        let (near, far) = pair();
        let (one, other) = (Arc::new(Mail::new(3)), Arc::new(Mail::new(3)));
        heard(0, far, &other, |_| ());
        let writer = heard(1, near, &one, |_| ());
        let ask = || {
            one.forget_answer(1);
            assert!(writer.write_within(Kind::Ask, 0, &[], Duration::from_secs(9)));
            one.answer(1, Duration::from_secs(9))
        };
        for ranks in [&[][..], &[2], &[0, 2]] {
            other.set_waits_for(ranks);
            assert_eq!(ask(), Some(ranks.to_vec()));
        }
    }

    #[test]
    fn an_end_for_all_reaches_a_rank_that_computes() {
        let (near, far) = pair();
        let (tell, told) = std::sync::mpsc::channel();
        let mail = Arc::new(Mail::new(2));
        heard(1, far, &mail, move |news| tell.send(news).expect("heard"));
        Writer::new(near).write(Kind::Abort, 7, &[]).expect("written");
        assert_eq!(told.recv_timeout(Duration::from_secs(9)), Ok(News::Abort(7)));
    }
}
