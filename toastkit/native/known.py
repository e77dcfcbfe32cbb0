"""Classes of mlx_lm that are recognised by their source, and the mixins that compute in their
place: those of attentions here, the others in modules/ and layers/."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from math import sqrt
from typing import Any

import mlx.nn as nn

from toastkit.native.forms.common import HEADS, USUAL, Heads, Known, KnownAttention
from toastkit.native.functions import definition_of, functions_of
from toastkit.native.layers.blocks import (
    ForkedLayer,
    Layer,
    PassingLayer,
    ScaledLayer,
    UnforkedLayer,
)
from toastkit.native.layers.decoder import (
    ConvolutionLayer,
    Decoder,
    DeltaLayer,
    KimiLayer,
    ParallelLayer,
)
from toastkit.native.layers.latent_attention import ABSORBED, EXPANDED, LatentAttention
from toastkit.native.layers.linear_attention import LinearAttentionLayer
from toastkit.native.layers.mixer import (
    BareMixerLayer,
    GatedNorm,
    GatedNormInGroups,
    HybridLayer,
    MambaLayer,
    NemotronLayer,
    SelectiveLayer,
)
from toastkit.native.layers.sharing import Experts, RouterOfNorm, SharingLayer
from toastkit.native.layers.time_mixing import TimeMixingLayer
from toastkit.native.modules.mixtures import (
    Mixture,
    MixtureBiased,
    MixtureBiasedAhead,
    MixtureInGroups,
    MixtureOfActivation,
    MixtureOfNarrow,
    MixtureOfWrapped,
    MixtureSparse,
    Router,
    RouterInGroups,
    RouterScored,
)
from toastkit.native.modules.recurrent import (
    GeneralisedDelta,
    Mixer,
    MixerGivenCacheFirst,
    SelectiveScan,
)
from toastkit.native.operands import AHEAD, CHOSEN

GEMMA = HEADS._replace(q_norm="q_norm", k_norm="k_norm", v_norm="v_norm", size="head_dim")
# It has no projections of keys and values: q_proj is a placeholder that is never used.
GEMMA_SHARING = GEMMA._replace(k="q_proj", v="q_proj", k_norm=None, v_norm=None, shares_cache=True)


class AfmoeAttention(KnownAttention):
    """Trinity's: RoPE in sliding-window layers only."""

    def parts(self: Any) -> Heads:
        rope = "rope" if self.is_local_attention and self.rope is not None else None
        return HEADS._replace(
            q_norm="q_norm", k_norm="k_norm", rope=rope, gated=True, gate="gate_proj"
        )


class GemmaAttention(KnownAttention):
    """Gemma 4's."""

    def parts(self: Any) -> Heads:
        if not self.has_kv:
            return GEMMA_SHARING
        return GEMMA._replace(v="k_proj" if self.use_k_eq_v else "v_proj")


class GraniteAttention(KnownAttention):
    """Granite 4's, which may have no RoPE."""

    def parts(self: Any) -> Heads:
        return HEADS._replace(rope=None if self.rope is None else "rope")


class RootAttention(KnownAttention):
    """Scores are divided by the root of a head's size."""

    _parts = HEADS._replace(heads="num_heads", key_heads="num_key_value_heads", scale="root")

    @property
    def root(self: Any) -> float:
        """The scale of scores."""
        return sqrt(1 / self.head_dim)


class StableAttention(RootAttention):
    """StableLM's, which may have a layer norm for each head."""

    def heads(self: Any) -> Heads | None:
        return None if self.qk_layernorm else super().heads()


def _variant(mixin: type, **attributes: Any) -> type:
    """A mixin with other values of some of its private attributes."""
    return type(mixin.__name__, (mixin,), {f"_{name}": each for name, each in attributes.items()})


def _attention(**names: Any) -> type:
    """The mixin of an attention whose parts are named otherwise than most."""
    return _variant(KnownAttention, parts=HEADS._replace(**names))


def _joined(part: str, **names: Any) -> type:
    """The same with a part that projects queries, keys and values."""
    return _attention(q=part, k=part, v=part, fused=True, size="head_dim", **names)


def _layer(**names: Any) -> type:
    """The mixin of a layer whose forward has an order of its own."""
    return _variant(Layer, block=USUAL._replace(**names))


FED = {"attended_norm": "post_attention_layernorm", "fed_norm": "post_feedforward_layernorm"}
QueriesScaled = _variant(ScaledLayer, block=USUAL._replace(scaled=True))

