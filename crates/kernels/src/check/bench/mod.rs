//! Speed of the ops: synchronised clocks around repetitions.
//!
//! An entry has inputs in several sets, which repetitions take in turn so that a device's cache does
//! not hold them, and the work of one repetition. The host's part is timed alone for starts and
//! allocations: what a device still does afterwards is awaited outside of the clock.

mod entries;

use std::time::{Duration, Instant};

use candle_core::{Device, Result, Tensor};

use super::case::{Input, Leaf};
use super::run::{caught, products_of};
use super::{Options, Size};
use crate::dispatch::{Products, set_products};

use entries::entries;

/// Bytes of inputs that sets have together, at least: more than any GPU's cache.
const ROTATED: usize = 1 << 28;

/// Most sets of inputs.
const MOST_SETS: usize = 8;

/// Time that repetitions take together, about.
const TIME: Duration = Duration::from_millis(300);

/// Most repetitions.
const MOST_TURNS: usize = 50;

/// How fast something is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rate {
    /// Multiplications and additions of products, 10¹² a second.
    Teraflops(f64),
    /// Bytes read and written, 10⁹ a second.
    Gigabytes(f64),
    /// Time of the host, 10⁻⁶ seconds a call.
    HostMicroseconds(f64),
}

/// Speed of one entry.
#[derive(Debug, Clone)]
pub struct Speed {
    /// What was timed.
    pub name: &'static str,
    /// Sizes.
    pub shape: String,
    /// Type of products.
    pub products: Products,
    /// Milliseconds of one repetition and the rate, or why there are none.
    pub outcome: std::result::Result<(f64, Rate), String>,
}

/// Work of one repetition.
#[derive(Debug, Clone, Copy)]
enum Work {
    /// Floating-point operations of products.
    Operations(f64),
    /// Bytes that are read and written.
    Bytes(f64),
    /// Calls whose starts are timed, without what they start.
    Calls(usize),
}

/// What an entry repeats.
type Repeated = Box<dyn Fn(&[Tensor]) -> Result<()>>;

/// Something to time.
struct Entry {
    name: &'static str,
    shape: String,
    multiplies: bool,
    inputs: Vec<Input>,
    work: Work,
    run: Repeated,
}

/// Times every entry whose name begins as asked and hands its speed on at once. Errors and panics of an
/// entry are its own. Products are f32 afterwards.
pub fn measure(options: &Options, mut report: impl FnMut(&Speed)) {
    let wanted = |entry: &Entry| {
        let begins = |name: &String| entry.name.starts_with(name.as_str());
        options.names.is_empty() || options.names.iter().any(begins)
    };
    for entry in entries(options.size, &options.device).into_iter().filter(wanted) {
        for products in products_of(&options.device) {
            if products == Products::Half && !entry.multiplies {
                continue;
            }
            set_products(products);
            let outcome = caught(|| entry.time(&options.device, options.size));
            let (name, shape) = (entry.name, entry.shape.clone());
            report(&Speed { name, shape, products, outcome });
        }
    }
    set_products(Products::Single);
}

/// Names of all entries.
pub fn timed_names() -> impl Iterator<Item = &'static str> {
    let mut names: Vec<&str> = Vec::new();
    for entry in entries(Size::Smoke, &Device::Cpu) {
        if !names.contains(&entry.name) {
            names.push(entry.name);
        }
    }
    names.into_iter()
}

impl Entry {
    /// Milliseconds of one repetition, and the rate.
    fn time(&self, device: &Device, size: Size) -> Result<(f64, Rate)> {
        let bytes: usize = self.inputs.iter().map(Input::bytes).sum();
        let sets = if size == Size::Smoke { 2 } else { ROTATED.div_ceil(bytes.max(1)) };
        let sets = sets.clamp(1, MOST_SETS);
        let sets = (0..sets).map(|_| self.arguments(device)).collect::<Result<Vec<_>>>()?;
        let sets: Vec<Vec<Tensor>> =
            sets.iter().map(|set| set.iter().map(Leaf::tensor).collect()).collect();
        // The first starts compile kernels and grow the pool.
        for set in sets.iter().cycle().take(2) {
            (self.run)(set)?;
        }
        let once = self.clock(device, &sets, 1)?;
        let turns = match size {
            Size::Smoke => 2,
            _ => (TIME.as_secs_f64() / once.max(1e-9)).clamp(2.0, MOST_TURNS as f64) as usize,
        };
        let seconds = self.clock(device, &sets, turns)? / turns as f64;
        let rate = match self.work {
            Work::Operations(count) => Rate::Teraflops(count / seconds / 1e12),
            Work::Bytes(count) => Rate::Gigabytes(count / seconds / 1e9),
            Work::Calls(count) => Rate::HostMicroseconds(seconds / count as f64 * 1e6),
        };
        Ok((seconds * 1e3, rate))
    }

    /// Seconds of so many repetitions.
    fn clock(&self, device: &Device, sets: &[Vec<Tensor>], turns: usize) -> Result<f64> {
        device.synchronize()?;
        let start = Instant::now();
        for set in sets.iter().cycle().take(turns) {
            (self.run)(set)?;
        }
        if !matches!(self.work, Work::Calls(_)) {
            device.synchronize()?;
        }
        let seconds = start.elapsed().as_secs_f64();
        device.synchronize()?;
        // A clock may stand still for what takes no time.
        Ok(seconds.max(1e-9))
    }

    fn arguments(&self, device: &Device) -> Result<Vec<Leaf>> {
        self.inputs.iter().map(|input| input.leaf(input.repeated_on(device)?)).collect()
    }
}
