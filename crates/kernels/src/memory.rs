//! The memory of a process: an end in words where none is left, and budgets for work on what others
//! wrote.
//!
//! A program opts in with `#[global_allocator] static MEMORY: Allocator = Allocator::new();`. Without it
//! budgets hold nothing, a process without memory is ended by `abort` as ever, and large pieces lie in small pages.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::ptr::null;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};
use std::time::Duration;

use crate::at_end::AtEnd;
use crate::large_pages::ask_for_large_pages;

/// Exit code of a process that has no memory left.
const FAILED: i32 = 1;
/// Bytes of a piece from which on it lies in large pages.
const LARGE: usize = 4 << 20;

/// An allocator, by default the system's. A process that cannot have memory says so and exits with code 1. Pieces of
/// 4 MiB or more lie in large pages where Linux gives them to who asks (`transparent_hugepage`): matrices are written to
/// fresh memory with a fault for each 2 MiB in place of one for each 4 KiB.
#[derive(Debug)]
pub struct Allocator<A = System>(A);

impl Allocator {
    /// The system's allocator.
    #[must_use]
    pub const fn new() -> Self {
        Self(System)
    }
}

impl Default for Allocator {
    fn default() -> Self {
        Self::new()
    }
}

impl<A> Allocator<A> {
    /// Another allocator.
    #[must_use]
    pub const fn over(allocator: A) -> Self {
        Self(allocator)
    }

    /// The allocator that memory comes from.
    pub const fn inner(&self) -> &A {
        &self.0
    }
}

// SAFETY: every request is handed to the inner allocator as it came, and its answer is handed
// back. What is done besides neither allocates nor unwinds: counting, sleeping, ending the process.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Allocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        charge(layout.size());
        // SAFETY: the caller's promise.
        granted(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        charge(layout.size());
        // SAFETY: the caller's promise.
        granted(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        charge(size.saturating_sub(layout.size()));
        refund(layout.size().saturating_sub(size));
        // SAFETY: the caller's promise.
        granted(unsafe { self.0.realloc(block, layout, size) }, size)
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        refund(layout.size());
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(block, layout) }
    }
}

fn granted(block: *mut u8, size: usize) -> *mut u8 {
    if block.is_null() {
        out_of_memory(size)
    }
    if size >= LARGE {
        // SAFETY: the allocator has just given these bytes.
        unsafe { ask_for_large_pages(block, size) };
    }
    block
}

/// Says what is wrong without any memory, and ends the process.
#[cold]
fn out_of_memory(size: usize) -> ! {
    let mut text = [0_u8; 320];
    let mut rest = &mut text[..];
    // Both can only fail where nothing can be told any more.
    let _ = write!(
        rest,
        "error: no memory left: {size} bytes more could not be had\n\
         hint: hold less at a time (shorter rows, smaller batches, a smaller or quantised model), or \
         allow the process more memory (`ulimit -v`, the container's limit)\n"
    );
    let left = rest.len();
    let _ = std::io::stderr().write_all(&text[..text.len() - left]);
    std::process::exit(FAILED)
}

/// Hands memory that is free again back to the system, where the allocator would keep it (glibc): for after
/// work that takes much memory in small pieces for a while.
pub fn release_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointer; glibc allows it at any time and on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Keeps memory that is free again for what asks next, in place of giving large pieces back to the system each
/// time (glibc): for work that asks for the same pieces step by step. The process holds what it held at most.
/// Limits that the environment sets are left as they are.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"]
        .iter()
        .any(|name| std::env::var_os(name).is_some())
    {
        return;
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointer; glibc allows it at any time and on any thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        // What one thread freed serves another. Other arenas than the first map pieces above 64 MiB anew each time.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

thread_local! {
    static CURRENT: Cell<*const Budget> = const { Cell::new(null()) };
}

/// How much memory a thread may hold beyond what it held before.
#[derive(Debug)]
pub struct Budget {
    /// Bytes.
    left: AtomicIsize,
    /// The fewest that were left.
    least: AtomicIsize,
    /// All.
    bytes: isize,
    exceeded: AtomicBool,
}

impl Budget {
    /// So many bytes.
    pub fn new(bytes: usize) -> Arc<Self> {
        let bytes = isize::try_from(bytes).unwrap_or(isize::MAX);
        let [left, least] = [(); 2].map(|()| AtomicIsize::new(bytes));
        Arc::new(Self { left, least, bytes, exceeded: AtomicBool::new(false) })
    }

    /// Works within the budget. A thread that asks for more is stopped for good, inside of the
    /// allocator, with all that it holds: give it nothing that others wait for, and never wait for it
    /// itself, but for its answer or [`Self::is_exceeded`].
    pub fn within<T>(self: &Arc<Self>, work: impl FnOnce() -> T) -> T {
        let held = Arc::clone(self);
        let before = CURRENT.replace(Arc::as_ptr(&held));
        let restored = AtEnd(|| CURRENT.set(before));
        let result = work();
        drop(restored);
        drop(held);
        result
    }

    /// Whether the thread was stopped.
    pub fn is_exceeded(&self) -> bool {
        self.exceeded.load(Ordering::Acquire)
    }

    /// Bytes that the thread held at most, beyond what it held before.
    pub fn most_held(&self) -> usize {
        (self.bytes - self.least.load(Ordering::Relaxed)).unsigned_abs()
    }

    /// Bytes that the thread holds now, beyond what it held before.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        (self.bytes - self.left.load(Ordering::Relaxed)).unsigned_abs()
    }

    /// Stops the thread when it asks for memory the next time.
    pub fn withdraw(&self) {
        self.left.store(isize::MIN / 2, Ordering::Relaxed);
    }
}

