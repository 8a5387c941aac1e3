"""The model's configuration: three frozen sections, read from TOML, unknown keys refused with the nearest valid one.

Importing this module imports no torch, so that a command line can print help or a plan in under a second.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIGS = Path(__file__).parent / "configs"


class ConfigError(ValueError):
    """A configuration that cannot be used; its message is one sentence that names the key, what it got and the mend."""


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """`[model]`: the width of the residual stream and the looped block."""

    d_model: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    iterations: int = Field(default=2, gt=0)
    """L: how often the one block is applied."""
    mixer: Literal["kda"] = "kda"
    memory_max: float = Field(default=0.5, ge=0, le=1)
    """Most that the memory gate may take from the dense path."""


class KDASection(Section):
    """`[kda]`: the linear-attention mixer, with one short convolution each for q, k and v."""

    conv_size: int = Field(default=4, gt=0)
    gate_rank: int | None = Field(default=None, gt=0)
    """Rank of the two low-rank gates; None means head_dim."""
    lower_bound: float = Field(default=-5.0, lt=0, allow_inf_nan=False)
    """Lowest log decay of a step."""
    allow_fallback: bool = False
    """Whether a CUDA device may run the plain-torch implementation where flash-linear-attention cannot serve."""


class ExpertsSection(Section):
    """`[experts]`: the two-latent spectral experts, the shared expert and the router."""

    kind: Literal["tsct"] = "tsct"
    num_experts: int = Field(gt=0)
    top_k: int = Field(default=2, gt=0)
    rank: int = Field(gt=0)
    shared_rank: int = Field(gt=0)
    d_ffn: int = Field(gt=0)
    norm_topk_prob: bool | None = None
    """Whether the chosen weights are divided by their sum; None means yes for top_k >= 2 and no for 1."""
    routed_scaling_factor: float = Field(default=1.0, allow_inf_nan=False)
    balance_loss_coef: float = Field(default=0.01, ge=0)
    capacity: int | None = Field(default=None, gt=0)
    """Rows an expert takes before further rows are dropped; None is dropless."""
    implementation: Literal["auto", "reference", "padded", "triton"] = "auto"

    @model_validator(mode="after")
    def _fits(self) -> ExpertsSection:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k} but there are {self.num_experts} experts; lower top_k")
        for name in ("rank", "shared_rank"):
            if getattr(self, name) > self.d_ffn:
                raise ValueError(f"{name} is {getattr(self, name)} but d_ffn {self.d_ffn}; a rank is at most the width")
        return self

    @property
    def normalizes(self) -> bool:
        """`norm_topk_prob` with its default filled in."""
        return self.top_k >= 2 if self.norm_topk_prob is None else self.norm_topk_prob

    @property
    def d_ffn_padded(self) -> int:
        """`d_ffn` rounded up to 16, the width of activations and of `W_down` in memory."""
        return -(-self.d_ffn // 16) * 16


class ModelConfig(Section):
    """Everything that decides the model's function and its parameters' shapes."""

    model: ModelSection
    experts: ExpertsSection
    kda: KDASection = KDASection()

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        width = self.model.d_model
        for name in ("rank", "shared_rank"):
            rank = getattr(self.experts, name)
            if rank > width:
                raise ValueError(f"experts.{name} is {rank} but model.d_model {width}; a rank is at most the width")
        return self

    @property
    def inner(self) -> int:
        """Width of queries, keys and values: heads times head size."""
        return self.model.num_heads * self.model.head_dim

    @property
    def gate_rank(self) -> int:
        """Rank of KDA's low-rank gates."""
        return self.kda.gate_rank or self.model.head_dim


def named_configs(folder: Path = CONFIGS) -> list[str]:
    """The names that `--config NAME` takes."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_config(name_or_path: str) -> dict[str, Any]:
    """The tables of a named configuration or of a TOML file, unvalidated.

    Errors: `ConfigError` for an unknown name (with the nearest one), a missing file, or invalid TOML.
    """
    path = CONFIGS / f"{name_or_path}.toml"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        near = difflib.get_close_matches(name_or_path, named_configs(), n=1)
        known = f"did you mean '{near[0]}'" if near else f"the names are {', '.join(named_configs())}"
        raise ConfigError(f"config: '{name_or_path}' is neither a named configuration nor a file; {known}?")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid TOML ({error}); mend the file") from None


SectionT = TypeVar("SectionT", bound=Section)


def validate(kind: type[SectionT], tables: dict[str, Any]) -> SectionT:
    """`tables` as a `kind`; `ConfigError` names the dotted key, the value it got and what would be accepted."""
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        # A mistyped section is both unknown and missing: what was typed tells the reader more.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        raise ConfigError(_sentence(kind, first)) from None


def _sentence(kind: type[Section], error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"config: there is no key '{key}'; {_mend(kind, path)}"
    if error["type"] == "missing":
        return f"config: '{key}' is required and was not given; set it"
    message = error["msg"].removeprefix("Value error, ")
    got = error["input"]
    shown = "" if isinstance(got, dict | BaseModel) else f", got {got!r}"
    # What a section alone cannot know is said of the whole, and names its keys itself.
    named = f"'{key}'{shown}: " if key else ""
    return f"config: {named}{message[0].lower()}{message[1:]}"


def _mend(kind: type[Section], path: list[str]) -> str:
    """What an unknown key was meant to be: a like one beside it, the same one elsewhere, or any like one."""
    *sections, leaf = path
    prefix = ".".join([*sections, ""]) if sections else ""
    beside = difflib.get_close_matches(leaf, _names_in(kind, sections), n=1)
    elsewhere = [known for known in dotted_keys(kind) if known.rpartition(".")[2] == leaf]
    alike = difflib.get_close_matches(".".join(path), dotted_keys(kind), n=1)
    near = [prefix + name for name in beside] or elsewhere or alike
    return f"did you mean '{near[0]}'?" if near else "remove it"


def _names_in(kind: type[Section], sections: list[str]) -> list[str]:
    """The names that stand directly in a section, which may be the whole."""
    for section in sections:
        inner = kind.model_fields[section].annotation
        assert isinstance(inner, type)
        kind = inner
    return list(kind.model_fields)


def dotted_keys(kind: type[Section], prefix: str = "") -> list[str]:
    """Every key that `kind` accepts, `section.key`, in order."""
    keys: list[str] = []
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            keys += dotted_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


__all__ = [
    "ConfigError",
    "ExpertsSection",
    "KDASection",
    "ModelConfig",
    "ModelSection",
    "Section",
    "named_configs",
    "read_config",
    "validate",
]
