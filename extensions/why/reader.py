"""Log lines as records {name: number}: a pasted dictionary, JSON lines, TRL's printed dictionaries, CSV, a folder of tiny_lm,
verl's console lines (key:value - key:value), stable-baselines3's table. Nothing is executed.

NAMES maps what trainers call a quantity to the one name that relations.py uses; a new trainer is its names there.
"""

from __future__ import annotations

import ast
import collections
import csv
import io
import json
import math
import re
import sys
from pathlib import Path

from rl_lab import FileProblem

MAX_BYTES = 20_000_000
MAX_LINE = 100_000
KEPT_RECORDS = 20_000  # the last ones of a longer log: a trend is read off the end

# Name here -> names in logs. TRL, verl, OpenRLHF, stable-baselines3, tiny_lm.
NAMES: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "train/loss", "actor/loss", "policy_update/loss"),
    "policy_loss": ("actor/pg_loss", "policy_loss", "train/policy_gradient_loss", "policy_gradient_loss", "act_loss"),
    "value_loss": ("critic/vf_loss", "train/value_loss", "value_loss", "critic_loss"),
    "gradient_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm", "actor_grad_norm", "gradient_norm"),
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean", "rollout/ep_rew_mean", "ep_rew_mean", "train/reward"),
    "reward_std": ("reward_std", "group_reward_std", "train/reward_std"),
    "silent_groups": ("frac_reward_zero_std",),
    "kl": ("kl", "objective/kl", "actor/kl_loss", "kl_current_reference", "train/kl", "actor/reward_kl_penalty"),
    "kl_old_current": ("actor/ppo_kl", "ppo_kl", "approx_kl", "train/approx_kl", "kl_old_current"),
    "clip_fraction": ("clip_ratio/region_mean", "clip_ratio", "actor/pg_clipfrac", "train/clip_fraction", "clip_fraction",
                      "ppo_clip_ratio"),
    "truncated_share": ("completions/clipped_ratio", "response_length/clip_ratio", "truncated_fraction", "truncated"),
    "length": ("completions/mean_length", "response_length/mean", "response_length", "completion_length"),
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss"),
    "entropy_loss": ("train/entropy_loss", "entropy_loss"),
    "explained_variance": ("train/explained_variance", "explained_variance", "critic/vf_explained_var"),
    "learning_rate": ("learning_rate", "actor/lr", "train/learning_rate", "actor_lr"),
    "accuracy": ("rewards/accuracies", "acc"),
    "margin": ("rewards/margins",),
    "chosen_reward": ("rewards/chosen", "chosen_reward"),
    "rejected_reward": ("rewards/rejected", "reject_reward"),
    "sampler_ratio": ("sampling/importance_sampling_ratio/mean", "rollout_corr/rollout_is_mean"),
    "sampler_gap": ("sampling/sampling_logp_difference/mean", "vllm_kl"),
    "advantage_mean": ("critic/advantages/mean",),
}  # fmt: skip
_NAME_OF = {theirs: ours for ours, names in NAMES.items() for theirs in names}
PART = re.compile(r"^rewards/(.+)/(mean|std)$")


def name_of(key: str) -> str | None:
    """The name here of a trainer's key; None where there is none."""
    key = key.strip()
    for candidate in (key, key.removeprefix("train/"), key.removeprefix("train_")):
        if candidate in _NAME_OF:
            return _NAME_OF[candidate]
    return None


def numbers(record: object) -> dict[str, float]:
    """What of a record is a number; text that is one counts. Nested mappings are spread with /."""
    made: dict[str, float] = {}
    pending = [("", record, 0)]
    while pending:
        prefix, node, depth = pending.pop()
        if isinstance(node, dict) and depth < 6:
            pending += [(f"{prefix}/{key}" if prefix else str(key), value, depth + 1) for key, value in reversed(node.items())]
        elif isinstance(node, (int, float)) and not isinstance(node, bool):
            made[sys.intern(prefix)] = float(node) if abs(node) < 1e300 or node != node else -math.inf if node < 0 else math.inf
        elif isinstance(node, str) and len(node) < 40:
            try:
                made[sys.intern(prefix)] = float(node)
            except ValueError:
                continue
    return made


