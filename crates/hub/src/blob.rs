//! One file: fetched, resumed, summed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha1::Sha1;
use sha2::{Digest, Sha256};
use ureq::http::HeaderMap;

use crate::client::{Again, Answer, Failed, Hub, escape};
use crate::error::HubError;
use crate::listing::{RemoteFile, Sum};
use crate::pull::Event;
use crate::spec::{Repo, is_hex};
use crate::store::Store;

/// Bytes read at once.
const BLOCK: usize = 256 << 10;
/// A download that arrives slower is cut, so that another try can find a better server.
const SLOWEST: u64 = 1 << 10;
/// Bytes that count as progress: a server that always cuts after fewer is given up.
const PROGRESS: u64 = 1 << 20;

enum Hasher {
    Sha256(Box<Sha256>),
    Git(Box<Sha1>),
}

impl Hasher {
    fn new(sum: &Sum, size: u64) -> Self {
        match sum {
            Sum::Sha256(_) => Self::Sha256(Box::default()),
            Sum::Git(_) => Self::Git(Box::new(Sha1::new().chain_update(format!("blob {size}\0")))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Git(hasher) => hasher.update(bytes),
        }
    }

    fn finish(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
        match self {
            Self::Sha256(hasher) => hex(&hasher.finalize()),
            Self::Git(hasher) => hex(&hasher.finalize()),
        }
    }
}

/// A download of one file.
pub(crate) struct Fetch<'a> {
    pub hub: &'a Hub,
    pub repo: &'a Repo,
    pub commit: &'a str,
    pub file: &'a RemoteFile,
    pub store: &'a Store,
}

