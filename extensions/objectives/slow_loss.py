"""A slow second way to every loss, for the tests: one token at a time, plain Python and autograd, no code of the engine."""

from __future__ import annotations

import math
import statistics
from functools import lru_cache

import torch
from torch import Tensor

from extensions.objectives import Batch, Row


class SlowLoss:
    """The loss as its formula reads, with explicit stop-gradients. Advantages A (N, T) and the kept rows are given."""

    def __init__(self, row: Row, batch: Batch, logps: Tensor, A: Tensor, kept: list[int]):
        self.row, self.batch, self.logps, self.A = row, batch, logps, A
        used = {i: [t for t in range(batch.mask.shape[1]) if batch.mask[i, t]] for i in kept}
        if row.overlong == "mask":
            used = {i: [] if batch.truncated[i] else tokens for i, tokens in used.items()}
        self.keeps = {(i, t): self._sampler_keeps(i, t, used[i]) for i in used for t in used[i]}
        if row.sampler_dropped == "left_out":
            used = {i: [t for t in tokens if self.keeps[i, t]] for i, tokens in used.items()}
        self.used = used
        self.all = [(i, t) for i, tokens in used.items() for t in tokens]

    def total(self) -> Tensor:
        """Policy, KL and NLL terms; the critic and the entropy have their own tests."""
        row, total = self.row, torch.zeros((), dtype=self.logps.dtype)
        for i, t in self.all:
            ratio, place = self.ratio(i, t), self.sampler_weight(i, t)
            counted = self.weight(row.reduction, i) * self.selects(row.token_selection, i, t)
            total = total - counted * place * self.J(i, t, ratio)
            if row.kl_in_loss and row.kl != "exact":
                kl = self.kl(i, t) * (ratio if row.kl_weight == "ratio" else 1)
                kl = kl * (place if row.sampler_place == "loss" else 1) * self.selects(row.kl_tokens, i, t)
                reduction = row.reduction if row.kl_reduction == "same" else row.kl_reduction
                total = total + row.kl_coef * self.weight(reduction, i) * kl
        good = [(i, t) for i, t in self.all if self.is_good(i, t)]
        return total - sum((row.nll_coef / len(good) * self.logps[i, t] for i, t in good), 0 * total)

    def is_good(self, i: int, t: int) -> bool:
        measure = {"none": -1.0, "positive_advantage": self.A[i, t], "positive_reward": self.batch.rewards[i]}
        return measure[self.row.nll] > 0

    # ---- reduction

    def weight(self, reduction: str, i: int) -> float:
        row, batch, rows = self.row, self.batch, [tokens for tokens in self.used.values()]
        tokens, width = len(self.all), batch.mask.shape[1]
        counted = [tokens for tokens in rows if tokens or row.rows_counted == "all"]
        B = len(counted) if batch.window_rows is None else batch.window_rows

        def prompt_tokens() -> float:
            prompts = {j: int(batch.group_ids[j]) for j, used in self.used.items() if used}
            own = sum(len(self.used[j]) for j in prompts if prompts[j] == int(batch.group_ids[i]))
            return len(set(prompts.values())) * own

        return {
            "mean_per_response": lambda: 1 / B / (len(self.used[i]) + row.length_eps),
            "mean_over_tokens": lambda: 1 / tokens,
            "mean_over_window": lambda: 1 / (batch.window_tokens or tokens),
            "mean_per_prompt": lambda: 1 / prompt_tokens(),
            "sum_per_response": lambda: 1 / B,
            "sum_over_budget": lambda: 1 / B / batch.budget,
            "sum_over_width": lambda: 1 / B / width,
            "total_over_width": lambda: 1 / width,
            "sum_over_tokens": lambda: 1.0,
        }[reduction]() / (batch.accumulation_steps if row.accumulation == "divide" else 1)

    # ---- the sampler's correction

    def gap(self, i: int, t: int) -> float:
        return (self.batch.old_logps[i, t] - self.batch.sampler_logps[i, t]).item()

    def _sampler_keeps(self, i: int, t: int, answer: list[int]) -> bool:
        row = self.row
        if row.sampler_drop == "none":
            return True

        def x(s: int) -> float:
            d = self.gap(i, s)
            p0, ps = math.exp(self.batch.old_logps[i, s]), math.exp(self.batch.sampler_logps[i, s])
            table = {"ratio": d, "k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d, "tv": abs(p0 - ps)}
            return table[row.sampler_drop]

        def inside(value: float) -> bool:
            value = math.exp(value) if row.sampler_drop == "ratio" else value
            return row.sampler_drop_low <= value <= row.sampler_drop_high

        return {
            "token": lambda: inside(x(t)),
            "mean": lambda: inside(statistics.fmean(x(s) for s in answer)),
            "sum": lambda: inside(sum(x(s) for s in answer)),
            "worst": lambda: all(inside(x(s)) for s in answer),
        }[row.sampler_drop_level]()

    def sampler_weight(self, i: int, t: int) -> float:
        row, answer = self.row, [s for s in range(self.batch.mask.shape[1]) if self.batch.mask[i, s]]
        if row.overlong == "mask" and self.batch.truncated[i]:
            answer = []
        w = {
            "none": lambda: 1.0,
            "token": lambda: math.exp(self.gap(i, t)),
            "product": lambda: math.exp(sum(self.gap(i, s) for s in answer)),
            "geometric": lambda: math.exp(statistics.fmean(self.gap(i, s) for s in answer)),
            "given": lambda: self.batch.sampler_weights.expand(self.batch.mask.shape)[i, t].item(),
        }[row.sampler_correction]()
        w = {
            "as_is": lambda: w,
            "capped": lambda: min(w, row.sampler_high),
            "floored": lambda: max(w, row.sampler_low),
            "banded": lambda: min(max(w, row.sampler_low), row.sampler_high),
        }[row.sampler_bound]()
        return w if self.keeps[i, t] else 0.0

    # ---- which tokens

    def selects(self, rule: str, i: int, t: int) -> bool:
        row, batch = self.row, self.batch
        if rule in ("all", "given"):
            return rule == "all" or bool(batch.selected_tokens[i, t])
        if rule == "top_entropy":
            values = sorted(batch.entropies[j, s].item() for j, s in self.all)
            at = (1 - row.selected_share) * (len(values) - 1)
            low = values[math.floor(at)]
            return batch.entropies[i, t].item() >= low + (values[math.ceil(at)] - low) * (at - math.floor(at))
        cov = self.covariances()
        if rule == "outside_covariance":
            return not row.covariance_low < cov[i, t] < row.covariance_high
        count = max(1, int(len(cov) * row.selected_share))
        return (i, t) in sorted(cov, key=cov.get, reverse=True)[:count]

    @lru_cache  # noqa: B019
    def covariances(self) -> dict[tuple[int, int], float]:
        A, l = self.A.tolist(), self.batch.logps.tolist()
        mean_A, mean_l = (statistics.fmean(x[j][s] for j, s in self.all) for x in (A, l))
        return {(j, s): (A[j][s] - mean_A) * (l[j][s] - mean_l) for j, s in self.all}

    # ---- ratio, J, KL

    @lru_cache  # noqa: B019  (an object lives for one comparison)
    def log_ratios(self, i: int) -> tuple[dict[int, Tensor], Tensor]:
        d = {s: self.logps[i, s] - self.batch.old_logps[i, s] for s in self.used[i]}
        return d, sum(d.values()) / len(d)

    def ratio(self, i: int, t: int) -> Tensor | None:
        row, l = self.row, self.logps
        d, mean = self.log_ratios(i)

        def cut(x: Tensor) -> Tensor:
            return x.clamp(row.log_ratio_min, row.log_ratio_max)

        def clipped_mean() -> Tensor:
            signs = {s: self.A[i, s].sign() for s in d}
            within = {s: x.clamp(-row.clip_low, row.clip_high) for s, x in d.items()}
            parts = [x if signs[s] == 0 else torch.minimum(x * signs[s], within[s] * signs[s]) * signs[s] for s, x in d.items()]
            return (sum(parts) / len(d)).exp()

        return {
            "token": lambda: cut(d[t]).exp(),
            "sequence_mean": lambda: cut(mean).exp(),
            "sequence_product": lambda: cut(sum(d.values())).exp(),
            "sequence_mean_token": lambda: cut(mean.detach() + l[i, t] - l[i, t].detach()).exp(),
            "sequence_mean_of_clipped": clipped_mean,
            "none": lambda: None,
        }[row.ratio]()

    def J(self, i: int, t: int, r: Tensor | None) -> Tensor:
        row, a, l, l0 = self.row, self.A[i, t], self.logps[i, t], self.batch.old_logps[i, t]
        lag = -self.log_ratios(i)[1].item()
        if row.off_policy_rows == "drop" and a < 0 and lag > row.off_policy_threshold:
            return 0 * l
        if row.ratio == "none":
            return a * l
        low, high = 1 - row.clip_low, 1 + row.clip_high
        p, p0 = l.exp().item(), l0.exp().item()
        clip = lambda: torch.minimum(r * a, r.clamp(low, high) * a)  # noqa: E731

        def vespo() -> Tensor:
            w = sum(self.log_ratios(i)[0].values()).detach().exp()
            k, lam = (
                (row.vespo_k_positive, row.vespo_lam_positive) if a >= 0 else (row.vespo_k_negative, row.vespo_lam_negative)
            )
            return w**k * math.exp(lam) * (-lam * w).exp() * a * l

        def is_beyond(distance: float) -> bool:
            return distance > row.clip_high and l > l0 if a > 0 else distance > row.clip_low and l < l0

        tv, kl = abs(p - p0), p0 * math.log(p0 / p) + (1 - p0) * math.log((1 - p0) / (1 - p))
        trusted = lambda distance: 0 * l if is_beyond(distance) else r.detach().clamp(max=row.ratio_cap) * a * l  # noqa: E731
        within = lambda distance: 0 * l if is_beyond(distance) else r * a  # noqa: E731
        tau = row.tau_positive if a > 0 else row.tau_negative
        return {
            "plain": lambda: r * a,
            "clip": clip,
            "dual_clip": lambda: torch.maximum(clip(), row.ratio_cap * a) if a < 0 else clip(),
            "capped_clip": lambda: torch.minimum(r.clamp(max=row.ratio_cap) * a, r.clamp(low, high) * a),
            "capped": lambda: r.clamp(max=row.ratio_cap) * a,
            "cispo": lambda: r.detach().clamp(low, high) * a * l,
            "topr": lambda: (1.0 if a > 0 else r.detach().clamp(max=row.topr_cap)) * a * l,
            "sapo": lambda: 4 / tau * torch.sigmoid(tau * (r - 1)) * a,
            "vespo": vespo,
            "dppo_tv": lambda: trusted(tv),
            "dppo_kl": lambda: trusted(kl),
            "region_tv": lambda: within(tv),
            "region_kl": lambda: within(kl),
        }[row.surrogate]()

    def kl(self, i: int, t: int) -> Tensor:
        row, l = self.row, self.logps[i, t]
        d = l - (self.batch.old_logps[i, t] if row.kl_anchor == "old" else self.batch.ref_logps[i, t])
        kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() + d - 1, "abs": d.abs()}[row.kl]
        carried = {"own": kl, "k2": d**2 / 2, "score": kl.detach() * l, "none": 0 * l}[row.kl_gradient]
        return kl.detach() + carried - carried.detach()
