"""PPO on a two-step decision tree: how GAE carries a reward back to a step that earned nothing.

State 0: action 0 leads to state 1, action 1 to state 2, reward 0. In states 1 and 2 either action ends the episode with
a reward from `TERMINAL_REWARDS`. The policy is a 3x2 table of logits, the critic three scalars, all zero at the start.

Same as the paper: sampling from the old policy, GAE, the clipped surrogate, value regression on lambda-returns. Left out:
reference KL, entropy bonus, advantage standardisation, value clipping, minibatches. It is not the paper's configuration.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import NamedTuple, Sequence

# First of the imports that take time: it answers Ctrl-C while torch is loading.
from rl_lab import (
    Adam,
    BanditSettings,
    Generators,
    LabParser,
    OnStep,
    Range,
    Rollout,
    UpdateSettings,
    Variant,
    action_logps,
    add_seeds,
    add_settings,
    categorical_kl,
    check_history_memory,
    check_seeds_given_once,
    check_writable,
    csv_text,
    draw,
    flag_of,
    format_table,
    gae,
    in_context,
    json_text,
    list_of_files,
    median_of,
    name_of_seeds,
    name_of_step,
    of_run,
    path_argument,
    ppo_loss,
    progress_line,
    readable,
    replace_files,
    result_paths,
    reuse_batch,
    rows_of,
    rows_of_runs,
    run_command,
    setting,
    short_name,
    software,
    title,
    variants_of,
)

import torch  # isort: skip
from torch import Tensor  # isort: skip

TERMINAL_REWARDS = torch.tensor([[1.0, 0.0], [0.2, 0.0]], dtype=torch.float64)
"""Reward of the second action (column) in state 1 (first row) and state 2 (second row)."""

COLUMNS = (
    "step",
    "expected_return",
    "probability_state_1",
    "value_start",
    "entropy",
    "kl_old_current",
    "loss",
    "value_loss",
    "gradient_norm",
    "clip_fraction",
    "stopped_early",
    "optimizer_steps",
    "sampled_actions",
)


@dataclasses.dataclass(frozen=True)
class ChainSettings(UpdateSettings):
    """Every number of the chain's training."""

    gae_lambda: float = setting(
        0.95, Range(float, 0, 1), "how far GAE carries residuals back: 0 one step, 1 all", "GAE", short="lambda"
    )
    gamma: float = setting(1.0, Range(float, 0, 1), "discount of each step", "GAE")
    episodes: int = setting(64, Range(int, 1, 100_000), "complete two-step episodes per iteration", "rollout")


