"""Which code runs a checkpoint: the decoder described by data, or transformers' modules for one that is not."""

from typing import TYPE_CHECKING

import torch

from nearline.engine.models.decoder import Decoder
from nearline.engine.models.layers import WeightReader, Weights, check_shapes
from nearline.protocol import DecoderSpec
from nearline.protocol.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from nearline.engine.models.generic import GenericDecoder


def decoder_of(
    spec: DecoderSpec, weights: Weights, dtype: torch.dtype, device: torch.device
) -> "Decoder | GenericDecoder":
    """Make the decoder of a checkpoint without waiting for its bytes.

    Raises CheckpointCorrupt for tensors that are not the spec's, UnsupportedCheckpoint where transformers is needed
    and missing.
    """
    if spec.layout != "generic":
        check_shapes(spec, weights)
        return Decoder(spec, WeightReader(spec, weights, dtype, device), dtype, device)
    try:
        # transformers takes seconds to import, and only such a checkpoint needs it.
        from nearline.engine.models.generic import GenericDecoder
    except ImportError as missing:
        raise UnsupportedCheckpoint(
            f"{spec.architecture} runs through transformers, which this node lacks ({missing}); install "
            "nearline[generic] there"
        ) from None
    return GenericDecoder(spec, weights, dtype, device)
