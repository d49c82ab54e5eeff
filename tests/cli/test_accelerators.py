"""A run on the CPU says which extra the machine's accelerator needs."""

import jax
import pytest

from jaxformer.cli import accelerators


@pytest.mark.parametrize(
    ("files", "extra"),
    [
        ({}, None),
        ({"proc/driver/nvidia/version": ""}, "cuda"),
        ({"dev/nvidia0": ""}, "cuda"),
        ({"dev/accel0": ""}, "tpu"),
        ({"dev/vfio/0": "", "sys/bus/pci/devices/a/vendor": "0x1ae0\n"}, "tpu"),
        ({"dev/vfio/0": "", "sys/bus/pci/devices/a/vendor": "0x8086\n"}, None),
        ({"sys/bus/pci/devices/a/vendor": "0x1ae0\n"}, None),
    ],
)
def test_visible(tmp_path, files, extra):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert accelerators.visible(tmp_path, path=str(tmp_path)) == extra


def test_nvidia_smi_on_the_path(tmp_path):
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    assert accelerators.visible(tmp_path, path=str(tmp_path)) == "cuda"


@pytest.mark.parametrize(
    ("backend", "asked", "extra", "said"),
    [
        ("cpu", None, "cuda", "an NVIDIA GPU, but {}: install the extra `cuda` (uv run --extra cuda train.py …)."),
        ("cpu", None, "tpu", "a TPU, but {}: install the extra `tpu` (uv run --extra tpu train.py …)."),
        ("cpu", None, None, None),
        ("cpu", "cpu", "cuda", None),
        ("gpu", None, "cuda", None),
    ],
)  # fmt: skip
def test_missing_extra(monkeypatch, backend, asked, extra, said):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    before = jax.config.values["jax_platforms"]
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(accelerators, "visible", lambda: extra)
    jax.config.update("jax_platforms", asked)
    try:
        found = accelerators.missing_extra("train.py")
        assert found == (said and f"This machine has {said}".format("JAX runs on the CPU"))
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("platforms", "extra", "is_kept"),
    [(None, None, True), (None, "cuda", False), ("cpu", "cuda", True), ("cuda,cpu", None, False), ("tpu", "tpu", False)],
)
def test_memory_is_kept_where_the_program_will_run_on_cpus(monkeypatch, platforms, extra, is_kept):
    monkeypatch.setattr(accelerators, "visible", lambda: extra)
    monkeypatch.setattr(accelerators.host_memory, "keep_memory", lambda: True)
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", platforms)
    try:
        assert accelerators.keep_memory() == is_kept
    finally:
        jax.config.update("jax_platforms", before)
