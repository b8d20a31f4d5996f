//! Layers with a state in a cache: passes, what is taken back of them, states that are put aside.

use longdraft_kernels::recurrence::Walk;

use super::{Aside, KvCache, Layer};
use crate::config::cached::STATES_ASIDE;
use crate::error::{Result, refused};
use crate::target_model::recurrent::{CachedState, Rows, State};

impl KvCache {
    /// What the recurrent layer `layer` remembers of the committed tokens: the last inputs of its convolution,
    /// `[n − 1, C]`, the newest last, and the matrix of its delta rule, `[Nv, Dk, Dv]`, empty if it has none.
    /// `None` for layers that attend, and after a tree of which no path was kept.
    pub fn state(&self, layer: usize) -> Option<(&[f32], Vec<f32>)> {
        self.check_open().ok()?;
        let Layer::State(state) = self.layers.get(layer)? else { return None };
        let committed = self.length > self.states.as_ref()?.base;
        Some(state.values(committed))
    }

    fn each_state(&mut self) -> impl Iterator<Item = &mut CachedState> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            Layer::State(state) => Some(state.as_mut()),
            _ => None,
        })
    }

    /// Whether a pass can begin.
    /// It fails where the last pass ended with an error, or left a tree of which no path was kept.
    pub(in crate::target_model) fn check_open(&self) -> Result<()> {
        let Some(states) = &self.states else { return Ok(()) };
        if states.broken {
            return Err(refused("a pass over this cache ended with an error: truncate it first"));
        }
        if states.walk.as_ref().is_some_and(|walk| !walk.is_chain()) {
            return Err(refused(
                "a recurrent layer goes on from one path: keep one of the last tree",
            ));
        }
        Ok(())
    }

    /// Begins a pass whose rows go on from one another as `walk` says. [`Self::check_open`] comes before it.
    pub(in crate::target_model) fn begin(&mut self, walk: &Walk) {
        let length = self.length;
        let Some(states) = &mut self.states else { return };
        let advances = length > states.base;
        (states.base, states.broken) = (length, true);
        states.walk = Some(walk.clone());
        if advances {
            self.each_state().for_each(CachedState::advance);
        }
    }

    /// A layer's outputs of the rows of the pass that began.
    /// It fails where the layer has no state, or the rows do not fit.
    pub(in crate::target_model) fn step(
        &mut self,
        layer: usize,
        rows: Rows,
        is_text: bool,
    ) -> Result<Vec<f32>> {
        let walk = self.states.as_ref().and_then(|states| states.walk.as_ref());
        let (Some(Layer::State(state)), Some(walk)) = (self.layers.get_mut(layer), walk) else {
            return Err(refused("a layer without a state does not step"));
        };
        if is_text { state.run_text(&rows, walk.rows()) } else { state.run(rows, walk) }
    }

    /// Ends a pass of `rows` rows. After text the state before its last token is put aside.
    pub(in crate::target_model) fn end_pass(&mut self, rows: usize, is_text: bool) {
        self.commit(rows);
        let length = self.length;
        let Some(states) = &mut self.states else { return };
        states.broken = false;
        if is_text && rows > 0 {
            states.walk = Some(Walk::chain(1));
            states.base = length - 1;
            self.put_aside();
        }
    }

    /// Puts the states before the last pass aside. Of too many the one goes whose neighbours are closest.
    fn put_aside(&mut self) {
        let layers = self.layers.iter().filter_map(|layer| match layer {
            Layer::State(state) => Some(state.before().clone()),
            _ => None,
        });
        let states: Vec<State> = layers.collect();
        let Some(own) = &mut self.states else { return };
        own.aside.retain(|aside| aside.length < own.base);
        own.aside.push(Aside { length: own.base, states });
        if own.aside.len() > STATES_ASIDE {
            let length = |place: usize| own.aside[place].length;
            let before = |place: usize| place.checked_sub(1).map_or(0, length);
            let between = |place: &usize| length(place + 1) - before(*place);
            let place = (0..own.aside.len() - 1).min_by_key(between);
            own.aside.remove(place.unwrap_or(0));
        }
    }

    /// Of the last pass, keeps the states after `rows`, which follow one another from `first` on.
    pub(super) fn keep_states(&mut self, first: usize, rows: &[usize]) -> Result<()> {
        let length = self.length;
        let Some(states) = &mut self.states else { return Ok(()) };
        let all = length - states.base;
        let walk = states.walk.as_ref().filter(|walk| walk.rows() == all);
        let (Some(walk), true) = (walk, first == states.base) else {
            return Err(refused(format!(
                "a recurrent layer takes back tokens of its last pass, from {} on, not from {first} on",
                states.base
            )));
        };
        if !walk.is_path(rows) {
            return Err(refused("a recurrent layer keeps rows that follow one another"));
        }
        let is_all = walk.is_chain() && rows.len() == all;
        states.walk = Some(Walk::chain(rows.len()));
        if is_all {
            return Ok(());
        }
        states.broken = true;
        self.each_state().try_for_each(|state| state.keep(rows))?;
        if let Some(states) = &mut self.states {
            states.broken = false;
        }
        Ok(())
    }

    /// The largest length up to `length` that has a state.
    pub(super) fn with_state(&self, length: usize) -> usize {
        let Some(states) = &self.states else { return length };
        let is_chain = states.walk.as_ref().is_none_or(Walk::is_chain);
        if length >= self.length && !states.broken {
            return self.length;
        }
        if length >= states.base && !states.broken && is_chain {
            return length;
        }
        let aside = states.aside.iter().map(|aside| aside.length);
        aside.filter(|aside| *aside <= length).max().unwrap_or(0)
    }

    /// Cuts to `length`, or to the largest length below it that has a state.
    pub(super) fn truncate_states(&mut self, length: usize) {
        let Some(states) = &mut self.states else { return };
        if length >= self.length && !states.broken {
            return;
        }
        if length >= states.base && !states.broken {
            let (base, rows) = (states.base, (0..length - states.base).collect::<Vec<_>>());
            if self.keep_states(base, &rows).is_ok() {
                self.length = length;
                return;
            }
        }
        let Some(states) = &mut self.states else { return };
        states.aside.retain(|aside| aside.length <= length);
        let aside = states.aside.pop();
        let at = aside.as_ref().map_or(0, |aside| aside.length);
        let earlier = aside.as_ref().map(|aside| aside.states.as_slice()).unwrap_or_default();
        for (place, state) in self.each_state().enumerate() {
            state.restore(earlier.get(place));
        }
        self.length = at;
        if let Some(states) = &mut self.states {
            (states.base, states.walk, states.broken) = (at, None, false);
            states.aside.extend(aside);
        }
    }
}