class Transitions(NamedTuple):
    """Steps in the order they happened, episode by episode: [e0 t0, e0 t1, e1 t0, e1 t1, ...]; every shape is [2 E].

    Of S runs side by side, [S, 2 E].
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    old_values: Tensor
    next_values: Tensor
    terminated: Tensor
    boundary: Tensor
    old_logp: Tensor


def episode_by_episode(first_step: Tensor, second_step: Tensor) -> Tensor:
    """[..., E] and [..., E] -> [..., 2 E], each episode's two steps side by side.

    All first steps followed by all second steps would let the recursion of `gae` run from one episode into another.
    """
    return torch.stack([first_step, second_step], dim=-1).flatten(-2)


def sample_episodes(policy: Tensor, critic: Tensor, episodes: int, generator: Generators) -> Transitions:
    """Complete episodes of the current policy. policy [3, 2] logits, critic [3] -> transitions, all detached.

    Of S runs side by side: policy [S, 3, 2], critic [S, 3] and a generator for each.
    """

    def choose(count: int, probability: Tensor) -> Tensor:
        return draw(lambda own, p: torch.multinomial(p, count, replacement=True, generator=own), generator, probability)

    with torch.no_grad():
        probability = policy.softmax(dim=-1)
        first_action = choose(episodes, probability[..., 0, :])
        second_state = 1 + first_action
        second_action = choose(1, in_context(probability, second_state)).squeeze(-1)
        states = episode_by_episode(torch.zeros_like(second_state), second_state)
        actions = episode_by_episode(first_action, second_action)
        final_reward = TERMINAL_REWARDS[second_state - 1, second_action]
        ends = episode_by_episode(torch.zeros_like(second_state), torch.ones_like(second_state)).bool()
        return Transitions(
            states=states,
            actions=actions,
            rewards=episode_by_episode(torch.zeros_like(final_reward), final_reward),
            old_values=in_context(critic, states, cell=0),
            # Nothing follows the second step; `gae` does not read its next value, since it is terminated.
            next_values=episode_by_episode(in_context(critic, second_state, cell=0), torch.zeros_like(final_reward)),
            terminated=ends,
            boundary=ends,
            old_logp=action_logps(in_context(policy, states), actions),
        )


def expected_return(policy: Tensor) -> Tensor:
    """J = sum_a pi(a|0) sum_b pi(b|s_a) R(s_a, b): all four routes, nothing sampled. policy [..., 3, 2] logits -> [...]."""
    probability = policy.softmax(dim=-1)
    return (probability[..., 0, :] * (probability[..., 1:, :] * TERMINAL_REWARDS).sum(dim=-1)).sum(dim=-1)


def kl_at_visited_states(old: Tensor, current: Tensor, states: Tensor) -> Tensor:
    """KL(old || current), exact over the two actions, averaged over the states of the rollout.

    [3, 2] logits, states [2 E] -> scalar; of S runs side by side, [S, 3, 2] and [S, 2 E] -> [S].
    """
    return categorical_kl(in_context(old, states), in_context(current, states)).mean(dim=-1)


class ChainRun(NamedTuple):
    """What a training leaves behind."""

    settings: ChainSettings
    history: list[dict[str, float]]
    first_rollout_trace: list[dict]
    policy: Tensor
    critic: Tensor

    def __repr__(self) -> str:
        first, end = self.history[0]["expected_return"], self.history[-1]["expected_return"]
        of = f"seed {self.settings.seed}, lambda {self.settings.gae_lambda:g}, {self.settings.steps} iterations"
        return f"<ppo_chain, {of}: expected return {first:.4f} -> {end:.4f}>"


def train_chain(*, on_step: OnStep | None = None, **settings: float) -> ChainRun:
    """Train the chain; `settings` are the fields of ChainSettings.

    Each iteration: sample episodes; one call of `gae` on the flat transitions; up to `max_updates` updates of
    mean(clipped policy loss) + value_weight * mean((V - lambda_return)^2) on that batch; evaluate exactly.
    Same arguments, same numbers; no global random state is read or moved.
    Raises ValueError for a setting out of range, FloatingPointError when a loss or gradient is not finite.
    """
    seed = settings.pop("seed", ChainSettings.seed)
    (run,) = train_chain_seeds([seed], on_step=on_step and (lambda rows: on_step(rows[0])), **settings)
    return run


def train_chain_seeds(seeds: Sequence[int], *, on_step=None, **settings: float) -> list[ChainRun]:
    """`train_chain` for several seeds at once, through the same tensors; see rl_lab.train_seeds."""
    of_seed = [ChainSettings(**settings, seed=seed) for seed in seeds]
    shared, alone = of_seed[0], len(seeds) == 1
    policy = torch.zeros(*() if alone else (len(seeds),), 3, 2, dtype=torch.float64, requires_grad=True)
    critic = torch.zeros(policy.shape[:-1], dtype=torch.float64, requires_grad=True)
    optimizer = Adam([policy, critic], shared.learning_rate)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    counts = {"optimizer_steps": torch.zeros(policy.shape[:-2], dtype=torch.long), "sampled_actions": 0}
    histories: list[list[dict[str, float]]] = [[] for _ in seeds]

    def record(step: int, kl_old_current: float | list[float], update: dict) -> None:
        columns = {"step": step, "kl_old_current": kl_old_current, **evaluate_chain(policy, critic), **update, **counts}
        columns["optimizer_steps"] = counts["optimizer_steps"].tolist()
        rows = rows_of_runs({name: columns[name] for name in COLUMNS}, len(seeds))
        for history, row in zip(histories, rows):
            history.append(row)
        if on_step:
            on_step(rows)

    record(0, 0.0, dict.fromkeys(("loss", "value_loss", "gradient_norm", "clip_fraction", "stopped_early"), 0))
    for step in range(1, shared.steps + 1):
        steps = sample_episodes(policy, critic, shared.episodes, generators[0] if alone else generators)
        advantages, lambda_returns = gae(
            steps.rewards, steps.old_values, steps.next_values, steps.terminated, steps.boundary,
            gamma=shared.gamma, lam=shared.gae_lambda,
        )  # fmt: skip
        batch = Rollout(
            steps.states, steps.actions, steps.rewards, steps.old_logp, advantages, steps.old_values, lambda_returns
        )
        if step == 1:
            traces = [trace_episodes(*own) for own in runs_of(alone, steps, advantages, lambda_returns)]
        updates = reuse_batch(
            lambda: ppo_loss(policy, critic, batch, None, shared),
            lambda old, current: kl_at_visited_states(old, current, steps.states),
            policy,
            optimizer,
            shared.max_updates,
            shared,
            name_of_step("ppo_chain", seeds, step),
        )
        counts["optimizer_steps"] += torch.tensor(updates.count)
        counts["sampled_actions"] += steps.actions.shape[-1]
        record(step, kl_at_visited_states(updates.policies[0], updates.policies[-1], steps.states).tolist(), updates.update)
    ends = [(policy.detach(), critic.detach())] if alone else zip(policy.detach(), critic.detach())
    return [ChainRun(*own, *end) for *own, end in zip(of_seed, histories, traces, ends)]


def evaluate_chain(policy: Tensor, critic: Tensor) -> dict[str, float]:
    """Exact metrics; of S runs side by side, lists of S numbers."""
    with torch.no_grad():
        probability = policy.softmax(dim=-1)
        return {
            "expected_return": expected_return(policy).tolist(),
            "probability_state_1": probability[..., 0, 0].tolist(),
            "value_start": critic[..., 0].tolist(),
            "entropy": torch.special.entr(probability).sum(dim=-1).mean(dim=-1).tolist(),
        }


def runs_of(alone: bool, steps: Transitions, *columns: Tensor) -> list[tuple]:
    """The transitions and further columns of each run."""
    if alone:
        return [(steps, *columns)]
    return [(of_run(steps, run), *(column[run] for column in columns)) for run in range(len(steps.states))]


def trace_episodes(steps: Transitions, advantages: Tensor, lambda_returns: Tensor, episodes: int = 4) -> list[dict]:
    """The first complete episodes of a rollout, one row per step, from sampled action to value target."""
    index = torch.arange(len(steps.states))
    columns = dict(episode=index // 2, t=index % 2, state=steps.states, action=steps.actions, reward=steps.rewards)
    columns.update(old_value=steps.old_values, next_value=steps.next_values)
    columns.update(terminated=steps.terminated, boundary=steps.boundary)
    columns.update(advantage=advantages, lambda_return=lambda_returns)
    return rows_of({name: column[: 2 * episodes] for name, column in columns.items()})


# ------------------------------------------------------------------------------------------ command line

DESCRIPTION = """\
Train PPO on a tree of two decisions where only the second is rewarded, on
the CPU, in seconds. Writes OUTPUT/ppo_chain.csv (one row an iteration) and
OUTPUT/ppo_chain.json (settings, first episodes), and prints where the
advantage of the unrewarded first step comes from.

