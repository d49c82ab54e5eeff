"""Plans: what is read of XLA's text, model FLOPs, plans by arithmetic, refusals (compiled plans: ``test_plan_tpu``)."""

import dataclasses
import functools
import json
import re
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from examples import hybrid
from jaxformer.cost import advise, analytic, command, compile, hlo, model_flops, programs, topology
from jaxformer.cost.budget import Budget
from jaxformer.cost.hlo import buffer_names, buffers, collectives, hlo_cost, text
from jaxformer.cost.plan import VERSION
from jaxformer.cost.programs import Program
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training.objective import NextToken
from tests import tiny
from tests.states import initial, update

# Programs


def looped(x, kernels):
    """A scan of 5 around one of 3, and a product outside."""

    def outer(x, kernel):
        inner = lambda x, _: (jnp.tanh(x @ kernel), None)
        return jax.lax.scan(inner, x, None, length=3)[0], None

    return jax.lax.scan(outer, x, kernels)[0] @ kernels[0]


@pytest.fixture(scope="module")
def loops():
    shapes = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((5, 16, 16), "float32")
    return jax.jit(looped).lower(*shapes).compile().as_text()


@pytest.mark.parametrize("told", [True, False])
def test_loops_count_as_often_as_they_run(loops, told):
    program = loops if told else re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", loops)
    assert ("known_trip_count" in program) == told
    module = text.parse(program)
    assert sorted(one.trip_count for one, _ in module.executed() if one.op == "while") == [3, 5]
    work = hlo_cost.count(module)
    assert work.flops == (5 * 3 + 1) * 2 * 8 * 16 * 16 and not work.unknown_loops


def test_a_loop_without_a_count_is_told():
    until = lambda x: jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)
    work = hlo_cost.count(text.parse(jax.jit(until).lower(jnp.ones((4, 4))).compile().as_text()))
    assert work.flops == 2 * 4**3 and work.unknown_loops == 1


@pytest.mark.parametrize("remat", ["none", "full"])
def test_an_update_has_the_flops_of_the_formula(remat):
    cfg = jf.presets.llama(vocab_size=64, d_model=32, n_layers=4, n_heads=4, d_ff=64, max_length=16, scan=True, remat=remat)
    state = jax.eval_shape(functools.partial(initial, cfg, jf.OptimConfig(), 10))
    batch = {name: jax.ShapeDtypeStruct((2, 16), dtype) for name, dtype in (("tokens", "int32"), ("targets", "int32"))}
    batch["weights"] = jax.ShapeDtypeStruct((2, 16), "float32")
    program = jax.jit(update(cfg, jf.OptimConfig(), 10)).lower(state, batch).compile().as_text()
    wanted = model_flops.training(cfg, 2, 16)
    norms = 6 * 2 * 16 * (2 * 4 + 1) * 32  # which are in N, and multiply nothing
    head = 2 * 2 * 16 * 64 * 32
    forward = (wanted.weights - norms) / 3 - head + 2 * wanted.attention / 3  # scores are computed whole, masked or not
    assert wanted.attention == 3 * 4 * 2 * 4 * 4 * 8 * 16**2 / 2
    assert hlo_cost.count(text.parse(program)).flops == 3 * (forward + head) + (forward if remat == "full" else 0) - _unneeded(
        remat, cfg
    )


def _unneeded(remat, cfg):
    """The last product of a block is not computed again: nothing needs it."""
    return 0 if remat == "none" else cfg.n_layers * 2 * 2 * 16 * cfg.d_ff * cfg.d_model


PRODUCT = """
ENTRY %main (a: bf16[4,12,32,8], b: bf16[4,12,32,8], c: bf16[4,32,96,1], d: bf16[96,12,8,1]) -> f32[4,12,32,32] {
  %a = bf16[4,12,32,8]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[4,12,32,8]{3,2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %c = bf16[4,32,96,1]{1,2,3,0:T(8,128)(2,1)} parameter(2)
  %d = bf16[96,12,8,1]{0,2,1,3:T(8,128)(2,1)} parameter(3)
  %batched = f32[4,12,32,32]{2,3,1,0:T(8,128)} convolution(%a, %b), window={size=4x12 stride=3x11 lhs_dilate=4x12}, DIMS
  ROOT %heads = bf16[4,32,12,8]{1,3,2,0} convolution(%c, %d), window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, MORE
}
""".replace("DIMS", "dim_labels=01bf_01oi->01bf").replace("MORE", "dim_labels=0bf1_i1o0->0b1f")


