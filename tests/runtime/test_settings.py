# pyright: basic
import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.problems import known_keys
from etude.runtime.settings import json_schema, load_settings, resolved_toml
from etude.runtime.toml import leaves, to_toml

KEYS = sorted(set(known_keys(RunConfig)))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | FINITE | TEXTS
TABLES = st.recursive(
    st.dictionaries(
        TEXTS.filter(lambda key: key and "." not in key and not key.isdecimal()), SCALARS | st.lists(SCALARS)
    ),
    lambda inner: st.dictionaries(st.from_regex(r"[a-z_-]{1,8}", fullmatch=True), inner | st.lists(inner, min_size=1)),
    max_leaves=12,
)


def problems(*, file=None, overrides=(), environ=None):
    with pytest.raises(ConfigError) as caught:
        load_settings(file, overrides, environ or {})
    return str(caught.value).splitlines()


def test_later_sources_win_and_every_value_says_where_it_came_from(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nlr = 1.0\nbeta1 = 0.1\neps = 0.1\n")
    settings = load_settings(file, ["trainer.lr=3.0"], {"ETUDE__TRAINER__LR": "2.0", "ETUDE__TRAINER__BETA1": "0.2"})
    trainer = settings.config.trainer
    assert (trainer.lr, trainer.beta1, trainer.eps, trainer.beta2) == (3.0, 0.2, 0.1, RunConfig().trainer.beta2)
    origins = [settings.provenance[f"trainer.{key}"] for key in ("lr", "beta1", "eps", "beta2")]
    assert origins == ["--set", "ETUDE__TRAINER__BETA1", str(file), "default"]


def test_without_any_source_the_configuration_is_the_default():
    settings = load_settings(None, [], {"HOME": "/", "ETUDE": "x"})
    assert settings.config == RunConfig()
    assert set(settings.provenance.values()) == {"default"}


def test_every_value_has_exactly_one_origin():
    settings = load_settings(None, ["pools.0.view=bf16", "harness.env.A=1"], {})
    assert list(settings.provenance) == list(leaves(settings.config.model_dump(mode="json")))
    assert {key for key, origin in settings.provenance.items() if origin == "--set"} == {
        "pools.0.view",
        "harness.env.A",
    }


@given(st.floats(1e-12, 1e6), st.integers(1, 10**9))
def test_numbers_are_read_as_toml(lr, steps):
    config = load_settings(None, [f"trainer.lr={lr!r}", f"trainer.steps={steps}"], {}).config
    assert (config.trainer.lr, config.trainer.steps) == (lr, steps)


@given(TEXTS.filter(lambda text: text == text.strip() and not text.startswith(("'", '"'))))
def test_text_needs_no_quotes_whatever_it_looks_like(text):
    config = load_settings(None, [f"policy.path={text}", f"harness.env.A={text}"], {}).config
    assert config.policy.path == config.harness.env["A"] == text


@pytest.mark.parametrize("text", ["7", "true", "1979-05-27", "[1]", '"7"', "'7'", "a=b", "1\nb = 2"])
def test_text_that_looks_like_another_type_stays_text(text):
    assert load_settings(None, [f"policy.path={text}"], {}).config.policy.path == text.strip("'\"")


def test_pools_are_named_by_index_or_by_name(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[[pools]]\nname = "fast"\n[[pools]]\nname = "exact"\n')
    settings = load_settings(file, ["pools.0.view=bf16", "pools.exact.view=fp8"], {"ETUDE__POOLS__FAST__THREADS": "3"})
    assert [(pool.view, pool.threads) for pool in settings.config.pools] == [("bf16", 3), ("fp8", 1)]
    assert settings.provenance["pools.1.view"] == "--set"
    assert settings.provenance["pools.1.name"] == str(file)
    assert settings.provenance["pools.1.threads"] == "default"


def test_a_list_in_a_later_source_replaces_the_whole_list():
    settings = load_settings(None, ["pools.0.view=bf16", 'pools=[{name="new"}]', 'stages=["eval"]'], {})
    assert [(pool.name, pool.view) for pool in settings.config.pools] == [("new", "fp32")]
    assert settings.provenance["pools.0.view"] == "default"
    assert settings.config.stages == ("eval",)


def test_names_below_a_free_table_keep_their_capitals():
    settings = load_settings(None, ["harness.env.PATH=/bin"], {"ETUDE__HARNESS__ENV__Lang": "C"})
    assert settings.config.harness.env == {"PATH": "/bin", "Lang": "C"}


@given(st.sampled_from([key for key in KEYS if not key.startswith("harness.rules.")]), st.data())
def test_a_mistyped_key_is_refused_with_a_key_that_exists(key, data):
    table, _, field = key.rpartition(".")
    at = data.draw(st.integers(0, len(field)))
    typo = (f"{table}." if table else "") + field[:at] + data.draw(st.sampled_from("qzj")) + field[at:]
    lines = problems(overrides=[f"{typo}=1"])
    assert len(lines) == 1
    guess = lines[0].rpartition("did you mean ")[2].rstrip("?")
    assert lines[0].startswith(f"--set: {typo}: unknown key") or typo.split(".")[0] not in RunConfig.model_fields
    # A name of one or two letters with another one is too little to guess from.
    assert guess in KEYS or len(field) < 3


def test_a_key_in_the_wrong_table_is_found_in_the_right_one():
    assert problems(overrides=["group_size=4"]) == ["--set: group_size: unknown key; did you mean rollout.group_size?"]


def test_all_problems_are_listed_each_with_its_source(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[trainer]\nlrr = 1\nsteps = "5"\n[[pools]]\nview = "int3"\n')
    assert sorted(problems(file=file, overrides=["trainer.lr=-1"], environ={"ETUDE__EVAL__ATTEMPTS": "0.5"})) == sorted(
        [
            "ETUDE__EVAL__ATTEMPTS: eval.attempts: must be a valid integer, got 0.5",
            "--set: trainer.lr: must be greater than 0, got -1",
            f"{file}: pools.0.name: is required",
            f"{file}: pools.0.view: must be 'fp32', 'bf16', 'fp8', 'fp8_block', 'int8' or 'int4', got \"int3\"",
            f'{file}: trainer.steps: must be a valid integer, got "5"',
            f"{file}: trainer.lrr: unknown key; did you mean trainer.lr?",
        ]
    )


@pytest.mark.parametrize("text", ["true", "nan", "inf", "1e400", "[]", "fast", ""])
def test_no_value_turns_into_a_number_by_itself(text):
    assert problems(overrides=[f"trainer.lr={text}"])[0].startswith("--set: trainer.lr: must be a")


def test_parts_that_do_not_fit_each_other_are_refused_with_the_reason():
    (line,) = problems(overrides=["algorithm.replay_support=false"])
    assert line.startswith("algorithm.replay_support = false does not fit")
    (line,) = problems(overrides=["harness.compaction.trigger_tokens=900"])
    assert line.startswith("harness.compaction.trigger_tokens = 900 leaves no room for a summary")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.lr", "--set trainer.lr: there is no '='; write --set table.key=value"),
        ("trainer.lr.x=1", "--set: trainer.lr.x: trainer.lr has no keys that could be set"),
        ("pools.b.view=bf16", "--set: pools.b.view: there is no 'b'; known are local, and 0 to 0"),
        ("pools.7.view=bf16", "--set: pools.7.view: there is no '7'; known are local, and 0 to 0"),
        ("pools.0=1", "--set: pools.0: pools has no keys that could be set"),
        ("=1", "--set: has an empty key"),
        ("trainer..lr=1", "--set: trainer..lr: has an empty key"),
    ],
)
def test_an_override_that_leads_nowhere_says_so(override, message):
    assert problems(overrides=[override])[0].startswith(message)


@given(st.text(max_size=30))
def test_an_override_never_fails_with_anything_but_a_configuration_error(override):
    try:
        settings = load_settings(None, [override], {})
    except ConfigError:
        return
    assert "--set" in settings.provenance.values()


def test_a_file_that_cannot_be_read_says_what_to_do(tmp_path):
    (line,) = problems(file=tmp_path / "none.toml")
    assert "No such file" in line
    assert "name a TOML file" in line
    broken = tmp_path / "broken.toml"
    broken.write_text("[trainer\n")
    assert "not valid TOML" in problems(file=broken)[0]
    assert "line 1" in problems(file=broken)[0]
    broken.write_bytes(b"\xff")
    assert "not valid TOML" in problems(file=broken)[0]


@given(TABLES)
def test_what_is_written_as_toml_reads_back_the_same(table):
    assert tomllib.loads(to_toml(table, {})) == table


def test_the_resolved_configuration_reads_back_the_same_and_shows_every_origin(tmp_path):
    overrides = ["pools.0.view=bf16", 'harness.env.A=x\x7f\n"é😀', 'stages=["eval"]', "trainer.eps=1e-08"]
    settings = load_settings(None, overrides, {"ETUDE__RUN__SEED": "3"})
    text = resolved_toml(settings)
    file = tmp_path / "resolved.toml"
    file.write_text(text)
    assert load_settings(file, [], {}).config == settings.config
    assert "seed = 3  # ETUDE__RUN__SEED" in text.splitlines()
    assert 'view = "bf16"  # --set' in text.splitlines()
    commented = [line for line in text.splitlines() if "  # " in line]
    assert len(commented) == len(settings.provenance)


def test_a_file_name_cannot_forge_lines_of_the_resolved_configuration(tmp_path):
    file = tmp_path / "a\nlr = 5.toml"
    file.write_text("[run]\nseed = 1\n")
    settings = load_settings(file, [], {})
    assert tomllib.loads(resolved_toml(settings)) == settings.config.model_dump(mode="json")


def test_the_schema_describes_every_field_and_refuses_unknown_ones():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    trainer = schema["$defs"]["TrainerSection"]
    assert trainer["properties"]["row_tokens"]["description"]
