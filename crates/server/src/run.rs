//! The choices of one request, from submission to their last token.

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use lily_scheduler::{Event, EventStream, Failure, Generator, Request, SubmitError};
use serde_json::{Value, json};

use crate::answer::{Answer, Delta, FinishReason};
use crate::metrics::Metrics;

/// What happened next.
#[derive(Debug)]
pub enum Happened {
    /// A choice goes on, or has ended with a reason.
    Deltas { choice: usize, deltas: Vec<Delta>, ended: Option<FinishReason> },
    /// The request failed; there is nothing more.
    Failed(Failure),
    /// All choices have ended.
    Done,
}

#[derive(Debug)]
struct Choice {
    /// `None` once it has ended. Dropping it cancels the choice.
    events: Option<EventStream>,
    answer: Answer,
}

/// A request under way. Dropping it cancels what is not finished.
pub struct Run {
    choices: Vec<Choice>,
    prompt: usize,
    cached: Option<usize>,
    submitted: Instant,
    started: Option<Instant>,
    metrics: Arc<Metrics>,
}

impl Run {
    /// Submits a request once for each choice.
    ///
    /// # Errors
    /// If one is refused, none is made.
    pub fn submit(
        generator: &dyn Generator,
        metrics: &Arc<Metrics>,
        request: Request,
        answers: Vec<Answer>,
    ) -> Result<Self, SubmitError> {
        let prompt = request.prompt.len();
        let submitted = Instant::now();
        let mut choices = Vec::with_capacity(answers.len());
        for (index, answer) in answers.into_iter().enumerate() {
            let mut request = request.clone();
            request.sample.choice = index as u32;
            choices.push(Choice { events: Some(generator.submit(request)?), answer });
        }
        metrics.requests.add(1);
        let metrics = Arc::clone(metrics);
        Ok(Self { choices, prompt, cached: None, submitted, started: None, metrics })
    }

    /// Number of choices.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Waits for what happens next.
    pub async fn next(&mut self) -> Happened {
        loop {
            let next = std::future::poll_fn(|context| {
                let mut open = false;
                for (index, choice) in self.choices.iter_mut().enumerate() {
                    let Some(events) = &mut choice.events else { continue };
                    open = true;
                    if let Poll::Ready(event) = events.poll_next(context) {
                        return Poll::Ready(Some((index, event)));
                    }
                }
                if open { Poll::Pending } else { Poll::Ready(None) }
            });
            let Some((index, event)) = next.await else { return Happened::Done };
            if let Some(happened) = self.take(index, event) {
                return happened;
            }
        }
    }

    /// What has happened already, without waiting.
    pub fn try_next(&mut self) -> Option<Happened> {
        for index in 0..self.choices.len() {
            while let Some(event) =
                self.choices[index].events.as_mut().and_then(EventStream::try_next)
            {
                if let Some(happened) = self.take(index, Some(event)) {
                    return Some(happened);
                }
            }
        }
        None
    }

    fn take(&mut self, index: usize, event: Option<Event>) -> Option<Happened> {
        let choice = &mut self.choices[index];
        let deltas = match event {
            Some(Event::Started { cached, at }) => {
                self.started.get_or_insert(at);
                self.cached.get_or_insert(cached);
                return None;
            }
            Some(Event::Token(token)) => {
                // What stands at an answer's beginning by rule is told before the prompt is computed.
                match (choice.answer.first, choice.answer.last) {
                    (Some(_), Some(last)) => self.metrics.inter_token.observe(token.at - last),
                    _ if token.sampled => {
                        self.metrics.first_token.observe(token.at - self.submitted);
                    }
                    _ => {}
                }
                choice.answer.token(token)
            }
            Some(Event::Finished(finish)) => choice.answer.finish(finish),
            Some(Event::Failed(failure)) => return Some(self.fail(failure)),
            None => {
                let failure = Failure::Device("it ended the answer without a reason".into());
                return Some(self.fail(failure));
            }
        };
        let ended = choice.answer.ended();
        if ended.is_some() {
            choice.events = None;
        }
        (ended.is_some() || !deltas.is_empty()).then_some(Happened::Deltas {
            choice: index,
            deltas,
            ended,
        })
    }

    fn fail(&mut self, failure: Failure) -> Happened {
        for choice in &mut self.choices {
            choice.events = None;
        }
        Happened::Failed(failure)
    }

    fn generated(&self) -> usize {
        self.choices.iter().map(|choice| choice.answer.generated).sum()
    }

    /// OpenAI's `usage`.
    pub fn usage(&self) -> Value {
        let reasoning: usize = self.choices.iter().map(|choice| choice.answer.reasoning).sum();
        let generated = self.generated();
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": generated,
            "total_tokens": self.prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self.cached.unwrap_or(0)},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        })
    }

    /// Prompt and answer apart, in the form of llama.cpp's server.
    pub fn timings(&self) -> Value {
        let first = self.choices.iter().filter_map(|choice| choice.answer.first).min();
        let last = self.choices.iter().filter_map(|choice| choice.answer.last).max();
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        let cached = self.cached.unwrap_or(0);
        let prompt = between(self.started, first);
        let predicted = between(first, last);
        let rate = |tokens: usize, time: Duration| match time.is_zero() {
            true => 0.0,
            false => tokens as f64 / time.as_secs_f64(),
        };
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        // The first tokens come out of the prompt's last step, with those by rule before them.
        let led: usize = self.choices.iter().map(|choice| choice.answer.led).sum();
        let decoded = self.generated().saturating_sub(self.choices.len() + led);
        json!({
            "prompt_n": self.prompt - cached.min(self.prompt),
            "cache_n": cached,
            "prompt_ms": ms(prompt),
            "prompt_per_second": rate(self.prompt - cached.min(self.prompt), prompt),
            "predicted_n": self.generated(),
            "predicted_ms": ms(predicted),
            "predicted_per_second": rate(decoded, predicted),
        })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.started.is_some() {
            self.metrics.prompt_tokens.add(self.prompt as u64);
            self.metrics.completion_tokens.add(self.generated() as u64);
        }
    }
}
