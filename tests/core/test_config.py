"""Settings from files and overrides: types, defaults, merging, and errors that say where and what."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st

from paceline.core import config
from paceline.core.errors import ConfigError, UsageError


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Optimizer:
    name: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ValueError("learning_rate must be positive")


@dataclass(frozen=True)
class Layer:
    width: int
    bias: bool = True


@dataclass(frozen=True)
class Settings:
    workers: int
    seed: int | None = None
    title: str = "run"
    note: str | None = None
    color: Color = Color.RED
    optimizer: Optimizer = field(default_factory=Optimizer)
    fallback: Optimizer | None = None
    layers: list[Layer] = field(default_factory=list)
    hosts: tuple[str, ...] = ()
    sizes: dict[int, float] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    out: Path = Path("out")
    limit: int | Literal["auto"] = "auto"


@dataclass(frozen=True)
class Strict:
    limit: int | None
    name: str | None = "x"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


FILES = {
    "a.toml": "workers = 4\ncolor = 'blue'\n[optimizer]\nlearning_rate = 1e-3\n[[layers]]\nwidth = 8\n",
    "a.json": """{"workers": 4, "color": "blue", "optimizer": {"learning_rate": 1e-3},
        "layers": [{"width": 8}]}""",
    "a.yaml": "workers: 4\ncolor: blue\noptimizer: {learning_rate: 1e-3}\nlayers:\n  - width: 8\n",
}


@pytest.mark.parametrize("name", FILES)
def test_the_three_formats_say_the_same(tmp_path, name):
    path = written(tmp_path, name, FILES[name])
    assert config.load(Settings, path) == Settings(
        workers=4, color=Color.BLUE, optimizer=Optimizer(learning_rate=0.001), layers=[Layer(8)]
    )


def test_later_sources_win_key_by_key(tmp_path):
    first = written(tmp_path, "a.toml", FILES["a.toml"])
    second = written(tmp_path, "b.yml", "optimizer: {name: adam}\nfree: {b: 2}\n")
    result = config.load(Settings, {"free": {"a": 1}}, first, second, overrides=["optimizer.betas=[0.5, 1]"])
    assert result.optimizer == Optimizer("adam", 0.001, (0.5, 1.0))
    assert result.free == {"a": 1, "b": 2}
    assert result.workers == 4


@pytest.mark.parametrize(
    ("override", "name", "expected"),
    [
        ("workers=1e2", "workers", 100),
        ("title=hello world", "title", "hello world"),
        ('title="quoted"', "title", "quoted"),
        ("title=3", "title", "3"),
        ("seed=none", "seed", None),
        ("note=none", "note", None),
        ("note=word", "note", "word"),
        ("color=blue", "color", Color.BLUE),
        ("color=BLUE", "color", Color.BLUE),
        ("hosts=['a', 'b']", "hosts", ("a", "b")),
        ("sizes.3=0.5", "sizes", {3: 0.5}),
        ("free.x.y=true", "free", {"x": {"y": True}}),
        ("free.x=abc", "free", {"x": "abc"}),
        ("fallback.learning_rate=2", "fallback", Optimizer(learning_rate=2.0)),
        ("layers=[{width=3, bias=false}]", "layers", [Layer(3, False)]),
        ("tags=['b', 'a']", "tags", frozenset({"a", "b"})),
        ("out=/tmp/x", "out", Path("/tmp/x")),
        ("limit=auto", "limit", "auto"),
        ("limit=7", "limit", 7),
        (" workers = 3 ", "workers", 3),
    ],
)
def test_overrides_take_the_type_of_their_field(override, name, expected):
    result = getattr(config.load(Settings, {"workers": 1}, overrides=[override]), name)
    assert result == expected
    assert type(result) is type(expected)


def test_booleans_are_not_numbers_and_may_be_capitalised():
    assert config.load(Layer, overrides=["width=1", "bias=False"]) == Layer(1, False)
    for bad in ({"width": True}, {"width": 1, "bias": 1}):
        with pytest.raises(ConfigError):
            config.load(Layer, bad)


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("workers = 'x'", "workers: expected int, given 'x' (str)", "change workers to int"),
        ("workers = 1.5", "workers: expected int, given 1.5 (float)", ""),
        ("workrs = 1", "unknown key workrs", "did you mean workers?"),
        (
            "workers = 1\n[optimizer]\nlr = 1",
            "unknown key optimizer.lr",
            "valid below optimizer: name, learning_rate, betas",
        ),
        ("workers = 1\n[fallback]\nnam = 'x'", "unknown key fallback.nam", "did you mean fallback.name?"),
        ("workers = 1\n[optimizer]\nname = 'sdg'", "optimizer.name: expected one of 'sgd', 'adam'", ""),
        ("workers = 1\n[optimizer]\nbetas = [1.0]", "optimizer.betas: expected tuple[float, float] of 2", ""),
        ("workers = 1\n[[layers]]\nwidth = 'x'", "layers[0].width: expected int", ""),
        (
            "workers = 1\n[[layers]]\nwidht = 1",
            "unknown key layers[0].widht",
            "did you mean layers[0].width?",
        ),
        ("workers = 1\n[[layers]]\nbias = true", "layers[0].width is missing", ""),
        ("workers = 1\noptimizer = 3", "optimizer: expected a table of name, learning_rate, betas", ""),
        ("workers = 1\ncolor = 'green'", "color: expected one of 'red', 'blue', given 'green'", ""),
        ("workers = 1\nseed = 'x'", "seed: expected int or none", ""),
        ("workers = 1\n[sizes]\nx = 1", "sizes: expected keys that are int, given 'x'", ""),
        ("title = 'x'", "workers is missing", "--set workers=..."),
        ("workers = 1\n[optimizer]\nlearning_rate = -1", "optimizer: expected a valid Optimizer", ""),
        ("workers = ", "is not valid TOML", "correct the file"),
    ],
)
def test_errors_name_the_file_the_key_and_what_was_expected(tmp_path, text, message, remedy):
    path = written(tmp_path, "bad.toml", text)
    with pytest.raises(ConfigError) as caught:
        config.load(Settings, path)
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert caught.value.remedy


def test_the_error_names_the_source_that_is_wrong(tmp_path):
    good = written(tmp_path, "good.toml", "workers = 1")
    bad = written(tmp_path, "bad.json", '{"seed": "x"}')
    with pytest.raises(ConfigError, match=r"bad\.json: seed: expected int"):
        config.load(Settings, good, bad)
    with pytest.raises(ConfigError, match="--set sed=1: unknown key sed"):
        config.load(Settings, good, overrides=["sed=1"])
    with pytest.raises(ConfigError, match="--set seed: not of the form"):
        config.load(Settings, good, overrides=["seed"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "", "suffix '.ini' is not one of"),
        ("a.json", "[1]", "holds a list"),
        ("a.json", '{"a": 1, "a": 2}', "'a' stands twice"),
        ("a.json", "{", "is not valid JSON"),
        ("a.yaml", "a: 1\na: 2\n", "'a' stands twice, line 2"),
        ("a.yaml", "a: [", "is not valid YAML"),
        ("a.yaml", "", "workers is missing"),
    ],
)
def test_files_that_cannot_be_read_say_why(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match="a"):
        config.load(Settings, path := written(tmp_path, name, text))
    with pytest.raises(ConfigError) as caught:
        config.load(Settings, path)
    assert message in caught.value.message


def test_a_missing_file_and_text_in_another_encoding(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config.load(Settings, tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes("title = 'é'".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.load(Settings, tmp_path / "latin.toml")


def test_only_dataclasses_describe_settings():
    with pytest.raises(UsageError, match="is not a dataclass"):
        config.load(dict, {})


OPTIMIZERS = st.builds(
    Optimizer,
    name=st.sampled_from(["sgd", "adam"]),
    learning_rate=st.floats(min_value=0, exclude_min=True),
    betas=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        Settings,
        workers=st.integers(-(2**63), 2**63 - 1),
        seed=st.none() | st.integers(),
        title=TEXT,
        note=st.none() | TEXT,
        color=st.sampled_from(Color),
        optimizer=OPTIMIZERS,
        fallback=st.none() | OPTIMIZERS,
        layers=st.lists(st.builds(Layer, width=st.integers(), bias=st.booleans()), max_size=3),
        hosts=st.lists(TEXT, max_size=3).map(tuple),
        sizes=st.dictionaries(st.integers(), st.floats(allow_nan=False), max_size=3),
        free=st.dictionaries(
            TEXT, st.integers() | TEXT | st.lists(TEXT) | st.dictionaries(TEXT, st.booleans()), max_size=3
        ),
        tags=st.frozensets(TEXT, max_size=3),
        limit=st.just("auto") | st.integers(),
    )
)
def test_what_is_dumped_loads_to_the_same(settings):
    text = config.dumps(settings)
    assert config.load(Settings, tomllib.loads(text)) == settings


def test_the_dump_reads_like_a_file_a_person_wrote():
    settings = Settings(workers=2, optimizer=Optimizer("adam"), layers=[Layer(3)], free={"a b": {"c": 1.5}})
    assert config.dumps(settings).splitlines() == [
        "workers = 2",
        'title = "run"',
        'color = "red"',
        "layers = [{ width = 3, bias = true }]",
        "hosts = []",
        "tags = []",
        'out = "out"',
        'limit = "auto"',
        "",
        "[optimizer]",
        'name = "adam"',
        "learning_rate = 0.1",
        "betas = [0.9, 0.999]",
        "",
        "[sizes]",
        "",
        "[free]",
        "",
        '[free."a b"]',
        "c = 1.5",
    ]


def test_none_is_written_only_where_it_can_be_read_back():
    assert config.dumps(Strict(limit=None)) == 'limit = "none"\nname = "x"\n'
    assert config.load(Strict, tomllib.loads('limit = "none"')) == Strict(limit=None)
    with pytest.raises(ConfigError, match="name is None, which TOML cannot write"):
        config.dumps(Strict(limit=1, name=None))
    with pytest.raises(ConfigError, match="cannot be written as TOML"):
        config.dumps(Settings(workers=1, free={"x": object()}))


def test_json_of_the_plain_kind_is_accepted_as_a_mapping():
    assert config.load(Layer, json.loads('{"width": 2}')) == Layer(2)
