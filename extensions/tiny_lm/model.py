"""The model of the tiny language model: a two-layer decoder-only transformer, its key-value cache, and sampling.

Same as usual: pre-norm blocks, causal attention, learned positions. Simplified: untied output layer, no dropout unless it is
asked for. What matters here are the two masks and the positions: with left padding a token's position is the number of real
tokens before it, not its index.

Letters: N rows, T positions (prompt and response), V vocabulary, D width, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extensions.distributed import rules
from extensions.tiny_lm.task import EOS, PAD, PROMPT_LENGTH, RESPONSE_LENGTH, VOCABULARY, Prompts, written
from rl_lab import action_logps

Cache = list  # of each layer: None at the start, then keys and values [N, H, T so far, D / H]


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). x [N, T, D] -> [N, T, D]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, visible: Tensor, past: tuple[Tensor, Tensor] | None, dropout: float):
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads  # each [N, H, T, D / H]
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        attended = self.attention_output(attended.transpose(1, 2).flatten(-2))
        x = x + F.dropout(attended, dropout, self.training)
        return x + F.dropout(self.feed_forward(self.feed_forward_norm(x)), dropout, self.training), (key, value)


class Decoder(nn.Module):
    """A causal transformer. With `outputs` = V it is a policy (logits), with 1 a critic (values).

    Weights are drawn from `generator` alone: building a model moves no global random state. float32.
    """

    def __init__(self, outputs: int, generator: torch.Generator, width: int = 64, layers: int = 2, heads: int = 4):
        super().__init__()
        # torch.nn layers draw their weights from the global generator when built; they are drawn again below.
        with torch.random.fork_rng(devices=[]):
            self.token_embedding = nn.Embedding(VOCABULARY, width)
            self.position_embedding = nn.Embedding(PROMPT_LENGTH + RESPONSE_LENGTH, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
            self.output_norm = nn.LayerNorm(width)
            self.output = nn.Linear(width, outputs)
        self.to(torch.float32)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.2 if name.startswith("token") else 0.02  # small weights: fast to learn, slow to memorise
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.dropout = 0.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, cache: Cache | None = None) -> Tensor:
        """Outputs at each position of input_ids.

        input_ids [N, T]; attention_mask [N, S + T] bool, False on padding, where S positions are in the cache already;
        -> [N, T, outputs]. `cache` (see `empty_cache`) is brought up to date in place.

        A query sees the real tokens up to its own position. A padding query would see nothing, and a softmax over nothing is
        NaN, so every query sees itself as well; nobody reads what a padding position computes.
        """
        total, new = attention_mask.shape[1], input_ids.shape[1]
        position = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, total - new :]
        query, key = torch.arange(total - new, total).unsqueeze(1), torch.arange(total)
        visible = (attention_mask.unsqueeze(1) & (key <= query)) | (key == query)
        x = self.token_embedding(input_ids) + self.position_embedding(position)
        for layer, block in enumerate(self.blocks):
            x, keys_and_values = block(x, visible.unsqueeze(1), cache[layer] if cache else None, self.dropout)
            if cache:
                cache[layer] = keys_and_values
        return self.output(self.output_norm(x))

    def empty_cache(self) -> Cache:
        return [None] * len(self.blocks)


class Sequences(NamedTuple):
    """Prompt and response in one row, with the two masks that must not be confused."""

    input_ids: Tensor  # [N, T]
    attention_mask: Tensor  # [N, T] bool: what the model may read: prompt and response, no padding
    response_mask: Tensor  # [N, T] bool: what the policy wrote, its EOS included: what a loss may count

    def take(self, rows: Tensor | slice) -> Sequences:
        return Sequences(*(column[rows] for column in self))


def join(prompts: Prompts, responses: Tensor) -> Sequences:
    """Left-padded prompts and their responses [N, R] (whatever follows the first EOS is padding) as sequences, T = P + R."""
    wrote = written(responses)
    return Sequences(
        torch.cat([prompts.ids, responses.masked_fill(~wrote, PAD)], dim=1),
        torch.cat([prompts.attention_mask, wrote], dim=1),
        torch.cat([torch.zeros_like(prompts.attention_mask), wrote], dim=1),
    )


class Split(NamedTuple):
    """Rows over ranks: `unit` neighbours, a group of answers, stay on one rank. In the end every rank holds all rows."""

    group: object  # a process group of torch.distributed
    unit: int = 1

    def own(self, rows: int) -> slice:
        """This rank's part of so many rows."""
        unit = self.unit if rows % self.unit == 0 else 1
        part = rules.share(rows // unit, rules.rank_in(self.group), rules.world_size(self.group))
        return slice(part.start * unit, part.stop * unit)

    def join(self, own: Tensor) -> Tensor:
        """The rows of all ranks in order. Gradient: through this rank's rows alone, so gradients add up over ranks."""
        joined, where = rules.gather_rows(own.detach().to(torch.uint8 if own.dtype == torch.bool else own.dtype), self.group)
        joined = joined.to(own.dtype)
        return torch.cat([joined[: where.start], own, joined[where.stop :]]) if own.requires_grad else joined

    def any(self, flags: Tensor) -> bool:
        """Whether any flag of any rank is set."""
        return bool(rules.gather(flags.any().to(torch.uint8), self.group).any())


def _drawn(probabilities: Tensor, generator: torch.Generator, split: Split | None, rows: int) -> Tensor:
    """One token of each row, [N, V] -> [N]. With `split` argmax p / E, E exponential noise of all rows, as multinomial does."""
    if split is None:
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    noise = torch.empty(rows, probabilities.shape[1], dtype=probabilities.dtype).exponential_(1, generator=generator)
    return (probabilities / noise[split.own(rows)]).argmax(dim=-1)


@torch.no_grad()
def generate(
    policy: Decoder,
    prompts: Prompts,
    generator: torch.Generator | None,
    temperature: float = 1.0,
    split: Split | None = None,
) -> tuple[Tensor, Tensor]:
    """Let the policy answer each prompt: one token at a time, with a key-value cache, until all rows have written EOS.

    generator None takes the likeliest token (greedy) instead of sampling.
    -> responses [N, R], PAD after EOS; token_logps [N, R] under the policy's own softmax, 0 after EOS. At another
    temperature than 1 these are not the log-probabilities of the distribution that was sampled from.

    With `split` this rank answers its own rows alone, and hands and gets the others. Every rank draws the noise of all rows
    from the same generator, so that the answers are those of one process, however many ranks there are.
    """
    if split is not None:
        own = split.own(len(prompts.ids))
        responses, token_logps = _answers(policy, prompts.take(own), generator, temperature, split, len(prompts.ids))
        return split.join(responses), split.join(token_logps)
    return _answers(policy, prompts, generator, temperature, None, len(prompts.ids))


def _answers(
    policy: Decoder,
    prompts: Prompts,
    generator: torch.Generator | None,
    temperature: float,
    split: Split | None,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """generate for these prompts; with `split` they are this rank's part of `rows`."""
    cache = policy.empty_cache()
    count = len(prompts.ids)
    responses = torch.full((count, RESPONSE_LENGTH), PAD)
    token_logps = torch.zeros(count, RESPONSE_LENGTH, dtype=policy.output.weight.dtype)
    running = torch.ones(count, dtype=torch.bool)
    ids, attention_mask = prompts
    for t in range(RESPONSE_LENGTH):
        logits = policy(ids, attention_mask, cache)[:, -1]
        if generator is None:
            token = logits.argmax(dim=-1)
        else:
            probabilities = (logits / temperature).softmax(dim=-1)
            token = _drawn(probabilities, generator, split, rows)
        responses[:, t] = token.masked_fill(~running, PAD)
        token_logps[:, t] = action_logps(logits, token).masked_fill(~running, 0.0)
        running = running & (token != EOS)
        if not (running.any() if split is None else split.any(running)):
            break
        ids, attention_mask = responses[:, t : t + 1], torch.cat([attention_mask, running.unsqueeze(1)], dim=1)
    return responses, token_logps
