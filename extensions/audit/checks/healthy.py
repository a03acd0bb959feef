"""What only looks like a mistake, and what logs of pairs say."""

from __future__ import annotations

import numpy as np

from extensions.audit.catalogue import Finding, finding
from extensions.audit.read.recording import Recording
from extensions.audit.tolerance import NOTHING


# ------------------------------------------------------------------------------------------ not a mistake


def not_mistakes(recording: Recording, result, has_gradient: bool) -> list[Finding]:
    """A loss of 0: healthy, or without a signal. Says why it is fine."""
    if not result.zero or "logps" not in recording.arrays:
        return []
    a, mask = recording.arrays, recording.arrays["mask"]
    A = a.get("advantages")
    if A is None:
        return []
    if has_gradient:
        norm = float(np.linalg.norm(a["dloss_dlogps"])) if "dloss_dlogps" in a else 0.0
        size = f"The gradient has norm {norm:.4g}"
    else:
        # Without a recorded gradient: what the first match would send back.
        norm = float(np.abs(A).max())
        size = f"No gradient recorded; advantages reach {norm:.4g}"
    if norm > NOTHING:
        return [finding("loss_zero_healthy", "note", f"{size}; advantages sum to {float(np.sum(A)):.2g}.", advice="")]
    if not np.abs(A).max() > 0:
        return [
            finding(
                "no_signal",
                "note",
                f"{size}; all {mask.shape[0]} advantages are 0.",
                advice="watch the share of groups with spread",
            )
        ]
    return []


def pair_findings(recording: Recording, result) -> list[Finding]:
    """Margins and accuracy as logged, and the cases that only look wrong."""
    out = []
    margins, beta = result.margins, result.beta
    reported, accuracy = recording.number("margin"), recording.number("accuracy")
    if margins is not None and len(margins):
        mean = float(margins.mean())
        if reported is not None and mean:
            factor = reported / mean
            if beta and abs(factor - beta * beta) <= 1e-4 * beta * beta and beta != 1:
                out.append(
                    finding(
                        "beta_twice",
                        "mistake",
                        f"The logged margin {reported:.6g} is beta squared ({beta * beta:g}) times the mean "
                        f"log-ratio margin {mean:.6g}.",
                    )
                )
        share = float((margins > 0).double().mean())
        if (accuracy if accuracy is not None else share) < 0.5 and bool((margins != 0).any()):
            out.append(
                finding(
                    "low_accuracy",
                    "warning" if share == 0 and len(margins) > 3 else "note",
                    f"{100 * share:.0f} % of {len(margins)} margins are positive."
                    + (f" Reported accuracy {accuracy:g}." if accuracy is not None else ""),
                    np.flatnonzero((margins <= 0).numpy()),
                )
            )
        if not bool((margins != 0).any()) and not any(m.mistakes for m in result.mistakes):
            out.append(
                finding(
                    "loss_zero_healthy",
                    "note",
                    "Every margin is 0: policy and reference are equal, as at the first step (loss log 2 for DPO). "
                    "At a later step the reference would be live.",
                    advice="record a later step to be sure that the reference is frozen",
                )
            )
    if result.prompt_cancels:
        out.append(
            finding("prompt_cancels", "note", "Margins over prompt and answer equal those over the answer.", advice="")
        )
    return out
