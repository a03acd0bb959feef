"""A row of extensions/objectives on this rank's part of the batch: what to gather, what to count, what to call backward on.

    step = RowOnRanks(row, batch, engine, M)         one exchange of rewards, and one of counts
    for rows in micro_batches: step.loss(rows, logps[rows], ...).backward()

The row itself stays what it is. What one process takes over its whole batch comes from all ranks:

    group statistics, std over answers      rewards, ids, lengths and KL of all rows, as `gen_` arrays of the batch
    whitening over tokens                   rules.whiten, handed over as given advantages
    group filter                            by the rewards of all; rows that leave are in no count
    denominator                             rules.mean_over_tokens, mean_per_response or sum_over_constant

so that the sum over micro-batches and ranks of what reaches the optimiser is the row on the joined batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from extensions.distributed import rules
from extensions.distributed.rules import Engine, Group, Totals
from extensions.objectives import (
    GENERATION,
    Batch,
    PreferenceRow,
    Preferences,
    Row,
    divide_by_std,
    evaluate,
    evaluate_preference,
    loss_to_backpropagate,
)
from extensions.objectives.advantages import advantages_and_targets, kl_of_sampling

# reduction of a row -> the same with its denominator left to the rule, and which rule that is.
NUMERATORS = {
    "mean_over_tokens": ("mean_over_window", "tokens"),
    "mean_over_window": ("mean_over_window", "tokens"),
    "mean_per_response": ("mean_per_response", "rows"),
    "sum_per_response": ("sum_per_response", "rows"),
    "sum_over_budget": ("sum_over_budget", "rows"),
}

COLUMNS = 4  # reward, prompt id, length, KL: what a row sends to the other ranks


def take(batch: Batch, rows: Tensor) -> Batch:
    """Some rows of a batch; what belongs to the generation batch or to all rows stays whole."""
    whole = {*GENERATION, "reward_weights"}
    return replace(batch, **{
        field.name: getattr(batch, field.name)[rows]
        for field in dataclasses.fields(batch)
        if isinstance(getattr(batch, field.name), Tensor) and field.name not in whole
    })  # fmt: skip


def with_generation(row: Row, batch: Batch, group: Group) -> Batch:
    """The batch with rewards, ids, lengths and KL sums of the rows of all ranks, (M,) each, and where its own rows stand.

    As `gen_` arrays, from which the advantages are then computed. One exchange of four numbers a row.
    """
    kl = kl_of_sampling(row, batch).sum(dim=1) if row.kl_in_reward else torch.zeros_like(batch.rewards)
    ids = torch.zeros_like(batch.lengths) if batch.group_ids is None else batch.group_ids
    # Ids and lengths are whole numbers below 2^53: a float64 holds them exactly.
    columns = torch.stack([x.double() for x in (batch.rewards, ids, batch.lengths, kl)], dim=1)
    joined, own = rules.gather_rows(columns, group)
    rewards, ids, lengths, kl = joined.T.contiguous()
    dtype = batch.logps.dtype
    return replace(
        batch,
        gen_rewards=rewards.to(dtype),
        gen_group_ids=ids.long(),
        gen_lengths=lengths.to(dtype),
        gen_kl=kl.to(dtype),
        row_ids=torch.arange(own.start, own.stop),
    )


def rows_with_spread(rewards: Tensor, ids: Tensor, group: Group) -> Tensor:
    """Rows whose group over all ranks has unequal rewards, (n,) bool: what group_filter "spread" keeps."""
    return rules.group_statistics(rewards, ids, group).std > 0


def check_row(row: Row) -> None:
    """Raises ValueError for a row that these rules do not cover, and says which choice it is.

    Left out: choices that look at the whole batch in ways of their own (quantiles, covariances, rewards in parts), and terms
    with another denominator than the policy term. What is refused here would be wrong by a little, silently.
    """
    covered = {"reduction": tuple(NUMERATORS), "kl_reduction": ("same", row.reduction)}
    if row.entropy_coef:
        covered["entropy_reduction"] = ("same", row.reduction)
    covered |= dict(overlong=("none", "soft"), reward_parts=("sum_then_normalise",), missing_reward=("refuse", "exclude"))
    for field, allowed in covered.items():
        if getattr(row, field) not in allowed:
            wanted = ", ".join(allowed)
            raise ValueError(f"{row.name}: {field} {getattr(row, field)!r} has no rule over ranks; wanted {wanted}")
    for field in (*row.advantage_extras, *row.loss_extras):
        raise ValueError(f"{row.name}: {field} {getattr(row, field)!r} has no rule over ranks")
    if row.baseline == "greedy" and row.credit == "outcome":
        raise ValueError(f"{row.name}: baseline 'greedy' has no rule over ranks with credit 'outcome'")


class RowOnRanks:
    """One update of an objective on this rank's rows; every rank makes one, also with no row at all (batch None).

    row: of extensions.objectives. batch: this rank's rows, of all its micro-batches. micro_batches: how many these are.
    Raises ValueError, on every rank, as check_row, and for data that evaluate would refuse.
    """

    def __init__(self, row: Row, batch: Batch | None, engine: Engine, micro_batches: int = 1):
        check_row(row)
        self.row, self.engine = row, engine
        self.reduction, self.counts = NUMERATORS[row.reduction]
        if batch is None:
            self._join_with_nothing()
            self.batch, self.kept, tokens, rows = None, None, 0, 0
        else:
            self.batch, self.kept = self._over_all_ranks(batch)
            tokens = int(batch.mask[self.kept].sum())
            counted = self.kept if row.rows_counted == "all" else self.kept & (batch.lengths > 0)
            rows = int(counted.sum())
        self.totals = rules.count(tokens, rows, micro_batches, engine.group)

    @property
    def _gathers(self) -> bool:
        """Whether the advantages need the rewards of other ranks."""
        of_answers = self.row.credit == "outcome" or self.row.is_grouped
        return self.row.baseline not in ("gae", "given") and of_answers

    def _over_all_ranks(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The batch with what it needs of the other ranks, and its rows that stay, (n,) bool."""
        row, group = self.row, self.engine.group
        kept = torch.ones(len(batch.mask), dtype=torch.bool)
        if row.group_filter == "spread":
            kept = rows_with_spread(batch.rewards, batch.group_ids, group)
        if self._gathers:
            batch = with_generation(row, batch, group)
        if row.scale == "token_std":
            counted = batch.mask & kept.unsqueeze(1)
            raw, targets = advantages_and_targets(replace(row, scale="none", group_filter="none"), batch, counted)
            white = whitened(row, raw.expand_as(counted), counted, group)
            batch = replace(batch, advantages=white, returns=targets if batch.returns is None else batch.returns)
        return batch, kept

    def _join_with_nothing(self) -> None:
        """The same exchanges, in the same order, with no rows."""
        group = self.engine.group
        none, ids = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        if self.row.group_filter == "spread":
            rows_with_spread(none, ids, group)
        if self._gathers:
            rules.gather_rows(torch.zeros(0, COLUMNS, dtype=torch.float64), group)
        if self.row.scale == "token_std":
            whitened(self.row, none, torch.zeros(0, dtype=torch.bool), group)

    def loss(self, rows: Tensor, logps: Tensor, **live: Tensor) -> Tensor | None:
        """What to call backward() on for one micro-batch; None when none of its rows counts: take zero_loss then.

        rows: numbers of this rank's rows, (b,). logps (b, T) of these rows, and in `live` vpreds, entropies, logits, each
        with its graph. Gradient: to these.
        """
        counted = self.kept[rows] & self.batch.mask[rows].any(dim=1)
        if not counted.any():
            return None
        current = {name: value[counted] for name, value in {"logps": logps, **live}.items()}
        micro = take(self.batch, rows[counted])
        unused = ~micro.mask
        fixed = {
            name: value.detach().masked_fill(unused.reshape(*unused.shape, *[1] * (value.dim() - 2)), 0.0)
            for name, value in current.items()
        }
        micro = replace(micro, **fixed, window_tokens=1.0, window_rows=1.0)
        numerator = loss_to_backpropagate(evaluate(self._row_of_numerator(), micro), **current)
        rule = rules.mean_over_tokens if self.counts == "tokens" else rules.mean_per_response
        return rule(numerator, self.totals, self.engine)

    def _row_of_numerator(self) -> Row:
        """The row with a denominator of 1, and with advantages as they are given where they were whitened already."""
        row = replace(
            self.row, reduction=self.reduction, kl_reduction="same", entropy_reduction="same", group_filter="none",
            accumulation="none", rows_counted="all",
        )  # fmt: skip
        if row.scale != "token_std":
            return row
        row = replace(row, baseline="given", scale="none", credit="outcome", overlong="none")
        return row if row.kl_in_loss else replace(row, kl="none", kl_coef=0.0, kl_place="loss")


