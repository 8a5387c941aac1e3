"""A run's configuration: the model's four sections and the trainer's six, from TOML, `--set` and options.

Later sources win: section defaults, the configuration's file, `--set`, options. Importing this module imports no torch.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from dormouse_model.config import (
    ConfigError,
    EngramSection,
    ExpertsSection,
    KDASection,
    ModelConfig,
    ModelSection,
    Section,
    dotted_keys,
    named_configs,
    read_config,
    validate,
)
from pydantic import BeforeValidator, Field, model_validator

CONFIGS = Path(__file__).parent / "configs"

Rate = Annotated[float, Field(le=1e6, allow_inf_nan=False)]
"""A rate or its factor: the product of two still is an fp32 number."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]

SEGMENT_UNIT = 64
"""Segments are multiples of it: the kernels' chunk, so that a row in segments is cut into the chunks of the whole."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class DataSection(Section):
    """`[data]`: which bytes are trained on."""

    paths: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Files, folders and globs, or `markov:ORDER:SEED`; empty means the interpreter's own standard library.

    Bytes are taken as they are; `.gz` and `.zst` are unpacked, of `.jsonl` and `.parquet` the texts are read.
    """
    val: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """The same for held-out bytes; empty means a share of `paths`."""
    text_field: str = Field(default="text", min_length=1)
    """The field of a `.jsonl` row, or the column of a `.parquet` file, that holds a document."""
    order: Literal["random", "stream"] = "random"
    """How windows follow each other.

    `random` is a pseudo-random permutation of them, a new one each epoch. With `stream` a row of the batch goes on
    where the same row ended at the step before; the rows begin evenly spread over the data.
    """
    heldout_fraction: Finite = Field(default=0.05, gt=0, lt=1)
    """Share of the bytes that is never trained on, where `val` is empty."""


class TrainSection(Section):
    """`[train]`: the size of a step, how many, and their learning rate."""

    batch: int = Field(default=16, gt=0)
    """Rows of a micro-batch; a step sees `batch * accumulate` rows."""
    seq: int = Field(default=256, gt=0)
    """Bytes of a row that are predicted; each row reads one more."""
    steps: int = Field(default=400, gt=0)
    lr: Rate = Field(default=0.02, gt=0)
    """Peak learning rate; a group's own is this times its `optim.*_lr` factor."""
    accumulate: int = Field(default=1, gt=0)
    """Micro-batches of a step."""
    segment: int | None = Field(default=None, gt=0)
    """Bytes of a row that are read and back-propagated at once, a multiple of 64 that divides `seq`; None is all."""
    carry: Literal["reset", "tbptt", "full"] = "reset"
    """What a segment knows of the one before: nothing; its state without gradients; its state with gradients.

    With `data.order` `stream` the first segment of a step gets the last state of the step before, unless `reset`, and
    never gradients. A state that is handed on is reset in each row where a document begins.
    """
    seed: int = Field(default=0, ge=0, lt=2**63)
    init: str = ""
    """A run, or a file that `dormouse export` wrote, whose weights the run begins with; empty means new ones."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is CUDA where there is a device; a run's folder holds what it became."""
    threads: int = Field(default=0, ge=0, le=4096)
    """Threads of torch on a CPU; 0 leaves torch's own choice. Another number gives other rounding."""
    warmup: int = Field(default=20, ge=0)
    """Steps over which the rate rises from zero to its peak."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    """After the warm-up: `wsd` holds the peak and then decays, `cosine` decays all the way."""
    decay_fraction: Finite = Field(default=0.3, ge=0, le=1)
    """Share of the steps, at the end, over which `wsd` decays."""
    clip: Finite = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    max_skipped: int = Field(default=10, ge=0)
    """Non-finite steps in a row that are skipped before the run ends with an error."""

    @property
    def segments(self) -> int:
        """Segments of a row."""
        return 1 if self.segment is None else self.seq // self.segment

    @property
    def decay_begins(self) -> int | None:
        """Steps taken before the decay begins; None for a schedule that cannot be extended."""
        return self.steps - round(self.decay_fraction * self.steps) if self.schedule == "wsd" else None


class OptimSection(Section):
    """`[optim]`: Muon on expert factors and dense matrices, sparse Adam on tables, AdamW on the rest."""

    muon_lr: Rate = Field(default=1.0, ge=0)
    """Rate of Muon's groups as a factor of `train.lr`."""
    adam_lr: Rate = Field(default=0.15, ge=0)
    """Rate of AdamW's groups as a factor of `train.lr`."""
    table_lr: Finite = Field(default=5.0, ge=0)
    """Rate of Engram's tables as a factor of AdamW's."""
    momentum: Finite = Field(default=0.95, ge=0, lt=1)
    """Muon's momentum."""
    nesterov: bool = True
    newton_schulz_steps: Literal[3, 4, 5] = 4
    weight_decay: Rate = Field(default=0.0, ge=0)
    """Decoupled decay of dense matrices; orthonormal factors are not decayed."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's two averages."""
    eps: Finite = Field(default=1e-8, ge=1e-20)
    """AdamW's. What is nothing in fp32 would make a gradient of zero 0 / 0."""
    retract: Literal["step", "never"] = "step"
    """When factors are brought back to orthonormal."""