A setting takes a list, too: --gae-lambda 0,0.95,1 makes three runs, in
OUTPUT-lambda0, OUTPUT-lambda0.95, ..., and prints one table."""

EXAMPLES = """\
examples:
  python -B ppo_chain.py --seed 7 --gae-lambda 0.95 --output results-chain
  python -B ppo_chain.py --gae-lambda 0,0.95,1 --output results-chain
  python -B ppo_chain.py --gae-lambda 0,1 --seeds 0-19 --output chain-seeds"""

TRACE_HEADS = {
    "episode": "episode",
    "t": "t",
    "state": "state",
    "action": "action",
    "reward": "reward",
    "old_value": "V(s)",
    "next_value": "V(next)",
    "terminated": "ends",
    "boundary": "cut",
    "advantage": "A",
    "lambda_return": "A+V",
}
"""The printed name of each column of the trace; `ends` is terminated, `cut` boundary."""


def first_rewarded(run: ChainRun) -> tuple[dict, dict]:
    """The two steps of the first episode in the trace that was rewarded, or of the first episode."""
    pairs = list(zip(run.first_rollout_trace[::2], run.first_rollout_trace[1::2]))
    return next((pair for pair in pairs if pair[1]["reward"]), pairs[0])


def explain_trace(run: ChainRun) -> str:
    """The first episodes as a table, and the arithmetic of the first one that was rewarded."""
    trace, settings = run.first_rollout_trace, run.settings

    def cell(value: object) -> str:
        return ("no", "yes")[value] if isinstance(value, bool) else f"{value:.4g}"

    rows = [[cell(row[name]) for name in TRACE_HEADS] for row in trace]
    lines = ["First batch, before any update (the critic is still zero):", "", format_table(list(TRACE_HEADS.values()), rows)]
    first, second = first_rewarded(run)
    delta_0 = first["reward"] + settings.gamma * first["next_value"] - first["old_value"]
    delta_1 = second["reward"] - second["old_value"]
    lines += [
        "(ends: terminated, no bootstrap; cut: boundary, nothing carried in; A+V: return)",
        "",
        f"Episode {first['episode']}, backwards:",
        f"  A_1 = delta_1 = r_1 - V(s_1) = {second['reward']:g} - {second['old_value']:g} = {delta_1:g}",
        f"  A_0 = delta_0 + gamma * lambda * A_1 = {delta_0:g} + {settings.gamma:g} * {settings.gae_lambda:g} * {delta_1:g}"
        f" = {first['advantage']:g}",
        "  with delta_0 = r_0 + gamma * V(s_1) - V(s_0)",
    ]
    if settings.gae_lambda == 0:
        lines += ["  With lambda 0 the first step learns only after the critic has:", "  through V(s_1) in delta_0."]
    return "\n".join(lines)


MEASURES = {
    "expected return": "expected_return",
    "P(state 1)": "probability_state_1",
    "V(start)": "value_start",
    "entropy": "entropy",
}
"""What the tables show of a run, with the column that holds it."""


def summary(runs: Sequence[ChainRun]) -> str:
    """Before and after; several seeds become medians."""
    rows = [[name, *(readable(median_of(runs, column, row)) for row in (0, -1))] for name, column in MEASURES.items()]
    cost = f"{median_of(runs, 'sampled_actions'):.0f} sampled actions, {median_of(runs, 'optimizer_steps'):.0f} updates"
    best = f"The best possible return is {TERMINAL_REWARDS.max().item():g} (undiscounted)."
    estimate = "V(start) is the critic's estimate of it and may exceed it."
    return "\n".join([format_table(["", "before", "after"], rows), "", best, estimate, f"Cost: {cost}."])


def table_of_variants(variants: Sequence[Variant], runs: Sequence[Sequence[ChainRun]]) -> str:
    """A row for each variant: what varies, A_0 of the first batch's first rewarded episode, and the end (medians of seeds)."""
    fields = dataclasses.fields(ChainSettings)
    varied = [field for field in fields if len({variant.settings[field.name] for variant in variants}) > 1]
    rows = []
    for variant, own in zip(variants, runs):
        credit = statistics.median(first_rewarded(run)[0]["advantage"] for run in own)
        numbers = (credit, *(median_of(own, column) for column in MEASURES.values()))
        rows.append([*(f"{variant.settings[field.name]:g}" for field in varied), *map(readable, numbers)])
    table = format_table([*map(short_name, varied), "first A_0", *MEASURES], rows)
    return f"{table}\n\nfirst A_0: the unrewarded first step's advantage in the first rewarded episode"


