"""Calls on several devices: on automatic and explicit meshes, and inside `jax.shard_map`."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxflash
from check import assert_close
from jaxflash import masks
from marks import needs_kernels
from meshes import cpu_mesh
from transformed_calls import B, H, N, S, T, dense, on_cpu, random_qkv, uneven_loss

pytestmark = pytest.mark.usefixtures("accurate_products", "quick_compilation")


def _sharded(arrays, mesh, *specs):
    return [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip(arrays, specs, strict=True)
    ]


# ---- Automatic axes ------------------------------------------------------------------------------


def _compiled(loss, path, arguments):
    """The gradient of a function, compiled for the devices of its arguments, CPUs. A program of the
    kernels, lowered for CUDA, compiles there too; it does not run."""
    traced = jax.jit(jax.grad(loss, tuple(range(len(arguments))))).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda" if path == "cuda" else "cpu",)).compile()


_SPLITS = {
    "batch": ((("b", "h"),),) * 3,
    "batch and heads": (("b", None, "h"),) * 3,
    "heads": ((None, None, "h"),) * 3,
}


@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
@pytest.mark.parametrize("split", _SPLITS.values(), ids=_SPLITS)
def test_sharded_program_gathers_nothing(split, path):
    """Batch and key/value heads split; each device works on its own part."""
    qkv = _sharded(random_qkv(8), cpu_mesh(b=4, h=2), *split)
    attend = functools.partial(jaxflash.dot_product_attention, implementation=path)
    text = _compiled(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), path, qkv).as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


# Query heads over more devices than there are key heads: (key heads, mesh, split of the heads).
_MORE_DEVICES = {
    "one key head": (1, dict(b=2, h=4), "h"),
    "two key heads": (2, dict(b=2, h=4), "h"),
    "two axes": (2, dict(g=2, h=4), ("g", "h")),
    "between two axes": (2, dict(h=4, g=2), ("h", "g")),
}


@needs_kernels
@pytest.mark.parametrize("row", _MORE_DEVICES.values(), ids=_MORE_DEVICES)
def test_more_devices_than_key_heads(row):
    """Each device takes its query heads and the key head that they share; of its gradients only
    those of keys and values are summed and, where key heads are whole everywhere, put together."""
    kv_heads, axes, heads = row
    shapes = ((2, T, 16, H), (2, S, kv_heads, H), (2, S, kv_heads, H))
    split = ((None, None, heads), (), ())
    qkv = _sharded([np.ones(shape, np.float32) for shape in shapes], cpu_mesh(**axes), *split)
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    text = _compiled(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), "cuda", qkv).as_text()
    shards = math.prod(n for name, n in axes.items() if name in heads)
    q_heads = f"{T},{16 // shards},{H}"
    calls = [line for line in text.splitlines() if "custom-call" in line and "jaxflash" in line]
    assert len(calls) == 2
    for call in calls:
        assert f"f32[2,{q_heads}]" in call
        assert f"f32[2,{S},1,{H}]" in call
    assert "all-reduce" in text
    for line in text.splitlines():
        if "all-gather(" in line:
            assert f"f32[2,{S},{kv_heads},{H}]" in line


@needs_kernels
def test_kernels_need_shardy():
    """Without it, jax 0.10 would end the process."""
    qkv = _sharded(random_qkv(8), cpu_mesh(b=4, h=2), *_SPLITS["batch and heads"])
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")
    shardy = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(NotImplementedError, match="jax_use_shardy_partitioner"):
            _compiled(lambda *qkv: jnp.sum(attend(*qkv)), "cuda", qkv)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv]
        assert "Shardy" in jaxflash.supported(*shapes)[0]
        traced = jax.jit(jaxflash.dot_product_attention).trace(*shapes)
        with pytest.warns(jaxflash.SlowPathWarning, match="Shardy"):
            traced.lower(lowering_platforms=("cuda",))
        # Of which the blockwise path can make use.
        mask = masks.function(lambda b, h, q, kv: q + kv > 3)
        plan = jax.jit(lambda: masks.plan(mask, (1, 1, 8, 8))).trace()
        plan.lower(lowering_platforms=("cuda",))
    finally:
        jax.config.update("jax_use_shardy_partitioner", shardy)


@pytest.mark.parametrize("split", _SPLITS.values(), ids=_SPLITS)
def test_sharded_is_unsharded(split):
    qkv = random_qkv(8)
    step = jax.jit(jax.value_and_grad(uneven_loss(jaxflash.dot_product_attention), (0, 1, 2)))
    sharded = _sharded(qkv, cpu_mesh(b=4, h=2), *split)
    actual = step(*sharded)
    assert_close(actual, step(*on_cpu(qkv)))
    for gradient, operand in zip(actual[1], sharded, strict=True):
        assert gradient.sharding.is_equivalent_to(operand.sharding, gradient.ndim)


# ---- Explicit meshes -----------------------------------------------------------------------------

# Query, key and value on an explicit mesh b=2, h=4; what else is given is on every device. N = 8
# query heads, K = 2 key heads.
_EXPLICIT = {
    "batch": ((("b", "h"),),) * 3,
    "heads": ((None, None, "b"),) * 3,
    "batch and heads": (("h", None, "b"),) * 3,
    "more devices than key heads": ((None, None, "h"), (), ()),
    "query alone": (("b", None, None), (), ()),
    "query length": ((None, "h"), (), ()),
    "query length, batch and heads": (("h", "b"), ("h", None, "b"), ("h", None, "b")),
    "key length": ((), (None, "h"), (None, "h")),
}


def _explicit_mesh():
    return cpu_mesh(AxisType.Explicit, b=2, h=4)


def _explicit_case():
    """Arrays of lengths that take several tiles, and a loss of a dictionary of them."""
    rng = np.random.default_rng(0)
    shapes = dict(
        query=(8, 160, 8, H), key=(8, 132, 2, H), value=(8, 132, 2, H), bias=(8, 1, 132), sink=(8,),
        alibi_slopes=(8,),
    )  # fmt: skip
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def loss(attend):
        def of_arrays(arrays):
            ids = jnp.broadcast_to(jnp.arange(160) // 32, (8, 160))
            out, lse = attend(
                **arrays, is_causal=True, segment_ids=(ids, ids[:, :132]), return_residual=True
            )
            seen = jnp.where(jnp.isfinite(lse), lse, 0)
            return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.sin(seen))

        # Compiling takes longest.
        options = {"xla_backend_optimization_level": 0}
        return jax.jit(jax.value_and_grad(of_arrays), compiler_options=options)

    return arrays, loss


@functools.cache
def _explicit_expected():
    arrays, loss = _explicit_case()
    return loss(dense)(arrays)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("specs", _EXPLICIT.values(), ids=_EXPLICIT)
def test_explicit_mesh(specs):
    """Gradients of what is split and of what stands whole on every device (bias, sink, slopes)."""
    arrays, loss = _explicit_case()
    mesh = _explicit_mesh()
    placed = _sharded(arrays.values(), mesh, *specs, (), (), ())
    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla")
    with jax.set_mesh(mesh):
        actual = loss(attend)(dict(zip(arrays, placed, strict=True)))
    assert_close(actual, _explicit_expected())
    for name, x in zip(arrays, placed, strict=True):
        assert actual[1][name].sharding.is_equivalent_to(x.sharding, x.ndim), name


_LENGTHS_ON_A_MESH = np.array([1, 2, 3, 9, 20, 0, 7, 8], np.int32)
_SLOPES_ON_A_MESH = np.linspace(0.1, 1, N, dtype=np.float32)
_ON_A_MESH = {
    "nothing": {},
    "mask function": dict(
        mask=masks.causal()
        | masks.function(lambda b, h, q, kv, lengths: kv < lengths[b], _LENGTHS_ON_A_MESH)
    ),
    "bias, sink, slopes, cap": dict(
        bias=np.ones((8, 1, 1, S), np.float32),
        sink=_SLOPES_ON_A_MESH,
        alibi_slopes=_SLOPES_ON_A_MESH,
        logits_soft_cap=3.0,
    ),
    "score_mod": dict(
        score_mod=lambda score, b, h, q, kv: score * jnp.asarray(_SLOPES_ON_A_MESH)[h]
    ),
    "lengths, bottom right": dict(
        key_value_seq_lengths=_LENGTHS_ON_A_MESH, is_causal=True, causal_alignment="bottom_right"
    ),
    "segments": dict(
        segment_ids=(np.zeros((8, T), np.int32), np.tile(np.arange(S, dtype=np.int32) // 9, (8, 1)))
    ),
    "dropout": dict(dropout_rate=0.3, dropout_rng=jax.random.PRNGKey(0)),
}


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("options", _ON_A_MESH.values(), ids=_ON_A_MESH)
def test_explicit_mesh_of_the_arguments(options):
    """`jax.set_mesh` is not needed, and `jax.make_mesh` makes explicit ones."""
    qkv = random_qkv(8)
    placed = _sharded(qkv, _explicit_mesh(), *((("h", None, "b"),) * 3))

    def run(attend, qkv):
        attend = functools.partial(attend, **options)

        def all_of(*qkv):
            mapped = jax.vmap(attend, 1, 1)(*(x[:, None] for x in qkv))
            return mapped, jax.jvp(jax.grad(uneven_loss(attend), (0, 1, 2)), qkv, qkv)

        return jax.jit(all_of, compiler_options={"xla_backend_optimization_level": 0})(*qkv)

    assert_close(run(jaxflash.dot_product_attention, placed), run(dense, qkv))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("options", _ON_A_MESH.values(), ids=_ON_A_MESH)
def test_explicit_mesh_of_the_arguments_without_jit(options):
    """Beside arrays of one device, which are not on the mesh."""
    qkv = random_qkv(8)
    placed = _sharded(qkv, _explicit_mesh(), *((("h", None, "b"),) * 3))
    options = jax.tree.map(jnp.asarray, options) if "bias" in options else options
    assert_close(jaxflash.dot_product_attention(*placed, **options), dense(*qkv, **options))


def _gradients_on_an_explicit_mesh(path, qkv, *specs, mapped=False):
    """On the kernels' path only whether the program compiles; theirs is of no use on CPUs."""
    mesh = _explicit_mesh()
    placed = _sharded(qkv, mesh, *specs)

    def loss_of(attend):
        if not mapped:
            return uneven_loss(attend)
        return uneven_loss(
            lambda *qkv, **options: jax.vmap(functools.partial(attend, **options))(*qkv)
        )

    loss = loss_of(functools.partial(jaxflash.dot_product_attention, implementation=path))
    with jax.set_mesh(mesh):
        program = _compiled(loss, path, placed)
        if path == "cuda":
            return
        actual = program(*placed)
    assert_close(actual, jax.grad(loss_of(dense), (0, 1, 2))(*qkv))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
