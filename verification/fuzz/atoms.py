"""Random calls of every public atom of rl_lab, judged by the definitions.

A call must answer within the rounding of its dtypes, or refuse with ValueError or TypeError where its docstring says so;
leave its arguments as they are; answer in their dtype; and send gradients to the arguments that its docstring names alone.

A new atom is an entry of SIGNATURES and a function in definitions.py.
"""

from __future__ import annotations

import contextlib
import decimal
import fractions
import math
import random
import warnings
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

import rl_lab
from verification.fuzz import definitions
from verification.fuzz.case import Failure, Kind
from verification.fuzz.definitions import DEFINITIONS, WIDE, Answer, Borderline, Form, Refused


class Signature(NamedTuple):
    """The arguments of an atom: `name: kind axes`, kind f(loating), i(nteger) or b(ool); axes "*" stands for any leading ones."""

    arguments: str
    numbers: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()  # where it flows
    elementwise: bool = False  # a NaN stays in its slot


SIGNATURES = {
    "action_logps": Signature("logits:f*A actions:i*", (), ("logits",)),
    "reinforce_loss": Signature("logp:f* returns:f*", (), ("logp",), True),
    "td_residuals": Signature("rewards:f*T values:f*T next_values:f*T terminated:b*T", ("gamma",)),
    "gae": Signature("rewards:f*T values:f*T next_values:f*T terminated:b*T boundary:b*T", ("gamma", "lam")),
    "importance_ratio": Signature("logp:f* old_logp:f*", (), ("logp",), True),
    "clipped_policy_loss": Signature("logp:f* old_logp:f* advantages:f*", ("epsilon",), ("logp",), True),
    "clip_fraction": Signature("logp:f* old_logp:f*", ("epsilon",)),
    "clipped_value_loss": Signature("values:f* old_values:f* returns:f*", ("epsilon",), ("values",), True),
    "categorical_kl": Signature("logits:f*A reference_logits:f*A", (), ("logits",)),
    "kl_estimates": Signature("logp:f* ref_logp:f*", (), ("logp",), True),
    "preference_probability": Signature(
        "reward_chosen:f* reward_rejected:f*", (), ("reward_chosen", "reward_rejected")
    ),
    "dpo_loss": Signature(
        "chosen:f* rejected:f* ref_chosen:f* ref_rejected:f*", ("beta",), ("chosen", "rejected"), True
    ),
    "groups_without_spread": Signature("rewards:f*G"),
    "group_advantages": Signature("rewards:f*G", ("eps",)),
    "zero_variance_probability": Signature("probabilities:f*A", ("group_size",), ("probabilities",)),
    "response_token_logps": Signature("logits:fBTV input_ids:iBT response_mask:bBT", (), ("logits",)),
    "response_logps": Signature("logits:fBTV input_ids:iBT response_mask:bBT", (), ("logits",)),
}
SMOOTH = ("action_logps", "reinforce_loss", "importance_ratio", "categorical_kl", "kl_estimates", "preference_probability")
SMOOTH += ("dpo_loss", "zero_variance_probability", "response_token_logps", "response_logps")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = tuple(getattr(torch, name) for name in rl_lab._DTYPES["integer"] if hasattr(torch, name))
RANGES = {  # name -> (low, high, above); beside a tensor of some dtype, epsilon and beta must be numbers it holds
    "gamma": (0, 1, False),
    "lam": (0, 1, False),
    "epsilon": (0, math.inf, True),
    "beta": (0, math.inf, True),
    "eps": (0, math.inf, False),
    "group_size": (1, math.inf, False),
}
USUAL = {
    "gamma": (0, 1, 0.9, 0.99, 0.999),
    "lam": (0, 1, 0.95, 0.5),
    "epsilon": (0.2, 0.1, 1e-3, 0.999, 1, 3.0),
    "beta": (0.1, 0.5, 1.0, 2, 1e-4),
    "eps": (0, 1e-8, 1e-6, 1.0),
    "group_size": (1, 2, 3, 8, 16.0),
}
STRANGE = (
    10**400, -(10**400), 2**70, 2**63, 1e308, 1e39, 6e4, 1e-300, 5e-324, 0.0, -0.0, -1, math.nan, math.inf, -math.inf, True, None,
    "0.2", 1 + 0j, [0.2], fractions.Fraction(1, 5), fractions.Fraction(3), decimal.Decimal("0.2"), np.float32(0.25), np.float64(0.2),
    np.int64(1), np.float16(0.5), np.array(0.2), np.bool_(True), torch.tensor(0.2), 1.5, 2.000001, b"1",
)  # fmt: skip


