//! Downloads that cannot end well: a clear error, and nothing with a name that it does not deserve.

mod server;

use std::fs::{self, File};
use std::time::{Duration, Instant};

use lily_hub::{Cache, HubError, HubOptions};
use server::{ID, Reply, Request, Server, Site, assert_sound, parts, pull};

const SHARD: &str = "model-00002-of-00002.safetensors";

/// What a pull from such a server fails with. Nothing is promised by the cache afterwards.
fn fails(handler: impl Fn(&Request, &Site) -> Reply + Send + Sync + 'static) -> HubError {
    fails_with(|options| options, handler)
}

fn fails_with(
    change: impl Fn(HubOptions) -> HubOptions,
    handler: impl Fn(&Request, &Site) -> Reply + Send + Sync + 'static,
) -> HubError {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let server = Server::start(move |r| handler(r, &site));
    let error = pull(change(server.options()), dir.path(), ID).unwrap_err();
    assert_sound(dir.path());
    assert!(Cache::new(dir.path()).find(&ID.parse().unwrap()).is_err());
    assert!(!dir.path().join("models--Org--Model-1/refs").exists());
    assert!(!error.hint().is_empty());
    assert!(!format!("{error} {error:?} {}", error.hint()).contains("hf_secret"));
    if matches!(error, HubError::Sum { .. }) {
        assert!(parts(dir.path()).is_empty(), "a damaged part was kept");
    }
    error
}

/// With a wrong listing.
fn fails_listing(listing: impl Into<String>) -> HubError {
    let listing = listing.into();
    fails(move |_, _| Reply::new(200, listing.clone()))
}

fn says(error: &HubError, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
}

#[test]
fn refusals_by_status() {
    says(&fails(|_, _| Reply::new(404, "")), &["127.0.0.1", "has no Org/Model-1"]);
    let error = fails(|_, _| Reply::new(401, ""));
    says(&error, &["refuses access to Org/Model-1", "401"]);
    assert!(error.hint().contains("set HF_TOKEN"));
    let token = |o: HubOptions| HubOptions { token: Some("hf_secret".into()), ..o };
    let error = fails_with(token, |_, _| Reply::new(403, "hf_secret"));
    assert!(error.hint().contains("HF_TOKEN is valid"), "{}", error.hint());
    says(&fails(|_, _| Reply::new(418, "")), &["status 418"]);
    says(&fails(|_, _| Reply::new(500, "")), &["status 500"]);
    // A file that is listed and not there.
    let gone =
        |r: &Request, s: &Site| if r.is_for(SHARD) { Reply::new(404, "") } else { s.reply(r) };
    says(&fails(gone), &[SHARD]);
}

#[test]
fn a_server_that_wants_to_be_left_alone() {
    let start = Instant::now();
    let error = fails(|_, _| Reply::new(429, "").with("retry-after", "86400"));
    says(&error, &["429", "86400 seconds"]);
    assert!(start.elapsed() < Duration::from_secs(60), "it was not waited for");
    says(&fails(|_, _| Reply::new(429, "").with("retry-after", "soon")), &["429"]);
}

#[test]
fn redirections() {
    says(&fails(|r, _| Reply::new(302, "").with("location", r.path.clone())), &["without end"]);
    says(&fails(|_, _| Reply::new(302, "")), &["to no address"]);
    says(
        &fails(|_, _| Reply::new(301, "").with("location", "file:///etc/passwd")),
        &["to no address"],
    );
}