@pytest.mark.parametrize("specs", [(("b",),) * 3, (("b", None, "h"), ("b",), ("b",))])
def test_one_key_head_on_an_explicit_mesh(path, specs):
    query, key, value = random_qkv(8)
    _gradients_on_an_explicit_mesh(path, (query, key[:, :, :1], value[:, :, :1]), *specs)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
def test_vmap_of_a_split_axis_on_an_explicit_mesh(path):
    """Whose heads are split, too."""
    specs = (("h", None, "b"),) * 3
    _gradients_on_an_explicit_mesh(path, random_qkv(8), *specs, mapped=True)


# How the operand is split that alone is on the mesh.
_ALONE = {
    "query": ("b", None, "h"),
    "key": ("h", None, "b"),
    "value": ("h",),
    "bias": ("b", "h"),
    "mask": ("b", None, "h"),
    "query_seq_lengths": ("b",),
    "key_value_seq_lengths": ("h",),
    "query_ids": ("b",),
    "key_ids": ("b", "h"),
    "sink": ("h",),
    "alibi_slopes": ("b", "h"),
    "table": ("h",),
}
if jax.__version_info__ < (0, 11):  # which does not index what is split, in any function
    del _ALONE["table"]


def _of_all_operands(attend):
    """Arrays by the names of `_ALONE`, and what gives a loss and the gradients of them."""
    rng = np.random.default_rng(0)
    arrays = dict(
        zip(("query", "key", "value"), random_qkv(8), strict=True),
        bias=rng.standard_normal((8, N, 1, S), np.float32),
        mask=rng.random((8, 1, T, S)) < 0.8,
        query_seq_lengths=_LENGTHS_ON_A_MESH,
        key_value_seq_lengths=_LENGTHS_ON_A_MESH,
        query_ids=np.tile(np.arange(T, dtype=np.int32) // 9, (8, 1)),
        key_ids=np.tile(np.arange(S, dtype=np.int32) // 9, (8, 1)),
        sink=_SLOPES_ON_A_MESH,
        alibi_slopes=np.tile(_SLOPES_ON_A_MESH, (8, 1)),
        table=rng.standard_normal((N, T), np.float32),
    )

    def loss(query, key, value, query_ids, key_ids, table, **others):
        def score_mod(score, b, h, q, kv):
            return score + table[h, q]

        ids = query_ids, key_ids
        return uneven_loss(attend, segment_ids=ids, score_mod=score_mod, **others)(
            query, key, value
        )

    def run(arrays):
        floats = {name: x for name, x in arrays.items() if x.dtype == np.float32}
        others = {name: x for name, x in arrays.items() if name not in floats}
        step = jax.value_and_grad(lambda floats, others: loss(**floats, **others))
        return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})(floats, others)

    return arrays, run


