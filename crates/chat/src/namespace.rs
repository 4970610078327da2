//! `namespace()`: the one thing that a template can change.
//!
//! Only through it can a value grow without end, so what is stored is checked: it must not nest
//! deeper than [`MAX_DEPTH`], lazy sequences become lists, and no namespace goes into a namespace.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use crate::limits::{MAX_DEPTH, deep};
use crate::pyvalue::repr_of;
use crate::source::SET_METHOD;

/// Values looked at for one unit of fuel.
const NODES_PER_FUEL: u64 = 16;

/// Jinja2's `Namespace`.
#[derive(Default)]
pub(crate) struct Namespace {
    fields: Mutex<Vec<(String, Value)>>,
}

/// `namespace(mapping, name=value…)`.
pub(crate) fn namespace(state: &State, from: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let namespace = Namespace::default();
    if let Some(from) = from {
        for key in from.try_iter()? {
            let value = from.get_item(&key)?;
            namespace.set(state, key.to_string(), &value)?;
        }
    }
    let names: Vec<String> = named.args().map(str::to_owned).collect();
    for name in names {
        let value: Value = named.get(&name)?;
        namespace.set(state, name, &value)?;
    }
    Ok(Value::from_object(namespace))
}

impl Namespace {
    fn set(&self, state: &State, name: String, value: &Value) -> Result<(), Error> {
        let mut nodes = 0;
        let settled = settle(state, value, 0, &mut nodes)?;
        state.consume_fuel(1)?;
        let value = settled.unwrap_or_else(|| value.clone());
        let mut fields = self.fields.lock().unwrap_or_else(PoisonError::into_inner);
        match fields.iter_mut().find(|(known, _)| *known == name) {
            Some(field) => field.1 = value,
            None => fields.push((name, value)),
        }
        Ok(())
    }
}

/// The value without lazy parts, or `None` if it has none.
fn settle(
    state: &State,
    value: &Value,
    depth: usize,
    nodes: &mut u64,
) -> Result<Option<Value>, Error> {
    *nodes += 1;
    if nodes.is_multiple_of(NODES_PER_FUEL) {
        state.consume_fuel(1)?;
    }
    if depth > MAX_DEPTH {
        return Err(deep());
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let plain = value.is_tuple() || value.downcast_object_ref::<Vec<Value>>().is_some();
            let mut changed = !plain;
            let mut items = Vec::new();
            for item in value.try_iter()? {
                let settled = settle(state, &item, depth + 1, nodes)?;
                changed |= settled.is_some();
                items.push(settled.unwrap_or(item));
            }
            Ok(match (changed, value.is_tuple()) {
                (false, _) => None,
                (true, true) => Some(Value::from(minijinja::value::Tuple::from(items))),
                (true, false) => Some(Value::from(items)),
            })
        }
        ValueKind::Map => {
            let mut changed = false;
            let mut entries = Vec::new();
            for key in value.try_iter()? {
                let item = value.get_item(&key)?;
                let settled = settle(state, &item, depth + 1, nodes)?;
                changed |= settled.is_some();
                entries.push((key, settled.unwrap_or(item)));
            }
            Ok(changed.then(|| Value::from_pairs(entries)))
        }
        _ if value.downcast_object_ref::<Namespace>().is_some() => Err(Error::new(
            ErrorKind::InvalidOperation,
            "a namespace cannot be kept in a namespace",
        )),
        _ => Ok(None),
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<Namespace>")
    }
}

impl Object for Namespace {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        let fields = self.fields.lock().unwrap_or_else(PoisonError::into_inner);
        fields.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        if method != SET_METHOD {
            return match self.get_value(&Value::from(method)) {
                Some(field) => field.call(state, args),
                None => Err(Error::from(ErrorKind::UnknownMethod)),
            };
        }
        let (name, value): (String, &Value) = from_args(args)?;
        self.set(state, name, value)?;
        Ok(Value::from(()))
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = self.fields.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let fields = Value::from_pairs(fields);
        write!(f, "<Namespace {}>", repr_of(&fields).map_err(|_| fmt::Error)?)
    }
}
