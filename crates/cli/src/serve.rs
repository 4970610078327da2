//! `lily serve`: the model behind an OpenAI-compatible HTTP server.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Args;
use lily_device::Device;
use lily_engine::{EngineOptions, Machine, budget, snapshot_bytes};
use lily_scheduler::{Generator, Limits, Scheduler, SchedulerOptions};
use lily_server::replay::{Replay, Script};
use lily_server::{Options, ServedModel};

use crate::failure::Failure;
use crate::fit::{Free, Size, fitting, told};
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs, count};
use crate::output::note;

/// Serve the model over HTTP, as OpenAI's API.
///
/// It listens on this machine only, unless --host says otherwise; then a key is needed. Routes and fields are in
/// docs/api.md. SIGTERM or Ctrl-C ends it: no new requests are taken, running ones may finish for ten seconds.
#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// Address to listen on: an IP address, or localhost.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = host)]
    pub host: IpAddr,

    /// Port to listen on; 0 takes a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub port: u16,

    /// Context of each request in tokens: prompt and answer together. Default: 32768, or what the model or
    /// memory allows.
    #[arg(long, value_name = "N", value_parser = count)]
    pub ctx: Option<usize>,

    /// Requests that run at once. Default: 4, or what memory allows.
    #[arg(long, value_name = "N", value_parser = count)]
    pub parallel: Option<usize>,

    /// Requests that may wait; more are refused with status 429.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = queue)]
    pub queue: usize,

    /// Key that every route but /health asks for. Default: the environment's LILY_API_KEY, else none.
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,

    /// Serve without a key although --host is no address of this machine alone: whoever reaches the port may use
    /// the server.
    #[arg(long)]
    pub no_api_key: bool,

    /// One more name by which requests may call the model; can be given again.
    #[arg(long, value_name = "NAME")]
    pub alias: Vec<String>,

    /// Accept every model name, for clients whose model name cannot be set.
    #[arg(long)]
    pub any_model: bool,

    /// An origin from which browsers may call, as http://localhost:3000; can be given again. Default: none.
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,

    /// Most bytes of a request body.
    #[arg(long, value_name = "BYTES", default_value_t = Options::MAX_BODY, value_parser = body_bytes)]
    pub max_body: usize,

    /// Seconds in which all headers of a request must arrive.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub header_timeout: u64,

    /// Seconds after which a client that reads nothing is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub write_timeout: u64,

    /// Answer by a script instead of the model: JSON Lines with match and text; see docs/api.md.
    #[arg(long, value_name = "FILE")]
    pub replay: Option<PathBuf>,

    #[command(flatten)]
    pub compute: ComputeArgs,
}

/// Runs the command.
pub fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let options = options(args)?;
    let opened = Opened::new(&args.model, &args.compute)?;
    let model = served(args, &opened)?;
    // Before the model is loaded: a port in use is told at once.
    let listener = TcpListener::bind((args.host, args.port)).map_err(|error| {
        let what = format!("cannot listen on {}:{}: {error}", args.host, args.port);
        Failure::new(what, "choose another --port, or end what uses it")
    })?;
    let address = listener.local_addr()?;
    let generator = generator(args, &opened, &model)?;
    note(&format!("{} is served at http://{address}/v1", model.id));
    lily_server::serve(listener, options, model, generator)?;
    Ok(())
}

fn options(args: &ServeArgs) -> Result<Options, Failure> {
    let environment = || std::env::var("LILY_API_KEY").ok();
    let api_key = args.api_key.clone().or_else(environment).filter(|key| !key.is_empty());
    if !args.host.is_loopback() && api_key.is_none() && !args.no_api_key {
        return Err(Failure::usage(
            format!("{} can be reached from other machines, and there is no key", args.host),
            "give --api-key, stay with --host 127.0.0.1, or insist with --no-api-key",
        ));
    }
    Ok(Options {
        api_key,
        cors_origins: args.cors_origin.clone(),
        max_body: args.max_body,
        header_timeout: Duration::from_secs(args.header_timeout),
        write_timeout: Duration::from_secs(args.write_timeout),
        ..Options::new(args.host)
    })
}

fn served(args: &ServeArgs, opened: &Opened) -> anyhow::Result<ServedModel> {
    let tokenizer = opened.need_tokenizer()?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (id, full) = names(args.model.model.as_deref());
    Ok(ServedModel {
        id,
        aliases: args.alias.iter().cloned().chain(full).collect(),
        any_name: args.any_model,
        created,
        template: opened.template(&tokenizer)?,
        defaults: opened.defaults()?,
        mask: Some(opened.named_tokens(&tokenizer)),
        tokenizer,
    })
}

