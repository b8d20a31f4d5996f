//! A pickle machine that can build state dicts only (protocols 2 to 5, the opcodes that
//! `torch.save` writes).

use std::collections::HashMap;
use std::rc::Rc;

/// Containers may nest this deep; state dicts need four levels.
const MAX_DEPTH: usize = 64;

/// Most values that are copied because a container grows that something else refers to as well.
/// Writers refer to a container while it is empty.
const MAX_COPIES: usize = 1 << 16;

/// Most values that are remembered: writers remember some ten of a tensor.
const MAX_MEMO: usize = 1 << 20;

/// Most dimensions of a tensor, as in PyTorch.
const MAX_RANK: usize = 64;

/// What a state dict is made of.
#[derive(Debug, Clone)]
pub(super) enum Value {
    None,
    Bool,
    Int(i64),
    Float,
    Str(Rc<str>),
    /// Tuples and lists.
    Sequence(Rc<Vec<Value>>, usize),
    Dict(Rc<Vec<(Value, Value)>>, usize),
    /// A name that was mentioned; calling anything but the allowed ones is an error.
    Global(Rc<str>),
    Storage(Storage),
    Tensor(Rc<TensorRef>),
}

/// Reference to a raw storage in the zip.
#[derive(Debug, Clone)]
pub(super) struct Storage {
    /// PyTorch class name.
    pub(super) class: Rc<str>,
    /// File name below `data/`.
    pub(super) key: Rc<str>,
}

/// A view of a storage, counts in elements.
#[derive(Debug, Clone)]
pub(super) struct TensorRef {
    pub(super) storage: Storage,
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    pub(super) stride: Vec<usize>,
}

impl Value {
    /// What it is; values themselves may be shared so often that printing them would never end.
    fn kind(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool => "a truth value",
            Self::Int(_) => "a number",
            Self::Float => "a fraction",
            Self::Str(_) => "a string",
            Self::Sequence(..) => "a tuple or list",
            Self::Dict(..) => "a dict",
            Self::Global(_) => "a name",
            Self::Storage(_) => "a storage",
            Self::Tensor(_) => "a tensor",
        }
    }

    fn depth(&self) -> usize {
        match self {
            Self::Sequence(_, depth) | Self::Dict(_, depth) => *depth,
            _ => 0,
        }
    }

    fn sequence(items: Vec<Self>) -> Result<Self, String> {
        let depth = 1 + items.iter().map(Self::depth).max().unwrap_or(0);
        if depth > MAX_DEPTH {
            return Err(format!("containers nest deeper than {MAX_DEPTH}"));
        }
        Ok(Self::Sequence(Rc::new(items), depth))
    }

    fn items(&self) -> Result<&[Self], String> {
        match self {
            Self::Sequence(items, _) => Ok(items),
            other => Err(format!("a tuple was expected, found {}", other.kind())),
        }
    }

    fn usize(&self) -> Result<usize, String> {
        match self {
            Self::Int(n) => usize::try_from(*n).map_err(|_| format!("{n} is not a size")),
            other => Err(format!("a size was expected, found {}", other.kind())),
        }
    }

    fn str(&self) -> Result<Rc<str>, String> {
        match self {
            Self::Str(s) => Ok(Rc::clone(s)),
            other => Err(format!("a string was expected, found {}", other.kind())),
        }
    }
}

enum Slot {
    Mark,
    Value(Value),
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    stack: Vec<Slot>,
    memo: HashMap<usize, Value>,
    /// Values that may still be copied.
    copies: usize,
}

/// Runs a pickle and returns what it built.
pub(super) fn parse(input: &[u8]) -> Result<Value, String> {
    let (stack, memo) = (Vec::new(), HashMap::new());
    let mut machine = Machine { input, at: 0, stack, memo, copies: MAX_COPIES };
    loop {
        let at = machine.at;
        if let Some(value) =
            machine.step().map_err(|problem| format!("pickle byte {at}: {problem}"))?
        {
            return Ok(value);
        }
    }
}

