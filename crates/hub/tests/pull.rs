//! Downloads that end well, at once or after some trouble.

mod server;

use std::fs;
use std::sync::{Arc, Mutex};

use lily_hub::{Cache, Event, Hub, HubError, HubOptions};
use server::{COMMIT, ID, Reply, Server, Site, assert_sound, parts, pull, ranged, sha256};

const SHARD: &str = "model-00002-of-00002.safetensors";

#[test]
fn a_model_arrives_in_the_layout_of_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let served = site.clone();
    let server = Server::start(move |r| served.reply(r));
    let cache = Cache::new(dir.path());
    let spec = ID.parse().unwrap();
    let error = cache.find(&spec).unwrap_err();
    assert!(matches!(error, HubError::NotCached { .. }) && error.hint().contains(ID), "{error}");

    let mut told = Vec::new();
    let hub = Hub::new(server.options()).unwrap();
    let pulled = hub
        .pull(&cache, &spec, |event| {
            told.push(match event {
                Event::Planned { files, bytes, present, .. } => {
                    format!("{files} {bytes} {present}")
                }
                Event::File { name, size, have } => format!("{name} {size} {have}"),
                Event::At(_) => return,
                other => format!("{other:?}"),
            });
        })
        .unwrap();
    assert_eq!((pulled.files, pulled.commit.as_str()), (5, COMMIT));
    let index = site.bytes("model.safetensors.index.json").len() as u64;
    assert_eq!(pulled.bytes, 200_009 + index);
    assert_eq!(pulled.downloaded, pulled.bytes);
    assert_eq!(told[0], format!("5 {} {index}", pulled.bytes));
    assert_eq!(&told[1..3], ["config.json 2 0", "Done"]);

    let repo = dir.path().join("models--Org--Model-1");
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let snapshot = repo.join("snapshots").join(COMMIT);
    assert_eq!(pulled.path, snapshot);
    assert_eq!(cache.find(&spec).unwrap(), snapshot);
    #[cfg(unix)]
    assert_eq!(
        fs::read_link(snapshot.join(SHARD)).unwrap().to_str().unwrap(),
        format!("../../blobs/{}", sha256(site.bytes(SHARD)))
    );
    let mut names: Vec<_> = fs::read_dir(&snapshot)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 5);
    assert!(!names.iter().any(|n| n == "README.md" || n == "other.safetensors"), "{names:?}");
    assert_eq!(fs::read(snapshot.join(SHARD)).unwrap(), site.bytes(SHARD));
    assert_sound(dir.path());
    assert!(parts(dir.path()).is_empty());

    let models = cache.models().unwrap();
    assert_eq!(models.len(), 1);
    assert_eq!((models[0].id.as_str(), models[0].bytes), (ID, pulled.bytes));
    assert_eq!(models[0].revisions, ["main"]);
    assert!(models[0].missing.is_empty(), "{models:?}");

    // What is there is not fetched again.
    let before = server.requests().len();
    assert_eq!(server.pull(dir.path()).unwrap().downloaded, 0);
    assert_eq!(server.requests().len(), before + 1);
}

#[test]
fn revisions_and_refs() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let moved = Arc::new(Mutex::new(site.clone()));
    let served = Arc::clone(&moved);
    let server = Server::start(move |r| served.lock().unwrap().reply(r));
    let refs = dir.path().join("models--Org--Model-1/refs");
    // A commit is its own name.
    pull(server.options(), dir.path(), &format!("{ID}@{COMMIT}")).unwrap();
    assert!(!refs.exists());
    pull(server.options(), dir.path(), &format!("{ID}@refs/pr/1")).unwrap();
    assert!(
        server.requests()[6].path.contains("/revision/refs%2Fpr%2F1?"),
        "{:?}",
        server.requests()
    );
    assert_eq!(fs::read_to_string(refs.join("refs/pr/1")).unwrap(), COMMIT);
    // The branch moves on: a second snapshot shares the blobs that are the same.
    server.pull(dir.path()).unwrap();
    let newer = "f".repeat(40);
    *moved.lock().unwrap() = Site { commit: newer.clone(), ..site.with("config.json", b"{ }") };
    assert_eq!(server.pull(dir.path()).unwrap().downloaded, 3);
    let cache = Cache::new(dir.path());
    let find = |spec: &str| cache.find(&spec.parse().unwrap());
    assert!(find(ID).unwrap().ends_with(&newer));
    for spec in ["@refs/pr/1", "@0123456", &format!("@{COMMIT}")] {
        assert!(find(&format!("{ID}{spec}")).unwrap().ends_with(COMMIT), "{spec}");
    }
    assert!(matches!(find(&format!("{ID}@v2")), Err(HubError::NotCached { .. })));
    let models = cache.models().unwrap();
    assert_eq!(models[0].revisions, ["refs/pr/1"]);
    assert_eq!(models[1].revisions, ["main"]);
    assert_sound(dir.path());
}

