"""What the figures show: a colour per method, labels from the settings that differ, reference lines, the axis that is asked for.

Reading CSV files and writing figures are tested in test_command_lines.py; the curves of --atoms against the atoms below.
"""

import contextlib
import io
import json
import math
import os
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch

import plot_results
from rl_lab import dpo_loss, group_advantages
from test_rl_lab import Case

REWARDS = [[1.0, 0.2, -0.5], [-0.5, 1.0, 0.2]]


class FigureCase(Case):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_in(self, name: str, method: str = "ppo", columns: dict | None = None, **config) -> Path:
        """A run of three rows as a training writes it: METHOD.csv and METHOD.json."""
        columns = {"step": [0, 1, 2], **(columns or {})}
        if "sampled_accuracy" not in columns:  # a run of the bandit
            columns = {"expected_reward": [0.2, 0.5, 0.9], **columns}
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        (folder / f"{method}.csv").write_text("\n".join(lines) + "\n")
        if config:
            run = {"config": {"seed": 7, "kl_stop": 0.05, **config}, "reward_table": REWARDS}
            (folder / f"{method}.json").write_text(json.dumps(run))
        return folder

    def draw(self, *folders: Path, **settings):
        return plot_results.draw_curves([c for folder in folders for c in plot_results.read_folder(folder)], **settings)

    @staticmethod
    def labels(figure) -> list[str]:
        return [text.get_text() for text in figure.legends[0].texts]

    @staticmethod
    def panel(figure, title: str):
        return next(axis for axis in figure.axes if axis.get_title() == title)


