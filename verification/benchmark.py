"""Speed and memory of the core lab as ratios to a named peer, measured in one run. A measurement, not a test.

    python -m verification.benchmark [--rounds 9] [--threads 2] [--only gae half tokens process adam]

gae      rl_lab.gae against torchrl's generalized_advantage_estimate and its vectorised twin, on (1024, 1024), (64, 2),
         (1, 1) and (1, 128) in float32 and float64, without any end and with 2 % terminations and 2 % time limits (skipped
         without torchrl)
half     what it costs that atoms compute float16 and bfloat16 in float32: forward and backward of 1,000,000 tokens against
         the same atom in float32, and k3 against its plain formula exp(-d) - 1 + d in the same dtype
tokens   rl_lab.response_token_logps on (4, 512, 32000) float32, half of the positions in the response, forward and backward,
         against gathering from one full log_softmax: time and peak memory, each measurement in a process of its own
process  the whole process `rl_lab.py --algorithm all` against `python -c "import torch"`
adam     the first construction of torch.optim.Adam against `import torch`: why rl_lab writes Adam out

Ours and the peer run in turn, round by round; each round gives a ratio ours / peer, so a machine that slows down slows both.
Printed are medians, and the smallest and largest ratio of a round. What both compute is compared before it is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from rl_lab import LabParser, clipped_policy_loss, format_table, gae, kl_estimates, response_token_logps, run_command

ROOT = Path(__file__).resolve().parent.parent
PROCESS_BOUND = 1.6
GAE_BOUNDS = {(1024, 1024): 0.5}  # against torchrl's loop; elsewhere, and against its vectorised twin, 1
THREADS = torch.get_num_threads()
GAMMA, LAM = 0.99, 0.95


class Comparison(NamedTuple):
    """Two numbers a round, ours and the peer's, in one unit."""

    what: str
    peer: str
    unit: str
    ours: list[float]
    theirs: list[float]
    bound: float | None

    def row(self) -> list[str]:
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs)]
        median = statistics.median(ratios)
        verdict = "-" if self.bound is None else f"{self.bound:g} " + ("kept" if median <= self.bound else "MISSED")
        return [
            self.what, self.peer, *(f"{statistics.median(values):.3g} {self.unit}" for values in (self.ours, self.theirs)),
            f"{median:.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}", verdict,
        ]


HEADER = ["what", "peer", "ours", "peer's", "ratio", "min-max", "bound"]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def in_turn(ours: Callable[[], object], theirs: Callable[[], object], rounds: int, calls: int) -> tuple[list, list]:
    """Milliseconds a call of two functions, measured in turn; one round of warm-up first, and the order alternates."""
    times = {ours: [], theirs: []}
    for number in range(rounds + 1):
        for function in (ours, theirs) if number % 2 else (theirs, ours):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if number:
                times[function].append((time.perf_counter() - start) / calls * 1e3)
    return times[ours], times[theirs]


# ------------------------------------------------------------------------------------------ gae


def gae_series(shape: tuple[int, int], dtype: torch.dtype, ends: bool) -> dict[str, Tensor]:
    """Random series; with `ends`, 2 % of the steps terminate and 2 % more hit a time limit."""
    generator = torch.Generator().manual_seed(0)
    series = {name: torch.randn(shape, generator=generator, dtype=dtype) for name in ("rewards", "values", "next_values")}
    share = 0.02 if ends else 0.0
    terminated = torch.rand(shape, generator=generator) < share
    return dict(series, terminated=terminated, boundary=terminated | (torch.rand(shape, generator=generator) < share))


def measure_gae(rounds: int) -> list[Comparison]:
    try:
        from torchrl.objectives.value import functional
    except ImportError as problem:
        progress(f"gae: skipped, no torchrl ({problem}): python -m pip install -r verification/requirements.txt")
        return []
    found = []
    for (shape, calls), dtype, ends, name in itertools.product(
        (((1024, 1024), 1), ((64, 2), 500), ((1, 1), 500), ((1, 128), 50)),
        (torch.float32, torch.float64),
        (True, False),
        ("generalized_advantage_estimate", "vec_generalized_advantage_estimate"),
    ):
        what = f"gae {shape} {str(dtype).removeprefix('torch.')}{', with ends' if ends else ''}"
        if ends and name.startswith("vec") and dtype == torch.float64 and shape[0] > 1:
            progress(f"{what} against {name}: not run, its convolution asks for 22 GB here")
            continue
        series = gae_series(shape, dtype, ends)
        # torchrl has one more axis, and calls the boundary done.
        columns = [series[key].unsqueeze(-1) for key in ("values", "next_values", "rewards", "boundary", "terminated")]
        programs = [
            functools.partial(gae, **series, gamma=GAMMA, lam=LAM),
            functools.partial(getattr(functional, name), GAMMA, LAM, *columns),
        ]
        for mine, peer in zip(*(program() for program in programs)):
            torch.testing.assert_close(mine, peer.squeeze(-1), rtol=1e-4, atol=1e-4)
        progress(f"{what} against {name}")
        bound = 1.0 if name.startswith("vec") else GAE_BOUNDS.get(shape, 1.0)
        found.append(Comparison(what, f"torchrl {name}", "ms", *in_turn(*programs, rounds, calls), bound))
    return found


