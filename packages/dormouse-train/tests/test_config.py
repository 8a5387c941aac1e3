from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from dormouse_model.config import CONFIGS as MODELS
from dormouse_model.config import ConfigError, ModelConfig, dotted_keys, named_configs, validate
from dormouse_train import config as module
from dormouse_train.config import (
    CONFIGS,
    PROGRESS_KEYS,
    Config,
    TrainSection,
    diff,
    load_config,
    parse_set,
    refused_on_resume,
    to_toml,
)

FIRST_DAY = [
    "train.batch",
    "train.seq",
    "train.steps",
    "train.lr",
    "train.accumulate",
    "eval.every",
    "checkpoint.every",
    "log.every",
]


def test_a_name_joins_the_models_tables_and_the_trainers():
    config = load_config("nano")
    trainers = tomllib.loads((CONFIGS / "nano.toml").read_text())
    assert config.model.d_model == tomllib.loads((MODELS / "nano.toml").read_text())["model"]["d_model"]
    assert config.train.steps == trainers["train"]["steps"]
    assert load_config(None) == config


def test_every_named_configuration_of_the_trainer_is_one_of_the_model():
    assert {path.stem for path in CONFIGS.glob("*.toml")} <= set(named_configs())


def test_the_keys_of_the_first_day_exist():
    assert set(FIRST_DAY) <= set(dotted_keys(Config))


def test_sets_win_over_the_file_and_options_win_over_sets(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "nano"\n[train]\nsteps = 7\nbatch = 3\nseq = 9\n[model]\nnum_heads = 3\n')
    config = load_config(str(file), ["train.batch=4", "train.seq=10"], {"train.seq": 11})
    assert (config.train.steps, config.train.batch, config.train.seq) == (7, 4, 11)
    assert (config.model.num_heads, config.model.d_model) == (3, load_config("nano").model.d_model)


def test_a_file_without_a_base_holds_everything(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(load_config("nano", ["train.steps=5"])))
    assert load_config(str(file)).train.steps == 5
    file.write_text("[train]\nsteps = 5\n")
    with pytest.raises(ConfigError, match="'model' is required"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.device=cpu", "cpu"),
        ("train.lr=1e-3", 0.001),
        ("train.steps = 12", 12),
        ('data.paths=["a", "b"]', ["a", "b"]),
        ("eval.prompt=a = b", "a = b"),
        ("optim.nesterov=false", False),
        ("eval.prompt=1\nlog.every = 2", "1\nlog.every = 2"),
    ],
)
def test_a_set_value_is_toml_or_the_bare_string(text: str, value: object):
    assert parse_set(text)[1] == value


