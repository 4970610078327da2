//! Log-probabilities of an answer, for people and for programs.

use lily_chat::Tokenizer;
use lily_engine::Logprobs;
use serde::Serialize;

/// A token and how probable the model held it.
#[derive(Serialize)]
pub struct Entry {
    id: u32,
    /// Its text; what is not UTF-8 by itself shows as U+FFFD. `null` without a tokenizer entry.
    token: Option<String>,
    logprob: f32,
}

/// A token of the answer and the most probable ones in its place.
#[derive(Serialize)]
pub struct Position {
    #[serde(flatten)]
    chosen: Entry,
    top: Vec<Entry>,
}

/// One position a token.
pub fn positions(
    ids: &[u32],
    logprobs: &[Logprobs],
    tokenizer: Option<&Tokenizer>,
) -> Vec<Position> {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.and_then(|t| t.token_bytes(id));
        let token = bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        Entry { id, token, logprob }
    };
    let position = |(id, l): (&u32, &Logprobs)| Position {
        chosen: entry(*id, l.logprob),
        top: l.top.iter().map(|(id, logprob)| entry(*id, *logprob)).collect(),
    };
    ids.iter().zip(logprobs).map(position).collect()
}

/// One line a token.
pub fn lines(positions: &[Position]) -> Vec<String> {
    let name = |e: &Entry| e.token.as_ref().map_or(e.id.to_string(), |text| format!("{text:?}"));
    let names: Vec<String> = positions.iter().map(|p| name(&p.chosen)).collect();
    let width = names.iter().map(|n| n.chars().count()).max().unwrap_or(0).min(24);
    let line = |(name_of_chosen, p): (&String, &Position)| {
        let top = p.top.iter().map(|e| format!("{} {:.4}", name(e), e.logprob));
        let top = top.collect::<Vec<_>>().join("  ");
        format!("{:>9.4}  {name_of_chosen:width$}  {top}", p.chosen.logprob).trim_end().to_owned()
    };
    names.iter().zip(positions).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: u32, token: Option<&str>, logprob: f32) -> Entry {
        Entry { id, token: token.map(str::to_owned), logprob }
    }

    #[test]
    fn texts() {
        let list = [
            Position {
                chosen: entry(5, Some(" Paris"), -0.25),
                top: vec![entry(5, Some(" Paris"), -0.25), entry(9, Some("\n"), -12.5)],
            },
            Position { chosen: entry(70, None, 0.0), top: vec![] },
        ];
        assert_eq!(
            lines(&list),
            ["  -0.2500  \" Paris\"  \" Paris\" -0.2500  \"\\n\" -12.5000", "   0.0000  70"]
        );
        assert_eq!(lines(&[]), Vec::<String>::new());
    }
}
