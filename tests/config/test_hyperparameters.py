"""Components that are frozen dataclasses: their fields are hyperparameters, compared, written, read, and set from outside."""

import dataclasses
import json
from typing import Any

import example_components as example
import jax
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

import jaxformer as jf
from jaxformer.config.components import Component
from jaxformer.config.strict import from_dict, to_json
from jaxformer.parallel.sharding import MeshConfig, shardings
from jaxformer.training import run

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=1)
PATH = "example_components:NarrowMlp"


def swapped(**fields):
    return dataclasses.replace(CFG, **fields)


def round_trip(cfg):
    return from_dict(type(cfg), json.loads(to_json(cfg)), trust=True)


# Equality


def test_equal_hyperparameters_make_equal_configs():
    cfg, same = (swapped(mlp=example.NarrowMlp(width=4, powers=((1, 2),))) for _ in range(2))
    assert cfg == same and hash(cfg) == hash(same) and cfg.mlp is not same.mlp
    others = [example.NarrowMlp(width=5, powers=((1, 2),)), example.NarrowMlp(width=4), example.NarrowMlp(4, 2.0, ((1, 2),))]
    assert len({cfg, *(swapped(mlp=other) for other in others)}) == 4


def test_equal_hyperparameters_share_a_compilation():
    traced = []
    f = jax.jit(lambda cfg, x: traced.append(cfg) or x, static_argnums=0)
    for width in (4, 4, 5):
        f(swapped(mlp=example.NarrowMlp(width)), 1.0)
    assert len(traced) == 2


def test_a_class_and_its_path_stand_for_its_defaults():
    assert swapped(mlp=example.NarrowMlp) == swapped(mlp=PATH) == swapped(mlp=f"{PATH}()") == swapped(mlp=example.NarrowMlp())
    assert isinstance(swapped(mlp=PATH).mlp, example.NarrowMlp)


def test_hyperparameters_in_the_path():
    cfg = swapped(mlp=f"{PATH}(width=4, temperature=2.0, powers=((1, 3), (2,)))")
    assert cfg == swapped(mlp=example.NarrowMlp(4, 2.0, ((1, 3), (2,)))) != swapped(mlp=PATH)


# Files


def test_json_holds_the_path_and_every_hyperparameter():
    cfg = swapped(mlp=example.NarrowMlp(4, 2.0, ((1, 3), (2,))))
    assert json.loads(to_json(cfg))["mlp"] == {
        **{"component": PATH, "width": 4, "temperature": 2.0},
        "powers": [[1, 3], [2]],
    }
    again = round_trip(cfg)
    assert again == cfg and hash(again) == hash(cfg) and round_trip(jf.Config(model=cfg)) == jf.Config(model=cfg)


def test_a_file_may_leave_defaults_out():
    plain = json.loads(to_json(CFG)) | {"mlp": {"component": PATH, "width": 4}}
    assert from_dict(jf.ModelConfig, plain, trust=True) == swapped(mlp=example.NarrowMlp(width=4))


@dataclasses.dataclass(frozen=True)
class Strange(example.NarrowMlp):
    """With a hyperparameter of any kind."""

    thing: Any = None


@pytest.mark.parametrize("value", [np.float32(1.0), example.NarrowMlp(), (1, (2, abs)), b"x"], ids=str)
def test_a_hyperparameter_that_no_file_can_hold_is_refused_when_written(value):
    cfg = swapped(mlp=Strange(thing=value))
    assert cfg == swapped(mlp=Strange(thing=value)) != swapped(mlp=Strange())
    with pytest.raises(ValueError, match="mlp=Strange.*cannot be written to a file: its thing must be a number, a string"):
        to_json(cfg)
    assert round_trip(swapped(mlp=Strange(thing=(1, ("a", None, True)))))