def parse_line(line: str) -> dict[str, float]:
    """One line as a record; {} where it holds none."""
    start, end = line.find("{"), line.rfind("}")
    if 0 <= start < end:
        body = line[start : end + 1]
        body_for_python = re.sub(r"(?<=[:\s,])(nan|inf|-inf|NaN|Infinity)(?=\s*[,}])", lambda match: f"'{match[1]}'", body)
        for parse, text in ((json.loads, body), (ast.literal_eval, body_for_python)):
            try:
                return numbers(parse(text))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    # Time in proportion to the line, whatever stands in it: no pattern has two ways to share the same characters.
    before, *cells, after = [cell.strip() for cell in line.split("|")] if line.count("|") == 3 else ("", "", "")
    if len(cells) == 2 and not before + after and re.fullmatch(r"[\w/ ]+", cells[0]):  # a row of stable-baselines3's table
        return numbers({cells[0]: cells[1]}) if re.fullmatch(r"[-+.\deE]+|nan", cells[1]) else {}
    pairs = re.findall(r"(?<![\w/@.-])([A-Za-z_][\w/@.-]*)\s*[:=]\s*(?:np\.float\d+\()?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))\b", line)
    return numbers(dict(pairs))


def read_records(source: str) -> list[dict[str, float]]:
    """Records of a pasted line, a file or a folder of tiny_lm. Raises FileProblem of one line."""
    path = Path(source) if len(source) < 1_000 and "\n" not in source and "{" not in source else None
    try:
        exists = path is not None and path.exists()
    except OSError:
        exists = False
    if not exists:
        if path is not None and not re.search(r"[:=]", source):
            raise FileProblem(f"{source}: no such file, and no log line with key: value")
        text = source
    else:
        text = _text_of(path)
    if max(map(len, io.StringIO(text)), default=0) > MAX_LINE:
        raise FileProblem(f"a line has more than {MAX_LINE} characters; that is no log line")
    records = _csv_records(text) or _line_records(text)
    if not records:
        raise FileProblem("holds no number under a name: wanted a dictionary, JSON lines, CSV or key: value")
    return records


def _text_of(path: Path) -> str:
    if path.is_dir():
        files = sorted(path.glob("*.csv"))
        if not files:
            raise FileProblem(f"{path}: holds no .csv file; wanted a folder that tiny_lm wrote, or a log file")
        path = files[0]
    if not path.is_file():
        raise FileProblem(f"{path}: is no regular file")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as problem:
        raise FileProblem(f"{path}: cannot be read ({problem.strerror})") from None
    if len(raw) > MAX_BYTES:
        raise FileProblem(f"{path}: is larger than {MAX_BYTES // 10**6} MB; cut it to the lines in question")
    return raw.decode("utf-8", errors="replace")


def _csv_records(text: str) -> list[dict[str, float]]:
    head = text.lstrip().split("\n", 1)[0]
    if "{" in head or "," not in head or ":" in head or not re.fullmatch(r"[\w/@ .,\"-]+", head.strip()):
        return []
    rows = csv.DictReader(io.StringIO(text.lstrip(), newline=""))
    try:
        made = (numbers({str(key): value for key, value in row.items() if isinstance(value, str)}) for row in rows)
        return list(collections.deque(filter(None, made), maxlen=KEPT_RECORDS))
    except csv.Error as problem:  # a cell of more than 128 kB
        raise FileProblem(f"looks like CSV and is none ({problem})") from None


def _line_records(text: str) -> list[dict[str, float]]:
    made, table = collections.deque(maxlen=KEPT_RECORDS), {}
    for line in io.StringIO(text):
        record = parse_line(line)
        if line.lstrip().startswith("|"):
            table |= record
        elif record:
            made.append(record)
        elif table and line.strip().startswith("---"):
            made.append(table)
            table = {}
    if table:
        made.append(table)
    return list(made)
