//! What ranks say when they meet: who they are, and whether they are welcome.
//!
//! Words are JSON after their length. Whoever says anything else is sent away, or not heard for long.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{ParallelError, Result};
use crate::launcher::Place;

/// Longest time until all ranks have come: clusters start machines one after the other.
pub(super) const LONGEST: Duration = Duration::from_mins(10);
/// Time after which the first rank tells for whom it waits.
const PATIENT: Duration = Duration::from_secs(20);
/// Time that one who connects has to say who it is.
pub(super) const POLITE: Duration = Duration::from_secs(5);
/// Between two looks at who came.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Guests that are heard at a time.
const CROWD: usize = 256;
/// Bytes of a greeting at most.
const LONGEST_HELLO: usize = 4 << 10;

/// Who a rank is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    program: String,
    job: String,
    pub(super) rank: usize,
    size: usize,
    pub(super) host: String,
    /// Where it takes ranks above it.
    pub(super) port: u16,
}

/// What a rank that was come to says of it.
#[derive(Debug, Serialize, Deserialize)]
enum Welcome {
    Come,
    /// Another job's ranks meet here.
    Elsewhere,
    Refused(String),
}

/// Looks whether those that are waited for can still come.
pub(super) type Watcher<'a> = &'a mut dyn FnMut() -> Result<()>;

pub(super) fn hello(place: &Place, port: u16) -> Hello {
    Hello {
        program: concat!("longdraft ", env!("CARGO_PKG_VERSION")).to_owned(),
        job: place.job.clone(),
        rank: place.rank,
        size: place.size,
        host: gethostname::gethostname().to_string_lossy().into_owned(),
        port,
    }
}

