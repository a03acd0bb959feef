"""PPO in Gymnasium environments, from the lab's atoms: what moving from a table of logits to an environment adds.

    boundaries.py    where episodes end: GAE over rows of several episodes, five well-known mistakes, their exact toys
    environments.py  vector environments, spaces, one collector for three autoreset modes
    policy.py        actor and critic in one flat vector; categorical and Gaussian actions
    normalise.py     running statistics of observations and rewards, frozen in evaluation
    update.py        rollout -> batch -> mini-batch loss -> step; the losses are atoms of rl_lab.py
    settings.py      every number with its range, named choices, presets per environment
    training.py      Trainer: the loop, the evaluation, the state of a checkpoint
    files.py         ppo.csv, ppo.json, checkpoint.npz; command.py is the command line

Another method on the same environments is a subclass of `Trainer` (extensions/trust_region/environment.py is one), or is built
from the parts: `make_environments` and `Collector.collect` give rollouts, `Policy` has the actor's parameters first in `flat`
(`actor_leaves`, `parameters_at`), `batch_of` turns a rollout into old log-probabilities, advantages and returns, and `evaluate`
measures. Importing this package does not import Gymnasium.

Source: arXiv 1707.06347; time limits arXiv 1712.00378. Left out: recurrent policies, images as images, action masks, several
processes.
"""

from extensions.gymnasium_ppo.boundaries import MISTAKES, Mistake, Steps, advantages_of, kept_rows, toy_table
from extensions.gymnasium_ppo.environments import AUTORESET, Collector, Rollout, Spaces, make_environments
from extensions.gymnasium_ppo.normalise import ObservationNormaliser, RewardNormaliser
from extensions.gymnasium_ppo.policy import Categorical, Gaussian, Policy
from extensions.gymnasium_ppo.settings import PRESETS, EnvironmentSettings, RolloutSettings, Run, make_run, run_of
from extensions.gymnasium_ppo.training import Trainer, evaluate, train
from extensions.gymnasium_ppo.update import Batch, batch_of, descend_flat, gradient_of, minibatches, ppo_loss, update_on_batch

__all__ = [
    "AUTORESET",
    "Batch",
    "Categorical",
    "Collector",
    "EnvironmentSettings",
    "Gaussian",
    "MISTAKES",
    "Mistake",
    "ObservationNormaliser",
    "PRESETS",
    "Policy",
    "RewardNormaliser",
    "Rollout",
    "RolloutSettings",
    "Run",
    "Spaces",
    "Steps",
    "Trainer",
    "advantages_of",
    "batch_of",
    "descend_flat",
    "evaluate",
    "gradient_of",
    "kept_rows",
    "make_environments",
    "make_run",
    "minibatches",
    "ppo_loss",
    "run_of",
    "toy_table",
    "train",
    "update_on_batch",
]
