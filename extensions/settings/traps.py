"""Which traps a set of settings walks into: the tables of traps_*.py, and the general ones about keys and batch sizes.

TRAPS is the one list. Findings come worst first; a trap whose condition cannot be asked because a value is no number is
left to the error that names the value.
"""

from __future__ import annotations

from extensions.settings.arithmetic import batch_words
from extensions.settings.meaning import ACTOR, Refused, meaning
from extensions.settings.trainers import Settings
from extensions.settings.trap import SEVERITIES, Case, Finding, Trap, number_of, said
from extensions.settings.traps_others import OTHER_TRAPS, VERL_TRAPS
from extensions.settings.traps_trl import TRL_TRAPS

TRAPS: tuple[Trap, ...] = TRL_TRAPS + VERL_TRAPS + OTHER_TRAPS
GENERAL = {12: "batch_does_not_divide", 28: "key_is_not_read", 29: "unknown_key"}
"""Number of a trap of every trainer -> its name; they need no row, so they are no entries of TRAPS."""
# Keys whose being unread has a trap of its own, which says more.
_SAID_BY_A_TRAP = (ACTOR + "clip_ratio", ACTOR + "grad_clip", "label_smoothing")
# Keys of earlier versions -> what became of them.
GONE = {
    "max_prompt_length": "earlier TRL cut prompts at it; 1.16 does not: filter long prompts out of the data set",
    "evaluation_strategy": "it is eval_strategy now",
    "rpo_alpha": 'loss_type=["sigmoid", "sft"] with loss_weights takes its place',
    "reference_free": "CPO and SimPO are the losses without a reference",
}


def findings_of(settings: Settings) -> list[Finding]:
    """Every trap, worst first. Raises ValueError (Refused, or one that names a key) where a value is none at all."""
    case = Case(settings, meaning(settings), batch_words(settings))
    made = [*_of_batch(case), *_of_keys(settings)]
    for trap in TRAPS:
        if settings.trainer.method not in trap.methods or case.row is None or not trap.when(case):
            continue
        text, number = number_of(trap, case)
        made.append(
            Finding(trap.name, said(trap.severity, case), said(trap.words, case), said(trap.change, case), trap.source, (), number, text)
        )
    if settings.trainer.method == "sb3":
        made = [finding for finding in made if finding.name != GENERAL[12]]  # its own trap says more
    return sorted(made, key=lambda finding: -SEVERITIES.index(finding.severity))


def _of_batch(case: Case) -> list[Finding]:
    return [
        Finding(GENERAL[12], "mistake" if "error" in problem else "warning", problem[0].upper() + problem[1:] + ".",
                "sizes that divide", "trl#3204, #3020, #4511; unsloth#1796; verifiers#112")
        for problem in case.words.problems
    ]  # fmt: skip


def _of_keys(settings: Settings) -> list[Finding]:
    made = []
    for key, near in settings.unknown.items():
        gone = GONE.get(key)
        words = f"{settings.trainer.title} does not have {key}" + (f": {gone}." if gone else ".")
        change = f"did you mean {near[0]}?" if near and not gone else "drop it, or look what it is called in this version"
        severity = "mistake" if near and not gone else "warning"
        made.append(Finding(GENERAL[29], severity, words + " A wrapper that filters keywords drops it without a word.", change,
                            f"defaults of {settings.trainer.package} {settings.version}; meta-r2 configuration page", (key,)))  # fmt: skip
    for key, because in settings.unread.items():
        if key in _SAID_BY_A_TRAP:
            continue
        made.append(Finding(GENERAL[28], "warning", f"{key} has no effect: {because}.", "drop it, or set what makes it read",
                            "RLinf#316", (key,)))  # fmt: skip
    return made


__all__ = ["GENERAL", "TRAPS", "Finding", "Refused", "findings_of"]
