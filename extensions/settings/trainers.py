"""The trainers whose settings are read: their defaults, how a file is known as theirs, and which of their keys are not read.

A new trainer is an entry in TRAINERS, its defaults in defaults/*.json (make_defaults.py), its row in meaning.py and its
batch words in arithmetic.py. A key that a trainer knows and does not read is an entry in UNREAD.
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Callable, Mapping, NamedTuple

from extensions.settings.files import Found

FOLDER = Path(__file__).parent / "defaults"


class Trainer(NamedTuple):
    """One settings class or command line of a trainer."""

    name: str
    package: str  # file of defaults
    title: str
    marks: tuple[str, ...]  # keys that only its files have
    method: str  # family of the row: grpo, rloo, pairs, kto, verl, openrlhf, sb3
    others: tuple[str, ...] = ()  # keys that its files have beside, read by something else


_TRL_OTHERS = (
    "trainer dataset_mixture datasets config prompt_form use_peft run_name hub_model_id system_prompt reward_funcs "
    "dataset_prompt_column benchmarks callbacks cosine_max_len cosine_min_value_wrong wandb_project wandb_entity "
    "num_processes num_machines model dataset"
).split()
_ZOO = "n_envs n_timesteps policy normalize env_wrapper frame_stack vec_env_wrapper env env_kwargs total_timesteps".split()

TRAINERS: dict[str, Trainer] = {
    trainer.name: trainer
    for trainer in (
        Trainer("trl.GRPOConfig", "trl", "TRL 1.16.0, GRPOTrainer", ("num_generations", "max_completion_length", "scale_rewards",
                "num_iterations", "epsilon_high"), "grpo", tuple(_TRL_OTHERS)),
        Trainer("trl.RLOOConfig", "trl", "TRL 1.16.0, RLOOTrainer", ("normalize_advantages", "reward_clip_range"), "rloo",
                tuple(_TRL_OTHERS)),
        Trainer("trl.DPOConfig", "trl", "TRL 1.16.0, DPOTrainer", ("ld_alpha", "f_divergence_type", "loss_weights",
                "precompute_ref_log_probs"), "pairs", tuple(_TRL_OTHERS)),
        Trainer("trl.KTOConfig", "trl", "TRL 1.16.0, KTOTrainer", ("desirable_weight", "undesirable_weight"), "kto",
                tuple(_TRL_OTHERS)),
        Trainer("trl.CPOConfig", "trl", "TRL 1.16.0, experimental CPOTrainer", ("cpo_alpha", "simpo_gamma"), "pairs",
                tuple(_TRL_OTHERS)),
        Trainer("trl.ORPOConfig", "trl", "TRL 1.16.0, experimental ORPOTrainer", (), "pairs", tuple(_TRL_OTHERS)),
        Trainer("verl.ppo", "verl", "verl 0.9.1, main_ppo", ("actor_rollout_ref.", "algorithm.", "data.train_batch_size"),
                "verl"),
        Trainer("openrlhf.ppo", "openrlhf", "OpenRLHF 0.11.2, train_ppo_ray", ("algo.", "rollout.", "actor.eps_clip",
                "advantage_estimator", "init_kl_coef"), "openrlhf"),
        Trainer("openrlhf.dpo", "openrlhf", "OpenRLHF 0.11.2, train_dpo", ("model.beta", "model.ipo_enable", "model.nll_loss_coef"), "openrlhf_dpo"),
        Trainer("sb3.PPO", "stable_baselines3", "stable-baselines3 2.9.2, PPO", ("n_epochs", "clip_range", "clip_range_vf",
                "gae_lambda", "ent_coef"), "sb3", (*_ZOO, "vec_normalize.gamma")),
        Trainer("sb3.A2C", "stable_baselines3", "stable-baselines3 2.9.2, A2C", ("use_rms_prop", "rms_prop_eps"), "a2c",
                (*_ZOO, "vec_normalize.gamma")),
    )
}  # fmt: skip

# Flags that older scripts use -> the key they have become.
RENAMED: dict[str, dict[str, str]] = {
    "openrlhf.ppo": {
        "advantage_estimator": "algo.advantage.estimator",
        "init_kl_coef": "algo.kl.init_coef",
        "use_kl_loss": "algo.kl.use_loss",
        "kl_estimator": "algo.kl.estimator",
        "n_samples_per_prompt": "rollout.n_samples_per_prompt",
        "rollout_batch_size": "rollout.batch_size",
        "train_batch_size": "train.batch_size",
        "micro_train_batch_size": "train.micro_batch_size",
        "micro_rollout_batch_size": "rollout.micro_batch_size",
        "max_epochs": "train.max_epochs",
        "num_episodes": "train.num_episodes",
        "eps_clip": "actor.eps_clip",
        "eps_clip_low_high": "actor.eps_clip_low_high",
        "value_clip": "critic.value_clip",
        "gamma": "algo.advantage.gamma",
        "lambd": "algo.advantage.lambd",
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "apply_chat_template": "data.apply_chat_template",
        "reward_clip_range": "reward.clip_range",
        "dynamic_filtering": "algo.dynamic_filtering_enable",
        "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
        "pretrain": "actor.model_name_or_path",
        "reward_pretrain": "reward.model_name_or_path",
        "prompt_data": "data.prompt_dataset",
        "input_key": "data.input_key",
        "generate_max_len": "rollout.max_new_tokens",
        "no_advantage_std_norm": "algo.advantage.no_std_norm",
        "actor_learning_rate": "actor.adam.lr",
        "critic_learning_rate": "critic.adam.lr",
        "zero_stage": "ds.zero_stage",
        "colocate_all_models": "train.colocate_all",
        "adam_offload": "ds.adam_offload",
        "actor_num_gpus_per_node": "actor.num_gpus_per_node",
        "actor_num_nodes": "actor.num_nodes",
        "dual_clip": "actor.dual_clip",
        "prompt_max_len": "data.max_len",
    },
    "trl.GRPOConfig": {"vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max"},
}


LARGEST_WHOLE = 1e15
"""Of a setting that counts something: products of a few of them, and their quotients, are floats then."""


@dataclass
class Settings:
    """What a run is configured with: written keys over the defaults of one trainer."""

    trainer: Trainer
    written: dict[str, object]
    defaults: dict[str, object]
    version: str
    found: Found = field(default_factory=Found)
    renamed: dict[str, str] = field(default_factory=dict)  # old name -> the key it is read as
    world: int = 1  # processes, where the settings do not say it

    def __getitem__(self, key: str) -> object:
        """The value that counts: written, or the default. Raises KeyError for a key that the trainer does not have."""
        return self.written[key] if key in self.written else self.defaults[key]

    def get(self, key: str, otherwise: object = None) -> object:
        """As [key], for keys of which only some versions or engines have a default."""
        value = self.written.get(key, self.defaults.get(key))
        return otherwise if value is None else value

    def number(self, key: str, otherwise: float = 0.0) -> float:
        """The value as a number. Raises ValueError that names the key for anything else."""
        value = self.get(key, otherwise)
        if isinstance(value, str) and value.startswith(("lin_", "linear_")):  # a schedule of the SB3 zoo: its first value
            value = value.split("_", 1)[1]
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):  # the last: a whole number of more digits than a float has
            raise ValueError(f"{key}: got {str(value)[:40]!r}, wanted a number") from None

    def whole(self, key: str, otherwise: int = 1) -> int:
        made = self.number(key, otherwise)
        if not abs(made) <= LARGEST_WHOLE or made != int(made):
            raise ValueError(f"{key}: got {made:g}, wanted a whole number of at most {LARGEST_WHOLE:g}")
        return int(made)

    def has(self, key: str) -> bool:
        return key in self.written

    @property
    def unknown(self) -> dict[str, list[str]]:
        """Written keys that the trainer does not have -> the nearest that it has."""
        known = set(self.defaults) | set(command_line_keys(self.trainer)) | set(self.trainer.others)
        parents = {".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)}
        open_ended = ("_target_", "override_config", "_kwargs", "reward_kwargs", "config.")
        made = {}
        for key in self.written:
            if key in known or key in parents or any(part in key for part in open_ended):
                continue
            if any(key.startswith(f"{name}.") and not isinstance(self.defaults[name], (int, float, bool)) for name in self.defaults):
                continue  # inside a free dictionary of the trainer
            made[key] = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        return made

    @property
    def unread(self) -> dict[str, str]:
        """Written keys that the trainer knows and does not read with these settings -> why."""
        made = {}
        for rule in UNREAD:
            if rule.trainer not in ("", self.trainer.name):
                continue
            for key in self.written:
                matches = key == rule.key or rule.key.endswith("*") and key.startswith(rule.key[:-1])
                if matches and key not in made and rule.when(self):
                    made[key] = rule.because
        return made


class Unread(NamedTuple):
    trainer: str
    key: str  # a key, or a beginning followed by *
    when: Callable[[Settings], bool]
    because: str


def _loss(settings: Settings) -> object:
    return settings["loss_type"]


def _losses(settings: Settings) -> list:
    made = settings.get("loss_type")
    return made if isinstance(made, list) else [made]


_ACTOR = "actor_rollout_ref.actor."
_GRPO, _DPO, _VERL, _ORLHF = "trl.GRPOConfig", "trl.DPOConfig", "verl.ppo", "openrlhf.ppo"


def _mode(settings: Settings) -> str:
    return str(settings.get(_ACTOR + "policy_loss.loss_mode"))


UNREAD: tuple[Unread, ...] = (
    Unread(_GRPO, "use_bias_correction_kl", lambda s: not s.number("beta"), "beta is 0: there is no KL term"),
    Unread(_GRPO, "sapo_*", lambda s: _loss(s) != "sapo", 'only loss_type "sapo" reads it'),
    Unread(_GRPO, "vespo_*", lambda s: _loss(s) != "vespo", 'only loss_type "vespo" reads it'),
    Unread(_GRPO, "vllm_*", lambda s: not s.get("use_vllm"), "use_vllm is false"),
    Unread(_GRPO, "epsilon", lambda s: _loss(s) == "cispo", "CISPO here has no lower bound: only epsilon_high is read"),
    Unread(_GRPO, "epsilon*", lambda s: _loss(s) in ("sapo", "vespo"), "this loss_type has no band of ratios"),
    Unread(_GRPO, "delta", lambda s: _loss(s) in ("cispo", "sapo", "vespo"), "this loss_type does not cap the ratio"),
    Unread(_GRPO, "ref_model_*", lambda s: not s.get("sync_ref_model"), "sync_ref_model is false"),
    Unread(_GRPO, "entropy_target", lambda s: not s.get("use_adaptive_entropy"), "use_adaptive_entropy is false"),
    Unread(_GRPO, "entropy_coef_*", lambda s: not s.get("use_adaptive_entropy"), "use_adaptive_entropy is false"),
    Unread(_DPO, "label_smoothing", lambda s: not {"robust", "exo_pair", "aot", "aot_unpaired"} & set(_losses(s)),
           "only robust, exo_pair, aot and aot_unpaired read it; sigmoid does not"),
    Unread(_DPO, "f_alpha_divergence_coef", lambda s: s.get("f_divergence_type") != "alpha_divergence",
           "f_divergence_type is not alpha_divergence"),
    Unread(_DPO, "discopop_tau", lambda s: "discopop" not in _losses(s), "loss_type is not discopop"),
    Unread("trl.CPOConfig", "simpo_gamma", lambda s: _loss(s) != "simpo", "loss_type is not simpo"),
    Unread(_VERL, _ACTOR + "clip_ratio", lambda s: not _mode(s).startswith("dppo") and
           s.get(_ACTOR + "clip_ratio_low") is not None and s.get(_ACTOR + "clip_ratio_high") is not None,
           "clip_ratio_low and clip_ratio_high are set (0.2 by default), and win"),
    Unread(_VERL, _ACTOR + "clip_ratio_c", lambda s: _mode(s) not in ("vanilla", "dppo_tv", "dppo_kl"),
           "only the losses vanilla and dppo read it"),
    Unread(_VERL, _ACTOR + "grad_clip", lambda s: True, "the clip that counts is actor.optim.clip_grad"),
    Unread(_VERL, "critic.grad_clip", lambda s: True, "the clip that counts is critic.optim.clip_grad"),
    Unread(_VERL, _ACTOR + "tau_*", lambda s: _mode(s) != "sapo", "only loss_mode sapo reads it"),
    Unread(_VERL, _ACTOR + "kl_loss_*", lambda s: not s.get(_ACTOR + "use_kl_loss"), "use_kl_loss is false"),
    Unread(_VERL, "algorithm.kl_ctrl.*", lambda s: not s.get("algorithm.use_kl_in_reward"), "use_kl_in_reward is false"),
    Unread(_VERL, "algorithm.kl_penalty", lambda s: not s.get("algorithm.use_kl_in_reward"), "use_kl_in_reward is false"),
    Unread(_VERL, "algorithm.lam", lambda s: s.get("algorithm.adv_estimator") != "gae", "only adv_estimator gae reads it"),
    Unread(_VERL, "algorithm.gamma", lambda s: s.get("algorithm.adv_estimator") not in ("gae", "reinforce_plus_plus"),
           "only adv_estimator gae and reinforce_plus_plus read it"),
    Unread(_VERL, "algorithm.norm_adv_by_std_in_grpo", lambda s: not str(s.get("algorithm.adv_estimator")).startswith("grpo"),
           "only the grpo estimators read it"),
    Unread(_VERL, _ACTOR + "loss_scale_factor", lambda s: s.get(_ACTOR + "loss_agg_mode") != "seq-mean-token-sum-norm",
           "only loss_agg_mode seq-mean-token-sum-norm reads it"),
    Unread(_VERL, _ACTOR + "loss_agg_mode", lambda s: _mode(s) in ("geo_mean", "sapo"),
           "this loss_mode takes the mean over answers whatever is set"),
    Unread(_ORLHF, "algo.advantage.lambd", lambda s: s.get("algo.advantage.estimator") != "gae", "only the estimator gae reads it"),
    Unread(_ORLHF, "algo.advantage.gamma", lambda s: s.get("algo.advantage.estimator") not in ("gae", "reinforce"),
           "gamma is set to 1 for this estimator"),
    Unread(_ORLHF, "critic.*", lambda s: s.get("algo.advantage.estimator") != "gae", "without the estimator gae there is no critic"),
    Unread(_ORLHF, "actor.eps_clip", lambda s: s.get("actor.eps_clip_low_high") is not None, "eps_clip_low_high is set, and wins"),
    Unread(_ORLHF, "algo.advantage.is_correction_*", lambda s: s.get("algo.advantage.is_correction_level") == "off",
           "is_correction_level is off"),
    Unread(_ORLHF, "actor.loss_agg_mode", lambda s: s.get("actor.policy_loss_type") == "gspo", "gspo takes the mean over answers"),
    Unread("sb3.A2C", "rms_prop_eps", lambda s: s.get("use_rms_prop") is False, "use_rms_prop is false"),
)  # fmt: skip


@lru_cache
def document(package: str) -> dict:
    return json.loads((FOLDER / f"{package}.json").read_text(encoding="utf-8"))


def defaults_of(trainer: Trainer) -> dict[str, object]:
    made = document(trainer.package)["trainers"][trainer.name]
    return {key: value for key, value in made.items() if value != "<computed>"} | {
        key: None for key, value in made.items() if value == "<computed>"
    }


def command_line_keys(trainer: Trainer) -> Mapping[str, object]:
    """Keys that a settings file of the trainer's command line holds beside its own."""
    return document("trl")["trainers"]["trl command line"] if trainer.package == "trl" else {}


