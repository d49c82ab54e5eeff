"""Numbers that the field's texts work out by hand, and published sizes, against the library's own functions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.data import packing
from jaxformer.nn.attend import attend

pytestmark = pytest.mark.usefixtures("quick_compilation")
HAND = {"rtol": 0, "atol": 5e-7}  # the numbers are given to six decimals


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def soft_selection(scores):
    """Weights of one query of width 1, so that the scale is 1 and the scores are the keys themselves."""
    seen = []
    keys = jnp.asarray(scores, jnp.float32).reshape(1, 1, -1, 1)
    ones = jnp.ones((1, 1, 1, 1, 1))
    mask = np.ones((1, 1, len(scores)), bool)
    for given in (None, mask):  # with and without a mask are two programs
        attend(ones, keys, keys, given, observe=lambda w: seen.append(w) or w)
    np.testing.assert_array_equal(*seen)
    return np.asarray(seen[0]).ravel()


def test_attention_by_hand():
    cfg = jf.ModelConfig(vocab_size=3, d_model=2, n_layers=1, n_heads=1, position="none")
    eye = jnp.eye(2)
    value = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    params = {"query": eye[:, None, None], "key": eye[:, None], "value": value[:, None], "out": eye[None, None]}
    x = jnp.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    (out, _), seen = jf.capture(lambda x: jf.attention.apply(params, x, cfg), "weights")(x)
    weights = seen["weights"][0, 0, 0]
    np.testing.assert_array_equal(weights[0], [1, 0, 0])
    np.testing.assert_allclose(weights[2], [0.248255, 0.248255, 0.503490], **HAND)
    np.testing.assert_allclose(out[0, 2], [3.006980, 4.510470], rtol=1e-6)


def test_soft_selection():
    np.testing.assert_allclose(soft_selection([1, 4, 2]), [0.0420, 0.8438, 0.1142], atol=5e-5)  # given to four decimals


def test_saturated_softmax():
    np.testing.assert_allclose(soft_selection([100, 0, -100]), [1, 0, 0], atol=1e-40)
    np.testing.assert_array_equal(soft_selection([1000, 1000]), [0.5, 0.5])


def test_layer_norm_of_1_2_3():
    cfg = jf.ModelConfig(vocab_size=3, d_model=3, n_layers=1, n_heads=1, norm_eps=1e-12, position="none")
    y = np.asarray(jf.norm.apply({"gain": jnp.ones(3), "bias": jnp.zeros(3)}, jnp.array([1.0, 2.0, 3.0]), cfg))
    assert y[1] == 0  # the mean is 2
    np.testing.assert_allclose(1 / y[2] ** 2, 2 / 3, rtol=1e-6)  # the variance is 2/3: y = (3 - 2) / sqrt(variance)


@pytest.mark.parametrize(("width", "heads", "expected"), [(512, 8, 64), (12_288, 96, 128)])
def test_head_width(width, heads, expected):
    cfg = jf.ModelConfig(vocab_size=3, d_model=width, n_layers=1, n_heads=heads)
    assert cfg.head_dim == expected
    assert jf.attention.spec(cfg)["query"].shape(cfg) == (width, heads, 1, expected)


def test_embedding_size():
    cfg = jf.ModelConfig(vocab_size=50_000, d_model=4096, n_layers=1, n_heads=32)
    assert math.prod(jf.model.spec(cfg)["embedding"]["token"].shape(cfg)) == 204_800_000


def test_embedding_is_a_product_with_one_hot_rows():
    cfg = jf.ModelConfig(vocab_size=7, d_model=4, n_layers=1, n_heads=1)
    table, ids = draw(7, 4), jnp.array([[3, 0, 6]])
    np.testing.assert_array_equal(
        jf.model.embed({"embedding": {"token": table}}, ids, cfg), jax.nn.one_hot(ids, 7, dtype=jnp.float32) @ table
    )


def test_causal_mask_of_length_3():
    info = jf.mask.arange(3)
    mask = jf.mask.visible(info, info, causal=True)
    np.testing.assert_array_equal(mask[0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    seen = []
    q, k, v = draw(1, 1, 1, 3, 4), draw(1, 1, 3, 4), draw(1, 1, 3, 4)
    attend(q, k, v, mask, observe=lambda w: seen.append(w) or w)
    np.testing.assert_array_equal(seen[0][0, 0, 0] > 0, mask[0])  # -inf before the softmax is exactly 0 after it


def test_variance_of_scores_is_the_head_width_unscaled_and_1_scaled():
    q, k = draw(1, 1, 1, 500, 64), draw(1, 1, 500, 64, seed=1)
    seen = []
    attend(q, k, k, None, observe=lambda w: seen.append(w) or w)
    scaled = np.log(seen[0])  # scores but for a constant a query
    unscaled = np.einsum("th,sh->ts", q[0, 0, 0], k[0, 0])
    # 500 · 64 numbers give the variance to about 1%
    np.testing.assert_allclose([unscaled.var(), scaled.var(-1).mean()], [64, 1], rtol=0.05)


def count(spec, cfg):
    return jf.spec.count(spec, cfg)


def test_feed_forward_is_two_thirds_of_a_block():
    cfg = jf.ModelConfig(vocab_size=3, d_model=96, n_layers=1, n_heads=4, mlp="relu")
    mlp, attention = count(jf.mlp.spec(cfg), cfg), count(jf.attention.spec(cfg), cfg)
    assert (mlp, attention) == (8 * 96**2, 4 * 96**2)
    swiglu = dataclasses.replace(cfg, mlp="swiglu", d_ff=64)
    assert count(jf.mlp.spec(swiglu), swiglu) == 3 * 96 * 64


def shapes(cfg, batch, length):
    """Shapes of a block's named activations and output; nothing is computed."""
    params = jf.spec.abstract(jf.block.spec(cfg), cfg)
    x = jax.ShapeDtypeStruct((batch, length, cfg.d_model), jnp.float32)
    _, seen = jax.eval_shape(jf.capture(lambda p, x: jf.block.apply(p, x, cfg)), params, x)
    return {name.removeprefix("attention."): x.shape for name, x in seen.items()}


