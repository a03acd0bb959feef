"""Tell an engineer what their trainer really computed: recompute one recorded batch and name the choices and the mistakes.

    python -m extensions.audit extensions/audit/captures/trl_grpo_grpo_pass2.npz       a recorded batch of a real trainer
    python -m extensions.audit BATCH.npz --declared grpo@trl-1.16.0 --set clip_high=0.28 --set beta=0.04
    python -m extensions.audit BATCH.npz --json report.json --fail-on warning
    python -m extensions.audit recorded/step_000010/                            one step: every rank and micro-batch
    python -m extensions.audit --recipes                                        how to record such files (extensions.record)
    python -m extensions.audit --list                                           every mistake it knows, with what to change
    python -m extensions.audit --self-test                                      plants each mistake into each shipped capture
    python -m extensions.audit --self-test --damaged 10000                      damaged and hostile files instead

The report says, in this order: the batch in words; which advantage rule gives the reported advantages; which objective,
reduction and KL give the reported loss; whether the gradient agrees; then findings. Where several choices give the same
number on this batch it says "cannot tell", lists them, and says which recording would decide. Exit status: 0 clean, 1 a
finding at or above --fail-on, 2 a file or usage error (so that 1 always means a finding).

What to record. Everything is optional except what a check needs; a check that lacks an input names it. The most telling
array is `dloss_dlogps`, the gradient of the loss with respect to the token log-probabilities: many mistakes have the right
value and a wrong gradient. A loss of 0 on the first pass tells nothing; its gradient tells everything.

Names for other code: `audit(recording_from(arrays), declared, numbers)` returns a report with `as_json()`.

    from extensions.audit import audit, parse_declared, recording_from

    declared, numbers = parse_declared("grpo@trl-1.16.0", ["beta=0.04"])          # or None, {}
    report = audit(recording_from({"logps": ..., "mask": ..., "loss": ...}), declared, numbers)

From a file to a finding, floor by floor; a floor imports only the ones above it (held by test_floors.py):

    read/        the file, safely: formats, the names trainers use, shapes
    declared.py  what the user says the trainer follows: --declared, --set
    catalogue.py every finding, its severity, what to change
    search/      forms a loss may take and which of them give the loss, the gradient, the advantages, the pairs' loss
    checks/      checks without a search, and what only looks like a mistake
    say/         from matches to words and findings; the report as text and JSON
    run.py       the order of it all: audit()
    step/        the files of one step: denominators over ranks and micro-batches
    proof/       how good it is: mistakes planted, files damaged
    command.py   the command line

Same as extensions.objectives: every formula is taken from there. Left out: what its NOT_EXPRESSED lists, and combinations
of two mistakes at once.
"""

import rl_lab  # noqa: F401  (first: it answers Ctrl-C while torch loads)
from extensions.audit.declared import Declared, parse_declared
from extensions.audit.read.recording import Recording, read_recording, recording_from
from extensions.audit.run import audit
from extensions.audit.say.report import Report

__all__ = ["Declared", "Recording", "Report", "audit", "parse_declared", "read_recording", "recording_from"]
