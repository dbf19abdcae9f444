"""The Python SDK: `Client(url).function("name").remote("text")`, with asynchronous twins."""

from nearline.client.blocking import Call, Client, Function
from nearline.client.functions import AsyncCall, AsyncClient, AsyncFunction
from nearline.client.types import Output

__all__ = ["AsyncCall", "AsyncClient", "AsyncFunction", "Call", "Client", "Function", "Output"]
