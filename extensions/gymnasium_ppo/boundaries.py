"""Where an episode ends inside a rollout, what the value after it is, and five well-known mistakes with exact numbers.

A new mistake is one entry of MISTAKES with its function in `_with_mistake` (or, for garbage rows, in `kept_rows`) and one
row of `toy_table`.

Letters: N environments, T rows of a rollout. The last axis is time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_lab import gae


class Mistake(NamedTuple):
    """A well-known wrong treatment of boundaries that can be switched on."""

    what: str
    toy: str  # its number on a toy, in words; `toy_table` computes it


MISTAKES = {
    "one-done": Mistake(
        "one flag, terminated or truncated, stops bootstrap and recursion: a time limit counts as a real end",
        "last step before a time limit: -gamma / (1 - gamma), -49 at gamma 0.98",
    ),
    "no-bootstrap": Mistake(
        "the last row of a rollout is taken for a real end: nothing is bootstrapped where the buffer was cut",
        "last row of a buffer: -gamma / (1 - gamma), -49 at gamma 0.98",
    ),
    "reset-value": Mistake(
        "at a time limit the value is that of the next episode's first observation, not of the final observation",
        "three states before a rewarding one, gamma 0.9: -2.439",
    ),
    "mask-late": Mistake(
        "the flags of the ends are read one row late, and the value of the next row is bootstrapped",
        "end at row 1, values (5, 5, 100): +96 in place of -4",
    ),
    "garbage-rows": Mistake(
        "next-step autoreset: the row that only resets stays in the batch as if it were a transition",
        "every garbage row: (gamma - 1) V = -1; their share is 1 / (n + 1) for episodes of n steps",
    ),
}


class Steps(NamedTuple):
    """What advantages are computed from. All [N, T]; floating, the last three bool."""

    rewards: Tensor
    values: Tensor  # V(s_t)
    next_values: Tensor  # V of the true next observation, before any reset
    terminated: Tensor  # a real end: nothing comes after
    truncated: Tensor  # a time limit: something would have come after
    valid: Tensor  # False: next-step autoreset, the row only resets; it is no transition


def advantages_of(steps: Steps, gamma: float, lam: float, mistake: str | None = None) -> tuple[Tensor, Tensor]:
    """GAE over rows that may hold several episodes and garbage rows -> (advantages [N, T], returns [N, T]).

    delta_t = r_t + gamma (0 if terminated_t else V(next_t)) - V(s_t); A_t = delta_t + gamma lam (0 if boundary_t else A_t+1).
    boundary = terminated or truncated, and the last row. Both flags at once: terminated wins, nothing is bootstrapped. Rows
    that are not valid get a number, too; it reaches no other row, since the row before them is a boundary, and the caller
    selects it away (`kept_rows`).

    Gradient: none. Raises what rl_lab.gae raises, ValueError for an unknown mistake. Source: arXiv 1506.02438; time limits as
    in arXiv 1712.00378 (partial-episode bootstrapping).
    """
    if mistake is not None and mistake not in MISTAKES:
        raise ValueError(f"mistake: got {mistake!r}, wanted one of {', '.join(MISTAKES)}")
    boundary = steps.terminated | steps.truncated
    terminated, next_values = steps.terminated, steps.next_values
    if mistake is not None:
        terminated, boundary, next_values = _with_mistake(mistake, steps, boundary)
    boundary = boundary.clone()
    boundary[..., -1] = True
    return gae(steps.rewards, steps.values, next_values, terminated, boundary, gamma, lam)


def kept_rows(valid: Tensor, mistake: str | None = None) -> Tensor:
    """Rows that enter the batch [N, T] bool: the transitions; with the mistake garbage-rows, all."""
    return torch.ones_like(valid) if mistake == "garbage-rows" else valid


def _with_mistake(mistake: str, steps: Steps, boundary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """terminated, boundary and next_values as a program with this mistake has them."""
    terminated, next_values = steps.terminated, steps.next_values
    if mistake == "one-done":
        return boundary, boundary, next_values
    if mistake == "no-bootstrap":
        terminated = terminated.clone()
        terminated[..., -1] = True
        return terminated, boundary, next_values
    if mistake == "reset-value":
        return terminated, boundary, torch.where(boundary, _value_after_reset(steps), next_values)
    if mistake == "mask-late":
        late = boundary.roll(1, dims=-1)
        late[..., 0] = False
        following = torch.where(boundary, _value_of_row(steps, 1), next_values)
        return late & terminated.roll(1, dims=-1), late, following
    return terminated, boundary, next_values


def _value_of_row(steps: Steps, later: int) -> Tensor:
    """V of the observation that many rows later in the buffer, whatever episode it belongs to; at the end, the true one."""
    result = steps.next_values.clone()
    result[..., :-later] = steps.values[..., later:]
    return result


def _value_after_reset(steps: Steps) -> Tensor:
    """V of the first observation of the next episode: one row later, or two where the row between only resets."""
    garbage_follows = (~steps.valid).roll(-1, dims=-1)
    garbage_follows[..., -1] = False
    two_later = _value_of_row(steps, 2) if steps.values.shape[-1] > 2 else steps.next_values
    return torch.where(garbage_follows, two_later, _value_of_row(steps, 1))


# ------------------------------------------------------------------------------------------ toys


def constant_reward_toy(gamma: float, limit: int, episodes: int = 1, after: int = 0) -> Steps:
    """Reward 1 for ever, V* = 1 / (1 - gamma) everywhere, a time limit: the right advantage is 0 in every row.

    `after`: so many rows of the next episode follow, and the buffer is cut there. -> Steps [1, episodes * limit + after].
    """
    rows = episodes * limit + after
    value = torch.full((1, rows), 1 / (1 - gamma), dtype=torch.float64)
    truncated = (torch.arange(1, rows + 1) % limit == 0).unsqueeze(0)
    none = torch.zeros(1, rows, dtype=torch.bool)
    return Steps(torch.ones_like(value), value, value.clone(), none, truncated, ~none)


def staircase_toy() -> Steps:
    """Three states without reward before one that earns 1 for ever; gamma 0.9, a time limit after three steps, twice.

    V* = (7.29, 8.1, 9), V(final observation) = 10: the right advantage is 0 in every row. -> Steps [1, 6].
    """
    states = torch.tensor([[0, 1, 2, 0, 1, 2]])
    value, following = (10 * 0.9 ** (3 - s).double() for s in (states, states + 1))
    none = torch.zeros(1, 6, dtype=torch.bool)
    return Steps(torch.zeros_like(value), value, following, none, states == 2, ~none)


def late_mask_toy() -> Steps:
    """Two rows of an episode that ends, one row of the next; reward 1, values 5, 5, 100. -> Steps [1, 3]."""
    value = torch.tensor([[5.0, 5.0, 100.0]], dtype=torch.float64)
    following = torch.tensor([[5.0, 0.0, 100.0]], dtype=torch.float64)
    end = torch.tensor([[False, True, False]])
    return Steps(torch.ones_like(value), value, following, end, torch.zeros_like(end), torch.ones_like(end))


def garbage_toy(gamma: float, length: int, episodes: int) -> Steps:
    """The constant-reward toy as next-step autoreset records it: a row of reward 0 after each episode's last."""
    rows = episodes * (length + 1)
    row = torch.arange(1, rows + 1) % (length + 1)
    valid = (row != 0).unsqueeze(0)
    value = torch.full((1, rows), 1 / (1 - gamma), dtype=torch.float64)
    none = torch.zeros_like(valid)
    return Steps(valid.double(), value, value.clone(), none, (row == length).unsqueeze(0), valid)