@functools.cache
def _expected_of_all_operands():
    arrays, run = _of_all_operands(dense)
    return run(arrays)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", _ALONE)
def test_explicit_mesh_of_one_argument(name):
    """Whichever it is, the others go there with it, and its gradient stays where it is."""
    arrays, run = _of_all_operands(jaxflash.dot_product_attention)
    placed = jax.tree.map(jnp.asarray, arrays)
    (placed[name],) = _sharded([arrays[name]], _explicit_mesh(), _ALONE[name])
    actual = run(placed)
    assert_close(actual, _expected_of_all_operands())
    if name in actual[1]:
        gradient = actual[1][name]
        assert gradient.sharding.is_equivalent_to(placed[name].sharding, gradient.ndim)


def test_explicit_mesh_of_two_batch_axes():
    """Which operands split over the same mesh axis."""
    qkv = [x.reshape(2, 4, *x.shape[1:]) for x in random_qkv(8)]
    placed = _sharded(qkv, _explicit_mesh(), ("b",), (None, "b"), ("b", "h"))
    gradient = jax.jit(jax.grad(uneven_loss(jaxflash.dot_product_attention), (0, 1, 2)))
    actual = gradient(*placed)
    assert_close(actual, gradient(*qkv))
    for x, y in zip(actual, placed, strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@needs_kernels
@pytest.mark.parametrize("specs", _EXPLICIT.values(), ids=_EXPLICIT)
def test_explicit_mesh_of_the_kernels(specs):
    """The output is split as the query; the program compiles, gradient included."""
    mesh = _explicit_mesh()
    arrays, _ = _explicit_case()
    placed = _sharded([arrays[name] for name in ("query", "key", "value")], mesh, *specs)
    attend = functools.partial(
        jaxflash.dot_product_attention, implementation="cuda", return_residual=True
    )
    with jax.set_mesh(mesh):
        out, lse = jax.eval_shape(attend, *placed)
        _compiled(uneven_loss(attend), "cuda", placed)
    spec = (*specs[0], None, None, None)
    assert out.sharding.spec == PartitionSpec(*spec[:3], None)
    assert lse.sharding.spec == PartitionSpec(*spec[:3])


def test_dropout_keys_of_each_example_on_an_explicit_mesh():
    """As Equinox's modules are mapped: keys are split like the examples."""
    query, keys = random_qkv(B)[0], jax.random.split(jax.random.key(0), B)

    def run(query, keys):
        def attend(x, key):
            return jaxflash.dot_product_attention(x, x, x, dropout_rate=0.3, dropout_rng=key)

        return jax.grad(lambda query: jnp.sum(jnp.sin(jax.vmap(attend)(query, keys))))(query)

    placed = _sharded((query, keys), _explicit_mesh(), ("b",), ("b",))
    with jax.set_mesh(_explicit_mesh()):
        actual = jax.jit(run)(*placed)
    assert_close(actual, run(*on_cpu([query, keys])))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("ids_spec", [(), ("b",)], ids=["whole ids", "split ids"])
def test_segments_on_an_explicit_mesh(ids_spec):
    """With the kernels as a possibility, whose ranges are computed before the platform is known."""
    mesh = _explicit_mesh()
    ids = np.tile(np.array([0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4], np.int32), (8, 1))
    query = np.random.default_rng(0).standard_normal((8, 12, N, H), np.float32)
    expected = dense(query, query, query, segment_ids=ids)
    placed = _sharded([query, ids], mesh, ("b",), ids_spec)

    def attend(query, ids):
        return jaxflash.dot_product_attention(query, query, query, segment_ids=ids)

    with jax.set_mesh(mesh):
        assert_close(jax.jit(attend)(*placed), expected)


# ---- Inside shard_map ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["xla", pytest.param("cuda", marks=needs_kernels)])
def test_partly_manual_shard_map(path):
    """One axis manual, the other left to the compiler."""
    mesh = cpu_mesh(d=2, h=2, b=2)
    attend = functools.partial(jaxflash.dot_product_attention, implementation=path)
    whole = PartitionSpec("d")
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={"d"}, check_vma=True
    )
    qkv = _sharded(random_qkv(8), mesh, *(((("d", "b"), None, "h"),) * 3))
    text = _compiled(lambda *qkv: jnp.sum(jnp.sin(mapped(*qkv))), path, qkv).as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


