"""The linear map against ``einsum``, for every equation that the library uses; how it reads its kernel."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from jaxformer.nn.dense import dense

SIZE = 3  # of every axis, so that axes in a wrong order show as wrong numbers


def equations():
    """Those written in the package's own calls."""
    found = set()
    for path in Path(jaxformer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) == "dense":
                found.add(node.args[0].value)
    return sorted(found)


EQUATIONS = equations()
BIASES = {"BTD,DKGH->BKGTH": (3, 3, 1, 3), "BSD,DKH->BKSH": (3, 1, 3)}  # [K, (G,) 1, H]; others: the last axis


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def operands(equation, dtype="float32"):
    x_dims, kernel_dims = equation.split("->")[0].split(",")
    x, kernel = draw(*[SIZE] * len(x_dims), dtype=dtype), draw(*[SIZE] * len(kernel_dims), seed=1)
    return x, kernel, draw(*BIASES.get(equation, (SIZE,)), seed=2)


def test_the_equations_are_read():
    assert {"BTD,DF->BTF", "BKGTH,KGHD->BTD"} <= set(EQUATIONS) and len(EQUATIONS) >= 5


@pytest.mark.parametrize("equation", EQUATIONS)
def test_dense_is_einsum_and_a_bias(equation):
    x, kernel, bias = operands(equation)

    def einsum(x, kernel, bias):
        return jnp.einsum(equation, x, kernel, precision="highest") + bias

    @jax.jit
    def both(*args):
        pairs = [jax.vjp(f, *args) for f in (lambda *args: dense(equation, *args), einsum)]
        return [(out, back(draw(*out.shape, seed=9))) for out, back in pairs]

    for leaf in range(kernel.ndim - 1):  # neighbouring axes exchanged
        assert np.abs(einsum(x, kernel.swapaxes(leaf, leaf + 1), bias) - einsum(x, kernel, bias)).max() > 0.1
    found, expected = both(x, kernel, bias)
    # float32 sums of up to 81 products of size 1, in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    np.testing.assert_allclose(dense(equation, x, kernel), expected[0] - bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_result_has_the_dtype_of_the_input(equation):
    x, kernel, bias = operands(equation, "bfloat16")
    found = dense(equation, x, kernel, bias)
    exact = jnp.einsum(equation, x.astype(jnp.float32), kernel) + bias
    assert found.dtype == jnp.bfloat16
    # kernel, sum and bias are rounded to 8 bits each; sums of up to 27 products have size 10
    assert 1e-4 < np.abs(np.asarray(found, np.float32) - exact).max() < 0.2


@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_kernel_is_read_as_it_is_stored(equation):
    """No transposition of it, which a CPU would do again for every token."""
    x, kernel, bias = operands(equation)
    jaxpr = jax.make_jaxpr(lambda *args: dense(equation, *args))(x, kernel, bias).jaxpr
    (product,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    weight = product.invars[1]
    for eqn in jaxpr.eqns:
        if eqn.outvars[0] is weight:  # a matrix is the same bytes
            assert eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None
            weight = eqn.invars[0]
    assert weight is jaxpr.invars[1]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_cpus_multiply_matrices_forward_and_backward(equation):
    """Where rows and columns are several axes each, XLA would copy the operands of all three products first."""
    x, kernel, _ = operands(equation)
    gradient = jax.jit(jax.grad(lambda *args: (dense(equation, *args) ** 2).sum(), (0, 1)))
    products = re.findall(r"dot_general.* : \(tensor<(.*?)>, tensor<(.*?)>\)", gradient.lower(x, kernel).as_text())
    assert len(products) == 3
    assert all(len(operand.split("x")) == 3 for product in products for operand in product)  # two sizes and a dtype