/// The name of the model, and its full name if it has one: never a path.
fn names(model: Option<&Path>) -> (String, Option<String>) {
    let Some(path) = model else { return (lily_demo::NAME.into(), None) };
    let spec = path.to_str().filter(|_| !path.exists()).and_then(|name| name.split_once('/'));
    if let Some((owner, name)) = spec
        && !name.contains('/')
        && !owner.is_empty()
    {
        return (name.into(), Some(format!("{owner}/{name}")));
    }
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = whole.file_name().and_then(|name| name.to_str()).map(|n| n.trim_start_matches('.'));
    match name {
        Some("demo") if !path.exists() => (lily_demo::NAME.into(), None),
        Some(name) if !name.is_empty() => (name.into(), None),
        _ => ("model".into(), None),
    }
}

fn generator(
    args: &ServeArgs,
    opened: &Opened,
    model: &ServedModel,
) -> anyhow::Result<Arc<dyn Generator>> {
    let most = opened.model.config.max_position_embeddings;
    let wanted = Size {
        context: args.ctx.unwrap_or(most.min(DEFAULT_CONTEXT)),
        parallel: args.parallel.unwrap_or(DEFAULT_PARALLEL),
    };
    opened.check_context(wanted.context)?;
    if let Some(file) = &args.replay {
        let Size { context, parallel } = wanted;
        let limits = Limits { context, parallel, queue: args.queue };
        return Ok(Arc::new(replay(file, limits, model)?));
    }
    let device: Arc<dyn Device> = args.compute.device()?.into();
    let plan = &opened.model.plan;
    let machine = Machine::detect();
    let options = |size: Size| {
        // Room for the prefixes of some conversations a request, and for requests that give way; it must not be
        // what makes the server too large.
        let whole = snapshot_bytes(plan, size.context);
        let kept = whole.saturating_mul(4 * size.parallel as u64).min(whole.max(MOST_KEPT));
        let spare = machine.available.map_or(u64::MAX, |bytes| bytes / 4);
        EngineOptions {
            snapshot_bytes: kept.min(spare),
            ..EngineOptions::new(size.context, size.parallel, args.compute.chunk())
        }
    };
    let free = Free { context: args.ctx.is_none(), parallel: args.parallel.is_none() };
    let limit = device.memory_limit();
    let size = fitting(wanted, free, |size| {
        // As the engines are made.
        let options = EngineOptions { undo: device.overlaps(), ..options(size) };
        budget(&*device, plan, &options).check(&machine, limit).is_ok()
    });
    if let Some(line) = told(wanted, size) {
        note(&line);
    }
    let options = options(size);
    let scheduling = SchedulerOptions {
        queue: args.queue,
        // A GPU computes prompts and answers by different kernels.
        mixed: args.compute.on_host(),
        ..paced(args.compute.on_host())
    };
    let factory = opened.engines(device);
    let factory = Box::new(move || factory(options));
    Ok(Arc::new(Scheduler::new(factory, scheduling)?))
}

/// How a device's speed shapes the work. A GPU computes thousands of tokens in the time that a copy of a state off it
/// takes, and 32 tokens of a prompt, of which its matrix units make a chunk, as fast as 16.
fn paced(on_host: bool) -> SchedulerOptions {
    let standard = SchedulerOptions::default();
    match on_host {
        true => standard,
        false => SchedulerOptions { stride: 8192, min_chunk: 32, ..standard },
    }
}

/// Requests at once unless asked otherwise.
const DEFAULT_PARALLEL: usize = 4;

/// Context of a request unless asked otherwise, where the model has more.
const DEFAULT_CONTEXT: usize = 32_768;

/// Most bytes for kept states, unless a single one of a full context has more.
const MOST_KEPT: u64 = 2 << 30;

fn replay(file: &Path, limits: Limits, model: &ServedModel) -> anyhow::Result<Replay> {
    let place = || format!("the replay file {}", file.display());
    let text = std::fs::read_to_string(file).with_context(place)?;
    let end = model.tokenizer.eos_id().or_else(|| model.defaults.stop_ids.first().copied());
    let end = end.ok_or_else(|| {
        Failure::new("the model names no token that ends a turn", "take its tokenizer_config.json")
    })?;
    let script = Script::parse(&text, &model.tokenizer, end).with_context(place)?;
    Ok(Replay::start(script, limits)?)
}

fn host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(Ipv4Addr::LOCALHOST.into()),
        _ => text.parse().map_err(|_| "an IP address or localhost is needed".into()),
    }
}

fn queue(text: &str) -> Result<usize, String> {
    if text == "0" { Ok(0) } else { count(text) }
}

fn body_bytes(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1024..=1 << 30).contains(&n) => Ok(n),
        _ => Err("a number of bytes from 1024 to 1073741824 is needed".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_no_paths() {
        let name = |path: &str| names(Some(Path::new(path)));
        assert_eq!(names(None).0, lily_demo::NAME);
        assert_eq!(name("org/Model-1"), ("Model-1".into(), Some("org/Model-1".into())));
        assert_eq!(name("/no/such/folder/m/").0, "m");
        assert_eq!(name("demo").0, lily_demo::NAME);
        assert_eq!(name("src").0, "src");
        assert_eq!(name("/").0, "model");
    }
}
