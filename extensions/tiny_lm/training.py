"""train(): one training from its start to its history."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from extensions.objectives import Row
from extensions.tiny_lm.measure import measure, sample_records
from extensions.tiny_lm.methods import METHODS, TRAINABLE_ROWS, columns_of, objective_row, own_steps
from extensions.tiny_lm.stage import MISTAKES, Diagnostics, Stage, TinySettings
from extensions.tiny_lm.model import Decoder
from extensions.tiny_lm.task import VERIFIERS, VOCABULARY, draw_prompts
from rl_lab import OnStep

if TYPE_CHECKING:
    from extensions.distributed.ranks import Rank


class TrainingRun(NamedTuple):
    """What a training leaves behind."""

    algorithm: str
    verifier: str
    mistake: str | None
    settings: TinySettings
    row: Row | None
    history: list[Diagnostics]
    samples: list[dict]
    policy: Decoder
    reference: Decoder


def train(
    algorithm: str,
    start: Decoder | None = None,
    *,
    verifier: str = "exact",
    objective: str | None = None,
    mistake: str | None = None,
    on_step: OnStep | None = None,
    rank: Rank | None = None,
    **settings: float,
) -> TrainingRun:
    """Train a copy of `start`; `start` itself, frozen, is the reference. SFT without `start` begins with random weights.

    The history has a row before training, one every `evaluate_every` rounds and one at the end. EVALUATION_COLUMNS are
    measured after the row's update; loss, gradient norm and the method's own columns are averages over the rounds since the
    row before (each round reports its last pass) and NaN where there is nothing to average; counts are cumulative; `seconds`
    is the only entry that differs between equal runs; it goes into the JSON, not into the CSV.

    rank: this process as one of several that train together (extensions.distributed.ranks); each calls train alike.
    settings: fields of TinySettings. Global random state, default dtype and thread count stay as they were.
    Raises ValueError for unknown names, settings out of range, a mistake without effect on this algorithm, or a DPO without
    pairs; FloatingPointError when a loss or gradient is not finite.
    """
    check_names(algorithm, verifier, objective, mistake)
    stage = prepared(algorithm, start, verifier, objective, mistake, settings, rank)
    held_out = draw_prompts(
        stage.settings.evaluation_prompts, torch.Generator().manual_seed(stage.settings.seed + 1), held_out=True
    )
    history: list[Diagnostics] = []
    began = time.perf_counter()

    def record(step: int, old: Decoder, reports: list[Diagnostics]) -> None:
        averages = {}
        for name in ("loss", "gradient_norm", *METHODS[algorithm].own_columns):
            reported = [report[name] for report in reports if name in report]
            averages[name] = statistics.fmean(reported) if reported else math.nan
        seconds = round(time.perf_counter() - began, 3)
        measured = measure(stage.policy, old, stage.reference, stage, held_out)
        row = {"step": step, **measured, **averages, **stage.counts, "seconds": seconds}
        history.append({name: row[name] for name in columns_of(algorithm)})
        if on_step:
            on_step(history[-1])

    old = copy.deepcopy(stage.policy)
    record(0, old, [])
    samples = sample_records(stage.policy, stage, held_out, "before")
    reports = []
    # Dropout, when a mistake switches it on, can only draw from the global generator: it is lent and given back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stage.settings.seed)
        for step, report in enumerate(METHODS[algorithm].run(stage), start=1):
            reports.append(report)
            if step % stage.settings.evaluate_every == 0 or step == stage.settings.steps:
                record(step, old, reports)
                reports = []
            old.load_state_dict(stage.policy.state_dict())
    samples += sample_records(stage.policy, stage, held_out, "after")
    models = stage.policy, stage.reference
    return TrainingRun(algorithm, verifier, mistake, stage.settings, stage.row, history, samples, *models)


def prepared(
    algorithm: str,
    start: Decoder | None,
    verifier: str,
    objective: str | None,
    mistake: str | None,
    changes: dict[str, float],
    rank: Rank | None = None,
) -> Stage:
    """Settings with the algorithm's own numbers filled in, the two models, the generator and the verifier's prompts."""
    row = objective_row(algorithm, objective, changes.get("kl", None if objective else TinySettings.kl))
    settings = TinySettings(**changes)
    method = METHODS[algorithm]
    settings = dataclasses.replace(
        settings,
        steps=settings.steps or own_steps(algorithm, verifier),
        learning_rate=settings.learning_rate or method.learning_rate,
        kl=settings.kl if row is None else row.kl_coef,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    if start is None and algorithm != "sft":
        raise ValueError(f"start: {algorithm} needs a supervised policy to start from; train('sft').policy is one")
    reference = copy.deepcopy(start) if start is not None else Decoder(VOCABULARY, generator)
    reference.requires_grad_(False).eval()
    policy = copy.deepcopy(reference).requires_grad_(True)
    public = draw_prompts(settings.public_tests, generator, held_out=False) if verifier == "public-tests" else None
    counts = dict.fromkeys(("optimizer_steps", "samples", "tokens", "pair_presentations"), 0)
    stage = Stage(
        algorithm, settings, policy, reference, generator, verifier, public, row, mistake, counts, method.final_rate
    )
    if rank is not None and rank.ranks > 1:
        check_ranks(stage, rank.ranks)
        stage.rank = rank
    return stage


def check_ranks(stage: Stage, ranks: int) -> None:
    """Raises ValueError for more ranks than prompts, and for a mistake whose noise would depend on the split."""
    settings = stage.settings
    prompts = {
        "sft": ("demonstrations",),
        "ppo": ("ppo_prompts",),
        "dpo": ("dpo_prompts", "dpo_batch"),
        "online-dpo": ("online_prompts",),
        "grpo": ("group_prompts",),
        "rloo": ("group_prompts",),
    }
    for name in prompts[stage.algorithm]:
        if getattr(settings, name) < ranks:
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: got {getattr(settings, name)} for {ranks} ranks, wanted at least one for each")
    if stage.mistake == "dropout":
        raise ValueError("mistake: dropout draws its noise row by row, so each split has another; wanted one process")


def check_names(algorithm: str, verifier: str, objective: str | None, mistake: str | None) -> None:
    """Raises ValueError, naming the argument, for an unknown name or for two that do not go together."""
    known = {"algorithm": (algorithm, METHODS), "verifier": (verifier, VERIFIERS)}
    if objective is not None:
        known["objective"] = (objective, TRAINABLE_ROWS)
    if mistake is not None:
        known["mistake"] = (mistake, MISTAKES)
    for argument, (value, names) in known.items():
        if value not in names:
            raise ValueError(f"{argument}: got {value!r}, wanted one of {', '.join(names)}")
    if objective is not None and algorithm != "grpo":
        raise ValueError(f"objective: {objective} trains in the loop of grpo, not of {algorithm}")
    if mistake is not None and algorithm not in MISTAKES[mistake].algorithms:
        raise ValueError(
            f"mistake: {mistake} makes no difference to {algorithm}; wanted one of {', '.join(MISTAKES[mistake].algorithms)}"
        )
    if verifier != "exact" and algorithm == "sft":
        raise ValueError(f"verifier: sft learns from right answers and asks no verifier, so {verifier} makes no difference")
