"""What is accepted, and every error: its type, and that the text names the argument."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from jaxflash import _extension, _support, masks
from marks import needs_kernels

T, S, N, K, H, VALUE = 6, 5, 4, 2, 8, 3
pytestmark = pytest.mark.usefixtures("accurate_products")
BATCH = (2,)


def _arrays(**changes):
    arrays = dict(
        query=np.ones((*BATCH, T, N, H), np.float32),
        key=np.ones((*BATCH, S, K, H), np.float32),
        value=np.ones((*BATCH, S, K, VALUE), np.float32),
    )
    return {**arrays, **changes}


def _ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# What the kernels do not take.
_REFUSED = dict(
    score_mod=lambda score, b, h, q, kv: jax.lax.fori_loop(0, h, lambda i, x: 0.5 * x, score)
)


# id: (arguments that replace or join good ones, words that the text must have)
ERRORS = {
    "query not an array": (dict(query="abc"), ["query", "str"]),
    "value None": (dict(value=None), ["value", "None"]),
    "query rank": (dict(query=_ones(T, H)), ["query", "(6, 8)"]),
    "key rank": (dict(key=_ones(S, K, H)), ["key", "(5, 2, 8)"]),
    "query integer": (dict(query=_ones(*BATCH, T, N, H, dtype=np.int32)), ["query", "int32"]),
    "key dtype": (dict(key=_ones(*BATCH, S, K, H, dtype=np.float16)), ["key", "float16"]),
    "value dtype": (dict(value=_ones(*BATCH, S, K, H, dtype=np.float16)), ["value", "float16"]),
    "key batch": (dict(key=_ones(3, S, K, H)), ["key", "(3, 5, 2, 8)"]),
    "value batch": (dict(value=_ones(1, S, K, H)), ["value", "(1, 5, 2, 8)"]),
    "key head size": (dict(key=_ones(*BATCH, S, K, H + 1)), ["key", "head size", "9"]),
    "query head size 0": (dict(query=_ones(*BATCH, T, N, 0)), ["query", "head size"]),
    "value head size 0": (dict(value=_ones(*BATCH, S, K, 0)), ["value", "head size"]),
    "value length": (dict(value=_ones(*BATCH, S + 1, K, H)), ["value", "(6, 2)"]),
    "value heads": (dict(value=_ones(*BATCH, S, K + 1, H)), ["value", "(5, 3)"]),
    "head counts": (dict(query=_ones(*BATCH, T, 3, H)), ["query heads", "3", "2"]),
    "heads before the length": (
        dict(
            query=_ones(*BATCH, N, T, H), key=_ones(*BATCH, N, S, H), value=_ones(*BATCH, N, S, H)
        ),
        ["query heads", "query (2, 4, 6, 8)", "key (2, 4, 5, 8)", "length, heads"],
    ),
    "value heads before the length": (
        dict(value=_ones(*BATCH, K, S, VALUE)),
        ["value", "query (2, 6, 4, 8)", "key (2, 5, 2, 8)", "value (2, 2, 5, 3)"],
    ),
    "no key heads": (
        dict(key=_ones(*BATCH, S, 0, H), value=_ones(*BATCH, S, 0, H)),
        ["key heads", "0"],
    ),
    "bias integer": (dict(bias=_ones(T, S, dtype=np.int32)), ["bias", "int32"]),
    "bias bool": (dict(bias=_ones(T, S, dtype=bool)), ["bias", "bool", "mask"]),
    "bias shape": (dict(bias=_ones(2, T, S)), ["bias", "(2, 6, 5)", "(2, 4, 6, 5)"]),
    "bias of key heads": (dict(bias=_ones(*BATCH, K, T, S)), ["bias", "(2, 2, 6, 5)"]),
    "bias rank": (dict(bias=_ones(3, *BATCH, N, T, S)), ["bias", "(3, 2, 4, 6, 5)"]),
    "mask float": (dict(mask=_ones(T, S)), ["mask", "bool", "float32"]),
    "mask integer": (dict(mask=_ones(T, S, dtype=np.int32)), ["mask", "bool", "int32"]),
    "mask shape": (dict(mask=_ones(S, T, dtype=bool)), ["mask", "(5, 6)"]),
    "scale text": (dict(scale="big"), ["scale"]),
    "scale bytes": (dict(scale=b"2"), ["scale", "real number", "b'2'"]),
    "scale too large": (dict(scale=10**400), ["scale", "int"]),
    "scale array": (dict(scale=_ones(2)), ["scale"]),
    "scale abstract array": (
        dict(scale=jax.ShapeDtypeStruct((2,), np.float32)),
        ["scale", "(2,)", "float32"],
    ),
    "scale NaN": (dict(scale=float("nan")), ["scale", "nan"]),
    "scale infinite": (dict(scale=float("inf")), ["scale", "inf"]),
    "is_causal": (dict(is_causal="yes"), ["is_causal", "yes"]),
    "query lengths float": (dict(query_seq_lengths=_ones(*BATCH)), ["query_seq_lengths", "float"]),
    "key lengths float": (
        dict(key_value_seq_lengths=_ones(*BATCH)),
        ["key_value_seq_lengths", "int32", "float32"],
    ),
    "query lengths shape": (
        dict(query_seq_lengths=_ones(3, dtype=np.int32)),
        ["query_seq_lengths", "(3,)", "(2,)"],
    ),
    "key lengths too large": (
        dict(key_value_seq_lengths=[3, 2**40]),
        ["key_value_seq_lengths", "int32"],
    ),
    "key lengths shape": (
        dict(key_value_seq_lengths=_ones(2, 1, dtype=np.int32)),
        ["key_value_seq_lengths", "(2, 1)"],
    ),
    "window negative": (dict(local_window_size=-1), ["local_window_size", "-1"]),
    "window side negative": (dict(local_window_size=(3, -2)), ["local_window_size", "-2"]),
    "window flag": (dict(local_window_size=True), ["local_window_size", "True"]),
    "window float": (dict(local_window_size=2.5), ["local_window_size", "2.5"]),
    "window triple": (dict(local_window_size=(1, 2, 3)), ["local_window_size", "(1, 2, 3)"]),
    "implementation": (dict(implementation="cudnn"), ["implementation", "cudnn", "xla"]),
    "implementation type": (dict(implementation=3), ["implementation", "3"]),
    "segment ids float": (dict(segment_ids=_ones(*BATCH, T)), ["segment_ids", "float32"]),
    "segment ids shape": (
        dict(segment_ids=(_ones(*BATCH, T, dtype=np.int32), _ones(*BATCH, T, dtype=np.int32))),
        ["segment_ids", "key", "(2, 5)", "(2, 6)"],
    ),
    "segment ids shared by other lengths": (
        dict(segment_ids=_ones(*BATCH, T, dtype=np.int32)),
        ["segment_ids", "pair", "(2, 6)", "(2, 5)"],
    ),
    "segment ids of one side": (
        dict(segment_ids=(_ones(*BATCH, T, dtype=np.int32), None)),
        ["segment_ids of the key side", "None"],
    ),
    "segment ids triple": (
        dict(segment_ids=(_ones(*BATCH, T, dtype=np.int32),) * 3),
        ["segment_ids", "3"],
    ),
    "alignment": (dict(causal_alignment="bottom_left"), ["causal_alignment", "bottom_left"]),
    "soft cap zero": (dict(logits_soft_cap=0.0), ["logits_soft_cap", "0.0"]),
    "soft cap negative": (dict(logits_soft_cap=-1.0), ["logits_soft_cap", "-1.0"]),
    "soft cap text": (dict(logits_soft_cap="x"), ["logits_soft_cap"]),
    "soft cap beyond float32": (
        dict(logits_soft_cap=1e39),
        ["logits_soft_cap", "float32", "1e+39"],
    ),
    "soft cap below float32": (
        dict(logits_soft_cap=1e-39),
        ["logits_soft_cap", "float32", "1e-39"],
    ),
    "scale beyond float32": (dict(scale=-1e39), ["scale", "float32", "-1e+39"]),
    "scale complex": (dict(scale=np.complex64(1 + 5j)), ["scale", "real number", "1+5j"]),
    "scale bool": (dict(scale=np.bool_(True)), ["scale", "real number", "True"]),
    "sink shape": (dict(sink=_ones(K)), ["sink", "(2,)", "(4,)"]),
    "sink integer": (dict(sink=_ones(N, dtype=np.int32)), ["sink", "int32"]),
    "alibi shape": (dict(alibi_slopes=_ones(3, N)), ["alibi_slopes", "(3, 4)"]),
    "dropout rate 1": (dict(dropout_rate=1.0), ["dropout_rate", "1.0"]),
    "dropout rate negative": (dict(dropout_rate=-0.1), ["dropout_rate", "-0.1"]),
    "dropout rate NaN": (dict(dropout_rate=float("nan")), ["dropout_rate", "nan"]),
    "dropout without key": (dict(dropout_rate=0.5), ["dropout_rng", "0.5"]),
    "dropout key text": (
        dict(dropout_rate=0.5, dropout_rng="x"),
        ["dropout_rng must be a PRNG key", "str"],
    ),
    "dropout key float": (dict(dropout_rate=0.5, dropout_rng=_ones(2)), ["dropout_rng", "float32"]),
    "dropout key shape": (
        dict(dropout_rate=0.5, dropout_rng=_ones(3, 2, dtype=np.uint32)),
        ["dropout_rng", "(3, 2)"],
    ),
    "precision": (dict(precision="exact"), ["precision", "exact"]),
    "deterministic_backward": (dict(deterministic_backward=1), ["deterministic_backward", "1"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_names_the_argument(name):
    changes, words = ERRORS[name]
    arguments = _arrays(**changes)
    for function in (
        jaxflash.dot_product_attention,
        jaxflash.supported,
        # At trace time: nothing has to run.
        lambda **kwargs: jax.eval_shape(lambda: jaxflash.dot_product_attention(**kwargs)),
    ):
        with pytest.raises(ValueError, match=words[0]) as caught:
            function(**arguments)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


@pytest.mark.parametrize("name", [n for n in ERRORS if not n.startswith("implementation")])
def test_reference_has_the_same_errors(name):
    changes, words = ERRORS[name]
    with pytest.raises(ValueError, match=words[0]):
        jaxflash.reference.dot_product_attention(**_arrays(**changes))


@pytest.mark.parametrize("name", ["logits_soft_cap", "dropout_rate"])
def test_traced_numbers_are_refused(name):
    def traced(number):
        return jaxflash.dot_product_attention(**_arrays(), **{name: number})

    with pytest.raises(ValueError, match=f"{name} must be a Python number"):
        jax.jit(traced)(0.5)


def test_unknown_argument():
    with pytest.raises(TypeError, match="causal"):
        jaxflash.dot_product_attention(**_arrays(), causal=True)
    with pytest.raises(TypeError, match=r"'causal'.* is_causal"):
        jaxflash.supported(**_arrays(), causal=True)


@pytest.mark.parametrize("name", ["is_causal", "return_residual", "deterministic_backward"])
def test_traced_flags_are_refused(name):
    def traced(flag):
        return jaxflash.dot_product_attention(**_arrays(), **{name: flag})

    with pytest.raises(ValueError, match=f"{name} must be known at trace time.*static_argnames"):
        jax.jit(traced)(True)


# ---- What jax.nn accepts ------------------------------------------------------------------------


def test_signature_extends_jax_nn():
    ours = inspect.signature(jaxflash.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    assert list(ours) == list(
        inspect.signature(jaxflash.reference.dot_product_attention).parameters
    )


_JAX_NN_CALLS = {
    "4-D": dict(),
    "3-D": dict(batch=()),
    "bias 4-D": dict(bias=(2, 4, 6, 5)),
    "bias 4-D broadcast": dict(bias=(1, 4, 1, 5)),
    "bias 3-D": dict(bias=(4, 6, 5)),
    "bias 2-D": dict(bias=(6, 5)),
    "bias 1-D": dict(bias=(5,)),
    "bias 4-D unbatched": dict(batch=(), bias=(1, 4, 6, 5)),
    "mask 4-D": dict(mask=(2, 1, 6, 5)),
    "mask 3-D": dict(mask=(4, 6, 5)),
    "mask 2-D": dict(mask=(6, 5)),
    "mask 4-D unbatched": dict(batch=(), mask=(1, 1, 6, 5)),
    "lengths": dict(lengths=(2,)),
    "lengths unbatched": dict(batch=(), lengths=(1,)),
    "query lengths": dict(query_lengths=(2,)),
    "window int": dict(options=dict(local_window_size=2)),
    "window pair": dict(options=dict(local_window_size=(2, 1))),
    "scale int": dict(options=dict(scale=2)),
    "scale numpy": dict(options=dict(scale=np.float32(0.5))),
    "causal": dict(options=dict(is_causal=True)),
}


@pytest.mark.parametrize("name", _JAX_NN_CALLS)
def test_takes_what_jax_nn_takes(name):
    row = _JAX_NN_CALLS[name]
    rng = np.random.default_rng(0)
    batch = row.get("batch", BATCH)
    arguments = dict(
        query=rng.standard_normal((*batch, T, N, H), np.float32),
        key=rng.standard_normal((*batch, S, K, H), np.float32),
        value=rng.standard_normal((*batch, S, K, H), np.float32),
        **row.get("options", {}),
    )
    if "bias" in row:
        arguments["bias"] = rng.standard_normal(row["bias"], np.float32)
    if "mask" in row:
        arguments["mask"] = rng.random(row["mask"]) < 0.8
        arguments["mask"][..., 0] = True
    if "lengths" in row:
        arguments["key_value_seq_lengths"] = np.arange(2, 2 + row["lengths"][0]).astype(np.int32)
    if "query_lengths" in row:
        arguments["query_seq_lengths"] = np.arange(3, 5).astype(np.int32)
    with jax.numpy_dtype_promotion("standard"):  # with 64-bit types, its lengths meet int64
        expected = jax.nn.dot_product_attention(**arguments)
    actual = jaxflash.dot_product_attention(**arguments)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_takes_lists_and_numpy():
    query = np.ones((T, N, H), np.float32)
    attend = functools.partial(jaxflash.dot_product_attention, implementation="xla")
    for given in (query, query.tolist()):  # of floats: with 64-bit types, those
        out = attend(given, given, given)
        assert isinstance(out, jax.Array)
        array = jnp.asarray(given)
        expected = attend(array, array, array)
        assert out.dtype == expected.dtype
        np.testing.assert_array_equal(out, expected)


# ---- The choice of the implementation -----------------------------------------------------------


def test_masks_that_were_not_made():
    qkv = (jnp.ones((1, 4, 2, 8)),) * 3
    with pytest.raises(ValueError, match="got causal without its arguments: call it"):
        jaxflash.dot_product_attention(*qkv, mask=masks.causal)
    with pytest.raises(ValueError, match="makes one of a function"):
        jaxflash.dot_product_attention(*qkv, mask=lambda b, h, q, kv: q > kv)


def test_traced_window():
    qkv = (jnp.ones((1, 4, 2, 8)),) * 3
    attend = jax.jit(lambda side: jaxflash.dot_product_attention(*qkv, local_window_size=side))
    message = r"local_window_size .* traced int\d\d: .* static_argnames"
    with pytest.raises(ValueError, match=message):
        attend(2)


def test_supported_without_arrays():
    def shapes(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    q = shapes(1, 128, 4, 64)
    always = jaxflash.supported(q, q, q)  # () where the library has kernels and the machine a GPU
    assert len(always) <= 1
    if jax.default_backend() == "gpu":
        assert not always
    elif "without CUDA kernels" in always[0]:
        return
    else:
        assert "no NVIDIA GPU" in always[0] or "compute capability" in always[0]
    reasons = jaxflash.supported(
        q, q, q, shapes(128, 128), shapes(128, 128, dtype=jnp.bool_), logits_soft_cap=5.0,
        sink=shapes(4), dropout_rate=0.1, dropout_rng=jax.random.key(0),
    )  # fmt: skip
    for name in ("mask", "bias", "logits_soft_cap", "sink", "dropout_rate"):
        assert not any(name in reason for reason in reasons), name
    large = shapes(1, 128, 4, 257)
    assert any("257" in reason for reason in jaxflash.supported(large, large, large))
    double = shapes(1, 128, 4, 64, dtype=jnp.float64)
    assert any("float64" in reason for reason in jaxflash.supported(double, double, double))


@needs_kernels
def test_cuda_names_every_reason_at_once():
    refused = dict(
        query=_ones(*BATCH, T, N, 300), key=_ones(*BATCH, S, K, 300), **_REFUSED
    )  # fmt: skip
    call = _arrays(**refused)
    with pytest.raises(NotImplementedError) as caught:
        jaxflash.dot_product_attention(**call, implementation="cuda")
    # The machine's do not matter before the program is lowered.
    reasons = set(jaxflash.supported(**call)) - set(jaxflash.supported(**_arrays()))
    assert len(reasons) == 2
    for reason in reasons:
        assert reason in str(caught.value)
    for word in ("head size 300", "score_mod", "while", "'xla'"):
        assert word in str(caught.value)


@needs_kernels
@pytest.mark.parametrize(
    ("length", "options", "word"),
    [
        (2**30 + 1, dict(), "at most 2**30"),
        (2**24 + 1, dict(alibi_slopes=_ones(N)), None),
        (
            2**24 + 1,
            dict(
                score_mod=lambda score, b, h, q, kv: score + 0.1 * (q - kv).astype(jnp.float32),
                is_causal=True, causal_alignment="bottom_right",
            ),
            "at most 16777216",
        ),
    ],
    ids=["index", "slopes", "difference"],
)  # fmt: skip
def test_lengths_that_the_kernels_do_not_take(length, options, word):
    x = jax.ShapeDtypeStruct((length, N, 64), jnp.bfloat16)
    machine = set(jaxflash.supported(*(jax.ShapeDtypeStruct((8, N, 64), jnp.bfloat16),) * 3))
    reasons = set(jaxflash.supported(x, x, x, **options)) - machine
    if word is None:
        assert not reasons
    else:
        assert len(reasons) == 2  # of query and key
        assert all(word in reason for reason in reasons)


@needs_kernels
def test_kernels_on_a_cpu_are_an_error_that_says_so():
    """As documentation promises, when the platform is known: eagerly, compiled, in a gradient and
    for an exported program; tracing alone, or lowering for CUDA, is no error."""
    cpu = jax.devices("cpu")[0]
    arrays = jax.device_put(list(_arrays().values()), cpu)
    attend = functools.partial(jaxflash.dot_product_attention, implementation="cuda")

    def loss(*arrays):
        return jnp.sum(attend(*arrays))

    for run in (
        attend,
        jax.jit(attend),
        jax.grad(loss),
        jax.vmap(attend),
        jax.export.export(jax.jit(attend), platforms=["cpu", "cuda"]),
        jax.jit(attend).lower,
    ):
        with pytest.raises(NotImplementedError, match="'cuda' needs an NVIDIA GPU"):
            run(*arrays)
    jax.make_jaxpr(attend)(*arrays)
    jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cuda",))
    # The process survives.
    jax.block_until_ready(jaxflash.dot_product_attention(*arrays))


def _lowering_warnings(*platforms, fresh=True, function=None, **options):
    """Texts of the warnings of the slow path when a call is lowered."""
    if fresh:
        _support._warned.clear()
    attend = functools.partial(jaxflash.dot_product_attention, **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = jax.jit((function or (lambda f: f))(attend)).trace(*_arrays().values())
        assert not caught  # the platform is not known yet
        traced.lower(lowering_platforms=platforms)
    assert all(issubclass(w.category, jaxflash.SlowPathWarning) for w in caught)
    return [str(w.message) for w in caught]


def test_slow_path_on_cuda_warns():
    """Once for each reason, where CUDA is the target and nobody asked for the blockwise path."""
    reason = "score_mod" if _extension.kernels else "without CUDA kernels"
    (text,) = _lowering_warnings("cuda", **_REFUSED)
    assert reason in text
    assert "SlowPathWarning" in text
    assert _lowering_warnings("cuda", fresh=False, **_REFUSED) == []
    if _extension.kernels:
        assert _lowering_warnings("cuda") == []  # the kernels
    assert _lowering_warnings("cpu", **_REFUSED) == []
    # As jax.export has it, and from no cache.
    for _ in range(2):
        assert _lowering_warnings("cpu", "cuda", **_REFUSED) == [text]
    assert _lowering_warnings("cuda", **_REFUSED, implementation="xla") == []


@needs_kernels
@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "score_mod"])
@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_gradients_of_captures_on_cuda(name, implementation):
    """They are the kernels', of which nobody warns; where additions have no order and must have
    one, the warning says why, once."""
    shape = dict(bias=(N, T, S), score_mod=(N, T + S), alibi_slopes=(N,))[name]
    x = jnp.ones(shape, jnp.float32)

    def lowering_warnings(fresh, **options):
        def gradient(attend):
            def loss(x, query, key, value):
                option = x
                if name == "score_mod":
                    option = lambda score, b, h, q, kv: score + x[h, q - kv + S]  # noqa: E731
                options_of_call = {name: option, **options, "implementation": implementation}
                return jnp.sum(attend(query, key, value, **options_of_call))

            return lambda *qkv: jax.grad(loss, (0, 1))(x, *qkv)

        return _lowering_warnings("cuda", fresh=fresh, function=gradient)

    assert lowering_warnings(True) == []
    texts = lowering_warnings(True, deterministic_backward=True)
    if name != "score_mod":
        assert texts == []
        return
    (text,) = texts
    assert "gradients of captured arrays" in text
    assert "deterministic_backward with the gradient of an array that score_mod reads" in text
    assert lowering_warnings(False, deterministic_backward=True) == []


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "read", "cause"),
    [
        ((N, T + S), lambda x, b, h, q, kv: x[h, q - kv + S], "at an index computed of q or kv"),
        ((N, T - 1), lambda x, b, h, q, kv: x[h, q], "at q along an axis that is not as long"),
        ((S, S), lambda x, b, h, q, kv: x[kv, kv], "at kv in two axes"),
        ((N, 20_000), lambda x, b, h, q, kv: x[h, 2 * b], f"have {N * 20_000} elements"),
        ((N, 60_000 // N), lambda x, b, h, q, kv: x[h, 2 * b], None),
        ((N, T), lambda x, b, h, q, kv: x[h, q], None),
    ],
)
def test_why_additions_have_no_order(shape, read, cause):
    """The warning names what is in the way of this array."""

    def gradient(attend):
        def loss(x, *qkv):
            return jnp.sum(attend(*qkv, score_mod=lambda score, *i: score + read(x, *i)))

        return lambda *qkv: jax.grad(loss)(jnp.ones(shape, jnp.float32), *qkv)

    texts = _lowering_warnings("cuda", function=gradient, deterministic_backward=True)
    assert len(texts) == (cause is not None)
    assert all("an array that score_mod reads" in text and cause in text for text in texts)


def test_slow_path_warning_can_be_an_error():
    _support._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxflash.SlowPathWarning)
        attend = functools.partial(jaxflash.dot_product_attention, **_REFUSED)
        traced = jax.jit(attend).trace(*_arrays().values())
        for _ in range(2):
            with pytest.raises(jaxflash.SlowPathWarning):
                traced.lower(lowering_platforms=("cuda",))


def test_precision_follows_jax():
    """The spec's one decision about precision, for every way to say it."""
    from jaxflash import _spec

    def highest(precision):
        options = dict(jaxflash.dot_product_attention.__kwdefaults__, precision=precision)
        del options["implementation"], options["return_residual"], options["score_mod"]
        return _spec.make(**_arrays(), bias=None, mask=None, **options)[0].highest_precision

    with jax.default_matmul_precision(None):
        assert not highest(None)
    assert not highest("default")
    assert not highest(jax.lax.Precision.DEFAULT)
    assert highest("highest")
    assert highest(jax.lax.Precision.HIGHEST)
    assert highest((jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST))
    with jax.default_matmul_precision("highest"):
        assert highest(None)
        assert not highest("default")
    for name in ("tensorfloat32", "bfloat16", "high"):
        with jax.default_matmul_precision(name):
            assert highest(None) == highest(name)
    presets = jax.lax.DotAlgorithmPreset
    for preset in (presets.F32_F32_F32, presets.TF32_TF32_F32_X3, presets.BF16_BF16_F32_X6):
        assert highest(preset)
        assert highest(preset.name)
        with jax.default_matmul_precision(preset.name):
            assert highest(None)
    for preset in (presets.DEFAULT, presets.TF32_TF32_F32, presets.BF16_BF16_F32):
        assert not highest(preset)
        assert not highest(preset.name)
    assert highest(jax.lax.DotAlgorithm(np.float32, np.float32, np.float32))
    assert not highest(jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, np.float32))


