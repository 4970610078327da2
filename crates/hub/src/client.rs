//! Requests: where the token goes, what is followed, what is tried again.

use std::ffi::OsString;
use std::fmt;
use std::time::Duration;

use ureq::http::header::{AUTHORIZATION, LOCATION, RETRY_AFTER};
use ureq::http::uri::Uri;
use ureq::http::{HeaderMap, HeaderValue, Response};
use ureq::{Agent, Body};

use crate::error::{HubError, TokenUse};

const ENDPOINT: &str = "https://huggingface.co";
/// Redirections that are followed.
const MAX_REDIRECTS: usize = 10;

/// Where from and with how much patience.
#[derive(Clone)]
pub struct HubOptions {
    /// Address of the hub or of a mirror.
    pub endpoint: String,
    /// Sent to the endpoint, and to no other server that it redirects to.
    pub token: Option<String>,
    /// Whether downloads are switched off.
    pub offline: bool,
    /// Tries in a row without progress before a download is given up.
    pub attempts: u32,
    /// Pause before the second try; doubled for each one after it.
    pub pause: Duration,
    /// Silence of a server that counts as a cut.
    pub stall: Duration,
    /// Longest time that a server may ask to wait.
    pub longest_wait: Duration,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self {
            endpoint: ENDPOINT.into(),
            token: None,
            offline: false,
            attempts: 5,
            pause: Duration::from_secs(1),
            stall: Duration::from_secs(30),
            longest_wait: Duration::from_secs(120),
        }
    }
}

impl HubOptions {
    /// `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` of the environment.
    pub fn from_env(var: impl Fn(&str) -> Option<OsString>) -> Self {
        let text = |name: &str| {
            let value = var(name)?.to_string_lossy().trim().to_owned();
            (!value.is_empty()).then_some(value)
        };
        let on = |v: String| ["1", "on", "yes", "true"].contains(&v.to_lowercase().as_str());
        Self {
            endpoint: text("HF_ENDPOINT").unwrap_or(ENDPOINT.into()),
            token: text("HF_TOKEN"),
            offline: text("HF_HUB_OFFLINE").is_some_and(on),
            ..Self::default()
        }
    }
}

impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never the token.
        f.debug_struct("HubOptions").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// A hub to download from.
pub struct Hub {
    pub(crate) options: HubOptions,
    endpoint: Uri,
    token: Option<HeaderValue>,
    token_use: TokenUse,
    agent: Agent,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.options.fmt(f)
    }
}

/// An error, and whether trying again may help.
pub(crate) struct Failed {
    pub error: HubError,
    pub again: Again,
}

/// Whether to try again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    Never,
    /// After the usual pause.
    Soon,
    /// After the time that the server asked for.
    After(Duration),
}

impl From<HubError> for Failed {
    fn from(error: HubError) -> Self {
        Self { error, again: Again::Never }
    }
}

/// A successful answer: the headers of the first one, as a redirection tells of the file itself what the server
/// that it leads to does not know, and the last one.
pub(crate) struct Answer {
    pub first: HeaderMap,
    pub last: Response<Body>,
}

impl Hub {
    /// A client. Connects to nothing yet.
    pub fn new(options: HubOptions) -> Result<Self, HubError> {
        let bad = |problem| HubError::Endpoint { endpoint: options.endpoint.clone(), problem };
        let endpoint: Uri = options
            .endpoint
            .trim_end_matches('/')
            .parse()
            .map_err(|_| bad("it cannot be read as a URL"))?;
        match endpoint.scheme_str() {
            Some("http" | "https") => {}
            _ => return Err(bad("it begins with neither https:// nor http://")),
        }
        match endpoint.authority() {
            Some(authority) if authority.as_str().contains('@') => {
                return Err(bad("it holds a user name; use HF_TOKEN"));
            }
            Some(_) if endpoint.query().is_none() => {}
            _ => return Err(bad("it has no host, or a query")),
        }
        let local = is_loopback(endpoint.host().unwrap_or_default());
        let mut builder = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("lily/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(options.stall))
            .timeout_recv_response(Some(options.stall))
            .timeout_per_read(Some(options.stall));
        if local {
            builder = builder.proxy(None);
        }
        let token = options.token.as_deref().map(bearer).transpose()?;
        let token_use = match (&token, endpoint.scheme_str() == Some("https") || local) {
            (None, _) => TokenUse::Unset,
            (Some(_), true) => TokenUse::Sent,
            (Some(_), false) => TokenUse::KeptBack,
        };
        let agent = builder.build().new_agent();
        Ok(Self { options, endpoint, token, token_use, agent })
    }

    /// The server's name.
    pub(crate) fn host(&self) -> String {
        self.endpoint.authority().map_or(String::new(), |a| a.to_string())
    }

    /// An address on the endpoint; `path` begins with `/`.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.options.endpoint.trim_end_matches('/'))
    }

