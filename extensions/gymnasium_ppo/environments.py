"""Gymnasium vector environments with any autoreset mode behind one interface, and the collector that fills a rollout.

A space that is to be supported is one entry in `observation_reader` or `action_writer`; an autoreset mode one branch of
`Collector._advance`.

What Gymnasium 1.4 does at the end of an episode (measured; one environment, episode of three steps):
    next-step   the ending step returns the true final observation; the next step ignores its action and returns the first
                observation of the next episode, reward 0 and no flag: a garbage row, which is no transition
    same-step   the ending step returns the first observation of the next episode; the final one is info["final_obs"]
    disabled    the ending step returns the final observation; reset(options={"reset_mask": ended}) starts the next episode

Letters: N environments, T rows of a rollout, D numbers of an observation, A numbers or choices of an action.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, NamedTuple, Sequence

import numpy as np

from rl_lab import FileProblem

if TYPE_CHECKING:
    import gymnasium

MISSING = "gymnasium is not installed; python -m pip install -r extensions/requirements.txt brings it"

AUTORESET = {"next-step": "NEXT_STEP", "same-step": "SAME_STEP", "disabled": "DISABLED"}
"""Names on the command line -> members of gymnasium.vector.AutoresetMode."""


def import_gymnasium():
    """The package, or FileProblem with the one sentence that says how to get it."""
    try:
        import gymnasium
    except ModuleNotFoundError as problem:
        if problem.name != "gymnasium":
            raise
        raise FileProblem(MISSING) from problem
    return gymnasium


class Spaces(NamedTuple):
    """What a policy has to know of an environment."""

    observation_size: int  # D
    action_size: int  # number of choices, or numbers per action
    continuous: bool
    read: Callable[[np.ndarray], np.ndarray]  # observations of N environments -> a new [N, D] float64
    write: Callable[[np.ndarray], np.ndarray]  # the policy's actions -> what the environments take


def observation_reader(space: gymnasium.Space) -> tuple[int, Callable]:
    """Size of an observation and how a batch of them is read. Box: flattened; Discrete: one-hot. Raises ValueError."""
    spaces = import_gymnasium().spaces
    if isinstance(space, spaces.Box):
        return int(np.prod(space.shape)), lambda batch: np.array(batch, dtype=np.float64).reshape(len(batch), -1)
    if isinstance(space, spaces.Discrete):
        return int(space.n), lambda batch: np.eye(int(space.n))[np.asarray(batch, dtype=int) - int(space.start)]
    raise ValueError(f"its observations are {type(space).__name__}, wanted Box or Discrete")


def action_writer(space: gymnasium.Space) -> tuple[int, bool, Callable]:
    """Size of an action, whether it is continuous, and how a batch is handed over. Raises ValueError.

    Box: the raw action of the Gaussian, clipped to the limits. The clipped one is executed; the raw one is stored, and its
    log-probability is the one that counts.
    """
    spaces = import_gymnasium().spaces
    if isinstance(space, spaces.Discrete):
        return int(space.n), False, lambda batch: batch + int(space.start)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = space.low.reshape(1, -1), space.high.reshape(1, -1)

        def clipped(batch: np.ndarray) -> np.ndarray:
            return np.minimum(np.maximum(batch, low), high).astype(space.dtype).reshape(len(batch), *space.shape)

        return low.size, True, clipped
    raise ValueError(f"its actions are {type(space).__name__}, wanted Discrete or Box of real numbers")


def make_environments(name: str, count: int, autoreset: str = "next-step", time_limit: int = 0):
    """N copies of a registered environment in one process -> (vector environment, Spaces).

    time_limit: steps after which an episode is truncated; 0: the environment's own limit. Raises ValueError, naming the
    environment, when it is unknown, cannot be built, or has other spaces than Box and Discrete; FileProblem without gymnasium.
    """
    gymnasium = import_gymnasium()
    limits = {"max_episode_steps": time_limit} if time_limit else {}

    def make():
        return gymnasium.make(name, disable_env_checker=True, **limits)

    mode = gymnasium.vector.AutoresetMode[AUTORESET[autoreset]]
    try:
        environments = gymnasium.vector.SyncVectorEnv([make] * count, copy=False, autoreset_mode=mode)
    except (gymnasium.error.Error, ImportError, AttributeError, TypeError) as problem:
        # The last three: what a missing optional package, or an id that is no environment, raises inside gymnasium.
        raise ValueError(f"{name} cannot be made ({str(problem).strip().splitlines()[0]})") from problem
    try:
        observation_size, read = observation_reader(environments.single_observation_space)
        action_size, continuous, write = action_writer(environments.single_action_space)
    except ValueError as problem:
        environments.close()
        raise ValueError(f"{name} is not supported: {problem}") from None
    return environments, Spaces(observation_size, action_size, continuous, read, write)


class Rollout(NamedTuple):
    """T rows of N environments, time first. Rows that are not `valid` only reset and are no transitions."""

    observations: np.ndarray  # [T, N, D]
    actions: np.ndarray  # [T, N] integer, or [T, N, A] raw
    rewards: np.ndarray  # [T, N]
    next_observations: np.ndarray  # [T, N, D] the true next observation, before any reset
    terminated: np.ndarray  # [T, N] bool
    truncated: np.ndarray  # [T, N] bool
    valid: np.ndarray  # [T, N] bool
    episode_returns: list[float]  # of the episodes that ended here, in order
    episode_lengths: list[int]


Act = Callable[[int, np.ndarray], np.ndarray]
"""(row of the rollout, observations [N, D]) -> actions."""


class Collector:
    """Steps N environments and hands out rollouts; what an autoreset mode does differently ends here.

    `taken` keeps every executed action since the seeding, so that `replay` can bring fresh environments to the same place.
    """

    def __init__(self, environments, spaces: Spaces, autoreset: str, seeds: Sequence[int]):
        self.environments, self.spaces, self.autoreset = environments, spaces, autoreset
        count = environments.num_envs
        self.current = spaces.read(environments.reset(seed=list(seeds))[0])
        self.resetting = np.zeros(count, dtype=bool)  # next-step: the next row only resets
        self.returns, self.lengths = np.zeros(count), np.zeros(count, dtype=int)
        self.taken: list[np.ndarray] = []

    def collect(self, rows: int, act: Act) -> Rollout:
        """`rows` calls of step, each with the actions of `act` -> Rollout with T = rows."""
        columns = []
        episode_returns, episode_lengths = [], []
        for row in range(rows):
            observations = self.current
            actions = act(row, observations)
            rewards, following, terminated, truncated, valid = self._advance(self.spaces.write(actions))
            columns.append((observations, actions, rewards, following, terminated, truncated, valid))
            self.returns += rewards
            self.lengths += valid
            for i in np.flatnonzero(terminated | truncated):
                episode_returns.append(float(self.returns[i]))
                episode_lengths.append(int(self.lengths[i]))
                self.returns[i] = self.lengths[i] = 0
        return Rollout(*map(np.stack, zip(*columns)), episode_returns, episode_lengths)

    def _advance(self, executed: np.ndarray) -> tuple[np.ndarray, ...]:
        """One step of every environment -> rewards, true next observations, terminated, truncated, valid."""
        self.taken.append(executed)
        observations, rewards, terminated, truncated, info = self.environments.step(executed)
        following, ended, valid = self.spaces.read(observations), terminated | truncated, ~self.resetting
        self.current = following
        if self.autoreset == "next-step":
            self.resetting = ended
        elif ended.any() and self.autoreset == "same-step":
            following = following.copy()
            following[ended] = self.spaces.read(np.stack([info["final_obs"][i] for i in np.flatnonzero(ended)]))
        elif ended.any():
            self.current = self.spaces.read(self.environments.reset(options={"reset_mask": ended})[0])
        return rewards, following, terminated, truncated, valid

    def replay(self, taken: np.ndarray) -> None:
        """Repeat executed actions [steps, N, ...] on environments that were seeded alike; episode sums are rebuilt, too."""
        for executed in taken:
            rewards, _, terminated, truncated, valid = self._advance(executed)
            ended = terminated | truncated
            self.returns = np.where(ended, 0.0, self.returns + rewards)
            self.lengths = np.where(ended, 0, self.lengths + valid)