def test_a_pair_of_functions_is_no_choice_by_layer():
    """A ``Component`` is a tuple too, and cannot be written unless a name leads to it."""
    cfg = swapped(mlp=Component(example.spec, example.apply))
    with pytest.raises(ValueError, match="mlp=Component.*cannot be written to a file"):
        to_json(cfg)
    with pytest.raises(ValueError, match="mlp=.*cannot be written to a file"):
        to_json(swapped(mlp=local_class()()))


def local_class():
    @dataclasses.dataclass(frozen=True)
    class Local(example.NarrowMlp):
        pass

    return Local


# What is refused


@dataclasses.dataclass
class Thawed:
    width: int = 4
    spec = apply = None


@dataclasses.dataclass(frozen=True)
class Listed:
    widths: Any = dataclasses.field(default_factory=list)
    spec = apply = None


WRONG = [
    (f"{PATH}(widht=4)", "has no hyperparameter 'widht'; did you mean 'width'"),
    (f"{PATH}(4)", "write hyperparameters as keywords, such as Name"),
    (f"{PATH}(width=)", "write hyperparameters as keywords"),
    (f"{PATH}(width=4", "write hyperparameters as keywords"),
    (f"{PATH}(width=four)", "write hyperparameters as keywords"),
    (f"{PATH}(width=4)(width=5)", "write hyperparameters as keywords"),
    ("example_components:NarowMlp(width=4)", "has no 'NarowMlp'; did you mean 'NarrowMlp'"),
    ("example_components:squared_relu(width=4)", "is not a dataclass, so it takes no hyperparameters"),
    ("example_components:SquaredRelu(width=4)", "is not a dataclass, so it takes no hyperparameters"),
    ("swiglu(width=4)", "'swiglu.*did you mean 'swiglu'"),
    (Thawed(), "is not hashable; declare it @dataclass.frozen=True."),
    (Listed(), "is not hashable; declare it .*use tuples in place of lists"),
    (example.MovingAverage, "has hyperparameters without a default: .*'decay'"),
    ("example_components:MovingAverage", "has hyperparameters without a default: .*'decay'"),
    ("example_components:MovingAverage()", "has hyperparameters without a default: .*'decay'"),
]


@pytest.mark.parametrize(("value", "message"), WRONG, ids=[str(value) for value, _ in WRONG])
def test_wrong_hyperparameters_are_refused(value, message):
    with pytest.raises(ValueError, match=f"mlp.*{message}"):
        swapped(mlp=value)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"component": PATH, "widht": 4}, "has no hyperparameter 'widht'; did you mean 'width'"),
        ({"component": "example_components:NarowMlp"}, "did you mean 'NarrowMlp'"),
        ({"component": "example_components:SquaredRelu", "width": 4}, "takes no hyperparameters"),
        ({"width": 4}, "does not name a component"),
        ({"component": None}, "does not name a component"),
        ({"component": "example_components:MovingAverage"}, "without a default: .*'decay'"),
    ],
)
def test_wrong_files_are_refused(plain, message):
    with pytest.raises(ValueError, match=f"mlp=.*{message}"):
        from_dict(jf.ModelConfig, json.loads(to_json(CFG)) | {"mlp": plain}, trust=True)


# The command line


def config_file(folder, cfg):
    path = folder / "own.py"
    path.write_text(
        f'"""Mine."""\nimport example_components, jaxformer as jf\nfrom jaxformer.config.strict import from_dict\n'
        f"config = jf.Config(model=from_dict(jf.ModelConfig, {json.loads(to_json(cfg))!r}, trust=True))\n"
    )
    return path


def test_the_command_line_changes_one_hyperparameter(tmp_path):
    cfg = swapped(mlp=example.NarrowMlp(4, 2.0, ((1, 3),)))
    path = config_file(tmp_path, cfg)
    parsed = run.parse([str(path), "--model.mlp.width", "8", "--model.d-ff", "20"], path).config
    assert parsed.model == dataclasses.replace(cfg, mlp=example.NarrowMlp(8, 2.0, ((1, 3),)), d_ff=20) != cfg
    assert run.parse([str(path)], path).config.model == cfg