def as_sparse(tensor: Tensor) -> Tensor:
    return (torch.zeros(1) if tensor.dim() == 0 else tensor.float()).to_sparse()


HOSTILE = {  # what stands in place of a tensor: everything here is to be refused
    "list": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.double().numpy(),
    "None": lambda tensor: None,
    "text": lambda tensor: "tensor",
    "float": lambda tensor: 0.5,
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "float8_e4m3fn": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "float8_e5m2": lambda tensor: tensor.to(torch.float8_e5m2),
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": as_sparse,
    "nested": lambda tensor: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 1.0, 0, torch.quint8),
    "an axis more": lambda tensor: tensor.unsqueeze(-1).expand(*tensor.shape, 2),
    "another number of axes": lambda tensor: tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(),
    "other kind": lambda tensor: tensor.to(torch.int64 if tensor.dtype in FLOATS else torch.float32),
}
VIEWS = {
    "plain": lambda tensor: tensor,
    "every second": lambda tensor: torch.stack([tensor, torch.zeros_like(tensor)], -1).flatten(-2)[..., ::2]
    if tensor.dim()
    else tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor[:1].expand_as(tensor) if tensor.dim() else tensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
}


class Call(NamedTuple):
    atom: str
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    views: dict[str, str]
    hostile: dict[str, str]  # name -> entry of HOSTILE
    tracked: tuple[str, ...]  # arguments that require a gradient
    mode: str  # "grad", "no_grad" or "inference"
    default: torch.dtype


# ------------------------------------------------------------------------------------------ drawing

DOUBLES = torch.float64


def numbers_drawn(rng: random.Random, count: int, dtype: torch.dtype, style: str) -> list[float]:
    info = torch.finfo(dtype)
    special = [0.0, -0.0, 1.0, -1.0, info.tiny, -info.tiny, info.max, -info.max, info.eps, 1 + info.eps, info.tiny * info.eps]
    special += [-math.inf, math.inf, math.nan]
    scale, base = 10 ** rng.uniform(-4, 3), rng.choice((1.0, 0.1, 100.0, -3.0))
    draws = {
        "normal": lambda: rng.gauss(0, scale),
        "log-probability": lambda: -rng.expovariate(0.5),
        "near": lambda: base * (1 + rng.randrange(-300, 300) * info.eps / 2),
        "huge": lambda: rng.uniform(-1, 1) * info.max,
        "small": lambda: rng.uniform(-1, 1) * info.tiny,
        "whole": lambda: float(rng.randrange(-2, 4)),
        "special": lambda: rng.choice(special),
    }
    rate = rng.choice((0, 0, 0, 0.02, 0.2))
    return [draws["special" if rng.random() < rate else style]() for _ in range(count)]


STYLES = ("normal", "normal", "normal", "log-probability", "log-probability", "near", "huge", "small", "whole", "special")


def probabilities_drawn(rng: random.Random, rows: int, size: int) -> list[float]:
    flat = []
    for _ in range(rows):
        scores = [rng.gauss(0, rng.choice((0.1, 1, 5))) for _ in range(size)]
        total = sum(map(math.exp, scores))
        flat += [math.exp(score) / total for score in scores]
    if flat and rng.random() < 0.2:
        flat[rng.randrange(len(flat))] += rng.choice((1e-6, 1e-5, 1e-3, -1.0, math.nan, math.inf))
    return flat


