"""What is installed is what is in the checkout, and its modules import in one direction only."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import pycoll

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pycoll"


def module_files() -> dict[str, Path]:
    """Dotted name -> file of every module in the checkout, through the directory links."""
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        if "__init__.py" in files:
            package = ".".join(Path(folder).relative_to(ROOT).parts)
            for name in files:
                if name.endswith(".py"):
                    module = package if name == "__init__.py" else f"{package}.{name[:-3]}"
                    found[module] = Path(folder, name)
    return found


MODULES = module_files()


class Imports(NamedTuple):
    """The modules that a file imports: all, and of pycoll's those that it needs when it runs."""

    every: set[str]
    runs_on: set[str]


@functools.cache
def imports_of(path: Path) -> Imports:
    """What a file imports, also inside functions; what is under TYPE_CHECKING does not run."""
    every, runs_on = set[str](), set[str]()
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), True)]
    while todo:
        node, runs = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += [(child, False) for child in node.body]
            todo += [(child, runs) for child in node.orelse]
            continue
        todo += [(child, runs) for child in ast.iter_child_nodes(node)]
        found = set()
        if isinstance(node, ast.Import):
            every |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}:{node.lineno}: relative import"
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                found.add(dotted if dotted in MODULES else node.module)
            every |= found
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "LazyModule":
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
        runs_on |= found if runs else set()
    return Imports(every, runs_on & set(MODULES))


# ---------------------------------------------------------------- what is installed


@pytest.fixture
def distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("pycollective")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("pycoll is not installed, only found through the path: pip install '.[test]'")


def is_editable(distribution: importlib.metadata.Distribution) -> bool:
    text = distribution.read_text("direct_url.json") or "{}"
    return bool(json.loads(text).get("dir_info", {}).get("editable"))


def test_the_tests_use_the_installed_package(
    distribution: importlib.metadata.Distribution,
) -> None:
    if is_editable(distribution):
        expected = PACKAGE / "__init__.py"
    else:
        expected = Path(str(distribution.locate_file("pycoll/__init__.py"))).resolve()
        assert not expected.is_relative_to(PACKAGE)
    assert Path(pycoll.__file__).resolve() == expected


def test_processes_that_tests_start_use_the_same_package() -> None:
    tell = [sys.executable, "-c", "import pycoll; print(pycoll.__file__)"]
    for command in (tell, [sys.executable, "-m", "pycoll._launcher", "-n", "2", "--", *tell]):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert set(done.stdout.split()) == {pycoll.__file__}


def test_the_installed_modules_equal_those_in_the_checkout(
    distribution: importlib.metadata.Distribution,
) -> None:
    if is_editable(distribution):
        pytest.skip("an editable install has no copy that could differ")
    here = {path.relative_to(ROOT).as_posix(): path for path in MODULES.values()}
    installed = {
        file.as_posix(): Path(str(file.locate()))
        for file in distribution.files or []
        if file.suffix == ".py"
    }
    assert sorted(installed) == sorted(here)
    differing = [name for name in here if here[name].read_bytes() != installed[name].read_bytes()]
    assert differing == [], "the checkout has changed since: pip install . again"


def test_only_pycoll_lands_in_site_packages(
    distribution: importlib.metadata.Distribution,
) -> None:
    tops = {file.parts[0] for file in distribution.files or []}
    allowed = re.compile(
        r"pycoll|\.\.|pycollective-[^/]*\.dist-info|__editable__[^/]*pycoll[^/]*|pycollective\.egg-link"
    )
    assert {top for top in tops if not allowed.fullmatch(top)} == set()


def test_the_distribution_has_its_commands_plugin_and_type_marker(
    distribution: importlib.metadata.Distribution,
) -> None:
    points = {(p.group, p.name): p for p in distribution.entry_points}
    of_torch = {("torch.backends", "pycoll"), ("torch.distributed.backends", "pycoll")}
    assert set(points) == of_torch | {
        ("console_scripts", "pycoll-run"),
        ("console_scripts", "pycoll"),
        ("pytest11", "pycoll"),
    }
    has_torch = importlib.util.find_spec("torch") is not None
    for key, point in points.items():
        assert point.load() if has_torch or key not in of_torch else True
    assert Path(pycoll.__file__).with_name("py.typed").is_file()


def test_the_version_is_stated_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pycoll.__version__ == project["version"]


