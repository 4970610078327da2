//! Reading request bodies within bounds.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, EXPECT};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::error::ApiError;
use crate::options::Options;

/// A body may take so long, and more for what has arrived: on average it must come faster than
/// [`SLOWEST`]. One that drips would hold its connection for as long as it likes.
const PAUSE: Duration = Duration::from_secs(30);
/// Bytes a millisecond.
const SLOWEST: u64 = 1;
/// How much, and how long, is still read of a refused body, so that the client sees the refusal.
const DRAIN: (usize, Duration) = (8 << 20, Duration::from_secs(2));

/// The whole body.
pub async fn read(request: Request, options: &Options) -> Result<Bytes, ApiError> {
    let too_large = || {
        let message = format!(
            "the request body is larger than the {} bytes that this server takes; send less, or start it with a larger --max-body",
            options.max_body
        );
        ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let length = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if length
        .and_then(|length| length.parse::<u64>().ok())
        .is_some_and(|n| n > options.max_body as u64)
    {
        drain(request);
        return Err(too_large());
    }
    let mut body = request.into_body();
    let mut bytes = BytesMut::new();
    let begun = Instant::now();
    loop {
        let more = Duration::from_millis(bytes.len() as u64 / SLOWEST);
        let Ok(frame) = timeout_at(begun + PAUSE + more, body.frame()).await else {
            let message = "the request body did not arrive in time; send it without long pauses";
            return Err(ApiError::refused(StatusCode::REQUEST_TIMEOUT, message));
        };
        match frame {
            None => return Ok(bytes.freeze()),
            Some(Err(error)) => {
                return Err(ApiError::invalid(format!("the request body broke off: {error}")));
            }
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else { continue };
                if bytes.len() + data.len() > options.max_body {
                    discard(body);
                    return Err(too_large());
                }
                bytes.extend_from_slice(&data);
            }
        }
    }
}

/// Reads on for a moment after a refusal: a connection that is closed over unread bytes is reset, and the client
/// might never see why.
pub fn drain(request: Request) {
    // Who waits for leave to send gets none.
    if !request.headers().contains_key(EXPECT) {
        discard(request.into_body());
    }
}

fn discard(mut body: Body) {
    let (most, time) = DRAIN;
    tokio::spawn(tokio::time::timeout(time, async move {
        let mut left = most;
        while let Some(Ok(frame)) = body.frame().await {
            let taken = frame.data_ref().map_or(0, Bytes::len);
            left = left.saturating_sub(taken);
            if left == 0 {
                break;
            }
        }
    }));
}

/// The JSON of a body, whatever its Content-Type says.
pub fn json(bytes: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| {
        ApiError::invalid(format!(
            "the request body is not valid JSON: {error}; send a JSON object"
        ))
    })
}
