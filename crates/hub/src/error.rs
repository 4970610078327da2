use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate: its text says what happened and where, [`hint`](Self::hint) what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A text is no model id.
    #[error("{text:?} is not a model id: {problem}")]
    Spec {
        /// The text.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Neither a cache folder nor a home folder is set.
    #[error("there is no cache folder: neither HF_HUB_CACHE nor HF_HOME nor HOME is set")]
    NoCacheFolder,
    /// The model is not in the cache.
    #[error("{id} is not in the cache {cache}")]
    NotCached {
        /// The model.
        id: String,
        /// The cache folder.
        cache: PathBuf,
    },
    /// Files of the model are not in the cache.
    #[error("{id} is not complete in the cache: {missing} missing")]
    Incomplete {
        /// The model.
        id: String,
        /// What is missing, in words.
        missing: String,
    },
    /// `HF_ENDPOINT` is no address.
    #[error("HF_ENDPOINT is {endpoint:?}, which is not an address: {problem}")]
    Endpoint {
        /// The value.
        endpoint: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The token cannot be sent.
    #[error("HF_TOKEN holds characters that a token cannot have")]
    Token,
    /// `HF_HUB_OFFLINE` is set.
    #[error("downloads are switched off: HF_HUB_OFFLINE is set")]
    Offline,
    /// No connection.
    #[error("{host} cannot be reached: {problem}")]
    Unreachable {
        /// The server.
        host: String,
        /// What the system said.
        problem: String,
    },
    /// 404.
    #[error("{host} has no {what}")]
    NotFound {
        /// The server.
        host: String,
        /// What was asked for.
        what: String,
    },
    /// 401 or 403.
    #[error("{host} refuses access to {what} (status {status})")]
    Denied {
        /// The server.
        host: String,
        /// What was asked for.
        what: String,
        /// The status.
        status: u16,
        /// What became of the token.
        token: TokenUse,
    },
    /// 429, for longer than is waited.
    #[error("{host} refuses more requests for now (status 429){}", wait(*.seconds))]
    RateLimited {
        /// The server.
        host: String,
        /// Seconds that it asks to wait.
        seconds: Option<u64>,
    },
    /// Another status that is no success.
    #[error("{host} answered with status {status} when asked for {what}")]
    Status {
        /// The server.
        host: String,
        /// What was asked for.
        what: String,
        /// The status.
        status: u16,
    },
    /// Redirections that are not followed.
    #[error("{host} redirects the request for {what} {problem}")]
    Redirect {
        /// The server asked first.
        host: String,
        /// What was asked for.
        what: String,
        /// Why it is not followed.
        problem: String,
    },
    /// An answer that makes no sense.
    #[error("the answer of {host} about {what} cannot be used: {problem}")]
    Answer {
        /// The server.
        host: String,
        /// What was asked for.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The repository holds no checkpoint.
    #[error("{id} holds no {what}")]
    NoCheckpoint {
        /// The model.
        id: String,
        /// What is missing.
        what: String,
    },
    /// The download broke off again and again.
    #[error("{file} broke off after {have} of {size} bytes: {problem}")]
    Cut {
        /// The file.
        file: String,
        /// Bytes that are there.
        have: u64,
        /// Bytes of the whole.
        size: u64,
        /// What happened.
        problem: String,
    },
    /// The bytes are not those that were published.
    #[error(
        "{file} arrived damaged: its checksum is {found}, that of the published file {expected}"
    )]
    Sum {
        /// The file.
        file: String,
        /// The published checksum.
        expected: String,
        /// That of the bytes received.
        found: String,
    },
    /// The disk is too small.
    #[error("{need} bytes are to be downloaded to {folder}, where {free} are free")]
    Space {
        /// The cache folder.
        folder: PathBuf,
        /// Bytes needed.
        need: u64,
        /// Bytes free.
        free: u64,
    },
    /// Another process is downloading the same.
    #[error("{id} is being downloaded by another program")]
    Busy {
        /// The model.
        id: String,
    },
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What became of the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenUse {
    /// It was sent.
    Sent,
    /// There is none.
    Unset,
    /// It was kept back, as the connection is not encrypted.
    KeptBack,
}

fn wait(seconds: Option<u64>) -> String {
    seconds.map_or(String::new(), |s| format!("; it asks to wait {s} seconds"))
}

impl HubError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// What to do about it.
    pub fn hint(&self) -> String {
        match self {
            Self::Spec { .. } => {
                "write ORG/NAME or ORG/NAME@REVISION, as in Qwen/Qwen3.6-35B-A3B".into()
            }
            Self::NoCacheFolder => "set HF_HUB_CACHE to the folder that models are kept in".into(),
            Self::NotCached { id, .. } => {
                format!("lily pull {id} downloads it; lily models lists what is there")
            }
            Self::Incomplete { id, .. } => format!("lily pull {id} downloads what is missing"),
            Self::Endpoint { .. } => "write it as in HF_ENDPOINT=https://huggingface.co".into(),
            Self::Token => "copy the token again: it is one word, such as hf_…".into(),
            Self::Offline => "unset HF_HUB_OFFLINE to download".into(),
            Self::Unreachable { .. } => {
                "check the network connection; HF_ENDPOINT names a mirror, \
                HTTPS_PROXY a proxy"
                    .into()
            }
            Self::NotFound { .. } => "check the spelling of the model and of the revision".into(),
            Self::Denied { token: TokenUse::Sent, .. } => "check that HF_TOKEN is valid, and that \
                its owner has accepted the model's terms on its page"
                .into(),
            Self::Denied { token: TokenUse::Unset, .. } => {
                "check the spelling; for a model that needs a login set HF_TOKEN".into()
            }
            Self::Denied { token: TokenUse::KeptBack, .. } => {
                "HF_TOKEN was not sent, as HF_ENDPOINT \
                is not encrypted: use an https address"
                    .into()
            }
            Self::RateLimited { .. } | Self::Status { .. } => {
                "try again later: what has been downloaded is kept".into()
            }
            Self::Redirect { .. } | Self::Answer { .. } => {
                "check HF_ENDPOINT, and whether a login \
                page or a proxy answers in the server's place"
                    .into()
            }
            Self::NoCheckpoint { .. } => {
                "choose a model published as safetensors: GGUF and others are not read".into()
            }
            Self::Cut { .. } => "run the same command again: it goes on where it broke off".into(),
            Self::Sum { .. } => {
                "nothing of it was kept; try again, and another mirror if it happens again".into()
            }
            Self::Space { .. } => {
                "free some space, or set HF_HUB_CACHE to a folder on a larger disk".into()
            }
            Self::Busy { .. } => "wait until it is done, or end the other one".into(),
            Self::Io { .. } => "check the permissions of the cache folder and its disk".into(),
        }
    }
}
