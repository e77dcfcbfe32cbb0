"""llama.cpp for the benchmarks of native products: a random model in Q4_0, and a worker
(workers.py) that runs it. Read by an interpreter that has it:

    export CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    CXXFLAGS="$CFLAGS" pip install --no-cache-dir llama-cpp-python gguf

GGML_AMX_INT8=OFF does not leave AMX out where llama.cpp is built for the machine that builds it.

    python benchmarks/native_llama.py make PATH < config.json
    python benchmarks/native_llama.py run PATH THREADS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from workers import serve, steps_within

BLOCK, BLOCK_BYTES = 32, 18  # of Q4_0: a float16, and 32 numbers of 4 bits
SPREAD = 0.0043  # of a step: weights have a standard deviation of 0.02
BATCH = 512  # tokens that are computed at a time, llama.cpp's default
FIRST = 5  # token of a prompt
CONTEXT, ROOM = 16, 512  # of sequences that step together: positions before, and at most


def make(path: str, config: dict[str, Any]) -> None:
    """Writes a llama, an OLMoE or a mixture of Qwen3's, of the shape of mlx_lm's config."""
    import gguf

    random = np.random.default_rng(0)
    width, vocab, head = config["hidden_size"], config["vocab_size"], config.get("head_dim")
    head = head or width // config["num_attention_heads"]
    queries, keys = (head * config[f"num_{n}_heads"] for n in ("attention", "key_value"))
    inner, experts = config["intermediate_size"], config.get("num_experts")
    architecture = config["model_type"].replace("_", "")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("no_vocab")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        inner = config.get("moe_intermediate_size", inner)
        writer.add_expert_feed_forward_length(inner)

    def packed(name: str, *shape: int) -> None:
        blocks = np.frombuffer(
            random.bytes(int(np.prod(shape)) // BLOCK * BLOCK_BYTES), np.uint8
        ).reshape(-1, BLOCK_BYTES).copy()  # fmt: skip
        blocks[:, :2] = np.frombuffer(np.float16(SPREAD).tobytes(), np.uint8)
        data = blocks.reshape(*shape[:-1], shape[-1] // BLOCK * BLOCK_BYTES)
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def plain(name: str, values: np.ndarray) -> None:
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    packed("token_embd", vocab, width)
    plain("output_norm", np.ones(width))
    if not config["tie_word_embeddings"]:
        packed("output", vocab, width)
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        plain(f"{block}attn_norm", np.ones(width))
        plain(f"{block}ffn_norm", np.ones(width))
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            packed(f"{block}attn_{name}", rows, width)
        packed(f"{block}attn_output", width, queries)
        end, several = ("_exps", (experts,)) if experts else ("", ())
        if experts:
            normed = (queries, keys) if architecture == "olmoe" else (head, head)
            plain(f"{block}attn_q_norm", np.ones(normed[0]))
            plain(f"{block}attn_k_norm", np.ones(normed[1]))
            plain(f"{block}ffn_gate_inp", 0.02 * random.standard_normal((experts, width)))
        for name in ("gate", "up"):
            packed(f"{block}ffn_{name}{end}", *several, inner, width)
        packed(f"{block}ffn_down{end}", *several, width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Runner:
    """A model and a context. threads: that compute."""

    def __init__(self, path: str, threads: int, context: int = 4096):
        import llama_cpp

        self._api = llama_cpp
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._silent = silent  # it is called as long as the library is there
        llama_cpp.llama_log_set(silent, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot read {path}")
        self._threads = threads
        self._context = self._new_context(context, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._token = FIRST

    def _new_context(self, positions: int, sequences: int) -> Any:
        """For so many sequences that together have so many positions."""
        options = self._api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = positions, positions, BATCH
        options.n_threads = options.n_threads_batch = self._threads
        options.n_seq_max = sequences
        context = self._api.llama_init_from_model(self._model, options)
        if not context:
            raise SystemExit("llama.cpp makes no context")
        return context

    def read(self, ids: list[int]) -> int:
        """The likeliest token after some more."""
        tokens = (self._api.llama_token * len(ids))(*ids)
        batch = self._api.llama_batch_get_one(tokens, len(ids))
        if code := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama.cpp: llama_decode gives {code}")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab,))))

    def forget(self) -> None:
        """All that was read."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def decode(self, context: float, count: float) -> float:
        """Tokens a second."""
        self.forget()
        token = self.read([self.read([FIRST] * int(context))])
        start = time.perf_counter()
        for _ in range(int(count)):
            token = self.read([token])
        return count / (time.perf_counter() - start)

    def begin(self, context: float) -> None:
        """Reads a prompt to go on from."""
        self.forget()
        self._token = self.read([self.read([FIRST] * int(context))])

    def go(self, seconds: float) -> float:
        """Tokens a second, taken for so long after `begin`."""

        def step() -> None:
            self._token = self.read([self._token])

        return steps_within(seconds, step)

    def prefill(self, count: float) -> float:
        """Tokens a second."""
        ids = [FIRST + 7 * n % 4000 for n in range(int(count))]
        self.forget()
        start = time.perf_counter()
        self.read(ids)
        return count / (time.perf_counter() - start)

    def together(self, sequences: float, count: float) -> float:
        """Tokens a second of all, of so many sequences that take `count` steps together."""
        api, rows = self._api, int(sequences)
        context = self._new_context(ROOM * rows, rows)
        batch = api.llama_batch_init(rows, 0, 1)
        batch.n_tokens, tokens = rows, [FIRST + row for row in range(rows)]
        begun = 0.0
        for position in range(CONTEXT + int(count)):
            if position == CONTEXT:
                begun = time.perf_counter()
            for row in range(rows):
                batch.token[row], batch.pos[row], batch.logits[row] = tokens[row], position, 1
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, row
            if code := api.llama_decode(context, batch):
                raise SystemExit(f"llama.cpp: llama_decode gives {code}")
            for row in range(rows):
                logits = api.llama_get_logits_ith(context, row)
                tokens[row] = int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab,))))
        rate = rows * count / (time.perf_counter() - begun)
        api.llama_batch_free(batch)
        api.llama_free(context)
        return rate


def main() -> None:
    what, path, *rest = sys.argv[1:]
    if what == "make":
        make(path, json.load(sys.stdin))
        return
    runner = Runner(path, int(rest[0]))
    names = ("decode", "begin", "go", "prefill", "together")
    serve({name: getattr(runner, name) for name in names})


if __name__ == "__main__":
    main()
