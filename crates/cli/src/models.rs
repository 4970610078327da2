//! `lily models`: what is in the cache.

use clap::Args;
use lily_hub::CachedModel;
use serde_json::json;

use crate::output::{Stdout, bytes, note_dimmed, table};
use crate::resolve::{cache, hub_failure};

/// List the models in the Hugging Face cache.
///
/// A complete one can be given to --model by the name shown. Models of other kinds (GGUF and others) are listed
/// as incomplete: they have no weights that Lily reads.
#[derive(Args)]
pub struct ModelsArgs {
    /// Print one JSON object: cache (the folder) and models with id, revisions, commit, path, bytes, complete and
    /// missing (names of files).
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn models(args: &ModelsArgs) -> anyhow::Result<()> {
    let cache = cache()?;
    let models = cache.models().map_err(|error| hub_failure(&error))?;
    let mut out = Stdout::new();
    if args.json {
        let model = |m: &CachedModel| {
            json!({
                "id": m.id,
                "revisions": m.revisions,
                "commit": m.commit,
                "path": m.path,
                "bytes": m.bytes,
                "complete": m.missing.is_empty(),
                "missing": m.missing,
            })
        };
        let models: Vec<_> = models.iter().map(model).collect();
        return Ok(out.json(&json!({ "cache": cache.root(), "models": models }))?);
    }
    if models.is_empty() {
        note_dimmed(&format!("there are no models in {}", cache.root().display()));
        note_dimmed("lily pull ORG/NAME downloads one; the built-in model needs none");
        return Ok(());
    }
    let head = ["model", "size", "state"].map(String::from).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(models.iter().map(row)).collect();
    out.text(&table(&rows))?;
    Ok(out.flush()?)
}

/// Name as --model takes it, size, state.
fn row(model: &CachedModel) -> Vec<String> {
    let name = match model.revisions.as_slice() {
        names if names.iter().any(|n| n == "main") => model.id.clone(),
        [name, ..] => format!("{}@{name}", model.id),
        [] => format!("{}@{}", model.id, &model.commit[..12.min(model.commit.len())]),
    };
    let state = match model.missing.as_slice() {
        [] => "complete".to_owned(),
        [one] => format!("{one} is missing"),
        more => format!("{} files are missing", more.len()),
    };
    vec![name, bytes(model.bytes), state]
}