impl<'a> Machine<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.input.len());
        let end = end.ok_or("it ends in the middle")?;
        let bytes = &self.input[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    /// A little-endian unsigned number of `count` bytes.
    fn number(&mut self, count: usize) -> Result<usize, String> {
        let mut bytes = [0; 8];
        bytes[..count].copy_from_slice(self.take(count)?);
        usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| "a length is absurd".into())
    }

    fn string(&mut self, length: usize) -> Result<Rc<str>, String> {
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| "a string is not UTF-8")?;
        Ok(Rc::from(text))
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let rest = &self.input[self.at..];
        let end = rest.iter().position(|&b| b == b'\n').ok_or("it ends in the middle")?;
        let line = std::str::from_utf8(self.take(end)?).map_err(|_| "a name is not UTF-8")?;
        self.at += 1;
        Ok(line)
    }

    fn push(&mut self, value: Value) {
        self.stack.push(Slot::Value(value));
    }

    fn pop(&mut self) -> Result<Value, String> {
        match self.stack.pop() {
            Some(Slot::Value(value)) => Ok(value),
            _ => Err("the stack is empty".into()),
        }
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value>, String> {
        let mut values = Vec::new();
        loop {
            match self.stack.pop() {
                Some(Slot::Value(value)) => values.push(value),
                Some(Slot::Mark) => break,
                None => return Err("a mark is missing".into()),
            }
        }
        values.reverse();
        Ok(values)
    }

    fn pop_some(&mut self, count: usize) -> Result<Value, String> {
        let mut values = (0..count).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
        values.reverse();
        Value::sequence(values)
    }

    fn remember(&mut self, index: usize) -> Result<(), String> {
        let value = self.pop()?;
        self.memo.insert(index, value.clone());
        if self.memo.len() > MAX_MEMO {
            return Err(format!("more than {MAX_MEMO} values are remembered"));
        }
        self.push(value);
        Ok(())
    }

    fn recall(&mut self, index: usize) -> Result<(), String> {
        let value = self.memo.get(&index).ok_or("it recalls what it never stored")?.clone();
        self.push(value);
        Ok(())
    }

    /// Executes one opcode; `Some` when the pickle is complete.
    fn step(&mut self) -> Result<Option<Value>, String> {
        let opcode = self.take(1)?[0];
        match opcode {
            b'.' => return self.pop().map(Some),
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'(' => self.stack.push(Slot::Mark),
            // BUILD sets attributes of an object (metadata of an OrderedDict): not needed.
            b'0' | b'b' => drop(self.pop()?),
            b'N' => self.push(Value::None),
            0x88 | 0x89 => self.push(Value::Bool),
            b'K' => self.push_int(1)?,
            b'M' => self.push_int(2)?,
            b'J' => {
                let n = self.number(4)? as u32 as i32;
                self.push(Value::Int(i64::from(n)));
            }
            0x8a => self.push_long()?,
            b'G' => {
                self.take(8)?;
                self.push(Value::Float);
            }
            b'X' => self.push_string(4)?,
            0x8c => self.push_string(1)?,
            0x8d => self.push_string(8)?,
            b'q' => self.number(1).and_then(|i| self.remember(i))?,
            b'r' => self.number(4).and_then(|i| self.remember(i))?,
            0x94 => self.remember(self.memo.len())?,
            b'h' => self.number(1).and_then(|i| self.recall(i))?,
            b'j' => self.number(4).and_then(|i| self.recall(i))?,
            b')' | b']' => self.push(Value::sequence(Vec::new())?),
            b'}' => self.push(Value::Dict(Rc::default(), 1)),
            b't' | b'l' => {
                let items = self.pop_to_mark()?;
                self.push(Value::sequence(items)?);
            }
            0x85..=0x87 => {
                let tuple = self.pop_some(usize::from(opcode - 0x84))?;
                self.push(tuple);
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.pop_to_mark()?;
                self.append(items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(vec![key, value])?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.set_items(items)?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Value::Global(Rc::from(format!("{module}.{name}"))));
            }
            0x93 => {
                let (name, module) = (self.pop()?.str()?, self.pop()?.str()?);
                self.push(Value::Global(Rc::from(format!("{module}.{name}"))));
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(persistent(&id)?);
            }
            b'R' => {
                let (arguments, function) = (self.pop()?, self.pop()?);
                self.push(call(&function, &arguments)?);
            }
            other => return Err(format!("opcode 0x{other:02x} is not part of a state dict")),
        }
        Ok(None)
    }

    fn push_int(&mut self, bytes: usize) -> Result<(), String> {
        let n = self.number(bytes)?;
        self.push(Value::Int(n as i64));
        Ok(())
    }

    fn push_long(&mut self) -> Result<(), String> {
        let length = self.number(1)?;
        if length > 8 {
            return Err("a number has more than 64 bits".into());
        }
        let bytes = self.take(length)?;
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = if negative { [0xff; 8] } else { [0; 8] };
        wide[..length].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(wide)));
        Ok(())
    }

    fn push_string(&mut self, length_bytes: usize) -> Result<(), String> {
        let length = self.number(length_bytes)?;
        let text = self.string(length)?;
        self.push(Value::Str(text));
        Ok(())
    }

    fn append(&mut self, new: Vec<Value>) -> Result<(), String> {
        let Value::Sequence(mut items, depth) = self.pop()? else {
            return Err("items are appended to something that is not a list".into());
        };
        let depth = new.iter().map(|item| 1 + item.depth()).fold(depth, usize::max);
        if depth > MAX_DEPTH {
            return Err(format!("containers nest deeper than {MAX_DEPTH}"));
        }
        self.own(&mut items)?.extend(new);
        self.push(Value::Sequence(items, depth));
        Ok(())
    }

    /// The items of a container, a copy if something else refers to them.
    fn own<'v, T: Clone>(&mut self, items: &'v mut Rc<Vec<T>>) -> Result<&'v mut Vec<T>, String> {
        if Rc::strong_count(items) > 1 {
            let left = self.copies.checked_sub(items.len());
            self.copies = left.ok_or("containers grow after they were referred to")?;
        }
        Ok(Rc::make_mut(items))
    }

    fn set_items(&mut self, flat: Vec<Value>) -> Result<(), String> {
        let Value::Dict(mut entries, mut depth) = self.pop()? else {
            return Err("items are set on something that is not a dict".into());
        };
        if !flat.len().is_multiple_of(2) {
            return Err("a key has no value".into());
        }
        let mut flat = flat.into_iter();
        let all = self.own(&mut entries)?;
        while let (Some(key), Some(value)) = (flat.next(), flat.next()) {
            depth = depth.max(1 + value.depth());
            all.push((key, value));
        }
        if depth > MAX_DEPTH {
            return Err(format!("containers nest deeper than {MAX_DEPTH}"));
        }
        self.push(Value::Dict(entries, depth));
        Ok(())
    }
}

