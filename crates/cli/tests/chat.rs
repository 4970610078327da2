//! `lily chat` without a terminal.

mod common;

use std::path::Path;

use common::{Run, command, feed, file, isolate};

const GREEDY: &[&str] = &["chat", "--temperature", "0", "--no-think", "--quiet"];

fn chat(args: &[&str], stdin: &str) -> Run {
    let run = feed(command(&[GREEDY, args].concat()), stdin);
    assert_eq!(run.code, Some(0), "{run:?}");
    run
}

/// The figure that /stats gives for a line.
fn figure(run: &Run, name: &str) -> usize {
    let line = run.stderr.lines().rfind(|l| l.trim_start().starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name}: {run:?}"));
    line.split_whitespace().nth(1).unwrap().replace(',', "").parse().unwrap()
}

#[test]
fn lines_are_messages_and_stdout_holds_the_answers() {
    let run = chat(&[], "What is the capital of France?\n\n  \nWhat is the capital of Italy?");
    assert_eq!(run.stdout.lines().count(), 2, "{run:?}");
    assert!(run.stdout.starts_with("The capital of France is Paris.\n"), "{run:?}");
    assert_eq!(run.stderr, "");
    // The answers are those of lily run, if the conversation is new.
    let alone = "What is the capital\nof France?";
    let one = common::lily(&["run", alone, "--temperature", "0", "--no-think", "--quiet"]);
    for text in
        ["What is the capital\\\nof France?\n", "\"\"\"\nWhat is the capital\nof France?\n\"\"\"\n"]
    {
        assert_eq!(chat(&[], text).stdout, one.stdout);
    }
    assert_eq!(chat(&[], "").stdout, "");
}

#[test]
fn what_was_read_is_reused() {
    let first = "What is the capital of France?\n";
    let run = chat(&[], &format!("{first}/stats\n"));
    assert_eq!(figure(&run, "reused"), 0);
    let (prompt, stable) = (figure(&run, "prompt"), figure(&run, "read"));
    assert_eq!(prompt, stable);
    for thinking in [&["--preset", "thinking", "--temperature", "0", "--quiet"][..], &GREEDY[1..]] {
        let args = [&["chat"], thinking].concat();
        let run = feed(command(&args), &format!("{first}And of Italy?\nAnd of Spain?\n/stats\n"));
        // All but the answer of the turn before and the new message.
        let (prompt, reused, read) =
            (figure(&run, "prompt"), figure(&run, "reused"), figure(&run, "read"));
        assert_eq!(prompt, reused + read);
        assert!(reused > stable && read < prompt - stable, "{run:?}");
    }
    // It changes no answer: a conversation that was loaded is read anew.
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("talk.json");
    let saved = saved.to_str().unwrap();
    let third = "And of Spain?\n";
    let warm = chat(&[], &format!("{first}And of Italy?\n/save {saved}\n{third}"));
    let cold = chat(&["--load", saved], third);
    assert_eq!(warm.stdout.lines().last(), cold.stdout.lines().last());
}

#[test]
fn commands() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("talk.json");
    let saved = saved.to_str().unwrap();
    let run = chat(
        &[],
        &format!(
            "/help\n/system\n/system Be brief.\n/system\nWhat is the capital of France?\n/save {saved}\n/reset\n\
             /stats\n/load {saved}\n/stats\n/think on\n/system \"\"\n/nonsense\n//x\n/exit\nnot answered\n"
        ),
    );
    for part in [
        "/save FILE",
        "there is no system message",
        "\nBe brief.\n",
        "3 messages are saved",
        "a new conversation",
        "3 messages of ",
        "thinking is on",
        "is removed",
        "error: there is no command /nonsense\n hint: ",
    ] {
        assert!(run.stderr.contains(part), "{part}: {run:?}");
    }
    assert_eq!(run.stdout.lines().next(), Some("The capital of France is Paris."), "{run:?}");
    let value: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(saved).unwrap()).unwrap();
    let messages = value["messages"].as_array().unwrap();
    let roles: Vec<_> = messages.iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    assert_eq!(messages[2]["content"], "The capital of France is Paris.");
    // What is no conversation changes nothing.
    let bad = file(&dir, "bad.json", r#"[{"role":"assistant","content":"x"}]"#);
    let run =
        chat(&["--load", saved], &format!("/load {bad}\n/load /no/such\n/save {bad}\n/stats\n"));
    for part in [
        "messages[0]: it is the turn of the user",
        "/no/such cannot be read",
        "is no saved conversation",
    ] {
        assert!(run.stderr.contains(part), "{part}: {run:?}");
    }
    assert!(figure(&run, "context") > 10, "{run:?}");
}