def draw(rng: random.Random) -> Call:
    atom = rng.choice(list(SIGNATURES))
    signature = SIGNATURES[atom]
    sizes = {axis: rng.choice((1, 2, 3, 5, 8)) for axis in "AGTBV"} | {"*": None}
    sizes["T"] = rng.choice((1, 2, 3, 8, 9, 20, 70)) if rng.random() < 0.95 else rng.choice((0, 500, 2000))
    if rng.random() < 0.04:
        sizes[rng.choice("AGTBV")] = 0
    leading = [rng.choice((0, 1, 1, 2, 3, 4, 20)) if rng.random() < 0.9 else 0 for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3)))]
    dtype, style = rng.choice(FLOATS), rng.choice(STYLES)
    mixed = rng.random() < 0.1
    tensors = {}
    for part in signature.arguments.split():
        name, _, form = part.partition(":")
        shape = [size for axis in form[1:] for size in (leading if axis == "*" else [sizes[axis]])]
        count = math.prod(shape)
        if form[0] == "f":
            own = rng.choice(FLOATS) if mixed else dtype
            of_probabilities = name == "probabilities" and count and rng.random() < 0.9
            flat = (
                probabilities_drawn(rng, count // shape[-1], shape[-1])
                if of_probabilities
                else numbers_drawn(rng, count, own, style if rng.random() < 0.8 else rng.choice(STYLES))
            )
            tensors[name] = torch.tensor(flat, dtype=DOUBLES).reshape(shape).to(own)
        elif form[0] == "i":
            high = sizes["V" if name == "input_ids" else "A"]
            low = -1 if rng.random() < 0.05 else 0
            values = [rng.randrange(low, max(high, 1) + (rng.random() < 0.02)) for _ in range(count)]
            tensors[name] = torch.tensor(values, dtype=torch.int64).reshape(shape).to(rng.choice(WHOLE))
        else:
            rate = rng.choice((0, 0.1, 0.5))
            tensors[name] = torch.tensor([rng.random() < rate for _ in range(count)], dtype=torch.bool).reshape(shape)
    arrange(rng, tensors)
    floats = [name for name, tensor in tensors.items() if tensor.dtype in FLOATS]
    replacements = [name for name in HOSTILE if len(tensors) > 1 or "ax" not in name]  # one tensor may have any axes
    hostile = {rng.choice(list(tensors)): rng.choice(replacements)} if rng.random() < 0.06 else {}
    strange = rng.random() < 0.1
    return Call(
        atom,
        tensors,
        {name: rng.choice(STRANGE if strange else USUAL[name]) for name in signature.numbers},
        {name: rng.choice(list(VIEWS)) if rng.random() < 0.3 else "plain" for name in tensors},
        hostile,
        tuple(name for name in floats if rng.random() < 0.7),
        rng.choice(("grad", "grad", "grad", "no_grad", "inference")),
        torch.float32 if rng.random() < 0.9 else rng.choice(FLOATS),
    )


def arrange(rng: random.Random, tensors: dict[str, Tensor]) -> None:
    """Make most calls with flags and masks, and those with near twins, ones that are not refused."""
    if "boundary" in tensors and rng.random() < 0.97:
        tensors["boundary"] |= tensors["terminated"]
    mask = tensors.get("response_mask")
    if mask is not None and rng.random() < 0.95 and mask.shape[1] > 1:
        mask[:, 0] = False
        mask[~mask.any(dim=1), -1] = True
    first, *others = (name for name, tensor in tensors.items() if tensor.dtype in FLOATS)
    for name in others:
        if rng.random() < 0.2 and tensors[name].shape == tensors[first].shape:  # a policy that has hardly moved
            moved = tensors[first].double() * (1 + rng.choice((0, 1e-7, 1e-3)))
            tensors[name] = moved.to(tensors[name].dtype)


# ------------------------------------------------------------------------------------------ judging


def arguments_of(call: Call) -> dict[str, Any]:
    arguments = {}
    for name, tensor in call.tensors.items():
        value = VIEWS[call.views[name]](tensor.clone())
        if name in call.hostile:
            with warnings.catch_warnings():  # nested and quantized tensors are said to be prototypes and deprecated
                warnings.simplefilter("ignore")
                value = HOSTILE[call.hostile[name]](tensor.clone())
        elif name in call.tracked:
            value = value.detach().requires_grad_()
        arguments[name] = value
    return arguments


def is_a_number(name: str, value: object) -> float | None:
    """The number as the docstrings take it, or None where it is to be refused."""
    low, high, above = RANGES[name]
    real = isinstance(value, (int, float, fractions.Fraction, np.floating, np.integer))
    if not real or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number) or not (low < number if above else low <= number) or number > high:
        return None
    return None if name == "group_size" and number != int(number) else number


def form_of(call: Call) -> tuple[Form, torch.dtype]:
    dtypes = [tensor.dtype for tensor in call.tensors.values() if tensor.dtype in FLOATS]
    dtype = dtypes[0]
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    inside, outside = torch.finfo(wide), torch.finfo(dtype)
    return Form(inside.eps, inside.max, inside.tiny, outside.eps, outside.max, outside.tiny), dtype


