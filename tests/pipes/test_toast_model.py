"""toast-model as a person meets it: every subcommand through the real executable."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import executable
from tests.model.published import write_published
from tests.pipes.conftest import Model
from tests.terminals import Terminal
from tests.unpack import unpack
from toastkit.model.files import TEMPLATES_FOLDER
from toastkit.model.locate import CRUMB


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Toastkit's own folder for this test."""
    return tmp_path / "data" / "toastkit" / "models"


def ok(done: subprocess.CompletedProcess) -> str:
    """What a command wrote that went well and had nothing to say."""
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(done: subprocess.CompletedProcess, code: int, *said: str) -> str:
    """The hint of a command that failed with one line."""
    assert (done.returncode, done.stdout) == (code, ""), done
    first, *hint = done.stderr.splitlines()
    assert first.startswith("toast-model: ") and len(hint) <= 1 and not first.endswith(".")
    for words in said:
        assert words in first
    return "".join(hint)


def json_info(model: Model, name: object) -> dict:
    return json.loads(ok(model("info", "--json", name)))


# ----------------------------------------------------------------------------- the command itself


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        ([], "missing command", "toast-model --help"),
        (["lst"], "no such command: 'lst'", "did you mean list?"),
        (["xyz"], "no such command: 'xyz'", "commands are list, info, pull, rm, bake"),
        (["info", "--jsn"], "no such option '--jsn'", "toast-model info --help"),
        (["--jsn", "info"], "no such option '--jsn'", "toast-model --help"),
        (["info", "a", "b"], "got unexpected extra argument", "toast-model info --help"),
        (["rm"], "missing argument 'NAME'", "toast-model rm --help"),
        (["split", "crumb"], "missing option '-o'", "toast-model split --help"),
        (["info", "--supported", "crumb"], "--supported takes no model", ""),
        (["info", "--supported", "--device"], "--supported and --device exclude each other", ""),
        (["bake", "crumb", "--group-size", "32"], "--group-size is for --quant", ""),
        (["bake", "crumb", "--gears", "low,top"], "no such gear to bake: 'top'", "low and mid"),
        (["bake", "crumb", "--gears", "low,"], "no such gear to bake: ''", "low and mid"),
        (["split", "crumb", "-o", "."], "-o takes the name of a directory to make, not '.'", ""),
        (["split", "crumb", "-o", "/"], "-o takes the name of a directory to make, not '/'", ""),
        (["bake", "crumb", "-o", "x.bin"], "-o takes a name that ends in .toast", ""),
        (["bake", "crumb"], "a model called 'crumb': that is the embedded one", "give -o FILE"),
        (["-q", "list", "-v"], "--verbose and --quiet exclude each other", ""),
        (["bake", "crumb", "--dtype", "int8"], "'int8' is not one of", "bake --help"),
        (["pull", "crumb"], "not a hub id: 'crumb'", "org/name"),
        (["pull", "org/name@dev"], "not a hub id: 'org/name@dev'", "--revision dev says"),
        (["rm", "--yes", "crumb"], "crumb is a part of toastkit and stays", ""),
    ],
    ids=" ".join,
)
def test_usage(model: Model, arguments: list[str], said: str, hint: str) -> None:
    assert hint in refused(model(*arguments), 64, said)


def test_what_is_not_here_is_not_fetched(model: Model, tmp_path: Path) -> None:
    for command in (["info"], ["verify"], ["split", "-o", tmp_path / "x"], ["bake"]):
        hint = refused(model(*command, "org/name"), 66, "no such model here: org/name")
        assert hint == "  hint: toast-model pull org/name"
        hint = refused(model(*command, "nope"), 66, "no such model: nope")
        assert hint.startswith("  hint: a model is a directory, ")


def test_flags_before_and_after_the_subcommand(model: Model, tmp_path: Path) -> None:
    (tmp_path / "hf" / "hub" / "models--org--half").mkdir(parents=True)
    told = "toast-model: org/half: no whole model in the Hugging Face cache\n"
    assert model("list").stderr == ""
    assert model("list", "-v").stderr == model("-v", "list").stderr == told
    assert model("list", env={"TOAST_VERBOSE": "1"}).stderr == told
    assert model("list", "-q", env={"TOAST_VERBOSE": "1"}).stderr == ""
    assert model("-v", "list", env={"TOAST_QUIET": "1"}).stderr == told
    for arguments in (["--debug", "info", "nope"], ["info", "--debug", "nope"]):
        done = model(*arguments)
        assert done.returncode == 66 and "Traceback" in done.stderr


