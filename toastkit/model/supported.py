"""The supported model types: what mlx_lm has on disk, and how much of that is known to work here.

Reads mlx_lm's files as text. Importing them would need MLX, and the package's own `__init__`
transformers; so `toast-model info --supported` answers without either.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from toastkit.errors import DataError, UnavailableError

# Compared with mlx_lm, chunk by chunk, through sessions and the store: tests/model/published.
TESTED = (
    "falcon_h1", "gemma3_text", "gpt_oss", "llama", "mamba2", "mixtral", "olmoe", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next",
)  # fmt: skip
# Besides, those of which a small checkpoint gives what transformers gives: tests/oracle.
COMPARED = (
    "afmoe", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5", "exaone4", "exaone_moe", "falcon_mamba", "gemma2", "gemma3", "gemma4",
    "gemma4_text", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gptj", "granite",
    "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "internlm3", "iquestcoder",
    "laguna", "lfm2", "lfm2_moe", "llava", "mamba", "mellum", "minicpm3", "minimax_m2",
    "ministral3", "mistral", "mistral3", "nemotron", "nemotron_h", "olmo2", "olmo3", "phi",
    "phimoe", "qwen3_5_text", "qwen3_vl", "recurrent_gemma", "seed_oss", "smollm3", "solar_open",
    "stablelm",
)  # fmt: skip

# In mlx_lm but unsupported here, by the name of the file in mlx_lm/models; the reason ends a
# message. A run over all of mlx_lm 0.32 with small random weights found these: whole prompts
# against chunks, later tokens changed, sessions, steps built ahead.
UNSUPPORTED = {
    "bitnet": "its ternary layers are in a format of their own, which is not read here",
    "deepseek_v41": "its cache is of a class of its own, which a session cannot hold",
    "olmo": "it needs the package ai2-olmo and PyTorch",
    "phi3small": "its attention in mlx_lm looks at later tokens",
}
# What mlx_lm computes differently from transformers, in all checkpoints; the rest of a sentence
# that begins with the architecture. The oracle in tests/oracle shows each; of PLaMo 3, which
# transformers has not, that mlx_lm differs from itself.
CAUTIONS: dict[str, str] = {
    "ernie4_5_moe": "chooses experts without their correction bias",
    "jamba": "weighs the chosen experts against each other, not among all",
    "plamo3": "sees one key more in a prompt than in steps, once its window is full",
}
# Refused or warned about in some checkpoints, by their configuration: toastkit.model.normalise.
NOTES = {
    "gemma": "GELU is exact", "gpt_bigcode": "GELU is exact", "starcoder2": "GELU is exact",
    "gpt_neox": "GELU is approximated", "glm": "rotates whole heads only",
    "minicpm3": "needs an output matrix of its own",
}  # fmt: skip
# Model types whose checkpoints may have a sliding window that mlx_lm does not know.
NO_WINDOW = (
    "dots1", "gemma2", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
METAL_ONLY = {"muse_spark": "it has kernels for Apple's GPUs only"}
# Their forward pass reads the chosen experts on the host.
READ_ON_HOST = ("dbrx",)

# transformers 5's names for the language model of a vision model, saved by itself.
TEXT_ONLY = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}

NAME = re.compile(r"[\w-]{1,100}")
TABLES = ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING")


class Support(NamedTuple):
    """A model type, as config.json names it. module: its file in mlx_lm/models. status: "tested",
    "compared", "expected" (nothing is known against it) or "unsupported". note: why, or what else
    to know; may be empty."""

    model_type: str
    module: str
    status: str
    note: str


def mlx_lm_spec() -> ModuleSpec:
    """Return the spec of the installed mlx_lm. Raises UnavailableError if it is not installed."""
    module = sys.modules.get("mlx_lm")
    spec = getattr(module, "__spec__", None) or PathFinder.find_spec("mlx_lm")
    if spec is None or spec.submodule_search_locations is None:
        raise UnavailableError("mlx_lm is not installed", hint="pip install mlx-lm")
    return spec


def mlx_lm_folder() -> Path:
    """Return the folder of the installed mlx_lm. Raises UnavailableError if it is not installed."""
    return Path(next(iter(mlx_lm_spec().submodule_search_locations or ())))


def module_name(model_type: str, architectures: object = None) -> str:
    """Return the file in mlx_lm/models for a model type, by mlx_lm's own two tables of synonyms.

    architectures: config.json's, a list of class names; anything else counts as none. Raises
    DataError for what cannot be the name of a model type.
    """
    if not NAME.fullmatch(model_type):
        raise DataError(f"model type {model_type[:100]!r} is not supported")
    names = architectures if isinstance(architectures, list) else [architectures]
    folder = mlx_lm_folder()
    source = _source(folder / "utils.py")
    known = (folder / "models" / f"{model_type}.py").is_file()
    named = [name for name in names if isinstance(name, str) and name and name in source]
    if known and not named and f'"{model_type}":' not in source:
        return model_type
    by_type, by_architecture = _synonyms(source)
    for name in named:
        if (model_type, name) in by_architecture:
            return by_architecture[model_type, name]
    return by_type.get(model_type, TEXT_ONLY.get(model_type, model_type))


def _synonyms(source: str) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Return the tables of mlx_lm/utils.py, read as literals: by model type, and by model type and
    architecture."""
    found = re.findall(r"^(\w+) = (\{.*?^\})$", source, re.MULTILINE | re.DOTALL)
    tables = {name: ast.literal_eval(table) for name, table in found if name in TABLES}
    return tables.get(TABLES[0], {}), tables.get(TABLES[1], {})


