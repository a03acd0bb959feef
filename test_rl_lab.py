"""The guide's acceptance suite: 19 tests, in the order of the guide; more cases are subtests.

A failure prints the guide's section and formula, what came out, what was wanted and, where a known mistake gives what came
out, that mistake in words. Expected numbers carry their arithmetic. A `*_wrong` number is what the mistake would give.
`python -m verification.teaching` puts mistakes into the lab one by one and prints what this suite says of each.
"""

import math
import unittest

import torch
from torch import Tensor

import token_objectives as tokens
from ppo_chain import episode_by_episode, train_chain
from rl_lab import (
    REWARDS,
    action_logps,
    categorical_kl,
    clipped_policy_loss,
    dpo_loss,
    gae,
    group_advantages,
    kl_estimates,
    response_logps,
    response_token_logps,
    train,
)

SEEDS = (0, 7, 19)
NEAR = 5e-6  # a mistake's value is given to six digits
THREADS = torch.get_num_threads()


def setUpModule():
    torch.set_num_threads(1)  # as the commands do: a second thread only slows tensors of this size


def tearDownModule():
    torch.set_num_threads(THREADS)


def load_tests(loader, standard_tests, pattern):
    """The tests in the order they are written: an atom's own test comes before those that use the atom."""
    cases = (Gae, PolicyObjectives, ResponseLogps, TokenObjectives, Training)
    return unittest.TestSuite(case(name) for case in cases for name in vars(case) if name.startswith("test_"))


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def leaf(*numbers: float) -> Tensor:
    return f64(*numbers).requires_grad_()


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


class Case(unittest.TestCase):
    def assertClose(
        self, got, wanted, atol: float = 1e-12, *, says: str = "", mistakes: dict | None = None, likely: str = ""
    ):
        """`got` equals `wanted`: numbers to within `atol`, anything else exactly.

        says: guide section, function and formula. mistakes: words -> the value that this mistake would give. likely: the
        mistake to look for when the value is none of those.
        """
        if equal(got, wanted, atol):
            return
        lines = [says] if says else []
        lines += [f"  got     {shown(got)}", f"  wanted  {shown(wanted)}"]
        found = [words for words, value in (mistakes or {}).items() if equal(got, value, max(atol, NEAR))]
        if found:
            lines.append(f"  This is what comes out {' or '.join(found)}.")
        elif likely:
            lines.append(f"  Likely mistake: {likely}.")
        elif mistakes:
            lines.append(f"  It is not what comes out {', or '.join(mistakes)}.")
        self.fail("\n".join(["", *lines]))

    def assertBeyond(self, got: float, bound: float, *, above: bool, says: str, likely: str):
        """`got` lies above (or below) a bound that the mistake named in `likely` does not reach."""
        if not (got > bound if above else got < bound):
            side = "above" if above else "below"
            self.fail(f"\n{says}\n  got     {got:.6g}\n  wanted  {side} {bound:g}\n  Likely mistake: {likely}.")

    def assertRefused(self, error: type[Exception], words: str, says: str, function, *arguments, **settings):
        """The call raises `error` with `words` in its message: a wrong input is not computed with."""
        try:
            result = function(*arguments, **settings)
        except error as problem:
            if words in str(problem):
                return
            result = f"{error.__name__}: {problem}"
        self.fail(f"\n{says}\n  got     {shown(result)}\n  wanted  {error.__name__} with the words {words!r}")


def equal(got, wanted, atol: float) -> bool:
    """Numbers, lists of numbers and tensors to within `atol`; anything else by ==."""
    try:
        got, wanted = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, wanted))
    except (TypeError, ValueError, RuntimeError):
        return type(got) is type(wanted) and got == wanted
    return got.shape == wanted.shape and bool(((got - wanted).abs() <= atol).all() or torch.equal(got, wanted))


