"""The atoms against the functions that three public trainers ship: stable-baselines3, torchrl and TRL.

    python -m pip install -r verification/requirements.txt
    python -B -m unittest -v verification.test_peers

Skipped where a package is absent or has another version than verification/requirements.txt names. Nothing of the peers is
copied: their own functions and methods run, on the smallest real trainers, with random models built from a configuration;
nothing is downloaded. Where a test hands a trainer log-probabilities or rewards, it does so in float64, and all that follows
is the trainer's code; where it does not, the trainer's own float32 sets the tolerance.

Where a peer means something else by the same word, the class has tests named `test_differs_...`: they state both meanings as
formulas and check each of them, so that the difference itself is bound.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import random
import tempfile
import unittest
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.testing import assert_close

from rl_lab import (
    action_logps,
    categorical_kl,
    clip_fraction,
    clipped_policy_loss,
    clipped_value_loss,
    dpo_loss,
    gae,
    group_advantages,
    groups_without_spread,
    importance_ratio,
    kl_estimates,
    response_logps,
    response_token_logps,
)
from token_objectives import mean_over_tokens, mean_per_response

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PINS = dict(line.split("==") for line in REQUIREMENTS.read_text(encoding="utf-8").split() if "==" in line)

DOUBLE = dict(rtol=1e-11, atol=1e-12)
SINGLE = dict(rtol=2e-5, atol=2e-6)


def needs(*packages: str):
    """Skip a class, with one line that says why, unless these packages have the versions of requirements.txt."""
    for package in packages:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != PINS[package]:
            reason = f"needs {package} {PINS[package]} ({found}): python -m pip install -r verification/requirements.txt"
            return unittest.skip(reason)
    return lambda test_class: test_class


@contextlib.contextmanager
def undisturbed(default_dtype: torch.dtype) -> Iterator[None]:
    """Quiet and offline, and afterwards the random state, threads, dtype and environment are as before.

    Trainers seed the global generators when they are built, and print warnings and progress bars of their own.
    """
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    before = dict(os.environ)
    threads, dtype, python_state, numpy_state = (
        torch.get_num_threads(), torch.get_default_dtype(), random.getstate(), np.random.get_state()
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        os.environ.update(variables, HF_HOME=folder)
        torch.manual_seed(0)
        torch.set_default_dtype(default_dtype)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


class PeerTest(unittest.TestCase):
    """Base of the comparisons: each test leaves the process as it was.

    torchrl and TRL compute some factors in torch's default dtype even where all their arguments are float64 (the discount,
    the n / (n - 1) of a deviation), so float64 is the default while they run.
    """

    default_dtype = torch.float64

    def run(self, result=None):
        with undisturbed(self.default_dtype):
            return super().run(result)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def chance(shape: tuple[int, ...], probability: float, seed: int) -> Tensor:
    return torch.rand(shape, generator=generator(seed)) < probability


def gradient_of(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs, retain_graph=True)


# ------------------------------------------------------------------------------------------ GAE


def random_series(shape: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """Rewards, values and both flags for [..., T]: terminations, time limits and a last step that may be neither."""
    terminated = chance(shape, 0.15, seed + 3)
    return dict(
        rewards=normal(shape, seed),
        values=normal(shape, seed + 1),
        next_values=normal(shape, seed + 2),
        terminated=terminated,
        boundary=terminated | chance(shape, 0.15, seed + 4),
    )


@needs("torchrl")
class TorchrlGae(PeerTest):
    """torchrl calls our `boundary` done. Its arrays carry one more axis, [..., T, 1]."""

    @staticmethod
    def torchrl_gae(name: str, series: dict[str, Tensor], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        from torchrl.objectives.value import functional

        columns = (series[key].unsqueeze(-1) for key in ("values", "next_values", "rewards", "boundary", "terminated"))
        advantages, returns = getattr(functional, name)(gamma, lam, *columns)
        return advantages.squeeze(-1), returns.squeeze(-1)

    def test_advantages_and_returns_equal_the_loop_and_the_vectorised_twin(self):
        for number, shape in enumerate([(1, 1), (1, 7), (6, 1), (5, 40), (3, 2, 17)]):
            series = random_series(shape, 10 * number)
            for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (1.0, 0.3), (0.9, 0.9)):
                ours = gae(**series, gamma=gamma, lam=lam)
                for name in ("generalized_advantage_estimate", "vec_generalized_advantage_estimate"):
                    # Past 15 steps 0.3^k falls below the twin's cut of 1e-7: see the test of that difference.
                    short_memory = name.startswith("vec") and (gamma * lam) ** shape[-1] < 1e-7
                    tolerance = dict(rtol=0, atol=1e-5) if short_memory else DOUBLE
                    with self.subTest(name=name, shape=shape, gamma=gamma, lam=lam):
                        assert_close(self.torchrl_gae(name, series, gamma, lam), ours, **tolerance)

    def test_lambda_zero_equals_the_loop(self):
        series = random_series((4, 9), 1)
        assert_close(self.torchrl_gae("generalized_advantage_estimate", series, 0.9, 0.0), gae(**series, gamma=0.9, lam=0.0))

    def test_float32_agrees_to_float32_rounding(self):
        torch.set_default_dtype(torch.float32)
        series = {name: x.float() if x.is_floating_point() else x for name, x in random_series((8, 64), 2).items()}
        for name in ("generalized_advantage_estimate", "vec_generalized_advantage_estimate"):
            assert_close(self.torchrl_gae(name, series, 0.99, 0.95), gae(**series, gamma=0.99, lam=0.95), **SINGLE)

    def test_differs_the_discount_is_rounded_to_the_default_dtype(self):
        # Float64 data under torch's usual default float32: torchrl's gamma and gamma * lam are float32 numbers, an error of
        # 1e-8 a step. gae with exactly those two numbers agrees to float64. (The twin rounds gamma only.)
        torch.set_default_dtype(torch.float32)
        series, (gamma, lam) = random_series((5, 40), 5), (0.99, 0.95)
        rounded, product = float(np.float32(gamma)), float(np.float32(gamma * lam))
        products = {"generalized_advantage_estimate": product, "vec_generalized_advantage_estimate": gamma * lam}
        for name, carried in products.items():
            peer, lam_used = self.torchrl_gae(name, series, gamma, lam), carried / rounded
            with self.subTest(name=name):
                assert_close(peer, gae(**series, gamma=rounded, lam=lam_used), **DOUBLE)
                self.assertGreater((peer[0] - gae(**series, gamma=gamma, lam=lam)[0]).abs().max(), 1e-9)

    def test_the_comparison_sees_the_two_flags_exchanged(self):
        series = random_series((4, 30), 3)
        ours = gae(**series, gamma=0.99, lam=0.95)[0]
        ended = dict(series, terminated=series["boundary"])
        peer = self.torchrl_gae("generalized_advantage_estimate", ended, 0.99, 0.95)[0]
        self.assertGreater((ours - peer).abs().max(), 0.1)

    def test_differs_vectorised_twin_drops_weights_below_1e_minus_7(self):
        # One reward, k steps ahead, everything else 0: A_0 = (gamma lam)^k. The twin keeps the first
        # floor(log 1e-7 / log 0.81) = floor(76.49) = 76 weights, k = 0 to 75; 0.81^76 = 1.1e-7 is dropped already.
        for steps_ahead, kept in ((75, True), (76, False)):
            series = {name: torch.zeros(100, dtype=torch.float64) for name in ("rewards", "values", "next_values")}
            series.update({name: torch.zeros(100, dtype=torch.bool) for name in ("terminated", "boundary")})
            series["rewards"][steps_ahead] = 1.0
            batched = {name: x.unsqueeze(0) for name, x in series.items()}
            twin = self.torchrl_gae("vec_generalized_advantage_estimate", batched, 0.9, 0.9)[0][0, 0]
            ours = gae(**series, gamma=0.9, lam=0.9)[0][0]
            self.assertAlmostEqual(ours.item() / 0.81**steps_ahead, 1.0, places=12)
            self.assertAlmostEqual(twin.item(), 0.81**steps_ahead if kept else 0.0, places=14)

    def test_differs_an_unused_next_value_poisons_it(self):
        # torchrl multiplies by (1 - terminated), and 0 * NaN is NaN; gae selects.
        series = random_series((1, 6), 4)
        series["terminated"][0, 3] = series["boundary"][0, 3] = True
        series["next_values"][0, 3] = math.nan
        peer = self.torchrl_gae("generalized_advantage_estimate", series, 0.99, 0.95)[0]
        self.assertTrue(peer[0, 3].isnan())
        self.assertTrue(gae(**series, gamma=0.99, lam=0.95)[0].isfinite().all())

    def test_differs_terminated_without_done_is_accepted(self):
        # torchrl then cuts the bootstrap and lets the next episode's advantage flow back; gae refuses the flags.
        series = dict(
            rewards=torch.tensor([[1.0, 10.0]]), values=torch.zeros(1, 2), next_values=torch.zeros(1, 2),
            terminated=torch.tensor([[True, True]]), boundary=torch.tensor([[False, True]]),
        )
        peer = self.torchrl_gae("generalized_advantage_estimate", series, 1.0, 1.0)[0]
        assert_close(peer, torch.tensor([[11.0, 10.0]]))
        with self.assertRaisesRegex(ValueError, "boundary"):
            gae(**series)


@needs("torchrl")
class TorchrlValueAndKl(PeerTest):
    """The clipped value loss and the per-token k3 of torchrl."""

    def test_clipped_value_loss_equals_the_critic_loss(self):
        from torchrl.objectives.utils import _clip_value_loss

        values, old_values, returns = normal((200,), 1).requires_grad_(), normal((200,), 2), normal((200,), 3)
        plain = (values - returns).square()
        peer, _ = _clip_value_loss(old_values, values, torch.tensor(0.2), returns, plain, "l2")
        ours = clipped_value_loss(values, old_values, returns, 0.2)
        assert_close(ours, peer, **DOUBLE)
        assert_close(gradient_of(ours.sum(), values), gradient_of(peer.sum(), values), **DOUBLE)

    def test_k3_equals_the_per_token_estimate(self):
        from torchrl.objectives.llm import k3_kl_token_estimate

        logp, ref_logp = normal((300,), 1).requires_grad_(), normal((300,), 2)
        ours, peer = kl_estimates(logp, ref_logp)[2], k3_kl_token_estimate(ref_logp, logp)
        assert_close(ours, peer, **DOUBLE)
        assert_close(gradient_of(ours.sum(), logp), gradient_of(peer.sum(), logp), **DOUBLE)


@functools.lru_cache
def walk_environment():
    """A gymnasium environment that ends by itself (at 4 steps to the right) or by a time limit, and writes a diary."""
    import gymnasium

    class Walk(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-10, 10, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.position, self.moves = 0, 0
            return self.observation(), {}

        def observation(self) -> np.ndarray:
            return np.array([self.position], dtype=np.float32)

        def step(self, action):
            self.position += 1 if action else -1
            self.moves += 1
            reward, terminated, truncated = 0.1 * self.position, self.position == 4, self.moves == 6
            self.diary.append((reward, self.observation(), terminated, terminated or truncated))
            return self.observation(), reward, terminated, truncated, {}

    return Walk


@needs("stable-baselines3", "gymnasium")
class StableBaselines3Gae(PeerTest):
    """RolloutBuffer keeps one flag, the start of an episode. A time limit is paid into the reward before it is stored."""

    default_dtype = torch.float32

    def test_the_buffer_equals_gae_when_time_limits_are_paid_into_the_reward(self):
        from gymnasium import spaces
        from stable_baselines3.common.buffers import RolloutBuffer

        for seed, (steps, environments) in enumerate([(1, 1), (5, 1), (40, 3), (128, 4)]):
            for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
                for dtype, tolerance in ((np.float64, DOUBLE), (np.float32, SINGLE)):
                    series = random_series((environments, steps), 10 * seed)
                    # Inside an episode the next value is the value of the next row; only at a boundary is it another one.
                    following = series["values"].roll(-1, dims=1)
                    inside = ~series["boundary"]
                    inside[:, -1] = False
                    series["next_values"] = torch.where(inside, following, series["next_values"])

                    space = spaces.Discrete(2)
                    buffer = RolloutBuffer(steps, space, space, "cpu", gae_lambda=lam, gamma=gamma, n_envs=environments)
                    for name in ("rewards", "values", "episode_starts", "advantages", "returns"):
                        setattr(buffer, name, getattr(buffer, name).astype(dtype))
                    time_limit = series["boundary"] & ~series["terminated"]
                    paid = series["rewards"] + gamma * series["next_values"].masked_fill(~time_limit, 0.0)
                    starts = torch.cat([torch.zeros(environments, 1, dtype=torch.bool), series["boundary"]], dim=1)
                    zeros = np.zeros(environments)
                    for t in range(steps):
                        values = series["values"][:, t]
                        buffer.add(zeros, zeros, paid[:, t].numpy(), starts[:, t].numpy(), values, torch.zeros(environments))
                    buffer.compute_returns_and_advantage(series["next_values"][:, -1], starts[:, -1].numpy())

                    with self.subTest(steps=steps, gamma=gamma, lam=lam, dtype=dtype.__name__):
                        advantages, returns = gae(**series, gamma=gamma, lam=lam)
                        peer = torch.from_numpy(buffer.advantages.T), torch.from_numpy(buffer.returns.T)
                        assert_close(tuple(x.double() for x in peer), (advantages, returns), **tolerance)

    def test_a_real_rollout_with_time_limits_equals_gae_on_the_raw_rewards(self):
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import DummyVecEnv

        environments = [walk_environment()() for _ in range(3)]
        for environment in environments:
            environment.diary = []
        model = PPO(
            "MlpPolicy", DummyVecEnv([lambda e=e: e for e in environments]), n_steps=50, batch_size=50, gamma=0.97,
            gae_lambda=0.9, seed=3, device="cpu",
        )
        _, callback = model._setup_learn(150)
        self.assertTrue(model.collect_rollouts(model.env, callback, model.rollout_buffer, 50))
        buffer = model.rollout_buffer

        diaries = [list(zip(*environment.diary)) for environment in environments]
        rewards, observations, terminated, boundary = ([diary[i] for diary in diaries] for i in range(4))
        critic = model.policy.predict_values
        with torch.no_grad():
            next_values = torch.stack([critic(torch.tensor(np.array(seen))).squeeze(1) for seen in observations])
        series = dict(
            rewards=torch.tensor(rewards, dtype=torch.float32),
            values=torch.from_numpy(buffer.values.T.copy()),
            next_values=next_values,
            terminated=torch.tensor(terminated),
            boundary=torch.tensor(boundary),
        )
        self.assertTrue((series["boundary"] & ~series["terminated"]).any() and series["terminated"].any())
        advantages, returns = gae(**series, gamma=0.97, lam=0.9)
        assert_close(torch.from_numpy(buffer.advantages.T.copy()), advantages, **SINGLE)
        assert_close(torch.from_numpy(buffer.returns.T.copy()), returns, **SINGLE)

        # The broken twin: a time limit taken for an end. The comparison tells it from the real thing.
        ended = gae(**dict(series, terminated=series["boundary"]), gamma=0.97, lam=0.9)[0]
        self.assertGreater((ended - advantages).abs().max(), 1e-2)


@needs("stable-baselines3")
class StableBaselines3Distribution(PeerTest):
    """The categorical policy of stable-baselines3."""

    def test_log_probability_exact_kl_and_their_gradients(self):
        from stable_baselines3.common.distributions import CategoricalDistribution, kl_divergence

        logits, reference = normal((20, 5), 1, 3.0).requires_grad_(), normal((20, 5), 2, 3.0)
        actions = torch.randint(5, (20,), generator=generator(3))
        current = CategoricalDistribution(5).proba_distribution(logits)
        other = CategoricalDistribution(5).proba_distribution(reference)
        for ours, peer in (
            (action_logps(logits, actions), current.log_prob(actions)),
            (categorical_kl(logits, reference), kl_divergence(current, other)),
        ):
            assert_close(ours, peer, **DOUBLE)
            assert_close(gradient_of(ours.sum(), logits), gradient_of(peer.sum(), logits), **DOUBLE)
        self.assertGreater((categorical_kl(reference, logits) - kl_divergence(current, other)).abs().max(), 0.1)


@needs("stable-baselines3", "gymnasium")
class StableBaselines3Ppo(PeerTest):
    """One full-batch epoch of PPO.train, whose logger shows the losses at the parameters before the step (float32)."""

    default_dtype = torch.float32

    def trained(self, **options):
        """The model after `train`, the batch it saw and the policy's log-probabilities and values before the step."""
        from stable_baselines3 import PPO
        from stable_baselines3.common.logger import Logger
        from stable_baselines3.common.vec_env import DummyVecEnv

        environment = walk_environment()()
        environment.diary = []
        model = PPO(
            "MlpPolicy", DummyVecEnv([lambda: environment]), n_steps=64, batch_size=64, n_epochs=1, seed=3, device="cpu",
            **options,
        )
        logger = Logger(None, [])
        model.set_logger(logger)
        _, callback = model._setup_learn(64)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, 64)
        buffer = model.rollout_buffer
        # On the first epoch every ratio is 1; an older policy and critic put the ratios on both sides of the band.
        buffer.log_probs += normal((64, 1), 5, 0.4).numpy().astype(np.float32)
        buffer.values += normal((64, 1), 6, 0.4).numpy().astype(np.float32)
        batch = {
            name: torch.from_numpy(getattr(buffer, name).copy()).flatten()
            for name in ("actions", "log_probs", "advantages", "returns", "values")
        }
        with torch.no_grad():
            observations = torch.from_numpy(buffer.observations.copy()).squeeze(1)
            values, logp, _ = model.policy.evaluate_actions(observations, batch["actions"].long())
        model.train()
        return logger.name_to_value, batch, logp, values.flatten()

    def test_policy_loss_clip_fraction_and_approximate_kl(self):
        logged, batch, logp, values = self.trained(normalize_advantage=False)
        loss = clipped_policy_loss(logp, batch["log_probs"], batch["advantages"], 0.2).mean()
        self.assertAlmostEqual(logged["train/policy_gradient_loss"], loss.item(), places=6)
        fraction = clip_fraction(logp, batch["log_probs"], 0.2).item()
        self.assertTrue(0.1 < fraction < 0.9)
        self.assertAlmostEqual(logged["train/clip_fraction"], fraction, places=6)
        # approx_kl is mean(rho - 1 - log rho): k3 with the roles of the policies exchanged, KL(old || current), since
        # the old policy is the one that sampled.
        k3_old_current = kl_estimates(batch["log_probs"], logp)[2].mean().item()
        self.assertAlmostEqual(logged["train/approx_kl"], k3_old_current, places=6)
        self.assertNotAlmostEqual(k3_old_current, kl_estimates(logp, batch["log_probs"])[2].mean().item(), places=3)
        self.assertAlmostEqual(logged["train/value_loss"], (values - batch["returns"]).square().mean().item(), places=5)

    def test_differs_advantages_are_standardised_by_the_sample_deviation(self):
        logged, batch, logp, _ = self.trained()
        advantages = batch["advantages"]
        standardised = (advantages - advantages.mean()) / (advantages.std(correction=1) + 1e-8)
        peer = logged["train/policy_gradient_loss"]
        self.assertAlmostEqual(peer, clipped_policy_loss(logp, batch["log_probs"], standardised).mean().item(), places=6)
        self.assertNotAlmostEqual(peer, clipped_policy_loss(logp, batch["log_probs"], advantages).mean().item(), places=2)

    def test_differs_value_clip_has_no_maximum(self):
        # SB3: (V_old + clip(V - V_old) - R)^2 alone; the atom takes the larger of that and (V - R)^2.
        logged, batch, _, values = self.trained(clip_range_vf=0.1)
        clipped = batch["values"] + (values - batch["values"]).clamp(-0.1, 0.1)
        self.assertAlmostEqual(logged["train/value_loss"], (clipped - batch["returns"]).square().mean().item(), places=5)
        ours = clipped_value_loss(values, batch["values"], batch["returns"], 0.1).mean().item()
        self.assertGreater(ours, logged["train/value_loss"] + 1e-3)