def check_supported(model_type: str, module: str) -> None:
    """Raise DataError, with the reason, for a model type that mlx_lm has, in a file of that name,
    and that cannot work here. Does not check for unknown types."""
    reason = _reason(module)
    if reason is not None:
        raise DataError(f"model type {model_type!r} is not supported: {reason}")


def reads_on_host(module: str) -> bool:
    """True if the step graph of a file in mlx_lm/models depends on the values of its inputs, so
    that it cannot be built before its token is known."""
    return module in READ_ON_HOST


def _reason(module: str) -> str | None:
    """Return why a module of mlx_lm cannot work on this machine, or None."""
    if sys.platform != "darwin" and module in METAL_ONLY:
        return METAL_ONLY[module]
    return UNSUPPORTED.get(module)


def supported() -> list[Support]:
    """Return all model types of the installed mlx_lm with their synonyms, sorted."""
    folder = mlx_lm_folder()
    sources = {path.stem: _source(path) for path in (folder / "models").glob("*.py")}
    known = {name for name, source in sources.items() if _is_architecture(source)}
    by_type, by_architecture = _synonyms(_source(folder / "utils.py"))
    types = {**{name: name for name in known}, **TEXT_ONLY, **by_type}
    rows = [(name, module, "") for name, module in types.items()]
    for (name, architecture), module in by_architecture.items():
        rows.append((name, module, f"where architectures has {architecture}"))
    found = [_support(*row, sources[row[1]]) for row in rows if row[1] in known]
    return sorted(found, key=lambda row: (row.model_type.lower(), row.note))


def _support(model_type: str, module: str, condition: str, source: str) -> Support:
    reason = _reason(module)
    notes = [condition] if condition else []
    if reason is not None:
        return Support(model_type, module, "unsupported", "; ".join([*notes, reason]))
    if module != model_type:
        notes.append(f"runs as {module}" + (", which is tested" if module in TESTED else ""))
    if VISION.search(source):
        notes.append("text only")
    if model_type in NO_WINDOW:
        notes.append("looks back without a sliding window")
    notes += [table[module] for table in (NOTES, CAUTIONS) if module in table]
    return Support(model_type, module, _status(model_type, condition), "; ".join(notes))


def _status(model_type: str, condition: str) -> str:
    if condition:
        return "expected"
    if model_type in TESTED:
        return "tested"
    return "compared" if model_type in COMPARED else "expected"


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# Parsing all of mlx_lm takes a second; searching for class and import lines takes no time.
CLASS = re.compile(r"^class (\w+)", re.M)
IMPORT = re.compile(r"^from [.\w]+ import (\([^)]*\)|.*)", re.M)
# What `sanitize` drops from a multimodal model.
VISION = re.compile(r"vision_(tower|model|embed)|model\.visual|multi_modal_projector|audio_tower")


def _is_architecture(source: str) -> bool:
    """True if a file has the two classes `Model` and `ModelArgs`, its own or imported."""
    names = set(CLASS.findall(source))
    for listed in IMPORT.findall(source):
        words = map(str.split, re.sub(r"#.*|[()]", "", listed).split(","))
        names.update(found[-1] for found in words if found)
    return {"Model", "ModelArgs"} <= names
