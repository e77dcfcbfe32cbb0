"""Which experts a token goes to: where each architecture of mlx_lm keeps K, and how its router
weighs the K that it chose. One line of `ROUTERS` for each; nothing else here knows a model.

K is set on the blocks of one model and nowhere else: two models in a process do not share it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.nn as nn

from toastkit.errors import UsageError
from toastkit.holdings.layer_slots import PARENTS
from toastkit.store.store import Store

# What a router makes of its logits. SOFTMAX: over all experts, before the K are chosen; CHOSEN:
# over the K. SIGMOID: of each; some choose by it and a bias, and weigh by it alone (DeepSeek-V3).
# SPARSEMIXER: expert after expert, each against those that are left. CONFIGURED: the checkpoint
# says which of the first and third.
SOFTMAX, CHOSEN, SIGMOID = "softmax", "chosen", "sigmoid"
SPARSEMIXER, CONFIGURED = "sparsemixer", "configured"


class Router(NamedTuple):
    """k: the attribute that holds K, from the MoE block. score: see above. normed: whether the
    weights of the K are made to add up to 1, or the attribute that says so. shared: the experts
    that every token goes through, an attribute of the block, None where there are none."""

    k: str
    score: str
    normed: bool | str = False
    shared: str | None = None


SHARED, NORM = "shared_experts", "norm_topk_prob"
GATED = Router("gate.top_k", SIGMOID, f"gate.{NORM}", SHARED)  # in the manner of DeepSeek-V3
BAILING = Router("gate.top_k", CONFIGURED, f"gate.{NORM}", SHARED)
KIMI = Router("args.num_experts_per_token", SIGMOID, "args.moe_renormalize", SHARED)
GRANITE = Router("router.top_k", CHOSEN)
QWEN = Router("top_k", SOFTMAX, NORM)

# By the module and class of the MoE block in mlx_lm.models.
ROUTERS: dict[str, Router] = {
    "Klear.KlearSparseMoeBlock": Router("top_k", SIGMOID, NORM, SHARED),
    "afmoe.AfmoeMoE": Router("num_experts_per_tok", CONFIGURED, "route_norm", SHARED),
    "bailing_hybrid.SparseMoeBlock": BAILING,
    "bailing_moe.BailingMoeSparseMoeBlock": BAILING,
    "bailing_moe_linear.SparseMoeBlock": BAILING,
    "bailing_moe_v3.BailingSparseMoE": GATED._replace(normed=True),
    "deepseek.DeepseekMoE": Router("gate.top_k", SOFTMAX, False, SHARED),
    "deepseek_v2.DeepseekV2MoE": Router("gate.top_k", SOFTMAX, False, SHARED),
    "deepseek_v3.DeepseekV3MoE": GATED,
    "deepseek_v32.DeepseekV32MoE": GATED,
    "dots1.Dots1MoE": GATED,
    "ernie4_5_moe.Ernie4_5_MoeMLP": Router("k", CONFIGURED, True, SHARED),
    "exaone_moe.MoE": GATED,
    # Its router and its experts hang in the decoder layer itself.
    "gemma4_text.DecoderLayer": Router("router.config.top_k_experts", CHOSEN),
    "glm4_moe.MoE": GATED,
    "glm4_moe_lite.Glm4MoeLiteMoE": GATED,
    "gpt_oss.MLPBlock": Router("num_experts_per_tok", CHOSEN),
    "granitemoe.GraniteMoeMoE": GRANITE,
    "granitemoehybrid.GraniteMoeHybridMoE": GRANITE,
    "hunyuan.MoeBlock": Router("top_k", SOFTMAX, False, "shared_mlp"),
    "jamba.JambaSparseMoeBlock": Router("num_experts_per_tok", CHOSEN),
    "kimi_k3.KimiK3SparseMoE": KIMI,
    "kimi_linear.KimiSparseMoE": KIMI,
    "laguna.MoE": Router("gate.top_k", CONFIGURED, True, "shared_expert"),
    "lfm2_moe.Lfm2MoeSparseMoeBlock": Router("top_k", SIGMOID, NORM),
    "llama4.MoE": Router("top_k", SIGMOID, False, "shared_expert"),
    "longcat_flash.LongcatFlashMoE": Router("router.top_k", SOFTMAX, f"router.{NORM}"),
    "mellum.MellumSparseMoeBlock": QWEN,
    "mimo_v2_flash.MoE": GATED,
    "minimax.MiniMaxSparseMoeBlock": Router("num_experts_per_tok", SIGMOID, True),
    "minimax_m3_vl.SparseMoeBlock": Router("num_experts_per_tok", SIGMOID, True, SHARED),
    "mistral4.Mistral4MoE": Router("num_experts_per_tok", SOFTMAX, f"args.{NORM}", SHARED),
    "mixtral.MixtralSparseMoeBlock": Router("num_experts_per_tok", CHOSEN),
    "nemotron_h.NemotronHMoE": GATED,
    "olmoe.OlmoeSparseMoeBlock": QWEN,
    "phimoe.PhiMoESparseMoeBlock": Router("top_k", SPARSEMIXER),
    "phixtral.MOE": Router("num_experts_per_tok", CHOSEN),
    "qwen2_moe.Qwen2MoeSparseMoeBlock": Router("top_k", SOFTMAX, False, "shared_expert"),
    "qwen3_moe.Qwen3MoeSparseMoeBlock": QWEN,
    "qwen3_next.Qwen3NextSparseMoeBlock": QWEN._replace(shared="shared_expert"),
    "step3p5.Step3p5MoE": GATED._replace(shared="share_expert"),
}


@dataclass(frozen=True, eq=False)
class MoEBlock:
    """One of a model. path: in the module tree. layer: the decoder layer that it is in. router: how
    it chooses. experts: among how many. own_k: K as the checkpoint has it."""

    path: str
    layer: int
    module: Any
    router: Router
    experts: int
    own_k: int

    @property
    def k(self) -> int:
        """Experts that a token goes to, at this moment."""
        return _attribute(self.module, self.router.k)

    def set_k(self, k: int) -> None:
        """Has tokens go to so many experts from now on: of graphs that are built from now on."""
        *owners, name = self.router.k.split(".")
        owner = self.module
        for word in owners:
            part = getattr(owner, word)
            if not isinstance(part, nn.Module):
                # Settings, which all layers share, and other models made of them.
                part = copy.copy(part)
                setattr(owner, word, part)
            owner = part
        setattr(owner, name, k)


def moe_blocks(store: Store) -> list[MoEBlock]:
    """The MoE blocks of a store's model, by layer. Raises UsageError for a model without any, and
    for one whose router is not in the table, by its name."""
    found: list[MoEBlock] = []
    covered: set[str] = set()
    modules = dict(store.model.named_modules())
    for path, module in sorted(modules.items(), key=lambda item: item[0].count(".")):
        router = router_of(module)
        layer = store.layer_of(f"{path}.")
        experts = None if router is None or layer is None else _experts_under(path, modules, store)
        if router is None or layer is None or experts is None:
            continue
        found.append(MoEBlock(path, layer, module, router, experts, _attribute(module, router.k)))
        covered.update(name for name in modules if f"{name}.".startswith(f"{path}."))
    kind = store.config.model_type
    if any(_is_experts(module) for name, module in modules.items() if name not in covered):
        raise UsageError(
            f"{store.files.name}: how {kind} chooses its experts is not known here",
            hint="without --experts it runs as it is",
        )
    if not found:
        raise UsageError(f"{store.files.name} has no experts: {kind} is a dense model here")
    return sorted(found, key=lambda block: block.layer)


def router_of(module: Any) -> Router | None:
    """The line of the table for a module. A class may have been changed for one derived from it."""
    names = (f"{c.__module__.rpartition('.')[2]}.{c.__name__}" for c in type(module).__mro__)
    return next((ROUTERS[name] for name in names if name in ROUTERS), None)


def _is_experts(module: Any) -> bool:
    """Whether a module is the experts of a layer, or chooses among some of another kind."""
    names = [c.__name__ for c in type(module).__mro__]
    return any(name in PARENTS or name.endswith("SparseMoeBlock") for name in names)


def _experts_under(path: str, modules: dict[str, Any], store: Store) -> int | None:
    """How many experts a block has, from the shape of their matrices; None where it has none."""
    for name, module in modules.items():
        if name.startswith(f"{path}.") and any(c.__name__ in PARENTS for c in type(module).__mro__):
            return next(
                store.shape(tensor)[0]
                for tensor in store.names
                if tensor.startswith(f"{name}.") and tensor.endswith(".weight")
            )
    return None


def _attribute(module: Any, path: str) -> Any:
    for word in path.split("."):
        module = getattr(module, word)
    return module
