"""The bandit and the chain: a fourth method as one entry, seeds side by side, lists of settings, what is read and refused."""

from __future__ import annotations

import dataclasses
import io
import json
import statistics
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch

import ppo_chain
import rl_lab
import token_objectives
from ppo_chain import train_chain, train_chain_seeds
from rl_lab import METHODS, FileProblem, train, train_seeds
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)
from verification.test_loops import quiet

METHOD_NAMES = ("ppo", "dpo", "grpo")


# ------------------------------------------------------------------------------------------ a fourth method is one entry


@dataclasses.dataclass(frozen=True)
class RLOOSettings(rl_lab.GRPOSettings):
    """GRPO's settings and one more."""

    rloo_scale: float = rl_lab.setting(1.0, rl_lab.Range(float, 0, 10, above=True), "factor of the advantages", "RLOO")


def sample_rloo(policy, critic, task, settings, generator):
    """Groups as GRPO's; the advantage of an answer is its reward minus the mean reward of the others."""
    groups = rl_lab.sample_groups(policy, task, settings, generator)
    others = (groups.rewards.sum(dim=-1, keepdim=True) - groups.rewards) / (settings.group_size - 1)
    return groups._replace(advantages=settings.rloo_scale * (groups.rewards - others))


def rloo_loss(policy, critic, batch, task, settings):
    """REINFORCE over the batch; two lines, since what else a training needs is not the method's."""
    logp = rl_lab.action_logps(rl_lab.in_context(policy, batch.contexts), batch.actions)
    return rl_lab.reinforce_loss(logp, batch.advantages).mean(dim=(-2, -1)), {}


RLOO = METHODS["grpo"]._replace(
    make_batch=sample_rloo,
    loss=rloo_loss,
    settings=RLOOSettings,
    own_columns=(),
    measures={"expected reward": (rl_lab.last("expected_reward"), ".4f")},
    reuses_batch=False,
    note=lambda runs: f"rloo: {len(runs)} runs",
)


class AFourthMethod(unittest.TestCase):
    def setUp(self):
        patch = mock.patch.dict(METHODS, rloo=RLOO)
        patch.start()
        self.addCleanup(patch.stop)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_one_entry_trains_it(self):
        run = train("rloo", learning_rate=0.1)
        self.assertEqual(list(run.history[0]), list(rl_lab.COMMON_COLUMNS))
        self.assertGreater(run.history[-1]["optimal_action_probability"], 0.95)
        self.assertEqual(run.history[-1]["optimizer_steps"], 120)  # one update on each batch
        self.assertEqual(run.history[-1]["sampled_actions"], 120 * 128)
        for row in run.first_batch_trace:  # R - (8 mean - R) / 7 = 8/7 (R - mean)
            self.assertAlmostEqual(row["advantage"], 8 / 7 * (row["reward"] - row["group_mean"]), places=12)
        self.assertEqual(train_seeds("rloo", [3, 4], steps=4)[1].history, train("rloo", seed=4, steps=4).history)
        self.assertNotEqual(train("rloo", steps=2, rloo_scale=2.0).history, train("rloo", steps=2).history)

    def test_one_entry_brings_command_flags_and_files(self):
        options = ["--steps", "2", "--output", str(self.folder / "o")]
        code, printed, err = quiet(rl_lab.main, ["--algorithm", "all", *options])
        self.assertEqual((code, err), (None, ""))
        self.assertIn("\nrloo ", printed)
        self.assertIn("\nrloo: 1 runs\n", printed)
        self.assertEqual(len(list((self.folder / "o").iterdir())), 8)
        self.assertEqual(json.loads((self.folder / "o" / "rloo.json").read_text())["config"]["rloo_scale"], 1.0)
        code, printed, _ = quiet(rl_lab.main, ["--algorithm", "rloo", "--rloo-scale", "1,2", *options])
        self.assertRegex(printed, r"\nrloo\nrloo-scale  expected reward\n1 +0\.\d{4}\n2 +0\.\d{4}\n")
        code, _, err = quiet(rl_lab.main, ["--algorithm", "grpo", "--rloo-scale", "2", *options])
        self.assertEqual(code, 2)
        self.assertIn("--algorithm grpo does not read it (read by rloo)", err)

    def test_the_shipped_three_stay_three(self):
        mock.patch.stopall()
        METHODS.pop("rloo", None)
        self.assertEqual(tuple(METHODS), METHOD_NAMES)
        self.assertNotIn("rloo_scale", {field.name for field in dataclasses.fields(rl_lab.bandit_settings())})
        self.assertIs(rl_lab.bandit_settings(), rl_lab.BanditSettings)