class EvalSection(Section):
    """`[eval]`: held-out bits per byte and samples."""

    every: int = Field(default=100, ge=0)
    """Steps between evaluations; 0 means only at the end."""
    window_bytes: int = Field(default=32768, gt=0)
    """Held-out bytes scored by an evaluation during the run."""
    final_window_bytes: int = Field(default=2**20, ge=0)
    """Held-out bytes scored at the end; 0 means all."""
    sample_bytes: int = Field(default=200, ge=0)
    """Bytes that a sample writes; 0 means no samples."""
    prompt: str = "def "


class CheckpointSection(Section):
    """`[checkpoint]`: how often the run is saved."""

    every: int = Field(default=100, ge=0)
    """Steps between checkpoints; 0 means only at the end."""
    keep: int = Field(default=2, gt=0)
    """Checkpoints that are kept, the newest ones."""


class LogSection(Section):
    """`[log]`: how often a line is shown and written to metrics.jsonl, and whether to TensorBoard too."""

    every: int = Field(default=10, gt=0)
    tensorboard: bool = False
    """Whether the run holds the same numbers as TensorBoard's events."""


class Config(Section):
    """Everything that decides what a run does; `config.toml` of its folder."""

    model: ModelSection
    experts: ExpertsSection
    kda: KDASection = KDASection()
    engram: EngramSection = EngramSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @property
    def architecture(self) -> ModelConfig:
        """The sections that the model is built from."""
        return ModelConfig.model_validate({name: getattr(self, name) for name in ModelConfig.model_fields})

    @property
    def carries_across_steps(self) -> bool:
        """Whether a step begins with the states that the step before left."""
        return self.data.order == "stream" and self.train.carry != "reset"

    @model_validator(mode="after")
    def _segments_fit(self) -> Self:
        keys, unit = self.train, SEGMENT_UNIT
        if keys.segment is not None and (keys.segment % unit or keys.seq % keys.segment):
            fitting = [str(n) for n in range(unit, keys.seq + 1, unit) if keys.seq % n == 0]
            mend = f"give {' or '.join(fitting)}" if fitting else f"make train.seq a multiple of {unit}"
            wrong = (
                f"does not divide train.seq = {keys.seq}" if keys.segment % unit == 0 else f"is no multiple of {unit}"
            )
            raise ValueError(f"train.segment = {keys.segment} {wrong}; {mend}")
        if keys.carry != "reset" and self.data.order == "random" and keys.segments == 1:
            raise ValueError(
                f"train.carry = '{keys.carry}' carries a state across steps, and with data.order = 'random' their rows "
                "are unrelated; set data.order = 'stream', or a train.segment to carry it within a step"
            )
        if self.carries_across_steps and self.model.mixer == "sdpa":
            raise ValueError(
                "model.mixer = 'sdpa' has a state that grows with every byte, so it cannot be carried across steps; "
                "set train.carry = 'reset' or data.order = 'random'"
            )
        return self


PROGRESS_KEYS = frozenset(
    {
        "log.every",
        "log.tensorboard",
        "eval.every",
        "eval.sample_bytes",
        "eval.prompt",
        "eval.window_bytes",
        "eval.final_window_bytes",
        "train.max_skipped",
        "checkpoint.every",
        "checkpoint.keep",
    }
)
"""Keys that a resume may change: they decide what is shown and kept, and not one bit of the trained tensors."""


