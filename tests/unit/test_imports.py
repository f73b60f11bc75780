"""The import rules of docs/architecture.md: what may know of what, and that `import rota` stays light."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import rota

PACKAGE = Path(rota.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# Folders and files that are pure: no torch, no processes, no clock. Those not built yet are kept here on purpose.
PURE = (
    *("rota.schedule", "rota.memory.residency", "rota.memory.shards", "rota.memory.sharp"),
    *("rota.balance.decide", "rota.balance.pace", "rota.balance.virtual", "rota.plan.reshard", "rota.execute.policy"),
    *("rota.plan.box", "rota.plan.layout", "rota.plan.ownership"),
    *("rota.plan.reference", "rota.plan.collectives", "rota.plan.step_check"),
)
# The one file of a pure folder that starts processes and looks at clocks.
EXCEPT = {"rota.schedule.child"}
IMPURE = {"torch", "subprocess", "multiprocessing", "threading", "socket", "time", "psutil", "os"}

# Only these may import it.
ONLY = {
    "ray": (
        "rota.execute.backends.ray",
        "rota.execute.backends.ray_keeper",
        "rota.execute.backends.ray_nodes",
        "rota.execute.backends.ray_token",
    ),
    "ortools": ("rota.schedule.cp_sat", "rota.schedule.milp"),
    "sqlite3": ("rota.store", "rota.cli.doctor"),
    "rich": ("rota.report", "rota.cli"),
    "click": ("rota.cli",),
    "pynvml": ("rota.cluster.discover",),
    "cloudpickle": ("rota.pickling", "rota.runtime.worker", "rota.cli.sweep_file"),
}

# (who, never imports)
NEVER = [
    ("rota.runtime", "rota.execute"),
    ("rota.runtime", "rota.schedule"),
    ("rota.profile", "rota.execute"),
    ("rota.schedule", "rota.execute"),
    ("rota.schedule", "rota.runtime"),
    ("rota.state", "rota.runtime"),
    ("rota.state", "rota.execute"),
    ("rota.store", "rota.execute"),
    ("rota.store", "rota.runtime"),
    ("rota.cluster", "rota.execute"),
    ("rota.execute", "rota.cli"),
    ("rota.report", "rota.cli"),
]


@functools.cache
def imports(path):
    """What `_imports` finds: every rule asks for it again."""
    return frozenset(_imports(path))


def _imports(path):
    """The absolute names of the modules that a file imports, wherever in it; not those for type checkers only."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(id(inner) for inner in ast.walk(node))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, parent):
    return name == parent or name.startswith(parent + ".")


def test_pure_modules_import_nothing_impure():
    for name, path in MODULES.items():
        if name not in EXCEPT and any(within(name, pure) for pure in PURE):
            found = {imported.partition(".")[0] for imported in imports(path)} & IMPURE
            assert not found, f"{name} is pure and imports {found}"


@pytest.mark.parametrize("library", ONLY)
def test_a_library_is_imported_only_where_it_belongs(library):
    for name, path in MODULES.items():
        if any(within(imported, library) for imported in imports(path)):
            assert any(within(name, place) for place in ONLY[library]), f"{name} imports {library}"


@pytest.mark.parametrize(("who", "whom"), NEVER)
def test_a_room_does_not_know_of_the_rooms_above_it(who, whom):
    for name, path in MODULES.items():
        if within(name, who):
            assert not any(within(imported, whom) for imported in imports(path)), f"{name} imports {whom}"


def test_threads_are_owned():
    """Others are torn down in the midst of what they do when the interpreter ends, or keep it from ending."""
    pools = {"rota.memory.mover", "rota.memory.staging"}  # which wait for theirs when they are closed
    for name, path in MODULES.items():
        text = path.read_text()
        assert "daemon=True" not in text, name
        assert name == "rota.threads" or not {"threading.Thread", "threading.Timer"} & _attributes(path), name
        assert name in pools or not any("ThreadPoolExecutor" in imported for imported in imports(path)), name


def _attributes(path):
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


def test_every_module_says_what_it_is_in_one_line():
    for name, path in MODULES.items():
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, f"{name} has no docstring"
        assert len(text.splitlines()[0]) < 120


@pytest.mark.parametrize("library", ["torch", "ortools"])
def test_importing_rota_and_its_command_line_does_not_import_what_is_slow_to_load(library):
    code = f"import sys, rota, rota.cli; sys.exit({library!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_whoever_has_the_solver_in_a_child_does_not_load_it():
    code = "import sys, rota.schedule.child; sys.exit('ortools' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_the_public_names_are_few_and_all_there():
    assert len(rota.__all__) <= 19
    assert all(hasattr(rota, name) for name in rota.__all__)
