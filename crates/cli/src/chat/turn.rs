//! One question and its answer.

use std::ops::ControlFlow;
use std::sync::Arc;

use lily_chat::{ChatError, ChatTemplate, RenderInput, Tokenizer};
use lily_engine::{
    Cancel, Engine, EngineError, FinishReason, GenerateParams, Generated, Reuse, Session, Timings,
};

use super::ChatArgs;
use super::conversation::Conversation;
use crate::failure::Failure;
use crate::interrupt::Interrupts;
use crate::model::Opened;
use crate::output::{Progress, Stdout, grouped, note_dimmed};
use crate::show::Show;

/// A model in conversation.
pub struct Talk<'a> {
    pub conversation: Conversation,
    /// Whether the model may think before it answers.
    pub think: bool,
    opened: &'a Opened,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    engine: Engine,
    session: Session,
    params: GenerateParams,
    quiet: bool,
    interactive: bool,
    last: Option<Turn>,
    answers: u64,
}

/// Figures of one answer.
#[derive(Clone, Copy)]
struct Turn {
    prompt: Reuse,
    kept: bool,
    timings: Timings,
    answer: usize,
}

/// A prompt and the part of it that the prompts of later turns begin with.
struct Prompt {
    ids: Vec<u32>,
    stable: usize,
}

impl<'a> Talk<'a> {
    pub fn new(
        args: &ChatArgs,
        opened: &'a Opened,
        context: usize,
        interactive: bool,
    ) -> anyhow::Result<Self> {
        let tokenizer = opened.need_tokenizer()?;
        let template = opened.template(&tokenizer)?;
        let defaults = opened.defaults()?;
        let mut sample = args.sampling.params(&defaults);
        sample.mask = Some(opened.named_tokens(&tokenizer));
        opened.check_sampling(&sample)?;
        let mut engine = opened.engine_with_checkpoints(&args.compute, context)?;
        let session = engine.open_session()?;
        let max_tokens = args.max_tokens.unwrap_or(usize::MAX);
        Ok(Self {
            conversation: Conversation::default(),
            think: !args.no_think && !args.sampling.no_think(),
            opened,
            tokenizer,
            template,
            engine,
            session,
            params: GenerateParams { sample, max_tokens, stop_ids: defaults.stop_ids },
            quiet: args.quiet,
            interactive,
            last: None,
            answers: 0,
        })
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        self.opened.checkpoint.source()
    }

    /// Tokens that the conversation may have.
    pub fn context(&self) -> usize {
        self.engine.options().context
    }

    /// Tokens of a conversation. One without a question is not rendered: templates refuse it.
    pub fn tokens(&self, conversation: &Conversation) -> anyhow::Result<usize> {
        match conversation.messages().iter().any(|m| m["role"] == "user") {
            true => Ok(self.encode(conversation.messages(), false, usize::MAX)?.len()),
            false => Ok(0),
        }
    }

    /// Answers a question on stdout. Question and answer become part of the conversation, unless the answer
    /// ended before it began.
    pub fn answer(&mut self, question: &str, interrupts: &Interrupts) -> anyhow::Result<()> {
        let prompt = self.prompt(question)?;
        let cancel = interrupts.answering();
        let Some((reuse, kept, before)) = self.read(&prompt, cancel.flag())? else {
            note_dimmed("interrupted; the message is taken back");
            return Ok(());
        };
        let mut show = Show::chat(&self.tokenizer, &prompt.ids);
        let generated = self.speak(&mut show, cancel.flag())?;
        let text = show.text().unwrap_or_default();
        let stays = !text.is_empty() || generated.finish == FinishReason::Stop;
        if stays {
            self.conversation.push(question, show.thinking().unwrap_or_default(), text);
        }
        self.tell_end(&generated, show.is_thinking(), stays);
        let mut timings = generated.timings;
        timings.prefill_tokens += before.prefill_tokens;
        timings.prefill_seconds += before.prefill_seconds;
        self.last = Some(Turn { prompt: reuse, kept, timings, answer: generated.ids.len() });
        self.answers += 1;
        Ok(())
    }

    /// Tokens and times of the last answer, for people.
    pub fn stats(&self) -> Vec<String> {
        let tokens = self.tokens(&self.conversation).unwrap_or(0);
        let context = format!(
            "context   {:>7} of {} tokens",
            grouped(tokens as u64),
            grouped(self.context() as u64)
        );
        let Some(Turn { prompt, kept, timings: t, answer }) = self.last else {
            return vec![context];
        };
        let rate = |tokens: u64, seconds: f64| match seconds > 0.0 {
            true => format!("{seconds:>9.3} s {:>9.1} tokens/s", tokens as f64 / seconds),
            false => String::new(),
        };
        let line = |what: &str, tokens: usize, rest: String| {
            format!("{what:<9} {:>7} tokens{rest}", grouped(tokens as u64)).trim_end().to_owned()
        };
        let reused = if kept { "" } else { "; too large to be kept for the next turn" };
        vec![
            line("prompt", prompt.reused + prompt.computed, String::new()),
            line("  reused", prompt.reused, reused.into()),
            line("  read", prompt.computed, rate(t.prefill_tokens, t.prefill_seconds)),
            line("answer", answer, rate(t.decode_tokens, t.decode_seconds)),
            context,
        ]
    }