# ---------------------------------------------------------------- what builds the core


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """build_backend/pycoll_compiler.py, on an x86-64 whose PATH is an empty folder."""
    source = ROOT / "build_backend" / "pycoll_compiler.py"
    spec = importlib.util.spec_from_file_location("pycoll_compiler", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(sysconfig, "get_config_var", {"CC": "pythons-own -pthread"}.get)
    return module


def put_program(name: str) -> None:
    path = Path(os.environ["PATH"], name)
    path.touch()
    path.chmod(0o755)


def test_without_a_compiler_the_build_asks_for_zig(compiler: ModuleType) -> None:
    (needed,) = compiler.requirements()
    assert needed.startswith("ziglang")


@pytest.mark.parametrize("name", ["pythons-own", "cc", "gcc", "clang", "mine"])
def test_with_a_compiler_the_build_asks_for_none(
    name: str, compiler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "mine":
        monkeypatch.setenv("CC", "mine -m64")
    put_program(name)
    assert compiler.requirements() == []


def test_the_compiler_in_cc_is_taken_before_others(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program("mine")
    put_program("pythons-own")
    monkeypatch.setenv("CC", "mine -m64")
    assert compiler.own_compiler() == "mine -m64"


def test_another_compiler_stands_in_for_one_that_is_not_there(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program("gcc")
    monkeypatch.setenv("CC", "mine -m64")
    assert compiler.own_compiler() is None
    assert compiler.command() == ["gcc"]


def test_zig_compiles_for_any_processor_and_an_old_glibc(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    zig = str(tmp_path / "ziglang" / "zig")
    for libc, target in (
        (("glibc", "2.39"), "x86_64-linux-gnu.2.28"),
        (("glibc", "2.17"), "x86_64-linux-gnu.2.17"),
        (("", ""), "x86_64-linux-musl"),
    ):
        monkeypatch.setattr("platform.libc_ver", lambda said=libc: said)
        assert compiler.command() == [zig, "cc", "-target", target]


def test_without_compiler_and_zig_the_build_says_what_to_install(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = compiler.what_is_missing()
    assert "\n" not in missing
    for words in ("no C compiler", "apt install gcc", "dnf install gcc", "pip install ziglang"):
        assert words in missing


def test_without_pythons_headers_the_build_says_what_to_install(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_program("cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    missing = compiler.what_is_missing()
    assert "\n" not in missing
    for words in ("Python.h", "apt install python3-dev", "dnf install python3-devel"):
        assert words in missing
    (tmp_path / "Python.h").touch()
    assert compiler.what_is_missing() is None


def test_where_the_core_cannot_be_built_the_build_ends_with_one_line(compiler: ModuleType) -> None:
    with pytest.raises(SystemExit, match="the compiled core cannot be built: the reason"):
        compiler.refuse_to_build("the reason")


def test_free_threaded_python_is_refused_by_the_build(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.refuse_free_threading()  # not this one
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(SystemExit, match=r"^pycoll: free-threaded CPython is not.*GIL.*$"):
        compiler.refuse_free_threading()


def test_free_threaded_python_is_refused_by_the_import() -> None:
    program = "import sys; sys.abiflags += 't'; import pycoll"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: pycoll does not run on free-threaded CPython: use a")


# ---------------------------------------------------------------- who imports whom


class Row(NamedTuple):
    """A row of the table in docs/design.md: packages, what they may import, other packages."""

    packages: list[str]
    inside: list[str]
    outside: list[str]


@functools.cache
def rows() -> list[Row]:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    table = text.split("| package |", 1)[1].split("\n\n", 1)[0]
    found = []
    for line in table.splitlines()[2:]:
        names, _, inside, outside = (cell.strip() for cell in line.strip("|").split("|"))
        words = [w.strip() for w in outside.split(",") if w.strip()]
        found.append(Row(re.findall(r"`([^`]+)`", names), re.findall(r"`([^`]+)`", inside), words))
    return found


def package_of(module: str) -> str:
    """`pycoll._launcher.spawn` -> `_launcher`; pycoll itself -> `__init__`."""
    return (*module.split("."), "__init__")[1]


def row_of(package: str) -> Row:
    found = [row for row in rows() if package in row.packages]
    assert len(found) == 1, f"docs/design.md: the table has {len(found)} rows for `{package}`"
    return found[0]


def test_the_table_of_imports_goes_down_only() -> None:
    above: list[str] = []
    for row in rows():
        for other in row.inside:
            assert other in above, f"`{row.packages[0]}` may not import `{other}`: not above it"
        above += row.packages
    assert set(above) == {package_of(module) for module in MODULES}


def test_a_module_imports_only_what_the_table_allows() -> None:
    wrong = []
    for module in sorted(MODULES):
        row = row_of(package_of(module))
        for imported in sorted(imports_of(MODULES[module]).every - {module}):
            top = imported.partition(".")[0]
            if top == "pycoll":
                allowed = package_of(imported) in row.packages + row.inside
            else:
                allowed = top in sys.stdlib_module_names or top in row.outside
            if not allowed:
                wrong.append(f"{module} may not import {imported}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    graph = {module: imports_of(path).runs_on - {module} for module, path in MODULES.items()}
    package = "pycoll._communicator"
    graph[f"{package}.communicator"].remove(f"{package}.grid")  # see docs/design.md
    order = graphlib.TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names one


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    bare = {"transports", "launcher", "tests", "conftest"}
    perhaps = re.compile(rf"^\s*(from|import)\b.*\b({'|'.join(bare)})\b", re.M)  # also in a text
    wrong = []
    for folder in ("pycoll", "transports", "launcher", "tests", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if perhaps.search(text) and bare & {n.split(".")[0] for n in imports_of(path).every}:
                wrong.append(str(path))
    assert not wrong, "\n".join(wrong)
