"""PPO on a two-step decision tree: how GAE carries a reward back to a step that earned nothing.

State 0: action 0 leads to state 1, action 1 to state 2, reward 0. In states 1 and 2 either action ends the episode with
a reward from `TERMINAL_REWARDS`. The policy is a 3x2 table of logits, the critic three scalars, all zero at the start.

Same as the paper: sampling from the old policy, GAE, the clipped surrogate, value regression on lambda-returns. Left out:
reference KL, entropy bonus, advantage standardisation, value clipping, minibatches. It is not the paper's configuration.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple, Sequence

# First of the imports that take time: it answers Ctrl-C while torch is loading.
from rl_lab import (
    Adam,
    LabParser,
    OnStep,
    Range,
    Rollout,
    UpdateSettings,
    action_logps,
    add_settings,
    categorical_kl,
    check_writable,
    chosen_settings,
    csv_text,
    format_table,
    gae,
    json_text,
    ppo_loss,
    progress_line,
    replace_files,
    reuse_batch,
    rows_of,
    run_command,
    setting,
    software,
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

    gae_lambda: float = setting(0.95, Range(float, 0, 1), "how far GAE carries residuals back: 0 one step, 1 all", "GAE")
    gamma: float = setting(1.0, Range(float, 0, 1), "discount of each step", "GAE")
    episodes: int = setting(64, Range(int, 1, 100_000), "complete two-step episodes per iteration", "rollout")


class Transitions(NamedTuple):
    """Steps in the order they happened, episode by episode: [e0 t0, e0 t1, e1 t0, e1 t1, ...]; every shape is [2 E]."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    old_values: Tensor
    next_values: Tensor
    terminated: Tensor
    boundary: Tensor
    old_logp: Tensor


def episode_by_episode(first_step: Tensor, second_step: Tensor) -> Tensor:
    """[E] and [E] -> [2 E], each episode's two steps side by side.

    All first steps followed by all second steps would let the recursion of `gae` run from one episode into another.
    """
    return torch.stack([first_step, second_step], dim=1).flatten()


def sample_episodes(policy: Tensor, critic: Tensor, episodes: int, generator: torch.Generator) -> Transitions:
    """Complete episodes of the current policy. policy [3, 2] logits, critic [3] -> transitions, all detached."""
    with torch.no_grad():
        probability = policy.softmax(dim=-1)
        first_action = torch.multinomial(probability[0], episodes, replacement=True, generator=generator)
        second_state = 1 + first_action
        second_action = torch.multinomial(probability[second_state], 1, generator=generator).squeeze(1)
        states = episode_by_episode(torch.zeros_like(second_state), second_state)
        actions = episode_by_episode(first_action, second_action)
        final_reward = TERMINAL_REWARDS[second_state - 1, second_action]
        ends = episode_by_episode(torch.zeros_like(second_state), torch.ones_like(second_state)).bool()
        return Transitions(
            states=states,
            actions=actions,
            rewards=episode_by_episode(torch.zeros_like(final_reward), final_reward),
            old_values=critic[states],
            # Nothing follows the second step; `gae` does not read its next value, since it is terminated.
            next_values=episode_by_episode(critic[second_state], torch.zeros_like(final_reward)),
            terminated=ends,
            boundary=ends,
            old_logp=action_logps(policy[states], actions),
        )


def expected_return(policy: Tensor) -> Tensor:
    """J = sum_a pi(a|0) sum_b pi(b|s_a) R(s_a, b): all four routes, nothing sampled. policy [3, 2] logits -> scalar."""
    probability = policy.softmax(dim=-1)
    return (probability[0] * (probability[1:] * TERMINAL_REWARDS).sum(dim=-1)).sum()


def kl_at_visited_states(old: Tensor, current: Tensor, states: Tensor) -> Tensor:
    """KL(old || current), exact over the two actions, averaged over the states of the rollout: [3, 2] logits -> scalar."""
    return categorical_kl(old[states], current[states]).mean()


class ChainRun(NamedTuple):
    """What a training leaves behind."""

    settings: ChainSettings
    history: list[dict[str, float]]
    first_rollout_trace: list[dict]
    policy: Tensor
    critic: Tensor


def train_chain(*, on_step: OnStep | None = None, **settings: float) -> ChainRun:
    """Train the chain; `settings` are the fields of ChainSettings.

    Each iteration: sample episodes; one call of `gae` on the flat transitions; up to `max_updates` updates of
    mean(clipped policy loss) + value_weight * mean((V - lambda_return)^2) on that batch; evaluate exactly.
    Same arguments, same numbers; no global random state is read or moved.
    Raises ValueError for a setting out of range, FloatingPointError when a loss or gradient is not finite.
    """
    settings = ChainSettings(**settings)
    policy = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    critic = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = Adam([policy, critic], settings.learning_rate)
    generator = torch.Generator().manual_seed(settings.seed)
    counts = {"optimizer_steps": 0, "sampled_actions": 0}
    history: list[dict[str, float]] = []

    def record(step: int, kl_old_current: float, update: dict[str, float]) -> None:
        with torch.no_grad():
            probability = policy.softmax(dim=-1)
            row = {
                "step": step,
                "expected_return": expected_return(policy).item(),
                "probability_state_1": probability[0, 0].item(),
                "value_start": critic[0].item(),
                "entropy": torch.special.entr(probability).sum(dim=-1).mean().item(),
                "kl_old_current": kl_old_current,
                **update,
                **counts,
            }
        history.append({name: row[name] for name in COLUMNS})
        if on_step:
            on_step(history[-1])

    record(0, 0.0, dict.fromkeys(("loss", "value_loss", "gradient_norm", "clip_fraction", "stopped_early"), 0))
    for step in range(1, settings.steps + 1):
        steps = sample_episodes(policy, critic, settings.episodes, generator)
        advantages, lambda_returns = gae(
            steps.rewards, steps.old_values, steps.next_values, steps.terminated, steps.boundary,
            gamma=settings.gamma, lam=settings.gae_lambda,
        )  # fmt: skip
        batch = Rollout(
            steps.states, steps.actions, steps.rewards, steps.old_logp, advantages, steps.old_values, lambda_returns
        )
        if step == 1:
            trace = trace_episodes(steps, advantages, lambda_returns)
        updates = reuse_batch(
            lambda: ppo_loss(policy, critic, batch, None, settings),
            lambda old, current: kl_at_visited_states(old, current, steps.states),
            policy,
            optimizer,
            settings.max_updates,
            settings,
            f"ppo_chain, step {step}",
        )
        counts["optimizer_steps"] += updates.count
        counts["sampled_actions"] += steps.actions.numel()
        drift = kl_at_visited_states(updates.policies[0], updates.policies[-1], steps.states).item()
        record(step, drift, updates.update)
    return ChainRun(settings, history, trace, policy.detach(), critic.detach())


