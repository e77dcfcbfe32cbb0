"""Records what transformers computes for small checkpoints that it saved itself.

    python -m tests.oracle.record_transformers [NAME...]

Needs torch and transformers; the suite needs neither: it makes the same weights again, see
weights.py, and reads the files that this writes: what transformers wrote into config.json, the
names and shapes of the tensors, and the log-probabilities at cases.POSITIONS.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from tests.oracle.cases import CASES, LENGTH, PLAIN, POSITIONS, SMALL, THETA, VISION, VOCAB
from tests.oracle.old_names import old_names
from tests.oracle.weights import prompt, weight

SEEN = re.compile(r"visual|vision|multi_modal|mm_projector")  # no part of the language model
FOLDER = Path(__file__).parent / "recorded"


def small_config(model_type: str, given: dict):
    """A configuration of few and small parts."""
    made = CONFIG_MAPPING[model_type]
    usual = made()
    known = {*usual.to_dict(), *usual.attribute_map}
    small = {**SMALL, **VISION} if "vision" in model_type else SMALL
    settings = {k: v for k, v in small.items() if k in known}
    for part in ("text_config", "vision_config"):
        if isinstance(getattr(usual, part, None), transformers.PretrainedConfig):
            settings[part] = small_config(
                getattr(usual, part).model_type, given.get(part, {})
            ).to_dict()
    rope = usual.to_dict().get("rope_parameters")
    if rope is not None and "rope_theta" in rope:
        settings["rope_parameters"] = {**rope, "rope_theta": THETA}
    parts = ("text_config", "vision_config")
    return made(**{**settings, **{k: v for k, v in given.items() if k not in parts}})


def _class(config):
    """Models that see as well have no class for text alone."""
    known = type(config) in AutoModelForCausalLM._model_mapping
    return (
        AutoModelForCausalLM
        if known and not hasattr(config, "text_config")
        else AutoModelForImageTextToText
    )


def log_probabilities(path: Path, config) -> np.ndarray:
    """(LENGTH, VOCAB) float64 of the checkpoint at a path, with some configuration."""
    model = _class(config).from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt(LENGTH, VOCAB)]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


def record(name: str) -> dict:
    model_type, given = CASES.get(name, (name, {}))
    config = small_config(model_type, given)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with torch.device("meta"):
            size = sum(p.numel() for p in _class(config).from_config(config).parameters())
        if size > 2_000_000:
            raise ValueError(f"{size} parameters are too many")
        model = _class(config).from_config(config, dtype=torch.float32)
        model.save_pretrained(path)
        del model
        saved = json.loads((path / "config.json").read_text())
        [file] = path.glob("*.safetensors")
        whole = load_file(file)
        shapes = {tensor: list(array.shape) for tensor, array in whole.items()}
        made = {tensor: weight(tensor, tuple(shape)) for tensor, shape in shapes.items()}
        save_file(made, file, metadata={"format": "pt"})
        found = log_probabilities(path, AutoConfig.from_pretrained(path))
        (path / "config.json").write_text(json.dumps(old_names(saved)))
        again = log_probabilities(path, AutoConfig.from_pretrained(path))
    saved.pop("transformers_version", None)
    shapes = {name: shape for name, shape in shapes.items() if not SEEN.search(name)}
    if not np.isfinite(found).all():
        raise ValueError("not finite")
    rows = np.round(found[list(POSITIONS)], 4)
    return {
        "config": saved,
        "tensors": shapes,
        "old_agrees": bool(np.abs(found - again).max() < 1e-5),
        "log_probabilities": rows.tolist(),
    }


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name in names or [*PLAIN, *CASES]:
        try:
            made = record(name)
        except Exception as error:  # the next one may go
            print(name, "FAILED", type(error).__name__, str(error).replace("\n", " ")[:200])
            continue
        print(
            name,
            sum(map(np.prod, made["tensors"].values())),
            "" if made["old_agrees"] else "OLD DIFFERS",
            flush=True,
        )
        (FOLDER / f"{name}.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
