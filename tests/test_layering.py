"""What may be imported, read and printed where."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autoflash

PACKAGE = Path(autoflash.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(PACKAGE.rglob("*.py"))

# (module, what it may do there): settings reads, the pool hands the environment on to its children.
READS_ENVIRONMENT = {"settings.py", "tuning/pool.py"}


# In a process of its own: it configures logging, which disables the loggers that other tests watch.
LINT = """
import sys
from importlinter import cli
sys.exit(cli.lint_imports(config_filename=sys.argv[1], no_cache=True, no_logo=True))
"""


def lint(config: Path) -> tuple[int, str]:
    """Exit status and report of import-linter."""
    done = subprocess.run(
        [sys.executable, "-c", LINT, str(config)], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_imports_only_go_down():
    status, report = lint(ROOT / "pyproject.toml")
    assert status == 0, report
    assert "Imports only go down KEPT" in report
    assert "1 kept, 0 broken" in report


def test_the_linter_would_see_an_import_that_goes_up(tmp_path):
    config = tmp_path / "pyproject.toml"
    config.write_text(
        '[tool.importlinter]\nroot_package = "autoflash"\n'
        '[[tool.importlinter.contracts]]\nname = "upside down"\ntype = "layers"\n'
        'layers = ["autoflash.errors", "autoflash.problem", "autoflash.kernels"]\n'
    )
    status, report = lint(config)
    assert status == 1
    assert "upside down BROKEN" in report
    assert "autoflash.problem -> autoflash.errors" in report


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def environment_uses(tree: ast.Module) -> list[int]:
    """Lines that name the environment: os.environ, os.getenv and the like, however imported."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os":
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names | {"*"}]
        elif isinstance(node, ast.Import):
            lines += [node.lineno for a in node.names if a.name == "os" and a.asname]
    return lines


def prints(tree: ast.Module) -> list[int]:
    """Lines that use the built-in print, even without calling it."""
    uses = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "print")
    return sorted(node.lineno for node in uses)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import os\nx = os.environ['A']\n", 1),
        ("import os\nx = os.getenv('A')\nos.environ.get('B')\n", 2),
        ("from os import environ\n", 1),
        ("from os import path, getenv as g\n", 1),
        ("import os as system\n", 1),
        ("import os\nx = os.path\nenviron = 1\n", 0),
    ],
)
def test_the_search_finds_each_way_to_the_environment(text, count):
    assert len(environment_uses(ast.parse(text))) == count


def test_only_settings_reads_the_environment():
    users = {module_name(path) for path in MODULES if environment_uses(tree_of(path))}
    assert users == READS_ENVIRONMENT


def test_the_pool_only_hands_the_environment_on():
    tree = tree_of(PACKAGE / "tuning" / "pool.py")
    lines = (PACKAGE / "tuning" / "pool.py").read_text().splitlines()
    used = [lines[number - 1].strip() for number in environment_uses(tree)]
    # A dict that spreads all of it: no variable is looked at.
    assert [line.startswith("found = {**os.environ, ") for line in used] == [True]


def test_the_library_never_prints():
    assert prints(ast.parse("print(1)\nf = print\nconsole.print(1)\n")) == [1, 2]
    assert {module_name(path): prints(tree_of(path)) for path in MODULES} == {
        module_name(path): [] for path in MODULES
    }


def test_templates_and_records_hold_no_code():
    for folder in ("templates", "tuning_db"):
        for path in (ROOT / folder).rglob("*.py"):
            body = tree_of(path).body
            assert [type(node) for node in body] == [ast.Expr], f"{path} is more than a docstring"
