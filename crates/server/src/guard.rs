//! Who may talk to the server: Host header, origins, key. Before anything else is looked at.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, AUTHORIZATION, HOST, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::body::drain;
use crate::error::ApiError;
use crate::options::Options;

/// Lets a request through, or answers it.
pub async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let options = &app.options;
    let headers = request.headers();
    // An address in the request line counts as a Host header does.
    let named = request.uri().host().is_none_or(|name| name_is_allowed(name, options));
    if !named || !host_is_allowed(headers, options) {
        let message = "the Host header is not this server's; use localhost, 127.0.0.1 or [::1]";
        drain(request);
        return ApiError::refused(StatusCode::FORBIDDEN, message)
            .code("host_not_allowed")
            .into_response();
    }
    let origin = allowed_origin(headers, options);
    let preflight =
        request.method() == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &origin {
        Some(_) if preflight => preflight_response(),
        _ if request.uri().path() != "/health" && !key_is_right(headers, options) => {
            drain(request);
            let message =
                "an API key is needed: send the server's key as Authorization: Bearer KEY";
            ApiError::refused(StatusCode::UNAUTHORIZED, message)
                .code("invalid_api_key")
                .into_response()
        }
        _ => next.run(request).await,
    };
    if let Some(origin) = origin {
        response.headers_mut().insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().append(VARY, HeaderValue::from_static("Origin"));
    }
    response
}

/// A web page must not reach a server on this machine under a name of its own (DNS rebinding). Beyond this
/// machine the key protects the server under whatever name it has there.
fn host_is_allowed(headers: &HeaderMap, options: &Options) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    host.to_str().ok().and_then(host_name).is_some_and(|name| name_is_allowed(name, options))
}

fn name_is_allowed(name: &str, options: &Options) -> bool {
    let address = name.trim_matches(['[', ']']).parse::<IpAddr>();
    match address {
        _ if name.eq_ignore_ascii_case("localhost") => true,
        _ if ["127.0.0.1", "[::1]"].contains(&name) => true,
        Ok(address) if address == options.host => true,
        address => !options.host.is_loopback() && (options.api_key.is_some() || address.is_ok()),
    }
}

/// The name of a Host header without its port.
fn host_name(host: &str) -> Option<&str> {
    let end = match host.starts_with('[') {
        true => host.find(']')? + 1,
        false => host.find(':').unwrap_or(host.len()),
    };
    let (name, port) = host.split_at(end);
    let fits = match port.strip_prefix(':') {
        None => port.is_empty(),
        Some(digits) => digits.len() <= 5 && digits.bytes().all(|b| b.is_ascii_digit()),
    };
    (fits && !name.is_empty()).then_some(name)
}

fn allowed_origin(headers: &HeaderMap, options: &Options) -> Option<HeaderValue> {
    let origin = headers.get(ORIGIN)?;
    let allowed =
        options.cors_origins.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes());
    allowed.then(|| origin.clone())
}

fn preflight_response() -> Response {
    let headers = [
        (ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, OPTIONS"),
        (ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type, x-api-key"),
        (ACCESS_CONTROL_MAX_AGE, "600"),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

fn key_is_right(headers: &HeaderMap, options: &Options) -> bool {
    let Some(key) = &options.api_key else { return true };
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let header = headers.get("x-api-key").map(HeaderValue::as_bytes);
    [bearer, header].into_iter().flatten().any(|given| equal(given, key.as_bytes()))
}

/// Compares in a time that does not depend on where the two differ.
fn equal(given: &[u8], key: &[u8]) -> bool {
    let mut different = u8::from(given.len() != key.len());
    for (at, byte) in given.iter().enumerate() {
        different |= byte ^ key.get(at % key.len().max(1)).copied().unwrap_or(1);
    }
    std::hint::black_box(different) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(host: &str, bound: &str, key: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_str(host).unwrap());
        let api_key = key.map(str::to_owned);
        host_is_allowed(&headers, &Options { api_key, ..Options::new(bound.parse().unwrap()) })
    }

    #[test]
    fn hosts() {
        for host in ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8080"]
        {
            assert!(allowed(host, "127.0.0.1", None), "{host}");
        }
        let foreign = [
            "evil.example",
            "evil.example:80",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example#localhost",
            "localhost@evil.example",
            "127.0.0.1:80@evil.example",
            "xlocalhost",
            "",
            "127.0.0.1:",
            "[::1",
            "192.0.2.1",
            "localhost:x",
        ];
        for host in foreign {
            assert_eq!(allowed(host, "127.0.0.1", Some("k")), host == "127.0.0.1:", "{host}");
        }
        assert!(allowed("192.0.2.1:80", "0.0.0.0", None));
        assert!(!allowed("box.example", "0.0.0.0", None));
        assert!(allowed("box.example", "0.0.0.0", Some("k")));
        assert!(!host_is_allowed(&HeaderMap::new(), &Options::new("127.0.0.1".parse().unwrap())));
    }

    #[test]
    fn keys() {
        let right = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_str(value).unwrap());
            let mut options = Options::new("127.0.0.1".parse().unwrap());
            options.api_key = Some("sk-1".into());
            key_is_right(&headers, &options)
        };
        for (name, value) in [
            ("authorization", "Bearer sk-1"),
            ("authorization", "bearer sk-1"),
            ("x-api-key", "sk-1"),
        ] {
            assert!(right(name, value), "{name}: {value}");
        }
        for value in [
            "Bearer",
            "Bearer ",
            "Bearer sk-",
            "Bearer sk-1x",
            "Bearer sk-1sk-1",
            "Bearer  sk-1",
            "sk-1",
            "Basic sk-1",
        ] {
            assert!(!right("authorization", value), "{value}");
        }
        assert!(!right("cookie", "sk-1"));
    }
}
