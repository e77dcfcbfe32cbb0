#!/bin/sh
# Saves a run on its way to the sampler, and draws from it again with another seed: no model this
# time, only the logits in the file. Shows where the second answer parts from the first.
# Usage: replay.sh [PROMPT [SEED [OTHER_SEED]]]
set -eu
prompt=${1:-Tell me a story about a fox and a river.}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 130' INT TERM

# --inline puts the logits themselves into the stream, where usually a reference will do.
toast-tokenize -- "$prompt" < /dev/null |
    toast-prefill |
    toast-decode --inline |
    tee "$dir/run.frames" |
    toast-sample --temp 1 -n 60 --seed "${2:-1}" |
    tee "$dir/first.frames" |
    toast-detokenize

toast-sample --temp 1 -n 60 --seed "${3:-2}" < "$dir/run.frames" > "$dir/second.frames"

# One line per token: position and id. The draws can be compared up to the first difference: the
# logits after it are those that followed the first answer.
for draw in first second; do
    toast-frames --json --kinds token < "$dir/$draw.frames" |
        sed 's/.*"pos": \([0-9]*\), "id": \([0-9]*\).*/\1 \2/' > "$dir/$draw"
done
paste "$dir/first" "$dir/second" | awk '
    $2 != $4 { print "differs at position " $1 ": token " $2 ", then " $4; found = 1; exit }
    END { if (!found) print "no difference in " NR " tokens" }'