def test_help_names_the_subcommands(model: Model) -> None:
    text = ok(model("--help"))
    names = re.findall(r"^  (\w+) +\S", text.partition("Commands:")[2], re.M)
    assert names == ["list", "info", "pull", "rm", "bake", "split", "verify", "plan"]
    for name in names:
        assert f"Usage: toast-model {name}" in ok(model(name, "--help"))


def test_a_reader_that_goes_away(model: Model) -> None:
    with subprocess.Popen([executable("model"), "info"], stdout=subprocess.PIPE) as process:
        process.stdout.close()
    assert process.returncode == -13


# ------------------------------------------------------------------------------------ list, info


def test_list(model: Model, home: Path) -> None:
    assert [line.split()[0] for line in ok(model("list")).splitlines()] == ["NAME", "crumb"]
    home.mkdir(parents=True)
    unpack(home / "copy")
    (home / "bro\nken").mkdir()
    done = model("list")
    assert done.returncode == 0 and "copy" in done.stdout
    assert done.stderr.startswith(r"toast-model: bro\nken: ") and done.stderr.count("\n") == 1
    records = [json.loads(line) for line in model("list", "--json").stdout.splitlines()]
    assert [(r["name"], r["source"]) for r in records] == [("copy", "own"), ("crumb", "embedded")]
    for record in records:
        facts = json_info(model, record["name"])
        assert (facts["path"], facts["size"]) == (record["where"], record["size"])


def test_info(model: Model, home: Path) -> None:
    text = ok(model("info"))
    facts = {line[:18].strip(): line[19:] for line in text.splitlines()}
    assert facts["name"] == "crumb" and facts["model type"] == "qwen3_next"
    assert facts["layers"] == "8: 6 recurrent, MoE; 2 attention, MoE"
    assert facts["parameters"] == "7.72 M, 4.18 M for a token"
    assert facts["head"] == "is the embedding" and facts["chat template"] == "yes"
    assert json_info(model, "crumb")["parameters"] == 7_719_280
    home.mkdir(parents=True)
    unpack(home / "copy")
    assert ok(model("info", env={"TOAST_MODEL": "copy"})).startswith("name               copy\n")
    assert ok(model("info", "crumb", env={"TOAST_MODEL": "nope"})) == text


def test_supported(model: Model) -> None:
    head, *rows = ok(model("info", "--supported")).splitlines()
    assert head.split() == ["TYPE", "MODULE", "STATUS", "NOTE"]
    records = [json.loads(line) for line in ok(model("info", "--supported", "--json")).splitlines()]
    assert len(records) == len(rows) > 50
    assert {r["model_type"] for r in records} >= {"llama", "qwen3_next", "gpt_oss"}


# --------------------------------------------------------------------------------------- bake


