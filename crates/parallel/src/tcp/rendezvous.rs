//! How ranks find each other: all come to the first one, which tells everybody where the others listen.
//!
//! ```text
//! rank r > 0: listens, and comes to the first rank -> Hello (job, rank, its own port)
//! first rank: has heard all                        -> everybody's machine, address and port
//! rank r > 0: comes to the ranks below it, and takes those above it
//! ```

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::greeting::{
    Hello, LONGEST, LOOK_EVERY, Obstacle, POLITE, Watcher, gather, hear, hello, is_gone, join,
    problem, say,
};
use crate::error::{ParallelError, Result};
use crate::launcher::Place;

/// Ports that are tried from the job's on: the first may be taken.
const PORTS: u16 = 16;
/// Bytes of the table of all ranks at most.
const LONGEST_TABLE: usize = 64 << 20;

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

/// Meets the other ranks; the first one may bring a listener of its own.
/// It fails where ranks do not come, or are of another program, or contradict each other.
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
    let address: IpAddr = if place.is_local {
        loopback(place)
    } else if is_ipv6(place) {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    TcpListener::bind((address, port))
}

/// This machine's address for itself, of the first rank's kind.
fn loopback(place: &Place) -> IpAddr {
    if is_ipv6(place) { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() }
}

fn is_ipv6(place: &Place) -> bool {
    let addresses = (place.address.as_str(), place.port).to_socket_addrs();
    addresses.is_ok_and(|mut all| all.next().is_some_and(|to| to.is_ipv6()))
}

/// Where the first rank can be: on this machine alone, or where its name leads.
fn addresses_of_first(place: &Place) -> io::Result<Vec<IpAddr>> {
    if place.is_local {
        // Launchers give the machine's name, which may lead to an address where nobody listens.
        return Ok(vec![loopback(place)]);
    }
    let found = (place.address.as_str(), place.port).to_socket_addrs()?;
    Ok(found.map(|address| address.ip()).collect())
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
        let joined = insist(address, &own, limit, &mut || is_there(streams[0].as_ref()));
        streams.push(Some(joined.map_err(|cause| {
            if !is_there(streams[0].as_ref()) {
                return lost(&io::ErrorKind::UnexpectedEof.into());
            }
            let host = &seat.host;
            problem(format!("rank {} does not reach rank {rank} on {host}: {cause}", place.rank))
        })?));
    }
    streams.push(None);
    // The first one ends where another does not come.
    let mut is_first_there = || {
        let lost = || lost(&io::ErrorKind::UnexpectedEof.into());
        if is_there(streams[0].as_ref()) { Ok(()) } else { Err(lost()) }
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
        let found = addresses_of_first(place);
        let found = found.map_err(|error| cause = error.to_string()).unwrap_or_default();
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

fn is_there(stream: Option<&TcpStream>) -> bool {
    stream.is_some_and(|stream| !is_gone(stream))
}

/// Comes to a rank that listens already; the way there may fail for a while, as long as the first rank is there.
fn insist(
    address: SocketAddr,
    own: &Hello,
    limit: Instant,
    is_first_there: &mut dyn FnMut() -> bool,
) -> std::result::Result<TcpStream, Obstacle> {
    loop {
        match join(address, own) {
            Err(Obstacle::Connection(_)) if Instant::now() < limit && is_first_there() => {
                std::thread::sleep(10 * LOOK_EVERY);
            }
            joined => return joined,
        }
    }
}

fn broken(rank: usize, error: &io::Error) -> ParallelError {
    problem(format!("rank {rank} ended before all had come ({error})"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

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
            // One that left at once would be waited for.
            let others = others.into_iter().map(|other| other.join().expect("a thread"));
            let others: Vec<Met> = others.map(|met| met.expect("met")).collect();
            for (met, own) in others.iter().zip([2, 1]) {
                let want: Vec<bool> = (0..3).map(|rank| rank != own).collect();
                assert_eq!(is_there(met), want);
            }
            drop(quiet);
        });
    }

    #[test]
    fn a_first_rank_whose_port_is_taken_is_found_at_the_next() {
        let (taken, port) = first();
        // Who has the port closes whatever comes.
        std::thread::spawn(move || taken.incoming().for_each(drop));
        let two = move |rank| Place { size: 2, ..place(rank, port) };
        let first = std::thread::spawn(move || meet(&two(0), None, &mut || Ok(())));
        // One that left at once would be waited for.
        let _other = meet(&two(1), None, &mut || Ok(())).expect("met");
        assert!(first.join().expect("a thread").is_ok());
    }

    #[test]
    fn ranks_of_one_machine_meet_whatever_its_name_leads_to() {
        let (listener, port) = first();
        // Of a network that is kept for documents: nobody listens there.
        let of = move |rank| {
            let address = "192.0.2.1".to_owned();
            Place { size: 2, address, ..place(rank, port) }
        };
        let first = std::thread::spawn(move || meet(&of(0), Some(listener), &mut || Ok(())));
        let _other = meet(&of(1), None, &mut || Ok(())).expect("met");
        assert!(first.join().expect("a thread").is_ok());
    }

    #[test]
    fn a_rank_that_waits_for_another_ends_with_the_first() {
        let (_, free) = first();
        let own = hello(&place(2, free), 0);
        let mut looks = 0;
        let mut is_first_there = || {
            looks += 1;
            looks < 3
        };
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), free);
        let joined = insist(address, &own, Instant::now() + LONGEST, &mut is_first_there);
        assert!(matches!(joined, Err(Obstacle::Connection(_))));
        assert_eq!(looks, 3);
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
}
