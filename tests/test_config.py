"""Settings from the environment, and the one line that says what is wrong with a file."""

import os
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from rose.config import Section, Settings, load_yaml, make_private_dir, vllm_plugins
from rose.errors import ConfigError


class Inner(Section):
    num_slabs: int
    name: str = "gpu0"


class Outer(Section):
    inner: Inner
    many: tuple[Inner, ...] = Field(default=(), min_length=1)
    named: dict[Annotated[str, Field(min_length=1)], Inner] = Field(default_factory=dict)


def explain(tmp_path: Path, text: str) -> str:
    path = tmp_path / "NODE.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path, Outer)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_correct_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "NODE.yaml"
    path.write_text("inner: {num_slabs: 3}\nmany: [{num_slabs: 4, name: x}]\n")
    assert load_yaml(path, Outer) == Outer(inner=Inner(num_slabs=3), many=(Inner(num_slabs=4, name="x"),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("inner: {num_slab: 3}", "inner.num_slab: unknown key; did you mean num_slabs? (and 1 more)"),
        ("inner: {num_slabs: 3}\nzzz: 1", "zzz: unknown key; known keys: inner, many, named"),
        ("inner: {num_slabs: lots}", "inner.num_slabs: input should be a valid integer"),
        ("inner: {num_slabs: 3}\nmany: [{}]", "many[0].num_slabs: missing; add it"),
        (
            "inner: {num_slabs: 3}\nmany: [{num_slabs: 1, nam: x}]",
            "many[0].nam: unknown key; did you mean name?",
        ),
        (
            "inner: {num_slabs: 3}\nnamed: {a: {num_slab: 1}}",
            "named.a.num_slab: unknown key; did you mean num_slabs? (and 1 more)",
        ),
        ("inner: {num_slabs: 3}\nmany: x y", "many: expected a list, such as [A, B], got 'x y'"),
        ("inner: 7", "inner: expected keys with values, such as KEY: VALUE, got 7"),
        ("inner: {num_slabs: 3}\nmany: []", "many: expected at least 1, got []"),
        ("- 1", "expected keys inner, many, named at the top level"),
        ("inner: {", "not valid YAML: "),
        ("", "expected keys inner, many, named at the top level"),
    ],
)
def test_a_wrong_file_is_explained_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    assert explain(tmp_path, text).startswith(expected)


def test_a_list_with_a_wrong_item_is_not_called_too_short_as_well(tmp_path: Path) -> None:
    said = explain(tmp_path, "inner: {num_slabs: 3}\nmany: [{num_slabs: lots}]")
    assert said.startswith("many[0].num_slabs: ") and "more)" not in said


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: can't be read \(No such file"):
        load_yaml(tmp_path / "nothing.yaml", Outer)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        load_yaml(tmp_path / "x.yaml", Outer)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ROSE_RUNTIME_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}, "/a"),
        ({"ROSE_RUNTIME_DIR": "", "XDG_RUNTIME_DIR": "/b"}, "/b/rose"),
        ({}, f"/tmp/rose-{os.getuid()}"),
    ],
)
def test_runtime_dir_follows_the_environment(environ: dict[str, str], expected: str) -> None:
    assert Settings.from_environment(environ).runtime_dir == Path(expected)


def test_settings_take_keys_and_cache_from_the_environment() -> None:
    settings = Settings.from_environment(
        {"ROSE_KEY": "k", "ROSE_ROUTER_ADMIN_KEY": "", "ROSE_CACHE_DIR": "/c"}
    )
    assert (settings.key, settings.admin_key, settings.profile_dir) == ("k", None, Path("/c/profiles"))
    assert settings.follower_key == "k" and settings.public_key is None
    relay = Settings.from_environment({"ROSE_KEY": "k", "ROSE_READ_KEY": "r", "ROSE_PUBLIC_KEY": "p"})
    assert relay.follower_key == "r"
    assert relay.key_variables() == {"ROSE_KEY": "k", "ROSE_READ_KEY": "r", "ROSE_PUBLIC_KEY": "p"}
    assert Settings.from_environment({"HOME": "/h"}).cache_dir == Path("/h/.cache/rose")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ROSE_STATE_DIR": "/a", "XDG_STATE_HOME": "/b"}, "/a"),
        ({"XDG_STATE_HOME": "/b", "HOME": "/h"}, "/b/rose"),
        ({"HOME": "/h"}, "/h/.local/state/rose"),
    ],
)
def test_state_dir_follows_the_environment(environ: dict[str, str], expected: str) -> None:
    assert Settings.from_environment(environ).state_dir == Path(expected)


def test_private_dir_is_created_for_this_user_only(tmp_path: Path) -> None:
    path = make_private_dir(tmp_path / "a" / "b", "choose another")
    assert path.stat().st_mode & 0o777 == 0o700


def test_private_dir_refuses_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"others may write to it .*; choose another"):
        make_private_dir(tmp_path, "choose another")


def test_private_dir_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run: the folder can't be made \(Not a directory\); choose"):
        make_private_dir(tmp_path / "file" / "run", "choose another")


def test_vllm_plugins_keeps_what_the_operator_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert vllm_plugins() == "mine,rose"


def test_vllm_plugins_names_every_installed_one_when_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import entry_points

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    installed = {entry.name for entry in entry_points(group="vllm.general_plugins")}
    assert installed | {"rose"} <= set(vllm_plugins().split(","))
