"""Reading a recorded batch safely: formats, the names trainers use, shapes and dtypes.

Nothing is executed: an .npz member that holds Python objects is refused, a .pt file is loaded with weights_only and only
after its list of names has been looked through, and no size that a file claims is believed before it is compared with
what the file holds. Memory stays proportional to the file: arrays that would take more than 24 times its size (plus 8 MB)
are refused, counted as the numbers of 8 bytes that they become here.

`read_recording(path)` returns a Recording: canonical names (`ALIASES`), float64, bool and int64 arrays, plain numbers.
Every problem is a rl_lab.FileProblem of one line that says what was found, what was wanted and the likely cause.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import pickletools
import tokenize
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rl_lab import FileProblem

# Canonical name -> other names that trainers use for the same array. Also the list that --help prints.
ALIASES: dict[str, tuple[str, ...]] = {
    # per token, (N, T)
    "logps": ("per_token_logps", "log_prob", "log_probs", "action_log_probs", "token_logps"),
    "old_logps": ("old_per_token_logps", "old_log_probs", "old_log_prob", "old_action_log_probs", "logprobs_old"),
    "ref_logps": ("ref_per_token_logps", "ref_log_prob", "ref_log_probs", "base_action_log_probs"),
    "mask": ("completion_mask", "response_mask", "action_mask", "loss_mask"),
    "attention_mask": (),
    "tool_mask": (),
    "completion_ids": ("responses", "response_ids"),
    "input_ids": (),
    "token_level_rewards": (),
    "token_level_scores": (),
    "values": ("old_values",),
    "vpreds": ("value_preds", "new_values"),
    "returns": ("value_targets",),
    "entropies": ("entropy", "token_entropies"),
    "loss_mat": ("per_token_loss", "token_losses"),
    "dloss_dlogps": ("grad_logps", "logps_grad", "dloss_dlog_prob"),
    "dloss_dvpreds": (),
    "dloss_dentropies": (),
    "dloss_dloss_mat": (),
    "dkl_dlogps": (),
    "logits": (),
    "ref_logits": (),
    # per answer, (N,)
    "advantages": (),
    "advantages_raw": (),
    "rewards": ("scores", "reward"),
    "rewards_per_func": (),
    "reward_weights": (),
    "reward_baselines": (),
    "group_ids": ("uid", "uids", "prompt_index", "index"),
    "prompt_lengths": ("prompt_lens",),
    "lengths": ("completion_lengths", "response_lengths", "response_length"),
    "row_truncated": ("is_truncated",),
    "micro_batch_ids": ("micro_batch", "microbatch_ids"),
    "seq_logps": ("sequence_logps",),
    "ref_seq_logps": (),
    # the generation batch a micro-batch was cut from
    "gen_rewards": (),
    "gen_rewards_per_func": (),
    "gen_group_ids": (),
    "gen_advantages": (),
    "gen_lengths": (),
    "gen_kl": (),
    "row_ids": (),
    # environments: (T, E) beside last_values, else (..., T)
    "terminated": ("terminations",),
    "truncated": ("truncations",),
    "boundary": ("done", "dones"),
    "next_values": (),
    "episode_starts": (),
    "last_values": (),
    "last_dones": (),
    "terminal_values": ("final_values",),
    "env_rewards": (),
    "discounts": (),
    "reset_rows": ("autoreset", "is_autoreset"),
    "ratio": ("rho", "ratios"),
    "dloss_dratio": ("dloss_drho",),
    # pairs, (P,)
    "chosen_logps": ("policy_chosen_logps", "chosen_seq_logps"),
    "rejected_logps": ("policy_rejected_logps", "rejected_seq_logps"),
    "ref_chosen_logps": ("reference_chosen_logps",),
    "ref_rejected_logps": ("reference_rejected_logps",),
    "chosen_lengths": (),
    "rejected_lengths": (),
    "dloss_dchosen_logps": (),
    "dloss_drejected_logps": (),
    "labels": (),
    "kl_seq_logps": (),
    "ref_kl_seq_logps": (),
    "accuracy": ("rewards/accuracies", "accuracies"),
    "margin": ("rewards/margins", "margins"),
    # reported numbers and settings
    "loss": ("pg_loss",),
    "kl": ("approx_kl", "mean_kl"),
    "clip_fraction": ("clip_ratio/region_mean", "clip_ratio", "actor/pg_clipfrac", "train/clip_fraction", "pg_clipfrac"),
    "reported_entropy_loss": ("entropy_loss",),
    "beta": ("kl_coef",),
    "clip_low": ("epsilon", "epsilon_low", "clip_ratio_low", "clip_range"),
    "clip_high": ("epsilon_high", "clip_ratio_high"),
    "ratio_cap": ("delta", "clip_ratio_c"),
    "value_clip": ("clip_range_vf", "cliprange_value", "value_clip_range"),
    "num_items_in_batch": ("batch_num_tokens",),
    "global_batch_size": ("window_rows",),
    "accumulation_steps": ("gradient_accumulation_steps", "current_gradient_accumulation_steps"),
    "world_size": ("num_processes", "dp_size"),
    "steps_per_generation": (),
    "budget": ("max_completion_length", "loss_scale_factor"),
    "temperature": (),
    "top_k": (),
    "eos_id": ("eos_token_id",),
    "pad_id": ("pad_token_id",),
    "gamma": (),
    "lam": ("gae_lambda", "lmbda", "lambda_"),
    "pass_index": ("pass", "epoch_of_batch", "pass_over_generation"),
    # logs
    "log_steps": (),
    "log_values": (),
    "log_windows": (),
    "logged_mean": (),
}
CANONICAL = {other: name for name, others in ALIASES.items() for other in (name, *others)}

NUMBERS = (
    "loss beta clip_low clip_high ratio_cap value_clip num_items_in_batch global_batch_size accumulation_steps world_size "
    "steps_per_generation budget temperature top_k pad_id gamma lam pass_index logged_mean reported_entropy_loss "
    "clip_fraction accuracy margin"
).split()
"""Names of single numbers; `kl` may be a number or an array, `eos_id` a number or a list."""
FLAGS = (
    "mask",
    "attention_mask",
    "tool_mask",
    "terminated",
    "truncated",
    "boundary",
    "row_truncated",
    "labels",
    "episode_starts",
    "last_dones",
    "reset_rows",
)
WHOLE = (
    "completion_ids",
    "input_ids",
    "group_ids",
    "prompt_lengths",
    "lengths",
    "micro_batch_ids",
    "gen_group_ids",
    "gen_lengths",
    "row_ids",
    "chosen_lengths",
    "rejected_lengths",
    "log_steps",
    "log_windows",
    "eos_id",
)
TOKEN_ARRAYS = (
    "logps",
    "old_logps",
    "ref_logps",
    "mask",
    "token_level_rewards",
    "token_level_scores",
    "vpreds",
    "returns",
    "entropies",
    "loss_mat",
    "dloss_dlogps",
    "dloss_dvpreds",
    "dloss_dentropies",
    "dloss_dloss_mat",
    "dkl_dlogps",
    "values",
    "tool_mask",
)
ROW_ARRAYS = (
    "rewards",
    "reward_baselines",
    "group_ids",
    "prompt_lengths",
    "lengths",
    "row_truncated",
    "micro_batch_ids",
    "row_ids",
    "seq_logps",
    "ref_seq_logps",
)

NOT_NEEDED = ("prompt_ids", "prompt_mask", "prompts", "actions", "backward_dlogps", "old_seq_logps", "dloss_dseq_logps")
"""Names that recordings often hold and no check reads."""

SUFFIXES = (".npz", ".pt", ".safetensors", ".jsonl")


@dataclass
class Recording:
    """One recorded batch under canonical names.

    arrays: float64, bool or int64; numbers: single numbers; eps: the spacing of the trainer's own arithmetic at 1, from
    the dtype of what it reported; renamed: name in the file -> canonical; unread: names nothing here reads; remarks:
    what was assumed.
    """

    arrays: dict[str, np.ndarray]
    numbers: dict[str, float]
    eps: float
    renamed: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    low_precision: dict[str, str] = field(default_factory=dict)  # arrays stored below float32

    def __contains__(self, name: str) -> bool:
        return name in self.arrays or name in self.numbers

    def get(self, name: str):
        return self.arrays.get(name)

    def number(self, name: str, default: float | None = None) -> float | None:
        return self.numbers.get(name, default)


def read_recording(path: Path) -> Recording:
    """A recorded batch from .npz, .pt, .safetensors or .jsonl. Raises rl_lab.FileProblem."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise FileProblem(f"{path}: not a regular file; wanted {', '.join(SUFFIXES)}")
    except OSError as problem:
        raise FileProblem(f"{path}: {problem.strerror}") from problem
    except ValueError as problem:
        raise FileProblem(f"{path!s}: not a usable file name ({problem})") from problem
    if size == 0:
        raise FileProblem(f"{path}: empty file; was the recording interrupted?")
    readers = {".npz": _read_npz, ".pt": _read_pt, ".safetensors": _read_safetensors, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise FileProblem(f"{path}: suffix {path.suffix or '(none)'!r} is not known; wanted one of {', '.join(SUFFIXES)}")
    try:
        raw = reader(path, size)
    except FileProblem as problem:
        raise FileProblem(f"{path}: {problem}") from problem
    except MemoryError as problem:
        raise FileProblem(f"{path}: does not fit into memory") from problem
    except OSError as problem:
        raise FileProblem(f"{path}: {problem.strerror or 'cannot be read'}") from problem
    try:
        _check_size(raw, size)
        return recording_from(raw)
    except FileProblem as problem:
        raise FileProblem(f"{path}: {problem}") from problem


# ------------------------------------------------------------------------------------------ formats


def _limit(size: int) -> int:
    """Bytes that a file of this size may become. Zeros of padding fold to a tenth; float32 doubles on reading."""
    return 8 * 2**20 + 24 * size


def _check_size(raw: dict[str, np.ndarray | torch.Tensor], size: int) -> None:
    """Raise FileProblem for arrays far larger than their file: a compressed bomb, or a view repeated without end."""

    def bytes_here(value: np.ndarray | torch.Tensor) -> int:
        cells = value.numel() if isinstance(value, torch.Tensor) else value.size
        is_flag = value.dtype in (torch.bool, np.dtype(bool))
        return cells * (1 if is_flag else max(8, value.dtype.itemsize))

    needed = sum(map(bytes_here, raw.values()))
    if needed > _limit(size):
        raise FileProblem(f"{size} bytes would become {needed}, wanted at most {_limit(size)}; refused")


_ZIP_PROBLEMS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    RuntimeError,
    NotImplementedError,
    SyntaxError,
    RecursionError,
    AttributeError,
    UnicodeError,
    tokenize.TokenError,
)
"""What zipfile and the .npy header parser raise on damaged input (lzma's and bz2's own errors are OSError and EOFError)."""