#[test]
fn what_broke_off_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let server = Server::start(move |r| match r.is_for(SHARD) && r.nth < 2 {
        true => site.reply(r).cut(30_000),
        false => site.reply(r),
    });
    assert_eq!(server.pull(dir.path()).unwrap().files, 5);
    let requests = server.requests_for(SHARD);
    let ranges: Vec<_> = requests.iter().map(|r| r.header("range")).collect();
    assert_eq!(ranges, [None, Some("bytes=30000-"), Some("bytes=60000-")]);
    assert!(requests[1].header("if-range").unwrap().starts_with('"'));
    assert_sound(dir.path());
    assert!(parts(dir.path()).is_empty());
}

#[test]
fn another_run_goes_on_where_the_last_one_ended() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let server = Server::start(move |r| match r.is_for(SHARD) && r.nth == 0 {
        true => site.reply(r).cut(30_000),
        false => site.reply(r),
    });
    let once = HubOptions { attempts: 1, ..server.options() };
    let error = pull(once, dir.path(), ID).unwrap_err();
    assert!(matches!(error, HubError::Cut { have: 30_000, size: 100_000, .. }), "{error}");
    assert!(error.hint().contains("goes on"));
    assert_sound(dir.path());
    assert_eq!(parts(dir.path()).len(), 2, "the part and its validator");
    let cache = Cache::new(dir.path());
    let error = cache.find(&ID.parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains(&format!("{SHARD} is missing")), "{error}");
    assert_eq!(cache.models().unwrap()[0].missing, [SHARD]);
    assert!(!dir.path().join("models--Org--Model-1/refs").exists());
    let pulled = server.pull(dir.path()).unwrap();
    assert_eq!(pulled.downloaded, 70_000);
    assert_eq!(server.requests_for(SHARD)[1].header("range"), Some("bytes=30000-"));
    assert!(cache.find(&ID.parse().unwrap()).is_ok());
}

/// After a cut the server does something else than to go on; the file arrives all the same.
fn after_a_cut(then: impl Fn(&server::Request, &[u8]) -> Reply + Send + Sync + 'static) {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let server = Server::start(move |r| match (r.is_for(SHARD), r.nth) {
        (true, 0) => site.reply(r).cut(30_000),
        (true, 1) => then(r, site.bytes(SHARD)),
        _ => site.reply(r),
    });
    server.pull(dir.path()).unwrap();
    assert_sound(dir.path());
    assert!(parts(dir.path()).is_empty());
}

#[test]
fn servers_that_do_not_continue() {
    after_a_cut(|_, bytes| Reply::new(200, bytes));
    after_a_cut(|r, bytes| ranged(r, bytes, "\"another\""));
    after_a_cut(|_, _| Reply::new(416, ""));
    // A part of another file, of another place, of nothing, or without saying of what.
    let part = |bytes: &[u8]| Reply::new(206, &bytes[30_000..]);
    let right = "bytes 30000-99999/100000";
    after_a_cut(move |_, b| part(b).with("content-range", right).with("etag", "\"another\""));
    after_a_cut(move |_, b| part(b).with("content-range", "bytes 20000-99999/100000"));
    after_a_cut(move |_, b| part(b).with("content-range", "bytes 30000-99999/100001"));
    after_a_cut(move |_, b| part(b).with("content-range", "bytes 30000-18446744073709551616/*"));
    after_a_cut(move |_, b| part(b));
    // The right place and wrong bytes: the sum tells, and the file is fetched anew.
    after_a_cut(move |_, _| Reply::new(206, vec![0; 70_000]).with("content-range", right));
}