def test_products_that_tpus_write_as_convolutions():
    """Batch dimensions become dilated windows, of which most places meet a hole."""
    products = [one for one, _ in text.parse(PRODUCT).executed()][-2:]
    assert list(map(hlo_cost.flops, products)) == [2 * 4 * 12 * 32 * 32 * 8, 2 * 4 * 32 * 96 * 12 * 8]
    # Main memory alone: b lies on the chip.
    assert hlo_cost.traffic(products[0]) == 4 * 12 * 32 * (8 * 2 + 32 * 4)


@pytest.mark.parametrize("stride,low,dilation,spread", [(1, 0, 1, 1), (2, 1, 1, 1), (1, 3, 2, 1), (3, 2, 1, 2), (2, 0, 3, 2)])
def test_convolutions_meet_so_many_elements(stride, low, dilation, spread):
    size, window = 7, 4
    dilated, reach = (size - 1) * dilation + 1, (window - 1) * spread + 1
    out = (dilated + 2 * low - reach) // stride + 1
    ones = jnp.ones((1, 1, size)), jnp.ones((1, 1, window))
    met = jax.lax.conv_general_dilated(*ones, (stride,), [(low, low)], lhs_dilation=(dilation,), rhs_dilation=(spread,))
    assert met.shape == (1, 1, out) and hlo_cost._valid(size, window, out, stride, low, dilation, spread) == met.sum()


