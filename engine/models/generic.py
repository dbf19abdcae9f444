"""Decoders that no DecoderSpec describes: transformers' own modules, with our paged attention in place of theirs.

Imported only when such a checkpoint is bound. Nothing is fused, adapters are not served, the weights stay views.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from nearline import kernels
from nearline.engine.kv_cache import KVCache
from nearline.engine.models.layers import Weights
from nearline.engine.models.lora import HeadPlan, LoraPlan
from nearline.kernels import AttentionMeta
from nearline.protocol import DecoderSpec
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

_ATTENTION = "nearline_paged"


@dataclass(frozen=True, slots=True)
class _Step:
    """What attention needs of the step under way, whichever module calls it."""

    slots_T: Tensor
    meta: AttentionMeta
    kv: KVCache


_step: ContextVar[_Step] = ContextVar("step")


class GenericDecoder:
    """The same door as Decoder, in front of a causal language model of transformers.

    The module is made at the first forward pass, when all bytes have come. Not thread-safe.
    """

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        """Check names and shapes against the module's. Raises CheckpointCorrupt, or UnsupportedCheckpoint."""
        _register()
        self._weights, self._dtype, self._device = weights, dtype, device
        self._class = getattr(transformers, spec.architecture, None)
        if self._class is None:
            version = transformers.__version__
            raise UnsupportedCheckpoint(f"transformers {version} has no {spec.architecture}; install a later one")
        self._config = self._class.config_class.from_dict(json.loads(spec.generic_config))
        with torch.device("meta"):
            skeleton = self._class(self._config)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
        self._check_shapes()
        self._model: Any = None
        self._head: Any = None
        self._hidden = _Given()

    def reserve_positions(self, num_positions: int) -> None:
        """Nothing to do: the modules compute what they need of positions."""

    @torch.inference_mode()
    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        meta: AttentionMeta,
        kv: KVCache,
        lora: LoraPlan | None = None,
    ) -> Tensor:
        """Compute the final, normalised hidden state of every token and store its keys and values. Shapes: [T, M].

        Raises CheckpointCorrupt if the bytes of the model cannot come.
        """
        if self._model is None:
            self._load()
        with _running(_Step(slots_T, meta, kv)):
            output = self._model.base_model(
                input_ids=token_ids_T.long()[None], position_ids=positions_T.long()[None], use_cache=False
            )
        hidden_TM: Tensor = output.last_hidden_state[0]
        return hidden_TM

    @torch.inference_mode()
    def logits(self, hidden_BM: Tensor, heads: HeadPlan | None = None) -> Tensor:
        """Project hidden states onto the vocabulary, scaled and capped as the family does. Shapes: [B, V] in fp32."""
        self._hidden.state_1BM = hidden_BM[None]
        logits: Tensor = self._head(input_ids=None, use_cache=False).logits[0]
        return logits.float()

    def _check_shapes(self) -> None:
        for name, wanted in self._shapes.items():
            found = tuple(self._weights.tensor(name).shape)
            if found != wanted:
                raise CheckpointCorrupt(f"tensor {name!r} has shape {list(found)}, config.json says {list(wanted)}")

    def _load(self) -> None:
        self._weights.wait_for(list(self._shapes))
        tensors = {name: self._weights.tensor(name) for name in self._shapes}
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        place = {} if self._device.type == "cpu" else {"device_map": str(self._device)}
        assert self._class is not None
        self._model = self._class.from_pretrained(
            None, config=self._config, state_dict=tensors, dtype=self._dtype, attn_implementation=_ATTENTION, **place
        )
        # The model again, its layers replaced by hidden states that are given: what remains is head, scale and cap.
        self._head = copy.copy(self._model)
        self._head._modules = {**self._model._modules, self._model.base_model_prefix: self._hidden}


class _Given(nn.Module):
    """Stands where the layers stood and answers with `state_1BM`."""

    state_1BM: Tensor

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return BaseModelOutputWithPast(last_hidden_state=self.state_1BM)


@contextmanager
def _running(step: _Step) -> Iterator[None]:
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _register() -> None:
    transformers.AttentionInterface.register(_ATTENTION, _attend)
    # Our attention knows where each sequence begins; a mask would be [T, T].
    transformers.AttentionMaskInterface.register(_ATTENTION, lambda *_args, **_kwargs: None)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers asks: [1, H, T, D] queries, [1, K, T, D] keys and values; returns [1, T, H, D]."""
    step = _step.get()
    k_cache, v_cache = step.kv.layers[module.layer_idx]
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).to(k_cache.dtype).contiguous() for x in (query, key, value))
    if k_TKD.shape[1:] != (k_cache.shape[1], k_cache.shape[3]) or k_TKD.shape != v_TKD.shape:
        raise UnsupportedCheckpoint(
            f"{type(module).__name__} has keys of {list(k_TKD.shape[1:])} and values of {list(v_TKD.shape[1:])}, "
            f"config.json promises {[k_cache.shape[1], k_cache.shape[3]]} for both"
        )
    scaling, window, softcap = (options.get(name) for name in ("scaling", "sliding_window", "softcap"))
    scale = q_THD.shape[-1] ** -0.5 if scaling is None else float(scaling)
    kernels.write_kv(k_TKD, v_TKD, k_cache, v_cache, step.slots_T)
    o_THD = kernels.paged_attention(q_THD, k_cache, v_cache, step.meta, scale, window, softcap)
    return o_THD[None].to(query.dtype), None
