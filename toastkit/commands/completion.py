"""Shell completion: names known to us, besides the shell's own completion of files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from toastkit.base_directories import listed
from toastkit.errors import ToastError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# click's own functions leave out the shell's completion in prompts and redirections, and the option
# in --option=value. Completion must not print messages, so stderr is closed. bash splits
# --option=value at the sign; `filenames` makes it quote names and mark directories. Where nothing
# fits it would complete files by itself but for `none`, which the other shells can do without.
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
        plain)
            [[ $value == *[!a-zA-Z0-9_./=-]* ]] && compopt -o filenames
            COMPREPLY+=("$value")
            ;;
        none) compopt +o bashdefault +o default ;;
        file | dir)
            compopt -o filenames
            mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -${type:0:1} -- "$current")
            ;;
        esac
    done < <(env COMP_WORDS="${words[*]}"$'\\n'"$current" COMP_CWORD=${#words[@]} \\
        %(complete_var)s=bash_complete "${1/#\\~\\//$HOME/}" 2> /dev/null)
}
complete -o nosort -o bashdefault -o default -F %(complete_func)s %(prog_name)s
"""
# compset: leave what precedes the value alone.
ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a names told
    local type value help
    compset -P 1 '--[^=]##='
    for type value help in "${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
        %(complete_var)s=zsh_complete %(prog_name)s 2> /dev/null)}"; do
        case $type in
        plain) if [[ $help == _ ]]; then names+=("$value"); else told+=("$value:$help"); fi ;;
        file) _path_files -f ;;
        dir) _path_files -/ ;;
        esac
    done
    (( $#told )) && _describe -V unsorted told
    (( $#names )) && compadd -V unsorted -a names
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
FISH = """\
function %(complete_func)s
    set -l token (commandline -ct | string collect)
    set -l option (string match -r -- '^--[^=]+=' "$token")
    for line in (env COMP_WORDS=(commandline -cp | string collect) "COMP_CWORD=$token" \\
            %(complete_var)s=fish_complete %(prog_name)s 2> /dev/null)
        set -l parts (string split -m 1 , -- $line)
        switch $parts[1]
            case plain
                echo "$option$parts[2]"
            case file dir
                for name in (complete -C "'' "(string replace -- "$option" '' "$token"))
                    echo "$option$name"
                end
        end
    end
end
complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def variable(name: str) -> str:
    """The environment variable by which a shell asks a command for completions."""
    return f"_{name}_complete".replace("-", "_").upper()


def script(command: click.Command, name: str, shell: str) -> str:
    """The script for a shell to evaluate."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click knows the three that --completion accepts
    asked = kind(command, {}, name, variable(name))
    return SCRIPTS[shell] % asked.source_vars()


def complete(command: click.Command, name: str, instruction: str) -> int:
    """Answer a shell; return the exit code. An incomplete command line is no error."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(command, {}, name, variable(name), instruction)
    except (click.ClickException, ToastError, LookupError, ValueError):
        return 1


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

    return beginning(incomplete, names_here()) + files(context, parameter, incomplete)


def removable(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The models that may be removed."""
    from toastkit.model.locate import removable_names

    return _only(beginning(incomplete, removable_names()))


def sessions(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Named sessions, and directories."""
    from toastkit.session.names import sessions_root

    return beginning(incomplete, listed(sessions_root())) + files(context, parameter, incomplete)


def chats(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Named conversations, which have no slash in their name."""
    from toastkit.client.chats import SUFFIX, chats_root

    names = [name for name in listed(chats_root()) if name.endswith(SUFFIX)]
    return _only(beginning(incomplete, [name.removesuffix(SUFFIX) for name in names]))


def _only(items: list[CompletionItem]) -> list[CompletionItem]:
    """These, and no files of the shell's own even if there are none of them."""
    from click.shell_completion import CompletionItem

    return [*items, CompletionItem("_", type="none")]


def beginning(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    """The names that begin with what was typed."""
    from click.shell_completion import CompletionItem

    # The answer has one name per line.
    fit = [name for name in names if name.startswith(incomplete) and name.isprintable()]
    return [CompletionItem(name) for name in fit]
