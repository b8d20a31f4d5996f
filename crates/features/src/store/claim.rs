//! Claims: several processes capture into one store, a shard by one of them at a time.
//!
//! A claim is an object `claims/SHARD.N` that is created atomically. Its owner renews it; a claim
//! whose owner is dead (a process of this machine), or that was not renewed for the length of a
//! lease, is stale, and who creates `claims/SHARD.N+1` first takes over. Nothing is ever deleted
//! under another process, so exactly one takes over. Should a process that was only slow come back,
//! it finds the higher number and lets go.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::location::Location;
use crate::error::Result;

/// Folder of a store's claims.
pub(super) const CLAIMS: &str = "claims";

/// A claim that was not renewed for so long is stale.
pub(super) const LEASE: Duration = Duration::from_mins(10);

/// How often a claim is renewed.
pub(super) const RENEWAL: Duration = Duration::from_mins(2);

/// More takeovers of one shard than this mean that something else is wrong.
const MOST_TAKEOVERS: usize = 10_000;

/// Who works on a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    host: String,
    pid: u32,
    /// When the process started, as the system counts it; tells reused process ids apart.
    started: Option<u64>,
    /// Seconds since 1970.
    renewed: u64,
}

impl Owner {
    fn this_process() -> Self {
        let pid = std::process::id();
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        Self { host, pid, started: started(pid), renewed: now() }
    }

    fn is_stale(&self, this: &Self) -> bool {
        let dead = self.host == this.host && !is_alive(self);
        // A time that lies far ahead would never be long ago: whoever waits would wait for ever.
        dead || now().abs_diff(self.renewed) > LEASE.as_secs()
    }

    /// What a process that waits for this one's shard says of it.
    fn told(&self, location: &Location, shard: &str, object: &str) -> String {
        let (place, minutes) = (location.name(), LEASE.as_secs() / 60);
        format!(
            "shard {shard}: process {} on {} works on it (claim {place}/{object}, which lapses if it is not \
             renewed for {minutes} minutes)",
            self.pid, self.host
        )
    }
}

/// A shard that this process works on.
#[derive(Debug)]
pub(super) struct Claim {
    shard: String,
    number: usize,
    owner: Owner,
}

impl Claim {
    /// Takes a shard, or tells which living process works on it, while its claim is there.
    pub(super) fn take(
        location: &Location,
        shard: &str,
    ) -> Result<std::result::Result<Self, Option<String>>> {
        let owner = Owner::this_process();
        for number in 0..MOST_TAKEOVERS {
            let object = object(shard, number);
            // Who completes the store takes half claims away, this one's too: it asks again.
            let asked = location.create(&object, &bytes(&owner));
            if asked.or_else(|_| location.create(&object, &bytes(&owner)))? {
                return Ok(Ok(Self { shard: shard.to_owned(), number, owner }));
            }
            // What cannot be read was torn by a crash of the machine.
            let holder: Option<Owner> = match location.get_created(&object)? {
                Some(holder) => holder.ok(),
                // Its owner has finished since.
                None => return Ok(Err(None)),
            };
            if let Some(holder) = holder.filter(|holder| !holder.is_stale(&owner)) {
                return Ok(Err(Some(holder.told(location, shard, &object))));
            }
        }
        Ok(Err(None))
    }

    /// Says that this process is still at work, if that is due; tells whether the shard is still
    /// this process's.
    pub(super) fn renew(&mut self, location: &Location) -> Result<bool> {
        if now().saturating_sub(self.owner.renewed) < RENEWAL.as_secs() {
            return Ok(true);
        }
        self.renew_now(location)
    }

    /// The same whether it is due or not.
    pub(super) fn renew_now(&mut self, location: &Location) -> Result<bool> {
        let own = object(&self.shard, self.number);
        let overtaken = location.size(&object(&self.shard, self.number + 1))?.is_some();
        // Who took the shard over and is done with it has taken this claim away, too.
        if overtaken || location.size(&own)?.is_none() {
            return Ok(false);
        }
        self.owner.renewed = now();
        location.put(&own, bytes(&self.owner))?;
        Ok(true)
    }

    /// Runs what may take long; meanwhile another thread renews the claim, `every` so often.
    pub(super) fn hold_while<T>(
        &mut self,
        location: &Location,
        every: Duration,
        run: impl FnOnce() -> T,
    ) -> T {
        std::thread::scope(|scope| {
            let (running, ended) = mpsc::channel::<()>();
            scope.spawn(move || {
                while ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                    // Whether the shard is still this process's is asked before its receipt is written.
                    let _ = self.renew(location);
                }
            });
            let done = run();
            // Where it panics, this goes all the same.
            drop(running);
            done
        })
    }

    /// Removes what processes left that were killed between a shard's receipt and their claim's end.
    /// Only for a store whose shards are all complete.
    pub(super) fn clear(location: &Location) -> Result<()> {
        // By what is there, not by number: of two kills, the first may leave a number and the second
        // none below it.
        let left = location.list(CLAIMS)?;
        left.iter().try_for_each(|name| location.delete(&format!("{CLAIMS}/{name}")))
    }

    /// Lets go, after the shard is complete or when it is given up.
    pub(super) fn release(self, location: &Location) -> Result<()> {
        // The highest first: a lower one that is left alone is stale.
        (0..=self.number).rev().try_for_each(|n| location.delete(&object(&self.shard, n)))
    }
}

fn object(shard: &str, number: usize) -> String {
    format!("{CLAIMS}/{shard}.{number}")
}