def wide(tensor: Tensor) -> np.ndarray:
    if tensor.dtype in FLOATS:
        return tensor.detach().double().numpy().astype(WIDE)
    return tensor.numpy()


def empty_is_refused(call: Call) -> bool:
    last = {"action_logps": "logits", "categorical_kl": "logits", "td_residuals": "rewards", "gae": "rewards"}
    last |= {"groups_without_spread": "rewards", "group_advantages": "rewards", "zero_variance_probability": "probabilities"}
    name = last.get(call.atom)
    return name is not None and (call.tensors[name].dim() == 0 or call.tensors[name].shape[-1] == 0)


def wanted(call: Call, arguments: dict[str, Any]) -> list[Answer] | None:
    """What the definition says of the call; None for a refusal. Raises Borderline."""
    numbers = {name: is_a_number(name, value) for name, value in call.numbers.items()}
    form, _ = form_of(call)
    if call.hostile or None in numbers.values() or empty_is_refused(call):
        return None
    bounded = ("epsilon", "beta", "group_size") if call.atom != "clip_fraction" else ()
    if any(numbers.get(name, 0) > form.largest for name in bounded):
        return None
    with np.errstate(all="ignore"):
        try:
            return DEFINITIONS[call.atom](form, **{name: wide(value) for name, value in arguments.items()}, **numbers)
        except Refused:
            return None


def off(got: Tensor, answer: Answer, form: Form) -> str | None:
    """Where and how far a result is off, or None."""
    values = wide(got).astype(WIDE)
    want, slack = np.asarray(answer.value), np.broadcast_to(answer.slack, values.shape)
    if values.shape != want.shape:
        return f"shape {values.shape}, wanted {want.shape}"
    with np.errstate(all="ignore"):
        room = definitions.STEPS * slack * form.eps + form.eps_out * np.abs(want) + form.smallest_out
        near = np.abs(values - want) <= room
        same = (values == want) | (np.isnan(values) & np.isnan(want))
        beyond = (np.abs(want) + room >= form.largest_out * (1 - form.eps_out)) & (np.sign(values) == np.sign(want))
        beyond &= np.abs(values) >= form.largest_out * (1 - 2 * form.eps_out) - room
        good = near | same | beyond | np.isinf(slack)
    if good.all():
        return None
    where = tuple(int(i) for i in np.argwhere(~good)[0])
    got_here, want_here = values[where], want[where]
    return f"at {list(where)} got {float(got_here)!r}, wanted {float(want_here)!r} within {float(room[where]):.2g}"


