//! A hub on the loopback address, right or wrong as a test wants it.

#![allow(dead_code)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lily_hub::{Cache, Hub, HubError, HubOptions, Pulled, Spec};
use sha1::Sha1;
use sha2::{Digest, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const ID: &str = "Org/Model-1";

#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    pub headers: HashMap<String, String>,
    /// How many requests for the same path came before it.
    pub nth: usize,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub fn is_for(&self, file: &str) -> bool {
        self.path.ends_with(&format!("/{file}"))
    }
}

#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Bytes of the body after which the connection is closed.
    pub cut: Option<usize>,
    /// Whether it stays open after the cut instead.
    pub stall: bool,
    /// Whether the length is not told.
    pub chunked: bool,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.retain(|(n, _)| *n != name);
        self.headers.push((name, value.into()));
        self
    }

    pub fn cut(self, at: usize) -> Self {
        Self { cut: Some(at), ..self }
    }

    pub fn stall(self, at: usize) -> Self {
        Self { stall: true, ..self.cut(at) }
    }

    fn send(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} Status\r\nconnection: close\r\n", self.status);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        match self.chunked {
            true => head.push_str("transfer-encoding: chunked\r\n\r\n"),
            false => head.push_str(&format!("content-length: {}\r\n\r\n", self.body.len())),
        }
        stream.write_all(head.as_bytes())?;
        let sent = &self.body[..self.cut.unwrap_or(self.body.len()).min(self.body.len())];
        if self.chunked {
            stream.write_all(format!("{:x}\r\n", sent.len()).as_bytes())?;
            stream.write_all(sent)?;
            stream.write_all(b"\r\n0\r\n\r\n")?;
        } else {
            stream.write_all(sent)?;
        }
        stream.flush()?;
        if self.stall {
            std::thread::sleep(Duration::from_secs(30));
        }
        Ok(())
    }
}

pub struct Server {
    pub address: String,
    log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let (handler, shared) = (Arc::new(handler), Arc::clone(&log));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (handler, log) = (Arc::clone(&handler), Arc::clone(&shared));
                std::thread::spawn(move || serve(stream, &*handler, &log));
            }
        });
        Self { address, log }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }

    pub fn requests_for(&self, file: &str) -> Vec<Request> {
        self.requests().into_iter().filter(|r| r.is_for(file)).collect()
    }

    pub fn options(&self) -> HubOptions {
        HubOptions {
            endpoint: self.address.clone(),
            attempts: 3,
            pause: Duration::from_millis(1),
            stall: Duration::from_secs(5),
            longest_wait: Duration::from_secs(2),
            ..HubOptions::default()
        }
    }

    pub fn pull(&self, root: &Path) -> Result<Pulled, HubError> {
        pull(self.options(), root, ID)
    }
}

pub fn pull(options: HubOptions, root: &Path, spec: &str) -> Result<Pulled, HubError> {
    let spec: Spec = spec.parse().unwrap();
    Hub::new(options)?.pull(&Cache::new(root), &spec, |_| {})
}