    /// Asks for something once. `what` names it in errors.
    pub(crate) fn get(
        &self,
        url: &str,
        what: &str,
        headers: &[(&'static str, String)],
    ) -> Result<Answer, Failed> {
        let mut uri: Uri = url.parse().map_err(|_| self.redirect(what, "to no address".into()))?;
        let mut first = None;
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(uri.clone());
            for (name, value) in headers {
                request = request.header(*name, value);
            }
            let known = same_origin(&uri, &self.endpoint) && self.token_use == TokenUse::Sent;
            if let Some(token) = self.token.as_ref().filter(|_| known) {
                request = request.header(AUTHORIZATION, token);
            }
            let answer = request.call().map_err(|error| self.unreachable(&uri, error))?;
            let status = answer.status().as_u16();
            if !matches!(status, 301 | 302 | 303 | 307 | 308) {
                let first = first.unwrap_or_else(|| answer.headers().clone());
                return match status {
                    200 | 206 | 416 => Ok(Answer { first, last: answer }),
                    _ => Err(self.refused(&uri, what, status, answer.headers())),
                };
            }
            let to = answer.headers().get(LOCATION).and_then(|l| l.to_str().ok()).unwrap_or("");
            let next =
                resolve(&uri, to).ok_or_else(|| self.redirect(what, "to no address".into()))?;
            if uri.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                let host = next.host().unwrap_or_default();
                return Err(self.redirect(what, format!("to {host} without encryption")).into());
            }
            first.get_or_insert_with(|| answer.headers().clone());
            uri = next;
        }
        Err(self.redirect(what, "without end".into()).into())
    }

    /// Asks again as long as it may help.
    pub(crate) fn persist<T>(
        &self,
        mut waiting: impl FnMut(&HubError, Duration),
        mut attempt: impl FnMut() -> Result<T, Failed>,
        mut progressed: impl FnMut() -> bool,
    ) -> Result<T, HubError> {
        let mut tries = 0;
        loop {
            let failed = match attempt() {
                Ok(value) => return Ok(value),
                Err(failed) => failed,
            };
            tries = if progressed() { 1 } else { tries + 1 };
            let pause = match failed.again {
                Again::Never => return Err(failed.error),
                Again::After(time) if time > self.options.longest_wait => return Err(failed.error),
                Again::After(time) => time,
                Again::Soon => self.options.pause * 2u32.saturating_pow((tries - 1).min(6)),
            };
            if tries >= self.options.attempts {
                return Err(failed.error);
            }
            waiting(&failed.error, pause);
            std::thread::sleep(pause);
        }
    }

    fn redirect(&self, what: &str, problem: String) -> HubError {
        HubError::Redirect { host: self.host(), what: what.into(), problem }
    }

    fn unreachable(&self, uri: &Uri, error: ureq::Error) -> Failed {
        let problem = match &error {
            ureq::Error::HostNotFound => "its name is not known".into(),
            ureq::Error::Timeout(_) => "it does not answer".into(),
            ureq::Error::Io(e) => e.to_string(),
            other => other.to_string(),
        };
        let host = uri.authority().map_or(String::new(), |a| a.host().to_owned());
        Failed { error: HubError::Unreachable { host, problem }, again: Again::Soon }
    }

    fn refused(&self, uri: &Uri, what: &str, status: u16, headers: &HeaderMap) -> Failed {
        let host = uri.authority().map_or(String::new(), |a| a.host().to_owned());
        let what = what.to_owned();
        match status {
            404 => HubError::NotFound { host, what }.into(),
            401 | 403 => HubError::Denied { host, what, status, token: self.token_use }.into(),
            429 => {
                let seconds = headers.get(RETRY_AFTER).and_then(|v| v.to_str().ok()?.parse().ok());
                let again = seconds.map_or(Again::Soon, |s| Again::After(Duration::from_secs(s)));
                Failed { error: HubError::RateLimited { host, seconds }, again }
            }
            _ => {
                let again = if status >= 500 { Again::Soon } else { Again::Never };
                Failed { error: HubError::Status { host, what, status }, again }
            }
        }
    }
}

