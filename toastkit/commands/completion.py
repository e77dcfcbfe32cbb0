"""What a shell offers after a press of Tab: names that we know, beside the files that it knows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# click's own function leaves the shell's completion out: of prompts, and of what is redirected.
# bash takes --option=value apart at the sign; `filenames` has it quote names and mark directories.
BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' current=${COMP_WORDS[COMP_CWORD]} words=() word type value
    for word in "${COMP_WORDS[@]:0:COMP_CWORD}"; do
        [[ $word == = ]] || words+=("$word")
    done
    [[ $current == = ]] && current=
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
        plain) COMPREPLY+=("$value") ;;
        file | dir)
            compopt -o filenames
            mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -${type:0:1} -- "$current")
            ;;
        esac
    done < <(env COMP_WORDS="${words[*]}"$'\\n'"$current" COMP_CWORD=${#words[@]} \\
        %(complete_var)s=bash_complete "$1")
}
complete -o nosort -o bashdefault -o default -F %(complete_func)s %(prog_name)s
"""


def script(command: click.Command, name: str, variable: str, shell: str) -> str:
    """What a shell has to evaluate. variable: the one that asks a command for completions."""
    from click.shell_completion import BashComplete, get_completion_class

    class Bash(BashComplete):
        source_template = BASH

    kind = Bash if shell == "bash" else get_completion_class(shell)
    assert kind is not None  # click knows the three that --completion takes
    return kind(command, {}, name, variable).source()


def files(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The shell's own completion."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The models on this machine, and files."""
    from toastkit.model.locate import names_here

    return _beginning(incomplete, names_here()) + files(context, parameter, incomplete)


def sessions(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Named sessions, and directories."""
    from toastkit.session.names import sessions_root

    return _beginning(incomplete, _listed(sessions_root())) + files(context, parameter, incomplete)


def chats(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Named conversations, which have no slash in their name."""
    from toastkit.client.chats import SUFFIX, chats_root

    names = [name for name in _listed(chats_root()) if name.endswith(SUFFIX)]
    return _beginning(incomplete, [name.removesuffix(SUFFIX) for name in names])


def _listed(folder: os.PathLike[str]) -> list[str]:
    """The names in a folder that can be asked for."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []


def _beginning(incomplete: str, names: list[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    # A line of the answer is a name.
    fit = [name for name in names if name.startswith(incomplete) and name.isprintable()]
    return [CompletionItem(name) for name in fit]