def off_share(advantages: Tensor, value: float, tolerance: float = 0.01) -> float:
    """Share of rows whose advantage is wrong by more than this share of V, where the right one is 0."""
    return (advantages.abs() > tolerance * value).double().mean().item()


def toy_table(lam: float = 0.95) -> list[tuple[str, str, float, float]]:
    """(mistake, where, right number, wrong number) for every mistake, computed by the code that trains."""
    table = []

    def row(mistake: str, where: str, steps: Steps, gamma: float, lam: float, at: int) -> None:
        right, wrong = (advantages_of(steps, gamma, lam, name)[0][0, at].item() for name in (None, mistake))
        table.append((mistake, where, right, wrong))

    for gamma, limit in ((0.98, 500), (0.9, 200), (0.99, 200)):
        toy = constant_reward_toy(gamma, limit)
        row("one-done", f"reward 1, gamma {gamma}, limit {limit}: A of the last step", toy, gamma, lam, -1)
        row("one-done", f"reward 1, gamma {gamma}, limit {limit}: A 20 steps earlier", toy, gamma, lam, -21)
        wrong = advantages_of(toy, gamma, lam, "one-done")[0]
        where = f"reward 1, gamma {gamma}, limit {limit}: share off by 1 % of V"
        table.append(("one-done", where, 0.0, off_share(wrong, 1 / (1 - gamma))))
    cut = constant_reward_toy(0.98, 500, after=100)
    row("no-bootstrap", "reward 1, gamma 0.98, buffer cut: A of its last row", cut, 0.98, lam, -1)
    row("reset-value", "staircase, gamma 0.9: A of the last step", staircase_toy(), 0.9, lam, 2)
    row("mask-late", "V = (5, 5, 100), gamma 1, lambda 0: A of the end", late_mask_toy(), 1.0, 0.0, 1)
    for length, episodes in ((9, 10), (200, 2)):
        toy = garbage_toy(0.98, length, episodes)
        wrong = advantages_of(toy, 0.98, lam, "garbage-rows")[0][~toy.valid][0].item()
        table.append(("garbage-rows", f"reward 1, gamma 0.98, length {length}: A of a garbage row", 0.0, wrong))
        share = (kept_rows(toy.valid, "garbage-rows") & ~toy.valid).double().mean().item()
        table.append(("garbage-rows", f"length {length}: share of garbage in the batch", 0.0, share))
    return table