def trace_episodes(steps: Transitions, advantages: Tensor, lambda_returns: Tensor, episodes: int = 4) -> list[dict]:
    """The first complete episodes of a rollout, one row per step, from sampled action to value target."""
    index = torch.arange(len(steps.states))
    columns = dict(episode=index // 2, t=index % 2, state=steps.states, action=steps.actions, reward=steps.rewards)
    columns.update(old_value=steps.old_values, next_value=steps.next_values)
    columns.update(terminated=steps.terminated, boundary=steps.boundary)
    columns.update(advantage=advantages, lambda_return=lambda_returns)
    return rows_of(columns)[: 2 * episodes]


# ------------------------------------------------------------------------------------------ command line

DESCRIPTION = """\
Train PPO on a tree of two decisions where only the second is rewarded, on the CPU, in seconds.
Writes OUTPUT/ppo_chain.csv (one row an iteration) and OUTPUT/ppo_chain.json (settings, first episodes),
and prints where the advantage of the unrewarded first step comes from."""

EXAMPLES = """\
examples:
  python -B ppo_chain.py --seed 7 --gae-lambda 0.95 --output results-chain
  python -B ppo_chain.py --seed 7 --gae-lambda 0 --output results-chain-lambda0
  python -B ppo_chain.py --seed 7 --gae-lambda 1 --output results-chain-lambda1"""


def explain_trace(run: ChainRun) -> str:
    """The first episodes as a table, and the arithmetic of the first one that was rewarded."""
    trace, settings = run.first_rollout_trace, run.settings
    header = list(trace[0])
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in trace]
    lines = ["First batch, before any update (the critic is still zero):", "", format_table(header, cells), ""]
    pairs = list(zip(trace[::2], trace[1::2]))
    first, second = next((pair for pair in pairs if pair[1]["reward"]), pairs[0])
    delta_0 = first["reward"] + settings.gamma * first["next_value"] - first["old_value"]
    delta_1 = second["reward"] - second["old_value"]
    lines += [
        f"Episode {first['episode']}, backwards:",
        f"  A_1 = delta_1 = r_1 - V(s_1) = {second['reward']:g} - {second['old_value']:g} = {delta_1:g}"
        "   (terminated: no bootstrap; boundary: nothing carried in)",
        f"  A_0 = delta_0 + gamma * lambda * A_1 = {delta_0:g} + {settings.gamma:g} * {settings.gae_lambda:g} * {delta_1:g}"
        f" = {first['advantage']:g}   (delta_0 = r_0 + gamma * V(s_1) - V(s_0))",
    ]
    if settings.gae_lambda == 0:
        lines.append("  With lambda 0 the first step learns only after the critic has: through V(s_1) in delta_0.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = LabParser(description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "--output", type=Path, default=Path("results-chain"), metavar="DIR", help="folder to write; default results-chain"
    )
    add_settings(parser, ChainSettings)
    arguments = parser.parse_args(argv)
    settings = chosen_settings(arguments, ChainSettings)
    table, document = arguments.output / "ppo_chain.csv", arguments.output / "ppo_chain.json"
    check_writable([table, document], expected_bytes=500 * (settings["steps"] + 100))

    run = train_chain(on_step=progress_line("chain", settings["steps"], "expected_return"), **settings)
    saved = {
        "config": dataclasses.asdict(run.settings),
        "reward_table": TERMINAL_REWARDS.tolist(),
        "software": software(),
        "initial_metrics": run.history[0],
        "final_metrics": run.history[-1],
        "first_rollout_trace": run.first_rollout_trace,
    }
    replace_files({table: csv_text(run.history), document: json_text(saved)})

    before, after = run.history[0], run.history[-1]
    print(explain_trace(run))
    print(f"\nseed {settings['seed']}, {settings['steps']} iterations, lambda {settings['gae_lambda']:g}\n")
    names = ("expected_return", "probability_state_1", "value_start", "entropy")
    print(format_table(["", "before", "after"], [[name, f"{before[name]:.4f}", f"{after[name]:.4f}"] for name in names]))
    best = TERMINAL_REWARDS.max().item()
    print(f"\nThe best possible return is {best:g} (undiscounted). value_start is the critic's estimate and may exceed it.")
    cost = f"{after['sampled_actions']} sampled actions, {after['optimizer_steps']} optimizer steps"
    print(f"Cost: {cost}. Files: {table}, {document}")


if __name__ == "__main__":
    run_command(main)