#[test]
fn a_full_context_loses_nothing() {
    let long = "word ".repeat(100);
    let text =
        format!("What is the capital of France?\n{long}\n/stats\nWhat is the capital of Italy?\n");
    let run = chat(&["--context", "80"], &text);
    assert!(
        run.stderr.contains("the context holds 80") && run.stderr.contains("taken back"),
        "{run:?}"
    );
    assert!(run.stderr.contains("hint: use a longer --context"), "{run:?}");
    assert_eq!(run.stdout.lines().count(), 2, "{run:?}");
    let shortest = chat(&["--context", "24"], "What is the capital of France?\n/stats\n");
    assert!(shortest.stderr.contains("ended: the context is full"), "{shortest:?}");
    let first = chat(&["--context", "8"], "What is the capital of France?\n");
    assert!(first.stderr.contains("the message has "), "{first:?}");
    // A conversation that does not fit is not loaded.
    let dir = tempfile::tempdir().unwrap();
    let talk =
        format!(r#"[{{"role":"user","content":"{long}"}},{{"role":"assistant","content":"x"}}]"#);
    let talk = file(&dir, "talk.json", &talk);
    let run = chat(&["--context", "80"], &format!("/load {talk}\n/stats\n"));
    assert!(run.stderr.contains("the context holds 80") && figure(&run, "context") == 0, "{run:?}");
}

#[test]
fn lengths_seeds_and_history() {
    let run = chat(&["--max-tokens", "2"], "What is the capital of France?\n/stats\n");
    assert!(
        run.stderr.contains("ended: --max-tokens was reached") && figure(&run, "answer") == 2,
        "{run:?}"
    );
    let run =
        feed(command(&["chat", "--temperature", "0", "--max-tokens", "1"]), "Hello\n/stats\n");
    assert!(
        run.stderr
            .contains("ended while thinking: --max-tokens was reached; the message is taken back")
    );
    assert!(
        run.stderr.contains("not a general assistant") && figure(&run, "context") == 0,
        "{run:?}"
    );
    let wild =
        ["chat", "--quiet", "--seed", "5", "--max-tokens", "8", "--no-think", "--temperature", "2"];
    let answers = || feed(command(&wild), "Tell me a story.\nTell me a story.\n").stdout;
    assert_eq!(answers(), answers());
    // A pipe leaves no history.
    let home = tempfile::tempdir().unwrap();
    let mut piped = command(GREEDY);
    isolate(&mut piped, home.path());
    feed(piped, "Hello\n");
    assert!(!Path::new(&home.path().join("state")).exists());
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_an_answer_and_then_the_program() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::process::Stdio;

    let wild = [
        "chat",
        "--temperature",
        "100",
        "--top-k",
        "0",
        "--top-p",
        "1",
        "--seed",
        "3",
        "--no-think",
    ];
    let mut child = command(&wild).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let pid = child.id().to_string();
    let interrupt = || {
        assert!(
            std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success()
        );
    };
    stdin.write_all(b"Go on.\n").unwrap();
    let mut byte = [0];
    stdout.read_exact(&mut byte).unwrap();
    interrupt();
    while byte != *b"\n" {
        stdout.read_exact(&mut byte).unwrap();
    }
    // It still listens: the next command is obeyed.
    stdin.write_all(b"/stats\n").unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut stderr = String::new();
    while !stderr.contains("\ncontext ") {
        stderr.push_str(&format!("\n{}", lines.next().expect(&stderr).unwrap()));
    }
    interrupt();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{stderr}");
    assert!(stderr.contains("ended: interrupted"), "{stderr}");
}
