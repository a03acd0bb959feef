"""Batch sizes in words: how many answers, prompts, groups and updates the settings make, and what does not divide.

Terms as TRL fixed them (its pull request 3396), p answers in one forward on one device, a accumulation steps, w processes, s
forwards per generation, G answers per prompt: an optimiser step averages over p a w answers, a generation batch has p w s,
of p w s / G prompts. verl and OpenRLHF count prompts instead, stable-baselines3 environment steps. One function per
trainer, in WORDS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable

from extensions.settings.trainers import Settings


@dataclass
class BatchWords:
    """Numbers under fixed names for the program, sentences for the reader, and what does not divide."""

    numbers: dict[str, float | bool | None] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)


def _s(count: float, word: str) -> str:
    return f"{count:g} {word}" + ("" if count == 1 else "es" if word.endswith("ch") else "s")


def positive(settings: Settings, key: str, otherwise: int = 1) -> int:
    made = settings.whole(key, otherwise)
    if made < 1:
        raise ValueError(f"{key}: got {made}, wanted at least 1")
    return made


def trl_generation(settings: Settings) -> BatchWords:
    """GRPOTrainer and RLOOTrainer."""
    words, w = BatchWords(), settings.world
    p, a = positive(settings, "per_device_train_batch_size"), positive(settings, "gradient_accumulation_steps")
    group, mu = positive(settings, "num_generations", 8), positive(settings, "num_iterations")
    budget = settings.get("max_completion_length")
    generation, s = settings.get("generation_batch_size"), settings.get("steps_per_generation")
    if generation is not None and s is not None:
        words.problems.append("generation_batch_size and steps_per_generation are both set: TRL stops with an error")
    if generation is not None:
        generation = positive(settings, "generation_batch_size")
        if generation % (p * w):
            words.problems.append(f"generation_batch_size {generation} does not divide by {p} per device * {w} processes")
        s = max(1, generation // (p * w))
    else:
        s = a if s is None else positive(settings, "steps_per_generation")
        generation = p * w * s
    step, prompts, updates = p * a * w, generation / group, s * mu / a
    if generation % group:
        words.problems.append(
            f"a generation batch of {generation} answers does not divide into groups of {group}: TRL stops with an error"
        )
    if group < 2:
        words.problems.append("num_generations is 1: a group of one has no baseline, and TRL stops with an error")
    if s % a:
        words.problems.append(
            f"steps_per_generation {s} is no multiple of gradient_accumulation_steps {a}: some optimiser steps mix two "
            "generation batches, and the window of the token mean is wrong for them"
        )
    on_policy = a % (s * mu) == 0
    words.numbers = {
        "answers_per_device": p, "answers_per_step": step, "answers_per_generation": generation, "prompts_per_generation": prompts,
        "prompts_per_step": step / group, "group_size": group, "updates_per_generation": updates, "passes": mu,
        "ratio_is_one": on_policy, "processes": w, "tokens_per_generation_at_most": None if budget is None else generation * budget,
    }  # fmt: skip
    words.lines = [
        f"One forward: {_s(p, 'answer')} on each of {_s(w, 'process')}. per_device_train_batch_size counts answers, not prompts.",
        f"One optimiser step averages over {p} * {a} accumulated * {w} = {_s(step, 'answer')} of {step / group:g} prompts.",
        f"One generation batch: {p} * {w} * {s} steps_per_generation = {_s(generation, 'answer')} = {prompts:g} prompts * "
        f"{group} answers.",
        f"It is used for {s} * {mu} num_iterations / {a} = {updates:g} optimiser steps; each answer is passed over "
        f"{'once' if mu == 1 else f'{mu} times'}.",
        "Every ratio is 1: the policy that is updated is the one that sampled. Clip and epsilon do nothing, clip_ratio is 0."
        if on_policy
        else f"The ratio is 1 in the first of these steps and leaves 1 after it: the clip can act in {updates - 1:g} of {updates:g}.",
        f"An epoch over D prompts: D * {group} / {step} * {mu} = {group * mu / step:g} D optimiser steps.",
    ]
    if budget is not None:
        words.lines.append(f"Tokens generated for it: at most {generation} * {budget} = {generation * budget:,}.")
    _assume_world(settings, words)
    return words


def _assume_world(settings: Settings, words: BatchWords) -> None:
    if settings.world == 1:
        words.assumed.append("one process; --processes N says how many there are")


def trl_offline(settings: Settings) -> BatchWords:
    """DPO, CPO, ORPO, KTO: batches of a data set."""
    words, w = BatchWords(), settings.world
    p, a = positive(settings, "per_device_train_batch_size"), positive(settings, "gradient_accumulation_steps")
    unit = "labelled answer" if settings.trainer.method == "kto" else "pair"
    rows = p if unit != "pair" else 2 * p
    words.numbers = {"per_device": p, "per_step": p * a * w, "sequences_per_forward": rows, "processes": w}
    words.lines = [
        f"One forward: {_s(p, unit)} on each of {_s(w, 'process')}"
        + (f", which are {rows} sequences (chosen and rejected)." if unit == "pair" else "; z0 is the mean over these answers."),
        f"One optimiser step averages over {p} * {a} accumulated * {w} = {_s(p * a * w, unit)}.",
        "The data are fixed: no generation, no ratio to a policy that sampled.",
    ]
    if settings.trainer.method == "kto" and p < 2:
        words.problems.append("KTO estimates z0 from answers that belong to other prompts: one answer per device has none")
    _assume_world(settings, words)
    return words


def verl(settings: Settings) -> BatchWords:
    actor, words = "actor_rollout_ref.actor.", BatchWords()
    prompts, n = positive(settings, "data.train_batch_size", 1024), positive(settings, "actor_rollout_ref.rollout.n")
    mini, epochs = positive(settings, actor + "ppo_mini_batch_size", 256), positive(settings, actor + "ppo_epochs")
    gpus = positive(settings, "trainer.nnodes") * positive(settings, "trainer.n_gpus_per_node", 8)
    micro, length = settings.get(actor + "ppo_micro_batch_size_per_gpu"), settings.get("data.max_response_length")
    answers, updates = prompts * n, prompts / mini * epochs
    if mini > prompts:
        words.problems.append(f"ppo_mini_batch_size {mini} is larger than train_batch_size {prompts}: verl stops with an error")
    elif prompts % mini:
        words.problems.append(f"train_batch_size {prompts} does not divide by ppo_mini_batch_size {mini}: the last one is smaller")
    if answers % gpus:
        words.problems.append(f"{answers} answers do not divide over {gpus} GPUs: verl stops with an error")
    if mini * n % gpus:
        words.problems.append(f"a mini-batch of {mini} * {n} answers does not divide over {gpus} GPUs")
    per_gpu = mini * n / gpus
    dynamic = settings.get(actor + "use_dynamic_bsz")
    if micro is None and settings.get(actor + "ppo_micro_batch_size") is None and not dynamic:
        words.problems.append("no ppo_micro_batch_size_per_gpu and no use_dynamic_bsz: verl stops with an error")
    elif isinstance(micro, int) and micro > 0 and per_gpu % micro and not dynamic:
        words.problems.append(f"{per_gpu:g} answers a GPU do not divide by ppo_micro_batch_size_per_gpu {micro}")
    words.numbers = {
        "prompts_per_generation": prompts, "answers_per_generation": answers, "group_size": n, "prompts_per_step": mini,
        "answers_per_step": mini * n, "updates_per_generation": updates, "passes": epochs, "ratio_is_one": updates <= 1,
        "processes": gpus, "answers_per_device": per_gpu,
        "tokens_per_generation_at_most": answers * length if isinstance(length, int) else None,
    }  # fmt: skip
    words.lines = [
        f"One generation batch: {prompts} prompts * {n} answers = {answers} answers on {gpus} GPUs.",
        f"One optimiser step: ppo_mini_batch_size counts prompts: {mini} * {n} = {mini * n} answers, {per_gpu:g} on each GPU.",
        f"Updates per generation batch: {prompts} / {mini} * {epochs} ppo_epochs = {updates:g}.",
        "Every ratio is 1 in the only update: the clip does nothing, pg_clipfrac is 0."
        if updates <= 1
        else f"The ratio leaves 1 after the first of these updates: the clip can act in {updates - 1:g} of {updates:g}.",
    ]
    if isinstance(micro, int) and micro > 0 and not dynamic:
        words.lines.append(f"Each GPU passes over its part in {math.ceil(per_gpu / micro)} forwards of {micro}.")
    if isinstance(length, int):
        words.lines.append(f"Tokens generated for it: at most {answers} * {length} = {answers * length:,}.")
    for key in ("data.train_batch_size", "trainer.n_gpus_per_node"):
        if not settings.has(key):
            words.assumed.append(f"{key} {settings.get(key)} (default)")
    return words


def openrlhf(settings: Settings) -> BatchWords:
    words = BatchWords()
    prompts, n = positive(settings, "rollout.batch_size", 1024), positive(settings, "rollout.n_samples_per_prompt")
    train, epochs = positive(settings, "train.batch_size", 128), positive(settings, "train.max_epochs")
    gpus = positive(settings, "actor.num_nodes") * positive(settings, "actor.num_gpus_per_node", 8)
    micro, length = positive(settings, "train.micro_batch_size"), settings.get("rollout.max_new_tokens")
    answers = prompts * n
    updates = answers / train * epochs
    if answers % train:
        words.problems.append(f"{answers} answers do not divide by train.batch_size {train}: the last update is smaller")
    if train % (gpus * micro) and not settings.get("train.dynamic_batch_enable"):
        words.problems.append(f"train.batch_size {train} does not divide by {gpus} GPUs * micro_batch_size {micro}")
    words.numbers = {
        "prompts_per_generation": prompts, "answers_per_generation": answers, "group_size": n, "answers_per_step": train,
        "updates_per_generation": updates, "passes": epochs, "ratio_is_one": updates <= 1, "processes": gpus,
        "tokens_per_generation_at_most": answers * length if isinstance(length, int) else None,
    }  # fmt: skip
    words.lines = [
        f"One generation batch: rollout.batch_size counts prompts: {prompts} * {n} answers = {answers} answers.",
        f"One optimiser step: train.batch_size counts answers: {train}, in forwards of {micro} on {gpus} GPUs.",
        f"Updates per generation batch: {answers} / {train} * {epochs} = {updates:g}.",
        "Every ratio is 1 in the only update: the clip does nothing."
        if updates <= 1
        else f"The ratio leaves 1 after the first of these updates: the clip can act in {updates - 1:g} of {updates:g}.",
    ]
    if isinstance(length, int):
        words.lines.append(f"Tokens generated for it: at most {answers} * {length} = {answers * length:,}.")
    return words


def stable_baselines3(settings: Settings) -> BatchWords:
    words, envs = BatchWords(), positive(settings, "n_envs")
    steps = positive(settings, "n_steps", 2048)
    rollout = steps * envs
    if settings.trainer.method == "a2c":
        words.numbers = {"answers_per_generation": rollout, "updates_per_generation": 1, "passes": 1, "ratio_is_one": True}
        words.lines = [f"One rollout: {steps} steps * {envs} environments = {rollout} transitions, one update over all of them."]
    else:
        size, epochs = positive(settings, "batch_size", 64), positive(settings, "n_epochs", 10)
        batches = math.ceil(rollout / size)
        if rollout % size:
            words.problems.append(
                f"batch_size {size} does not divide {steps} * {envs} = {rollout}: the last mini-batch of each epoch has only "
                f"{rollout % size} transitions, and its advantages are standardised among themselves"
            )
        if size > rollout:
            words.problems.append(f"batch_size {size} is larger than the rollout of {rollout}: one mini-batch of {rollout}")
        words.numbers = {
            "answers_per_generation": rollout, "answers_per_step": min(size, rollout), "updates_per_generation": batches * epochs,
            "passes": epochs, "ratio_is_one": batches * epochs <= 1,
        }  # fmt: skip
        words.lines = [
            f"One rollout: {steps} steps * {envs} environments = {rollout} transitions.",
            f"{batches} mini-batches of {min(size, rollout)} an epoch, {epochs} epochs: {batches * epochs} updates per rollout.",
            f"Every transition is used {epochs} times; the ratio is 1 only in the first update.",
        ]
        total = settings.get("n_timesteps") or settings.get("total_timesteps")
        if isinstance(total, (int, float)) and total > 0:
            words.lines.append(f"{total:g} steps in all: {math.ceil(total / rollout)} rollouts.")
    if not settings.has("n_envs"):
        words.assumed.append("one environment; --set n_envs=N says how many there are")
    return words


WORDS: dict[str, Callable[[Settings], BatchWords]] = {
    "grpo": trl_generation, "rloo": trl_generation, "pairs": trl_offline, "kto": trl_offline, "verl": verl, "openrlhf": openrlhf,
    "sb3": stable_baselines3, "a2c": stable_baselines3,
}  # fmt: skip


def batch_words(settings: Settings) -> BatchWords:
    """Batch arithmetic of the settings. Raises ValueError that names the key for a size that is no whole number above 0."""
    make = WORDS.get(settings.trainer.method)
    return make(settings) if make else openrlhf_pairs(settings)


def openrlhf_pairs(settings: Settings) -> BatchWords:
    size = positive(settings, "train.batch_size", 128)
    return BatchWords({"per_step": size}, [f"One optimiser step averages over {_s(size, 'pair')}."])