def whitened(row: Row, advantages: Tensor, counted: Tensor, group: Group) -> Tensor:
    """scale "token_std" over the tokens of all ranks: (A - mean) and the row's own guard of its std."""
    of = rules.moments_of_all(advantages, counted, group)
    if of.count <= row.std_ddof:
        raise ValueError(f"{row.name}: {of.count:.0f} token(s) over all ranks have no std")
    variance = torch.tensor(of.M2 / (of.count - row.std_ddof), dtype=torch.float64)
    return torch.where(counted, divide_by_std(row, advantages - of.mean, variance), 0.0)


class PairsOnRanks(NamedTuple):
    """A preference loss, a mean over pairs: totals.rows are the pairs of all ranks."""

    row: PreferenceRow
    engine: Engine
    totals: Totals

    def loss(self, data: Preferences, logps: Tensor) -> Tensor:
        """(W / P) sum over this micro-batch's pairs; logps (2p, T) with their graph, chosen answers first."""
        result = evaluate_preference(self.row, data)
        numerator = loss_to_backpropagate(result, logps) * (len(result.losses))
        return rules.mean_per_response(numerator, self.totals, self.engine)


def pairs_on_ranks(row: PreferenceRow, pairs: int, engine: Engine, micro_batches: int = 1) -> PairsOnRanks:
    """Counts the pairs of all ranks, P = sum_r p_r: one all_gather. Raises ValueError if the row has an NLL over tokens."""
    if row.sft_coef and row.sft_reduction == "mean_over_tokens":
        raise ValueError(f"{row.name}: its NLL has another denominator, tokens, than its pairs")
    return PairsOnRanks(row, engine, rules.count(pairs, pairs, micro_batches, engine.group))
