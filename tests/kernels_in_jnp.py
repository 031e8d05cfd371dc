"""What custom calls of passes compute, in jnp, so that CPU devices run what GPUs would: calls of a
score program without lengths and masks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxflash import _kernel_program, _program


def forward(kernel, *operands):
    batch = kernel.full_batch(operands)
    qkv, _, numbers, captures = _parts(kernel, operands)
    results = _attention(kernel, numbers, qkv, captures)
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in results)


def backward(kernel, *operands):
    batch = kernel.full_batch(operands)
    qkv, (_, dout, _, *dlse), numbers, captures = _parts(kernel, operands)
    (_, lse), pull = jax.vjp(functools.partial(_attention, kernel, numbers), qkv, captures)
    gradients, of_captures = pull((dout, dlse[0] if dlse else jnp.zeros_like(lse)))
    if kernel.gradients is not None:
        assert not kernel.gradients.key_sums
        for i in kernel.gradients.captures:
            x = of_captures[i]
            gradients += (x if kernel.gradients.is_narrow(i) else x.astype(jnp.float32),)
    results = (x.reshape(*batch, *x.shape[1:]) for x in gradients)
    sums = ([a for a, one in enumerate(of) if one] for of in kernel.full_sums(len(batch)))
    return tuple(jnp.sum(x, axes, keepdims=True) for x, axes in zip(results, sums, strict=True))


def _parts(kernel, operands):
    """(query, key and value, other operands, numbers of batch elements and heads, captures), with
    one batch axis."""
    assert kernel.mask.number == 0
    assert kernel.lengths == (False, False)
    batch = kernel.full_batch(operands)

    def flat(i, x):
        if i in kernel.unbatched:
            return x
        own = x.shape[len(batch) :]
        return jnp.broadcast_to(x, (*batch, *own)).reshape(-1, *own)

    operands = tuple(flat(i, x) for i, x in enumerate(operands))
    end = len(operands) - len(kernel.program.capture_ranks)
    first = end - 2 * kernel.numbered
    numbers = operands[first:end]
    if not numbers:
        numbers = tuple(jnp.arange(operands[0].shape[axis], dtype=jnp.int32) for axis in (0, 2))
    return operands[:3], operands[3:first], numbers, operands[end:]


def _attention(kernel, numbers, qkv, captures):
    """(out, lse) of a program, which knows batch elements and heads by numbers."""
    query, key, value = (x.astype(jnp.float32) for x in qkv)
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * kernel.spec.scale
    q_len, kv_len = scores.shape[2:]
    jaxpr = (kernel.spec.program or _kernel_program.identity()).jaxpr
    used = len(jaxpr.in_avals) - len(_program.ARGUMENTS)

    def logit(batch_captures, score, b, h, q, kv):
        arguments = score, b, h, q, kv, q - kv, *batch_captures
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arguments)[0]

    over_keys = jax.vmap(logit, (None, 0, None, None, None, 0))
    over_rows = jax.vmap(over_keys, (None, 0, None, None, 0, None))
    over_heads = jax.vmap(over_rows, (None, 0, None, 0, None, None))
    q, kv = (jnp.arange(n, dtype=jnp.int32) for n in (q_len, kv_len))
    logits = jax.vmap(over_heads, (0, 0, 0, None, None, None))(
        captures[:used], scores, *numbers, q, kv
    )
    if len(captures) > used:
        sink = captures[used][..., None, None]
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - lse[..., None])[..., :kv_len]
    out = jnp.einsum("bnts,bsnh->btnh", weights, value)
    return out.astype(qkv[0].dtype), lse.mT