KERNELS = """
ENTRY %main (q: bf16[2,4,64,8], k: bf16[2,4,64,8], w: s32[64]) -> bf16[2,4,64,8] {
  %q = bf16[2,4,64,8]{3,2,1,0} parameter(0)
  %k = bf16[2,4,64,8]{3,2,1,0} parameter(1)
  %w = s32[64]{0} parameter(2)
  %splash_mha_fwd.1 = (f32[2,32,128]{2,1,0}, bf16[2,4,64,8]{3,2,1,0}) custom-call(%w, %q, %k, %k), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 32}"
}}, metadata={op_name="jit(f)/splash_mha_fwd_residuals/pallas_call"}
  %splash_mha_dkv.2 = (bf16[2,2,4,64,8]{4,3,2,1,0}, bf16[2,4,64,8]{3,2,1,0}, bf16[2,4,64,8]{3,2,1,0}) custom-call(%w, %q, %k, %k), custom_call_target="tpu_custom_call"
  ROOT %other.3 = bf16[2,4,64,8]{3,2,1,0} custom-call(%q), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


def test_kernels_of_attention_go_by_formula():
    """Two products forward, five in the backward kernel that gives all three gradients; half of the scores are masked."""
    work = hlo_cost.count(text.parse(KERNELS))
    assert work.kernel_flops == (2 + 5) * 2 * 2 * 4 * 64 * 64 * 8 / 2 and work.flops == 0
    assert work.kernels == {"splash_mha_fwd_residuals": 1, "splash_mha_dkv": 1, "other": 1}
    assert work.unknown_kernels == {"other"}


# Collectives

ASYNC = """
%starts (p: bf16[8,64]) -> bf16[32,64] {
  %p = bf16[8,64]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[32,64]{1,0} all-gather(%p), channel_id=3, replica_groups=mesh['axis_0'=4] {'axis_0'}, dimensions={0}
}
%beside (p.1: bf16[8,64], q: bf16[16,16]) -> bf16[16,16] {
  %p.1 = bf16[8,64]{1,0} parameter(0)
  %q = bf16[16,16]{1,0} parameter(1)
  %all-gather.2 = bf16[32,64]{1,0} all-gather(%p.1), channel_id=3, replica_groups=mesh['axis_0'=4] {'axis_0'}, dimensions={0}
  ROOT %dot.1 = bf16[16,16]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%all-reduce-scatter.1 (g: f32[32,64]) -> f32[8,64] {
  %g = f32[32,64]{1,0} parameter(0)
  %all-reduce.1 = f32[32,64]{1,0} all-reduce(%g), channel_id=4, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice.1 = f32[8,64]{1,0} slice(%all-reduce.1), slice={[0:8], [0:64]}
}
ENTRY %main (x: bf16[8,64], y: bf16[16,16], z: f32[32,64]) -> f32[8,64] {
  %x = bf16[8,64]{1,0} parameter(0)
  %y = bf16[16,16]{1,0} parameter(1)
  %z = f32[32,64]{1,0} parameter(2)
  %start = bf16[32,64]{1,0} fusion(%x), kind=kCustom, calls=%starts
  %middle = bf16[16,16]{1,0} fusion(%x, %y), kind=kOutput, calls=%beside
  %zeros = bf16[64,16]{1,0} broadcast(%nought), dimensions={}
  %part = bf16[64,16]{1,0} dynamic-update-slice(%zeros, %middle, %place, %place)
  %all-reduce.2 = (bf16[16,16]{1,0}, bf16[64,16]{1,0}) all-reduce(%middle, %part), channel_id=5, COLUMNS
  ROOT %scatter = f32[8,64]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1
}
""".replace("COLUMNS", "replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add")


def test_collectives_are_counted_once():
    where = topology.parse("v5e:2x2")
    found = collectives.find_collectives(text.parse(ASYNC), where, [(0, 0), (1, 0), (0, 1), (1, 1)])
    assert [(one.kind, one.bytes, one.hidden) for one in found] == [
        ("all-gather", 32 * 64 * 2, True),  # in two fusions, one of which has a product: one collective
        ("all-reduce", 16 * 16 * 2, False),
        ("all-gather as all-reduce", 64 * 16 * 2, False),  # zeros, but for each device's part
        ("reduce-scatter", 32 * 64 * 4, False),
    ]
    # Both axes of two chips: a link each. The second all-reduce is over the second axis alone.
    link = where.chip.link
    np.testing.assert_allclose(
        [one.seconds for one in found], [4096 * 3 / 4 / (2 * link), 512 / link, 2048 / link, 8192 * 3 / 4 / (2 * link)]
    )


@pytest.mark.parametrize(
    "attribute,groups",
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups={}", None),
    ],
)
def test_groups_of_devices(attribute, groups):
    assert collectives._groups(instruction(f"{attribute}, more=1")) == groups


def test_groups_in_another_form_are_no_guess():
    with pytest.raises(ValueError, match=r"replica_groups=\(0..3\)"):
        collectives._groups(instruction("replica_groups=(0..3), more=1"))


def instruction(attributes):
    return text.Instruction(text.Computation(text.Module(), "main"), "x", [], "all-gather", [], f"), {attributes}")


# Memory

ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, page 0, parameter 0, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:
 value: <1 weight @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 1: size 512, page 0, thread-local:
 value: <2 inner @0> (size=512,offset=0): f32[]
allocation 2: size 20480, page 0, preallocated-temp:
 value: <3 kept @0> (size=8192,offset=0): f32[2,8,128]{2,1,0}
 value: <4 loop{0} (phi) @0> (size=8192,offset=0): f32[2,8,128]{2,1,0}
 value: <5 grad @0> (size=4096,offset=8192): f32[8,128]{1,0}
 value: <6 early @0> (size=12288,offset=8192): f32[3,8,128]{2,1,0}
 value: <7 seen @0> (size=4096,offset=12288): f32[8,128]{1,0}
allocation 3: size 1024, color 1, page 0, preallocated-temp:
 value: <8 fast @0> (size=1024,offset=0): f32[256]{0}
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:weight
    1:early
    2:kept
    3:loop
    4:back
    5:grad
    6:seen
  BufferLiveRange:
    weight{}:0-9
    early{}:1-2
    kept{}:2-3
    loop{0}:3-7
    grad{}:5-9
    seen{}:6-8
"""
TEXT = """
ENTRY %main (weight: f32[8,128]) -> f32[8,128] {
  %weight = f32[8,128]{1,0} parameter(0), metadata={op_name="state.params[\\'mlp\\'][\\'up\\']"}
  %early = f32[3,8,128]{2,1,0} broadcast(%weight), metadata={op_name="jit(update)/jvp(decoder)/mlp/exp"}
  %kept = f32[2,8,128]{2,1,0} broadcast(%weight), metadata={op_name="jit(update)/jvp(decoder)/while/body/mlp/dot_general"}
  %loop = (f32[2,8,128]{2,1,0}) tuple(%kept), metadata={op_name="jit(update)/jvp(decoder)/while"}
  %back = f32[8,8]{1,0} dot(%weight, %weight), lhs_contracting_dims={1}, rhs_contracting_dims={1}, META
  %grad = f32[8,128]{1,0} add(%weight, %weight), metadata={op_name="jit(update)/transpose(jvp(decoder))/mlp/dot_general"}
  ROOT %seen = f32[8,128]{1,0} add(%weight, %weight), metadata={op_name="jit(update)/sqrt"}
}
""".replace("META", 'metadata={op_name="jit(update)/transpose(jvp(decoder))/mlp/dot_general"}')


def test_memory_is_that_of_the_fullest_moment():
    found = buffers.read_buffers(ASSIGNMENT, RANGES, text.parse(TEXT), {"decoder.0.mlp.hidden": (8, 128)})
    assert found.total == 4096 + 20480 == sum(buffer.bytes for buffer in found.buffers) + found.gaps
    kinds = {(buffer.kind, buffer.name): buffer.bytes for buffer in found.buffers}
    # At the start of early 12,288 bytes of the arena are in use, with kept 20,480: then nothing of the backward pass lives.
    assert kinds == {
        ("activations", "decoder.*.mlp.hidden (dot_general)"): 8192,
        ("temporaries", "decoder.*.mlp.hidden (exp)"): 12288,
        ("parameters", "mlp.up"): 4096,
    }
    later = buffers.read_buffers(ASSIGNMENT.replace("early", "other"), RANGES, text.parse(TEXT), {})
    kinds = {(buffer.kind, buffer.name): buffer.bytes for buffer in later.buffers}
    assert kinds.pop(("gradients", "mlp.up")) == 4096 and later.gaps == 20480 - 8192 - 2 * 4096
    assert ("activations", "decoder/mlp/dot_general") in kinds


def test_an_activation_is_told_by_its_shape():
    """Where D = T and L is the number of heads, only the order of axes tells stacked outputs of blocks from weights."""
    named = {
        "decoder.0.attention.weights": (4, 32, 1, 64, 64),
        "decoder.0.out": (4, 64, 64),
        "decoder.0.mlp.hidden": (4, 64, 96),
    }
    tell = buffer_names.Names(text.parse(TEXT), named, {})._activation
    assert tell("broadcast.95", "bf16[32,4,64,64]{3,2,1,0}") == "of the shape of decoder.*.out"
    assert tell("reshape.7", "bf16[4,32,64,64]{3,2,1,0}") == "of the shape of decoder.*.attention.weights"
    assert tell("decoder/mlp/dot_general", "bf16[32,4,96,64]{3,2,1,0}") == "decoder.*.mlp.hidden (dot_general)"
    assert tell("decoder/attention/dot_general", "bf16[32,4,96,64]{3,2,1,0}") == "decoder/attention/dot_general"


# Texts that are not understood

DUMP = {
    "after_optimizations": TEXT,
    "after_codegen": TEXT,
    "after_optimizations-buffer-assignment": ASSIGNMENT,
    "after_optimizations-live-range": RANGES,
}
GATHER = "  %gather = f32[16,128]{1,0} all-gather(%weight), channel_id=1, replica_groups={{0,1}}, dimensions={0}\n  ROOT"


def reading(folder, dump):
    for stage, content in dump.items():
        (folder / f"module_0.jit_update.{stage}.txt").write_text(content)
    where = topology.parse("v5e:2x1")
    return hlo.read(folder, {}, {}, where, [(0, 0), (1, 0)])


@pytest.mark.parametrize(
    "stage,old,new,lost",
    [
        ("after_optimizations", "ENTRY", "MAIN", {"memory"}),
        ("after_codegen", "ENTRY", "MAIN", {"work", "collectives"}),
        ("after_codegen", " dot(", " product(", {"work"}),
        ("after_codegen", "lhs_contracting_dims={1}", "lhs_contracting_dims={7}", {"work"}),
        ("after_codegen", "replica_groups={{0,1}}", "replica_groups=<0-1>", {"collectives"}),
        ("after_optimizations-buffer-assignment", "allocation", "slot", {"memory"}),
        ("after_optimizations-buffer-assignment", " value: ", " buffer: ", {"memory"}),
        ("after_optimizations-live-range", ":", " ", {"memory"}),
        ("after_optimizations-live-range", RANGES, "", {"memory"}),
    ],
)
def test_what_is_not_understood_is_said_and_left_out(stage, old, new, lost, tmp_path, monkeypatch):
    dump = DUMP | {"after_codegen": TEXT.replace("  ROOT", GATHER)}
    good = reading(tmp_path, dump)
    assert good.problem == "" and len(good.collectives) == 1 and good.work.flops > 0 and good.memory.total == 4096 + 20480
    monkeypatch.setattr(hlo, "versions", lambda: {"jax": "9.9", "libtpu": "9.8"})
    assert old in dump[stage]
    damaged = reading(tmp_path, dump | {stage: dump[stage].replace(old, new)})
    for name in ("memory", "work", "collectives"):
        assert getattr(damaged, name) == (None if name in lost else getattr(good, name)), name
    assert "jax 9.9 and libtpu 9.8" in damaged.problem and "jax 0.10.2" in damaged.problem


def test_a_plan_without_any_text_has_the_compilers_totals(monkeypatch):
    """XLA's CPU backend names its texts in another way: none of them is found."""
    product = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((64, 64), "float32"))
    program = Program("product", lambda: product, 64, model_flops.ModelFlops(2.0 * 64**3, 0.0), {})
    where = topology.parse("v5e:1x1")
    made = compile.compiled(program, where, [SimpleNamespace(coords=(0, 0))])
    totals = product.compile().memory_analysis()
    assert made.memory == {"arguments": 64 * 64 * 4, "results": 64 * 64 * 4, "temporaries": totals.temp_size_in_bytes}
    assert made.fits and made.needed_bytes == sum(made.memory.values()) and not made.largest
    assert made.hardware_flops == made.model_flops == 2 * 64**3 and made.time.compute == 2 * 64**3 / where.chip.peak
    assert "not understood" in made.notes[0] and "the compiler's totals" in made.notes[1]
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)
    with pytest.raises(ValueError, match="the memory that the program needs is not known"):
        compile.compiled(program, where, [SimpleNamespace(coords=(0, 0))])


