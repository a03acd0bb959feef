"""One verdict per recorded quantity: fits, does not fit, not compared; and why."""

from __future__ import annotations

from extensions.audit.read.recording import Recording
from extensions.audit.say.report import Report

FITS, DIFFERS, NOT_COMPARED = "fits", "does not fit", "not compared"
GIVEN = "taken as given: what is compared is made from it"
ABOUT = {
    "advantages": ("advantage", "baseline", "std", "group", "whitening", "score_on", "rewards_one", "flag", "bootstrap"),
    "kl": ("kl_",),
    "clip_fraction": ("clip_fraction",),
    "accuracy": ("accuracy",),
}
"""Quantity -> parts of names of the findings that contradict it."""


def quantity_verdicts(recording: Recording, report: Report) -> dict[str, dict]:
    made = {}
    for name in [*recording.arrays, *recording.numbers]:
        verdict, why = _verdict(name, report)
        made[name] = {"verdict": verdict, "why": why}
    for name in recording.unread:
        used = report.reading is not None and name in str(report.reading.get("weight"))
        made[name] = {"verdict": FITS if used else NOT_COMPARED, "why": "a factor of the gradient" if used else "no check knows this name"}
    return made


def _verdict(name: str, report: Report) -> tuple[str, str]:
    against = [f.name for f in report.findings if f.severity != "note" and any(part in f.name for part in ABOUT.get(name, ()))]
    if against:
        return DIFFERS, f"see {against[0]}"
    read = report.reading or {}
    if name == "loss":
        return _of_loss(report, read)
    if name.startswith("dloss_d"):
        agrees = report.gradient.get("agrees")
        if agrees or read.get("complete"):
            return FITS, "every token is accounted for" if read.get("complete") else "the best match has this gradient"
        if agrees is False:
            return DIFFERS, "no right computation of the table has it; see the findings"
        return NOT_COMPARED, "nothing to compare it with"
    if name in ("advantages", "returns"):
        if report.advantages.get("matches"):
            return FITS, "a rule of the table gives them"
        return (DIFFERS, "see the findings") if "not_reproduced" in report.named() and report.advantages.get("tried") else (
            NOT_COMPARED, "nothing to compute them from, or no rule gives them")
    if name in ("kl", "clip_fraction", "accuracy", "margin", "reported_entropy_loss"):
        lines = " ".join(report.lines.get("metrics", []))
        return (FITS, "recomputed") if name.split("_")[0] in lines else (NOT_COMPARED, "what it averages over is not recorded")
    return NOT_COMPARED, GIVEN


def _of_loss(report: Report, read: dict) -> tuple[str, str]:
    if read.get("value_agrees"):
        return FITS, "predicted from what the gradient says"
    if report.loss.get("matches"):
        return FITS, "the best match gives this value"
    if report.loss.get("with_a_mistake"):
        return DIFFERS, "only a computation with a mistake gives it; see the findings"
    if "not_reproduced" in report.named():
        return DIFFERS, "nothing that was tried gives it"
    return NOT_COMPARED, "nothing to compute it from"