#[test]
fn a_part_of_another_program_is_continued() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let blobs = dir.path().join("models--Org--Model-1/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let sum = sha256(site.bytes(SHARD));
    let part = blobs.join(format!("{sum}.incomplete"));
    let whole = site.bytes(SHARD).to_vec();
    let server = Server::start(move |r| site.reply(r));
    fs::write(&part, &whole[..500]).unwrap();
    server.pull(dir.path()).unwrap();
    let request = &server.requests_for(SHARD)[0];
    assert_eq!((request.header("range"), request.header("if-range")), (Some("bytes=500-"), None));
    // Whole but for its name: nothing is fetched. Longer than the file, or damaged: fetched anew.
    for (bytes, fetched) in
        [(whole.clone(), 0), (vec![1; 100_001], 1), (vec![1; 100_000], 1), (vec![1; 9], 2)]
    {
        fs::remove_file(blobs.join(&sum)).unwrap();
        fs::write(&part, bytes).unwrap();
        let before = server.requests_for(SHARD).len();
        server.pull(dir.path()).unwrap();
        assert_eq!(server.requests_for(SHARD).len(), before + fetched);
        assert_sound(dir.path());
    }
}

#[test]
fn busy_servers_are_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let server = Server::start(move |r| match (r.path.contains("/api/"), r.nth) {
        (true, 0) => Reply::new(429, "").with("retry-after", "1"),
        (true, 1) => Reply::new(503, "busy"),
        (false, 0) if r.is_for(SHARD) => Reply::new(500, ""),
        _ => site.reply(r),
    });
    let mut waits = Vec::new();
    let hub = Hub::new(server.options()).unwrap();
    let spec = ID.parse().unwrap();
    hub.pull(&Cache::new(dir.path()), &spec, |event| {
        if let Event::Waiting { error, pause } = event {
            waits.push(format!("{error} {}", pause.as_millis()));
        }
    })
    .unwrap();
    assert_eq!(waits.len(), 3, "{waits:?}");
    assert!(waits[0].contains("429") && waits[0].ends_with(" 1000"), "{waits:?}");
}

#[test]
fn the_token_stays_with_the_endpoint() {
    let dir = tempfile::tempdir().unwrap();
    let site = Site::new();
    let elsewhere = site.clone();
    let store = Server::start(move |r| {
        let name = r.path.trim_start_matches("/cdn/").to_owned();
        ranged(r, elsewhere.bytes(&name), "\"of the store\"")
    });
    let to = store.address.clone();
    let server = Server::start(move |r| {
        if let Some(file) = r.path.strip_prefix("/moved/") {
            return Reply::new(302, "").with("location", format!("{to}/cdn/{file}"));
        }
        match r.path.rsplit_once("/resolve/") {
            Some((_, file)) => {
                let file = file.split_once('/').unwrap().1;
                let reply = Reply::new(307, "see there").with("location", format!("/moved/{file}"));
                let sum = sha256(site.bytes(file));
                reply
                    .with("x-linked-etag", format!("\"{sum}\""))
                    .with("etag", "\"of the redirection\"")
            }
            None => site.reply(r),
        }
    });
    let options = HubOptions { token: Some("hf_secret".into()), ..server.options() };
    pull(options, dir.path(), ID).unwrap();
    assert_sound(dir.path());
    let with_token = |r: &server::Request| r.header("authorization") == Some("Bearer hf_secret");
    assert!(server.requests().iter().all(with_token), "{:?}", server.requests());
    assert_eq!(store.requests().len(), 5);
    assert!(store.requests().iter().all(|r| r.header("authorization").is_none()));
}