def detect(found: Found) -> Trainer | None:
    """The trainer whose marks the keys carry; None where nothing or two speak. A trainer's own name in the file decides."""
    if found.trainer:
        return TRAINERS[found.trainer]
    named = str(found.values.get("trainer", "")).lower()
    for trainer in TRAINERS.values():
        if named and named.removesuffix("trainer") == trainer.name.split(".")[1].removesuffix("Config").lower():
            return trainer
    counts = {name: _marks(trainer, found.values) for name, trainer in TRAINERS.items()}
    best = max(counts.values())
    leaders = [name for name, count in counts.items() if count == best]
    if best and len(leaders) == 1:
        return TRAINERS[leaders[0]]
    # What is written and known to one trainer alone.
    fits = {name: sum(key in document(t.package)["trainers"][name] for key in found.values) for name, t in TRAINERS.items()}
    best = max(fits.values())
    leaders = [name for name, count in fits.items() if count == best]
    return TRAINERS[leaders[0]] if best and len(leaders) == 1 else None


def _marks(trainer: Trainer, values: Mapping[str, object]) -> int:
    prefixes = tuple(mark for mark in trainer.marks if mark.endswith("."))
    return sum(key in trainer.marks or bool(prefixes) and key.startswith(prefixes) for key in values)


def settings_of(found: Found, trainer: Trainer, world: int = 1) -> Settings:
    """The written keys under the names that the trainer has for them, over its defaults."""
    defaults, written, renamed = defaults_of(trainer), {}, {}
    values = found.values
    if trainer.package == "verl":
        values = {key.replace("@", "."): value for key, value in values.items()}
        # A file of the actor alone, or an older one: rollout.n, actor.clip_ratio.
        values = {
            (f"actor_rollout_ref.{key}" if key.split(".")[0] in ("actor", "rollout", "ref") else key): value
            for key, value in values.items()
        }
    if trainer.package == "stable_baselines3":
        # The zoo's files have one block an environment: its name stands before every key.
        heads = {key.split(".")[0] for key in values if "." in key and not key.startswith("vec_normalize")}
        if len(heads) >= 1 and not any(key in defaults for key in values):
            head = sorted(heads)[0]
            values = {key.removeprefix(f"{head}."): value for key, value in values.items() if key.startswith(f"{head}.")}
            found.notes.append(f"read: the block {head}" + (f" of {len(heads)}" if len(heads) > 1 else ""))
    aliases = RENAMED.get(trainer.name, {})
    for key, value in values.items():
        new = key if key in defaults else aliases.get(key.replace("-", "_"), key)
        if new != key:
            renamed[key] = new
        written[new] = value
    version = document(trainer.package)["version"]
    return Settings(trainer, written, defaults, version, found, renamed, world)
