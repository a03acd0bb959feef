"""Gates with constants of their own, solved from the gradient: sapo's temperatures, vespo's exponents, geo_mean's clip.

Each solver takes a Facts and a law and returns a SolvedGate, or None where the numbers do not follow its formula.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from extensions.audit.reading.facts import Facts, Tokens

TEMPERATURES = np.geomspace(0.05, 20, 90)  # where a temperature is first looked for; then refined


class SolvedGate(NamedTuple):
    name: str
    numbers: dict[str, float]
    slope: Callable[[Tokens], np.ndarray]
    values: dict[str, Callable[[Tokens], np.ndarray]]
    keeps_closed: bool = False  # the value counts tokens without gradient like any other


def _sigmoid(x):
    return 1 / (1 + np.exp(-np.clip(x, -700, 700)))


def solve_sapo(f: Facts, t: Tokens, y: np.ndarray) -> SolvedGate | None:
    """h = kappa 4 p (1 - p) r, p = sigmoid(tau (r - 1)); tau by the sign of A."""
    if f.old is None:
        return None
    h, use = -y / t.A, (t.A != 0) & (y != 0)
    use &= h > 0
    taus, kappas = {}, {}
    for sign in (1, -1):
        here = use & (t.A * sign > 0)
        if here.sum() < 4 or np.ptp(t.r[here]) < 1e-3:
            continue
        r, logs = t.r[here], np.log(h[here])

        def spread(tau):
            p = _sigmoid(tau * (r - 1))
            gap = logs - np.log(4 * p * (1 - p) * r)
            return np.std(gap), np.mean(gap)

        tau = min(TEMPERATURES, key=lambda x: spread(x)[0])
        low, high = tau / 1.1, tau * 1.1
        for _ in range(60):
            a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
            low, high = (low, b) if spread(a)[0] < spread(b)[0] else (a, high)
        tau = (low + high) / 2
        if spread(tau)[0] > 30 * f.tolerance:
            return None
        taus[sign], kappas[sign] = tau, spread(tau)[1]
    if not taus or len(kappas) == 2 and abs(kappas[1] - kappas[-1]) > 100 * f.tolerance:
        return None
    plus, minus = taus.get(1, taus.get(-1)), taus.get(-1, taus.get(1))

    def parts(t):
        tau = np.where(t.A > 0, plus, minus)
        p = _sigmoid(tau * (t.r - 1))
        return tau, p

    def slope(t):
        tau, p = parts(t)
        return 4 * p * (1 - p) * t.r * t.A

    def value(t):
        tau, p = parts(t)
        return 4 / tau * p * t.A

    return SolvedGate("sapo", {"tau where A > 0": float(plus), "tau where A < 0": float(minus)}, slope, {"4 / tau sigmoid A": value})


def solve_vespo(f: Facts, t: Tokens, y: np.ndarray) -> SolvedGate | None:
    """log h = log kappa + lam + k log w - lam w of each answer, w = exp(sum_t(l - l0)); k and lam by the sign of A."""
    if f.old is None:
        return None
    h, use = -y / t.A, (t.A != 0) & (y != 0)
    use &= h > 0
    rows, first = np.unique(t.row[use], return_index=True)
    at = np.flatnonzero(use)[first]
    if len(at) < 6 or not np.isfinite(h[at]).all():
        return None
    # One number an answer: its tokens must agree.
    per_row = np.full(len(f.l), np.nan)
    per_row[t.row[at]] = h[at]
    if (abs(h[use] - per_row[t.row[use]]) > 10 * f.tolerance * abs(h[use])).mean() > 0.05:
        return None
    log_w, logs, plus = np.clip(t.sum_gap[at], -18.4, 20), np.log(h[at]), t.A[at] >= 0
    w = np.exp(log_w)
    M = np.stack([np.ones(len(at)), plus * log_w, plus * (1 - w), ~plus * log_w, ~plus * (1 - w)], 1)
    M = M[:, [True, plus.any(), plus.any(), (~plus).any(), (~plus).any()]]
    solved, _, rank, singular = np.linalg.lstsq(M, logs, rcond=None)
    if rank < M.shape[1] or len(at) <= M.shape[1] or singular[0] > 1e5 * singular[-1] or abs(M @ solved - logs).max() > 100 * f.tolerance:
        return None
    numbers = list(map(float, solved[1:]))
    kp, lp = numbers[:2] if plus.any() else (0.0, 0.0)
    kn, ln = numbers[-2:] if (~plus).any() else (0.0, 0.0)

    def slope(t):
        log_w = np.clip(t.sum_gap, -18.4, 20)
        k, lam = np.where(t.A >= 0, kp, kn), np.where(t.A >= 0, lp, ln)
        return np.exp(lam + k * log_w - lam * np.exp(log_w)) * t.A

    return SolvedGate("vespo", {"k where A > 0": kp, "lam where A > 0": lp, "k where A < 0": kn, "lam where A < 0": ln}, slope,
                      {"sg[phi] A l": lambda t: slope(t) * t.l})


def solve_geo_mean(f: Facts, t: Tokens, y: np.ndarray) -> SolvedGate | None:
    """log h_i = log kappa + mean_t of l - l0, each clipped on the side A asks for: linear in the two widths."""
    if f.old is None or f.mask.shape[1] < 2 or f.mask.size > 10 * 4000:
        return None
    A = np.broadcast_to(f.A, f.mask.shape)
    d = np.where(f.mask, f.l - f.old, 0.0)
    shut = f.mask & (f.g == 0) & (A != 0)
    with np.errstate(all="ignore"):
        h = np.where(f.mask & ~shut & (A != 0), -f.g / A, np.nan)
    scale = np.full(len(f.l), np.nan)
    ok = y != 0
    scale[t.row[ok]] = t.g[ok] / y[ok]
    per_row = np.array([np.median(x[np.isfinite(x)]) if np.isfinite(x).any() else np.nan for x in h]) / scale
    good = np.isfinite(per_row) & (per_row > 0)
    if good.sum() < 5 or not shut.any():
        return None
    high = (shut & (A > 0)).sum(1) / f.lengths
    low = (shut & (A < 0)).sum(1) / f.lengths
    base = np.where(shut, 0.0, d).sum(1) / f.lengths
    M = np.stack([np.ones(len(base)), high, -low], 1)[good]
    keep = [True, bool(high[good].any()), bool(low[good].any())]
    solved, _, rank, singular = np.linalg.lstsq(M[:, keep], (np.log(per_row) - base)[good], rcond=None)
    if rank < sum(keep) or good.sum() <= sum(keep) or abs(M[:, keep] @ solved - (np.log(per_row) - base)[good]).max() > 100 * f.tolerance:
        return None
    widths = dict(zip([n for n, k in zip(("", "high", "low"), keep) if k], map(float, solved)))
    widths.pop("")
    level = np.exp(base + widths.get("high", 0.0) * high - widths.get("low", 0.0) * low)
    return SolvedGate("geo_mean", {f"log-ratio clipped, {k}": v for k, v in widths.items()}, lambda t: level[t.row] * t.A,
                      {"r A": lambda t: level[t.row] * t.A}, True)


SOLVERS = (solve_sapo, solve_vespo, solve_geo_mean)
