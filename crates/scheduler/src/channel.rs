//! Events from a thread to whoever waits for them, in an async task or in a thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::api::Event;

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    waker: Option<Waker>,
    /// The sender is gone.
    ended: bool,
    /// The receiver is gone.
    cancelled: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    arrived: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a stream and its sender. The stream has no bound of its own: an answer is bounded by its request.
pub fn events() -> (EventSender, EventStream) {
    let shared = Arc::new(Shared::default());
    (EventSender(Arc::clone(&shared)), EventStream(shared))
}

/// The end of a generator. Dropping it ends the stream.
#[derive(Debug)]
pub struct EventSender(Arc<Shared>);

impl EventSender {
    /// Sends an event. `false`: the request was cancelled, nobody listens.
    pub fn send(&self, event: Event) -> bool {
        let mut state = self.0.lock();
        if state.cancelled {
            return false;
        }
        state.events.push_back(event);
        self.wake(state);
        true
    }

    /// Whether the request was cancelled: nobody listens any more.
    pub fn is_cancelled(&self) -> bool {
        self.0.lock().cancelled
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let waker = state.waker.take();
        drop(state);
        self.0.arrived.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        self.wake(state);
    }
}

/// The events of one request. Dropping it cancels the request.
#[derive(Debug)]
pub struct EventStream(Arc<Shared>);

impl EventStream {
    /// The next event; `None` after the last.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.0.lock();
        match state.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if state.ended => Poll::Ready(None),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Waits in an async task for the next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// The next event if it is there already.
    pub fn try_next(&mut self) -> Option<Event> {
        self.0.lock().events.pop_front()
    }

    /// Waits in a thread for the next event: `Ok(None)` after the last, `Err` when the time is over.
    ///
    /// # Errors
    /// The time is over.
    pub fn next_timeout(&mut self, time: Duration) -> Result<Option<Event>, TimedOut> {
        let end = Instant::now() + time;
        let mut state = self.0.lock();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Ok(Some(event));
            }
            if state.ended {
                return Ok(None);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TimedOut);
            }
            let waited = self.0.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.cancelled = true;
        state.events.clear();
    }
}

/// No event came in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;
    use crate::api::Finish;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn events_wake_the_task_that_waits() {
        let (sender, mut stream) = events();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        assert_eq!(stream.poll_next(&mut context), Poll::Pending);
        assert!(sender.send(Event::Finished(Finish::Stop)));
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert_eq!(
            stream.poll_next(&mut context),
            Poll::Ready(Some(Event::Finished(Finish::Stop)))
        );
        assert_eq!(stream.poll_next(&mut context), Poll::Pending);
        drop(sender);
        assert_eq!(count.0.load(Ordering::SeqCst), 2);
        assert_eq!(stream.poll_next(&mut context), Poll::Ready(None));
    }

    #[test]
    fn what_was_sent_before_the_end_is_received() {
        let (sender, mut stream) = events();
        sender.send(Event::Finished(Finish::Length));
        drop(sender);
        let time = Duration::from_secs(5);
        assert_eq!(stream.next_timeout(time), Ok(Some(Event::Finished(Finish::Length))));
        assert_eq!(stream.next_timeout(time), Ok(None));
    }

    #[test]
    fn a_dropped_stream_is_seen() {
        let (sender, stream) = events();
        assert!(!sender.is_cancelled());
        drop(stream);
        assert!(sender.is_cancelled());
        assert!(!sender.send(Event::Finished(Finish::Stop)));
    }

    #[test]
    fn waiting_ends_with_the_time() {
        let (_sender, mut stream) = events();
        assert_eq!(stream.next_timeout(Duration::ZERO), Err(TimedOut));
        assert_eq!(stream.try_next(), None);
    }
}
