//! Functions that a template finds: those of Hugging Face, and Jinja2's where minijinja lacks them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use crate::concat::{ADDEND, CONCAT, addend, concat};
use crate::namespace::namespace;
use crate::pystr::wrong;
use crate::pyvalue::str_of;
use crate::source::VARIADIC;
use crate::strftime;

/// What a template passed to `raise_exception`.
#[derive(Debug)]
pub(crate) struct Raised(pub(crate) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Installs all of them.
pub(crate) fn install(environment: &mut Environment<'_>) {
    environment.remove_global("debug");
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: &str| strftime_at(strftime::now(), format));
    environment.add_function("namespace", namespace);
    environment.add_function("dict", dict);
    environment.add_function("cycler", |items: Rest<Value>| -> Result<Value, Error> {
        if items.0.is_empty() {
            return Err(wrong("cycler needs at least one item"));
        }
        Ok(Value::from_object(Cycler { items: items.0, at: AtomicUsize::new(0) }))
    });
    environment.add_function("joiner", |by: Option<Value>| -> Result<Value, Error> {
        let by = by.map_or(Ok(", ".to_owned()), |by| str_of(&by))?;
        Ok(Value::from_object(Joiner { by, used: AtomicUsize::new(0) }))
    });
    environment.add_function(CONCAT, concat);
    environment.add_function(ADDEND, addend);
    environment.add_function(VARIADIC, |wrapped: Value, names: Rest<String>| {
        Value::from_object(Variadic { wrapped, names: names.0 })
    });
}

fn raise_exception(state: &State<'_, '_>, message: &Value) -> Result<Value, Error> {
    let message = str_of(message)?;
    let message = crate::marks::unmark(&message).into_owned();
    if let Some(text) = crate::conversation::excuse(state, &message) {
        return Ok(text);
    }
    Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
}

pub(crate) fn strftime_at(unix_seconds: u64, format: &str) -> Result<String, Error> {
    strftime::at(unix_seconds, format)
        .map_err(|code| wrong(format!("strftime_now does not know %{code}")))
}

/// `dict(mapping or pairs, name=value…)`, always a new one.
fn dict(state: &State, from: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let mut pairs = Vec::new();
    if let Some(from) = from {
        let is_map = from.kind() == ValueKind::Map;
        for item in from.try_iter()? {
            state.consume_fuel(2)?;
            pairs.push(match is_map {
                true => (item.clone(), from.get_item(&item)?),
                false => (item.get_item_by_index(0)?, item.get_item_by_index(1)?),
            });
        }
    }
    for name in named.args().map(str::to_owned).collect::<Vec<_>>() {
        pairs.push((Value::from(&name), named.get(&name)?));
    }
    Ok(Value::from_pairs(pairs))
}

/// Jinja2's `cycler`.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = self.at.load(Ordering::Relaxed) % self.items.len();
        (key.as_str() == Some("current")).then(|| self.items[at].clone())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        _: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "next" => {
                let at = self.at.fetch_add(1, Ordering::Relaxed);
                Ok(self.items[at % self.items.len()].clone())
            }
            "reset" => {
                self.at.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// Jinja2's `joiner`: nothing the first time, then its text.
#[derive(Debug)]
struct Joiner {
    by: String,
    used: AtomicUsize,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        let first = self.used.swap(1, Ordering::Relaxed) == 0;
        Ok(Value::from(if first { "" } else { &self.by }))
    }
}

/// A macro that takes more arguments than it names; see [`source`](crate::source).
struct Variadic {
    wrapped: Value,
    names: Vec<String>,
}

impl fmt::Debug for Variadic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.wrapped)
    }
}

impl Object for Variadic {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.wrapped.get_item(key).ok()
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (args, named) = match args.split_last() {
            Some((last, before)) if last.is_kwargs() => (before, last.clone()),
            _ => (args, Value::from_pairs::<[(Value, Value); 0], _, _>([])),
        };
        let (own, extra) = args.split_at(args.len().min(self.names.len()));
        let (mut known, mut unknown) = (Vec::new(), Vec::new());
        for key in named.try_iter()? {
            let (name, value) = (key.to_string(), named.get_item(&key)?);
            match name == "caller" || self.names.contains(&name) {
                true => known.push((name, value)),
                false => unknown.push((key, value)),
            }
        }
        known.push(("varargs".into(), Value::from(Tuple::from(extra.to_vec()))));
        known.push(("kwargs".into(), Value::from_pairs(unknown)));
        let mut all = own.to_vec();
        all.push(Value::from(Kwargs::from_iter(known)));
        self.wrapped.call(state, &all)
    }
}