# Chips


def test_chips_reach_their_peak_at_a_clock_that_they_have():
    assert {name: round(chip.clock / 1e9, 2) for name, chip in topology.TPUS.items()} == {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75}


@pytest.mark.parametrize(
    "spelled,message",
    [
        ("v5x:4x4", "unknown chip 'v5x'; did you mean 'v5p'"),
        ("v5e:3x4", "the nearest is v5e:4x4"),
        ("v5p:4x4", "the nearest is v5p:4x4x1"),
        ("v5e", "such as v5e:4x4"),
        ("gpu:8xH300", "did you mean 'H200'"),
        ("gpu:H100", "gpu:8xH200"),
    ],
)
def test_unknown_topologies_are_refused(spelled, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        topology.parse(spelled)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(ValueError, match=re.escape("pip install 'jaxformer[plan]'")):
        topology.devices(topology.parse("v5e:2x2"))


# Formulas


def test_llama2_7b_has_the_flops_that_others_count():
    """MaxText's formula, 16,384 tokens a device: 649.5 TFLOP in weights, 52.8 in causal attention."""
    found = model_flops.training(jf.presets.llama2_7b(), 4, 4096)
    assert (round(found.weights / 1e12, 1), round(found.attention / 1e12, 1)) == (649.5, 52.8)


def test_windows_and_experts_count_what_is_met():
    whole, windowed = (dataclasses.replace(tiny.PRESETS["llama_gqa"], window=window) for window in (None, 4))
    pairs = lambda cfg: model_flops.training(cfg, 1, 16).attention / (3 * 3 * 4 * cfg.n_heads * cfg.head_dim)
    assert (pairs(whole), pairs(windowed)) == (16 * 16 / 2, 16 * 4 - 4 * 4 / 2)
    moe = jf.presets.mixtral_8x7b()
    active = jf.spec.active(jf.model.spec(moe), moe) - moe.vocab_size * moe.d_model  # the input's table multiplies nothing
    assert model_flops.decoding(moe, 1, 1).weights == 2 * active
    recurrent = hybrid.cfg  # two of its eight layers have attention: 4 heads of width 16
    assert model_flops.prefill(recurrent, 1, 16).attention == 2 * 4 * 4 * 16 * 16 * 16 / 2


def test_what_is_kept_for_the_backward_pass():
    cfg = tiny.PRESETS["llama_mha"]
    batch = {"tokens": jax.ShapeDtypeStruct((4, 8), "int32"), "targets": jax.ShapeDtypeStruct((4, 8), "int32")}
    batch["weights"] = jax.ShapeDtypeStruct((4, 8), "float32")
    objectives = [NextToken(dataclasses.replace(cfg, scan=True, remat=remat)) for remat in REMAT]
    kept = [sum(size for _, size in analytic.saved(objective, batch)) for objective in objectives]
    assert kept[0] > 1.5 * kept[1] > 1.5 * kept[2]
    block = 4 * 8 * cfg.d_model * 4  # of each block its input, and little besides what the head needs
    assert kept[2] > cfg.n_layers * block


REMAT = ("none", "dots", "full")

# Plans


@pytest.mark.parametrize(
    "cfg", [hybrid.cfg, tiny.PRESETS["deepseek"], tiny.PRESETS["gpt2"]], ids=["hybrid", "deepseek", "gpt2"]
)
def test_generation_is_planned_for_the_parameters_that_it_reads(cfg):
    mesh = MeshConfig(fsdp=4, tensor=2).make()
    planned = programs._unstacked(cfg, mesh)
    real = jax.eval_shape(
        functools.partial(jf.model.unstack, cfg=cfg), jax.eval_shape(functools.partial(jf.init, cfg), jax.random.key(0))
    )
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (planned, real)]
    assert shapes[0] == shapes[1]
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(planned["decoder"]["layers"]))