impl Fetch<'_> {
    /// Bytes that are there already: of the whole file, or of its beginning.
    pub fn present(&self) -> u64 {
        let sum = self.file.sum.text();
        if self.is_whole() {
            return self.file.size;
        }
        len(&self.store.part(sum)).min(self.file.size)
    }

    /// Whether the file is there. Its sum was compared before it got its name.
    pub fn is_whole(&self) -> bool {
        let path = self.store.blob(self.file.sum.text());
        fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == self.file.size)
    }

    /// Fetches what is missing. On an error the part that has arrived stays for the next time, unless it is
    /// damaged.
    pub fn run(&self, on: &mut dyn FnMut(Event<'_>)) -> Result<(), HubError> {
        let part = self.store.part(self.file.sum.text());
        let on = std::cell::RefCell::new(on);
        let mut before = len(&part);
        let result = self.hub.persist(
            |error, pause| (*on.borrow_mut())(Event::Waiting { error, pause }),
            || self.attempt(&part, &mut |event| (*on.borrow_mut())(event)),
            || {
                let now = len(&part);
                now.saturating_sub(std::mem::replace(&mut before, now)) >= PROGRESS
            },
        );
        // Nothing to continue from, or another file.
        if len(&part) == 0 || matches!(result, Err(HubError::Sum { .. })) {
            remove(&part);
        }
        result
    }

    fn attempt(&self, part: &Path, on: &mut dyn FnMut(Event<'_>)) -> Result<(), Failed> {
        let io = |e: io::Error| HubError::io(part, e);
        let mut out = OpenOptions::new();
        let mut out = out.read(true).append(true).create(true).open(part).map_err(io)?;
        if out.metadata().map_err(io)?.len() > self.file.size {
            out.set_len(0).map_err(io)?;
        }
        let mut hasher = Hasher::new(&self.file.sum, self.file.size);
        let mut have = hash_rest(&mut out, &mut hasher).map_err(io)?;
        let resumed = have > 0;
        if have < self.file.size || self.file.size == 0 {
            let mut answer = self.request(part, have)?;
            match answer.last.status().as_u16() {
                206 => self.check_range(&answer, part, have)?,
                // The whole, from its beginning.
                200 => {
                    out.set_len(0).map_err(io)?;
                    hasher = Hasher::new(&self.file.sum, self.file.size);
                    have = 0;
                }
                _ => return Err(self.start_over(part, "it does not continue there".into())),
            }
            self.check_headers(&answer, have)?;
            let tag = validator(answer.last.headers());
            // A file that cannot be continued safely is fetched anew, which is no harm.
            let _ = fs::write(tag_path(part), tag.unwrap_or_default());
            on(Event::At(have));
            self.copy(&mut answer, &mut out, &mut hasher, &mut have, on)?;
        }
        out.sync_all().map_err(io)?;
        let found = hasher.finish();
        let expected = self.file.sum.text().to_owned();
        if found != expected {
            // Before the next try begins.
            remove(part);
            let file = self.file.name.clone();
            let error = HubError::Sum { file, expected, found };
            // The beginning may be of another time: once more without it.
            return Err(Failed { error, again: if resumed { Again::Soon } else { Again::Never } });
        }
        let blob = self.store.blob(&expected);
        fs::rename(part, &blob).map_err(|e| HubError::io(&blob, e))?;
        let _ = fs::remove_file(tag_path(part));
        Ok(())
    }

    fn request(&self, part: &Path, have: u64) -> Result<Answer, Failed> {
        let (org, name, file) = (self.repo.org(), self.repo.name(), escape(&self.file.name));
        let url = self.hub.url(&format!("/{org}/{name}/resolve/{}/{file}", self.commit));
        let mut headers = vec![("accept-encoding", "identity".to_owned())];
        if have > 0 {
            headers.push(("range", format!("bytes={have}-")));
            let tag = fs::read_to_string(tag_path(part)).unwrap_or_default();
            if !tag.is_empty() {
                headers.push(("if-range", tag));
            }
        }
        self.hub.get(&url, &format!("{} of {}", self.file.name, self.repo), &headers)
    }

    /// A continuation must begin where it was asked to, and be of the same file.
    fn check_range(&self, answer: &Answer, part: &Path, have: u64) -> Result<(), Failed> {
        let headers = answer.last.headers();
        let range = header(headers, "content-range").unwrap_or_default();
        let parse = || {
            let (span, total) = range.strip_prefix("bytes ")?.split_once('/')?;
            let (first, last) = span.split_once('-')?;
            let total = if total == "*" { self.file.size } else { total.parse().ok()? };
            Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?, total))
        };
        if parse() != Some((have, self.file.size.saturating_sub(1), self.file.size)) {
            let problem = format!("it gives \"{range}\" where bytes {have}- were asked for");
            return Err(self.start_over(part, problem.escape_default().to_string()));
        }
        let before = fs::read_to_string(tag_path(part)).unwrap_or_default();
        match validator(headers) {
            Some(now) if !before.is_empty() && before != now => {
                Err(self.start_over(part, "the file has changed there".into()))
            }
            _ => Ok(()),
        }
    }

    /// What the server says of the file must fit the listing.
    fn check_headers(&self, answer: &Answer, have: u64) -> Result<(), Failed> {
        if let Some(length) = answer.last.body().content_length() {
            let rest = self.file.size - have;
            if length != rest {
                let problem = format!("it gives {length} bytes where {rest} were announced");
                return Err(self.answer(problem).into());
            }
        }
        let linked = header(&answer.first, "x-linked-etag").map(|t| t.trim_matches('"').to_owned());
        match (&self.file.sum, linked) {
            (Sum::Sha256(expected), Some(found)) if is_hex(&found, 64) && found != *expected => {
                let (file, expected) = (self.file.name.clone(), expected.clone());
                Err(HubError::Sum { file, expected, found }.into())
            }
            _ => Ok(()),
        }
    }

    fn copy(
        &self,
        answer: &mut Answer,
        out: &mut File,
        hasher: &mut Hasher,
        have: &mut u64,
        on: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), Failed> {
        let size = self.file.size;
        let cut = |have: u64, problem: String| Failed {
            error: HubError::Cut { file: self.file.name.clone(), have, size, problem },
            again: Again::Soon,
        };
        let mut body = answer.last.body_mut().as_reader();
        let mut block = vec![0; BLOCK];
        let window = self.hub.options.stall.max(Duration::from_millis(1));
        let (mut since, mut then) = (Instant::now(), *have);
        loop {
            let n = match body.read(&mut block) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(cut(*have, error.to_string())),
            };
            if n as u64 > size - *have {
                remove(&self.store.part(self.file.sum.text()));
                return Err(self
                    .answer(format!("it is longer than the {size} bytes announced"))
                    .into());
            }
            out.write_all(&block[..n])
                .map_err(|e| HubError::io(&self.store.part(self.file.sum.text()), e))?;
            hasher.update(&block[..n]);
            *have += n as u64;
            on(Event::At(*have));
            if since.elapsed() >= window {
                if *have - then < SLOWEST * window.as_secs() {
                    return Err(cut(*have, "it arrives too slowly".into()));
                }
                (since, then) = (Instant::now(), *have);
            }
        }
        match *have == size {
            true => Ok(()),
            false => Err(cut(*have, "the connection was closed".into())),
        }
    }

    fn answer(&self, problem: String) -> HubError {
        let what = format!("{} of {}", self.file.name, self.repo);
        HubError::Answer { host: self.hub.host(), what, problem }
    }

    /// Drops what has arrived, and tries again without it.
    fn start_over(&self, part: &Path, problem: String) -> Failed {
        remove(part);
        Failed { error: self.answer(problem), again: Again::Soon }
    }
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// The strong validator of an answer, with which a later one can be continued.
fn validator(headers: &HeaderMap) -> Option<String> {
    header(headers, "etag")
        .filter(|tag| tag.starts_with('"') && tag.ends_with('"') && tag.len() > 2)
}

fn tag_path(part: &Path) -> PathBuf {
    part.with_extension("incomplete.etag")
}

fn len(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |m| m.len())
}

fn remove(part: &Path) {
    let _ = fs::remove_file(part);
    let _ = fs::remove_file(tag_path(part));
}

/// Feeds the bytes of a file to the sum and counts them.
fn hash_rest(file: &mut File, hasher: &mut Hasher) -> io::Result<u64> {
    let mut block = vec![0; BLOCK];
    let mut have = 0;
    loop {
        match file.read(&mut block)? {
            0 => return Ok(have),
            n => {
                hasher.update(&block[..n]);
                have += n as u64;
            }
        }
    }
}
