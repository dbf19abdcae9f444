"""One decoder-only transformer described by data: what the importer checks, the loader fuses and the engine runs.

Pure. `families.py` reads it from a `config.json`, `tensor_names.py` says which tensors it has.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: `kind` is transformers' rope_type, `values` its other numbers.

    `divisors` has one divisor per frequency, for the kind "longrope" alone.
    """

    kind: str
    values: tuple[tuple[str, float], ...] = ()
    divisors: tuple[float, ...] = ()

    def value(self, name: str, default: float) -> float:
        return dict(self.values).get(name, default)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shapes and switches of a decoder. Shape letters as in DESIGN.md: L layers, M model dim, H heads, K kv heads,
    D head dim, F ffn dim, V vocab. `no_rope_layers` and `sliding_layers` list layer indices."""

    family: str
    architecture: str
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_context_tokens: int
    dtype: str
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    activation: str = "silu"
    """transformers' name of it: silu, gelu, gelu_new, gelu_pytorch_tanh or relu."""
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    no_rope_layers: tuple[int, ...] = ()
    layout: str = "llama"
    """Row of `tensor_names.LAYOUTS`: which norms surround a layer's two halves, and what its tensors are called."""
    is_gated: bool = True
    """The feed-forward half is down(act(gate) · up), otherwise down(act(up))."""
    is_layer_norm: bool = False
    """Norms subtract the mean and have a bias, otherwise they are RMS norms."""
    norm_offset: float = 0.0
    """Added to every norm weight before it multiplies (Gemma: 1)."""
    is_qk_norm_wide: bool = False
    """Query and key norms span all heads of a token, otherwise each head by itself."""
    is_transposed: bool = False
    """Projections are stored [in, out] (GPT-2's Conv1D)."""
    learned_positions: int = 0
    """Rows of the table of learned positions; 0: there is none."""
    position_offset: int = 0
    """Row of the table that position 0 has (OPT: 2)."""
    rotary_dim: int | None = None
    """Leading dims of each head that rope turns; None: all D."""
    sliding_rope_theta: float | None = None
    """Base of the unscaled rope of `sliding_layers`, where it is their own (Gemma 3)."""
    embedding_scale: float = 1.0
    is_embedding_scale_rounded: bool = False
    """The scale is rounded to the compute dtype before it multiplies (Gemma)."""
    residual_scale: float = 1.0
    """Multiplies what each half of a layer adds to the residual stream (Granite)."""
    attention_scale: float | None = None
    """Multiplies attention scores; None: D^-½."""
    attention_softcap: float | None = None
    """Scores s become c·tanh(s/c) before the mask (Gemma 2)."""
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    generic_config: str = ""
    """The whole config.json of a decoder that is not described (layout "generic"): transformers' modules run it."""

    @property
    def kv_values_per_token(self) -> int:
        """Numbers (not bytes) that one position keeps in the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def query_dim(self) -> int:
        """H·D: columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """K·D: columns of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
