"""Experts per token: where each architecture of mlx_lm keeps K. `K_OF` has a name for each; nothing
else in this package knows a model.

K is set on the blocks of one model only: two models in a process do not share it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from toastkit.errors import UsageError
from toastkit.holdings.layer_slots import is_switch
from toastkit.store.store import Store

# MoE blocks by module and class in mlx_lm.models, by the attribute that holds K.
_BLOCKS = {
    "gate.top_k": (
        "bailing_hybrid.SparseMoeBlock", "bailing_moe.BailingMoeSparseMoeBlock",
        "bailing_moe_linear.SparseMoeBlock", "bailing_moe_v3.BailingSparseMoE",
        "deepseek.DeepseekMoE", "deepseek_v2.DeepseekV2MoE", "deepseek_v3.DeepseekV3MoE",
        "deepseek_v32.DeepseekV32MoE", "dots1.Dots1MoE", "exaone_moe.MoE", "glm4_moe.MoE",
        "glm4_moe_lite.Glm4MoeLiteMoE", "laguna.MoE", "mimo_v2_flash.MoE",
        "nemotron_h.NemotronHMoE", "step3p5.Step3p5MoE",
    ),
    "top_k": (
        "Klear.KlearSparseMoeBlock", "hunyuan.MoeBlock", "lfm2_moe.Lfm2MoeSparseMoeBlock",
        "llama4.MoE", "mellum.MellumSparseMoeBlock", "olmoe.OlmoeSparseMoeBlock",
        "phimoe.PhiMoESparseMoeBlock", "qwen2_moe.Qwen2MoeSparseMoeBlock",
        "qwen3_moe.Qwen3MoeSparseMoeBlock", "qwen3_next.Qwen3NextSparseMoeBlock",
    ),
    "num_experts_per_tok": (
        "afmoe.AfmoeMoE", "gpt_oss.MLPBlock", "jamba.JambaSparseMoeBlock",
        "minimax.MiniMaxSparseMoeBlock", "minimax_m3_vl.SparseMoeBlock", "mistral4.Mistral4MoE",
        "mixtral.MixtralSparseMoeBlock", "phixtral.MOE",
    ),
    "router.top_k": (
        "granitemoe.GraniteMoeMoE", "granitemoehybrid.GraniteMoeHybridMoE",
        "longcat_flash.LongcatFlashMoE",
    ),
    "args.num_experts_per_token": ("kimi_k3.KimiK3SparseMoE", "kimi_linear.KimiSparseMoE"),
    "k": ("ernie4_5_moe.Ernie4_5_MoeMLP",),
    # Its router and experts are attributes of the decoder layer itself.
    "router.config.top_k_experts": ("gemma4_text.DecoderLayer",),
}  # fmt: skip
K_OF = {name: k for k, names in _BLOCKS.items() for name in names}


@dataclass(frozen=True, eq=False)
class MoEBlock:
    """An MoE block of a model. layer: its decoder layer. k_name: the attribute that holds K,
    relative to the module. own_k: the checkpoint's K."""

    layer: int
    module: Any
    k_name: str
    own_k: int

    @property
    def k(self) -> int:
        """The current number of experts per token."""
        return _attribute(self.module, self.k_name)

    def set_k(self, k: int) -> None:
        """Set the number of experts per token, for graphs built from now on."""
        *owners, name = self.k_name.split(".")
        owner = self.module
        for word in owners:
            part = getattr(owner, word)
            if not isinstance(part, nn.Module):
                # Settings, shared by all layers, and by other models that are made from them.
                part = copy.copy(part)
                setattr(owner, word, part)
            owner = part
        setattr(owner, name, k)


def moe_blocks(store: Store) -> list[MoEBlock]:
    """The MoE blocks of a store's model, by layer. Raises UsageError for a model without any, and
    for one whose router is not in the table."""
    found: list[MoEBlock] = []
    covered: set[str] = set()
    modules = dict(store.model.named_modules())
    for path, module in sorted(modules.items(), key=lambda item: item[0].count(".")):
        k_name, layer = k_name_of(module), store.layer_of(f"{path}.")
        if k_name is None or layer is None:
            continue
        within = {name for name in modules if f"{name}.".startswith(f"{path}.")}
        if any(is_switch(modules[name]) for name in within):
            found.append(MoEBlock(layer, module, k_name, _attribute(module, k_name)))
            covered |= within
    kind = store.config.model_type
    if any(is_experts(module) for name, module in modules.items() if name not in covered):
        raise UsageError(
            f"{store.files.name}: how {kind} chooses its experts is not known here",
            hint="without --experts it runs as it is",
        )
    if not found:
        raise UsageError(f"{store.files.name} has no experts: {kind} is a dense model here")
    return sorted(found, key=lambda block: block.layer)


def k_name_of(module: Any) -> str | None:
    """The table's entry for a module, None without one. Base classes count: a module's class may
    have been replaced by a derived one."""
    names = (f"{c.__module__.rpartition('.')[2]}.{c.__name__}" for c in type(module).__mro__)
    return next((K_OF[name] for name in names if name in K_OF), None)


def is_experts(module: Any) -> bool:
    """True if a module is a layer's experts, or a sparse MoE block of an unknown kind."""
    return is_switch(module) or any(
        c.__name__.endswith("SparseMoeBlock") for c in type(module).__mro__
    )


def _attribute(module: Any, path: str) -> Any:
    for word in path.split("."):
        module = getattr(module, word)
    return module
