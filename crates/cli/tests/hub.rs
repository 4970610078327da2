//! `lily pull`, `lily models` and models in the cache.

mod common;
#[path = "../../hub/tests/server/mod.rs"]
mod server;

use std::fs;
use std::path::Path;

use common::{Run, command, isolate, lily_at};
use server::{COMMIT, ID, Reply, Server, Site};

fn pull(home: &Path, server: &Server, args: &[&str]) -> Run {
    let mut command = command(&[&["pull"], args].concat());
    isolate(&mut command, home);
    let output = command.env("HF_ENDPOINT", &server.address).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn a_model_is_pulled_listed_and_run() {
    let home = tempfile::tempdir().unwrap();
    let files = lily_demo::FILES.iter().map(|(name, bytes)| (*name, bytes.to_vec())).collect();
    let site = Site { files, commit: COMMIT.into() };
    let server = Server::start(move |r| site.reply(r));
    let run = pull(home.path(), &server, &[ID]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let snapshot = home.path().join(format!("hub/models--Org--Model-1/snapshots/{COMMIT}"));
    assert_eq!(run.stdout, format!("{}\n", snapshot.display()));
    assert!(run.stderr.contains("7 files of ") && run.stderr.contains("downloaded"), "{run:?}");
    assert!(!run.stderr.contains('\x1b'), "{run:?}");
    let run = pull(home.path(), &server, &[ID, "--json", "--quiet"]);
    let value: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&value["downloaded"], &value["commit"]), (&0.into(), &COMMIT.into()));
    assert_eq!(run.stderr, "");
    insta::assert_snapshot!("json_pull", format!("{:#}", common::shape(&value)));

    let run = lily_at(home.path(), &["models"]);
    assert!(run.stdout.contains(ID) && run.stdout.contains("complete"), "{run:?}");
    let run = lily_at(home.path(), &["models", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(value["models"][0]["complete"], true);
    insta::assert_snapshot!("json_models", format!("{:#}", common::shape(&value)));
    let question =
        ["run", "What is the capital of France?", "--temperature", "0", "--no-think", "--quiet"];
    for id in [ID, &format!("{ID}@main"), &format!("{ID}@{}", &COMMIT[..8])] {
        let run = lily_at(home.path(), &[&question[..], &["--model", id]].concat());
        assert_eq!(run.stdout, "The capital of France is Paris.\n", "{run:?}");
    }
    assert_eq!(lily_at(home.path(), &["inspect", ID]).code, Some(0));

    // A file goes: it is said, and pulled again.
    fs::remove_file(fs::canonicalize(snapshot.join("model.safetensors")).unwrap()).unwrap();
    let run = lily_at(home.path(), &[&question[..], &["--model", ID]].concat());
    assert_eq!(run.code, Some(1));
    assert!(
        run.stderr.contains("model.safetensors is missing")
            && run.stderr.contains("hint: lily pull Org/Model-1"),
        "{run:?}"
    );
    assert!(lily_at(home.path(), &["models"]).stdout.contains("model.safetensors is missing"));
    assert_eq!(pull(home.path(), &server, &[ID]).code, Some(0));
    assert_eq!(lily_at(home.path(), &["inspect", ID, "--verify"]).code, Some(0));
}

#[test]
fn refusals_have_a_hint() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start(|_| Reply::new(404, ""));
    let run = pull(home.path(), &server, &[ID]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""));
    assert!(run.stderr.starts_with("error: 127.0.0.1 has no Org/Model-1\n hint: "), "{run:?}");
    let run = lily_at(home.path(), &["models"]);
    assert!(
        run.stderr.contains("there are no models") && run.stderr.contains("lily pull"),
        "{run:?}"
    );
}
