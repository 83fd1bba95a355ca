"""What `pip install` brings is what is imported; what is missing all the same is told in one sentence."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.fork_server import REPOSITORY

PACKAGE = REPOSITORY / "src" / "photinus"
_EXTRA = re.compile(r"extra == ['\"](\w+)['\"]")
# Of an extra, imported where it is asked for, with an error that says so; and what torch itself brings.
ELSEWHERE = {"mlflow", "ray", "safetensors", "tensorboard", "typing_extensions", "wandb"}


def required(extra: str | None = None) -> set[str]:
    """Names of the distributions that pip installs with Photinus, or with one of its extras."""
    found = set()
    for line in importlib.metadata.requires("photinus") or []:
        condition = _EXTRA.search(line)
        if (condition.group(1) if condition else None) == extra:
            found.add(re.split(r"[^\w-]", line)[0].lower())
    return found


def imported() -> dict[str, Path]:
    """Third-party packages that the package's files import, wherever in the file, and one file that does."""
    found: dict[str, Path] = {}
    for path in PACKAGE.rglob("*.py"):
        if "templates" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found.update({name.split(".")[0]: path for name in names})
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "photinus"}}


def test_whatever_the_package_imports_is_installed_with_it() -> None:
    assert {"torch", "numpy", "tqdm", "matplotlib", "cloudpickle", "jinja2", "rich"} <= required()
    missing = {name: path for name, path in imported().items() if name not in required() | ELSEWHERE}
    assert missing == {}


def test_the_wheel_has_every_file_that_stands_beside_the_modules(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="what builds wheels is not installed beside the tests")
    command = [sys.executable, "-m", "pip", "wheel", str(REPOSITORY), "--no-build-isolation", "--no-deps", "--quiet"]
    command += [
        "-Cwheel.cmake=false",
        "-Cwheel.py-api=py3",
        f"-Cbuild-dir={tmp_path / 'build'}",
        "--wheel-dir",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    listed = subprocess.run(["git", "ls-files", "src"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    wanted = {line.removeprefix("src/") for line in listed.stdout.splitlines()} - {"photinus/templates/ruff.toml"}
    assert "photinus/tools/view/page.html.j2" in wanted
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_the_demo_installs_data_and_no_tools() -> None:
    assert required("demo") == {"scikit-learn"}
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    assert "'.[demo]'" in planned
    assert "'.[test]'" not in planned
    tools = {"mypy", "ruff", "clang-format", "hypothesis", "pytest"}
    assert tools <= required("test")
    assert not any(re.search(rf"\b{tool}\b", planned) for tool in tools)


def test_the_site_needs_its_tools_and_neither_a_compiler_nor_torch() -> None:
    command = ["make", "--dry-run", "--always-make", "docs"]
    planned = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"'([\w-]+)[^' ]*'", planned) == ["mkdocs-material", "mkdocstrings", "ruff"]
    assert not re.search(r"cmake|nanobind|scikit|ninja|--editable|check_machine", planned)
    beside = subprocess.run([*command, "check"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert beside.index("'.[test]'") < beside.index("'mkdocs-material")  # two at once would make one environment


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run_without(absent: set[str], program: str) -> subprocess.CompletedProcess[str]:
    """The program on a Python that does not have these packages."""
    command = [sys.executable, "-c", WITHOUT.format(absent=absent) + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("absent", "program", "told"),
    [
        ("torch", "import photinus; photinus.init()", "photinus.init needs torch, which {python} does not have"),
        ("torch", "from photinus import Trainer", "photinus.Trainer needs torch, which"),
        ("cloudpickle", "import photinus; photinus.launch(print)", "photinus.launch needs cloudpickle, which"),
    ],
)
def test_a_missing_library_is_told_in_one_sentence_with_the_command_that_brings_it(
    absent: str, program: str, told: str
) -> None:
    ended = run_without({absent}, program)
    *_, last = ended.stderr.strip().splitlines()
    assert told.format(python=sys.executable) in last, ended.stderr
    assert f"pip install {absent}" in last
    assert last.startswith("photinus.errors.MissingLibraryError: ")
    assert ended.stderr.count("Traceback") == 1
    assert run_without({absent}, f"try: {program}\nexcept ImportError: print('caught')").stdout == "caught\n"


def test_the_command_line_tells_a_missing_library_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    command = f"from photinus.cli.main import main; sys.exit(main(['run', {str(tmp_path / 'train.py')!r}]))"
    ended = run_without({"torch"}, command)
    assert ended.returncode == 1
    assert ended.stderr.startswith("photinus: LaunchError: photinus run needs PyTorch, which ")
    assert ended.stderr.count("\n") == 1


def test_the_engine_needs_no_other_library() -> None:
    program = (
        "from photinus import engine\n"
        "with engine.Communicator(0, 1, engine.new_address()) as communicator: communicator.barrier()\n"
        "print('met')"
    )
    ended = run_without(required(), program)
    assert ended.stdout == "met\n", ended.stderr
