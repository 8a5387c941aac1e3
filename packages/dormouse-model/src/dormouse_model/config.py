"""The model's configuration: four frozen sections, read from TOML, unknown keys refused with the nearest valid one.

Importing this module imports no torch, so that a command line can print help or a plan in under a second.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

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
    mixer: Literal["kda", "sdpa"] = "kda"
    """`sdpa`, softmax attention, is another model to compare with; its state grows with the past."""
    memory_max: float = Field(default=0.5, ge=0, le=1)
    """Most that the memory gate may take from the dense path, for Engram where there is one."""


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

    kind: Literal["tsct", "dense"] = "tsct"
    """`dense` are SwiGLU experts as the control, of the width at which the model has as many parameters."""
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
        if self.kind == "dense" and self.implementation == "triton":
            raise ValueError("implementation is 'triton', which serves kind 'tsct' alone; use 'auto' for 'dense'")
        return self

    @property
    def normalizes(self) -> bool:
        """`norm_topk_prob` with its default filled in."""
        return self.top_k >= 2 if self.norm_topk_prob is None else self.norm_topk_prob

    @property
    def d_ffn_padded(self) -> int:
        """`d_ffn` rounded up to 16, the width of activations and of `W_down` in memory."""
        return -(-self.d_ffn // 16) * 16

    def tsct_parameters(self, d_model: int) -> int:
        """Parameters of two-latent experts: routed, shared, and the one down projection of all."""
        ranks = self.num_experts * self.rank + self.shared_rank
        return ranks * (2 * d_model + self.d_ffn + 2) + d_model * self.d_ffn

    def swiglu_parameters(self, d_model: int, width: int) -> int:
        """Parameters of SwiGLU experts of `width`, the shared one included."""
        return 3 * d_model * (self.num_experts * width + self._shared_width(width))

    def swiglu_widths(self, d_model: int) -> tuple[int, int]:
        """Widths of a routed and of the shared SwiGLU expert, in the ratio of the ranks.

        The routed one is that at which `swiglu_parameters` is nearest to `tsct_parameters`.
        """
        wanted, lowest = self.tsct_parameters(d_model), 1
        while self.swiglu_parameters(d_model, lowest + 1) <= wanted:
            lowest += 1
        width = min((lowest, lowest + 1), key=lambda w: abs(self.swiglu_parameters(d_model, w) - wanted))
        return width, self._shared_width(width)

    def _shared_width(self, width: int) -> int:
        return max(1, round(width * self.shared_rank / self.rank))


class EngramSection(Section):
    """`[engram]`: tables of learned rows that the last bytes look up, read beside the dense path."""

    enabled: bool = False
    orders: tuple[int, ...] = (2, 3, 4)
    """Lengths of the n-grams, the current byte included, ascending; a table each."""
    rows: int = Field(default=4096, gt=0, lt=2**40)
    """Most rows of a table. Order n has `min(rows, 256^n)`, an n-gram each where that is `256^n`, hashed otherwise."""
    dim: int = Field(default=32, gt=0)
    """Width of a row."""
    conv_size: int = Field(default=4, gt=0)
    hash_seed: int = Field(default=0, ge=0)
    """Decides which n-grams share a row; another seed makes the tables those of another model."""

    @field_validator("orders")
    @classmethod
    def _ascending(cls, orders: tuple[int, ...]) -> tuple[int, ...]:
        if not orders or orders[0] < 1 or orders[-1] > 8 or list(orders) != sorted(set(orders)):
            raise ValueError("orders must rise from at least 1 to at most 8, the bytes that a hash can hold apart")
        return orders

    @property
    def context(self) -> int:
        """Bytes before the current one that the longest n-gram reads."""
        return self.orders[-1] - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each order's table; none where Engram is off."""
        return tuple(min(self.rows, 256**order) for order in self.orders) if self.enabled else ()


class ModelConfig(Section):
    """Everything that decides the model's function and its parameters' shapes."""

    model: ModelSection
    experts: ExpertsSection
    kda: KDASection = KDASection()
    engram: EngramSection = EngramSection()

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
        near = [] if path.suffix else difflib.get_close_matches(name_or_path, named_configs(), n=1)
        mend = f"did you mean '{near[0]}'?" if near else f"give {', '.join(named_configs())} or the path of a TOML file"
        raise ConfigError(f"config: '{name_or_path}' is neither a named configuration nor a file; {mend}")
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
    "EngramSection",
    "ExpertsSection",
    "KDASection",
    "ModelConfig",
    "ModelSection",
    "Section",
    "named_configs",
    "read_config",
    "validate",
]