def same_bits(before: Tensor, after: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN and -0 included."""
    both = [tensor.detach().double() if tensor.dtype in FLOATS else tensor.detach() for tensor in (before, after)]
    return both[0].shape == both[1].shape and both[0].numpy().tobytes() == both[1].numpy().tobytes()


def unchanged(before: dict[str, Tensor], arguments: dict[str, Any]) -> str | None:
    return next((name for name, tensor in before.items() if not same_bits(tensor, arguments[name])), None)


@contextlib.contextmanager
def surroundings(call: Call):
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[call.mode]
    before = torch.get_default_dtype()
    torch.set_default_dtype(call.default)
    try:
        with mode():
            yield
    finally:
        torch.set_default_dtype(before)


def judge(call: Call, folder: Path | None = None, atoms: object = rl_lab) -> Failure | None:
    """The first promise that a call breaks. `atoms` holds the functions: a test puts a broken twin there."""
    fails = lambda rule, detail: Failure(rule, call.atom, detail)  # noqa: E731
    arguments = arguments_of(call)
    form, dtype = form_of(call)
    kept = {name: value.detach().clone() for name, value in arguments.items() if name not in call.hostile}
    try:
        with surroundings(call):
            results = getattr(atoms, call.atom)(**arguments, **call.numbers)
    except (ValueError, TypeError) as problem:
        results, refusal = None, f"{type(problem).__name__}: {problem}"
    except Exception as problem:
        return fails("exception", f"raised {type(problem).__name__}: {str(problem)[:200]}; wanted ValueError or TypeError alone")
    changed = unchanged(kept, arguments)
    if changed:
        return fails("argument changed", f"{changed} holds other numbers than before the call")
    try:
        answers = wanted(call, arguments)
    except Borderline:
        return None
    if results is None:
        return fails("refused", f"{refusal[:300]}; the definition gives an answer") if answers is not None else None
    results = results if isinstance(results, tuple) else (results,)
    if answers is None:
        return fails("accepted", f"gave {str(results)[:200]}; wanted a refusal")
    for result, answer in zip(results, answers, strict=True):
        is_flag = call.atom == "groups_without_spread" or (call.atom == "response_token_logps" and result is results[1])
        if result.dtype != (torch.bool if is_flag else dtype):
            return fails("dtype", f"{result.dtype}, wanted {torch.bool if is_flag else dtype}")
        wrong = off(result, answer, form)
        if wrong:
            return fails("value", wrong)
    if call.atom == "gae" and arguments["rewards"].dim() > 1 and len(arguments["rewards"]):
        alone = atoms.gae(**{name: tensor[-1] for name, tensor in arguments.items()}, **call.numbers)
        if not all(same_bits(of_row, of_batch[-1]) for of_row, of_batch in zip(alone, results)):
            return fails("row alone", f"the last row alone gives {alone}; wanted the bits of the batch")
    return gradients(call, arguments, results, atoms)


def gradients(call: Call, arguments: dict[str, Any], results: tuple[Tensor, ...], atoms: object) -> Failure | None:
    """Gradients reach the named arguments alone, are numbers where everything is, and do not depend on the dtype."""
    signature = SIGNATURES[call.atom]
    floating = [result for result in results if result.dtype in FLOATS]
    flows = call.mode == "grad" and bool(set(call.tracked) & set(signature.gradient))
    for result in results:
        if result.requires_grad != (flows and result.dtype in FLOATS):
            return Failure("gradient leak", call.atom, f"a result requires a gradient: {result.requires_grad}, wanted {flows}")
    if not flows:
        return None
    try:
        torch.autograd.backward(floating, [torch.ones_like(result) for result in floating])
    except Exception as problem:
        return Failure("exception", call.atom, f"its gradient raised {type(problem).__name__}: {str(problem)[:200]}")
    finite = all(torch.isfinite(tensor).all() for tensor in call.tensors.values())
    finite = finite and all(torch.isfinite(result).all() for result in results)
    slots = torch.ones((), dtype=torch.bool)
    if signature.elementwise:
        for value in (*(arguments[name] for name in call.tensors), *floating):
            slots = slots & torch.isfinite(value)
    for name in call.tracked:
        gradient = arguments[name].grad
        if name not in signature.gradient:
            if gradient is not None:
                return Failure("gradient leak", call.atom, f"{name} got a gradient")
        elif gradient is None:
            return Failure("gradient", call.atom, f"{name} got no gradient")
        elif (finite or signature.elementwise) and (gradient.isnan() & slots).any():
            return Failure("gradient", call.atom, f"NaN in the gradient of {name} where every number is finite")
    if call.atom in SMOOTH and finite:
        return gradient_off(call, arguments, atoms)
    return None


GRADIENT_STEPS = 2000  # eps; numbers of up to MODERATE in exponents and quotients
MODERATE = 30.0


def gradient_off(call: Call, arguments: dict[str, Any], atoms: object) -> Failure | None:
    """The gradient of each result beside the one of the same stored numbers in float64."""
    floats = [name for name, tensor in call.tensors.items() if tensor.dtype in FLOATS]
    if any(call.tensors[name].numel() and call.tensors[name].abs().max() > MODERATE for name in floats):
        return None
    form, _ = form_of(call)
    signature = SIGNATURES[call.atom]
    tracked = [name for name in call.tracked if name in signature.gradient]
    double = {name: arguments[name].detach().double().requires_grad_(name in tracked) for name in floats}
    try:
        pair = [getattr(atoms, call.atom)(**given, **call.numbers) for given in (arguments, arguments | double)]
    except ValueError:
        return None  # a row of probabilities that sums to 1 in its own dtype alone
    for got, want in zip(*(results if isinstance(results, tuple) else (results,) for results in pair)):
        if got.dtype not in FLOATS:
            continue
        slopes = [
            torch.autograd.grad(result, [given[name] for name in tracked], torch.ones_like(result))
            for result, given in ((got, arguments), (want, double))
        ]
        for name, got_slope, want_slope in zip(tracked, *slopes):
            info = torch.finfo(arguments[name].dtype)
            size = want_slope.abs()
            room = size * (2 * max(info.eps, form.eps_out) + GRADIENT_STEPS * form.eps) + info.tiny
            if not signature.elementwise:  # differences of probabilities, which are at most 1
                room += GRADIENT_STEPS * form.eps * size.clamp(min=1)
            bad = ((got_slope.double() - want_slope).abs() > room) & (size < info.max / 2)
            if bad.any():
                where = tuple(bad.nonzero()[0].tolist())
                numbers = f"got {got_slope[where].item()!r}, in float64 {want_slope[where].item()!r}"
                return Failure("gradient", call.atom, f"of {name} at {list(where)}: {numbers}")
    return None


# ------------------------------------------------------------------------------------------ showing, shrinking


def written(value: object) -> str:
    """A number or a tensor as Python that makes it again."""
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.tolist()
    if value.numel() > 64:
        return f"<{value.dtype} {tuple(value.shape)}>"
    text = repr(plain).replace("nan", "math.nan").replace("inf", "math.inf")
    return f"torch.tensor({text}, dtype={value.dtype})"


def show(call: Call) -> str:
    parts = [f"{name}={written(tensor)}" for name, tensor in call.tensors.items()]
    parts = [
        part + "".join(f" [{word}]" for word in (call.views[name], call.hostile.get(name)) if word not in ("plain", None))
        for name, part in zip(call.tensors, parts)
    ]
    parts += [f"{name}={value!r:.60}" for name, value in call.numbers.items()]
    notes = [f"gradients of {', '.join(call.tracked)}"] if call.tracked else []
    notes += [call.mode] * (call.mode != "grad") + [f"default {call.default}"] * (call.default != torch.float32)
    return f"{call.atom}({', '.join(parts)})" + (f"  # {'; '.join(notes)}" if notes else "")


def simpler(call: Call) -> Iterator[Call]:
    """Fewer rows, plain views, simple numbers."""
    axes = {}  # letter, or place of a leading axis -> [(tensor, its axis)]
    lead = max((tensor.dim() for tensor in call.tensors.values()), default=0)
    for part in SIGNATURES[call.atom].arguments.split():
        name, _, form = part.partition(":")
        own = call.tensors[name].dim() - (len(form) - 1 - form.count("*"))
        letters = [*range(own), *form[2:]] if "*" in form else list(form[1:])
        for axis, letter in enumerate(letters[: call.tensors[name].dim()]):
            axes.setdefault(letter, []).append((name, axis))
    for places in axes.values():
        size = call.tensors[places[0][0]].shape[places[0][1]]
        for start, stop in ((0, size // 2), (size // 2, size), (0, size - 1), (1, size)):
            if 0 < stop - start < size:
                yield call._replace(tensors=call.tensors | {
                    name: call.tensors[name].narrow(axis, start, stop - start).clone() for name, axis in places
                })  # fmt: skip
    if lead and all(tensor.dim() and tensor.shape[0] == 1 for tensor in call.tensors.values()):
        yield call._replace(tensors={name: tensor[0].clone() for name, tensor in call.tensors.items()})
    for name, view in call.views.items():
        if view != "plain":
            yield call._replace(views=call.views | {name: "plain"})
    if call.default != torch.float32:
        yield call._replace(default=torch.float32)
    if call.mode != "grad":
        yield call._replace(mode="grad")
    for name in call.tracked:
        yield call._replace(tracked=tuple(other for other in call.tracked if other != name))
    for name, value in call.numbers.items():
        if value is not USUAL[name][0]:
            yield call._replace(numbers=call.numbers | {name: USUAL[name][0]})
    for name, tensor in call.tensors.items():
        if tensor.dtype not in FLOATS or tensor.numel() > 16:
            continue
        flat = tensor.flatten().double()
        for place, number in enumerate(flat.tolist()):
            for simple in (0.0, 1.0, float(round(number)) if math.isfinite(number) else 0.0, float(f"{number:.2g}")):
                if simple == number or (number in (0.0, 1.0)):
                    continue
                changed = flat.clone()
                changed[place] = simple
                yield call._replace(tensors=call.tensors | {name: changed.reshape(tensor.shape).to(tensor.dtype)})


KIND = Kind("atoms", draw, judge, show, simpler, slice=400, turn=5)
