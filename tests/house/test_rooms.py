"""The shape of the house: arrows between rooms run down only, and no room's file or class grows too large."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "paddle_vpp_ext"

# A room: a folder, or a file that stands by itself; and the rooms that it may import from.
GROUND = {"log", "releases"}
PLANS = {"schedule", "search", "planning"}
MIDDLE = {"fleet", "executor", "instruments", *GROUND, *PLANS}
ROOMS = {
    "log": set(),
    "releases": set(),
    "schedule": set(),
    "search": {"schedule"},
    "planning": {"schedule", "search"},
    "instruments": {"schedule"},
    "executor": {"schedule", "instruments"},
    "diagnosis": {"executor"},
    "fleet": {"schedule", *GROUND},
    "fleet.transport": {"fleet", "executor", "schedule", "log"},
    "fleet.stage": {"fleet", "schedule", "log"},
    "fleet.observe": {"fleet", "executor", "instruments", "schedule", "diagnosis", "log"},
    "fleet.engine": {*MIDDLE, "fleet.transport", "fleet.stage", "fleet.observe", ""},
    "tools": {*PLANS, "tools.draw"},
    "tools.draw": {*PLANS},
    "tools.cli": {*PLANS, "tools", "tools.draw", "diagnosis", "activation", "releases", "log", ""},
    "activation": {""},
    "": {"planning", "fleet.engine", "fleet.stage"},  # the public names, each imported when it is asked for
    "__main__": {"tools.cli"},
    "examples": {"", "schedule", "tools.draw"},
}
FILES = sorted(ROOT.rglob("*.py"))
# Imported when a function is called, since they lead back: the version, enable().
LAZY = {("fleet.engine", ""), ("tools.cli", ""), ("activation", "")}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {module_of(path) for path in FILES}


def room_of(parts):
    """The room of a module, or of a name in it."""
    for length in (2, 1):
        if ".".join(parts[:length]) in ROOMS and (length == 1 or parts[:2] in {module_of(p) for p in FILES if p.name == "__init__.py"}):
            return ".".join(parts[:length])
    return ""


def imports_of(path):
    """(line, the module of this package that it imports, whether at the top of the file)."""
    here, tree = module_of(path), ast.parse(path.read_text(encoding="utf-8"))
    package = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = package[: len(package) - node.level + 1] + tuple((node.module or "").split(".") if node.module else ())
        elif (node.module or "").partition(".")[0] == "paddle_vpp_ext":
            base = tuple(node.module.split(".")[1:])
        else:
            continue
        for name in node.names:
            target = (*base, name.name) if (*base, name.name) in MODULES else base
            yield node.lineno, target, node in tree.body


def test_no_two_rooms_need_each_other():
    TopologicalSorter({room: {other for other in below if (room, other) not in LAZY} for room, below in ROOMS.items()}).prepare()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_run_down_and_nothing_is_too_large(path):
    room = room_of(module_of(path))
    for line, target, at_top in imports_of(path):
        other = room_of(target)
        assert other == room or other in ROOMS[room], f"{path}:{line}: {room or 'the package'} imports from {other or 'the package'}"
        assert not at_top or (room, other) not in LAZY, f"{path}:{line}: import this in the function that needs it"
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400, f"{path} has more than 400 lines: more than one reason to change?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert node.end_lineno - node.lineno < 200, f"{path}:{node.lineno}: {node.name} has 200 lines or more"


@pytest.mark.parametrize("folder", ["schedule", "search", "planning", "tools", "executor.py", "instruments.py", "diagnosis.py"])
def test_planning_and_looking_need_no_paddle(folder):
    found = ROOT / folder
    for path in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not any(name.split(".")[0] == "paddle" for name in names), f"{path}:{node.lineno} imports Paddle"
