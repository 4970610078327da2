//! `lily completions` and `lily man`: for shells and their users.

use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::failure::Failure;
use crate::output::Stdout;

/// Print completions for a shell.
///
/// bash: lily completions bash > ~/.local/share/bash-completion/completions/lily
///
/// zsh: lily completions zsh > a folder of $fpath, as _lily
///
/// fish: lily completions fish > ~/.config/fish/completions/lily.fish
#[derive(Args)]
pub struct CompletionsArgs {
    /// The shell.
    pub shell: Shell,
}

/// Print the manual page.
///
/// `lily man | man -l -` shows it. With --out the pages of all commands are written as well.
#[derive(Args)]
pub struct ManArgs {
    /// Folder to write lily.1, lily-run.1 and so on to, such as ~/.local/share/man/man1.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Runs `lily completions`.
pub fn completions(args: &CompletionsArgs, mut command: Command) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "lily", &mut text);
    print(&text)
}

/// Runs `lily man`.
pub fn man(args: &ManArgs, command: Command) -> anyhow::Result<()> {
    let Some(dir) = &args.out else {
        let mut text = Vec::new();
        Man::new(command.disable_help_subcommand(true)).render(&mut text)?;
        return print(&text);
    };
    let written =
        std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(command, dir));
    Ok(written.map_err(|error| {
        let what = format!("the pages cannot be written to {}: {error}", dir.display());
        Failure::new(what, "check the folder and its permissions")
    })?)
}

fn print(text: &[u8]) -> anyhow::Result<()> {
    let mut out = Stdout::new();
    out.bytes(text)?;
    Ok(out.flush()?)
}
