"""A real ssh server for a test: on a port of its own, with keys of its own, for this user; nothing of it is left.

    with ssh_server(tmp_path, host=second) as server:
        run_job("--ssh", server.ssh, "--hostfile", ...)

Needs root and Debian's openssh-server (`apt-get install openssh-server`); skips, with the reason, where it is missing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.netns import NetworkHost

__all__ = ["SshServer", "ssh_server"]

_SSHD = "/usr/sbin/sshd"
_PRIVILEGES = Path("/run/sshd")  # sshd insists on this empty folder
_PORT = 2222
_START_S = 10.0
_CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
{more}
"""


@dataclass(frozen=True)
class SshServer:
    """A running server. `ssh` is the command that reaches it (and others with the same keys)."""

    address: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def ssh(self) -> str:
        known = shlex.quote(f"UserKnownHostsFile={self.folder}/known_hosts")
        return (
            f"ssh -F /dev/null -p {self.port} -i {shlex.quote(str(self.folder / 'key'))} -o IdentitiesOnly=yes "
            f"-o GlobalKnownHostsFile=/dev/null -o {known}"
        )


@contextlib.contextmanager
def ssh_server(
    folder: Path, *, host: NetworkHost | None = None, more: str = "", before: Sequence[str] = ()
) -> Iterator[SshServer]:
    """A server on this machine's loopback, or on a host.

    Args:
        folder: for keys and configuration; the same folder means the same keys.
        more: further lines of sshd_config.
        before: a command in front of sshd, which runs it with its last arguments.
    """
    if os.geteuid() != 0:
        pytest.skip("an ssh server for a test needs root")
    if not Path(_SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip(f"{_SSHD} or ssh is not installed (Debian: apt-get install openssh-server)")
    address, port = ("127.0.0.1", _free_port()) if host is None else (host.address, _PORT)
    _make_keys(folder, f"[{address}]:{port}", [] if host is None else [f"[{host.name}]:{port}"])
    config = folder / f"sshd_config_{address}"
    config.write_text(_CONFIG.format(port=port, address=address, folder=folder, more=more))
    made_folder = not _PRIVILEGES.exists()
    _PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
    words = [*before, _SSHD, "-D", "-e", "-f", str(config)]
    log = folder / f"sshd_log_{address}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words if host is None else host.command(words), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        _wait_for(process, log)
        yield SshServer(address, port, folder, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if made_folder:
            with contextlib.suppress(OSError):
                _PRIVILEGES.rmdir()


def _make_keys(folder: Path, name: str, others: Sequence[str]) -> None:
    for key in ("host_key", "key"):
        if not (folder / key).exists():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, timeout=20)
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    kind, public, *_ = (folder / "host_key.pub").read_text().split()
    with (folder / "known_hosts").open("a") as known:
        known.write("".join(f"{each} {kind} {public}\n" for each in (name, *others)))


def _wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while "Server listening" not in log.read_text():
        assert process.poll() is None, f"sshd ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"sshd does not listen:\n{log.read_text()}"
        time.sleep(0.01)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
