"""The sizes of a transformer, and the bytes of its activations by arithmetic.

What is counted is what PyTorch's eager kernels keep for backward and hold while they run, operator by
operator, as the definitions of the package ``transformers`` issue them: in bfloat16 an RMS norm computes in
float32 and keeps its input and its normalised values there, and logits are float32 for the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

RMS, LAYER = "rms", "layer"
GELU_OF_PARTS = "gelu_new"
"""GELU by the tanh formula, written out: each of its elementwise operators keeps an input."""
FLOAT32 = 4


class TokenBytes(NamedTuple):
    """Bytes for each token.

    Attributes:
        whole: the same on every tensor-parallel rank.
        split: those of all tensor-parallel ranks together.
    """

    whole: float = 0.0
    split: float = 0.0

    def __add__(self, other: tuple) -> TokenBytes:  # type: ignore[override]
        return TokenBytes(self.whole + other[0], self.split + other[1])

    def times(self, count: float) -> TokenBytes:
        return TokenBytes(self.whole * count, self.split * count)

    def on(self, tensor: int) -> float:
        """Return the bytes of one of ``tensor`` tensor-parallel ranks."""
        return self.whole + self.split / tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSizes:
    """The sizes of a transformer that reads one sequence of tokens and predicts tokens.

    Attributes:
        hidden: the width between layers. heads, key_heads: attention's, of queries and of keys and values;
            head_dim: the width of each.
        inner: the width inside a layer's feed-forward part; with experts, of each expert.
        gated: whether that part multiplies two products (SwiGLU, GeGLU). activation: its name in a
            ``config.json``.
        norm: ``rms`` or ``layer``. norms: those of a layer between its parts; head_norms: queries and keys
            are normed, too.
        biases: of the products, by their kind: those of ``qkv``, ``out`` and ``feed``.
        positions: rows of a learned table of positions; token_types: rows of a further table.
        tied: the head multiplies with the embedding's table.
        experts, chosen: the experts of a layer, and those that each token goes to; 0 for none.
            shared_inner: the width of the expert that every token goes to. dense_layers: layers that have
            no experts but a feed-forward part of width dense_inner.
        head_product: a product of width ``hidden`` and a norm stand before the head (BERT).
    """

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    gated: bool = True
    activation: str = "silu"
    norm: str = RMS
    norms: int = 2
    head_norms: bool = False
    biases: tuple[str, ...] = ()
    positions: int = 0
    token_types: int = 0
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    shared_inner: int = 0
    dense_layers: int = 0
    dense_inner: int = 0
    head_product: bool = False
    longest: int = 0

    # -- parameters -------------------------------------------------------------------------------

    @property
    def queries(self) -> int:
        """The width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads, which is that of the values."""
        return self.key_heads * self.head_dim

    @property
    def table(self) -> int:
        """The elements of the embedding's table, and of the head."""
        return self.vocabulary * self.hidden

    def _norm(self, width: int) -> int:
        return width * (2 if self.norm == LAYER else 1)

    def _feed(self, inner: int) -> int:
        bias = ((2 if self.gated else 1) * inner + self.hidden) * ("feed" in self.biases)
        return (3 if self.gated else 2) * self.hidden * inner + bias

    def _block(self, *, with_experts: bool) -> TokenBytes:
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        attention += (self.queries + 2 * self.keys) * ("qkv" in self.biases)
        whole = self.norms * self._norm(self.hidden) + self.hidden * ("out" in self.biases)
        whole += 2 * self._norm(self.head_dim) * self.head_norms
        if not with_experts:
            return TokenBytes(whole, attention + self._feed(self.dense_inner or self.inner))
        whole += self.hidden * self.experts + self.hidden * bool(self.shared_inner)
        shared = self._feed(self.shared_inner) if self.shared_inner else 0
        return TokenBytes(whole, attention + self.experts * self._feed(self.inner) + shared)

    @property
    def block(self) -> TokenBytes:
        """The parameters of the largest layer."""
        return self._block(with_experts=self.experts > 0)

    @property
    def parameters(self) -> TokenBytes:
        """All parameters; a tied one counts once."""
        dense = self.dense_layers if self.experts else self.layers
        found = self._block(with_experts=False).times(dense)
        found += self._block(with_experts=True).times(self.layers - dense)
        rest = (self.positions + self.token_types) * self.hidden + self._norm(self.hidden)
        if self.head_product:
            # BERT: an embedding norm beside that of the product before the head; its head has a bias.
            rest += self.hidden * (self.hidden + 1) + self._norm(self.hidden)
        return found + TokenBytes(
            rest, self.table * (1 if self.tied else 2) + self.vocabulary * self.head_product
        )

    # -- activations, in bytes for each token -----------------------------------------------------

    def kept_by_norm(self, element: int, *, handed_on: bool = True) -> TokenBytes:
        """Return what a norm keeps: its input, what it makes of it, and what it hands on to a product.

        An RMS norm keeps its input and its normalised values in float32 (``LlamaRMSNorm``).

        Args:
            element: bytes of a number in which operators compute.
        """
        own = 2 * FLOAT32 if self.norm == RMS else element
        return TokenBytes((own + element * handed_on) * self.hidden)

    def scores(self, element: int, sequence: int) -> float:
        """Return the bytes of attention's scores: none where a fused kernel keeps none. In float32, keys that
        several queries share have no such kernel.
        """
        return FLOAT32 * self.heads * sequence * (element == FLOAT32 and self.key_heads < self.heads)

    def kept_by_attention(self, element: int, sequence: int, *, core: bool = True) -> TokenBytes:
        """Return what attention keeps: queries, keys and values, and with its ``core`` the result with the
        logarithms of its sums."""
        if scores := self.scores(element, sequence):
            # Keys and values are repeated for each query head.
            own = element * 4 * self.queries + scores
            return TokenBytes(0, own if core else element * (self.queries + 2 * self.keys))
        own = element * (self.queries + 2 * self.keys)
        if core:
            own += element * self.queries + FLOAT32 * self.heads
        if self.head_norms:
            own += 2 * FLOAT32 * (self.queries + self.keys)
        return TokenBytes(0, own)

    def _kept_by_feed(self, element: int, inner: int) -> TokenBytes:
        if self.gated:
            return TokenBytes(0, 4 * element * inner)
        if self.activation == GELU_OF_PARTS:
            return TokenBytes(0, (4 * FLOAT32 + element) * inner)
        return TokenBytes(0, (1 if self.activation == "relu" else 2) * element * inner)

    def kept_by_layer(self, element: int, sequence: int, *, core: bool = True) -> TokenBytes:
        """Return what the largest layer keeps for backward; the others are counted as if like it."""
        # Behind a part, a norm hands on to a sum, which keeps nothing.
        kept = self.kept_by_norm(element).times(2)
        kept += self.kept_by_norm(element, handed_on=False).times(self.norms - 2)
        kept += self.kept_by_attention(element, sequence, core=core)
        if not self.experts:
            return kept + self._kept_by_feed(element, self.inner)
        # The router's softmax; per chosen expert a row that is sent and one that returns, and their order.
        kept += TokenBytes(FLOAT32 * self.experts + self.chosen * (2 * element * self.hidden + 32))
        kept += self._kept_by_feed(element, self.inner).times(self.chosen)
        return kept + self._kept_by_feed(element, self.shared_inner)

    def boundary(self, element: int) -> float:
        """Return what is kept between two layers that run again in backward."""
        # An RMS norm's float32 copy is made behind the sum that ends a layer, and not again.
        return (element + self.wide(element)) * self.hidden

    def wide(self, element: int) -> int:
        """Return the bytes of a number of the float32 copy that a norm computes with; 0 if it makes none."""
        return FLOAT32 if self.norm == RMS and element < FLOAT32 else 0

    def kept_by_end(self, element: int) -> float:
        """Return what is kept between the last layer and the loss, without the loss's own."""
        extra = 4 * element * self.hidden if self.head_product else 0.0
        return self.kept_by_norm(element).whole + extra

    def work_in_layer(self, element: int, tensor: int, tokens: float, *, matrix: bool) -> float:
        """Return the bytes that a layer's backward holds while it runs, besides what was kept.

        Args:
            tokens: those of the micro-batch.
            matrix: the gradient of a matrix has memory of its own, which the optimizer does not see.
        """
        inner = self.inner * max(1, self.chosen) * tokens / tensor
        # The norm behind a layer makes float32 copies while all of the layer is kept.
        norm = (4 * FLOAT32 if self.norm == RMS else element) * self.hidden * tokens
        # By then the input of the product behind it is gone.
        activation = (3 * FLOAT32 - element) * inner * (self.activation == GELU_OF_PARTS)
        # The first matrices of all experts have one gradient.
        largest = self.hidden * self.inner * (2 * self.experts or 1) / tensor
        return max(norm, activation, element * (inner + largest * matrix))