def shown(value) -> str:
    """A value in one line: numbers to six digits."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Gae(Case):
    SAYS = "guide 3.3, rl_lab.gae: delta_t = r_t + gamma V(next) - V(s), A_t = delta_t + gamma lambda A_(t+1)"

    def test_terminal_reward_reaches_every_step(self):
        # gamma .9, lam .5: delta = (1 + .9*2 - 1, 1 - 2) = (1.8, -1); A = (1.8 + .45 * -1, -1); returns = A + V.
        advantages, returns = gae(f64(1, 1), f64(1, 2), f64(2, 9), flags(0, 1), flags(0, 1), gamma=0.9, lam=0.5)
        self.assertClose(
            advantages, [1.35, -1.0], says=self.SAYS + "; no V(next) after a real end",
            mistakes={
                "when V(next) is used after a real end (the mask `terminated` is missing)": [1.8 + 0.45 * 7.1, 7.1],
                "when V(next) is used only after a real end (the mask is inverted)": [0.0 + 0.45 * 7.1, 7.1],
                "when V(next) is used nowhere": [0.0 - 0.45, -1.0],
                "without gamma in the recursion": [1.8 - 0.5, -1.0],
                "without gamma in delta": [2.0 - 0.45, -1.0],
                "without lambda": [1.8 - 0.9, -1.0],
                "without the recursion: lambda 0, or every step taken as a boundary": [1.8, -1.0],
                "when the recursion subtracts": [1.8 + 0.45, -1.0],
                "when V(s) is added instead of subtracted": [3.8 + 0.45 * 3, 3.0],
                "when the recursion runs forwards in time": [-1.0, 1.8],
                "in reversed order": [-1.0, 1.35],
            },
        )  # fmt: skip
        self.assertClose(
            returns, [2.35, 1.0], says="guide 3.3, rl_lab.gae: returns = advantages + V, what the critic regresses on",
            mistakes={"without adding V back": [1.35, -1.0], "when V is subtracted": [0.35, -3.0]},
        )  # fmt: skip
        end = flags(0, 0, 1)
        # delta = (0, 0, 1); A_2 = 1, A_1 = 0 + lam * 1, A_0 = 0 + lam * A_1.
        for lam, wanted in ((1.0, [1, 1, 1]), (0.5, [0.25, 0.5, 1]), (0.0, [0, 0, 1])):
            with self.subTest(lam=lam):
                advantages, returns = gae(f64(0, 0, 1), f64(0, 0, 0), f64(0, 0, 0), end, end, gamma=1.0, lam=lam)
                self.assertClose(advantages, wanted, says=self.SAYS)
                self.assertClose(returns, wanted, says="guide 3.3: returns = advantages + V, here V = 0")
        with self.subTest("no gradient leaves"):
            values = leaf(0.1, 0.2, 0.3)
            for output in gae(leaf(0, 0, 1), values, values, end, end):
                self.assertClose(
                    output.requires_grad, False, says="guide 3.2, 4.3: advantages and value targets carry no gradient",
                    likely="a missing detach: the actor's loss would train the critic",
                )  # fmt: skip

    def test_truncation_bootstraps_from_the_final_observation(self):
        says = "guide 3.3, rl_lab.gae: a time limit stops the recursion, not the bootstrap"
        # Nothing terminated: delta = (0 + .4 - .5, 0 + .7 - .4) = (-.1, .3); lam 1: A = (-.1 + .3, .3).
        arguments = f64(0, 0), f64(0.5, 0.4), f64(0.4, 0.7)
        as_an_end_wrong = [-0.5, -0.4]  # terminated at the limit: delta_1 = 0 - .4; A = (-.1 - .4, -.4)
        advantages, returns = gae(*arguments, flags(0, 0), flags(0, 1), gamma=1.0, lam=1.0)
        self.assertClose(
            advantages, [0.2, 0.3], says=says,
            mistakes={
                "when the time limit is taken as a real end (one flag for both questions)": as_an_end_wrong,
                "without the recursion": [-0.1, 0.3],
            },
        )  # fmt: skip
        self.assertClose(returns, [0.7, 0.7], says="guide 3.3: returns = advantages + V")
        with self.subTest("one flag for both is another number"):
            merged, _ = gae(*arguments, flags(0, 1), flags(0, 1), gamma=1.0, lam=1.0)
            self.assertClose(
                merged, as_an_end_wrong, says="guide 3.3, rl_lab.gae: a real end has no V(next)",
                mistakes={"when V(next) is used after a real end (the mask `terminated` is missing)": [0.2, 0.3]},
            )  # fmt: skip
        with self.subTest("a value after a real end is never read"):
            advantages, _ = gae(f64(0, 1), f64(0.5, 0.4), f64(0.4, math.nan), flags(0, 1), flags(0, 1), gamma=1.0, lam=1.0)
            self.assertClose(advantages, [0.5, 0.6], says=says)  # delta = (-.1, 1 - .4)
        with self.subTest("terminated without boundary is refused"):
            self.assertRefused(ValueError, "terminated is True", says, gae, *arguments, flags(0, 1), flags(0, 0))

    def test_episodes_in_one_flat_batch_do_not_mix(self):
        generator = torch.Generator().manual_seed(0)
        rewards, values, next_values = torch.randn(3, 6, dtype=torch.float64, generator=generator)
        terminated, boundary = flags(0, 1, 0, 0, 0, 1), flags(0, 1, 0, 1, 0, 1)
        whole, _ = gae(rewards, values, next_values, terminated, boundary, gamma=0.9, lam=0.8)
        only_at_real_ends_wrong, following = [0.0] * 6, 0.0
        for t in reversed(range(6)):
            delta = rewards[t] + (0 if terminated[t] else 0.9 * next_values[t]) - values[t]
            following = (delta + (0 if terminated[t] else 0.9 * 0.8 * following)).item()
            only_at_real_ends_wrong[t] = following
        for start in (0, 2, 4):
            part = slice(start, start + 2)
            of_part = (series[part] for series in (rewards, values, next_values, terminated, boundary))
            alone, _ = gae(*of_part, gamma=0.9, lam=0.8)
            self.assertClose(
                whole[part], alone, says=f"guide 3.3, rl_lab.gae: steps {start} and {start + 1} are an episode of their own",
                mistakes={
                    "when the recursion is stopped by `terminated` only and runs over a time limit": only_at_real_ends_wrong[part]
                },
                likely="the recursion runs from one episode into the next: `boundary` must stop it",
            )  # fmt: skip
        with self.subTest("rows of a batch are episodes of their own"):
            rows = [x.reshape(3, 2) for x in (rewards, values, next_values, terminated, boundary)]
            batched, _ = gae(*rows, gamma=0.9, lam=0.8)
            self.assertClose(
                batched.flatten(), whole, says="guide 3.3, rl_lab.gae: the last axis is time, rows are episodes",
                likely="the recursion runs along the wrong axis, or over the rows",
            )  # fmt: skip
        with self.subTest("stacking all first steps before all second steps leaks"):
            first, second, zero = f64(0, 0), f64(0, 1), f64(0, 0, 0, 0)
            end = episode_by_episode(flags(0, 0), flags(1, 1))
            self.assertClose(
                end.int(), [0, 1, 0, 1], says="guide 4.5, ppo_chain.episode_by_episode: e0 t0, e0 t1, e1 t0, e1 t1",
                mistakes={
                    "when all first steps are stacked before all second steps: the recursion of gae would run from one "
                    "episode into another": [0, 0, 1, 1],
                    "when time runs backwards": [1, 0, 1, 0],
                },
            )  # fmt: skip
            right, _ = gae(episode_by_episode(first, second), zero, zero, end, end, gamma=1.0, lam=1.0)
            self.assertClose(right, [0, 0, 1, 1], says="guide 4.5: the reward of an episode reaches its own first step only")
            stacked_end = torch.cat([flags(0, 0), flags(1, 1)])
            wrong, _ = gae(torch.cat([first, second]), zero, zero, stacked_end, stacked_end, gamma=1.0, lam=1.0)
            self.assertNotEqual(wrong[[0, 2, 1, 3]].tolist(), right.tolist())


class PolicyObjectives(Case):
    def test_clipped_loss_four_cases_value_and_gradient(self):
        says = "guide 4.2, rl_lab.clipped_policy_loss: objective min(rho A, clip(rho, 1 - eps, 1 + eps) A)"
        logp, old_logp, advantages = f64(1.5, 0.5, 1.5, 0.5).log().requires_grad_(), leaf(0, 0, 0, 0), leaf(1, -1, -1, 1)
        loss = clipped_policy_loss(logp, old_logp, advantages)
        # objective: min(1.5, 1.2), min(-.5, -.8), min(-1.5, -1.2), min(.5, .8).
        self.assertClose(
            -loss, [1.2, -0.8, -1.5, 0.5], says=says,
            mistakes={
                "without the minimum: rows 3 and 4 moved the wrong way and must keep their gradient": [1.2, -0.8, -1.2, 0.8],
                "with the maximum in place of the minimum": [1.5, -0.5, -1.2, 0.8],
                "without any clip": [1.5, -0.5, -1.5, 0.5],
                "when only the upper side is clipped": [1.2, -0.5, -1.5, 0.5],
                "when only the lower side is clipped": [1.5, -0.8, -1.5, 0.5],
                "when the ratio is inverted (old over current)": [2 / 3, -2.0, -0.8, 1.2],
                "with the wrong sign: the objective is to be maximised, the loss is its negative": [-1.2, 0.8, 1.5, -0.5],
                "when the minimum is taken before multiplying by A": [1.2, -0.5, -1.2, 0.5],
                "when the denominator is the current policy: every ratio is 1": [1.0, -1.0, -1.0, 1.0],
            },
        )  # fmt: skip
        gradient, *others = torch.autograd.grad(loss.sum(), [logp, old_logp, advantages], allow_unused=True)
        for name, other in zip(("old_logp", "advantages"), others):
            self.assertClose(
                other, None, says=f"guide 3.4, 4.3, rl_lab.clipped_policy_loss: no gradient reaches {name}",
                likely=f"{name} is not detached: with old_logp from the current policy the gradient would cancel",
            )  # fmt: skip
        self.assertClose(
            gradient, [0.0, 0.0, 1.5, -0.5], says="guide 4.2: d loss / d logp = -rho A where the clip is not flat",
            mistakes={
                "when the ratio has no gradient of its own (d loss / d logp = -A)": [0.0, 0.0, 1.0, -1.0],
                "for the objective: the loss is its negative": [0.0, 0.0, -1.5, 0.5],
                "without any clip": [-1.5, 0.5, 1.5, -0.5],
            },
        )  # fmt: skip
        with self.subTest("other widths"):
            # epsilon .6: nothing is clipped any more, so every row is rho A.
            wide = -clipped_policy_loss(logp, old_logp, advantages, epsilon=0.6)
            self.assertClose(
                wide, [1.5, -0.5, -1.5, 0.5], says=says + ", eps .6",
                mistakes={"when eps is ignored and .2 is used": [1.2, -0.8, -1.5, 0.5]},
            )  # fmt: skip
        with self.subTest("an old log-probability recomputed from the current policy makes every ratio 1"):
            self.assertClose(-clipped_policy_loss(logp, logp, advantages), [1, -1, -1, 1], says=says + ", rho = 1")

    def test_dpo_loss_at_the_reference_and_away_from_it(self):
        says = "guide 5.3, rl_lab.dpo_loss: -log sigmoid(beta h), h = (chosen - ref_chosen) - (rejected - ref_rejected)"
        # margin 2, beta .2: log(1 + exp(-.4)) = .513015; chosen .4 -> .3, rejected .3 -> .1: log(1 + 1 / 2.25) = .367725.
        self.assertClose(
            dpo_loss(f64(2), f64(0), f64(0), f64(0), beta=0.2), [0.513015], atol=5e-7, says=says,
            mistakes={
                "when chosen and rejected are exchanged": [0.913015],
                "with beta outside the sigmoid": [0.2 * math.log1p(math.exp(-2))],
                "without beta": [math.log1p(math.exp(-2))],
                "with the wrong sign: log sigmoid is to be maximised, the loss is its negative": [-0.513015],
            },
        )  # fmt: skip
        fallen = dpo_loss(f64(0.3).log(), f64(0.1).log(), f64(0.4).log(), f64(0.3).log(), beta=1.0)
        self.assertClose(
            fallen, [0.367725], atol=5e-7, says=says,
            mistakes={
                "without the reference": [math.log1p(1 / 3)],
                "when policy and reference are exchanged": [math.log1p(2.25)],
                "when the two log-ratios are added": [math.log1p(4)],
            },
        )  # fmt: skip
        chosen, rejected, ref_chosen, ref_rejected = leaf(-2), leaf(-2), leaf(-2), leaf(-2)
        loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.5)
        self.assertClose(loss, [math.log(2)], says=says + "; log 2 at the reference")
        gradients = torch.autograd.grad(loss.sum(), [chosen, rejected, ref_chosen, ref_rejected], allow_unused=True)
        slope = "guide 5.3: at the reference the gradient is -beta / 2 to chosen, +beta / 2 to rejected"
        exchanged = "when chosen and rejected are exchanged, or the sign is turned"
        # -beta sigmoid(-beta h) = -.5 * .5
        self.assertClose(gradients[0], [-0.25], says=slope, mistakes={exchanged: [0.25], "without beta": [-0.5]})
        self.assertClose(gradients[1], [0.25], says=slope, mistakes={exchanged: [-0.25], "without beta": [0.5]})
        self.assertClose(
            gradients[2:], (None, None), says="guide 5.3: the reference is fixed: no gradient reaches it",
            likely="the reference's log-probabilities are not detached",
        )  # fmt: skip
        with self.subTest("linear, not infinite, at a margin of -10000"):
            far = leaf(-1e4)
            loss = dpo_loss(far, f64(0), f64(0), f64(0), beta=0.5)
            self.assertClose(
                loss, [5000.0], says="guide 5.3: -logsigmoid(x) is -x for very negative x",
                mistakes={"with log(sigmoid(x)): sigmoid(-5000) is 0 and its logarithm infinite": [math.inf]},
            )  # fmt: skip
            self.assertClose(torch.autograd.grad(loss.sum(), far)[0], [-0.5], says="guide 5.3: slope -beta far out")

    def test_exact_kl_value_direction_and_gradient(self):
        p, q = f64(0.5, 0.5), f64(0.9, 0.1)
        says = "guide 3.6, rl_lab.categorical_kl: KL(p || q) = sum_a p_a (log p_a - log q_a)"
        # KL(p || q) = .5 log(.5/.9) + .5 log(.5/.1) = .510826; KL(q || p) = .9 log 1.8 + .1 log .2 = .368064.
        for got, wanted, other in ((categorical_kl(p.log(), q.log()), 0.510826, 0.368064),
                                   (categorical_kl(q.log(), p.log()), 0.368064, 0.510826)):  # fmt: skip
            self.assertClose(
                got, wanted, atol=5e-7, says=says,
                mistakes={
                    "in the other direction, KL(q || p)": other, "with the wrong sign": -wanted,
                    "when q weighs the actions and not p": -other, "with a mean over the actions": wanted / 2,
                },
            )  # fmt: skip
        logits, reference = leaf(1.0, -0.5, 0.3), leaf(0.2, 0.4, -1.0)
        kl = categorical_kl(logits, reference)
        gradient, of_reference = torch.autograd.grad(kl, [logits, reference], allow_unused=True)
        # d KL / d z_a = p_a (log p_a - log q_a - KL).
        probability, gap = logits.softmax(-1).detach(), (logits.log_softmax(-1) - reference.log_softmax(-1)).detach()
        self.assertClose(
            gradient, probability * (gap - kl.detach()), says="guide 3.6: d KL / d z_a = p_a (log p_a - log q_a - KL)",
            mistakes={"when the weights p_a are detached": 0 * gap, "in the other direction": probability - reference.softmax(-1)},
        )  # fmt: skip
        self.assertClose(
            of_reference, None, says="guide 3.6: the reference is fixed: no gradient reaches it", likely="a missing detach"
        )
        with self.subTest("zero, with zero gradient, at equality"):
            kl = categorical_kl(logits, logits.detach())
            self.assertClose(kl, 0, says=says + "; 0 at p = q")
            self.assertClose(torch.autograd.grad(kl, logits)[0], [0, 0, 0], says="guide 3.6: KL has its minimum at p = q")
        with self.subTest("k1 and k3 average to it under the policy; k3 reversed does not"):
            policy, other = f64(0.7, 0.2, 0.1), f64(0.3, 0.3, 0.4)
            k1, _, k3 = kl_estimates(policy.log(), other.log())
            exact = categorical_kl(policy.log(), other.log())  # .373386
            reversed_k3_wrong = (policy * (policy / other - 1 - (policy / other).log())).sum()  # .418275
            self.assertClose(
                (policy * k1).sum(), exact, says="guide 3.6, rl_lab.kl_estimates: k1 = log p - log ref averages to KL(p || ref)",
                mistakes={"with the wrong sign": -exact},
            )  # fmt: skip
            self.assertClose(
                (policy * k3).sum(), exact, says="guide 3.6, rl_lab.kl_estimates: k3 = ref/p - 1 - log(ref/p)",
                mistakes={"when the ratio is turned round (p/ref in place of ref/p)": reversed_k3_wrong},
            )  # fmt: skip
            self.assertGreater(abs(reversed_k3_wrong - exact), 0.04)

    def test_group_advantages(self):
        says = "guide 6.1, rl_lab.group_advantages: A_i = (R_i - mean) / (std + 1e-8), population std of the own group"
        # [0, 1, 0, 0]: mean .25, variance (3 * .0625 + .5625) / 4 = .1875, std .433013: -.57735, 1.73205.
        self.assertClose(
            group_advantages(f64(0, 1, 0, 0)), [-0.57735, 1.73205, -0.57735, -0.57735], atol=5e-6, says=says,
            mistakes={
                "with the sample standard deviation (divisor G - 1): another convention": [-0.5, 1.5, -0.5, -0.5],
                "without dividing by the standard deviation": [-0.25, 0.75, -0.25, -0.25],
                "when the variance divides": [-0.25 / 0.1875, 0.75 / 0.1875, -0.25 / 0.1875, -0.25 / 0.1875],
                "without subtracting the mean": [0.0, 1 / 0.433013, 0.0, 0.0],
                "with the wrong sign": [0.57735, -1.73205, 0.57735, 0.57735],
            },
        )  # fmt: skip
        with self.subTest("rewards of two prompts never mix"):
            alone = group_advantages(f64(1, 0))
            self.assertClose(
                group_advantages(torch.stack([f64(1, 0), f64(5, 4)])), torch.stack([alone, alone]), atol=5e-6,
                says="guide 6.1: each prompt's answers are compared with each other only",
                mistakes={"when mean and std go over all prompts": (f64(1, 0, 5, 4).view(2, 2) - 2.5) / 2.061553},
                likely="mean or std goes over all prompts",
            )  # fmt: skip
        rewards = torch.stack([f64(0, 0, 1, 1), f64(5, 5, 5, 5)])
        # mean .5, population std .5: (R - .5) / (.5 + 1e-8).
        self.assertClose(group_advantages(rewards), [[-1, -1, 1, 1], [0, 0, 0, 0]], atol=3e-8, says=says)
        no_spread = (
            "guide 6.3, rl_lab.group_advantages: a group whose answers all got the same reward has advantage exactly 0"
        )
        self.assertClose(group_advantages(rewards)[1].tolist(), [0.0] * 4, atol=0, says=no_spread)
        with self.subTest("equal up to rounding is equal"):
            self.assertClose(
                group_advantages(f64(0.1 + 0.2, 0.3)).tolist(), [0.0, 0.0], atol=0, says=no_spread,
                likely="round-off is divided by itself: a spread of a few ulps becomes an advantage of about 1",
            )  # fmt: skip
        with self.subTest("adding a constant changes nothing; a group of one and NaN are refused"):
            shifted = group_advantages(rewards + 3)
            self.assertClose(
                shifted, group_advantages(rewards), atol=1e-7, says="guide 6.1: a constant added changes nothing"
            )
            self.assertClose(
                group_advantages(leaf(0, 1)).requires_grad, False, says="guide 6.1: advantages carry no gradient"
            )
            self.assertRefused(ValueError, "one answer", says, group_advantages, f64(1))
            self.assertRefused(ValueError, "nan", says, group_advantages, f64(1, math.nan))

    def test_zero_loss_with_gradient_and_zero_group_without(self):
        # Two answers of probability 1/2, one parameter: loss = 1 - 2 sigmoid(theta), slope -2 * .25 = -.5 at 0.
        says = "guide 6.3: at ratio 1 centred advantages give loss 0 and a gradient that is not"
        theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
        logp = torch.stack([theta, torch.zeros_like(theta)]).log_softmax(dim=-1)
        loss = clipped_policy_loss(logp, logp.detach(), group_advantages(f64(1, 0))).mean()
        self.assertClose(loss, 0, atol=1e-8, says=says)
        slope = torch.autograd.grad(loss, theta, retain_graph=True)[0]
        self.assertClose(
            slope, -0.5, atol=2e-8, says=says,
            mistakes={"when logp - logp cancels the gradient": 0.0, "with the wrong sign": 0.5},
        )  # fmt: skip
        stepped = torch.sigmoid(-0.2 * slope)
        self.assertClose(stepped, 0.524979, atol=5e-7, says="guide 6.3: an SGD step of rate .2 takes theta to .1")
        with self.subTest("logp - logp cancels the gradient; the atom detaches the denominator itself"):
            wrong = -((logp - logp).exp() * f64(1, -1)).mean()
            self.assertClose(
                torch.autograd.grad(wrong, theta, retain_graph=True)[0], 0, says="the mistake, shown: no gradient"
            )
            right = clipped_policy_loss(logp, logp, f64(1, -1)).mean()
            self.assertClose(
                torch.autograd.grad(right, theta, retain_graph=True)[0], -0.5, says=says,
                mistakes={"when old_logp is not detached and logp - logp cancels the gradient": 0.0},
            )  # fmt: skip
        with self.subTest("equal rewards: no gradient from the surrogate, some from a KL in the loss"):
            equal_rewards = clipped_policy_loss(logp, logp.detach(), group_advantages(f64(1, 1))).mean()
            silent = torch.autograd.grad(equal_rewards, theta, retain_graph=True)[0]
            self.assertClose(silent, 0, says="guide 6.3: a group without spread has no gradient from the surrogate")
            kl = categorical_kl(torch.stack([theta, torch.zeros_like(theta)]), f64(1, 0))
            self.assertNotEqual(torch.autograd.grad(kl, theta)[0].item(), 0)


class ResponseLogps(Case):
    def test_causal_shift_and_mask(self):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(1, 5, 6, dtype=torch.float64, generator=generator).requires_grad_()
        ids = torch.tensor([[0, 1, 2, 4, 4]])  # prompt, prompt, answer, EOS, PAD
        mask = flags(0, 0, 1, 1, 0).unsqueeze(0)
        logp = logits.log_softmax(-1)[0].detach()
        token_logps, valid = response_token_logps(logits, ids, mask)
        self.assertClose(
            valid.int().tolist(), [[0, 1, 1, 0]],
            says="guide 7.1, rl_lab.response_token_logps: valid = response_mask[:, 1:]: the mask follows the target token",
            mistakes={"when the mask follows the row that predicts: one step late": [[0, 0, 1, 1]]},
        )  # fmt: skip
        # The answer (id 2, position 2) is scored by row 1, the EOS (id 4, position 3) by row 2.
        says = "guide 7.1: the logits at position t score the token at t + 1"
        self.assertClose(
            token_logps, [[0, logp[1, 2].item(), logp[2, 4].item(), 0]], says=says,
            mistakes={
                "when the targets are not shifted": [[0, logp[1, 1].item(), logp[2, 2].item(), 0]],
                "when the logits are shifted too": [[0, logp[2, 2].item(), logp[3, 4].item(), 0]],
            },
        )  # fmt: skip
        total = (logp[1, 2] + logp[2, 4]).item()
        self.assertClose(
            response_logps(logits, ids, mask), [total],
            says="guide 2.1, 7.1, rl_lab.response_logps: log pi(y | x) = sum over the answer's tokens",
            mistakes={
                "with a mean over all positions in place of the sum over the tokens": [total / 4],
                "with a mean over the answer's tokens: another objective": [total / 2],
                "when EOS is left out": [logp[1, 2].item()],
            },
        )  # fmt: skip
        touched = torch.autograd.grad(response_logps(logits, ids, mask).sum(), logits)[0].abs().sum(-1)[0] > 0
        self.assertClose(touched.int(), [0, 1, 1, 0, 0], says=says + "; only these rows get a gradient")
        with self.subTest("the mask follows the target, not the row"):
            late_wrong = logp[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)[mask[0, :-1]].sum()
            self.assertNotAlmostEqual(late_wrong.item(), response_logps(logits, ids, mask).item())
        with self.subTest("NaN in unused slots changes neither value nor gradient"):
            poisoned = logits.detach().clone()
            poisoned[0, [0, 3, 4]] = math.nan
            poisoned.requires_grad_()
            sums = response_logps(poisoned, ids, mask)
            unused = "guide 7.1: a mask selects; multiplying by it would let NaN through (0 * NaN)"
            self.assertClose(sums, response_logps(logits, ids, mask).detach(), says=unused)
            gradient = torch.autograd.grad(sums.sum(), poisoned)[0]
            self.assertClose(bool(torch.isfinite(gradient).all()), True, says=unused + "; every gradient is finite")

    def test_bad_shapes_masks_and_ids_are_refused(self):
        logits, ids = torch.zeros(2, 4, 5, dtype=torch.float64), torch.tensor([[0, 1, 2, 3]] * 2)
        mask = flags(0, 0, 1, 1).repeat(2, 1)
        self.assertClose(
            response_logps(logits, ids, mask), [-2 * math.log(5)] * 2, says="guide 7.1: two tokens of probability 1/5 each"
        )
        first, empty, labels = mask.clone(), mask.clone(), ids.clone()
        first[1, 0], empty[1], labels[0, 0] = True, False, -100
        refused = (
            ("shifted ids", (logits, ids[:, 1:], mask), ValueError, "unshifted"),
            ("shifted mask", (logits, ids, mask[:, 1:]), ValueError, "unshifted"),
            ("no batch axis", (logits[0], ids[0], mask[0]), ValueError, "B, T, V"),
            ("mask of numbers", (logits, ids, mask.int()), TypeError, "response_mask"),
            ("ids as floats", (logits, ids.double(), mask), TypeError, "input_ids"),
            ("mask at position 0", (logits, ids, first), ValueError, "row 1"),
            ("no response token", (logits, ids, empty), ValueError, "row 1"),
            ("labels for ids", (logits, labels, mask), ValueError, "-100"),
            ("id beyond the vocabulary", (logits, ids + 2, mask), ValueError, "0 to 4"),
        )
        for name, arguments, error, words in refused:
            for function in (response_token_logps, response_logps):
                with self.subTest(name, function=function.__name__):
                    self.assertRefused(error, words, f"guide 7.1: {name}: refused, not computed with", function, *arguments)
        with self.subTest("a column against a row broadcasts silently"):
            column = f64(1, 2), f64(1, 2), f64(1, 2).unsqueeze(1)
            self.assertRefused(ValueError, "broadcast", "guide 7.1: [B, 1] against [B]", clipped_policy_loss, *column)


class TokenObjectives(Case):
    """token_objectives.py: two answers of 2 and 3 tokens, a zero 5x5 table, EOS = PAD = 4."""

    def setUp(self):
        self.table = torch.zeros(5, 5, dtype=torch.float64)
        self.ids, self.mask = tokens.INPUT_IDS, tokens.RESPONSE_MASK

    def dpo(self, table: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        ids, mask = (self.ids, self.mask) if ids is None else (ids, mask)
        return tokens.dpo_sequence_loss(table, self.table, ids, mask)

    def grpo(self, table: Tensor, ids: Tensor | None = None, mask: Tensor | None = None, **reduction) -> Tensor:
        ids, mask = (self.ids, self.mask) if ids is None else (ids, mask)
        return tokens.grpo_sequence_loss(table, self.table, self.table, ids, mask, **reduction)

    def test_mask_from_token_ids_loses_one_eos_in_each_answer(self):
        self.assertClose(self.ids.tolist(), [[0, 1, 2, 4, 4], [0, 1, 3, 3, 4]], says="guide 7.6: the two answers")
        self.assertClose(
            self.mask.int().tolist(),
            [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]],
            says="guide 7.1, 7.6: the real EOS counts, PAD does not",
        )
        wrong = tokens.token_id_mask(self.ids, self.mask)
        self.assertClose(
            wrong.int().tolist(), [[0, 0, 1, 0, 0], [0, 0, 1, 1, 0]],
            says="guide 7.1, 7.6, token_objectives.token_id_mask: the mistake `ids != EOS` drops the real EOS, too",
        )  # fmt: skip
        logits = tokens.bigram_logits(self.table, self.ids)
        # Every token has log-probability -log 5: 2 and 3 tokens right, 1 and 2 with the mistake.
        for mask, counts in ((self.mask, (2, 3)), (wrong, (1, 2))):
            self.assertClose(
                response_logps(logits, self.ids, mask), [-n * math.log(5) for n in counts],
                says="guide 7.1: every token of a zero table has log-probability -log 5", likely="tokens counted too few or too many",
            )  # fmt: skip
        gradient = tokens.sgd_step(lambda t: self.dpo(t, self.ids, wrong), self.table).gradient_norm
        self.assertNotAlmostEqual(gradient, tokens.sgd_step(self.dpo, self.table).gradient_norm)

    def test_reductions_differ_on_unequal_lengths(self):
        values = torch.tensor([[1.0, 0.0, 0.0], [3.0, 4.0, 5.0]]).double()
        valid = flags(1, 0, 0, 1, 1, 1).reshape(2, 3)
        self.assertClose(
            tokens.mean_per_response(values, valid), (1 + 4) / 2,
            says="guide 6.2, token_objectives.mean_per_response: mean over an answer's tokens, then over answers",
            mistakes={
                "with a mean over all tokens: another objective": 13 / 4,
                "when the padded width divides and not the answer's own length": (1 / 3 + 4) / 2,
                "when answers are summed and not averaged": 5.0,
            },
        )  # fmt: skip
        self.assertClose(
            tokens.mean_over_tokens(values, valid), 13 / 4,
            says="guide 7.3, token_objectives.mean_over_tokens: sum over counted tokens, divided by their number",
            mistakes={"with a mean per answer: another objective": 2.5, "when padding is counted in the denominator": 13 / 6},
        )  # fmt: skip
        with self.subTest("NaN in padding is not read"):
            unread = values.masked_fill(~valid, math.nan)
            for reduction, wanted in ((tokens.mean_per_response, 2.5), (tokens.mean_over_tokens, 13 / 4)):
                self.assertClose(
                    reduction(unread, valid), wanted, says="guide 7.1: a mask selects",
                    likely="multiplying by the mask lets NaN through (0 * NaN)",
                )  # fmt: skip
        # Ratio 1: token losses -1 -1 and +1 +1 +1. Per response (-1 + 1) / 2; over tokens (-2 + 3) / 5.
        over_tokens, padded = 0.2, (-2 / 4 + 3 / 4) / 2
        self.assertClose(
            self.grpo(self.table), 0, atol=1e-8, says="guide 7.3, token_objectives.grpo_sequence_loss: mean per response",
            mistakes={"with a mean over tokens: another objective": over_tokens, "when the padded width divides": padded},
        )  # fmt: skip
        self.assertClose(
            self.grpo(self.table, reduction=tokens.mean_over_tokens), over_tokens, atol=1e-8,
            says="guide 7.3, token_objectives.grpo_sequence_loss: mean over tokens, (-2 + 3) / 5",
            mistakes={"with a mean per response": 0.0, "when padding counts": 1 / 8},
        )  # fmt: skip
        with self.subTest("answers of 10 and 100 tokens: the long one weighs 1/2 or 100/110"):
            lengths = torch.arange(100) < torch.tensor([[10], [100]])
            ones_in_long = torch.stack([torch.zeros(100), torch.ones(100)]).double()
            self.assertClose(
                tokens.mean_per_response(ones_in_long, lengths), 1 / 2, says="guide 7.3: each answer weighs 1/2"
            )
            self.assertClose(
                tokens.mean_over_tokens(ones_in_long, lengths), 100 / 110, says="guide 7.3: each token weighs 1/110"
            )
        with self.subTest("a row without tokens has no mean"):
            empty = values, ~flags(1, 1, 1, 0, 0, 0).reshape(2, 3)
            self.assertRefused(
                ValueError, "row 0", "guide 7.3: an empty answer has no mean", tokens.mean_per_response, *empty
            )

    def test_appended_padding_changes_neither_loss_nor_gradient(self):
        padding = torch.full((2, 4), tokens.PAD)
        ids = torch.cat([self.ids, padding], dim=1)
        mask = torch.cat([self.mask, torch.zeros(2, 4, dtype=torch.bool)], dim=1)
        generator = torch.Generator().manual_seed(3)
        start = torch.randn(5, 5, dtype=torch.float64, generator=generator)
        for name, objective in (("dpo", self.dpo), ("grpo", self.grpo)):
            with self.subTest(name):
                short, long = (start.clone().requires_grad_() for _ in range(2))
                loss, padded = objective(short), objective(long, ids, mask)
                says = f"guide 7.1, token_objectives, {name}: four more PAD change nothing"
                likely = "a mean or a sum over the padded width"
                self.assertClose(padded, loss.detach(), says=says + " in the loss", likely=likely)
                gradients = torch.autograd.grad(padded, long)[0], torch.autograd.grad(loss, short)[0]
                self.assertClose(*gradients, says=says + " in the gradient", likely=likely)
        with self.subTest("counting the padding does change it"):
            counted_wrong = torch.cat([self.mask, torch.ones(2, 4, dtype=torch.bool)], dim=1)
            self.assertNotAlmostEqual(self.grpo(start, ids, counted_wrong).item(), self.grpo(start).item())

    def test_one_update_of_each_objective(self):
        with self.subTest("old and reference receive no gradient and stay where they were"):
            table, old, reference = (self.table.clone().requires_grad_() for _ in range(3))
            loss = tokens.grpo_sequence_loss(table, old, reference, self.ids, self.mask)
            loss = loss + tokens.dpo_sequence_loss(table, reference, self.ids, self.mask)
            gradients = torch.autograd.grad(loss, [table, old, reference], allow_unused=True)
            fixed = "guide 2, 7.6: old and reference are fixed copies: no gradient reaches them"
            self.assertClose(gradients[1:], (None, None), says=fixed, likely="a missing detach")
            self.assertBeyond(
                gradients[0].norm().item(), 0, above=True, says="guide 7.6: the table gets a gradient",
                likely="the policy was detached, or old and current are the same tensor: logp - logp cancels",
            )  # fmt: skip
            self.assertClose(self.table.abs().max().item(), 0.0, says=fixed)
        with self.subTest("another start: old and reference are read, not the current table"):
            generator = torch.Generator().manual_seed(4)
            table, old, reference = 0.5 * torch.randn(3, 5, 5, dtype=torch.float64, generator=generator)
            got = tokens.grpo_sequence_loss(table, old, reference, self.ids, self.mask)
            right, old_refreshed, reference_refreshed, kl_pushes = slow_grpo(table, old, reference, self.ids, self.mask)
            self.assertClose(
                got, right, says="guide 6.2, 7.3, token_objectives.grpo_sequence_loss: mean of -min(rho A, clip(rho) A) + .02 KL",
                mistakes={
                    "when old is refreshed: the denominator is the current table and every ratio is 1": old_refreshed,
                    "when the reference is refreshed: the KL term is 0": reference_refreshed,
                    "when the KL is subtracted: it pushes away from the reference": kl_pushes,
                },
            )  # fmt: skip
        dpo, grpo = tokens.sgd_step(self.dpo, self.table), tokens.sgd_step(self.grpo, self.table)
        uphill = "the step goes uphill, chosen and rejected are exchanged, or a token is scored by the wrong row"
        self.assertClose(
            [dpo.loss_before, dpo.loss_after], [0.693147, 0.668435], atol=5e-7, likely=uphill,
            says="guide 7.6, token_objectives: DPO before and after one SGD step of rate .1",
        )  # fmt: skip
        self.assertClose(
            [grpo.loss_before, grpo.gradient_norm, grpo.loss_after], [0, 0.414997, -0.017285], atol=5e-7, likely=uphill,
            says="guide 7.6, token_objectives: GRPO's loss, gradient norm and loss after one SGD step of rate .1",
        )  # fmt: skip
        margin = tokens.preference_margin(dpo.table_after, self.table, self.ids, self.mask)
        self.assertBeyond(
            margin.item(), 0, above=True, says="guide 5.3: the margin of the chosen answer grows",
            likely="chosen and rejected are exchanged",
        )  # fmt: skip
        with self.subTest("answers to different prompts are refused"):
            other_prompt = self.table, torch.tensor([[0, 1, 2, 4, 4], [1, 1, 3, 3, 4]]), self.mask
            self.assertRefused(ValueError, "one prompt", "guide 7.2: a pair shares its prompt", self.dpo, *other_prompt)


def slow_grpo(table: Tensor, old: Tensor, reference: Tensor, ids: Tensor, mask: Tensor) -> list[float]:
    """GRPO's loss on the two answers in plain loops, and what three mistakes give: old refreshed, reference refreshed, KL's sign.

    Rewards 1 and 0: advantages +1 and -1 (mean .5, std .5). Row t of a table scores the token that follows token t.
    """
    logp, old_logp, ref_logp = (x.log_softmax(-1) for x in (table, old, reference))
    results = []
    for denominator, anchor, sign in (
        (old_logp, ref_logp, 1),
        (logp, ref_logp, 1),
        (old_logp, logp, 1),
        (old_logp, ref_logp, -1),
    ):
        answers = []
        for row, advantage in enumerate((1 / (1 + 2e-8), -1 / (1 + 2e-8))):
            terms = []
            for t in range(1, ids.shape[1]):
                if mask[row, t]:
                    before, token = ids[row, t - 1], ids[row, t]
                    rho = (logp[before, token] - denominator[before, token]).exp()
                    kl = (logp[before].exp() * (logp[before] - anchor[before])).sum()
                    terms.append(-min(rho * advantage, rho.clamp(0.8, 1.2) * advantage) + sign * 0.02 * kl)
            answers.append(sum(terms) / len(terms))
        results.append((sum(answers) / 2).item())
    return results


class Training(Case):
    def test_each_method_learns_the_reward_table(self):
        self.reused_batches_keep_their_old_policy()
        self.the_reference_holds_the_policy()
        self.long_gradients_are_shortened()
        for algorithm in ("ppo", "dpo", "grpo"):
            for seed in SEEDS:
                with self.subTest(algorithm=algorithm, seed=seed):
                    run = train(algorithm, seed=seed)
                    first, last = run.history[0], run.history[-1]
                    says = f'guide 8, train("{algorithm}", seed={seed}): '
                    self.assertClose([row["step"] for row in run.history], list(range(121)), says=says + "rows 0 to 120")
                    # Uniform start: (1 + .2 - .5) / 3 and 1/3.
                    start = [first["expected_reward"], first["optimal_action_probability"]]
                    self.assertClose(
                        start, [0.7 / 3, 1 / 3], atol=1e-7, says=says + "row 0 is the uniform start, before training"
                    )
                    zeros = first["loss"], first["optimizer_steps"], first["kl_current_reference"]
                    self.assertClose(zeros, (0, 0, 0), says=says + "loss, updates and KL to the reference before training")
                    for name in ("expected_reward", "optimal_action_probability"):
                        self.assertBeyond(
                            last[name], 0.99, above=True, says=says + f"{name} rises to about 1",
                            likely="a sign (loss against objective, advantage, chosen and rejected), or a detached policy",
                        )  # fmt: skip
                    exact = (run.policy.softmax(-1) * REWARDS).sum(-1).mean()
                    self.assertClose(
                        last["expected_reward"], exact, says=says + "the last row is exact and taken after its update",
                        likely="evaluation before the update",
                    )  # fmt: skip
                    self.assertBeyond(
                        last["kl_current_reference"], 1.0, above=True, says=says + "close to log 3: nearly deterministic",
                        likely="the reference follows the policy, or KL is taken to `old`",
                    )  # fmt: skip
                    self.assertBeyond(
                        max(row["kl_old_current"] for row in run.history), 0.05, above=False,
                        says=says + "no batch drifts past the KL stop", likely="too many updates on one batch",
                    )  # fmt: skip
                    self.assertClose(run.task.reference.abs().max().item(), 0.0, says=says + "the reference never moves")
        with self.subTest("same seed, same numbers; another seed, others; the global generator is not touched"):
            torch.manual_seed(5)
            state = torch.get_rng_state()
            again, other = train("ppo", seed=7, steps=3), train("ppo", seed=8, steps=3)
            self.assertEqual(again.history, train("ppo", seed=7, steps=3).history)
            self.assertNotEqual(again.history, other.history)
            self.assertTrue(torch.equal(state, torch.get_rng_state()))

    def reused_batches_keep_their_old_policy(self):
        """Row 1 holds the loss of the last of four updates on one batch: it must have fallen below the first pass."""
        for algorithm, right, refreshed in (("grpo", -0.1257, 0.0005), ("ppo", -0.1083, -0.0194)):
            with self.subTest("old is fixed while a batch is reused", algorithm=algorithm):
                self.assertBeyond(
                    train(algorithm, steps=1).history[1]["loss"], (right + refreshed) / 2, above=False,
                    says=f"guide 2, 3.4, 4.3: the surrogate's loss after four updates on one batch ({algorithm}: about {right})",
                    likely=f"old is refreshed at every update: the ratio is 1 in every pass and the loss stays near {refreshed}",
                )  # fmt: skip

    def the_reference_holds_the_policy(self):
        """With a weight of 10 the KL to the reference ends at .0039; with its sign turned at 1.0962."""
        with self.subTest("GRPO's KL pulls towards the reference"):
            self.assertBeyond(
                train("grpo", steps=60, grpo_kl_weight=10).history[-1]["kl_current_reference"], 0.02, above=False,
                says="guide 6.2: loss + weight * KL(current || reference) keeps the policy near the reference at weight 10",
                likely="the KL is subtracted (sign), or the reference follows the policy",
            )  # fmt: skip
        with self.subTest("PPO's shaped reward pulls towards the reference"):
            self.assertBeyond(
                train("ppo", steps=60, ppo_kl_beta=5).history[-1]["kl_current_reference"], 0.1, above=False,
                says="guide 4.3: R_shaped = R - beta (log pi_old - log pi_ref) keeps the policy near the reference at beta 5",
                likely="the KL is paid out instead of charged (sign), or taken to `old` and not to the reference",
            )  # fmt: skip

    def long_gradients_are_shortened(self):
        """At the defaults no gradient of the bandit reaches 1; a limit of .001 cuts each of them, and by another factor each time."""
        with self.subTest("gradient clipping"):
            free, clipped = (
                train("ppo", steps=3, max_gradient_norm=limit).history[-1]["expected_reward"] for limit in (1.0, 1e-3)
            )
            self.assertBeyond(
                abs(free - clipped), 1e-6, above=True, says="guide 3.5, 4.3: a gradient above max_gradient_norm is scaled down",
                likely="gradient clipping is off: the run is the same whatever the limit",
            )  # fmt: skip

    def test_grpo_budget_and_counters(self):
        with self.subTest("the trace repeats the arithmetic of the first group"):
            trace = train("grpo", steps=1).first_batch_trace
            rewards = f64(*(row["reward"] for row in trace))
            self.assertClose(sorted({row["group"] for row in trace}), [0], says="guide 8: the trace follows the first group")
            self.assertClose(
                [row["advantage"] for row in trace], group_advantages(rewards),
                says="guide 6.1, rl_lab.sample_grpo: advantages come from the answers to the same prompt",
                likely="mean or std goes over all prompts: rewards of different prompts in one group",
            )  # fmt: skip
            self.assertClose(
                [row["old_logp"] for row in trace], [-math.log(3)] * 8, says="guide 3.4: old is the uniform start"
            )
        for group_size, prompts in ((8, 16), (2, 64), (16, 8), (4, 16)):
            with self.subTest(group_size=group_size, prompts=prompts):
                run = train("grpo", steps=3, group_size=group_size, online_batch_prompts=prompts)
                says = f"guide 6.5, G {group_size}, {prompts} prompts: "
                sampled = [row["sampled_actions"] for row in run.history]
                budget = [group_size * prompts * step for step in range(4)]
                self.assertClose(sampled, budget, says=says + "sampled_actions counts prompts x G, summed over iterations")
                updates = [row["optimizer_steps"] for row in run.history]
                self.assertClose(updates, [0, 4, 8, 12], says=says + "optimizer_steps: four updates per batch")
                self.assertClose({row["pair_presentations"] for row in run.history}, {0}, says=says + "no pairs in GRPO")
                self.assertEqual((run.settings.group_size, run.settings.online_batch_prompts), (group_size, prompts))
        with self.subTest("a batch that drifts past the stop gets no further update"):
            stopped = train("grpo", steps=1, learning_rate=0.5).history[1]
            says = "guide 4.3: KL(old || current) above .05 ends the batch's updates; the step that crossed it stays"
            self.assertClose(
                (stopped["optimizer_steps"], stopped["stopped_early"]), (1, 1), says=says, likely="the KL stop is off"
            )
            self.assertBeyond(
                stopped["kl_old_current"], 0.05, above=True, says=says, likely="drift is measured from a later policy"
            )

    def test_partial_flips_count_and_reproducibility(self):
        clean = train("dpo", steps=1).task.clean_pairs.rows()
        self.assertClose(len(clean), 12, says="guide 5.5: 4 contexts x 3 pairs of actions")
        for context, chosen, rejected in clean:
            self.assertBeyond(
                (REWARDS[context, chosen] - REWARDS[context, rejected]).item(), 0, above=True,
                says="guide 5.5: the chosen action has the higher reward", likely="chosen and rejected are exchanged",
            )  # fmt: skip
        for flips in (1, 3, 6):
            with self.subTest(flips=flips):
                task = train("dpo", steps=1, seed=7, preference_flips=flips).task
                indices, training = task.flipped_pair_indices, task.training_pairs.rows()
                self.assertClose(len(set(indices)), flips, says="guide 10.3: so many different pairs are flipped")
                for i, (context, chosen, rejected) in enumerate(clean):
                    wanted = [context, rejected, chosen] if i in indices else [context, chosen, rejected]
                    self.assertClose(training[i], wanted, says="guide 10.3: exactly the listed pairs are exchanged, once")
                self.assertClose(task.clean_pairs.rows(), clean, says="guide 10.3: the unflipped labels stay as they were")
                again = train("dpo", steps=1, seed=7, preference_flips=flips).task
                self.assertClose(again.flipped_pair_indices, indices, says="guide 10.3: same seed, same pairs")
        with self.subTest("the seed chooses which; too many are refused; other methods are untouched"):
            runs = [train("dpo", steps=1, seed=seed, preference_flips=3) for seed in range(5)]
            chosen = {tuple(run.task.flipped_pair_indices) for run in runs}
            self.assertBeyond(len(chosen), 1, above=True, says="guide 10.3: the seed chooses", likely="a fixed choice")
            too_many = "guide 10.3: there are 12 pairs"
            self.assertRefused(ValueError, "from 0 to 12", too_many, train, "dpo", preference_flips=13)
            untouched = train("ppo", steps=2, preference_flips=6).history, train("ppo", steps=2).history
            self.assertClose(*untouched, says="guide 10.3: flips change DPO's pairs only")

    def test_full_flip_lowers_the_loss_and_the_reward(self):
        for seed in SEEDS:
            with self.subTest(seed=seed):
                right, flipped = train("dpo", seed=seed).history, train("dpo", seed=seed, preference_flips=12).history
                says = "guide 10.3: all 12 labels reversed, after 120 updates: "
                for history in (right, flipped):
                    start = [history[0]["dpo_training_loss"], history[0]["dpo_original_loss"]]
                    self.assertClose(start, [math.log(2)] * 2, says="guide 5.3: log 2 at the reference")
                    self.assertClose(
                        history[-1]["dpo_training_loss"], 0.0525, atol=5e-5, says=says + "the training loss falls just as far",
                        mistakes={"when the clean labels are trained on": 3.444513, "when the reference follows the policy": math.log(2)},
                        likely="the sides are exchanged in the loss",
                    )  # fmt: skip
                    costs = history[-1]["optimizer_steps"], history[-1]["pair_presentations"]
                    self.assertClose(costs, (120, 1440), says="guide 5.5: one update per iteration on 12 pairs")
                self.assertClose(flipped[-1]["dpo_original_loss"], 3.4445, atol=5e-4, says=says + "loss on the true labels")
                self.assertClose(
                    flipped[-1]["expected_reward"], -0.4957, atol=5e-4, says=says + "a wrong task is learned as well",
                    mistakes={"when the clean labels are trained on": right[-1]["expected_reward"]},
                )  # fmt: skip
                self.assertClose(right[-1]["expected_reward"], 0.9950, atol=5e-4, says="guide 5.5: reward with true labels")
                columns = [[row[f"dpo_{kind}_loss"] for row in right] for kind in ("training", "original")]
                self.assertClose(*columns, atol=0, says="guide 5.5: without flips both losses are the same")
                before = [row["loss"] for row in right[1:]], [row["dpo_training_loss"] for row in right[:-1]]
                self.assertClose(
                    *before, says="guide 8: a row's loss is taken before its update: the training loss of the row above",
                    likely="the loss is measured after the update",
                )  # fmt: skip

    def test_chain_learns_through_time(self):
        for lam in (0.0, 0.95, 1.0):
            with self.subTest("first rollout, critic zero", lam=lam):
                trace = train_chain(steps=1, gae_lambda=lam).first_rollout_trace
                order = [(row["episode"], row["t"]) for row in trace]
                says = f"guide 4.5, ppo_chain, lambda {lam}: "
                self.assertClose(order, [(e, t) for e in range(4) for t in range(2)], says=says + "episode by episode")
                for start, end in zip(trace[::2], trace[1::2]):
                    # A_1 = R, A_0 = lam * R: nothing of the next episode; the flags are set at the second step only.
                    self.assertClose(
                        [start["advantage"], end["advantage"]], [lam * end["reward"], end["reward"]],
                        says=says + "with a zero critic A_1 = R and A_0 = lambda R",
                        mistakes={
                            "when lambda is ignored (1 is used)": [end["reward"], end["reward"]],
                            "when the recursion is cut at every step": [0.0, end["reward"]],
                        },
                        likely="the recursion runs into the next episode, or every step is taken as an end",
                    )  # fmt: skip
                    self.assertClose(
                        end["state"], 1 + start["action"], says=says + "action 0 leads to state 1, 1 to state 2"
                    )
                    ends = [row[flag] for row in (start, end) for flag in ("terminated", "boundary")]
                    self.assertClose(ends, [False, False, True, True], says=says + "both flags at the second step only")
        with self.subTest("lambda 0 learns too, through the critic"):
            self.assertBeyond(
                train_chain(gae_lambda=0.0).history[-1]["expected_return"], 0.99, above=True,
                says="guide 4.5: at lambda 0 the first step learns from the critic's V(s_1)",
                likely="the critic is not trained (its loss is detached, weighs 0 or climbs), or V(next) is that of another state",
            )  # fmt: skip
        for seed in SEEDS:
            with self.subTest(seed=seed):
                run = train_chain(seed=seed)
                first, last = run.history[0], run.history[-1]
                start = [first[name] for name in ("expected_return", "probability_state_1", "value_start")]
                self.assertClose(start, [0.3, 0.5, 0], says="guide 4.5: J of the uniform policy is (1 + 0 + .2 + 0) / 4")
                for name in ("expected_return", "probability_state_1"):
                    self.assertBeyond(
                        last[name], 0.99, above=True, says=f"guide 4.5, ppo_chain: {name} rises to about 1",
                        likely="credit does not reach the first step, or a sign",
                    )  # fmt: skip
                costs = last["sampled_actions"], last["optimizer_steps"]
                self.assertClose(costs, (15360, 480), says="guide 4.5: 120 x 128 transitions, 4 updates on each batch")


if __name__ == "__main__":
    unittest.main()