# The mesh is of CPU devices, whatever else the machine has.
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "specs",
    [(("b", None, "h"),) * 3, (("b", None, "h"), (None, None, "h"), (None, None, "h"))],
    ids=["all", "shared keys"],
)
def test_shard_map(specs):
    """With the check of varying axes, which also asks it of the gradients and of a scan's carry."""
    mesh = cpu_mesh(b=4, h=2)
    query, key, value = random_qkv(8)
    if specs[1][0] is None:
        key, value = key[:1], value[:1]
    specs = tuple(PartitionSpec(*spec) for spec in specs)

    def of(attend, shard):
        def per_device(query, key, value):
            batch = (query.shape[0],)
            key, value = (jnp.broadcast_to(x, batch + x.shape[1:]) for x in (key, value))

            def layer(x, _):
                return x + attend(x, key, value, is_causal=True), None

            return jax.lax.scan(layer, query, None, length=2)[0]

        run = per_device
        if shard:
            run = jax.shard_map(
                per_device, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=True
            )
        return jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(run(*qkv))), (0, 1, 2)))(
            query, key, value
        )

    assert_close(of(jaxflash.dot_product_attention, True), of(dense, False))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("key_is_split", [False, True])
def test_dropout_in_shard_map(key_is_split):
    """Each device counts its own batch elements; with a key for all, or one for each."""
    mesh = cpu_mesh(b=4, rest=2)
    query, key, value = random_qkv(8)
    options = dict(dropout_rate=0.3, is_causal=True)

    def per_device(query, key, value, rng):
        if key_is_split:
            rng = jax.random.fold_in(rng, jax.lax.axis_index("b"))
        return jaxflash.dot_product_attention(query, key, value, dropout_rng=rng, **options)

    split = PartitionSpec("b")
    run = jax.shard_map(
        per_device, mesh=mesh, in_specs=(split, split, split, PartitionSpec()), out_specs=split
    )
    rng = jax.random.key(3)
    rngs = [jax.random.fold_in(rng, i) if key_is_split else rng for i in range(4)]
    expected = [
        dense(*(x[2 * i : 2 * i + 2] for x in (query, key, value)), dropout_rng=rngs[i], **options)
        for i in range(4)
    ]
    assert_close(jax.jit(run)(query, key, value, rng), jnp.concatenate(expected))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", ["segments", "packed"])
