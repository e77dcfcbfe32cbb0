#!/bin/sh
# Each step of inference is a process of its own; every arrow is a pipe that you can cut.
PATH="$(dirname "$0")/../.venv/bin:$PATH"

cat <<'PIPELINE'
$ toast-tokenize "Tell me a story about a fox and a river." |
    toast-prefill | toast-decode | toast-entropy-gear | toast-sample | toast-detokenize

PIPELINE
toast-tokenize "Tell me a story about a fox and a river." |
    toast-prefill | toast-decode | toast-entropy-gear | toast-sample | toast-detokenize