fn bytes(owner: &Owner) -> Vec<u8> {
    serde_json::to_vec(owner).unwrap_or_default()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Start of a process of this machine in clock ticks, where the system tells.
fn started(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the start is the 20th field after it.
    text.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(unix)]
fn is_alive(owner: &Owner) -> bool {
    use nix::errno::Errno;
    use nix::sys::signal::kill;
    use nix::unistd::Pid;
    // Other numbers mean groups of processes, of which some always exist.
    let Some(pid) = i32::try_from(owner.pid).ok().filter(|pid| *pid > 0) else { return false };
    // Signal none: only whether the process exists.
    let exists = kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH);
    exists && (owner.started.is_none() || owner.started == started(owner.pid))
}

#[cfg(not(unix))]
fn is_alive(_: &Owner) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location() -> (tempfile::TempDir, Location) {
        let folder = tempfile::tempdir().expect("folder");
        let location = Location::open(&folder.path().display().to_string(), true).expect("open");
        (folder, location)
    }

    fn write(location: &Location, number: usize, owner: &Owner) {
        assert!(location.create(&object("s", number), &bytes(owner)).expect("create"));
    }

    #[test]
    fn a_shard_is_taken_once_until_it_is_let_go() -> Result<()> {
        let (_folder, location) = location();
        let claim = Claim::take(&location, "s")?.expect("free");
        let told = Claim::take(&location, "s")?.expect_err("taken").expect("its owner");
        let (pid, place) = (std::process::id(), location.name());
        assert!(told.contains(&format!("process {pid} on ")), "{told}");
        assert!(told.contains(&format!("claim {place}/claims/s.0")), "{told}");
        assert!(Claim::take(&location, "other")?.is_ok());
        claim.release(&location)?;
        assert!(Claim::take(&location, "s")?.is_ok());
        Ok(())
    }

    #[test]
    fn claims_of_dead_processes_and_ended_leases_are_taken_over() -> Result<()> {
        let this = Owner::this_process();
        let dead = Owner { started: Some(1), ..this.clone() };
        let elsewhere = Owner { host: "elsewhere".into(), ..this.clone() };
        let ended = Owner { renewed: now() - LEASE.as_secs() - 5, ..elsewhere.clone() };
        let ahead = Owner { renewed: u64::MAX, ..elsewhere.clone() };
        let of_group = Owner { pid: u32::MAX, started: None, ..this.clone() };
        for (owner, taken) in [
            (&this, false),
            (&dead, true),
            (&elsewhere, false),
            (&ended, true),
            (&ahead, true),
            (&of_group, true),
        ] {
            let (_folder, location) = location();
            write(&location, 0, owner);
            let claim = Claim::take(&location, "s")?;
            assert_eq!(claim.is_ok(), taken, "{owner:?}");
            if let Ok(claim) = claim {
                assert_eq!(claim.number, 1);
                claim.release(&location)?;
                assert_eq!(location.size(&object("s", 0))?, None);
            }
        }
        Ok(())
    }

    #[test]
    fn claims_that_are_left_go_whatever_their_numbers() -> Result<()> {
        let (_folder, location) = location();
        Claim::clear(&location)?;
        write(&location, 1, &Owner::this_process());
        write(&location, 7, &Owner::this_process());
        Claim::clear(&location)?;
        assert_eq!(location.list(CLAIMS)?, Vec::<String>::new());
        Ok(())
    }

    #[test]
    fn a_process_that_asks_is_not_disturbed_by_the_owner() -> Result<()> {
        let (folder, location) = location();
        let _claim = Claim::take(&location, "s")?.expect("free");
        // What another process has written at the moment before it learns that it comes too late.
        let asking = folder.path().join("claims/s.0#1");
        std::fs::write(&asking, "{}").expect("write");
        location.remove_staged("", "s.", Duration::ZERO);
        assert!(asking.exists());
        location.remove_staged(CLAIMS, "s.", Duration::ZERO);
        assert!(!asking.exists());
        Ok(())
    }

    #[test]
    fn who_was_overtaken_lets_go() -> Result<()> {
        let (_folder, location) = location();
        let mut claim = Claim::take(&location, "s")?.expect("free");
        claim.owner.renewed -= LEASE.as_secs();
        assert!(claim.renew(&location)?);
        assert!(now() - claim.owner.renewed < 5);
        claim.owner.renewed -= LEASE.as_secs();
        write(&location, 1, &Owner::this_process());
        assert!(!claim.renew(&location)?);
        // Who took over has completed the shard and is gone.
        (0..2).try_for_each(|number| location.delete(&object("s", number)))?;
        assert!(!claim.renew_now(&location)?);
        assert_eq!(location.size(&object("s", 0))?, None);
        Ok(())
    }

    #[test]
    fn a_claim_is_renewed_while_something_takes_long() -> Result<()> {
        let (_folder, location) = location();
        let mut claim = Claim::take(&location, "s")?.expect("free");
        claim.owner.renewed -= LEASE.as_secs();
        let (own, old) = (object("s", 0), bytes(&claim.owner));
        location.put(&own, old.clone())?;
        let started = std::time::Instant::now();
        claim.hold_while(&location, Duration::from_millis(5), || {
            while location.get(&own).is_ok_and(|held| held.as_ref() == Some(&old)) {
                assert!(started.elapsed().as_secs() < 60, "never renewed");
                std::thread::yield_now();
            }
        });
        assert!(now() - claim.owner.renewed < 60);
        Ok(())
    }
}