def test_shape_walk():
    """B 1, T 4, D 8, 2 heads of width 4; heads are [B, K, G, T, H] with one query head to a key/value head."""
    cfg = jf.ModelConfig(vocab_size=3, d_model=8, n_layers=1, n_heads=2)
    assert shapes(cfg, 1, 4) == {
        **{"query": (1, 2, 1, 4, 4), "key": (1, 2, 4, 4), "value": (1, 2, 4, 4)},
        **{"weights": (1, 2, 1, 4, 4), "mixed": (1, 2, 1, 4, 4)},
        **{"mlp.up": (1, 4, 32), "mlp.hidden": (1, 4, 32), "mlp.out": (1, 4, 8), "out": (1, 4, 8)},
    }


def test_shape_walk_of_the_2017_sizes():
    cfg = jf.presets.transformer_base()
    found = shapes(cfg, 1, 100)
    assert found["query"] == (1, 8, 1, 100, 64)
    assert found["weights"] == (1, 8, 1, 100, 100)
    assert jf.attention.spec(cfg)["out"].shape(cfg) == (8, 1, 64, 512)  # 8 heads side by side are 512 inputs
    assert found["mlp.hidden"] == (1, 100, 2048)
    assert found["out"] == (1, 100, 512)


def test_a_cached_step_has_query_length_1_and_key_length_the_history():
    cfg = jf.ModelConfig(vocab_size=3, d_model=8, n_layers=2, n_heads=4, n_kv_heads=2)
    params = jf.spec.abstract(jf.model.spec(cfg), cfg)
    cache = jax.eval_shape(lambda: jf.init_cache(cfg, 1, 5))
    for layer in cache.layers:
        assert sum(math.prod(x.shape) for x in layer.values()) == 2 * 5 * 2 * 2  # 2 · S · K · H
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    _, seen = jax.eval_shape(jf.capture(lambda p, t, c: jf.forward_cached(p, t, cfg, c), "*weights"), params, token, cache)
    assert {x.shape for x in seen.values()} == {(1, 2, 2, 1, 5)}