def plan(*arguments, capsys):
    made = command.plan_command([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(made.values()))
    return made


def test_a_plan_by_arithmetic(capsys):
    found = plan("llama2_7b", "--topology", "gpu:8xH100", capsys=capsys)
    (step,) = found.programs
    assert found.by == "arithmetic" and "nothing was compiled" in " ".join(found.stated)
    assert found.parameters == 6_738_415_616 and found.mesh["fsdp"] == 8
    assert step.memory["parameters"] == pytest.approx(found.parameters * 4 / 8, rel=1e-3)  # 1e-3: a few norms are whole
    assert step.memory["optimizer"] == 2 * step.memory["parameters"] + 2 * 4  # two moments; two counts of the updates
    assert sum(step.memory.values()) == pytest.approx(step.needed_bytes)
    assert step.tokens == 32 * 4096 and step.model_flops * 8 == model_flops.training(jf.presets.llama2_7b(), 32, 4096).total
    away = plan("llama2_7b", "--topology", "gpu:8xH100", "--mesh.offload", capsys=capsys)
    assert away.mesh == found.mesh and away.stated == found.stated
    assert away.programs[0].memory == step.memory | {"optimizer": 0}
    assert "fsdp over all" in " ".join(found.stated)
    spread = plan("llama2_7b", "--topology", "gpu:8xH100", "--mesh.tensor", "8", capsys=capsys)
    assert "fsdp over all" not in " ".join(spread.stated)
    gather = next(c for c in step.collectives if c.kind == "all-gather")
    assert gather.bytes == pytest.approx(2 * found.parameters * 2, rel=1e-3)  # forward and backward, in bfloat16


def test_the_state_of_other_optimizers_is_their_own(capsys):
    adamw, lion = (
        plan("gpt2", "--topology", "gpu:8xH100", "--optim.name", name, capsys=capsys).programs[0] for name in ("adamw", "lion")
    )
    assert lion.memory["optimizer"] == lion.memory["parameters"] + 2 * 4  # one moment
    assert adamw.memory == lion.memory | {"optimizer": 2 * lion.memory["parameters"] + 2 * 4}
    assert adamw.traffic_bytes - lion.traffic_bytes == 2 * lion.memory["parameters"]


def test_generation_by_arithmetic(capsys):
    found = plan("llama3_8b", "--topology", "gpu:8xH200", "--decode", "--mesh.tensor", "8", capsys=capsys)
    reading, steps = found.programs
    assert (
        reading.memory["cache"] == 2 * 32 * 32 * 4096 * 128 * 2 + 2 * 32 * 4
    )  # of 32 layers one of 8 heads; the two counts of 32 rows
    assert steps.time.bound == "memory" and steps.tokens == 32 * 16


def test_the_json_keeps_its_fields(capsys, tmp_path):
    command.plan_command(["gpt2", "--topology", "gpu:1xA100", "--json", str(tmp_path / "plan.json")])
    assert "by arithmetic" in " ".join(capsys.readouterr().out.split())
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["version"] == VERSION and list(values) == [
        *(
            "config",
            "topology",
            "chip",
            "devices",
            "mesh",
            "by",
            "parameters",
            "stated",
            "programs",
            "trials",
            "version",
            "fits",
        )
    ]
    assert list(values["programs"][0]) == [
        *("name", "fits", "needed_bytes", "available_bytes", "memory", "largest", "tokens", "model_flops", "attention_flops"),
        *("hardware_flops", "kernel_flops", "traffic_bytes", "collectives", "time", "compile_seconds", "host_bytes", "notes"),
    ]


def test_what_does_not_fit_gets_a_change_that_does(capsys):
    found = plan("llama2_7b", "--topology", "gpu:8xA100", "--data.batch-size", "128", "--mesh.data", "8", capsys=capsys)
    assert not found.fits and not any(trial.fits for trial in found.trials[:-1]) and found.trials[-1].fits
    fixed = plan(
        *("llama2_7b", "--topology", "gpu:8xA100", "--data.batch-size", "128", "--mesh.data", "8"),
        *found.trials[-1].flags,
        capsys=capsys,
    )
    assert fixed.fits and fixed.programs[0].needed_bytes == found.trials[-1].needed_bytes


def test_trying_stops_with_the_budget():
    config = jf.Config(model=tiny.PRESETS["llama_mha"], mesh=MeshConfig(data=8))
    mesh = {"data": 8, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    where = topology.parse("gpu:8xA100")
    step = analytic.training_step(config, config.mesh.make(jax.devices()), where)
    slow, told = dataclasses.replace(step, compile_seconds=100.0), []
    assert advise.search(config, mesh, [slow], lambda config: [slow], Budget(50.0), told.append) == ()
    assert "--budget 50" in told[0]


def test_why_a_trial_was_rejected_is_said_before_the_next():
    config = jf.Config(model=tiny.PRESETS["llama_mha"], mesh=MeshConfig(data=8))
    mesh = {"data": 8, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    step = analytic.training_step(config, config.mesh.make(jax.devices()), topology.parse("gpu:8xA100"))
    large, told = dataclasses.replace(step, fits=False, needed_bytes=90 << 30, available_bytes=72 << 30), []
    trials = advise.search(config, mesh, [large], lambda config: [large], Budget(50.0), told.append)
    assert len(trials) > 1
    assert [line.startswith("trying: ") for line in told] == [True, False] * len(trials)
    assert set(told[1::2]) == {"training step: does not fit, 90.00 of 72.00 GiB per device"}


def test_the_budget_ends_a_compilation_too():
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"training step: still compiling when the 0.05 s of --budget were over"):
        Budget(0.05).run(release.wait, "training step")
    release.set()
    assert Budget(60.0).run(lambda: "plan", "training step") == Budget(0.0).run(lambda: "plan", "training step") == "plan"
    with pytest.raises(KeyError, match="inside"):
        Budget(60.0).run(lambda: {}["inside"], "training step")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["gpt2"], "give --topology"),
        (["gpt", "--topology", "v5e:4x4"], "did you mean 'gpt2'"),
        (["gpt2", "--topology", "v5e:4x4", "--mesh.fsdp", "3"], "a mesh of fsdp 3 does not fit 16 devices"),
        (["gpt2", "--topology", "v5e:4x4", "--data.batch-size", "10"], "the nearest is 16"),
        (["gpt2", "--topology", "v5e:4x4", "--data.length", "2048"], "past model.max_length=1024"),
        (["gpt2", "--topology", "v5e:4x4", "--train.microbatches", "3"], "in 3 microbatches is not divisible by 16 devices"),
        (["transformer_base", "--topology", "v5e:4x4", "--decode"], "causal decoders"),
        (["--topology", "v5e:4x4"], "the first argument must be a config file or a preset"),
        (["configs/none.py", "--topology", "v5e:4x4"], "no config file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(arguments, message, monkeypatch):
    monkeypatch.setattr(topology, "devices", lambda where: pytest.fail("too late"))
    with pytest.raises(ValueError, match=re.escape(message)):
        command.plan_command(arguments)
