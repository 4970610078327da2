//! Connections: accepted, bounded, and ended in order.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use crate::app::{App, router};
use crate::model::ServedModel;
use crate::options::Options;
use crate::socket::Socket;
use lily_scheduler::Generator;

/// Connections at once; more wait to be accepted.
const CONNECTIONS: usize = 1024;
/// Bytes of a request's line and headers.
const HEADER_BYTES: usize = 64 << 10;
/// Threads for HTTP: little work, and the device needs the cores.
const THREADS: usize = 2;
/// Time that finished answers have to reach their clients at the end.
const FLUSH: Duration = Duration::from_secs(2);
/// Time beyond the grace after which the rest is dropped.
const PATIENCE: Duration = Duration::from_secs(3);

/// Serves until the process is told to end (SIGTERM, Ctrl-C), lets running answers finish within the grace, and
/// returns.
///
/// # Errors
/// The system grants no runtime, or the listener cannot be used.
pub fn serve(
    listener: TcpListener,
    options: Options,
    model: ServedModel,
    generator: Arc<dyn Generator>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("http")
        .enable_all()
        .build()?;
    let app = Arc::new(App::new(model, generator, options));
    let result = runtime.block_on(async move {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let end = told_to_end()?;
        run(&app, listener, end).await;
        Ok(())
    });
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

async fn run(app: &Arc<App>, listener: tokio::net::TcpListener, end: impl Future<Output = ()>) {
    let graceful = GracefulShutdown::new();
    tokio::select! {
        () = accept(app, &listener, &graceful) => {}
        () = end => {}
    }
    drop(listener);
    let grace = app.options.grace;
    app.generator.shutdown(grace);
    tokio::select! {
        () = graceful.shutdown() => {}
        () = drained(app, grace + PATIENCE) => {}
    }
}

async fn accept(app: &Arc<App>, listener: &tokio::net::TcpListener, graceful: &GracefulShutdown) {
    let router = router(app);
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(app.options.header_timeout)
        .max_buf_size(HEADER_BYTES);
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(_) => {
                // Out of file descriptors, or a connection that ended already: the next one may do.
                sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let _ = socket.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let socket = Socket::new(socket, app.options.write_timeout);
        let connection = http.serve_connection(TokioIo::new(socket), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A connection that fails concerns its client alone.
            let _ = connection.await;
            drop(permit);
        });
    }
}

/// Returns when nothing runs any more and what was made had time to be sent, at the latest after a time.
async fn drained(app: &App, most: Duration) {
    let end = Instant::now() + most;
    let mut idle_since = None;
    while Instant::now() < end {
        let status = app.generator.status();
        let idle = status.running == 0 && status.waiting == 0;
        let since = *idle_since.get_or_insert_with(Instant::now);
        if !idle {
            idle_since = None;
        } else if since.elapsed() >= FLUSH {
            return;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// Ends with the first signal; the second ends the process at once.
fn told_to_end() -> io::Result<impl Future<Output = ()>> {
    let mut signals = Signals::new()?;
    Ok(async move {
        signals.next().await;
        tokio::spawn(async move {
            signals.next().await;
            std::process::exit(130);
        });
    })
}

#[cfg(unix)]
struct Signals(tokio::signal::unix::Signal, tokio::signal::unix::Signal);

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        // Without a console there is no Ctrl-C, and nothing to wait for.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
