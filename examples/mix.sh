#!/usr/bin/env bash
# Two prompts, one answer: mix.py averages what the two decodes expect next, one sampler draws, and
# the token goes back to both, which may have read prompts of other lengths.
# Usage: mix.sh [PROMPT_A PROMPT_B]
set -eu
a=${1:-Tell me a story about a fox and a river.}
b=${2:-Tell me a story about a robot and a castle.}

run() {
    toast-tokenize -- "$1" < /dev/null | toast-prefill | toast-decode --inline
}

# The python3 beside toast-decode is the one that has toastkit's modules.
decode=$(command -v toast-decode) || { echo "mix.sh: toast-decode is not on PATH" >&2; exit 127; }
PATH="$(dirname "$(readlink -f "$decode")"):$PATH"

python3 "$(dirname "$0")/mix.py" <(run "$a") <(run "$b") | toast-sample --temp 0 | toast-detokenize
