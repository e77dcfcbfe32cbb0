#!/bin/sh
# Confidence as an exit status: prints the answer and ends with 0 where the model was sure of its
# words, otherwise says "not sure" on stderr and ends with 1. So a script can write
#   answer=$(gate.sh "$question") || answer="I shall ask somebody."
# Usage: gate.sh [PROMPT [LIMIT]]   LIMIT: the least mean log-probability of the answer's tokens
set -eu
prompt=${1:-What is the capital of France?}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 130' INT TERM

toast-tokenize -- "$prompt" < /dev/null |
    toast-prefill |
    toast-decode --greedy --max-tokens 200 > "$dir/run.frames"

if toast-frames --stat < "$dir/run.frames" |
    LC_ALL=C awk -v limit="${2:--0.1}" '/^mean logprob/ { sure = $3 >= limit } END { exit !sure }'
then
    toast-detokenize < "$dir/run.frames"
else
    echo "not sure" >&2
    exit 1
fi
