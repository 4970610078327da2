//! What begins with `/`.

use std::path::PathBuf;

use crate::failure::Failure;

/// A command as people read of it.
pub struct Help {
    pub usage: &'static str,
    pub about: &'static str,
}

const fn help(usage: &'static str, about: &'static str) -> Help {
    Help { usage, about }
}

/// All commands.
pub const COMMANDS: &[Help] = &[
    help("/help", "this list"),
    help("/reset", "begin a new conversation; the system message stays"),
    help("/system TEXT", "set the system message; /system \"\" removes it, /system shows it"),
    help("/think on|off", "whether the model may think before it answers"),
    help("/stats", "tokens and times of the last answer, and how full the context is"),
    help("/save FILE", "save the conversation as JSON"),
    help("/load FILE", "go on with a saved conversation"),
    help("/exit", "leave, as Ctrl-D does"),
];

/// A command.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Help,
    Reset,
    /// `None` shows it.
    System(Option<String>),
    /// `None` shows it.
    Think(Option<bool>),
    Stats,
    Save(PathBuf),
    Load(PathBuf),
    Exit,
}

impl Command {
    /// Reads a line that begins with `/`.
    pub fn parse(line: &str) -> Result<Self, Failure> {
        let line = line.trim();
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file = || match rest {
            "" => Err(Failure::new(format!("{name} needs a file"), format!("{name} talk.json"))),
            path => Ok(expand(path)),
        };
        let alone = |command| match rest {
            "" => Ok(command),
            _ => {
                Err(Failure::new(format!("nothing may follow {name}"), "/help lists the commands"))
            }
        };
        match name {
            "/help" | "/?" => alone(Self::Help),
            "/reset" => alone(Self::Reset),
            "/stats" => alone(Self::Stats),
            "/exit" | "/quit" => alone(Self::Exit),
            "/system" => Ok(Self::System(match rest {
                "" => None,
                "\"\"" => Some(String::new()),
                text => Some(text.to_owned()),
            })),
            "/think" => match rest {
                "" => Ok(Self::Think(None)),
                "on" => Ok(Self::Think(Some(true))),
                "off" => Ok(Self::Think(Some(false))),
                _ => Err(Failure::new(
                    format!("{rest:?} is neither on nor off"),
                    "/think on, or /think off",
                )),
            },
            "/save" => file().map(Self::Save),
            "/load" => file().map(Self::Load),
            _ => Err(Failure::new(
                format!("there is no command {name}"),
                "/help lists the commands; a message that begins with / is sent with a second / before it",
            )),
        }
    }
}

/// No shell stands between the line and us: `~/` is ours to read.
fn expand(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => PathBuf::from(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands() {
        let parse = |line: &str| Command::parse(line).unwrap();
        assert_eq!(parse("/help"), Command::Help);
        assert_eq!(parse(" /reset "), Command::Reset);
        assert_eq!(parse("/system  Be brief. "), Command::System(Some("Be brief.".into())));
        assert_eq!(parse("/system \"\""), Command::System(Some(String::new())));
        assert_eq!(parse("/system"), Command::System(None));
        assert_eq!(parse("/think off"), Command::Think(Some(false)));
        assert_eq!(parse("/save my talk.json"), Command::Save("my talk.json".into()));
        assert_eq!(parse("/quit"), Command::Exit);
        let home = std::env::var_os("HOME").map(PathBuf::from);
        if let Some(home) = home {
            assert_eq!(parse("/load ~/a b"), Command::Load(home.join("a b")));
        }
        for (line, says) in [
            ("/", "no command /"),
            ("/nonsense x", "no command /nonsense"),
            ("/save", "/save needs a file"),
            ("/think maybe", "neither on nor off"),
            ("/reset all", "nothing may follow"),
        ] {
            let error = Command::parse(line).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("hint: "), "{line}: {error}");
        }
        for help in COMMANDS {
            let name = help.usage.split(' ').next().unwrap();
            let error = Command::parse(name).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(!error.contains("no command"), "{name}");
        }
    }
}
