"""The reference fixtures themselves: complete, small, drawn alike everywhere, and made with the weights that are drawn."""

import json
import zlib

import numpy as np
import pytest
from golden import weights
from golden.cases import CASES

BOUND = 1_600_000
MARGIN = 0.01  # what make.py asks of the two best tokens, a thousand times float32's rounding of logits of order 1
HEADS = ("lm_head.weight", "embed_out.weight", "transformer.wte.weight", "model.embed_tokens.weight", "model.shared.weight")
DECODING = [name for name in CASES if not name.startswith("bert")]


def test_every_case_has_its_fixture_and_all_are_small():
    paths = sorted(weights.FOLDER.glob("*.npz"))
    assert [path.stem for path in paths] == sorted(CASES)
    assert sum(path.stat().st_size for path in paths) < BOUND


# The first normals of RandomState(0) and RandomState(42), as NumPy has given them since 2007.
@pytest.mark.parametrize(
    ("seed", "normals"),
    [
        (0, [1.764052345967664, 0.4001572083672233, 0.9787379841057392]),
        (42, [0.4967141530112327, -0.13826430117118466, 0.6476885381]),
    ],
)
@pytest.mark.parametrize(
    ("name", "shape", "offset", "scale"),
    [
        ("a.norm.weight", (3,), 0.7, 0.2),
        ("a.proj.bias", (3,), 0.0, 0.2),
        ("final_logits_bias", (1, 3), 0.0, 0.2),
        ("a.embed_tokens.weight", (3, 1), 0.0, 0.5),
        ("a.proj.weight", (1, 3), 0.0, 1.5 / 3**0.5),
        ("h.0.mlp.c_fc.weight", (1, 3), 0.0, 1.5),
    ],
)
def test_draws_are_the_frozen_normals_of_name_and_seed(name, shape, offset, scale, seed, normals):
    drawn = weights.draw({name: shape}, zlib.crc32(name.encode()) ^ seed, gain=0.7, embedding=0.5)[name]
    assert drawn.shape == shape and drawn.dtype == np.float32
    # half a unit of float32 at 1, and the ten digits given
    np.testing.assert_allclose(drawn.ravel(), offset + scale * np.asarray(normals), rtol=0, atol=1e-7)


def test_a_tensor_does_not_depend_on_the_others():
    _, tensors, arrays = weights.load("gpt2")
    name = "transformer.h.1.mlp.c_proj.weight"
    alone = weights.draw({name: tensors[name].shape}, int(arrays["seed"]))[name]
    assert len(tensors) > 1 and np.array_equal(alone, tensors[name])
    assert not np.array_equal(alone, weights.draw({name: alone.shape}, int(arrays["seed"]) + 1)[name])


@pytest.mark.parametrize("name", CASES)
def test_tensors_have_the_stored_shapes_and_are_all_different(name):
    config, tensors, arrays = weights.load(name)
    assert config["architectures"] == [CASES[name].model]
    assert {key: list(value.shape) for key, value in tensors.items()} == json.loads(str(arrays["shapes"]))
    assert all(value.dtype == np.float32 for value in tensors.values())
    # the first numbers, so that no tensor begins as another does; standardised, or gains would never equal biases
    starts = [np.round((v.ravel()[:4] - v.ravel()[0]) / (v.ravel()[1] - v.ravel()[0]), 3).tobytes() for v in tensors.values()]
    assert len(set(starts)) == len(tensors)


@pytest.mark.parametrize("name", CASES)
def test_references_are_finite_and_their_gradients_are_of_these_tensors(name):
    _, tensors, arrays = weights.load(name)
    for key, array in arrays.items():
        assert array.dtype.kind != "f" or np.isfinite(array).all(), key
    fixed = {name for name in tensors if name == "final_logits_bias" or name.endswith("e_score_correction_bias")}
    assert set(tensors) - set(arrays["grad_names"].tolist()) <= fixed
    assert set(arrays["grad_names"].tolist()) <= set(tensors)
    assert not arrays["attention_mask"][1].all() and arrays["attention_mask"][[0, 2]].all()


def logits_of_hidden(name, config, tensors, arrays):
    """Logits of row 0 from its last hidden states, by the head alone."""
    if config["model_type"] in ("marian", "bart"):
        return arrays["dec_hidden_layers"][-1] @ tensors["model.shared.weight"].T + tensors["final_logits_bias"]
    if config["model_type"] == "t5":
        head, scale = ("lm_head.weight", 1.0) if name == "t5_v11" else ("shared.weight", config["d_model"] ** -0.5)
        return scale * arrays["dec_hidden_final"] @ tensors[head].T
    logits = arrays["hidden_final"] @ next(tensors[head] for head in HEADS if head in tensors).T
    cap = config.get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("name", DECODING)
def test_logits_were_made_with_the_drawn_weights(name):
    config, tensors, arrays = weights.load(name)
    # float32 sums of at most 48 products of order 1, in another order
    np.testing.assert_allclose(logits_of_hidden(name, config, tensors, arrays), arrays["logits_unpadded"][0], rtol=0, atol=1e-5)


def test_pooled_output_was_made_with_the_drawn_weights():
    _, tensors, arrays = weights.load("bert")
    pooled = np.tanh(arrays["hidden_layers"][-1, 0] @ tensors["pooler.dense.weight"].T + tensors["pooler.dense.bias"])
    # row 0 is full, so that its mask changes nothing; float32 sums of 32 products
    np.testing.assert_allclose(pooled, arrays["pooler_output_padded"][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", DECODING)
def test_greedy_ids_are_clearly_the_best_of_their_logits(name):
    _, _, arrays = weights.load(name)
    logits = arrays["greedy_step_logits"].reshape(
        -1, arrays["greedy_step_logits"].shape[-2], arrays["logits_unpadded"].shape[-1]
    )
    live = logits.any(-1)
    assert live[:, 0].all() and len(np.unique(arrays["greedy_ids"])) >= 5
    assert np.array_equal(logits.argmax(-1)[live], arrays["greedy_ids"][:, -logits.shape[1] :][live])
    second, best = np.sort(logits, -1)[..., -2:].transpose(2, 0, 1)
    assert (best - second)[live].min() > MARGIN


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.beams] + ["marian", "bart", "t5_v10", "t5_v11"])
def test_beams_end_at_different_lengths_and_come_best_first(name):
    config, _, arrays = weights.load(name)
    start = arrays["beam_prompt"].shape[1] if "beam_prompt" in arrays else 1
    for key, settings in json.loads(str(arrays["beams"])).items():
        ids, scores = arrays[f"{key}_ids"], arrays[f"{key}_scores"]
        assert settings["eos_token_id"] == config["eos_token_id"]
        assert ids.shape[:2] == scores.shape and ids.shape[1] == settings["num_return_sequences"]
        assert (np.diff(scores) < 0).all()
    ended = arrays["beam_ids"][..., start:] == config["eos_token_id"]
    assert len(set(ended.argmax(-1)[ended.any(-1)].tolist())) >= 3 and not ended.any(-1).all()
