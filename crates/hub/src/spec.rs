//! Which model.

use std::fmt;
use std::str::FromStr;

use crate::error::HubError;

/// A model on the hub: `ORG/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Repo {
    org: String,
    name: String,
}

impl Repo {
    /// Who publishes it.
    pub fn org(&self) -> &str {
        &self.org
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of its folder in the cache.
    pub fn folder(&self) -> String {
        format!("models--{}--{}", self.org, self.name)
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.org, self.name)
    }
}

/// A model and, if given, a revision of it: `ORG/NAME[@revision]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The model.
    pub repo: Repo,
    /// A branch, a tag or a commit; `main` if none is given.
    pub revision: Option<String>,
}

impl Spec {
    /// The revision asked for.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.repo.fmt(f)?;
        self.revision.iter().try_for_each(|r| write!(f, "@{r}"))
    }
}

impl FromStr for Spec {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let error = |problem| HubError::Spec { text: text.to_owned(), problem };
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (text, None),
        };
        let (org, name) = id.split_once('/').ok_or(error("there is no / between ORG and NAME"))?;
        if name.contains('/') {
            return Err(error("there is more than one /"));
        }
        if !is_part(org) || !is_part(name) {
            return Err(error(
                "ORG and NAME consist of letters, digits, '-', '_' and '.', and neither begin nor end with \
                 '-' or '.' nor have two of them in a row",
            ));
        }
        if revision.is_some_and(|r| !is_revision(r)) {
            return Err(error("the revision after @ is not the name of a branch, tag or commit"));
        }
        let repo = Repo { org: org.to_owned(), name: name.to_owned() };
        Ok(Self { repo, revision: revision.map(str::to_owned) })
    }
}

/// The hub's own rule, which also makes the name of the cache folder unambiguous.
fn is_part(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=96).contains(&text.len())
        && text.chars().all(plain)
        && !text.contains("--")
        && !text.contains("..")
        && !text.starts_with(['-', '.'])
        && !text.ends_with(['-', '.'])
}

fn is_revision(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    let part = |p: &str| !p.is_empty() && !p.starts_with('.') && p.chars().all(plain);
    text.len() <= 200 && text.split('/').all(part)
}

/// Whether a text is a full commit.
pub(crate) fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

/// Whether a text is so many hexadecimal digits, in lower case.
pub(crate) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids() {
        for text in ["Qwen/Qwen3.6-35B-A3B", "a/b@main", "a/b@refs/pr/1", "a_b/c.d@v1.0"] {
            assert_eq!(text.parse::<Spec>().unwrap().to_string(), text);
        }
        let spec: Spec = "Qwen/Qwen3.6-35B-A3B".parse().unwrap();
        assert_eq!(spec.repo.folder(), "models--Qwen--Qwen3.6-35B-A3B");
        assert_eq!((spec.repo.org(), spec.revision()), ("Qwen", "main"));
        for text in [
            "",
            "demo",
            "/",
            "a/",
            "/a",
            "a/b/c",
            "../b",
            "a/..",
            "./a",
            "a/b@",
            "a/b@../x",
            "a/b@x/../y",
            "a/b@/x",
            "a/b@x//y",
            "a b/c",
            "a/b\n",
            "a--b/c",
            "-a/b",
            "a/b@x y",
            "~/b",
            "a\\b/c",
            "é/b",
        ] {
            let error = text.parse::<Spec>().unwrap_err();
            assert!(matches!(error, HubError::Spec { .. }), "{text}: {error}");
            assert!(error.hint().contains("ORG/NAME"));
        }
        assert!(
            "a/b".parse::<Spec>().is_ok()
                && format!("a/{}", "b".repeat(97)).parse::<Spec>().is_err()
        );
    }
}
