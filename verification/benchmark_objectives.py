"""Time of one evaluation of extensions.objectives against TRL's own loss and its backward pass, on the same arrays.

    python -m verification.benchmark_objectives [--rows 512] [--width 1024] [--repeats 15] [--threads 2]

Needs TRL (`python -m pip install trl==1.16.0`). TRL's `GRPOTrainer._compute_loss` is called as it is shipped, its metrics
included, on a trainer whose forward pass hands back the given log-probabilities: no model runs on either side. Ours is
`evaluate`: loss, gradient in closed form, advantages from rewards and the three clip fractions; then once more with
`make_batch`, which checks the arrays. Both compute in float32. Rounds alternate between the programs, and the median round
is printed, so that a busy machine disturbs both. The results are compared before anything is timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Callable

import torch

import rl_lab
from extensions.objectives import ROWS, evaluate, make_batch

CASES = {  # name -> (row of the table, TRL's options)
    "grpo": (ROWS["grpo@trl-1.16.0"], dict(loss_type="grpo")),
    "grpo, beta 0.04": (replace(ROWS["grpo@trl-1.16.0"], kl_coef=0.04), dict(loss_type="grpo", beta=0.04)),
    "dapo": (ROWS["dapo@trl-1.16.0"], dict(loss_type="dapo")),
    "dr_grpo": (replace(ROWS["dr_grpo@trl-1.16.0"], scale="group_std"), dict(loss_type="dr_grpo")),
    "gspo": (ROWS["gspo@trl-1.16.0"], dict(loss_type="grpo", importance_sampling_level="sequence")),
    "cispo": (replace(ROWS["cispo@trl-1.16.0"], clip_high=4.0), dict(loss_type="cispo", epsilon_high=5.0)),
    "sapo": (ROWS["sapo@trl-1.16.0"], dict(loss_type="sapo")),
}


def arrays(rows: int, width: int) -> dict[str, torch.Tensor]:
    """A batch of answers of uneven length with ratios around 1, groups of 8; float32."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    logps = -torch.rand(rows, width, generator=generator) * 3
    return {
        "logps": logps,
        "old_logps": logps + 0.2 * torch.randn(rows, width, generator=generator),
        "ref_logps": logps + 0.3 * torch.randn(rows, width, generator=generator),
        "mask": torch.arange(width) < lengths.unsqueeze(1),
        "rewards": torch.rand(rows, generator=generator),
        "group_ids": torch.arange(rows) // 8,
    }


def trl_loss(data: dict[str, torch.Tensor], advantages: torch.Tensor, options: dict) -> Callable[[], tuple]:
    """A function that runs TRL's loss and backward once and returns both results."""
    from trl import GRPOTrainer

    settings = (
        dict(loss_type="grpo", beta=0.0, epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token") | options
    )
    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        settings,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=data["mask"].shape[1],
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            use_bias_correction_kl=True,
            delta=None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _metrics={"train": defaultdict(list)},
    )
    logps = data["logps"].clone().requires_grad_()
    entropies = torch.ones_like(data["logps"])
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, entropies, None)
    ids = torch.zeros(data["mask"].shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": data["mask"].long(),
        "advantages": advantages,
        "old_per_token_logps": data["old_logps"],
        "ref_per_token_logps": data["ref_logps"],
        "num_items_in_batch": data["mask"].sum(),
    }

    def run() -> tuple:
        logps.grad = None
        loss = trainer._compute_loss(None, inputs)
        loss.backward()
        return loss.detach(), logps.grad

    return run


def median_times(programs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each program; one run of each a round, after one warm-up."""
    times = {name: [] for name in programs}
    for number in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = rl_lab.LabParser(prog="python -m verification.benchmark_objectives", description=__doc__.partition("\n")[0])
    for name, default in (("rows", 512), ("width", 1024), ("repeats", 15), ("threads", torch.get_num_threads())):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default {default}")
    arguments = parser.parse_args()
    if min(vars(arguments).values()) < 1 or arguments.rows % 8:
        parser.error("every number must be at least 1, and --rows a multiple of 8")
    try:
        import trl
    except ModuleNotFoundError:
        sys.exit("benchmark_objectives: TRL is not installed here; python -m pip install trl==1.16.0")
    torch.set_num_threads(arguments.threads)
    data = arrays(arguments.rows, arguments.width) | {"budget": arguments.width}
    lines = []
    for name, (row, options) in CASES.items():
        read = {array: data[array] for array in ("logps", "mask", *row.needs)}
        batch = make_batch(**read)
        ours = evaluate(row, batch)
        theirs = trl_loss(data, ours.advantages[:, 0].contiguous(), options)
        loss, gradient = theirs()
        difference = ((gradient - ours.dloss_dlogps).abs().max() / gradient.abs().max()).item()
        if difference > 1e-4:
            sys.exit(f"benchmark_objectives: {name}: gradients differ by {difference:.1e}; no use in timing")
        seconds = median_times(
            {
                "trl": theirs,
                "evaluate": lambda: evaluate(row, batch),
                "make_batch": lambda: evaluate(row, make_batch(**read)),
            },
            arguments.repeats,
        )
        lines.append(
            [
                name,
                *(f"{1000 * seconds[program]:.1f}" for program in ("trl", "evaluate", "make_batch")),
                f"{seconds['evaluate'] / seconds['trl']:.2f}",
                f"{seconds['make_batch'] / seconds['trl']:.2f}",
                f"{difference:.0e}",
            ]
        )
        print(f"{name}: done", file=sys.stderr)
    print(
        f"({arguments.rows}, {arguments.width}) tokens, float32, {arguments.threads} threads, TRL {trl.__version__}; "
        f"median of {arguments.repeats}, milliseconds"
    )
    header = [
        "objective",
        "TRL loss + backward",
        "evaluate",
        "make_batch + evaluate",
        "ratio",
        "ratio with make_batch",
        "gradient difference",
    ]
    print(rl_lab.format_table(header, lines))
    print("ratio: ours / TRL's; at most 1 is what this project asks of itself.")


if __name__ == "__main__":
    main()