class Lines(FigureCase):
    def test_a_method_has_one_colour_and_a_folder_one_style_in_the_order_ppo_dpo_grpo(self):
        for method in ("grpo", "ppo", "dpo"):
            self.run_in("a", method)
        self.run_in("b", "grpo")
        figure = self.draw(self.folder / "a", self.folder / "b")
        self.assertEqual(self.labels(figure), ["ppo a", "dpo a", "grpo a", "grpo b"])
        lines = self.panel(figure, "expected reward").lines
        self.assertEqual(lines[2].get_color(), lines[3].get_color())
        self.assertNotEqual(lines[2].get_linestyle(), lines[3].get_linestyle())
        self.assertEqual(len({line.get_linewidth() for line in lines}), 1, "a thicker line reads as more important")
        alone = self.draw(self.run_in("c", "grpo"))
        self.assertEqual(self.panel(alone, "expected reward").lines[0].get_color(), lines[2].get_color())

    def test_labels_are_the_settings_that_differ(self):
        folders = [self.run_in(f"g{size}", "grpo", group_size=size, online_batch_prompts=128 // size) for size in (2, 16)]
        self.assertEqual(self.labels(self.draw(*folders)), ["G 2, prompts 64", "G 16, prompts 8"])
        with self.subTest("without the JSON: the shortest name that tells them apart, and nobody's directories"):
            folders = [self.run_in("left/run"), self.run_in("right/run")]
            self.assertEqual(self.labels(self.draw(*folders)), ["left/run", "right/run"])
        with self.subTest("a broken or a hostile JSON is as none"):
            for text in ("{", "[" * 100_000, '{"config": 3}', '{"config": {"a": 1}, "reward_table": [[1], [2, 3]]}'):
                (folders[0] / "ppo.json").write_text(text)
                self.assertEqual(len(self.labels(self.draw(*folders))), 2)

    def test_names_that_mean_something_to_a_font_or_a_terminal(self):
        for name in (r"r$\frac$", "a\nb", "结果"):
            with self.subTest(name):
                figure = self.draw(self.run_in(name), self.run_in("plain"))
                with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                    arguments = ["--input", str(self.folder / name), str(self.folder / "plain"), "--output"]
                    plot_results.main([*arguments, str(self.folder / "figure.svg")])
                self.assertEqual((len(out.getvalue().splitlines()), err.getvalue()), (1, ""))
                self.assertNotIn("\n", self.labels(figure)[0])
        with self.subTest("an .svg keeps the characters themselves"):
            figure = self.draw(self.folder / "结果", self.folder / "plain")
            self.assertIn("结果", plot_results.rendered(figure, ".svg")[0].decode())

    def test_seeds_that_are_all_the_same_are_said_to_be(self):
        for seed in (0, 1):
            self.run_in(f"many/seed-{seed}", "dpo", seed=seed)
        (label,) = self.labels(self.draw(self.folder / "many"))
        self.assertEqual(label, "dpo (2 seeds, all the same: nothing is sampled)")

    def test_small_print_says_seed_and_steps(self):
        figure = self.draw(self.run_in("a", group_size=4))
        self.assertIn("seed 7, steps 2", [text.get_text() for text in figure.texts])


class Panels(FigureCase):
    def test_reference_lines_come_from_the_run_itself(self):
        figure = self.draw(self.run_in("a", columns={"kl_old_current": [0, 0.01, 0.02]}, group_size=4))
        heights = [line.get_ydata()[0] for line in self.panel(figure, "expected reward").lines[1:]]
        # best: (1 + 1) / 2; uniform: (1 + .2 - .5) / 3; the worst, -.5, is far below every curve and left out.
        self.assertClose(heights, [1.0, 0.7 / 3])
        (stop,) = self.panel(figure, plot_results.KL_TO_OLD).lines[1:]
        self.assertEqual(stop.get_ydata()[0], 0.05)
        with self.subTest("the worst is drawn where a curve goes there"):
            figure = self.draw(self.run_in("b", columns={"expected_reward": [0.2, 0.0, -0.4]}, group_size=4))
            self.assertClose([line.get_ydata()[0] for line in self.panel(figure, "expected reward").lines[1:]][-1], -0.5)
        with self.subTest("no JSON, no line"):
            self.assertEqual(len(self.panel(self.draw(self.run_in("c")), "expected reward").lines), 1)

    def test_the_gap_to_the_best_is_logarithmic(self):
        axis = self.panel(self.draw(self.run_in("a", group_size=4)), "best - expected reward (log axis)")
        self.assertEqual(axis.get_yscale(), "log")
        self.assertClose(axis.lines[0].get_ydata().tolist(), [0.8, 0.5, 0.1])

    def test_reward_against_kl(self):
        columns = {"kl_current_reference": [0, 0.3, 0.8]}
        axis = self.panel(
            self.draw(self.run_in("a", columns=columns)), "expected reward against " + plot_results.KL_TO_REFERENCE
        )
        self.assertEqual(axis.lines[0].get_xdata().tolist(), [0, 0.3, 0.8])
        self.assertEqual(axis.lines[0].get_ydata().tolist(), [0.2, 0.5, 0.9])

    def test_verifier_and_accuracy_share_a_panel_and_sft_leaves_the_kl_panel(self):
        columns = {"sampled_accuracy": [0.5, 0.4, 0.0], "reward": [0.5, 0.8, 1.0], "kl_current_reference": [0, 1, 2]}
        self.run_in("lm", "grpo", columns)
        folder = self.run_in("lm", "sft", {**columns, "kl_current_reference": [0, 5, 10]})
        figure = self.draw(folder)
        both = [line.get_ydata().tolist() for line in figure.axes[0].lines[:2]]
        self.assertEqual(both, [columns["sampled_accuracy"], columns["reward"]])
        self.assertEqual(len(self.panel(figure, plot_results.KL_TO_REFERENCE).lines), 1)

    def test_row_0_of_an_update_column_is_no_measurement(self):
        columns = {name: [0, 1, 2] for name in ("gradient_norm", "clip_fraction", "value_loss")}
        figure = self.draw(self.run_in("a", columns=columns))
        for panel in plot_results.UPDATES[:3]:
            self.assertEqual(self.panel(figure, panel.title).lines[0].get_xdata().tolist(), [1, 2])

    def test_labels_that_agree_in_every_row_are_drawn_once(self):
        losses = {"dpo_training_loss": [0.7, 0.5, 0.3], "dpo_original_loss": [0.7, 0.5, 0.3]}
        titles = [axis.get_title() for axis in self.draw(self.run_in("a", "dpo", losses)).axes]
        self.assertNotIn("DPO loss on the original labels", titles)
        flipped = self.run_in("b", "dpo", {**losses, "dpo_original_loss": [0.7, 0.9, 1.2]})
        axis = self.panel(self.draw(self.folder / "a", flipped), "DPO loss on the original labels")
        self.assertEqual(len([line for line in axis.lines if len(line.get_xdata()) == 3]), 2)


class Axes(FigureCase):
    def test_x_is_what_was_used_up(self):
        budget = {"sampled_actions": [0, 128, 256], "optimizer_steps": [0, 4, 8], "pair_presentations": [0, 0, 0]}
        folder = self.run_in("a", "ppo", budget)
        self.run_in("a", "dpo", {**budget, "sampled_actions": [0, 0, 0], "pair_presentations": [0, 12, 24]})
        for axis, drawn, wanted in (("samples", "ppo", [0, 128, 256]), ("pairs", "dpo", [0, 12, 24])):
            with self.subTest(axis):
                figure = self.draw(folder, x_axis=axis)
                self.assertEqual(self.labels(figure), [drawn])
                self.assertEqual(figure.axes[0].lines[0].get_xdata().tolist(), wanted)
                self.assertIn("not drawn, since it used none", figure.get_supxlabel())
        self.assertEqual(self.labels(self.draw(folder, x_axis="updates")), ["ppo", "dpo"])
        with self.subTest("nothing is left"), self.assertRaisesRegex(plot_results.PlotProblem, "--x pairs: grpo used none"):
            self.draw(self.run_in("b", "grpo", budget), x_axis="pairs")


class Files(FigureCase):
    @unittest.skipUnless(hasattr(os, "mkfifo"), "this system has no named pipes")
    def test_pipes_and_devices_are_refused_and_not_read_without_end(self):
        os.mkfifo(self.run_in("pipe") / "grpo.csv")
        (self.run_in("device") / "grpo.csv").symlink_to("/dev/zero")
        for name in ("pipe", "device"):
            with self.subTest(name), self.assertRaisesRegex(plot_results.PlotProblem, "grpo.csv: is not a regular file"):
                plot_results.read_folder(self.folder / name)

    def test_settings_that_no_axis_can_show_give_no_reference_line(self):
        for table, stop in (([[1, 0.2], [1e308, 1]], 1e308), ([[]], "x"), ([[1, float("nan")]], None), ([[1, "x"]], [1]), (3, {})):
            folder = self.run_in("odd", seed=1, kl_stop=stop)
            document = json.loads((folder / "ppo.json").read_text()) | {"reward_table": table}
            (folder / "ppo.json").write_text(json.dumps(document))
            (curves,) = plot_results.read_folder(folder)
            with self.subTest(table=table, stop=stop):
                self.assertEqual(curves.settings.keys() & {"reward_table", "kl_stop"}, set())
                self.assertFalse({"best", "KL stop"} & plot_results.reference_values(curves).keys())
                plot_results.rendered(plot_results.draw_curves([curves]), ".svg")

    def test_a_figure_keeps_its_mode(self):
        path = self.folder / "figure.svg"
        path.write_text("earlier")
        path.chmod(0o600)
        plot_results.save(plot_results.new_figure(1, panel_size=(2, 1))[0], path)
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)


class Atoms(Case):
    """The formulas that --atoms draws beside those held in test_oracles.py."""

    def test_dpo(self):
        margin = torch.linspace(-8, 8, 33, dtype=torch.float64).requires_grad_()
        zero = torch.zeros_like(margin)
        loss = dpo_loss(margin, zero, zero, zero, beta=0.5)
        (slope,) = torch.autograd.grad(loss.sum(), margin)
        drawn = plot_results.dpo_of_margin(margin.detach().numpy(), 0.5)
        self.assertClose(drawn[0], loss.detach(), says="-log sigmoid(beta h)")
        self.assertClose(drawn[1], slope, says="-beta sigmoid(-beta h)")

    def test_group_advantages(self):
        for right in range(1, 8):
            rewards = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
            wanted = group_advantages(rewards)[[0, -1]]
            drawn = [plot_results.group_advantage_of(is_right, right, 8) for is_right in (True, False)]
            self.assertClose(drawn, wanted, atol=1e-6, says="(R - mean) / std of a binary group")

    def test_the_guides_four_points_are_marked(self):
        figure = plot_results.draw_atoms()
        marked = [line.get_ydata().tolist() for line in figure.axes[0].lines if line.get_marker() == "o"]
        self.assertClose(sorted(sum(marked, [])), [-1.5, -0.8, 0.5, 1.2], says="guide 4.2: 1.2, -0.8, -1.5, 0.5")
        self.assertEqual(len([axis for axis in figure.axes if axis.lines]), 6)
        self.assertTrue(math.isclose(np.log(2), plot_results.dpo_of_margin(np.zeros(1), 0.3)[0][0]))


if __name__ == "__main__":
    unittest.main()
