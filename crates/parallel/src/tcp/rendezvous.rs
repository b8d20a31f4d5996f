//! How ranks find each other: all come to the first one, which tells everybody where the others listen.
//!
//! ```text
//! rank r > 0: listens, and comes to the first rank -> Hello (job, rank, its own port)
//! first rank: has heard all                        -> everybody's machine, address and port
//! rank r > 0: comes to the ranks below it, and takes those above it
//! ```
//!
//! Whoever else connects is sent away, or not heard for long.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
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
/// Ports that are tried from the job's on: the first may be taken.
const PORTS: u16 = 16;
/// Time that one who connects has to say who it is.
const POLITE: Duration = Duration::from_secs(5);
/// Between two looks at who came.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Guests that are heard at a time.
const CROWD: usize = 256;
/// Bytes of a greeting at most, and of the table of all ranks.
const LONGEST_HELLO: usize = 4 << 10;
const LONGEST_TABLE: usize = 64 << 20;

/// Who a rank is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    program: String,
    job: String,
    rank: usize,
    size: usize,
    host: String,
    /// Where it takes ranks above it.
    port: u16,
}

/// What a rank that was come to says of it.
#[derive(Debug, Serialize, Deserialize)]
enum Welcome {
    Come,
    /// Another job's ranks meet here.
    Elsewhere,
    Refused(String),
}

/// Where a rank is found.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Seat {
    host: String,
    /// As the first rank sees it; none on the first rank's machine.
    address: Option<IpAddr>,
    port: u16,
}

/// The ways to all ranks but this one, and their machines' names.
pub(super) struct Met {
    pub(super) streams: Vec<Option<TcpStream>>,
    pub(super) hosts: Vec<String>,
}

/// Looks whether those that are waited for can still come.
pub(super) type Watcher<'a> = &'a mut dyn FnMut() -> Result<()>;

/// Meets the other ranks; the first one may bring a listener of its own.
///
/// # Errors
/// - ranks do not come, or are of another program, or contradict each other
pub(super) fn meet(
    place: &Place,
    listener: Option<TcpListener>,
    watch: Watcher<'_>,
) -> Result<Met> {
    let limit = Instant::now() + LONGEST;
    if place.rank == 0 {
        let listener = listener.map_or_else(|| listen_first(place), Ok)?;
        as_first(place, &listener, limit, watch)
    } else {
        as_other(place, limit)
    }
}