# ------------------------------------------------------------------------------------------ seeds side by side

# Settings under which runs stop after different numbers of updates, and only some are clipped.
UNEVEN = dict(steps=12, learning_rate=0.1, max_updates=7, kl_stop=0.004, max_gradient_norm=0.05, preference_flips=5)
UNEVEN_CHAIN = dict(steps=12, learning_rate=0.1, kl_stop=0.01, max_updates=7, max_gradient_norm=0.1, gae_lambda=0.3, gamma=0.9)
SEEDS = [0, 7, 19, 3, 12]


def largest_difference(ones, many) -> float:
    """Over all rows and columns of several runs."""
    pairs = [(x, y) for one, other in zip(ones, many, strict=True) for x, y in zip(one.history, other.history, strict=True)]
    return max(abs(x[name] - y[name]) for x, y in pairs for name in x)


class SeedsSideBySide(unittest.TestCase):
    TOLERANCE = 1e-12

    def test_every_number_is_that_of_the_single_run(self):
        for algorithm in METHOD_NAMES:
            with self.subTest(algorithm):
                many = train_seeds(algorithm, SEEDS, **UNEVEN)
                ones = [train(algorithm, seed=seed, **UNEVEN) for seed in SEEDS]
                self.assertLess(largest_difference(ones, many), self.TOLERANCE)
                for one, other in zip(ones, many):
                    self.assertEqual(one.settings, other.settings)
                    self.assertEqual(list(one.history[0]), list(other.history[0]))
                    for x, y in zip(one.history[-1].values(), other.history[-1].values()):
                        self.assertIs(type(x), type(y))
                    self.assertEqual(len(one.first_batch_trace), len(other.first_batch_trace))
                    for x, y in zip(one.first_batch_trace, other.first_batch_trace):
                        self.assertEqual(list(x), list(y))
                        for name in x:
                            torch.testing.assert_close(torch.tensor(x[name]), torch.tensor(y[name]), rtol=0, atol=1e-12)
                    torch.testing.assert_close(one.policy, other.policy, rtol=0, atol=self.TOLERANCE)
                    if algorithm == "dpo":
                        self.assertEqual(one.task.flipped_pair_indices, other.task.flipped_pair_indices)
                        self.assertEqual(one.task.training_pairs.rows(), other.task.training_pairs.rows())

    def test_the_case_reaches_what_it_is_there_for(self):
        for algorithm in ("ppo", "grpo"):
            runs = train_seeds(algorithm, SEEDS, **UNEVEN)
            self.assertGreater(len({run.history[-1]["optimizer_steps"] for run in runs}), 2)
            norms = [row["gradient_norm"] for run in runs for row in run.history[1:]]
            self.assertTrue(min(norms) < 0.05 < max(norms))
        flipped = {tuple(run.task.flipped_pair_indices) for run in train_seeds("dpo", SEEDS, **UNEVEN)}
        self.assertGreater(len(flipped), 2)

    def test_the_chain(self):
        many = train_chain_seeds(SEEDS, **UNEVEN_CHAIN)
        ones = [train_chain(seed=seed, **UNEVEN_CHAIN) for seed in SEEDS]
        self.assertLess(largest_difference(ones, many), self.TOLERANCE)
        self.assertGreater(len({run.history[-1]["optimizer_steps"] for run in many}), 1)
        for one, other in zip(ones, many):
            self.assertEqual(one.settings, other.settings)
            self.assertEqual(one.first_rollout_trace, other.first_rollout_trace)
            torch.testing.assert_close(one.critic, other.critic, rtol=0, atol=self.TOLERANCE)

    def test_broken_twins_are_told_apart(self):
        ones = [train("ppo", seed=seed, **UNEVEN) for seed in SEEDS]
        real_draw, real_descend, real_reuse = rl_lab.draw, rl_lab.descend, rl_lab.reuse_batch

        def one_generator_for_all(sample, generators, *arguments):
            return real_draw(sample, [generators[0]] * len(generators), *arguments)

        def one_norm_for_all(loss, optimizer, limit, where, moving=None):
            together = real_descend(loss.sum(), optimizer, limit, where)
            return torch.full(loss.shape, together, dtype=torch.float64)

        def one_stop_for_all(loss, kl, *arguments):
            return real_reuse(loss, lambda old, new: kl(old, new).max().expand(len(SEEDS)), *arguments)

        twins = dict(draw=one_generator_for_all, descend=one_norm_for_all, reuse_batch=one_stop_for_all)
        for name, twin in twins.items():
            with self.subTest(twin.__name__), mock.patch.object(rl_lab, name, twin):
                self.assertGreater(largest_difference(ones, train_seeds("ppo", SEEDS, **UNEVEN)), 1e-6)

    def test_a_loss_that_is_not_finite_names_the_seed(self):
        real = METHODS["ppo"].loss

        def spoilt(policy, critic, batch, task, settings):
            loss, diagnostics = real(policy, critic, batch, task, settings)
            return torch.stack([loss[0], loss[1] * float("nan"), loss[2]]), diagnostics

        with mock.patch.dict(METHODS, ppo=METHODS["ppo"]._replace(loss=spoilt)):
            with self.assertRaisesRegex(FloatingPointError, "^ppo, seed 6, step 1: loss is nan"):
                train_seeds("ppo", [5, 6, 7], steps=2)

    def test_progress_gets_the_rows_of_all(self):
        seen = []
        runs = train_seeds("grpo", [1, 2], steps=3, on_step=seen.append)
        self.assertEqual([list(rows) for rows in zip(*(run.history for run in runs))], seen)

    def test_the_clip_fraction_of_each_run_is_the_atoms(self):
        generator = torch.Generator().manual_seed(0)
        logp, old = torch.randn(2, 6, 5, 4, dtype=torch.float64, generator=generator) * 0.2
        logp[0, 0] = old[0, 0] + torch.tensor([1.2, 0.8, 1.0, 1.3], dtype=torch.float64).log()
        for axes, shape in ((1, (30, 4)), (2, (6, 5, 4))):
            x, y = logp.reshape(shape), old.reshape(shape)
            wanted = [rl_lab.clip_fraction(a, b, 0.2).item() for a, b in zip(x, y)]
            self.assertEqual(rl_lab.clip_fraction_of_each_run(x, y, 0.2, axes).tolist(), wanted)

    def test_waiting_runs_keep_parameters_and_state(self):
        parameter = torch.zeros(3, 2, dtype=torch.float64)
        adam = rl_lab.Adam([parameter], 0.1)
        gradient = torch.ones(3, 2, dtype=torch.float64)
        adam.step([gradient], torch.tensor([True, True, True]))
        adam.step([-gradient], torch.tensor([True, False, True]))
        self.assertEqual(adam.steps.tolist(), [2, 1, 2])
        alone = rl_lab.Adam([torch.zeros(2, dtype=torch.float64)], 0.1)
        alone.step([gradient[0]])
        self.assertEqual((parameter[1].tolist(), adam.means[0][1].tolist()), (alone.parameters[0].tolist(), alone.means[0].tolist()))
        alone.step([-gradient[0]])
        self.assertEqual(parameter[0].tolist(), alone.parameters[0].tolist())


