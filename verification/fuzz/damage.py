"""Whole files of every kind that a command reads, and the ways to damage one.

A damage is a function (rng, bytes) -> bytes; `damaged` gives the bytes back where it does not fit them. To add one, write it
beside its relatives and into the table of its kind at the end.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import pickle
import random
import re
import struct
import warnings
import zipfile
from typing import Callable

import numpy as np
import torch

from verification.fuzz import child

SMALL_CAPTURE = 4000  # bytes: larger batches take the audit longer, not other ways
HOSTILE_NUMBERS = (
    "nan", "inf", "-inf", "NaN", "Infinity", "1e999", "-1e999", "1e308", "1e300", "1e16", "1e-400", "5e-324", "-0", "0", "-1", "2", "true",
    "null", "1" + "0" * 400, "9" * 5000, "0x10", "٣", "", '"1"', "[]", "{}", "[[1]]", "1_0", "--1", "1.5", "9223372036854775808", '"\\ud800"',
)  # fmt: skip
HOSTILE_TEXT = ('"' * 3, "[" * 3000, "{" * 3000, '{"a":' * 500, "\0", "\ufeff", "\r", "\n", "\u2028", "\\", ",", ":", "=", "#", "&a [*a, *a]", "*a",
                "!!python/object:os.system", "${x}", "$((1/0))", "$((9**9**9))", "'", "<<: *a", "- ", "\t", "|", "a" * 30000, "é漢", "\x1b[31m")  # fmt: skip

# ------------------------------------------------------------------------------------------ whole files


@functools.cache
def batches() -> dict[str, bytes]:
    """Recorded batches as .npz, .pt and .jsonl: the small captures, and what a user would make of one."""
    made = {}
    for folder in ("audit", "objectives"):
        for path in sorted((child.LAB / "extensions" / folder / "captures").glob("*.npz")):
            if path.stat().st_size <= SMALL_CAPTURE:
                made[f"{path.stem}.npz"] = path.read_bytes()
    for name in list(made)[::6]:
        with np.load(io.BytesIO(made[name])) as arrays:
            tensors = {key: torch.from_numpy(arrays[key].copy()) for key in arrays.files if arrays[key].dtype.kind in "fiub"}
        stream = io.BytesIO()
        torch.save(tensors, stream)
        made[name.replace(".npz", ".pt")] = stream.getvalue()
        made[name.replace(".npz", ".npy")] = npy(next(iter(tensors.values())).numpy())
    rows = [
        {"logps": [-0.5, -1.25, -0.1][: 3 - row % 2], "old_logps": [-0.4, -1.3, -0.1][: 3 - row % 2], "reward": float(row % 2),
         "group_ids": row // 2, "advantages": 1.0 - 2 * (row % 2), "beta": 0.04}
        for row in range(4)
    ]  # fmt: skip
    made["rows.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    pairs = [{"chosen_logps": -3.0 - p, "rejected_logps": -4.0, "ref_chosen_logps": -3.5, "ref_rejected_logps": -3.9} for p in range(3)]
    made["pairs.jsonl"] = "".join(json.dumps(pair) + "\n" for pair in pairs).encode()
    return made


TABLES = {"table.json": b"[[1, 0.2, -0.5], [-0.5, 1, 0.2]]", "large.json": json.dumps([list(range(30))] * 20).encode()}
SETTINGS = {
    "grpo.json": b'{"num_generations": 8, "beta": 0.04, "loss_type": "dapo", "per_device_train_batch_size": 4, "learning_rate": 1e-6}',
    "dpo.yaml": b"# TRL\nbeta: 0.1\nloss_type: [sigmoid, sft]\nlearning_rate: 5.0e-7\nmax_length: 1024\nbase: &b {x: 1}\nuse:\n  <<: *b\n",
    "verl.yaml": b"algorithm:\n  adv_estimator: grpo\nactor_rollout_ref:\n  actor: {clip_ratio: 0.2, ppo_mini_batch_size: 64}\n",
    "grpo.toml": b"num_generations = 8\nbeta = 0.04\n[trainer]\nlearning_rate = 1e-6\n",
    "train.py": b"from trl import GRPOConfig\nB = 0.04\nargs = GRPOConfig(beta=B, num_generations=4, **{'epsilon': 0.2})\n",
    "sb3.py": b"from stable_baselines3 import PPO\nm = PPO('MlpPolicy', make_vec_env('CartPole-v1', n_envs=8), n_steps=32, batch_size=64)\n",
    "run.sh": b"export N=8\npython -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n  actor_rollout_ref.rollout.n=$N data.x=$((2*3))\n",
    "openrlhf.sh": b"deepspeed --module openrlhf.cli.train_ppo_ray --init_kl_coef 0.01 --n_samples_per_prompt 8 --advantage_estimator group_norm\n",
}
LOGS = {
    "log.jsonl": b'{"loss": 0.0, "kl": 0.1, "reward_std": 0.3, "grad_norm": 0.1}\n{"loss": 0.2, "kl": 0.2, "clip_ratio": 0.5}\n',
    "log.csv": b"step,loss,kl,reward\n0,0.1,0.0,0.5\n1,0.2,0.1,0.6\n",
    "log.txt": b"{'loss': 0.0, 'grad_norm': nan, 'rewards/accuracies': 0.9}\nstep:1 - actor/pg_loss:0.1 - actor/ppo_kl:0.01\n"
    b"| train/ | |\n|    approx_kl | 0.01 |\n|    loss | 1.5 |\n------\n",
}
CURVES = {
    "ppo.csv": b"step,expected_reward,optimal_action_probability,entropy,kl_old_current,kl_current_reference,loss,gradient_norm\n"
    b"0,0.2,0.3,1.1,0,0,0,0\n1,0.5,0.6,0.8,0.01,0.1,-0.1,0.2\n",
    "chain.csv": b"step,expected_return,probability_state_1,value_start\n0,0.3,0.5,0\n1,0.9,0.9,0.5\n",
    "ppo.json": b'{"config": {"seed": 7, "steps": 3, "group_size": 8}, "reward_table": [[1, 0.2], [0, 1]]}',
}


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array)
    return stream.getvalue()


# ------------------------------------------------------------------------------------------ any bytes


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30)) if data else 0):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def flip_near_the_end(rng: random.Random, data: bytes) -> bytes:
    """The central directory of a zip."""
    place = max(0, len(data) - 300)
    return data[:place] + flip(rng, data[place:])


def insert(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.choice((1, 4, 100, 3000))) + data[place:]


def leave_out(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + data[place + rng.choice((1, 2, 8, 100)) :]


def repeat(rng: random.Random, data: bytes) -> bytes:
    place, length = rng.randrange(len(data) + 1), rng.choice((1, 10, 200, 2000))
    return data[:place] + data[place : place + length] * rng.choice((2, 2, 10, 300)) + data[place + length :]


def splice(rng: random.Random, data: bytes) -> bytes:
    everything = [*batches().values(), *TABLES.values(), *SETTINGS.values(), *LOGS.values(), *CURVES.values()]
    other = rng.choice(everything)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other)) :]


def noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 10, 1000, 20000)))


# ------------------------------------------------------------------------------------------ text


def _text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def other_number(rng: random.Random, data: bytes) -> bytes:
    """A number of the text becomes a hostile one."""
    text = _text(data)
    found = list(re.finditer(r"-?\d+(\.\d+)?(e-?\d+)?", text or ""))
    if not found:
        return data
    for match in sorted(rng.sample(found, min(len(found), rng.choice((1, 1, 2, 5)))), key=lambda m: -m.start()):
        text = text[: match.start()] + rng.choice(HOSTILE_NUMBERS) + text[match.end() :]
    return text.encode("utf-8", "surrogatepass")


def hostile_text(rng: random.Random, data: bytes) -> bytes:
    text = _text(data)
    if text is None:
        return data
    place = rng.randrange(len(text) + 1)
    return (text[:place] + rng.choice(HOSTILE_TEXT) + text[place:]).encode("utf-8", "surrogatepass")


def other_encoding(rng: random.Random, data: bytes) -> bytes:
    text = _text(data)
    return data if text is None else text.encode(rng.choice(("utf-16", "utf-8-sig", "utf-32", "utf-7")))


def swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines[: rng.randrange(len(lines) + 1)] + lines[: rng.choice((0, 1))])


def very_deep(rng: random.Random, data: bytes) -> bytes:
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ("(", ")"), ("- ", ""), ("a: {", "}"), ("-", ""), ("not ", "")))
    depth = rng.choice((30, 200, 3000, 100_000))
    return (opening * depth + "1" + closing * depth).encode()


def many_lines(rng: random.Random, data: bytes) -> bytes:
    """The file over and over, up to about 1 MB."""
    times = min(rng.choice((100, 3000, 50_000)), 1_000_000 // max(1, len(data)))
    return data * times


def csv_cell(rng: random.Random, data: bytes) -> bytes:
    rows = list(csv.reader(io.StringIO((_text(data) or "").replace("\0", ""))))
    if not rows or not any(rows):
        return data
    for _ in range(rng.choice((1, 1, 3))):
        row = rng.choice([row for row in rows if row])
        row[rng.randrange(len(row))] = rng.choice((*HOSTILE_NUMBERS, "step", "expected_reward", *HOSTILE_TEXT))
    if rng.random() < 0.3:
        rng.choice(rows).append("1")
    stream = io.StringIO()
    csv.writer(stream).writerows(rows)
    return stream.getvalue().encode("utf-8", "surrogatepass")


def json_value(rng: random.Random, data: bytes) -> bytes:
    """A value of the first JSON document, or of each line, becomes something else."""
    lines = data.splitlines() if data.count(b"\n") > 1 else [data]
    made = []
    for line in lines:
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            return data
        made.append(json.dumps(_changed(rng, tree) if rng.random() < 0.7 else tree))
    return "\n".join(made).encode()


def _changed(rng: random.Random, tree: object) -> object:
    others = (None, True, "text", "nan", -1, 0, 1e308, 10**400, [], {}, [1], [[1.0]], [None], {"a": 1}, float("nan"), "\ud800", "a\nb", 1.5)
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        pick = rng.random()
        if pick < 0.15:
            return {name: value for name, value in tree.items() if name != key}
        if pick < 0.25:
            return {**tree, rng.choice(("logps", "mask", "rewards", "beta", "a\nb", "", "é", "x" * 300)): tree[key]}
        return {**tree, key: _changed(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        place = rng.randrange(len(tree))
        return [*tree[:place], *([_changed(rng, tree[place])] if rng.random() < 0.8 else []), *tree[place + 1 :]]
    return rng.choice(others)


# ------------------------------------------------------------------------------------------ .npy, .npz


def _arrays(data: bytes) -> dict[str, np.ndarray] | None:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception:  # whatever numpy raises on damaged input: that is what the lab is tried with
        return None


def _npz(arrays: dict[str, np.ndarray], rng: random.Random) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.5 else zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            inner = io.BytesIO()
            np.lib.format.write_array(inner, np.asanyarray(array), allow_pickle=True)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), inner.getvalue())
    return stream.getvalue()


def of_arrays(change: Callable[[random.Random, dict[str, np.ndarray]], dict | None]) -> Callable[[random.Random, bytes], bytes]:
    @functools.wraps(change)
    def damage(rng: random.Random, data: bytes) -> bytes:
        arrays = _arrays(data)
        if not arrays:
            return data
        with np.errstate(all="ignore"):
            return _npz(change(rng, arrays), rng)

    return damage


@of_arrays
def other_dtype(rng, arrays):
    name = rng.choice(list(arrays))
    dtype = rng.choice(("f2", "f4", "f8", "f16", "i1", "u8", "i8", "?", "c8", "U5", "S3", ">f8", "O", "M8[s]", "m8", "V4"))
    return arrays | {name: arrays[name].astype(dtype)}


@of_arrays
def structured(rng, arrays):
    return arrays | {rng.choice(list(arrays)): np.zeros(3, dtype=[("a", "f8"), ("b", "i4", (2,))])}


@of_arrays
def other_shape(rng, arrays):
    name = rng.choice(list(arrays))
    value = arrays[name]
    return arrays | {
        name: rng.choice((
            lambda: value.reshape(-1), lambda: value.T, lambda: value[None], lambda: value[..., None], lambda: value[:0],
            lambda: value[:1], lambda: value[..., :0], lambda: value[:-1], lambda: np.concatenate([value, value]), lambda: value.sum(),
            lambda: np.broadcast_to(value, (2, *value.shape)), lambda: np.zeros((0, 0)), lambda: value.reshape(-1)[0],
            lambda: np.repeat(value, 30, axis=0), lambda: np.float64(0.5), lambda: np.zeros((2, 2, 2, 2, 2)),
        ))()
    }  # fmt: skip


@of_arrays
def other_values(rng, arrays):
    changed = dict(arrays)
    for name in rng.sample(list(arrays), min(len(arrays), rng.choice((1, 1, 2, 4)))):
        value = arrays[name].copy()
        if value.dtype.kind not in "fiub" or not value.size:
            continue
        flat = value.reshape(-1)
        hostile = (np.nan, np.inf, -np.inf, 1e308, -1e308, 1e300, 1e30, 5e-324, 0, -1, 1, 2, 1e9, 2**31, -(2**63), 700, -700, 1e-8)
        if rng.random() < 0.3:
            flat[:] = rng.choice(hostile) if value.dtype.kind == "f" else rng.choice((0, 1, 7, 100))
        else:
            for _ in range(rng.choice((1, 1, 3))):
                flat[rng.randrange(value.size)] = rng.choice(hostile) if value.dtype.kind == "f" else rng.choice((0, 1, 7, 100))
        changed[name] = flat.reshape(value.shape)
    return changed


@of_arrays
def scaled(rng, arrays):
    name = rng.choice([name for name, value in arrays.items() if value.dtype.kind == "f"])
    return arrays | {name: arrays[name] * rng.choice((0, -1, 2, 1e3, 1e150, 1e300, 1e-30, 1e-320))}


@of_arrays
def other_names(rng, arrays):
    name = rng.choice(list(arrays))
    value = arrays[name]
    other = rng.choice(list(arrays))
    return rng.choice((
        {key: item for key, item in arrays.items() if key != name},
        arrays | {name: arrays[other], other: value},
        arrays | {rng.choice(("per_token_logps", "old_values", "beta", "kl", "epsilon", "scores", "done", "labels", "logits")): value},
        arrays | {rng.choice(("../x", "a\nb", "x" * 200, "", "é", "a/b", "dloss_d", "dloss_dnothing", "\x1b[31m")): value},
        {name: value},
        {key: arrays[key] for key in rng.sample(list(arrays), len(arrays))},
    ))  # fmt: skip


@of_arrays
def from_another(rng, arrays):
    """An array of another batch in place of one, or beside them."""
    others = _arrays(rng.choice([data for name, data in batches().items() if name.endswith(".npz")]))
    name = rng.choice(list(others))
    return arrays | {name: others[name]}


@of_arrays
def pickled(rng, arrays):
    return arrays | {rng.choice(list(arrays)): np.array([{"a": 1}, None], dtype=object)}


@of_arrays
def much_padding(rng, arrays):
    """Zeros fold to a thousandth of their size."""
    name = rng.choice(list(arrays))
    return arrays | {name: np.zeros((rng.choice((1000, 4000)), rng.choice((1000, 2000))), dtype=rng.choice(("f4", "f8", "i1", "?")))}


def other_header(rng: random.Random, data: bytes) -> bytes:
    """The header of a .npy, alone or in an .npz, claims something else."""
    headers = (
        "{'descr': '<f8', 'fortran_order': False, 'shape': (100000, 1000000), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (2.0,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': 3, }",
        "{'descr': '<f8', 'fortran_order': 1, 'shape': (2,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '|V0', 'fortran_order': False, 'shape': (10**9,), }",
        "{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9223372036854775807, 9), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999,), }",
        "{'descr': [('a', '<f8', (100000, 100000))], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': 'nothing', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1,), 'more': 1}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1," * 70 + "), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1L, 2L), }",
        "{" * 300, "(" * 3000 + ")" * 3000, "[]", "x", "", "{'descr': '<f8'}", "__import__('os').system('true')", "{'a': 1\0}", "9" * 9000,
    )  # fmt: skip
    header = rng.choice(headers).encode()
    body = rng.choice((b"", bytes(8), bytes(16), bytes(800)))
    version = rng.choice((b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\0\0", b"\xff\xff"))
    length = struct.pack("<H" if version == b"\1\0" else "<I", len(header) if rng.random() < 0.8 else rng.randrange(2**15))
    made = b"\x93NUMPY" + version + length + header + body
    arrays = _arrays(data)
    if arrays is None:
        return made
    stream = io.BytesIO(data)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr(rng.choice((f"{rng.choice(list(arrays))}.npy", "mask.npy", "logps.npy", "loss.npy")), made)
    return stream.getvalue()


def strange_zip(rng: random.Random, data: bytes) -> bytes:
    """Members that are no arrays, that come twice, that unfold a thousandfold, that are packed in another way."""
    stream = io.BytesIO(data if zipfile.is_zipfile(io.BytesIO(data)) else b"")
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    try:
        with zipfile.ZipFile(stream, "a" if stream.getvalue() else "w", method) as archive:
            name = rng.choice(("mask.npy", "logps.npy", "readme.txt", "folder/", "data.pkl", "../../x.npy", "logps", ".npy", "a\nb.npy"))
            content = rng.choice((b"", b"text", bytes(30_000_000), npy(np.ones((2, 3))), rng.randbytes(100)))
            archive.writestr(name, content)
    except (zipfile.BadZipFile, ValueError, OSError):
        return data
    return stream.getvalue()


def lying_zip(rng: random.Random, data: bytes) -> bytes:
    """A field of the central directory says something else: size, method, encryption, where a member begins."""
    place = data.find(b"PK\1\2", rng.randrange(max(1, len(data))))
    if place < 0:
        place = data.find(b"PK\1\2")
    if place < 0 or place + 46 > len(data):
        return data
    at, value = rng.choice((
        (24, struct.pack("<I", rng.choice((0, 1, 10**9, 2**32 - 1)))), (20, struct.pack("<I", rng.choice((0, 1, 2**31)))),
        (10, struct.pack("<H", rng.choice((0, 8, 9, 12, 14, 99)))), (8, struct.pack("<H", rng.choice((1, 8, 0x41, 0x800)))),
        (42, struct.pack("<I", rng.choice((0, 1, 10**9)))), (28, struct.pack("<H", rng.choice((0, 5, 60000)))), (6, b"\xff\xff"),
    ))  # fmt: skip
    return data[: place + at] + value + data[place + at + len(value) :]


# ------------------------------------------------------------------------------------------ .pt


class _Runs:
    """Unpickled, it would run a command."""

    def __reduce__(self):
        return print, ("run",)


def other_index(rng: random.Random, data: bytes) -> bytes:
    """A .pt whose data.pkl builds something else than a dict of tensors."""
    itself: list = []
    itself.append(itself)
    shared: object = [0.5] * 60
    for _ in range(4):
        shared = [shared] * 60
    value = rng.choice((
        {"logps": shared}, {"logps": itself}, {"logps": [[0.5] * 1000] * 1000}, {"logps": _Runs()}, _Runs(), [1, 2], None, {1: 2, None: 3},
        {"logps": "x" * 100_000}, {"logps": 10**400}, {"logps": [10**30]}, {"logps": [[1, 2], [3]]}, {"logps": ["a", 1]}, {"mask": {1, 2}},
        {"logps": [[[[[0.5]]]]]}, {"logps": 1 + 2j}, {"a\nb": 1.0}, {"logps": []}, {"logps": [True, None]}, {"logps": b"bytes"},
        {"logps": {"deeper": 1}}, {"beta": 0.5, "logps": [[-0.5, -1.0]], "mask": [[1, 1]], "advantages": [1.0]}, {"loss": float("nan")},
        {f"n{i}": i for i in range(3000)}, {"logps": np.float64(0.5)}, {"logps": [list(range(300))] * 300},
    ))  # fmt: skip
    return _with_index(pickle.dumps(value, protocol=rng.choice((0, 2, 4))))


def _with_index(index: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", index)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        for name, content in (storages or {}).items():
            archive.writestr(f"archive/data/{name}", content)
    return stream.getvalue()


def strange_tensor(rng: random.Random, data: bytes) -> bytes:
    """Tensors that torch.save writes and few expect: views, other dtypes, other layouts, numbers beside them."""
    with torch.no_grad():
        value = rng.choice((
            lambda: torch.zeros(1).expand(100_000, 10_000), lambda: torch.ones(3, 2).t(), lambda: torch.ones(2, 3).to_sparse(),
            lambda: torch.ones(2, 3, dtype=torch.complex64), lambda: torch.ones(2, 3).to(torch.float8_e4m3fn), lambda: torch.ones(2, 3).bfloat16(),
            lambda: torch.ones((), dtype=torch.uint16), lambda: torch.empty(0, 5), lambda: torch.nn.Parameter(torch.ones(2)),
            lambda: torch.arange(12.0)[::2], lambda: torch.ones(2, 3, device="meta"), lambda: torch.ones(1, 1, 1, 1, 1, 1),
            lambda: torch.full((2, 3), float("nan")), lambda: torch.tensor(True), lambda: torch.zeros(3).as_strided((2, 2), (0, 1)),
        ))()  # fmt: skip
        stream = io.BytesIO()
        try:
            others = {"mask": torch.ones(2, 3, dtype=torch.bool), "advantages": torch.tensor([1.0, -1.0]), "old_logps": torch.zeros(2, 3)}
            torch.save({rng.choice(("logps", "mask", "loss", "beta", "rewards")): value, **(others if rng.random() < 0.5 else {})}, stream)
        except (RuntimeError, NotImplementedError):
            return data
    return stream.getvalue()


def index_opcodes(rng: random.Random, data: bytes) -> bytes:
    """Opcodes of the index thrown about."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            content = {member.filename: archive.read(member) for member in archive.infolist()}
    except Exception:  # damaged already
        return data
    name = next((name for name in content if name.endswith("data.pkl")), None)
    if name is None:
        return data
    index = content[name]
    pieces = (b"(", b"]", b"}", b"2" * 50, b"0", b"h\0", b"q\1", b"\x85", b"t", b"l", b"N", b"R", b"b", b"Q", b"a", b"e", b"u", b"s",
              b"cos\nsystem\n", b"\x8c\3abcX", b"J\xff\xff\xff\x7f", b"\x8a\xff" + b"\xff" * 255, b"G" + b"\x7f\xf8" + bytes(6), b"(ll" * 300)  # fmt: skip
    for _ in range(rng.choice((1, 1, 3))):
        place = rng.randrange(len(index) + 1)
        index = index[:place] + rng.choice(pieces) + index[place + rng.choice((0, 1, 2)) :]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for member, body in content.items():
            archive.writestr(member, index if member == name else body)
    return stream.getvalue()