def test_segments_in_a_partly_manual_shard_map(kind):
    """JAX cannot scan for their ranges there."""
    mesh = cpu_mesh(d=2, rest=2)
    ids = np.array([[0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2]], np.int32)
    boundaries = np.array([[0, 2, 5, 8], [0, 1, 7, 8]], np.int32)
    query = np.random.default_rng(0).standard_normal((2, 8, N, H), np.float32)

    def attend(query, ids, boundaries):
        if kind == "segments":
            return jaxflash.dot_product_attention(query, query, query, segment_ids=ids)
        packed, boundaries = query[0], boundaries[0]
        return jaxflash.varlen_attention(packed, packed, packed, boundaries, boundaries)[None]

    split = PartitionSpec("d")
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(split,) * 3, out_specs=split, axis_names={"d"}
    )
    expected = dense(query, query, query, segment_ids=ids)
    assert_close(jax.jit(mapped)(query, ids, boundaries), expected)


@pytest.mark.usefixtures("cpu")
def test_ring_of_partial_results():
    """Keys split over devices: each merges what it makes of every part, as it comes around."""
    mesh = cpu_mesh(s=4, rest=2)
    query, key, value = random_qkv(B)

    def per_device(query, key, value):
        outs, lses = [], []
        for _ in range(4):
            out, lse = jaxflash.dot_product_attention(query, key, value, return_residual=True)
            outs.append(out)
            lses.append(lse)
            shift = [(i, (i + 1) % 4) for i in range(4)]
            key, value = (jax.lax.ppermute(x, "s", shift) for x in (key, value))
        return jaxflash.merge_attention(jnp.stack(outs), jnp.stack(lses))[0]

    keys = PartitionSpec(None, "s")
    run = jax.shard_map(
        per_device, mesh=mesh, in_specs=(keys, keys, keys), out_specs=keys, check_vma=True
    )

    def loss(f):
        return jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(f(*qkv))), (0, 1, 2)))

    assert_close(loss(run)(query, key, value), loss(dense)(query, key, value))