/// `('storage', class, key, device, count)` → a storage.
fn persistent(id: &Value) -> Result<Value, String> {
    match id.items()? {
        [Value::Str(kind), Value::Global(class), Value::Str(key), ..] if &**kind == "storage" => {
            let class = class.strip_prefix("torch.").unwrap_or(class);
            Ok(Value::Storage(Storage { class: Rc::from(class), key: Rc::clone(key) }))
        }
        _ => Err("a persistent id is not a tensor storage".into()),
    }
}

/// The calls that a state dict needs; everything else is refused.
fn call(function: &Value, arguments: &Value) -> Result<Value, String> {
    let Value::Global(name) = function else {
        return Err("something that is not a function is called".into());
    };
    let arguments = arguments.items()?;
    match (&**name, arguments) {
        ("collections.OrderedDict", []) => Ok(Value::Dict(Rc::default(), 1)),
        (
            "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor",
            [Value::Storage(storage), offset, shape, stride, ..],
        ) => {
            let sizes = |v: &Value| -> Result<Vec<usize>, String> {
                let items = v.items()?;
                if items.len() > MAX_RANK {
                    return Err(format!("a tensor of {} dimensions", items.len()));
                }
                items.iter().map(Value::usize).collect()
            };
            Ok(Value::Tensor(Rc::new(TensorRef {
                storage: storage.clone(),
                offset: offset.usize()?,
                shape: sizes(shape)?,
                stride: sizes(stride)?,
            })))
        }
        ("torch._utils._rebuild_parameter", [Value::Tensor(tensor), ..]) => {
            Ok(Value::Tensor(Rc::clone(tensor)))
        }
        (name, _) => Err(format!("`{name}` is called, which is not part of a state dict")),
    }
}