#[test]
fn listings_that_are_none() {
    says(&fails_listing("<!doctype html><title>Login</title>"), &["it is a web page"]);
    says(&fails_listing("nonsense"), &["it is not JSON"]);
    says(&fails_listing(r#"{"sha":"main","siblings":[]}"#), &["names no commit"]);
    let without = |file: &str| fails_listing(Site::new().without(file).listing());
    says(&without("config.json"), &["Org/Model-1 holds no config.json"]);
    let site = Site::new().without(SHARD);
    says(&fails(move |r, _| site.reply(r)), &[SHARD, "its index names"]);
    let site = Site::new().without("other.safetensors").without(SHARD);
    let site = site.without("model-00001-of-00002.safetensors");
    let error = fails_listing(site.listing());
    says(&error, &["holds no *.safetensors"]);
    assert!(error.hint().contains("GGUF"));
    says(&fails(|r, s| s.reply(r).cut(100)), &["broke off"]);
    let long =
        |_: &Request, _: &Site| Reply { chunked: true, ..Reply::new(200, vec![b' '; 33 << 20]) };
    says(&fails(long), &["too long"]);
}

#[test]
fn names_that_lead_elsewhere() {
    for name in ["../../../evil.json", "/tmp/evil.json", "a/../../evil.json", "..\\\\evil.json"] {
        let listing = Site::new().listing().replace("README.md", name);
        says(&fails_listing(listing), &["leads out of the folder", "evil.json"]);
    }
    let index = r#"{"weight_map":{"a":"../../../evil.safetensors"}}"#;
    let site = Site::new().with("model.safetensors.index.json", index.as_bytes());
    says(&fails(move |r, _| site.reply(r)), &["evil.safetensors", "its index names"]);
    for bad in ["{}", "[", r#"{"weight_map":{"a":1}}"#] {
        let site = Site::new().with("model.safetensors.index.json", bad.as_bytes());
        says(&fails(move |r, _| site.reply(r)), &["it is not the index"]);
    }
}

#[test]
fn absurd_sizes() {
    let listing = |size: &str| {
        Site::new().listing().replace(r#""size":100000"#, &format!(r#""size":{size}"#))
    };
    for size in ["18446744073709551615", "17592186044417", "-1", "1e3", "\"7\""] {
        let error = fails_listing(listing(size));
        says(&error, &["has no possible size"]);
    }
    // Possible, but not here: refused before a byte of it is fetched.
    let large = listing("17592186044416");
    let error = fails(move |r, s| match r.path.contains("/api/") {
        true => Reply::new(200, large.clone()),
        false => s.reply(r),
    });
    assert!(matches!(error, HubError::Space { need, .. } if need > 1 << 44), "{error}");
    assert!(error.hint().contains("HF_HUB_CACHE"));
}

#[test]
fn bodies_that_do_not_fit() {
    let shard = |reply: fn(Reply) -> Reply| {
        fails(move |r, s| if r.is_for(SHARD) { reply(s.reply(r)) } else { s.reply(r) })
    };
    // Of the right length and wrong.
    let error = shard(|r| Reply { body: vec![7; 100_000], ..r });
    assert!(matches!(error, HubError::Sum { .. }), "{error}");
    says(&error, &[SHARD, "damaged"]);
    says(&shard(|r| r.with("x-linked-etag", format!("\"{}\"", "0".repeat(64)))), &["damaged"]);
    // Shorter or longer than the listing says, told or not.
    says(&shard(|r| Reply { body: vec![7; 99_999], ..r }), &["99999", "100000 were announced"]);
    says(&shard(|r| Reply { body: vec![7; 100_001], ..r }), &["100001", "100000 were announced"]);
    says(&shard(|r| Reply { body: vec![7; 50], chunked: true, ..r }), &["broke off after 150 of"]);
    says(
        &shard(|r| Reply { body: vec![7; 200_000], chunked: true, ..r }),
        &["longer than the 100000"],
    );
    says(&shard(|_| Reply::new(200, "<html>Please log in</html>")), &["26 bytes where 100000"]);
    says(&shard(|_| Reply::new(206, vec![0; 100_000])), &["asked for"]);
    says(&shard(|r| r.cut(0)), &["broke off after 0 of 100000"]);
    // Small files have a sum as well.
    let error = fails(|r, s| match r.is_for("config.json") {
        true => Reply::new(200, "[]"),
        false => s.reply(r),
    });
    assert!(matches!(error, HubError::Sum { .. }), "{error}");
}

#[test]
fn servers_that_fall_silent() {
    let two = |o: HubOptions| HubOptions { attempts: 2, stall: Duration::from_millis(200), ..o };
    let start = Instant::now();
    let error = fails_with(two, |r, s| match r.is_for(SHARD) {
        true => s.reply(r).stall(1000),
        false => s.reply(r),
    });
    says(&error, &["broke off after", "of 100000"]);
    says(&fails_with(two, |r, s| s.reply(r).stall(10)), &["broke off"]);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn no_network() {
    // A port that was free a moment ago: nobody listens.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let options = HubOptions { endpoint: format!("http://{free}"), ..HubOptions::default() };
    let error = pull(options, dir.path(), ID).unwrap_err();
    says(&error, &["127.0.0.1 cannot be reached"]);
    assert!(error.hint().contains("network") && error.hint().contains("HF_ENDPOINT"));
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is written for nothing");
    let options = HubOptions { offline: true, ..HubOptions::default() };
    assert!(matches!(pull(options, dir.path(), ID), Err(HubError::Offline)));
}

#[test]
fn two_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let server = Server::start(move |r| site.reply(r));
    let locks = dir.path().join(".locks/models--Org--Model-1");
    fs::create_dir_all(&locks).unwrap();
    let held = File::create(locks.join("lily-pull.lock")).unwrap();
    held.lock().unwrap();
    let error = server.pull(dir.path()).unwrap_err();
    assert!(matches!(error, HubError::Busy { .. }), "{error}");
    drop(held);
    assert!(server.pull(dir.path()).is_ok());
}

#[test]
#[cfg(unix)]
fn a_folder_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let server = Server::start(move |r| site.reply(r));
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = server.pull(&file).unwrap_err();
    assert!(matches!(error, HubError::Io { .. }), "{error}");
    says(&error, &["file"]);
}
