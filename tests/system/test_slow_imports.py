"""An import that takes its time: who removes its name meanwhile ends it, on the node too."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nearline.protocol.errors import Cancelled, ModelNotFound, NearlineError
from tests.system.conftest import RunningPlatform, eventually, register


@pytest.fixture
def silent_url() -> Iterator[tuple[str, list[socket.socket]]]:
    """A web server that accepts and never answers; the connections it has."""
    connections: list[socket.socket] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def accept() -> None:
            while True:
                try:
                    connections.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/model", connections
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


def is_left(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.settimeout(0.0)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("kind", ["models", "adapters"])
def test_removing_a_name_during_its_import_ends_the_import(
    platform: RunningPlatform, tiny_model: Path, silent_url: tuple[str, list[socket.socket]], kind: str
) -> None:
    url, connections = silent_url
    failed: list[NearlineError] = []
    with platform.client() as client, platform.client() as other:
        base = {"base": "slow-base"} if kind == "adapters" else {}
        if base:
            register(client, "slow-base", tiny_model)

        def add() -> None:
            try:
                list(client.admin.add(kind, {"name": "slow", "source": url, **base}))
            except NearlineError as error:
                failed.append(error)

        adding = threading.Thread(target=add)
        adding.start()
        assert eventually(lambda: bool(connections))
        other.admin.remove(kind, "slow")
        adding.join(timeout=60.0)
        assert [type(error) for error in failed] == [Cancelled]
        assert "was removed while it was being registered" in failed[0].message
        assert eventually(lambda: all(map(is_left, connections))), "the importing process has gone"
        with pytest.raises(ModelNotFound):
            other.admin.remove(kind, "slow")
        if base:
            other.admin.remove("models", "slow-base")