def build_parser() -> LabParser:
    of_the_bandit = {flag_of(field): "rl_lab.py" for field in dataclasses.fields(BanditSettings)}
    of_the_bandit.update({"--algorithm": "rl_lab.py", "--reward-table": "rl_lab.py"})
    parser = LabParser(description=DESCRIPTION, epilog=EXAMPLES, flags_elsewhere=of_the_bandit)
    parser.add_argument(
        "--output", type=path_argument, default=Path("results-chain"), metavar="DIR",
        help="folder to write; default results-chain",
    )  # fmt: skip
    add_seeds(parser)
    add_settings(parser, ChainSettings, lists=True)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    check_seeds_given_once(parser, arguments)
    variants = variants_of(parser, arguments, ChainSettings)
    seeds, named = arguments.seeds or [arguments.seed], arguments.seeds or [None]
    folders = [variant.folder(arguments.output) for variant in variants]
    longest = max(variant.settings["steps"] for variant in variants)
    check_history_memory(longest * len(seeds) * len(variants))
    places = list(itertools.product(folders, ["ppo_chain"], named))
    check_writable([path for place in places for path in result_paths(*place)], expected_bytes=500 * (longest + 100))

    runs = []
    for variant, folder in zip(variants, folders):
        label = "  ".join(["chain", *variant.labels(), *[name_of_seeds(seeds)] * bool(arguments.seeds)])
        settings = {name: value for name, value in variant.settings.items() if name != "seed"}
        show = progress_line(label, settings["steps"], "expected_return")
        runs.append(train_chain_seeds(seeds, on_step=show, **settings))
        texts = {}
        for seed, run in zip(named, runs[-1]):
            texts.update(zip(result_paths(folder, "ppo_chain", seed), (csv_text(run.history), json_text(document_of(run)))))
        replace_files(texts)

    if len(variants) == 1 and not arguments.seeds:
        print(explain_trace(runs[0][0]) + "\n")
    print(title(variants, arguments.seed, arguments.seeds) + "\n")
    print(summary(runs[0]) if len(variants) == 1 else table_of_variants(variants, runs), end="\n\n")
    print(list_of_files(folders, ["ppo_chain"], arguments.seeds))


def document_of(run: ChainRun) -> dict:
    """What OUTPUT/ppo_chain.json holds."""
    return {
        "config": dataclasses.asdict(run.settings),
        "reward_table": TERMINAL_REWARDS.tolist(),
        "software": software(),
        "initial_metrics": run.history[0],
        "final_metrics": run.history[-1],
        "first_rollout_trace": run.first_rollout_trace,
    }


if __name__ == "__main__":
    run_command(main)