def load_config(
    source: str | Path | Mapping[str, Any] | None,
    sets: Sequence[str] = (),
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """The configuration of a name, TOML file or its tables (None: `nano`), changed by `sets` and dotted `overrides`.

    A file or tables may stand on a named configuration: their top-level `base = "nano"` is read first.
    Errors: `ConfigError` for an unknown name, key or value, naming the nearest valid one.
    """
    if isinstance(source, Mapping):
        return assemble(_on_base(source, "the tables"), sets, overrides)
    return assemble(_tables("nano" if source is None else str(source)), sets, overrides)


def read_resolved(path: Path) -> dict[str, Any]:
    """The tables of a run's `config.toml`, unvalidated."""
    return read_config(str(path))


def assemble(tables: dict[str, Any], sets: Sequence[str] = (), overrides: Mapping[str, object] | None = None) -> Config:
    """`tables` changed by each `key=value` of `sets` and then by `overrides`, validated."""
    merged = merge({}, tables)
    for assignment in sets:
        key, value = parse_set(assignment)
        put(merged, key, value)
    for key, value in (overrides or {}).items():
        put(merged, key, value)
    config = validate(Config, merged)
    _check(config)
    return config


def _check(config: Config) -> None:
    """What one section alone cannot know. Errors: `ConfigError`."""
    validate(ModelConfig, config.model_dump(include=set(ModelConfig.model_fields)))
    for key, value in flat(config).items():
        text = "".join(map(str, value)) if isinstance(value, tuple) else str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"config: '{key}', got {value!r}: it is not UTF-8 as config.toml is; rename it") from None


def _tables(name_or_file: str) -> dict[str, Any]:
    tables = read_config(name_or_file)
    if name_or_file in named_configs():
        return merge(tables, _train_tables(name_or_file))
    return _on_base(tables, name_or_file)


def _on_base(tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`tables` over those of the named configuration that they stand on, if they do."""
    own = {key: value for key, value in tables.items() if key != "base"}
    base = tables.get("base")
    if base is None:
        return own
    if base not in named_configs():
        near = difflib.get_close_matches(str(base), named_configs(), n=1, cutoff=0.3)
        mend = f"did you mean '{near[0]}'?" if near else f"the names are {', '.join(named_configs())}"
        raise ConfigError(f"config: base = {base!r} of {where} is not a named configuration; {mend}")
    return merge(_tables(base), own)


def _train_tables(name: str) -> dict[str, Any]:
    path = CONFIGS / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def parse_set(assignment: str) -> tuple[str, object]:
    """`a.b=value` as the key and its value: TOML where it is valid, the bare string otherwise.

    Errors: `ConfigError` for a missing `=` or an unknown key, naming the nearest valid one.
    """
    key, equals, text = assignment.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set: got {assignment!r}; write section.key=value, such as train.steps=200")
    valid = dotted_keys(Config)
    if key not in valid:
        near = difflib.get_close_matches(key, valid, n=1, cutoff=0.3)
        mend = f"did you mean '{near[0]}'?" if near else f"the sections are {', '.join(Config.model_fields)}"
        raise ConfigError(f"--set: there is no key '{key}'; {mend}")
    return key, _toml_value(text.strip())


def _toml_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def put(tables: dict[str, Any], key: str, value: object) -> None:
    """Set the dotted `key` of nested `tables` in place."""
    *sections, last = key.split(".")
    for section in sections:
        below = tables.get(section)
        tables[section] = dict(below) if isinstance(below, Mapping) else {}
        tables = tables[section]
    tables[last] = value


def to_toml(config: Config) -> str:
    """`config` as TOML that reads back as the same configuration; keys that are None are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def flat(config: Config) -> dict[str, object]:
    """Every dotted key of `config` with its value, in order."""
    values: dict[str, object] = {}
    for key in dotted_keys(Config):
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        values[key] = value
    return values


def diff(saved: Config, asked: Config) -> dict[str, tuple[object, object]]:
    """The keys whose values differ, each with (saved, asked)."""
    old, new = flat(saved), flat(asked)
    return {key: (old[key], new[key]) for key in old if old[key] != new[key]}


def refused_on_resume(saved: Config, asked: Config, step: int) -> dict[str, tuple[object, object]]:
    """The differences that a resume from `step` must refuse: all but progress keys.

    `train.steps` may differ while a WSD schedule has not begun to decay, neither as it was nor as it would be:
    until then every step taken is the same whatever the length of the run.
    """
    differences = diff(saved, asked)
    begins = saved.train.decay_begins, asked.train.decay_begins
    extends = all(begin is not None and step <= begin for begin in begins)
    allowed = PROGRESS_KEYS | ({"train.steps"} if extends else set())
    return {key: values for key, values in differences.items() if key not in allowed}


__all__ = [
    "PROGRESS_KEYS",
    "CheckpointSection",
    "Config",
    "DataSection",
    "EvalSection",
    "LogSection",
    "OptimSection",
    "TrainSection",
    "load_config",
]