def test_head_0_is_the_first_columns_of_one_projection():
    cfg = jf.ModelConfig(vocab_size=3, d_model=8, n_layers=1, n_heads=2)
    kernel, x = draw(8, 8), draw(1, 4, 8, seed=1)
    heads = jf.attention.query({"query": kernel.reshape(8, 2, 1, 4)}, x, cfg)
    np.testing.assert_allclose(heads[0, 0, 0], (x @ kernel)[0, :, :4], rtol=1e-6, atol=1e-6)  # the same float32 products
    np.testing.assert_allclose(heads[0, 1, 0], (x @ kernel)[0, :, 4:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", [lambda x: x, jax.nn.relu])
def test_a_feed_forward_without_activation_is_one_affine_map(activation):
    cfg = jf.ModelConfig(
        vocab_size=3, d_model=4, n_layers=1, n_heads=1, mlp=jf.mlp.choice(activation, gated=False), mlp_bias=True
    )
    params = {name: draw(*param.shape(cfg), seed=i) for i, (name, param) in enumerate(jf.mlp.spec(cfg).items())}
    x = draw(2, 3, 4, seed=9)
    affine = x @ (params["up"] @ params["down"]) + (params["up_bias"] @ params["down"] + params["down_bias"])
    same = np.allclose(jf.mlp.apply(params, x, cfg), affine, rtol=1e-4, atol=1e-4)  # sums of 16 float32 terms of size 5
    assert same == (activation is not jax.nn.relu)


def test_next_token_alignment():
    """put money in the bank: standing on "the", a row sees four words and is trained on "bank"."""
    words = "put money in the bank".split()  # noqa: SIM905
    stream = packing.Stream(np.arange(5, dtype=np.int32), np.array([0, 5]))
    batch = packing.windows(stream, np.array([0]), length=4, pad_id=0, segment_documents=False)
    assert [words[i] for i in batch["tokens"][0]] == ["put", "money", "in", "the"]
    assert [words[i] for i in batch["targets"][0]] == ["money", "in", "the", "bank"]
    assert batch["weights"].tolist() == [[1, 1, 1, 1]]
    cfg = jf.ModelConfig(vocab_size=5, d_model=8, n_layers=1, n_heads=1)
    params = jax.tree.map(lambda p: draw(*p.shape), jf.spec.abstract(jf.model.spec(cfg), cfg))
    _, seen = jf.capture(lambda ids: jf.forward(params, ids, cfg), "*weights")(batch["tokens"])
    assert (seen["decoder.0.attention.weights"][0, 0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 4]


def gradient_norms_by_layer(residual):
    """[seeds, L]: norms of the gradients of the decoder's feed-forward, at initialisation."""
    sizes = {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 6, "encoder_layers": 6, "scan": True}
    no_dropout = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    cfg = jf.presets.transformer_base(**sizes, **no_dropout, residual=residual)
    assert cfg.init == "xavier"
    ids = np.random.default_rng(0).integers(0, 64, (2, 4, 17))
    batch = {"tokens": ids[0, :, :-1], "targets": ids[0, :, 1:], "weights": np.ones((4, 16)), "source": ids[1]}

    @jax.jit
    def norms(key):
        params = jf.init(cfg, key)
        kernel_LFD = jax.grad(lambda p: jf.loss(p, batch, cfg)[0])(params)["decoder"]["layers"]["mlp"]["down"]
        return jnp.sqrt((kernel_LFD**2).sum((1, 2)))

    return np.stack([norms(key) for key in jax.random.split(jax.random.key(0), 4)])


def test_post_ln_gradients_grow_towards_the_output_and_pre_ln_gradients_do_not():
    """Xiong et al. 2020: at initialisation, Xavier weights, the 2017 encoder–decoder of 6 + 6 layers."""
    post, pre = gradient_norms_by_layer("post"), gradient_norms_by_layer("pre")
    # In Post-LN every layer's norm weakens the gradient on its way down; from the last to the first a factor of about 6
    assert (post[:, -1] / post[:, 0] > 2).all()
    assert (np.diff(post.mean(0)) > 0).all()
    # In Pre-LN the residual path carries it down unchanged
    assert (pre[:, -1] / pre[:, 0] < 1.2).all()


def test_a_sinusoid_moves_on_by_a_rotation_that_depends_on_the_distance_alone():
    width, distance = 8, 3
    table = np.asarray(jf.position.sinusoids(jnp.arange(40), width))
    turn = np.zeros((width, width))
    for i in range(width // 2):
        a = distance / 10_000 ** (2 * i / width)
        turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[np.cos(a), np.sin(a)], [-np.sin(a), np.cos(a)]]
    # float32 angles up to 40 are known to 4e-6
    np.testing.assert_allclose(table[distance:], table[:-distance] @ turn.T, atol=1e-5)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_matrices_of_two_positions_make_that_of_their_distance(layout):
    def matrix(position):
        angle = jf.position.angles(jnp.full(8, position), 8, 10_000.0)
        return np.asarray(jf.rope.rotate(jnp.eye(8), angle, layout)).T  # columns are the rotated unit vectors

    for a, b in [(0, 5), (3, 7), (11, 2)]:
        np.testing.assert_allclose(matrix(a).T @ matrix(b), matrix(b - a), atol=2e-6)  # float32 angles up to 11
    assert np.abs(matrix(3).T - matrix(3)).max() > 0.1


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
        ("llama2_7b", 6_738_415_616),
        ("llama3_8b", 8_030_261_248),
        ("llama2_70b", 68_976_648_192),
        ("llama3_1_70b", 70_553_706_496),
        ("llama3_2_1b", 1_235_814_400),
        ("qwen2_5_0_5b", 494_032_768),
        ("qwen3_0_6b", 596_049_920),
        ("mistral_7b", 7_241_732_096),
    ],
)
def test_published_parameter_counts(preset, parameters):
    cfg = getattr(jf.presets, preset)()
    assert count(jf.model.spec(cfg), cfg) == parameters
    shapes = jax.eval_shape(lambda: jf.spec.init(jf.model.spec(cfg), cfg, jax.random.key(0)))  # no memory is used
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == parameters


@pytest.mark.parametrize("name", ["gpt2", "llama", "transformer_base", "mixtral_8x7b"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_parameters_are_the_same_whatever_program_draws_them(name, param_dtype):
    """CPUs compile the program of ``init`` in less time, with other options than a program of the user's around it."""
    cfg = getattr(jf.presets, name)(vocab_size=97, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, param_dtype=param_dtype)
    inside = jax.jit(lambda key: jf.init(cfg, key), compiler_options={"xla_backend_optimization_level": 3})
    one, other = inside(jax.random.key(3)), inside(jax.random.key(4))
    assert not np.array_equal(jax.tree.leaves(one)[0], jax.tree.leaves(other)[0])
    jax.tree.map(np.testing.assert_array_equal, jf.init(cfg, jax.random.key(3)), one)