    /// The prompt, if it has up to `limit` tokens. Messages that the template refuses as they are (a loaded
    /// conversation may hold such) are rendered by the rules of [`lily_chat::tolerance`].
    fn encode(
        &self,
        messages: Vec<serde_json::Value>,
        answer: bool,
        limit: usize,
    ) -> Result<Vec<u32>, ChatError> {
        let input = RenderInput {
            messages,
            add_generation_prompt: answer,
            enable_thinking: (!self.think).then_some(false),
            ..RenderInput::default()
        };
        self.tokenizer.encode_rendered_within(&self.template.render_tolerant(&input)?.text, limit)
    }

    fn prompt(&self, question: &str) -> anyhow::Result<Prompt> {
        let messages = self.conversation.messages_with(question);
        // What is a little too long is told with its figure; what is far too long costs no more work.
        let ids = match self.encode(messages.clone(), true, 2 * self.context()) {
            Err(ChatError::TooLong { limit, .. }) => return Err(self.too_long(limit, "more than ")),
            other => other?,
        };
        if ids.len() >= self.context() {
            return Err(self.too_long(ids.len(), ""));
        }
        let stable = self.encode(messages, false, usize::MAX)?;
        let stable = if ids.starts_with(&stable) { stable.len() } else { 0 };
        Ok(Prompt { ids, stable })
    }

    /// Computes the prompt. A later prompt has the answer without its thinking, so it departs from the state
    /// where the answer begins: a copy of the state before it is kept. `None` if Ctrl-C ended it.
    fn read(
        &mut self,
        prompt: &Prompt,
        cancel: &Cancel,
    ) -> anyhow::Result<Option<(Reuse, bool, Timings)>> {
        let (mut kept, mut before) = (false, Timings::default());
        let mut reused = None;
        if prompt.stable > 1 {
            let Some(reuse) = self.sync(&prompt.ids[..prompt.stable], cancel)? else {
                return Ok(None);
            };
            reused = Some(reuse.reused);
            kept = self.engine.checkpoint(&mut self.session)?;
            before = self.session.timings();
        }
        let Some(reuse) = self.sync(&prompt.ids, cancel)? else { return Ok(None) };
        let reused = reused.unwrap_or(reuse.reused);
        let computed = prompt.ids.len() - reused;
        Ok(Some((Reuse { reused, computed }, kept, before)))
    }

    fn sync(&mut self, ids: &[u32], cancel: &Cancel) -> anyhow::Result<Option<Reuse>> {
        let mut progress = Progress::new("reading:", self.quiet);
        let synced = self.engine.sync(&mut self.session, ids, cancel, |done, total| {
            progress.show(|| format!("{done} of {total} tokens"));
        });
        match synced {
            Ok(reuse) => Ok(Some(reuse)),
            Err(EngineError::Cancelled { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn speak(&mut self, show: &mut Show, cancel: &Cancel) -> anyhow::Result<Generated> {
        let mut out = Stdout::new();
        show.begin(&out, false, self.quiet);
        let mut failed = Ok(());
        let mut params = self.params.clone();
        params.sample.seed = params.sample.seed.wrapping_add(self.answers);
        let generated = self.engine.generate(&mut self.session, &params, cancel, |id| {
            failed = show.token(&mut out, id, params.stop_ids.contains(&id));
            if failed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        failed?;
        show.end(&mut out)?;
        if self.interactive {
            out.line("")?;
            out.flush()?;
        }
        Ok(generated)
    }

    /// Why the answer ended, if not by itself, and what became of it.
    fn tell_end(&self, generated: &Generated, thinking: bool, stays: bool) {
        let why = match generated.finish {
            FinishReason::Stop => return,
            FinishReason::Length => "--max-tokens was reached",
            FinishReason::ContextFull => {
                "the context is full: /save keeps the conversation, /reset begins a new one, a longer --context \
                 holds more"
            }
            FinishReason::Cancelled => "interrupted",
        };
        let when = if thinking { "ended while thinking" } else { "ended" };
        let fate = if stays { "" } else { "; the message is taken back" };
        note_dimmed(&format!("{when}: {why}{fate}"));
    }

    fn too_long(&self, tokens: usize, more: &str) -> anyhow::Error {
        let context = self.context();
        let what = match self.conversation.messages().iter().any(|m| m["role"] == "user") {
            true => format!(
                "with this message the conversation has {more}{tokens} tokens, the context holds {context} with the \
                 answer; the message is taken back and nothing else is lost"
            ),
            false => format!(
                "the message has {more}{tokens} tokens, the context holds {context} with the answer"
            ),
        };
        let hint = match self.interactive {
            true => {
                "send a shorter one; /save keeps the conversation, /reset begins a new one, and lily chat \
                     --load FILE --context N goes on with a longer context"
            }
            false => "use a longer --context",
        };
        Failure::new(what, hint).into()
    }
}
