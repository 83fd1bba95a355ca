"""Why a host could not be started over ssh, in words that name the host and what to do."""

from __future__ import annotations

import re
import sys

_SSH_FAILED = 255
# What ssh says -> what it means, what to do. {host} is the destination, {ssh} the user's command for it.
_SSH_WORDS = {
    r"could not resolve hostname|name or service not known|temporary failure in name resolution": "its name is not "
    "known here (ssh: {said}). Look for a slip in the host file, or give an address.",
    r"connection refused": "it refuses connections: no ssh server listens there (ssh: {said}). Start sshd on it, or "
    "name its port with --ssh-port.",
    r"banner exchange": "something accepts connections there, but it does not answer as an ssh server does (ssh: "
    "{said}). Name the right port with --ssh-port.",
    r"connection timed out|operation timed out|no route to host|network is unreachable|host is down": "it cannot be "
    "reached (ssh: {said}). Look whether it is up and in this network, or leave it out with --exclude {name}.",
    r"remote host identification has changed": "its host key has changed since it was last seen: it was set up anew, "
    "or another machine answers (ssh: {said}). If you know why, `ssh-keygen -R {name}` forgets the old key; then log "
    "in once by hand: {ssh} {host}",
    r"host key verification failed|no .*host key is known": "its host key is not known here, so it could be another "
    "machine (ssh: {said}). Log in once by hand and accept the key: {ssh} {host}",
    r"permission denied": "it refuses to let this user in without a password (ssh: {said}). Put your public key "
    "there: ssh-copy-id {host} (then `{ssh} {host} true` must work without a question).",
    r"too many authentication failures": 'it was offered too many keys (ssh: {said}). Name the right one: --ssh "ssh '
    '-o IdentitiesOnly=yes -i KEY"',
    r"bad owner or permissions|unprotected private key file": "ssh refuses a file of yours because others could write "
    "or read it (ssh: {said}). Take away their rights with chmod, as ssh says.",
    r"connection (closed|reset) by|kex_exchange_identification": "it closed the connection before anything was said "
    "(ssh: {said}). Its ssh server may be overloaded (MaxStartups) or refuse this address; its log says why.",
    r"timeout, server .* not responding|broken pipe|client_loop|connection to .* closed": "the connection to it was "
    "lost (ssh: {said}). Look whether it is still up.",
}


def trouble(destination: str, ssh: str, status: int, said: str, printed: str) -> str:
    """One message on why `remote` did not start there, or was lost.

    `ssh`, the user's command, ended with `status` (or minus a signal), `said` on stderr and `printed` on stdout.
    """
    name = destination.rpartition("@")[2]
    last = _last_line(said) or _last_line(printed)
    lowered = said.lower()
    if status == _SSH_FAILED:
        for pattern, told in _SSH_WORDS.items():
            if re.search(pattern, lowered):
                return f"host {name}: {told.format(said=last, host=destination, name=name, ssh=ssh)}"
        return f"host {name}: ssh failed: {last or 'it said nothing'}. Try by hand: {ssh} {destination} true"
    if re.search(r"no module named '?photinus", lowered):
        older = "photinus.launcher" in lowered
        what = "an older version of Photinus, which cannot be started from elsewhere" if older else "no Photinus"
        return (
            f"host {name}: its {sys.executable} has {what}. Install the version that runs here: {ssh} {destination} "
            f"{sys.executable} -m pip install ..."
        )
    if status == 127 or re.search(r"not found|no such file", lowered):
        return (
            f"host {name}: there is no {sys.executable}, the Python that runs here. All hosts need the same "
            f"environment at the same path: install it there, or share its folder."
        )
    if status == 126 or "permission denied" in lowered:
        return f"host {name}: {sys.executable} may not be run by this user ({last})."
    ending = f"was killed by signal {-status}" if status < 0 else f"ended with code {status}"
    return f"host {name}: the command there {ending} before it began" + (f": {last}" if last else ".")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200].removeprefix("ssh: ") if lines else ""