# ------------------------------------------------------------------------------------------ TRL: the smallest real trainers

VOCABULARY = ("<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(13)))


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny_model(seed: int):
    """A one-layer random transformer in float64, eight numbers wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            max_position_embeddings=64, initializer_range=0.8, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    ).double()


def online_trainer(kind: str, **options):
    """A GRPOTrainer or RLOOTrainer on a tiny policy (seed 1) with a tiny reference (seed 2), in training mode."""
    import trl
    from datasets import Dataset
    from transformers.utils import logging

    logging.disable_progress_bar()
    policy = tiny_model(1)
    with tempfile.TemporaryDirectory() as folder:
        # The trainer builds its reference from the folder that the policy's configuration names.
        tiny_model(2).save_pretrained(folder)
        policy.config._name_or_path = folder
        settings = dict(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=8, num_generations=4,
            max_completion_length=6, beta=0.1,
        )
        trainer = getattr(trl, f"{kind}Trainer")(
            policy,
            lambda completions, **_: [float(len(set(completion.split()))) for completion in completions],
            args=getattr(trl, f"{kind}Config")(**settings | options),
            train_dataset=Dataset.from_dict({"prompt": ["w1 w2"]}),
            processing_class=tokenizer(),
        )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def dpo_trainer(**options):
    """A DPOTrainer on the tiny policy and the tiny reference, in training mode."""
    import datasets
    from trl import DPOConfig, DPOTrainer

    datasets.disable_progress_bars()
    rows = {"prompt": ["w1 w2", "w3"], "chosen": [" w4 w5", " w6"], "rejected": [" w7", " w8 w9 w9"]}
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(output_dir=folder, use_cpu=True, bf16=False, report_to="none", beta=0.5)
        trainer = DPOTrainer(
            tiny_model(1),
            ref_model=tiny_model(2),
            args=DPOConfig(**settings | options),
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=tokenizer(),
        )
    trainer.model.train()
    return trainer


def sequences(rows: int, seed: int, prompt_width: int = 4, response_width: int = 6) -> dict[str, Tensor]:
    """Token ids with prompts padded on the left and responses on the right, as GRPO batches are."""
    width = prompt_width + response_width
    prompt_lengths = torch.randint(1, prompt_width + 1, (rows, 1), generator=generator(seed))
    lengths = torch.randint(1, response_width + 1, (rows, 1), generator=generator(seed + 1))
    position = torch.arange(width)
    response_mask = (position >= prompt_width) & (position < prompt_width + lengths)
    attention = response_mask | ((position < prompt_width) & (position >= prompt_width - prompt_lengths))
    ids = torch.randint(3, len(VOCABULARY), (rows, width), generator=generator(seed + 2)).masked_fill(~attention, 0)
    return dict(input_ids=ids, attention_mask=attention.long(), response_mask=response_mask)


@needs("trl", "transformers", "datasets", "tokenizers")
class TrlTokenLogps(PeerTest):
    """Log-probabilities of response tokens."""

    def test_selective_log_softmax_values_and_gradients(self):
        from trl.trainer.utils import selective_log_softmax

        for seed, scale in ((0, 1.0), (1, 30.0), (2, 1e4)):
            logits = normal((3, 9, 11), seed, scale).requires_grad_()
            ids = torch.randint(11, (3, 9), generator=generator(seed))
            mask = chance((3, 9), 0.6, seed)
            mask[:, 0], mask[:, 4] = False, True
            ours, valid = response_token_logps(logits, ids, mask)
            peer = selective_log_softmax(logits[:, :-1], ids[:, 1:], row_mask=mask[:, 1:])
            weights = normal((3, 8), seed + 10)
            with self.subTest(scale=scale):
                assert_close(valid, mask[:, 1:])
                # 1e4 has an ulp of 1.8e-12: x - logsumexp(x) rounds there, log_softmax subtracts the maximum first.
                tolerance = dict(rtol=1e-11, atol=1e-15 * max(scale, 1e3))
                assert_close(ours, peer, **tolerance)
                ours_gradient, peer_gradient = (gradient_of((x * weights).sum(), logits) for x in (ours, peer))
                assert_close(ours_gradient, peer_gradient, **tolerance)

    def test_the_comparison_sees_a_missing_shift(self):
        from trl.trainer.utils import selective_log_softmax

        logits, ids = normal((2, 6, 5), 1), torch.randint(5, (2, 6), generator=generator(1))
        mask = torch.arange(6).expand(2, 6) >= 2
        ours = response_token_logps(logits, ids, mask)[0]
        unshifted = selective_log_softmax(logits[:, 1:], ids[:, 1:], row_mask=mask[:, 1:])
        self.assertGreater((ours - unshifted).abs().max(), 0.1)

    def test_a_real_forward_and_backward_of_grpo(self):
        trainer = online_trainer("GRPO")
        batch = sequences(rows=5, seed=3)
        ids, attention, mask = batch["input_ids"], batch["attention_mask"], batch["response_mask"]
        peer, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, logits_to_keep=6)
        ours, valid = response_token_logps(trainer.model(ids, attention_mask=attention).logits, ids, mask)
        self.assertEqual(int(valid.sum()), int(mask.sum()))
        # TRL returns the last 6 columns, and float32 although the model is float64.
        self.assertEqual((peer.dtype, ours.dtype), (torch.float32, torch.float64))
        self.assertTrue((ours[:, :-6] == 0).all())
        assert_close(peer.double(), ours[:, -6:], **SINGLE)
        weight = trainer.model.lm_head.weight
        ours_gradient, = gradient_of(mean_over_tokens(ours, valid), weight)
        peer_gradient, = gradient_of(mean_over_tokens(peer, mask[:, -6:]), weight)
        self.assertGreater(ours_gradient.abs().max(), 1e-2)
        assert_close(peer_gradient, ours_gradient, **SINGLE)

    def test_differs_temperature_divides_the_logits(self):
        trainer = online_trainer("GRPO", temperature=0.7)
        batch = sequences(rows=3, seed=4)
        ids, attention, mask = batch["input_ids"], batch["attention_mask"], batch["response_mask"]
        peer, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, logits_to_keep=6)
        logits = trainer.model(ids, attention_mask=attention).logits
        assert_close(peer.double(), response_token_logps(logits / 0.7, ids, mask)[0][:, -6:], **SINGLE)
        self.assertGreater((peer - response_token_logps(logits, ids, mask)[0][:, -6:]).abs().max(), 0.1)

    def test_differs_unused_rows_are_read(self):
        # TRL normalises every row and zeroes the unused ones afterwards: the value is clean, the gradient is not.
        from trl.trainer.utils import selective_log_softmax

        for poison in (math.nan, -math.inf):
            logits = normal((1, 5, 4), 1)
            logits[0, 0] = poison
            logits.requires_grad_()
            ids, mask = torch.tensor([[0, 1, 2, 3, 1]]), torch.tensor([[False, False, True, True, True]])
            peer = selective_log_softmax(logits[:, :-1], ids[:, 1:], row_mask=mask[:, 1:])
            ours, _ = response_token_logps(logits, ids, mask)
            with self.subTest(poison=poison):
                assert_close(ours, peer, **DOUBLE)
                self.assertTrue(gradient_of(peer.sum(), logits)[0][0, 0].isnan().any())
                self.assertTrue((gradient_of(ours.sum(), logits)[0][0, 0] == 0).all())


def grpo_inputs(logps: Tensor, mask: Tensor, advantages: Tensor, **more: Tensor) -> dict[str, Tensor]:
    """What GRPOTrainer._compute_loss reads beside the log-probabilities; the ids are only there for their shape."""
    rows, width = mask.shape
    return dict(
        prompt_ids=torch.zeros(rows, 1, dtype=torch.long), prompt_mask=torch.ones(rows, 1, dtype=torch.long),
        completion_ids=torch.zeros(rows, width, dtype=torch.long), completion_mask=mask.long(), advantages=advantages,
        num_items_in_batch=mask.sum(), **more,
    )


class GivenLogps(PeerTest):
    """Base: a random float64 batch, and TRL's loss on it through the trainer's own _compute_loss."""

    ROWS, WIDTH = 6, 9

    def setUp(self):
        shape = self.ROWS, self.WIDTH
        self.logps = (-normal(shape, 1).abs()).requires_grad_()
        self.old_logps = self.logps.detach() + normal(shape, 2, 0.3)
        self.ref_logps = self.logps.detach() + normal(shape, 3, 0.5)
        self.advantages = normal((self.ROWS,), 4)
        lengths = torch.tensor([[1], [9], [3], [5], [8], [2]])
        self.mask = torch.arange(self.WIDTH) < lengths

    def trl_loss(self, trainer, logps: Tensor | None = None, **changed) -> Tensor:
        logps = self.logps if logps is None else logps
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.ones_like(logps), None)
        more = dict(old_per_token_logps=self.old_logps, ref_per_token_logps=self.ref_logps)
        return trainer._compute_loss(trainer.model, grpo_inputs(logps, self.mask, self.advantages, **more) | changed)

    def our_tokens(self) -> Tensor:
        """Clipped loss per token, the answer's advantage at each of its tokens."""
        return clipped_policy_loss(self.logps, self.old_logps, self.advantages.unsqueeze(1).expand_as(self.logps), 0.2)

    def assert_same(self, ours: Tensor, peer: Tensor):
        assert_close(ours, peer, **DOUBLE)
        assert_close(gradient_of(ours, self.logps), gradient_of(peer, self.logps), **DOUBLE)


@needs("trl", "transformers", "datasets", "tokenizers")
class TrlClippedLoss(GivenLogps):
    """GRPOTrainer._compute_loss without a KL term: the clipped loss and its reductions."""

    def test_each_loss_type_is_the_clipped_loss_under_a_named_reduction(self):
        reductions = {
            "grpo": lambda tokens: mean_per_response(tokens, self.mask),
            "bnpo": lambda tokens: mean_over_tokens(tokens, self.mask),
            "dapo": lambda tokens: mean_over_tokens(tokens, self.mask),
            # Dr. GRPO divides by a budget of tokens, whatever was written.
            "dr_grpo": lambda tokens: tokens.masked_fill(~self.mask, 0).sum() / (self.ROWS * 6),
        }
        for loss_type, reduction in reductions.items():
            with self.subTest(loss_type=loss_type):
                trainer = online_trainer("GRPO", loss_type=loss_type, beta=0.0)
                self.assert_same(reduction(self.our_tokens()), self.trl_loss(trainer))

    def test_the_default_loss_type_is_the_mean_over_tokens_and_not_per_response(self):
        trainer = online_trainer("GRPO", beta=0.0)
        self.assertEqual(trainer.loss_type, "dapo")
        peer = self.trl_loss(trainer)
        assert_close(mean_over_tokens(self.our_tokens(), self.mask), peer, **DOUBLE)
        self.assertGreater((mean_per_response(self.our_tokens(), self.mask) - peer).abs(), 1e-3)

    def test_without_old_logps_the_ratio_is_one_and_the_gradient_is_not_zero(self):
        peer = self.trl_loss(online_trainer("GRPO", loss_type="grpo", beta=0.0), old_per_token_logps=None)
        self.old_logps = self.logps
        self.assert_same(mean_per_response(self.our_tokens(), self.mask), peer)
        self.assertAlmostEqual(peer.item(), -self.advantages.mean().item(), places=12)
        self.assertGreater(gradient_of(peer, self.logps)[0].abs().max(), 1e-2)

    def test_differs_dapo_counts_the_tokens_of_the_generation_batch(self):
        # On a part of it, the denominator is not this part's own tokens: with twice the tokens in all, half the value.
        trainer = online_trainer("GRPO", beta=0.0)
        peer = self.trl_loss(trainer, num_items_in_batch=2 * self.mask.sum())
        assert_close(mean_over_tokens(self.our_tokens(), self.mask) / 2, peer, **DOUBLE)

    def test_differs_clip_ratio_counts_only_tokens_without_gradient(self):
        trainer = online_trainer("GRPO", beta=0.0)
        self.trl_loss(trainer)
        ratio = importance_ratio(self.logps, self.old_logps)
        positive = (self.advantages > 0).unsqueeze(1)
        flat = ((ratio > 1.2) & positive) | ((ratio < 0.8) & ~positive)
        peer, = trainer._metrics["train"]["clip_ratio/region_mean"]
        self.assertAlmostEqual(peer, flat[self.mask].double().mean().item(), places=6)
        ours = clip_fraction(self.logps[self.mask], self.old_logps[self.mask], 0.2).item()
        self.assertAlmostEqual(ours, ((ratio - 1).abs() > 0.2)[self.mask].double().mean().item(), places=12)
        self.assertGreater(ours, peer + 0.1)

    def test_differs_an_overflowing_ratio_turns_the_gradient_into_nan(self):
        # rho = exp(800) is inf in float64. The clip takes 1.2 A, whose gradient is 0; TRL's is 0 * inf.
        self.advantages = self.advantages.abs()
        self.old_logps[0, 0] = self.logps[0, 0].detach() - 800
        peer = self.trl_loss(online_trainer("GRPO", loss_type="bnpo", beta=0.0))
        ours = mean_over_tokens(self.our_tokens(), self.mask)
        assert_close(ours, peer, **DOUBLE)
        self.assertTrue(gradient_of(peer, self.logps)[0][0, 0].isnan())
        self.assertEqual(gradient_of(ours, self.logps)[0][0, 0], 0.0)

    def test_differs_a_caller_must_detach_the_old_logps(self):
        # With the same graph on both sides TRL's ratio is 1 and its gradient cancels; the atom detaches for the caller.
        trainer = online_trainer("GRPO", loss_type="bnpo", beta=0.0)
        peer = self.trl_loss(trainer, old_per_token_logps=self.logps)
        self.old_logps = self.logps
        ours = mean_over_tokens(self.our_tokens(), self.mask)
        assert_close(ours, peer, **DOUBLE)
        self.assertEqual(gradient_of(peer, self.logps)[0].abs().max(), 0.0)
        self.assertGreater(gradient_of(ours, self.logps)[0].abs().max(), 1e-2)

    def test_differs_masked_tokens_are_multiplied_away(self):
        # NaN * 0 is NaN: a NaN in a padded slot reaches TRL's loss. The lab's reductions select.
        logps = self.logps.detach().clone().masked_fill(~self.mask, math.nan)
        self.assertTrue(self.trl_loss(online_trainer("GRPO", beta=0.0), logps=logps).isnan())
        tokens = clipped_policy_loss(logps, self.old_logps, self.advantages.unsqueeze(1).expand_as(logps))
        self.assertTrue(mean_over_tokens(tokens, self.mask).isfinite())


@needs("trl", "transformers", "datasets", "tokenizers")
class TrlKl(GivenLogps):
    """The KL terms of GRPO (k3 in the loss) and RLOO (k1 in the reward). k2 is in neither."""

    BETA = 0.1

    def test_k3_in_the_loss(self):
        trainer = online_trainer("GRPO", loss_type="grpo", beta=self.BETA, use_bias_correction_kl=False)
        k3 = kl_estimates(self.logps, self.ref_logps)[2]
        peer = self.trl_loss(trainer)
        self.assert_same(mean_per_response(self.our_tokens() + self.BETA * k3, self.mask), peer)
        # The logged number is a mean over tokens, whatever the reduction of the loss.
        logged, = trainer._metrics["train"]["kl"]
        self.assertAlmostEqual(logged, mean_over_tokens(k3, self.mask).item(), places=12)

    def test_the_comparison_sees_the_policies_exchanged(self):
        trainer = online_trainer("GRPO", loss_type="grpo", beta=self.BETA, use_bias_correction_kl=False)
        reversed_k3 = kl_estimates(self.ref_logps, self.logps)[2]
        wrong = mean_per_response(self.our_tokens() + self.BETA * reversed_k3, self.mask)
        self.assertGreater((wrong - self.trl_loss(trainer)).abs(), 1e-4)

    def test_differs_by_default_k3_is_weighted_by_the_ratio(self):
        # rho * k3: unbiased under the old policy that sampled, and its gradient is rho (k3 + 1 - exp(-d)).
        trainer = online_trainer("GRPO", loss_type="bnpo", beta=self.BETA)
        self.assertTrue(trainer.args.use_bias_correction_kl)
        self.advantages = torch.zeros_like(self.advantages)
        ratio, (k1, _, k3) = importance_ratio(self.logps, self.old_logps), kl_estimates(self.logps, self.ref_logps)
        peer = self.trl_loss(trainer)
        self.assert_same(self.BETA * mean_over_tokens(ratio * k3, self.mask), peer)
        by_hand = self.BETA * ratio * (k3 + 1 - torch.exp(-k1)) / self.mask.sum()
        assert_close(gradient_of(peer, self.logps)[0], by_hand.detach().masked_fill(~self.mask, 0), **DOUBLE)
        self.assertGreater((peer - self.BETA * mean_over_tokens(k3, self.mask)).abs(), 1e-4)

    def test_k1_summed_over_the_answer_is_what_rloo_takes_from_the_reward(self):
        trainer = online_trainer("RLOO", beta=self.BETA)
        rewards = normal((8, 1), 5)
        trainer._calculate_rewards = lambda *_: rewards
        given = {}

        def logps_of(model, ids, attention, logits_to_keep, *_, **__):
            name = "old" if model is trainer.model else "reference"
            given[name] = -normal((len(ids), logits_to_keep), len(name)).abs()
            return given[name], None, None

        trainer._get_per_token_logps_and_entropies = logps_of
        output = trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * 8)
        k1, _, _ = kl_estimates(given["old"], given["reference"])
        mask = output["completion_mask"].bool()
        penalised = rewards.squeeze(1) - self.BETA * k1.masked_fill(~mask, 0).sum(dim=1)
        # RLOO: the reward minus the mean of the other three answers, which is G / (G - 1) = 4/3 of reward minus mean.
        groups = penalised.view(2, 4)
        centred = groups - groups.mean(dim=1, keepdim=True)
        assert_close(output["advantages"].view(2, 4), centred * 4 / 3, **DOUBLE)
        self.assertAlmostEqual(trainer._metrics["train"]["kl"][0], mean_over_tokens(k1, mask).item(), places=6)