def test_one_path_may_be_set_without_a_list():
    assert load_config(None, ["data.paths=books"]).data.paths == ("books",)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["train.step=1"], "no key 'train.step'; did you mean 'train.steps'"),
        (["trian.steps=1"], "did you mean 'train.steps'"),
        (["zzz=1"], "the sections are model, experts"),
        (["train.steps"], "write section.key=value"),
        (["train.steps=many"], "'train.steps', got 'many': input should be a valid integer"),
        (["train.steps=0"], "'train.steps', got 0"),
        (["train.clip=-1"], "'train.clip', got -1"),
        (["train.lr=nan"], "'train.lr', got nan"),
        (["train.schedule=cos"], "'wsd' or 'cosine'"),
        (["experts.top_k=99"], "lower top_k"),
        (["model.d_model=64", "experts.rank=65"], "config: experts.rank is 65 but model.d_model 64"),
        (["experts.d_ffn=20", "experts.rank=21"], "rank is 21 but d_ffn 20"),
        (["eval.prompt=\udcff"], "config: 'eval.prompt', got '\\udcff': it is not UTF-8"),
        (["data.paths=b/\udcff.txt"], "config: 'data.paths', got ('b/\\udcff.txt',): it is not UTF-8"),
        (["train.lr=1e300"], "less than or equal to 1000000"),
        (["optim.muon_lr=1e300"], "less than or equal to 1000000"),
        (["optim.eps=1e-300"], "'optim.eps', got 1e-300"),
        (["train.threads=99999999999"], "less than or equal to 4096"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_the_mend(sets: list[str], says: str):
    with pytest.raises(ConfigError) as refused:
        load_config(None, sets)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_empty_name_is_not_the_default():
    with pytest.raises(ConfigError, match=r"'' is neither a named configuration nor a file; give .*nano"):
        load_config("")


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "nano"\n[train]\nbatchs = 3\n')
    with pytest.raises(ConfigError, match=r"no key 'train.batchs'; did you mean 'train.batch'"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("text", "says"),
    [('base = "nanno"\n', "did you mean 'nano'"), ("base = [1]\n", "not a named configuration"), ("a = \n", "TOML")],
)
def test_a_wrong_base_or_broken_toml_is_refused(tmp_path: Path, text: str, says: str):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(str(file))


def test_the_resolved_configuration_reads_back_as_itself():
    sets = ['data.paths=["a b", "c\\"d"]', "eval.prompt='line\n\tnext \\ é'", "experts.capacity=3", "train.lr=0.1"]
    for config in (load_config(None, sets), load_config(None)):
        assert validate(Config, tomllib.loads(to_toml(config))) == config


def test_a_difference_names_each_key_with_both_values():
    saved, changed = (load_config(None, [f"train.lr={lr}", f"log.every={n}"]) for lr, n in ((0.25, 4), (0.5, 3)))
    assert diff(saved, changed) == {"train.lr": (0.25, 0.5), "log.every": (4, 3)}


def test_progress_keys_may_change_on_resume_and_others_not():
    saved = load_config(None)
    others = {"eval.prompt": "x", "log.tensorboard": True}
    changed = others | dict.fromkeys(PROGRESS_KEYS - others.keys(), 3)
    assert {"train.max_skipped", "eval.window_bytes"} <= changed.keys()
    assert refused_on_resume(saved, load_config(None, [], changed), step=5) == {}
    assert refused_on_resume(saved, load_config(None, ["train.seed=1"]), step=5) == {"train.seed": (0, 1)}


@pytest.mark.parametrize(
    ("schedule", "step", "steps", "allowed"),
    [
        ("wsd", 70, 200, True),  # the decay of 100 steps begins after step 70
        ("wsd", 71, 200, False),
        ("wsd", 40, 60, True),  # shorter, and step 42 is where that decay would begin
        ("wsd", 43, 60, False),
        ("cosine", 1, 200, False),
    ],
)
def test_steps_are_a_progress_key_only_before_a_wsd_decay_begins(schedule: str, step: int, steps: int, allowed: bool):
    base = {"train.schedule": schedule, "train.decay_fraction": 0.3}
    saved = load_config(None, [], base | {"train.steps": 100})
    asked = load_config(None, [], base | {"train.steps": steps})
    assert (refused_on_resume(saved, asked, step) == {}) is allowed


def test_every_section_of_the_model_reaches_it(monkeypatch: pytest.MonkeyPatch):
    class Wider(ModelConfig):
        train: TrainSection = TrainSection()

    monkeypatch.setattr(module, "ModelConfig", Wider)
    assert load_config(None, ["train.steps=7"]).architecture.train.steps == 7  # ty: ignore[missing-attribute]


@pytest.mark.parametrize("betas", ["[1.0, 0.9]", "[0.9, -0.1]", "[0.9, nan]"])
def test_averages_that_do_not_decay_are_refused(betas: str):
    with pytest.raises(ConfigError, match=r"optim\.betas"):
        load_config(None, [f"optim.betas={betas}"])


def test_the_last_score_is_of_a_bounded_window():
    assert load_config(None).eval.final_window_bytes == 2**20


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["train.segment=48"], "train.segment = 48 is no multiple of 64; give 64 or 128 or 256"),
        (["train.segment=192"], "train.segment = 192 does not divide train.seq = 256; give 64 or 128 or 256"),
        (
            ["train.seq=100", "train.segment=64"],
            "train.segment = 64 does not divide train.seq = 100; make train.seq a multiple of 64",
        ),
        (["train.carry=tbptt"], "train.carry = 'tbptt' carries a state across steps, and with data.order = 'random'"),
        (["train.carry=full", "train.segment=256"], "train.carry = 'full' carries a state across steps"),
        (
            ["train.carry=tbptt", "data.order=stream", "model.mixer=sdpa"],
            "model.mixer = 'sdpa' has a state that grows with every byte",
        ),
    ],
)
def test_segments_that_cannot_be_are_refused_by_name(sets: list[str], says: str):
    with pytest.raises(ConfigError, match=f"^config: {says}"):
        load_config("nano", ["train.seq=256", *sets])


@pytest.mark.parametrize(
    ("sets", "segments", "across"),
    [
        ([], 1, False),
        (["train.segment=64", "train.carry=full"], 4, False),
        (["data.order=stream"], 1, False),
        (["data.order=stream", "train.carry=tbptt"], 1, True),
        (["data.order=stream", "train.carry=full", "train.segment=128", "train.accumulate=3"], 2, True),
        (["model.mixer=sdpa", "train.carry=tbptt", "train.segment=64"], 4, False),
    ],
)
def test_segments_that_can_be(sets: list[str], segments: int, across: bool):
    config = load_config("nano", ["train.seq=256", *sets])
    assert (config.train.segments, config.carries_across_steps) == (segments, across)
