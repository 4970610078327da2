//! Figures for Prometheus.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lily_scheduler::{Health, Status};

/// A figure that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Times by upper bounds in seconds.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One more than the bounds: the last counts what exceeds them all.
    counts: Vec<AtomicU64>,
    microseconds: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, microseconds: AtomicU64::new(0) }
    }

    pub fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let at = self.bounds.iter().position(|bound| seconds <= *bound);
        self.counts[at.unwrap_or(self.bounds.len())].fetch_add(1, Ordering::Relaxed);
        self.microseconds.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        let mut total = 0;
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            total += count.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {total}");
        }
        total += self.counts[self.bounds.len()].load(Ordering::Relaxed);
        let seconds = self.microseconds.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {total}");
        let _ = writeln!(out, "{name}_sum {seconds}\n{name}_count {total}");
    }
}

/// What the server counts itself.
#[derive(Debug)]
pub struct Metrics {
    /// Requests that were taken.
    pub requests: Counter,
    /// Requests that were refused, for whatever reason.
    pub refused: Counter,
    pub prompt_tokens: Counter,
    pub completion_tokens: Counter,
    pub first_token: Histogram,
    pub inter_token: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        const FIRST: &[f64] = &[0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];
        const INTER: &[f64] =
            &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];
        Self {
            requests: Counter::default(),
            refused: Counter::default(),
            prompt_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            first_token: Histogram::new(FIRST),
            inter_token: Histogram::new(INTER),
        }
    }
}

impl Metrics {
    /// Prometheus' text format, version 0.0.4.
    pub fn text(&self, status: &Status) -> String {
        let mut out = String::new();
        let mut one = |name: &str, kind: &str, help: &str, value: f64| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        };
        let well = f64::from(u8::from(status.health == Health::Well));
        let figures = [
            ("lily_requests_total", "counter", "Requests taken.", self.requests.get() as f64),
            (
                "lily_requests_refused_total",
                "counter",
                "Requests refused.",
                self.refused.get() as f64,
            ),
            ("lily_requests_running", "gauge", "Answers being made.", status.running as f64),
            (
                "lily_requests_waiting",
                "gauge",
                "Answers waiting in the queue.",
                status.waiting as f64,
            ),
            (
                "lily_prompt_tokens_total",
                "counter",
                "Sum of usage.prompt_tokens.",
                self.prompt_tokens.get() as f64,
            ),
            (
                "lily_completion_tokens_total",
                "counter",
                "Sum of usage.completion_tokens.",
                self.completion_tokens.get() as f64,
            ),
            (
                "lily_prompt_tokens_computed_total",
                "counter",
                "Prompt tokens computed by the device.",
                status.prompt_tokens_computed as f64,
            ),
            (
                "lily_prompt_tokens_cached_total",
                "counter",
                "Prompt tokens whose state was kept.",
                status.prompt_tokens_cached as f64,
            ),
            ("lily_device_steps_total", "counter", "Steps of the device.", status.steps as f64),
            (
                "lily_device_faults_total",
                "counter",
                "Steps of the device that failed.",
                status.faults as f64,
            ),
            (
                "lily_preemptions_total",
                "counter",
                "Answers that gave way to others and were taken up again.",
                status.preemptions as f64,
            ),
            (
                "lily_prefixes",
                "gauge",
                "States of prompts' prefixes that are kept.",
                status.prefixes as f64,
            ),
            (
                "lily_prefixes_skipped_total",
                "counter",
                "Prefixes of prompts that were not kept for want of memory.",
                status.prefixes_skipped as f64,
            ),
            ("lily_device_well", "gauge", "1 if the device can serve.", well),
            (
                "lily_device_heartbeat_seconds",
                "gauge",
                "Time since the device showed life.",
                status.heartbeat.as_secs_f64(),
            ),
            (
                "lily_context_tokens",
                "gauge",
                "Tokens of prompt and answer together.",
                status.limits.context as f64,
            ),
            (
                "lily_parallel_limit",
                "gauge",
                "Answers that are made at once.",
                status.limits.parallel as f64,
            ),
            ("lily_queue_limit", "gauge", "Answers that may wait.", status.limits.queue as f64),
        ];
        for (name, kind, help, value) in figures {
            one(name, kind, help, value);
        }
        const MEMORY: &str = "lily_memory_bytes";
        let _ = writeln!(out, "# HELP {MEMORY} Memory by purpose.\n# TYPE {MEMORY} gauge");
        for memory in &status.memory {
            let _ = writeln!(out, "{MEMORY}{{purpose=\"{}\"}} {}", memory.purpose, memory.bytes);
        }
        let help = "Time from a request to its first token.";
        self.first_token.write("lily_time_to_first_token_seconds", help, &mut out);
        let help = "Time between two tokens of an answer.";
        self.inter_token.write("lily_inter_token_seconds", help, &mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_each_time_once() {
        let histogram = Histogram::new(&[0.1, 1.0]);
        for ms in [50, 100, 500, 5000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let mut text = String::new();
        histogram.write("h", "x", &mut text);
        let lines: Vec<_> = text.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "h_bucket{le=\"0.1\"} 2",
                "h_bucket{le=\"1\"} 3",
                "h_bucket{le=\"+Inf\"} 4",
                "h_sum 5.65",
                "h_count 4",
            ]
        );
    }
}
