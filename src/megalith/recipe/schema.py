"""The recipe: one typed file that every verb reads.

Each field carries its meaning, unit and default; ``megalith recipe explain FIELD`` prints them and
``megalith recipe schema`` writes them as JSON Schema for editors. Rules that join several fields
stand at the section, or at :class:`Recipe` where they join sections. Such a rule reports
``"field|what is wrong"``, so that the error names the field's path.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import Discriminator, Field, Tag, model_validator

from megalith.recipe.base import Arguments, Reference, Section, derived, option
from megalith.recipe.families import DecoderConfig, FactoryModel, ResNetConfig


class TextData(Section):
    """Text, packed into sequences of equal length."""

    source: Literal["stdlib", "files"] = option(
        "stdlib", "stdlib: the source code of the running Python's standard library; or files"
    )
    files: list[str] = option(
        [], "files, folders or globs (.txt, .py, .md, .jsonl ...; .gz and .zst are unpacked)"
    )
    field: str = option("text", "name of the text field in JSONL files")
    tokenizer: str = option(
        "bytes", "bytes, bpe-N (trained on the source, N tokens), or a tokenizers JSON file"
    )
    sequence: int = option(256, "length of a sample", unit="tokens", gt=0)
    cross_document_attention: bool = option(
        True, "attention sees across documents of a sample; false: as if each stood alone"
    )
    validation: float = option(
        0.05, "share of documents kept for validation, chosen by their hash", gt=0, lt=1
    )
    limit: int | None = option(
        None, "use documents up to this much text, in shuffled order", unit="bytes", gt=0
    )
    cache: str = option(".cache/megalith", "folder for tokenizers and token shards")
    workers: int = option(0, "processes that load samples beside training", ge=0)

    @model_validator(mode="before")
    @classmethod
    def _files_are_the_source(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("files") and "source" not in data:
            return {**data, "source": "files"}
        return data

    @model_validator(mode="after")
    def _has_files(self) -> TextData:
        if self.source == "files" and not self.files:
            raise ValueError('files|source = "files" needs at least one file, folder or glob')
        if self.source != "files" and self.files:
            raise ValueError(f'files|go with source = "files", not "{self.source}"')
        return self


class ImageData(Section):
    """Images with a class each."""

    source: Literal["digits", "fashion-mnist", "idx"] = option(
        ..., "digits (scikit-learn's 8x8), fashion-mnist (Debian package), or idx files in folder"
    )
    folder: str | None = option(None, "folder with idx files (optionally .gz), MNIST's names")
    augment: Literal["none", "shift", "shift-flip"] = option(
        "none", "random shift of up to an eighth of the size; shift-flip also mirrors"
    )
    validation: float = option(
        0.2, "share of samples kept for validation where the source has no test set", gt=0, lt=1
    )
    workers: int = option(0, "processes that load samples beside training", ge=0)

    @model_validator(mode="after")
    def _has_folder(self) -> ImageData:
        if self.source == "idx" and not self.folder:
            raise ValueError('folder|is needed with source = "idx"')
        return self


class FactoryData(Section):
    """Any data of the user's own: a function that returns ``megalith.data.Splits``."""

    source: Literal["factory"] = option("factory", "data of your own; goes with factory")
    factory: Reference = option(..., "function that returns Splits, as 'package.module:name'")
    args: Arguments = option({}, "keyword arguments for the factory")
    workers: int = option(0, "processes that load samples beside training", ge=0)


def _given(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, dict) else getattr(section, name, None)


def _model_kind(model: Any) -> str | None:
    default = "factory" if _given(model, "factory") else "decoder"
    return _given(model, "family") or default


def _data_kind(data: Any) -> str:
    source = _given(data, "source")
    if source in ("digits", "fashion-mnist", "idx"):
        return "images"
    return "factory" if source == "factory" or _given(data, "factory") else "text"


ModelSection = Annotated[
    Annotated[DecoderConfig, Tag("decoder")]
    | Annotated[ResNetConfig, Tag("resnet")]
    | Annotated[FactoryModel, Tag("factory")],
    Discriminator(_model_kind),
]
DataSection = Annotated[
    Annotated[TextData, Tag("text")]
    | Annotated[ImageData, Tag("images")]
    | Annotated[FactoryData, Tag("factory")],
    Discriminator(_data_kind),
]


class TaskSection(Section):
    """What the model is asked to do: its loss and metrics."""

    name: Literal["language", "classify"] = option("language", "next token, or class of an image")
    factory: Reference | None = option(
        None, "function that returns a Task of yours, as 'package.module:name'; replaces name"
    )
    args: Arguments = option({}, "keyword arguments for the factory")
    loss: Reference | None = option(
        None, "loss of yours, f(outputs, targets) -> sum over the valid targets (not -100)"
    )
    regularizer: Reference | None = option(
        None, "f(model) -> scalar, added once per update to the mean loss"
    )
    label_smoothing: float = option(0.0, "share of the target spread over all classes", ge=0, lt=1)
    z_loss: float = option(0.0, "weight of the squared log-normaliser (PaLM, section 5)", ge=0)


