"""Where `pycoll status` and `pycoll top` reach a job: a Unix socket in a folder of its user alone.

The folder is pycoll in XDG_RUNTIME_DIR, or else /tmp/pycoll-UID, which nobody else may enter. Each
end makes sure that the other is of the same user. A question is one message, JSON; the answer is a
byte, and with it the descriptor of a memfd that holds JSON, which may be as long as it likes: so
neither end ever waits for the other in the middle of a message.

The launcher removes its socket at its end, or the guardian if the launcher was killed, or, if both
were, who looks for jobs next.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
from collections.abc import Callable
from typing import Any

QUESTION_NBYTES = 4096
_MAX_ASKERS = 16
_TRIES = 3  # a job that ends removes the folder between two steps of one that begins


def folders() -> list[str]:
    """Return the folders in which sockets of this user's jobs may be, the best first."""
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [f"{runtime}/pycoll"] if runtime.startswith("/") else []
    # A job that was started where that variable is not set, or set to something else.
    return list(dict.fromkeys([*found, f"/run/user/{uid}/pycoll", f"/tmp/pycoll-{uid}"]))


def is_private(folder: str) -> bool:
    """Whether this is a folder of this user's that nobody else may enter."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_mine and not status.st_mode & 0o077


class Asker:
    """Who has asked something, and waits for the answer."""

    def __init__(self, connection: socket.socket, question: dict[str, Any]) -> None:
        self._connection: socket.socket | None = connection
        self.question = question

    def answer(self, found: object) -> None:
        """Answer, and close the connection; only the first call counts."""
        import json

        connection, self._connection = self._connection, None
        if connection is None:
            return
        with connection, contextlib.suppress(OSError):  # who asked has gone, or memory is short
            memory = os.memfd_create("answer.pycoll", os.MFD_CLOEXEC)
            with open(memory, "wb", buffering=0) as file:
                file.write(json.dumps(found).encode())
                socket.send_fds(connection, [b"!"], [memory], socket.MSG_DONTWAIT)


class JobSocket:
    """The launcher's end.

    Args:
        job: the job's id.
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        asked: called with who has asked something.

    Attributes:
        path: of the socket; "": there is none, as no folder can be used.
    """

    def __init__(
        self, job: str, selector: selectors.BaseSelector, asked: Callable[[Asker], object]
    ) -> None:
        self._selector, self._asked = selector, asked
        self._askers: list[socket.socket] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self.path = ""
        for folder in folders():
            with contextlib.suppress(OSError):
                self.path = _bind(self._socket, folder, f"{os.getpid()}.{job[:8]}")
                self._socket.listen(_MAX_ASKERS)
                selector.register(self._socket, selectors.EVENT_READ, self._let_in)
                return

    def close(self) -> None:
        """Remove the socket, and leave who has asked without an answer; may be called again."""
        for connection in (*self._askers, self._socket):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection)
            connection.close()
        self._askers.clear()
        if self.path:
            forget(self.path)
            self.path = ""

    def _let_in(self) -> None:
        from pycoll._launcher.agent_socket import peer_of  # not sooner: few jobs are asked

        try:
            connection = self._socket.accept()[0]
        except OSError:
            return
        try:
            peer_of(connection)
        except OSError:
            return connection.close()
        connection.setblocking(False)
        self._askers.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection))
        if len(self._askers) > _MAX_ASKERS:
            self._leave(self._askers[0]).close()

    def _hear(self, connection: socket.socket) -> None:
        import json

        try:
            question = json.loads(connection.recv(QUESTION_NBYTES))
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):  # gone, or it is nothing that we know
            question = None
        self._leave(connection)
        if isinstance(question, dict):
            self._asked(Asker(connection, question))
        else:
            connection.close()

    def _leave(self, connection: socket.socket) -> socket.socket:
        self._askers.remove(connection)
        self._selector.unregister(connection)
        return connection


def _bind(end: socket.socket, folder: str, name: str) -> str:
    """Bind a socket in a folder, which is made if it is not there; returns its path.

    Raises:
        OSError: the folder cannot be used.
    """
    path = f"{folder}/{name}"
    if "\n" in path:  # the guardian is told in a line
        raise OSError(f"{path!r} is not one line")
    for attempt in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if not is_private(folder):
            raise PermissionError(f"{folder} is not a folder of this user alone")
        try:
            end.bind(path)
            break
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise
    return path


def forget(path: str) -> None:
    """Remove the socket of a job that has ended, and the folder if it was the last."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def ask(path: str, question: dict[str, Any], timeout_s: float) -> Any:
    """Return what a job answers.

    Raises:
        ConnectionRefusedError: nobody is there any more.
        TimeoutError: it does not answer in time.
        OSError: it cannot be asked, or it is not of this user.
    """
    import json

    from pycoll._launcher.agent_socket import peer_of

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        peer_of(connection)
        connection.send(json.dumps(question).encode())
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not data or not descriptors:
            raise ConnectionRefusedError("the job ends")
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            return json.load(file)
