#!/usr/bin/env python3
"""Step 6b. `perplexity-long.json`: text that the model draws itself, with mlx-lm's log-probabilities in float32 (runner.py) and how far
its run in bfloat16 moves the perplexity, for several orders of sums.     golden_long.py MODEL_DIR LILY OUT_DIR
MODEL_DIR/golden has the openings; LILY is the program that draws (--precise). Passages that OUT_DIR has are not drawn again."""
import json, math, subprocess, sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
import runner

model, lily, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
mx.set_default_device(mx.cpu)
COUNT, LENGTH, OPENING = 24, 769, 32
ORDERS = [(1, 768), (2, 768), (4, 192), (8, 192)]       # parts of each sum, tokens of a step
F = mx.float32
A = runner.Run(model)


def openings():
    """Short prompts of greedy.json, and the first tokens of the other texts."""
    read = lambda name: json.load(open(model / "golden" / name))
    starts = [(p["name"], p["prompt_ids"]) for p in read("greedy.json")["prompts"] if len(p["prompt_ids"]) < 150]
    texts = read("perplexity.json")["passages"] + read("logprobs.json")["sequences"][:1]
    return starts + [(p["name"], p["ids"][:OPENING]) for p in texts]


def draw(n, opening):
    """Goes on at temperature 1 until the passage is full: an answer's end is followed by what the model says next, a text's by a user's turn."""
    ids, calls = list(opening), 0
    while len(ids) < LENGTH:
        options = dict(temperature=1, top_p=1, top_k=0, min_p=0, presence_penalty=0, repetition_penalty=1, seed=1000 * n + calls, max_tokens=LENGTH - len(ids))
        argv = [lily, "run", "--precise", "--device", "cpu", "--model", str(model), "--token-ids", "-", "--json", "--quiet"]
        for name, value in options.items():
            argv += ["--" + name.replace("_", "-"), str(value)]
        new = json.loads(subprocess.run(argv, input=json.dumps(ids).encode(), stdout=subprocess.PIPE, check=True).stdout)["token_ids"]
        ids, calls = ids + new, calls + 1
        if new[-1:] == [A.eot]:
            ids += A.enc("<|im_start|>user\n")
    return ids[:LENGTH]


def log_softmax(l):
    l = l.astype(np.float64)
    l -= l.max(-1, keepdims=True)
    return l - np.log(np.exp(l).sum(-1, keepdims=True))


def bf16(parts, passages):
    """mlx-lm in bfloat16; products (by numpy, each sum in `parts`), convolution, rotary embedding and attention in float32, their results rounded."""
    dense = {}

    def weights(w, s, b, k):
        if id(w) not in dense:
            dense[id(w)] = np.array(mx.dequantize(w, s.astype(F), b.astype(F), group_size=k.get("group_size", 64), bits=k.get("bits", 4)))
        return dense[id(w)]

    def product(x, d):
        step = x.shape[-1] // (parts if x.shape[-1] % (parts * 64) == 0 else 1)
        total = x[..., :step] @ d[:, :step].T
        for i in range(step, x.shape[-1], step):
            total = total + x[..., i:i + step] @ d[:, i:i + step].T
        return total

    def linear(x, w, scales, biases, **k):
        return mx.array(product(np.array(x.astype(F)), weights(w, scales, biases, k))).astype(x.dtype)

    def experts(x, w, s, b, rhs_indices, **k):
        assert k.get("lhs_indices") is None
        d, index, rows = weights(w, s, b, k), np.array(rhs_indices), np.array(x.astype(F))
        rows = np.broadcast_to(rows, index.shape + rows.shape[-2:]).reshape(-1, rows.shape[-1])
        result = np.empty((index.size, d.shape[1]), np.float32)
        for e in np.unique(index):
            at = np.nonzero(index.reshape(-1) == e)[0]
            result[at] = product(rows[at], d[e])
        return mx.array(result.reshape(index.shape + (1, d.shape[1]))).astype(x.dtype)

    conv, rope, attention = originals
    mx.quantized_matmul, mx.gather_qmm = linear, experts
    mx.conv1d = lambda x, w, *a, **k: conv(x.astype(F), w.astype(F), *a, **k).astype(x.dtype)
    mx.fast.rope = lambda x, *a, **k: rope(x.astype(F), *a, **k).astype(x.dtype)
    mx.fast.scaled_dot_product_attention = lambda q, k, v, **kw: attention(q.astype(F), k.astype(F), v.astype(F), **kw).astype(q.dtype)
    m, _ = load_model(model)
    for ids, chunk in passages:
        cache = make_prompt_cache(m)
        yield np.concatenate([np.array(m(mx.array([ids[i:min(i + chunk, LENGTH - 1)]]), cache=cache)[0].astype(F)) for i in range(0, LENGTH - 1, chunk)])


originals = mx.conv1d, mx.fast.rope, mx.fast.scaled_dot_product_attention
file = out / "perplexity-long.json"
if file.exists():
    drawn = [(p["name"], p["ids"]) for p in json.load(open(file))["passages"]]
else:
    starts = openings()
    drawn = [(starts[n % len(starts)][0] + ", drawn on, %d" % (n // len(starts) + 1), draw(n, starts[n % len(starts)][1])) for n in range(COUNT)]
at, js = np.arange(LENGTH - 1), []
for name, ids in drawn:
    l = A.logits(ids[:-1])
    js.append(dict(name=name, ids=ids, logprob=[round(float(x), 4) for x in log_softmax(l)[at, ids[1:]]], top1=[int(x) for x in l.argmax(-1)]))
    print(name, math.exp(-sum(js[-1]["logprob"]) / (LENGTH - 1)), flush=True)
ratios, errors, means, equal, each = [], [], [], [], []
for parts, chunk in ORDERS:
    differences, same = [], []
    for p, l in zip(js, bf16(parts, [(p["ids"], chunk) for p in js])):
        differences.append(np.array(p["logprob"]) - log_softmax(l)[at, p["ids"][1:]])
        same.append(np.mean(l.argmax(-1) == p["top1"]))
    differences = np.array(differences)
    ratios.append(round(math.exp(differences.mean()), 5))
    errors.append(round(float(differences.mean(1).std(ddof=1)) / math.sqrt(len(js)), 5))
    means.append(round(float(abs(differences).mean()), 5))
    each.append(abs(differences).mean(1))
    equal.append(round(float(np.mean(same)), 5))
    print(parts, chunk, ratios[-1], errors[-1], means[-1], equal[-1], flush=True)
bf = dict(made_with="mlx-lm, bfloat16 activations, products (by numpy), convolution, rotary embedding and attention in float32, results rounded to bfloat16",
          note="every list has an entry for each order of sums: orders are parts of a sum and tokens of a step, standard_errors of the ratios come of the spread of the passages, "
               "mean_logprob_differences are of absolute values (passage_mean_logprob_differences: of each passage, the largest of the orders), top1_equal is a share of the positions; perplexity_ratio is the first",
          perplexity_ratio=ratios[0], perplexity_ratios=ratios, standard_errors=errors, mean_logprob_differences=means, top1_equal=equal, orders=ORDERS,
          passage_mean_logprob_differences=[round(float(x), 5) for x in np.max(each, axis=0)])
note = "%d predicted positions each: ids[1] to ids[%d]; top1[i] is the most probable token after ids[:i+1]; the model drew the texts itself at temperature 1" % (LENGTH - 1, LENGTH - 1)
json.dump(dict(made_with="mlx-lm, float32 activations, CPU", note=note, bf16_f32acc=bf, passages=js), open(file, "w"), ensure_ascii=False, separators=(",", ":"))