# ------------------------------------------------------------------------------------------ lists of settings


class Lists(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_groups_at_a_fixed_budget(self):
        arguments = ["--group-size", "2,4", "--grpo-prompts", "8,4", "--steps", "3", "--output", str(self.folder / "r")]
        code, printed, err = quiet(rl_lab.main, ["--algorithm", "grpo", *arguments])
        self.assertEqual((code, err), (None, ""))
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["r-g2", "r-g4"])
        table = [line.split() for line in printed.splitlines()[2:6]]
        self.assertEqual(table[:2], [["grpo"], "g prompts expected reward groups without spread".split()])
        for row, size, prompts in zip(table[2:], (2, 4), (8, 4)):
            run = train("grpo", steps=3, group_size=size, online_batch_prompts=prompts)
            self.assertEqual((self.folder / f"r-g{size}" / "grpo.csv").read_text(), rl_lab.csv_text(run.history))
            share = statistics.fmean(r["zero_group_fraction"] for r in run.history[1:])
            self.assertEqual(row, [str(size), str(prompts), f"{run.history[-1]['expected_reward']:.4f}", f"{share:.4f}"])

    def test_flips(self):
        arguments = ["--preference-flips", "0,12", "--steps", "3", "--output", str(self.folder / "r")]
        _, printed, _ = quiet(rl_lab.main, ["--algorithm", "all", *arguments])
        rows = [line.split() for line in printed.splitlines()[3:6]]
        self.assertEqual(rows[0], "flips training loss original-label loss expected reward".split())
        for row, flips in zip(rows[1:], (0, 12)):
            last = train("dpo", steps=3, preference_flips=flips).history[-1]
            losses = [f"{last[name]:.6f}" for name in ("dpo_training_loss", "dpo_original_loss")]
            self.assertEqual(row, [str(flips), *losses, f"{last['expected_reward']:.4f}"])
        self.assertIn("Nothing that varies is read by ppo, grpo: the same in every folder.", printed)
        self.assertEqual(len(list((self.folder / "r-flips12").iterdir())), 6)

    def test_lambdas_with_seeds(self):
        arguments = ["--gae-lambda", "0,0.95", "--seeds", "0-2", "--steps", "3", "--output", str(self.folder / "c")]
        code, printed, err = quiet(ppo_chain.main, arguments)
        self.assertEqual((code, err), (None, ""))
        rows = [line.split() for line in printed.splitlines()[3:5]]
        for row, lam in zip(rows, (0.0, 0.95)):
            runs = [train_chain(seed=seed, steps=3, gae_lambda=lam) for seed in range(3)]
            text = (self.folder / f"c-lambda{lam:g}" / "seed-2" / "ppo_chain.csv").read_text()
            self.assertEqual(text, rl_lab.csv_text(runs[2].history))
            end = statistics.median(run.history[-1]["expected_return"] for run in runs)
            # lambda 0 leaves the unrewarded first step without credit, 0.95 passes on 0.95 of the reward 1 (or 0.2).
            credit = statistics.median(lam * ppo_chain.first_rewarded(run)[1]["reward"] for run in runs)
            self.assertEqual(row[:3], [f"{lam:g}", f"{credit:.4f}", f"{end:.4f}"])

    def test_the_rule_of_the_names(self):
        parser = rl_lab.build_parser()

        def variants(*arguments):
            return rl_lab.variants_of(parser, parser.parse_args(arguments), rl_lab.BanditSettings)

        def folders(*arguments):
            return [str(variant.folder(Path("a/r"))) for variant in variants(*arguments)]

        self.assertEqual(folders(), ["a/r"])
        self.assertEqual(folders("--group-size", "4"), ["a/r"])
        self.assertEqual(folders("--learning-rate", "0.01,1"), ["a/r-learning-rate0.01", "a/r-learning-rate1"])
        # The first list whose values differ names the runs; none: all of them do.
        self.assertEqual(folders("--group-size", "4,4", "--grpo-prompts", "1,2"), ["a/r-prompts1", "a/r-prompts2"])
        twice = ("--group-size", "4,4,8", "--grpo-prompts", "1,2,1")
        self.assertEqual(folders(*twice), ["a/r-g4-prompts1", "a/r-g4-prompts2", "a/r-g8-prompts1"])
        for wrong, words in (
            (("--group-size", "2,4", "--grpo-prompts", "1,2,3"), "2 for --group-size, 3 for --grpo-prompts values"),
            (("--group-size", "4,4"), "--group-size: the same run twice"),
            (("--seed", "1,2"), "(several seeds: --seeds)"),
            (("--group-size", "2,1"), "argument --group-size: got '2,1', wanted a whole number from 2 to 4096"),
        ):
            code, _, err = quiet(rl_lab.main, [*wrong, "--output", str(self.folder / "never")])
            self.assertEqual((code, words in err), (2, True), err)
        self.assertEqual(list(self.folder.iterdir()), [])


