"""Loads PyTorch's distributed suite, which lies in its wheel, for one plan."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import mmap
import os
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.common_distributed as common

from tests.conformance import cuda_on_cpu, disguise
from tests.conformance.plan import Plan

NAME = "torch.testing._internal.distributed.distributed_test"
GROUP_TIMEOUT_S = 40
BARRIER_TIMEOUT_S = 60
"""The suite's own barrier, of files, gives up after 10 s, which a busy machine may need to start the ranks."""


class Marks:
    """What a test really used, noted by its ranks in memory that they share with the runner."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2)

    def clear(self) -> None:
        self._memory[:] = b"\0\0"

    def note_ddp(self) -> None:
        self._memory[0] = 1

    def note_group(self) -> None:
        self._memory[1] = 1

    @property
    def ddp(self) -> bool:
        return self._memory[0] != 0

    @property
    def group(self) -> bool:
        return self._memory[1] != 0


@dataclass(frozen=True)
class Suite:
    """The loaded suite."""

    plan: Plan
    module: types.ModuleType
    case: type
    marks: Marks

    @property
    def names(self) -> list[str]:
        return sorted(name for name in dir(self.case) if name.startswith("test"))


def load(plan: Plan) -> Suite:
    """The suite for the plan. Once per process: it changes torch for good where the plan says so.

    Raises:
        RuntimeError: this torch's suite is another one than what this runner knows.
    """
    torch.set_num_threads(1)
    marks = Marks()
    real = _backend_name(plan)
    _note_groups(plan.backend, marks)
    _take_ddp_class(plan, marks)
    if plan.answers_as is not None:
        disguise.answer_as(plan.backend, plan.answers_as)
    os.environ.update(
        BACKEND=plan.backend,
        WORLD_SIZE=str(plan.world_size),
        MASTER_ADDR="127.0.0.1",
        INIT_METHOD="file://",  # of this kind; each test gets a file of its own
    )
    module = _load(real)
    module.default_pg_timeout = GROUP_TIMEOUT_S  # type: ignore[attr-defined]
    sync = module.Barrier.sync.__func__
    sync.__defaults__ = (None, BARRIER_TIMEOUT_S)
    case = types.new_class("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase))
    return Suite(plan, module, case, marks)


def _backend_name(plan: Plan) -> str:
    if plan.backend == plan.like:
        return plan.backend
    common.DistTestCases.backend_feature["plugin"].add(plan.backend)
    return disguise.TwoNames(plan.backend, plan.like)


def _note_groups(backend: str, marks: Marks) -> None:
    plugins = dist.Backend._plugins
    plugin = plugins.get(backend.upper())
    if plugin is None:
        return

    def create(*args: Any, **kwargs: Any) -> Any:
        marks.note_group()
        return plugin.creator_fn(*args, **kwargs)

    plugins[backend.upper()] = plugin._replace(creator_fn=create)


def _take_ddp_class(plan: Plan, marks: Marks) -> None:
    where, _, name = plan.ddp_class.partition(":")
    chosen = getattr(importlib.import_module(where), name)
    make = chosen.__init__

    @functools.wraps(make)
    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        marks.note_ddp()
        make(self, *args, **kwargs)

    chosen.__init__ = make_and_note
    torch.nn.parallel.DistributedDataParallel = chosen
    torch.nn.parallel.distributed.DistributedDataParallel = chosen
    if plan.cuda_on_cpu:
        cuda_on_cpu.prepare(plan.world_size, chosen)


class _NamedBackend(ast.NodeTransformer):
    """`BACKEND = os.environ["BACKEND"]`, at the top of the suite, becomes `BACKEND = _conformance_backend`."""

    found = 0

    def visit_Module(self, node: ast.Module) -> ast.Module:
        for statement in node.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement) == "BACKEND = os.environ['BACKEND']":
                statement.value = ast.copy_location(ast.Name("_conformance_backend", ast.Load()), statement.value)
                self.found += 1
        return node


def _load(backend: str) -> types.ModuleType:
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"torch {torch.__version__} has no {NAME}: this installation came without torch.testing")
    with open(spec.origin, "rb") as file:
        tree = ast.parse(file.read(), spec.origin)
    changed = _NamedBackend()
    tree = changed.visit(tree)
    if changed.found != 1:
        raise RuntimeError(
            f"{spec.origin} of torch {torch.__version__} takes the backend's name in another way than "
            f"`BACKEND = os.environ['BACKEND']`, once; tests/conformance/suite.py has to learn it"
        )
    module = importlib.util.module_from_spec(spec)
    module.__dict__["_conformance_backend"] = backend
    sys.modules[NAME] = module
    # Without dont_inherit this file's `from __future__ import annotations` would hold in the suite too.
    exec(compile(tree, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module
