//! Texts and JSON that people and programs rely on, compared with what was agreed
//! (`INSTA_UPDATE=always cargo test -p lily --test snapshots` writes them anew; read the difference).

mod common;

use std::fs;

use common::{file, json, lily, lily_at, shape};

fn settings() -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings
}

#[test]
fn help() {
    let commands = [
        "",
        "run",
        "chat",
        "serve",
        "pull",
        "models",
        "doctor",
        "score",
        "inspect",
        "plan",
        "bench",
        "bench run",
        "bench compare",
        "bench score",
        "bench ablate",
        "bench roofline",
        "bench synth",
        "licenses",
        "completions",
        "man",
    ];
    for command in commands {
        let args: Vec<&str> =
            command.split(' ').filter(|w| !w.is_empty()).chain(["--help"]).collect();
        let run = lily(&args);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
        let name = format!("help {command}").trim().replace(' ', "_");
        settings().bind(|| insta::assert_snapshot!(name, run.stdout));
    }
}

#[test]
fn errors() {
    let dir = tempfile::tempdir().unwrap();
    let talk = file(&dir, "talk.json", r#"{"messages":[{"role":"user","content":"x"}]}"#);
    let cases: &[&[&str]] = &[
        &["run"],
        &["run", ""],
        &["run", "hi", "--model", "/no/such"],
        &["run", "hi", "--model", "Org/Name"],
        &["run", "hi", "--model", "Org/Name@v1"],
        &["inspect", "Org/Name"],
        &["run", "hi", "--preset", "fast"],
        &["chat", "--context", "99999"],
        &["chat", "--load", &talk],
        &["pull", "Name"],
        &["pull", "Org/../Name"],
        &["pull", "Org/Name@"],
        &["completions", "cmd"],
        &["man", "--out", "/dev/null/x"],
    ];
    let mut text = String::new();
    for args in cases {
        let run = lily(args);
        assert_eq!(run.stdout, "", "{args:?}");
        let shown = format!("{}\n", args.join(" "));
        text.push_str(&format!("$ lily {shown}{}[{}]\n\n", run.stderr, run.code.unwrap()));
    }
    let text = text.replace(dir.path().to_str().unwrap(), "DIR");
    settings().bind(|| insta::assert_snapshot!("errors", text));
}

#[test]
fn shapes_of_json() {
    let dir = tempfile::tempdir().unwrap();
    let text = file(&dir, "text.txt", "The capital of France is Paris.");
    let cases: &[&[&str]] = &[
        &["run", "hi", "--json", "--max-tokens", "3"],
        &["run", "hi", "--json", "--max-tokens", "3", "--logprobs", "2"],
        &["score", "--text", &text, "--json"],
        &["inspect", "--json", "--tensors"],
        &["models", "--json"],
        &["doctor", "--json"],
    ];
    let mut all = String::new();
    for args in cases {
        let mut value = json(args);
        if args[0] == "doctor" {
            // Unknown on some systems.
            for (part, key) in
                [("processor", "name"), ("processor", "cores_online"), ("memory", "physical")]
            {
                value[part][key] = "…".into();
            }
            for key in ["total", "available", "page_cache"] {
                value["memory"][key] = "…".into();
            }
            value["cache"]["free"] = "…".into();
        }
        if args[0] == "inspect" {
            for key in ["machine_total", "machine_available"] {
                value["memory"][key] = "…".into();
            }
        }
        all.push_str(&format!("$ lily {} --json\n{:#}\n\n", args[0], shape(&value)));
    }
    settings().bind(|| insta::assert_snapshot!("json", all));
}

/// Probabilities as people see them: the same bits on every machine.
#[test]
fn logprobs_for_people() {
    let args = ["run", "What is the capital of France?", "--no-think", "--temperature", "0"];
    let run = lily(&[&args[..], &["--quiet", "--logprobs", "2"]].concat());
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    settings().bind(|| insta::assert_snapshot!("logprobs", run.stdout));
}

#[test]
fn completions_and_man_pages() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = lily(&["completions", shell]);
        assert_eq!(run.code, Some(0));
        for word in ["doctor", "no-think", "preset"] {
            assert!(run.stdout.contains(word), "{shell}: {word}");
        }
    }
    let page = lily(&["man"]).stdout;
    assert!(page.contains(".TH lily 1") && page.contains(r"lily\-chat(1)"), "{page}");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("man1");
    assert_eq!(lily(&["man", "--out", out.to_str().unwrap()]).code, Some(0));
    let mut names: Vec<String> = fs::read_dir(&out)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(
        names.contains(&"lily.1".into()) && names.contains(&"lily-bench-synth.1".into()),
        "{names:?}"
    );
    let page = fs::read_to_string(out.join("lily-run.1")).unwrap();
    assert!(page.contains(r"\-\-preset"), "{page}");
}

#[test]
fn a_doctor_for_people() {
    let home = tempfile::tempdir().unwrap();
    let run = lily_at(home.path(), &["doctor"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    for part in [
        "instruction set ",
        "cores",
        "available",
        "no models",
        "cpu    usable",
        "cuda   not usable: ",
        "metal",
    ] {
        assert!(run.stdout.contains(part), "{part}: {run:?}");
    }
    assert!(run.stdout.contains(home.path().to_str().unwrap()), "{run:?}");
}