# ------------------------------------------------------------------------------------------ what is read, refused, planned


class Reading(unittest.TestCase):
    def test_a_flag_that_nothing_reads_is_refused(self):
        for algorithm in METHOD_NAMES:
            read = {field.name for field in dataclasses.fields(METHODS[algorithm].settings)}
            for field in dataclasses.fields(rl_lab.BanditSettings):
                with self.subTest(algorithm, flag=rl_lab.flag_of(field)):
                    parser = rl_lab.build_parser()
                    arguments = parser.parse_args(["--algorithm", algorithm, rl_lab.flag_of(field), f"{field.default}"])
                    code, _, err = quiet(rl_lab.check_flags, parser, arguments, (algorithm,))
                    self.assertEqual(code, None if field.name in read else 2, err)

    def test_a_method_reads_what_its_settings_say(self):
        """Each declared setting changes the run, no other does: the classes are the truth about the losses."""
        changed = dict(
            seed=8, learning_rate=0.3, max_gradient_norm=0.01, clip_epsilon=0.01, max_updates=2, kl_stop=1e-4,
            value_weight=2.0, ppo_samples=64, ppo_kl_beta=0.5, dpo_beta=1.5, preference_flips=5, group_size=4,
            online_batch_prompts=8, grpo_kl_weight=1.0,
        )  # fmt: skip
        for algorithm in METHOD_NAMES:
            base = train(algorithm, steps=3).history
            read = {field.name for field in dataclasses.fields(METHODS[algorithm].settings)} - {"steps"}
            if algorithm == "dpo":
                read -= {"seed"}  # nothing is sampled; the seed only chooses the exchanged pairs
            moved = {name for name, value in changed.items() if train(algorithm, steps=3, **{name: value}).history != base}
            self.assertEqual(moved, read)

    def test_hints(self):
        for main, arguments, words in (
            (rl_lab.main, ["--gae-lambda", "1"], "--gae-lambda is a flag of ppo_chain.py"),
            (rl_lab.main, ["--group-sizes", "2"], "did you mean --group-size?"),
            (ppo_chain.main, ["--lambda", "1"], "did you mean --gae-lambda?"),
            (ppo_chain.main, ["--group-size=2"], "--group-size is a flag of rl_lab.py"),
            (rl_lab.main, ["--lambda", "1"], "did you mean --gae-lambda of ppo_chain.py?"),
        ):
            code, _, err = quiet(main, arguments)
            self.assertEqual((code, words in err, err.count("\n")), (2, True, 1), err)
        chain = {rl_lab.flag_of(field) for field in dataclasses.fields(ppo_chain.ChainSettings)}
        bandit = {rl_lab.flag_of(field) for field in dataclasses.fields(rl_lab.BanditSettings)}
        self.assertEqual(set(rl_lab.FLAGS_OF_THE_CHAIN), chain - bandit)

    def test_a_value_of_two_dashes_is_no_value(self):
        for main in (rl_lab.main, ppo_chain.main, token_objectives.main):
            flags = ["--output"] if main is token_objectives.main else ["--output", "--seed", "--seeds", "--steps"]
            for flag in flags:
                code, _, err = quiet(main, [f"{flag}=--"])
                self.assertEqual((code, err.count("\n")), (2, 1))
                self.assertIn(f"argument {flag}: got '--', wanted a value", err)

    def test_short_lines_at_a_prompt(self):
        for run in (train("ppo", steps=1), train("dpo", steps=1), train_chain(steps=1)):
            self.assertLess(len(repr(run)), 100)
            self.assertRegex(repr(run), r"^<.*seed 7.*1 iterations: expected re\w+ 0\.\d{4} -> 0\.\d{4}>$")

    def test_printed_lines_fit_80_columns(self):
        with tempfile.TemporaryDirectory(dir="/tmp" if Path("/tmp").is_dir() else None) as folder, mock.patch.dict(
            "os.environ", COLUMNS="80"
        ):
            short = ["--steps", "2", "--output", f"{folder}/r"]
            for main, arguments in (
                (rl_lab.main, ["--algorithm", "all", *short]),
                (rl_lab.main, ["--algorithm", "all", "--seeds", "0-1", *short]),
                (rl_lab.main, ["--algorithm", "dpo", "--preference-flips", "0,12", *short]),
                (ppo_chain.main, short),
                (ppo_chain.main, ["--gae-lambda", "0,1", *short]),
                (token_objectives.main, ["--output", f"{folder}/t.json"]),
                (rl_lab.main, ["--help"]),
                (ppo_chain.main, ["--help"]),
                (token_objectives.main, ["--help"]),
            ):
                _, printed, _ = quiet(main, arguments)
                self.assertEqual([line for line in printed.splitlines() if len(line) > 80], [], arguments)


