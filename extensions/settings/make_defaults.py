"""Write defaults/*.json again, from the trainers' source text. Nothing of a trainer is imported or run.

    python -m extensions.settings.make_defaults --packages SITE_PACKAGES [--verl FOLDER] [--openrlhf FOLDER]

SITE_PACKAGES holds trl, transformers and stable_baselines3 as pip installs them; the two FOLDERs are unpacked wheels
(`pip download --no-deps verl==0.9.1`, then unzip). A trainer whose source is not given keeps its file. Where a default is no
constant (a call, a platform's answer), the file holds the text "<computed>".

A new trainer is an entry in SOURCES: its name, its version, and a function from the folder to {key: default}.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
from pathlib import Path

import rl_lab

FOLDER = Path(__file__).parent / "defaults"
COMPUTED = "<computed>"
VERSIONS = {"trl": "1.16.0", "verl": "0.9.1", "openrlhf": "0.11.2", "stable_baselines3": "2.9.2"}


def constant(node: ast.expr | None) -> object:
    """The value of an expression that is a constant; COMPUTED for any other."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        if isinstance(node, ast.Lambda):
            return constant(node.body)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "int" and isinstance(node.args[0], ast.Constant):
            return int(node.args[0].value)
        if isinstance(node, ast.Call) and not node.args and ast.unparse(node.func) in ("dict", "list"):
            return {"dict": {}, "list": []}[ast.unparse(node.func)]
        return COMPUTED
    if isinstance(value, (tuple, set)):
        return list(value)
    return COMPUTED if isinstance(value, float) and math.isinf(value) else value


def dataclass_fields(path: Path, name: str) -> dict[str, object]:
    """{field: default} of the class `name` in a file, without its bases."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    made: dict[str, object] = {}
    for item in found.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if ast.unparse(item.annotation).startswith("ClassVar") or item.target.id.startswith("_"):
            continue
        value = item.value
        if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            value = given.get("default", given.get("default_factory"))
            if isinstance(value, ast.Name) and value.id in ("dict", "list"):
                value = ast.Dict([], []) if value.id == "dict" else ast.List([])
        made[item.target.id] = None if value is None else constant(value)
    return made


def signature(path: Path, name: str) -> dict[str, object]:
    """{argument: default} of the constructor of the class `name`; arguments without a default are None."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    (made,) = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    names = [argument.arg for argument in made.args.args[1:]]
    defaults = [None] * (len(names) - len(made.args.defaults)) + [constant(node) for node in made.args.defaults]
    return {key: value for key, value in zip(names, defaults) if not key.startswith("_")}


def trl(packages: Path) -> dict[str, dict[str, object]]:
    """The settings classes of TRL, each with what it inherits."""
    base = dataclass_fields(packages / "transformers" / "training_args.py", "TrainingArguments")
    base |= dataclass_fields(packages / "trl" / "trainer" / "base_config.py", "_BaseConfig")
    places = {name: packages / "trl" / "trainer" for name in ("GRPO", "DPO", "KTO", "RLOO", "SFT")}
    places |= {name: packages / "trl" / "experimental" / name.lower() for name in ("CPO", "ORPO")}
    made = {}
    for name, folder in places.items():
        made[f"trl.{name}Config"] = base | dataclass_fields(folder / f"{name.lower()}_config.py", f"{name}Config")
    script = dataclass_fields(packages / "trl" / "scripts" / "utils.py", "ScriptArguments")
    script |= dataclass_fields(packages / "trl" / "trainer" / "model_config.py", "ModelConfig")
    made["trl command line"] = script
    return made


def stable_baselines3(packages: Path) -> dict[str, dict[str, object]]:
    root = packages / "stable_baselines3"
    return {
        "sb3.PPO": signature(root / "ppo" / "ppo.py", "PPO"),
        "sb3.A2C": signature(root / "a2c" / "a2c.py", "A2C"),
        "sb3.VecNormalize": signature(root / "common" / "vec_env" / "vec_normalize.py", "VecNormalize"),
    }


def flattened(tree: object, prefix: str = "") -> dict[str, object]:
    """{a.b.c: value} of nested mappings; an empty mapping stays one value."""
    if not isinstance(tree, dict) or (not tree and prefix):
        return {prefix: tree}
    made: dict[str, object] = {}
    for key, value in tree.items():
        made |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return made


def verl(folder: Path) -> dict[str, dict[str, object]]:
    """verl's own flattened settings; `_generated_` files of other engines add the keys that only they have."""
    import yaml

    root = folder / "verl" / "trainer" / "config"
    made = flattened(yaml.safe_load((root / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8")))
    for path in sorted(root.glob("_generated_ppo_*_trainer.yaml")):
        made = flattened(yaml.safe_load(path.read_text(encoding="utf-8"))) | made
    return {"verl.ppo": {key: value for key, value in sorted(made.items()) if not key.endswith("_target_")}}


def openrlhf(folder: Path) -> dict[str, dict[str, object]]:
    """Flags of its two command lines. A flag named by `prefix` belongs to actor and critic."""
    made = {}
    for name in ("train_ppo_ray", "train_dpo"):
        (path,) = folder.rglob(f"openrlhf/cli/{name}.py")
        flags: dict[str, object] = {}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument") and node.args):
                continue
            flag = node.args[0]
            text = flag.value if isinstance(flag, ast.Constant) else ast.unparse(flag)[2:-1]
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            for prefix in ("actor", "critic") if "{prefix}" in text else ("",):
                value = given.get("default")
                if isinstance(value, ast.IfExp):
                    value = value.body if prefix == "actor" else value.orelse
                key = re.sub(r"^--", "", text.replace("{prefix}", prefix))
                flags[key] = None if value is None else constant(value)
        made["openrlhf.ppo" if "ppo" in name else "openrlhf.dpo"] = flags
    return made


SOURCES = {"trl": trl, "stable_baselines3": stable_baselines3, "verl": verl, "openrlhf": openrlhf}


def document(package: str, folder: Path) -> dict:
    """What a defaults file holds: the package, its version, and {trainer: {key: default}}."""
    return {"package": package, "version": VERSIONS[package], "trainers": SOURCES[package](folder)}


def text_of(made: dict) -> str:
    return json.dumps(made, indent=1, sort_keys=False, allow_nan=False) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = rl_lab.LabParser(
        prog="python -m extensions.settings.make_defaults",
        description="Write the trainers' defaults again from their source text, without importing it.",
    )
    parser.add_argument("--packages", type=Path, metavar="SITE_PACKAGES", help="folder that holds trl, stable_baselines3")
    parser.add_argument("--verl", type=Path, metavar="FOLDER", help="the unpacked wheel of verl")
    parser.add_argument("--openrlhf", type=Path, metavar="FOLDER", help="the unpacked wheel of openrlhf")
    arguments: argparse.Namespace = parser.parse_args(argv)
    given = {
        "trl": arguments.packages,
        "stable_baselines3": arguments.packages,
        "verl": arguments.verl,
        "openrlhf": arguments.openrlhf,
    }
    if not any(given.values()):
        parser.error("wanted --packages, --verl or --openrlhf")
    for package, folder in given.items():
        if folder is not None:
            try:
                made = document(package, folder)
            except (OSError, ValueError, SyntaxError) as problem:
                raise rl_lab.FileProblem(f"{folder}: holds no {package} that can be read ({problem})") from problem
            rl_lab.replace_files({FOLDER / f"{package}.json": text_of(made)})
            print(f"wrote {package}.json: {sum(map(len, made['trainers'].values()))} defaults of {package} {made['version']}")


if __name__ == "__main__":
    rl_lab.run_command(main)
