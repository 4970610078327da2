//! How `lily inspect` shows what it found.

use std::io;

use lily_checkpoint::{ChecksumStatus, VerifyReport};
use lily_device::MemoryLimit;
use lily_model::{Claim, Layout, ModelConfig};
use lily_ops::LayerKind;
use serde_json::{Value, json};

use crate::inspect::{Class, Files, InspectArgs, Inspection};
use crate::output::{Stdout, bytes, grouped, table};

/// Prints the inspection as text or as JSON.
pub fn print(
    out: &mut Stdout,
    args: &InspectArgs,
    inspection: &Inspection,
    verified: Option<&VerifyReport>,
) -> io::Result<()> {
    if args.json {
        return out.json(&as_json(args, inspection, verified));
    }
    let i = inspection;
    out.line(&i.source)?;
    out.text(&shape(&i.config))?;
    match &i.files {
        Some(files) => out.text(&tensors(files))?,
        None => out.line(
            "\ntensors: none, config.json only; bytes are those of the checkpoint it describes",
        )?,
    }
    if let (true, Some(files)) = (args.tensors, &i.files) {
        out.text(&list(files))?;
    }
    out.text(&class_table(&i.classes))?;
    out.text(&memory(i))?;
    if let Some(report) = verified {
        out.line(&format!("\nverify\n{report}"))?;
    }
    out.flush()
}

fn shape(c: &ModelConfig) -> String {
    // One cell: table() would set a second one to the right.
    let row = |what: &str, value: String| vec![format!("{what:<11}{value}")];
    let (recurrent, attention) = (c.count(LayerKind::Recurrent), c.count(LayerKind::Attention));
    let rows = [
        row(
            "layers",
            format!("{}: {recurrent} Gated DeltaNet, {attention} attention", c.layers.len()),
        ),
        row("width", format!("{}, vocabulary {}", c.hidden_size, grouped(c.vocab_size as u64))),
        row(
            "experts",
            format!(
                "{} of width {}, {} a token, and a shared one of width {}",
                c.experts, c.expert_width, c.experts_per_token, c.shared_expert_width
            ),
        ),
        row(
            "attention",
            format!(
                "{} query heads, {} KV heads of {}, {} rotated",
                c.attention_heads, c.kv_heads, c.head_dim, c.rope_dims
            ),
        ),
        row(
            "DeltaNet",
            format!(
                "{} key heads of {}, {} value heads of {}, {} taps",
                c.linear_key_heads,
                c.linear_key_dim,
                c.linear_value_heads,
                c.linear_value_dim,
                c.conv_taps
            ),
        ),
        row("context", format!("at most {} tokens", grouped(c.max_position_embeddings as u64))),
    ];
    format!("\nshape\n{}", table(&rows))
}

fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::Mlx => "MLX",
        Layout::HuggingFace => "Hugging Face",
    }
}

fn tensors(files: &Files) -> String {
    let size = files.shards.iter().map(|s| s.1).sum();
    let mut text = format!(
        "\ntensors ({} layout)\n  {} in {} {} of {}; {} claimed by a role",
        layout_name(files.layout),
        grouped(files.tensors.len() as u64),
        files.shards.len(),
        if files.shards.len() == 1 { "file" } else { "files" },
        bytes(size),
        grouped(files.claimed() as u64),
    );
    let skipped = files.skipped();
    if skipped.is_empty() {
        text.push_str(", none skipped");
    }
    for (rule, (count, size)) in skipped {
        text.push_str(&format!(
            "\n  skipped as {rule}: {} of {}",
            grouped(count as u64),
            bytes(size)
        ));
    }
    text.push('\n');
    text
}

fn list(files: &Files) -> String {
    let mut text = "\n".to_owned();
    for t in &files.tensors {
        let became = match &t.claim {
            Claim::Role(role) => role.clone(),
            Claim::Skipped(rule) => format!("skipped: {rule}"),
        };
        text.push_str(&format!("  {} {} {:?} -> {became}\n", t.name, t.dtype, t.shape));
    }
    text
}

fn sums(classes: &[Class]) -> (u64, u64) {
    (classes.iter().map(|c| c.bytes).sum(), classes.iter().map(|c| c.token).sum())
}

fn class_table(classes: &[Class]) -> String {
    let head = ["weights", "format", "bytes", "read per token"].map(String::from).to_vec();
    let row = |name: &str, format: String, size: u64, token: u64| {
        vec![name.to_owned(), format, grouped(size), grouped(token)]
    };
    let mut rows = vec![head];
    for c in classes {
        rows.push(row(c.name, c.formats.join(", "), c.bytes, c.token));
    }
    let (size, token) = sums(classes);
    rows.push(row("sum", String::new(), size, token));
    format!("\n{}", table(&rows))
}