fn serve(mut stream: TcpStream, handler: &dyn Fn(&Request) -> Reply, log: &Mutex<Vec<Request>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    let mut next = || {
        line.clear();
        lines.by_ref().take(1 << 16).read_line(&mut line).ok()?;
        Some(line.trim_end().to_owned()).filter(|l| !l.is_empty())
    };
    let Some(first) = next() else { return };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = HashMap::new();
    while let Some(line) = next() {
        let (name, value) = line.split_once(':').unwrap();
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let request = {
        let mut log = log.lock().unwrap();
        let nth = log.iter().filter(|r| r.path == path).count();
        let request = Request { path, headers, nth };
        log.push(request.clone());
        request
    };
    // Who hangs up is part of some tests.
    let _ = handler(&request).send(&mut stream);
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub fn git(bytes: &[u8]) -> String {
    hex(&Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}

/// A repository served as the hub would.
#[derive(Clone)]
pub struct Site {
    pub files: Vec<(&'static str, Vec<u8>)>,
    pub commit: String,
}

impl Site {
    /// A checkpoint of two shards with 200 kB of weights.
    pub fn new() -> Self {
        let weights = |seed: u32| {
            let mut x = seed;
            let next = |_| {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (x >> 24) as u8
            };
            (0..100_000).map(next).collect()
        };
        let index = r#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
        Self {
            files: vec![
                ("README.md", b"about".to_vec()),
                ("config.json", b"{}".to_vec()),
                ("model.safetensors.index.json", index.into()),
                ("model-00001-of-00002.safetensors", weights(1)),
                ("model-00002-of-00002.safetensors", weights(2)),
                ("other.safetensors", b"not in the index".to_vec()),
                ("tokenizer.json", b"{\"t\":1}".to_vec()),
            ],
            commit: COMMIT.into(),
        }
    }

    pub fn without(mut self, file: &str) -> Self {
        self.files.retain(|(name, _)| *name != file);
        self
    }

    pub fn with(self, file: &'static str, bytes: &[u8]) -> Self {
        let mut site = self.without(file);
        site.files.push((file, bytes.to_vec()));
        site
    }

    pub fn bytes(&self, file: &str) -> &[u8] {
        &self.files.iter().find(|(name, _)| *name == file).unwrap().1
    }

    pub fn listing(&self) -> String {
        let entries: Vec<String> = self
            .files
            .iter()
            .map(|(name, bytes)| {
                let lfs = match name.ends_with(".safetensors") {
                    true => {
                        format!(r#","lfs":{{"sha256":"{}","size":{}}}"#, sha256(bytes), bytes.len())
                    }
                    false => String::new(),
                };
                let (size, git) = (bytes.len(), git(bytes));
                format!(r#"{{"rfilename":"{name}","size":{size},"blobId":"{git}"{lfs}}}"#)
            })
            .collect();
        format!(r#"{{"sha":"{}","siblings":[{}]}}"#, self.commit, entries.join(","))
    }

    pub fn reply(&self, request: &Request) -> Reply {
        if request.path.starts_with(&format!("/api/models/{ID}/revision/")) {
            return Reply::new(200, self.listing()).with("content-type", "application/json");
        }
        let prefix = format!("/{ID}/resolve/{}/", self.commit);
        let name = request.path.strip_prefix(&prefix).unwrap_or_default();
        let Some((_, bytes)) = self.files.iter().find(|(n, _)| *n == name) else {
            return Reply::new(404, "Entry not found");
        };
        ranged(request, bytes, &format!("\"{}\"", sha256(bytes)))
    }
}

/// Part or whole of a file, as `Range` and `If-Range` ask.
pub fn ranged(request: &Request, bytes: &[u8], etag: &str) -> Reply {
    let same = request.header("if-range").is_none_or(|tag| tag == etag);
    let from = request.header("range").filter(|_| same).map(|range| {
        range.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap().parse::<usize>().unwrap()
    });
    match from {
        None => Reply::new(200, bytes).with("etag", etag),
        Some(from) if from >= bytes.len() => Reply::new(416, ""),
        Some(from) => Reply::new(206, &bytes[from..])
            .with("etag", etag)
            .with("content-range", format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len())),
    }
}

/// No name in the cache promises what is not there: each whole blob has the sum in its name, each file of a
/// snapshot leads to one.
pub fn assert_sound(root: &Path) {
    let repo = root.join("models--Org--Model-1");
    let entries = |dir: &str| std::fs::read_dir(repo.join(dir)).into_iter().flatten().flatten();
    for blob in entries("blobs") {
        let name = blob.file_name().into_string().unwrap();
        let bytes = std::fs::read(blob.path()).unwrap();
        if !name.contains(".incomplete") {
            assert!([sha256(&bytes), git(&bytes)].contains(&name), "{name} is not its sum");
        }
    }
    for snapshot in entries("snapshots") {
        for file in std::fs::read_dir(snapshot.path()).unwrap().flatten() {
            let target = std::fs::canonicalize(file.path()).unwrap();
            assert!(target.starts_with(repo.join("blobs").canonicalize().unwrap()), "{target:?}");
        }
    }
}

/// Names of what lies in the blob folder and is no whole blob.
pub fn parts(root: &Path) -> Vec<String> {
    let dir = std::fs::read_dir(root.join("models--Org--Model-1/blobs"));
    let names = dir.into_iter().flatten().flatten().map(|e| e.file_name().into_string().unwrap());
    names.filter(|n| n.contains('.')).collect()
}