/// What `work` does outside of its thread's budget. Memory that it takes is given back outside, too.
pub(crate) fn outside<T>(work: impl FnOnce() -> T) -> T {
    let before = CURRENT.replace(null());
    let _restored = AtEnd(|| CURRENT.set(before));
    work()
}

fn charge(bytes: usize) {
    let current = CURRENT.get();
    if current.is_null() {
        return;
    }
    // SAFETY: set by `within`, which keeps the budget until it has put the former one back.
    let budget = unsafe { &*current };
    let bytes = isize::try_from(bytes).unwrap_or(isize::MAX);
    let left = budget.left.fetch_sub(bytes, Ordering::Relaxed);
    budget.least.fetch_min(left.saturating_sub(bytes), Ordering::Relaxed);
    if left < bytes {
        budget.exceeded.store(true, Ordering::Release);
        loop {
            std::thread::sleep(Duration::from_hours(1));
        }
    }
}

fn refund(bytes: usize) {
    let current = CURRENT.get();
    if !current.is_null() {
        // SAFETY: as in `charge`.
        unsafe { &*current }.left.fetch_add(bytes as isize, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[global_allocator]
    static MEMORY: Allocator = Allocator::new();

    #[test]
    fn what_is_given_back_can_be_had_again_and_more_stops_the_thread() {
        let budget = Budget::new(1 << 20);
        let sum: usize = budget.within(|| {
            (0..100).map(|i| vec![i as u8; 900_000].iter().filter(|byte| **byte > 0).count()).sum()
        });
        assert_eq!((sum, budget.is_exceeded()), (99 * 900_000, false));
        let (sender, receiver) = mpsc::channel();
        let held = Arc::clone(&budget);
        std::thread::spawn(move || {
            let grown = held.within(|| (0..2_000_000_u32).collect::<Vec<_>>().len());
            // Nobody may hear: that is what is tested.
            let _ = sender.send(grown);
        });
        while !budget.is_exceeded() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(receiver.try_recv().is_err());
        // Outside of a budget there is none.
        assert_eq!(vec![1_u8; 4 << 20].len(), 4 << 20);
    }

    #[test]
    fn a_withdrawn_budget_stops_at_the_next_request() {
        let budget = Budget::new(1 << 30);
        let held = Arc::clone(&budget);
        std::thread::spawn(move || {
            held.within(|| {
                loop {
                    // Otherwise the compiler leaves the request out.
                    drop(std::hint::black_box(Box::new([0_u8; 64])));
                    std::thread::yield_now();
                }
            });
        });
        assert!(!budget.is_exceeded());
        budget.withdraw();
        while !budget.is_exceeded() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn large_pieces_ask_for_large_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            eprintln!("skipped: this kernel has no large pages");
            return;
        }
        let is_asked_for = |address: usize| {
            let maps = std::fs::read_to_string("/proc/self/smaps").expect("maps");
            let mut holds = false;
            for line in maps.lines() {
                let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                let bound = |text| usize::from_str_radix(text, 16).ok();
                if let Some((Some(from), Some(to))) = range.map(|(a, b)| (bound(a), bound(b))) {
                    holds = (from..to).contains(&address);
                }
                if holds && line.starts_with("VmFlags:") {
                    return line.split(' ').any(|flag| flag == "hg");
                }
            }
            panic!("no map holds {address:#x}");
        };
        let large = vec![1_u8; 16 << 20];
        assert!(is_asked_for(large.as_ptr().addr() + (8 << 20)));
    }
}