fn memory(i: &Inspection) -> String {
    let b = &i.budget;
    let row = |what: &str, n: u64| vec![what.to_owned(), grouped(n), bytes(n)];
    let mut rows = vec![
        row("weights (mapped from the files)", b.weights),
        row("of it read once, then dropped at need", b.droppable()),
        row("copies of weights", b.copies),
        row("KV cache", b.kv),
        row("recurrent state", b.state),
        row("scratch", b.scratch),
        row("total", b.total()),
        row("of it allocated", b.anonymous()),
    ];
    for (what, known) in [("this machine", i.machine.total), ("available now", i.machine.available)]
    {
        rows.extend(known.map(|n| row(what, n)));
    }
    if let MemoryLimit::HostWithin(n) | MemoryLimit::Own(n) = i.limit {
        rows.push(row("available on the device", n));
    }
    let fits = match b.check(&i.machine, i.limit) {
        Ok(()) => String::new(),
        Err(refusal) => format!("  does not fit: {refusal}\n"),
    };
    format!(
        "\nmemory: 1 session of {} tokens, prompt chunks of {}, {}{}\n{}{fits}",
        grouped(i.context as u64),
        i.chunk,
        i.device,
        if i.precise { ", precise" } else { "" },
        table(&rows),
    )
}

fn as_json(args: &InspectArgs, i: &Inspection, verified: Option<&VerifyReport>) -> Value {
    let (size, token) = sums(&i.classes);
    let class = |c: &Class| {
        json!({
            "class": c.name,
            "formats": c.formats,
            "bytes": c.bytes,
            "bytes_per_token": c.token,
        })
    };
    let b = &i.budget;
    json!({
        "model": i.source,
        "shape": shape_json(&i.config),
        "tensors": i.files.as_ref().map(|files| tensors_json(files, args.tensors)),
        "weights": {
            "classes": i.classes.iter().map(class).collect::<Vec<_>>(),
            "bytes": size,
            "bytes_per_token": token,
        },
        "memory": {
            "context": i.context,
            "sessions": 1,
            "chunk": i.chunk,
            "precise": i.precise,
            "device": i.device,
            "weights": b.weights,
            "weights_read_once": b.droppable(),
            "copies": b.copies,
            "kv": b.kv,
            "kv_per_token": i.kv_token,
            "state": b.state,
            "scratch": b.scratch,
            "total": b.total(),
            "allocated": b.anonymous(),
            "machine_total": i.machine.total,
            "machine_available": i.machine.available,
            "fits": b.check(&i.machine, i.limit).is_ok(),
        },
        "verify": verified.map(verify_json),
    })
}

fn shape_json(c: &ModelConfig) -> Value {
    let kind = |kind: &LayerKind| match kind {
        LayerKind::Recurrent => "linear_attention",
        LayerKind::Attention => "full_attention",
    };
    json!({
        "layers": c.layers.len(),
        "layer_types": c.layers.iter().map(kind).collect::<Vec<_>>(),
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "attention_heads": c.attention_heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rope_dims": c.rope_dims,
        "linear_key_heads": c.linear_key_heads,
        "linear_value_heads": c.linear_value_heads,
        "linear_key_dim": c.linear_key_dim,
        "linear_value_dim": c.linear_value_dim,
        "conv_taps": c.conv_taps,
        "experts": c.experts,
        "experts_per_token": c.experts_per_token,
        "expert_width": c.expert_width,
        "shared_expert_width": c.shared_expert_width,
        "max_position_embeddings": c.max_position_embeddings,
    })
}

fn tensors_json(files: &Files, listed: bool) -> Value {
    let skipped = |(rule, (tensors, bytes)): (&str, (usize, u64))| json!({ "rule": rule, "tensors": tensors, "bytes": bytes });
    let shards = files.shards.iter().map(|(file, bytes)| json!({ "file": file, "bytes": bytes }));
    let mut value = json!({
        "layout": layout_name(files.layout),
        "count": files.tensors.len(),
        "claimed": files.claimed(),
        "skipped": files.skipped().into_iter().map(skipped).collect::<Vec<_>>(),
        "files": shards.collect::<Vec<_>>(),
    });
    if listed {
        let entry = |t: &crate::inspect::TensorEntry| {
            let (role, skipped) = match &t.claim {
                Claim::Role(role) => (Some(role.as_str()), None),
                Claim::Skipped(rule) => (None, Some(*rule)),
            };
            json!({
                "name": t.name,
                "dtype": t.dtype,
                "shape": t.shape,
                "bytes": t.bytes,
                "role": role,
                "skipped": skipped,
            })
        };
        value["list"] = files.tensors.iter().map(entry).collect();
    }
    value
}

fn verify_json(report: &VerifyReport) -> Value {
    let shard = |s: &lily_checkpoint::ShardChecksum| {
        let (status, list) = match &s.status {
            ChecksumStatus::Unlisted => ("unlisted", None),
            ChecksumStatus::Match { list } => ("match", Some(list)),
            ChecksumStatus::Mismatch { list, .. } => ("mismatch", Some(list)),
        };
        json!({ "file": s.file, "bytes": s.bytes, "sha256": s.sha256, "status": status, "list": list })
    };
    let non_finite = |n: &lily_checkpoint::NonFinite| json!({ "tensor": n.tensor, "file": n.file, "count": n.count, "first_index": n.first_index });
    json!({
        "clean": report.is_clean(),
        "tensors": report.tensors,
        "bytes": report.bytes,
        "files": report.shards.iter().map(shard).collect::<Vec<_>>(),
        "non_finite": report.non_finite.iter().map(non_finite).collect::<Vec<_>>(),
    })
}