/// Listens where ranks of other machines come, too, unless there are none.
fn listen(place: &Place, port: u16) -> io::Result<TcpListener> {
    let addresses = (place.address.as_str(), port).to_socket_addrs();
    let is_new = |address: SocketAddr| address.is_ipv6();
    let is_new = addresses.is_ok_and(|mut all| all.next().is_some_and(is_new));
    let of_old = if place.is_local { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
    let of_new = if place.is_local { Ipv6Addr::LOCALHOST } else { Ipv6Addr::UNSPECIFIED };
    TcpListener::bind(SocketAddr::new(if is_new { of_new.into() } else { of_old.into() }, port))
}

fn listen_first(place: &Place) -> Result<TcpListener> {
    let mut cause = None;
    for port in ports(place) {
        match listen(place, port) {
            Ok(listener) => return Ok(listener),
            Err(error) => cause = Some(error),
        }
    }
    let (first, last) = (place.port, place.port.saturating_add(PORTS - 1));
    let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
    Err(problem(format!(
        "cannot listen for the other ranks at the ports {first} to {last}{cause}; MASTER_PORT names another one"
    )))
}

fn ports(place: &Place) -> impl Iterator<Item = u16> {
    (0..PORTS).filter_map(move |next| place.port.checked_add(next))
}

fn hello(place: &Place, port: u16) -> Hello {
    Hello {
        program: concat!("longdraft ", env!("CARGO_PKG_VERSION")).to_owned(),
        job: place.job.clone(),
        rank: place.rank,
        size: place.size,
        host: gethostname::gethostname().to_string_lossy().into_owned(),
        port,
    }
}

fn as_first(
    place: &Place,
    listener: &TcpListener,
    limit: Instant,
    watch: Watcher<'_>,
) -> Result<Met> {
    let own = hello(place, 0);
    let mut came = gather(listener, &own, 1..place.size, limit, watch)?;
    let mut seats = vec![Seat { host: own.host, address: None, port: 0 }];
    for (hello, stream) in &came {
        let address = stream.peer_addr().map_err(|error| broken(hello.rank, &error))?;
        let address = Some(address.ip().to_canonical()).filter(|address| !address.is_loopback());
        seats.push(Seat { host: hello.host.clone(), address, port: hello.port });
    }
    for (hello, stream) in &mut came {
        say(stream, &seats).map_err(|error| broken(hello.rank, &error))?;
    }
    let hosts = seats.into_iter().map(|seat| seat.host).collect();
    let streams = std::iter::once(None).chain(came.into_iter().map(|(_, stream)| Some(stream)));
    Ok(Met { streams: streams.collect(), hosts })
}

fn as_other(place: &Place, limit: Instant) -> Result<Met> {
    let own_listener = listen(place, 0);
    let own_listener =
        own_listener.map_err(|error| problem(format!("cannot listen for other ranks: {error}")))?;
    let port = own_listener.local_addr().map_or(0, |address| address.port());
    let own = hello(place, port);
    let mut first = find_first(place, &own, limit)?;
    let lost = |error: &io::Error| {
        let (rank, size) = (place.rank, place.size);
        problem(format!(
            "rank {rank} of {size}: the first rank ended before all had come ({error})"
        ))
    };
    // The first one gives up at its own time, and then closes.
    let seats: Vec<Seat> =
        hear(&mut first, LONGEST_TABLE, limit + POLITE).map_err(|error| lost(&error))?;
    first.set_read_timeout(None).map_err(|error| lost(&error))?;
    if seats.len() != place.size {
        return Err(problem(format!("the first rank told of {} ranks", seats.len())));
    }
    let beside_first = first.peer_addr().map_err(|error| lost(&error))?.ip();
    let mut streams: Vec<Option<TcpStream>> = vec![Some(first)];
    for (rank, seat) in seats.iter().enumerate().take(place.rank).skip(1) {
        let address = SocketAddr::new(seat.address.unwrap_or(beside_first), seat.port);
        streams.push(Some(insist(address, &own, limit).map_err(|cause| {
            let host = &seat.host;
            problem(format!("rank {} does not reach rank {rank} on {host}: {cause}", place.rank))
        })?));
    }
    streams.push(None);
    // The first one ends where another does not come.
    let mut is_first_there = || match &streams[0] {
        Some(first) if is_gone(first) => Err(lost(&io::ErrorKind::UnexpectedEof.into())),
        _ => Ok(()),
    };
    let above = place.rank + 1..place.size;
    let came = gather(&own_listener, &own, above, limit, &mut is_first_there)?;
    streams.extend(came.into_iter().map(|(_, stream)| Some(stream)));
    Ok(Met { streams, hosts: seats.into_iter().map(|seat| seat.host).collect() })
}

/// Comes to the first rank, which may not listen yet.
fn find_first(place: &Place, own: &Hello, limit: Instant) -> Result<TcpStream> {
    let Place { rank, size, address, port, .. } = place;
    let mut cause = String::new();
    while Instant::now() < limit {
        // Names of a cluster's machines may come later than the machines.
        let found = (address.as_str(), *port).to_socket_addrs();
        let found = found.map_err(|error| cause = error.to_string());
        let found: Vec<IpAddr> = found.into_iter().flatten().map(|address| address.ip()).collect();
        for (port, ip) in ports(place).flat_map(|port| found.iter().map(move |ip| (port, *ip))) {
            match join(SocketAddr::new(ip, port), own) {
                Ok(stream) => return Ok(stream),
                Err(Obstacle::Refused(why)) => {
                    return Err(ParallelError::Ranks {
                        problem: format!("rank {rank} of {size} is refused: {why}"),
                    });
                }
                // It listened before it started this one.
                Err(Obstacle::Connection(error)) if place.is_child => {
                    return Err(problem(format!(
                        "rank {rank} of {size}: the first is gone ({error})"
                    )));
                }
                Err(obstacle) => cause = obstacle.to_string(),
            }
        }
        std::thread::sleep(10 * LOOK_EVERY);
    }
    let wait = LONGEST.as_secs();
    Err(problem(format!(
        "rank {rank} of {size} does not find the first rank at {address}:{port} within {wait} s: {cause}"
    )))
}

/// Comes to a rank that listens already; the way there may fail for a while.
fn insist(
    address: SocketAddr,
    own: &Hello,
    limit: Instant,
) -> std::result::Result<TcpStream, Obstacle> {
    loop {
        match join(address, own) {
            Err(Obstacle::Connection(_)) if Instant::now() < limit => {
                std::thread::sleep(10 * LOOK_EVERY);
            }
            joined => return joined,
        }
    }
}

/// Whether the other end of a stream closed; what it wrote stays unread.
fn is_gone(stream: &TcpStream) -> bool {
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
enum Obstacle {
    #[error("{0}")]
    Connection(#[from] io::Error),
    #[error("another job's ranks meet there")]
    Elsewhere,
    #[error("{0}")]
    Refused(String),
}

fn join(address: SocketAddr, own: &Hello) -> std::result::Result<TcpStream, Obstacle> {
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
fn gather(
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
    while came.iter().any(Option::is_none) {
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
            // One that is gone again may come again.
            if say(&mut stream, &welcome).is_ok() && is_welcome {
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

fn say(stream: &mut TcpStream, words: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(words)?;
    let mut piece = (text.len() as u32).to_le_bytes().to_vec();
    piece.extend(text);
    stream.write_all(&piece)
}

fn hear<T: DeserializeOwned>(stream: &mut TcpStream, most: usize, until: Instant) -> io::Result<T> {
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

fn broken(rank: usize, error: &io::Error) -> ParallelError {
    problem(format!("rank {rank} ended before all had come ({error})"))
}

fn problem(problem: String) -> ParallelError {
    ParallelError::Meeting { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(rank: usize, port: u16) -> Place {
        let (address, job) = ("127.0.0.1".to_owned(), "a".to_owned());
        Place { rank, size: 3, address, port, job, is_local: true, is_child: false }
    }

    /// A listener at a free port, and the port.
    fn first() -> (TcpListener, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        (listener, port)
    }

    #[test]
    fn ranks_meet_among_strangers() {
        let (listener, port) = first();
        std::thread::scope(|scope| {
            // A port scan, a browser, and one that says nothing and stays.
            let quiet = TcpStream::connect(("127.0.0.1", port)).expect("connect");
            drop(TcpStream::connect(("127.0.0.1", port)).expect("connect"));
            let mut browser = TcpStream::connect(("127.0.0.1", port)).expect("connect");
            browser.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("written");
            let others: Vec<_> = [2, 1]
                .map(|rank| scope.spawn(move || meet(&place(rank, port), None, &mut || Ok(()))))
                .into_iter()
                .collect();
            let met = meet(&place(0, port), Some(listener), &mut || Ok(())).expect("met");
            let is_there =
                |met: &Met| -> Vec<bool> { met.streams.iter().map(Option::is_some).collect() };
            assert_eq!((is_there(&met), met.hosts.len()), (vec![false, true, true], 3));
            for (other, own) in others.into_iter().zip([2, 1]) {
                let met = other.join().expect("a thread").expect("met");
                let want: Vec<bool> = (0..3).map(|rank| rank != own).collect();
                assert_eq!(is_there(&met), want);
            }
            drop(quiet);
        });
    }

    #[test]
    fn ranks_of_another_job_or_program_or_number_are_sent_away() {
        let own = hello(&place(0, 1), 0);
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
        let (listener, port) = first();
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
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
    fn a_first_rank_whose_port_is_taken_is_found_at_the_next() {
        let (taken, port) = first();
        // Who has the port closes whatever comes.
        std::thread::spawn(move || taken.incoming().for_each(drop));
        let two = move |rank| Place { size: 2, ..place(rank, port) };
        let first = std::thread::spawn(move || meet(&two(0), None, &mut || Ok(())));
        meet(&two(1), None, &mut || Ok(())).expect("met");
        assert!(first.join().expect("a thread").is_ok());
    }

    #[test]
    fn waiting_ends_where_nobody_can_come() {
        let (listener, port) = first();
        let mut looks = 0;
        let mut watch = || {
            looks += 1;
            if looks < 3 { Ok(()) } else { Err(problem("rank 1 ended".to_owned())) }
        };
        let met = meet(&place(0, port), Some(listener), &mut watch);
        assert!(met.is_err_and(|error| error.to_string() == "rank 1 ended"));
    }

    #[test]
    fn missing_ranks_are_named() {
        assert_eq!(missing(&[None, None], 1), "ranks 1, 2");
        assert_eq!(missing(&[None], 4), "rank 4");
    }
}