# ------------------------------------------------------------------------------------------ half precision


def plain_k3(logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, ...]:
    d = logp - ref_logp
    return d, d.square() / 2, torch.expm1(-d) + d


def measure_half(rounds: int) -> list[Comparison]:
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(1_000_000, generator=generator) for _ in range(3)]

    def run(atom: Callable, dtype: torch.dtype, count: int) -> Callable[[], None]:
        first, *others = (tensor.to(dtype) for tensor in numbers[:count])
        first.requires_grad_()

        def forward_and_backward() -> None:
            results = atom(first, *others)
            torch.autograd.grad((results[2] if isinstance(results, tuple) else results).sum(), first)

        return forward_and_backward

    found = []
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        for atom, count in ((clipped_policy_loss, 3), (kl_estimates, 2)):
            progress(f"half: {atom.__name__} {name}")
            pair = run(atom, dtype, count), run(atom, torch.float32, count)
            found.append(Comparison(f"{atom.__name__} {name}", "itself in float32", "ms", *in_turn(*pair, rounds, 1), None))
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        pair = run(kl_estimates, dtype, 2), run(plain_k3, dtype, 2)
        found.append(Comparison(f"kl_estimates {name}", "exp(-d) - 1 + d", "ms", *in_turn(*pair, rounds, 1), None))
    return found


# ------------------------------------------------------------------------------------------ tokens