def test_the_command_line_takes_a_path_with_hyperparameters(tmp_path):
    path = config_file(tmp_path, CFG)
    parsed = run.parse([str(path), "--model.mlp", f"{PATH}(width=8)"], path).config
    assert parsed.model == swapped(mlp=example.NarrowMlp(width=8))


@pytest.mark.parametrize("flag", ["--model.mlp.widht", "--model.mlp.width"])
def test_a_wrong_hyperparameter_on_the_command_line_is_refused(flag, tmp_path, capsys):
    path = config_file(tmp_path, swapped(mlp=example.NarrowMlp(4)))
    with pytest.raises(SystemExit):
        run.parse([str(path), flag, "wide"], path)
    shown = capsys.readouterr()
    assert "--model.mlp.width" in shown.out + shown.err


# Letters of its own


@dataclasses.dataclass(frozen=True)
class Lettered(example.NarrowMlp):
    """A feed-forward that declares what it is told to."""

    declared: tuple[tuple[Any, Any], ...] = ()

    def letters(self, cfg):
        return dict(self.declared)


LETTERS = [
    ((("D", 4),), "mlp declares 'D', a letter of the dimension key; choose one that is free"),
    ((("O", 4),), "mlp declares 'O', a letter of the dimension key"),
    ((("u", 4),), "mlp declares the dimension 'u'; it must be one letter from A to Z"),
    ((("UU", 4),), "mlp declares the dimension 'UU'; it must be one letter"),
    ((("Ü", 4),), "mlp declares the dimension 'Ü'; it must be one letter"),
    (((3, 4),), "mlp declares the dimension 3; it must be one letter"),
    ((("U", 0),), "mlp declares 'U' with size 0, which must be an integer of at least 1"),
    ((("U", 2.0),), "mlp declares 'U' with size 2.0, which must be an integer"),
    ((("U", True),), "mlp declares 'U' with size True, which must be an integer"),
]


@pytest.mark.parametrize(("declared", "message"), LETTERS, ids=[message for _, message in LETTERS])
def test_wrong_letters_are_refused(declared, message):
    assert swapped(mlp=Lettered(declared=(("U", 4),))).sizes["U"] == 4
    with pytest.raises(ValueError, match=message):
        swapped(mlp=Lettered(declared=declared))


@dataclasses.dataclass(frozen=True)
class WideAverage(example.MovingAverage):
    """With the letter that the feed-forward has too."""

    width: int = 3

    def letters(self, cfg):
        return {"U": self.width}


def test_two_components_may_share_a_letter_of_one_size_alone():
    assert swapped(mlp=example.NarrowMlp(3), attention=WideAverage(0.5, 3)).component_sizes == {"U": 3}
    with pytest.raises(ValueError, match="mlp declares 'U' with size 4, but attention with size 3; rename one of them"):
        swapped(mlp=example.NarrowMlp(4), attention=WideAverage(0.5, 3))


def test_a_letter_that_nobody_declares_is_refused():
    with pytest.raises(ValueError, match=r"weight\('D', 'U'\): the size of dimension 'U' is not known"):
        jf.init(swapped(mlp=Lettered()), jax.random.key(0))


def test_a_letter_is_counted_and_has_the_size_of_its_component():
    plain, cfg = swapped(mlp="relu", d_ff=20), swapped(mlp=example.NarrowMlp(5), d_ff=20)
    count = lambda cfg: jf.spec.count(jf.model.spec(cfg), cfg)
    assert count(plain) - count(cfg) == 2 * 32 * (20 - 5)
    params = jf.init(cfg, jax.random.key(0))
    up = params["decoder"]["layers"]["mlp"]["up"]
    assert up.shape == (1, 32, 5) and abs(float(up.std()) * 32**0.5 - 1) < 0.3, "fan_in of 160 numbers"
    with pytest.raises(ValueError, match=r"differs +decoder.layers.mlp.down +expected \[1, 4, 32\], found \[1, 5, 32\]"):
        jf.forward(params, tiny.tokens(cfg), swapped(mlp=example.NarrowMlp(4), d_ff=20))