class TrainSection(Section):
    """How long, how large, in which precision."""

    steps: int = option(1000, "updates", unit="updates", gt=0)
    global_batch: int = option(
        32, "samples per update, over all ranks and micro-batches", unit="samples", gt=0
    )
    micro_batch: int = derived(
        lambda data: data["global_batch"],
        "global_batch / ranks",
        "samples per forward pass of a rank",
        unit="samples",
        gt=0,
    )
    precision: Literal["fp32", "bf16", "fp16"] = option("fp32", "of matmuls and activations")
    checkpointing: Literal["none", "selective", "full"] = option(
        "none", "activations recomputed in backward: none, cheap operations only, whole blocks"
    )
    compile: bool = option(False, "torch.compile each block")
    clip: float | None = option(1.0, "largest global gradient norm; 0 or none: no clipping", ge=0)
    ema: float | None = option(None, "decay of an averaged copy of the weights", gt=0, lt=1)
    nonfinite_limit: int = option(
        10,
        "skipped updates in a row (non-finite loss or gradient) after which training stops",
        unit="updates",
        gt=0,
    )
    seed: int = option(0, "of weights, data order and dropout", ge=0)
    device: str = option("auto", "auto (the accelerator, else cpu), cpu, or a torch device type")

    @model_validator(mode="after")
    def _batches_fit(self) -> TrainSection:
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"micro_batch|{self.micro_batch} is larger than global_batch {self.global_batch}"
            )
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"micro_batch|{self.micro_batch} does not divide global_batch {self.global_batch}"
            )
        return self


class OptimGroup(Section):
    """Other settings for the parameters whose name matches."""

    match: str = option(..., "shell pattern on parameter names, such as '*.attention.*'")
    lr: float | None = option(None, "learning rate of this group", ge=0)
    weight_decay: float | None = option(None, "decay of this group", ge=0)


Decay = Annotated[float, Ge(0), Lt(1)]


class OptimSection(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "sgd", "muon", "adafactor"] = option(
        "adamw", "muon updates matrices of blocks and gives the rest to adamw"
    )
    factory: Reference | None = option(
        None, "f(groups, lr=...) -> torch Optimizer, as 'package.module:name'; replaces name"
    )
    args: Arguments = option({}, "further keyword arguments for the optimizer")
    lr: float = option(3e-4, "peak learning rate", gt=0)
    betas: tuple[Decay, Decay] = option((0.9, 0.95), "adamw: decay of first and second moment")
    eps: float = option(1e-8, "adamw: added to the root of the second moment", gt=0)
    momentum: float = option(0.9, "sgd and muon", ge=0, lt=1)
    nesterov: bool = option(False, "sgd: Nesterov's momentum")
    weight_decay: float = option(0.1, "decoupled decay (sgd: L2)", ge=0)
    decay_all: bool = option(False, "decay norms, biases and embeddings too")
    groups: list[OptimGroup] = option([], "settings for parameters by name; the first match counts")
    schedule: Literal["constant", "linear", "cosine", "wsd"] | Reference = option(
        "cosine", "of the learning rate after warmup, or yours: f(update, steps) -> factor"
    )
    warmup: int = option(0, "updates of linear warmup", unit="updates", ge=0)
    final: float = option(0.1, "share of lr at the end of linear, cosine and wsd", ge=0, le=1)
    decay: float = option(0.2, "wsd: share of the updates that the last decay takes", gt=0, le=1)