def full_log_softmax(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The usual way: normalise every position, then gather, then mask."""
    valid = response_mask[:, 1:]
    logps = logits[:, :-1].log_softmax(dim=-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return logps.masked_fill(~valid, 0.0), valid


TOKEN_VARIANTS = {"ours": response_token_logps, "full": full_log_softmax}


def token_batch(rows: int, positions: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((rows, positions, vocabulary), generator=generator).requires_grad_()
    input_ids = torch.randint(vocabulary, (rows, positions), generator=generator)
    return logits, input_ids, torch.arange(positions).expand(rows, -1) >= positions // 2


def peak_bytes() -> int | None:
    """Largest resident size of this process so far; None where the system does not say (Windows)."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss of a new Linux process starts at the peak of the process that started it; VmHWM is its own.
        return 1024 * int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")))
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def token_child(variant: str) -> None:
    """Forward and backward of one variant, three times after one warm-up: seconds, and bytes above the logits alone."""
    batch = token_batch(4, 512, 32000)
    before, seconds = peak_bytes(), []
    for _ in range(4):
        batch[0].grad = None
        start = time.perf_counter()
        token_logps, _ = TOKEN_VARIANTS[variant](*batch)
        token_logps.sum().backward()
        seconds.append(time.perf_counter() - start)
    peak = None if before is None else peak_bytes() - before
    print(json.dumps({"seconds": statistics.median(seconds[1:]), "peak": peak}))


def measure_tokens(rounds: int) -> list[Comparison]:
    small = token_batch(3, 16, 50)
    (ours, _), (full, _) = (variant(*small) for variant in TOKEN_VARIANTS.values())
    torch.testing.assert_close(ours, full)
    torch.testing.assert_close(*(torch.autograd.grad(logps.sum(), small[0])[0] for logps in (ours, full)))
    child = "-m", "verification.benchmark", "--threads", str(torch.get_num_threads()), "--token-child"
    results = {variant: [] for variant in TOKEN_VARIANTS}
    for number in range(rounds):
        progress(f"tokens: round {number + 1} of {rounds}")
        for variant in sorted(TOKEN_VARIANTS, reverse=bool(number % 2)):
            results[variant].append(json.loads(run_python(*child, variant).output))
    what = "response_token_logps (4, 512, 32000)"
    time_columns = [[1e3 * result["seconds"] for result in results[variant]] for variant in ("ours", "full")]
    found = [Comparison(f"{what}, time", "full log_softmax", "ms", *time_columns, 1.0)]
    if results["ours"][0]["peak"] is not None:
        memory = [[result["peak"] / 1e6 for result in results[variant]] for variant in ("ours", "full")]
        found.append(Comparison(f"{what}, peak memory", "full log_softmax", "MB", *memory, 1.0))
    return found


# ------------------------------------------------------------------------------------------ whole processes


class Process(NamedTuple):
    """What a whole process took, in seconds, and what it printed."""

    wall: float
    cpu: float
    output: str


def run_python(*arguments: str) -> Process:
    """Run Python at the top level of the lab; seconds from start to end, and of the processors meanwhile."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    start, before = time.perf_counter(), os.times()
    finished = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, os.times()
    if finished.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} ended with {finished.returncode}:\n{finished.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Process(wall, cpu, finished.stdout)


def measure_process(rounds: int) -> list[Comparison]:
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        lab, peer = ("rl_lab.py", "--algorithm", "all", "--output", folder), ("-c", "import torch")
        for number in range(rounds + 1):
            progress(f"process: round {number} of {rounds}")
            for command, runs in ((lab, ours), (peer, theirs)) if number % 2 else ((peer, theirs), (lab, ours)):
                runs.append(run_python(*command))
    what, named = "rl_lab.py --algorithm all", "python -c 'import torch'"
    # The first round is the warm-up: it fills the file cache.
    wall = [[run.wall for run in runs[1:]] for runs in (ours, theirs)]
    cpu = [[run.cpu for run in runs[1:]] for runs in (ours, theirs)]
    found = [Comparison(f"{what}, time", named, "s", *wall, PROCESS_BOUND)]
    # Windows does not say what a child used.
    return found + ([Comparison(f"{what}, processor time", named, "s", *cpu, None)] if all(cpu[1]) else [])


ADAM_CHILD = """
import json, sys, time
start = time.perf_counter()
import torch
imported = time.perf_counter() - start
parameters = [torch.zeros(4, 3, requires_grad=True)]
modules = len(sys.modules)
start = time.perf_counter()
torch.optim.Adam(parameters, lr=0.08)
print(json.dumps([time.perf_counter() - start, imported, len(sys.modules) - modules]))
"""


def measure_adam(rounds: int) -> list[Comparison]:
    runs = []
    for number in range(rounds + 1):
        progress(f"adam: round {number} of {rounds}")
        runs.append(json.loads(run_python("-c", ADAM_CHILD).output))
    constructed, imported, modules = (list(column) for column in zip(*runs[1:]))
    what = f"first torch.optim.Adam(...), imports {statistics.median(modules):.0f} modules"
    return [Comparison(what, "import torch", "s", constructed, imported, None)]


MEASUREMENTS = dict(
    gae=measure_gae, half=measure_half, tokens=measure_tokens, process=measure_process, adam=measure_adam
)


def build_parser() -> LabParser:
    summary, _, rest = __doc__.partition("\n")
    parser = LabParser(prog="python -m verification.benchmark", description=summary, epilog=rest.strip())

    def positive(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= 1000:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number from 1 to 1000")
        return int(text)

    parser.add_argument("--rounds", type=positive, default=9, metavar="N", help="rounds of each comparison; default 9")
    parser.add_argument(
        "--threads", type=positive, default=THREADS, metavar="N",
        help=f"threads of gae and tokens; default {THREADS}, torch's own. 1 is steadier on a machine that is busy",
    )
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), help="default: all")
    parser.add_argument("--token-child", choices=TOKEN_VARIANTS, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    torch.set_num_threads(arguments.threads)
    if arguments.token_child:
        token_child(arguments.token_child)
        return
    found = [comparison for name in arguments.only for comparison in MEASUREMENTS[name](arguments.rounds)]
    if not found:
        return
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{load}, {torch.get_num_threads()} threads, Python "
        f"{platform.python_version()}, torch {torch.__version__}; medians of {arguments.rounds} rounds in turn\n"
    )
    print(format_table(HEADER, [comparison.row() for comparison in found]))
    print("\nratio: ours / peer's, below 1 is faster or smaller; bound: the median this project asks of itself.")


if __name__ == "__main__":
    run_command(main)
