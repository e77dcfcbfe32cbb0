"""What the small files and the headers say of a checkpoint: no MLX, milliseconds.

`toast-model info` prints this first, then what toastkit.store.anatomy finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toastkit.model import toast_format
from toastkit.model.config import ModelConfig, load_config
from toastkit.model.files import ModelFiles
from toastkit.text.exact_numbers import counted
from toastkit.text.terminal import shown

SIZES = ("bits", "group_size", "mode")
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def summary(files: ModelFiles) -> dict[str, Any]:
    """Summarise config.json and the headers. Raises what they raise if one is broken."""
    from toastkit.text.tokenizer import templates  # not where sizes alone are formatted

    config = load_config(files)
    headers = files.headers
    entries = [entry for header in headers for entry in header.entries.values()]
    weights = [e for e in entries if toast_format.is_model_tensor(e.name)]
    dtypes: Counter[str] = Counter()
    for entry in weights:
        dtypes[entry.dtype] += entry.nbytes
    architectures = config.raw.get("architectures")
    if not isinstance(architectures, list):
        architectures = [architectures]
    return {
        "name": files.name,
        "path": str(files.path),
        "files": [header.path.name for header in headers],
        "size": sum(header.size for header in headers),
        "architecture": next((a for a in architectures if isinstance(a, str)), None),
        "model_type": config.model_type,
        "tensors": len(weights),
        "dtypes": {FLOATS.get(name, name): count for name, count in dtypes.most_common()},
        "quantization": _quantization(config),
        "gears": sorted({g for e in entries if (g := _gear(e.name))}),
        "gear_bytes": sum(entry.nbytes for entry in entries if _gear(entry.name)),
        "expert_major": files.is_expert_major,
        "context": config.context,
        "vocabulary": config.vocab,
        "chat_template": bool(templates(files)),
    }


def _gear(name: str) -> str | None:
    if not name.startswith(toast_format.GEAR_PREFIX):
        return None
    return name[len(toast_format.GEAR_PREFIX) :].split(".")[0]


def _quantization(config: ModelConfig) -> dict[str, Any] | None:
    """Return bits, group size and mode from config.json, and how many modules are exceptions."""
    for key in ("quantization", "quantization_config"):
        for place in config.levels:
            settings = place.get(key)
            if isinstance(settings, dict) and settings:
                names = ("bits", "group_size", "mode", "quant_method")
                found = {n: settings[n] for n in names if isinstance(settings.get(n), (int, str))}
                odd = sum(
                    isinstance(v, dict) or v is False for k, v in settings.items() if "." in k
                )
                return {**found, "exceptions": odd}
    return None


# ---------------------------------------------------------------------------- for people to read

PART_NAMES = {"mixer": "attention, mixer", "mlp": "dense MLP", "other": "norms and other"}


def summary_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, value) lines of a summary."""
    yield "name", shown(facts["name"])
    if facts["path"] != facts["name"]:
        yield "path", shown(facts["path"])
    names = facts["files"]
    what = shown(names[0]) if len(names) == 1 else str(len(names))
    yield "files", f"{what}, {human(facts['size'])}"
    yield "architecture", shown(facts["architecture"] or "not named")
    yield "model type", shown(facts["model_type"])
    yield "tensors", f"{facts['tensors']:,}"
    sizes = facts["dtypes"].items()
    yield "dtypes", ", ".join(f"{name} {human(count)}" for name, count in sizes) or "none"
    yield "quantised", _quantised(facts["quantization"])
    if facts["gears"]:
        yield "gears", f"{', '.join(map(shown, facts['gears']))}: {human(facts['gear_bytes'])}"
    if facts["expert_major"]:
        yield "layout", "expert after expert"
    longest = facts["context"]
    yield "context", counted(longest, "token", ",") if longest else "no limit given"
    yield "vocabulary", f"{facts['vocabulary']:,}"
    yield "chat template", "yes" if facts["chat_template"] else "no"


def _quantised(settings: Mapping[str, Any] | None) -> str:
    if settings is None:
        return "no"
    words = []
    if "bits" in settings:
        words.append(counted(settings["bits"], "bit"))
    if "group_size" in settings:
        words.append(f"groups of {settings['group_size']}")
    words += [shown(settings[key]) for key in ("mode", "quant_method") if key in settings]
    if settings["exceptions"]:
        words.append(f"{counted(settings['exceptions'], 'module')} otherwise")
    return ", ".join(words) or "yes"


def _contradict(packed: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] | None) -> bool:
    """True if more modules are packed in another way than the settings have exceptions."""
    if settings is None or "bits" not in settings:
        return False
    usual = {"mode": "affine", **settings}
    others = (one for one in packed if any(usual.get(key, one[key]) != one[key] for key in SIZES))
    return sum(one["modules"] for one in others) > settings["exceptions"]


def anatomy_lines(
    found: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (label, value) lines of what toastkit.store.anatomy found. settings: `quantization` of
    the summary, which the weights may contradict."""
    if _contradict(found["packed"], settings):
        packings = (
            f"{_quantised({**one, 'exceptions': 0})} ({counted(one['modules'], 'module')})"
            for one in found["packed"]
        )
        yield "packed in fact", "; ".join(packings)
    kinds = "; ".join(f"{count} {kind}" for kind, count in found["layer_kinds"].items())
    yield "layers", f"{found['layers']}: {kinds}"
    experts = found["experts"]
    if experts is not None:
        active = "" if experts["active"] is None else f", {experts['active']} for a token"
        shared = f", {experts['shared']} shared" if experts["shared"] else ""
        yield "experts", f"{experts['total']}{active}{shared}"
    total, active = found["parameters"], found["active_parameters"]
    more = f", {count(active)} for a token" if active != total else ""
    yield "parameters", f"{count(total)}{more}"
    yield "bytes", human(sum(found["bytes"].values()))
    for part, size in found["bytes"].items():
        if size:
            yield f"  {PART_NAMES.get(part, part)}", human(size)
        elif part == "head" and found["tied_head"]:
            yield f"  {part}", "is the embedding"
    if window := found["window_not_kept"]:
        yield "window", f"{counted(window, 'token', ',')}, which mlx_lm does not keep to"
    for caution in found["cautions"]:
        yield "caution", f"mlx_lm {caution}"
    cache = found.get("cache")
    if cache is not None:
        words = [f"{human(cache['bytes_per_1024_tokens'])} per 1,024 tokens"]
        if cache["window_bytes"]:
            words.append(f"at most {human(cache['window_bytes'])} of windows")
        if cache["state_bytes"]:
            words.append(f"{human(cache['state_bytes'])} of state")
        kind = f" ({cache['dtype']})" if cache["dtype"] else ""
        yield "cache", ", ".join(words) + kind


def count(number: int) -> str:
    """Format a number of parameters with three digits: 7.72 M."""
    return human(number, ("", "k", "M", "G", "T")).strip()


def human(number: int, units: tuple[str, ...] = ("B", "kB", "MB", "GB", "TB")) -> str:
    """Format bytes in decimal units with three digits: 15.5 MB."""
    size, step = float(number), 0
    while size >= 999.5 and step < len(units) - 1:
        size, step = size / 1000, step + 1
    digits = 0 if step == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {units[step]}"