def test_signed_and_unsigned_segment_ids_stay_different():
    x = np.ones((2, 1, 4), np.float32)
    ids = np.array([0, 2**32 - 1], np.uint32), np.array([0, -1], np.int32)
    attend = functools.partial(
        jaxflash.dot_product_attention, x, x, x, scale=0.0, return_residual=True
    )
    with jax.enable_x64(True):
        np.testing.assert_array_equal(attend(segment_ids=ids)[1][:, 0], [0, -np.inf])
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"segment_ids.*uint32 and int32"):
        attend(segment_ids=ids)
    narrow = np.array([0, 255], np.uint8), np.array([0, -1], np.int8)
    np.testing.assert_array_equal(attend(segment_ids=narrow)[1][:, 0], [0, -np.inf])


def test_abstract_dropout_keys_are_checked():
    arrays = _arrays()
    for rng in (
        jax.ShapeDtypeStruct((3, 4), jnp.float32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2)),
    ):
        with pytest.raises(ValueError, match="dropout_rng"):
            jaxflash.supported(**arrays, dropout_rate=0.1, dropout_rng=rng)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    assert not any("dropout" in x for x in jaxflash.supported(**arrays, dropout_rng=rng))


def test_wide_segment_ids_stay_different():
    """Ids of 64 bits that agree in their low half are not equal."""
    x = np.ones((2, 1, 4), np.float32)
    with jax.enable_x64(True):
        ids = jnp.array([1, 1 + 2**32])
        _, lse = jaxflash.dot_product_attention(
            x, x, x, segment_ids=ids, scale=0.0, return_residual=True
        )
    np.testing.assert_allclose(lse, np.zeros((2, 1)), atol=1e-6)