def _open_zip(path: Path, size: int) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(path)
    except _ZIP_PROBLEMS as problem:
        raise FileProblem("not a whole zip archive; truncated, or another format under this suffix") from problem
    unfolded = sum(max(member.file_size, 0) for member in archive.infolist())
    if unfolded > _limit(size):
        archive.close()
        raise FileProblem(f"would unfold from {size} to {unfolded} bytes; refused")
    return archive


def _read_npz(path: Path, size: int) -> dict[str, np.ndarray]:
    with _open_zip(path, size) as archive:
        arrays = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            try:
                with archive.open(member) as stream:
                    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise FileProblem(f"{name!r} is compressed in a way numpy does not write")
                    arrays[name] = _npy_array(name, stream.read())
            except FileProblem:
                raise
            except _ZIP_PROBLEMS as problem:
                raise FileProblem(f"array {name!r} is damaged or not in .npy form") from problem
    return arrays


def _npy_array(name: str, data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read_header is None:
        raise FileProblem(f"array {name!r}: .npy version {version}, wanted 1.0 or 2.0")
    shape, fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise FileProblem(f"array {name!r} holds Python objects; they are never unpickled: store numbers or strings")
    count = math.prod(shape)
    start = stream.tell()
    if any(extent < 0 for extent in shape) or count * dtype.itemsize != len(data) - start:
        raise FileProblem(
            f"array {name!r}: its header claims shape {shape} of {dtype}, its data are {len(data) - start} bytes"
        )
    if count and not dtype.itemsize:
        raise FileProblem(f"array {name!r}: dtype {dtype} holds nothing")
    return np.frombuffer(data, dtype, count, start).reshape(shape, order="F" if fortran else "C")


_PT_NAMES = {
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    "torch.serialization _get_layout",
    *(f"torch {kind}Storage" for kind in "Float Double Half BFloat16 Long Int Short Char Byte Bool".split()),
}


def _read_pt(path: Path, size: int) -> dict[str, np.ndarray]:
    with _open_zip(path, size) as archive:
        try:
            records = {member.filename: member.file_size for member in archive.infolist()}
            pickles = [name for name in records if name.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                raise FileProblem("not a file of torch.save (no data.pkl inside), or one from before PyTorch 1.6")
            claimed = _look_through(archive.read(pickles[0]))
        except FileProblem:
            raise
        except _ZIP_PROBLEMS as problem:
            raise FileProblem("damaged: its index cannot be read") from problem
    folder = pickles[0].removesuffix("data.pkl") + "data/"
    for key, nbytes in claimed:
        if records.get(folder + key) != nbytes:
            raise FileProblem(f"storage {key!r} is {records.get(folder + key)} bytes, and the index claims {nbytes}")
    try:
        loaded = torch.load(path, weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as problem:  # the loader raises whatever its C++ half meets; every kind means the same here
        raise FileProblem(
            "cannot be loaded as plain tensors (weights_only); damaged, or it holds other objects"
        ) from problem
    if not isinstance(loaded, dict):
        raise FileProblem(f"holds a {type(loaded).__name__}, wanted a dict of name: tensor")
    arrays = {}
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                raise FileProblem(f"tensor {name!r} has layout {value.layout}, wanted a dense one")
            arrays[str(name)] = value.detach()
        elif isinstance(value, (bool, int, float)):
            arrays[str(name)] = np.asarray(value)
        elif isinstance(value, (list, tuple)) and len(value) <= size:
            try:
                arrays[str(name)] = np.asarray(value)
            except (ValueError, OverflowError) as problem:
                raise FileProblem(f"{name!r}: a list that is no array of numbers or strings") from problem
    return arrays


_STORAGE_BYTES = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
    "Byte": 1,
    "Bool": 1,
}


def _look_through(data: bytes) -> list[tuple[str, int]]:
    """Storages that a torch index claims, (key, bytes). Reads the opcodes without running them.

    Raises FileProblem for any name outside _PT_NAMES, so that what the loader is given can only build plain tensors.
    """
    claimed: list[tuple[str, int]] = []
    pushed: list[object] = []  # what the last opcodes left on the stack, names and numbers only
    memo: dict[int, object] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"):
                raise FileProblem("its index builds objects: only plain tensors are loaded, nothing is run")
            if opcode.name == "GLOBAL" and argument not in _PT_NAMES:
                raise FileProblem(f"its index calls for {argument}: only plain tensors are loaded, nothing is run")
            if opcode.name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[argument] = pushed[-1] if pushed else None
            elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
                pushed.append(memo.get(argument))
            elif opcode.name == "BINPERSID":
                # The tuple ("storage", type, key, device, number of elements) has just been built.
                marker, kind, key, _, elements = [value for value in pushed[-6:] if value is not None][-5:]
                size = _STORAGE_BYTES[kind.removeprefix("torch ").removesuffix("Storage")]
                if marker != "storage" or not isinstance(elements, int):
                    raise FileProblem("its index names a storage in an unknown way")
                claimed.append((key, elements * size))
            elif isinstance(argument, (str, int)) and opcode.name != "PROTO":
                pushed.append(argument)
            elif opcode.name == "TUPLE":
                pushed.append(None)  # so that a PUT after it does not remember the last number
    except FileProblem:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, pickle.UnpicklingError, OverflowError) as problem:
        raise FileProblem("its index is damaged, or names a storage in an unknown way") from problem
    return claimed


def _read_safetensors(path: Path, size: int) -> dict[str, np.ndarray]:
    try:
        from safetensors.torch import load_file
    except ImportError as problem:
        raise FileProblem("reading .safetensors needs the package safetensors; or record an .npz file") from problem
    try:
        return dict(load_file(path))
    except MemoryError:
        raise
    except Exception as problem:  # the package's own error type, and what its compiled half raises
        raise FileProblem("not a whole .safetensors file") from problem


def _read_jsonl(path: Path, size: int) -> dict[str, np.ndarray]:
    rows, shared = [], {}
    with open(path, encoding="utf-8", errors="strict") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise FileProblem(f"line {number}: got {type(entry).__name__}, wanted an object with one response")
                for name in [name for name in entry if CANONICAL.get(name) in (*NUMBERS, "eos_id") or name == "kl"]:
                    value = entry.pop(name)
                    if name == "kl" and isinstance(value, list):
                        entry[name] = value
                    elif shared.setdefault(name, value) != value:
                        raise FileProblem(
                            f"line {number}: {name} is {value!r}, and {shared[name]!r} on an earlier line; it "
                            "belongs to the batch, not to a response"
                        )
                if entry:
                    rows.append((number, entry))
        except (ValueError, RecursionError) as problem:
            raise FileProblem(f"not JSON lines ({_short(problem)})") from problem
    if not rows and not shared:
        raise FileProblem("no response in it")
    arrays = {name: _json_array(name, value) for name, value in shared.items()}
    names = dict.fromkeys(name for _, entry in rows for name in entry)
    for name in names:
        arrays[name] = _json_column(name, [(number, entry.get(name)) for number, entry in rows])
    token_names = [n for n in names if arrays[n].ndim == 2]
    if token_names and not any(CANONICAL.get(name) == "mask" for name in names):
        first = next((n for n in token_names if CANONICAL.get(n) == "logps"), token_names[0])
        lengths = np.array([len(entry.get(first) or ()) for _, entry in rows])
        arrays["mask"] = np.arange(arrays[first].shape[1]) < lengths[:, None]
    return arrays


def _json_array(name: str, value) -> np.ndarray:
    try:
        made = np.asarray(value, dtype=None if value is not None else float)
    except (ValueError, OverflowError) as problem:
        raise FileProblem(f"{name}: wanted a number or a list of numbers") from problem
    if made.dtype.hasobject:
        raise FileProblem(f"{name}: wanted a number or a list of numbers")
    return made


def _json_column(name: str, cells: list[tuple[int, object]]) -> np.ndarray:
    """One column of the lines: numbers or strings give (N,), lists are padded on the right to (N, T)."""
    missing = [number for number, value in cells if value is None]
    if any(isinstance(value, list) for _, value in cells):
        wrong = [number for number, value in cells if not isinstance(value, list)]
        if wrong:
            raise FileProblem(f"line {wrong[0]}: {name} is no list, and it is one on other lines")
        width = max(len(value) for _, value in cells)
        filled = sum(len(value) for _, value in cells)
        if len(cells) * width > 1_000_000 + 64 * filled:
            raise FileProblem(
                f"{name}: one response is {width} long and most are short: padding would need {len(cells) * width} slots"
            )
        table = np.full((len(cells), width), np.nan)
        for row, (number, value) in enumerate(cells):
            if any(item is not None and (isinstance(item, str) or not isinstance(item, (int, float))) for item in value):
                raise FileProblem(f"line {number}: {name} holds something that is not a number")
            try:
                table[row, : len(value)] = [math.nan if item is None else item for item in value]
            except OverflowError as problem:
                raise FileProblem(f"line {number}: {name} holds a number that is too large") from problem
        return table
    if missing and CANONICAL.get(name) != "rewards":
        raise FileProblem(f"line {missing[0]}: {name} is missing, and it is there on other lines")
    values = [math.nan if value is None else value for _, value in cells]
    if all(isinstance(value, str) for value in values):
        return np.array(values)
    if any(not isinstance(value, (int, float)) for value in values):
        raise FileProblem(f"{name}: wanted a number, a string or a list of numbers on every line")
    try:
        return np.array(values) if all(isinstance(v, int) for v in values) else np.array(values, dtype=float)
    except OverflowError as problem:
        raise FileProblem(f"{name}: holds a number that is too large") from problem


def _short(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:100] or type(problem).__name__


# ------------------------------------------------------------------------------------------ names, dtypes, shapes

_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def recording_from(raw: dict[str, np.ndarray | torch.Tensor]) -> Recording:
    """Arrays under the names of a trainer -> a Recording: canonical names, float64, bool, int64, shapes checked.

    Raises rl_lab.FileProblem for an array that cannot be what its name says.
    """
    named: dict[str, np.ndarray] = {}
    renamed, unread, dtypes = {}, [], {}
    # A canonical name wins over its other names, whatever their order in the file.
    for name in sorted(raw, key=lambda n: (n not in ALIASES, n)):
        canonical = CANONICAL.get(name)
        if canonical is None or canonical in named:
            if name not in NOT_NEEDED:
                unread.append(name)
            continue
        if canonical != name:
            renamed[name] = canonical
        named[canonical], dtypes[canonical] = _plain(name, raw[name])
    if not named:
        raise FileProblem(
            f"holds {', '.join(sorted(map(str, raw))[:8]) or 'nothing'}; none of these names is known (--help lists them)"
        )

    arrays, numbers = {}, {}
    for name, value in named.items():
        if value.ndim == 3 and value.shape[-1] == 1:
            value = value[..., 0]
        if name in NUMBERS or (name == "kl" and value.size == 1):
            if value.size == 1:
                number = float(value.reshape(()))
                # A setting stored as float32 is the decimal it was typed as; a reported value keeps its digits.
                is_setting = name not in ("loss", "kl", "logged_mean", "reported_entropy_loss", "clip_fraction", "margin")
                numbers[name] = float(f"{number:.7g}") if is_setting and dtypes[name] == "float32" else number
            elif name in ("beta", "clip_low", "clip_high") and value.size and (value == value.flat[0]).all():
                numbers[name] = float(value.flat[0])
            else:
                raise FileProblem(f"{name}: got shape {value.shape}, wanted one number")
        elif name in FLAGS:
            arrays[name] = _as_flags(name, value)
        elif name in WHOLE:
            arrays[name] = _as_whole(name, value)
        else:
            arrays[name] = value.astype(np.float64)
    check_numbers(numbers)
    reported = [
        n for n in ("loss", "dloss_dlogps", "logps", "advantages", "loss_mat", "kl", "chosen_logps", "vpreds") if n in dtypes
    ]
    eps = max((_EPS.get(dtypes[n], 2.0**-23) for n in reported), default=2.0**-23)
    low = {name: kind for name, kind in dtypes.items() if kind in ("float16", "bfloat16")}
    recording = Recording(arrays, numbers, max(eps, 2.0**-23), renamed, unread, [], low)
    _arrange(recording)
    return recording


_RANGES = {
    **dict.fromkeys(("beta", "clip_low", "num_items_in_batch", "global_batch_size", "temperature", "top_k"), (0, math.inf)),
    **dict.fromkeys(("accumulation_steps", "world_size", "steps_per_generation", "budget"), (1, 1e12)),
    **dict.fromkeys(("gamma", "lam"), (0, 1)),
    "clip_high": (-1, math.inf),
    "ratio_cap": (0, math.inf),
    "value_clip": (0, math.inf),
    "pass_index": (0, math.inf),
}


def check_numbers(numbers: dict[str, float]) -> None:
    """Raise FileProblem for a setting that no trainer can have."""
    for name, (low, high) in _RANGES.items():
        value = numbers.get(name, low)
        may_be_infinite = name in ("clip_low", "clip_high", "ratio_cap", "value_clip")
        if not low <= value <= high or math.isinf(value) and not may_be_infinite:
            raise FileProblem(
                f"{name}: got {value:g}, wanted a number from {low:g}" + (f" to {high:g}" if high < 1e11 else "")
            )


def _plain(name: str, value) -> tuple[np.ndarray, str]:
    """float64, int64, bool or string array, and the dtype it came in. Complex numbers and objects are refused."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_complex() or value.is_quantized:
            raise FileProblem(f"{name}: got dtype {kind}, wanted real numbers")
        value = value.to(torch.float64).numpy() if value.is_floating_point() else value.numpy()
    else:
        value = np.asarray(value)
        kind = value.dtype.name
    if value.dtype.kind not in "fiubU":
        raise FileProblem(f"{name}: got dtype {value.dtype}, wanted numbers" + (" or strings" if name in WHOLE else ""))
    if value.dtype.kind == "U":
        if CANONICAL[name] not in ("group_ids", "gen_group_ids"):
            raise FileProblem(f"{name}: holds strings, wanted numbers")
        value = np.unique(value, return_inverse=True)[1].reshape(value.shape)
    with np.errstate(all="ignore"):
        value = value.astype(np.float64 if value.dtype.kind == "f" else bool if value.dtype.kind == "b" else np.int64)
    if value.size == 0:
        raise FileProblem(f"{name}: got shape {value.shape}, an array of nothing")
    return value, kind


def _as_flags(name: str, value: np.ndarray) -> np.ndarray:
    if value.dtype == bool:
        return value
    value = np.where(np.isnan(value), 0, value) if value.dtype.kind == "f" else value
    if not ((value == 0) | (value == 1)).all():
        bad = value[(value != 0) & (value != 1)].flat[0]
        raise FileProblem(f"{name}: holds {bad}, wanted 0 and 1 (or bool); likely another array under this name")
    return value != 0


def _as_whole(name: str, value: np.ndarray) -> np.ndarray:
    if value.dtype.kind == "f":
        value = np.where(np.isnan(value), -1, value) if value.ndim == 2 else value
        if not np.isfinite(value).all() or (np.abs(value) > 2**53).any() or (value != np.round(value)).any():
            raise FileProblem(f"{name}: wanted whole numbers")
    return value.astype(np.int64)


def _arrange(recording: Recording) -> None:
    """Bring the arrays into one layout, (N, T), and check their shapes against each other."""
    arrays = recording.arrays
    if "ratio" in arrays and "logps" not in arrays:
        with np.errstate(all="ignore"):
            arrays["logps"] = np.log(arrays["ratio"])
        if not np.isfinite(arrays["logps"]).all():
            raise FileProblem("ratio: wanted numbers above 0")
        arrays["old_logps"] = np.zeros_like(arrays["logps"])
        recording.remarks.append("ratios were recorded, not log-probabilities: taken as log-ratios against 0")
        if "dloss_dratio" in arrays and arrays["dloss_dratio"].shape != arrays["ratio"].shape:
            raise FileProblem(
                f"dloss_dratio: got shape {arrays['dloss_dratio'].shape}, wanted {arrays['ratio'].shape} as ratio"
            )
        if "dloss_dratio" in arrays:
            arrays["dloss_dlogps"] = arrays["dloss_dratio"] * arrays["ratio"]
    lead = next((arrays[n] for n in ("logps", "loss_mat", "vpreds", "token_level_rewards", "mask") if n in arrays), None)
    is_environment = "logps" not in arrays and any(name in arrays for name in ("last_values", "next_values", "terminated"))
    _check_small_arrays(arrays)
    if lead is None or is_environment:
        return
    if lead.ndim == 1:
        # N samples of one token each, as an environment's minibatch has them.
        for name in (*TOKEN_ARRAYS, "advantages", "advantages_raw"):
            if name in arrays and arrays[name].ndim == 1:
                arrays[name] = arrays[name][:, None]
        lead = lead[:, None]
    if lead.ndim != 2:
        raise FileProblem(f"logps: got shape {lead.shape}, wanted (N, T)")
    rows, width = lead.shape
    for name in TOKEN_ARRAYS:
        if name in arrays and arrays[name].shape != (rows, width):
            raise FileProblem(
                f"{name}: got shape {arrays[name].shape}, wanted {(rows, width)} as the other per-token arrays"
                + _broadcast_hint(arrays[name].shape, (rows, width))
            )
    for name in ROW_ARRAYS:
        if name in arrays and arrays[name].shape == (rows, 1) and name != "seq_logps":
            raise FileProblem(
                f"{name}: got shape {arrays[name].shape}, wanted ({rows},); against ({rows},) it would broadcast to "
                f"({rows}, {rows})"
            )
        if name in arrays and arrays[name].shape != (rows,):
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted ({rows},), one a row")
    if "advantages" in arrays:
        shape = arrays["advantages"].shape
        if shape == (rows, 1):
            arrays["advantages"] = arrays["advantages"][:, 0]
        elif shape not in ((rows,), (rows, width)):
            raise FileProblem(
                f"advantages: got shape {shape}, wanted ({rows},) or {(rows, width)}" + _broadcast_hint(shape, (rows,))
            )
    for name in ("completion_ids", "input_ids"):
        if name in arrays and arrays[name].ndim != 2:
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted (N, T)")
        if name in arrays and arrays[name].shape[0] != rows:
            raise FileProblem(f"{name}: got {arrays[name].shape[0]} rows, wanted {rows}")
    if "completion_ids" not in arrays and "input_ids" in arrays and arrays["input_ids"].shape == (rows, width):
        arrays["completion_ids"] = arrays["input_ids"]
    elif "input_ids" in arrays and "completion_ids" not in arrays and arrays["input_ids"].shape[1] > width:
        arrays["completion_ids"] = arrays["input_ids"][:, -width:]
    if "completion_ids" in arrays and arrays["completion_ids"].shape != (rows, width):
        recording.remarks.append(
            f"completion_ids {arrays['completion_ids'].shape} do not fit logps {(rows, width)}: not used"
        )
        del arrays["completion_ids"]
    if "attention_mask" in arrays:
        attention = arrays["attention_mask"]
        if attention.ndim != 2 or attention.shape[0] != rows or attention.shape[1] < width:
            raise FileProblem(f"attention_mask: got shape {attention.shape}, wanted {rows} rows of {width} or more")
        # verl and TRL keep prompt and response in one mask: the response is the tail.
        arrays["attention_mask"] = attention[:, attention.shape[1] - width :]
    if "mask" not in arrays:
        if "lengths" in arrays:
            if (arrays["lengths"] < 0).any() or (arrays["lengths"] > width).any():
                raise FileProblem(f"lengths: wanted numbers from 0 to {width}")
            arrays["mask"] = np.arange(width) < arrays["lengths"][:, None]
            recording.remarks.append("no mask recorded: taken from lengths, right padded")
        else:
            arrays["mask"] = np.ones((rows, width), dtype=bool)
            if width > 1:
                recording.remarks.append("no mask recorded: every slot is taken as counted; record mask (rows x tokens)")
    if "tool_mask" in arrays:
        # 1 on the model's own tokens, as TRL has it: tokens that a tool wrote are in the answer and not in the loss.
        arrays.setdefault("attention_mask", arrays["mask"])
        arrays["mask"] = arrays["mask"] & arrays["tool_mask"]
        recording.remarks.append("counted tokens: mask and tool_mask both set")
    for name in ("rewards_per_func",):
        if name in arrays and (arrays[name].ndim != 2 or arrays[name].shape[0] != rows):
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted ({rows}, F)")
    if "kl" in arrays and arrays["kl"].shape not in ((rows, width), (rows,)):
        raise FileProblem(f"kl: got shape {arrays['kl'].shape}, wanted a number, ({rows},) or {(rows, width)}")
    for name in ("logits", "ref_logits"):
        if name in arrays and arrays[name].shape[:-1] != (rows, width):
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted {(rows, width)} + (V,)")
    if "labels" in arrays and len(arrays["labels"]) != rows:
        raise FileProblem(f"labels: got {len(arrays['labels'])}, wanted {rows}, one a row")
    if "chosen_logps" in arrays and "logps" in arrays and width > 1 and 2 * len(arrays["chosen_logps"]) != rows:
        raise FileProblem(
            f"logps: got {rows} rows, wanted {2 * len(arrays['chosen_logps'])}: the chosen answers, then the rejected ones"
        )
    if "reset_rows" in arrays and arrays["reset_rows"].shape[0] != rows:
        raise FileProblem(f"reset_rows: got shape {arrays['reset_rows'].shape}, wanted {rows} rows")
    if "advantages_raw" in arrays and arrays["advantages_raw"].shape not in ((rows,), (rows, 1), (rows, width)):
        raise FileProblem(f"advantages_raw: got shape {arrays['advantages_raw'].shape}, wanted ({rows},) or {(rows, width)}")
    generation = [n for n in ("gen_rewards", "gen_group_ids", "gen_lengths", "gen_kl", "gen_advantages") if n in arrays]
    if "gen_rewards_per_func" in arrays and generation and len(arrays["gen_rewards_per_func"]) != len(arrays[generation[0]]):
        raise FileProblem(
            f"gen_rewards_per_func: got {len(arrays['gen_rewards_per_func'])} rows, wanted {len(arrays[generation[0]])}"
        )
    for name in generation:
        if arrays[name].ndim != 1 or len(arrays[name]) != len(arrays[generation[0]]):
            raise FileProblem(
                f"{name}: got shape {arrays[name].shape}, wanted ({len(arrays[generation[0]])},) as {generation[0]}"
            )
    if generation and "row_ids" in arrays:
        low, high = arrays["row_ids"].min(), arrays["row_ids"].max()
        if low < 0 or high >= len(arrays[generation[0]]):
            raise FileProblem(f"row_ids: got numbers from {low} to {high}, wanted 0 to {len(arrays[generation[0]]) - 1}")


def _check_small_arrays(arrays: dict[str, np.ndarray]) -> None:
    """Arrays that belong to no row of tokens: pairs, logs, weights."""
    for names in (
        (
            "chosen_logps",
            "rejected_logps",
            "ref_chosen_logps",
            "ref_rejected_logps",
            "chosen_lengths",
            "rejected_lengths",
            "dloss_dchosen_logps",
            "dloss_drejected_logps",
        ),
        ("labels", "kl_seq_logps", "ref_kl_seq_logps"),
        ("log_values", "log_windows"),
    ):
        sizes = {name: arrays[name].shape for name in names if name in arrays}
        if len({math.prod(shape) for shape in sizes.values()}) > 1:
            raise FileProblem(
                f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in sizes.items())}; wanted one length"
            )
        for name in sizes:
            arrays[name] = arrays[name].reshape(-1)
    if "log_steps" in arrays and arrays["log_steps"].ndim > 2:
        raise FileProblem(f"log_steps: got shape {arrays['log_steps'].shape}, wanted (steps,) or (steps, metrics)")
    for name in ("rewards_per_func", "gen_rewards_per_func"):
        weights = arrays.get("reward_weights")
        if name in arrays and (arrays[name].ndim != 2 or weights is not None and weights.shape != arrays[name].shape[1:]):
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted rows x F, with reward_weights (F,)")


def _broadcast_hint(got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if len(got) == 2 and (got[0] == 1 or got[1] == 1) or len(got) == len(wanted) == 2 and got == wanted[::-1]:
        return "; likely a transposed array, or one that would broadcast"
    return ""