COUNTS = {"heads": "num_attention_heads", "key_heads": "num_key_value_heads"}
NORMED = {"q_norm": "q_norm", "k_norm": "k_norm"}
OR_NOT = {"use_norms": "use_qk_norm"}
LAYER_NORMED = {"q_norm": "query_layernorm", "k_norm": "key_layernorm", **OR_NOT}

LfmAttention = _attention(out="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
LingAttention = _joined("query_key_value", out="dense", **LAYER_NORMED, **COUNTS)
ExpandedAttention = _variant(LatentAttention, parts=EXPANDED)
# With a router module, and shared experts without a gate.
MixtureScored = _variant(Mixture, shared="shared_experts")
MixtureAhead = _variant(Mixture, how=AHEAD)
MixtureOfPart = _variant(Mixture, router="router")
RouterOfPart = _variant(Router, part="layer")
LingRouter = _variant(RouterScored, part="gate_proj", bias="expert_bias", how=0)
MixtureChosen = _variant(Mixture, k="num_experts_per_tok", how=AHEAD | CHOSEN)

# The mixin for each class of mlx_lm.models, which is followed by the digests of the sources that it
# replaces: of mlx_lm 0.31 and 0.32, where they differ and both are known.
_KNOWN: dict[str, type] = {
    "qwen3_next.Qwen3NextGatedDeltaNet 2a2aee87b09300db": _variant(
        DeltaLayer, parts=("in_proj_qkvz", "in_proj_ba")
    ),
    "qwen3_next.Qwen3NextDecoderLayer f10022c1d06a8172": Decoder,
    "qwen3_5.DecoderLayer f10022c1d06a8172": Decoder,
    "qwen3_next.Qwen3NextSparseMoeBlock 9bc3562e7dd962b2 9c28cc63a2f1d683": Mixture,
    "qwen3_moe.Qwen3MoeSparseMoeBlock fffa3169fdc28428 5d2e8164fcb6ebfc": Mixture,
    "mellum.MellumSparseMoeBlock 5b2f6b4b2d4d7c4c": Mixture,
    "olmoe.OlmoeSparseMoeBlock e6ea43ca188f32b3": MixtureAhead,
    "qwen2_moe.Qwen2MoeSparseMoeBlock 7d404b0385a9ff7e": MixtureAhead,
    "mixtral.MixtralSparseMoeBlock 95e4c55589ec0085": MixtureChosen,
    "gpt_oss.MLPBlock 2964963bff3086a2": _variant(
        Mixture, router="router", experts="experts", k="num_experts_per_tok", how=CHOSEN
    ),
    "qwen3_5.GatedDeltaNet 730a07e14645d4b9": _variant(
        DeltaLayer, parts=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    ),
    "deepseek_v3.DeepseekV3MoE 5c396b22d20c5274": MixtureScored,
    "deepseek_v3.MoEGate b570948493299a05 477b6059456d1d80": RouterScored,
    "deepseek_v3.DeepseekV3Attention 410c4c4877a47726": LatentAttention,
    "glm4_moe_lite.Glm4MoeLiteAttention 5012a87eb0a3b345": LatentAttention,
    "mistral4.Mistral4Attention a6a93f1af760a550": _variant(
        LatentAttention, parts=ABSORBED._replace(scaled=True)
    ),
    "kimi_linear.KimiMLAAttention aef564308e14efa4": _variant(
        LatentAttention, parts=ABSORBED._replace(rope=None)
    ),
    "kimi_linear.KimiDecoderLayer c29e4676476657e0": KimiLayer,
    "kimi_linear.KimiDeltaAttention 410df2781a61b71c": Known,
    "kimi_linear.ShortConv1d da5985368dd76c88": Known,
    "deepseek_v2.DeepseekV2Attention 9be64f9b69c630ed": ExpandedAttention,
    "youtu_llm.YoutuLLMAttention 8d6eec3b3f0b20b5": ExpandedAttention,
    "minicpm3.Attention 367b597110cc3533": _variant(
        LatentAttention, parts=EXPANDED._replace(scale="softmax_scale")
    ),
    "deepseek_v32.DeepseekV32MoE 5c396b22d20c5274": MixtureScored,
    "deepseek_v32.MoEGate b570948493299a05 477b6059456d1d80": RouterScored,
    "glm4_moe.MoE 5c396b22d20c5274": MixtureScored,
    "glm4_moe.MoEGate b570948493299a05 477b6059456d1d80": RouterScored,
    "glm4_moe_lite.Glm4MoeLiteMoE 5c396b22d20c5274": MixtureScored,
    "glm4_moe_lite.MoEGate d9b3fd8a390c1951 4de9a63870602938": RouterScored,
    "exaone_moe.MoE f9d36ec94f848a11": MixtureScored,
    "exaone_moe.MoEGate fd0ea3ff3473b164 13ebe26c5d34352e": RouterScored,
    "mimo_v2_flash.MoE d9271ce472f8236e": MixtureScored,
    "mimo_v2_flash.MoEGate a8e37b8810cc0da9 6a1872dc0c8310c7": RouterScored,
    "deepseek_v2.DeepseekV2MoE 0372173aa0078ec7": MixtureScored,
    "deepseek_v2.MoEGate 2573fb5e1dad4958 7ffd4990c703fa63": RouterInGroups,
    "deepseek.DeepseekMoE 69bae7a13837b1c3": MixtureScored,
    "deepseek.MoEGate ab29305390820608": _variant(Router, how=AHEAD),
    "granitemoe.GraniteMoeMoE 5f3548f3637349a4": MixtureOfPart,
    "granitemoe.GraniteMoeTopKGating ec8e74c20a57f1e6 f04eadb945648a09": RouterOfPart,
    "granitemoehybrid.GraniteMoeHybridMoE eec89ab94adc358a": MixtureOfPart,
    "granitemoehybrid.GraniteMoeHybridTopKGating 2fb8919b4567cd72 a7ef0ab13c8edcd5": RouterOfPart,
    "kimi_linear.KimiSparseMoE fb1eb97ad807468c 2a35c4ac20ecd8a3": MixtureInGroups,
    "lfm2_moe.Lfm2MoeSparseMoeBlock ef564026ddc3ce64": MixtureBiased,
    "bailing_moe.BailingMoeSparseMoeBlock e3cd28aa22907455": MixtureScored,
    "bailing_moe.BailingMoeGate a1fa75f070d8dae5 48012017b29289d7": LingRouter,
    "bailing_moe_linear.SparseMoeBlock 9413923b0aafd0c8": MixtureScored,
    "bailing_moe_linear.Gate cb0b295f5163d674 5f13d886d3ab7e66": _variant(LingRouter, how=AHEAD),
    "bailing_moe_linear.DecoderLayer 17368933dfd4cd76": LinearAttentionLayer,
    "bailing_moe_linear.LinearAttention 073889f1401b9122 80e366e901784955": Known,
    "bailing_moe_linear.GroupRMSNorm 8d3df2d244586bfd ea1ce1ca1f4a5f45": Known,
    "ernie4_5_moe.Ernie4_5_MoeMLP d7e132a96b4b1f01": MixtureOfActivation,
    "dots1.Dots1MoE 7a1de1f2c61e297b": _variant(MixtureScored, experts="experts"),
    "dots1.Dots1TopkRouter 283e5f8aed02cc2f 3a67e15481b1a87d": RouterScored,
    "jamba.JambaSparseMoeBlock 6d0653d39fbee768": _variant(MixtureChosen, router="router"),
    "lfm2.Lfm2DecoderLayer 2cefc83b3b70e4cd": ConvolutionLayer,
    "lfm2.ShortConv 335f74b67bd97914": Known,
    "lfm2_moe.Lfm2DecoderLayer 2cefc83b3b70e4cd": ConvolutionLayer,
    "lfm2_moe.ShortConv 335f74b67bd97914": Known,
    "mamba2.Mamba2Block f287fbbe418194aa": Mixer,
    "mamba2.ResidualBlock 0b6f37bd719f05c5": BareMixerLayer,
    "mamba2.MambaRMSNormGated bdab6611f523d381": GatedNorm,
    "nemotron_h.NemotronHBlock ff351c51727082a3": NemotronLayer,
    "nemotron_h.NemotronHAttention e7238684209458d3": _attention(
        heads="num_heads", key_heads="num_key_value_heads", rope=None
    ),
    "nemotron_h.MambaRMSNormGated 888dd1eb87e2c4b2": GatedNormInGroups,
    "nemotron_h.NemotronHMoE 4e1be5b07ed4860f": MixtureOfNarrow,
    "nemotron_h.MoEGate 63862eb0c56aaee6 7e28e79b287f80cc": RouterScored,
    "nemotron_h.NemotronHMamba2Mixer 73a71362a42b947c 6d382b74693f9660": Mixer,
    "granitemoehybrid.GraniteMoeHybridMamba2Mixer b729fd14f83e1ec2 6d382b74693f9660": Mixer,
    "granitemoehybrid.GraniteMoeHybridRMSNormGated bdab6611f523d381": GatedNorm,
    "granitemoehybrid.GraniteMoeHybridLayer aa760904e09b2fd0": HybridLayer,
    "granitemoehybrid.GraniteMoeHybridAttention 541a10c42c9dc724": GraniteAttention,
    "falcon_h1.FalconH1DecoderLayer d42e93e338d2fb7b": ParallelLayer,
    "falcon_h1.FalconH1Attention b004f9fe9d0d0643": _attention(
        heads="num_heads", key_heads="num_kv_heads"
    ),
    "falcon_h1.FalconH1Mixer 83d9aadd9767eba9": MixerGivenCacheFirst,
    "gemma4_text.DecoderLayer 6721fbc4a640e702": SharingLayer,
    "gemma4_text.Attention b3f91cb534800079": GemmaAttention,
    "gemma4_text.Router 61bf4b667ae08b25 4aa48719195c797a": RouterOfNorm,
    "gemma4_text.Experts 7afdb11b23c48e01": Experts,
    "mamba.MambaBlock d9a77290910299c9 169a314aa037a616": SelectiveScan,
    "jamba.JambaMambaMixer a731a5ac4897cd1f": _variant(
        SelectiveScan, norms=("dt_layernorm", "b_layernorm", "c_layernorm")
    ),
    "mamba.ResidualBlock ff01b8b4dd6f4fb4": MambaLayer,
    "jamba.JambaDecoderLayer 51f927911e371095": SelectiveLayer,
    "jamba.JambaAttention 2dff4f5b86d7a511": _attention(rope=None, **COUNTS),
    "rwkv7.Rwkv7TimeMixing eb228e5a704d8b51": GeneralisedDelta,
    "rwkv7.Rwkv7Layer 78b24a7a0d31c438": TimeMixingLayer,
    "rwkv7.Rwkv7ChannelMixing 28c870b572a9a244": Known,
    "rwkv7.LayerNormPerHead 9a915383b5927c3c": Known,
    "rwkv7.LoRA 17e702fbfdd57fd0": Known,
    "rwkv7.TokenShift fa2d513005aa2ea4": Known,
    "afmoe.Attention c278e3c631b97143": AfmoeAttention,
    "afmoe.AfmoeMoE 9035049a859353b0 09d59d102695e7a5": MixtureOfWrapped,
    "afmoe.MoERouter b888b00bba05b3ab": Known,
    "gemma3_text.Attention a293df9f54178d8a": _attention(**NORMED),
    "olmo2.Attention 1e7b799d789a8d0e": _attention(**NORMED),
    "olmoe.Attention 52d7913e626e8f67": _attention(**NORMED),
    "cohere.Attention 8e33dc3e18a83c96": _attention(**NORMED, **OR_NOT),
    "glm4_moe.Attention fe598d993043bd79": _attention(**NORMED, **OR_NOT),
    "exaone4.Attention 2ac562e9182cb40f": _attention(**NORMED, use_rope="use_rope"),
    "exaone_moe.Attention 2ac562e9182cb40f": _attention(**NORMED, use_rope="use_rope"),
    "olmo3.Olmo3Attention 90a5351c6671e3b6": _attention(**NORMED, **COUNTS),
    "qwen3_next.Qwen3NextAttention a938424855f1b919": _attention(**NORMED, **COUNTS, gated=True),
    "lfm2.Attention 06714e58258dcf63": LfmAttention,
    "lfm2_moe.Attention 06714e58258dcf63": LfmAttention,
    "bailing_moe.BailingMoeAttention f17759b31ba86d72": LingAttention,
    "bailing_moe_linear.Attention f17759b31ba86d72": LingAttention,
    "phi3.Attention c22a1680bccb2d06": _joined("qkv_proj"),
    "ministral3.Attention f730ceee58eae615": _attention(scaled=True),
    "gemma2.Attention a62901768129867d": _attention(size="head_dim", cap="attn_logit_softcapping"),
    "gpt_oss.AttentionBlock 907d3050ceb13722": _attention(
        heads=None, key_heads=None, scale="sm_scale", size="head_dim", sinks="sinks"
    ),
    "cohere2.Attention 8e66ae5c1684a15b": _attention(use_rope="use_sliding_window"),
    "phi.PhiAttention 40fde0a6df234612": _variant(
        RootAttention, parts=RootAttention._parts._replace(out="dense")
    ),
    "minimax.MiniMaxSparseMoeBlock f95a6d46996d86bb 8d15d094b115016c": MixtureBiasedAhead,
    "minimax.MiniMaxAttention e6d80e20cec5495c": _attention(**NORMED, **OR_NOT, **COUNTS),
    "hunyuan.Attention 3d2fa7ed6e69cf13": _attention(**LAYER_NORMED, norm_after_rope=True),
    "hunyuan_v1_dense.Attention 0c3853706d692837": _attention(
        **LAYER_NORMED, norm_after_rope=True, size="head_dim"
    ),
    "hunyuan.DecoderLayer 204a7bfcbc967e4e": PassingLayer,
    "hunyuan.MoeBlock 22b48c7553192b79": _variant(
        MixtureAhead, shared="shared_mlp", projection="wg"
    ),
    "hunyuan.Gate bc73c8e9a2483e2f": Known,
    "phimoe.PhiMoESparseMoeBlock fa8dd25dc4828056": MixtureSparse,
    "exaone.AttentionModule a20f765331fef629": _attention(out="out_proj"),
    "afmoe.DecoderLayer 121ab383c8b16b79": _layer(
        second_norm="pre_mlp_layernorm",
        attended_norm="post_attention_layernorm",
        fed_norm="post_mlp_layernorm",
    ),
    "exaone.TransformerBlock 13e865e72ecd0ae6": _layer(
        attention="attention", first_norm="ln_1", second_norm="ln_2", holder="attn"
    ),
    "exaone4.TransformerBlock 8e4c30499f0b8e0e": _layer(first_norm=None, second_norm=None, **FED),
    "gemma3_text.TransformerBlock e639201f7e171c30": _layer(
        second_norm="pre_feedforward_layernorm", **FED
    ),
    "glm4.Glm4DecoderLayer 6730ad3d0790118e": _layer(
        attended_norm="post_self_attn_layernorm", fed_norm="post_mlp_layernorm"
    ),
    "gpt_oss.TransformerBlock e970827889a32b65": _layer(),
    "minimax.MiniMaxDecoderLayer f69acaa741e54e08": _layer(network="block_sparse_moe"),
    "ministral3.TransformerBlock 9a0aae1a5e4b35e2 e1525f9255023860": QueriesScaled,
    "mistral4.Mistral4DecoderLayer c3226bb6fc995192": QueriesScaled,
    "olmoe.TransformerBlock 28f6a7a8645f2234": _layer(),
    "phimoe.PhiMoEDecoderLayer c209f2724bc9000b": _layer(network="block_sparse_moe"),
    "stablelm.DecoderLayer 104f0e69e0f8f0b2": UnforkedLayer,
    "stablelm.Attention 1dd928e4eccc34e9": StableAttention,
    "internlm2.Attention 0c5eb24da5e8eb86": _joined("wqkv", out="wo", grouped=True),
    "gpt_neox.Attention f6c71d557234a941": _joined(
        "query_key_value",
        out="dense",
        grouped=True,
        heads="num_attention_heads",
        key_heads="num_attention_heads",
    ),
    "gpt_neox.TransformerBlock 7f730febe97b3643": ForkedLayer,
    "gpt2.Attention 64d7fd2fbd46dcd3": _joined(
        "c_attn", out="c_proj", heads="n_head", key_heads="n_head", rope=None
    ),
}
# Mixin and digests by module and name.
LAYERS: dict[tuple[str, str], tuple[type, frozenset[str]]] = {
    (f"mlx_lm.models.{module}", name): (mixin, frozenset(digests))
    for known, mixin in _KNOWN.items()
    for place, *digests in [known.split()]
    for module, name in [place.split(".")]
}


@cache
def layer_of(cls: type[nn.Module]) -> type | None:
    """Return the mixin for a class of an architecture; None for a class or version that is not
    known."""
    mixin, known = LAYERS.get((cls.__module__, cls.__name__), (None, frozenset()))
    return mixin if mixin is not None and digest(cls) in known else None


def digest(cls: type) -> str | None:
    """Digest of the source of a class's own methods, except __init__, and of the functions of its
    module that they call; None without source."""
    methods = [f for name, f in sorted(vars(cls).items()) if inspect.isfunction(f)]
    methods = [f for f in methods if f.__name__ != "__init__"]
    definitions = [definition_of(f.__code__) for f in (*methods, *functions_of(methods))]
    text = "".join(definition.text for definition in definitions if definition is not None)
    return None if None in definitions else hashlib.sha256(text.encode()).hexdigest()[:16]
