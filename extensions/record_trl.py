"""How each trainer of TRL is recorded: what extensions/record.py puts under a trainer class. TRL is not imported.

One class a kind of trainer: it watches one call of compute_loss, the methods of TRL 1.16.0 that pass log-probabilities on,
and, for GRPO and RLOO, the generation batch before it is shuffled and cut. Another trainer is another class and an entry of
TRAINERS. Each gives `_arrays`: what is recorded of a micro-batch, under the names of extensions/read/names.py.
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import TYPE_CHECKING, Any, Iterator, Sequence

import torch
from torch import Tensor

if TYPE_CHECKING:
    from extensions.record import Recorder


def last_columns(value: Any, columns: int) -> Any:
    """The last columns of a token-wise tensor; anything else as it is."""
    return value[:, -columns:] if isinstance(value, Tensor) and value.ndim >= 2 else value


class _Recording:
    """What the four trainers share: one call of compute_loss in training is one micro-batch."""

    recorder: Recorder
    _at: tuple[int, int] = (-1, 0)  # optimiser step, micro-batches of it so far

    def compute_loss(self, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
        step = self.state.global_step
        if not (self.model.training and torch.is_grad_enabled()):
            return super().compute_loss(model, inputs, *args, **kwargs)
        micro_batch = self._at[1] if self._at[0] == step else 0
        self._at = step, micro_batch + 1
        if not self.recorder.wants(step):
            return super().compute_loss(model, inputs, *args, **kwargs)
        before = dict(inputs)
        with self._watch(model) as seen:
            result = super().compute_loss(model, inputs, *args, **kwargs)
        with self.recorder.attempt(_versions()):
            place = {
                "rank": self.accelerator.process_index,
                "world_size": self.accelerator.num_processes,
                "micro_batch": micro_batch,
                "accumulation_steps": self.current_gradient_accumulation_steps,
                "step": step,
            }
            arrays, columns = self._arrays(model, before, seen)
            arrays["beta"] = self.beta
            self.recorder.write(result[0] if isinstance(result, tuple) else result, place, arrays, columns)
        return result

    def _metric(self, name: str) -> float | None:
        """What the trainer has just logged for this micro-batch; with several ranks it is a mean over all of them."""
        values = self._metrics["train"].get(name)
        return values[-1] if values and self.accelerator.num_processes == 1 else None

    def _logits(self, model: Any, input_ids: Tensor, attention_mask: Tensor, columns: int) -> Tensor | None:
        if not self.recorder.logits:
            return None
        with torch.no_grad(), torch.random.fork_rng(enabled=not input_ids.is_cuda or torch.cuda.is_available()):
            return model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -columns - 1 : -1]


class _Online(_Recording):
    """GRPO and RLOO: log-probabilities pass through one method; rewards are seen before the batch is shuffled."""

    _passes: list | None = None  # (log-probabilities, entropies) of each forward pass, while somebody watches
    _generation: dict | None = None
    _generated_at: int = -1

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._passes is not None:
            self._passes.append(outputs[:2])
        return outputs

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _generate_and_score_completions(self, inputs: Any) -> dict:
        self._passes = []
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            with self.recorder.attempt(_versions()):
                self._generation = self._of_generation(output)
        self._passes = None
        return output

    def _of_generation(self, output: dict) -> dict | None:
        """The generation batch of all ranks; into output, what is to be shuffled and cut with its rows. None: not known here."""
        rows, per_func = len(output["completion_ids"]), self._rewards_per_func
        first = self.accelerator.process_index * rows
        output["recorded_row_ids"] = torch.arange(first, first + rows, device=output["completion_ids"].device)
        weights = self.reward_weights.to(per_func.device)
        rewards = (per_func * weights).nansum(1).masked_fill(per_func.isnan().all(1), math.nan)
        clip = getattr(self, "reward_clip_range", None)
        made = {
            "gen_rewards": rewards.clamp(*clip) if clip else rewards,
            "gen_group_ids": torch.arange(len(per_func)) // self.num_generations,
            "reward_weights": weights,
        }
        if not clip:
            made["gen_rewards_per_func"] = per_func
        for name, value in zip(("recorded_old_logps", "recorded_ref_logps"), [one for one, _ in self._passes]):
            output[name] = value  # RLOO hands on their sums alone
        self._generated_at = self.state.global_step
        if rows < len(per_func) and "old_logps" in output and self.beta:
            return None  # RLOO's rewards hold the KL of rows that lie on other ranks
        if rows == len(per_func):
            made["gen_lengths"] = output["completion_mask"].sum(1)
            if len(self._passes) == 2 and "old_logps" in output:  # RLOO's KL in the reward
                gap = output["recorded_old_logps"] - output["recorded_ref_logps"]
                made["gen_kl"] = (gap * output["completion_mask"]).sum(1)
        return made

    @contextlib.contextmanager
    def _watch(self, model: Any) -> Iterator[list]:
        self._passes = seen = []
        try:
            yield seen
        finally:
            self._passes = None

    def _arrays(self, model: Any, inputs: dict, seen: Sequence) -> tuple[dict, None]:
        logps, entropies = next(outputs for outputs in reversed(seen) if outputs[0].requires_grad)
        ids, prompts = inputs["completion_ids"], inputs["prompt_ids"]
        arrays = {"logps": logps, "entropies": entropies, "mask": inputs["completion_mask"], "completion_ids": ids}
        arrays |= {name: inputs.get(name) for name in ("tool_mask", "advantages", "num_items_in_batch")}
        arrays["prompt_lengths"] = inputs["prompt_mask"].sum(1)
        arrays |= self._policies(inputs, logps)
        arrays |= self._settings()
        generation, rows = self._generation, inputs.get("recorded_row_ids")
        if generation is not None and rows is not None:
            arrays |= generation | {"row_ids": rows}
            for name in ("rewards", "group_ids", "rewards_per_func"):
                whole = generation.get(f"gen_{name}")
                arrays[name] = None if whole is None else whole.to(rows.device)[rows]
        arrays["pass_index"] = self._pass_index()
        arrays["clip_fraction"] = self._metric("clip_ratio/region_mean")
        whole = torch.cat([prompts, ids], 1), torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        arrays["logits"] = self._logits(model, *whole, columns=ids.shape[1])
        return arrays, None

    def _policies(self, inputs: dict, logps: Tensor) -> dict:
        old, ref = inputs.get("recorded_old_logps"), inputs.get("recorded_ref_logps")
        return {"old_logps": old, "ref_logps": ref}

    def _settings(self) -> dict:
        return {
            "clip_low": self.epsilon_low,
            "clip_high": self.epsilon_high,
            "steps_per_generation": self.args.steps_per_generation,
            "temperature": self.temperature,
            "top_k": self.args.top_k or 0,
            "eos_id": self.eos_token_ids,
            "pad_id": self._tokenizer.pad_token_id,
        }

    def _pass_index(self) -> int | None:
        """Passes over this generation batch before this one; None where the policy moved within the first, or not yet."""
        passed = self._step % (self.args.steps_per_generation * self.num_iterations) // self.args.steps_per_generation
        moved = self.state.global_step > self._generated_at
        return passed if moved == (passed > 0) else None


class _Grpo(_Online):
    def _policies(self, inputs: dict, logps: Tensor) -> dict:
        old = inputs.get("old_per_token_logps")
        return {
            "old_logps": logps.detach() if old is None else old,  # what the ratio is then taken against
            "ref_logps": inputs.get("ref_per_token_logps"),
            "sampler_logps": inputs.get("sampling_per_token_logps"),
            "sampler_weights": inputs.get("importance_sampling_ratio"),
        }

    def _settings(self) -> dict:
        made = super()._settings() | {"budget": self.max_completion_length, "ratio_cap": self.args.delta}
        if self.loss_type == "cispo":  # epsilon_high is the ratio's cap itself, and nothing bounds it from below
            made |= {"clip_low": math.inf, "clip_high": self.epsilon_high - 1}
        if self._entropy_bonus_enabled:
            made["entropy_coef"] = self.entropy_coef
        return made | {"kl": self._metric("kl") if self.beta else None}


class _Offline(_Recording):
    """DPO and KTO: the models are called inside the loss; what they return is caught there."""

    @contextlib.contextmanager
    def _watch(self, model: Any) -> Iterator[list]:
        seen: list = []
        unwrap = self.accelerator.unwrap_model
        models = {id(one): one for one in (unwrap(model), self.ref_model and unwrap(self.ref_model)) if one is not None}
        hooks = [
            one.register_forward_hook(lambda _, args, output: seen.append(getattr(output, "log_probs", None)))
            for one in models.values()
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _of_tokens(self, model: Any, inputs: dict, logps: Tensor, ref: Tensor | None) -> tuple[dict, int]:
        columns = inputs["input_ids"].shape[1] - 1  # the log-probability of token t + 1 stands at t
        return {
            "logps": logps,
            "ref_logps": ref,
            "mask": inputs["completion_mask"][:, 1:],
            "completion_ids": inputs["input_ids"][:, 1:],
            "attention_mask": inputs["attention_mask"],
            "eos_id": self._tokenizer.eos_token_id,
            "pad_id": self._tokenizer.pad_token_id,
            "logits": self._logits(model, inputs["input_ids"], inputs["attention_mask"], columns),
        }, columns


class _Dpo(_Offline):
    def _arrays(self, model: Any, inputs: dict, seen: Sequence) -> tuple[dict, int]:
        logps = next(output for output in seen if output.requires_grad)
        ref = next((output for output in seen if not output.requires_grad), None)
        arrays, columns = self._of_tokens(model, inputs, logps, ref)
        mask = arrays["mask"].bool()
        lengths = mask.sum(1)
        weight = mask.to(logps.dtype)
        if self.ld_alpha is not None:  # tokens beyond the shorter answer of a pair weigh ld_alpha
            shared = torch.minimum(*lengths.chunk(2)).repeat(2)[:, None]
            weight = weight * torch.where(mask.cumsum(1) <= shared, 1.0, self.ld_alpha)
        arrays["chosen_lengths"], arrays["rejected_lengths"] = lengths.chunk(2)
        arrays["chosen_logps"], arrays["rejected_logps"] = (last_columns(logps.detach(), columns) * weight).sum(1).chunk(2)
        if ref is not None:
            arrays["ref_chosen_logps"], arrays["ref_rejected_logps"] = (last_columns(ref, columns) * weight).sum(1).chunk(2)
        else:  # precompute_ref_log_probs
            arrays |= {name: inputs.get(name) for name in ("ref_chosen_logps", "ref_rejected_logps")}
        arrays["accuracy"], arrays["margin"] = self._metric("rewards/accuracies"), self._metric("rewards/margins")
        return arrays, columns


class _Kto(_Offline):
    _kl_logps: list = []

    def _compute_kl_logps(self, model: Any, batch: dict) -> Tensor | None:
        made = super()._compute_kl_logps(model, batch)
        self._kl_logps.append(made)
        return made

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self._kl_logps = []
        return super().compute_loss(*args, **kwargs)

    def _arrays(self, model: Any, inputs: dict, seen: Sequence) -> tuple[dict, int]:
        place = next(place for place, output in enumerate(seen) if output.requires_grad)
        after = seen[place + 1 :]
        arrays, columns = self._of_tokens(model, inputs, seen[place], after[-1] if after else None)
        mask = arrays["mask"].bool()
        arrays["labels"], arrays["lengths"] = torch.as_tensor(inputs["label"]).bool(), mask.sum(1)
        arrays["seq_logps"] = torch.where(mask, last_columns(seen[place].detach(), columns), 0.0).sum(1)
        if after:
            arrays["ref_seq_logps"] = torch.where(mask, last_columns(after[-1], columns), 0.0).sum(1)
        else:
            arrays["ref_seq_logps"] = inputs.get("ref_logps")
        if self.calculate_KL:
            arrays["kl_seq_logps"] = self._kl_logps[0]
            arrays["ref_kl_seq_logps"] = self._kl_logps[1] if len(self._kl_logps) > 1 else inputs.get("ref_KL_logps")
        return arrays, columns


TRAINERS: dict[str, type] = {"GRPOTrainer": _Grpo, "RLOOTrainer": _Online, "DPOTrainer": _Dpo, "KTOTrainer": _Kto}
"""The class of TRL that a trainer is or derives from -> what records it."""
WRITTEN_FOR = "1.16.0"


def _versions() -> str:
    version = getattr(sys.modules.get("trl"), "__version__", None)
    return "" if version in (None, WRITTEN_FOR) else f" (written for TRL {WRITTEN_FOR}, this is {version})"
