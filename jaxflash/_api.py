"""The public operation: arguments in, checked and sorted by `_spec`, computed by `_derivatives`."""

from __future__ import annotations

import inspect
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jax.typing import ArrayLike

from jaxflash import _derivatives, _scores, _sharding, _spec, _support
from jaxflash._arguments import flag
from jaxflash._mask import Mask

Implementation = _spec.Implementation
CausalAlignment = _spec.CausalAlignment
ScoreMod = _spec.ScoreMod
Window = _spec.Window


class PackedOptions(TypedDict, total=False):
    """Keyword arguments that `dot_product_attention` and `varlen_attention` share."""

    scale: ArrayLike | None
    is_causal: bool
    local_window_size: Window
    implementation: Implementation | None
    causal_alignment: CausalAlignment
    logits_soft_cap: float | None
    sink: ArrayLike | None
    alibi_slopes: ArrayLike | None
    score_mod: ScoreMod | None
    dropout_rate: float
    dropout_rng: jax.Array | None
    precision: jax.lax.PrecisionLike
    deterministic_backward: bool


class Options(PackedOptions, total=False):
    """Those of `dot_product_attention`."""

    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[Options],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    return_residual: bool,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    causal_alignment: CausalAlignment = "top_left",
    logits_soft_cap: float | None = None,
    sink: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    score_mod: ScoreMod | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    deterministic_backward: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Scaled dot-product attention with memory linear in the sequence length.

    Takes the arguments of `jax.nn.dot_product_attention`, with the same meaning, and more:

        softmax(mask(mod(cap(scale * Q @ K^T + bias - ALiBi)))) @ V

    computed without ever storing the logits (FlashAttention-2, Dao 2023, algorithms 1 and 2).
    In shapes, ``*B`` is any number of batch axes, or none; ``T`` query length;
    ``S`` key/value length; ``N`` query heads; ``K`` key/value heads, a divisor of ``N`` (query
    head ``n`` uses key head ``n // (N // K)``); ``H`` query/key head size; ``h`` value head size.

    Args:
      query: ``(*B, T, N, H)``, float16, bfloat16, float32, or float64 (blockwise path only).
      key: ``(*B, S, K, H)``, of the dtype of query.
      value: ``(*B, S, K, h)``, of the dtype of query.
      bias: floating-point array that broadcasts to ``(*B, N, T, S)``, added to the scaled logits.
        Each axis is 1 or full; leading axes may be missing. Its gradient is computed only if it is
        asked for.
      mask: bool array that broadcasts likewise; True means attend. Or a value of `jaxflash.masks`:
        bands, lengths, segments, intervals, arrays and functions of ``(b, h, q, kv)``, combined by
        ``&``, ``|`` and ``~``. `is_causal`, `local_window_size`, `segment_ids` and the sequence
        lengths are shorthand for such values. A query sees the keys that all of them allow.
      scale: factor of the logits; None means ``1 / sqrt(H)``. A number that is known when the call
        is traced is applied to the float32 logits, and compiled in. A traced scalar, which has a
        gradient, multiplies the query instead; the product is rounded to the dtype of query, and
        nothing is compiled again when it changes.
      is_causal: query ``i`` sees the keys at positions up to its own.
      query_seq_lengths: int32 ``(*B)``; queries from there on are padding: output 0, gradient 0.
      key_value_seq_lengths: int32 ``(*B)``; no query sees the keys from there on.
      local_window_size: ``(left, right)``, or one int for both: query ``i`` sees the keys from
        ``i - left`` to ``i + right``, both included; a side of None has no limit.
      implementation: ``"cuda"`` runs the CUDA kernels, or raises NotImplementedError with every
        reason why they cannot take the call; ``"xla"`` runs the blockwise path in plain JAX, on any
        platform; None runs the kernels on CUDA if they support the call (see `supported`), else the
        blockwise path, of which a program for CUDA warns (`SlowPathWarning`).
      return_residual: also return the lse, the logarithm of the softmax's denominator.
      segment_ids: int ``(*B, T)``, or a pair ``(*B, T)``, ``(*B, S)``: a query sees the keys with
        its own id.
      causal_alignment: the position of query ``i`` among the keys, for the causal mask, the window
        and ALiBi: ``i`` (``"top_left"``) or ``i + S - T`` (``"bottom_right"``; where sequence
        lengths are given, these are S and T).
      logits_soft_cap: ``c`` in ``c * tanh(logits / c)``, applied after the bias, before the mask.
      sink: ``(N,)``, one more logit per head in the softmax, whose value is 0.
      alibi_slopes: ``(N,)`` or ``(*B, N)``; subtracts ``slope * |query position - j|`` from the
        logit of key ``j`` (Press et al. 2021), before the soft cap.
      score_mod: ``(score, b, h, q, kv) -> score``, a function of scalars in JAX that changes each
        logit, after bias, ALiBi and soft cap and before the mask. ``score`` is float32 (float64 for
        float64 inputs). The others are int32 indices: of the batch element (row-major over the
        batch axes, 0 without any), the query head, the query and the key. Arrays that it captures,
        traced or not, are operands of the call and have gradients; an index out of bounds is
        clamped, as always in JAX. A logit of -inf has probability 0 and derivatives 0. The function
        is traced once and identified by what it computes: equal functions compile once.
      dropout_rate: probability, in [0, 1), with which a softmax probability is dropped; the others
        are scaled up. Rounded to a multiple of 2**-15 below 1. What is dropped depends on the PRNG
        key and the indices (batch, head, query, key) alone.
      dropout_rng: PRNG key of the dropout; needed if `dropout_rate` is not 0.
      precision: of matrix products of float32 inputs: DEFAULT rounds operands to TF32 on GPUs, HIGH
        and HIGHEST are accurate to float32; None follows ``jax_default_matmul_precision``. A
        ``DotAlgorithmPreset`` with float32 operands or several products (``X3`` ...) counts as
        HIGHEST, any other as DEFAULT.
      deterministic_backward: gradients are bitwise the same from run to run, as the output always
        is. Gradients of some arrays that score_mod reads, such as a table of ``q - kv``, then take
        the blockwise path: on a GPU their last bits may still differ, unless XLA is told to be
        deterministic.

    Returns:
      Output ``(*B, T, N, h)`` in the dtype of query. With ``return_residual``, a pair of the output
      and the lse ``(*B, T, N)``, a natural logarithm in float32 (float64 for float64 inputs). Both
      are differentiable.

    Raises:
      ValueError: an argument is invalid; the text names it, what was given and what is allowed.
      NotImplementedError: ``implementation="cuda"``, and the kernels do not take this call, or the
        program is compiled for another platform than CUDA (then raised when it is lowered).

    Warns:
      SlowPathWarning: with ``implementation=None``, the kernels do not take the call or one of its
        first derivatives, and a program for CUDA runs the blockwise path, many times slower there;
        once for each reason, when it is compiled.

    Two results differ from jax.nn. A query that sees no key has output 0, gradients 0 and lse
    -inf; jax.nn returns the mean of all values there. The lse is float32 and has a gradient;
    jax.nn rounds it to the dtype of key and stops its gradient.

    Output and lse have derivatives of every order in forward and reverse mode, with respect to
    query, key, value, a traced scale, bias, sink, alibi_slopes and what score_mod captures, in
    linear memory. If a call runs on the kernels, so do its tangents and first gradients, but for a
    few of captured arrays, which warn; derivatives of gradients are computed blockwise.

    NaN and infinity in keys that no query of the call sees, in queries that see no key, or in what
    goes with either (values, tangents, cotangents) reach neither the result nor a derivative. On
    the kernels one argument, or one of the mask values that must all allow a key, has to hide it
    from every query, or the query from every key.

    Examples:
      Causal attention of eight query heads over two key heads, and its gradient::

          keys = jax.random.split(jax.random.key(0), 3)
          query = jax.random.normal(keys[0], (2, 1024, 8, 64), jnp.bfloat16)
          key = jax.random.normal(keys[1], (2, 1024, 2, 64), jnp.bfloat16)
          value = jax.random.normal(keys[2], (2, 1024, 2, 64), jnp.bfloat16)
          out = jaxflash.dot_product_attention(query, key, value, is_causal=True)

          def loss(query):
              out = jaxflash.dot_product_attention(query, key, value, is_causal=True)
              return jnp.sum(out.astype(jnp.float32) ** 2)

          gradient = jax.jit(jax.grad(loss))(query)

      A sliding window of 256 keys with a soft cap, over padded sequences::

          lengths = jnp.array([1024, 700], jnp.int32)
          out = jaxflash.dot_product_attention(
              query,
              key,
              value,
              local_window_size=(255, 0),
              logits_soft_cap=50.0,
              query_seq_lengths=lengths,
              key_value_seq_lengths=lengths,
          )
    """
    return_residual = flag("return_residual", return_residual)
    spec, operands = _spec.make(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        causal_alignment=causal_alignment,
        logits_soft_cap=logits_soft_cap,
        sink=sink,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        deterministic_backward=deterministic_backward,
    )
    out, lse = run(spec, operands, score_mod, implementation)
    return (out, lse) if return_residual else out


def run(
    spec: _spec.AttentionSpec,
    operands: _spec.Operands,
    score_mod: ScoreMod | None,
    implementation: Implementation | None,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a call whose other arguments have been checked."""
    with _sharding.mesh_of(*jax.tree.leaves(operands)):
        spec, operands = _scores.compose(spec, operands, score_mod)
        path = choose_path(spec, operands, implementation)
        return _derivatives.attention(spec, path, operands)


def supported(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    implementation: Implementation | None = "cuda",
    return_residual: bool = False,
    **kwargs: Any,
) -> tuple[str, ...]:
    """Every reason why the CUDA kernels cannot take a call on this machine; none if they can.

    Takes the arguments of `dot_product_attention`; arrays may be `jax.ShapeDtypeStruct`.
    Of such types alone nothing is computed, and no JAX backend is started. A machine without a
    suitable GPU is a reason too, although programs can still be lowered and exported for CUDA on
    it.

    Args:
      query: as in `dot_product_attention`.
      key: as in `dot_product_attention`.
      value: as in `dot_product_attention`.
      bias: as in `dot_product_attention`.
      mask: as in `dot_product_attention`.
      implementation: checked, otherwise ignored.
      return_residual: ignored.
      **kwargs: other arguments of `dot_product_attention`.

    Returns:
      Reasons, each a short text; an empty tuple if the kernels take the call.

    Raises:
      ValueError: an argument is invalid, as in `dot_product_attention`.
      TypeError: there is no such argument.

    Examples:
      From shapes and dtypes alone, on a machine with a GPU::

          query = key = value = jax.ShapeDtypeStruct((2, 1024, 8, 512), jnp.float16)
          jaxflash.supported(query, key, value, is_causal=True)
          # ('query/key head size 512: the float16 kernels in this installation take 1 to 256',
          #  'value head size 512: the float16 kernels in this installation take 1 to 256')
    """
    _spec.check_implementation(implementation)
    unknown = [repr(name) for name in kwargs if name not in DEFAULTS]
    if unknown:
        raise TypeError(
            f"supported() got an unexpected keyword argument {', '.join(unknown)}; beside query, "
            "key, value, bias, mask, implementation and return_residual it takes "
            f"{', '.join(DEFAULTS)}"
        )
    return (
        *_support.reasons_against_kernels(*described(query, key, value, bias, mask, **kwargs)),
        *_support.reasons_against_machine(),
    )


def described(
    query, key, value, bias=None, mask=None, *, in_classes: bool = True, **kwargs
) -> tuple[_spec.AttentionSpec, _spec.Operands]:
    """What a call with these arguments of `dot_product_attention` amounts to; `in_classes`: see
    `_scores.compose`."""
    arguments = {**DEFAULTS, **kwargs}
    score_mod = arguments.pop("score_mod")
    spec, operands = _spec.make(query, key, value, bias, mask, **arguments)
    return _scores.compose(spec, operands, score_mod, in_classes)


DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(dot_product_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    and name not in ("implementation", "return_residual")
}


def choose_path(
    spec: _spec.AttentionSpec, operands: _spec.Operands, implementation: Implementation | None
) -> _derivatives.Path:
    """Where the call runs; raises what the caller must know when it asked for the kernels."""
    implementation = _spec.check_implementation(implementation)
    if implementation == "xla":
        return "xla"
    reasons = _support.reasons_against_kernels(spec, operands)
    if implementation is None:
        return _derivatives.Fallback(reasons) if reasons else "auto"
    if reasons:
        raise NotImplementedError(
            "implementation='cuda' cannot take this call (implementation='xla' can): "
            + "; ".join(reasons)
        )
    return "cuda"
