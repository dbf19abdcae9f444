"""A disk too small for all models: the one that is called is fetched again, and answers what it answered before."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nearline.protocol.errors import StorageFull
from tests.checkpoint_store.web import web
from tests.system.conftest import eventually, register, running


@pytest.mark.slow
def test_a_model_that_made_room_is_fetched_when_it_is_called(
    tmp_path: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    for seed in (1, 2):
        shutil.copytree(tiny_llama_dir(seed=seed), tmp_path / "web" / f"m{seed}")
    size = (tmp_path / "web" / "m1" / "model.safetensors").stat().st_size
    with (
        web(tmp_path / "web") as server,
        running(tmp_path / "data", "--ssd-budget", str(size + 1_400_000)) as platform,
        platform.client() as client,
    ):

        def ask(name: str) -> str:
            return client.function(name).remote("hello", max_tokens=4, temperature=0).text

        def is_remote(name: str) -> bool:
            return eventually(lambda: client.admin.show("models", name)["tier"] == "remote")

        register(client, "first", f"{server.url}/m1", keep_alive_s=0)
        answer = ask("first")
        register(client, "second", f"{server.url}/m2", keep_alive_s=0)
        assert is_remote("first")
        other = ask("second")
        for _ in range(2):
            assert ask("first") == answer
            assert is_remote("second")
            assert ask("second") == other
        with pytest.raises(StorageFull, match=r"the import needs \d+ bytes"):
            register(client, "third", tiny_llama_dir(hidden_size=256, intermediate_size=1024))
        assert ask("first") == answer