def test_weights_are_what_the_command_line_says(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "same.toast"
    env = {"TOAST_QUANT": "2", "TOAST_MODE": "mxfp4", "TOAST_GROUP_SIZE": "32"}
    ok(model("bake", "crumb", "-o", str(out), env=env))
    assert abs(out.stat().st_size - CRUMB.stat().st_size) < 1 << 16


@pytest.mark.parametrize("name", ["sp ace", ".hidden", "-dash"])
def test_a_file_that_could_not_be_found_by_its_name(model: Model, tmp_path: Path, name) -> None:
    unpack(tmp_path / name)
    hint = refused(model("bake", str(tmp_path / name)), 64, f"a model called {name!r}")
    assert hint == "  hint: give -o FILE"


# ---------------------------------------------------------------------------------------- rm


def test_rm(model: Model, home: Path, tmp_path: Path) -> None:
    home.mkdir(parents=True)
    unpack(home / "copy")
    hint = refused(model("rm", "copy"), 64, "will not remove copy, 1", "no terminal to ask at")
    assert hint == "  hint: --yes removes it"
    refused(model("rm", "copy", env={"TOAST_YES": "1"}), 64, "will not remove")
    env = {"XDG_DATA_HOME": str(tmp_path / "data")}
    ctrl_d = "\x04"
    for keys, code, said in (
        ("\n", 0, rb"\[y/N\]"),
        (ctrl_d, 130, rb"\r\n$"),
        ("y\n", 0, b"removed"),
    ):
        with closing(Terminal(executable("model"), "rm", "copy", env=env)) as terminal:
            assert terminal.end(keys) == code and re.search(said, terminal.screen)
        assert (home / "copy").exists() == (keys != "y\n")
    unpack(home / "copy")
    assert ok(model("rm", "-q", "--yes", "copy")) == "" and not (home / "copy").exists()
    unpack(home / "copy")
    done = model("rm", "--yes", home / "copy")
    assert re.fullmatch(rf"toast-model: removed copy, 1.* MB, {home / 'copy'}\n", done.stderr)
    refused(model("rm", "--yes", "copy"), 66, "no such model: copy")
    unpack(tmp_path / "mine")
    refused(model("rm", "--yes", tmp_path / "mine"), 64, "is in neither")
    assert (tmp_path / "mine" / "config.json").is_file()


# ---------------------------------------------------------------------------- bake, split, verify


def test_bake_into_toastkits_folder(model: Model, home: Path, tmp_path: Path) -> None:
    unpack(tmp_path / "mine")
    assert ok(model("bake", tmp_path / "mine")) == f"{home / 'mine.toast'}\n"
    first = (home / "mine.toast").read_bytes()
    hint = refused(model("bake", tmp_path / "mine"), 73, "mine.toast exists")
    assert hint == "  hint: --force overwrites it"
    refused(model("bake", tmp_path / "mine", env={"TOAST_FORCE": "1"}), 73, "exists")
    ok(model("bake", "--force", tmp_path / "mine"))
    assert (home / "mine.toast").read_bytes() == first
    assert "mine" in ok(model("list")) and json_info(model, "mine")["parameters"] == 7_719_280
    assert re.fullmatch(r"ok: \d+ tensors, 15\.\d MB\n", ok(model("verify", "mine")))


def test_bake_with_everything(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "q.toast"
    ok(model("bake", "crumb", "-o", out, "--quant", "4", "--group-size", "32"))
    facts = json_info(model, out)
    assert facts["quantization"]["bits"] == 4 and facts["quantization"]["group_size"] == 32
    assert facts["parameters"] == 7_719_280
    refused(model("bake", out, "-o", tmp_path / "x.toast", "--quant", "4"), 64, "quantised already")
    refused(model("bake", "crumb", "-o", tmp_path / "x.toast", "--quant", "7"), 64, "no bits 7")
    ok(
        model(
            "bake", "crumb", "-o", tmp_path / "g.toast", "--gears", "mid,low", "--dtype", "float16"
        )
    )
    facts = json_info(model, tmp_path / "g.toast")
    assert facts["gears"] == ["low", "mid"] and "float16" in facts["dtypes"]
    assert facts["bytes"]["gears"] > facts["bytes"]["experts"] / 2
    # An activation type that is set for all commands does not convert weights.
    ok(model("bake", "crumb", "-o", tmp_path / "d.toast", env={"TOAST_DTYPE": "float32"}))
    assert json_info(model, tmp_path / "d.toast")["dtypes"] == {"bfloat16": 2 * 7_719_280}
    assert sorted(p.name for p in tmp_path.glob("*.toast*")) == ["d.toast", "g.toast", "q.toast"]


def test_bake_experts_one_after_another(model: Model, tmp_path: Path) -> None:
    one, two, dense = (tmp_path / name for name in ("1.toast", "2.toast", "llama"))
    ok(model("bake", "crumb", "-o", one))
    ok(model("bake", "crumb", "-o", two, "--expert-major"))
    facts, others = json_info(model, two), json_info(model, one)
    assert facts["expert_major"] and not others["expert_major"]
    assert re.search(r"^layout +expert after expert$", ok(model("info", two)), re.MULTILINE)
    for name in ("tensors", "bytes", "parameters", "dtypes"):
        assert facts[name] == others[name]
    assert ok(model("verify", two)).split(",")[0] == ok(model("verify", one)).split(",")[0]
    ok(model("bake", two, "-o", tmp_path / "3.toast"))
    assert (tmp_path / "3.toast").read_bytes() == one.read_bytes()
    write_published(dense, "llama")
    refused(model("bake", dense, "-o", tmp_path / "x.toast", "--expert-major"), 64, "no experts")
    assert not (tmp_path / "x.toast").exists()
    two.write_bytes(
        two.read_bytes().replace(b'gate_proj.weight\\",\\"BF16', b'gate_proj.weight\\",\\"F32 ')
    )
    for command in ("info", "verify", "split"):
        rest = ["-o", tmp_path / "x"] if command == "split" else []
        refused(model(command, two, *rest), 65, "cannot read 2.toast", "has no usable description")


def test_outputs_that_cannot_be(model: Model, tmp_path: Path) -> None:
    (tmp_path / "folder.toast").mkdir()
    refused(model("bake", "crumb", "-o", tmp_path / "folder.toast", "--force"), 73, "a directory")
    refused(model("bake", "crumb", "-o", tmp_path / "no" / "x.toast"), 73, "no such file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    refused(model("split", "crumb", "-o", tmp_path / "full"), 73)
    assert (tmp_path / "full" / "x").read_text() == "x"
    for name in ("link.toast", "link"):
        (tmp_path / name).symlink_to("nothing")
    refused(model("bake", "crumb", "-o", tmp_path / "link.toast"), 73, "exists")
    refused(model("split", "crumb", "-o", tmp_path / "link"), 73, "is a symbolic link")
    long = tmp_path / f"{'x' * 255}.toast"
    refused(model("bake", "crumb", "-o", long), 73, f"cannot write {long}: file name too long")


def test_a_flipped_byte_is_found(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "x.toast"
    ok(model("bake", "crumb", "-o", out))
    data = bytearray(out.read_bytes())
    data[len(data) // 2] ^= 1
    out.write_bytes(data)
    done = model("verify", out)
    assert (done.returncode, done.stderr) == (65, "")
    assert re.fullmatch(r"x\.toast: model\.layers\.\d\..*: is not as it was written\n", done.stdout)
    out.write_bytes(data[:-5])
    done = model("verify", out)
    assert done.returncode == 65 and "truncated" in done.stderr + done.stdout
    assert (done.stdout + done.stderr).count("\n") == 1


def test_split_and_verify(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "layers"
    assert ok(model("split", "crumb", "-o", out)) == f"{out}\n"
    assert (out / "layer_0007.safetensors").is_file() and (out / "config.json").is_file()
    assert ok(model("verify", "--values", out)).startswith("ok: ")
    assert json_info(model, out)["parameters"] == 7_719_280
    (out / "tokenizer.json").write_text("{}")
    assert model("verify", out).stdout == "tokenizer.json: is not as it was written\n"
    assert ok(model("verify", "crumb")).endswith(" MB\n")
    unpack(tmp_path / "copy")
    assert "there are no checksums" in ok(model("verify", tmp_path / "copy"))


def test_named_templates_come_along(model: Model, toast, tmp_path: Path) -> None:
    name = f"{TEMPLATES_FOLDER}/rag.jinja"
    source = unpack(tmp_path / "source")
    (source / name).parent.mkdir()
    (source / name).write_text("rag: {{ messages[0].content }}")
    ok(model("bake", source, "-o", tmp_path / "x.toast"))
    ok(model("split", tmp_path / "x.toast", "-o", tmp_path / "split"))
    assert (tmp_path / "split" / name).read_bytes() == (source / name).read_bytes()
    assert ok(model("verify", tmp_path / "split")).startswith("ok: ")
    (tmp_path / "split" / name).write_text("")
    assert model("verify", tmp_path / "split").stdout == f"{name}: is not as it was written\n"
    command = ["tokenize", "--template-only", "-m", str(tmp_path / "x.toast"), "hi"]
    done = toast(*command, "--template-arg", "chat_template=rag")
    assert (done.stdout, done.stderr) == (b"rag: hi", b"")
    # There is no chat_template.jinja, in whose place stands no other file.
    done = toast(*command)
    line, hint = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (65, b"")
    assert line.endswith("x.toast: has no default chat template, but rag")
    assert hint == "  hint: choose one with --template-arg chat_template=NAME"


def test_what_needs_no_mlx(tmp_path: Path) -> None:
    from tests.unit.test_loaded_modules import PROMPT_FREE, loaded_by

    for arguments in (["list"], ["verify", "crumb"], ["info", "--supported"]):
        modules, out = loaded_by(tmp_path, "model", *arguments)
        assert out and sorted(modules & PROMPT_FREE) == []
