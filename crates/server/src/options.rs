//! How the server is set up.

use std::net::IpAddr;
use std::time::Duration;

/// Settings of the HTTP side.
#[derive(Debug, Clone)]
pub struct Options {
    /// The address it listens on.
    pub host: IpAddr,
    /// Key asked for on every route but /health.
    pub api_key: Option<String>,
    /// Origins that browsers may call from.
    pub cors_origins: Vec<String>,
    /// Most bytes of a request body.
    pub max_body: usize,
    /// Time to receive all headers of a request; an idle connection is closed after it too.
    pub header_timeout: Duration,
    /// Time after which a client that takes nothing of its response is given up.
    pub write_timeout: Duration,
    /// Time that running answers have after a signal to end.
    pub grace: Duration,
}

impl Options {
    /// Most bytes of a request body, unless asked otherwise: far above any context.
    pub const MAX_BODY: usize = 16 << 20;

    /// The settings for an address.
    pub fn new(host: IpAddr) -> Self {
        Self {
            host,
            api_key: None,
            cors_origins: Vec::new(),
            max_body: Self::MAX_BODY,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(10),
        }
    }
}