fn bearer(token: &str) -> Result<HeaderValue, HubError> {
    let plain = token.bytes().all(|b| b.is_ascii_graphic());
    let mut value =
        HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| HubError::Token)?;
    value.set_sensitive(true);
    if plain { Ok(value) } else { Err(HubError::Token) }
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn same_origin(a: &Uri, b: &Uri) -> bool {
    let port = |uri: &Uri| {
        uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 })
    };
    let host = |uri: &Uri| uri.host().unwrap_or_default().to_ascii_lowercase();
    a.scheme_str() == b.scheme_str() && host(a) == host(b) && port(a) == port(b)
}

/// The address that a `Location` means; absolute ones, those of another host and absolute paths.
fn resolve(from: &Uri, to: &str) -> Option<Uri> {
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    let absolute = if to.starts_with("//") {
        format!("{scheme}:{to}")
    } else if to.starts_with('/') {
        format!("{scheme}://{authority}{to}")
    } else {
        to.to_owned()
    };
    let uri: Uri = absolute.parse().ok()?;
    let http = matches!(uri.scheme_str(), Some("http" | "https"));
    (http && uri.host().is_some_and(|h| !h.is_empty())).then_some(uri)
}

/// A text as one part of a path.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::new();
    for b in text.bytes() {
        match b {
            b if b.is_ascii_alphanumeric() || b"-_.~".contains(&b) => out.push(char::from(b)),
            b => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn locations() {
        let from = uri("https://a.example/x/y?z");
        let to = |to: &str| resolve(&from, to).map(|u| u.to_string());
        assert_eq!(to("/p?q").as_deref(), Some("https://a.example/p?q"));
        assert_eq!(to("//b.example/p").as_deref(), Some("https://b.example/p"));
        assert_eq!(to("http://b.example:8/p").as_deref(), Some("http://b.example:8/p"));
        for bad in ["", "p", "ftp://b/", "file:///etc/passwd", "https://", "http:///x", "\u{7f}"] {
            assert_eq!(to(bad), None, "{bad}");
        }
    }

    #[test]
    fn origins() {
        let home = uri("https://hub.example");
        for same in ["https://hub.example/x", "https://HUB.example:443/x"] {
            assert!(same_origin(&uri(same), &home), "{same}");
        }
        for other in [
            "http://hub.example/",
            "https://hub.example:8443/",
            "https://cdn.hub.example/",
            "https://hub.example.evil/",
        ] {
            assert!(!same_origin(&uri(other), &home), "{other}");
        }
    }

    #[test]
    fn endpoints_and_tokens() {
        let hub = |endpoint: &str, token: Option<&str>| {
            let token = token.map(str::to_owned);
            Hub::new(HubOptions { endpoint: endpoint.into(), token, ..HubOptions::default() })
        };
        for bad in [
            "",
            "hub.example",
            "ftp://hub.example",
            "https://u:p@hub.example",
            "https://",
            "https://a/?b",
        ] {
            assert!(matches!(hub(bad, None), Err(HubError::Endpoint { .. })), "{bad}");
        }
        let uses = |endpoint, token| hub(endpoint, token).unwrap().token_use;
        assert_eq!(uses("https://hub.example/", Some("hf_x")), TokenUse::Sent);
        assert_eq!(uses("http://hub.example", Some("hf_x")), TokenUse::KeptBack);
        assert_eq!(uses("http://127.0.0.1:1", Some("hf_x")), TokenUse::Sent);
        assert_eq!(uses("https://hub.example", None), TokenUse::Unset);
        let error = hub("https://hub.example", Some("hf_secret\nx")).unwrap_err();
        assert!(
            matches!(error, HubError::Token) && !format!("{error:?} {error}").contains("secret")
        );
        let shown = format!("{:?}", hub("https://hub.example", Some("hf_secret")).unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }

    #[test]
    fn environment() {
        let env = |vars: &[(&str, &str)]| {
            let vars: Vec<(String, String)> =
                vars.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
            HubOptions::from_env(move |name| {
                vars.iter().find(|(k, _)| k == name).map(|(_, v)| v.into())
            })
        };
        assert_eq!(env(&[]).endpoint, ENDPOINT);
        let options =
            env(&[("HF_ENDPOINT", "https://m "), ("HF_TOKEN", " t\n"), ("HF_HUB_OFFLINE", "1")]);
        assert_eq!((options.endpoint.as_str(), options.token.as_deref()), ("https://m", Some("t")));
        assert!(options.offline && !env(&[("HF_HUB_OFFLINE", "0"), ("HF_TOKEN", "")]).offline);
        assert_eq!(escape("refs/pr/1 ä"), "refs%2Fpr%2F1%20%C3%A4");
    }
}
