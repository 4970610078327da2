//! `lily chat`: a conversation.

mod command;
mod conversation;
mod input;
mod lines;
mod turn;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::{Failure, message};
use crate::interrupt::Interrupts;
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs, count};
use crate::output::{note, note_dimmed};
use crate::sampling::SamplingArgs;

use command::{COMMANDS, Command};
use conversation::Conversation;
use input::{Entry, Input};
use turn::Talk;

/// Context unless asked otherwise: many turns fit, the cache of the largest model stays small.
const CONTEXT: usize = 16_384;

/// Talk with a model.
///
/// Each line is a message. A line that ends in \ goes on in the next one; """ begins and ends a message of
/// several lines. Commands begin with /: /help lists them. Ctrl-C ends the answer, what there is of it stays;
/// Ctrl-D leaves.
///
/// If stdin or stdout is no terminal, messages are read line by line and the answers alone go to stdout.
///
/// What the model has read is kept from turn to turn: only new text is computed. Sampling options that are not
/// given are those of --preset, or else of the checkpoint's generation_config.json.
#[derive(Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// Answer at once, without thinking first; /think changes it.
    #[arg(long)]
    pub no_think: bool,

    /// System message: how the model is to behave; /system changes it.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// Begin with the conversation in FILE, as /save writes it. --system takes the place of its system message.
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,

    /// Do not read and write the history of messages ($XDG_STATE_HOME/lily/history, or
    /// ~/.local/state/lily/history).
    #[arg(long)]
    pub no_history: bool,

    /// Most tokens of one answer, thinking included. Default: until the model ends it or the context is full.
    #[arg(long, value_name = "N", value_parser = count)]
    pub max_tokens: Option<usize>,

    /// Tokens that the conversation may have; memory is set aside for them. Default: 16384, or what the model
    /// was made for if that is less.
    #[arg(long, value_name = "N", value_parser = count)]
    pub context: Option<usize>,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub compute: ComputeArgs,

    /// Nothing on stderr but errors.
    #[arg(short, long)]
    pub quiet: bool,
}

/// Runs the command.
pub fn chat(args: &ChatArgs) -> anyhow::Result<()> {
    let interactive = io::stdin().is_terminal() && io::stdout().is_terminal();
    let opened = Opened::new(&args.model, &args.compute)?;
    let max = opened.model.config.max_position_embeddings;
    let context = args.context.unwrap_or(CONTEXT.min(max));
    opened.check_context(context)?;
    let mut talk = Talk::new(args, &opened, context, interactive)?;
    if let Some(file) = &args.load {
        load(&mut talk, file, args.quiet)?;
    }
    if let Some(text) = &args.system {
        talk.conversation.set_system(text);
    }
    let interrupts = Interrupts::install(interactive)?;
    let mut input = match interactive {
        true => Input::terminal(!args.no_history),
        false => Ok(Input::lines()),
    }?;
    if !args.quiet {
        greet(args, &opened, context, interactive);
    }
    loop {
        let outcome = match input.next()? {
            Entry::Left => break,
            Entry::Message(text) => talk.answer(&text, &interrupts),
            Entry::Command(line) => match Command::parse(&line) {
                Ok(Command::Exit) => break,
                Ok(command) => obey(&mut talk, command),
                Err(failure) => Err(failure.into()),
            },
        };
        match outcome {
            Ok(()) => {}
            // What the user can mend ends nothing; what nobody can mend ends a script.
            Err(error) if interactive || error.is::<Failure>() => {
                note(&format!("error: {}", message(&error)))
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn greet(args: &ChatArgs, opened: &Opened, context: usize, interactive: bool) {
    if args.model.model.is_none() {
        note_dimmed(&format!("{} answers: {}", lily_demo::NAME, lily_demo::ABOUT));
    } else if interactive {
        note_dimmed(&format!("{} answers", opened.checkpoint.source()));
    }
    if interactive {
        note_dimmed(&format!(
            "context of {context} tokens; /help lists the commands, Ctrl-D leaves"
        ));
    }
}

fn obey(talk: &mut Talk<'_>, command: Command) -> anyhow::Result<()> {
    match command {
        Command::Help => {
            COMMANDS.iter().for_each(|c| note(&format!("  {:<17} {}", c.usage, c.about)))
        }
        Command::Reset => {
            talk.conversation.clear();
            note_dimmed("a new conversation begins");
        }
        Command::System(None) => match talk.conversation.system() {
            Some(text) => note(text),
            None => note_dimmed("there is no system message; /system TEXT sets one"),
        },
        Command::System(Some(text)) => {
            talk.conversation.set_system(&text);
            let done = if text.is_empty() { "removed" } else { "set" };
            note_dimmed(&format!("the system message is {done}; the conversation goes on with it"));
        }
        Command::Think(wanted) => {
            talk.think = wanted.unwrap_or(talk.think);
            let is = if talk.think { "on: the model may think before it answers" } else { "off" };
            note_dimmed(&format!("thinking is {is}"));
        }
        Command::Stats => talk.stats().iter().for_each(|line| note(line)),
        Command::Save(file) => {
            talk.conversation.save(&file, talk.model())?;
            let messages = talk.conversation.messages().len();
            note_dimmed(&format!("{messages} messages are saved in {}", file.display()));
        }
        Command::Load(file) => load(talk, &file, false)?,
        Command::Exit => {}
    }
    Ok(())
}

/// Takes a saved conversation, if all of it fits: otherwise nothing changes.
fn load(talk: &mut Talk<'_>, file: &Path, quiet: bool) -> anyhow::Result<()> {
    let loaded = Conversation::load(file)?;
    let (tokens, context) = (talk.tokens(&loaded)?, talk.context());
    if tokens >= context {
        return Err(Failure::new(
            format!("{} has {tokens} tokens, the context holds {context}", file.display()),
            "start with a longer --context",
        )
        .into());
    }
    if !quiet {
        let messages = loaded.messages().len();
        note_dimmed(&format!("{messages} messages of {tokens} tokens are loaded"));
    }
    talk.conversation = loaded;
    Ok(())
}