# ------------------------------------------------------------------------------------------ tables

OF_BYTES = (cut, flip, flip_near_the_end, insert, leave_out, repeat, splice, noise)
OF_TEXT = (other_number, other_number, hostile_text, other_encoding, swap_lines, very_deep, many_lines)
OF_JSON = (json_value, json_value)
OF_CSV = (csv_cell, csv_cell)
OF_NPZ = (
    other_dtype, structured, other_shape, other_shape, other_values, other_values, other_values, scaled, other_names, other_names,
    from_another, pickled, much_padding, other_header, strange_zip, lying_zip,
)  # fmt: skip
OF_PT = (other_index, other_index, strange_tensor, index_opcodes, lying_zip, strange_zip)
DAMAGES = {one.__name__: one for one in (*OF_BYTES, *OF_TEXT, *OF_JSON, *OF_CSV, *OF_NPZ, *OF_PT)}
BY_SUFFIX = {  # what is usual for a file of this name; any of OF_BYTES goes with each
    ".npz": OF_NPZ, ".npy": (other_header,), ".pt": OF_PT, ".jsonl": OF_TEXT + OF_JSON, ".json": OF_TEXT + OF_JSON,
    ".csv": OF_TEXT + OF_CSV,
}  # fmt: skip


def damages_for(suffix: str) -> tuple[Callable, ...]:
    return BY_SUFFIX.get(suffix, OF_TEXT)


def damaged(name: str, seed: int, data: bytes) -> bytes:
    """The bytes after one damage; unchanged where it does not fit (no such axis, or an earlier damage left no archive)."""
    try:
        with warnings.catch_warnings():  # a member of a zip that comes twice is meant
            warnings.simplefilter("ignore")
            return DAMAGES[name](random.Random(seed), data)
    except Exception:  # numpy, zipfile and torch raise whatever they like on such input
        return data
