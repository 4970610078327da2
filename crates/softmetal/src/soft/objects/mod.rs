//! The classes, as far as the host code sends them messages.

mod command;
mod device;
mod encoder;
mod library;
mod queue;

pub(crate) use command::{CommandBuffer, Failure, lock};
pub(crate) use device::device;
pub(crate) use encoder::{Argument, Command, Copy, Encoded, Launch};

use objc2::rc::Retained;
use objc2::runtime::NSObject;
use objc2::{AnyThread, DefinedClass, Message, msg_send};

/// A new object.
fn make<T>(ivars: T::Ivars) -> Retained<T>
where
    T: DefinedClass + objc2::ClassType<Super = NSObject> + AnyThread + Message,
{
    let object = T::alloc().set_ivars(ivars);
    // SAFETY: NSObject's `init` takes nothing and gives the object back.
    unsafe { msg_send![super(object), init] }
}

/// A new object that its caller owns, as methods whose names begin with `new` give it.
fn raw<T>(ivars: T::Ivars) -> *mut T
where
    T: DefinedClass + objc2::ClassType<Super = NSObject> + AnyThread + Message,
{
    Retained::into_raw(make(ivars))
}
