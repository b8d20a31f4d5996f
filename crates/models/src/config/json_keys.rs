//! Keys of a `config.json`, as numbers, flags and lists.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::families::{Defaults, Sizes, by_length};
use super::rope::{self, TURNING};
use super::{RopeParameters, limits};
use crate::error::Problems;

/// Reads keys, collecting what is wrong instead of stopping at the first.
pub(crate) struct Keys<'a> {
    pub(crate) value: &'a Value,
    pub(crate) problems: Problems,
    /// Keys that hold another kind of value than theirs, each once however often it is read.
    misread: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    /// The keys of an object.
    pub(crate) fn of(value: &'a Value) -> Self {
        Self { value, problems: Problems::default(), misread: RefCell::default() }
    }

    /// All that was found to be wrong.
    pub(crate) fn into_problems(self) -> Problems {
        let Self { mut problems, misread, .. } = self;
        problems.0.extend(misread.into_inner());
        problems
    }

    /// What `read` makes of a key's value; a value of another kind is told.
    fn of_kind<T>(
        &self,
        key: &str,
        kind: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Option<T> {
        let value = self.present(key)?;
        let found = read(value);
        if found.is_none() {
            self.misread.borrow_mut().insert(format!("`{key}` = {value} is not {kind}"));
        }
        found
    }

    /// The value of a key; `None` if it is missing or null.
    pub(crate) fn present(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// A key's object.
    pub(super) fn object(&self, key: &str) -> Option<&'a Value> {
        self.of_kind(key, "an object", |value| value.is_object().then_some(value))
    }

    /// The object of rotary parameters, if there is one.
    pub(super) fn rotary_keys(&self) -> Option<&'a Value> {
        rope::rotary_keys(self.value)
    }

    /// Names rotary parameters that are of another kind than theirs, wherever they may stand.
    pub(super) fn check_rotary_kinds(&mut self) {
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(all) = self.object(key).map(Self::of) else { continue };
            let by_kind = rope::LAYER_KINDS.map(|kind| all.object(kind).map(Self::of));
            for keys in by_kind.into_iter().flatten().chain([all]) {
                keys.read_rotary_kinds();
                self.problems.0.append(&mut keys.into_problems().0);
            }
        }
    }

    fn read_rotary_kinds(&self) {
        for key in ["rope_type", "type"] {
            self.text(key);
        }
        for key in [
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "attn_factor",
            "mscale",
            "mscale_all_dim",
        ] {
            self.of_kind(key, "a number", Value::as_f64);
        }
        self.of_kind("truncate", "true or false", Value::as_bool);
    }

    /// Names ids of tokens that are of another kind than theirs.
    pub(super) fn check_token_kinds(&self) {
        self.of_kind("bos_token_id", "a whole number", Value::as_i64);
        self.of_kind("eos_token_id", "a whole number or a list of them", |ids| match ids {
            Value::Array(ids) => ids.iter().all(Value::is_i64).then_some(()),
            id => id.is_i64().then_some(()),
        });
    }

    /// Base and scaling of the rotary embedding of all layers; the base alone where frequencies depend on the length.
    pub(super) fn rope(&mut self, sizes: Sizes) -> RopeParameters {
        if by_length::is_stated(self) {
            return self.plain_rope(sizes);
        }
        let base = Defaults::of(sizes.architecture).rope_theta;
        let context = sizes.max_position_embeddings;
        RopeParameters::from_json_or(base, self.value, context, &mut self.problems)
    }

    /// The base of the rotary embedding of all layers.
    pub(super) fn plain_rope(&mut self, sizes: Sizes) -> RopeParameters {
        const KEY: &str = "rope_theta";
        let nested = self.rotary_keys().and_then(|keys| keys.get(KEY));
        let theta = nested.filter(|theta| !theta.is_null()).or_else(|| self.present(KEY));
        let value = json!({ KEY: theta });
        let base = Defaults::of(sizes.architecture).rope_theta;
        RopeParameters::from_json_or(
            base,
            &value,
            sizes.max_position_embeddings,
            &mut self.problems,
        )
    }

    /// `rope_parameters`, and in it those of full and of sliding layers where it is a map by kind.
    pub(super) fn ropes_by_kind(&self) -> (Option<&'a Value>, [Option<&'a Value>; 2]) {
        let map = self.object("rope_parameters");
        let of = |kind: &str| map.and_then(|map| map.get(kind)).filter(|value| value.is_object());
        (map, rope::LAYER_KINDS.map(of))
    }

    /// Rotary parameters of full layers: `rope_scaling` beside them takes the place of what they hold, too.
    pub(super) fn full_rope(&self, stated: Option<&Value>) -> Option<Value> {
        let mut keys = stated.and_then(Value::as_object).cloned();
        let scaling = self.object("rope_scaling").and_then(Value::as_object);
        for (key, value) in scaling.into_iter().flatten() {
            keys.get_or_insert_default().insert(key.clone(), value.clone());
        }
        keys.map(Value::Object)
    }

    /// A text, if there is one.
    pub(crate) fn text(&self, key: &str) -> Option<&'a str> {
        self.of_kind(key, "a text", Value::as_str)
    }

    /// A finite number, if there is one.
    pub(super) fn finite(&self, key: &str) -> Option<f64> {
        self.of_kind(key, "a number", Value::as_f64).filter(|number| number.is_finite())
    }

    /// A positive number; null is none of it, and a key that is left out is `absent`.
    pub(super) fn scale(&mut self, key: &str, absent: Option<f64>) -> Option<f64> {
        let Some(value) = self.value.get(key) else { return absent };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        if number.is_none() && !value.is_null() {
            self.problems.push(format!("`{key}` = {value} is not positive"));
        }
        limits::scale(&mut self.problems, key, number?)
    }

    /// A number of tokens from 1, whole or not, if there is one; what is wrong with another is told.
    pub(super) fn tokens_in(&mut self, key: &str) -> Option<f64> {
        let value = self.present(key)?;
        let most = limits::CONTEXT as f64;
        limits::within(&mut self.problems, key, value.as_f64().unwrap_or(f64::NAN), &(1.0..=most))
    }

    /// A list of numbers, if there is one.
    pub(super) fn numbers(&mut self, key: &str) -> Option<Vec<f32>> {
        let value = self.present(key)?;
        let numbers = value.as_array().and_then(|list| {
            list.iter().map(|number| number.as_f64().map(|number| number as f32)).collect()
        });
        if numbers.is_none() {
            self.problems.push(format!("`{key}` is not a list of numbers"));
        }
        numbers
    }

    /// A flag a layer, of numbers or booleans, if there is a list; it may go on beyond the layers.
    pub(super) fn each_layer(&mut self, key: &str, layers: usize) -> Option<Vec<bool>> {
        let listed = self.present(key)?;
        let one = |flag: &Value| flag.as_bool().or(flag.as_u64().map(|flag| flag != 0));
        let flags =
            listed.as_array().and_then(|list| list.iter().map(one).collect::<Option<Vec<_>>>());
        let Some(flags) = flags else {
            self.problems.push(format!("`{key}` is not a list of flags"));
            return None;
        };
        if flags.len() < layers {
            self.problems.push(format!("`{key}` lists {} of {layers} layers", flags.len()));
            return None;
        }
        Some(flags.into_iter().take(layers).collect())
    }

    /// Dimensions of a head that turn, of `partial_rotary_factor` at top level or beside the base.
    pub(super) fn turning(&mut self, sizes: Sizes, absent: f64) -> usize {
        let nested = self.rotary_keys().and_then(|rope| rope.get(TURNING));
        let nested = nested.filter(|value| !value.is_null());
        let share = match nested.or_else(|| self.present(TURNING)) {
            None => absent,
            Some(value) => value.as_f64().unwrap_or(f64::NAN),
        };
        let turning = (sizes.head_dim as f64 * share).floor();
        if !(share > 0.0 && share <= 1.0) || turning < 2.0 || turning % 2.0 != 0.0 {
            let head_dim = sizes.head_dim;
            self.problems.push(format!(
                "`{TURNING}` = {share} leaves no even number of dimensions of a head of {head_dim} to turn"
            ));
            return sizes.head_dim;
        }
        turning as usize
    }

    /// Refuses a share of a head that turns, at top level or beside a base, unless it is the whole head.
    pub(super) fn refuse_turning_in_part(&mut self) {
        if let Some(share) = rope::turning_in_part(self.value) {
            self.problems.push(format!(
                "`{TURNING}` = {share} is not supported for this family: its class turns whole heads"
            ));
        }
    }

    /// `sliding_window` in tokens; null is none, and a key that is left out is `absent`.
    pub(super) fn window(&mut self, absent: Option<usize>) -> Option<usize> {
        match self.value.get("sliding_window") {
            None => absent,
            Some(_) => self.size_from_one("sliding_window"),
        }
    }

    /// A whole number from 1, if there is one; what is wrong with another is told.
    pub(super) fn size_from_one(&mut self, key: &str) -> Option<usize> {
        let size = self.size(key)?;
        limits::check(&mut self.problems, &[(key, size, limits::CONTEXT)]);
        Some(size.max(1))
    }

    /// Whether each layer slides, as `layer_types` lists them; none without the key.
    pub(super) fn layer_types(&mut self, layers: usize) -> Option<Vec<bool>> {
        self.layer_kinds(layers, &[("full_attention", false), ("sliding_attention", true)])
    }

    /// What `layer_types` says of each layer, of kinds by their names; none without the key.
    pub(super) fn layer_kinds<T: Copy>(
        &mut self,
        layers: usize,
        kinds: &[(&str, T)],
    ) -> Option<Vec<T>> {
        let listed = self.present("layer_types")?;
        let Some(listed) = listed.as_array() else {
            self.problems.push("`layer_types` is not a list");
            return None;
        };
        if listed.len() != layers {
            let count = listed.len();
            self.problems.push(format!("`layer_types` lists {count} of {layers} layers"));
            return None;
        }
        let mut of_layers = Vec::with_capacity(listed.len());
        for (index, named) in listed.iter().enumerate() {
            let known = kinds.iter().find(|(name, _)| named.as_str() == Some(name));
            let Some((_, kind)) = known else {
                let names: Vec<&str> = kinds.iter().map(|(name, _)| *name).collect();
                let names = names.join(" and ");
                self.problems.push(format!(
                    "`layer_types[{index}]` = {named} is not supported ({names} are)"
                ));
                return None;
            };
            of_layers.push(*kind);
        }
        Some(of_layers)
    }

    pub(super) fn size(&mut self, key: &str) -> Option<usize> {
        let value = self.present(key)?;
        let size = value.as_u64().map(|n| n as usize);
        if size.is_none() {
            let message = format!("`{key}` = {value} is not a whole number");
            self.problems.push(message);
        }
        size.or(Some(1))
    }

    pub(super) fn required_size(&mut self, key: &str) -> usize {
        self.size(key).unwrap_or_else(|| {
            self.problems.push(format!("`{key}` is missing"));
            1
        })
    }

    /// A size that is known where files may leave it out; 1 if it is unusable.
    pub(crate) fn size_or(&mut self, key: &str, known: Option<usize>) -> usize {
        match known {
            Some(known) => self.size(key).unwrap_or(known),
            None => self.required_size(key),
        }
    }

    /// A number.
    pub(crate) fn number(&mut self, key: &str, default: f64) -> f64 {
        let Some(value) = self.present(key) else { return default };
        if !value.is_number() {
            self.problems.push(format!("`{key}` = {value} is not a number"));
        }
        value.as_f64().unwrap_or(default)
    }

    /// A flag; of numbers 0 is none.
    pub(super) fn flag(&self, key: &str, default: bool) -> bool {
        let as_flag =
            |value: &Value| value.as_bool().or(value.as_f64().map(|number| number != 0.0));
        self.of_kind(key, "a flag", as_flag).unwrap_or(default)
    }

    /// A switch, which numbers are not.
    pub(crate) fn switch(&self, key: &str, default: bool) -> bool {
        self.of_kind(key, "true or false", Value::as_bool).unwrap_or(default)
    }

    pub(super) fn token(&self, key: &str) -> Option<u32> {
        self.present(key).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok())
    }

    /// A list of whole numbers.
    pub(super) fn sizes(&mut self, key: &str) -> Vec<usize> {
        let Some(value) = self.present(key) else {
            return Vec::new();
        };
        let sizes = value.as_array().and_then(|list| {
            list.iter().map(|size| size.as_u64().map(|size| size as usize)).collect()
        });
        let message = format!("`{key}` = {value} is not a list of whole numbers");
        sizes.unwrap_or_else(|| {
            self.problems.push(message);
            Vec::new()
        })
    }

    /// One id or a list of them.
    pub(super) fn tokens(&self, key: &str) -> Vec<u32> {
        let ids = match self.present(key) {
            Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).collect(),
            Some(id) => id.as_u64().into_iter().collect(),
            None => Vec::new(),
        };
        ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect()
    }
}
