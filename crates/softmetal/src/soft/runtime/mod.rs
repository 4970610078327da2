//! The part of an Objective-C runtime that objc2 calls away from Apple: classes, methods, reference counts, autorelease
//! pools, blocks. Classes are made once and never go away.

mod block;
mod class;
mod object;

pub(crate) use block::Handler;
pub(crate) use class::{Base, Class, Entry, base_classes, define};
pub(crate) use object::{Header, alloc, dealloc, unpooled, with_pool};
