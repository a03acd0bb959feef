"""The table of choices, put together from the tables of the steps, and a row of it: what a PPO or GRPO objective is.

A new choice is one entry in the table of its step (surrogates.py, kl.py, advantages.py, sampler.py, selection.py,
reduction.py, critic.py), with its formula, its function and the numbers that it alone reads. CHOICES, NUMBERS, RANGES, STEPS
and the fields of Row are made from those tables; nothing is typed a second time. A new field is a line in _STEPS.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Iterator

from extensions.objectives.advantages import (
    ADVANTAGE_LEVELS,
    BASELINES,
    CENTRES,
    GROUP_BASELINES,
    GROUP_SCALES,
    GUARDS,
    OTHER_BASELINES,
    OTHER_SCALES,
    REWARD_CLIPS,
    WHITEN_OVER,
)
from extensions.objectives.critic import VALUE_LOSSES
from extensions.objectives.kl import KL_GRADIENTS, KLS
from extensions.objectives.reduction import LENGTH_EPS, REDUCTIONS
from extensions.objectives.sampler import (
    SAMPLER_BOUNDS,
    SAMPLER_CORRECTIONS,
    SAMPLER_DROP_LEVELS,
    SAMPLER_DROPPED,
    SAMPLER_DROPS,
    SAMPLER_PLACE,
)
from extensions.objectives.selection import SELECTIONS
from extensions.objectives.surrogates import RATIOS, SURROGATES
from extensions.objectives.table import GAMMA, INF, STD_DDOF, STD_EPS, Choice, Field, Number, plain_choices

_NLL_COEF = Number("nll_coef", 0.1, 0, INF, "weight of the NLL of good answers")

# Title of a step -> its fields, and numbers that no single choice owns. Order is that of an explanation.
_STEPS: dict[str, dict[str, Field | Number]] = {
    "1  answers and rewards": {
        "group_filter": Field("none", {
            "none": Choice("every group is used"),
            "spread": Choice("groups whose rewards are all equal leave the batch (a trainer samples others in their place)",
                needs=("rewards", "group_ids")),
        }),
        "overlong": Field("none", {
            "none": Choice("no length penalty"),
            "soft": Choice("R += 0 if y <= Lmax - Lc; (Lmax - Lc - y) / Lc up to Lmax; -1 beyond; y counted tokens", numbers=(
                Number("overlong_max", 20480.0, 1, INF, "Lmax, tokens"), Number("overlong_cache", 4096.0, 1, INF, "Lc"))),
            "mask": Choice("an answer that was cut off loses its tokens; its row still counts in B", needs=("truncated",)),
        }),
        "reward_parts": Field("sum_then_normalise", {
            "sum_then_normalise": Choice("R = sum_k weight_k r_k"),
            "normalise_then_sum": Choice("R = sum_k weight_k (r_k - group mean) / (group std + eps)",
                numbers=(STD_DDOF, STD_EPS), needs=("group_ids", "rewards_per_func", "reward_weights")),
        }),
        "missing_reward": Field("refuse", plain_choices(
            refuse="a reward that is not a finite number is an error",
            exclude="a row whose reward is NaN is left out of every mean and std, and gets A = 0",
        )),
        "reward_clip": Field("none", REWARD_CLIPS),
    },
    "2  advantage": {
        "baseline": Field("group_mean", OTHER_BASELINES | BASELINES),
        "credit": Field("outcome", {
            "outcome": Choice("one A for the answer, copied to its tokens"),
            "reward_to_go": Choice("A_t from sum_{j >= t} gamma^(j - t) r_j; with a baseline of answers, what it leaves is the"
                " reward of the last token", numbers=(GAMMA,)),
        }),
        "scale": Field("none", OTHER_SCALES | GROUP_SCALES),
        "std_guard": Field("add", GUARDS),
        "singleton": Field("refuse", plain_choices(
            refuse="a group of one is an error",
            raw="a group of one keeps its reward: mean 0, std 1",
            zero="a group of one gets A = 0",
        )),
        "centre": Field("mean", CENTRES),
        "whiten_over": Field("counted", WHITEN_OVER),
        "advantage_level": Field("as_is", ADVANTAGE_LEVELS),
    },
    "3  ratio": {
        "ratio": Field("token", RATIOS),
        "log_ratio_min": Number("log_ratio_min", -INF, -INF, 0, "l - l0 is cut here, and loses its gradient"),
        "log_ratio_max": Number("log_ratio_max", INF, 0, INF, "l - l0 is cut here, and loses its gradient"),
        "sampler_correction": Field("none", SAMPLER_CORRECTIONS),
        "sampler_bound": Field("as_is", SAMPLER_BOUNDS),
        "sampler_drop": Field("none", SAMPLER_DROPS),
        "sampler_drop_level": Field("token", SAMPLER_DROP_LEVELS),
        "sampler_dropped": Field("counted", SAMPLER_DROPPED),
        "sampler_place": Field("policy", SAMPLER_PLACE),
    },
    "4  surrogate J, maximised": {
        "surrogate": Field("clip", SURROGATES),
        "off_policy_rows": Field("keep", {
            "keep": Choice("every answer is used"),
            "drop": Choice("J = 0 where A < 0 and mean_t(l0 - l) > threshold; denominators still count the answer",
                numbers=(Number("off_policy_threshold", 0.0, -INF, INF),)),
        }),
        "token_selection": Field("all", SELECTIONS),
    },
    "5  KL to a fixed policy": {
        "kl": Field("none", KLS),
        "kl_place": Field("loss", plain_choices(
            loss="loss += coef * KL, reduced",
            reward="r -= coef * KL of the policy that sampled, before any baseline",
            after_baseline="A -= coef * KL of the policy that sampled, after baseline and scale of the group",
        )),
        "kl_anchor": Field("reference", plain_choices(
            reference="lr is the reference policy", old="lr is l0, the policy that sampled"
        )),
        "kl_weight": Field("none", plain_choices(none="KL_t", ratio="r KL_t, with gradient through r")),
        "kl_gradient": Field("own", KL_GRADIENTS),
        "kl_tokens": Field("all", SELECTIONS),
        "kl_log_limit": Number("kl_log_limit", INF, 0, INF, "d is cut to +- this"),
        "kl_limit": Number("kl_limit", INF, 0, INF, "the estimate is cut to +- this"),
    },
    "6  reduction of -J": {
        "reduction": Field("mean_per_response", REDUCTIONS),
        "kl_reduction": Field("same", {"same": Choice("as the policy term"), **REDUCTIONS}),
        "rows_counted": Field("all", plain_choices(
            all="B counts every row of the batch", nonempty="B counts the rows that have a token"
        )),
        "length_eps": LENGTH_EPS,
        "accumulation": Field("none", plain_choices(
            none="the loss of a micro-batch stands as it is", divide="loss / number of accumulation steps"
        )),
    },
    "7  critic, entropy, good answers": {
        "value_loss": Field("none", VALUE_LOSSES),
        "entropy_coef": Number("entropy_coef", 0.0, -INF, INF, "loss -= entropy_coef * the entropy, reduced"),
        "entropy_reduction": Field("mean_over_tokens", {"same": Choice("as the policy term"), **REDUCTIONS}),
        "nll": Field("none", {
            "none": Choice("no imitation"),
            "positive_advantage": Choice("+ coef * mean over the tokens of answers with A > 0 of -l", numbers=(_NLL_COEF,)),
            "positive_reward": Choice("+ coef * mean over the tokens of answers with R > 0 of -l", numbers=(_NLL_COEF,),
                needs=("rewards",)),
        }),
    },
}  # fmt: skip

FIELDS: dict[str, Field] = {
    name: made for step in _STEPS.values() for name, made in step.items() if isinstance(made, Field)
}
CHOICES: dict[str, dict[str, str]] = {
    name: {value: choice.formula for value, choice in field.choices.items()} for name, field in FIELDS.items()
}
"""Field -> value -> formula."""
NUMBERS: dict[tuple[str, str], tuple[str, ...]] = {
    (name, value): tuple(number.name for number in choice.numbers)
    for name, field in FIELDS.items()
    for value, choice in field.choices.items()
    if choice.numbers
}
"""(Field, value) -> the numbers that it reads. A number that no choice of a row reads has no effect and is not shown."""


QUIET = (
    "reward_clip", "centre", "whiten_over", "advantage_level", "sampler_correction", "sampler_drop", "token_selection",
    "kl_tokens", "nll",
)  # fmt: skip
"""Fields whose default is that nothing happens: an explanation leaves them out, Row.loss_extras and
Row.advantage_extras name those in use."""


def _homes() -> dict[str, str]:
    """Number -> the field it stands behind: the one most of whose choices read it, the first of equals."""
    readers: dict[str, dict[str, int]] = {}
    known: dict[str, Number] = {}
    for field, made in FIELDS.items():
        for number in (number for choice in made.choices.values() for number in choice.numbers):
            if known.setdefault(number.name, number) != number:
                raise ValueError(f"{number.name}: two choices read a number of this name with different defaults or ranges")
            counts = readers.setdefault(number.name, {})
            counts[field] = counts.get(field, 0) + 1
    return {name: max(counts, key=counts.get) for name, counts in readers.items()}


def _ordered() -> dict[str, dict[str, Field | Number]]:
    """Every step with its fields, each followed by the numbers that stand behind it."""
    homes, steps = _homes(), {}
    for title, step in _STEPS.items():
        steps[title] = {}
        for name, made in step.items():
            steps[title][name] = made
            numbers = [n for choice in made.choices.values() for n in choice.numbers] if isinstance(made, Field) else []
            steps[title] |= {number.name: number for number in numbers if homes[number.name] == name}
    return steps


_ORDERED = _ordered()
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = tuple((title, tuple(step)) for title, step in _ORDERED.items())
"""Title of a step -> its fields and numbers, in the order of an explanation."""
_NUMBERS: dict[str, Number] = {
    name: made for step in _ORDERED.values() for name, made in step.items() if isinstance(made, Number)
}
RANGES: dict[str, tuple[float, float]] = {name: (number.low, number.high) for name, number in _NUMBERS.items()}
"""Number -> its range."""


def _row_fields() -> list[tuple]:
    made: list[tuple] = [("name", "str"), ("source", "str", ""), ("differs", "str", "")]
    for step in _ORDERED.values():
        for name, what in step.items():
            kind = "str" if isinstance(what, Field) else "int" if what.is_whole else "float"
            made.append((name, kind, what.default))
    return made


# A dataclass calls __post_init__ only if it had one when it was made; Row's takes the place of this one.
_RowFields = dataclasses.make_dataclass(
    "_RowFields", _row_fields(), frozen=True, namespace={"__post_init__": lambda row: None}
)


class Row(_RowFields):
    """One objective: its choice at every step. Text fields are keys of CHOICES, numbers are plain numbers with RANGES.

    name, source and differs (from the paper, or from the rows that share the name), then every field of STEPS in that order.
    `dataclasses.replace(row, field=value)` makes a neighbour; a row can be hashed and compared, and
    `dataclasses.asdict` writes it out. `row.needs` names what it reads of a batch.
    Raises ValueError for a name outside CHOICES, a number out of range, or choices that exclude each other.
    """

    def __post_init__(self) -> None:
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{self.name}, {field}: got {getattr(self, field)!r}, wanted one of {', '.join(allowed)}")
        for field, number in _NUMBERS.items():
            value = getattr(self, field)
            is_number = isinstance(value, int if number.is_whole else (int, float)) and not isinstance(value, bool)
            if not is_number or not number.low <= value <= number.high:
                wanted = f"a number from {number.low:g} to {number.high:g}"
                raise ValueError(f"{self.name}, {field}: got {value!r}, wanted {wanted}")
        for excluded, reason in self._exclusions():
            if excluded:
                raise ValueError(f"{self.name}: {reason}")

    def _exclusions(self) -> Iterator[tuple[bool, str]]:
        """Choices that exclude each other, each with the reason."""
        yield from self._advantage_exclusions()
        surrogate = SURROGATES[self.surrogate]
        yield self.ratio == "none" and self.surrogate != "plain", "without a ratio the surrogate is plain"
        yield (
            self.ratio == "sequence_mean_of_clipped" and self.surrogate != "plain",
            "a clipped mean is not clipped again",
        )
        if surrogate.ratios is not None:
            yield self.ratio not in surrogate.ratios, f"{surrogate.because}: ratio {', '.join(surrogate.ratios)}"
        yield (
            self.kl_place != "loss" and self.kl_anchor == "old",
            "in the reward the KL is that of the policy that sampled: to itself it is 0",
        )
        yield (
            self.kl == "exact" and (self.kl_place != "loss" or self.kl_anchor == "old" or self.kl_gradient != "own"),
            "the exact KL is that of the current policy to the reference, in the loss, with its own gradient",
        )
        yield self.ratio == "none" and self.kl_weight == "ratio", "kl_weight ratio needs a ratio"
        yield (
            self.kl_place != "loss" and (self.kl_weight, self.kl_gradient, self.kl_tokens) != ("none", "own", "all"),
            "in the reward the KL carries no gradient and no weight",
        )
        yield (
            self.sampler_correction == "none" and self.sampler_bound != "as_is",
            "without a sampler_correction there is no weight that sampler_bound could cut",
        )

    def _advantage_exclusions(self) -> Iterator[tuple[bool, str]]:
        per_token = self.baseline in ("given", "gae") or self.credit == "reward_to_go" or self.kl_after_baseline
        yield (
            self.baseline in ("given", "gae") and self.credit == "reward_to_go",
            f"baseline {self.baseline} has advantages of its own: credit outcome",
        )
        of_answers = self.credit == "reward_to_go" and self.baseline in BASELINES
        yield (
            per_token and self.scale not in ("none", "token_std") and not (self.scale in GROUP_SCALES and self.is_grouped),
            "advantages per token are scaled by none or token_std",
        )
        yield (
            self.scale in GROUP_SCALES and not self.is_grouped,
            f"scale {self.scale} needs a baseline of the group: R / std has no value for rewards that are all equal",
        )
        yield (
            self.credit == "reward_to_go" and not of_answers and self.reward_parts != "sum_then_normalise",
            "reward_parts normalise_then_sum gives one number per answer, and reward_to_go one per token",
        )
        yield (
            self.kl_place == "after_baseline" and self.baseline in ("given", "gae"),
            "kl_place after_baseline needs a baseline of answers",
        )
        yield (
            self.centre == "none" and self.scale not in ("batch_std", "token_std"),
            "centre none is a way of batch_std and token_std",
        )
        yield self.whiten_over == "slots" and self.scale != "token_std", "whiten_over slots is a way of token_std"
        yield (
            self.reward_clip == "after_baseline" and self.baseline in ("given", "gae"),
            "reward_clip after_baseline needs a baseline of answers",
        )

    @property
    def is_grouped(self) -> bool:
        """Whether rewards are compared within groups."""
        return self.baseline in BASELINES or self.reward_parts == "normalise_then_sum"

    @property
    def has_kl(self) -> bool:
        return self.kl != "none" and self.kl_coef != 0

    @property
    def kl_in_loss(self) -> bool:
        return self.has_kl and self.kl_place == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Subtracted from the reward, before any baseline."""
        return self.has_kl and self.kl_place == "reward" and self.baseline != "given"

    @property
    def kl_after_baseline(self) -> bool:
        return self.has_kl and self.kl_place == "after_baseline"

    @property
    def advantage_extras(self) -> tuple[str, ...]:
        """The QUIET fields of steps 1 and 2 that this row uses: who knows only the classical choices would miss them."""
        return self._extras(lambda title: title[0] in "12")

    @property
    def loss_extras(self) -> tuple[str, ...]:
        """The same of the later steps."""
        return self._extras(lambda title: title[0] not in "12")

    def _extras(self, is_wanted: Callable[[str], bool]) -> tuple[str, ...]:
        names = [name for title, step in STEPS if is_wanted(title) for name in step]
        return tuple(name for name in names if name in QUIET and getattr(self, name) != FIELDS[name].default)

    def reads(self, number: str) -> bool:
        """Whether one of the choices of this row reads the number."""
        return any(number in NUMBERS.get((field, getattr(self, field)), ()) for field in FIELDS)

    @property
    def choices(self) -> dict[str, Choice]:
        """Field -> the entry that the row has chosen."""
        return {name: field.choices[getattr(self, name)] for name, field in FIELDS.items()}

    @property
    def needs(self) -> tuple[str, ...]:
        """What this row reads of a batch, besides logps and mask.

        Two have stand-ins: without old_logps the batch is a first pass, and rewards are summed from token_level_rewards or
        rewards_per_func. A batch with gen_ arrays brings those instead of rewards and group_ids.
        """
        off = {"value_loss"} if not self.value_coef else set()
        off |= set() if self.kl_in_loss else {"kl_tokens", "kl_reduction"}
        off |= set() if self.entropy_coef else {"entropy_reduction"}
        off |= {"reward_parts"} if self.baseline in ("given", "gae") else set()
        read = {need for field, choice in self.choices.items() if field not in off for need in choice.needs}
        in_reward = self.kl_in_reward or self.kl_after_baseline
        wanted = {
            "old_logps": self.ratio != "none" or in_reward or (self.kl_in_loss and self.kl_anchor == "old"),
            "ref_logps": in_reward or (self.kl_in_loss and self.kl_anchor == "reference" and self.kl != "exact"),
            "logits": self.kl_in_loss and self.kl == "exact",
            "ref_logits": self.kl_in_loss and self.kl == "exact",
            "vpreds": self.value_loss != "none" and self.value_coef != 0,
            "entropies": self.entropy_coef != 0,
        }
        return tuple(name for name in NEEDED if wanted.get(name, False) or name in read)


# In the order in which an explanation names them.
NEEDED = (
    "old_logps", "ref_logps", "logits", "ref_logits", "advantages", "rewards", "group_ids", "rewards_per_func",
    "reward_weights", "budget", "reward_baselines", "truncated", "values", "vpreds", "entropies", "sampler_logps",
    "sampler_weights", "selected_tokens",
)  # fmt: skip
