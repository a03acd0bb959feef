"""Memory and cost of one update: what is resident, and what is generated and scored. Switches say what is shared or cached.

Bytes: weights P b; gradients P b of the trained part; Adam 2 moments of 4 bytes, and a 4-byte master copy where the weights
have 2 bytes (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: 2 + 2 + 12 = 16 bytes a parameter). KV cache
2 layers tokens hidden b per sequence. Activations without recomputation s h layers (34 + 5 heads s / h) bytes per sequence
at 2 bytes (Korthikanti et al. 2022, arXiv 2205.05198, equation 2; their vocabulary term left out), with recomputation
2 s h layers. Logits s vocabulary 4 bytes. FLOPs: 2 P a token forward, 6 P a token forward and backward (Kaplan et al. 2020).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import rl_lab

METHODS = {
    # models that a method as usually run holds: trained, then frozen
    "ppo": (("actor", "critic"), ("reference", "reward")),
    "grpo": (("actor",), ("reference",)),
    "dpo": (("actor",), ("reference",)),
}


@dataclass(frozen=True)
class Model:
    """Sizes of one model, and the switches."""

    parameters: float
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    tokens: int  # of one sequence, prompt and answer
    method: str = "grpo"
    sequences: int = 8  # in one forward and backward
    bytes: int = 2
    adapters: float = 0.0  # trained parameters of adapters; 0: all are trained
    shared_critic: bool = False  # the critic is a head on the actor
    no_reference: bool = False
    cached_reference: bool = False  # log-probabilities computed once, model not resident
    no_reward_model: bool = False  # a rule scores
    shards: int = 1  # ZeRO 3 / FSDP
    recompute: bool = True


def resident(model: Model) -> dict[str, float]:
    """{what: bytes on one device}."""
    trained, frozen = METHODS[model.method]
    made: dict[str, float] = {}
    part = model.adapters or model.parameters
    master = 4 if model.bytes < 4 else 0
    for name in trained:
        if name == "critic" and model.shared_critic:
            made["critic head"] = model.hidden * (2 * model.bytes + 8 + master)
            continue
        made[f"{name} weights"] = (model.parameters + model.adapters) * model.bytes / model.shards
        made[f"{name} gradients"] = part * model.bytes / model.shards
        made[f"{name} optimizer"] = part * (8 + master) / model.shards
    for name in frozen:
        # With adapters the reference is the actor with them switched off.
        absent = name == "reference" and (model.no_reference or model.cached_reference or model.adapters)
        if not absent and not (name == "reward" and model.no_reward_model):
            made[f"{name} weights"] = model.parameters * model.bytes / model.shards
    s, h = model.tokens, model.hidden
    per_layer = 2 * s * h if model.recompute else s * h * (34 + 5 * model.heads * s / h)
    made["activations"] = model.sequences * model.layers * per_layer * model.bytes / 2
    made["logits"] = model.sequences * s * model.vocabulary * 4.0
    if model.method != "dpo":
        made["KV cache"] = model.sequences * 2 * model.layers * s * h * model.bytes
    return made


def work(model: Model) -> dict[str, float]:
    """{pass: FLOPs for the sequences of one update}."""
    tokens = model.tokens * model.sequences * (2 if model.method == "dpo" else 1)
    names = resident(model)
    made = {} if model.method == "dpo" else {"generate": 2 * model.parameters * tokens}
    if "reference weights" in names or (model.adapters and not model.no_reference):
        made["score by the reference"] = 2 * model.parameters * tokens
    if "reward weights" in names:
        made["score by the reward model"] = 2 * model.parameters * tokens
    made["train the actor"] = 6 * model.parameters * tokens
    if "critic weights" in names:
        made["train the critic"] = 6 * model.parameters * tokens
    return made


def models_held(model: Model) -> int:
    return sum(name.endswith("weights") for name in resident(model))


def ledger_document(model: Model) -> dict:
    return {"resident_bytes": resident(model), "total_bytes": sum(resident(model).values()), "models": models_held(model), "flops": work(model)}


def ledger_text(model: Model) -> str:
    held, flops = resident(model), work(model)
    rows = [[name, f"{size / 1e9:.3f}"] for name, size in held.items()] + [["all", f"{sum(held.values()) / 1e9:.3f}"]]
    costs = [[name, f"{size:.3g}"] for name, size in flops.items()] + [["all", f"{sum(flops.values()):.3g}"]]
    return (
        f"Memory on one device ({model.method}, {model.sequences} sequences of {model.tokens} tokens, {models_held(model)} models)\n"
        + rl_lab.format_table(["  resident", "GB"], [["  " + name, size] for name, size in rows])
        + "\n\nCost of one update\n" + rl_lab.format_table(["  pass", "FLOPs"], [["  " + name, size] for name, size in costs])
        + "\n\n  How many models there are is a choice: --shared-critic, --adapters,\n  --cached-reference, --no-reference and --no-reward-model change it."
    )  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory and cost")
    group.add_argument("--model", metavar="PARAMS,LAYERS,HIDDEN,VOCAB[,HEADS]", help="add the ledger for a model of this size")
    group.add_argument("--tokens", type=int, metavar="N", help="tokens of a sequence, prompt and answer")
    group.add_argument("--method", choices=sorted(METHODS), default="grpo", help="whose models are held (default grpo)")
    group.add_argument("--sequences", type=int, default=8, metavar="N", help="sequences in one forward (default 8)")
    group.add_argument("--bytes", type=int, choices=(2, 4, 8), default=2, help="bytes of a weight (default 2)")
    group.add_argument("--adapters", type=float, default=0.0, metavar="PARAMS", help="trained parameters of adapters; the rest is frozen")
    group.add_argument("--shards", type=int, default=1, metavar="N", help="devices over which weights, gradients and optimizer are sharded")
    for name, meaning in (
        ("shared-critic", "the critic is a head on the actor"), ("no-reference", "no KL to a reference"),
        ("cached-reference", "its log-probabilities are computed once and kept"), ("no-reward-model", "a rule gives the reward"),
        ("no-recompute", "activations are kept, not recomputed"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", action="store_true", help=meaning)


def model_of(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Model | None:
    """The model of --model, or None without it; a wrong flag ends the command."""
    if arguments.model is None:
        return None
    if arguments.tokens is None or arguments.tokens < 1:
        parser.error("--model: wanted together with --tokens N, at least 1")
    try:
        sizes = [float(part) for part in arguments.model.split(",")]
        if len(sizes) not in (4, 5) or not all(0 < size < 1e16 for size in sizes):
            raise ValueError
    except ValueError:
        parser.error(f"--model: got {arguments.model!r}, wanted PARAMS,LAYERS,HIDDEN,VOCAB[,HEADS], numbers above 0")
    if min(arguments.sequences, arguments.shards) < 1 or not 0 <= arguments.adapters < 1e16:
        parser.error("--sequences, --shards: wanted at least 1; --adapters: wanted at least 0")
    heads = sizes[4] if len(sizes) == 5 else max(1, sizes[2] // 128)
    return Model(
        sizes[0], int(sizes[1]), int(sizes[2]), int(sizes[3]), int(heads), arguments.tokens, arguments.method, arguments.sequences,
        arguments.bytes, arguments.adapters, arguments.shared_critic, arguments.no_reference, arguments.cached_reference,
        arguments.no_reward_model, arguments.shards, not arguments.no_recompute,
    )  # fmt: skip