@needs("trl", "transformers", "datasets", "tokenizers")
class TrlGroupAdvantages(PeerTest):
    """The advantages that GRPOTrainer gives a generated batch; rewards are handed over in float64."""

    def trl_advantages(self, rewards: Tensor, **options) -> tuple[Tensor, dict]:
        """rewards [prompts, G] -> advantages [prompts, G] and the trainer's metrics."""
        prompts, group = rewards.shape
        trainer = online_trainer(
            "GRPO", per_device_train_batch_size=rewards.numel(), num_generations=group, beta=0.0, max_completion_length=1,
            **options,
        )
        trainer._calculate_rewards = lambda *_: rewards.reshape(-1, 1).clone()
        output = trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * rewards.numel())
        return output["advantages"].view(prompts, group), trainer._metrics["train"]

    def test_differs_sample_deviation_and_a_guard_of_1e_minus_4(self):
        # s_sample = k s with k = sqrt(G / (G - 1)), so (R - m) / (k s + 1e-4) = group_advantages(R, 1e-4 / k) / k.
        for seed, group in enumerate((2, 3, 8)):
            rewards = normal((4, group), seed)
            k = math.sqrt(group / (group - 1))
            peer, _ = self.trl_advantages(rewards)
            with self.subTest(group=group):
                assert_close(peer, group_advantages(rewards, eps=1e-4 / k) / k, **DOUBLE)
                self.assertGreater((peer - group_advantages(rewards)).abs().max(), 0.01)
        # By hand, rewards (1, 0): m = 0.5, s = 0.5, s_sample = 0.7071068; ours +-1, TRL +-0.5 / 0.7072068 = +-0.7070068.
        peer, _ = self.trl_advantages(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
        self.assertAlmostEqual(peer[0, 0].item(), 0.7070068, places=7)
        self.assertAlmostEqual(group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64))[0].item(), 1.0, places=7)

    def test_scale_none_is_the_numerator(self):
        rewards = normal((3, 4), 1)
        peer, _ = self.trl_advantages(rewards, scale_rewards="none")
        std = rewards.std(dim=1, correction=0, keepdim=True)
        assert_close(peer, group_advantages(rewards, eps=0.0) * std, **DOUBLE)

    def test_differs_scale_batch_divides_by_the_spread_of_all_rewards(self):
        rewards = normal((3, 4), 2) + torch.tensor([[0.0], [5.0], [9.0]], dtype=torch.float64)
        peer, _ = self.trl_advantages(rewards, scale_rewards="batch")
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        assert_close(peer, centred / (rewards.std(correction=1) + 1e-4), **DOUBLE)
        self.assertLess(peer.abs().max(), group_advantages(rewards).abs().max() / 2)

    def test_groups_without_spread_agree_and_rounding_differs(self):
        tie = [0.1 + 0.2, 0.3, 0.3, 0.3]  # one ulp apart
        rewards = torch.tensor([[0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 1.0, 0.0], tie], dtype=torch.float64)
        peer, metrics = self.trl_advantages(rewards)
        ours = group_advantages(rewards)
        self.assertTrue((ours[[0, 2]] == 0).all() and (peer[0] == 0).all())
        self.assertTrue(0 < peer[2].abs().max() < 1e-11)  # 4.2e-17 / 1e-4: the guard hides what the atom calls a tie
        self.assertAlmostEqual(
            metrics["frac_reward_zero_std"][0], groups_without_spread(rewards).double().mean().item(), places=6
        )

    def test_differs_a_reward_that_could_not_be_computed(self):
        # TRL leaves NaN out of mean and deviation and gives it advantage 0; the atom refuses it by name.
        rewards = torch.tensor([[1.0, math.nan, 0.0, 0.5]], dtype=torch.float64)
        peer, _ = self.trl_advantages(rewards)
        # Scored: 1, 0, 0.5: mean 0.5, sample deviation 0.5, so 0.5 / 0.5001 = 0.99980004.
        assert_close(peer, torch.tensor([[0.5 / 0.5001, 0.0, -0.5 / 0.5001, 0.0]], dtype=torch.float64), **DOUBLE)
        with self.assertRaisesRegex(ValueError, "rewards"):
            group_advantages(rewards)

    def test_both_refuse_a_group_of_one(self):
        with self.assertRaisesRegex(ValueError, "at least 2|minimum required"):
            online_trainer("GRPO", num_generations=1)
        with self.assertRaisesRegex(ValueError, "nothing to be compared with"):
            group_advantages(torch.tensor([[1.0]]))

    def test_a_whole_generated_batch_with_its_own_rewards(self):
        # Nothing replaced: sampling, reward function, advantages, loss and its gradient, in the trainer's float32.
        trainer = online_trainer("GRPO", loss_type="grpo", beta=0.1, use_bias_correction_kl=False)
        batch = trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * 4 + [{"prompt": "w3"}] * 4)
        rewards = torch.tensor(list(trainer._logs["rewards"].values())[0], dtype=torch.float64).view(2, 4)
        self.assertFalse(groups_without_spread(rewards).any())
        k = math.sqrt(4 / 3)
        advantages = group_advantages(rewards, eps=1e-4 / k).flatten() / k
        assert_close(batch["advantages"].double(), advantages, **SINGLE)

        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        mask = torch.cat([torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], dim=1).bool()
        logps, valid = response_token_logps(trainer.model(ids, attention_mask=attention).logits, ids, mask)
        with torch.no_grad():
            ref_logps, _ = response_token_logps(trainer.ref_model(ids, attention_mask=attention).logits, ids, mask)
        policy = clipped_policy_loss(logps, logps, advantages.unsqueeze(1).expand_as(logps))
        ours = mean_per_response(policy + 0.1 * kl_estimates(logps, ref_logps)[2], valid)
        peer = trainer._compute_loss(trainer.model, batch)
        assert_close(peer.double(), ours, **SINGLE)
        weight = trainer.model.lm_head.weight
        assert_close(gradient_of(peer, weight), gradient_of(ours, weight), **SINGLE)