class Memory(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def table(self, rows) -> str:
        path = self.folder / "table.json"
        path.write_text(json.dumps(rows))
        return str(path)

    def test_pairs_are_counted_without_making_them(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(30):
            shape = torch.randint(1, 7, (2,), generator=generator).tolist()
            rewards = torch.randint(0, 3, [shape[0], shape[1] + 1], generator=generator).double()
            self.assertEqual(rl_lab.count_pairs(rewards), len(rl_lab.preference_pairs(rewards).contexts))

    def test_what_does_not_fit_is_refused_before_it_is_needed(self):
        wide = self.table([[i % 7 for i in range(5000)]])
        for arguments, words in (
            (["--algorithm", "dpo", "--reward-table", wide], "dpo on a table of 1 x 5000 .* about [0-9.]+ GB of memory"),
            (["--algorithm", "grpo", "--group-size", "4096", "--grpo-prompts", "4096"], "grpo .* GB of memory; at most 2 GB"),
            (["--steps", "100000", "--seeds", "0-99"], "30000000 iterations in all would take about 45.0 GB"),
        ):
            with mock.patch.object(rl_lab, "train_seeds", side_effect=AssertionError("trained")):
                with self.subTest(words), self.assertRaisesRegex(FileProblem, words):
                    rl_lab.main([*arguments, "--output", str(self.folder / "never")])
        with self.assertRaisesRegex(FileProblem, "15.0 GB"):
            ppo_chain.main(["--steps", "100000", "--seeds", "0-99", "--output", str(self.folder / "never")])
        self.assertEqual([path.name for path in self.folder.iterdir()], ["table.json"])

    def test_a_wide_table_is_no_matter_for_ppo(self):
        wide = self.table([[i % 7 for i in range(5000)]])
        arguments = ["--algorithm", "ppo", "--steps", "2", "--reward-table", wide, "--output", str(self.folder / "o")]
        with mock.patch.object(rl_lab, "preference_pairs", side_effect=AssertionError("pairs that nobody compares")):
            self.assertIsNone(quiet(rl_lab.main, arguments)[0])

    def test_many_seeds_go_in_groups_that_fit(self):
        variant = rl_lab.Variant({}, dataclasses.asdict(rl_lab.BanditSettings()))
        self.assertEqual(rl_lab.check_memory(METHOD_NAMES, [variant], 1000, rl_lab.REWARDS), 100)
        large = rl_lab.Variant({}, {**variant.settings, "ppo_samples": 500_000})
        together = rl_lab.check_memory(METHOD_NAMES, [large], 1000, rl_lab.REWARDS)
        one = rl_lab.planned_bytes(METHODS["ppo"], rl_lab.BanditSettings(ppo_samples=500_000), rl_lab.REWARDS)
        self.assertTrue(1 < together < 100)
        self.assertLessEqual(together * one, rl_lab.MEMORY_LIMIT)
        with mock.patch.object(rl_lab, "SEEDS_TOGETHER", 2):
            arguments = ["--algorithm", "grpo", "--steps", "2", "--seeds", "0-4", "--output", str(self.folder / "s")]
            _, printed, _ = quiet(rl_lab.main, arguments)
        for seed in range(5):
            text = (self.folder / "s" / f"seed-{seed}" / "grpo.csv").read_text()
            self.assertEqual(text, rl_lab.csv_text(train("grpo", steps=2, seed=seed).history))
        self.assertIn("medians over 5 seeds", printed)

    def test_torch_without_memory_ends_in_one_line(self):
        refused = RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried ...")
        with mock.patch("sys.argv", ["lab.py"]), mock.patch("sys.stdout", io.StringIO()):
            for problem in (refused, MemoryError()):
                with self.assertRaises(SystemExit) as stop:
                    rl_lab.run_command(mock.Mock(side_effect=problem))
                self.assertEqual(stop.exception.code, "lab.py: error: not enough memory")


if __name__ == "__main__":
    unittest.main()
