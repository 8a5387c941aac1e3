from __future__ import annotations

import subprocess
import sys

import pytest
from dormouse_model.config import (
    ConfigError,
    ModelConfig,
    dotted_keys,
    named_configs,
    read_config,
    validate,
)

TABLES = {
    "model": {"d_model": 24, "num_heads": 3, "head_dim": 8},
    "experts": {"num_experts": 5, "top_k": 2, "rank": 4, "shared_rank": 6, "d_ffn": 37},
}


def refusal(**tables: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(ModelConfig, {**TABLES, **tables})
    return str(caught.value)


@pytest.mark.parametrize("module", ["dormouse_model", "dormouse_model.config"])
def test_the_configuration_is_read_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_no_other():
    import dormouse_model

    assert all(getattr(dormouse_model, name) is not None for name in dormouse_model.__all__)
    assert set(dormouse_model.__all__) <= set(dir(dormouse_model))
    with pytest.raises(AttributeError, match="no attribute 'Dormouze'"):
        _ = dormouse_model.Dormouze


@pytest.mark.parametrize("name", named_configs())
def test_every_named_configuration_is_valid(name):
    validate(ModelConfig, read_config(name))


def test_nano_is_between_half_a_million_and_a_million_parameters():
    from dormouse_model import ledger

    assert 500_000 <= ledger("nano")["total"] <= 1_000_000


def test_defaults_are_filled_in():
    config = validate(ModelConfig, TABLES)
    assert (config.experts.normalizes, config.experts.d_ffn_padded, config.gate_rank, config.inner) == (True, 48, 8, 24)
    assert (config.kda.lower_bound, config.kda.allow_fallback, config.model.memory_max) == (-5.0, False, 0.5)
    assert not validate(ModelConfig, {**TABLES, "experts": {**TABLES["experts"], "top_k": 1}}).experts.normalizes


@pytest.mark.parametrize(
    ("table", "key", "meant"),
    [
        ("model", "dmodel", "model.d_model"),
        ("experts", "n_experts", "experts.num_experts"),
        ("model", "top_k", "experts.top_k"),
        ("kda", "lowerbound", "kda.lower_bound"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(table, key, meant):
    tables = {**TABLES, table: {**TABLES.get(table, {}), key: 1}}
    assert refusal(**tables) == f"config: there is no key '{table}.{key}'; did you mean '{meant}'?"


def test_a_mistyped_section_is_named_rather_than_the_one_that_is_missing():
    tables = {"modle": TABLES["model"], "experts": TABLES["experts"]}
    with pytest.raises(ConfigError, match=r"^config: there is no key 'modle'; did you mean 'model'\?$"):
        validate(ModelConfig, tables)


def test_a_mistyped_required_key_is_named_rather_than_missing():
    model = {"d_modl": 24, "num_heads": 3, "head_dim": 8}
    assert refusal(model=model) == "config: there is no key 'model.d_modl'; did you mean 'model.d_model'?"


def test_a_key_like_no_other_is_to_be_removed():
    assert refusal(kda={"zzz": 1}) == "config: there is no key 'kda.zzz'; remove it"


def test_a_missing_key_and_an_impossible_value_are_named():
    assert (
        refusal(model={"num_heads": 3, "head_dim": 8})
        == "config: 'model.d_model' is required and was not given; set it"
    )
    assert (
        refusal(model={**TABLES["model"], "d_model": 0})
        == "config: 'model.d_model', got 0: input should be greater than 0"
    )
    top_k = refusal(experts={**TABLES["experts"], "top_k": 6})
    assert top_k == "config: 'experts': top_k is 6 but there are 5 experts; lower top_k"
    rank = refusal(experts={**TABLES["experts"], "shared_rank": 38})
    assert rank == "config: 'experts': shared_rank is 38 but d_ffn 37; a rank is at most the width"
    wide = refusal(experts={**TABLES["experts"], "shared_rank": 30})
    assert wide == "config: experts.shared_rank is 30 but model.d_model 24; a rank is at most the width"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_factor_that_is_not_finite_is_refused(value):
    assert "routed_scaling_factor" in refusal(experts={**TABLES["experts"], "routed_scaling_factor": value})
    assert "kda.lower_bound" in refusal(kda={"lower_bound": value})


def test_names_files_and_toml_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'nanno' is neither a named configuration nor a file; did you mean 'nano'"):
        read_config("nanno")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        read_config(str(broken))


def test_dotted_keys_are_all_there_are():
    keys = dotted_keys(ModelConfig)
    assert len(keys) == len(set(keys)) > 15
    assert {"model.d_model", "experts.balance_loss_coef", "kda.conv_size"} <= set(keys)
