"""The table of choices itself: complete, without idle numbers, open to a new row."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from extensions import objectives
from extensions.objectives import PREFERENCE_ROWS, ROWS, choices, command, evaluate, make_batch
from extensions.objectives.oracle import GradientCase, check_close, combinations_of_choices, small_batch
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class TheTable(GradientCase):
    def test_every_choice_has_a_function_and_a_formula(self):
        formulas = objectives.CHOICES
        self.assertEqual(set(formulas["surrogate"]), set(objectives.SURROGATES))
        self.assertEqual(set(formulas["std_guard"]), set(objectives.GUARDS))
        self.assertEqual(set(objectives.GROUP_BASELINES), set(objectives.BASELINES))
        self.assertEqual(set(objectives.PREFERENCE_CHOICES["loss"]), set(objectives.PREFERENCE_LOSSES))
        fields = set(objectives.Row.__dataclass_fields__)
        self.assertLessEqual(set(formulas), fields)
        for (field, value), numbers in objectives.NUMBERS.items():
            self.assertIn(value, formulas[field])
            self.assertLessEqual(set(numbers), fields)

    def test_every_value_of_every_choice_is_used_by_a_test(self):
        """By a named row, or by a combination that the gradient test visits; the others are in test_advantages by name."""
        rows = [*ROWS.values(), *combinations_of_choices()]
        for field, values in objectives.CHOICES.items():
            unused = set(values) - {getattr(row, field) for row in rows}
            by_name = {"floor_variance", "batch_std_of_raw_rewards", "clip_replace", "before_baseline", "after_baseline"}
            by_name |= set(values) if field == "entropy_reduction" else set()  # those of `reduction`, one by one
            by_name |= {"batch_mean", "leave_one_out_std", "group_mean", "slots", "answer_mean", "add_or_leave"}
            self.assertLessEqual(unused, by_name | ({"none"} if field == "centre" else set()), field)

    def test_every_array_that_a_choice_needs_is_named(self):
        """Row.needs names arrays in the order of NEEDED: one that is missing there would be read without a word."""
        needed = {need for field in objectives.FIELDS.values() for choice in field.choices.values() for need in choice.needs}
        self.assertLessEqual(needed, set(choices.NEEDED))
        self.assertLessEqual(set(choices.NEEDED), {field.name for field in dataclasses.fields(objectives.Batch)})

    def test_imports_go_one_way(self):
        """Each room imports only rooms below it; what is imported for annotations alone is no import."""
        floors = ["table", "surrogates", "batch", "kl", "advantages", "reduction", "critic", "sampler", "selection", "choices"]
        floors += ["preference_losses", "pairs", "engine", "rows_captured", "rows", "rows_pairs", "small", "reader", "explain"]
        floors += ["worked", "figure", "command"]
        folder = Path(objectives.__file__).parent
        rooms = {path.stem for path in folder.glob("*.py") if not path.stem.startswith(("test_", "__"))}
        self.assertEqual(rooms, {*floors, "oracle", "slow_loss"})
        for floor, name in enumerate(floors):
            tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
            for node in tree.body:
                module = getattr(node, "module", None) or ""
                if module.startswith("extensions.objectives"):
                    self.assertIn(module.rpartition(".")[2], floors[:floor], f"{name} imports {module}")

    def test_rows_are_plain_records(self):
        for name, row in (ROWS | PREFERENCE_ROWS).items():
            self.assertEqual(row.name, name)
            self.assertTrue(row.source and row.differs, name)
            self.assertEqual(type(row)(**dataclasses.asdict(row)), row)
            self.assertIsInstance(hash(row), int)

    def test_needs_are_what_evaluate_reads(self):
        """With exactly what `needs` names each row evaluates; without one of them it says so."""
        batch = small_batch()
        for name, row in ROWS.items():
            held = {n: getattr(batch, n) for n in row.needs}
            if name == "ppo@sb3-2.9.2":
                held["values"] = batch.values
            evaluate(row, make_batch(logps=batch.logps, mask=batch.mask, **held))
            for missing in set(row.needs) - {"old_logps"}:
                with self.subTest(name=name, missing=missing), self.assertRaisesRegex(ValueError, missing):
                    evaluate(
                        row,
                        make_batch(
                            logps=batch.logps, mask=batch.mask, **{n: v for n, v in held.items() if n != missing}
                        )
                        if missing != "rewards"
                        else replace(batch, rewards=None, rewards_per_func=None),
                    )

    def test_a_new_row_is_one_entry(self):
        """The example of the module's docstring."""
        mine = replace(
            ROWS["grpo"], name="my_grpo", clip_high=0.28, reduction="mean_over_tokens", source="...", differs="..."
        )
        with mock.patch.dict(ROWS, {"my_grpo": mine}):
            self.assertIs(command.row_named("my_grpo"), mine)
            self.assertIn("my_grpo", objectives.family_table(small_batch()))
        self.assert_gradient_is_that_of_autograd(mine)

    def test_nothing_global_moves(self):
        state, threads, dtype = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
        objectives.family_table(objectives.small_batch()[0])
        self.assertTrue(torch.equal(state, torch.get_rng_state()))
        self.assertEqual((threads, dtype), (torch.get_num_threads(), torch.get_default_dtype()))

    def test_float32_stays_float32(self):
        batch = make_batch(
            **{n: getattr(small_batch(), n).float() for n in ("logps", "old_logps", "ref_logps", "rewards")},
            mask=small_batch().mask,
            group_ids=small_batch().group_ids,
        )
        result = evaluate(ROWS["grpo"], batch)
        self.assertEqual((result.loss.dtype, result.dloss_dlogps.dtype), (torch.float32, torch.float32))
        check_close(self, result.dloss_dlogps, evaluate(ROWS["grpo"], small_batch()).dloss_dlogps, 1e-5, "float32 gradient")


if __name__ == "__main__":
    unittest.main()
