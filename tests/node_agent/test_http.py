"""What a node serves over HTTP, and above all what it does not."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import xxhash

from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.controller.imports import FileFetcher
from nearline.controller.state import Fleet, NodeRecord
from nearline.node_agent.http import NodeHttp
from nearline.protocol import CheckpointInfo, Digest, NodeId
from nearline.protocol.errors import NotFound
from tests.controller.fleets import report


@pytest.fixture
def store(data_dir: Path) -> CheckpointStore:
    return CheckpointStore(StoreConfig(root=data_dir / "store", dram_pool_bytes=1 << 25, touch_ahead_bytes=0))


@pytest.fixture
async def url(store: CheckpointStore) -> AsyncIterator[str]:
    http = NodeHttp(store, None, lambda: {"status": "ok"})
    port = await http.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await http.close()
    store.close()


async def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    # encoded=True keeps %2e%2e and friends as an attacker would send them
    from yarl import URL

    async with aiohttp.ClientSession() as session, session.get(URL(url, encoded=True), headers=headers) as answer:
        return answer.status, await answer.read(), dict(answer.headers)


async def test_text_files_of_a_checkpoint_are_served(
    url: str, data_dir: Path, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    info, root = stored_checkpoint
    for name in info.files:
        status, body, _ = await get(f"{url}/checkpoints/{info.digest}/files/{name}")
        assert status == 200
        assert body == (root / "checkpoints" / info.digest / name).read_bytes()


async def test_the_controller_fetches_a_file_in_a_folder(
    url: str, store: CheckpointStore, data_dir: Path, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    info = stored_checkpoint[0]
    name = "additional_chat_templates/tool use.jinja"
    directory = data_dir / "store" / "checkpoints" / info.digest
    (directory / name).parent.mkdir()
    (directory / name).write_text("{{ messages }}")
    manifest = store.manifest(info.digest)
    listed = replace(manifest, info=replace(manifest.info, files=(*info.files, name)))
    store._manifests[info.digest] = listed
    fleet = Fleet()
    fleet.nodes[NodeId("n1")] = NodeRecord(report(http_url=url, residency=store.residency()))
    fleet.nodes[NodeId("n1")].apply(fleet.nodes[NodeId("n1")].report)
    fetcher = FileFetcher(fleet, "")
    try:
        assert await fetcher.fetch(info.digest, name) == b"{{ messages }}"
        with pytest.raises(NotFound):
            await fetcher.fetch(info.digest, "additional_chat_templates/../manifest.json/x")
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    "name",
    ["..%2f..%2f..%2fagent.lock", "%2e%2e/manifest.json", "model.safetensors", "%2fetc%2fpasswd", "config.json%00"],
)
async def test_nothing_else_is(url: str, name: str, stored_checkpoint: tuple[CheckpointInfo, Path]) -> None:
    status, body, _ = await get(f"{url}/checkpoints/{stored_checkpoint[0].digest}/files/{name}")
    assert status == 404
    assert b"error" in body


@pytest.mark.parametrize("digest", ["0" * 32, "..", "%2e%2e%2f", "Z" * 32])
async def test_unknown_checkpoints_are_not_found(url: str, digest: str) -> None:
    assert (await get(f"{url}/checkpoints/{digest}/files/config.json"))[0] == 404


async def test_chunks_carry_the_bytes_their_digests_name(
    url: str, store: CheckpointStore, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    manifest = store.manifest(Digest(stored_checkpoint[0].digest))
    base = f"{url}/checkpoints/{manifest.digest}/chunks"
    data = b""
    for index, digest in enumerate(manifest.chunk_digests):
        status, body, _ = await get(f"{base}/{index}")
        assert status == 200
        assert xxhash.xxh3_128_hexdigest(body) == digest
        data += body
    assert len(data) == manifest.num_bytes
    status, part, headers = await get(f"{base}/0", Range="bytes=100-199")
    assert (status, part) == (206, data[100:200])
    assert headers["Content-Range"].startswith("bytes 100-199/")
    assert (await get(f"{base}/0", Range="bytes=-10"))[1] == data[: manifest.chunk_bytes][-10:]
    assert (await get(f"{base}/0", Range="bytes=999999999-"))[0] == 416
    for index in (len(manifest.chunk_digests), -1, "x"):
        assert (await get(f"{base}/{index}"))[0] == 404


async def test_with_a_token_only_health_is_open(
    store: CheckpointStore, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    http = NodeHttp(store, "secret", lambda: {"status": "ok"})
    port = await http.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    path = f"{url}/checkpoints/{stored_checkpoint[0].digest}/files/config.json"
    assert (await get(f"{url}/health"))[0] == 200
    assert (await get(path))[0] == 401
    assert (await get(path, Authorization="Bearer wrong"))[0] == 401
    assert (await get(path, Authorization="Bearer secret"))[0] == 200
    await http.close()
    store.close()
