#!/usr/bin/env python3
"""Step 4. Trained weights -> HF-format bf16 checkpoint -> 4-bit MLX checkpoint (with the real mlx_lm.convert).
  export.py WEIGHTS_DIR TOK_DIR OUT_DIR      (WEIGHTS_DIR: w0..w3.bin, meta.json, as train.py packs them)"""
import json, shutil, sys, zlib
from pathlib import Path
import numpy as np
import mlx.core as mx

src, tok, out = map(Path, sys.argv[1:4])
template = Path(__file__).resolve().parents[2] / "models/demo/chat_template.jinja"
meta = json.load(open(src / "meta.json"))
parts = []
for i in range(4):
    b = (src / f"w{i}.bin").read_bytes()
    n = int.from_bytes(b[:8], "little")
    lo = np.frombuffer(b[8:8 + n], np.uint8).astype(np.uint16)
    hi = np.frombuffer(zlib.decompress(b[8 + n:]), np.uint8).astype(np.uint16)
    parts.append(lo | (hi << 8))
allw = np.concatenate(parts)
W = {}
for n, (off, shape) in meta.items():
    k = int(np.prod(shape))
    W[n] = allw[off:off + k].reshape(shape)
V, H, L, E, I = 4096, 384, 8, 16, 128
ids = {t: i for t, i in ((t, json.loads((tok / "tokenizer.json").read_text())) for t in ())}
tj = json.loads((tok / "tokenizer.json").read_text())
sp = {a["content"]: a["id"] for a in tj["added_tokens"]}
P = "model.language_model."
hf = {}
for n, a in W.items():
    if n.endswith("experts.gate_proj"):
        up = W[n.replace("gate_proj", "up_proj")]
        hf[P + n.replace("gate_proj", "gate_up_proj")] = np.concatenate([a, up], 1)
    elif n.endswith("experts.up_proj"):
        continue
    elif n.endswith("conv1d.weight"):
        hf[P + n] = a[:, None, :]
    elif n == "lm_head.weight":
        hf[n] = a
    else:
        hf[P + n] = a
text = dict(
    model_type="qwen3_5_moe_text", dtype="bfloat16", vocab_size=V, hidden_size=H, num_hidden_layers=L, full_attention_interval=4,
    layer_types=["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(L)],
    num_attention_heads=8, num_key_value_heads=1, head_dim=256, attention_bias=False, attention_dropout=0.0, attn_output_gate=True,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    mamba_ssm_dtype="float32", num_experts=E, num_experts_per_tok=4, moe_intermediate_size=I, shared_expert_intermediate_size=I,
    router_aux_loss_coef=0.02, hidden_act="silu", rms_norm_eps=1e-6, max_position_embeddings=32768, partial_rotary_factor=0.25,
    rope_parameters=dict(mrope_interleaved=True, mrope_section=[11, 11, 10], partial_rotary_factor=0.25, rope_theta=10000000, rope_type="default"),
    tie_word_embeddings=False, use_cache=True, bos_token_id=sp["<|endoftext|>"], eos_token_id=sp["<|endoftext|>"], pad_token_id=sp["<|endoftext|>"])
cfg = dict(architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", text_config=text, tie_word_embeddings=False)
gen = dict(bos_token_id=sp["<|endoftext|>"], do_sample=True, eos_token_id=[sp["<|im_end|>"], sp["<|endoftext|>"]], pad_token_id=sp["<|endoftext|>"],
           temperature=0.7, top_k=20, top_p=0.8)
b16 = out / "lily-demo-bf16"
b4 = out / "lily-demo-4bit"
for d in (b16, b4):
    if d.exists():
        shutil.rmtree(d)
b16.mkdir(parents=True)
mxw = {k: mx.array(np.ascontiguousarray(v)).view(mx.bfloat16) for k, v in hf.items()}
mx.save_safetensors(str(b16 / "model.safetensors"), mxw, metadata={"format": "pt"})
total = sum(v.nbytes for v in mxw.values())
json.dump(dict(metadata=dict(total_size=total), weight_map={k: "model.safetensors" for k in sorted(mxw)}), open(b16 / "model.safetensors.index.json", "w"), indent=1)
json.dump(cfg, open(b16 / "config.json", "w"), indent=1)
json.dump(gen, open(b16 / "generation_config.json", "w"), indent=1)
for f in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(tok / f, b16 / f)
shutil.copy(template, b16 / "chat_template.jinja")
from mlx_lm.convert import convert
convert(str(b16), str(b4), quantize=True)
for f in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    shutil.copy(b16 / f, b4 / f)
shutil.copy(template, b4 / "chat_template.jinja")
print("parameters", sum(v.size for v in mxw.values()), "bf16 bytes", total)
for d in (b16, b4):
    print(d.name, {f.name: f.stat().st_size for f in sorted(d.iterdir())})