# ------------------------------------------------------------------------------------------ TRL: DPO


@needs("trl", "transformers", "datasets", "tokenizers")
class TrlDpo(PeerTest):
    """DPOTrainer._compute_loss; a batch is all chosen rows, then all rejected ones."""

    PAIRS = 7

    def given(self, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Float64 log-probabilities per token of policy and reference, [2P, T], and which tokens count."""
        lengths = torch.randint(1, 9, (2 * self.PAIRS, 1), generator=generator(1))
        mask = torch.arange(8) < lengths
        policy = (-scale * normal(mask.shape, 2).abs()).masked_fill(~mask, 0).requires_grad_()
        reference = (-scale * normal(mask.shape, 3).abs()).masked_fill(~mask, 0)
        return policy, reference, mask

    def trl_loss(self, trainer, policy: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """TRL's loss where the models hand back these log-probabilities instead of computing some."""

        def model_of(logps: Tensor):
            rest = dict(entropy=torch.ones_like(logps), mean_logits=torch.zeros_like(logps), is_top1=mask)
            return lambda **_: SimpleNamespace(log_probs=logps, **rest)

        trainer.ref_model = model_of(reference)
        completion_mask = torch.nn.functional.pad(mask.long(), (1, 0))
        ids = torch.zeros_like(completion_mask)
        batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), completion_mask=completion_mask)
        return trainer._compute_loss(model_of(policy), batch, return_outputs=False)

    def test_loss_gradient_and_margin(self):
        for beta, scale in ((0.5, 1.0), (0.1, 1.0), (2.0, 1.0), (0.5, 3e3)):
            trainer = dpo_trainer(beta=beta)
            policy, reference, mask = self.given(scale)
            peer = self.trl_loss(trainer, policy, reference, mask)
            (chosen, rejected), (ref_chosen, ref_rejected) = policy.sum(dim=1).chunk(2), reference.sum(dim=1).chunk(2)
            ours = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
            with self.subTest(beta=beta, scale=scale):
                # The atom is unreduced; TRL takes the mean over pairs.
                self.assertEqual(ours.shape, (self.PAIRS,))
                assert_close(ours.mean(), peer, **DOUBLE)
                assert_close(gradient_of(ours.mean(), policy), gradient_of(peer, policy), **DOUBLE)
                margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected)).mean().item()
                self.assertAlmostEqual(trainer._metrics["train"]["rewards/margins"][0] / margin, 1.0, places=9)

    def test_the_comparison_sees_the_reference_left_out(self):
        policy, reference, mask = self.given()
        chosen, rejected = policy.sum(dim=1).chunk(2)
        without = dpo_loss(chosen, rejected, torch.zeros_like(chosen), torch.zeros_like(chosen), 0.5).mean()
        self.assertGreater((without - self.trl_loss(dpo_trainer(), policy, reference, mask)).abs(), 1e-2)

    def test_a_real_batch_with_real_models(self):
        trainer = dpo_trainer()
        batch = next(iter(trainer.get_train_dataloader()))
        ids, attention, mask = batch["input_ids"], batch["attention_mask"], batch["completion_mask"].bool()
        chosen, rejected, ref_chosen, ref_rejected = (
            scores
            for model in (trainer.model, trainer.ref_model)
            for scores in response_logps(model(ids, attention_mask=attention).logits, ids, mask).chunk(2)
        )
        ours = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.5).mean()
        peer = trainer._compute_loss(trainer.model, batch, return_outputs=False)
        self.assertGreater((ours - math.log(2)).abs(), 0.1)
        assert_close(peer.double(), ours, **SINGLE)
        weight = trainer.model.lm_head.weight
        assert_close(gradient_of(peer, weight), gradient_of(ours, weight), **SINGLE)

    def test_differs_sigmoid_norm_takes_means_over_tokens(self):
        # The same loss on (log pi - log ref) / T per answer: another objective, which the atom leaves to the caller.
        trainer = dpo_trainer(loss_type="sigmoid_norm")
        policy, reference, mask = self.given()
        peer = self.trl_loss(trainer, policy, reference, mask)
        lengths = mask.sum(dim=1)
        scores = (policy.sum(dim=1) / lengths).chunk(2) + (reference.sum(dim=1) / lengths).chunk(2)
        assert_close(dpo_loss(*scores, 0.5).mean(), peer, **DOUBLE)
        sums = policy.sum(dim=1).chunk(2) + reference.sum(dim=1).chunk(2)
        self.assertGreater((dpo_loss(*sums, 0.5).mean() - peer).abs(), 1e-2)


if __name__ == "__main__":
    unittest.main()
