"""TRPO's step written out, PPO with an adaptive KL penalty beside it, and who stays inside delta.

step.py       the step: Fisher-vector product, conjugate gradients, length, line search; on any differentiable policy
table.py      the same on one softmax, where it is an exponential tilt; wrong versions with their numbers
training.py   TRPO, PPO-KL and PPO-Clip on the bandit and the chain
environment.py  TRPO with a network in Gymnasium environments, on the trainer of extensions.gymnasium_ppo
figure.py     KL(old || new) of every update
command.py    python -m extensions.trust_region
"""

from extensions.trust_region.step import conjugate_gradients, fisher_vector_product, kl_old_current, trust_region_step
from extensions.trust_region.training import METHODS, TASKS, TrustRegionSettings, train

__all__ = [
    "METHODS", "TASKS", "TrustRegionSettings", "conjugate_gradients", "fisher_vector_product", "kl_old_current", "train",
    "trust_region_step",
]  # fmt: skip
