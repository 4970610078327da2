"""mlx-lm as a peer of `lily bench compare` and `lily bench score`: one warm process, JSON lines on stdin and stdout.

    python mlx_lm_peer.py MODEL_FOLDER

The first line that it prints is {"ready": true, ...}: versions, device, seconds to load, and the SHA-256 of each
weight file that it read. Then it answers each line of stdin with one line: {"seconds": s} or {"error": text}.

    {"op": "prefill", "tokens": n}                  a prompt, to the logits of its last token
    {"op": "decode", "context": c, "tokens": n}     n tokens after a context of c; the context is not timed
    {"op": "score", "ids": [...]}                   {"logprob": [...], "top1": [...]} of ids[1:], in f32

Scores leave the model in f32: measure speed with another process.

Generation is `generate_step`, which evaluates asynchronously and knows no text: the fastest path that mlx-lm has.
"""

import copy
import hashlib
import json
import os
import sys
import time
from pathlib import Path

# Whatever libraries print must not come between the lines of answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def answer(**fields):
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def word(i):
    """SplitMix64, as Lily's prompts are made."""
    mask = (1 << 64) - 1
    z = (i + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    return z ^ z >> 31


class Peer:
    def __init__(self, folder):
        import mlx.core as mx
        from mlx_lm.generate import generate_step, wired_limit
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        self.mx, self.generate_step, self.wired_limit = mx, generate_step, wired_limit
        self.make_cache = make_prompt_cache
        start = time.perf_counter()
        self.model, config = load_model(Path(folder))
        mx.eval(self.model.parameters())
        self.load_seconds = time.perf_counter() - start
        self.vocab = config.get("vocab_size") or config["text_config"]["vocab_size"]
        self.context = None

    def prompt(self, tokens):
        return self.mx.array([word(i) % self.vocab for i in range(tokens)])

    def prefill(self, tokens):
        self.context = None
        prompt = self.prompt(tokens)
        self.mx.eval(prompt)
        self.mx.synchronize()
        start = time.perf_counter()
        # Without tokens to generate it ends when the token after the prompt is known.
        for _ in self.generate_step(prompt, self.model, max_tokens=0):
            pass
        return time.perf_counter() - start

    def filled(self, context):
        """A cache of all tokens of a context but its last; kept, so that it is filled once."""
        if self.context is None or self.context[0] != context:
            self.context = None
            cache = self.make_cache(self.model)
            prompt = self.prompt(context)
            if context > 1:
                for _ in self.generate_step(prompt[:-1], self.model, max_tokens=0, prompt_cache=cache):
                    pass
                self.mx.eval([c.state for c in cache])
            self.context = (context, prompt, cache)
        return self.context[1], copy.deepcopy(self.context[2])

    def decode(self, context, tokens):
        prompt, cache = self.filled(context)
        steps = self.generate_step(prompt[-1:], self.model, max_tokens=tokens + 1, prompt_cache=cache)
        next(steps)
        start = time.perf_counter()
        count = sum(1 for _ in steps)
        seconds = time.perf_counter() - start
        if count != tokens:
            raise RuntimeError(f"{count} of {tokens} tokens were generated")
        return seconds

    def score(self, ids):
        mx = self.mx
        # bf16 logits are often equal where f32 ones are not; packed weights stay as they are.
        self.model.set_dtype(mx.float32)
        logits = self.model(mx.array(ids[:-1])[None])[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
        return chosen.tolist(), mx.argmax(logits, axis=-1).tolist()

    def handle(self, request):
        with self.wired_limit(self.model):
            match request["op"]:
                case "prefill":
                    answer(seconds=self.prefill(request["tokens"]))
                case "decode":
                    answer(seconds=self.decode(request["context"], request["tokens"]))
                case "score":
                    logprob, top1 = self.score(request["ids"])
                    answer(logprob=logprob, top1=top1)
                case op:
                    answer(error=f"there is no operation {op}")


def main():
    folder = sys.argv[1]
    from importlib.metadata import version

    peer = Peer(folder)
    files = sorted(Path(folder).glob("model*.safetensors"))
    answer(
        ready=True,
        mlx_lm=version("mlx-lm"),
        mlx=version("mlx"),
        device=str(peer.mx.default_device()),
        load_seconds=peer.load_seconds,
        files=[dict(name=f.name, bytes=f.stat().st_size, sha256=sha256(f)) for f in files],
    )
    for line in sys.stdin:
        try:
            peer.handle(json.loads(line))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


main()