class LayoutSection(Section):
    """How the run is spread; the product of the axes is the number of ranks."""

    replicate: int = option(1, "copies of the model, each with its own samples", unit="ranks", gt=0)
    shard: int = option(
        1, "ranks with their own samples that share out one copy (ZeRO)", unit="ranks", gt=0
    )
    zero: Literal[1, 2, 3] = option(
        3, "what shard shares out: 1 optimizer state, 2 gradients too, 3 weights too"
    )
    expert: int = option(
        1, "ranks with their own samples that share out the experts", unit="ranks", gt=0
    )
    context: int = option(1, "ranks that share out each sequence", unit="ranks", gt=0)
    exchange: Literal["gather", "all-to-all"] = option(
        "gather", "context: every rank gets all keys and values, or the heads are swapped"
    )
    tensor: int = option(1, "ranks that share out each matrix", unit="ranks", gt=0)
    sequence_parallel: bool = option(
        True, "tensor: norms and dropouts work on a part of the sequence each"
    )
    pipeline: int = option(1, "ranks that share out the layers", unit="ranks", gt=0)
    schedule: Literal["gpipe", "1f1b", "interleaved"] = option(
        "1f1b", "order of a pipeline's micro-batches"
    )
    stages: int = option(2, "interleaved: stages on each rank of the pipeline", unit="stages", gt=1)
    cuts: list[str] = option(
        [], "pipeline: name of the first block of each further stage; left out: cut by cost"
    )
    split: dict[str, Literal["column", "row"]] = option(
        {}, "tensor, for a module of yours: how the linear layers of each name pattern are split"
    )
    offload: bool = option(False, "shard: weights, gradients and state wait on the host")
    engine: Literal["own", "ddp"] = option(
        "own", "replicate: this project's bucketed sums, or torch's DistributedDataParallel"
    )
    synchronised_norms: bool = option(
        False, "batch norms take their statistics over all ranks' samples"
    )
    backend: str | None = option(
        None, "torch.distributed backend; left out: the device's (nccl, gloo, ...)"
    )
    timeout: int = option(600, "a collective that takes longer ends the run", unit="seconds", gt=0)
    restarts: int = option(
        0, "how often the ranks of this machine start again after one of them has died", ge=0
    )

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.data_ranks * self.context * self.tensor * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks, that get samples of their own."""
        return self.replicate * self.shard * self.expert


class EvaluateSection(Section):
    """Validation, early stopping and samples."""

    every: int = option(
        100, "updates between evaluations; 0: only at the end", unit="updates", ge=0
    )
    samples: int | None = option(
        None, "evaluate on the first so many; none: all", unit="samples", gt=0
    )
    patience: int | None = option(
        None, "stop after this many evaluations without improvement; none: never", gt=0
    )
    min_delta: float = option(0.0, "smallest fall of the validation loss that counts", ge=0)
    prompt: str | None = option(None, "text that a sample continues at each evaluation")
    sample_tokens: int = option(64, "length of that sample", unit="tokens", gt=0)


class CheckpointSection(Section):
    """When the run's state goes to disk."""

    every: int = option(
        100, "updates between checkpoints; 0: only at the end", unit="updates", ge=0
    )
    keep: int = option(2, "newest checkpoints kept; the best one is kept besides", gt=0)
    asynchronous: bool = option(
        False, "go on training while a copy in host memory is written; takes that much memory"
    )


class RunSection(Section):
    """Where the run lives and what it tells."""

    dir: str = option("runs/run", "run folder: recipe, metrics, checkpoints, samples, report.html")
    log_every: int = option(10, "updates between lines of metrics", unit="updates", gt=0)
    tensorboard: bool = option(False, "also write TensorBoard events (megalith[tensorboard])")


class Recipe(Section):
    """Everything that defines a run."""

    model: ModelSection = Field(default_factory=DecoderConfig, description="the model")
    data: DataSection = Field(default_factory=TextData, description="where samples come from")
    task: TaskSection = Field(default_factory=TaskSection, description="loss and metrics")
    train: TrainSection = Field(default_factory=TrainSection, description="the training run")
    optim: OptimSection = Field(default_factory=OptimSection, description="optimizer and schedule")
    layout: LayoutSection = Field(
        default_factory=LayoutSection, description="how the run is spread over ranks"
    )
    evaluate: EvaluateSection = Field(
        default_factory=EvaluateSection, description="validation and early stopping"
    )
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="when state is saved"
    )
    run: RunSection = Field(default_factory=RunSection, description="the run folder")

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        model, data = self.model, self.data
        if (
            isinstance(model, DecoderConfig)
            and isinstance(data, TextData)
            and model.path is None
            and data.sequence > model.context
        ):
            raise ValueError(
                f"data.sequence|{data.sequence} is longer than model.context {model.context}"
            )
        self._batches_divide()
        if self.optim.warmup >= self.train.steps and self.optim.warmup:
            raise ValueError(
                f"optim.warmup|{self.optim.warmup} updates leave nothing of "
                f"train.steps {self.train.steps}"
            )
        return self

    def _batches_divide(self) -> None:
        """The global batch is a number of micro-batches on every rank; one each by default."""
        ranks, batch, micro = (
            self.layout.data_ranks,
            self.train.global_batch,
            self.train.micro_batch,
        )
        if "micro_batch" not in self.train.model_fields_set and batch % ranks == 0:
            micro = batch // ranks
            train = self.train.model_copy(update={"micro_batch": micro})
            object.__setattr__(self, "train", train)
        if batch % (micro * ranks):
            raise ValueError(
                f"train.global_batch|{batch} is not a multiple of micro_batch {micro} x "
                f"{ranks} ranks that get samples of their own"
            )