/// Whether the other end of a stream closed; what it wrote stays unread.
pub(super) fn is_gone(stream: &TcpStream) -> bool {
    let look = || -> io::Result<usize> {
        stream.set_nonblocking(true)?;
        let seen = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        seen
    };
    match look() {
        Ok(count) => count == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// Why a rank cannot come.
#[derive(Debug, thiserror::Error)]
pub(super) enum Obstacle {
    #[error("{0}")]
    Connection(#[from] io::Error),
    #[error("another job's ranks meet there")]
    Elsewhere,
    #[error("{0}")]
    Refused(String),
}

pub(super) fn join(address: SocketAddr, own: &Hello) -> std::result::Result<TcpStream, Obstacle> {
    let mut stream = TcpStream::connect_timeout(&address, POLITE)?;
    stream.set_nodelay(true)?;
    say(&mut stream, own)?;
    match hear(&mut stream, LONGEST_HELLO, Instant::now() + POLITE)? {
        Welcome::Come => {}
        Welcome::Elsewhere => return Err(Obstacle::Elsewhere),
        Welcome::Refused(why) => return Err(Obstacle::Refused(why)),
    }
    stream.set_read_timeout(None)?;
    Ok(stream)
}

/// Takes some ranks, in their order.
pub(super) fn gather(
    listener: &TcpListener,
    own: &Hello,
    ranks: Range<usize>,
    limit: Instant,
    watch: Watcher<'_>,
) -> Result<Vec<(Hello, TcpStream)>> {
    let mut came: Vec<Option<(Hello, TcpStream)>> = ranks.clone().map(|_| None).collect();
    let failed = |error: io::Error| problem(format!("cannot listen for other ranks: {error}"));
    listener.set_nonblocking(true).map_err(failed)?;
    let (tell, told) = channel();
    let guests = Arc::new(());
    let crowd = Arc::downgrade(&guests);
    let (started, mut is_told) = (Instant::now(), false);
    while !are_all_there(&mut came) {
        watch()?;
        while let Ok((stream, _)) = listener.accept() {
            // Of a crowd of strangers the last are sent away.
            if crowd.strong_count() <= CROWD {
                greet(stream, tell.clone(), crowd.upgrade());
            }
        }
        if let Ok((hello, mut stream)) = told.recv_timeout(LOOK_EVERY) {
            let welcome = judge(own, &hello, &ranks, &came);
            let is_welcome = matches!(welcome, Welcome::Come);
            // One that left meanwhile may come again.
            let has_heard = !is_gone(&stream) && say(&mut stream, &welcome).is_ok();
            if has_heard && is_welcome {
                let place = hello.rank - ranks.start;
                came[place] = Some((hello, stream));
            }
        }
        let now = Instant::now();
        if now > limit || !is_told && now > started + PATIENT {
            let missing = missing(&came, ranks.start);
            let text = format!(
                "{missing} of {}, as its launcher's variables say, did not come within",
                own.size
            );
            if now > limit {
                return Err(problem(format!("{text} {} s", LONGEST.as_secs())));
            }
            is_told = true;
            // Nothing can be told where stderr is gone.
            let _ =
                writeln!(io::stderr(), "rank {} waits: {text} {} s", own.rank, PATIENT.as_secs());
        }
    }
    Ok(came.into_iter().flatten().collect())
}

/// Whether all have come and are there still; those that left may come again.
fn are_all_there(came: &mut [Option<(Hello, TcpStream)>]) -> bool {
    if came.iter().any(Option::is_none) {
        return false;
    }
    let left =
        came.iter_mut().filter(|seat| seat.as_ref().is_some_and(|(_, stream)| is_gone(stream)));
    left.map(|seat| *seat = None).count() == 0
}

/// Hears who came, on a thread: others must not wait for one that says nothing. It holds its place in the crowd.
fn greet(mut stream: TcpStream, tell: Sender<(Hello, TcpStream)>, place: Option<Arc<()>>) {
    let listen = move || -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let hello = hear(&mut stream, LONGEST_HELLO, Instant::now() + POLITE)?;
        stream.set_read_timeout(None)?;
        drop(place);
        // Nobody waits any more: the connection closes.
        let _ = tell.send((hello, stream));
        Ok(())
    };
    // One that cannot be heard is sent away.
    let _ = std::thread::Builder::new().spawn(listen);
}

fn judge(
    own: &Hello,
    hello: &Hello,
    ranks: &Range<usize>,
    came: &[Option<(Hello, TcpStream)>],
) -> Welcome {
    if hello.job != own.job {
        return Welcome::Elsewhere;
    }
    let refuse = |why: String| Welcome::Refused(why);
    if hello.program != own.program {
        return refuse(format!("it is {}, and others are {}", hello.program, own.program));
    }
    if hello.size != own.size {
        return refuse(format!("it is one of {} ranks, and others of {}", hello.size, own.size));
    }
    if !ranks.contains(&hello.rank) {
        return refuse(format!("rank {} does not come to rank {}", hello.rank, own.rank));
    }
    match &came[hello.rank - ranks.start] {
        // One that is gone may have been started anew.
        Some((other, stream)) if !is_gone(stream) => {
            refuse(format!("there is such a rank on {} already", other.host))
        }
        _ => Welcome::Come,
    }
}

/// `ranks 2, 5`.
fn missing(came: &[Option<(Hello, TcpStream)>], first: usize) -> String {
    let absent = came.iter().enumerate().filter(|(_, who)| who.is_none());
    let ranks: Vec<String> = absent.map(|(at, _)| (first + at).to_string()).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, ranks.join(", "))
}

pub(super) fn say(stream: &mut TcpStream, words: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(words)?;
    let mut piece = (text.len() as u32).to_le_bytes().to_vec();
    piece.extend(text);
    stream.write_all(&piece)
}

pub(super) fn hear<T: DeserializeOwned>(
    stream: &mut TcpStream,
    most: usize,
    until: Instant,
) -> io::Result<T> {
    let mut length = [0; 4];
    fill(stream, &mut length, until)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > most {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length];
    fill(stream, &mut text, until)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Reads until `bytes` are full, though they come one by one.
fn fill(stream: &mut TcpStream, mut bytes: &mut [u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

pub(super) fn problem(problem: String) -> ParallelError {
    ParallelError::Meeting { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        let (address, job) = ("127.0.0.1".to_owned(), "a".to_owned());
        Place { rank: 0, size: 3, address, port: 1, job, is_local: true, is_child: false }
    }

    #[test]
    fn ranks_of_another_job_or_program_or_number_are_sent_away() {
        let own = hello(&place(), 0);
        let of = |change: fn(&mut Hello)| {
            let mut hello = Hello { rank: 1, ..own.clone() };
            change(&mut hello);
            judge(&own, &hello, &(1..3), &[None, None])
        };
        assert!(matches!(of(|_| ()), Welcome::Come));
        assert!(matches!(of(|hello| hello.job = "b".to_owned()), Welcome::Elsewhere));
        let refused = |welcome: Welcome, why: &str| {
            let Welcome::Refused(text) = welcome else { panic!("{welcome:?}") };
            assert!(text.contains(why), "{text}");
        };
        refused(of(|hello| hello.program = "longdraft 0.0.1".to_owned()), "longdraft 0.0.1");
        refused(of(|hello| hello.size = 4), "one of 4 ranks, and others of 3");
        refused(of(|hello| hello.rank = 0), "rank 0");
        refused(of(|hello| hello.rank = 3), "rank 3");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let stream = TcpStream::connect(address).expect("connect");
        let (far, _) = listener.accept().expect("accept");
        let twice = [Some((Hello { host: "h".to_owned(), ..own.clone() }, stream)), None];
        let again = || judge(&own, &Hello { rank: 1, ..own.clone() }, &(1..3), &twice);
        refused(again(), "on h already");
        // One that is gone may have been started anew.
        drop(far);
        let started = Instant::now();
        while !matches!(again(), Welcome::Come) {
            assert!(started.elapsed() < LONGEST, "a dead rank keeps its place");
        }
    }

    #[test]
    fn missing_ranks_are_named() {
        assert_eq!(missing(&[None, None], 1), "ranks 1, 2");
        assert_eq!(missing(&[None], 4), "rank 4");
    }
}
