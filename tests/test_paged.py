"""Caches in pages: against the definition, on bad input, mapped, sharded, without derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxflash
from jaxflash import _ffi
from marks import needs_kernels
from meshes import cpu_mesh

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")

# What an error may be, relative to the largest number of the result.
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5}


def _cache(
    lengths,
    *,
    page_size=16,
    capacity=None,
    queries=1,
    heads=(4, 2),
    sizes=(16, 16),
    dtype="float32",
    seed=0,
):
    """(query, key_pages, value_pages, page_table, lengths) of sequences whose pages lie anywhere in
    a pool; pages that belong to none of them are NaN, and so is what is behind a length."""
    random = np.random.default_rng(seed)
    capacity = max(*lengths, page_size) if capacity is None else capacity
    number = -(-capacity // page_size)
    (q_heads, kv_heads), (head_dim, value_dim) = heads, sizes
    batch = len(lengths)
    pool = batch * number + 3
    table = random.permutation(pool)[: batch * number].astype(np.int32).reshape(batch, number)

    def pages(size):
        x = np.full((pool, page_size, kv_heads, size), np.nan, np.float32)
        for row, length in zip(table, lengths, strict=True):
            content = random.standard_normal((number * page_size, kv_heads, size), np.float32)
            content[max(length, 0) :] = np.nan
            x[row] = content.reshape(number, page_size, kv_heads, size)
        return jnp.asarray(x, dtype)

    query = random.standard_normal((batch, queries, q_heads, head_dim), np.float32)
    return (
        jnp.asarray(query, dtype),
        pages(head_dim),
        pages(value_dim),
        jnp.asarray(table),
        jnp.asarray(lengths, jnp.int32),
    )


def _check(arrays, implementation=None, **options):
    """(out, lse) of the function, compared with the definition."""
    run = jax.jit(
        functools.partial(
            jaxflash.paged_attention,
            implementation=implementation,
            return_residual=True,
            **options,
        )
    )
    out, lse = run(*arrays)
    definition = functools.partial(jaxflash.reference.paged_attention, return_residual=True)
    expected = jax.jit(functools.partial(definition, **options))(*arrays)
    assert out.dtype == arrays[0].dtype
    assert lse.dtype == jnp.float32
    tolerance = _TOLERANCE[out.dtype.name]
    for x, y in zip((out, lse), expected, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        assert x.shape == y.shape
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y))
        finite = np.isfinite(y)
        top = np.max(np.abs(y), where=finite, initial=1.0)
        np.testing.assert_allclose(x[finite], y[finite], rtol=0, atol=tolerance * top)
    return out, lse


# (lengths, options of the cache, options of the call)
_ROWS = {
    "one query": ((100, 37, 1), {}, {}),
    "empty": ((0, 20, 0), dict(queries=2), dict(is_causal=True)),
    "several queries": ((100, 37, 64), dict(queries=5), {}),
    "causal": ((100, 37, 64), dict(queries=5), dict(is_causal=True)),
    "fewer keys than queries": ((3, 40, 0), dict(queries=5), dict(is_causal=True)),
    "window": ((200, 37, 64), dict(queries=5), dict(is_causal=True, local_window_size=(20, 0))),
    "window, both sides": ((200, 37), dict(queries=5), dict(local_window_size=(20, 3))),
    "soft cap": ((100, 37), dict(queries=3), dict(is_causal=True, logits_soft_cap=2.0)),
    "sink": ((100, 37, 0), {}, dict(sink=np.linspace(-1, 1, 4, dtype=np.float32))),
    "window, soft cap, sink": (
        (300, 37, 0),
        dict(queries=7),
        dict(
            is_causal=True,
            local_window_size=(30, 0),
            logits_soft_cap=2.0,
            sink=np.linspace(-1, 1, 4, dtype=np.float32),
        ),
    ),
    "scale": ((100, 37), {}, dict(scale=0.7)),
    "capacity": ((100, 37), dict(capacity=700, queries=2), dict(is_causal=True)),
    "groups of 8": ((100, 37), dict(heads=(16, 2), queries=2), dict(is_causal=True)),
    "one head": ((100, 37), dict(heads=(1, 1)), {}),
    "values of another size": ((100, 37), dict(sizes=(24, 8)), {}),
    "many queries": ((400, 170), dict(queries=150), dict(is_causal=True)),
}


@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
def test_definition(row):
    lengths, cache, call = row
    _check(_cache(lengths, **cache), "xla", **call)


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [(16, "float16"), (32, "bfloat16"), (64, "float32"), (128, "bfloat16"), (256, "float16")],
)
def test_page_sizes(page_size, dtype):
    arrays = _cache((1300, 0, 40), page_size=page_size, dtype=dtype, queries=2)
    _check(arrays, "xla", is_causal=True)


def test_definition_is_the_contiguous_one():
    query, key_pages, value_pages, table, lengths = _cache((100, 37, 0), queries=3)
    key, value = (
        np.asarray(x)[np.asarray(table)].reshape(3, -1, *x.shape[2:])
        for x in (key_pages, value_pages)
    )
    expected = jaxflash.reference.dot_product_attention(
        query, key, value, is_causal=True, key_value_seq_lengths=lengths,
        causal_alignment="bottom_right",
    )  # fmt: skip
    actual = jaxflash.reference.paged_attention(
        query, key_pages, value_pages, table, lengths, is_causal=True
    )
    np.testing.assert_array_equal(actual, expected)


def test_no_batch_and_many_batch_axes():
    query, *pages, table, lengths = _cache((100, 37, 5, 0), queries=2)
    whole, _ = _check((query, *pages, table, lengths), "xla")
    for i in range(4):
        one = jaxflash.paged_attention(query[i], *pages, table[i], lengths[i])
        np.testing.assert_allclose(one, whole[i], rtol=1e-5, atol=1e-6)
    axes = (2, 1, 2)
    query, table, lengths = (x.reshape(*axes, *x.shape[1:]) for x in (query, table, lengths))
    out, _ = _check((query, *pages, table, lengths), "xla")
    np.testing.assert_allclose(out.reshape(whole.shape), whole, rtol=1e-5, atol=1e-6)


def _clamping():
    """(arrays, the same with numbers and lengths within their bounds)"""
    query, *pages, _, _ = _cache((40, 40, 40), queries=2)
    pages = [jnp.nan_to_num(x) for x in pages]
    last = pages[0].shape[0] - 1
    table = np.array([[0, -1, 2], [last + 1, 1, 2**31 - 1], [-(2**31), 0, 0]], np.int32)
    lengths = np.array([48, 2**31 - 1, -5], np.int32)
    return (
        (query, *pages, jnp.asarray(table), jnp.asarray(lengths)),
        (query, *pages, jnp.clip(table, 0, last), jnp.clip(lengths, 0, 48)),
    )


def test_numbers_and_lengths_are_clamped():
    arrays, clamped = _clamping()
    out, lse = _check(arrays, "xla", is_causal=True)
    expected = jaxflash.reference.paged_attention(*clamped, is_causal=True, return_residual=True)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    assert (out[2] == 0).all()
    assert np.isneginf(lse[2]).all()


def test_numbers_behind_the_length_have_no_meaning():
    query, *pages, table, lengths = _cache((17, 5), capacity=64)
    garbage = table.at[0, 2:].set(jnp.array([10**6, -7], jnp.int32)).at[1, 1:].set(-1)
    _check((query, *pages, garbage, lengths), "xla")


def test_sequences_may_share_pages():
    query, *pages, table, _ = _cache((64, 64, 64))
    table = table.at[1, :2].set(table[0, :2]).at[2].set(table[0])
    _check((query, *pages, table, jnp.array([64, 50, 33], jnp.int32)), "xla")


@pytest.mark.parametrize("what", ["queries", "table", "keys", "heads of the query", "batch"])
def test_nothing_to_see(what):
    query, key_pages, value_pages, table, lengths = _cache((20, 7))
    if what == "queries":
        query = query[:, :0]
    elif what == "table":
        table = table[:, :0]
    elif what == "keys":
        lengths = jnp.zeros_like(lengths)
    elif what == "heads of the query":
        query = query[:, :, :0]
    else:
        query, table, lengths = query[:0], table[:0], lengths[:0]
    out, lse = _check((query, key_pages, value_pages, table, lengths), "xla")
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_lengths_bound_the_work():
    """A large capacity costs nothing: only blocks that hold keys are visited."""
    arrays = _cache((20, 7), capacity=1 << 16)
    text = (
        jax.jit(functools.partial(jaxflash.paged_attention, implementation="xla"))
        .lower(*arrays)
        .compile()
    )
    temporary = text.memory_analysis().temp_size_in_bytes
    cache = 2 * arrays[3].size * 16 * 2 * 16 * 4
    assert temporary < cache / 8, (temporary, cache)


def test_large_calls_gather_blocks():
    """Memory of a block of keys, not of the cache, with many queries too."""
    arrays = _cache((8192,), queries=256)
    compiled = (
        jax.jit(functools.partial(jaxflash.paged_attention, implementation="xla", is_causal=True))
        .lower(*arrays)
        .compile()
    )
    dense = 4 * 256 * 8192 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < dense / 2


# ---- Bad input -----------------------------------------------------------------------------------


def _changed(**changes):
    names = ("query", "key_pages", "value_pages", "page_table", "lengths")
    arguments = dict(zip(names, _cache((20, 7)), strict=True))
    return {**arguments, **{name: change(arguments) for name, change in changes.items()}}


_ERRORS = {
    "rank of the query": (dict(query=lambda x: x["query"][0, 0]), "query must have shape"),
    "rank of the pages": (
        dict(key_pages=lambda x: x["key_pages"][0]),
        "key_pages must have shape .pages, page_size, heads, head_size",
    ),
    "page size": (
        dict(
            key_pages=lambda x: x["key_pages"][:, :8], value_pages=lambda x: x["value_pages"][:, :8]
        ),
        "key_pages page size must be one of 16, 32, 64, 128, 256, got 8",
    ),
    "no power of two": (
        dict(
            key_pages=lambda x: jnp.zeros((3, 48, 2, 16), jnp.float32),
            value_pages=lambda x: jnp.zeros((3, 48, 2, 16), jnp.float32),
        ),
        "key_pages page size must be one of 16, 32, 64, 128, 256, got 48",
    ),
    "no pages": (
        dict(key_pages=lambda x: x["key_pages"][:0], value_pages=lambda x: x["value_pages"][:0]),
        "key_pages must hold at least one page",
    ),
    "other values": (
        dict(value_pages=lambda x: x["value_pages"][:2]),
        "value_pages must have the pages, page size and heads of key_pages",
    ),
    "dtype of the keys": (
        dict(key_pages=lambda x: x["key_pages"].astype(jnp.bfloat16)),
        "key_pages must have the dtype of query, float32, got bfloat16",
    ),
    "dtype of the values": (
        dict(value_pages=lambda x: x["value_pages"].astype(jnp.int8)),
        "value_pages must have the dtype of query, float32, got int8",
    ),
    "dtype of the table": (
        dict(page_table=lambda x: x["page_table"].astype(jnp.int8)),
        "page_table must have dtype int32, got int8",
    ),
    "shape of the table": (
        dict(page_table=lambda x: x["page_table"][:1]),
        "page_table must have shape",
    ),
    "dtype of the lengths": (
        dict(lengths=lambda x: x["lengths"].astype(jnp.float32)),
        "lengths must have dtype int32, got float32",
    ),
    "shape of the lengths": (
        dict(lengths=lambda x: x["lengths"][:1]),
        "lengths must have the batch shape",
    ),
    "no lengths": (dict(lengths=lambda x: None), "lengths must be"),
    "head size": (
        dict(key_pages=lambda x: x["key_pages"][..., :8]),
        r"key_pages must have the head size of query \(\d+\), got shape \(",
    ),
    "heads": (
        dict(query=lambda x: x["query"][:, :, :3]),
        r"the heads of key_pages must divide those of query \(3\), got 2",
    ),
    "sink": (dict(sink=lambda x: jnp.zeros(3)), "sink must have shape"),
    "soft cap": (dict(logits_soft_cap=lambda x: -1.0), "logits_soft_cap must be positive"),
    "window": (dict(local_window_size=lambda x: -1), "local_window_size"),
    "implementation": (dict(implementation=lambda x: "gpu"), "implementation must be one of"),
}


@pytest.mark.parametrize(("changes", "text"), _ERRORS.values(), ids=_ERRORS)
@pytest.mark.parametrize("attend", [jaxflash.paged_attention, jaxflash.reference.paged_attention])
def test_errors(attend, changes, text):
    if attend is jaxflash.reference.paged_attention and "implementation" in changes:
        pytest.skip("ignored by the definition")
    with pytest.raises(ValueError, match=text):
        attend(**_changed(**changes))


@pytest.mark.parametrize("name", ["query", "key_pages", "value_pages", "sink", "scale"])
@pytest.mark.parametrize("mode", ["reverse", "forward", "reverse of vmap", "under jit"])
def test_no_derivatives(mode, name):
    arguments = _changed(sink=lambda x: jnp.zeros(4), scale=lambda x: jnp.float32(0.3))

    def loss(x):
        return jnp.sum(jaxflash.paged_attention(**{**arguments, name: x}))

    x = arguments[name]
    run = {
        "reverse": lambda: jax.grad(loss)(x),
        "forward": lambda: jax.jvp(loss, (x,), (jnp.ones_like(x),)),
        "reverse of vmap": lambda: jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x[None])))(x),
        "under jit": lambda: jax.jit(jax.grad(loss))(x),
    }[mode]
    if mode == "reverse of vmap" and name == "sink":
        pytest.skip("sinks cannot be mapped")
    with pytest.raises(NotImplementedError, match="paged_attention has no derivatives"):
        run()


def test_gradients_of_other_things():
    """Where nothing that the function takes is differentiated."""
    arrays = _cache((20, 7))
    gradient = jax.grad(
        lambda x: jnp.sum(x * jax.lax.stop_gradient(jaxflash.paged_attention(*arrays)))
    )
    assert np.isfinite(gradient(jnp.float32(2.0)))


# ---- Transformations -----------------------------------------------------------------------------

_AXES = {
    "all but pages": (0, None, None, 0, 0),
    "pages too": (0, 0, 0, 0, 0),
    "query alone": (1, None, None, None, None),
    "lengths alone": (None, None, None, None, 0),
    "table alone": (None, None, None, 1, None),
    "keys alone": (None, 0, None, None, None),
    "values alone": (None, None, 1, None, None),
}


@pytest.mark.parametrize("in_axes", _AXES.values(), ids=_AXES)
def test_vmap(in_axes):
    caches = [_cache((40, 37, 9), queries=2, seed=seed) for seed in range(3)]
    arrays = [
        caches[0][i] if axis is None else jnp.stack([x[i] for x in caches], axis)
        for i, axis in enumerate(in_axes)
    ]
    if not in_axes[1] == in_axes[2] == in_axes[3] == 0:
        arrays[1:3] = [jnp.nan_to_num(x) for x in arrays[1:3]]
    attend = functools.partial(jaxflash.paged_attention, is_causal=True, return_residual=True)
    mapped = jax.jit(jax.vmap(attend, in_axes))(*arrays)
    for i in range(3):
        one = [
            x if axis is None else jax.lax.index_in_dim(x, i, axis, keepdims=False)
            for x, axis in zip(arrays, in_axes, strict=True)
        ]
        for x, y in zip(mapped, attend(*one), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-5)


def test_vmap_clamps_within_its_own_pool():
    arrays, clamped = _clamping()
    both = [jnp.stack((x, y)) for x, y in zip(arrays, clamped, strict=True)]
    out = jax.vmap(jaxflash.paged_attention)(*both)
    np.testing.assert_allclose(out[0], out[1], rtol=1e-5, atol=1e-6)


def test_nested_vmap():
    query, *pages, table, lengths = _cache((40, 37, 9, 0), queries=2)
    expected = jaxflash.paged_attention(query, *pages, table, lengths)

    def attend(query, table, lengths):
        return jaxflash.paged_attention(query, *pages, table, lengths)

    split = [x.reshape(2, 2, *x.shape[1:]) for x in (query, table, lengths)]
    actual = jax.vmap(jax.vmap(attend))(*split)
    np.testing.assert_allclose(actual.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


def test_mapped_sinks_are_refused():
    arrays = _cache((20, 7))
    with pytest.raises(NotImplementedError, match="cannot map sink"):
        jax.vmap(lambda sink: jaxflash.paged_attention(*arrays, sink=sink))(jnp.zeros((3, 4)))


def test_new_tables_compile_nothing(compilations):
    query, *pages, table, lengths = _cache((40, 37))
    others = table[::-1], lengths - 3
    run = jax.jit(jaxflash.paged_attention)
    run(query, *pages, table, lengths)
    compilations.clear()
    run(query, *pages, *others)
    assert not compilations


def test_scan_over_a_cache_that_grows():
    """Tokens one by one, each written to its page before it is attended to."""
    random = np.random.default_rng(0)
    tokens, batch = 40, 2
    q = random.standard_normal((tokens, batch, 1, 4, 16), np.float32)
    k, v = (random.standard_normal((tokens, batch, 2, 16), np.float32) for _ in range(2))
    table = jnp.array([[4, 0, 2], [1, 5, 3]], jnp.int32)

    def step(pages, token):
        i, q, k, v = token
        place = table[:, i // 16], i % 16
        pages = tuple(x.at[place].set(new) for x, new in zip(pages, (k, v), strict=True))
        lengths = jnp.full(batch, i + 1, jnp.int32)
        return pages, jaxflash.paged_attention(q, *pages, table, lengths)

    pages = (jnp.full((6, 16, 2, 16), jnp.nan, jnp.float32),) * 2
    _, outs = jax.jit(lambda *x: jax.lax.scan(step, pages, x))(
        jnp.arange(tokens, dtype=jnp.int32), q, k, v
    )
    expected = jaxflash.reference.dot_product_attention(
        *(np.moveaxis(x, 0, 1) for x in (q[:, :, 0], k, v)), is_causal=True
    )
    np.testing.assert_allclose(
        np.moveaxis(np.asarray(outs)[:, :, 0], 0, 1), expected, rtol=1e-4, atol=1e-5
    )


def test_export_with_symbolic_sizes():
    arrays = _cache((40, 37), queries=2)
    shapes = jax.export.symbolic_args_specs(
        arrays, ("b, t, 4, 16", "p, 16, 2, 16", "p, 16, 2, 16", "b, m", "b")
    )
    attend = jax.jit(functools.partial(jaxflash.paged_attention, implementation="xla"))
    exported = jax.export.deserialize(jax.export.export(attend)(*shapes).serialize())
    np.testing.assert_allclose(exported.call(*arrays), attend(*arrays), rtol=1e-5, atol=1e-6)


# ---- Sharding ------------------------------------------------------------------------------------


# Of query, pages, table and lengths.
_SPLITS = {
    "batch": ((("b", "h"),), (), (("b", "h"),), (("b", "h"),)),
    "heads": ((None, None, "h"), (None, None, "h"), (), ()),
    "batch and heads": (("b", None, "h"), (None, None, "h"), ("b",), ("b",)),
    "pages": ((), (("b", "h"),), (), ()),
    "query alone": (("b", None, "h"), (), (), ()),
    "pages alone": ((), (None, None, "h"), (), ()),
}


def _placed(mesh, split):
    arrays = _cache(tuple(range(30, 38)), queries=2, heads=(8, 4))
    of_query, of_pages, of_table, of_lengths = split
    specs = (of_query, of_pages, of_pages, of_table, of_lengths)
    # A pool that the devices divide.
    arrays = [
        jnp.concatenate((x, x[: -x.shape[0] % 8])) if i in (1, 2) else x
        for i, x in enumerate(arrays)
    ]
    placed = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    return arrays, placed


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("split", _SPLITS.values(), ids=_SPLITS)
def test_sharded_is_unsharded(split, kind):
    with jax.default_device(jax.devices("cpu")[0]):
        mesh = cpu_mesh(kind, b=4, h=2)
        arrays, placed = _placed(mesh, split)
        sink = jnp.linspace(-1, 1, 8)
        attend = functools.partial(
            jaxflash.paged_attention, is_causal=True, implementation="xla", return_residual=True
        )
        with jax.set_mesh(mesh):
            actual = jax.jit(attend)(*placed, sink=sink)
        if kind == AxisType.Explicit and any(split[0]):
            assert actual[0].sharding.is_equivalent_to(placed[0].sharding, 4)
        for x, y in zip(actual, attend(*arrays, sink=sink), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def _compiled(attend, platform, *arguments):
    """A program for CUDA compiles for the CPUs that its arguments are on; it does not run there."""
    traced = jax.jit(attend).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).compile().as_text()


@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
@pytest.mark.parametrize("split", ["batch", "heads", "batch and heads"])
def test_sharded_program_gathers_nothing(split, path):
    _, placed = _placed(cpu_mesh(AxisType.Auto, b=4, h=2), _SPLITS[split])
    attend = functools.partial(jaxflash.paged_attention, implementation=path)
    text = _compiled(attend, "cuda" if path == "cuda" else "cpu", *placed)
    assert (path == "cuda") == (_ffi.PAGED_TARGET in text)
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@needs_kernels
@pytest.mark.parametrize("split", _SPLITS.values(), ids=_SPLITS)
def test_explicit_mesh_of_the_kernels(split):
    mesh = cpu_mesh(AxisType.Explicit, b=4, h=2)
    _, placed = _placed(mesh, split)
    attend = functools.partial(jaxflash.paged_attention, implementation="cuda")
    with jax.set_mesh(mesh):
        assert _ffi.PAGED_TARGET in _compiled(attend, "cuda", *placed)


@needs_kernels
def test_more_devices_than_key_heads():
    """Each takes some query heads of one key head; nothing is summed."""
    mesh = cpu_mesh(AxisType.Auto, h=8)
    split = ((None, None, "h"), (), (), ())
    _, placed = _placed(mesh, split)
    attend = functools.partial(jaxflash.paged_attention, implementation="cuda")
    text = _compiled(attend, "cuda", *placed)
    (call,) = (x for x in text.splitlines() if "custom-call" in x and _ffi.PAGED_TARGET in x)
    assert "f32[8,2,1,16]" in call
    assert ",16,1,16]" in call  # pages of one key head
    assert "all-reduce" not in text


def test_shard_map_over_pools():
    """Each device has its own sequences and its own pool."""
    with jax.default_device(jax.devices("cpu")[0]):
        mesh = cpu_mesh(AxisType.Auto, b=8)
        caches = [_cache((20, 33), queries=2, seed=seed) for seed in range(8)]
        arrays = [jnp.concatenate(x) for x in zip(*caches, strict=True)]
        parts = PartitionSpec("b")
        run = jax.shard_map(
            functools.partial(jaxflash.paged_attention, is_causal=True, implementation="xla"),
            mesh=mesh, in_specs=(parts,) * 5, out_specs=parts,
        )  # fmt: skip
        actual = jax.jit(run)(*arrays)
        expected = [jaxflash.paged_attention(*cache, is_causal=True) for cache in caches]
        np.testing.assert_allclose(actual, jnp.concatenate(expected), rtol=1e-5, atol=1e-5)


# ---- Kernels -------------------------------------------------------------------------------------


def test_target_name_is_versioned():
    """It is part of exported programs: a changed contract gets a new number."""
    assert _ffi.PAGED_TARGET == "jaxflash_paged_v5"


@needs_kernels
def test_programs_for_cuda_hold_the_kernels():
    arrays = _cache((40, 37), queries=2, dtype="bfloat16")
    for attend in (jaxflash.paged_attention, jax.vmap(jaxflash.paged_attention)):
        if attend is not jaxflash.paged_attention:
            arrays = [x[None] for x in arrays]
        traced = jax.jit(attend).trace(*arrays)
        assert _ffi.PAGED_TARGET in traced.lower(lowering_platforms=("cuda",)).as_text()
        assert _ffi.PAGED_TARGET not in traced.lower(lowering_platforms=("cpu",)).as_text()


@needs_kernels
def test_export_for_cuda_with_symbolic_sizes():
    arrays = _cache((40, 37), queries=2)
    shapes = jax.export.symbolic_args_specs(
        arrays, ("b, t, 4, 16", "p, 16, 2, 16", "p, 16, 2, 16", "b, m", "b")
    )
    exported = jax.export.export(
        jax.jit(jaxflash.paged_attention),
        platforms=["cuda", "cpu"],
        disabled_checks=jaxflash.EXPORT_CHECKS,
    )(*shapes)
    assert _ffi.PAGED_TARGET in exported.mlir_module()


def test_kernels_say_what_they_lack():
    arrays = _cache((40, 37), sizes=(512, 16))
    with pytest.raises(NotImplementedError, match="query/key head size 512"):
        jaxflash.paged_attention(*arrays, implementation="cuda")


@needs_kernels
def test_kernels_on_another_platform():
    arrays = _cache((40, 37))
    attend = functools.partial(jaxflash.paged_attention, implementation="cuda")
    with pytest.raises(NotImplementedError, match="compiled for another platform"):
        jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cpu",))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
def test_kernels(row, dtype):
    lengths, cache, call = row
    _check(_cache(lengths, dtype=dtype, **cache), "cuda", **call)


# Long ones are shared among blocks, whose parts are merged.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("queries", [1, 5, 100])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_page_sizes_of_the_kernels(page_size, queries, dtype):
    arrays = _cache(
        (9000, 0, 77, 3000), page_size=page_size, queries=queries, heads=(8, 2), sizes=(128, 128),
        dtype=dtype,
    )  # fmt: skip
    sink = jnp.linspace(-1, 1, 8)
    _check(arrays, "cuda", is_causal=True, sink=sink)
    _check(arrays, "cuda", is_causal=True, local_window_size=(2000, 0), logits_soft_cap=3.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(64, 64), (72, 40), (96, 96), (192, 128), (192, 192), (256, 256), (20, 12)], ids=str
)
@pytest.mark.parametrize("queries", [1, 40])
def test_head_sizes_of_the_kernels(sizes, queries):
    """The last one on Hopper is for the portable kernels."""
    arrays = _cache((2500, 300), queries=queries, sizes=sizes, dtype="bfloat16")
    _check(arrays, "cuda", is_causal=True, sink=jnp.linspace(-1, 9, 4))


@pytest.mark.gpu
def test_kernels_clamp():
    arrays, clamped = _clamping()
    arrays, clamped = (
        (*(x.astype(jnp.bfloat16) for x in those[:3]), *those[3:]) for those in (arrays, clamped)
    )
    out, _ = _check(arrays, "cuda", is_causal=True)
    expected, _ = _check(clamped, "cuda", is_causal=True)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.gpu
def test_kernels_read_no_meaningless_numbers():
    query, *pages, table, lengths = _cache((17, 5), capacity=640, dtype="bfloat16")
    garbage = table.at[0, 2:].set(10**9).at[1, 1:].set(-(10**9))
    _check((query, *pages, garbage, lengths), "cuda")


@pytest.mark.gpu
def test_kernels_repeat_their_bits():
    arrays = _cache((9000, 100), dtype="bfloat16", heads=(8, 2), sizes=(128, 128))
    run = jax.jit(functools.partial(jaxflash.paged_attention, implementation="cuda"))
    first = np.asarray(run(*arrays))
    for _ in range(10):
        np.testing.assert_array_equal(np.asarray(run(*arrays)), first)


@pytest.mark.gpu
def test_kernels_under_vmap_of_pools():
    caches = [_cache((40, 37, 9), queries=2, seed=seed, dtype="bfloat16") for seed in range(3)]
    arrays = [jnp.stack(x) for x in zip(*caches, strict=True)]
    attend = functools.partial(jaxflash.paged_attention, is_causal=True, implementation="cuda")
    mapped = jax.jit(jax.vmap(attend))(*arrays)
    for i, cache in enumerate(caches):
        np.testing.assert_allclose(
            np.float32(mapped[i]), np.float32(attend(*cache)), rtol=2e-2, atol=2e-2
        )
