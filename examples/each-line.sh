#!/bin/sh
# One answer per line of a list, two ways. A shell loop is right for doing something with each
# answer, but starts a process and loads the model for every line; --each-line loads it once.
# Usage: each-line.sh [FILE]
set -eu
if [ $# -gt 0 ] && { ! [ -r "$1" ] || [ -d "$1" ]; }; then
    echo "each-line.sh: cannot read $1" >&2
    exit 66
fi

prompts() {
    if [ $# -gt 0 ]; then
        cat -- "$1"
        return
    fi
    cat <<'END'
Who are you?
What is the capital of France?
One of the goats costs 2 dollars. How much do 4 goats cost?
END
}

# < /dev/null: a command in a loop shares the loop's stdin, and toast-decode takes what is piped to
# it as part of its prompt: without this, the first one would swallow the rest of the list.
prompts "$@" | while IFS= read -r prompt || [ -n "$prompt" ]; do
    [ -n "$prompt" ] || continue
    answer=$(toast-decode -- "$prompt" < /dev/null)
    printf '%s\n%s\n\n' "> $prompt" "$answer"
done

prompts "$@" | toast-decode --each-line