def test_hyperparameters_do_what_they_say():
    cfg, warm = (swapped(mlp=example.NarrowMlp(5, temperature)) for temperature in (1.0, 2.0))
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    up = params["decoder"]["layers"]["mlp"]["up"]
    halved = params | {"decoder": params["decoder"] | {"layers": params["decoder"]["layers"] | {"mlp": {}}}}
    halved["decoder"]["layers"]["mlp"] = params["decoder"]["layers"]["mlp"] | {"up": up / 2}
    forward = jax.jit(jf.forward, static_argnums=2)
    assert np.abs(forward(params, tokens, cfg) - forward(params, tokens, warm)).max() > 1e-3
    np.testing.assert_allclose(forward(halved, tokens, cfg), forward(params, tokens, warm), atol=1e-5)  # float32, of size 1


def test_a_letter_of_its_own_on_a_mesh(monkeypatch):
    """Replicated, unless the table says where it goes; the numbers are those of one device."""
    cfg = swapped(mlp=example.NarrowMlp(6), n_kv_heads=4)
    params, batch = tiny.drawn(cfg), tiny.batch(cfg, 8)
    program = lambda: jax.jit(jax.value_and_grad(lambda params, batch: jf.loss(params, batch, cfg)[0]))
    expected = program()(params, batch)
    mesh = MeshConfig(fsdp=2, tensor=2, data=2).make()
    places = []
    for axes in ((), ("tensor",)):
        for table in ("PARAMETERS", "ACTIVATIONS"):
            monkeypatch.setitem(getattr(jf.parallel.sharding, table), "U", axes)
        placed = shardings(jf.model.spec(cfg), cfg, mesh)
        places.append(placed["decoder"]["layers"]["mlp"]["up"].spec)
        with jax.set_mesh(mesh):
            rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
            found = program()(jax.device_put(params, placed), jax.device_put(batch, rows))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # float32 sums in another order
    assert places == [PartitionSpec(None, "fsdp", None), PartitionSpec(None, "fsdp", "tensor")]


@dataclasses.dataclass(frozen=True)
class Taken:
    """A component with a field that files have another use for."""

    component: str = "x"

    def spec(self, cfg):
        return {}

    def apply(self, params, x_BTD, cfg):
        return x_BTD


class Bare:
    """A class whose functions are methods."""

    def spec(self, cfg):
        return {}

    def apply(self, params, x_BTD, cfg):
        return x_BTD


@pytest.mark.parametrize(
    ("component", "message"),
    [(Taken(), "cannot be called 'component'"), (Bare, r"its methods need an instance; give Bare\(\)")],
)
def test_components_that_would_not_work_are_refused(component, message):
    with pytest.raises(ValueError, match=message):
        jf.ModelConfig(16, 8, 1, 2, mlp=component)


def test_a_size_that_follows_another_is_worked_out_again_of_a_loaded_config():
    cfg = jf.ModelConfig(30, 32, 1, 4, encoder_layers=1, encoder_heads=8)
    again = from_dict(jf.ModelConfig, json.loads(to_json(cfg)))
    assert again == cfg and again.encoder == cfg.encoder
    assert dataclasses.replace(again, n_heads=2).head_dim == 16


def test_fields_of_earlier_versions_are_named():
    with pytest.raises(ValueError, match="Experts has no field 'number'; it is called n_experts now"):
        jf.Experts(number=4)
    with pytest.raises(ValueError, match="ModelConfig has no field 'save'; it is called remat_save now"):
        jf.ModelConfig(16, 8, 1, 2, save=("mlp.up",))
