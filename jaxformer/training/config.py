"""The records of a run's config: what to train, on what, how and where."""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jaxformer.config import ModelConfig
from jaxformer.config.components import nearest
from jaxformer.config.strict import Strict, check_seed, within
from jaxformer.data import DataConfig
from jaxformer.parallel.multihost import DistributedConfig
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training import tracking
from jaxformer.training.optim import OptimConfig

NEXT_TOKEN = "next_token"
"""The name of the library's own objective."""


@dataclass(frozen=True)
class TrainConfig(Strict):
    """How long and how to train, and what to show."""

    FORMER = {"keep": "keep_checkpoints"}
    NAMES = {"objective": (NEXT_TOKEN,)}

    steps: int = 1000
    """Number of updates (training steps)."""
    objective: str = NEXT_TOKEN
    """What training minimises: next_token (cross-entropy), or 'package.module:name' of an objective, a function
    (params, batch, rng), or of a function of the ModelConfig and this TrainConfig that returns one (see
    jaxformer.training.objective)."""
    eval_every: int = 250
    """Number of steps between evaluations; each also prints a sample and saves the state."""
    save_every: int = 0
    """Number of steps between saves, in addition to those after evaluations. 0: save after evaluations only."""
    save_minutes: float = 0.0
    """Minutes after the last save between evaluations at which the state is saved again. 0: never by time."""
    profile: str = ""
    """First and last step to trace, such as 10:15. The trace is written to profile/ in the run's directory, for XProf (xprof
    RUN/profile) or TensorBoard. Empty: no trace."""
    log_every: int = 10
    """Number of steps between records in metrics.jsonl."""
    track: tracking.Name = "none"
    """Experiment tracker that also gets every record: wandb, trackio or mlflow (install the extra of that name). A resumed run
    continues its run there."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep. The checkpoint of lowest validation loss is always kept too."""
    microbatches: int = 1
    """Parts that a batch is computed in, one after another, to save memory. The results stay the same, except for dropout
    masks and, with experts, the balance loss, which each part computes from its own load."""
    label_smoothing: float = 0.0
    """Share of the target probability that is spread evenly over the vocabulary. 0: no smoothing."""
    loss_chunk: int | None = None
    """Number of positions whose logits are in memory at a time, to save memory. None: all."""
    mtp_weight: float = 0.3
    """Weight of the loss on the token after the next one, for a model with model.mtp."""
    z_loss: float = 0.0
    """Weight of the mean squared logsumexp of the logits, which keeps them from drifting (Chowdhery et al. 2022: 1e-4)."""
    max_skipped: int = 0
    """Number of updates in a row that may be skipped because their gradient is not finite: the parameters stay as they are, and
    training continues with the next batch. One more stops the run."""
    agree_every: int = 1000
    """Number of steps between comparisons of the copies of the parameters on several devices and processes; the run stops if
    they differ. 0: no comparisons."""
    parallel: Literal["jit", "pmap"] = "jit"
    """How the rows of a batch are spread over the devices, if no mesh is given: by jax.jit or by jax.pmap."""
    seed: int = 0
    """Seed of the initial parameters and of dropout, from 0 to 4294967295 (2^32 − 1)."""
    prompt: str = "def "
    """Prompt of the samples printed during training."""
    sample_tokens: int = 200
    """Number of tokens in a sample printed during training. 0: no samples."""
    temperature: float = 0.8
    """Sampling temperature for the samples printed during training."""

    def __post_init__(self):
        super().__post_init__()
        counts = ("steps", "eval_every", "log_every", "keep_checkpoints", "microbatches", "loss_chunk")
        within(self, 1, math.inf, *counts, prefix="train.")
        within(self, 0, math.inf, "max_skipped", "agree_every", "save_every", "save_minutes", prefix="train.")
        profiled_steps(self.profile, self.steps)
        within(self, 0, math.inf, "sample_tokens", "temperature", "mtp_weight", "z_loss", prefix="train.")
        within(self, 0, 1, "label_smoothing", prefix="train.")
        check_seed("train.seed", self.seed)
        if self.objective != NEXT_TOKEN and ":" not in self.objective:
            near = nearest(self.objective, [NEXT_TOKEN])
            raise ValueError(f"unknown train.objective {self.objective!r}{near} (or give 'package.module:name')")


def profiled_steps(profile: str, steps: int) -> range:
    """The steps that ``train.profile`` names. Raises ValueError for what is not two of them."""
    if not profile:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", profile)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= steps:
        raise ValueError(
            f"train.profile={profile!r} must be the first and the last step to trace, such as 10:15, from 1 to {steps}"
        )
    return range(int(match[1]), int(match[2]) + 1)


@dataclass(frozen=True)
class InitConfig(Strict):
    """What training starts from."""

    folder: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """A run directory, a Hugging Face folder or a Hugging Face Hub id whose model is trained further. It decides the
    architecture and the tokenizer (unless data.tokenizer is a path). None: fresh parameters."""
    revision: str | None = None
    """Branch, tag or commit to load, where init.from is a Hugging Face Hub id."""

    def __post_init__(self):
        super().__post_init__()
        if self.revision is not None and self.folder is None:
            raise ValueError("init.revision has no effect without init.from; give a Hugging Face Hub id there")


@dataclass(frozen=True)
class Config(Strict):
    """Everything that defines a run."""

    model: ModelConfig
    """The model. Its vocab_size is raised to that of the tokenizer where it is smaller."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """The data that the model is trained on."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """The optimizer."""
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    """How long and how to train, and what to show."""
    init: InitConfig = dataclasses.field(default_factory=InitConfig)
    """What training starts from."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """How the model is spread over devices."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """How this process finds the others of a run with several processes."""
    run_dir: str = ""
    """Directory that the run writes everything to. If it already holds a run, that run is continued. Default: runs/<name of the
    config file>."""

    def __post_init__(self):
        super().__post_init__()
        if re.match(r"[a-z][a-z0-9+.-]+:/", self.run_dir, re.IGNORECASE):
            raise ValueError(
                f"--run-dir {self.run_dir}: a run is written to a local directory, as only there it is "
                "locked and its checkpoints appear whole; give one, and copy it afterwards (gcloud storage rsync, aws s3 sync)"
            )
        if self.train.parallel == "pmap" and self.mesh != MeshConfig():
            raise ValueError("train.parallel='pmap' copies the state to every device, and cannot be combined with mesh")
        if self.train.parallel == "pmap" and self.distributed.on:
            raise ValueError("train.parallel='pmap' runs in one process, not with distributed; use jit, the default")


@dataclass(frozen=True)
class Command:
    """What the command line of ``train.py`` asks for. Only ``config`` is kept with the run."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    """The run."""
    trust: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Follow the import paths in the config.json of the run of --init.from, which runs their code. The paths that this command
    itself names are always followed."""
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Check the run instead of training it: settings, tokenizer, a batch, the loss, gradients, a few updates on one batch, a
    checkpoint, memory and disk. A line for each, OK, WARNING or FAILED; nothing is written into the run directory; the exit
    code is 1 if anything failed."""
