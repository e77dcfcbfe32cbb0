#!/bin/sh
# Your own sampler in the loop, here in awk: toast-frames shows it each step's most likely tokens
# as a line of JSON, it prints the one it has drawn, and toast-feed sends that back to toast-decode.
# Usage: awk-sampler.sh [PROMPT [TEMPERATURE [K [SEED]]]]
set -eu
prompt=${1:-Tell me a story about a miller.}

# Each step waits for the one before, so no filter may hold lines back. mawk, Debian's awk, reads
# a pipe in blocks unless told otherwise; the other awks take a line when it is there.
case $(awk -W version 2>&1 < /dev/null) in
    mawk*) interactive='-W interactive' ;;
    *) interactive= ;;
esac

# LC_ALL=C: a number has a decimal point, not a comma.
toast-tokenize -- "$prompt" < /dev/null |
    toast-prefill |
    toast-decode |
    toast-frames --json --top 40 |
    LC_ALL=C awk $interactive -v temperature="${2:-0.8}" -v k="${3:-5}" -v seed="${4:-1}" \
        -f "$(dirname "$0")/sampler.awk" |
    toast-feed |
    toast-detokenize
